"""Load a user's tables and infer their schema: each column's role and field, from its name, type and values."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import numpy as np

from tigon.data.arrow import keys
from tigon.data.values import BadValue, Ints
from tigon.rank.data.fields import Field, Id, Ids, Number, Side, Text, Time
from tigon.rank.data.labels import Label
from tigon.rank.data.schema import Roles, Schema
from tigon.rank.data.tables import (
    ACTIONS,
    NAME,
    SPOKEN,
    Tables,
    explain_value,
    find_roles,
    gather_tables,
    load_columns,
    load_history,
)

# Integers with at most this many distinct values are categories, not quantities.
FEW = 32
# Above this many distinct values, all fields except the item are hashed.
MANY = 1_000_000
# Minimum mean number of spaces for a string column to be text.
SPACES = 3.0
ID_ENDINGS = ("id", "_code", "_type", "category", "class")
# Names of one-hot fields, as from `examples/convert_tables.py`.
ONE_HOT = re.compile(r"field_\d+")
# Names pandas gives a DataFrame's index: in parquet, in csv, and after reading such a csv.
INDEX = re.compile(r"__index_level_\d+__||Unnamed: \d+")


def load_tables(
    data: Any, history: Any, items: Any, users: Any, schema: Schema | None, roles: dict[str, Any],
    labelled: bool = True,
) -> tuple[Tables, Schema]:  # fmt: skip
    """Tables and schema, inferred if not given. Open options are not fitted yet.

    Raises: ValueError for unreadable tables, and for roles together with a schema.
    """
    if schema is not None and roles:
        raise ValueError(f"{NAME}: schema= already defines the roles, got also {', '.join(roles)}.")
    rows = load_columns(data)
    history = load_history(history)
    items, users = (None if side is None else load_columns(side) for side in (items, users))
    found = find_roles(rows, roles, history) if schema is None else schema.roles
    if schema is not None and not labelled:  # ignore an all-missing label column
        columns = {Label.parse(text).column for text in found.labels}
        rows = {name: column for name, column in rows.items()
                if name not in columns or column.null_count < len(column)}  # fmt: skip
    tables = gather_tables(rows, history, items, users, found)
    return tables, infer_fields(tables, found) if schema is None else schema


def infer_schema(data: Any, *, history: Any = None, items: Any = None, users: Any = None, **roles: Any) -> Schema:
    """Infer a schema from the tables' column names, types and values, and fit it on the tables.

    Args:
        data, history, items, users, roles: as in `Impressions.read`.
    Raises: ValueError as `Impressions.read`.
    """
    tables, schema = load_tables(data, history, items, users, None, roles)
    return fit_schema(schema, tables)


def fit_schema(schema: Schema, tables: Tables) -> Schema:
    """Fit the schema's open fields on the tables.

    Raises: ValueError for a value that does not fit its field.
    """
    roles = schema.roles
    made: dict[str, Field] = {}
    if roles.time is not None and roles.time not in schema.fields and roles.time in tables.rows:
        schema = Schema(roles, {**schema.fields, roles.time: Time(side="context")})._because(schema.left_out)
    for name, field in schema.fields.items():
        if not field.is_open:
            continue
        found = {}
        for table in _homes(name, field, schema.roles):
            if name in tables.columns(table):
                with explain_value(table, name, field.kind):
                    found[table] = field.values(tables.columns(table)[name])
        try:
            made[name] = field.fit([*found.values()])
        except ValueError as error:
            raise ValueError(f"{NAME}: column {name!r} ({field.kind}): {error}") from None
        if isinstance(field, Time):
            _one_unit(name, field, found)
    return schema.replace(made) if made else schema


def _one_unit(name: str, field: Time, largest: dict[str, float]) -> None:
    """Raise if numeric times in two tables appear to have different units."""
    units = {table: field.fit([x]).options()["unit"] for table, x in largest.items() if x}
    if len(set(units.values())) > 1:
        said = ", and ".join(f"in {SPOKEN[table]} like {unit}" for table, unit in units.items())
        raise ValueError(f"{NAME}: column {name!r} (Time) must have one unit, but looks {said} since 1970.")


def _homes(name: str, field: Field, roles: Roles) -> tuple[str, ...]:
    """The tables that a field is fitted on."""
    if name in (roles.item, roles.time):
        return ("rows", "history")
    sides = {"context": ("rows", "users"), "item": ("rows", "history", "items"), "row": ("rows",)}
    return sides.get(field.side, ("history",))


def infer_fields(tables: Tables, roles: Roles) -> Schema:
    """Infer roles and fields. `left_out` gives the reason for each skipped column."""
    fields: dict[str, Field] = {}
    if roles.item is not None:
        fields[roles.item] = Id(side="item", history=tables.history is not None)
    left_out: dict[str, str] = {}
    for name in roles.action:
        column = tables.column("history", name, "an action")
        guess = infer_field(name, column)
        fields[name] = Id(side="action") if isinstance(guess, str) else dataclasses.replace(guess, side="action")
    if roles.user is not None:
        if tables.history is None and roles.user in tables.rows:
            fields[roles.user] = Id(side="context")
        else:
            left_out[roles.user] = "the history identifies the user"
    if roles.time is not None and roles.time in tables.rows:
        fields[roles.time] = Time(side="context")
    happened = {Label.parse(text).column for text in roles.labels} | {*roles.action}
    groups = _Groups(tables, roles)
    for table in ("rows", "items", "users"):
        for name, column in tables.columns(table).items():
            if name in fields or name in (roles.request, roles.user, roles.weight) or name in left_out:
                continue
            if name in happened or (table == "rows" and name in ACTIONS):
                left_out[name] = "it records an outcome" + ("" if name in happened else ", by its name")
                continue
            guess = infer_field(name, column)
            if isinstance(guess, str):
                left_out[name] = guess
                continue
            side: Side = "item" if table == "items" or name in tables.columns("items") else "context"
            if table == "rows" and side != "item":
                side = groups.side(column)
            known = tables.history is not None and (
                name in tables.columns("history") or name in tables.columns("items")
            )
            fields[name] = dataclasses.replace(guess, side=side, history=side == "item" and known)
    for name in tables.columns("history"):
        if name not in fields and name not in (roles.user, roles.time, roles.request):
            left_out.setdefault(
                name, "only events have this column; name the column by action=… if it records an outcome"
            )
    return Schema(roles, fields)._because(left_out)


def infer_field(name: str, column: Any) -> Field | str:
    """The field suggested by a column's type and values, or the reason for skipping the column."""
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = column.type
    if column.null_count == len(column):
        return "it has no values"
    if INDEX.fullmatch(name.strip()):
        return "by its name, a row index written by pandas"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        if types.is_string(inner) or types.is_large_string(inner) or types.is_integer(inner):
            return Ids(hash_rows=MANY) if pc.count_distinct(column.flatten()).as_py() > MANY else Ids()
        return f"it holds lists of {inner}"
    bytes_ = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    if types.is_nested(kind) or types.is_time(kind) or any(of(kind) for of in bytes_):
        return f"models cannot read {kind} values"
    if types.is_duration(kind):
        return "it holds durations; convert the durations to numbers"
    distinct = pc.count_distinct(column, mode="all").as_py()
    if distinct == 1:
        return "it has a single value"
    coded = Id(hash_rows=MANY) if distinct > MANY else Id()
    if types.is_string(kind) or types.is_large_string(kind):
        texts = pc.unique(column).drop_null().cast("large_string")
        if pc.mean(pc.count_substring(texts, " ")).as_py() >= SPACES:
            return Text()
        return Time() if _are_times(texts) else coded
    if types.is_temporal(kind):
        return Time()
    if types.is_boolean(kind):
        return Id()
    whole = types.is_integer(kind)
    if types.is_floating(kind) and distinct <= FEW:
        values = np.array(pc.unique(column).cast("float64").drop_null())
        whole = bool(np.all(np.isnan(values) | (values == np.floor(values))))
    named = name.lower().endswith(ID_ENDINGS) or ONE_HOT.fullmatch(name) is not None
    if whole and (distinct <= FEW or (types.is_integer(kind) and named)):
        return coded
    return Number()


def _are_times(texts: Any) -> bool:
    import pyarrow as pa

    try:
        return texts.slice(0, 1000).cast(pa.timestamp("us")) is not None
    except pa.ArrowInvalid:
        return False


class _Groups:
    """Row groups in which a column may be constant: by item, by request, by user."""

    def __init__(self, tables: Tables, roles: Roles) -> None:
        import pyarrow as pa

        rows: Any = tables.rows
        self.item = _codes(rows[roles.item]) if roles.item in rows else None
        self.request = _codes(rows[roles.request]) if roles.request in rows else None
        self.user = _codes(rows[roles.user]) if roles.user in rows else None
        if self.request is None and self.user is not None and roles.time in rows:
            time = _codes(rows[roles.time])
            self.request = _codes(pa.array(self.user * (int(time.max(initial=0)) + 1) + time))

    def side(self, column: Any) -> Side:
        """The side whose groups the column is constant in.

        On several matches, prefers the grouping with the most repeated rows: with few repeats, constancy may be
        accidental, such as an item shown to a single kind of user.
        """
        codes = _codes(column)
        found: tuple[int, Side] = (0, "row")
        sides: tuple[tuple[Ints | None, Side], ...] = (
            (self.item, "item"), (self.request, "context"), (self.user, "context"),
        )  # fmt: skip
        for group, side in sides:
            if group is not None and _constant(codes, group) and (side == "item" or _constant(codes, self.request)):
                found = max(found, (len(group) - int(group.max(initial=0)), side), key=lambda one: one[0])
        return found[1]


def _codes(column: Any) -> Ints:
    """A code per value, from 0; missing values share a code."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        column = pc.binary_join(column.cast(pa.list_(pa.string())), "\x1f")
    elif not types.is_floating(column.type):
        with contextlib.suppress(BadValue):
            column = keys(column)
    return np.array(column.dictionary_encode().indices.cast("int64").fill_null(-1)) + 1


def _constant(codes: Ints, group: Ints | None) -> bool:
    """Whether the codes are constant within each group."""
    if group is None:
        return False
    first = np.zeros(int(group.max(initial=0)) + 1, dtype=np.int64)
    first[group] = codes
    return bool((first[group] == codes).all())
