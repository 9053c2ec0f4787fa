"""Histories: only what is strictly earlier, the same as a loop over requests finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tigon.rank.data.history import find_windows, sort_events

USERS = st.integers(0, 3)
# Few and far times: ties within a user, between users, and with requests.
TIMES = st.integers(-2, 6).map(lambda t: t * 10**15)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def by_a_loop(events, requests):
    """The histories of requests as lists of events, and how many events have the request's own time."""
    found, same = [], []
    for user, time in requests:
        own = [i for i, (actor, when) in enumerate(events) if actor == user and when < time]
        found.append(sorted(own, key=lambda i: events[i][1]))
        same.append(sum(event == (user, time) for event in events))
    return found, same


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None)
@given(events=st.lists(st.tuples(USERS, TIMES), max_size=25),
       requests=st.lists(st.tuples(st.integers(-1, 4), TIMES), max_size=12))  # fmt: skip
def test_windows_are_what_a_loop_finds(device, events, requests):
    actor, when = torch.tensor(events, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
    user, time = torch.tensor(requests, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
    order = sort_events(actor, when)
    found = find_windows(actor[order], when[order], user, time)
    listed = [order[a:b].tolist() for a, b in zip(found.start.tolist(), found.end.tolist(), strict=True)]
    assert (listed, found.same.tolist()) == by_a_loop(events, requests)
