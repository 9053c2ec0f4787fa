"""Sum the rows of a small fp32 matrix and round once: the last step for gradients summed by persistent programs.

Each program of a backward kernel keeps its share of dW (and dbias) in registers and stores the share as a row. This
launch adds the rows and casts. The summation order is fixed, so the result is deterministic, unlike with atomics.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, jit, launch, multiprocessors, next_power_of_2, tl

# ---------------------------------------------------------------------------------------------------------- kernels


# One program sums BLOCK_N columns over all P rows; with `sum_ptr` an extra last program sums the S shares of a single
# number, such as alpha's gradient.
# partial (P, N) or (P, 2, N) fp32 with stride_p, dW and dbias side by side; often still in L2. first, second (N,):
# results; second is None with a single half.
# Rows BLOCK_P apart share an accumulator, and the accumulators are added in a tree, in the same order on every run. The
# only rounding is at the store.
@jit
def _sum_rows_kernel(
    partial_ptr, first_ptr, second_ptr, shares_ptr, sum_ptr, P, N, stride_p, S,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if sum_ptr is not None:  # noqa: SIM102
        if tl.program_id(0) == tl.num_programs(0) - 1:
            share = tl.zeros((BLOCK_P * BLOCK_N,), tl.float32)
            for start in range(0, S, BLOCK_P * BLOCK_N):
                at = start + tl.arange(0, BLOCK_P * BLOCK_N)
                share += tl.load(shares_ptr + at, mask=at < S, other=0.0)
            tl.store(sum_ptr, tl.sum(share, 0).to(sum_ptr.dtype.element_ty))
            return
    blocks = tl.cdiv(N, BLOCK_N)
    which = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    partial_ptr += which * N
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + rows[:, None].to(tl.int64) * stride_p + cols[None, :], mask=mask, other=0.0)
    out = tl.sum(total, 0)
    if which == 0:
        tl.store(first_ptr + cols, out.to(first_ptr.dtype.element_ty), mask=cols < N)
    elif second_ptr is not None:
        tl.store(second_ptr + cols, out.to(second_ptr.dtype.element_ty), mask=cols < N)


# --------------------------------------------------------------------------------------------------------- launches


def _tile() -> tuple[int, int, int]:
    """Return rows and columns per block, and warps: narrow blocks, since there are few columns and many SMs."""
    # A load takes 16 fp32 columns from 64 rows: 64 bytes, two sectors, per row. N / 16 programs keep most SMs busy at
    # the usual widths.
    return 64, 16, 8


def spread(m: int, block_m: int, block_n: int, device: torch.device) -> tuple[int, int, int] | None:
    """Return rows per tile, warps and stages for row counts so small that tiles with `block_m` rows would idle half the
    device.

    None for more rows, and for a single tile, whose program stores the sums without a second launch.
    """
    tiles, programs = cdiv(m, block_m), multiprocessors(device)
    if block_m == 1 or tiles == 1 or 2 * tiles > programs:
        return None
    # 1, 4 or 16 rows, not every power of two: each value compiles a kernel, and lengths change between steps.
    rows = 1
    while 4 * rows < block_m and 4 * rows * programs <= m:
        rows *= 4
    return rows, min(8, max(1, rows * block_n // 512)), 1


WARPS = 8  # per program with a tile from `cut`


class Cut(NamedTuple):
    """How programs split M rows × N columns that they sum.

    parts: row parts with `each` rows; blocks: column blocks; rows, columns: the tile.
    """

    parts: int
    each: int
    blocks: int
    rows: int
    columns: int


@functools.lru_cache(maxsize=4096)
def cut(M: int, N: int, device: torch.device) -> Cut:
    """Return the split: tiles are 512 bytes wide for 16-bit dtypes, and eight programs per SM keep memory busy."""
    columns = min(256, max(16, next_power_of_2(N)))
    rows, blocks = 8192 // max(64, columns), cdiv(N, columns)
    each = cdiv(cdiv(M, max(1, 8 * multiprocessors(device) // blocks)), rows) * rows
    return Cut(cdiv(M, each), each, blocks, rows, columns)


def shares(programs: int, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the buffers where a backward kernel's programs store shares of first and second; the second is None unless
    separate.

    Several programs store fp32 rows for `sum_rows`, so that sums are rounded once. A single program stores the results
    directly.
    """
    if programs == 1:
        return first, second
    halves = () if second is None else (2,)
    return first.new_empty((programs, *halves, first.shape[0]), dtype=torch.float32), None


def sum_rows(
    partial: Tensor, first: Tensor, second: Tensor | None = None, shares: Tensor | None = None,
    total: Tensor | None = None,
) -> None:  # fmt: skip
    """Write partial's column sums to first, or the sums of both halves to first and second.

    Args:
        partial: (P, N), or (P, 2, N) with `second`; fp32, dense. If partial is first (see `shares`), there is nothing
            to do.
        first, second: (N,), any float dtype, dense.
        shares: (S,) fp32, summed into total.
        total: a single number.
    """
    if partial is first:
        return
    P, N = partial.shape[0], first.shape[0]
    halves = 1 if second is None else 2
    # partial is dense: P, N and dtypes determine its strides, and so the key.
    S = None if shares is None else shares.shape[0]
    key = (P, N, S, *(None if t is None else t.dtype for t in (first, second, total)))

    def plan() -> Plan:
        block_p, block_n, warps = _tile()
        programs = cdiv(N, block_n) * halves + (total is not None)
        return programs, (P, N, N * halves, S, block_p, block_n), {"num_warps": warps}

    launch(_sum_rows_kernel, key, (partial, first, second, shares, total), plan)
