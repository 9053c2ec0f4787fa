"""Few wide rows, each split into parts for several programs: one program per row would leave SMs idle."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.kernels.device import multiprocessors
from tigon.kernels.rows import cdiv, next_power_of_2

# For vocabulary rows that are summed and not written. A part is a multiple of PART columns, such that there are PARTED
# programs per multiprocessor; with more rows than half that count, rows stay whole. Rows up to WIDE columns stay whole
# too, because a second launch takes as long as reading such a row.
PART, PARTED, WIDE = 4096, 4, 16384


class Parts(NamedTuple):
    """How rows are split. number: parts per row; width: columns per part; most: upper bound on number.

    most is a power of 2 that depends only on the row width, so that another row count compiles no new kernel.
    """

    number: int
    width: int
    most: int


def cut_rows(M: int, N: int, unit: int, programs: int) -> Parts | None:
    """Split M rows of N columns into whole units of columns, for `programs` programs in total; None for no split.

    Units are distributed evenly: no part is empty, and there may be fewer programs than requested.
    """
    units = cdiv(N, unit)
    number = min(programs // M, units)
    if number < 2:
        return None
    width = cdiv(units, number) * unit
    return Parts(cdiv(N, width), width, next_power_of_2(units))


def find_sum_parts(M: int, N: int, device: torch.device, wide: int = 1) -> Parts | None:
    """Parts for kernels that sum M rows of N classes; None if M gives enough programs or N is up to wide · WIDE."""
    return None if wide * WIDE >= N else cut_rows(M, N, PART, PARTED * multiprocessors(device))


def part_tile(depth: int, block: int, warps: int) -> tuple[int, int, int]:
    """A tile of `depth` blocks, no wider than the smallest part."""
    most = min(block, PART)
    return max(1, min(depth, PART // most)), most, max(1, warps * most // block)


def fold_warps(most: int) -> int:
    """Warps for a program that adds up a row's parts: 8 numbers of each kind per thread."""
    return min(8, max(1, most // 256))
