"""Few wide rows, each cut into parts for several programs: a program a row would leave multiprocessors idle."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.kernels.device import multiprocessors
from tigon.kernels.rows import cdiv, next_power_of_2

# Rows of a vocabulary that are summed, and not written, are cut by this. A part is so many columns or a multiple, until
# there are PARTED programs for each multiprocessor: more rows than half of those are programs enough. Rows of up to
# WIDE columns are left whole, since a second launch takes as long as reading one.
PART, PARTED, WIDE = 4096, 4, 16384


class Parts(NamedTuple):
    """How each of some rows is cut. number: parts of a row; width: a part's columns; most: a bound of the number.

    most is a power of 2 that follows from the row's width alone, so that another number of rows compiles no kernel.
    """

    number: int
    width: int
    most: int


def cut_rows(M: int, N: int, unit: int, programs: int) -> Parts | None:
    """How M rows of N columns are cut into whole units of columns, for so many programs in all; None for no cut.

    Units are shared out evenly: no part is empty, and there may be fewer programs than were asked for.
    """
    units = cdiv(N, unit)
    # The lesser of two numbers: parts for so many programs, and parts of one unit.
    number = min(programs // M, units)
    if number < 2:
        return None
    width = cdiv(units, number) * unit
    return Parts(cdiv(N, width), width, next_power_of_2(units))


def find_sum_parts(M: int, N: int, device: torch.device, wide: int = 1) -> Parts | None:
    """The parts of M rows of N classes that kernels sum; None where rows are programs enough, or up to wide · WIDE."""
    return None if wide * WIDE >= N else cut_rows(M, N, PART, PARTED * multiprocessors(device))


def part_tile(depth: int, block: int, warps: int) -> tuple[int, int, int]:
    """A tile of `depth` blocks, no wider than the least part."""
    most = min(block, PART)
    return max(1, min(depth, PART // most)), most, max(1, warps * most // block)


def fold_warps(most: int) -> int:
    """Warps of a program that adds the numbers of a row's parts: 8 of each kind a thread."""
    # One warp's threads meet without a barrier.
    return min(8, max(1, most // 256))
