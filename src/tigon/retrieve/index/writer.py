"""Write items: choose their rows, and replay journal updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints, Value
from tigon.files import parse_json
from tigon.retrieve.filters.schema import name_rows
from tigon.retrieve.ids import KINDS, join_texts, last_of_each, split_texts
from tigon.retrieve.index.items import ItemBatch, parse_vectors, show_id
from tigon.retrieve.index.memory import MemoryPlan, format_bytes, make_plan
from tigon.retrieve.index.rows import ItemDirectory, spare_rows
from tigon.retrieve.index.table import PIECE, RowTable
from tigon.retrieve.storage.journal import parse_record, read_records

# String ids that are looked up per step.
STRINGS = 64


class ItemWriter:
    """Writes items to an index. The caller holds the update lock.

    Args:
        table: the rows, on this device.
    """

    def __init__(self, table: RowTable) -> None:
        self.table = table

    @property
    def directory(self) -> ItemDirectory:
        """Each item's row."""
        return self.table.directory

    def plan(self, capacity: int) -> MemoryPlan:
        """Compute the index's memory for a capacity."""
        return make_plan(self.table.format, capacity, self.table.schema, self.directory.text_length())

    # ------------------------------------------------------------------------------------------------------------ parse

    def parse(self, ids: Any, embeddings: Any, table: Any) -> ItemBatch:
        """Parse items into their stored form.

        Raises: ValueError, naming the first offending id, for anything that does not fit the index.
        """
        name, schema, scheduler = "Index.upsert", self.table.schema, self.table.scheduler
        read = self.directory.read(name, ids)
        encoded = schema.encode(table, name_rows(read), len(read))
        last = last_of_each(read)
        scheduler.yield_to_searches()
        vectors = None
        if self.table.is_over_parameter:
            if embeddings is not None:
                raise ValueError(
                    f"{name}: embeddings must be None for an index over a parameter, which holds the embeddings: "
                    "update the parameter."
                )
        else:
            vectors = parse_vectors(embeddings, read, self.table.format)
            scheduler.yield_to_searches()
        words = encoded.words
        if len(last) < len(read):
            words = np.ascontiguousarray(words[:, last])
            vectors = None if vectors is None else vectors[torch.from_numpy(last).to(vectors.device)]
            read = [read[i] for i in last] if isinstance(read, list) else read[last]
        lookup = self._look_up(read)
        scheduler.yield_to_searches()
        return ItemBatch(read, vectors, words, encoded.growth, lookup)

    def _look_up(self, ids: Ints | list[str]) -> tuple[Ints, Ints] | None:
        """Look up keys and rows of ids; strings, which are compared individually, a few per step. None before the first
        item.

        Raises: ValueError if there is no room for the new items.
        """
        table = self.directory.ids
        if table is None:
            self._check_room(ids, np.full(len(ids), -1))
            return None
        step = STRINGS if isinstance(ids, list) else max(len(ids), 1)
        parts = []
        for start in range(0, max(len(ids), 1), step):
            parts.append(table.find(ids[start : start + step]))
            if len(ids) > step:
                self.table.scheduler.yield_to_searches()
        keys, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self._check_room(ids, rows)
        return keys, rows

    def _check_room(self, ids: Ints | list[str], rows: Ints) -> None:
        new = int((rows < 0).sum())
        if self.table.is_over_parameter:
            if new:
                first = show_id(ids, int(np.argmax(rows < 0)))
                raise ValueError(f"Index.upsert: ids must be rows of the indexed parameter, got {first}.")
            return
        count, capacity = len(self.directory), self.directory.capacity
        if count + new > capacity:
            needed = count + new
            size = format_bytes(self.plan(needed).device_bytes)
            raise ValueError(
                f"Index.upsert: {new:,} new items do not fit: the index holds {count:,} of {capacity:,}. "
                f"index.grow({needed}) adds capacity, and takes {size} on the device."
            )

    def find(self, name: str, ids: Any) -> tuple[Ints | list[str], Ints, Ints]:
        """Distinct ids, and the keys and rows of those in the index.

        Raises: ValueError if the id type is not the index's.
        """
        read = self.directory.read(name, ids)
        if self.directory.ids is None or not len(read):
            return read, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        read = list(dict.fromkeys(read)) if isinstance(read, list) else np.unique(read)
        keys, rows = self.directory.ids.find(read)
        there = rows >= 0
        if self.table.is_over_parameter:  # its deleted items keep their rows
            there[there] = self.directory.rows.live_mask()[rows[there]]
        return read, keys[there], rows[there]

    # ------------------------------------------------------------------------------------------------------------ write

    def write(self, items: ItemBatch) -> None:
        """Write items to rows that no search reads, then the live bits between two searches."""
        if not len(items.ids):
            return
        directory, attributes = self.directory, self.table.attributes
        attributes.schema.grow_vocabularies(items.growth)
        if directory.ids is None:
            directory.ids = KINDS["str" if isinstance(items.ids, list) else "int64"]()
        attributes.counts.settle()
        keys, old = items.lookup if items.lookup is not None else directory.ids.find(items.ids)
        if items.vectors is None:
            self.table.write_attributes(old, items.words)
            return
        if isinstance(items.ids, list):
            new = np.flatnonzero(keys < 0)
            keys[new] = directory.ids.keys([items.ids[i] for i in new])
        start = 0
        # All items become visible at once, as far as unread rows suffice.
        while start < len(keys):
            part = slice(start, start + max(1, directory.rows.available()))
            rows = directory.rows.allocate(len(keys[part]))
            replaced = old[part][old[part] >= 0]
            self.place(rows, keys[part], items.vectors[part], items.words[:, part], replaced)
            directory.ids.place(keys[part], rows)
            start = part.stop

    def place(self, rows: Ints, keys: Ints, vectors: Tensor, words: Ints, replaced: Ints) -> None:
        """Write items to rows allocated for them."""
        self.table.write(rows, keys, vectors, words, replaced)

    def remove(self, keys: Ints, rows: Ints) -> None:
        """Delete items found by `find`."""
        if len(rows):
            if not self.table.is_over_parameter:
                self.directory.ids.place(keys, np.full(len(keys), -1))  # type: ignore[union-attr]
            self.hide(rows)

    def hide(self, rows: Ints) -> None:
        self.table.hide(rows)

    def reserve(self, items: ItemBatch) -> None:
        """Allocate and free the memory that a write needs on a GPU: if that fails, nothing is written.

        Raises: torch.OutOfMemoryError, with an explanation.
        """
        table, format = self.table, self.table.format
        if table.device.type != "cuda":
            return
        # Copies in fp32: for biases, and for codes with their ratios, rounded numbers and errors.
        copies = (8 if table.bias is not None else 0) + (24 if table.codes is not None else 0)
        vector = format.dim * (table.embeddings.element_size() + copies)
        rows = min(len(items.ids), max(1, PIECE // max(1, vector)))
        needed = rows * (vector + 8 * (2 * table.schema.words + 3))
        try:
            with table.scheduler.update_stream(table.device, from_caller=False):
                torch.empty(needed, dtype=torch.uint8, device=table.device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"Index.upsert: not enough device memory for {format_bytes(needed)} of new items in transit; nothing "
                "was written."
            ) from error

    def grow(self, capacity: int) -> None:
        """Make room for more items.

        Raises: ValueError if that is less than the present capacity, or for an index over a parameter;
            torch.OutOfMemoryError, with an explanation.
        """
        directory = self.directory
        if self.table.is_over_parameter:
            raise ValueError("Index.grow: an index over a parameter has a fixed size; make the parameter larger.")
        if capacity < directory.capacity:
            raise ValueError(
                f"Index.grow: capacity must be at least {directory.capacity:,}, the present capacity, got {capacity:,}."
            )
        try:
            # A growth that the journal refused has left more rows.
            self.extend(max(capacity + spare_rows(capacity), directory.rows.total))
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"Index.grow: {capacity:,} items take {format_bytes(self.plan(capacity).device_bytes)} on the device, "
                "beside the existing buffers, more than the free memory; the index is unchanged: save the index and "
                "load it on a device with enough memory."
            ) from error
        directory.capacity = capacity

    def extend(self, rows: int) -> None:
        self.table.grow(rows)

    # ---------------------------------------------------------------------------------------------------------- journal

    def replay(self, path: Path, snapshot: str) -> None:
        """Replay a journal's updates on top of a snapshot.

        Raises: ValueError for a damaged journal, another snapshot's journal, and an update that does not fit.
        """
        for kind, body, end in read_records(path, snapshot):
            if kind == "snapshot":
                continue
            try:
                tensors = parse_record(body)
                if kind == "grow":
                    self.grow(int(tensors["capacity"][0]))
                elif kind == "delete":
                    _, keys, rows = self.find("Index.delete", unpack_ids(tensors))
                    self.remove(keys, rows)
                else:
                    self.write(self._unpack(tensors))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f"Index: the journal {path} does not match its snapshot, before byte {end:,}: {error}"
                ) from error

    def _unpack(self, tensors: dict[str, Tensor]) -> ItemBatch:
        """Unpack a record's items, which were checked before writing: only shapes and types are checked here."""
        vectors, words, schema = tensors["vectors"], tensors["words"].numpy(), self.table.schema
        growth: dict[str, list[Value]] = parse_json(tensors["growth"].numpy().tobytes(), "a vocabulary")
        ids = self.directory.read("Index.upsert", unpack_ids(tensors))
        schema.check_growth(growth)
        lookup = self._look_up(ids)
        shapes = vectors.shape, vectors.dtype, words.shape
        if shapes != ((len(ids), self.table.format.dim), self.table.dtype, (schema.words, len(ids))):
            raise ValueError(f"a record of {len(ids):,} items has {shapes[0]}, {shapes[1]} and {shapes[2]}")
        return ItemBatch(ids, vectors, words, growth, lookup)


def pack_items(items: ItemBatch) -> dict[str, Tensor]:
    """Pack items into a record's tensors."""
    assert items.vectors is not None
    growth = bytearray(json.dumps(items.growth).encode())
    return {
        "vectors": items.vectors.cpu(), "words": torch.from_numpy(items.words),
        "growth": torch.frombuffer(growth, dtype=torch.uint8), **pack_ids(items.ids),
    }  # fmt: skip


def pack_ids(ids: Ints | list[str]) -> dict[str, Tensor]:
    """Pack ids into a record's tensors."""
    if isinstance(ids, list):
        blob, ends = join_texts(ids)
        return {"id_bytes": blob, "id_ends": ends}
    return {"ids": torch.from_numpy(np.ascontiguousarray(ids))}


def unpack_ids(tensors: dict[str, Tensor]) -> Any:
    if "ids" in tensors:
        return tensors["ids"].numpy()
    return split_texts(tensors["id_bytes"].numpy().tobytes(), tensors["id_ends"].numpy())
