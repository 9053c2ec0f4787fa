"""quantized_embedding and quantize_rows: what a code stands for, and bags of them."""

import pytest
import torch
from numerics import check

from tigon.ops.quantized_table import quantize_rows, quantized_embedding, quantized_embedding_reference


def widened(codes, scale_offset):
    scale, offset = scale_offset.double().split(1, 1)
    return codes.double() * scale + offset


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_number_is_off_by_half_a_scale_at_most(dtype, size, device):
    """Also the least and the largest of a row: their rounding to fp16 goes outwards."""
    weight = (torch.randn(300, 30, device=device) * size + size * torch.randn(300, 1, device=device)).to(dtype)
    codes, scale_offset = quantize_rows(weight)
    assert codes.dtype == torch.uint8
    assert scale_offset.dtype == torch.float16
    error = (widened(codes, scale_offset) - weight.double()).abs().amax(1)
    scale = scale_offset[:, 0].double()
    assert (error <= scale / 2 * (1 + 1e-9)).all()
    # No wider than the row takes: what fp16 rounds of offset and scale, and the least number that it has.
    spread = weight.double().amax(1) - weight.double().amin(1)
    allowed = spread / 255 * (1 + 2**-9) + weight.double().abs().amax(1) * 2**-10 / 255 + 2**-23
    assert (scale <= allowed).all()


def test_a_constant_row_is_exact(device):
    numbers = torch.tensor([0.0, 1 / 3, -2.5, 65504, -65504, 0.1], device=device)
    halves = numbers.half()
    codes, scale_offset = quantize_rows(halves[:, None].expand(-1, 9))
    assert torch.equal(widened(codes, scale_offset), halves.double()[:, None].expand(-1, 9))
    full = numbers[:, None].expand(-1, 9)
    error = (widened(*quantize_rows(full)) - full.double()).abs()
    assert (error <= (full.double().abs() * 2**-22).clamp_min(2**-25)).all()


@pytest.mark.parametrize("kind", ["fixed", "ragged", "fields"])
@pytest.mark.parametrize("codes_dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bags(kind, codes_dtype, dtype, backend, device):
    codes = torch.randint(0, 256, (40, 30), device=device).sub(128 * (codes_dtype == torch.int8)).to(codes_dtype)
    scale_offset = torch.randn(40, 2, device=device).half()
    factors = None
    options = {"padding_idx": 3, "mode": "sum", "include_last_offset": True}
    values, offsets = torch.randint(0, 20, (6, 2) if kind == "fields" else (12, 5), device=device), None
    if kind == "ragged":
        values, offsets = values.view(-1), torch.tensor([0, 3, 3, 41, 60], device=device)
        options |= {"mode": "mean"}
    else:
        factors = torch.randn(values.shape, device=device)
    if kind == "fields":
        options |= {"field_offsets": torch.tensor([0, 20, 40], device=device)}

    def run(function):
        def called(scale_offset, factors):
            of = torch.float64 if scale_offset.dtype == torch.float64 else dtype
            return function(codes, scale_offset, values, offsets, per_sample_weights=factors, dtype=of, **options)

        return called

    reference = run(quantized_embedding_reference)
    check(run(quantized_embedding), reference, scale_offset, factors, eager=reference, grad=False)


def test_the_kernels_answer_a_wrong_id_with_nan(device, triton_backend):
    codes, scale_offset = torch.ones(4, 8, dtype=torch.uint8, device=device), torch.ones(4, 2, device=device).half()
    values = torch.tensor([[1, 2], [4, 0], [-1, 0]], device=device)
    y = torch.ops.tigon.quantized_embedding(codes, scale_offset, values, None, None, None, False, -1, torch.float32)
    assert y[0].eq(4).all()
    assert y[1:].isnan().all()


def test_compiles(backend, device):
    codes, scale_offset = quantize_rows(torch.randn(40, 16, device=device))
    values = torch.randint(0, 40, (6, 3), device=device)
    compiled = torch.compile(quantized_embedding, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(codes, scale_offset, values), quantized_embedding(codes, scale_offset, values))


def test_nothing(backend, device):
    codes, scale_offset = quantize_rows(torch.randn(0, 16, device=device))
    y = quantized_embedding(codes, scale_offset, torch.zeros(3, 0, dtype=torch.long, device=device))
    assert torch.equal(y, torch.zeros(3, 16, device=device))


CODES, SCALES, IDS = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 2).half(), torch.zeros(2, 3).long()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: quantize_rows(torch.ones(3)), r"weight must be \(N, D\) floats, got \(3,\)"),
        (lambda: quantize_rows(torch.full((1, 2), float("nan"))), r"must be finite and within"),
        (lambda: quantize_rows(torch.tensor([[1.0, 7e4]])), r"must be finite and within"),
        (lambda: quantized_embedding(CODES.float(), SCALES, IDS), r"codes must be \(N, D\) uint8 or int8, got"),
        (lambda: quantized_embedding(CODES, SCALES.float(), IDS), r"scale_offset must be \(4, 2\) float16, got"),
        (lambda: quantized_embedding(CODES, SCALES, IDS + 4), r"values must lie in \[0, 4\), got 4"),
        (lambda: quantized_embedding(CODES, SCALES, IDS, dtype=torch.int32), r"dtype must be a float dtype"),
        (
            lambda: quantized_embedding(CODES, SCALES, IDS, per_sample_weights=torch.ones(2, 3, requires_grad=True)),
            r"per_sample_weights must not require a gradient",
        ),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("codes_dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize(("width", "stride", "first"), [(1, 1, 0), (5, 5, 1), (30, 30, 2), (33, 40, 3), (16, 16, 0)])
def test_rows_of_bytes_that_begin_anywhere(width, stride, first, codes_dtype, device, triton_backend):
    """Read by words of four bytes, which begin elsewhere; two ids at a time, and one alone."""
    memory = torch.randint(0, 256, (20 * stride + 8,), device=device).to(torch.uint8)
    codes = memory.as_strided((20, width), (stride, 1), first).view(codes_dtype)
    scale_offset = torch.randn(20, 2, device=device).half()
    for shape, fields in (((40, 6), None), ((5, 3), None), ((7, 2), torch.tensor([0, 8, 20], device=device))):
        values = torch.randint(0, 8, shape, device=device)
        values[0, 0] = 19 if fields is None else 7
        y = quantized_embedding(codes, scale_offset, values, field_offsets=fields)
        want = quantized_embedding_reference(codes, scale_offset, values, field_offsets=fields, dtype=torch.float64)
        torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-4)
