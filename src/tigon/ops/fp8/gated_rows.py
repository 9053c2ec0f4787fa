"""act(gate) · up in e4m3 rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
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
from tigon.kernels.tiles.fp8 import compute_amax_tile, compute_scale_tile, larger
from tigon.ops.acts import ACTS
from tigon.ops.fp8.recipe import E4M3, Rows
from tigon.ops.fp8.reference import gated_rows_reference

# Widest row that a program holds in registers; wider rows are read twice, block by block.
MAX_TILE = 16384


def gated_rows(gate_up: Tensor, act: str, keep: bool = False) -> tuple[Rows, Rows | None]:
    """act(gate) · up of gate_up (M, 2N) in rows; with keep also gate and up, data (M, 2N) and scale (M, 2)."""
    if not use_triton(gate_up) or not gate_up.numel():
        return gated_rows_reference(gate_up, act, keep)
    found = _fp8_gated_rows(gate_up, act, keep)
    return Rows(*found[:2]), Rows(*found[2:]) if keep else None


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def store_e4m3(ptr, x, scale, cols, N):
    """x / scale in e4m3, which saturates."""
    tl.store(ptr + cols, (x * (1.0 / scale)).to(tl.float8e4nv), mask=cols < N)


@jit
def find_scale(x):
    return compute_scale_tile(compute_amax_tile(x, 0))


@jit
def _multiply(g_ptr, cols, N, ACT: tl.constexpr):
    g = tl.load(g_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    u = tl.load(g_ptr + N + cols, mask=cols < N, other=0.0).to(tl.float32)
    y, _ = ACT(g)
    return g, u, y * u


# Persistent grid: a program takes every num_programs-th row.
#   g        gate and up side by side, (M, 2N), with a row stride
#   q, s     the product's rows and scales
#   k, ks    rows of gate and up, (M, 2N), and their scales, (M, 2); or both None
#   WHOLE    the row fits BLOCK columns in registers. Other rows are read twice: for the maxima, and backwards for the
#            rows
#   STAGES   rows prefetched into shared memory: a wide row leaves no registers for a second program per SM, and nothing
#            else hides load latency
@jit
@do_not_specialize("M")
def _fp8_gated_rows_kernel(
    g_ptr, q_ptr, s_ptr, k_ptr, ks_ptr, M, N, stride_g,
    ACT: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    for r in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        row = r + tl.full((), 0, tl.int64)
        g_row, q_row = g_ptr + row * stride_g, q_ptr + row * N
        if WHOLE:
            g, u, y = _multiply(g_row, cols, N, ACT)
            top, top_g, top_u = y, g, u
        else:
            top = tl.zeros((BLOCK,), tl.float32)
            top_g, top_u = top, top
            for start in range(0, N, BLOCK):
                g, u, y = _multiply(g_row, start + cols, N, ACT)
                top = larger(top, tl.abs(y))
                if k_ptr is not None:
                    top_g, top_u = larger(top_g, tl.abs(g)), larger(top_u, tl.abs(u))
        scale = find_scale(top)
        tl.store(s_ptr + row, scale)
        if k_ptr is not None:
            k_row = k_ptr + row * 2 * N
            scale_g, scale_u = find_scale(top_g), find_scale(top_u)
            tl.store(ks_ptr + 2 * row, scale_g)
            tl.store(ks_ptr + 2 * row + 1, scale_u)
        if WHOLE:
            store_e4m3(q_row, y, scale, cols, N)
            if k_ptr is not None:
                store_e4m3(k_row, g, scale_g, cols, N)
                store_e4m3(k_row + N, u, scale_u, cols, N)
        else:
            last = (N - 1) // BLOCK * BLOCK
            for back in range(0, N, BLOCK):  # the blocks read last are the likeliest to be in L2 still
                start = last - back
                g, u, y = _multiply(g_row, start + cols, N, ACT)
                store_e4m3(q_row, y, scale, start + cols, N)
                if k_ptr is not None:
                    store_e4m3(k_row, g, scale_g, start + cols, N)
                    store_e4m3(k_row + N, u, scale_u, start + cols, N)


# --------------------------------------------------------------------------------------------------------- launches


class Tile(NamedTuple):
    """block: columns at a time. whole: a row is one block. resident: programs per SM; None for a program per row."""

    block: int
    warps: int
    whole: bool = True
    stages: int = 1
    resident: int | None = None

    def plan(self, M: int, device: torch.device, *arguments: Any) -> Plan:
        programs = M if self.resident is None else min(M, self.resident * multiprocessors(device))
        stages = self.stages if programs < M else 1
        return programs, (M, *arguments, self.block, self.whole, stages), {"num_warps": self.warps}


def choose_tile(n: int, itemsize: int, prefetch: bool, device: torch.device) -> Tile:
    """The tile for rows of n columns.

    Args:
        itemsize: bytes of all inputs per column.
        prefetch: whether a program with 16,384 columns takes so many registers that there is one per SM.
    """
    if n > MAX_TILE:
        return Tile(16384, 32, whole=False)  # with 1,024 threads an SM holds one row, and L2 more of each row
    # 16 or 32 columns per thread: 16-byte stores of each result, and two 16-byte loads of 16-bit numbers for each.
    block = next_power_of_2(n)
    warps = min(16, max(1, block // 512))
    if block < MAX_TILE or not prefetch:
        return Tile(block, warps)
    # One stage is in registers; 4096 bytes are for the maxima.
    stages = min(3, 1 + (shared_memory(device) - 4096) // (block * itemsize))
    return Tile(block, warps, stages=stages, resident=1)


def _tile(gate_up: Tensor, keep: bool) -> Tile:
    n = gate_up.shape[1] // 2
    if keep and n > MAX_TILE:
        return Tile(8192, 16, whole=False)  # 1,024 threads have too few registers for three maxima
    return choose_tile(n, 2 * gate_up.element_size(), keep, gate_up.device)


def _fp8_gated_rows_fake(gate_up: Tensor, act: str, keep: bool) -> list[Tensor]:
    M, width = gate_up.shape
    widths = ((width // 2, 1), (width, 2)) if keep else ((width // 2, 1),)
    device = gate_up.device
    return [
        torch.empty((M, n), dtype=dtype, device=device)
        for pair in widths
        for n, dtype in zip(pair, (E4M3, torch.float32), strict=True)
    ]


@launcher(_fp8_gated_rows_fake)
def _fp8_gated_rows(gate_up: Tensor, act: str, keep: bool) -> list[Tensor]:
    """The product's rows and scales, and with keep those of gate and up."""
    found = _fp8_gated_rows_fake(gate_up, act, keep)
    gate_up = view_rows(gate_up)
    M, width = gate_up.shape

    def plan() -> Plan:
        arguments = (width // 2, gate_up.stride(0), ACTS[act].tile)
        return _tile(gate_up, keep).plan(M, gate_up.device, *arguments)

    tensors = (gate_up, *found) if keep else (gate_up, *found, None, None)
    launch(_fp8_gated_rows_kernel, (*gate_up.shape, gate_up.stride(0), gate_up.dtype, act, keep), tensors, plan)
    return found
