"""Impressions: who was shown which item, when, and the outcome; in memory, in batches of requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tigon.data.arrow import nearest
from tigon.data.values import Ints
from tigon.rank.data.batch import Batch
from tigon.rank.data.in_memory import InMemoryImpressions
from tigon.rank.data.infer import fit_schema, load_tables
from tigon.rank.data.materialize import materialize
from tigon.rank.data.ragged import expand_spans, offsets_from_lengths
from tigon.rank.data.schema import Schema
from tigon.rank.data.split import RequestSet
from tigon.rank.data.tables import Tables


class Impressions(RequestSet):
    """Requests with candidates and histories; made by `read`.

    The tables are tensors in memory, and a batch is a gather, without a data loader.

    Attributes:
        schema: roles and fitted fields.
        notes: messages about the data: unknown items, events at the time of a request, labels with a single class.
        rows: number of impressions; `len` is the number of requests.
        request_ids, item_ids: each request's id and each candidate's item, as in the table.
        device: the tensors' device.
    """

    def __init__(self, memory: InMemoryImpressions, tables: Tables, schema: Schema, labelled: bool = True) -> None:
        self._memory, self._tables, self._open, self._labelled = memory, tables, schema, labelled
        self._offsets, self._time = memory.offsets, memory.time
        self.schema, self.notes = memory.schema, memory.notes
        self._which = torch.arange(len(memory.offsets) - 1)

    @classmethod
    def read(
        cls,
        data: Any,
        *,
        history: Any = None,
        items: Any = None,
        users: Any = None,
        schema: Schema | None = None,
        labelled: bool = True,
        **roles: Any,
    ) -> Impressions:
        """Read a table with one impression per row.

        A request's history contains its user's events strictly before the request's time, the earliest time among its
        rows. Events at exactly that time are excluded and counted.

        Args:
            data: a file or files (parquet, csv, JSON lines, arrow), a pyarrow.Table, a pandas or polars DataFrame, or a
                dict of arrays.
            history: events in the same formats, with user, item and time; "self" for the impressions themselves,
                "positives" for impressions with a positive label; a list such as ["self", "train.parquet"] adds earlier
                impressions; None for no history.
            items, users: feature tables, one row per item or user.
            schema: from training, or written by hand; None infers the schema. Open options are fitted on this data.
            labelled: whether labels are required, at least one per row; tables to score may lack labels or have empty
                label columns.
            roles: without a schema, the arguments for `Roles`; columns with usual names are found automatically.

        Raises: ValueError for an unreadable file, a missing column (with the nearest name), a label that is not 0 or 1,
            a row without any label value, a history without times, and values that do not fit their field.
        """
        tables, schema = load_tables(data, history, items, users, schema, roles, labelled)
        return cls(materialize(tables, fit_schema(schema, tables), labelled), tables, schema, labelled)

    def __repr__(self) -> str:
        return f"Impressions({len(self):,} requests, {self.rows:,} rows, {len(self._memory.event_time):,} events)"

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self._memory.rows.device

    @property
    def request_ids(self) -> list[Any]:
        """Each request's id: its value in the request column, or its first row number."""
        held = self._memory
        if held.requests is None:
            return list(held.rows[held.offsets[:-1][self._which].to(self.device)].tolist())
        return list(held.requests.take(self._which.numpy()).to_pylist())

    @property
    def item_ids(self) -> list[Any]:
        """Each candidate's item as in the table, request by request.

        Raises: ValueError if there is no item column.
        """
        if self.schema.roles.item is None:
            raise ValueError("rank.Impressions: these impressions have no item column; name the column by item=….")
        return self.column(self.schema.roles.item)

    @property
    def columns(self) -> list[str]:
        """The table's column names."""
        return list(self._tables.rows)

    def column(self, name: str) -> list[Any]:
        """A table column for all candidates, request by request.

        Args:
            name: the column's name.
        Raises: ValueError for an unknown column.
        """
        table = self._tables.rows
        if name not in table:
            raise ValueError(f"rank.Impressions: there is no column {name!r}; {nearest(name, table)}")
        return list(table[name].take(self._row_numbers(self._which)).to_pylist())

    def to(self, device: torch.device | str, *, pin: bool = False) -> Impressions:
        """Copy all tensors to a device.

        Args:
            device: such as "cuda".
            pin: copy to a GPU through pinned memory, so that the host does not wait.
        """
        return self._with_memory(self._memory.to(device, pin))

    def _with_memory(self, memory: InMemoryImpressions) -> Impressions:
        return Impressions(memory, self._tables, self._open, self._labelled)._select(self._which)

    def _with_schema(self, schema: Schema) -> Impressions:
        return self._with_memory(materialize(self._tables, schema, self._labelled).to(self.device))

    def _row_numbers(self, which: Tensor) -> Ints:
        numbers: Ints = self._memory.rows[self._spans(which).to(self.device)].cpu().numpy()
        return numbers

    # ------------------------------------------------------------------------------------------------------- batches

    def batch(
        self, indices: Tensor, *, history_max: int | None = None, device: torch.device | str | None = None
    ) -> Batch:
        """Build a batch.

        Args:
            indices: (R,) int64 request indices, from 0 to len(self) − 1.
            history_max: maximum events per request, newest first.
            device: the batch's device; None for the data's.
        Returns: a `Batch`, requests in the order of indices.
        Raises: ValueError for an index out of range.
        """
        held, at = self._memory, self.device
        indices = torch.as_tensor(indices).cpu()
        if indices.dim() != 1 or indices.dtype != torch.int64:
            raise ValueError(
                f"Impressions.batch: indices must be (R,) int64, got {tuple(indices.shape)} {indices.dtype}."
            )
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise ValueError(
                f"Impressions.batch: indices must be from 0 to {len(self) - 1:,}, got "
                f"{int(indices.min()):,} to {int(indices.max()):,}."
            )
        which = self._which[indices]
        first, last = self._events(which, history_max)
        offsets, history_offsets = (
            offsets_from_lengths(held.offsets[which + 1] - held.offsets[which]),
            offsets_from_lengths(last - first),
        )
        rows = _spans(held.offsets[which], offsets, at)
        events = _spans(first, history_offsets, at)
        here, ones = which.to(at, non_blocking=True), torch.arange(len(which) + 1)
        age = torch.zeros(0, dtype=torch.float64, device=at)
        if held.time is not None:
            lengths = history_offsets.diff().to(at, non_blocking=True)
            now = torch.repeat_interleave(held.time[here], lengths, output_size=len(events))
            age = (now - held.event_time[events]).double() / 1e6
        batch = Batch(
            offsets,
            history_offsets,
            {name: one.take(here, which, ones) for name, one in held.context.items()},
            {name: one.take(rows, held.offsets[which], offsets) for name, one in held.items.items()},
            {name: one.take(events, first, history_offsets) for name, one in held.history.items()},
            age,
            {name: one[rows] for name, one in held.labels.items()},
            None if held.weights is None else held.weights[rows],
            held.rows[rows],
            held.partial,
        )
        return batch if device is None or torch.device(device) == at else batch.to(device)

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
        """Iterate over all requests in batches.

        Args:
            requests: requests per batch; or
            tokens: maximum events plus candidates per batch; a larger request is a batch by itself.
            shuffle: generator for the order; None keeps table order.
            history_max, device: as in `batch`.
            skip: batches to skip at the start, to resume a run.
        Raises: ValueError unless exactly one of requests and tokens is given, and is positive.
        """
        size = requests if tokens is None else tokens
        if (requests is None) == (tokens is None) or size is None or size < 1:
            raise ValueError(
                f"Impressions.batches: give requests or tokens, a positive number, got requests={requests}, "
                f"tokens={tokens}."
            )
        order = torch.arange(len(self)) if shuffle is None else torch.randperm(len(self), generator=shuffle)
        costs = torch.ones(len(self), dtype=torch.int64)
        if tokens is not None:
            first, last = self._events(self._which, history_max)
            costs = self._sizes() + last - first
        ends = costs[order].cumsum(0)
        start = number = 0
        while start < len(order):
            spent = int(ends[start - 1]) if start else 0
            end = max(start + 1, int(torch.searchsorted(ends, spent + size, right=True)))
            if number >= skip:
                yield self.batch(order[start:end], history_max=history_max, device=device)
            start, number = end, number + 1

    def _events(self, which: Tensor, history_max: int | None) -> tuple[Tensor, Tensor]:
        """First and last event per request, limited to the latest `history_max`."""
        first, last = self._memory.first[which], self._memory.last[which]
        if history_max is None:
            return first, last
        if history_max < 0:
            raise ValueError(f"Impressions: history_max must be 0 or more, got {history_max}.")
        return torch.maximum(first, last - history_max), last


def _spans(first: Tensor, offsets: Tensor, device: torch.device) -> Tensor:
    """`expand_spans` on a device, from host values."""
    total = int(offsets[-1])
    return expand_spans(first.to(device, non_blocking=True), offsets.to(device, non_blocking=True), total)
