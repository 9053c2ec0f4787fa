"""Sort all tokens' choices by expert: a stable counting sort in two launches, without atomics.

A slot is a token's choice, t · K + k. The first launch counts the experts in each block of slots. In the second launch
each block sums the counts over all blocks, and the sums over earlier blocks give the positions of its own slots. The
second launch also lists the row tiles for the products: each expert's rows are contiguous and start a new tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, next_power_of_2, tl

LEAST_ROWS = 16  # smallest tile; the tile list is allocated for this size


class Routing(NamedTuple):
    """The sorted choices, all int32.

    Attributes:
        order: (S,), the slots sorted by expert. Not written beyond offsets[E]; do not read there.
        place: (S,), each slot's position in `order`, or −1 for an index outside [0, E).
        offsets: (E + 1,), the start of each expert's slots in `order`.
        tiles: (2, ·), expert and first row per tile; surplus tiles have expert E.
    """

    order: Tensor
    place: Tensor
    offsets: Tensor
    tiles: Tensor


# ---------------------------------------------------------------------------------------------------------- kernels


# One program counts the experts in BLOCK slots, STEP slots at a time: the comparison matrix (STEP, WIDTH) must fit in
# registers.
# index (S,): an expert per slot; an index outside [0, E) matches none. counts (BLOCKS, E). WIDTH: E rounded up to a
# power of two.
@jit
@do_not_specialize("S")
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


# One program places BLOCK slots and writes its share of the tile list; program 0 also writes the offsets.
# index (S,), counts (BLOCKS, E): input. order, place (S,), offsets (E + 1,), tiles (2, TILES): `Routing`. ROWS: rows
# per tile.
# Each program reads all counts from L2, BLOCKS² · E loads in total, which saves a third launch for the prefix sums.
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
    # Tile list, striped over the programs. Each expert starts a new tile, so that no tile needs two weights.
    tiles = (total + (ROWS - 1)) // ROWS
    last = tl.cumsum(tiles, 0)
    for first in range(block * STEP, TILES, BLOCKS * STEP):
        tile = first + tl.arange(0, STEP)
        # A tile's expert is the number of experts whose tiles end before it; E for surplus tiles.
        expert = tl.sum(((last[None, :] <= tile[:, None]) & (experts < E)[None, :]).to(tl.int32), 1)
        rows = begin[None, :] + (tile[:, None] - (last - tiles)[None, :]) * ROWS
        row = tl.sum(tl.where(expert[:, None] == experts[None, :], rows, 0), 1)
        tl.store(tiles_ptr + tile, expert, mask=tile < TILES)
        tl.store(tiles_ptr + TILES + tile, row, mask=tile < TILES)


# --------------------------------------------------------------------------------------------------------- launches


def rows_of_a_tile(slots: int, experts: int, dtype: torch.dtype) -> int:
    """Return the rows per tile for the products.

    On average half of each expert's last tile is empty, so a tile has at most as many rows as the mean token count per
    expert. 128 rows are split over two warp groups with 64 rows each.
    """
    mean = slots // max(experts, 1)
    most = 64 if dtype == torch.float32 else 128
    # An average expert fills at least five eighths of a tile (96 of 128, 40 of 64, 20 of 32 rows): emptier tiles waste
    # products, and smaller tiles load the weight more often.
    return min(most, 128 if mean >= 96 else 64 if mean >= 40 else 32 if mean >= 20 else LEAST_ROWS)


def tiles_at_most(slots: int, experts: int, rows: int) -> int:
    """Return the tile count for the worst split, where every expert's last tile has a single row."""
    return min((slots + experts * (rows - 1)) // rows, slots)


def empty_routing(index: Tensor, E: int) -> Routing:
    S = index.shape[0] * index.shape[1]

    def room(*shape: int) -> Tensor:
        return index.new_empty(shape, dtype=torch.int32)

    # int32: half the bytes of torch's indices, and S stays below 2**31.
    return Routing(room(S), room(S), room(E + 1), room(2, S // LEAST_ROWS + E))


def _route_tile(E: int) -> tuple[int, int, dict[str, int]]:
    """Return slots per block, slots per step, and Triton options."""
    # A step's slots × experts are about 4096 elements in registers: 16 slots with 256 experts.
    step = max(1, min(32, 4096 // next_power_of_2(E)))
    return max(256, step), step, {"num_warps": 4}


def route(index: Tensor, E: int, rows: int) -> Routing:
    """Sort the choices (T, K) by expert, and list the tiles with `rows` rows each."""
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
