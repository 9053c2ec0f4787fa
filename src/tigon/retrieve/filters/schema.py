"""Item attributes: columns by name, and each column's bits in the attribute words.

A word is an int64 whose bit 63 is never used. Columns do not cross words, except Tags with more than 63 values, so
that a filter reads one word per column.
"""

from __future__ import annotations

import copy
import json
import keyword
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tigon.data.arrow import find_nearest
from tigon.data.columns import read_columns
from tigon.data.schema import dump_fields, parse_field
from tigon.data.values import BadValue, Ints, Value, as_value, describe
from tigon.files import parse_json
from tigon.retrieve.filters.columns import Category, Coded, Column, Tags, Vocabulary
from tigon.retrieve.filters.ordered import Number, Timestamp

KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (Category, Tags, Number, Timestamp)}
WORD = 63
# Words with a meaning in the text form.
RESERVED = {"has", "has_any", "has_all", "between", "null", *(word.lower() for word in keyword.kwlist)}


class Place(NamedTuple):
    """A column's bits in a word. start: the lowest of these bits within the column, not 0 for further words of Tags."""

    word: int
    shift: int
    bits: int
    start: int = 0

    @property
    def mask(self) -> int:
        return ((1 << self.bits) - 1) << self.shift


class Encoded(NamedTuple):
    """Table rows as words, and the values to add to vocabularies once the rows are written."""

    words: Ints
    growth: dict[str, list[Value]]


class Schema:
    """Names and kinds of the columns that items can be filtered by.

    Columns are `Category`, `Tags`, `Number` and `Timestamp`. Their bits are packed into int64 words.

    Args:
        columns: a column for each name.

    Raises: ValueError if a name is not an identifier or has a meaning in filters, or if a column's kind is unknown.
    """

    def __init__(self, **columns: Column) -> None:
        self.columns: dict[str, Column] = {}
        self.names: dict[str, str] = {}  # as Python reads them in a filter's text, which has no ligatures
        for name, column in columns.items():
            read = unicodedata.normalize("NFKC", name)
            if not name.isidentifier() or read.lower() in RESERVED:
                raise ValueError(f"Schema: a column name must be an identifier not reserved in filters, got {name!r}.")
            if read in self.names:
                raise ValueError(f"Schema: columns {self.names[read]!r} and {name!r} have the same name in filters.")
            self.names[read] = name
            if not isinstance(column, Column):
                made = " (an instance: Category(), not Category)" if isinstance(column, type) else ""
                raise ValueError(
                    f"Schema: column {name!r} must be one of {', '.join(KINDS)}{made}, got {_type(column)}."
                )
            self.columns[name] = copy.deepcopy(column)
            self.columns[name].name = name
        self.places, self.words = _pack_columns(self.columns)
        self.version = 0

    def __getitem__(self, name: str) -> Column:
        if not isinstance(name, str):
            raise ValueError(f"where: a column name must be a string, got {describe(name)}.")
        if name not in self.columns:
            if (known := self.names.get(unicodedata.normalize("NFKC", name))) is not None:
                return self.columns[known]
            raise ValueError(f"where: there is no column {name!r}{self.nearest(name)}.")
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # vocabularies grow

    def __repr__(self) -> str:
        return f"Schema({', '.join(f'{name}={column!r}' for name, column in self.columns.items())})"

    def nearest(self, name: str) -> str:
        """The end of an error message about an unknown column name."""
        if not self.columns:
            return ": the index has no schema"
        if (near := find_nearest(name, self.columns, 0.4)) is not None:
            return f"; did you mean {near!r}, a {self.columns[near].kind}"
        return f"; there are {', '.join(map(repr, self.columns))}"

    # ---------------------------------------------------------------------------------------------------------- JSON

    def to_json(self) -> str:
        """Columns, options and vocabularies as JSON."""
        return json.dumps(dump_fields(self.columns), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Read a schema from a text such as `{"country": {"kind": "Category"}, "tags": {"kind": "Tags", "size": 48}}`.

        Args:
            text: JSON: for each column the kind and its options.

        Raises: ValueError if the text is not JSON, or a kind or an option is unknown.
        """
        if not isinstance(text, (str, bytes)):
            raise ValueError(f"Schema.from_json: the text must be JSON, got {_type(text)}.")
        described = parse_json(text, "Schema.from_json: the text")
        where = "Schema.from_json: column"
        return cls(**{name: parse_field(f"{where} {name!r}", told, KINDS) for name, told in described.items()})

    # -------------------------------------------------------------------------------------------------------- encode

    def encode(self, table: Any, row_name: Callable[[int], str] = "row {}".format, count: int | None = None) -> Encoded:
        """Encode table rows as attribute words. Vocabularies do not change until `grow_vocabularies` is called.

        Args:
            table: a pyarrow.Table, a pandas or polars DataFrame, or a dict of arrays. None if there are no columns.
            row_name: names a row by position in an error.
            count: the required row count.

        Returns: (words, rows) int64, and the new values by column.
        Raises: ValueError if a column is unknown or missing, or if a value does not fit its column.
        """
        columns, rows = read_columns("retrieve", {} if table is None else table)
        for name in columns:
            if name not in self.columns:
                raise ValueError(
                    f"retrieve: the table has a column {name!r} that the schema lacks{self.nearest(name)}."
                )
        for name in self.columns:
            if name not in columns:
                raise ValueError(f"retrieve: the table must have the column {name!r}, a {self.columns[name].kind}.")
        rows = rows if columns or count is None else count
        if count is not None and rows != count:
            raise ValueError(f"retrieve: the table must have a row for each of the {count:,} ids, got {rows:,} rows.")
        words = np.zeros((self.words, rows), dtype=np.int64)
        growth = {}
        for name, values in columns.items():
            try:
                if new := self._encode(self.columns[name], values, words):
                    growth[name] = new
            except BadValue as error:
                raise ValueError(
                    f"retrieve: column {name!r} ({self.columns[name].kind}), {row_name(error.position)}: {error}."
                ) from None
        return Encoded(words, growth)

    def _encode(self, column: Column, values: Any, words: Ints) -> list[Value]:
        places = self.places[column.name]
        if isinstance(column, Tags):
            rows, bits, new = column.tags(values)
            for place in places:
                here = (bits >= place.start) & (bits < place.start + place.bits)
                np.bitwise_or.at(words[place.word], rows[here], np.int64(1) << (bits[here] - place.start + place.shift))
            return new
        assert isinstance(column, Coded)
        codes, new = column.codes(values)
        words[places[0].word] |= codes << places[0].shift
        return new

    def grow_vocabularies(self, growth: Mapping[str, list[Value]]) -> None:
        """Add new values to the vocabularies."""
        for name, values in growth.items():
            column = self.columns[name]
            assert isinstance(column, Vocabulary)
            column.extend(values)
            self.version += 1

    def check_growth(self, growth: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the vocabularies have room for the values."""
        for name, values in growth.items():
            column = self.columns.get(name)
            if not isinstance(column, Vocabulary) or not isinstance(values, list):
                raise ValueError(f"retrieve: there is no vocabulary {name!r}{self.nearest(name)}.")
            if any(as_value(value) is None for value in values):
                raise ValueError(f"retrieve: values of {name!r} must be strings or integers.")
            column.number_values(values, lambda i: i)

    def decode(self, name: str, words: Ints) -> Ints:
        """A column's codes in attribute words."""
        place = self.places[name][0]
        codes: Ints = (words[place.word] >> place.shift) & ((1 << place.bits) - 1)
        return codes


def _pack_columns(columns: Mapping[str, Column]) -> tuple[dict[str, list[Place]], int]:
    """Places for all columns, and the word count: widest first, each into the first word with room."""
    pieces = [
        (name, start, min(WORD, column.bits - start))
        for name, column in columns.items()
        for start in range(0, column.bits, WORD)
    ]
    used: list[int] = []
    places: dict[str, list[Place]] = {name: [] for name in columns}
    for name, start, bits in sorted(pieces, key=lambda piece: -piece[2]):
        word = next((i for i, taken in enumerate(used) if taken + bits <= WORD), len(used))
        if word == len(used):
            used.append(0)
        places[name].append(Place(word, used[word], bits, start))
        used[word] += bits
    return places, len(used)


def _type(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def name_rows(ids: Iterable[Any]) -> Callable[[int], str]:
    """A function that names the row at a position by its id, for errors."""
    listed = ids if isinstance(ids, (list, np.ndarray)) else list(ids)
    return lambda position: f"id {_plain(listed[position])!r}"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
