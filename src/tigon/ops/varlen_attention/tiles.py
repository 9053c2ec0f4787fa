"""Tables of tiles, made on the device from the documents' offsets: the host never learns the documents' lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tigon.kernels import (
    Plan,
    SymInt,
    cdiv,
    do_not_specialize,
    find_capture,
    is_traced,
    jit,
    launch,
    launcher,
    tl,
)

# Entries and documents that a program has in registers.
ENTRIES, DOCUMENTS = 64, 64
KINDS = ("forward", "queries", "keys")

# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _count_tiles(offsets_ptr, first, B, count, size, DOCUMENTS: tl.constexpr):
    """Return the documents from `first` on, the tile count of each, and how many documents end before they start, or
    lie outside of 0..count."""
    document = first + tl.arange(0, DOCUMENTS)
    start = tl.load(offsets_ptr + document, mask=document < B, other=count)
    stop = tl.load(offsets_ptr + document + 1, mask=document < B, other=count)
    wrong = tl.sum(((stop < start) | (start < 0) | (stop > count)).to(tl.int32), 0)
    return document, tl.cdiv(stop - start, size).to(tl.int32), wrong


# One program makes ENTRIES entries of one of three tables, for tiles of `forward`, `queries` and `keys` tokens.
# offsets (B + 1,) int. tiles (3, rows, 6) int32: start and stop, range of the document, and twice
# whether offsets are wrong.
#
# The program takes the tiles at its numbers in the order of the documents, and finds the place of each in the order of
# falling work. Tiles are alike in work if they have as many other tiles of their document to read, their level: for
# queries the tiles before them, for keys those behind. So a tile's place is the number of tiles of higher levels, and
# of earlier documents at the same level.
# Wrong offsets make a table over the whole row, marked as wrong: nothing is read outside of the tensors.
@jit
@do_not_specialize("B", "count", "rows", "forward", "queries", "keys")
def _tiles_kernel(
    offsets_ptr, tiles_ptr, B, count, rows, forward, queries, keys,
    ENTRIES: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(0) % 3
    size = tl.where(table == 0, forward, tl.where(table == 1, queries, keys))
    number = tl.program_id(0) // 3 * ENTRIES + tl.arange(0, ENTRIES)
    document = tl.zeros((ENTRIES,), tl.int32)
    level = number
    tiles = 0
    wrong = (tl.load(offsets_ptr) != 0).to(tl.int32) + (tl.load(offsets_ptr + B) != count).to(tl.int32)
    for first in range(0, B, DOCUMENTS):
        at, counts, errors = _count_tiles(offsets_ptr, first, B, count, size, DOCUMENTS)
        before = (tiles + tl.cumsum(counts, 0))[None, :] <= number[:, None]
        before = before & (at < B)[None, :]
        document += tl.sum(before.to(tl.int32), 1)
        level -= tl.sum(tl.where(before, counts[None, :], 0), 1)
        tiles += tl.sum(counts, 0)
        wrong += errors
    right = wrong == 0
    live = right & (number < tiles)
    begin = tl.load(offsets_ptr + document, mask=live, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + document + 1, mask=live, other=0).to(tl.int32)
    place = tl.where(live, 0, number)
    for first in range(0, tl.where(right, B, 0), DOCUMENTS):
        at, counts, _ = _count_tiles(offsets_ptr, first, B, count, size, DOCUMENTS)
        above = tl.maximum(counts[None, :] - level[:, None] - 1, 0)
        alike = (counts[None, :] > level[:, None]) & (at[None, :] < document[:, None])
        place += tl.where(live, tl.sum(above + alike.to(tl.int32), 1), 0)
    end = tl.where(right, end, count)
    level = tl.where(right, level, number)
    live = live | ((wrong > 0) & (number < tl.cdiv(count, size)))
    index = tl.where(table == 2, tl.cdiv(end - begin, size) - 1 - level, level)
    start = begin + index * size
    stop = tl.where(live, tl.minimum(start + size, end), 0)
    stored = place < rows
    tiles_ptr += (table * rows + place).to(tl.int64) * 6
    tl.store(tiles_ptr, tl.where(live, start, 0), mask=stored)
    tl.store(tiles_ptr + 1, stop, mask=stored)
    tl.store(tiles_ptr + 2, begin, mask=stored)
    tl.store(tiles_ptr + 3, end, mask=stored)
    mark = tl.zeros((ENTRIES,), tl.int32) + (wrong > 0).to(tl.int32)
    tl.store(tiles_ptr + 4, mark, mask=stored)
    tl.store(tiles_ptr + 5, mark, mask=stored)


# --------------------------------------------------------------------------------------------------------- launches


def _varlen_tiles_fake(offsets: Tensor, count: SymInt, *sizes: int) -> Tensor:
    # An entry for each full tile and each document's last; a multiple of four keeps each table's address aligned.
    rows = (count // min(sizes) + offsets.shape[0] + 2) // 4 * 4
    return offsets.new_empty((len(KINDS), rows, 6), dtype=torch.int32)


@launcher(_varlen_tiles_fake)
def _varlen_tiles(offsets: Tensor, count: SymInt, forward: int, queries: int, keys: int) -> Tensor:
    offsets = offsets.contiguous()
    tiles = _varlen_tiles_fake(offsets, count, forward, queries, keys)
    rows, B = tiles.shape[1], offsets.shape[0] - 1

    def plan() -> Plan:
        arguments = B, count, rows, forward, queries, keys, ENTRIES, DOCUMENTS
        return len(KINDS) * cdiv(rows, ENTRIES), arguments, {"num_warps": 4}

    if rows:
        launch(_tiles_kernel, (B, count, forward, queries, keys, offsets.dtype), (offsets, tiles), plan)
    return tiles


# By offsets: (address, version, stream, capture), and the tables by what made them. A model's layers share them.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def find_tiles(offsets: Tensor, count: int, sizes: tuple[int, ...]) -> Tensor:
    """Return the tables for tiles of `sizes` tokens, (3, rows, 6) int32, in the order of KINDS."""
    return find_tables(offsets, (count, *sizes), lambda: _varlen_tiles(offsets, count, *sizes))


def find_tables(offsets: Tensor, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """Return what `make` makes of offsets, under a key.

    Tables are made once for offsets whose values do not change, and once more in each CUDA graph: tables from before a
    capture would hold the documents of then, and later calls would find tables that a replay overwrites. A compiler
    merges equal calls in its graph.
    """
    if is_traced(offsets) or offsets.is_inference() or (capture := find_capture(offsets)) is None:
        return make()
    stream = torch._C._cuda_getCurrentRawStream(offsets.get_device()) if offsets.is_cuda else 0
    state = offsets.data_ptr(), offsets._version, stream, capture
    known, tables = _made.get(offsets, (None, {}))
    if known != state:
        tables = {}
        _made[offsets] = state, tables
    if key not in tables:
        tables[key] = make()
    found: Tensor = tables[key]
    return found
