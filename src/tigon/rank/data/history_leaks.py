"""Detect training histories that leak the outcomes of held-out requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tigon.data.arrow import kinds_agree
from tigon.rank.data.schema import Schema
from tigon.rank.data.tables import Tables


class Exposures(NamedTuple):
    """Impression rows and their request times, both (n,) int64."""

    rows: NDArray[np.int64]
    time: NDArray[np.int64]


def check_history_leaks(tables: Tables, schema: Schema, train: Exposures, held: Exposures) -> None:
    """Raise if training histories leak held-out outcomes."""
    found = find_history_leaks(tables, schema, train, held)
    if not len(found):
        return
    row, roles, events = int(found[0]), schema.roles, tables.columns("history")
    event = ", ".join(f"{name} {events[name][row]}" for name in (roles.user, roles.item, roles.time) if name)
    some = "1 event is" if len(found) == 1 else f"{len(found):,} events are"
    raise ValueError(
        f"Impressions.split: by must be 'time' where histories to train on tell of held-out requests: {some} of the "
        f"same user and item, not before the request, such as row {row} of the history ({event})."
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
    users, items = (_codes(tables, role) for role in (roles.user, roles.item))
    when = tables.encode("history", roles.time, schema.fields[roles.time]).numpy()
    # Per user, the latest training request; per user and item, the first held-out request that showed the item.
    latest = np.full(users.most, np.iinfo(np.int64).min)
    named = users.rows[train.rows]
    np.maximum.at(latest, named[named >= 0], train.time[named >= 0])
    pairs = users.rows[held.rows] * items.most + items.rows[held.rows]
    known = (users.rows[held.rows] >= 0) & (items.rows[held.rows] >= 0)
    shown, place = np.unique(pairs[known], return_inverse=True)
    first = np.full(len(shown) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, place, held.time[known])
    own = users.events * items.most + items.events
    at = np.searchsorted(shown, own)
    there = (at < len(shown)) & (users.events >= 0) & (items.events >= 0)
    there[there] = shown[at[there]] == own[there]
    since = np.where(there, first[np.where(there, at, len(shown))], first[-1])
    read = there & (when >= since) & (when < latest[users.events])
    return torch.from_numpy(np.flatnonzero(read))


class _Codes(NamedTuple):
    """Codes for user or item keys: in impressions and events, −1 if missing; and the code count."""

    rows: NDArray[np.int64]
    events: NDArray[np.int64]
    most: int


def _codes(tables: Tables, role: str) -> _Codes:
    import pyarrow as pa

    rows, events = kinds_agree([tables.keys(table, role, "a role") for table in ("rows", "history")])
    coded = pa.concat_arrays([rows, events]).dictionary_encode()
    found = np.array(coded.indices.cast("int64").fill_null(-1))
    return _Codes(found[: len(rows)], found[len(rows) :], max(len(coded.dictionary), 1))
