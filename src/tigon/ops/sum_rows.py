"""out = Σ rows of a small fp32 matrix, rounded once: the last step of a gradient that persistent programs sum in parts.

Each program of a backward kernel keeps its share of dW (and of dbias) in registers and stores that share as one row.
This launch adds the rows and casts. The order of the sum is fixed, and so are its bits, which atomics would not give.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, jit, launch, multiprocessors, next_power_of_2, tl

# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _sum_rows_kernel(
    partial_ptr, first_ptr, second_ptr, shares_ptr, sum_ptr, P, N, stride_p, S,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if sum_ptr is not None:  # noqa: SIM102
        # A program more than the columns need has the shares of one number, such as alpha's gradient.
        if tl.program_id(0) == tl.num_programs(0) - 1:
            share = tl.zeros((BLOCK_P * BLOCK_N,), tl.float32)
            for start in range(0, S, BLOCK_P * BLOCK_N):
                at = start + tl.arange(0, BLOCK_P * BLOCK_N)
                share += tl.load(shares_ptr + at, mask=at < S, other=0.0)
            tl.store(sum_ptr, tl.sum(share, 0).to(sum_ptr.dtype.element_ty))
            return
    # The matrix has a row for each program of the kernel before: a few megabytes, of which much may still be in L2.
    blocks = tl.cdiv(N, BLOCK_N)
    # One launch for both halves: dW and dbias lie side by side in each row.
    which = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    partial_ptr += which * N
    # Rows BLOCK_P apart share a sum, and these sums are added in a tree: in the same order on every run.
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        # 0 beyond P: the number of programs is no multiple of BLOCK_P, nor does the sum depend on it.
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + rows[:, None].to(tl.int64) * stride_p + cols[None, :], mask=mask, other=0.0)
    # The one rounding is at the store: partial sums and their sum are fp32.
    out = tl.sum(total, 0)
    if which == 0:
        tl.store(first_ptr + cols, out.to(first_ptr.dtype.element_ty), mask=cols < N)
    # A launch without a second result has no program with which = 1: None lets the compiler drop the branch.
    elif second_ptr is not None:
        tl.store(second_ptr + cols, out.to(second_ptr.dtype.element_ty), mask=cols < N)


@jit
def part_of(W, rows_each, UNIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's part of the rows and the first of them, as `cut` has it, its columns, and which there are.

    W counts UNIT columns, which tells the compiler that the width is a multiple of it: rows of 1000 numbers of 16 bits
    are then read 16 bytes a thread, as those of 1008 are.
    """
    blocks = tl.cdiv(W, BLOCK_N // UNIT)
    part = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # int64: a batch may have more than 2**31 numbers.
    return part, part.to(tl.int64) * rows_each, cols, cols < W * UNIT


# --------------------------------------------------------------------------------------------------------- launches


def _tile() -> tuple[int, int, int]:
    """Rows and columns of a block, and warps. Narrow blocks, since there are few columns and many multiprocessors."""
    # A load takes 16 fp32 columns of 64 rows: 64 bytes, two sectors, from each row, and nothing beside them. N / 16
    # programs keep most multiprocessors at work at the usual widths.
    return 64, 16, 8


def spread(m: int, block_m: int, block_n: int, device: torch.device) -> tuple[int, int, int] | None:
    """Rows of a tile, warps and stages for so few rows that tiles of `block_m` would leave half of the device idle.

    None for more rows; and for those of one tile, whose program stores their sums without a second launch.
    """
    tiles, programs = cdiv(m, block_m), multiprocessors(device)
    if block_m == 1 or tiles == 1 or 2 * tiles > programs:
        return None
    # 1, 4 or 16 rows, and not any power of two: each is a kernel to compile, and lengths change from step to step.
    rows = 1
    while 4 * rows < block_m and 4 * rows * programs <= m:
        rows *= 4
    return rows, min(8, max(1, rows * block_n // 512)), 1


WARPS = 8  # of a program that `cut` gives a tile


class Cut(NamedTuple):
    """How programs share out M rows of N columns that they sum. parts: of the rows, of `each` rows; blocks: of the
    columns; then a tile's rows and columns."""

    parts: int
    each: int
    blocks: int
    rows: int
    columns: int


@functools.lru_cache(maxsize=4096)
def cut(M: int, N: int, device: torch.device) -> Cut:
    """Tiles of 512 bytes of a 16-bit row; eight programs a multiprocessor, which keep its memory busy."""
    columns = min(256, max(16, next_power_of_2(N)))
    rows, blocks = 8192 // max(64, columns), cdiv(N, columns)
    each = cdiv(cdiv(M, max(1, 8 * multiprocessors(device) // blocks)), rows) * rows
    return Cut(cdiv(M, each), each, blocks, rows, columns)


def shares(programs: int, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Where the programs of a backward kernel store their shares of first and second, and of second, if apart.

    Rows for `sum_rows` to add, in fp32 whatever the results' dtype: a sum is rounded once, when all is added. One
    program, of few rows, has the whole sums and stores the results themselves.
    """
    if programs == 1:
        return first, second
    halves = () if second is None else (2,)
    return first.new_empty((programs, *halves, first.shape[0]), dtype=torch.float32), None


def sum_rows(
    partial: Tensor, first: Tensor, second: Tensor | None = None, shares: Tensor | None = None,
    total: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the column sums of partial to first, or those of its two halves to first and second.

    partial: (P, N), or (P, 2, N) with `second`; fp32, dense. first, second: (N,), any float dtype, dense. Nothing is to
    be done where `shares` gave the results themselves. shares: (S,) fp32, whose sum goes to total, one number.
    """
    if partial is first:
        return
    P, N = partial.shape[0], first.shape[0]
    halves = 1 if second is None else 2
    # The matrix is dense, so that its row stride follows from N and halves: the key names dtypes beside P and N alone.
    # None is a constant: without shares the kernel has no such argument.
    S = None if shares is None else shares.shape[0]
    key = (P, N, S, *(None if t is None else t.dtype for t in (first, second, total)))

    def plan() -> Plan:
        block_p, block_n, warps = _tile()
        programs = cdiv(N, block_n) * halves + (total is not None)
        return programs, (P, N, N * halves, S, block_p, block_n), {"num_warps": warps}

    launch(_sum_rows_kernel, key, (partial, first, second, shares, total), plan)
