"""Layer normalisation: y = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias.

Source: Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.ops.sum_rows import sum_rows
from tigon.runtime import (
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
    row_groups,
    shared_memory,
    tl,
    use_triton,
)
from tigon.tiles.reduce import sum2

# One program holds a row up to this width; wider rows are read twice, block by block.
MAX_TILE = 16384
# Widths, from and to, of which the forward gives each row to a program of its own, for more of them to be resident;
# and those that it reads twice, in small blocks, where a row would be padded by a third.
ALONE = ((4097, 6144), (MAX_TILE, MAX_TILE))
TWICE = (8193, MAX_TILE - 1)
# Whether the backward of the widest rows asks for the next row while it is at work on this one.
AHEAD = True


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Shift each row of x to mean zero and scale it to unit variance, then scale by weight and shift by bias.

    Args:
        x: (..., N), any float dtype. Everything is computed in fp32 (fp64 for fp64). Rows that two strides describe,
            such as one head of a packed projection, are read where they lie.
        weight, bias: (N,), or None for no scale, no shift; either without the other. Their dtype may differ from x's.
        eps: added to the variance (of N, not N − 1), in squared units of x.
    Returns: (..., N) in x's dtype, rounded once, at the end; also where weight or bias is wider than x, which is what
        `F.layer_norm` does where it takes such a mixture (on the CPU; on CUDA it refuses).
    Raises: ValueError for a weight or bias that is not (N,), a scalar x or a dtype that is not a float.

    Replaces::

        y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"layer_norm: x must have a float dtype, got {x.dtype}.")
    shape = x.shape[-1:]
    if not shape:
        raise ValueError("layer_norm: x must have at least one dimension, got a scalar.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and getattr(t, "shape", None) != shape:
            check_tensors("layer_norm", **{name: t})
            raise ValueError(
                f"layer_norm: {name} must have shape {tuple(shape)}, the last dimension of x {tuple(x.shape)}, "
                f"got {tuple(t.shape)}."
            )
    if not use_triton(x, weight, bias):
        return layer_norm_reference(x, weight, bias, eps=eps)
    return _layer_norm(x, weight, bias, eps)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
@do_not_specialize("M")
def _layer_norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, inner, stride_xo, stride_xi, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The widest rows: a persistent grid, whose next rows are on their way while this one is summed and stored.
    cols = tl.arange(0, BLOCK_N)
    col_mask = (cols < N)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask
        # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
        x_at = (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi
        x = tl.load(x_ptr + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # The mean of the centred row corrects the rounding of the first mean. A row of equal numbers then has exactly
        # their mean.
        mean = tl.sum(x, 1) / N
        centred = tl.where(col_mask, x - mean[:, None], 0.0)
        left = tl.sum(centred, 1) / N
        # fma: with the squares beyond fp32, left² may be too. The difference of two infinities would be NaN, where an
        # infinite variance gives 1/std = 0 and finite numbers.
        rstd = tl.rsqrt(tl.maximum(tl.fma(left * -1.0, left, tl.sum(centred * centred, 1) / N), 0.0) + eps)
        mean += left
        # Both statistics are kept in fp32, 8 bytes a row, side by side: the backward pass reads them with one load.
        tl.store(stats_ptr + 2 * rows, mean, mask=row_mask)
        tl.store(stats_ptr + 2 * rows + 1, rstd, mask=row_mask)
        # x is subtracted before it is scaled: mean · rstd, taken out of the bracket, would round at the size of the
        # mean.
        y = (x - mean[:, None]) * rstd[:, None]
        if w_ptr is not None:
            y = y * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        if b_ptr is not None:
            y = y + tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@jit
def _fold(wide, narrow):
    """narrow plus the pieces of wide of its length: a row in two parts, added within threads before warps exchange."""
    return tl.sum(tl.reshape(wide, (wide.shape[0] // narrow.shape[0], narrow.shape[0])), 0) + narrow


@jit
def _scale_and_shift(x_ptr, w_ptr, b_ptr, y_ptr, cols, mask, mean, rstd):
    # The eviction policy makes this load differ from the first. The compiler would merge two equal loads, and keep the
    # row in registers in between.
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = (x - mean) * rstd
    if w_ptr is not None:
        y = y * tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y = y + tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
@do_not_specialize("M")
def _layer_norm_row_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, inner, stride_xo, stride_xi, eps,
    BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # One row a program, in one part or in two. Once the sums are known the row is read again, from the L1 cache. The
    # registers that do not hold it in between serve another program, which waits for memory while this one sums.
    row = tl.program_id(0)
    # int64: an output of 2**31 elements is 512k rows of 4096. From here on a row is addressed by columns alone, in
    # int32.
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    y_ptr += row.to(tl.int64) * N
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    # The two parts are added lane by lane first, so that one reduction between warps serves both.
    total = x
    if BLOCK_REST > 0:
        # A row of 12288 is 8192 + 4096: as one tile, a power of 2, it would be a quarter padding.
        rest = BLOCK_N + tl.arange(0, BLOCK_REST)
        x_rest = tl.load(x_ptr + rest, mask=rest < N, other=0.0).to(tl.float32)
        total = _fold(x, x_rest)
    mean = tl.sum(total, 0) / N
    # The mean of the centred row corrects the first mean, as in the kernel above; one exchange brings both sums.
    centred = tl.where(mask, x - mean, 0.0)
    squares = centred * centred
    if BLOCK_REST > 0:
        centred_rest = tl.where(rest < N, x_rest - mean, 0.0)
        squares = _fold(squares, centred_rest * centred_rest)
        centred = _fold(centred, centred_rest)
    left, square = tl.reduce((centred, squares), 0, _add_pairs)
    left = left / N
    rstd = tl.rsqrt(tl.maximum(tl.fma(left * -1.0, left, square / N), 0.0) + eps)
    mean += left
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, rstd)
    _scale_and_shift(x_ptr, w_ptr, b_ptr, y_ptr, cols, mask, mean, rstd)
    if BLOCK_REST > 0:
        _scale_and_shift(x_ptr, w_ptr, b_ptr, y_ptr, rest, rest < N, mean, rstd)


@jit
@do_not_specialize("M")
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A persistent grid: each program walks the rows with the grid's stride and keeps its share of dW and dbias in
    # registers. Masked columns need no further mask: dy is zero there, and is a factor of every term.
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < N
    # The weight is the same for every row: it stays in registers for the whole walk.
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    # A share for every row of the tile: rows are added once, at the end, and not in each step.
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask[None, :]
        dy_ptrs = dy_ptr + (rows // inner_dy).to(tl.int64) * stride_dyo + (rows % inner_dy).to(tl.int64) * stride_dyi
        # dy comes first: every result needs it, and with a bias alone wanted nothing else is read.
        dy = tl.load(dy_ptrs[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_DW or dx_ptr is not None:
            x_ptrs = x_ptr + (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi
            x = tl.load(x_ptrs[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            # Mean and 1/std lie side by side: one load of 8 bytes brings both.
            pair = rows[:, None] * 2 + tl.arange(0, 2)[None, :]
            mean, rstd = tl.split(tl.load(stats_ptr + pair, mask=row_mask[:, None], other=0.0))
            mean, rstd = mean[:, None], rstd[:, None]
            xhat = (x - mean) * rstd
        if NEED_DW:
            dw += dy * xhat
        if dx_ptr is not None:
            wdy = dy
            if w_ptr is not None:
                wdy = dy * w[None, :]
            # The two sums are the components of wdy along xhat and along the constant, which a norm cannot pass on.
            along, shift = sum2(wdy * xhat, wdy)
            dx = (wdy - shift[:, None] / N - xhat * (along[:, None] / N)) * rstd
            tl.store(dx_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_DB:
            db += dy
    if NEED_DW or NEED_DB:
        # A row of partial sums for each program; sum_rows adds them in a fixed order, without atomics.
        partial_ptr += tl.program_id(0).to(tl.int64) * (NEED_DW + NEED_DB) * N + cols
    if NEED_DW:
        tl.store(partial_ptr, tl.sum(dw, 0), mask=col_mask)
    if NEED_DB:
        tl.store(partial_ptr + NEED_DW * N, tl.sum(db, 0), mask=col_mask)


@jit
def _row_terms(dy_row, x_row, w_ptr, cols, mask, mean, rstd):
    dy = tl.load(dy_row + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
    xhat = (x - mean) * rstd
    if w_ptr is not None:
        dy = dy * tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    return dy * xhat, dy


@jit
def _row_gradients(
    dy_row, x_row, w_ptr, dx_ptr, cols, mask, mean, rstd, along, shift, dw, db,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
):  # fmt: skip
    # evict_first keeps this load from being merged with the first one. It is also true: nobody reads the row again.
    dy = tl.load(dy_row + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if NEED_DB:
        db += dy
    if NEED_DW or dx_ptr is not None:
        x = tl.load(x_row + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        xhat = (x - mean) * rstd
    if NEED_DW:
        dw += dy * xhat
    if dx_ptr is not None:
        if w_ptr is not None:
            # Unlike the row, the weight is read again for every row of the program: evict_last keeps it cached.
            dy = dy * tl.load(w_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dx = (dy - shift - xhat * along) * rstd
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    return dw, db


@jit
@do_not_specialize("M")
def _layer_norm_row_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
    SECTORS: tl.constexpr,
):  # fmt: skip
    # As above, for rows so wide that the sums of dW and dbias take half of all registers. The other half does not hold
    # the row while it is summed, so the row is read once more, from the L1 cache. A different eviction policy keeps the
    # compiler from merging the two loads; and it may move nothing out of the loop into a register (disable_licm).
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    # One row at a time: a share for each row of a tile, as in the kernel above, would not fit into registers.
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    if BLOCK_REST > 0:
        rest = BLOCK_N + tl.arange(0, BLOCK_REST)
        dw_rest = tl.zeros((BLOCK_REST,), tl.float32)
        db_rest = tl.zeros((BLOCK_REST,), tl.float32)
    # A sector of the cache is 32 bytes, 16 numbers of 16 bits: the least that a load brings in.
    if SECTORS > 0:
        sectors = tl.arange(0, SECTORS)
        seen = tl.zeros((SECTORS,), tl.float32)
    for r in tl.range(tl.program_id(0), M, tl.num_programs(0), loop_unroll_factor=1, disable_licm=True):
        # int64 by an addition: the loop variable itself is int32, as M is.
        row = r + tl.full((), 0, tl.int64)
        dy_row = dy_ptr + row // inner_dy * stride_dyo + row % inner_dy * stride_dyi
        x_row = x_ptr + row // inner * stride_xo + row % inner * stride_xi
        mean = tl.load(stats_ptr + 2 * row)
        rstd = tl.load(stats_ptr + 2 * row + 1)
        along = 0.0
        shift = 0.0
        if dx_ptr is not None:
            products, total = _row_terms(dy_row, x_row, w_ptr, cols, mask, mean, rstd)
            if SECTORS > 0:
                # Prefetch: loading one number of each sector of the next row brings the whole row into the cache, and
                # takes one register where the row would take sixteen.
                ahead = tl.minimum(row + tl.num_programs(0), M - 1)
                dy_ahead = dy_ptr + ahead // inner_dy * stride_dyo + ahead % inner_dy * stride_dyi + sectors * 16
                x_ahead = x_ptr + ahead // inner * stride_xo + ahead % inner * stride_xi + sectors * 16
                hint = tl.load(dy_ahead, mask=sectors * 16 < N, other=0.0).to(tl.float32)
                hint += tl.load(x_ahead, mask=sectors * 16 < N, other=0.0).to(tl.float32)
            if BLOCK_REST > 0:
                products_rest, total_rest = _row_terms(dy_row, x_row, w_ptr, rest, rest < N, mean, rstd)
                products = _fold(products, products_rest)
                total = _fold(total, total_rest)
            along, shift = tl.reduce((products, total), 0, _add_pairs)
            along = along / N
            shift = shift / N
        # An arithmetic with None would not compile: without dx there is no address to compute.
        dx_row = dx_ptr if dx_ptr is None else dx_ptr + row * N
        dw, db = _row_gradients(
            dy_row, x_row, w_ptr, dx_row, cols, mask, mean, rstd, along, shift, dw, db, NEED_DW, NEED_DB
        )
        if BLOCK_REST > 0:
            dw_rest, db_rest = _row_gradients(
                dy_row, x_row, w_ptr, dx_row, rest, rest < N, mean, rstd, along, shift, dw_rest, db_rest,
                NEED_DW, NEED_DB,
            )  # fmt: skip
        if SECTORS > 0 and dx_ptr is not None:
            seen = tl.maximum(seen, hint)
    if SECTORS > 0 and dx_ptr is not None:
        # The mask is never true, which the compiler cannot know. Without a use it would drop the prefetching loads.
        tl.store(stats_ptr + sectors, seen, mask=sectors + M < 0)
    if NEED_DW or NEED_DB:
        partial_ptr += tl.program_id(0).to(tl.int64) * (NEED_DW + NEED_DB) * N
    if NEED_DW:
        tl.store(partial_ptr + cols, dw, mask=mask)
        if BLOCK_REST > 0:
            tl.store(partial_ptr + rest, dw_rest, mask=rest < N)
    if NEED_DB:
        tl.store(partial_ptr + NEED_DW * N + cols, db, mask=mask)
        if BLOCK_REST > 0:
            tl.store(partial_ptr + NEED_DW * N + rest, db_rest, mask=rest < N)


@jit
@do_not_specialize("M")
def _layer_norm_wide_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, inner, stride_xo, stride_xi, eps,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    y_ptr += row.to(tl.int64) * N
    # Sums are taken about the mean of the first block, which lies within sqrt(N / BLOCK_N) standard deviations of the
    # row's mean, whatever the row holds. The difference of squares below therefore keeps its digits.
    cols = tl.arange(0, BLOCK_N)
    about = tl.sum(tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32), 0) / BLOCK_N
    total = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    # Lanes keep sums of their own: they meet once a row, and not once a block.
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        # Masked columns hold 0, not `about`: without the select each would add -about to the sums.
        x = tl.where(cols < N, x - about, 0.0)
        total += x
        squares += x * x
    shift = tl.sum(total, 0) / N
    mean = about + shift
    # fma: shift² is not rounded by itself. Never below 0: rounding could make the variance of equal numbers negative.
    rstd = tl.rsqrt(tl.maximum(tl.fma(shift * -1.0, shift, tl.sum(squares, 0) / N), 0.0) + eps)
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, rstd)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = (tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) - mean) * rstd
        if w_ptr is not None:
            y = y * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if b_ptr is not None:
            y = y + tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
@do_not_specialize("M")
def _layer_norm_wide_dx_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dy_ptr += (row // inner_dy).to(tl.int64) * stride_dyo + (row % inner_dy).to(tl.int64) * stride_dyi
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    dx_ptr += row.to(tl.int64) * N
    mean = tl.load(stats_ptr + 2 * row)
    rstd = tl.load(stats_ptr + 2 * row + 1)
    products = tl.zeros((BLOCK_N,), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy = dy * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += dy
        # x − mean is scaled by rstd once, after the sum, and not element by element.
        products += dy * (tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) - mean)
    # rstd twice: once for the xhat of the sum, once for that of dx below.
    along = tl.sum(products, 0) * rstd * rstd / N
    shift = tl.sum(total, 0) / N
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy = dy * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        dx = (dy - shift - (x - mean) * along) * rstd
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


@jit
@do_not_specialize("M")
def _layer_norm_wide_dw_kernel(
    dy_ptr, x_ptr, stats_ptr, partial_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi, P,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Column blocks are the slow index: programs that run together read neighbouring rows of the same columns.
    part = tl.program_id(0) % P
    cols = tl.program_id(0) // P * BLOCK_N + tl.arange(0, BLOCK_N)
    # dW and dbias need columns only, dx whole rows: in kernels of their own, neither holds what the other sums.
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    # A fixed set of rows in a fixed order: the same bits on every run.
    for r in range(part, M, P):
        row = r + tl.full((), 0, tl.int64)
        dy_at = row // inner_dy * stride_dyo + row % inner_dy * stride_dyi
        dy = tl.load(dy_ptr + dy_at + cols, mask=cols < N, other=0.0).to(tl.float32)
        if NEED_DB:
            db += dy
        if NEED_DW:
            x_at = row // inner * stride_xo + row % inner * stride_xi
            x = tl.load(x_ptr + x_at + cols, mask=cols < N, other=0.0).to(tl.float32)
            dw += dy * ((x - tl.load(stats_ptr + 2 * row)) * tl.load(stats_ptr + 2 * row + 1))
    partial_ptr += part.to(tl.int64) * (NEED_DW + NEED_DB) * N + cols
    if NEED_DW:
        tl.store(partial_ptr, dw, mask=cols < N)
    if NEED_DB:
        tl.store(partial_ptr + NEED_DW * N, db, mask=cols < N)


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(n: int, itemsizes: tuple[int, ...], shared: int) -> tuple[int, int, int, int]:
    """Rows a tile, columns a tile, warps and stages.

    Narrow rows share a tile, so that every warp has 16-byte loads to make; each further warp makes the three sums
    dearer. With the widest rows the next row is on its way if shared memory holds two of everything that is loaded: the
    compiler buffers weight and bias too. itemsizes: bytes an element of x, weight and bias.
    """
    block_n = next_power_of_2(n)
    # Narrower rows have other programs beside them, which hide their loads.
    stages = 3 if block_n > 8192 and 2 * block_n * sum(itemsizes) + 8192 <= shared else 1
    return max(1, 2048 // block_n), block_n, 4 if n <= 5120 else 8 if n <= 12288 else 16, stages


def _row_tile(n: int) -> tuple[int, int, int]:
    """Columns of a row's two parts, and warps.

    A tile is a power of 2, which 12288 is not, but 8192 + 4096 wastes no lane. The second part is empty where it would
    be as large as the first. Every thread has 16-byte loads to make in both parts.
    """
    block_n = next_power_of_2(n)
    warps = 4 if n <= 5120 else 8 if n <= 8192 else 16
    rest = max(next_power_of_2(n - block_n // 2), 256 * warps)
    return (block_n // 2, rest, warps) if rest < block_n // 2 else (block_n, 0, warps)


def _bwd_tile(n: int, x: Tensor) -> tuple[int, int, int, int, int]:
    """Rows, columns, warps, stages, programs a multiprocessor.

    One program computes a tile while its next two are loaded: 2 inputs · 3 stages · 16 KiB of shared memory. There is
    no prefetch where that does not fit, or where a row is so wide that registers are short. A row that leaves much of a
    power of 2 empty loads less and sums more: such tiles hold one row, with one more stage.
    """
    block_n = next_power_of_2(n)
    if 4 * n <= 3 * block_n and 4096 <= block_n <= 8192 and x.element_size() == 2:
        warps, programs = (4, 2) if block_n == 4096 else (8, 1)
        if programs * (2 * 4 * 2 * block_n + 1024) <= shared_memory(x.device):
            return 1, block_n, warps, 4, programs
    # 16 KiB a tile, whatever the width: as many loads on their way, narrow rows or wide.
    block_m = max(1, 16384 // x.element_size() // block_n)
    tile_bytes = block_m * block_n * x.element_size()
    stages = 3 if tile_bytes <= 16384 and 6 * tile_bytes + 4096 <= shared_memory(x.device) else 1
    return block_m, block_n, 8 if tile_bytes <= 16384 else 16, stages, 1


def _layer_norm_fwd_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((x.numel() // max(1, x.shape[-1]), 2), dtype=torch.float32)


@launcher("(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)", _layer_norm_fwd_fake)
def _layer_norm_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, stats = _layer_norm_fwd_fake(x, weight, bias, eps)
    if x.numel() == 0:
        return y, stats
    M, N = stats.shape[0], x.shape[-1]
    x, *strides = row_groups(x)
    weight = weight if weight is None else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()

    alone = any(least <= N <= most for least, most in ALONE)
    twice = TWICE[0] <= N <= TWICE[1]

    def plan() -> Plan:
        arguments = (M, N, *strides, eps)
        if N > MAX_TILE:
            return M, (*arguments, 8192), {"num_warps": 16}
        if twice:
            return M, (*arguments, 2048), {"num_warps": 8}
        if alone:
            *parts, warps = _row_tile(N)
            return M, (*arguments, *parts), {"num_warps": warps}
        itemsizes = tuple(t.element_size() for t in (x, weight, bias) if t is not None)
        block_m, block_n, warps, stages = _fwd_tile(N, itemsizes, shared_memory(x.device))
        # One program a tile, or, with a prefetch, one a multiprocessor, which walks.
        grid = cdiv(M, block_m) if stages == 1 else min(cdiv(M, block_m), multiprocessors(x.device))
        return grid, (*arguments, block_m, block_n, stages), {"num_warps": warps}

    kernel = _layer_norm_row_fwd_kernel if alone else _layer_norm_fwd_kernel
    if N > MAX_TILE or twice:
        kernel = _layer_norm_wide_fwd_kernel
    dtypes = (x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    launch(kernel, (M, N, *strides, dtypes, eps), (x, weight, bias, y, stats), plan)
    return y, stats


def _layer_norm_bwd_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, need_dx: bool, need_dw: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    dw = torch.empty_like(weight) if need_dw and weight is not None else x.new_empty(0)
    return dx, dw, torch.empty_like(bias) if need_db and bias is not None else x.new_empty(0)


@launcher(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, bool need_dx, bool need_dw, bool need_db)"
    " -> (Tensor, Tensor, Tensor)",
    _layer_norm_bwd_fake,
)
def _layer_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw, db = _layer_norm_bwd_fake(dy, x, weight, bias, stats, need_dx, need_dw, need_db)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    M, N = stats.shape[0], x.shape[-1]
    dy, *dy_strides = row_groups(dy)
    x, *x_strides = row_groups(x)
    weight = weight if weight is None else weight.contiguous()
    out_dx = dx if need_dx else None
    arguments: tuple[Any, ...] = (M, N, *dy_strides, *x_strides)
    dtypes = (dy.dtype, x.dtype, None if weight is None else weight.dtype)
    key = (arguments, dtypes, need_dx, need_dw, need_db)
    halves = need_dw + need_db
    partial: Tensor | None = None
    if N * x.element_size() <= 2 * MAX_TILE:  # registers hold the row and its gradient: half as many columns in fp32
        block_m, block_n, warps, stages, each = _bwd_tile(N, x)
        # As many programs as run at a time: each has a row of partial sums, which are traffic too.
        programs = min(cdiv(M, block_m), each * multiprocessors(x.device))
        if halves:
            partial = x.new_empty((programs, halves, N), dtype=torch.float32)

        # Beyond 8192 columns the sums of dW and dbias leave no registers to hold the row.
        by_row = block_n > 8192

        def plan() -> Plan:
            tile = (*_row_tile(N)[:2], block_n // 16 * AHEAD) if by_row else (block_m, block_n, stages)
            return programs, (*arguments, need_dw, need_db, *tile), {"num_warps": warps}

        kernel = _layer_norm_row_bwd_kernel if by_row else _layer_norm_bwd_kernel
        launch(kernel, key, (dy, x, weight, stats, out_dx, partial), plan)
    else:
        if need_dx:
            # dx and the sums read dy and x once each: together, a wide row would leave no registers for the sums.
            tensors = (dy, x, weight, stats, dx)
            launch(_layer_norm_wide_dx_kernel, key, tensors, lambda: (M, (*arguments, 8192), {"num_warps": 16}))
        if halves:
            # Columns alone are too few programs for wide rows: rows are shared out as well, among four a
            # multiprocessor.
            columns = cdiv(N, 1024)
            programs = min(M, max(1, 4 * multiprocessors(x.device) // columns))
            partial = x.new_empty((programs, halves, N), dtype=torch.float32)
            slices = programs * columns, (*arguments, programs, need_dw, need_db, 1024), {"num_warps": 4}
            launch(_layer_norm_wide_dw_kernel, key, (dy, x, stats, partial), lambda: slices)
    if halves:
        sum_rows(partial, dw if need_dw else db, db if need_dw and need_db else None)  # type: ignore[arg-type]
    return dx, dw, db


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, bias, output[1])


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    dx, dw, db = _layer_norm_bwd(dy, *ctx.saved_tensors, need_dx, need_dw, need_db)
    return dx if need_dx else None, dw if need_dw else None, db if need_db else None, None


_layer_norm = differentiable(_layer_norm_fwd, _setup_context, _backward)
