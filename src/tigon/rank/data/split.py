"""Split requests into training and held-out requests, and detect histories that leak held-out outcomes."""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints
from tigon.rank.data.infer import fit_schema
from tigon.rank.data.ragged import expand_spans, offsets_from_lengths
from tigon.rank.data.schema import Schema
from tigon.rank.data.tables import Tables

By = Literal["time", "request"]
S = TypeVar("S", bound="RequestSet")


class Exposures(NamedTuple):
    """Impression rows and their request times, both (n,) int64."""

    rows: Ints
    time: Ints


class RequestSet:
    """Some of a table's requests: the base of `Impressions` and `Stream`."""

    schema: Schema
    _tables: Tables
    _open: Schema  # before fitting
    _which: Tensor  # (len,) int64, ascending requests
    _offsets: Tensor  # (R + 1,) int64 on the CPU, the rows of all requests
    _time: Tensor | None  # (R,) int64 microseconds

    def __len__(self) -> int:
        return len(self._which)

    @property
    def rows(self) -> int:
        """Number of impressions."""
        return int(self._sizes().sum())

    def split(self: S, *, by: By = "time", fraction: float, seed: int = 0) -> tuple[S, S]:
        """Split into training and held-out requests.

        Open schema options are refitted on the training part, so that items seen only in the held-out part are unknown,
        as in production. Histories are unchanged: a held-out request reads all earlier events by its user, from either
        part.

        Args:
            by: "time": hold out the latest requests, keeping simultaneous requests together. "request": random
                requests.
            fraction: held-out fraction, 0 to 1.
            seed: for the random split.
        Returns: (train, held), each in table order.
        Raises: ValueError for an unknown `by` or invalid fraction; by "time" without times; by "request" if the history
            is the impressions themselves, or has events from held-out requests, which would leak their labels into
            training.
        """
        time = None if self._time is None else self._time.cpu()[self._which]
        mask = choose_held_out(time, len(self), by, fraction, seed, self._tables.own)
        train, held = self._which[~mask], self._which[mask]
        if by == "request":
            check_history_leaks(self._tables, self.schema, self._exposures(train), self._exposures(held))
        whole = self
        if self._open.is_open and len(train) and len(held):
            latest = int(time[~mask].max()) if by == "time" and time is not None else None
            schema = fit_schema(self._open, self._tables.part(self._row_numbers(train), latest, self.schema))
            whole = self if schema == self.schema else self._with_schema(schema)
        return whole._select(train), whole._select(held)

    def _select(self: S, which: Tensor) -> S:
        part = copy.copy(self)
        part._which = which
        return part

    def _with_schema(self: S, schema: Schema) -> S:
        raise NotImplementedError

    def _row_numbers(self, which: Tensor) -> Ints:
        """Table row numbers for requests."""
        raise NotImplementedError

    def _sizes(self) -> Tensor:
        """(len,) candidates per request."""
        return self._offsets[self._which + 1] - self._offsets[self._which]

    def _spans(self, which: Tensor) -> Tensor:
        """Places of the requests' rows, request by request."""
        return expand_spans(self._offsets[which], offsets_from_lengths(self._offsets[which + 1] - self._offsets[which]))

    def _exposures(self, which: Tensor) -> Exposures:
        """Rows and times for requests."""
        time = torch.zeros(len(self._offsets) - 1, dtype=torch.int64) if self._time is None else self._time.cpu()
        sizes = self._offsets[which + 1] - self._offsets[which]
        return Exposures(self._row_numbers(which), time[which].repeat_interleave(sizes).numpy())


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
        raise ValueError("Impressions.split: by='time' needs times, but these impressions have none.")
    if by == "request" and own:
        raise ValueError(
            "Impressions.split: by must be 'time' if the impressions serve as history: training histories would "
            "contain held-out labels."
        )
    many = round(fraction * count)
    held = torch.zeros(count, dtype=torch.bool)
    if by == "request":
        held[torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:many]] = True
    elif many:
        assert time is not None
        held = time >= time.sort(descending=True).values[many - 1]
    return held


def check_history_leaks(tables: Tables, schema: Schema, train: Exposures, held: Exposures) -> None:
    """Raise if training histories leak held-out outcomes."""
    found = find_history_leaks(tables, schema, train, held)
    if not len(found):
        return
    row, roles, events = int(found[0]), schema.roles, tables.columns("history")
    event = ", ".join(f"{name} {events[name][row]}" for name in (roles.user, roles.item, roles.time) if name)
    some = "1 event is" if len(found) == 1 else f"{len(found):,} events are"
    raise ValueError(
        f"Impressions.split: by must be 'time' if training histories leak held-out requests: {some} for the "
        f"same user and item, not before the request, such as history row {row} ({event})."
    )


def find_history_leaks(tables: Tables, schema: Schema, train: Exposures, held: Exposures) -> Tensor:
    """History rows that leak a held-out request and are read by a training request.

    Such an event matches a held-out row's user and item, is not before that request, and is before a later training
    request by the same user. The event may be the very click that the held-out label records: leaked as a training
    feature, and for the next-item loss as a target after the same past.
    """
    roles = schema.roles
    if tables.history is None or roles.user is None or roles.item is None or roles.time is None:
        return torch.zeros(0, dtype=torch.int64)
    (users, actors), user_count = tables.codes(roles.user, "the user")
    (items, shown), item_count = tables.codes(roles.item, "the item")
    when = tables.encode("history", roles.time, schema.fields[roles.time]).numpy()
    # Per user, the latest training request; per user and item, the first held-out request that showed the item.
    latest = np.full(max(user_count, 1), np.iinfo(np.int64).min)
    named = users[train.rows]
    np.maximum.at(latest, named[named >= 0], train.time[named >= 0])
    known = (users[held.rows] >= 0) & (items[held.rows] >= 0)
    pairs, place = np.unique((users[held.rows] * item_count + items[held.rows])[known], return_inverse=True)
    first = np.full(len(pairs) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, place, held.time[known])
    own = actors * item_count + shown
    at = np.searchsorted(pairs, own)
    there = (at < len(pairs)) & (actors >= 0) & (shown >= 0)
    there[there] = pairs[at[there]] == own[there]
    since = np.where(there, first[np.where(there, at, len(pairs))], first[-1])
    read = there & (when >= since) & (when < latest[actors])
    return torch.from_numpy(np.flatnonzero(read))
