"""Choose held-out requests: the latest, or random requests."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

By = Literal["time", "request"]


def choose_held_out(time: Tensor | None, count: int, by: By, fraction: float, seed: int, own: bool) -> Tensor:
    """(count,) bool mask.

    time: (count,) int64 request times, on the CPU. own: whether the history is the impressions themselves.
    Raises: ValueError as `Impressions.split`.
    """
    if by not in get_args(By):
        raise ValueError(f"Impressions.split: by must be 'time' or 'request', got {by!r}.")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Impressions.split: fraction must be from 0 to 1, got {fraction}.")
    if by == "time" and time is None:
        raise ValueError("Impressions.split: by='time' needs times, and these impressions have none.")
    if by == "request" and own:
        raise ValueError(
            "Impressions.split: by must be 'time' where the history is the impressions themselves: held-out labels "
            "would stand in the histories to train on."
        )
    many = round(fraction * count)
    held = torch.zeros(count, dtype=torch.bool)
    if by == "request":
        held[torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:many]] = True
    elif many:
        assert time is not None
        held = time >= time.sort(descending=True).values[many - 1]
    return held
