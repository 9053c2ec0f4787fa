"""Row bookkeeping on the host: which rows hold items, which are free, and each item's row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tigon.data.values import Ints
from tigon.retrieve.ids import Ids, IntIds, StringIds, last_of_each, read_ids

# Spare rows beyond the capacity, so that items in a full index can be replaced: as many as one update piece.
SPARE = 4096
# Row count above which bitmap words are sorted, so that each word is written once.
MANY = 4096


def spare_rows(capacity: int) -> int:
    return min(capacity, max(SPARE, capacity // 256))


class RowAllocator:
    """Which rows hold items, and which are free. The host's copy of the live bits.

    Attributes:
        total: rows in the buffers. end: no row from here on was ever used. count: rows that hold items.
        live: a bit for each row. free: free rows below `end`.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.end = 0
        self.count = 0
        self.live = np.zeros((total + 31) // 32, dtype=np.uint32)
        self.free = np.zeros(0, dtype=np.int64)

    @classmethod
    def from_live_bits(cls, live: npt.NDArray[np.int32], total: int) -> RowAllocator:
        rows = cls(total)
        rows.live = live.astype(np.int64).astype(np.uint32)
        mask = rows.live_mask()
        rows.count = int(mask.sum())
        rows.end = int(mask.nonzero()[0][-1]) + 1 if rows.count else 0
        rows.free = np.flatnonzero(~mask[: rows.end])
        return rows

    def live_mask(self) -> npt.NDArray[np.bool_]:
        """(total,), whether each row holds an item."""
        bits = np.unpackbits(self.live.view(np.uint8), bitorder="little")
        return bits[: self.total].astype(bool)

    def is_live(self, row: int) -> bool:
        return bool(self.live[row >> 5] >> np.uint32(row & 31) & np.uint32(1))

    def extend(self, total: int) -> None:
        more = np.zeros((total + 31) // 32 - len(self.live), dtype=np.uint32)
        self.live = np.concatenate([self.live, more])
        self.total = total

    def available(self) -> int:
        return len(self.free) + self.total - self.end

    def allocate(self, count: int) -> Ints:
        """Reserve rows to write to, ascending. The rows stay free until `publish` is called for them."""
        again = self.free[:count]
        rows = np.concatenate([again, np.arange(self.end, self.end + count - len(again))])
        rows.sort()
        return rows

    def mark(self, shown: Ints, hidden: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Set the live bits of some rows and clear those of others. Returns the changed words' numbers and values."""
        one = np.uint32(1)
        np.bitwise_or.at(self.live, shown >> 5, one << (shown & 31).astype(np.uint32))
        np.bitwise_and.at(self.live, hidden >> 5, ~(one << (hidden & 31).astype(np.uint32)))
        places = bitmap_words(np.concatenate([shown, hidden]))
        return places, self.live[places].view(np.int32)

    def publish(self, shown: Ints, hidden: Ints) -> None:
        """Called after `mark`: from now on searches see the shown rows, and the hidden rows are free."""
        again = int((shown < self.end).sum())  # the first free rows, as `allocate` takes them
        self.free = np.concatenate([self.free[again:], hidden])
        self.end = max(self.end, int(shown.max()) + 1 if len(shown) else 0)
        self.count += len(shown) - len(hidden)


def bitmap_words(rows: Ints) -> Ints:
    """The bitmap words that hold the rows' bits, by number. A word may repeat for few rows that are not ascending."""
    if len(rows) > MANY:
        return np.unique(rows >> 5)
    places: Ints = rows >> 5
    if len(places) > 1:
        places = places[np.concatenate([[True], places[1:] != places[:-1]])]
    return places


class ItemDirectory:
    """Each item's row, by id.

    Attributes:
        capacity: the most items.
        rows: which rows hold items. ids: the id table; None until the first item is written.
    """

    def __init__(self, capacity: int, rows: int) -> None:
        self.capacity = capacity
        self.rows = RowAllocator(rows)
        self.ids: Ids | None = None

    def __len__(self) -> int:
        return self.rows.count

    def text_length(self) -> int | None:
        """The mean length of string ids, in bytes; None for other ids."""
        ids = self.ids
        return len(ids.blob) // max(ids.count, 1) if isinstance(ids, StringIds) else None

    def read(self, name: str, ids: Any) -> Ints | list[str]:
        """Parse ids of the directory's type; of any type while the directory is empty.

        Raises: ValueError for ids of another type.
        """
        read = read_ids(name, ids)
        kind = "str" if isinstance(read, list) else "int64"
        if len(read) and self.ids is not None and self.ids.kind != kind:
            raise ValueError(f"{name}: ids must be {self.ids.kind}, like the ids in the index, got {kind}.")
        return read

    def number_rows(self, ids: Ints | list[str]) -> Ints:
        """Give the n-th id row n, for an index over a parameter. Returns the ids' keys.

        Raises: ValueError unless the ids are distinct and as many as the capacity.
        """
        if len(ids) != self.capacity or len(last_of_each(ids)) != self.capacity:
            raise ValueError(
                f"Index.over: ids must be {self.capacity:,} distinct ids, one for each row, got {len(ids):,}."
            )
        self.ids = StringIds() if isinstance(ids, list) else IntIds()
        keys = self.ids.keys(ids)
        self.ids.place(keys, np.arange(self.capacity))
        return keys
