"""The choices of all tokens, sorted by expert: a counting sort of two launches, stable, without atomics.

A choice of a token is a slot, t · K + k. The first launch counts the experts in each block of slots. In the second each
block adds up the counts of all blocks; the counts of the blocks before it say where its own slots go. The second launch
also lists the tiles of rows that the products walk: each expert's rows follow one another and take whole tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, next_power_of_2, tl

LEAST_ROWS = 16  # the fewest rows of a tile: room for the list of tiles is made for that size


class Routing(NamedTuple):
    """order (S,): the slots, sorted by expert. place (S,): each slot's position in `order`, or −1 for an index outside
    [0, E). offsets (E + 1,): where each expert's slots begin in `order`. tiles (2, ·): expert and first row of each
    tile, expert E for a surplus tile. All int32. `order` beyond offsets[E] is not written; do not read it."""

    order: Tensor
    place: Tensor
    offsets: Tensor
    tiles: Tensor


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
@do_not_specialize("S")
def _count_kernel(
    index_ptr, counts_ptr, S, E, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    # Counting sort by blocks, stable and free of atomics: counts, their sums over blocks, then places.
    block = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    # Counts of one block of slots: blocks are added in their order by the next kernel.
    count = tl.zeros((WIDTH,), tl.int32)
    # STEP slots at a time: the comparison's matrix (STEP, WIDTH) must fit into registers.
    for start in range(0, tl.minimum(BLOCK, S - block * BLOCK), STEP):
        slot = block * BLOCK + start + tl.arange(0, STEP)
        expert = tl.load(index_ptr + slot, mask=slot < S, other=-1)
        # A comparison with every expert instead of atomics: an index outside [0, E) matches none.
        count += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * E + experts, count, mask=experts < E)


@jit
@do_not_specialize("S", "BLOCKS", "TILES")
def _place_kernel(
    index_ptr, counts_ptr, order_ptr, place_ptr, offsets_ptr, tiles_ptr, S, E, BLOCKS, TILES,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    before = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, BLOCKS, STEP):
        # Every block reads all of counts, (BLOCKS, E), from L2: BLOCKS² · E reads in all spare a launch that would add
        # them up.
        others = first + tl.arange(0, STEP)
        mask = (others < BLOCKS)[:, None] & (experts < E)[None, :]
        count = tl.load(counts_ptr + others[:, None] * E + experts[None, :], mask=mask, other=0)
        total += tl.sum(count, 0)
        # Earlier blocks' counts alone: what is stable within a block and between blocks is stable as a whole.
        before += tl.sum(tl.where((others < block)[:, None], count, 0), 0)
    # Every block computes all offsets from the counts, which spares a third launch.
    # The sum is exclusive: the slots of all smaller experts.
    begin = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(offsets_ptr + experts, begin, mask=experts < E)
        tl.store(offsets_ptr + E, tl.sum(total, 0))
    # Where the next slot of each expert goes: behind the smaller experts, and behind earlier blocks.
    running = begin + before
    for start in range(0, tl.minimum(BLOCK, S - block * BLOCK), STEP):
        slot = block * BLOCK + start + tl.arange(0, STEP)
        expert = tl.load(index_ptr + slot, mask=slot < S, other=-1)
        # One row of this matrix has at most one 1: sums over experts pick that expert's number.
        chosen = ((expert[:, None] == experts[None, :]) & (experts < E)[None, :]).to(tl.int32)
        # Slots of the same expert keep their order within a step: the sort is stable.
        earlier = tl.cumsum(chosen, 0) - chosen
        # The slot's own expert is the only term: places of slots in this step, then of earlier steps, blocks and
        # experts.
        at = tl.sum(chosen * (earlier + running[None, :]), 1)
        known = tl.sum(chosen, 1) > 0
        # Places are distinct: the scattered stores need no atomics.
        tl.store(order_ptr + at, slot, mask=known)
        tl.store(place_ptr + slot, tl.where(known, at, -1), mask=slot < S)
        running += tl.sum(chosen, 0)
    # The list of tiles: the blocks take turns at writing it.
    # Each expert's rows begin a new tile, so that no tile needs two weights.
    tiles = (total + (ROWS - 1)) // ROWS
    last = tl.cumsum(tiles, 0)
    for first in range(block * STEP, TILES, BLOCKS * STEP):
        tile = first + tl.arange(0, STEP)
        # The number of experts whose tiles end before this one is its expert; E for surplus tiles.
        expert = tl.sum(((last[None, :] <= tile[:, None]) & (experts < E)[None, :]).to(tl.int32), 1)
        # The tile's number within its expert, times ROWS, from the expert's first row.
        rows = begin[None, :] + (tile[:, None] - (last - tiles)[None, :]) * ROWS
        row = tl.sum(tl.where(expert[:, None] == experts[None, :], rows, 0), 1)
        tl.store(tiles_ptr + tile, expert, mask=tile < TILES)
        tl.store(tiles_ptr + TILES + tile, row, mask=tile < TILES)


# --------------------------------------------------------------------------------------------------------- launches


def rows_of_a_tile(slots: int, experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile of the products. One of each expert's tiles is half empty on average, so a tile has no more rows
    than an expert has tokens on average. 128, where two groups of warps multiply 64 rows each, if there are enough."""
    mean = slots // max(experts, 1)
    most = 64 if dtype == torch.float32 else 128
    # An average expert fills at least five eighths of its tile, 96 of 128, 40 of 64 or 20 of 32 rows: a half-empty tile
    # multiplies for nothing, and a small one reads the weight more often.
    return min(most, 128 if mean >= 96 else 64 if mean >= 40 else 32 if mean >= 20 else LEAST_ROWS)


def tiles_at_most(slots: int, experts: int, rows: int) -> int:
    """Tiles of the worst split, in which every expert's last tile holds a single row. Surplus programs exit at once."""
    return min((slots + experts * (rows - 1)) // rows, slots)


def empty_routing(index: Tensor, E: int) -> Routing:
    S = index.shape[0] * index.shape[1]

    def room(*shape: int) -> Tensor:
        return index.new_empty(shape, dtype=torch.int32)

    # int32: half the bytes of torch's indices, and S stays below 2**31.
    return Routing(room(S), room(S), room(E + 1), room(2, S // LEAST_ROWS + E))


def _route_tile(E: int) -> tuple[int, int, dict[str, int]]:
    """Slots of a block, and of a step through it: a step's slots × experts are about 4096 numbers in registers."""
    # WIDTH is E rounded up to a power of two: with 256 experts a step is 16 slots.
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
