"""A batch of requests with their candidates and histories."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tigon.rank.data.ragged import Ragged


@dataclass(frozen=True)
class Batch:
    """R requests, C candidates and E events as ragged tensors, without padding.

    Attributes:
        offsets: (R + 1,) int64 on the CPU: request r has candidates offsets[r] … offsets[r + 1] − 1.
        history_offsets: (R + 1,) int64 on the CPU, likewise for the events, oldest first.
        context: fields with side "context", R values each.
        items: fields with side "item" or "row", C values each, including the item's own id.
        history: fields in `schema.history`, E values each.
        age: (E,) float64, seconds from the event to its request, above 0.
        labels: (C,) float32, 0 and 1, by name; {} for a table without labels. NaN for missing values.
        weights: (C,) float32, or None.
        rows: (C,) int64 table row numbers.
        partial: labels with missing values anywhere in the table; `label_mask` gives the mask for this batch.
        requests, candidates, events: R, C and E.

    Field values are int64 codes, float32 numbers, `Ragged` code lists, a list of str, or int64 microseconds.
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
    partial: frozenset[str] = frozenset()

    @property
    def requests(self) -> int:
        return len(self.offsets) - 1

    @property
    def candidates(self) -> int:
        return len(self.rows)

    @property
    def events(self) -> int:
        return len(self.age)

    def label_mask(self, label: str) -> Tensor | None:
        """Mask for rows with a value for a label.

        Args:
            label: a name in `labels`, or another.
        Returns: (C,) bool; None for labels without missing values.
        """
        return ~self.labels[label].isnan() if label in self.partial and label in self.labels else None

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to a device; offsets stay on the CPU.

        Args:
            device: such as "cuda".
        """
        names = ("context", "items", "history", "age", "labels", "weights", "rows")
        return replace(self, **{name: move(getattr(self, name), device, pin=True) for name in names})


def labelled_rows(batch: Any, label: str) -> Tensor | None:
    """`Batch.label_mask`; None for batches from another `BatchSource`, whose rows all have labels."""
    out: Tensor | None = batch.label_mask(label) if hasattr(batch, "label_mask") else None
    return out


def move(value: Any, device: torch.device | str, pin: bool = False) -> Any:
    """Move tensors, field values and dicts with them to a device; texts and None stay.

    pin: copy to a GPU through pinned memory, so that the host does not wait. Only for batches: pinned memory is
        unavailable to other processes.
    """
    if isinstance(value, dict):
        return {name: move(one, device, pin) for name, one in value.items()}
    if isinstance(value, Ragged):
        return Ragged(move(value.values, device, pin), move(value.offsets, device, pin))
    if not isinstance(value, Tensor):
        return value if value is None or isinstance(value, list) else value.to(device, pin)
    if pin and value.device.type == "cpu" and torch.device(device).type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def select_rows(value: Any, rows: Tensor, total: int | None = None) -> Any:
    """Select rows from field values. total: the selected lists' total length, if known."""
    if isinstance(value, Ragged):
        return value.take(rows, total)
    if isinstance(value, list):
        return [value[row] for row in rows.tolist()]
    return value[rows]
