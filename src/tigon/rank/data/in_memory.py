"""In-memory impressions: tensors built once from the tables, from which batches are sliced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.rank.data.batch import move, select_rows
from tigon.rank.data.ragged import Ragged, expand_spans, offsets_from_lengths
from tigon.rank.data.schema import Schema


class ColumnBuffer(NamedTuple):
    """A field's values.

    Attributes:
        values: tensor, `Ragged` or texts; codes as int32, half the size used in batches.
        places: (n,) index into values for each row; None: values are in row order. For texts on the CPU.
        sums: (n + 1,) int64 on the CPU, for `Ragged` values: cumulative list lengths by row, so that list batches are
            built without synchronising with the GPU.
    """

    values: Any
    places: Tensor | None = None
    sums: Tensor | None = None

    def take(self, rows: Tensor, first: Tensor, offsets: Tensor) -> Any:
        """Gather values for rows.

        first, offsets: on the CPU, the same rows as runs: from each `first`, with lengths given by `offsets`.
        """
        if isinstance(self.values, list):
            return select_rows(self.values, self._resolve(expand_spans(first, offsets)))
        total = None
        if self.sums is not None:
            total = int((self.sums[first + offsets.diff()] - self.sums[first]).sum())
        found = select_rows(self.values, self._resolve(rows), total)
        if isinstance(found, Ragged):
            return Ragged(found.values.long(), found.offsets)
        return found.long() if found.dtype == torch.int32 else found

    def select(self, rows: Tensor) -> ColumnBuffer:
        """Select rows, in the given order."""
        return (
            ColumnBuffer(select_rows(self.values, rows))
            if self.places is None
            else ColumnBuffer(self.values, self.places[rows])
        )

    def compact(self, coded: bool) -> ColumnBuffer:
        """Convert to storage form: with `sums`, and codes as int32."""
        if isinstance(self.values, Ragged):
            lengths = self.values.lengths
            sums = offsets_from_lengths(lengths if self.places is None else lengths[self.places])
            return ColumnBuffer(Ragged(self.values.values.int(), self.values.offsets), self.places, sums)
        return self._replace(values=self.values.int()) if coded else self

    def to(self, device: torch.device | str, pin: bool = False) -> ColumnBuffer:
        if isinstance(self.values, list):
            return self
        places = None if self.places is None else move(self.places, device, pin)
        return self._replace(values=move(self.values, device, pin), places=places)

    def _resolve(self, rows: Tensor) -> Tensor:
        return rows if self.places is None else self.places[rows]


@dataclass(frozen=True)
class InMemoryImpressions:
    """Impression tensors.

    Attributes:
        requests: pyarrow array with request ids; None without a request column.
        offsets: (R + 1,) int64 on the CPU, candidates per request. first, last: (R,) event ranges, on the CPU.
        time: (R,) int64 microseconds, the earliest among a request's rows; None without times.
        context, items, history: stored field values for R requests, N candidates and E events.
        event_time: (E,) int64.
        labels, weights, rows: for N candidates.
        notes: messages from reading.
        partial: labels with missing values (NaN).
    """

    schema: Schema
    requests: Any
    offsets: Tensor
    first: Tensor
    last: Tensor
    history: dict[str, ColumnBuffer]
    event_time: Tensor
    time: Tensor | None
    context: dict[str, ColumnBuffer]
    items: dict[str, ColumnBuffer]
    labels: dict[str, Tensor]
    weights: Tensor | None
    rows: Tensor
    notes: list[str]
    partial: frozenset[str] = frozenset()

    def to(self, device: torch.device | str, pin: bool = False) -> InMemoryImpressions:
        names = ("time", "context", "items", "history", "event_time", "labels", "weights", "rows")
        return replace(self, **{name: move(getattr(self, name), device, pin) for name in names})
