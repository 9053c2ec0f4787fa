"""Round rows to e4m3 with a scale each: q = x / s, s the power of two at or above max |x| / 448.

A row stays in registers between its maximum and its rounding, so each number is read once: 2 bytes read, 1 written.
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
from tigon.kernels.tiles.fp8 import compute_amax_tile, compute_scale_tile, larger
from tigon.ops.fp8.recipe import E4M3, Rows
from tigon.ops.fp8.reference import quantize_rows_reference

# Widest row that registers hold; wider rows are read twice, block by block.
MAX_TILE = 16384


def quantize_rows(x: Tensor, *beside: Tensor, out: Rows | None = None) -> Rows:
    """Round rows to e4m3 with a scale each; several tensors side by side, such as dq, dk and dv, share the scale.

    Args:
        x: (M, N), bf16, fp16 or fp32; rows may be further apart than N.
        beside: at most two more tensors, with M rows and their own widths and strides.
        out: the result's memory, contiguous; not under torch.compile.
    Returns: data (M, N), N the sum of the widths, and scale (M, 1). A row with inf has an infinite scale, and inf
        becomes NaN; a row with NaN is NaN throughout.
    """
    if not use_triton(x, *beside):
        rows = quantize_rows_reference(x, *beside)
        return rows if out is None else Rows(out.data.copy_(rows.data), out.scale.copy_(rows.scale))
    if out is None:
        return Rows(*_fp8_rows(x, *beside))
    _write_rows(out, x, *beside)
    return out


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _load_rows(ptr, rows, M, N, stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def _store_rows(ptr, x, rows, M, N, stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], x.to(tl.float8e4nv), mask=mask)


# A program: BLOCK_M whole rows in registers, so memory is read once.
#   a, b, c  (M, A), (M, B), (M, C) side by side; b and c may be None. Rows are stride_a, stride_b, stride_c apart
#   q, s     e4m3 (M, N) and fp32 (M,), dense
@jit
@do_not_specialize("M")
def _quantize_rows_kernel(
    a_ptr, b_ptr, c_ptr, q_ptr, s_ptr, M, N, A, B, C, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    a = _load_rows(a_ptr, rows, M, A, stride_a, BLOCK_A)
    amax = compute_amax_tile(a, 1)
    if b_ptr is not None:
        b = _load_rows(b_ptr, rows, M, B, stride_b, BLOCK_B)
        amax = larger(amax, compute_amax_tile(b, 1))
    if c_ptr is not None:
        c = _load_rows(c_ptr, rows, M, C, stride_c, BLOCK_C)
        amax = larger(amax, compute_amax_tile(c, 1))
    s = compute_scale_tile(amax)
    tl.store(s_ptr + rows, s, mask=rows < M)
    inverse = (1.0 / s)[:, None]
    _store_rows(q_ptr, a * inverse, rows, M, A, N, BLOCK_A)
    if b_ptr is not None:
        _store_rows(q_ptr + A, b * inverse, rows, M, B, N, BLOCK_B)
    if c_ptr is not None:
        _store_rows(q_ptr + A + B, c * inverse, rows, M, C, N, BLOCK_C)


@jit
def _find_wide_amax(amax, x_ptr, N, BLOCK: tl.constexpr):
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        amax = larger(amax, tl.abs(x))
    return amax


@jit
def _round_wide_row(x_ptr, q_ptr, inverse, N, BLOCK: tl.constexpr):
    blocks = tl.cdiv(N, BLOCK)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(q_ptr + cols, (x * inverse).to(tl.float8e4nv), mask=cols < N)


# A program: one row, too wide for registers and read twice. The second pass goes backwards: the blocks read last are
# the likeliest to be in L2 still.
#   x, b     (M, A) and (M, B) side by side, with row strides; b may be None
#   q, s     e4m3 (M, A + B) and fp32 (M,), dense
@jit
def _quantize_wide_rows_kernel(x_ptr, b_ptr, q_ptr, s_ptr, A, B, stride_x, stride_b, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    q_ptr += row * (A + B)
    amax = _find_wide_amax(tl.zeros((BLOCK,), tl.float32), x_ptr, A, BLOCK)
    if b_ptr is not None:
        amax = _find_wide_amax(amax, b_ptr + row * stride_b, B, BLOCK)
    s = compute_scale_tile(compute_amax_tile(amax, 0))
    tl.store(s_ptr + row, s)
    if b_ptr is not None:
        _round_wide_row(b_ptr + row * stride_b, q_ptr + A, 1.0 / s, B, BLOCK)
    _round_wide_row(x_ptr, q_ptr, 1.0 / s, A, BLOCK)


# --------------------------------------------------------------------------------------------------------- launches


def tile_rows(block: int) -> tuple[int, int]:
    """Rows and warps of a program, for rows padded to `block` columns: 32 numbers a thread, four 16-byte loads."""
    return max(1, 8192 // next_power_of_2(block)), 8 if block <= 8192 else 16


def _wide_tile() -> tuple[int, int]:
    """Columns of a block, and warps: with 1,024 threads an SM holds two rows at most, and L2 more of each row."""
    return 16384, 32


def allocate_rows(x: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Data and scale of `Rows`, for the rows of x."""
    return x.new_empty((len(x), N), dtype=E4M3), x.new_empty((len(x), 1), dtype=torch.float32)


def _fp8_rows_fake(x: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return allocate_rows(x, sum(t.shape[1] for t in (x, b, c) if t is not None))


@launcher(_fp8_rows_fake)
def _fp8_rows(x: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    data, scale = _fp8_rows_fake(x, b, c)
    _write_rows(Rows(data, scale), x, b, c)
    return data, scale


def _write_rows(out: Rows, x: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> None:
    data, scale = out
    M, N = data.shape
    if not data.numel():
        return
    if N > MAX_TILE:
        if c is not None:
            x, b = torch.cat([t for t in (x, b, c) if t is not None], 1), None
        _write_wide_rows(out, view_rows(x), None if b is None else view_rows(b))
        return
    parts = [None if t is None else view_rows(t) for t in (x, b, c)]
    widths = [0 if t is None else t.shape[1] for t in parts]
    strides = [0 if t is None else t.stride(0) for t in parts]

    def plan() -> Plan:
        blocks = [next_power_of_2(width) for width in widths]
        block_m, warps = tile_rows(sum(b for b, width in zip(blocks, widths, strict=True) if width))
        return cdiv(M, block_m), (M, N, *widths, *strides, block_m, *blocks), {"num_warps": warps}

    key = (M, *widths, *strides, *[None if t is None else t.dtype for t in parts])
    launch(_quantize_rows_kernel, key, (*parts, data, scale), plan)


def _write_wide_rows(out: Rows, x: Tensor, b: Tensor | None) -> None:
    sizes = x.shape[1], 0 if b is None else b.shape[1], x.stride(0), 0 if b is None else b.stride(0)

    def plan() -> Plan:
        block, warps = _wide_tile()
        return len(x), (*sizes, block), {"num_warps": warps}

    key = (len(x), *sizes, x.dtype, None if b is None else b.dtype)
    launch(_quantize_wide_rows_kernel, key, (x, b, *out), plan)
