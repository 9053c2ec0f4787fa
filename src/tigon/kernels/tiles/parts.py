"""Rows split into parts: which part a program owns. A part is read like a separate row, edges included.

Per-part numbers are stored by kind, so that a program loads one kind for all its row's parts in one run.
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def locate_part_of_row(P, width, N):
    """This program's row (int64), its part's first column, and the part's width, for rows of N in P parts."""
    program = tl.program_id(0)
    start = program % P * width
    return (program // P).to(tl.int64), start, tl.minimum(width, N - start)


@jit
def numbers_of_parts(partial_ptr, row, kind: tl.constexpr, P, other, KINDS: tl.constexpr, BLOCK_P: tl.constexpr):
    """One kind of number for each part of a row, (BLOCK_P,); `other` past the last part. partial: (M, KINDS, P)."""
    parts = tl.arange(0, BLOCK_P)
    return tl.load(partial_ptr + (row * KINDS + kind) * P + parts, mask=parts < P, other=other)


@jit
def locate_part(W, rows_each, UNIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's part of the rows, its first row, columns and mask, as `tigon.ops.sum_rows.cut` splits them.

    W counts UNIT columns, which tells the compiler that the width is a multiple of UNIT: rows of 1000 16-bit numbers
    are then read 16 bytes per thread, like rows of 1008.
    """
    blocks = tl.cdiv(W, BLOCK_N // UNIT)
    part = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    return part, part.to(tl.int64) * rows_each, cols, cols < W * UNIT
