"""Attention between the r numbers in a row: y = A v, with A = softmax(q kᵀ / τ) (r, r) per row.

A is never in memory, forward or backward, and only the input is saved for the backward pass.

The softmax is invariant to a shift in k. With k' = k − (max k + min k) / 2 the largest score in row i of A is
|q_i| h / τ, with h = (max k − min k) / 2, so no pass over the scores is needed to find the maximum.

Source: Residual DCN in LiRank, Borisyuk et al. 2024, https://arxiv.org/abs/2402.06859, section 3.2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    dense_like,
    dense_like_second,
    differentiable,
    do_not_specialize,
    jit,
    launch,
    launcher,
    next_power_of_2,
    register_limit,
    tl,
    use_triton,
    view_rows,
)
from tigon.kernels.tiles.constants import LN2, LOG2E
from tigon.ops.example import Example

# The widest A: a tile holds all its columns, 16 per thread on 8 warps.
MAX_RANK = 4096


def outer_softmax(qkv: Tensor, temperature: float = 1.0, *, residual: bool = False) -> Tensor:
    """softmax(q kᵀ / temperature) v for each row, with q, k and v its three thirds. fp32, rounded once.

    Args:
        qkv: (..., 3r), any float dtype, r up to 4096: a fused projection, q before k before v.
        temperature: τ > 0, divides the products q_i k_j.
        residual: add v, as in LiRank's cross layer. The gradient is added in the same pass.

    Returns: (..., r) in qkv's dtype.

    Raises: ValueError for a last dimension not divisible by 3 or longer than 3 · 4096, a non-float dtype, and a
        temperature that is not positive.

    Only qkv is saved for the backward pass, and its gradient is a single tensor, without concatenation. The arithmetic
    is r² exponentials per row forward, and as many backward. A row with an infinite k gives NaN.

    Source: LiRank, https://arxiv.org/abs/2402.06859

    Replaces::

        q, k, v = qkv.chunk(3, -1)
        scores = q.unsqueeze(-1) * k.unsqueeze(-2) / temperature
        y = (scores.softmax(-1) @ v.unsqueeze(-1)).squeeze(-1)
    """
    if not qkv.dtype.is_floating_point or qkv.dim() == 0:
        raise ValueError(f"outer_softmax: qkv must be (..., 3r) floats, got {tuple(qkv.shape)} {qkv.dtype}.")
    if qkv.shape[-1] % 3 or qkv.shape[-1] > 3 * MAX_RANK:
        raise ValueError(
            f"outer_softmax: qkv must be (..., 3r), q, k and v side by side with r up to {MAX_RANK}, got "
            f"{tuple(qkv.shape)}."
        )
    if not temperature > 0:
        raise ValueError(f"outer_softmax: temperature must be positive, got {temperature}.")
    if not use_triton(qkv):
        return outer_softmax_reference(qkv, temperature, residual=residual)
    return _outer_softmax(qkv, temperature, residual)


def outer_softmax_reference(qkv: Tensor, temperature: float = 1.0, *, residual: bool = False) -> Tensor:
    q, k, v = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).chunk(3, -1)
    if qkv.numel() == 0:
        return (q + k + v).to(qkv.dtype)
    scores = q.unsqueeze(-1) * k.unsqueeze(-2) / temperature
    y = (scores.softmax(-1) * v.unsqueeze(-2)).sum(-1)
    return (y + v if residual else y).to(qkv.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels
#
# A tile is (I, J, S, LI, LJ): S samples, each with A's rows ri · LI + li and columns rj · LJ + lj. Triton distributes
# the last dimensions over threads, so S · LI · LJ is the thread count, and a thread holds I rows and J columns in
# registers. Sums over I and J stay within the thread; only row and column sums cross threads, not elements: r²/LJ +
# r²/LI exchanges or fewer, instead of r². With Triton's usual two-dimensional tile the exchanges take longer than the
# exponentials.


@jit
def _deal(x, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """(S, BLOCK), as loaded, as (BLOCK / LANES, S, LANES): rows or columns for tiles."""
    return tl.permute(tl.reshape(x, (SAMPLES, BLOCK // LANES, LANES)), (1, 0, 2))


@jit
def _gather(x, SAMPLES: tl.constexpr, BLOCK: tl.constexpr):
    """Inverse of `_deal`, for a store."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (SAMPLES, BLOCK))


@jit
def _over_columns(tile):
    # Dimension 1 first, which is in registers: only one number per row and thread is exchanged.
    return tl.sum(tl.sum(tile, 1), 3)


@jit
def _center(k, live):
    """k minus its midrange, and half the range: (S, BLOCK) and (S, 1). Columns beyond r get 0."""
    # Halve before adding: the sum of two large numbers with equal sign would overflow.
    top = 0.5 * tl.max(tl.where(live, k, float("-inf")), 1, keep_dims=True)
    low = 0.5 * tl.min(tl.where(live, k, float("inf")), 1, keep_dims=True)
    return tl.where(live, k - (top + low), 0.0), top - low


# y (B, R) from x = qkv (B, 3 R), row stride stride_x. A program owns SAMPLES samples and loops over STEP rows of A.
# WHOLE: R == BLOCK, so that no columns are padding. scale_log2e: log₂ e / τ.
@jit
@do_not_specialize("B")
def _outer_softmax_fwd_kernel(
    x_ptr, y_ptr, B, R, stride_x, scale_log2e,
    RESIDUAL: tl.constexpr, WHOLE: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    LANES_I: tl.constexpr, LANES_J: tl.constexpr,
):  # fmt: skip
    # int64: sample · stride exceeds 2**31 at 11 million samples with r = 64.
    samples = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)[:, None]
    x_ptr += samples * stride_x
    y_ptr += samples * R
    columns = tl.arange(0, BLOCK)[None, :]
    live = columns < R
    inside = (samples < B) & live
    k = tl.load(x_ptr + R + columns, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x_ptr + 2 * R + columns, mask=inside, other=0.0).to(tl.float32)
    k, half = _center(k, live)
    k = _deal(k, SAMPLES, BLOCK, LANES_J)[None, :, :, None, :]
    v = _deal(v, SAMPLES, BLOCK, LANES_J)[None, :, :, None, :]
    # 1 for A's columns, 0 beyond r, where k is 0 and the exponential is not.
    counts = _deal(tl.broadcast_to(live, (SAMPLES, BLOCK)).to(tl.float32), SAMPLES, BLOCK, LANES_J)
    counts = counts[None, :, :, None, :]
    for start in range(0, R, STEP):
        rows = start + tl.arange(0, STEP)[None, :]
        mask = (samples < B) & (rows < R)
        q = tl.load(x_ptr + rows, mask=mask, other=0.0).to(tl.float32) * scale_log2e
        top = tl.abs(q) * half
        q = _deal(q, SAMPLES, STEP, LANES_I)[:, None, :, :, None]
        top = _deal(top, SAMPLES, STEP, LANES_I)[:, None, :, :, None]
        e = tl.exp2(q * k - top)
        total = _over_columns(e if WHOLE else e * counts)
        y = _gather(_over_columns(e * v) / total, SAMPLES, STEP)
        if RESIDUAL:
            # Read again as rows, from the cache.
            y += tl.load(x_ptr + 2 * R + rows, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=mask)


# dx = (dq, dk, dv) (B, 3 R) from dy and x, with the forward kernel's layout; scale: 1/τ. A step holds whole rows of A:
# the row sums and y are recomputed from the exponentials that the gradients need, so that y is exact rather than
# rounded to 16 bits. Where a row has one large score, v_j − y cancels.
@jit
@do_not_specialize("B")
def _outer_softmax_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, B, R, stride_dy, stride_x, scale, scale_log2e,
    RESIDUAL: tl.constexpr, WHOLE: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    LANES_I: tl.constexpr, LANES_J: tl.constexpr,
):  # fmt: skip
    # int64 as in the forward kernel.
    samples = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)[:, None]
    x_ptr += samples * stride_x
    dy_ptr += samples * stride_dy
    dx_ptr += samples * (3 * R)
    columns = tl.arange(0, BLOCK)[None, :]
    live = columns < R
    inside = (samples < B) & live
    k = tl.load(x_ptr + R + columns, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x_ptr + 2 * R + columns, mask=inside, other=0.0).to(tl.float32)
    k, half = _center(k, live)
    k = _deal(k, SAMPLES, BLOCK, LANES_J)[None, :, :, None, :]
    v = _deal(v, SAMPLES, BLOCK, LANES_J)[None, :, :, None, :]
    counts = _deal(tl.broadcast_to(live, (SAMPLES, BLOCK)).to(tl.float32), SAMPLES, BLOCK, LANES_J)
    counts = counts[None, :, :, None, :]
    # Per row lane: lanes are reduced once, after the loop.
    dk = tl.zeros((BLOCK // LANES_J, SAMPLES, LANES_I, LANES_J), tl.float32)
    dv = tl.zeros((BLOCK // LANES_J, SAMPLES, LANES_I, LANES_J), tl.float32)
    for start in range(0, R, STEP):
        rows = start + tl.arange(0, STEP)[None, :]
        mask = (samples < B) & (rows < R)
        q = tl.load(x_ptr + rows, mask=mask, other=0.0).to(tl.float32) * scale_log2e
        dy = tl.load(dy_ptr + rows, mask=mask, other=0.0).to(tl.float32)
        top = _deal(tl.abs(q) * half, SAMPLES, STEP, LANES_I)[:, None, :, :, None]
        q = _deal(q, SAMPLES, STEP, LANES_I)[:, None, :, :, None]
        e = tl.exp2(q * k - top)
        share = 1.0 / _over_columns(e if WHOLE else e * counts)
        y = (_over_columns(e * v) * share)[:, None, :, :, None]
        # dy_i divided by the row sum turns exponentials into A's elements times dy_i. Rows beyond r have dy = 0;
        # columns beyond r are not stored, and add nothing to dq, as their k is 0.
        factor = _deal(dy, SAMPLES, STEP, LANES_I) * share
        w = factor[:, None, :, :, None]
        dv += tl.sum(e * w, 0)
        ds = e * (v - y)  # not yet multiplied by w
        dk += tl.sum(ds * (w * q), 0)
        # Σ_j ds_ij = 0: k and k' give the same dq.
        dq = _gather(_over_columns(ds * k) * factor, SAMPLES, STEP) * scale
        tl.store(dx_ptr + rows, dq.to(dx_ptr.dtype.element_ty), mask=mask)
    dk = _gather(tl.sum(dk, 2), SAMPLES, BLOCK) * LN2  # q holds q · scale · log₂ e
    dv = _gather(tl.sum(dv, 2), SAMPLES, BLOCK)
    if RESIDUAL:
        dv += tl.load(dy_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + R + columns, dk.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + 2 * R + columns, dv.to(dx_ptr.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(r: int, rows: int) -> tuple[dict[str, int], int]:
    """Samples per program, columns, rows per step, row lanes and column lanes; and warps.

    rows: A's rows per step and thread. A thread has 16 columns, for which k, v and in the backward pass two sums are in
    registers. With four row lanes, a sample with r = 64 takes 16 threads. A program is a single warp where possible, so
    that its threads exchange sums and distribute loads without a barrier.
    """
    block = max(4, next_power_of_2(r))
    lanes_j = max(1, block // 16)
    lanes_i = max(1, min(4, 256 // lanes_j))  # at most 8 warps: more would leave too few registers per thread
    warps = max(1, lanes_i * lanes_j // 32)
    samples = warps * 32 // (lanes_i * lanes_j)
    step = min(block, rows * lanes_i)
    return {"SAMPLES": samples, "BLOCK": block, "STEP": step, "LANES_I": lanes_i, "LANES_J": lanes_j}, warps


def _fwd_tile(r: int) -> tuple[dict[str, int], int]:
    return _tile(r, 4)


def _bwd_tile(r: int) -> tuple[dict[str, int], int]:
    # Two rows by 16 columns take 166 registers if available. Four rows would need 8 warps.
    return _tile(r, 2)


def _outer_softmax_fwd_fake(qkv: Tensor, temperature: float, residual: bool) -> Tensor:
    return qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)


@launcher(_outer_softmax_fwd_fake)
def _outer_softmax_fwd(qkv: Tensor, temperature: float, residual: bool) -> Tensor:
    y = _outer_softmax_fwd_fake(qkv, temperature, residual)
    if qkv.numel() == 0:
        return y
    x = view_rows(qkv)
    (B, W), stride = x.shape, x.stride(0)

    def plan() -> Plan:
        R = W // 3
        tile, warps = _fwd_tile(R)
        numbers = B, R, stride, LOG2E.value / temperature, residual, tile["BLOCK"] == R
        return cdiv(B, tile["SAMPLES"]), (*numbers, *tile.values()), {"num_warps": warps}

    launch(_outer_softmax_fwd_kernel, (B, W, stride, x.dtype, temperature, residual), (x, y), plan)
    return y


@launcher(dense_like_second)
def _outer_softmax_bwd(dy: Tensor, qkv: Tensor, temperature: float, residual: bool) -> Tensor:
    dx = dense_like(qkv)
    if qkv.numel() == 0:
        return dx
    dy, x = view_rows(dy), view_rows(qkv)
    B, W = x.shape
    strides = dy.stride(0), x.stride(0)

    def plan() -> Plan:
        R = W // 3
        tile, warps = _bwd_tile(R)
        numbers = B, R, *strides, 1 / temperature, LOG2E.value / temperature, residual, tile["BLOCK"] == R
        # 16 warps per multiprocessor instead of 12, at the cost of a few spilled numbers: 4 to 13 % faster on an H200.
        options = {"num_warps": warps, **register_limit(x.device, 128)}
        return cdiv(B, tile["SAMPLES"]), (*numbers, *tile.values()), options

    key = (B, W, strides, dy.dtype, x.dtype, temperature, residual)
    launch(_outer_softmax_bwd_kernel, key, (dy, x, dx), plan)
    return dx


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, ctx.temperature, ctx.residual = inputs
    ctx.save_for_backward(qkv)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None or not ctx.needs_input_grad[0]:
        return None, None, None
    return _outer_softmax_bwd(dy, *ctx.saved_tensors, ctx.temperature, ctx.residual), None, None


_outer_softmax = differentiable(_outer_softmax_fwd, _setup_context, _backward)


EXAMPLES = {
    "outer_softmax": Example("Softmax", ((256, 96),), outer_softmax),
}
