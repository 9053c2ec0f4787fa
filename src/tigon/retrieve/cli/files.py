"""Item and query files, read in pieces, and their vectors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tigon.cli.problem import Problem, disk_full, one_line

IDS = ("id", "item_id", "ids")


class Source:
    """Table files: parquet is read in pieces, other formats at once.

    Args:
        command: the beginning of error messages.
        paths: files, or folders of files.
    Raises: Problem if a file is missing, empty, in an unknown format, or not in the format of its extension.

    Attributes:
        types: each column's pyarrow type; categories have their values' type.
        rows: the row count.
    """

    def __init__(self, command: str, paths: list[Path]) -> None:
        from tigon.data.arrow import arrow_columns
        from tigon.data.formats import get_suffix, list_files, read
        from tigon.data.parquet import SUFFIXES, ParquetColumns

        self.command, self.paths = command, paths
        with sentences(command):
            if all(get_suffix(file) in SUFFIXES for file in list_files(command, paths)):
                self.columns: Mapping[str, Any] = ParquetColumns(command, paths)
                self.types: dict[str, Any] = self.columns.types
                self.rows = int(self.columns.starts[-1])
            else:
                self.columns = arrow_columns(command, read(command, paths))
                self.types = {name: column.type for name, column in self.columns.items()}
                self.rows = len(next(iter(self.columns.values())))

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @property
    def names(self) -> list[str]:
        return list(self.types)

    def column(self, name: str) -> Any:
        """A whole column, as a pyarrow.Array."""
        with sentences(self.command):
            return self.columns[name]

    def pieces(self, columns: list[str], size: int) -> Iterator[Any]:
        """Tables with these columns, with at most `size` rows each."""
        import pyarrow as pa

        with sentences(self.command):
            if isinstance(self.columns, dict):
                for first in range(0, self.rows, size):
                    yield pa.table({name: self.columns[name].slice(first, size) for name in columns})
            else:
                for piece in self.columns.pieces(size, columns):  # type: ignore[attr-defined]
                    yield pa.table(piece)


@contextmanager
def sentences(command: str) -> Iterator[None]:
    """Turn errors about tables and indices into a command's Problems."""
    try:
        yield
    except (ValueError, OSError, OverflowError) as error:
        if disk_full(error):
            raise
        raise Problem(f"{command}: {re.sub(CALLED, '', one_line(error))}") from error


# The beginning of the library's error messages.
CALLED = r"^(retrieve( [a-z]+)?|(Index|Schema)(\.[a-z_]+)?): "


def vector_column(command: str, found: Source, given: str | None) -> str:
    """The vector column: the named column, or the only column that holds lists of floats."""
    if given is not None:
        return named(command, found, "--vector", given)
    candidates: list[str] = [name for name, kind in found.types.items() if holds_floats(kind)]
    if len(candidates) != 1:
        said = f"there are {', '.join(candidates)}" if candidates else "no column holds lists of floats"
        raise Problem(f"{command}: --vector must name the column of vectors in {found}: {said}")
    return candidates[0]


def holds_floats(kind: Any) -> bool:
    """Whether a pyarrow type is a list of floats, as for vectors."""
    import pyarrow.types as types

    return bool(is_list(kind) and types.is_floating(kind.value_type))


def is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def named(command: str, found: Source, option: str, name: str) -> str:
    """Check that a column name exists."""
    from tigon.data.arrow import nearest

    if name not in found.names:
        raise Problem(f"{command}: {option} must be a column of {found}, got {name!r}; {nearest(name, found.names)}")
    return name


def vectors_of(command: str, column: Any, name: str, first: int = 0) -> npt.NDArray[np.float32]:
    """(rows, dim) from a column with lists, or texts such as "[0.1, 0.2]".

    Raises: Problem if a row has no vector, or a vector with another width.
    """
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.types as types

    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(column, pa.ChunkedArray):  # without chunks
        column = pa.array([], type=column.type)
    if types.is_string(column.type) or types.is_large_string(column.type):
        texts = column.to_pylist()
        parsed = [numbers(text) for text in texts]
        if bad := [i for i, (text, one) in enumerate(zip(texts, parsed, strict=True)) if text and one is None]:
            raise Problem(
                f"{command}: column {name!r}, row {first + bad[0]:,}: must be numbers such as [0.1, 0.2], got "
                f"{texts[bad[0]][:60]!r}"
            )
        column = pa.array([one or None for one in parsed], type=pa.list_(pa.float32()))
    if not is_list(column.type):
        raise Problem(f"{command}: column {name!r} must hold lists of numbers, got {column.type}")
    if column.null_count:
        at = column.is_null().to_pylist().index(True)
        raise Problem(f"{command}: column {name!r}, row {first + at:,}: there is no vector")
    widths = np.asarray(compute.list_value_length(column))
    if len(widths) and not widths[0]:
        raise Problem(f"{command}: column {name!r}, row {first:,}: the vector has no numbers")
    if (widths != widths[0]).any():
        at = int(np.argmax(widths != widths[0]))
        raise Problem(
            f"{command}: column {name!r}, row {first + at:,}: every vector must have {widths[0]} numbers, as the first "
            f"has, got {widths[at]}"
        )
    try:
        flat = np.asarray(column.flatten().cast(pa.float32()).to_numpy(zero_copy_only=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Problem(f"{command}: column {name!r} must hold lists of numbers: {one_line(error)}") from error
    return np.require(flat, requirements="W").reshape(len(column), -1)  # torch warns about read-only arrays


def numbers(text: str | None) -> list[float] | None:
    """Parse the numbers in a text such as "[0.1, 0.2]"; None for any other text."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.strip().strip("[]()").replace(",", " ").split()]
    except ValueError:
        return None
