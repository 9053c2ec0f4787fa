"""Impressions larger than memory: parquet row groups, read one buffer at a time.

    shuffled row groups → buffers, each at most half the memory → shuffled requests within each buffer

A thread reads the next buffer while the current buffer is in use. A buffer is copied to the device as a whole, through
pinned memory, and batches are gathers there, as with `Impressions`. Events, items and users stay in memory.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tigon.data.arrow import kinds_agree
from tigon.data.parquet import ParquetColumns
from tigon.data.values import Ints
from tigon.rank.data.batch import Batch
from tigon.rank.data.impressions import Impressions
from tigon.rank.data.in_memory import InMemoryImpressions
from tigon.rank.data.infer import fit_schema, load_tables
from tigon.rank.data.labels import Label
from tigon.rank.data.materialize import earliest_times, group_requests, materialize, read_times
from tigon.rank.data.ragged import offsets_from_lengths
from tigon.rank.data.schema import Schema
from tigon.rank.data.split import RequestSet
from tigon.rank.data.tables import OWN, Tables

NAME = "rank.Stream"
MIB = 1 << 20


class Index(NamedTuple):
    """Locations of the requests.

    Attributes:
        offsets: (R + 1,) int64, each request's first row in the files.
        time: (R,) int64 microseconds, the earliest among its rows; None without times.
        pieces: (P + 1,) int64: piece p contains requests pieces[p] … pieces[p + 1] − 1, which begin in the same row
            group.
    """

    offsets: Tensor
    time: Tensor | None
    pieces: Tensor


class Buffer(NamedTuple):
    """Some pieces in memory. rows: file row number for each impression row."""

    data: Impressions
    rows: Tensor


class Stream(RequestSet):
    """`rank.Impressions` read from parquet files during iteration; made by `read`.

    `rank.fit`, `rank.score` and `rank.Explorer` accept a stream in place of `Impressions`. At most `mebibytes` of
    impressions are in memory, in two buffers. The order depends only on the files, the memory limit and the generator,
    so that a resumed run is bitwise identical.

    Attributes:
        schema: roles and fields, all fitted.
        notes: messages from reading.
        rows: number of impressions; `len` is the number of requests.
        pieces: number of row groups in which requests begin. most: largest combined size for two buffers so far, in
            bytes.
    """

    def __init__(self, tables: Tables, schema: tuple[Schema, Schema], index: Index, mebibytes: float) -> None:
        assert isinstance(tables.rows, ParquetColumns)
        self._tables, (self._open, self.schema), self._index = tables, schema, index
        self._offsets, self._time = index.offsets, index.time
        self._which = torch.arange(len(index.offsets) - 1)
        self.mebibytes, self.most = mebibytes, 0
        self.notes: list[str] = []
        self._measure_row_bytes()

    @classmethod
    def read(
        cls,
        data: Any,
        *,
        history: Any = None,
        items: Any = None,
        users: Any = None,
        schema: Schema | None = None,
        mebibytes: float = 1024.0,
        **roles: Any,
    ) -> Stream:
        """Open parquet files in which each request's rows are adjacent.

        Schema inference and fitting read one column at a time.

        Args:
            data: a parquet file, a folder with parquet files, or a list.
            history, items, users, schema, roles: as in `Impressions.read`; the history must be an event table.
            mebibytes: memory limit for the impressions.
        Raises: ValueError as `Impressions.read`; for requests with non-adjacent rows, and for row groups too large for
            the memory limit.
        """
        if history is not None and (history in OWN if isinstance(history, str) else {*OWN} & {*map(str, history)}):
            raise ValueError(
                f"{NAME}: history must be a table of events, not the impressions themselves, got {history!r}."
            )
        columns = ParquetColumns(NAME, data)
        tables, schema = load_tables(columns, history, items, users, schema, roles)
        found = fit_schema(schema, tables)
        return cls(tables, (schema, found), _build_index(tables, found, columns), mebibytes)

    def __repr__(self) -> str:
        return f"Stream({len(self):,} requests, {self.rows:,} rows, {self.pieces:,} row groups)"

    @property
    def pieces(self) -> int:
        return len(self._index.pieces) - 1

    def _with_schema(self, schema: Schema) -> Stream:
        return Stream(self._tables, (self._open, schema), self._index, self.mebibytes)

    def _row_numbers(self, which: Tensor) -> Ints:
        return self._spans(which).numpy()

    def batches(
        self,
        *,
        requests: int | None = None,
        tokens: int | None = None,
        shuffle: torch.Generator | None = None,
        history_max: int | None = None,
        device: torch.device | str | None = None,
        skip: int = 0,
    ) -> Iterator[Batch]:
        """Iterate over all requests in batches. A buffer's last batch may be smaller.

        Args:
            requests, tokens, history_max, device, skip: as in `Impressions.batches`. With a fixed request count, fully
                skipped buffers are not read.
            shuffle: generator for the order of row groups, and of requests in a buffer; None keeps file order.
        """
        buffers = self._buffers(shuffle)
        seeds = [None if shuffle is None else int(torch.randint(1 << 62, (1,), generator=shuffle)) for _ in buffers]
        if requests is not None and tokens is None and requests > 0:
            counts = [-(-sum(len(self._requests(piece)) for piece in buffer) // requests) for buffer in buffers]
            while counts and skip >= counts[0]:
                skip -= counts.pop(0)
                del buffers[0], seeds[0]
        place = torch.device("cpu" if device is None else device)
        with ThreadPoolExecutor(1) as pool:
            waiting: Future[Buffer] | None = pool.submit(self._load, buffers[0]) if buffers else None
            for number, seed in enumerate(seeds):
                assert waiting is not None
                buffer = waiting.result()
                further = number + 1 < len(buffers)
                waiting = pool.submit(self._load, buffers[number + 1]) if further else None
                data, rows = buffer.data.to(place, pin=True), buffer.rows.to(place)
                del buffer
                order = None if seed is None else torch.Generator().manual_seed(seed)
                drawn = 0
                for batch in data.batches(requests=requests, tokens=tokens, shuffle=order, history_max=history_max):
                    drawn += 1
                    if drawn > skip:
                        yield dataclasses.replace(batch, rows=rows[batch.rows])
                skip = max(0, skip - drawn)
                if waiting is not None:
                    self.most = max(self.most, count_bytes(data._memory) + count_bytes(waiting.result().data._memory))
                del data  # free it before a third buffer is read

    # ------------------------------------------------------------------------------------------------------- buffers

    def _buffers(self, shuffle: torch.Generator | None) -> list[list[int]]:
        """Group pieces into buffers that fit half the memory."""
        pieces = [piece for piece in range(self.pieces) if len(self._requests(piece))]
        if shuffle is not None:
            pieces = [pieces[i] for i in torch.randperm(len(pieces), generator=shuffle).tolist()]
        buffers: list[list[int]] = []
        room = 0.0
        for piece in pieces:
            weight = self._row_bytes * self._piece_rows(piece)
            if not buffers or weight > room:
                buffers.append([])
                room = self.mebibytes * MIB / 2
            buffers[-1].append(piece)
            room -= weight
        return buffers

    def _requests(self, piece: int) -> Tensor:
        """A piece's requests that belong to this stream."""
        first, last = torch.searchsorted(self._which, self._index.pieces[piece : piece + 2]).tolist()
        return self._which[first:last]

    def _piece_rows(self, piece: int) -> int:
        first, last = self._offsets[self._index.pieces[piece : piece + 2]].tolist()
        return int(last - first)

    def _load(self, pieces: Sequence[int]) -> Buffer:
        """Load the impressions in some pieces, and their events."""
        import pyarrow as pa

        columns, parts, numbers = self._tables.rows, [], []
        assert isinstance(columns, ParquetColumns)
        for piece in pieces:
            a, b = self._offsets[self._index.pieces[piece : piece + 2]].tolist()
            part, kept = pa.table(columns.between(a, b, self._columns_to_read())), self._spans(self._requests(piece))
            parts.append(part if len(kept) == b - a else part.take(pa.array((kept - a).numpy())))
            numbers.append(kept)
        rows = {name: column.combine_chunks() for name, column in
                zip(parts[0].column_names, pa.concat_tables(parts).columns, strict=True)}  # fmt: skip
        tables = self._with_own_events(dataclasses.replace(self._tables, rows=rows))
        held = materialize(tables, self.schema, True)
        # Without tables, which are freed: batches come from tensors.
        return Buffer(Impressions(held, Tables({}), self.schema), torch.cat(numbers))

    def _columns_to_read(self) -> list[str]:
        """Names of the columns to read."""
        roles = self.schema.roles
        labels = [Label.parse(text).column for text in roles.labels]
        named = [*self.schema.fields, roles.request, roles.item, roles.user, roles.time, roles.weight, *labels]
        return [name for name in dict.fromkeys(named) if name is not None and name in self._tables.rows]

    def _with_own_events(self, tables: Tables) -> Tables:
        """Drop events by users without impressions in these pieces."""
        import pyarrow.compute as pc

        user = self.schema.roles.user
        if tables.history is None or user is None:
            return tables
        actors, users = kinds_agree([tables.keys(table, user, "the user") for table in ("history", "rows")])
        kept = pc.is_in(actors, value_set=pc.unique(users))
        history = {name: column.filter(kept) for name, column in tables.history.items()}
        return dataclasses.replace(tables, history=history)

    def _measure_row_bytes(self) -> None:
        """Measure bytes per row on the largest piece. Raise if two such pieces exceed the memory limit."""
        sizes = [self._piece_rows(piece) for piece in range(self.pieces)]
        largest = int(np.argmax(sizes))
        loaded = self._load([largest])
        self._row_bytes = count_bytes(loaded.data._memory) / sizes[largest]
        self.notes += loaded.data.notes
        if 2 * self._row_bytes * sizes[largest] > self.mebibytes * MIB:
            raise ValueError(
                f"{NAME}: mebibytes must hold two row groups, with up to {sizes[largest]:,} rows and "
                f"{self._row_bytes * sizes[largest] / MIB:,.3g} MiB each, got {self.mebibytes:g}; files with smaller "
                "row groups need less."
            )


def count_bytes(held: InMemoryImpressions) -> int:
    """Bytes in all tensors and texts."""
    leaves = tree_leaves([getattr(held, field.name) for field in dataclasses.fields(held)])
    return sum(x.nbytes if isinstance(x, Tensor) else sys.getsizeof(x) for x in leaves if isinstance(x, (Tensor, str)))


def _build_index(tables: Tables, schema: Schema, columns: ParquetColumns) -> Index:
    roles = schema.roles
    group, names = group_requests(tables, roles)
    step = np.diff(group)
    if len(apart := np.flatnonzero((step != 0) & (step != 1))):
        row = int(apart[0]) + 1
        said = f"row {row:,}" if names is None else f"{names[int(group[row])].as_py()!r}"
        raise ValueError(
            f"{NAME}: a request's rows must be contiguous, but the rows of {said} are not; sort the files by request."
        )
    offsets = offsets_from_lengths(torch.from_numpy(np.bincount(group)))
    time = None
    if roles.time is not None and roles.time in columns:
        time = earliest_times(read_times(tables, "rows", schema), offsets)
    first = torch.searchsorted(offsets[:-1].contiguous(), torch.from_numpy(columns.starts[:-1]))
    pieces = torch.cat((first, torch.tensor([len(offsets) - 1]))).unique()
    assert all(a < b for a, b in pairwise(pieces.tolist()))
    return Index(offsets, time, pieces)
