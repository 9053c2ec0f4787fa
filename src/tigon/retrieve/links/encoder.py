"""Encode query or item attributes as numbers: a number for each value in each column."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tigon.data.columns import read_columns
from tigon.data.values import BadValue, Ints, Value, read_categories, read_lists
from tigon.retrieve.filters.columns import Column, Tags
from tigon.retrieve.ids import read_ids

Attribute = tuple[str, Value]


class EncodedAttributes(NamedTuple):
    """The rows' attributes: row r has numbers[starts[r] : starts[r + 1]], ascending and distinct."""

    starts: Ints
    numbers: Ints

    def row(self, row: int) -> Ints:
        return self.numbers[self.starts[row] : self.starts[row + 1]]

    @property
    def sizes(self) -> Ints:
        return np.diff(self.starts)


class AttributeEncoder:
    """A side's Category and Tags columns, and each column's values in order of first occurrence."""

    def __init__(self, who: str, kinds: Mapping[str, str], attributes: Iterable[Attribute] = ()) -> None:
        self.who, self.kinds = who, dict(kinds)
        self.attributes = [*attributes]
        self.numbers = {attribute: i for i, attribute in enumerate(self.attributes)}

    @classmethod
    def from_columns(cls, who: str, columns: Mapping[str, Column]) -> AttributeEncoder:
        return cls(who, {name: "Tags" if isinstance(column, Tags) else "Category" for name, column in columns.items()})

    @classmethod
    def from_json(cls, who: str, about: Any) -> AttributeEncoder:
        """Read from a links file: {"kinds": {"country": "Category"}, "attributes": [["country", "us"]]}.

        Raises: ValueError for anything else.
        """
        known = about if isinstance(about, dict) else {}
        kinds, attributes = known.get("kinds"), known.get("attributes", ())
        if not isinstance(kinds, dict) or not kinds or not {*map(str, kinds.values())} <= {"Category", "Tags"}:
            raise ValueError(f"no columns for {who}")
        fits = isinstance(attributes, list) and all(
            isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is str and pair[0] in kinds
            and type(pair[1]) in (str, int)
            for pair in attributes
        )  # fmt: skip
        if not fits or len({(*pair,) for pair in attributes}) < len(attributes):
            raise ValueError(f"no attribute list for {who}")
        return cls(who, kinds, ((name, value) for name, value in attributes))

    def encode(self, name: str, table: Any, grow: bool = False) -> tuple[EncodedAttributes, dict[str, Any]]:
        """Encode a table's rows. Unknown values are left out, unless `grow` adds them. Returns all columns as well.

        Raises: ValueError if a column is missing, or a value has another type.
        """
        columns, rows = read_columns("retrieve", table)
        of_rows, of_numbers = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for column, kind in self.kinds.items():
            if column not in columns:
                near = difflib.get_close_matches(column, columns, 1)
                there = (
                    f"there is {near[0]!r}" if near else f"there are {', '.join(map(repr, columns)) or 'no columns'}"
                )
                raise ValueError(
                    f"{name}: the table for {self.who} must have the column {column!r}, a {kind}; {there}."
                )
            try:
                at, indices, values = _read(kind, columns[column])
            except BadValue as error:
                raise ValueError(
                    f"{name}: column {column!r} ({kind}) for {self.who}, row {error.position}: {error}."
                ) from None
            numbers = np.array([self._number((column, value), grow) for value in values], dtype=np.int64)
            numbers = numbers[indices] if len(values) else np.zeros(0, dtype=np.int64)
            of_rows.append(at[numbers >= 0])
            of_numbers.append(numbers[numbers >= 0])
        # Sorted by row, then by number, without duplicates.
        wide = max(len(self.attributes), 1)
        both = np.unique(np.concatenate(of_rows) * wide + np.concatenate(of_numbers))
        starts = np.searchsorted(both // wide, np.arange(rows + 1))
        return EncodedAttributes(starts.astype(np.int64), both % wide), columns

    def _number(self, attribute: Attribute, grow: bool) -> int:
        if grow and attribute not in self.numbers:
            self.numbers[attribute] = len(self.attributes)
            self.attributes.append(attribute)
        return self.numbers.get(attribute, -1)

    def encode_one(self, name: str, attributes: Any) -> Ints:
        """The attribute numbers in one row, given as {"country": "us", "tags": ["new"]}."""
        if not isinstance(attributes, Mapping):
            raise ValueError(
                f"{name}: attributes for {self.who} must be a dict with a value for each column, got "
                f"{type(attributes).__name__}."
            )
        return self.encode(name, {column: [value] for column, value in attributes.items()})[0].numbers


def _read(kind: str, column: Any) -> tuple[Ints, Ints, list[Value]]:
    """Rows, each row's value index, and the values."""
    if kind == "Tags":
        return read_lists(column)
    indices, values = read_categories(column)
    at = np.flatnonzero(indices >= 0)
    return at, indices[at], values


def find_rows(name: str, who: str, ids: Any, columns: Mapping[str, Any], id: str | None, count: int) -> Ints:
    """The table rows that ids refer to: by the id column, or by row number.

    Raises: ValueError if there is no such column, if an id is repeated, or if an id is not in the table.
    """
    wanted = read_ids(name, ids)
    if id is None:
        if isinstance(wanted, list):
            raise ValueError(f"{name}: pairs must name {who} by row number when no id column is given, got text.")
        wrong = (wanted < 0) | (wanted >= count)
        if wrong.any():
            raise ValueError(f"{name}: pairs name {wanted[wrong][0]} for {who}, but the table has {count:,} rows.")
        return wanted
    if not isinstance(id, str) or id not in columns:
        raise ValueError(f"{name}: the table for {who} must have the id column {id!r}.")
    listed = read_ids(name, columns[id])
    in_table, in_pairs = ("text" if isinstance(part, list) else "integers" for part in (listed, wanted))
    if in_table != in_pairs and len(listed):
        raise ValueError(f"{name}: ids for {who} are {in_table} in the table and {in_pairs} in pairs.")
    values, asked = (part if isinstance(part, list) else part.tolist() for part in (listed, wanted))
    place = {value: row for row, value in enumerate(values)}
    if len(place) < len(values):
        twice = next(value for row, value in enumerate(values) if place[value] != row)
        raise ValueError(f"{name}: the column {id!r} for {who} must have each id once, but repeats {twice!r}.")
    if (missing := next((value for value in asked if value not in place), None)) is not None:
        raise ValueError(f"{name}: pairs name {missing!r}, which is not in the column {id!r} for {who}.")
    return np.array([place[value] for value in asked], dtype=np.int64)
