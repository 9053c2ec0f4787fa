"""Dynamic tanh, a stand-in for a norm without statistics: y = weight · tanh(alpha · x) + bias.

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
from tigon.ops.sum_rows import shares, sum_rows


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """weight · tanh(alpha · x) + bias, computed in fp32 and rounded once.

    Args:
        x: (..., N), any float dtype.
        alpha: one element, of shape (1,) or ().
        weight, bias: (N,), or None for 1 and 0. Their dtypes and alpha's may differ from x's.
    Returns: (..., N) in x's dtype, whatever the parameters have.
    Raises: ValueError for an alpha of more than one element, a weight or bias that is not (N,), a scalar x or a dtype
        that is not a float.

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
    # alpha, weight and bias are widened too: eager code in bf16 would round after each operation.
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.tanh(alpha.to(acc).view(()) * x.to(acc))
    if weight is not None:
        y = y * weight.to(acc)
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(x.dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
@do_not_specialize("M")
def _dyt_fwd_kernel(
    x_ptr, alpha_ptr, w_ptr, b_ptr, y_ptr, M, N, stride_xm, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # A flat grid over blocks of rows and of columns, the columns fastest: neighbours read neighbouring memory, and the
    # rows of a tile share one load of weight and bias.
    blocks = tl.cdiv(N, BLOCK_N)
    # Columns are cut as rows are: without a statistic no program needs a whole row.
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # No select is needed: tanh(0) = 0, and masked columns are not stored.
    mask = (rows < M)[:, None] & col_mask[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    # alpha is read on the device: a number of the host would be a synchronisation.
    # tanh by one exponential and a polynomial near 0, each to a few roundings of fp32: the slope that is dropped here
    # costs nothing.
    y, _ = tanh(x * tl.load(alpha_ptr).to(tl.float32))
    if w_ptr is not None:
        y *= tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    # y is dense, with N as its stride, whatever x's is.
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
@do_not_specialize("M", "P")
def _dyt_bwd_kernel(
    dy_ptr, x_ptr, alpha_ptr, w_ptr, dx_ptr, partial_ptr, db_ptr, dalpha_ptr, M, N, P, stride_dym, stride_xm,
    DW: tl.constexpr, DB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A persistent grid of P programs for each block of columns. Nothing is summed along a row, so that rows of any
    # width can be cut into blocks.
    blocks = tl.cdiv(N, BLOCK_N)
    # The share of the rows. Columns are the fast index, so that programs that run together read whole rows of memory.
    part = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    # Read once for all tiles of the program.
    alpha = tl.load(alpha_ptr).to(tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    # Three sums for every place of the tile: rows are added once, after the last tile.
    # 4096 places on 256 threads: 16 registers a thread for each sum. An unwanted sum is a constant 0, and compiled
    # away.
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    da = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(part, tl.cdiv(M, BLOCK_M), P, num_stages=STAGES):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (rows < M)[:, None] & col_mask[None, :]
        # With STAGES = 3 the next two tiles of x and dy are on their way into shared memory while this one is computed.
        # Masked places are 0 in both, and add 0 to every sum.
        x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        t, slope = tanh(x * alpha)
        if DW:
            dw += dy * t
        if DB:
            db += dy
        # y = w · t + b with t = tanh(α x), and so
        #     db = Σ dy,    dw = Σ dy · t,    dx = dy · w · α · (1 − t²),    dα = Σ dy · w · x · (1 − t²).
        # `slope` is 1 − t². Far from 0, where t rounds to ±1 and the difference would be 0, the exponential gives it.
        # The tanh is computed again: x is saved, t is not.
        slope *= dy
        if dalpha_ptr is not None:
            da += slope * x  # the weight, the same for every row, multiplies the sum at the end
        if dx_ptr is not None:
            dx = slope * alpha
            if w_ptr is not None:
                dx *= w[None, :]
            tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    # A row of partial sums for each program of a block of columns: fp32, added in a fixed order.
    # partial is (P, DW + DB, N). DW and DB are constants: with one of them the other's rows do not exist.
    sums = part.to(tl.int64) * N * (DW + DB) + cols
    if DW:
        tl.store(partial_ptr + sums, tl.sum(dw, 0), mask=col_mask)
    if DB:
        # A single part stores dW and dbias themselves: dbias to db_ptr, if both are wanted.
        db_ptrs = partial_ptr + N * DW + sums if db_ptr is None else db_ptr + cols
        tl.store(db_ptrs, tl.sum(db, 0), mask=col_mask)
    if dalpha_ptr is not None:
        by_column = tl.sum(da, 0)
        if w_ptr is not None:
            # dα = Σ w · Σ_rows slope · x: one multiplication a column, and not one an element.
            by_column *= w
        # One number a program, added in the launch that adds the rows: alpha's gradient is a sum over everything.
        tl.store(dalpha_ptr + tl.program_id(0), tl.sum(by_column, 0))


# --------------------------------------------------------------------------------------------------------- launches


def _columns(n: int) -> int:
    """Columns of a tile: the largest power of two, up to 1024, that leaves little of a row's last tile empty."""
    for block in (1024, 512, 256):
        # The tiles of a row may be an eighth wider than the row. Nothing is summed along a row, so no width has to be
        # padded to a power of two.
        if 8 * cdiv(n, block) * block <= 9 * n:
            return block
    return min(128, next_power_of_2(n))


def _fwd_tile(m: int, n: int, device: torch.device) -> tuple[int, int, int]:
    """Rows, columns and warps: several rows a tile, which read the weight once."""
    block_n = _columns(n)
    # A few rows leave multiprocessors idle. One row a tile then has no masked ones, whose tanh costs as much as others,
    # and narrow tiles give a thread 4 numbers instead of 32.
    if cdiv(m, 4096 // block_n) * cdiv(n, block_n) < multiprocessors(device):
        block_n = min(block_n, 256)
        return 1, block_n, max(1, block_n // 128)
    # 4096 numbers on 128 threads: four 16-byte loads a thread of 16-bit numbers.
    return 4096 // block_n, block_n, 4


def _whole_tile(m: int, n: int) -> tuple[int, int, int, int, int] | None:
    """As `_bwd_tile`, of one tile that holds all numbers, or None if there are too many."""
    # Its program has the whole of every sum, alpha's too, so that no launch adds shares. Up to 8192 columns: more take
    # one program longer than another launch takes. Rows are as many as usual, masked if need be: a number of rows is
    # not to compile a kernel.
    block_n = next_power_of_2(n)
    block_m = max(1, 4096 // block_n)
    return (block_m, block_n, 16, 1, 1) if block_n <= 8192 and m <= block_m else None


@functools.cache
def _bwd_tile(n: int, itemsize: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Rows, columns, warps, stages and programs a multiprocessor. Three sums stay in registers."""
    # A warp for 256 columns: a thread has 8 neighbours of each row, and both rows of a tile, so that the sums over rows
    # never leave it. Eight rows, or rows divided among warps, take half as long again on an H200.
    block_n = _columns(n)
    warps = max(1, block_n // 256)
    resident = 16 // warps
    # Without room for the prefetch, other programs of the multiprocessor still hide some loads.
    stages = 3 if resident * 4 * 2 * block_n * itemsize + 8192 <= shared_memory(device) else 1  # two inputs, two ahead
    return 2, block_n, warps, stages, resident


def _dyt_fwd_fake(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    # Dense whatever x's strides.
    return x.new_empty(x.shape)


@launcher("(Tensor x, Tensor alpha, Tensor? weight, Tensor? bias) -> Tensor", _dyt_fwd_fake)
def _dyt_fwd(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = _dyt_fwd_fake(x, alpha, weight, bias)
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
    # alpha's value is not in the key: the kernel loads it.
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


@launcher(
    "(Tensor dy, Tensor x, Tensor alpha, Tensor? weight, ScalarType? bias_dtype, bool need_dx, bool need_dalpha,"
    " bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor, Tensor)",
    _dyt_bwd_fake,
)
def _dyt_bwd(
    dy: Tensor, x: Tensor, alpha: Tensor, weight: Tensor | None, bias_dtype: torch.dtype | None, need_dx: bool,
    need_dalpha: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    empty = x.numel() == 0
    needs = need_dx, need_dalpha and empty, need_dw, need_db  # dalpha is allocated where it is summed
    dx, dalpha, dw, db = _dyt_bwd_fake(dy, x, alpha, weight, bias_dtype, *needs)
    if empty:
        return dx, dalpha.zero_(), dw.zero_(), db.zero_()
    x, dy, weight = view_rows(x), view_rows(dy), _dense(weight)
    M, N = x.shape
    strides = dy.stride(0), x.stride(0)
    block_m, block_n, warps, stages, resident = _whole_tile(M, N) or _bwd_tile(N, x.element_size(), x.device)
    columns = cdiv(N, block_n)
    # The grid fills the device: two programs a multiprocessor, divided among the blocks of columns. More parts would
    # only add rows of partial sums.
    parts = min(cdiv(M, block_m), max(1, resident * multiprocessors(x.device) // columns))
    sums = [t for t, needed in ((dw, need_dw), (db, need_db)) if needed]
    partial, second = shares(parts, *sums) if sums else (None, None)
    # A single program stores dalpha itself; of several each stores its share.
    alpha_shares = None
    if need_dalpha:
        dalpha = alpha.new_empty(alpha.shape)
        alpha_shares = None if parts * columns == 1 else x.new_empty(parts * columns, dtype=torch.float32)

    def plan() -> Plan:
        # A single tile has no next one to load ahead.
        arguments = (M, N, parts, *strides, need_dw, need_db, block_m, block_n, 1 if cdiv(M, block_m) == 1 else stages)
        return parts * columns, arguments, {"num_warps": warps}

    key = (M, N, strides, x.dtype, alpha.dtype, _dtype(weight), bias_dtype, need_dx, need_dalpha, need_dw, need_db)
    place = alpha_shares if alpha_shares is not None else dalpha if need_dalpha else None
    tensors = (dy, x, alpha, weight, dx if need_dx else None, partial, second, place)
    launch(_dyt_bwd_kernel, key, tensors, plan)
    if partial is not None and partial is not sums[0]:
        # alpha's shares, a few hundred numbers, are added in the launch of the others.
        together = () if alpha_shares is None else (alpha_shares, dalpha)
        sum_rows(partial, sums[0], sums[1] if len(sums) > 1 else None, *together)
    elif alpha_shares is not None:
        sum_rows(alpha_shares.unsqueeze(1), dalpha.view(1))
    return dx, dalpha, dw, db


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, alpha, weight, bias = inputs
    ctx.bias_dtype = _dtype(bias)
    # tanh(α x) is not saved: the backward pass computes it again from x, and a tensor of x's size less is kept.
    ctx.save_for_backward(x, alpha, weight)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    needs = ctx.needs_input_grad
    grads = _dyt_bwd(dy, *ctx.saved_tensors, ctx.bias_dtype, *needs)
    return tuple([g if needed else None for g, needed in zip(grads, needs, strict=True)])


_dyt = differentiable(_dyt_fwd, _setup_context, _backward)
