"""The residual stream plus an adapted layer: r + (y + s t Bᵀ), where y is the frozen layer's product.

Separately, these are three passes over y-sized tensors: the adapter's part is written, the frozen product reads that
part as an addend and writes the sum, and an addition reads both and writes the third. Here the tile of t Bᵀ is made
where y and r are added, and the result is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, next_power_of_2, tl, use_triton


def adapted_sum(residual: Tensor, y: Tensor, t: Tensor, b: Tensor, scale: float) -> Tensor:
    """residual + (y + scale · t bᵀ), summed in fp32, rounded once and written over y. Not differentiable.

    residual, y: (M, N), the same dtype. t: (M, r) and b: (N, r), in that dtype too.
    """
    # A layer with a custom product may return a non-contiguous result.
    if not use_triton(y, residual, t, b) or not y.is_contiguous():
        return y.copy_(adapted_sum_reference(residual, y, t, b, scale))
    M, N = y.shape
    if y.numel():
        rank, residual = t.shape[1], residual.contiguous()
        t, b = (f if f.stride(1) == 1 or rank == 1 else f.contiguous() for f in (t, b))

        def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
            block_m, block_n, block_r, warps = _tile(rank)
            grid = cdiv(M, block_m) * cdiv(N, block_n)
            return grid, (M, N, *strides, scale, rank, block_m, block_n, block_r), {"num_warps": warps}

        strides = t.stride(0), b.stride(0)
        launch(_adapted_sum_kernel, (M, N, y.dtype, residual.dtype, strides, scale, rank), (y, residual, t, b), plan)
    return y


def adapted_sum_reference(residual: Tensor, y: Tensor, t: Tensor, b: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    total = residual.to(wide) + (y.to(wide) + scale * (t.to(wide) @ b.to(wide).t()))
    return total.to(y.dtype)


def _tile(rank: int) -> tuple[int, int, int, int]:
    """Rows, columns and ranks per tile, and warps."""
    # 64 × 128 numbers on 128 threads: eight 16-byte loads each for y and r are in flight at once. The factors' tiles
    # come from L2, 6 KiB at rank 16 next to 32 KiB of y and r.
    return 64, 128, min(64, max(16, next_power_of_2(rank))), 4


# y = r + (y + scale · t Bᵀ) in place. A program owns a (BLOCK_M, BLOCK_N) tile. Columns are the fast grid index:
# concurrent programs share rows of t.
#   y, r: (M, N), contiguous. t, b: (M, RANK), (N, RANK), with row strides stride_tm and stride_bn, padded to BLOCK_R.
# Summed in fp32, with a single rounding at the store. The same thread reads and overwrites a number.
@jit
@do_not_specialize("M")
def _adapted_sum_kernel(
    y_ptr, r_ptr, t_ptr, b_ptr, M, N, stride_tm, stride_bn, scale, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    # int64: row · N reaches 2**31 at 512k tokens with width 4096.
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    r = tl.load(r_ptr + at, mask=mask, other=0.0)
    part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, RANK, BLOCK_R):
        k = first + tl.arange(0, BLOCK_R)
        t_at = rows.to(tl.int64)[:, None] * stride_tm + k[None, :]
        t = tl.load(t_ptr + t_at, mask=(rows < M)[:, None] & (k < RANK)[None, :], other=0.0)
        b_at = cols.to(tl.int64)[:, None] * stride_bn + k[None, :]
        b = tl.load(b_ptr + b_at, mask=(cols < N)[:, None] & (k < RANK)[None, :], other=0.0)
        part = tl.dot(t, b.T, part, input_precision="ieee")
    total = r.to(tl.float32) + (y.to(tl.float32) + scale * part)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)
