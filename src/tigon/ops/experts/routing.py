"""The choices of all tokens, sorted by expert: a counting sort of two launches, stable, without atomics.

A choice is a slot, t · K + k. The first launch counts the experts in each block of slots. In the second each block adds
up what all blocks counted, of which the blocks before it are where its own slots begin, and places them. It also lists
the tiles of rows that the products walk: of each expert's rows, which follow one another, as many tiles as it takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime import cdiv, launch, next_power_of_2, tl, triton

LEAST_ROWS = 16  # of a tile; what room for tiles is made by


class Routing(NamedTuple):
    """order (S,): the slots, sorted by expert. place (S,): where each slot is in it, or −1 for no expert of ours.
    offsets (E + 1,): where each expert's slots begin in `order`. tiles (2, ·): expert and first row of each tile; E
    where there is none. All int32; what lies beyond offsets[E] in `order` is not written, and is not to be read."""

    order: Tensor
    place: Tensor
    offsets: Tensor
    tiles: Tensor


# ---------------------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["S"])
def _count_kernel(
    index_ptr, counts_ptr, S, E, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    count = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, tl.minimum(BLOCK, S - block * BLOCK), STEP):
        slot = block * BLOCK + start + tl.arange(0, STEP)
        expert = tl.load(index_ptr + slot, mask=slot < S, other=-1)
        count += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * E + experts, count, mask=experts < E)


@triton.jit(do_not_specialize=["S", "BLOCKS", "TILES"])
def _place_kernel(
    index_ptr, counts_ptr, order_ptr, place_ptr, offsets_ptr, tiles_ptr, S, E, BLOCKS, TILES,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    before = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, BLOCKS, STEP):
        others = first + tl.arange(0, STEP)
        mask = (others < BLOCKS)[:, None] & (experts < E)[None, :]
        count = tl.load(counts_ptr + others[:, None] * E + experts[None, :], mask=mask, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((others < block)[:, None], count, 0), 0)
    begin = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(offsets_ptr + experts, begin, mask=experts < E)
        tl.store(offsets_ptr + E, tl.sum(total, 0))
    running = begin + before
    for start in range(0, tl.minimum(BLOCK, S - block * BLOCK), STEP):
        slot = block * BLOCK + start + tl.arange(0, STEP)
        expert = tl.load(index_ptr + slot, mask=slot < S, other=-1)
        chosen = ((expert[:, None] == experts[None, :]) & (experts < E)[None, :]).to(tl.int32)
        earlier = tl.cumsum(chosen, 0) - chosen
        at = tl.sum(chosen * (earlier + running[None, :]), 1)
        known = tl.sum(chosen, 1) > 0
        tl.store(order_ptr + at, slot, mask=known)
        tl.store(place_ptr + slot, tl.where(known, at, -1), mask=slot < S)
        running += tl.sum(chosen, 0)
    # The tiles, in turns among the blocks.
    tiles = (total + (ROWS - 1)) // ROWS
    last = tl.cumsum(tiles, 0)
    for first in range(block * STEP, TILES, BLOCKS * STEP):
        tile = first + tl.arange(0, STEP)
        expert = tl.sum(((last[None, :] <= tile[:, None]) & (experts < E)[None, :]).to(tl.int32), 1)
        rows = begin[None, :] + (tile[:, None] - (last - tiles)[None, :]) * ROWS
        row = tl.sum(tl.where(expert[:, None] == experts[None, :], rows, 0), 1)
        tl.store(tiles_ptr + tile, expert, mask=tile < TILES)
        tl.store(tiles_ptr + TILES + tile, row, mask=tile < TILES)


# --------------------------------------------------------------------------------------------------------- launches


def rows_of_a_tile(slots: int, experts: int, dtype: torch.dtype) -> int:
    """How many rows a tile of the products has: one of an expert's tiles is half empty on average, so no more than its
    tokens on average; 128, of which two groups of warps multiply 64 each, where there are enough."""
    mean = slots // max(experts, 1)
    most = 64 if dtype == torch.float32 else 128
    return min(most, 128 if mean >= 96 else 64 if mean >= 40 else 32 if mean >= 20 else LEAST_ROWS)


def tiles_at_most(slots: int, experts: int, rows: int) -> int:
    """Tiles of the worst split: every expert's last one holds a single row."""
    return min((slots + experts * (rows - 1)) // rows, slots)


def empty_routing(index: Tensor, E: int) -> Routing:
    S = index.shape[0] * index.shape[1]

    def room(*shape: int) -> Tensor:
        return index.new_empty(shape, dtype=torch.int32)

    return Routing(room(S), room(S), room(E + 1), room(2, S // LEAST_ROWS + E))


def _route_tile(E: int) -> tuple[int, int, dict[str, int]]:
    """Slots of a block, and of a step through it: as many as make, beside all experts, 4096 numbers in registers."""
    step = max(1, min(32, 4096 // next_power_of_2(E)))
    return max(256, step), step, {"num_warps": 4}


def route(index: Tensor, E: int, rows: int) -> Routing:
    """Sort the choices (T, K) by expert, and list the tiles of `rows` rows."""
    routing = empty_routing(index, E)
    index = index.contiguous()
    S, TILES = index.numel(), routing.tiles.shape[1]
    block, step, options = _route_tile(E)
    blocks, width = max(1, cdiv(S, block)), next_power_of_2(E)
    counts = index.new_empty((blocks, E), dtype=torch.int32)
    key = (S, E, rows, index.dtype)
    launch(_count_kernel, key, (index, counts), lambda: (blocks, (S, E, block, step, width), options))
    arguments = (S, E, blocks, TILES, rows, block, step, width)
    launch(_place_kernel, key, (index, counts, *routing), lambda: (blocks, arguments, options))
    return routing
