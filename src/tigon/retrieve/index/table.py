"""An index's rows: vectors, attribute words, live bits and ids in buffers, and the host-side bookkeeping."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tigon.data.values import Ints
from tigon.retrieve.filters.attributes import Attributes
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.ids import KINDS, IntIds, StringIds
from tigon.retrieve.index.codes import VectorCodes
from tigon.retrieve.index.filter_cache import FilterCache
from tigon.retrieve.index.format import VectorFormat
from tigon.retrieve.index.rows import ItemDirectory, RowAllocator, bitmap_words, spare_rows
from tigon.retrieve.index.scheduler import UpdateScheduler
from tigon.retrieve.scan import CodedItems
from tigon.retrieve.transfer import array_to_device, batch_to_device, is_run, row_index, scatter_rows_

# Vector bytes that are pinned at once.
PIECE = 1 << 26
BUFFERS = ("vectors", "words", "live", "item_ids", "bias")


class RowTable(nn.Module):
    """Rows for items, some of them free. `state_dict` and `.to` work; copies are made between two updates.

    Args:
        format: the vector format.
        directory: each item's row; with as many rows as the buffers get.
        schema: the attribute columns; the table keeps the object.
        weight: (rows, dim), a parameter whose rows are the vectors, in place of a vector buffer.

    Attributes:
        vectors: (rows, dim); None over a parameter. words: (W, rows) int64, the attributes. live: (⌈rows/32⌉,) int32.
        item_ids: (rows,) int64, the id keys. bias: (rows,) fp32, −|x|² for metric "l2". codes: None without codes.
    """

    vectors: Tensor | None
    words: Tensor
    live: Tensor
    item_ids: Tensor
    bias: Tensor | None

    def __init__(
        self, format: VectorFormat, directory: ItemDirectory, schema: Schema, device: torch.device | str | None,
        weight: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.format, self.directory = format, directory
        self.attributes = Attributes(schema)
        self.scheduler = UpdateScheduler()
        self.cache = FilterCache(self.scheduler)
        # In a tuple, so that the parameter is not registered here.
        self._weight: tuple[Tensor, ...] = () if weight is None else (weight,)
        rows, place = directory.rows.total, torch.device(device or "cpu") if weight is None else weight.device
        vectors = None if self._weight else torch.zeros(rows, format.dim, dtype=format.dtype, device=place)
        self.register_buffer("vectors", vectors)
        self.register_buffer("words", torch.zeros(schema.words, rows, dtype=torch.int64, device=place))
        self.register_buffer("live", torch.zeros((rows + 31) // 32, dtype=torch.int32, device=place))
        self.register_buffer("item_ids", torch.full((rows,), -1, dtype=torch.int64, device=place))
        has_bias = format.has_bias and not self._weight
        self.register_buffer("bias", torch.zeros(rows, device=place) if has_bias else None)
        self.codes = None if format.codes is None else VectorCodes(format, rows, place)
        if self.codes is not None and not self._weight:
            self.codes.version = ()

    @property
    def embeddings(self) -> Tensor:
        """(rows, dim), the vectors."""
        return self._weight[0].detach() if self.vectors is None else self.vectors

    @property
    def is_over_parameter(self) -> bool:
        return bool(self._weight)

    @property
    def schema(self) -> Schema:
        return self.attributes.schema

    @property
    def rows(self) -> RowAllocator:
        return self.directory.rows

    @property
    def device(self) -> torch.device:
        return self.live.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.dtype

    def version(self) -> tuple[int, ...] | None:
        """A value that changes when the parameter under the index is written; () for an index with its own vectors."""
        if not self._weight:
            return ()
        weight = self._weight[0]
        return None if weight.is_inference() else (weight.data_ptr(), weight._version)

    def rebuild_codes(self) -> None:
        """Encode all vectors again."""
        if self.codes is not None:
            self.codes.rebuild(self.embeddings, self.version())

    # ----------------------------------------------------------------------------------------------------------- reads

    def items(self, candidates: int | None = None) -> Tensor | CodedItems:
        """The rows in use, with their codes unless the parameter may have been written since encoding."""
        vectors = self.embeddings[: self.rows.end]
        if self.codes is None or self.codes.version is None or self.codes.version != self.version():
            return vectors
        return self.codes.attach(vectors, candidates)

    def live_words(self, always: bool = False) -> Tensor | None:
        """The live bits for the rows in use; None where all these rows hold items, unless always."""
        end = self.rows.end
        return None if self.rows.count == end and not always else self.live[: (end + 31) // 32]

    def score_bias(self) -> Tensor | None:
        """−|x|² for the rows in use, which metric "l2" adds to 2 q · x."""
        if not self.format.has_bias:
            return None
        end = self.rows.end
        # A parameter may have changed: its biases are computed for each search.
        return self.bias[:end] if self.bias is not None else distance_bias(self.embeddings[:end])

    def keys_of_rows(self, rows: Tensor) -> Tensor:
        """The id keys in rows; −1 for row −1."""
        return torch.where(rows >= 0, self.item_ids[rows.clamp(min=0)], -1)

    # ----------------------------------------------------------------------------------------------------------- writes

    def write(self, rows: Ints, keys: Ints, vectors: Tensor, words: Ints, replaced: Ints) -> None:
        """Write items to free rows, then show these rows to searches and hide the rows that they replace."""
        most = max(1, PIECE // max(1, self.format.dim * self.embeddings.element_size()))
        for start in range(0, len(keys), most):
            part = slice(start, start + most)
            hidden = replaced if start == 0 else replaced[:0]
            self._write_piece(rows[part], keys[part], vectors[part], words[:, part], hidden)
        self.attributes.counts.add(words)
        self.scheduler.yield_to_searches()
        self.publish(rows, replaced)

    def _write_piece(self, rows: Ints, keys: Ints, vectors: Tensor, words: Ints, hidden: Ints) -> None:
        """Write a piece that one copy brings to the device, and subtract hidden rows from the counts."""
        scheduler, device = self.scheduler, self.device
        with scheduler.update_stream(device):
            if vectors.device.type == "cuda" == device.type:
                vectors.record_stream(torch.cuda.current_stream(device))
            run = is_run(rows)
            row_tensor, item_ids, attributes, places, hidden_rows, vectors = batch_to_device(
                [rows[:0] if run else rows, keys, words, bitmap_words(rows), hidden], device, vectors
            )
            target: Any = slice(int(rows[0]), int(rows[-1]) + 1) if run else row_tensor
            scheduler.yield_to_searches()
            scatter_rows_(self.embeddings, target, vectors)
            scatter_rows_(self.item_ids, target, item_ids)
            if self.bias is not None:
                self.bias[target] = distance_bias(vectors)
            if self.codes is not None:
                self.codes.write(target, vectors)
            scheduler.yield_to_searches()
            with self.cache.write_lock:
                if self.schema.words:
                    self.words[:, target] = attributes
                self.cache.renew(self.words, places)
            scheduler.yield_to_searches()
            self._count_out(hidden_rows)
        scheduler.yield_to_searches()

    def write_attributes(self, rows: Ints, words: Ints) -> None:
        """Write attributes in place, between two searches, and show rows that are free."""
        was_live = self.rows.live_mask()[rows]
        with self.scheduler.update_stream(self.device):
            self._count_out(array_to_device(rows[was_live], self.device))
        self.attributes.counts.add(words)
        with self.cache.write_lock, self.scheduler.exclusive(self.device):
            self.words[:, row_index(rows, self.device)] = array_to_device(words, self.device)
            self.cache.renew(self.words, array_to_device(bitmap_words(rows), self.device))
        self.publish(rows[~was_live], rows[:0])

    def hide(self, rows: Ints) -> None:
        """Hide rows from searches, which frees the rows."""
        with self.scheduler.update_stream(self.device):
            self._count_out(array_to_device(rows, self.device))
        self.publish(rows[:0], rows)

    def publish(self, shown: Ints, hidden: Ints) -> None:
        """Show rows to searches, and hide others."""
        places, bits = self.rows.mark(shown, hidden)
        if len(bits) % 2:
            bits = np.append(bits, np.int32(0))
        with self.scheduler.update_stream(self.device, from_caller=False):
            run = is_run(places)
            place_tensor, marks = batch_to_device([places[:0] if run else places, bits.view(np.int64)], self.device)
            target: Any = slice(int(places[0]), int(places[-1]) + 1) if run else place_tensor
            marks = marks.view(torch.int32)[: len(places)]
        with self.scheduler.exclusive(self.device):
            self.rows.publish(shown, hidden)
            self.live[target] = marks

    def _count_out(self, rows: Tensor) -> None:
        """Subtract rows that hold items from the counts; on a GPU once the copy of their attributes has arrived."""
        counts = self.attributes.counts
        if not self.schema.words or not len(rows):
            counts.items -= len(rows)
            return
        words = self.words.index_select(1, rows)
        if words.device.type != "cuda":
            counts.add(words.numpy(), sign=-1)
            return
        pinned = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        pinned.copy_(words, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        counts.subtract_when_copied(pinned, event)

    def grow(self, rows: int) -> None:
        """Copy the buffers to larger buffers, which are all allocated before any old buffer is freed.

        Raises: torch.OutOfMemoryError; the table is unchanged then.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # running searches read the old buffers
        with self.scheduler.launch_lock:
            places: list[tuple[nn.Module, str]] = [(self, name) for name in BUFFERS]
            if self.codes is not None:
                places += [(self.codes, name) for name in self.codes.row_buffers()]
            grown = [(holder, name, new) for holder, name in places if (new := _extend(holder, name, rows)) is not None]
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # later searches may run on any stream
            for holder, name, new in grown:
                setattr(holder, name, new)
            self.cache.clear()
            self.rows.extend(rows)

    def limit_cache(self, size: int | None) -> None:
        """Empty the filter cache and limit its bytes; None: `default_bytes`."""
        with self.scheduler.update_lock:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            with self.scheduler.launch_lock:
                self.cache.limit = size
                self.cache.clear()

    # ------------------------------------------------------------------------------------------------------------ state

    def restart(self, with_ids: bool = True) -> None:
        """Rebuild the host side from the buffers: free rows, counts, and with `with_ids` the rows by id."""
        self.directory.rows = RowAllocator.from_live_bits(self.live.cpu().numpy(), len(self.item_ids))
        self.attributes = Attributes(self.schema)
        self.cache.clear()
        rows = np.flatnonzero(self.rows.live_mask())
        if with_ids and isinstance(self.directory.ids, StringIds):
            self.directory.ids.rows.fill(-1)
        if len(rows):
            if with_ids:
                if not isinstance(self.directory.ids, StringIds):
                    self.directory.ids = IntIds()
                self.directory.ids.place(self.item_ids.cpu().numpy()[rows], rows)
            self.attributes.counts.add(self.words.cpu().numpy()[:, rows])

    def get_extra_state(self) -> Tensor:
        """The state beside the buffers: the vocabularies, and the id texts."""
        ids = self.directory.ids
        about = {
            "schema": self.schema.to_json(), "ids": None if ids is None else ids.kind,
            "texts": ids.texts() if isinstance(ids, StringIds) else [],
        }  # fmt: skip
        return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        about = json.loads(state.cpu().numpy().tobytes())
        schema = Schema.from_json(about["schema"])
        if schema.places != self.schema.places:
            raise ValueError(f"Index: the state belongs to an index with {schema!r}, not {self.schema!r}.")
        self.attributes = Attributes(schema)
        self.directory.ids = KINDS[about["ids"]]() if about["ids"] else None
        if isinstance(self.directory.ids, StringIds):
            self.directory.ids.keys(about["texts"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        with self.scheduler.update_lock, self.scheduler.launch_lock:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            if self.codes is not None:
                self.codes.load(state_dict, f"{prefix}codes.", *args, **kwargs)
                self.codes.version = None if self._weight else ()  # the codes' weights are unknown
            self.restart()

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.scheduler.wait_for_updates(self.device)
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> RowTable:
        with self.scheduler.update_lock, self.scheduler.launch_lock:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            before = self.dtype
            super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
            self.format = replace(self.format, dtype=self.dtype)
            self.cache.clear()
            if self.bias is not None:  # half() is meant for the vectors
                self.bias = distance_bias(self.embeddings)
            if self.codes is not None:
                were_cast = self.codes.restore_dtypes()
                if self._weight:  # the parameter moves with its model, before or after
                    self.codes.version = None
                elif self.dtype != before or were_cast:
                    self.rebuild_codes()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A consistent copy for pickle: updates continue while the copy is written."""
        with self.scheduler.update_lock:
            self.scheduler.wait_for_updates(self.device)
            state = {**self.__dict__}
            state |= copy.deepcopy({name: state[name] for name in ("directory", "attributes", "_modules")})
            state["_buffers"] = {k: None if v is None else v.clone() for k, v in state["_buffers"].items()}
            self._wait_for_copies()
            return _with_stale_codes(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowTable:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with self.scheduler.update_lock:
            self.scheduler.wait_for_updates(self.device)
            copied.__setstate__(_with_stale_codes(copy.deepcopy(self.__dict__, memo)))
            self._wait_for_copies()
        return copied

    def _wait_for_copies(self) -> None:
        """Wait for copies on the GPU: an update on another stream would overtake them."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def allocate_table(format: VectorFormat, capacity: int, schema: Schema, device: torch.device | str | None) -> RowTable:
    """Allocate free rows for the capacity, plus spare rows.

    Raises: ValueError if the CPU's memory does not suffice; torch.OutOfMemoryError on a GPU.
    """
    try:
        return RowTable(format, ItemDirectory(capacity, capacity + spare_rows(capacity)), schema, device)
    except (RuntimeError, MemoryError) as error:
        if torch.device(device or "cpu").type != "cpu":  # a CPU's error has no distinct type
            raise
        raise ValueError(
            f"Index: capacity must fit in memory, got {capacity:,} items of width {format.dim:,}: {error}"
        ) from error


def parse_weight(parameter: Tensor | nn.Embedding, metric: Any) -> Tensor:
    """Get the weight (items, dim) to build an index over.

    Raises: ValueError for another shape, and for a metric that needs a copy.
    """
    weight = parameter.weight if isinstance(parameter, nn.Embedding) else parameter
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            f"Index.over: parameter must be a float tensor (items, dim), neither 0, or an Embedding, got {got}."
        )
    if metric == "cosine":
        raise ValueError(
            "Index.over: metric must be 'ip' or 'l2', got 'cosine', which needs a scaled copy: scale the rows in the "
            "model."
        )
    return weight


def make_parameter_table(weight: Tensor, format: VectorFormat, schema: Schema, ids: Any, table: Any) -> RowTable:
    """Build the row table over a weight, whose rows all hold items.

    Raises: ValueError if ids or attributes have another row count, or do not fit the schema.
    """
    items = len(weight)
    directory = ItemDirectory(items, items)
    rows = RowTable(format, directory, schema, None, weight)
    keys = directory.number_rows(directory.read("Index.over", np.arange(items) if ids is None else ids))
    if schema.words and table is None:
        raise ValueError("Index.over: table must hold the attributes of the schema's columns, got None.")
    encoded = schema.encode(table, count=items)
    schema.grow_vocabularies(encoded.growth)
    rows.item_ids.copy_(torch.from_numpy(keys))
    rows.words.copy_(torch.from_numpy(encoded.words))
    rows.attributes.counts.add(encoded.words)
    rows.rebuild_codes()
    rows.publish(np.arange(items), np.zeros(0, dtype=np.int64))
    return rows


def _with_stale_codes(state: dict[str, Any]) -> dict[str, Any]:
    """A copy's state, whose codes were made from another parameter than the copy's."""
    codes = state["_modules"].get("codes")
    if codes is not None and state["_weight"]:
        codes.version = None
    return state


def _extend(holder: nn.Module, name: str, rows: int) -> Tensor | None:
    """A copy of a buffer with room for more rows."""
    old: Tensor | None = getattr(holder, name)
    if old is None:
        return None
    size = (rows + 31) // 32 if name == "live" else rows
    columns = name == "words"
    new = old.new_zeros((old.shape[0], size) if columns else (size, *old.shape[1:]))
    (new[:, : old.shape[1]] if columns else new[: old.shape[0]]).copy_(old)
    return new


def distance_bias(vectors: Tensor) -> Tensor:
    """−|x|² for each vector, in pieces, to avoid an fp32 copy of all vectors."""
    return torch.cat([-piece.float().square().sum(1) for piece in vectors.split(1 << 20)])
