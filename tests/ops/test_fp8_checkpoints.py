"""Weights from checkpoints in FP8: rows in blocks of 128, products with weights as they are stored, and gradients."""

import pytest
import torch
import torch.nn.functional as F
from fp8_recipe import error, narrow, scale

from tigon.ops.fp8 import products
from tigon.ops.fp8.blocks import quantize_blocks
from tigon.ops.fp8.frozen_checkpoint import FrozenBlocks, FrozenChannels, StoredFP8, freeze_fp8, multiply_frozen
from tigon.ops.fp8.recipe import BLOCK, E4M3, LEAST_SCALE, Rows, round_up
from tigon.ops.fp8.reference import quantize_blocks_reference, quantize_rows_reference
from tigon.ops.fp8.rows import quantize_rows


def check(found, x):
    (M, N), (data, scales) = x.shape, found
    wanted = quantize_rows_reference(x.reshape(-1, BLOCK))  # each block is a row
    assert data.dtype == E4M3
    assert data.is_contiguous()
    assert scales.dtype == torch.float32
    assert scales.shape == (M, N // BLOCK)
    assert not M or scales.stride() == (1, round_up(M))
    assert data.untyped_storage().nbytes() >= round_up(M) * N
    assert torch.equal(scales.nan_to_num(nan=-1).reshape(-1, 1), wanted.scale.nan_to_num(nan=-1))
    q, r = data.float(), wanted.data.float().view(M, N)
    assert torch.equal(q.nan_to_num(nan=500), r.nan_to_num(nan=500))


# 1, 15, 17: odd rows; 64: a program's rows, and 65: beyond them.
@pytest.mark.parametrize("tokens", [0, 1, 15, 17, 64, 65])
@pytest.mark.parametrize("width", [128, 384])
@pytest.mark.usefixtures("triton_backend")
def test_blocks(width, tokens, device):
    x = torch.randn(tokens, width, device=device) * 10 ** torch.randn(tokens, width, device=device)
    check(quantize_blocks(x.bfloat16()), x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("triton_backend")
def test_blocks_of_other_dtypes_and_strides(dtype, device):
    wide = torch.randn(20, 300, device=device).to(dtype)
    for x in (wide[:, 17:273], wide[::2, :256], wide[:1, :128].expand(3, -1), wide[:, :128].t()[:, :0].reshape(0, 128)):
        check(quantize_blocks(x), x)
    x = torch.randn(256, 5, device=device).to(dtype).t()
    check(quantize_blocks(x), x)


@pytest.mark.usefixtures("triton_backend")
def test_blocks_of_numbers_that_are_not_finite(device):
    x = torch.randn(6, 256, device=device).bfloat16()
    x[0], x[1, 3], x[2, 130], x[3, 5], x[4, :128] = 0, torch.inf, torch.nan, -3e38, 1e-40
    found = quantize_blocks(x)
    check(found, x)
    assert (found.scale[0] == LEAST_SCALE).all()
    sums = (found.data.float().view(6, 2, 128) * found.scale[:, :, None]).sum(2).isnan()
    assert sums.nonzero().tolist() == [[1, 0], [2, 1]]  # the other block of the row stays


def test_blocks_need_whole_blocks(device):
    with pytest.raises(ValueError, match=r"x must have a width that is a multiple of 128, got \(2, 96"):
        quantize_blocks(torch.randn(2, 96, device=device))


@pytest.mark.usefixtures("triton_backend")
def test_blocks_are_a_registered_operator(device):
    x = torch.randn(3, 256, device=device).bfloat16()
    torch.library.opcheck(torch.ops.tigon.fp8_blocks.default, (x,), test_utils=("test_schema", "test_faketensor"))


# ----------------------------------------------------------------------------------------------------------- products


def make_blocks(N, K, device="cpu"):
    """Bytes, and scales that are no powers of two and differ by a factor of 30."""
    data = (torch.randn(N, K, device=device) * 100).clamp(-448, 448).to(E4M3)
    return data, torch.rand(-(-N // 128), -(-K // 128), device=device) * 1e-3 + 3e-5


def expand(scales, N, K):
    return scales.double().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]


def make_rows(M, K):
    return (torch.randn(M, K) * torch.exp(torch.randn(M, K // 128).repeat_interleave(128, 1))).bfloat16()


def assert_rounded(found, exact, scale_of_terms):
    """Rounded to bf16 once, after sums in fp32."""
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + scale_of_terms * 2**-20).all()


@pytest.mark.parametrize("shape", [(1, 128, 128), (17, 256, 384)])
def test_products_in_blocks(shape):
    M, N, K = shape
    data, scales = make_blocks(N, K)
    rows = quantize_blocks_reference(make_rows(M, K))
    left = rows.data.double() * rows.scale.double().repeat_interleave(128, 1)
    right = data.double() * expand(scales, N, K)
    found = products.multiply_blocks(rows, data, scales)
    assert_rounded(found, left @ right.t(), left.abs() @ right.abs().t())


def multiply_as_cublas(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """torch.nn.functional.scaled_mm on Hopper: its checks, and cuBLAS's view of the memory."""
    (M, K), N = a.shape, b.shape[1]
    assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert M % 4 == 0
    L = K // 128
    padded = -(-L // 4) * 4
    assert (scale_a.shape, scale_a.stride(0)) == ((M, L), 1)
    assert scale_a.stride(1) == M
    assert (scale_b.shape, scale_b.stride()) == ((padded, N // 128), (1, padded))
    assert scale_a.dtype == scale_b.dtype == torch.float32
    left = a.view(torch.uint8).clone().view(E4M3).double() * scale_a.double().repeat_interleave(128, 1)
    right = b.t().double() * expand(scale_b[:L].t(), N, K)
    return (left @ right.t()).to(output_dtype)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(products, "why_no_blocks", lambda device: "")
    monkeypatch.setattr(F, "scaled_mm", multiply_as_cublas)


# 16: as they are; 1, 17: rows to a multiple of 16. 512: four blocks, whose scales need no padding.
@pytest.mark.parametrize("shape", [(16, 128, 512), (1, 256, 128), (17, 128, 384)])
@pytest.mark.usefixtures("hopper")
def test_factors_lie_in_memory_as_cublas_reads_them(shape):
    M, N, K = shape
    data, scales = make_blocks(N, K)
    x = make_rows(M, K)
    rows = quantize_blocks_reference(x)
    left = rows.data.double() * rows.scale.double().repeat_interleave(128, 1)
    right = data.double() * expand(scales, N, K)
    found = products.multiply_blocks(rows, data, scales)
    assert found.is_contiguous()
    assert_rounded(found, left @ right.t(), left.abs() @ right.abs().t())
    for part in (slice(0, 1), slice(M // 2, M)):  # some of the rows, and rows from elsewhere
        some = Rows(*(t[part] for t in rows))
        for given in (some, Rows(some.data.clone(), some.scale.contiguous())):
            assert torch.equal(products.multiply_blocks(given, data, scales), found[part])


# -------------------------------------------------------------------------------------------------------- the weights


def emulate(dtype_rows, x, weight):
    """x rounded, by weightᵀ in fp64, rounded to bf16. dtype_rows: numbers with one scale."""
    x = x.double()
    blocks = x.view(len(x), -1, dtype_rows)
    s = scale(blocks.abs().amax(2, keepdim=True))
    return (narrow(blocks, s) * s).view_as(x) @ weight.t()


def make_weight(kind, N=256, K=384):
    if kind == "blocks":
        data, scales = make_blocks(N, K)
        return freeze_fp8(data, scales, (128, 128)), data.double() * expand(scales, N, K)
    data, _ = make_blocks(N, K)
    scales = torch.rand(N, 1) * 1e-3 + 3e-5 if kind == "channels" else torch.tensor(0.00123)
    return freeze_fp8(data, scales, None), data.double() * scales.double()


@pytest.mark.parametrize("kind", ["blocks", "channels", "tensor"])
def test_layers_multiply_by_the_weight_as_stored(kind):
    weight, exact = make_weight(kind)
    N, K = exact.shape
    assert weight.block == (128 if kind == "blocks" else None)
    assert (weight.fold is None) == (kind != "channels")
    assert (weight.shape, weight.device) == ((N, K), torch.device("cpu"))
    torch.testing.assert_close(weight.dense(torch.float32).double(), exact, rtol=2**-23, atol=0)
    torch.testing.assert_close(weight.dense(torch.bfloat16).double(), exact, rtol=2**-8, atol=0)
    x = make_rows(34, K).view(2, 17, K).requires_grad_()
    dy = make_rows(34, N).view(2, 17, N)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = multiply_frozen(x, weight)
    assert not packed
    y.backward(dy)
    rows, dys = x.detach().view(34, K), dy.view(34, N)
    group_x, group_dy = (128, 128) if kind == "blocks" else (K, N)
    assert_rounded(y.detach().view(34, N), emulate(group_x, rows, exact), rows.double().abs() @ exact.abs().t())
    if kind == "channels":  # the channels' scales move into dy, before dy is rounded
        folded = (dys.float() * weight.scale.view(-1)).double()
        wanted = emulate(group_dy, folded, weight.data.double().t())
    else:
        wanted = emulate(group_dy, dys, exact.t())
    assert_rounded(x.grad.view(34, K), wanted, dys.double().abs() @ exact.abs())
    assert 1e-3 < error(y.detach().view(34, N), rows.double() @ exact.t()) < 0.05
    assert 1e-3 < error(x.grad.view(34, K), dys.double() @ exact) < 0.05


def test_products_of_callers_rows():
    """As adapters call them: rows rounded once, for several weights."""
    x, dy = make_rows(5, 384), make_rows(5, 256)
    for kind, quantize in (("blocks", quantize_blocks), ("channels", quantize_rows), ("tensor", quantize_rows)):
        weight, _ = make_weight(kind)
        assert torch.equal(weight.multiply(quantize(x)), weight.product(x))
        folded = dy if weight.fold is None else dy * weight.fold
        assert torch.equal(weight.multiply_transposed(quantize(folded)), weight.input_gradient(dy))


def test_masked_tokens_and_numbers_that_are_not_finite():
    for kind in ("blocks", "channels", "tensor"):
        weight, _ = make_weight(kind)
        dy = make_rows(4, 256)
        dy[1], dy[2, 3], dy[3, 200] = 0, torch.inf, torch.nan
        dx = weight.input_gradient(dy)
        assert (dx[1] == 0).all()
        assert dx.isnan().any(1).tolist() == [False, False, True, True]
        assert dx[2:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_dtypes_and_sizes_are_multiplied_dense(dtype):
    for size in ((200, 130), (256, 384)):
        data, scales = make_blocks(*size)
        weight = StoredFP8(data, scales.bfloat16(), (128, 128))
        exact = (data.double() * expand(scales.bfloat16(), *size)).to(dtype)
        x = torch.randn(3, size[1], dtype=dtype, requires_grad=True)
        y = multiply_frozen(x, weight)
        y.sum().backward()
        reference = x.detach().requires_grad_()
        F.linear(reference, exact).sum().backward()
        torch.testing.assert_close(y, F.linear(x, exact))
        torch.testing.assert_close(x.grad, reference.grad)


def test_only_whole_blocks_are_multiplied_in_fp8():
    data, scales = make_blocks(256, 384)
    assert type(freeze_fp8(data, scales, (128, 128))) is FrozenBlocks
    assert type(freeze_fp8(data, scales[:, :1].expand(2, 3), (128, 128))) is FrozenBlocks
    assert type(freeze_fp8(data[:, :320], scales, (128, 128))) is StoredFP8
    assert type(freeze_fp8(data[:250], scales, (128, 128))) is StoredFP8
    assert type(freeze_fp8(data, torch.ones(4, 6), (64, 64))) is StoredFP8
    assert type(freeze_fp8(data, torch.ones(256), None)) is FrozenChannels
    assert type(freeze_fp8(data[:200], torch.ones(200, 1), None)) is StoredFP8
    assert type(freeze_fp8(data.t()[:256], torch.ones(()), None)) is StoredFP8  # not contiguous


def test_powers_of_two_as_exponents_are_read():
    data, _ = make_blocks(128, 256)
    exponents = torch.tensor([[120, 131]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = freeze_fp8(data, exponents, (128, 128))
    assert torch.equal(weight.dense(torch.float32), data.float() * torch.tensor([2.0**-7, 16]).repeat_interleave(128))
    x = make_rows(3, 256)
    assert_rounded(weight.product(x), emulate(128, x, weight.dense(torch.float64)), torch.full((3, 128), 1e4))


def test_invalid_weights_raise():
    data, scales = make_blocks(256, 384)
    with pytest.raises(ValueError, match=r"data must be \(N, K\) torch.float8_e4m3fn, got \(256, 384\) torch"):
        StoredFP8(data.to(torch.float8_e5m2), scales, (128, 128))
    for bad, blocks in ((scales.t(), (128, 128)), (scales, None), (torch.ones(384), None), (torch.ones(()), (64, 64))):
        with pytest.raises(ValueError, match="FrozenBlocks: scale must have one number, one for each row of data"):
            FrozenBlocks(data, bad, blocks)


def test_second_derivatives_raise():
    weight, _ = make_weight("blocks")
    x = make_rows(2, 384).requires_grad_()
    (dx,) = torch.autograd.grad(multiply_frozen(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentia"):
        (dx.sum() + x.square().sum()).backward()
