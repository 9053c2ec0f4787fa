"""A batch of requests: their candidates, and what each may know of its user's past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tigon.rank.ragged import Ragged

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """R requests, C candidates and E events, each a run of tensors; nothing is padded.

    Attributes:
        offsets: (R + 1,) int64 on the CPU: the candidates of request r are offsets[r] … offsets[r + 1] − 1.
        history_offsets: (R + 1,) int64 on the CPU: its events, oldest first, are history_offsets[r] ….
        context: fields of side "context", of R values each.
        items: fields of the sides "item" and "row", of C values each, the item's own id among them.
        history: fields of `schema.history`, of E values each.
        age: (E,) float64, seconds from the event to its request, above 0.
        labels: (C,) float32, 0 and 1, by name; empty where the table has none.
        weights: (C,) float32, or None.
        rows: (C,) int64, the rows of the table.
        requests, candidates, events: R, C and E.

    A field's values are int64 codes, float32 numbers, `Ragged` lists of codes, a list of str, or int64 microseconds.
    """

    offsets: Tensor
    history_offsets: Tensor
    context: dict[str, Any]
    items: dict[str, Any]
    history: dict[str, Any]
    age: Tensor
    labels: dict[str, Tensor]
    weights: Tensor | None
    rows: Tensor

    @property
    def requests(self) -> int:
        return len(self.offsets) - 1

    @property
    def candidates(self) -> int:
        return len(self.rows)

    @property
    def events(self) -> int:
        return len(self.age)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device; offsets stay on the CPU.

        Args:
            device: such as "cuda".
        """
        return Batch(
            self.offsets,
            self.history_offsets,
            moved(self.context, device),
            moved(self.items, device),
            moved(self.history, device),
            self.age.to(device, non_blocking=True),
            moved(self.labels, device),
            None if self.weights is None else self.weights.to(device, non_blocking=True),
            self.rows.to(device, non_blocking=True),
        )


def moved(values: dict[str, T], device: torch.device | str) -> dict[str, T]:
    """Values of fields on a device; texts stay lists."""
    return {name: value if isinstance(value, list) else move(value, device) for name, value in values.items()}


def move(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Ragged) else value.to(device, non_blocking=True)


def taken(value: Any, rows: Tensor, total: int | None = None) -> Any:
    """The values of some rows of a field. total: how many values lists have in all, if that is known."""
    if isinstance(value, Ragged):
        return value.take(rows, total)
    if isinstance(value, list):
        return [value[row] for row in rows.tolist()]
    return value[rows]
