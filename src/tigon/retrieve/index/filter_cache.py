"""Cache recurring filters: the bitmap of passing rows is stored for each filter, and updated for written rows.

A bitmap takes an eighth of a byte per row, where a test reads 8 bytes per row and word. Bitmaps cover free rows as
well, since live bits are separate; so a row's bits may be written while no search reads the row, like its attributes,
and hiding a row changes no bits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tigon.retrieve.fork import Forkable
from tigon.retrieve.index.scheduler import UpdateScheduler
from tigon.retrieve.scan import RowBits, RowFilter
from tigon.retrieve.scan.bits import write_bits
from tigon.retrieve.scan.filters import EVERY
from tigon.retrieve.transfer import array_to_device

# By default the bits take as much memory as one attribute word per row, and at most 1 GiB.
FILTERS, MOST = 64, 1 << 30
# Filters whose first search is remembered, and filter batches whose tensors are cached.
REMEMBERED, BATCHES = 1024, 64
# A filter's bits are padded to a multiple of this many bitmap words, so that all filters have the same alignment.
ALIGNED = 32

Filters = RowFilter | Sequence[RowFilter | None] | None


class HasWords(Protocol):
    """An index's rows, whose attribute words (W, rows) are replaced when the index grows."""

    words: Tensor


def filter_bytes(rows: int) -> int:
    """The byte size of one filter's bits."""
    return 4 * -(-rows // (32 * ALIGNED)) * ALIGNED


def default_bytes(rows: int) -> int:
    return min(FILTERS * filter_bytes(rows), MOST)


class FilterCache(Forkable):
    """The bits of an index's recent filters, within a byte limit.

    A filter is cached from its second search on. Bits are written between two searches, like live bits; a search looks
    bits up under the launch lock, so that no bits are dropped while a search still reads them.

    Args:
        scheduler: the index's scheduler.
        limit: bytes; None: `default_bytes`.

    Attributes:
        write_lock: held while row attributes and their bits are written together.
        places: each filter's row in `bits`; least recently used first.
    """

    def __init__(self, scheduler: UpdateScheduler, limit: int | None = None) -> None:
        self.scheduler, self.limit = scheduler, limit
        self.write_lock = threading.Lock()
        self.clear()
        self.survive_forks()

    def after_fork(self, is_child: bool) -> None:
        if is_child:
            self.write_lock = threading.Lock()

    def __reduce__(self) -> tuple[type[FilterCache], tuple[UpdateScheduler, int | None]]:
        return FilterCache, (self.scheduler, self.limit)  # a copy starts empty

    def clear(self) -> None:
        """Drop all bits. No search or update may be running."""
        self.bits: Tensor | None = None
        self.places: dict[RowFilter, int] = {}
        self._seen: dict[int, None] = {}  # hashes: a filter itself may take megabytes
        self._cached: tuple[list[RowFilter], Tensor] | None = None  # for updates: filters, and where their bits start
        self._batches: dict[tuple[Any, ...], tuple[Tensor, Tensor, tuple[Any, ...]]] = {}

    def __len__(self) -> int:
        return len(self.places)

    # -------------------------------------------------------------------------------------------------------- search

    def prepare(self, filters: Filters, table: HasWords) -> None:
        """Before a search: compute bits for recurring filters, unless an update is being written."""
        distinct = _list_distinct(filters)
        if not distinct or not len(table.words) or _is_captured(table.words.device):
            return
        missing = [f for f in distinct if f not in self.places]
        if not missing:
            return
        # Beside cached filters a new filter is tested alone; otherwise the whole batch's filters would be tested.
        recurs = len(missing) < len(distinct) or all(hash(f) in self._seen for f in missing)
        self._seen.update(dict.fromkeys(map(hash, missing)))
        for seen in [*self._seen][: max(0, len(self._seen) - REMEMBERED)]:
            self._seen.pop(seen, None)
        if recurs and self.write_lock.acquire(blocking=False):
            try:
                self._make(distinct, table)
            except torch.OutOfMemoryError:
                pass  # the search tests attributes, as without bits
            finally:
                self.write_lock.release()

    def find(self, filters: Filters, rows: int) -> RowBits | None:
        """During a search: its filters' bits for the first rows; None unless all its filters are cached."""
        places, bits = self.places, self.bits
        distinct = _list_distinct(filters)
        if bits is None or not distinct or not all(f in places for f in distinct) or _is_captured(bits.device):
            return None
        for f in distinct:
            places[f] = places.pop(f)
        bits = bits[:, : (rows + 31) // 32]
        if isinstance(filters, RowFilter):
            return RowBits(bits[places[filters]][None])
        assert filters is not None
        stream = torch.cuda.current_stream(bits.device) if bits.device.type == "cuda" else None
        key = (stream, *map(id, filters))
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= BATCHES:
                self._batches.clear()
            number = {f: i for i, f in enumerate(distinct)}
            which = np.array([number[EVERY if f is None else f] for f in filters], dtype=np.int32)
            starts = _make_starts([places[f] for f in distinct], bits)
            # The entry keeps the filters alive, so that no other object gets their identity.
            batch = self._batches[key] = (array_to_device(which, bits.device), starts, tuple(filters))
        return RowBits(bits, batch[0], batch[1])

    def _make(self, distinct: list[RowFilter], table: HasWords) -> None:
        """Compute bits for filters without bits, in place of the least recently used bits."""
        device, total = table.words.device, table.words.shape[1]
        most = (default_bytes(total) if self.limit is None else self.limit) // filter_bytes(total)
        if len(distinct) > most:
            return
        caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
        with self.scheduler.exclusive(device):
            if caller is not None:
                torch.cuda.current_stream(device).wait_stream(caller)
            words = table.words
            if words.shape[1] != total:  # the index has grown since
                return
            missing = [f for f in distinct if f not in self.places]
            if not missing:
                return
            bits = self.bits = self._make_room(len(self.places) + len(missing), most, words)
            for f in [f for f in self.places if f not in distinct][: max(0, len(self.places) + len(missing) - most)]:
                del self.places[f]
            self._batches.clear()
            free = sorted(set(range(len(bits))) - set(self.places.values()))[: len(missing)]
            write_bits(missing, words, bits, _make_starts(free, bits))
            self.places.update(zip(missing, free, strict=True))
            self._cached = list(self.places), _make_starts(list(self.places.values()), bits)

    def warm(self, words: Tensor) -> None:
        """Compile the kernels for `renew`, with the first rows' bits, which do not change."""
        with self.write_lock, self.scheduler.exclusive(words.device):
            self.renew(words, torch.zeros(1, dtype=torch.int64, device=words.device))

    def _make_room(self, filters: int, most: int, words: Tensor) -> Tensor:
        """Make room for this many filters, doubling the buffer as needed; cached bits are kept."""
        have = 0 if self.bits is None else len(self.bits)
        if self.bits is not None and have >= min(filters, most):
            return self.bits
        size = min(most, max(4, 2 * have, filters))
        room = torch.zeros(size, filter_bytes(words.shape[1]) // 4, dtype=torch.int32, device=words.device)
        if self.bits is not None:
            room[:have] = self.bits
        return room

    # ------------------------------------------------------------------------------------------------------- updates

    def renew(self, words: Tensor, places: Tensor) -> None:
        """After row attributes were written, under `write_lock`: test the rows again by all cached filters.

        Args:
            words: (W, rows), all rows' attribute words.
            places: (n,) int64 on the same device, the bitmap words that hold the written rows.
        """
        if self.bits is None or self._cached is None or not len(places):
            return
        filters, starts = self._cached
        write_bits(filters, words, self.bits, starts, places)


def _list_distinct(filters: Filters) -> list[RowFilter]:
    if filters is None:
        return []
    if isinstance(filters, RowFilter):
        return [filters]
    distinct = list(dict.fromkeys(EVERY if f is None else f for f in filters))
    return [] if distinct == [EVERY] else distinct


def _make_starts(places: list[int], bits: Tensor) -> Tensor:
    return array_to_device(np.array(places, dtype=np.int64) * bits.stride(0), bits.device)


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, which would read the bits' present addresses after the cache changes."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
