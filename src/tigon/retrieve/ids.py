"""Map ids to rows on the host: int64 ids directly, string ids by a number each.

The item keys are in a buffer beside the vectors: the id itself, or the number of a string, which is never reused for
another string. So a search result identifies its items regardless of later writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tigon.data.values import Ints, describe
from tigon.files import is_encodable
from tigon.retrieve.arguments import as_int

EMPTY, GONE = -2, -1
LEAST = 64
# Slots probed per step, while at most FEW keys are looked up. Most keys end in the first step, and for few keys a step
# costs call overhead rather than memory traffic.
WINDOW, FEW = np.arange(8), 4096
# Rows and string numbers are int32.
MOST = 2**31
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Its hash shows whether another process hashes texts as this process does.
PROBE = "tigon"


class IntTable:
    """Numbers by int64 key: open addressing in two arrays, with whole key arrays processed at once.

    A slot takes 12 bytes at a load factor of 0.3 to 0.7: 0.4 GiB for 15.5 million keys, where a dict takes 1.7.
    """

    def __init__(self) -> None:
        self._reset(LEAST)

    def _reset(self, slots: int) -> None:
        self.keys = np.zeros(slots, dtype=np.int64)
        self.values = np.full(slots, EMPTY, dtype=np.int32)
        self.used = 0
        self._last: tuple[Ints, Ints] | None = None  # keys of the last lookup, and their slots

    def get(self, keys: Ints) -> Ints:
        """Each key's number, −1 where there is none."""
        slots = self._find(keys)
        self._last = keys, slots
        result: Ints = np.where(slots >= 0, self.values[slots], GONE).astype(np.int64)
        return result

    def set(self, keys: Ints, values: Ints) -> None:
        """Assign numbers to distinct keys. −1 removes a key."""
        last = self._last
        slots = last[1] if last is not None and last[0] is keys else self._find(keys)
        there = slots >= 0
        self.values[slots[there]] = values[there]
        keys, values = keys[~there], values[~there]
        if 10 * (self.used + len(keys)) > 7 * len(self.values):
            self._rehash(len(keys))
        self._insert(keys, values)

    def _rehash(self, more: int) -> None:
        kept = self.values >= 0
        keys, values = self.keys[kept], self.values[kept]
        self._reset(slots_for(len(keys) + more))
        self._insert(keys, values)

    def _start(self, keys: Ints) -> Ints:
        mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
        slots: Ints = (mixed & np.uint64(len(self.values) - 1)).astype(np.int64)
        return slots

    def _find(self, keys: Ints) -> Ints:
        """Each key's slot, −1 where there is none."""
        result = np.full(len(keys), -1, dtype=np.int64)
        slots, left = self._start(keys), np.arange(len(keys))
        while len(left):
            window = WINDOW if len(left) <= FEW else WINDOW[:1]
            here = (slots[:, None] + window) & (len(self.values) - 1)
            empty = self.values[here] == EMPTY
            ends = empty | (self.keys[here] == keys[:, None])
            first = np.arange(len(left)), ends.argmax(1)
            ended = ends[first]
            hit = ended & ~empty[first]
            result[left[hit]] = here[first][hit]
            if ended.all():
                break
            more = ~ended
            left, keys, slots = left[more], keys[more], slots[more] + len(window)
        return result

    def _insert(self, keys: Ints, values: npt.NDArray[Any]) -> None:
        self.used += len(keys)
        self._last = None
        slots = self._start(keys)
        left = np.arange(len(keys))
        while len(left):
            here = slots[left]
            free = self.values[here] == EMPTY
            # Several keys may want one slot: the last key gets the slot, in both arrays.
            self.keys[here[free]] = keys[left[free]]
            self.values[here[free]] = values[left[free]]
            left = left[~(free & (self.keys[here] == keys[left]))]
            slots[left] = (slots[left] + 1) & (len(self.values) - 1)


def slots_for(keys: int) -> int:
    """The slot count for a table with this many keys."""
    slots = LEAST
    while 10 * slots < 16 * keys:
        slots *= 2
    return slots


class IntIds:
    """int64 ids."""

    kind = "int64"

    def __init__(self) -> None:
        self.table = IntTable()

    def keys(self, ids: Any) -> Ints:
        """Each id's number, as in the buffer."""
        return np.asarray(ids, dtype=np.int64)

    def find(self, ids: Any) -> tuple[Ints, Ints]:
        """Keys and rows of ids, −1 where an id is absent."""
        keys = self.keys(ids)
        return keys, self.table.get(keys)

    def place(self, keys: Ints, rows: Ints) -> None:
        """Assign rows to items; −1 removes them."""
        self.table.set(keys, rows)

    def to_ids(self, keys: Ints) -> npt.NDArray[Any]:
        """Convert keys to ids."""
        return keys


class StringIds:
    """String ids: all texts concatenated, and a table of their 64-bit hashes.

    Texts with equal hashes are compared. A deleted id keeps its number until the index is saved.
    """

    kind = "str"

    def __init__(self) -> None:
        self.blob = bytearray()
        self.count = 0
        self.ends = np.zeros(LEAST, dtype=np.int64)
        self.rows = np.full(LEAST, GONE, dtype=np.int32)
        self.by_hash = IntTable()
        self.colliding: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hash_of_probe": self._hash(PROBE)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy. String hashes differ between processes, so a table from another process is rebuilt."""
        hash_of_probe = state.pop("hash_of_probe")
        self.__dict__.update(state)
        if hash_of_probe != self._hash(PROBE):
            texts, rows = self.texts(), self.rows[: self.count].astype(np.int64)
            self.__init__()  # type: ignore[misc]
            self.place(self.keys(texts), rows)

    def text(self, key: int) -> str:
        start = self.ends[key - 1] if key else 0
        return self.blob[start : self.ends[key]].decode()

    def _look_up(self, ids: list[str]) -> tuple[Ints, Ints]:
        """String numbers, −1 where there are none, and hashes."""
        hashes = np.fromiter(map(self._hash, ids), dtype=np.int64, count=len(ids))
        keys = self.by_hash.get(hashes)
        for i in np.flatnonzero(keys >= 0):
            if self.text(int(keys[i])) != ids[i]:
                keys[i] = self.colliding.get(ids[i], GONE)
        return keys, hashes

    @staticmethod
    def _hash(text: str) -> int:
        return hash(text)

    def keys(self, ids: Any) -> Ints:
        """Each id's number, all different; ids without a number get a new number."""
        keys, hashes = self._look_up(ids)
        new = np.flatnonzero(keys < 0)
        encoded = [ids[i].encode() for i in new]
        first = self.count
        if first + len(new) >= MOST:
            raise ValueError(f"Index.upsert: the index has seen {MOST:,} different ids: save and reload the index.")
        self._room(len(new))
        self.ends[first : first + len(new)] = len(self.blob) + np.cumsum(
            [len(text) for text in encoded], dtype=np.int64
        )
        self.blob += b"".join(encoded)
        keys[new] = np.arange(first, first + len(new))
        self.count += len(new)
        taken = self.by_hash.get(hashes[new]) >= 0
        _, firsts = np.unique(hashes[new], return_index=True)
        other = np.ones(len(new), dtype=bool)
        other[firsts] = False
        other |= taken
        self.colliding.update({ids[i]: int(keys[i]) for i in new[other]})
        self.by_hash.set(hashes[new[~other]], keys[new[~other]])
        return keys

    def _room(self, more: int) -> None:
        if self.count + more > len(self.ends):
            size = max(2 * len(self.ends), self.count + more)
            ends, rows = np.zeros(size, dtype=np.int64), np.full(size, GONE, dtype=np.int32)
            ends[: self.count], rows[: self.count] = self.ends[: self.count], self.rows[: self.count]
            self.ends, self.rows = ends, rows

    def find(self, ids: Any) -> tuple[Ints, Ints]:
        keys, _ = self._look_up(ids)
        return keys, np.where(keys >= 0, self.rows[keys], GONE).astype(np.int64)

    def place(self, keys: Ints, rows: Ints) -> None:
        self.rows[keys] = rows

    def to_ids(self, keys: Ints) -> npt.NDArray[Any]:
        result = np.empty(keys.shape, dtype=object)
        for place, key in np.ndenumerate(keys):
            result[place] = self.text(int(key)) if key >= 0 else None
        return result

    def cut(self, keys: Ints) -> tuple[Ints, bytes]:
        """The keys' text lengths, −1 where there is none, and the concatenated texts."""
        there = keys >= 0
        known = keys[there]
        ends = self.ends[known]
        starts = np.where(known > 0, self.ends[known - 1], 0)
        lengths = np.full(keys.shape, GONE, dtype=np.int64)
        lengths[there] = ends - starts
        blob = self.blob
        return lengths, b"".join([blob[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])

    def texts(self) -> list[str]:
        """All ids, by number."""
        return split_texts(bytes(self.blob), self.ends[: self.count])


Ids = IntIds | StringIds
KINDS: dict[str, type[IntIds] | type[StringIds]] = {"int64": IntIds, "str": StringIds}


def join_texts(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate texts as bytes, (n,) uint8, with each text's end, int64."""
    encoded = [text.encode() for text in texts]
    blob, ends = b"".join(encoded), np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return torch.frombuffer(bytearray(blob) or bytearray(1), dtype=torch.uint8)[: len(blob)], torch.from_numpy(ends)


def split_texts(blob: bytes, ends: Ints) -> list[str]:
    """Split concatenated bytes into texts by their ends.

    Raises: ValueError for invalid ends, or a part that is not text.
    """
    starts = np.append(np.zeros(1, dtype=np.int64), ends)
    if (np.diff(starts) < 0).any() or starts[-1] != len(blob):
        raise ValueError("the text offsets do not match the bytes")
    try:
        return [blob[a:b].decode() for a, b in itertools.pairwise(starts.tolist())]
    except UnicodeDecodeError:
        raise ValueError("ids are not UTF-8 text") from None


def find_row(ids: Ids | None, id: Any) -> int:
    """An id's row; −1 where absent, for an id of any type."""
    known: Any = None
    if isinstance(ids, StringIds):
        known = id if isinstance(id, str) else None
    elif ids is not None and not isinstance(id, (bool, np.bool_)):
        known = as_int(id)
    return -1 if ids is None or known is None else int(ids.find([known])[1][0])


def read_ids(name: str, ids: Any) -> Ints | list[str]:
    """Convert an id column to int64, or to a list of strings.

    Raises: ValueError for any other type, or text that UTF-8 cannot encode.
    """
    if isinstance(ids, torch.Tensor):
        ids = ids.detach().cpu()
        ids = ids.numpy() if ids.dtype in INTEGERS else ids.float().numpy()
    elif hasattr(ids, "to_pylist"):
        whole = str(ids.type).startswith(("int", "uint")) and not ids.null_count
        try:
            ids = np.asarray(ids) if whole else ids.to_pylist()
        except UnicodeDecodeError:
            raise ValueError(f"{name}: ids must be UTF-8 text, got other bytes.") from None
    elif hasattr(ids, "to_numpy") or hasattr(ids, "tolist"):
        ids = ids.to_numpy() if hasattr(ids, "to_numpy") else ids
        ids = ids.tolist() if ids.dtype.kind not in "iu" and ids.ndim == 1 else np.asarray(ids)
    elif isinstance(ids, (str, bytes, Mapping)) or not hasattr(ids, "__iter__"):
        raise ValueError(f"{name}: ids must be a list of integers or strings, got {describe(ids)}.")
    else:
        ids = list(ids)
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{name}: ids must have one dimension and be int64 or strings, got {ids.shape} {ids.dtype}."
            )
        if ids.dtype == np.uint64 and len(ids) and ids.max() >= 2**63:
            raise ValueError(f"{name}: ids must be below 2**63, got {ids.max()}.")
        numbers = ids.astype(np.int64)
    else:
        if all(isinstance(value, str) for value in ids) and len(ids):
            texts = [str(value) for value in ids]
            if not is_encodable("".join(texts)):
                wrong = next(i for i, text in enumerate(texts) if not is_encodable(text))
                raise ValueError(f"{name}: ids must be text encodable in UTF-8, got {describe(texts[wrong])}.")
            return texts
        listed = [as_int(value) for value in ids]
        for i, value in enumerate(listed):
            if value is None:
                raise ValueError(
                    f"{name}: ids must be all int64 or all strings, got {describe(ids[i])} at position {i:,}."
                )
        numbers = np.array(listed, dtype=np.int64)
    if (numbers == GONE).any():
        raise ValueError(f"{name}: ids must not be -1, which marks missing results.")
    return numbers


def last_of_each(ids: Ints | list[str]) -> Ints:
    """The positions of the last among equal ids, ascending."""
    if isinstance(ids, list):
        return np.sort(np.fromiter({text: i for i, text in enumerate(ids)}.values(), dtype=np.int64))
    ordered = np.sort(ids)
    if not (ordered[1:] == ordered[:-1]).any():
        return np.arange(len(ids))
    _, positions = np.unique(ids[::-1], return_index=True)
    return np.sort(len(ids) - 1 - positions)
