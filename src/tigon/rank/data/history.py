"""The events visible to a request: its user's events strictly before the request.

Events are sorted by user and then by time, so that a history is a slice, and two binary searches find all slices at
once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """Request r has the history events start[r] … end[r] − 1, oldest first.

    Attributes:
        start, end: (R,) int64.
        same: (R,) int64, number of the user's events at exactly the request's time, which are excluded.
    """

    start: Tensor
    end: Tensor
    same: Tensor


def sort_events(user: Tensor, time: Tensor) -> Tensor:
    """(E,) event order by user, then by time; stable.

    Args:
        user: (E,) int64 user codes. time: (E,) int64.
    """
    by_time = time.sort(stable=True).indices
    return by_time[user[by_time].sort(stable=True).indices]


def find_windows(event_user: Tensor, event_time: Tensor, user: Tensor, time: Tensor) -> Windows:
    """Find the event slice visible to each request.

    Args:
        event_user, event_time: (E,) int64, sorted by `sort_events`. User codes are ≥ 0.
        user, time: (R,) int64; user −1 has no history.
    """
    user, time, event_time = user.contiguous(), time.contiguous(), event_time.contiguous()
    times = event_time.unique()
    # Combine user and time rank into a single number, so that one search handles both.
    width = len(times) + 1
    keys = event_user * width + torch.searchsorted(times, event_time)
    first = user * width
    start = torch.searchsorted(keys, first)
    end = torch.searchsorted(keys, first + torch.searchsorted(times, time))
    after = torch.searchsorted(keys, first + torch.searchsorted(times, time, right=True))
    return Windows(start, end, after - end)
