"""Infer a schema for a table without a schema, from column types and values."""

from __future__ import annotations

from typing import Any, NamedTuple

from tigon.retrieve.cli.files import Source

# Columns with more distinct strings are names or texts, which are not useful to filter by.
MOST_CATEGORIES, MOST_TAGS = 1_000_000, 504
# Units and ranges for times and dates: a column gets the first range that holds all its values.
TIMES = (
    ("s", "1970-01-01", "2106-02-07"), ("m", "1700-01-01", "2700-01-01"), ("m", "0001-01-01", "8000-01-01"),
    ("h", "0001-01-01", "9999-12-31T23:00"),
)  # fmt: skip
DATES = (("D", "1000-01-01", "3000-01-01"), ("D", "0001-01-01", "9999-12-31"))


class Described(NamedTuple):
    """columns: the schema's columns by name. left_out: the reason for each column that was left out."""

    columns: dict[str, Any]
    left_out: dict[str, str]


def describe(found: Source, names: list[str]) -> Described:
    """Infer schema columns from file columns. Strings become categories, lists of strings become tags; numbers and
    times keep their order. There is room to double the number of values.
    """
    columns: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in names:
        made = _column(found, name, found.types[name])
        if isinstance(made, str):
            left_out[name] = made
        else:
            columns[name] = made
    return Described(columns, left_out)


def _column(found: Source, name: str, kind: Any) -> Any:
    import pyarrow.compute as compute
    import pyarrow.types as types

    from tigon.retrieve import Category, Number, Tags
    from tigon.retrieve.filters.schema import RESERVED

    if not name.isidentifier() or name.lower() in RESERVED:
        return "the name is reserved in filters" if name.isidentifier() else "the name is not an identifier"
    if types.is_null(kind):
        return "the column is empty"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind):
        distinct = compute.count_distinct(found.column(name)).as_py()
        if distinct > MOST_CATEGORIES:
            return f"{distinct:,} distinct values are too many to filter by"
        return Category(_room(distinct, least=255))
    if types.is_list(kind) or types.is_large_list(kind):
        if not (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
            return f"lists of {kind.value_type} cannot be filtered by"
        distinct = compute.count_distinct(compute.list_flatten(found.column(name))).as_py()
        if distinct > MOST_TAGS:
            return f"{distinct:,} distinct tags are too many to filter by"
        return Tags(min(63 * (_room(distinct, least=1) // 63 + 1), MOST_TAGS))
    if types.is_integer(kind):
        return _integers(compute.min_max(found.column(name)).as_py())
    if types.is_floating(kind):
        return Number()
    if types.is_timestamp(kind):
        return _times(found.column(name), TIMES)
    if types.is_date(kind):
        return _times(found.column(name), DATES)
    return f"{kind} cannot be filtered by"


def _times(column: Any, ranges: tuple[tuple[Any, str, str], ...]) -> Any:
    import numpy as np
    import pyarrow
    import pyarrow.compute as compute

    from tigon.data.values import BadValue, microseconds
    from tigon.retrieve import Timestamp

    ends = compute.min_max(column)
    try:
        stamps = microseconds(np.array(pyarrow.array([ends["min"], ends["max"]], column.type)))
    except BadValue:
        return "the column has times 290,000 years from now"
    for unit, low, high in ranges:
        made = Timestamp(unit, low, high)
        places = stamps // Timestamp.UNITS[unit]
        if not ends["min"].is_valid or (made.first <= places[0] and places[1] <= made.last):
            return made
    return "the column has times outside the years 1 to 9999"


def _integers(ends: dict[str, Any]) -> Any:
    from tigon.retrieve import Number

    low, high = ends["min"], ends["max"]
    if low is None:
        return "the column is empty"
    if max(abs(low), abs(high)) <= 2**24:
        return Number()  # as float32, which holds all values exactly
    if high >= 2**63:
        return f"the column has numbers above 2**63, such as {high:,}"
    if high - low >= 2**32 - 2:
        return f"{low:,} to {high:,} needs more than 32 bits"
    low = low - (low == high)  # a range needs two distinct numbers
    return Number(low, high, step=1, bits=max(8, (high - low + 1).bit_length()))


def _room(distinct: int, least: int) -> int:
    """The most values whose codes fit the bits needed for twice the present number; no fewer than `least`."""
    return max(least, (1 << (2 * distinct).bit_length()) - 1)
