"""Root-mean-square normalisation: y = x / sqrt(mean(x²) + eps) · (offset + weight).

Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.backend import (
    cdiv,
    differentiable,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    rows_of,
    shared_memory,
    tl,
    triton,
    use_triton,
)
from tigon.ops.sum_rows import sum_rows

CASTS = ("llama", "gemma", "none")
# One tile holds a row up to this width; wider rows are read twice, block by block.
MAX_TILE = 16384


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, cast: str = "llama"
) -> Tensor:
    """Scale each row of x to unit root mean square, then by weight.

    Args:
        x: (..., N), any float dtype. Statistics are taken in fp32 (fp64 for fp64).
        weight: (N,), or None for no scale.
        eps: added to the mean square, in squared units of x.
        offset: added to weight; Gemma stores weight − 1 and uses 1.0.
        cast: what is rounded when, as the model families write it:
            "llama"  x·rstd is rounded to x's dtype, then scaled; the result has the promoted dtype of x and weight.
            "gemma"  everything in fp32, rounded once, to x's dtype. Also what torch.nn.RMSNorm does.
            "none"   everything in fp32, rounded once, to the promoted dtype of x and weight.
    Returns: (..., N).
    Raises: ValueError for a weight that is not (N,), an unknown cast or a dtype that is not a float.

    Replaces (cast="llama")::

        variance = x.float().pow(2).mean(-1, keepdim=True)
        y = weight * (x.float() * torch.rsqrt(variance + eps)).to(x.dtype)
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"rms_norm: x must have a float dtype, got {x.dtype}.")
    if x.dim() == 0:
        raise ValueError("rms_norm: x must have at least one dimension, got a scalar.")
    if cast not in CASTS:
        raise ValueError(f"rms_norm: cast must be one of {CASTS}, got {cast!r}.")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must have shape {tuple(x.shape[-1:])}, the last dimension of x {tuple(x.shape)}, "
            f"got {tuple(weight.shape)}."
        )
    if not use_triton(x, weight):
        return rms_norm_reference(x, weight, eps=eps, offset=offset, cast=cast)
    return _rms_norm(x, weight, eps, offset, cast)


def rms_norm_reference(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, cast: str = "llama"
) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    x32 = x.to(acc)
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if cast == "llama":
        y = y.to(x.dtype)
        if weight is not None and not offset:
            return weight * y  # a product of two bf16 is computed in fp32 and rounded once, without a copy in fp32
    if weight is not None:
        w = weight.to(torch.promote_types(weight.dtype, torch.float32))
        y = y * (w + offset if offset else w)
    return y.to(_out_dtype(x, weight, cast))


def _out_dtype(x: Tensor, weight: Tensor | None, cast: str) -> torch.dtype:
    return x.dtype if weight is None or cast == "gemma" else torch.promote_types(x.dtype, weight.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["M"])
def _rms_norm_fwd_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, M, N, stride_xm, eps, offset,
    ROUND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    row_mask = rows < M
    mask = row_mask[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if ROUND:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if w_ptr is not None:
        y = y * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, M, N, stride_dym, stride_xm, offset,
    ROUND: tl.constexpr, RELOAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A persistent grid: each program walks the rows with the grid's stride and keeps its share of dW in registers.
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < N
    if w_ptr is not None and not RELOAD:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (rows < M)[:, None] & col_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        xhat = x * rstd
        if dw_ptr is not None:
            if ROUND:
                dw += dy * xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                dw += dy * xhat
        if dx_ptr is not None:
            if w_ptr is not None:
                if RELOAD:  # the widest rows leave no registers for the weight: it comes from the L1 cache each time
                    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
                dy = dy * w[None, :]
            dx = (dy - xhat * (tl.sum(dy * xhat, 1) / N)[:, None]) * rstd
            tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(dw, 0), mask=col_mask)


@triton.jit
def _rms_norm_wide_fwd_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, M, N, stride_xm, eps, offset, ROUND: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) * rstd
        if ROUND:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            y = y * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _rms_norm_wide_dx_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, N, stride_dym, stride_xm, offset, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * stride_dym
    x_ptr += row * stride_xm
    dx_ptr += row * N
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy = dy * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)
        products += dy * tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(products, 0) * rstd * rstd / N
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy = dy * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)
        dx = (dy - tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) * mean) * rstd
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_wide_dw_kernel(
    dy_ptr, x_ptr, rstd_ptr, dw_ptr, M, N, stride_dym, stride_xm, P, ROUND: tl.constexpr, BLOCK_N: tl.constexpr
):
    part = tl.program_id(0) % P
    cols = tl.program_id(0) // P * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    for r in range(part, M, P):
        row = r + tl.full((), 0, tl.int64)
        x = tl.load(x_ptr + row * stride_xm + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dym + cols, mask=cols < N, other=0.0).to(tl.float32)
        xhat = x * tl.load(rstd_ptr + row)
        if ROUND:
            xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
        dw += dy * xhat
    tl.store(dw_ptr + part.to(tl.int64) * N + cols, dw, mask=cols < N)


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(n: int) -> tuple[int, int, int]:
    """Rows a tile, columns a tile and warps: narrow rows share a tile, so that every warp has 16-byte loads to make."""
    block_n = next_power_of_2(n)
    return max(1, 2048 // block_n), block_n, 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16


def _bwd_tile(n: int, x: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, warps and stages. One program a multiprocessor, whose next two tiles are on their way meanwhile:
    2 inputs · 3 stages · 16 KiB. Where that does not fit, or a row is so wide that registers are short, no prefetch."""
    block_n = next_power_of_2(n)
    block_m = max(1, 16384 // x.element_size() // block_n)
    tile_bytes = block_m * block_n * x.element_size()
    stages = 3 if tile_bytes <= 16384 and 6 * tile_bytes + 4096 <= shared_memory(x.device) else 1
    return block_m, block_n, 8 if tile_bytes <= 16384 else 16, stages


def _rms_norm_fwd_fake(x, weight, eps, offset, cast):
    y = x.new_empty(x.shape, dtype=_out_dtype(x, weight, cast))
    return y, x.new_empty(x.numel() // max(1, x.shape[-1]), dtype=torch.float32)


@launcher("(Tensor x, Tensor? weight, float eps, float offset, str cast) -> (Tensor, Tensor)", _rms_norm_fwd_fake)
def _rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
    y, rstd = _rms_norm_fwd_fake(x, weight, eps, offset, cast)
    if x.numel() == 0:
        return y, rstd
    x = rows_of(x)
    weight = weight if weight is None else weight.contiguous()
    M, N = x.shape
    stride, rounded = x.stride(0), cast == "llama"

    def plan():
        if N > MAX_TILE:
            return M, (M, N, stride, eps, offset, rounded, 8192), {"num_warps": 16}
        block_m, block_n, warps = _fwd_tile(N)
        return cdiv(M, block_m), (M, N, stride, eps, offset, rounded, block_m, block_n), {"num_warps": warps}

    kernel = _rms_norm_fwd_kernel if N <= MAX_TILE else _rms_norm_wide_fwd_kernel
    key = (M, N, stride, x.dtype, None if weight is None else weight.dtype, y.dtype, eps, offset, rounded)
    launch(kernel, key, (x, weight, y, rstd), plan)
    return y, rstd


def _rms_norm_bwd_fake(dy, x, weight, rstd, offset, cast, need_dx, need_dw):
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    return dx, torch.empty_like(weight) if need_dw else x.new_empty(0)


@launcher(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, str cast, bool need_dx, bool need_dw)"
    " -> (Tensor, Tensor)",
    _rms_norm_bwd_fake,
)
def _rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, cast: str, need_dx: bool, need_dw: bool
) -> tuple[Tensor, Tensor]:
    dx, dw = _rms_norm_bwd_fake(dy, x, weight, rstd, offset, cast, need_dx, need_dw)
    if x.numel() == 0:
        return dx, dw.zero_()
    x, dy = rows_of(x), rows_of(dy)
    weight = weight if weight is None else weight.contiguous()
    M, N = x.shape
    strides, rounded = (dy.stride(0), x.stride(0)), cast == "llama"
    out_dx = dx if need_dx else None
    key = (M, N, *strides, dy.dtype, x.dtype, None if weight is None else weight.dtype, offset, rounded, need_dx)
    partial: Tensor | None = None
    arguments: tuple[Any, ...]
    if N * x.element_size() <= 2 * MAX_TILE:  # registers hold the row and its gradient: half as many columns in fp32
        block_m, block_n, warps, stages = _bwd_tile(N, x)
        programs = min(cdiv(M, block_m), multiprocessors(x.device))
        if need_dw:
            partial = x.new_empty((programs, N), dtype=torch.float32)
        arguments = (M, N, *strides, offset, rounded, block_n > 8192, block_m, block_n, stages)
        tensors = (dy, x, weight, rstd, out_dx, partial)
        launch(_rms_norm_bwd_kernel, (*key, need_dw), tensors, lambda: (programs, arguments, {"num_warps": warps}))
    else:
        if need_dx:
            arguments = (N, *strides, offset, 8192)
            launch(_rms_norm_wide_dx_kernel, key, (dy, x, weight, rstd, dx), lambda: (M, arguments, {"num_warps": 16}))
        if need_dw:
            columns = cdiv(N, 1024)
            programs = min(M, max(1, 4 * multiprocessors(x.device) // columns))
            partial = x.new_empty((programs, N), dtype=torch.float32)
            arguments = (M, N, *strides, programs, rounded, 1024)
            grid = programs * columns
            launch(_rms_norm_wide_dw_kernel, key, (dy, x, rstd, partial), lambda: (grid, arguments, {"num_warps": 4}))
    if need_dw:
        sum_rows(partial, dw)  # type: ignore[arg-type]
    return dx, dw


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, ctx.cast = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    need_dx, need_dw = ctx.needs_input_grad[:2]
    dx, dw = _rms_norm_bwd(dy, x, weight, rstd, ctx.offset, ctx.cast, need_dx, need_dw)
    return dx if need_dx else None, dw if need_dw else None, None, None, None


_rms_norm = differentiable(_rms_norm_fwd, _setup_context, _backward)
