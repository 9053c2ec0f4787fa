"""The residual sum, its RMS norm, and the norm in e4m3 rows, in one pass: 4 bytes read, 3 written.

    t = x + residual    rstd = 1 / sqrt(mean(t²) + eps)    q = t · rstd · (offset + weight) / s

The norm in x's dtype is never written: `tigon.ops.fp8.columns` computes the norm again from t and rstd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    do_not_specialize,
    jit,
    launch,
    launcher,
    next_power_of_2,
    tl,
    use_triton,
    view_rows,
)
from tigon.kernels.tiles.fp8 import compute_amax_tile, compute_scale_tile
from tigon.ops.fp8.recipe import Rows
from tigon.ops.fp8.reference import norm_rows_reference
from tigon.ops.fp8.rows import MAX_TILE, _fp8_rows, allocate_rows, tile_rows
from tigon.ops.rms_norm import _forward


def norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Rows]:
    """Add x to the residual stream, and round the sum's RMS norm to e4m3 rows.

    Args:
        x: (M, N), bf16, fp16 or fp32; rows may be further apart than N. residual: likewise, or None.
        weight: (N,) in any of these dtypes, or None.
        eps, offset, cast: as for `tigon.rms_norm`. The norm is rounded to x's dtype, then to e4m3.
    Returns: the sum (M, N) in x's dtype (x itself without a residual), 1/rms (M,) fp32, and the norm in rows.
    """
    if not use_triton(x, residual, weight):
        return norm_rows_reference(x, residual, weight, eps, offset, cast)
    total, rstd, data, scale = _fp8_norm_rows(x, residual, weight, eps, offset, cast)
    return x if residual is None else total, rstd, Rows(data, scale)


# ---------------------------------------------------------------------------------------------------------- kernels


# A program: BLOCK_M whole rows in registers, so memory is read once.
#   x, r     input and optional residual, (M, N), rows stride_x and stride_r apart
#   t        rounded sum x + r, dense; unused without r
#   rstd, s  (M,) fp32; q: e4m3 (M, N), dense
#   ROUND    Llama's order: the sum · rstd is rounded to x's dtype before the weight scales it
@jit
@do_not_specialize("M")
def _norm_rows_kernel(
    x_ptr, r_ptr, w_ptr, t_ptr, rstd_ptr, q_ptr, s_ptr, M, N, stride_x, stride_r, eps, offset,
    ROUND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
    row = rows.to(tl.int64)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if r_ptr is not None:
        x += tl.load(r_ptr + row * stride_r + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # The norm is taken from the rounded sum, as two separate steps would do.
        total = x.to(dtype)
        tl.store(t_ptr + row * N + cols[None, :], total, mask=mask)
        x = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    y = x * rstd[:, None]
    if ROUND:
        y = y.to(dtype).to(tl.float32)
    if w_ptr is not None:
        y = y * (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
    y = y.to(dtype).to(tl.float32)
    s = compute_scale_tile(compute_amax_tile(y, 1))
    tl.store(s_ptr + rows, s, mask=rows < M)
    tl.store(q_ptr + row * N + cols[None, :], (y * (1.0 / s)[:, None]).to(tl.float8e4nv), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _fp8_norm_rows_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(0 if residual is None else x.shape)
    return total, x.new_empty(len(x), dtype=torch.float32), *allocate_rows(x, x.shape[1])


@launcher(_fp8_norm_rows_fake)
def _fp8_norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, empty without a residual; 1/rms, data and scale."""
    total, rstd, data, scale = _fp8_norm_rows_fake(x, residual, weight, eps, offset, cast)
    M, N = data.shape
    if not data.numel():
        return total, rstd, data, scale
    if N > MAX_TILE:
        y = x.new_empty(x.shape)
        _forward(x, residual, weight, y, None if residual is None else total, rstd, eps, offset, cast)
        return total, rstd, *_fp8_rows(y)
    x = view_rows(x)
    residual = None if residual is None else view_rows(residual)
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()

    def plan() -> Plan:
        block_n = next_power_of_2(N)
        block_m, warps = tile_rows(block_n)
        arguments = (M, N, *strides, eps, offset, cast == "llama", block_m, block_n)
        return cdiv(M, block_m), arguments, {"num_warps": warps}

    dtypes = [None if t is None else t.dtype for t in (x, residual, weight)]
    launch(
        _norm_rows_kernel, (M, N, *strides, eps, offset, cast, *dtypes),
        (x, residual, weight, total, rstd, data, scale), plan,
    )  # fmt: skip
    return total, rstd, data, scale
