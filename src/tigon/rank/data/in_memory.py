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
    """The values of a field.

    Attributes:
        values: tensor, `Ragged` or texts; codes as int32, half of what batches have.
        places: (n,) which of them each row has; None: they stand in the rows' order. Those of texts are on the CPU.
        sums: (n + 1,) int64 on the CPU, of `Ragged` values: how many values all rows before have. With them a batch
            of lists is drawn without waiting for the GPU.
    """

    values: Any
    places: Tensor | None = None
    sums: Tensor | None = None

    def take(self, rows: Tensor, first: Tensor, offsets: Tensor) -> Any:
        """The values of rows.

        first, offsets: on the CPU, what rows are: runs from each `first` on, as many as `offsets` leave room for.
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
        """The values that rows have, in their order."""
        return (
            ColumnBuffer(select_rows(self.values, rows))
            if self.places is None
            else ColumnBuffer(self.values, self.places[rows])
        )

    def compact(self, coded: bool) -> ColumnBuffer:
        """As it is kept: with `sums`, and codes as int32."""
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
    """The tensors of impressions.

    Attributes:
        requests: a pyarrow array of what names each request; None where no column does.
        offsets: (R + 1,) int64 on the CPU, candidates of each request. first, last: (R,) its events, on the CPU.
        time: (R,) int64 microseconds, the earliest of a request's rows; None without times.
        context, items, history: stored values of fields, of R requests, N candidates and E events.
        event_time: (E,) int64.
        labels, weights, rows: of N candidates.
        notes: sentences on what was counted while reading.
        partial: labels of which candidates have no value, NaN.
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
        def sides(stored: dict[str, ColumnBuffer]) -> dict[str, ColumnBuffer]:
            return {name: one.to(device, pin) for name, one in stored.items()}

        def move_tensor(value: Tensor) -> Tensor:
            there: Tensor = move(value, device, pin)
            return there

        return replace(
            self,
            time=None if self.time is None else move_tensor(self.time),
            context=sides(self.context),
            items=sides(self.items),
            history=sides(self.history),
            event_time=move_tensor(self.event_time),
            labels={name: move_tensor(value) for name, value in self.labels.items()},
            weights=None if self.weights is None else move_tensor(self.weights),
            rows=move_tensor(self.rows),
        )
