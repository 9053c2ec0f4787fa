"""A row in parts: which of them a program has. A part is read as a row of its own, edges included.

The numbers of parts lie kind by kind, so that a program loads one kind of all parts of its row in one run.
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def part_of_row(P, width, N):
    """This program's row (int64), its part's first column, and the part's columns, of rows of N in P parts."""
    program = tl.program_id(0)
    start = program % P * width
    # No part is empty: P is the number of parts that begin within a row.
    return (program // P).to(tl.int64), start, tl.minimum(width, N - start)


@jit
def numbers_of_parts(partial_ptr, row, kind: tl.constexpr, P, other, KINDS: tl.constexpr, BLOCK_P: tl.constexpr):
    """One kind of number of each part of a row, (BLOCK_P,); `other` behind the last part. partial: (M, KINDS, P)."""
    parts = tl.arange(0, BLOCK_P)
    return tl.load(partial_ptr + (row * KINDS + kind) * P + parts, mask=parts < P, other=other)
