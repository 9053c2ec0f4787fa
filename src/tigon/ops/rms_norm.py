"""Root-mean-square normalisation: y = x / sqrt(mean(x²) + eps) · (offset + weight).

Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467

`add_rms_norm` runs the same kernels with r_ptr, the residual, and s_ptr, the sum x + r that the norm is taken from.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    check_no_shape,
    check_tensors,
    differentiable,
    do_not_specialize,
    empty_rows,
    in_order,
    jit,
    launch,
    launcher,
    memory_order,
    multiprocessors,
    next_power_of_2,
    row_groups,
    shared_memory,
    tl,
    use_triton,
)
from tigon.kernels.tiles.reduce import sum2
from tigon.ops.example import ROWS, WEIGHT, Example
from tigon.ops.sum_rows import shares, spread, sum_rows

Cast = Literal["llama", "gemma", "none"]
CASTS = get_args(Cast)
# Widest row that a tile holds in registers; wider rows are read twice, block by block.
MAX_TILE = 16384


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    cast: Cast = "llama",
) -> Tensor:
    """Scale each row of x to unit root mean square, then by weight.

    Args:
        x: (..., N), any float dtype and strides: one head of a packed projection is read in place. Statistics are fp32
            (fp64 for fp64).
        weight: (N,), or None for no scale.
        eps: added to the mean square, in squared units of x. None, as in torch: the machine epsilon of fp32, 1.2e-7, or
            of fp64 for fp64.
        offset: added to weight; Gemma stores weight − 1 and uses 1.0. Without a weight, unless 0, the factor itself.
        cast: where the result is rounded, as the model families write it:
            "llama"  x·rstd is rounded to x's dtype, then scaled; the result has the promoted dtype of x and weight.
            "gemma"  everything in fp32, rounded once, to x's dtype. Also what torch.nn.RMSNorm does.
            "none"   everything in fp32, rounded once, to the promoted dtype of x and weight.
    Returns: (..., N), in x's memory order.
    Raises: ValueError for a weight that is not (N,), an unknown cast, a scalar x or a dtype that is not a float.

    Replaces (cast="llama")::

        variance = x.float().pow(2).mean(-1, keepdim=True)
        y = weight * (x.float() * torch.rsqrt(variance + eps)).to(x.dtype)
    """
    _check("rms_norm", x, weight, cast)
    if eps is None:
        eps = default_eps(x.dtype)
    if not use_triton(x, weight):
        return rms_norm_reference(x, weight, eps=eps, offset=offset, cast=cast)
    return _rms_norm(x, weight, eps, offset, cast)


def default_eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _check(name: str, x: Tensor, weight: Tensor | None, cast: str) -> None:
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name}: x must have a float dtype, got {x.dtype}.")
    if x.dim() == 0:
        raise ValueError(f"{name}: x must have at least one dimension, got a scalar.")
    if cast not in CASTS:
        raise ValueError(f"{name}: cast must be one of {CASTS}, got {cast!r}.")
    if weight is not None and getattr(weight, "shape", None) != x.shape[-1:]:
        check_no_shape(name, weight)
        check_tensors(name, weight=weight)
        raise ValueError(
            f"{name}: weight must have shape {tuple(x.shape[-1:])}, the last dimension of x {tuple(x.shape)}, "
            f"got {tuple(weight.shape)}."
        )


def rms_norm_reference(
    x: Tensor, weight: Tensor | None = None, *, eps: float | None = None, offset: float = 0.0, cast: str = "llama"
) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    x32 = x.to(acc)
    eps = default_eps(x.dtype) if eps is None else eps
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if cast == "llama":
        y = y.to(x.dtype)
        if weight is not None and not offset:
            return in_order(weight * y, x)  # PyTorch multiplies bf16 in fp32 and rounds once
    if weight is not None:
        # At least fp32: bf16 + offset would be rounded before the scaling. An fp64 weight stays fp64.
        w = weight.to(torch.promote_types(weight.dtype, torch.float32))
        y = y * (w + offset if offset else w)
    elif offset:
        y = y * offset
    return in_order(y.to(_out_dtype(x.dtype, weight, cast)), x)


def _out_dtype(dtype: torch.dtype, weight: Tensor | None, cast: str) -> torch.dtype:
    if weight is None or cast == "gemma" or weight.dtype == dtype:
        return dtype
    return torch.promote_types(dtype, weight.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


# A program: BLOCK_M whole rows in registers, so memory is read once.
#   x, r     input and optional residual, (M, N); row i starts at (i // inner) · stride_o + (i % inner) · stride_i, with
#            separate strides for x (xo, xi) and r (ro, ri)
#   s, y     rounded sum x + r, and its norm; dense, row i starts at i · N
#   w        weight (N,) or None; offset is added in fp32, since bf16 1 + w would drop most bits of a small w. Without
#            a weight it is the factor
#   rstd     None, or (M,): saved only for rows too wide for the backward to recompute beside dW
#   ROUND    Llama's order: x · rstd is rounded to x's dtype before the weight scales it
@jit
@do_not_specialize("M")
def _rms_norm_fwd_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, M, N, inner, stride_xo, stride_xi, inner_r, stride_ro, stride_ri,
    eps, offset, ROUND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
    x_at = (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi
    y_at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if r_ptr is not None:
        r_at = (rows // inner_r).to(tl.int64) * stride_ro + (rows % inner_r).to(tl.int64) * stride_ri
        x += tl.load(r_ptr + r_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # The sum is rounded before the norm, as two separate steps would do; the backward reads the rounded sum.
        total = x.to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + y_at, total, mask=mask)
        x = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    y = x * rstd[:, None]
    if ROUND:
        y = y.to(x_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty).to(tl.float32)
    if w_ptr is not None:
        y = y * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
    else:
        y = y * offset
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


# Persistent grid: a program takes every num_programs-th tile of BLOCK_M rows, with all columns, and keeps a partial dW
# in registers.
#   dy, ds, x   upstream gradients of y and of the residual sum (None without one), and the input; each has strides as
#               in the forward pass
#   rstd        None: recomputed from the row in registers. Otherwise the saved (M,), which lets xhat and dW start
#               before the row sum: registers are short
#   dx          dense, in x's memory order; None if not needed
#   dw          (programs, N) fp32 partial sums, added by sum_rows in a fixed order without atomics. A single program
#               writes dW itself, in dW's dtype
#   RELOAD      the widest rows leave no registers for the weight: load it from L1 for every row
#   STAGES      tiles prefetched into shared memory: with a single program per SM nothing else hides load latency
# dx = (wdy − xhat · mean(wdy · xhat)) · rstd, dW = Σ dy · xhat over rows.
@jit
@do_not_specialize("M")
def _rms_norm_bwd_kernel(
    dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, M, N, inner_dy, stride_dyo, stride_dyi, inner_ds,
    stride_dso, stride_dsi, inner, stride_xo, stride_xi, eps, offset,
    ROUND: tl.constexpr, RELOAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < N
    if w_ptr is not None and not RELOAD:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & col_mask[None, :]
        x_at = (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi
        dy_at = (rows // inner_dy).to(tl.int64) * stride_dyo + (rows % inner_dy).to(tl.int64) * stride_dyi
        # Columns beyond N need no mask below: x and dy are 0 there, and every term contains x or dy.
        x = tl.load(x_ptr + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if ds_ptr is not None:
            ds_at = (rows // inner_ds).to(tl.int64) * stride_dso + (rows % inner_ds).to(tl.int64) * stride_dsi
            if rstd_ptr is None:
                ds = tl.load(ds_ptr + ds_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        wdy = dy
        if w_ptr is not None:
            if RELOAD:
                w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
            wdy = dy * w[None, :]
        else:
            wdy = dy * offset
        if rstd_ptr is None:
            # Sum wdy · x and not wdy · xhat: rstd is unknown until the sum of squares, and a single exchange between
            # warps then serves both sums.
            squares, products = sum2(x * x, wdy * x)
            rstd = tl.rsqrt(squares / N + eps)[:, None]
            xhat = x * rstd
            mean = products[:, None] * rstd / N
        else:
            rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
            xhat = x * rstd
            mean = (tl.sum(wdy * xhat, 1) / N)[:, None]
        if dw_ptr is not None:
            if ROUND:
                dw += dy * xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                dw += dy * xhat
        if dx_ptr is not None:
            dx = (wdy - xhat * mean) * rstd
            if ds_ptr is not None:
                if rstd_ptr is not None:
                    ds = tl.load(ds_ptr + ds_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                # In fp32 before the single rounding; a separate pass would round twice and move dx through memory
                # again.
                dx += ds
            dx_at = rows.to(tl.int64)[:, None] * N + cols[None, :]
            tl.store(dx_ptr + dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(dw, 0), mask=col_mask)


# A program: one row, too wide for registers and read twice: once for the squares, once for the result (from L2 as far
# as it is still cached). Arguments as in `_rms_norm_fwd_kernel`; rstd is always stored.
@jit
def _rms_norm_wide_fwd_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr, M, N, inner, stride_xo, stride_xi, inner_r, stride_ro, stride_ri,
    eps, offset, ROUND: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    y_ptr += row.to(tl.int64) * N
    if r_ptr is not None:
        r_ptr += (row // inner_r).to(tl.int64) * stride_ro + (row % inner_r).to(tl.int64) * stride_ri
        s_ptr += row.to(tl.int64) * N
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if r_ptr is not None:
            x += tl.load(r_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            total = x.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + cols, total, mask=cols < N)
            x = total.to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if r_ptr is not None:  # add again: another thread of the program may have stored the sum
            x += tl.load(r_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            x = x.to(s_ptr.dtype.element_ty).to(tl.float32)
        y = x * rstd
        if ROUND:
            y = y.to(x_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            y = y * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)
        else:
            y = y * offset
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


# dx for rows too wide for registers, a program per row; x and dy are read twice. Arguments as in
# `_rms_norm_bwd_kernel`; rstd is the forward's, so only Σ wdy · x is summed here. dW has a separate kernel: a dx
# program would have to keep N fp32 sums, which do not fit registers.
@jit
def _rms_norm_wide_dx_kernel(
    dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, N, inner_dy, stride_dyo, stride_dyi, inner_ds, stride_dso,
    stride_dsi, inner, stride_xo, stride_xi, offset, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dy_ptr += (row // inner_dy).to(tl.int64) * stride_dyo + (row % inner_dy).to(tl.int64) * stride_dyi
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    dx_ptr += row.to(tl.int64) * N
    if ds_ptr is not None:
        ds_ptr += (row // inner_ds).to(tl.int64) * stride_dso + (row % inner_ds).to(tl.int64) * stride_dsi
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy = dy * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)
        else:
            dy = dy * offset
        products += dy * tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(products, 0) * rstd * rstd / N
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy = dy * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)
        else:
            dy = dy * offset
        dx = (dy - tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) * mean) * rstd
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


# dW for rows too wide for registers. A program: BLOCK_N columns of every P-th row, a fixed set in a fixed order, so
# that results are reproducible. Neighbouring programs take neighbouring rows of the same columns.
#   dw          (P, N) partial sums, which sum_rows adds in order
@jit
@do_not_specialize("M")
def _rms_norm_wide_dw_kernel(
    dy_ptr, x_ptr, rstd_ptr, dw_ptr, M, N, inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi, P,
    ROUND: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % P
    cols = tl.program_id(0) // P * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    for r in range(part, M, P):
        row = r + tl.full((), 0, tl.int64)
        x_at = row // inner * stride_xo + row % inner * stride_xi
        dy_at = row // inner_dy * stride_dyo + row % inner_dy * stride_dyi
        x = tl.load(x_ptr + x_at + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_at + cols, mask=cols < N, other=0.0).to(tl.float32)
        xhat = x * tl.load(rstd_ptr + row)
        if ROUND:
            xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
        dw += dy * xhat
    tl.store(dw_ptr + part.to(tl.int64) * N + cols, dw, mask=cols < N)


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(n: int) -> tuple[int, int, int]:
    """Rows per tile, columns per tile and warps. Narrow rows share a tile, so that every warp has 16-byte loads."""
    # At least 2048 numbers per tile, 16 to 32 per thread: two to four 16-byte loads of 16-bit numbers.
    block_n = next_power_of_2(n)
    warps = 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16
    return max(1, 2048 // block_n), block_n, 4 if 4 * n <= 3 * block_n else warps  # much padding: fewer idle threads


@functools.cache
def _bwd_tile(n: int, itemsize: int, inputs: int, shared: int) -> tuple[int, int, int, int, int]:
    """Rows, columns, warps, stages and programs per SM.

    A program computes a tile while the next two are loaded: 2 or 3 inputs · 3 stages · 16 KiB of shared memory. A tile
    with much padding carries less, so more tiles are in flight. There is no prefetch where tiles do not fit, or where a
    row is so wide that registers are short.
    """
    block_n = next_power_of_2(n)
    block_m, warps, stages, resident = max(1, 16384 // itemsize // block_n), 8, 3, 1
    if 4 * n <= 3 * block_n and block_n * itemsize >= 8192:
        block_m, stages = 1, 4
        if block_n * itemsize == 8192:
            warps, resident = 4, 2
    tile_bytes = block_m * block_n * itemsize
    # A 32 KiB tile is one row: x, dy and the partial dW need 16 warps' registers. Registers are short, so rstd is
    # loaded, the weight is reloaded for every row, and nothing is prefetched.
    if tile_bytes > 16384:
        warps, stages = 16, 1
    elif (stages * inputs * tile_bytes + 4096) * resident > shared:
        stages = 1
    return block_m, block_n, warps, stages, resident


@functools.lru_cache(maxsize=4096)
def _bwd_grid(m: int, n: int, itemsize: int, inputs: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Rows, columns, warps, stages, and programs."""
    block_m, block_n, warps, stages, resident = _bwd_tile(n, itemsize, inputs, shared_memory(device))
    block_m, warps, stages = spread(m, block_m, block_n, device) or (block_m, warps, stages)
    programs = min(cdiv(m, block_m), resident * multiprocessors(device))
    return block_m, block_n, warps, 1 if cdiv(m, block_m) == 1 else stages, programs


def _empty_rstd(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Buffer for rstd; empty if the backward pass recomputes rstd from a row in registers.

    dtype: dtype of the rows that the backward pass reads.
    """
    N = x.shape[-1]
    rows = x.numel() // N if N * dtype.itemsize > MAX_TILE else 0
    return torch.empty(rows, dtype=torch.float32, device=x.device)


def _rms_norm_fwd_fake(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
    return empty_rows(x, _out_dtype(x.dtype, weight, cast)), _empty_rstd(x, x.dtype)


@launcher(_rms_norm_fwd_fake)
def _rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
    y, rstd = _rms_norm_fwd_fake(x, weight, eps, offset, cast)
    _forward(x, None, weight, y, None, rstd, eps, offset, cast)
    return y, rstd


def _forward(
    x: Tensor, r: Tensor | None, weight: Tensor | None, y: Tensor, total: Tensor | None, rstd: Tensor, eps: float,
    offset: float, cast: str,
) -> None:  # fmt: skip
    N = x.shape[-1]
    M = y.numel() // N if N else 0
    if M == 0:
        return
    offset = offset or 1.0 if weight is None else offset
    # Walk rows in the output's memory order, so that stores are contiguous.
    order = memory_order(y)
    x, *strides = row_groups(x, order)
    r, *strides_r = (None, 1, 0, 0) if r is None else row_groups(r, order)
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()

    def plan() -> Plan:
        arguments = (M, N, *strides, *strides_r, eps, offset, cast == "llama")
        if N > MAX_TILE:
            # 16 columns per thread: two 16-byte loads of 16-bit numbers, and 16 fp32 sums in the wide kernel.
            return M, (*arguments, 8192), {"num_warps": 16}
        block_m, block_n, warps = _fwd_tile(N)
        return cdiv(M, block_m), (*arguments, block_m, block_n), {"num_warps": warps}

    key = (
        M, N, x.dtype, r if r is None else r.dtype, weight if weight is None else weight.dtype, y.dtype, eps, offset,
        cast, *strides, *strides_r,
    )  # fmt: skip
    tensors = (x, r, weight, y, total, rstd if rstd.numel() else None)
    launch(_rms_norm_fwd_kernel if N <= MAX_TILE else _rms_norm_wide_fwd_kernel, key, tensors, plan)


def _rms_norm_bwd_fake(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, offset: float,
    cast: str, need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx = empty_rows(x) if need_dx else x.new_empty(0)
    return dx, torch.empty_like(weight) if need_dw and weight is not None else x.new_empty(0)


@launcher(_rms_norm_bwd_fake)
def _rms_norm_bwd(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, offset: float, cast: str,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, including ds, the gradient of `add_rms_norm`'s sum, unless None; and dweight."""
    dx, dw = _rms_norm_bwd_fake(dy, ds, x, weight, rstd, eps, offset, cast, need_dx, need_dw)
    N = x.shape[-1]
    M = x.numel() // N if N else 0
    if M == 0:
        return dx, dw.zero_()
    offset = offset or 1.0 if weight is None else offset
    order = None if x.is_contiguous() else memory_order(dx if need_dx else empty_rows(x))
    x, *strides = row_groups(x, order)
    dy, *strides_dy = row_groups(dy, order)
    ds, *strides_ds = (None, 1, 0, 0) if ds is None else row_groups(ds, order)
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    out_dx = dx if need_dx else None
    saved = rstd if rstd.numel() else None
    key = (
        M, N, need_dx, need_dw, dy.dtype, ds if ds is None else ds.dtype, x.dtype,
        weight if weight is None else weight.dtype, eps, offset, cast, *strides_dy, *strides_ds, *strides,
    )  # fmt: skip
    scalars = (*strides_dy, *strides_ds, *strides)
    partial = None
    if N * x.element_size() <= 2 * MAX_TILE:  # the row and dx fit registers; half as many columns in fp32
        block_m, block_n, warps, stages, programs = _bwd_grid(M, N, x.element_size(), 2 if ds is None else 3, x.device)
        if need_dw:
            partial, _ = shares(programs, dw)
        launch(
            _rms_norm_bwd_kernel, key, (dy, ds, x, weight, saved, out_dx, partial),
            lambda: (
                programs, (M, N, *scalars, eps, offset, cast == "llama", saved is not None, block_m, block_n, stages),
                {"num_warps": warps},
            ),
        )  # fmt: skip
    else:
        if need_dx:
            launch(
                _rms_norm_wide_dx_kernel, key, (dy, ds, x, weight, saved, dx),
                lambda: (M, (N, *scalars, offset, 8192), {"num_warps": 16}),
            )  # fmt: skip
        if need_dw:
            # Programs by columns and every P-th row, about four per SM. 1024 columns on 128 threads: a thread loads 16
            # bytes of x and of dy, and keeps 8 sums.
            columns = cdiv(N, 1024)
            programs = min(M, max(1, 4 * multiprocessors(x.device) // columns))
            partial, _ = shares(programs, dw)
            arguments = (M, N, *strides_dy, *strides, programs, cast == "llama", 1024)
            grid = programs * columns
            launch(_rms_norm_wide_dw_kernel, key, (dy, x, saved, partial), lambda: (grid, arguments, {"num_warps": 4}))
    if partial is not None:
        sum_rows(partial, dw)
    return dx, dw


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *ctx.options = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, *_ = ctx.needs_input_grad
    dx, dw = _rms_norm_bwd(dy, None, *ctx.saved_tensors, *ctx.options, need_dx, need_dw)
    return dx if need_dx else None, dw if need_dw else None


_rms_norm = differentiable(_rms_norm_fwd, _setup_context, _backward)


EXAMPLES = {
    "rms_norm": Example("Norms", (ROWS, WEIGHT), rms_norm),
}
