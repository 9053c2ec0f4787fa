"""Dynamic tanh, a replacement for normalization without statistics: y = weight · tanh(alpha · x) + bias.

Source: Zhu et al. 2025, Transformers without Normalization, https://arxiv.org/abs/2503.10622
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    check_tensors,
    dense_like,
    differentiable,
    do_not_specialize,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    shared_memory,
    tl,
    use_triton,
    view_rows,
)
from tigon.kernels.tiles.tanh import tanh
from tigon.ops.example import ROWS, WEIGHT, Example
from tigon.ops.sum_rows import shares, sum_rows


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """weight · tanh(alpha · x) + bias, computed in fp32 and rounded once.

    Args:
        x: (..., N), any float dtype.
        alpha: a single element, shape (1,) or ().
        weight, bias: (N,), or None for 1 and 0. Their dtypes and alpha's may differ from x's.
    Returns: (..., N) in x's dtype, regardless of the parameters' dtypes.
    Raises: ValueError for an alpha with several elements, a weight or bias that is not (N,), a scalar x or a non-float
        dtype.

    Replaces::

        y = weight * torch.tanh(alpha * x) + bias
    """
    if not x.dtype.is_floating_point or x.dim() == 0:
        raise ValueError(f"dyt: x must be (..., N) floats, got {tuple(x.shape)} {x.dtype}.")
    if not isinstance(alpha, Tensor) or alpha.numel() != 1:
        check_tensors("dyt", alpha=alpha)
        raise ValueError(f"dyt: alpha must have one element, got shape {tuple(alpha.shape)}.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and getattr(t, "shape", None) != x.shape[-1:]:
            check_tensors("dyt", **{name: t})
            raise ValueError(
                f"dyt: {name} must have shape {tuple(x.shape[-1:])}, the last dimension of x {tuple(x.shape)}, "
                f"got {tuple(t.shape)}."
            )
    if not use_triton(x, alpha, weight, bias):
        return dyt_reference(x, alpha, weight, bias)
    return _dyt(x, alpha, weight, bias)


def dyt_reference(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    # Widen alpha, weight and bias too: eager code in bf16 would round after each operation.
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.tanh(alpha.to(acc).view(()) * x.to(acc))
    if weight is not None:
        y = y * weight.to(acc)
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(x.dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


# One program computes BLOCK_M rows × BLOCK_N columns, columns fastest, so that concurrent programs read contiguous
# memory and a tile's rows share the loads of weight and bias.
# x (M, N) with stride_xm; alpha: a single element, read on the device to avoid a synchronization; w, b (N,) or None; y
# (M, N): dense.
# tanh uses an exponential, and a polynomial near 0, each accurate to a few fp32 roundings; the unused slope costs
# nothing.
@jit
@do_not_specialize("M")
def _dyt_fwd_kernel(
    x_ptr, alpha_ptr, w_ptr, b_ptr, y_ptr, M, N, stride_xm, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    blocks = tl.cdiv(N, BLOCK_N)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    # int64: row * stride reaches 2**31 at 512k tokens with width 4096.
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (rows < M)[:, None] & col_mask[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    y, _ = tanh(x * tl.load(alpha_ptr).to(tl.float32))
    if w_ptr is not None:
        y *= tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


# Persistent grid, P programs per column block: each program walks over row tiles, columns fastest, and keeps three sums
# per tile element in registers: 4096 elements on 256 threads are 16 registers per sum. Unneeded sums are constant 0 and
# compiled away.
# With t = tanh(α x): db = Σ dy, dw = Σ dy · t, dx = dy · w · α · (1 − t²), dα = Σ dy · w · x · (1 − t²). t is
# recomputed, only x is saved.
# dy, x: row strides; dx (M, N): dense, or None. partial (P, DW + DB, N) fp32: dw then db, if wanted; with P = 1 it is
# dw itself, and db_ptr is db. dalpha: a number per program, or dα itself.
# STAGES = 3 prefetches the next two tiles of x and dy into shared memory.
@jit
@do_not_specialize("M", "P")
def _dyt_bwd_kernel(
    dy_ptr, x_ptr, alpha_ptr, w_ptr, dx_ptr, partial_ptr, db_ptr, dalpha_ptr, M, N, P, stride_dym, stride_xm,
    DW: tl.constexpr, DB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK_N)
    part = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    alpha = tl.load(alpha_ptr).to(tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    da = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(part, tl.cdiv(M, BLOCK_M), P, num_stages=STAGES):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (rows < M)[:, None] & col_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        t, slope = tanh(x * alpha)
        if DW:
            dw += dy * t
        if DB:
            db += dy
        # slope is 1 − t², computed from the exponential: far from 0 t rounds to ±1, and the difference would be 0.
        slope *= dy
        if dalpha_ptr is not None:
            da += slope * x  # the weight multiplies the sum once, at the end
        if dx_ptr is not None:
            dx = slope * alpha
            if w_ptr is not None:
                dx *= w[None, :]
            tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    sums = part.to(tl.int64) * N * (DW + DB) + cols
    if DW:
        tl.store(partial_ptr + sums, tl.sum(dw, 0), mask=col_mask)
    if DB:
        db_ptrs = partial_ptr + N * DW + sums if db_ptr is None else db_ptr + cols
        tl.store(db_ptrs, tl.sum(db, 0), mask=col_mask)
    if dalpha_ptr is not None:
        by_column = tl.sum(da, 0)
        if w_ptr is not None:
            by_column *= w
        tl.store(dalpha_ptr + tl.program_id(0), tl.sum(by_column, 0))


# --------------------------------------------------------------------------------------------------------- launches


def _columns(n: int) -> int:
    """Return columns per tile: the largest power of two, up to 1024, that wastes little of a row's last tile."""
    for block in (1024, 512, 256):
        # A row's tiles may be an eighth wider than the row. Nothing is reduced along rows, so widths need no padding to
        # a power of two.
        if 8 * cdiv(n, block) * block <= 9 * n:
            return block
    return min(128, next_power_of_2(n))


def _fwd_tile(m: int, n: int, device: torch.device) -> tuple[int, int, int]:
    """Return rows, columns and warps: the rows in a tile share the weight's load."""
    block_n = _columns(n)
    # With few rows SMs are idle. A single row per tile then wastes no tanh on masked rows, and narrow tiles give a
    # thread 4 elements instead of 32.
    if cdiv(m, 4096 // block_n) * cdiv(n, block_n) < multiprocessors(device):
        block_n = min(block_n, 256)
        return 1, block_n, max(1, block_n // 128)
    return 4096 // block_n, block_n, 4


def _whole_tile(m: int, n: int) -> tuple[int, int, int, int, int] | None:
    """Return `_bwd_tile`'s values for a single tile that covers all elements, or None if there are too many."""
    # A single program holds the complete sums, including alpha's, and needs no second launch. Limited to 8192 columns:
    # more take a program longer than a launch. The row count is fixed and masked, so that row counts do not trigger
    # compilation.
    block_n = next_power_of_2(n)
    block_m = max(1, 4096 // block_n)
    return (block_m, block_n, 16, 1, 1) if block_n <= 8192 and m <= block_m else None


@functools.cache
def _bwd_tile(n: int, itemsize: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Return rows, columns, warps, stages and programs per SM. Three sums stay in registers."""
    # A warp per 256 columns: a thread has 8 neighbours in each row, and both rows, so that row sums stay in the thread.
    # Eight rows, or rows split over warps, take half as long again on an H200.
    block_n = _columns(n)
    warps = max(1, block_n // 256)
    resident = 16 // warps
    # Without shared memory for the prefetch, the SM's other programs still hide some loads.
    stages = 3 if resident * 4 * 2 * block_n * itemsize + 8192 <= shared_memory(device) else 1  # two inputs, two ahead
    return 2, block_n, warps, stages, resident


@launcher(dense_like)
def _dyt_fwd(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = dense_like(x)
    if y.numel() == 0:
        return y
    x = view_rows(x)
    M, N = x.shape
    stride = x.stride(0)

    def plan() -> Plan:
        block_m, block_n, warps = _fwd_tile(M, N, x.device)
        programs = cdiv(M, block_m) * cdiv(N, block_n)
        return programs, (M, N, stride, block_m, block_n), {"num_warps": warps}

    weight, bias = _dense(weight), _dense(bias)
    key = (M, N, stride, x.dtype, alpha.dtype, _dtype(weight), _dtype(bias))
    launch(_dyt_fwd_kernel, key, (x, alpha, weight, bias, y), plan)
    return y


def _dense(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.is_contiguous() else t.contiguous()


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _dyt_bwd_fake(
    dy: Tensor, x: Tensor, alpha: Tensor, weight: Tensor | None, bias_dtype: torch.dtype | None, need_dx: bool,
    need_dalpha: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    N = x.shape[-1]
    return (
        x.new_empty(x.shape if need_dx else 0),
        alpha.new_empty(alpha.shape if need_dalpha else 0),
        weight.new_empty(N) if need_dw and weight is not None else x.new_empty(0),
        x.new_empty(N, dtype=bias_dtype) if need_db else x.new_empty(0),
    )


@launcher(_dyt_bwd_fake)
def _dyt_bwd(
    dy: Tensor, x: Tensor, alpha: Tensor, weight: Tensor | None, bias_dtype: torch.dtype | None, need_dx: bool,
    need_dalpha: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    empty = x.numel() == 0
    needs = need_dx, need_dalpha and empty, need_dw, need_db  # dalpha is allocated below
    dx, dalpha, dw, db = _dyt_bwd_fake(dy, x, alpha, weight, bias_dtype, *needs)
    if empty:
        return dx, dalpha.zero_(), dw.zero_(), db.zero_()
    x, dy, weight = view_rows(x), view_rows(dy), _dense(weight)
    M, N = x.shape
    strides = dy.stride(0), x.stride(0)
    block_m, block_n, warps, stages, resident = _whole_tile(M, N) or _bwd_tile(N, x.element_size(), x.device)
    columns = cdiv(N, block_n)
    parts = min(cdiv(M, block_m), max(1, resident * multiprocessors(x.device) // columns))
    sums = [t for t, needed in ((dw, need_dw), (db, need_db)) if needed]
    partial, second = shares(parts, *sums) if sums else (None, None)
    alpha_shares = None
    if need_dalpha:
        dalpha = alpha.new_empty(alpha.shape)
        alpha_shares = None if parts * columns == 1 else x.new_empty(parts * columns, dtype=torch.float32)

    def plan() -> Plan:
        arguments = (M, N, parts, *strides, need_dw, need_db, block_m, block_n, 1 if cdiv(M, block_m) == 1 else stages)
        return parts * columns, arguments, {"num_warps": warps}

    key = (M, N, strides, x.dtype, alpha.dtype, _dtype(weight), bias_dtype, need_dx, need_dalpha, need_dw, need_db)
    place = alpha_shares if alpha_shares is not None else dalpha if need_dalpha else None
    tensors = (dy, x, alpha, weight, dx if need_dx else None, partial, second, place)
    launch(_dyt_bwd_kernel, key, tensors, plan)
    if partial is not None and partial is not sums[0]:
        together = () if alpha_shares is None else (alpha_shares, dalpha)
        sum_rows(partial, sums[0], sums[1] if len(sums) > 1 else None, *together)
    elif alpha_shares is not None:
        sum_rows(alpha_shares.unsqueeze(1), dalpha.view(1))
    return dx, dalpha, dw, db


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, alpha, weight, bias = inputs
    ctx.bias_dtype = _dtype(bias)
    ctx.save_for_backward(x, alpha, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    grads = _dyt_bwd(dy, *ctx.saved_tensors, ctx.bias_dtype, *needs)
    return tuple([g if needed else None for g, needed in zip(grads, needs, strict=True)])


_dyt = differentiable(_dyt_fwd, _setup_context, _backward)


EXAMPLES = {
    "dyt": Example("Norms", (ROWS, (1,), WEIGHT, WEIGHT), dyt),
}
