"""Experts in 4 bits: the formats' numbers, the kernels' bits, moe_mlp beside dequantized weights, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from numerics import check
from ops_table.experts import _eager, _reference

import tigon
from tigon.ops.experts import launches, moe_mlp, quantized_products
from tigon.ops.experts.options import Expert
from tigon.ops.experts.quantized import LAYOUTS, QuantizedExperts

FORMATS = ("nf4", "mxfp4")


def draw(E: int, N: int, K: int, format: str, device: torch.device | str = "cpu", seed: int = 0) -> QuantizedExperts:
    weight = torch.randn(E, N, K, generator=torch.Generator().manual_seed(seed)) / K**0.5
    return QuantizedExperts.quantize(weight, format).to(device)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_at_every_place_is_the_format_s_number(format, backend, device):
    """16 codes, first and second in a byte, under scales of three sizes, with a short last block."""
    blocksize, _, table = LAYOUTS[format]
    K = blocksize + 17
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (2, 3, K + K % 2), generator=g, dtype=torch.uint8)
    high, low = (codes[..., 0::2], codes[..., 1::2]) if format == "nf4" else (codes[..., 1::2], codes[..., 0::2])
    exponents = torch.tensor([[0, 127], [3, 130], [251, 120]], dtype=torch.uint8).expand(2, 3, 2)
    scales = torch.rand(2, 3, 2, generator=g) if format == "nf4" else exponents
    q = QuantizedExperts(high << 4 | low, scales, shape=(2, 3, K), format=format).to(device)
    factor = scales.double() if format == "nf4" else 2.0 ** (scales.double() - 127)
    exact = torch.tensor(table).double()[codes.long()][..., :K] * factor.repeat_interleave(blocksize, -1)[..., :K]
    assert torch.equal(q.dequantize(torch.float32).cpu(), exact.float())
    assert torch.equal(q.dequantize(torch.bfloat16).cpu(), exact.float().bfloat16())
    assert torch.equal(q.dequantize(torch.float64).cpu(), exact.float().double())


def test_quantize_takes_the_nearest_code():
    weight = torch.randn(2, 5, 192, generator=torch.Generator().manual_seed(0))
    for format in FORMATS:
        blocksize, _, table = LAYOUTS[format]
        q = QuantizedExperts.quantize(weight, format)
        blocks = weight.view(-1, blocksize)
        stored = q.pack().scales.flatten()
        scale = stored if format == "nf4" else 2.0 ** (stored.float() - 127)
        nearest = (blocks[..., None] - torch.tensor(table) * scale[:, None, None]).abs().amin(-1)
        error = (q.dequantize(torch.float32).view(-1, blocksize) - blocks).abs()
        torch.testing.assert_close(error, nearest, rtol=1e-5, atol=1e-7)
        # Strides do not matter.
        assert torch.equal(QuantizedExperts.quantize(weight.mT.contiguous().mT, format).packed, q.packed)
    again = QuantizedExperts.quantize(q.dequantize(), "mxfp4")  # loses nothing, though a block's scale may differ
    assert torch.equal(again.dequantize(), q.dequantize())
    assert not QuantizedExperts.quantize(torch.zeros(1, 2, 64)).dequantize().any()


def test_bitsandbytes_stacks_are_read_without_a_copy(device):
    q = draw(2, 3, 128, "nf4", device)
    flat = tigon.FourBit(q.packed.view(-1, 1), q.pack().scales.flatten(), q.table, (2, 3, 128))
    assert torch.equal(tigon.dequantize_4bit(flat), q.dequantize())
    read = QuantizedExperts.from_four_bit(flat)
    assert read.packed.data_ptr() == q.packed.data_ptr()
    assert torch.equal(read.dequantize(), q.dequantize())
    scale = torch.tensor([0.5], device=device)
    nested = tigon.NestedAbsmax(torch.linspace(0, 1, 256, device=device), scale, torch.tensor(0.25, device=device))
    codes = torch.arange(12, dtype=torch.uint8, device=device)
    flat = tigon.FourBit(q.packed.view(-1, 1), codes, q.table, (2, 3, 128), nested=nested)
    assert torch.equal(QuantizedExperts.from_four_bit(flat).dequantize(), tigon.dequantize_4bit(flat))


def test_gpt_oss_s_blocks_are_read_as_transformers_reads_them():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 6, 3, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 6, 3), generator=g, dtype=torch.uint8)
    q = QuantizedExperts.from_mxfp4(blocks, scales, by_columns=True)
    assert q.packed.data_ptr() == blocks.data_ptr()
    expected = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone())
    assert torch.equal(q(torch.empty(0, dtype=torch.bfloat16)), expected)


# Tokens, D, I, E, K: least, aligned, short last blocks, and enough rows per expert to expand two experts at a time.
SHAPES = [(1, 2, 2, 1, 1), (24, 128, 64, 3, 2), (9, 70, 35, 2, 2), (300, 32, 64, 3, 1)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_moe_mlp_is_that_of_the_dequantized_weights(shape, dtype, format, triton_backend, device, monkeypatch):
    T, D, inner, E, K = shape
    if T == 300:
        monkeypatch.setattr(launches, "MANY_ROWS", 64)
        monkeypatch.setattr(quantized_products, "WORKSPACE", 2 * 128 * 32 * dtype.itemsize)
    gate_up, down = draw(E, 2 * inner, D, format, device), draw(E, D, inner, format, device, 1)
    g = torch.Generator().manual_seed(2)
    x, weights = (torch.randn(T, n, generator=g).to(device, dtype) for n in (D, K))
    biases = [(torch.randn(E, n, generator=g) / 8).to(device, dtype) for n in (2 * inner, D)]
    index = torch.randint(E + (T > 1), (T, K), generator=g).to(device)  # E: another rank's expert
    config = Expert(interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0)

    def run(x, weights, *biases, **_):
        return moe_mlp(x, index, weights, (gate_up, biases[0]), (down, biases[1]), config=config)

    def dequantized(call):
        # In x's dtype, as the products take it: the oracle's fp64 weights are the rounded ones.
        stacks = [w.dequantize(dtype) for w in (gate_up, down)]

        def run(x, weights, *biases, **_):
            return call(x, index, weights, *(w.to(x.dtype) for w in stacks), *biases, config=config)

        return run

    check(run, dequantized(_reference), x, weights, *biases, eager=dequantized(_eager))


def test_all_tokens_to_one_expert_and_a_frozen_layer(backend, device):
    """A layer of which nothing else needs a gradient, under autocast, with one stack in 4 bits."""
    gate_up, down = draw(4, 64, 32, "nf4", device), draw(4, 32, 32, "mxfp4", device).dequantize(torch.float32)
    x, index = torch.randn(40, 32, device=device), torch.full((40, 1), 2, device=device)
    y = moe_mlp(x, index, torch.ones(40, 1, device=device), gate_up, down)
    assert not y.requires_grad
    want = moe_mlp(x, index, torch.ones(40, 1, device=device), gate_up.dequantize(torch.float32), down)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    with torch.autocast(device.type, torch.bfloat16):
        low = moe_mlp(x, index, torch.ones(40, 1, device=device), gate_up, down)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, want, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("many", [False, True])
def test_adapters_on_experts_in_4_bits(many, triton_backend, device, monkeypatch):
    """The share of rank 3 in both products, and every gradient, beside the dequantized weights."""
    if many:
        monkeypatch.setattr(launches, "MANY_ROWS", 1)
        monkeypatch.setattr(quantized_products, "WORKSPACE", 1)
    E, D, inner, T = 3, 64, 35, 20
    gate_up, down = draw(E, 2 * inner, D, "nf4", device), draw(E, D, inner, "mxfp4", device, 1)
    g = torch.Generator().manual_seed(2)
    shapes = (T, D), (T, 2), (E, 3, D), (E, 2 * inner, 3), (E, 3, inner), (E, D, 3)
    leaves = [torch.randn(shape, generator=g).to(device).requires_grad_() for shape in shapes]
    index = torch.randint(E, (T, 2), generator=g).to(device)

    def run(gate_up, down):
        x, weights, *factors = leaves
        first, second = tigon.ExpertAdapter(*factors[:2], 0.5), tigon.ExpertAdapter(*factors[2:], 0.25)
        y = moe_mlp(x, index, weights, gate_up, down, gate_up_adapter=first, down_adapter=second)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    dense = (w.dequantize(torch.float32) for w in (gate_up, down))
    for found, want in zip(run(gate_up, down), run(*dense), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_a_compiled_graph_has_the_same_bits(triton_backend, device):
    gate_up, down = draw(2, 32, 64, "nf4", device), draw(2, 64, 16, "mxfp4", device)
    index, weights = torch.arange(6, device=device)[:, None] % 2, torch.ones(6, 1, device=device)

    def run(x):
        return moe_mlp(x, index, weights, gate_up, down)

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        x = torch.linspace(-1, 1, 6 * 64, device=device).view(6, 64).requires_grad_()
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_it_moves_casts_copies_and_saves_as_a_module(device):
    q = draw(2, 4, 64, "nf4")
    bits = q.scales.clone()
    holder = torch.nn.Sequential(q).to(device).to(torch.bfloat16).half()
    assert torch.equal(holder[0].scales.cpu(), bits)  # a cast would round the maxima
    assert not any(p.requires_grad for p in holder.parameters())
    copied = copy.deepcopy(holder)
    with torch.no_grad():
        copied[0].packed.zero_()
    assert holder[0].packed.any()
    copied.load_state_dict(holder.state_dict())
    assert torch.equal(copied[0].dequantize(), holder[0].dequantize())
    assert set(holder.state_dict()) == {"0.packed", "0.scales"}


def test_bytes_that_mixed_precision_has_cast_are_refused():
    """FSDP2 of older torch gathers a uint8 parameter in `param_dtype`."""
    q = draw(1, 2, 64, "nf4")
    q.packed = torch.nn.Parameter(q.packed.bfloat16(), requires_grad=False)
    with pytest.raises(ValueError, match=r"must be torch.uint8, got torch.bfloat16: .* leave param_dtype out"):
        q.dequantize()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: QuantizedExperts.quantize(torch.ones(2, 3)), r"weight must be \(E, N, K\) floats, got \(2, 3\)"),
        (lambda: QuantizedExperts.quantize(torch.ones(1, 2, 3, dtype=torch.int32)), "must be .* floats, got .*int32"),
        (lambda: QuantizedExperts.quantize(torch.full((2, 1, 4), float("nan"))), "must be finite, and expert 0's"),
        (lambda: QuantizedExperts.quantize(torch.ones(1, 1, 4), "int4"), "format must be 'nf4' or 'mxfp4', got 'int4'"),
        (
            lambda: QuantizedExperts(torch.zeros(1, 2, 16).byte(), torch.zeros(1, 2, 2), shape=(1, 2, 32)),
            r"scales must be \(1, 2, 1\) torch.float32 for nf4 weights \(1, 2, 32\), got \(1, 2, 2\)",
        ),
        (
            lambda: QuantizedExperts(
                torch.zeros(1, 2, 15).byte(), torch.zeros(1, 2, 1).byte(), shape=(1, 2, 32), format="mxfp4"
            ),
            r"packed must be \(1, 2, 16\) torch.uint8 for mxfp4 weights .* got \(1, 2, 15\)",
        ),
        (
            lambda: QuantizedExperts.from_mxfp4(torch.zeros(1, 2, 1, 8).byte(), torch.zeros(1, 2, 1).byte()),
            r"blocks must be \(E, N, K / 32, 16\) beside scales .* got \(1, 2, 1, 8\)",
        ),
        (
            lambda: QuantizedExperts.from_four_bit(
                tigon.FourBit(torch.zeros(96).byte(), torch.zeros(2), torch.zeros(16), (2, 1, 96), blocksize=128)
            ),
            r"blocks of 64 weights with K a multiple of 64, got \(2, 1, 96\) in blocks of 128",
        ),
        (
            lambda: moe_mlp(
                torch.ones(1, 4), torch.zeros(1, 1).long(), torch.ones(1, 1), draw(2, 6, 5, "nf4"), torch.ones(2, 4, 3)
            ),
            r"gate_up must be \(E, 2I, D\) = \(2, 6, 4\) .* got \(2, 6, 5\)",
        ),
    ],
)
def test_what_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
