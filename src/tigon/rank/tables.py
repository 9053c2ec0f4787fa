"""The tables that impressions are read from: the impressions themselves, events, items and users."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tigon.rank.fields import Field
from tigon.rank.labels import Label
from tigon.rank.schema import USUAL, Roles, Schema
from tigon.tables.arrow import arrow_columns, keys, nearest
from tigon.tables.formats import read
from tigon.tables.recbole import beside
from tigon.tables.values import BadValue

NAME = "rank.Impressions"
Columns = dict[str, Any]


@dataclass
class Tables:
    """Columns of each table, pyarrow arrays by name; None where there is no such table.

    Attributes:
        rows: the impressions.
        history: events, with the names that the impressions use for user, item and time.
        items, users: features, one row each, with the impressions' name for the id.
        own: whether the history is the impressions themselves.
    """

    rows: Columns
    history: Columns | None = None
    items: Columns | None = None
    users: Columns | None = None
    own: bool = False

    def of(self, table: str) -> Columns:
        return getattr(self, table) or {}

    def count(self, table: str = "rows") -> int:
        return len(next(iter(self.of(table).values()), ()))

    def column(self, table: str, name: str, what: str) -> Any:
        """A column that has to be there.

        what: what the column is, for the error.
        """
        columns = self.of(table)
        if name not in columns:
            raise ValueError(f"{NAME}: {SPOKEN[table]} must have the column {name!r}, {what}; {nearest(name, columns)}")
        return columns[name]

    def part(self, rows: Any, latest: int | None, schema: Schema) -> Tables:
        """Some rows of the impressions, and the events until a time in microseconds; None: all events."""
        import pyarrow as pa

        history, time = self.history, schema.roles.time
        if history is not None and latest is not None and time is not None:
            early = pa.array((self.encode("history", time, schema.fields[time]) <= latest).numpy())
            history = {name: column.filter(early) for name, column in history.items()}
        return replace(self, rows={name: column.take(rows) for name, column in self.rows.items()}, history=history)

    def keys(self, table: str, name: str, what: str) -> Any:
        """A column of ids, as int64 or large_string."""
        try:
            return keys(self.column(table, name, what))
        except BadValue as error:
            raise self.bad(table, name, what, error) from None

    def encode(self, table: str, name: str, kind: Field) -> Any:
        """The values of a field in a table.

        Raises: ValueError that names column and row of a value that does not fit.
        """
        column = self.column(table, name, f"read as {kind.kind}")
        try:
            return kind.encode(column)
        except BadValue as error:
            raise self.bad(table, name, kind.kind, error) from None

    def bad(self, table: str, name: str, kind: str, error: BadValue) -> ValueError:
        return ValueError(f"{NAME}: column {name!r} ({kind}) of {SPOKEN[table]}, row {error.position}: {error}.")


# Histories that are made of the impressions themselves.
OWN = ("self", "positives")
# What columns that say what happened are usually called: actions of a history, and no features of an impression.
ACTIONS = (
    "action", "event", "event_type", "behavior", "behaviour", "rating", "click", "clicked", "is_click", "clk", "like",
    "liked", "is_like", "purchase", "purchased", "buy", "conversion", "converted", "share", "comment", "follow",
    "dwell", "dwell_time", "watch_time", "play_time", "long_view", "finished", "label", "target",
)  # fmt: skip
SPOKEN = {"rows": "the impressions", "history": "the history", "items": "the items", "users": "the users"}


def load(data: Any) -> Columns:
    """The columns of a table in memory, or of files; what it returned before, as it is."""
    if isinstance(data, Mapping) and all(type(c).__module__.split(".")[0] == "pyarrow" for c in data.values()):
        return dict(data)
    if isinstance(data, (str, os.PathLike)) or (
        isinstance(data, (list, tuple)) and data and all(isinstance(path, (str, os.PathLike)) for path in data)
    ):
        data = read(NAME, data)
    return arrow_columns(NAME, data)


def role(columns: Columns, name: str, given: str | None, table: str) -> str | None:
    """The column that has a role: the one that was named, else the first with a usual name; None without one.

    Raises: ValueError if the named column is not there.
    """
    if given is not None:
        if given not in columns:
            raise ValueError(f"{NAME}: there is no column {given!r} ({name}) in {table}; {nearest(given, columns)}")
        return given
    return next((usual for usual in USUAL[name] if usual in columns), None)


def roles_of(rows: Columns, given: Mapping[str, Any], history: Any) -> Roles:
    """The roles of columns: those that were named, and of the others what is usual.

    history: its columns, "self", "positives" or None.
    Raises: ValueError for a role that does not exist, and for an item that no column is.
    """
    known = [one.name for one in fields(Roles)]
    for name in given:
        if name not in known:
            raise ValueError(f"{NAME}: there is no argument {name!r}; {nearest(name, known)}")
    found: dict[str, Any] = {}
    for name in ("request", "item", "user", "time", "weight"):
        found[name] = role(rows, name, given.get(name), SPOKEN["rows"])
    if found["item"] is None:
        raise ValueError(
            f"{NAME}: name the column of items by item=…; there are {', '.join(map(repr, rows)) or 'no columns'}."
        )
    labels = given.get("labels")
    if labels is None:
        usual = role(rows, "labels", None, SPOKEN["rows"])
        labels = [] if usual is None else [usual]
    labels = [labels] if isinstance(labels, str) else list(labels)
    columns = [Label.of(text).column for text in labels]
    action = given.get("action")
    if action is None and isinstance(history, str):
        action = [name for name in columns if name in rows]
    elif action is None:
        action = [name for name in dict.fromkeys((*columns, *ACTIONS)) if name in (history or {})]
    return Roles(**found, labels=tuple(labels), action=(action,) if isinstance(action, str) else tuple(action))


def renamed(columns: Columns, roles: Roles, names: tuple[str, ...], table: str) -> Columns:
    """A side table under the names that the impressions have for its user, item and time."""
    found = dict(columns)
    for name in names:
        wanted = getattr(roles, name)
        if wanted is None or wanted in found:
            continue
        there = role(found, name, None, table) or ("id" if "id" in found and len(names) == 1 else None)
        if there is None:
            there_are = ", ".join(map(repr, columns))
            raise ValueError(f"{NAME}: {table} must have the column {wanted!r} ({name}); there are {there_are}.")
        found[wanted] = found.pop(there)
    return found


def own_history(rows: Columns, roles: Roles, positives: bool) -> Columns:
    """The impressions as events: all of them, or those with a positive label."""
    import pyarrow as pa

    if not positives:
        return rows
    kept = None
    for label in map(Label.of, roles.labels):
        if label.column not in rows:
            continue
        try:
            here = label.read(rows[label.column]) > 0
        except BadValue as error:
            raise ValueError(
                f"{NAME}: column {label.column!r} (label) of the impressions, row {error.position}: {error}."
            ) from None
        kept = here if kept is None else kept | here
    if kept is None:
        raise ValueError(f"{NAME}: history='positives' needs labels, and the impressions have none.")
    mask = pa.array(kept.numpy())
    return {name: column.filter(mask) for name, column in rows.items()}


def sides(data: Any) -> dict[str, Any]:
    """The tables of items and users that lie beside a file of impressions, by format."""
    return dict(beside(Path(data))) if isinstance(data, (str, os.PathLike)) else {}


def gather(rows: Columns, history: Any, items: Any, users: Any, roles: Roles) -> Tables:
    """All tables, with one name for each role."""
    own = isinstance(history, str)
    if own:
        history = own_history(rows, roles, history == "positives")
    elif history is not None:
        history = renamed(history, roles, ("user", "item", "time"), SPOKEN["history"])
    if items is not None:
        items = renamed(items, roles, ("item",), SPOKEN["items"])
    if users is not None:
        if roles.user is None:
            raise ValueError(f"{NAME}: a table of users needs the impressions' column of users; name it by user=….")
        users = renamed(users, roles, ("user",), SPOKEN["users"])
    return Tables(rows, history, items, users, own)
