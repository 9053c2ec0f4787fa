"""4-bit weights: the numbers of the format, written out; the kernel's bits; what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tigon
from tigon.ops.dequantize_4bit import dequantize_4bit_reference

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def drawn(shape, dtype=torch.bfloat16, blocksize=64, nested=True, nested_blocksize=256, device="cpu", seed=0):
    """A weight of random codes: every code of the table, and every code of the maxima where there are enough."""
    g = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    blocks = -(-numel // blocksize)
    packed = torch.randint(256, (-(-numel // 2), 1), generator=g, dtype=torch.uint8)
    table = torch.randn(16, generator=g).sort().values
    absmax, second = torch.rand(blocks, generator=g) + 0.01, None
    if nested:
        absmax = torch.randint(256, (blocks,), generator=g, dtype=torch.uint8)
        scale = torch.rand(-(-blocks // nested_blocksize), generator=g)
        second = tigon.NestedAbsmax(
            torch.randn(256, generator=g).to(device), scale.to(device), torch.tensor(0.03).to(device), nested_blocksize
        )
    return tigon.FourBit(packed.to(device), absmax.to(device), table.to(device), shape, dtype, blocksize, second)


def written_out(weight):
    """Weight by weight, as the format says."""
    table, absmax, nested = weight.table.tolist(), weight.absmax.tolist(), weight.nested
    f32 = lambda x: torch.tensor(x, dtype=torch.float32)  # noqa: E731
    values = []
    for i in range(torch.Size(weight.shape).numel()):
        byte = int(weight.packed.view(-1)[i // 2])
        code = byte >> 4 if i % 2 == 0 else byte & 15
        m = f32(absmax[i // weight.blocksize])
        if nested is not None:
            j = i // weight.blocksize
            m = nested.table[absmax[j]].cpu() * nested.scale[j // nested.blocksize].cpu() + nested.offset.cpu()
        values.append(f32(table[code]) * m)
    return torch.stack(values).to(weight.dtype).view(weight.shape) if values else torch.empty(weight.shape)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 64), {}),
        ((7, 40), {"nested": False}),  # the last block is cut off
        ((5, 13), {"blocksize": 32, "nested_blocksize": 2}),  # an odd number: bytes instead of words
        ((2, 3, 64), {"dtype": torch.float32, "blocksize": 128, "nested_blocksize": 1}),
        ((1, 8), {"dtype": torch.float16, "nested": False}),
    ],
)
def test_the_numbers_of_the_format(shape, options, backend, device):
    weight = drawn(shape, device=device, **options)
    assert torch.equal(tigon.dequantize_4bit(weight).cpu(), written_out(weight))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("nested", [True, False])
def test_the_kernel_gives_the_bits_of_the_reference(dtype, nested, triton_backend, device):
    weight = drawn((33, 264), dtype, nested=nested, nested_blocksize=8, device=device)  # several programs, the last cut
    assert torch.equal(tigon.dequantize_4bit(weight), dequantize_4bit_reference(weight))


def test_bytes_at_any_address_and_of_any_dtype(backend, device):
    weight = drawn((16, 64), device=device)
    moved = torch.empty(513, dtype=torch.uint8, device=device)[1:]
    moved.copy_(weight.packed.view(-1))
    want = tigon.dequantize_4bit(weight)
    assert torch.equal(tigon.dequantize_4bit(dataclasses.replace(weight, packed=moved)), want)
    stored = weight.packed.view(-1).view(torch.bfloat16)  # as FSDP wants a uniform dtype
    assert torch.equal(tigon.dequantize_4bit(dataclasses.replace(weight, packed=stored)), want)


def test_no_weights(backend, device):
    weight = drawn((0, 64), nested=False, device=device)
    assert tigon.dequantize_4bit(weight).shape == (0, 64)


def test_dense_casts(backend, device):
    weight = drawn((4, 64), device=device)
    assert torch.equal(weight.dense(torch.float32), tigon.dequantize_4bit(weight).float())
    assert weight.device == weight.packed.device


def test_compiles_whole(backend, device):
    weight = drawn((4, 64), device=device)
    x = torch.randn(3, 64, device=device, dtype=torch.bfloat16)

    def f(x):
        return x @ tigon.dequantize_4bit(weight).t()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), f(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": torch.zeros(3, dtype=torch.uint8)}, r"packed must hold 128 bytes.*\(4, 64\).*got 3"),
        ({"blocksize": 48}, r"blocksize must be a power of two, 8 or more, got 48"),
        ({"absmax": torch.zeros(3)}, r"absmax must be 4 numbers of torch.uint8.*got 3 of torch.float32"),
        ({"table": torch.zeros(15)}, r"table must be 16 numbers of torch.float32, got 15"),
        ({"dtype": torch.float64}, r"dtype must be bfloat16, float16 or float32, got torch.float64"),
        ({"absmax": torch.zeros(4, dtype=torch.uint8, device="meta")}, r"absmax must be on cpu.*got meta"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=f"FourBit: {message}"):
        dataclasses.replace(drawn((4, 64)), **change)


def test_nested_tables_are_checked():
    weight = drawn((4, 64))
    nested = dataclasses.replace(weight.nested, scale=torch.zeros(2))
    with pytest.raises(ValueError, match=r"nested.scale must be 1 numbers of torch.float32, got 2"):
        dataclasses.replace(weight, nested=nested)


def test_a_layer_that_was_never_quantised_is_refused():
    with pytest.raises(ValueError, match=r"quantised bitsandbytes Params4bit, got Parameter \(2, 4\) without"):
        tigon.FourBit.from_parameter(torch.nn.Parameter(torch.ones(2, 4)))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("compressed", [True, False])
def test_the_bits_of_bitsandbytes(quant_type, compressed, backend, device):
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    w = torch.randn(24, 256, dtype=torch.bfloat16)
    parameter = bnb.nn.Params4bit(w, requires_grad=False, quant_type=quant_type, compress_statistics=compressed)
    parameter = parameter.to(device)
    if parameter.quant_state is None:
        parameter = parameter._quantize(device)
    want = bnb.functional.dequantize_4bit(parameter.data, parameter.quant_state)
    assert torch.equal(tigon.dequantize_4bit(tigon.FourBit.from_parameter(parameter)), want)
