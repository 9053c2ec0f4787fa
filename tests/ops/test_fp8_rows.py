"""quantize_rows and norm_rows: the kernels' bytes are the reference's."""

import pytest
import torch

import tigon
from tigon.ops.fp8.norm_rows import norm_rows
from tigon.ops.fp8.recipe import E4M3, LEAST_SCALE, Norm, Rows
from tigon.ops.fp8.reference import norm_again, norm_rows_reference, quantize_rows_reference
from tigon.ops.fp8.rows import MAX_TILE, quantize_rows
from tigon.ops.rms_norm import CASTS

pytestmark = pytest.mark.usefixtures("triton_backend")
WIDTHS = 16, 48, 100, 129, 1000, 2064  # 100, 129: rows begin off 16-byte boundaries; 2064: beyond a power of two


def check(found, wanted):
    for q, s in (found, wanted):
        assert q.dtype == E4M3
        assert s.dtype == torch.float32
        assert s.shape == (len(q), 1)
    assert found.data.is_contiguous()
    assert torch.equal(found.scale.nan_to_num(nan=-1), wanted.scale.nan_to_num(nan=-1))
    q, r = found.data.float(), wanted.data.float()
    assert torch.equal(q.nan_to_num(nan=500), r.nan_to_num(nan=500))
    assert torch.equal(q.signbit() & ~q.isnan(), r.signbit() & ~r.isnan())


@pytest.mark.parametrize("tokens", [0, 1, 15, 17])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows(width, tokens, device):
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16) * 10 ** torch.randn(tokens, 1, device=device)
    x = x.bfloat16()
    check(quantize_rows(x), quantize_rows_reference(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_in_other_dtypes(dtype, device):
    x = torch.randn(5, 48, device=device, dtype=dtype)
    check(quantize_rows(x), quantize_rows_reference(x))


def make_hard_rows(width, dtype, device):
    x = torch.randn(10, width, device=device).to(dtype)
    x[0] = 0
    x[1, 7] = torch.finfo(dtype).max
    x[2] *= 1e-38  # partly denormal
    x[3] = 1e-40
    x[4, -1], x[5, 0], x[6, 3] = torch.inf, -torch.inf, torch.nan
    x[7, 1], x[7, 2] = torch.nan, torch.inf
    x[8] = 448 * 2.0**-126  # the largest number of the least scale
    x[9] = 448
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [16, 129, MAX_TILE + 40])
def test_zeros_and_numbers_that_are_not_finite(width, dtype, device):
    x = make_hard_rows(width, dtype, device)
    found = quantize_rows(x)
    check(found, quantize_rows_reference(x))
    assert (found.scale[[0, 3, 8]] == LEAST_SCALE).all()
    assert found.scale[9] == 1
    assert (found.scale[4:6] == torch.inf).all()
    assert found.scale[6:8].isnan().all()
    sums = (found.data.float() * found.scale).sum(1)
    assert sums.isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 2


@pytest.mark.parametrize("width", [48, 100, MAX_TILE + 48])
def test_rows_are_read_in_place(width, device):
    wide = torch.randn(5, width + 32, device=device).bfloat16()
    for x in (wide[:, :width], wide[::2, 16 : 16 + width], wide[:, 1 : 1 + width], wide[:1, :width].expand(3, -1)):
        check(quantize_rows(x), quantize_rows_reference(x))
    x = torch.randn(48, 5, device=device).bfloat16().t()
    check(quantize_rows(x), quantize_rows_reference(x))


@pytest.mark.parametrize(
    "widths",
    [(64, 16), (64, 16, 16), (100, 17, 12), (1024, 256, 256), (MAX_TILE, 16, 16), (MAX_TILE, 48), (32, MAX_TILE + 16)],
)
def test_tensors_side_by_side_share_a_scale(widths, device):
    parts = [torch.randn(7, width + 16 * i, device=device).bfloat16()[:, :width] for i, width in enumerate(widths)]
    for i, part in enumerate(parts):
        part[i, 3] = 1000  # the largest number of a row is in each tensor in turn
    parts[-1][5, -1] = torch.nan
    check(quantize_rows(*parts), quantize_rows_reference(torch.cat(parts, 1)))


def check_norm(x, residual, weight, offset, cast):
    given = [None if t is None else t.clone() for t in (x, residual, weight)]
    total, rstd, rows = norm_rows(x, residual, weight, 1e-5, offset, cast)
    wanted_total, wanted_rstd, wanted = norm_rows_reference(x, residual, weight, 1e-5, offset, cast)
    if residual is None:
        assert total is x
    else:
        assert total.is_contiguous()
        assert torch.equal(total, wanted_total)
        norm, sums = tigon.add_rms_norm(x, residual, weight, eps=1e-5, offset=offset, cast=cast)
        if sums.dtype == total.dtype:
            assert torch.equal(total, sums)
        if norm.dtype == x.dtype:
            _close(rows, quantize_rows_reference(norm))
    assert rstd.dtype == torch.float32
    torch.testing.assert_close(rstd, wanted_rstd, rtol=1e-6, atol=0)
    # From the same 1/rms, as the backward pass computes the norm again, the bytes are the same.
    check(rows, quantize_rows_reference(norm_again(total, Norm(rstd, weight, offset, cast))))
    _close(rows, wanted)
    assert all(t is None or torch.equal(t, old) for t, old in zip((x, residual, weight), given, strict=True))


def _close(found, wanted):
    assert torch.equal(found.scale, wanted.scale)
    steps = (found.data.view(torch.uint8).int() - wanted.data.view(torch.uint8).int()).abs()
    assert steps.numel() == 0 or (steps.amax() <= 1 and (steps > 0).sum() <= steps.numel() / 1000)


@pytest.mark.parametrize("tokens", [0, 1, 15, 17])
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_rows(width, tokens, device):
    x, residual = (torch.randn(tokens, width, device=device).bfloat16() for _ in range(2))
    check_norm(x, residual, torch.randn(width, device=device).bfloat16(), 0.0, "llama")


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("width", [100, MAX_TILE + 16])
def test_options(width, cast, weight_dtype, has_residual, device):
    x = torch.randn(3, width, device=device).bfloat16()
    residual = torch.randn(3, width, device=device).bfloat16() if has_residual else None
    weight = None if weight_dtype is None else torch.randn(width, device=device).to(weight_dtype)
    check_norm(x, residual, weight, 1.0, cast)


def test_norm_of_other_dtypes_and_strides(device):
    wide = torch.randn(9, 200, device=device)
    x, residual, weight = wide.bfloat16()[:, :100], wide.bfloat16()[:, 16:116], torch.randn(200, device=device)[::2]
    check_norm(x, residual, weight, 0.0, "gemma")
    check_norm(x, None, weight, 0.0, "llama")
    check_norm(x, wide[:, 100:], weight.bfloat16(), 0.0, "llama")  # the stream in fp32
    check_norm(wide[:, :100], wide[:, 100:], weight, 0.0, "llama")
    check_norm(wide.half()[:, :100], wide.half()[:, 100:], weight.half(), 0.0, "none")


@pytest.mark.parametrize("width", [48, MAX_TILE + 16])
def test_norm_of_numbers_that_are_not_finite(width, device):
    x = torch.randn(4, width, device=device).bfloat16()
    x[0], x[1, 3], x[2, 5] = 0, torch.inf, torch.nan
    _, _, rows = norm_rows(x, None, torch.ones(width, device=device).bfloat16(), 1e-5, 0.0, "llama")
    sums = (rows.data.float() * rows.scale).sum(1)
    assert sums.isnan().tolist() == [False, True, True, False]
    assert (rows.data[0].float() == 0).all()


def test_operators_are_registered(device):
    x = torch.randn(3, 48, device=device).bfloat16()
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tigon.fp8_rows.default, (x, x, x), test_utils=utils)
    for residual in (None, x):
        arguments = (x, residual, None, 1e-5, 0.0, "llama")
        torch.library.opcheck(torch.ops.tigon.fp8_norm_rows.default, arguments, test_utils=utils)


@pytest.mark.parametrize("width", [48, MAX_TILE + 40])
def test_rows_are_written_where_they_are_wanted(width, device):
    x = torch.randn(5, width, device=device).bfloat16()
    out = Rows(torch.empty(7, width, device=device, dtype=E4M3)[1:6], torch.empty(7, 1, device=device)[1:6])
    found = quantize_rows(x, out=out)
    assert [t.data_ptr() for t in found] == [t.data_ptr() for t in out]
    check(out, quantize_rows_reference(x))
