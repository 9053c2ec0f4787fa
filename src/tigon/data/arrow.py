"""Columns as pyarrow arrays, converted to keys, numbers, times and hashes without Python loops."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tigon.data.columns import read_columns
from tigon.data.values import BadValue, Bools, Ints, have_room, microseconds, read_times

# Microseconds per unit, for numeric times since 1970.
UNITS = {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 0.001}

# Reasons why pyarrow cannot convert a column.
CONVERSION_ERRORS: dict[type[Exception], str] = {
    OverflowError: "64-bit integers, got a larger integer",
    UnicodeEncodeError: "UTF-8 text, got an unpaired surrogate",
}


def arrow_columns(name: str, table: Any) -> dict[str, Any]:
    """A table's columns as pyarrow arrays.

    name: prefix for error messages.
    Raises: ValueError as in `read_columns`, and for a column with mixed value kinds.
    """
    import pyarrow as pa

    columns, _ = read_columns(name, table)
    found = {}
    for key, column in columns.items():
        if not isinstance(column, (pa.Array, pa.ChunkedArray)):
            try:
                column = pa.array(_in_known_units(column))
            except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError) as error:
                said = CONVERSION_ERRORS.get(type(error)) or f"values with a common type: {str(error).splitlines()[0]}"
                raise ValueError(f"{name}: column {key!r} must hold {said.rstrip('.')}.") from None
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode() if isinstance(column, pa.Array) else column.cast(column.type.value_type)
        if pa.types.is_string_view(column.type) or isinstance(column, pa.ChunkedArray):
            column = column.cast(pa.large_string())  # chunked text can exceed 32-bit offsets
        found[key] = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return found


def _in_known_units(column: Any) -> Any:
    """Convert NumPy times to a unit that Arrow supports."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "mM":
        unit, count = np.datetime_data(column.dtype)
        if count != 1 or unit not in ("D", "s", "ms", "us", "ns"):
            if not have_room(column, "s").all():
                raise TypeError(f"a {column.dtype} time is out of range")
            seconds = column.astype(f"{column.dtype.kind}8[s]")
            if (~np.isnat(column) & (seconds.astype(column.dtype) != column)).any():
                raise TypeError(f"a {column.dtype} time is not a whole second")
            return seconds
    return column


def find_nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The most similar name, in any case; None if no name is similar."""
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), lower, 1, cutoff)
    return lower[near[0]] if near else None


def nearest(name: str, names: Iterable[str]) -> str:
    """Suffix for an unknown-column error, suggesting a similar name."""
    listed = list(names)
    if (near := find_nearest(name, listed)) is not None:
        return f"did you mean {near!r}?"
    return f"there are {', '.join(map(repr, listed))}." if listed else "there are no columns."


def keys(column: Any) -> Any:
    """Identifiers as int64 or large_string; null for missing values and empty strings.

    Raises: BadValue for values that are neither strings nor integers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = column.type
    if types.is_null(kind):
        return pa.nulls(len(column), pa.int64())
    if types.is_boolean(kind):
        return column.cast(pa.int8()).cast(pa.int64())
    if types.is_integer(kind):
        if types.is_uint64(kind) and len(column) and (pc.max(column).as_py() or 0) >= 2**63:
            return column.cast(pa.large_string())
        return column.cast(pa.int64())
    if types.is_floating(kind):
        values = np.array(column.cast(pa.float64()).fill_null(np.nan))
        missing = np.isnan(values)
        with np.errstate(invalid="ignore"):
            wrong = ~missing & ((values != np.floor(values)) | (np.abs(values) >= 2.0**63))
        if wrong.any():
            at = int(wrong.argmax())
            raise BadValue(at, f"must be a string or an integer, got {values[at].item()!r}")
        return pa.array(np.where(missing, 0, values).astype(np.int64), mask=missing)
    if types.is_string(kind) or types.is_large_string(kind):
        column = column.cast(pa.large_string())
        return pc.if_else(pc.equal(column, ""), None, column)
    if types.is_temporal(kind) or types.is_decimal(kind):
        return column.cast(pa.large_string())
    raise BadValue(0, f"must be a string or an integer, got {kind}")


def kinds_agree(columns: Sequence[Any]) -> list[Any]:
    """Unify arrays from `keys`: integers if all are integers or empty, else strings."""
    import pyarrow as pa
    import pyarrow.types as types

    empty = [column.null_count == len(column) for column in columns]
    whole = all(none or types.is_integer(column.type) for column, none in zip(columns, empty, strict=True))
    kind = pa.int64() if whole else pa.large_string()
    return [pa.nulls(len(c), kind) if none else c.cast(kind) for c, none in zip(columns, empty, strict=True)]


def common_codes(columns: Sequence[Any]) -> tuple[list[Ints], int]:
    """Codes for the values of several arrays from `keys`, −1 for missing values, and the number of codes."""
    import pyarrow as pa

    coded = pa.concat_arrays(kinds_agree(columns)).dictionary_encode()
    codes = np.array(coded.indices.cast("int64").fill_null(-1))
    return np.split(codes, np.cumsum([len(column) for column in columns])[:-1]), len(coded.dictionary)


def is_numeric(column: Any) -> bool:
    """Whether `numbers` can read a column's type."""
    import pyarrow.types as types

    kind = column.type
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def numbers(column: Any) -> npt.NDArray[np.float64]:
    """Numbers as float64, NaN for missing values.

    Raises: BadValue for non-numeric values and infinities.
    """
    import pyarrow as pa
    import pyarrow.types as types

    kind = column.type
    if types.is_null(kind):
        return np.full(len(column), np.nan)
    if types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif not is_numeric(column):
        first = next((value for value in column.to_pylist() if value is not None), None)
        raise BadValue(0, f"must be a number, got {kind} {first!r}")
    values = np.array(column.cast(pa.float64(), safe=False).fill_null(np.nan))
    if (wrong := np.isinf(values)).any():
        at = int(wrong.argmax())
        raise BadValue(at, f"must be finite or missing, got {values[at].item()!r}")
    return values


def times(column: Any, unit: str) -> tuple[Ints, Bools]:
    """Times as microseconds since 1970 in UTC, and a mask for missing values.

    unit: for numeric times, a key in UNITS.
    Raises: BadValue for values that are not times.
    """
    import pyarrow.types as types

    kind = column.type
    if types.is_integer(kind) and unit == "us":
        return np.array(column.cast("int64").fill_null(0)), np.array(column.is_null())
    if types.is_integer(kind) or types.is_floating(kind):
        values = numbers(column)
        missing = np.isnan(values)
        wrong = np.abs(values) * UNITS[unit] >= 2.0**63
        if wrong.any():
            at = int(wrong.argmax())
            raise BadValue(at, f"must be a time in {unit} since 1970, got {values[at].item()!r}")
        if types.is_integer(kind):
            whole = np.array(column.cast("int64").fill_null(0))
            return (whole // 1000 if unit == "ns" else whole * int(UNITS[unit])), missing
        return np.rint(np.where(missing, 0, values) * UNITS[unit]).astype(np.int64), missing
    if types.is_string(kind) or types.is_large_string(kind):
        return _texts(column)
    return read_times(column)


def _texts(column: Any) -> tuple[Ints, Bools]:
    """Parse ISO texts with pyarrow if it can read all values, else individually."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = pc.if_else(pc.equal(column, ""), None, column)
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):  # texts without and with a time zone
        try:
            found = column.cast(kind)
            break
        except pa.ArrowInvalid:
            continue
    else:
        return read_times(column.to_pylist())
    stamps = np.array(found.to_numpy(zero_copy_only=False))
    missing = np.isnat(stamps)
    return np.where(missing, 0, microseconds(stamps)), missing


def hashes(column: Any) -> tuple[npt.NDArray[np.uint64], Bools]:
    """64-bit hashes for the text form of values from `keys`, and a mask for missing values; identical on every machine.

    h = Σ byte_i · p^i mod 2⁶⁴ over the UTF-8 bytes and the length, with bits mixed as in splitmix64.
    """
    import pyarrow as pa

    coded = column.cast(pa.large_string()).dictionary_encode()
    texts, missing = coded.dictionary, np.array(coded.is_null())
    indices = np.array(coded.indices.fill_null(0).cast("int64"))
    if not len(texts):
        return np.zeros(len(column), np.uint64), missing
    starts = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    held = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[starts[0] : starts[-1]]
    starts = starts - starts[0]
    lengths = np.diff(starts)
    place = np.arange(len(held)) - np.repeat(starts[:-1], lengths)
    powers = np.cumprod(np.full(max(int(lengths.max()), 1), 0x9E3779B97F4A7C15, np.uint64))
    terms = (held.astype(np.uint64) + np.uint64(1)) * powers[place]
    # Use a running sum: reduceat treats empty texts as one byte. The sum wraps modulo 2⁶⁴, as the hash does.
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
    h = sums[starts[1:]] - sums[starts[:-1]] + lengths.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    h ^= h >> np.uint64(31)
    return h[indices], missing
