"""Factors of a weight gradient: transposed, with scales folded into one of them."""

import pytest
import torch

from tigon import use_backend
from tigon.ops.fp8 import columns as columns_file
from tigon.ops.fp8.columns import fold_scales, to_columns, transpose_rows
from tigon.ops.fp8.recipe import E4M3, LARGEST, Norm, round_up
from tigon.ops.fp8.reference import (
    compute_scale,
    fold_scales_reference,
    norm_again,
    quantize_rows_reference,
    round_to_e4m3,
    to_columns_reference,
)

SHAPES = [(0, 48), (1, 16), (15, 100), (16, 48), (17, 1000), (33, 2064), (150, 16)]
NORMS = [("llama", 0.0, torch.bfloat16), ("gemma", 1.0, torch.bfloat16), ("none", 0.0, torch.float32)]


def draw_bytes(M: int, N: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (M, N), dtype=torch.uint8).to(device).view(E4M3)


def draw_norm(M: int, N: int, device: torch.device, norm: tuple[str, float, torch.dtype] = NORMS[0]) -> Norm:
    cast, offset, dtype = norm
    return Norm(torch.rand(M).to(device) + 0.5, torch.randn(N).to(device, dtype), offset, cast)


def draw_powers(M: int, device: torch.device) -> torch.Tensor:
    return torch.exp2(torch.randint(-30, 1, (M, 1)).float()).to(device)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether e4m3 numbers are equal; NaN equals NaN."""
    one, other = a.float(), b.float()
    same = torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))
    return a.shape == b.shape and a.dtype == b.dtype and same


@pytest.mark.parametrize("shape", SHAPES)
def test_a_transposition_is_exact(backend, device, shape):
    """Every byte, with zero bytes behind the last token; rows may have a stride, words more than one tile."""
    M, N = shape
    room = draw_bytes(M, N + 32, device)
    for data in (draw_bytes(M, N, device), room[:, 16 : N + 16]):
        found = transpose_rows(data)
        assert found.dtype == E4M3
        assert found.shape == (N, round_up(M))
        assert found.is_contiguous()
        found = found.view(torch.uint8)
        assert torch.equal(found[:, :M], data.view(torch.uint8).t())
        assert not found[:, M:].any()


@pytest.mark.parametrize("norm", [None, *NORMS], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_columns_are_the_reference(backend, device, shape, norm):
    M, N = shape
    x, factor = torch.randn(M, N).to(device, torch.bfloat16) * 50, draw_powers(M, device)
    again = None if norm is None else draw_norm(M, N, device, norm)
    found = to_columns(x, factor, again)
    assert equal(found, to_columns_reference(x, factor, again))
    assert found.is_contiguous()
    assert not found.view(torch.uint8)[:, M:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_strides_and_norms_without_a_weight(triton_backend, device, dtype):
    x = torch.randn(18, 80).to(device, dtype)[:, 16:64]
    factor = draw_powers(18, device)
    for norm in (None, draw_norm(18, 48, device), Norm(torch.rand(18).to(device), None, 0.0, "llama")):
        assert equal(to_columns(x, factor, norm), to_columns_reference(x, factor, norm))


def test_columns_of_zeros_huge_numbers_and_nan(triton_backend, device):
    x = torch.randn(21, 48).to(device, torch.bfloat16)
    x[0], x[1, 3], x[2, 0], x[3, 1], x[4, 5] = 0, 3e38, torch.inf, -torch.inf, torch.nan
    factor = draw_powers(21, device)
    factor[5], factor[6], factor[7] = 0, torch.nan, torch.inf
    norm = draw_norm(21, 48, device)
    norm.weight[9], norm.weight[10] = torch.inf, torch.nan
    for again in (None, norm):
        found = to_columns(x, factor, again)
        assert equal(found, to_columns_reference(x, factor, again))
        assert not found.view(torch.uint8)[:, 21:].any()
    assert to_columns(x, factor).float()[3, 1] == LARGEST  # saturates


@pytest.mark.parametrize("M", [0, 1, 15, 17, 5000, 9000])
def test_scales_are_folded(backend, device, M):
    into, other = draw_powers(M, device), draw_powers(M, device)
    quotient, c = fold_scales(into, other)
    expected, expected_c = fold_scales_reference(into, other)
    assert c.shape == ()
    assert quotient.shape == (M, 1)
    assert torch.equal(c, expected_c)
    assert torch.equal(quotient, expected)
    if M:
        assert torch.equal(c, (into * other).amax())


@pytest.mark.parametrize("where", [0, 40, 4500])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_infinite_and_nan_scales_survive(triton_backend, device, where, value):
    """The result of a weight gradient is then NaN, as c is."""
    into, other = draw_powers(4600, device), draw_powers(4600, device)
    other[where] = value
    quotient, c = fold_scales(into, other)
    expected, expected_c = fold_scales_reference(into, other)
    assert torch.equal(c.isnan(), expected_c.isnan())
    assert not c.isfinite()
    assert torch.equal(quotient.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_c_has_a_lower_bound(triton_backend, device):
    least = torch.full((20, 1), 2.0**-126, device=device)
    quotient, c = fold_scales(least, least)
    assert c == 2.0**-120
    assert (quotient == 2.0**-6).all()


def test_the_same_bits_twice(triton_backend, device):
    x, norm = torch.randn(33, 200).to(device, torch.bfloat16), draw_norm(33, 200, device)
    into, other = draw_powers(33, device), draw_powers(33, device)
    runs = []
    for _ in range(2):
        factor, c = fold_scales(into, other)
        runs.append([factor, c, to_columns(x, factor, norm).view(torch.uint8)])
    assert all(map(torch.equal, *runs))


def compute_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("normed", [False, True])
def test_weight_gradients_of_tokens_across_12_orders_of_magnitude(backend, device, normed):
    """Half of the tokens masked: as exact as rows of dyᵀ and xᵀ with a scale each, which need an amax over tokens."""
    M, N, K = 260, 96, 64
    size = 10.0 ** (-12 * torch.rand(M, 1)) * (torch.arange(M)[:, None] % 2)
    dy = (torch.randn(M, N) * size).to(device, torch.bfloat16)
    x = torch.randn(M, K).to(device, torch.bfloat16)
    norm = draw_norm(M, K, device) if normed else None
    y = x if norm is None else norm_again(x, norm)
    exact = dy.double().t() @ y.double()
    gradient, input_ = quantize_rows_reference(dy), quantize_rows_reference(y)
    factor, c = fold_scales(gradient.scale, input_.scale)
    dy_columns, x_columns = transpose_rows(gradient.data), to_columns(x, factor, norm)
    assert x_columns.float().abs().amax() <= LARGEST
    ours = c.double() * (dy_columns.double() @ x_columns.double().t())

    def round_columns(t: torch.Tensor) -> torch.Tensor:
        scale = compute_scale(t.float().abs().amax(0, keepdim=True))
        return round_to_e4m3(t, scale).double() * scale.double()

    rowwise = round_columns(dy).t() @ round_columns(y)
    assert compute_error(ours, exact) <= 1.05 * compute_error(rowwise, exact)
    # Masked tokens are exact zeros.
    assert not dy_columns.float()[:, 0:M:2].any()
    assert not x_columns.float()[:, 0:M:2].any()


def test_traced_calls_have_the_same_bits(triton_backend, device):
    def run(x, into, norm):
        factor, c = fold_scales(into, into)
        columns = to_columns(x, factor, norm)
        return factor, c, columns.view(torch.uint8), transpose_rows(columns).view(torch.uint8)

    inputs = torch.randn(18, 48).to(device, torch.bfloat16), draw_powers(18, device), draw_norm(18, 48, device)
    assert all(map(torch.equal, torch.compile(run, fullgraph=True, backend="eager")(*inputs), run(*inputs)))


def test_fake_tensors_have_the_shapes(device):
    """As torch.compile sees them."""
    x, factor = torch.randn(18, 48).to(device, torch.bfloat16), draw_powers(18, device)
    with use_backend("triton" if device.type == "cuda" else "torch"):
        real = [*fold_scales(factor, factor), to_columns(x, factor), transpose_rows(x.to(E4M3))]
    fake = [
        *columns_file._fp8_fold_scales_fake(factor, factor),
        columns_file._fp8_to_columns_fake(x, factor, None, None, 0.0, "none"),
        columns_file._fp8_transpose_rows_fake(x.to(E4M3)),
    ]
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]
