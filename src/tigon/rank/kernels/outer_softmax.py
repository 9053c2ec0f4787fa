"""Attention between the r numbers of a row: y = A v, A = softmax(q kᵀ / τ) of shape (r, r), one for each row.

A is never in memory, forward or backward, and nothing but the input is kept for the backward pass.

The softmax does not change when k is shifted. From k' = k − (max k + min k) / 2 the largest score of row i of A is
|q_i| h / τ, with h = (max k − min k) / 2: no pass over the scores looks for it.

Source: Residual DCN of LiRank, Borisyuk et al. 2024, https://arxiv.org/abs/2402.06859, section 3.2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
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

# The widest A: a tile has all of its columns, 16 a thread on 8 warps.
MAX_RANK = 4096


def outer_softmax(qkv: Tensor, temperature: float = 1.0, *, residual: bool = False) -> Tensor:
    """softmax(q kᵀ / temperature) v for each row, with q, k and v its three thirds. fp32, rounded once.

    Args:
        qkv: (..., 3r), any float dtype, r up to 4096: one projection, q before k before v.
        temperature: τ > 0, which divides the products q_i k_j.
        residual: add v, as LiRank's cross layer does. Its gradient is added in the same pass.
    Returns: (..., r) in qkv's dtype.
    Raises: ValueError for a last dimension that 3 does not divide or that is longer than 3 · 4096, a dtype that is not
        a float, and a temperature that is not positive.

    Nothing but qkv is kept for the backward pass, and its gradient is one tensor: no cat of three. Arithmetic is r²
    exponentials a row forward, and as many backward. A row of an infinite k is NaN.

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
# A tile is (I, J, S, LI, LJ): S samples, and of each the rows ri · LI + li of A and its columns rj · LJ + lj. Triton
# deals the last dimensions to threads, so that S · LI · LJ is the number of threads, and a thread has I rows and J
# columns in registers. Sums over I and J stay in the thread; what crosses threads is a number for each row and each
# column, and not one for each element: r²/LJ + r²/LI and less, instead of r² exchanges. Of a tile in Triton's usual
# two dimensions the exchanges take longer than the exponentials.


@jit
def _dealt(x, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """(S, BLOCK), as it was read, as (BLOCK / LANES, S, LANES): rows or columns of tiles."""
    return tl.permute(tl.reshape(x, (SAMPLES, BLOCK // LANES, LANES)), (1, 0, 2))


@jit
def _gathered(x, SAMPLES: tl.constexpr, BLOCK: tl.constexpr):
    """The way back, for a store."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (SAMPLES, BLOCK))


@jit
def _over_columns(tile):
    # Dimension 1 first, which is in registers: one number for each row and thread is left to exchange.
    return tl.sum(tl.sum(tile, 1), 3)


@jit
def _centred(k, live):
    """k less the middle of its range, and half of the range: (S, BLOCK) and (S, 1). Columns beyond r get 0."""
    # Halves: the sum of two large numbers of one sign is infinite.
    top = 0.5 * tl.max(tl.where(live, k, float("-inf")), 1, keep_dims=True)
    low = 0.5 * tl.min(tl.where(live, k, float("inf")), 1, keep_dims=True)
    return tl.where(live, k - (top + low), 0.0), top - low


@jit
@do_not_specialize("B")
def _outer_softmax_fwd_kernel(
    x_ptr, y_ptr, B, R, stride_x, scale_log2e,
    RESIDUAL: tl.constexpr, WHOLE: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    LANES_I: tl.constexpr, LANES_J: tl.constexpr,
):  # fmt: skip
    # int64: sample · stride exceeds 2**31 at 11 million samples of r = 64.
    samples = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)[:, None]
    x_ptr += samples * stride_x
    y_ptr += samples * R
    columns = tl.arange(0, BLOCK)[None, :]
    live = columns < R
    inside = (samples < B) & live
    k = tl.load(x_ptr + R + columns, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x_ptr + 2 * R + columns, mask=inside, other=0.0).to(tl.float32)
    k, half = _centred(k, live)
    k = _dealt(k, SAMPLES, BLOCK, LANES_J)[None, :, :, None, :]
    v = _dealt(v, SAMPLES, BLOCK, LANES_J)[None, :, :, None, :]
    # 1 for a column of A, 0 for one beyond r: its k is 0, whose exponential is not.
    counts = _dealt(tl.broadcast_to(live, (SAMPLES, BLOCK)).to(tl.float32), SAMPLES, BLOCK, LANES_J)
    counts = counts[None, :, :, None, :]
    # Rows beyond r end the loop, as far as they fill steps.
    for start in range(0, R, STEP):
        rows = start + tl.arange(0, STEP)[None, :]
        mask = (samples < B) & (rows < R)
        q = tl.load(x_ptr + rows, mask=mask, other=0.0).to(tl.float32) * scale_log2e
        top = tl.abs(q) * half
        q = _dealt(q, SAMPLES, STEP, LANES_I)[:, None, :, :, None]
        top = _dealt(top, SAMPLES, STEP, LANES_I)[:, None, :, :, None]
        e = tl.exp2(q * k - top)
        total = _over_columns(e if WHOLE else e * counts)
        y = _gathered(_over_columns(e * v) / total, SAMPLES, STEP)
        if RESIDUAL:
            # Read a second time, as rows, from the cache.
            y += tl.load(x_ptr + 2 * R + rows, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
@do_not_specialize("B")
def _outer_softmax_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, B, R, stride_dy, stride_x, scale, scale_log2e,
    RESIDUAL: tl.constexpr, WHOLE: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    LANES_I: tl.constexpr, LANES_J: tl.constexpr,
):  # fmt: skip
    # A step has whole rows of A: their sums and y are computed again from the exponentials that the gradients need, so
    # that y is exact, and not what was left of it in 16 bits. Where a row has one large score, v_j − y cancels.
    # int64 as in the forward.
    samples = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)[:, None]
    x_ptr += samples * stride_x
    dy_ptr += samples * stride_dy
    dx_ptr += samples * (3 * R)
    columns = tl.arange(0, BLOCK)[None, :]
    live = columns < R
    inside = (samples < B) & live
    k = tl.load(x_ptr + R + columns, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x_ptr + 2 * R + columns, mask=inside, other=0.0).to(tl.float32)
    k, half = _centred(k, live)
    k = _dealt(k, SAMPLES, BLOCK, LANES_J)[None, :, :, None, :]
    v = _dealt(v, SAMPLES, BLOCK, LANES_J)[None, :, :, None, :]
    counts = _dealt(tl.broadcast_to(live, (SAMPLES, BLOCK)).to(tl.float32), SAMPLES, BLOCK, LANES_J)
    counts = counts[None, :, :, None, :]
    # By lane of rows: lanes meet once, behind the loop.
    dk = tl.zeros((BLOCK // LANES_J, SAMPLES, LANES_I, LANES_J), tl.float32)
    dv = tl.zeros((BLOCK // LANES_J, SAMPLES, LANES_I, LANES_J), tl.float32)
    for start in range(0, R, STEP):
        rows = start + tl.arange(0, STEP)[None, :]
        mask = (samples < B) & (rows < R)
        q = tl.load(x_ptr + rows, mask=mask, other=0.0).to(tl.float32) * scale_log2e
        dy = tl.load(dy_ptr + rows, mask=mask, other=0.0).to(tl.float32)
        top = _dealt(tl.abs(q) * half, SAMPLES, STEP, LANES_I)[:, None, :, :, None]
        q = _dealt(q, SAMPLES, STEP, LANES_I)[:, None, :, :, None]
        e = tl.exp2(q * k - top)
        share = 1.0 / _over_columns(e if WHOLE else e * counts)
        y = (_over_columns(e * v) * share)[:, None, :, :, None]
        # dy_i over the row's sum turns exponentials into A's elements times dy_i. Rows beyond r have dy = 0; columns
        # beyond r are not stored, and add nothing to dq, as their k is 0.
        factor = _dealt(dy, SAMPLES, STEP, LANES_I) * share
        w = factor[:, None, :, :, None]
        dv += tl.sum(e * w, 0)
        ds = e * (v - y)  # over w
        dk += tl.sum(ds * (w * q), 0)
        # Σ_j ds_ij = 0: dq is the same of k and of k'.
        dq = _gathered(_over_columns(ds * k) * factor, SAMPLES, STEP) * scale
        tl.store(dx_ptr + rows, dq.to(dx_ptr.dtype.element_ty), mask=mask)
    dk = _gathered(tl.sum(dk, 2), SAMPLES, BLOCK) * LN2  # of q · scale · log₂ e
    dv = _gathered(tl.sum(dv, 2), SAMPLES, BLOCK)
    if RESIDUAL:
        dv += tl.load(dy_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + R + columns, dk.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + 2 * R + columns, dv.to(dx_ptr.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(r: int, rows: int) -> tuple[dict[str, int], int]:
    """Samples a program, columns, rows a step, lanes of rows and of columns; and warps.

    rows: of A, in a step and thread. A thread has 16 columns of each, for which k, v and backward two sums are in
    registers. With four lanes of rows, a sample of r = 64 is 16 threads. A program is a warp where that can be: its
    threads exchange sums, and deal what they read, behind no barrier.
    """
    block = max(4, next_power_of_2(r))
    lanes_j = max(1, block // 16)
    lanes_i = max(1, min(4, 256 // lanes_j))  # 8 warps at most: more would leave a thread too few registers
    warps = max(1, lanes_i * lanes_j // 32)
    samples = warps * 32 // (lanes_i * lanes_j)
    step = min(block, rows * lanes_i)
    return {"SAMPLES": samples, "BLOCK": block, "STEP": step, "LANES_I": lanes_i, "LANES_J": lanes_j}, warps


def _fwd_tile(r: int) -> tuple[dict[str, int], int]:
    return _tile(r, 4)


def _bwd_tile(r: int) -> tuple[dict[str, int], int]:
    # Two rows of 16 columns, which take 166 registers where they are given. With four rows it would be 8 warps.
    return _tile(r, 2)


def _outer_softmax_fwd_fake(qkv: Tensor, temperature: float, residual: bool) -> Tensor:
    return qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)


@launcher("(Tensor qkv, float temperature, bool residual) -> Tensor", _outer_softmax_fwd_fake)
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


def _outer_softmax_bwd_fake(dy: Tensor, qkv: Tensor, temperature: float, residual: bool) -> Tensor:
    return qkv.new_empty(qkv.shape)


@launcher("(Tensor dy, Tensor qkv, float temperature, bool residual) -> Tensor", _outer_softmax_bwd_fake)
def _outer_softmax_bwd(dy: Tensor, qkv: Tensor, temperature: float, residual: bool) -> Tensor:
    dx = _outer_softmax_bwd_fake(dy, qkv, temperature, residual)
    if qkv.numel() == 0:
        return dx
    dy, x = view_rows(dy), view_rows(qkv)
    B, W = x.shape
    strides = dy.stride(0), x.stride(0)

    def plan() -> Plan:
        R = W // 3
        tile, warps = _bwd_tile(R)
        numbers = B, R, *strides, 1 / temperature, LOG2E.value / temperature, residual, tile["BLOCK"] == R
        # 16 warps a multiprocessor in place of 12, for a few numbers on the stack: 4 to 13 % faster on an H200.
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
