"""The four tables: impressions, events, items and users."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from tigon.data.arrow import arrow_columns, common_codes, keys, nearest
from tigon.data.formats import read
from tigon.data.parquet import ParquetColumns
from tigon.data.values import BadValue, Ints
from tigon.rank.data.fields import Field
from tigon.rank.data.labels import Label
from tigon.rank.data.schema import USUAL, Roles, Schema

NAME = "rank.Impressions"
Columns = Mapping[str, Any]


@dataclass
class Tables:
    """Columns for each table, pyarrow arrays by name; None for an absent table.

    Attributes:
        rows: the impressions.
        history: events, with the impressions' names for user, item and time.
        items, users: features, one row each, with the impressions' name for the id.
        own: whether the history is the impressions themselves.
    """

    rows: Columns
    history: Columns | None = None
    items: Columns | None = None
    users: Columns | None = None
    own: bool = False

    def columns(self, table: str) -> Columns:
        return getattr(self, table) or {}

    def count(self, table: str = "rows") -> int:
        return len(next(iter(self.columns(table).values()), ()))

    def column(self, table: str, name: str, what: str) -> Any:
        """A required column.

        what: the column's role, for the error.
        """
        columns = self.columns(table)
        if name not in columns:
            raise ValueError(f"{NAME}: {SPOKEN[table]} must have the column {name!r}, {what}; {nearest(name, columns)}")
        return columns[name]

    def part(self, rows: Any, latest: int | None, schema: Schema) -> Tables:
        """Select impression rows, and events up to a time in microseconds; None: all events."""
        import pyarrow as pa

        history, time = self.history, schema.roles.time
        if history is not None and latest is not None and time is not None:
            early = pa.array((self.encode("history", time, schema.fields[time]) <= latest).numpy())
            history = {name: column.filter(early) for name, column in history.items()}
        if isinstance(self.rows, ParquetColumns):
            return replace(self, rows=self.rows.take(rows), history=history)
        return replace(self, rows={name: column.take(rows) for name, column in self.rows.items()}, history=history)

    def keys(self, table: str, name: str, what: str) -> Any:
        """An id column, as int64 or large_string."""
        with explain_value(table, name, what):
            return keys(self.column(table, name, what))

    def codes(self, name: str, what: str) -> tuple[list[Ints], int]:
        """Common codes for an id column in the impressions and the history, −1 if missing; and the code count."""
        return common_codes([self.keys(table, name, what) for table in ("rows", "history")])

    def encode(self, table: str, name: str, kind: Field) -> Any:
        """Encode a field from a table.

        Raises: ValueError naming the column and row if a value does not fit.
        """
        column = self.column(table, name, f"read as {kind.kind}")
        with explain_value(table, name, kind.kind):
            return kind.encode(column)


@contextmanager
def explain_value(table: str, name: str, kind: str) -> Iterator[None]:
    """Name the column and the row in an error about a value."""
    try:
        yield
    except BadValue as error:
        raise ValueError(
            f"{NAME}: column {name!r} ({kind}) of {SPOKEN[table]}, row {error.position}: {error}."
        ) from None


# Roles whose history columns are renamed to the impressions' names.
EVENT = ("user", "item", "time")
# Keywords for a history made from the impressions themselves.
OWN = ("self", "positives")


class OwnHistory(NamedTuple):
    """A history made from the impressions. word: a keyword in OWN. more: earlier impressions, prepended."""

    word: str
    more: Columns | None


# Usual names for outcome columns: actions in a history, never features for an impression.
ACTIONS = (
    "action", "event", "event_type", "behavior", "behaviour", "rating", "click", "clicked", "is_click", "clk", "like",
    "liked", "is_like", "purchase", "purchased", "buy", "conversion", "converted", "share", "comment", "follow",
    "dwell", "dwell_time", "watch_time", "play_time", "long_view", "finished", "label", "target",
)  # fmt: skip
SPOKEN = {"rows": "the impressions", "history": "the history", "items": "the items", "users": "the users"}


def load_columns(data: Any) -> Columns:
    """Load columns from an in-memory table or files; columns from an earlier call are returned unchanged."""
    if isinstance(data, ParquetColumns):
        return data
    if isinstance(data, Mapping) and all(type(c).__module__.split(".")[0] == "pyarrow" for c in data.values()):
        return dict(data)
    if isinstance(data, (str, os.PathLike)) or (
        isinstance(data, (list, tuple)) and data and all(isinstance(path, (str, os.PathLike)) for path in data)
    ):
        data = read(NAME, data)
    return arrow_columns(NAME, data)


def find_role(columns: Columns, name: str, given: str | None, table: str) -> str | None:
    """The column for a role: the named column, else the first with a usual name; None without either.

    Raises: ValueError if the named column does not exist.
    """
    if given is not None:
        if given not in columns:
            raise ValueError(f"{NAME}: there is no column {given!r} ({name}) in {table}; {nearest(given, columns)}")
        return given
    return next((usual for usual in USUAL[name] if usual in columns), None)


def find_roles(rows: Columns, given: Mapping[str, Any], history: Any) -> Roles:
    """Column roles: the given roles, and usual names for the others.

    history: its columns, an `OwnHistory` or None.
    Raises: ValueError for an unknown role, and for a table without columns.
    """
    known = [one.name for one in fields(Roles)]
    for name in given:
        if name not in known:
            raise ValueError(f"{NAME}: there is no argument {name!r}; {nearest(name, known)}")
    found: dict[str, Any] = {}
    for name in ("request", "item", "user", "time", "weight"):
        found[name] = find_role(rows, name, given.get(name), SPOKEN["rows"])
    if not rows:
        raise ValueError(f"{NAME}: the impressions must have columns, got none.")
    labels = given.get("labels")
    if labels is None:
        usual = find_role(rows, "labels", None, SPOKEN["rows"])
        labels = [] if usual is None else [usual]
    labels = [labels] if isinstance(labels, str) else list(labels)
    columns = [Label.parse(text).column for text in labels]
    action = given.get("action")
    if action is None:
        there = {*rows, *(history.more or ())} if isinstance(history, OwnHistory) else {*(history or ())}
        action = [name for name in dict.fromkeys((*columns, *ACTIONS)) if name in there]
    return Roles(**found, labels=tuple(labels), action=(action,) if isinstance(action, str) else tuple(action))


def rename_roles(columns: Columns, roles: Roles, names: tuple[str, ...], table: str) -> Columns:
    """Rename a side table's user, item and time columns to the impressions' names."""
    result = dict(columns)
    for name in names:
        wanted = getattr(roles, name)
        if wanted is None or wanted in result:
            continue
        there = find_role(result, name, None, table) or ("id" if "id" in result and len(names) == 1 else None)
        if there is None:
            there_are = ", ".join(map(repr, columns))
            raise ValueError(f"{NAME}: {table} must have the column {wanted!r} ({name}); there are {there_are}.")
        result[wanted] = result.pop(there)
    return result


def load_history(history: Any) -> OwnHistory | Columns | None:
    """Load a history: the impressions themselves, optionally after earlier impressions, or an event table."""
    if isinstance(history, str) and history in OWN:
        return OwnHistory(history, None)
    if isinstance(history, (list, tuple)) and (words := [w for w in history if isinstance(w, str) and w in OWN]):
        rest = [path for path in history if path not in words]
        if len(words) > 1:
            raise ValueError(f"{NAME}: a history must name one of 'self' and 'positives', got both or a repeated name.")
        return OwnHistory(words[0], load_columns(rest) if rest else None)
    return None if history is None else load_columns(history)


def history_from_impressions(rows: Columns, own: OwnHistory, roles: Roles) -> Columns | None:
    """Convert impressions to events: all, or only those with a positive label, after any earlier impressions.

    Tables without label columns, such as those to score, contribute no events, unless no labels are defined at all.
    None if there are no events.
    """
    import pyarrow as pa

    labels = list(map(Label.parse, roles.labels))
    if own.word == "positives" and not labels:
        raise ValueError(f"{NAME}: history='positives' needs labels, but the impressions have none.")
    parts = []
    for part in (own.more, rows):
        there = [label for label in labels if label.column in (part or {})]
        if part and (there or not labels):
            table = pa.table(part)
            parts.append(table.filter(_positive(part, there)) if own.word == "positives" else table)
    if not parts:
        return None
    try:
        return load_columns(parts[0] if len(parts) == 1 else pa.concat_tables(parts, promote_options="permissive"))
    except pa.ArrowException as error:
        said = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"{NAME}: the impressions and the earlier impressions have different columns: {said}."
        ) from None


def _positive(part: Columns, labels: list[Label]) -> Any:
    """Mask for rows with a positive label, as a pyarrow array."""
    import pyarrow as pa

    kept = torch.zeros(len(next(iter(part.values()))), dtype=torch.bool)
    for label in labels:
        with explain_value("rows", label.column, "label"):
            kept |= label.read(part[label.column], gaps=len(labels) > 1) > 0
    return pa.array(kept.numpy())


def gather_tables(rows: Columns, history: Any, items: Any, users: Any, roles: Roles) -> Tables:
    """Collect all tables, with unified role names."""
    own = isinstance(history, OwnHistory)
    for side, table in (("history", history), ("items", items)):
        if table is not None and roles.item is None:
            raise ValueError(
                f"{NAME}: {SPOKEN[side]} must go with impressions with items; name the column by item=…, there are "
                f"{', '.join(map(repr, rows))}."
            )
    if isinstance(history, OwnHistory):
        more = None if history.more is None else rename_roles(history.more, roles, EVENT, SPOKEN["history"])
        history = history_from_impressions(rows, history._replace(more=more), roles)
    elif history is not None:
        history = rename_roles(history, roles, EVENT, SPOKEN["history"])
    if items is not None:
        items = rename_roles(items, roles, ("item",), SPOKEN["items"])
    if users is not None:
        if roles.user is None:
            raise ValueError(f"{NAME}: a user table needs a user column in the impressions; name the column by user=….")
        users = rename_roles(users, roles, ("user",), SPOKEN["users"])
    return Tables(rows, history, items, users, own)
