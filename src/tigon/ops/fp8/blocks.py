"""Round rows to e4m3 with a scale for each 128 numbers, as products with weights in blocks of 128 × 128 read them.

A block's numbers stay in registers between their maximum and their rounding: 2 bytes read, 1 written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, do_not_specialize, jit, launch, launcher, tl, use_triton, view_rows
from tigon.kernels.tiles.fp8 import compute_amax_tile, compute_scale_tile
from tigon.ops.fp8.recipe import BLOCK, E4M3, Rows, round_up
from tigon.ops.fp8.reference import quantize_blocks_reference


def quantize_blocks(x: Tensor) -> Rows:
    """Round each 128 numbers of a row to e4m3, with the power of two at or above max |x| / 448 as their scale.

    Args:
        x: (M, N), bf16, fp16 or fp32, N a multiple of 128; rows may be further apart than N.
    Returns: data (M, N) and scale (M, N / 128), stored column by column. Both have memory for a multiple of 16 rows,
        which cuBLAS reads, and whose rows behind the last hold anything. A block with inf has an infinite scale, and
        inf becomes NaN; a block with NaN is NaN throughout.
    Raises: ValueError for another N.
    """
    if x.shape[1] % BLOCK:
        raise ValueError(f"quantize_blocks: x must have a width that is a multiple of {BLOCK}, got {tuple(x.shape)}.")
    if not use_triton(x) or not x.numel():
        return quantize_blocks_reference(x)
    return Rows(*_fp8_blocks(x))


# ---------------------------------------------------------------------------------------------------------- kernels


# A program: BLOCK_M rows of a block of 128 columns; neighbouring programs take neighbouring columns.
#   x        (M, N), rows stride_x apart
#   q, s     e4m3 (M, N), dense, and fp32 (N / 128, P): the scales of a block's rows lie side by side
@jit
@do_not_specialize("M")
def _quantize_blocks_kernel(x_ptr, q_ptr, s_ptr, M, N, P, stride_x, BLOCK_M: tl.constexpr):
    blocks = N // 128
    block = tl.program_id(0) % blocks
    rows = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block * 128 + tl.arange(0, 128)
    mask = (rows < M)[:, None]
    # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
    row = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    s = compute_scale_tile(compute_amax_tile(x, 1))
    tl.store(s_ptr + block.to(tl.int64) * P + rows, s, mask=rows < M)
    tl.store(q_ptr + row * N + cols[None, :], (x * (1.0 / s)[:, None]).to(tl.float8e4nv), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _tile() -> tuple[int, int]:
    """Rows and warps of a program: 32 numbers a thread, four 16-byte loads."""
    return 64, 8


def allocate_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scale of `quantize_blocks`, for the rows of x."""
    M, N = x.shape
    P = round_up(M)
    data = torch.empty((P, N), dtype=E4M3, device=x.device)
    return data[:M], torch.empty((N // BLOCK, P), dtype=torch.float32, device=x.device).t()[:M]


def _fp8_blocks_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return allocate_blocks(x)


@launcher(_fp8_blocks_fake)
def _fp8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scale = allocate_blocks(x)
    x = view_rows(x)
    M, N = x.shape
    stride, P = x.stride(0), scale.stride(1)

    def plan() -> Plan:
        block_m, warps = _tile()
        return cdiv(M, block_m) * (N // BLOCK), (M, N, P, stride, block_m), {"num_warps": warps}

    launch(_quantize_blocks_kernel, (M, N, stride, x.dtype), (x, data, scale), plan)
    return data, scale
