"""The events that a request may read: events of its user that are strictly earlier than the request.

Events stand sorted by user and then by time, so that a history is a slice of them, and two binary searches find all
slices at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """The history of request r is the events start[r] … end[r] − 1, oldest first.

    Attributes:
        start, end: (R,) int64.
        same: (R,) int64, how many events of the user have the very time of the request; they are not in its history.
    """

    start: Tensor
    end: Tensor
    same: Tensor


def sort_events(user: Tensor, time: Tensor) -> Tensor:
    """(E,) the order of events by user, then by time; those of one time as they stand.

    Args:
        user: (E,) int64 codes of users. time: (E,) int64.
    """
    by_time = time.sort(stable=True).indices
    return by_time[user[by_time].sort(stable=True).indices]


def find_windows(event_user: Tensor, event_time: Tensor, user: Tensor, time: Tensor) -> Windows:
    """The slices of events that requests may know.

    Args:
        event_user, event_time: (E,) int64, in the order of `ordered`. Codes of users are 0 and above.
        user, time: (R,) int64; user −1 has no history.
    """
    user, time, event_time = user.contiguous(), time.contiguous(), event_time.contiguous()
    times = event_time.unique()
    # User and place of the time in one number, so that one search answers for both.
    width = len(times) + 1
    keys = event_user * width + torch.searchsorted(times, event_time)
    first = user * width
    start = torch.searchsorted(keys, first)
    end = torch.searchsorted(keys, first + torch.searchsorted(times, time))
    after = torch.searchsorted(keys, first + torch.searchsorted(times, time, right=True))
    return Windows(start, end, after - end)
