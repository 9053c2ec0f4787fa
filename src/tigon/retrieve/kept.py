"""Filters that come again: which rows pass each is kept as bits, and tested again for the rows that are written.

The bits of a filter take an eighth of a byte a row, where testing it reads 8 bytes a row and word. They tell of rows
whether they hold an item or not, since live bits stand beside them; so a row's bits may be written while no search
looks at the row, as its attributes are, and hiding rows changes none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tigon.retrieve.fork import Forkable
from tigon.retrieve.scan import RowBits, RowFilter
from tigon.retrieve.scan.bits import write_bits
from tigon.retrieve.scan.filters import EVERY

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

# By default the bits take what one word of attributes takes, and at most a GiB.
FILTERS, MOST = 64, 1 << 30
# Filters whose number of searches is remembered, and batches whose tensors are.
REMEMBERED, BATCHES = 1024, 64
# Numbers to which a filter's bits are rounded up, so that all begin alike in memory.
ALIGNED = 32

Filters = RowFilter | Sequence[RowFilter | None] | None


def bytes_of(rows: int) -> int:
    """Of the bits of one filter."""
    return 4 * -(-rows // (32 * ALIGNED)) * ALIGNED


def default_bytes(rows: int) -> int:
    return min(FILTERS * bytes_of(rows), MOST)


class Kept(Forkable):
    """The bits of filters of one index: those used lately, within a number of bytes.

    A filter is kept from its second search on. Bits are made between two searches, as live bits are written; what a
    search uses is looked up under the lock of searches, so that nothing is given up that a search still reads.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit  # None: default_bytes
        # Rows' attributes and their bits are written as one, and no filter's bits are made meanwhile.
        self.writing = threading.Lock()
        self.clear()
        self.survive_forks()

    def after_fork(self, is_child: bool) -> None:
        if is_child:
            self.writing = threading.Lock()

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept(self.limit)

    def __reduce__(self) -> tuple[type[Kept], tuple[int | None]]:
        return Kept, (self.limit,)

    def clear(self) -> None:
        """Give all up. No search and no update may be under way."""
        self.bits: Tensor | None = None
        self.places: dict[RowFilter, int] = {}  # rows of bits; the filter used last is the last
        self._seen: dict[int, None] = {}  # hashes: a filter itself may take megabytes
        self._all: tuple[list[RowFilter], Tensor] | None = None  # for updates: filters, and where their bits begin
        self._batches: dict[tuple[Any, ...], tuple[Tensor, Tensor, tuple[Any, ...]]] = {}

    def __len__(self) -> int:
        return len(self.places)

    # -------------------------------------------------------------------------------------------------------- search

    def prepare(self, index: Index, filters: Filters) -> None:
        """Before a search: make the bits of filters that come again, if no update is being written just now."""
        distinct = _distinct(filters)
        if not distinct or not index.schema.words or _is_captured(index.device):
            return
        missing = [f for f in distinct if f not in self.places]
        if not missing:
            return
        # Beside filters that are kept, new ones are tested alone; otherwise all of them would be.
        again = len(missing) < len(distinct) or all(hash(f) in self._seen for f in missing)
        with index.turns.compiling:
            self._seen.update(dict.fromkeys(map(hash, missing)))
            while len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]
        if again and self.writing.acquire(blocking=False):
            try:
                self._make(index, distinct)
            except torch.OutOfMemoryError:
                pass  # the search tests attributes, as without bits
            finally:
                self.writing.release()

    def found(self, index: Index, filters: Filters, rows: int) -> RowBits | None:
        """During a search: the bits of its filters, of the first rows; None where some are not kept."""
        places, bits = self.places, self.bits
        distinct = _distinct(filters)
        if bits is None or not distinct or not all(f in places for f in distinct) or _is_captured(index.device):
            return None
        for f in distinct:
            places[f] = places.pop(f)
        bits = bits[:, : (rows + 31) // 32]
        if isinstance(filters, RowFilter):
            return RowBits(bits[places[filters]][None])
        assert filters is not None
        stream = torch.cuda.current_stream(index.device) if index.device.type == "cuda" else None
        key = (stream, *map(id, filters))
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= BATCHES:
                self._batches.clear()
            number = {f: i for i, f in enumerate(distinct)}
            which = np.array([number[EVERY if f is None else f] for f in filters], dtype=np.int32)
            starts = _starts([places[f] for f in distinct], bits)
            # The filters are held, so that no other object gets their identity.
            batch = self._batches[key] = (_sent(which, index.device), starts, tuple(filters))
        return RowBits(bits, batch[0], batch[1])

    def _make(self, index: Index, distinct: list[RowFilter]) -> None:
        """The bits of those of the filters that have none, in place of those that were used least lately."""
        total = int(index.attributes.shape[1])
        most = (default_bytes(total) if self.limit is None else self.limit) // bytes_of(total)
        if len(distinct) > most:
            return
        caller = torch.cuda.current_stream(index.device) if index.device.type == "cuda" else None
        with index.turns.switch(index.device):
            if caller is not None:
                torch.cuda.current_stream(index.device).wait_stream(caller)
            if int(index.attributes.shape[1]) != total:  # it has grown since
                return
            missing = [f for f in distinct if f not in self.places]
            if not missing:
                return
            self._make_room(index, len(self.places) + len(missing), most)
            bits = self.bits
            assert bits is not None
            for f in [f for f in self.places if f not in distinct][: max(0, len(self.places) + len(missing) - most)]:
                del self.places[f]
            self._batches.clear()
            free = sorted(set(range(len(bits))) - set(self.places.values()))[: len(missing)]
            write_bits(missing, index.attributes, bits, _starts(free, bits))
            self.places.update(zip(missing, free, strict=True))
            self._all = list(self.places), _starts(list(self.places.values()), bits)

    def warm(self, index: Index) -> None:
        """Compile what `renew` runs, by the bits of the first rows, which stay as they are."""
        with self.writing, index.turns.switch(index.device):
            self.renew(index, torch.zeros(1, dtype=torch.int64, device=index.device))

    def _make_room(self, index: Index, filters: int, most: int) -> None:
        """Memory for so many filters, doubled as they come; what is there stays."""
        have = 0 if self.bits is None else len(self.bits)
        if have >= min(filters, most):
            return
        size = min(most, max(4, 2 * have, filters))
        made = torch.zeros(size, bytes_of(int(index.attributes.shape[1])) // 4, dtype=torch.int32, device=index.device)
        if self.bits is not None:
            made[:have] = self.bits
        self.bits = made

    # ------------------------------------------------------------------------------------------------------- updates

    def renew(self, index: Index, words: Tensor) -> None:
        """After attributes of rows were written, under `writing`: the rows' bits of all filters.

        words: (n,) int64 on the index's device, the numbers of bits that the rows are in.
        """
        if self.bits is None or self._all is None or not len(words):
            return
        filters, starts = self._all
        write_bits(filters, index.attributes, self.bits, starts, words)


def _distinct(filters: Filters) -> list[RowFilter]:
    if filters is None:
        return []
    if isinstance(filters, RowFilter):
        return [filters]
    found = list(dict.fromkeys(EVERY if f is None else f for f in filters))
    return [] if found == [EVERY] else found


def _starts(places: list[int], bits: Tensor) -> Tensor:
    return _sent(np.array(places, dtype=np.int64) * bits.stride(0), bits.device)


def _sent(values: Any, device: torch.device) -> Tensor:
    from tigon.retrieve.writing import sent

    return sent(values, device)


def _is_captured(device: torch.device) -> bool:
    """A graph would read the bits where they are now, whatever is kept there later."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
