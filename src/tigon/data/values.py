"""Convert columns to numpy arrays with four readers: categories, numbers, times and tag lists.

A value is missing if it is None, NaN, NaT, NA or null.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tigon.files import is_encodable

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Value = str | int


class BadValue(ValueError):
    """An invalid value for a column, with its row position in the table."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position


class Categories(NamedTuple):
    """A value per row: `values[indices[row]]`, or missing if the index is −1."""

    indices: Ints
    values: list[Value]


class Lists(NamedTuple):
    """Values for all rows, flattened: row `rows[i]` has `values[indices[i]]`."""

    rows: Ints
    indices: Ints
    values: list[Value]


def _is_arrow(column: Any) -> bool:
    return type(column).__module__.split(".")[0] == "pyarrow"


def is_missing(value: Any) -> bool:
    """Whether a scalar counts as missing."""
    if value is None:
        return True
    if isinstance(value, (float, np.floating)):
        return math.isnan(value)
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    return type(value).__name__ in ("NAType", "NaTType")


# --------------------------------------------------------------------------------------------------------- categories


def as_value(value: Any) -> Value | None:
    """Normalise a category or tag to a string or an integer; None for other types."""
    if isinstance(value, (str, np.str_)):
        return str(value)
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return int(value)  # integer columns with missing values arrive as floats
    return None


def read_categories(column: Any) -> Categories:
    """Read a column with strings or integers."""
    if _is_arrow(column):
        return _arrow_categories(column)
    if isinstance(column, np.ndarray) and column.dtype.kind in "iubU":
        values, indices = np.unique(column, return_inverse=True)
        listed = [_value(v, 0) for v in values]
        _check_values(listed, indices)
        return Categories(indices.astype(np.int64), listed)
    known: dict[Value, int] = {}
    indices = np.empty(len(column), dtype=np.int64)
    for position, value in enumerate(column):
        if is_missing(value):
            indices[position] = -1
        else:
            indices[position] = known.setdefault(_value(value, position), len(known))
    _check_values(known, indices)
    return Categories(indices, list(known))


def _check_values(values: Iterable[Value], indices: Ints, rows: Ints | None = None) -> None:
    """Raise BadValue if any distinct value cannot be written to a file.

    indices: value index per row, or per entry in `rows`.
    """
    for i, value in enumerate(values):
        if not is_writable(value):
            at = int(np.argmax(indices == i))
            wanted = "UTF-8 text" if isinstance(value, str) else "a 64-bit integer"
            raise BadValue(at if rows is None else int(rows[at]), f"must be {wanted}, got {describe(value)}")


def is_writable(value: Value) -> bool:
    """Whether a value is a 64-bit integer or UTF-8-encodable text; '\\ud800', for example, is not encodable."""
    return is_encodable(value) if isinstance(value, str) else -(2**63) <= value < 2**63


def _value(value: Any, position: int) -> Value:
    kept = as_value(value)
    if kept is None:
        raise BadValue(position, f"must be a string or an integer, got {describe(value)}")
    return kept


def _arrow_categories(column: Any) -> Categories:
    if not hasattr(column, "dictionary"):
        if not _names_of_type(column.type, "string", "utf8", "int", "bool", "null", "float", "double"):
            raise BadValue(_first(column), f"must be a string or an integer, got {column.type}")
        if str(column.type) in ("bool", "null"):
            return read_categories(column.to_pylist())
        column = column.dictionary_encode()
    try:
        raw = column.dictionary.to_pylist()
    except UnicodeDecodeError:
        raise BadValue(_first(column), "must be UTF-8 text, got other bytes") from None
    indices = column.indices.cast("int64").fill_null(-1).to_numpy(zero_copy_only=False)
    values: dict[Value, int] = {}
    codes = np.full(len(raw) + 1, -1, dtype=np.int64)  # the last entry represents missing values
    for i, value in enumerate(raw):
        if not is_missing(value):
            if as_value(value) is None:
                raise BadValue(int(np.argmax(indices == i)), f"must be a string or an integer, got {describe(value)}")
            codes[i] = values.setdefault(_value(value, 0), len(values))
    value_indices = codes[indices]
    _check_values(values, value_indices)
    return Categories(value_indices, list(values))


def _names_of_type(kind: Any, *words: str) -> bool:
    return any(word in str(kind) for word in words) and "list" not in str(kind)


def _first(column: Any) -> int:
    """Position of the first non-missing value."""
    return next((i for i, valid in enumerate(column.is_valid().to_pylist()) if valid), 0)


# ------------------------------------------------------------------------------------------------------------ numbers


def read_numbers(column: Any) -> tuple[npt.NDArray[Any], Bools]:
    """Read numbers as int64 or float64, with a mask for missing values."""
    if _is_arrow(column):
        if str(column.type) == "null":
            return np.zeros(len(column)), np.ones(len(column), dtype=bool)
        if not _names_of_type(column.type, "int", "float", "double", "decimal"):
            raise BadValue(_first(column), f"must be a number, got {column.type}")
        missing = column.is_null().to_numpy(zero_copy_only=False)
        if not str(column.type).startswith(("int", "uint")):
            column = column.cast("float64")
        column = column.fill_null(0).to_numpy(zero_copy_only=False)
        values, unset = read_numbers(column)
        return values, unset | missing
    if isinstance(column, np.ndarray) and column.dtype.kind in "iu":
        if column.dtype == np.uint64 and len(column) and column.max() > np.iinfo(np.int64).max:
            raise BadValue(int(column.argmax()), f"must be below 2**63, got {column.max()}")
        return column.astype(np.int64), np.zeros(len(column), dtype=bool)
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        wide = column.astype(np.float64)
        return wide, np.isnan(wide)
    missing = np.zeros(len(column), dtype=bool)
    listed: list[Any] = []
    whole = True
    for position, value in enumerate(column):
        if is_missing(value):
            missing[position] = True
            listed.append(0)
            continue
        if isinstance(value, (bool, np.bool_)) or not _is_number(value):
            raise BadValue(position, f"must be a number, got {describe(value)}")
        integer = isinstance(value, (int, np.integer))
        if integer and not -(2**63) <= int(value) < 2**63:
            raise BadValue(position, f"must be between -2**63 and 2**63, got {value}")
        whole = whole and integer
        listed.append(int(value) if integer else float(value))
    values = np.array(listed, dtype=np.int64 if whole else np.float64)
    return values, missing | np.isnan(values)  # a Decimal may be NaN too


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) or type(value).__name__ == "Decimal"


# -------------------------------------------------------------------------------------------------------------- times


def read_times(column: Any) -> tuple[Ints, Bools]:
    """Read times as microseconds since 1970 in UTC, with a mask for missing values. Naive times are taken as UTC."""
    if _is_arrow(column):
        if str(column.type) == "null":
            return np.zeros(len(column), dtype=np.int64), np.ones(len(column), dtype=bool)
        if _names_of_type(column.type, "string", "utf8"):
            return read_times(column.to_pylist())
        if not _names_of_type(column.type, "timestamp", "date"):
            raise BadValue(_first(column), f"must be a time, got {column.type}")
        column = column.to_numpy(zero_copy_only=False)
    if isinstance(column, np.ndarray) and column.dtype.kind == "M":
        missing = np.isnat(column)
        return np.where(missing, 0, microseconds(column)), missing
    if isinstance(column, np.ndarray) and column.dtype.kind not in "OU":
        if column.dtype.kind == "f" and np.isnan(column).all():
            return np.zeros(len(column), dtype=np.int64), np.ones(len(column), dtype=bool)
        raise BadValue(0, f"must be a time, got {column.dtype}")
    missing = np.zeros(len(column), dtype=bool)
    times = np.zeros(len(column), dtype=np.int64)
    for position, value in enumerate(column):
        if is_missing(value):
            missing[position] = True
            continue
        try:
            time = as_time(value)
        except BadValue as error:
            raise BadValue(position, str(error)) from None
        if time is None:
            raise BadValue(position, f"must be a time such as '2026-01-31' or a datetime, got {describe(value)}")
        times[position] = time
    return times, missing


def microseconds(times: npt.NDArray[np.datetime64]) -> Ints:
    """Convert datetime64 in any unit to microseconds since 1970, rounded down.

    Raises: BadValue for a time that does not fit int64 microseconds (about ±290,000 years).
    """
    outside = ~have_room(times, "us")
    if outside.any():
        at = int(np.argmax(outside))
        raise BadValue(at, f"must be a time within 290,000 years from 1970, got {times.dtype} {times[at].astype(int)}")
    return times.astype("datetime64[us]").astype(np.int64)


def have_room(times: npt.NDArray[Any], unit: str) -> Bools:
    """Mask for datetime64 or timedelta64 values that convert to `unit`; NumPy wraps or rejects the others."""
    units = ("as", "fs", "ps", "ns", "us", "ms", "s", "m", "h", "D", "W", "M", "Y")
    own = np.datetime_data(times.dtype)[0]
    if own not in units[units.index(unit) :]:  # a finer unit, or no unit, which only NaT has
        return np.ones(times.shape, dtype=bool)
    # Compare in the times' coarser unit; near int64's limits, NumPy rounds to the opposite sign.
    bounds = np.array([-(2**63 - 2**40), 2**63 - 2**40], f"{times.dtype.kind}8[{unit}]").astype(times.dtype)
    inside: Bools = np.isnat(times) | ((times > bounds[0]) & (times < bounds[1]))
    return inside


def as_time(value: Any) -> int | None:
    """Convert a datetime, date, datetime64 or ISO text to microseconds since 1970 in UTC; None for other values."""
    if isinstance(value, (str, np.str_)):
        text = str(value).strip()
        try:
            value = datetime.datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
        except ValueError:
            return None
    if isinstance(value, np.datetime64):
        return int(microseconds(np.array([value]))[0])
    if isinstance(value, datetime.datetime):
        try:
            utc = value if value.tzinfo is None else value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
        except OverflowError:  # outside the years 1 to 9999 in UTC
            return None
        return (utc - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)
    if isinstance(value, datetime.date):
        return (value - datetime.date(1970, 1, 1)).days * 86_400_000_000
    return None


# --------------------------------------------------------------------------------------------------------------- tags


def read_lists(column: Any) -> Lists:
    """Read a column with string or integer lists. A missing list is empty."""
    if _is_arrow(column):
        return _arrow_lists(column)
    known: dict[Value, int] = {}
    rows: list[int] = []
    indices: list[int] = []
    for position, values in enumerate(column):
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if isinstance(values, (set, frozenset)):
            values = sorted(values, key=str)
        if isinstance(values, (list, tuple)):
            for value in values:
                rows.append(position)
                indices.append(known.setdefault(_value(value, position), len(known)))
        elif not is_missing(values):
            raise BadValue(position, f"must be a list of strings or integers, got {describe(values)}")
    lists = Lists(np.array(rows, dtype=np.int64), np.array(indices, dtype=np.int64), list(known))
    _check_values(known, lists.indices, lists.rows)
    return lists


def _arrow_lists(column: Any) -> Lists:
    if str(column.type) == "null":
        return Lists(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), [])
    if "list" not in str(column.type):
        raise BadValue(_first(column), f"must be a list of strings or integers, got {column.type}")
    lengths = np.array(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    rows = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    try:
        inner = _arrow_categories(column.flatten())
    except BadValue as error:
        raise BadValue(int(rows[error.position]) if len(rows) else 0, str(error)) from None
    if (inner.indices < 0).any():
        raise BadValue(
            int(rows[np.argmax(inner.indices < 0)]), "must be a list of strings or integers, got a list with null"
        )
    return Lists(rows, inner.indices, inner.values)


def describe(value: Any) -> str:
    """A value's type and the start of its repr, for error messages."""
    return f"{type(value).__name__} {shorten(value)}"


def shorten(value: Any) -> str:
    """The start of a value's repr, for error messages."""
    try:
        text = repr(value)
    except ValueError:  # integers with more digits than Python's limit
        text = "with too many digits to print"
    return text if len(text) <= 60 else text[:57] + "…"
