"""Lazily read parquet files, by column or by row group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tigon.data.arrow import arrow_columns, nearest
from tigon.data.formats import check_column_names, concat_tables, explain_errors, get_suffix, list_files
from tigon.data.values import Ints

SUFFIXES = (".parquet", ".pq")


class ParquetColumns(Mapping[str, Any]):
    """Columns from parquet files as pyarrow arrays by name. Each access reads the column again; no data is cached.

    Args:
        name: prefix for error messages, the calling operation.
        paths: a file, a folder with files, or a list.
    Raises: ValueError for other formats, unreadable files, files with different columns, and zero rows.

    Attributes:
        starts: (G + 1,) int64, each row group's first row, over all files.
        types: pyarrow type per column, from the first file; for categories the value type.
        bytes: total uncompressed size according to the files' metadata.
    """

    def __init__(self, name: str, paths: Any) -> None:
        import pyarrow as pa

        self.name, self.files = name, list_files(name, paths)
        self.groups: list[tuple[Path, int]] = []
        self.types: dict[str, Any] = {}
        self._rows: Ints | None = None
        self.bytes, sizes = 0, []
        for file in self.files:
            if get_suffix(file) not in SUFFIXES:
                raise ValueError(
                    f"{name}: row groups can only be read from files that end in {' or '.join(SUFFIXES)}, got {file}."
                )
            with explain_errors(name, file), _open(file) as opened:
                schema, metadata = opened.schema_arrow, opened.metadata
            check_column_names(name, file, schema.names)
            if self.types and {*schema.names} != {*self.types}:
                raise ValueError(f"{name}: {self.files[0]} and {file} must have the same columns, got {schema.names}.")
            types = {f.name: f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in schema}
            self.types = self.types or types
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                if group.num_rows:
                    self.groups.append((file, number))
                    sizes.append(group.num_rows)
                    self.bytes += group.total_byte_size
        if not sizes:
            raise ValueError(f"{name}: {self.files[0]} has no rows.")
        self.starts: Ints = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    def __len__(self) -> int:
        return len(self.types)

    def __iter__(self) -> Iterator[str]:
        return iter(self.types)

    def __contains__(self, name: object) -> bool:
        return name in self.types

    def __getitem__(self, name: str) -> Any:
        if name not in self.types:
            raise KeyError(name)
        column = self._read(self.groups, [name])[name]
        return column if self._rows is None else column.take(self._rows)

    def take(self, rows: Any) -> ParquetColumns:
        """Select rows, in the given order.

        Args:
            rows: (n,) int64 row numbers.
        """
        made = object.__new__(ParquetColumns)
        vars(made).update(vars(self), _rows=np.asarray(rows, dtype=np.int64))
        return made

    def between(self, first: int, last: int, columns: Sequence[str]) -> dict[str, Any]:
        """Columns for rows first … last − 1; reads only the row groups that contain them."""
        for column in columns:
            if column not in self.types:
                raise ValueError(f"{self.name}: there is no column {column!r}; {nearest(column, self.types)}")
        a, b = bisect_right(self.starts.tolist(), first) - 1, int(np.searchsorted(self.starts, last))
        start = int(self.starts[a])
        arrays = self._read(self.groups[a:b], list(columns))
        return {name: column.slice(first - start, last - first) for name, column in arrays.items()}

    def pieces(self, size: int, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Iterate over all rows in pieces with at most `size` rows.

        Raises: ValueError for a file with damage beyond its metadata.
        """
        import pyarrow as pa

        for file in self.files:
            with explain_errors(self.name, file), _open(file) as opened:
                for batch in opened.iter_batches(size, columns=list(columns), use_threads=False):
                    yield arrow_columns(self.name, pa.Table.from_batches([batch]))

    def _read(self, groups: Sequence[tuple[Path, int]], columns: list[str]) -> dict[str, Any]:
        tables = []
        for file, numbered in groupby(groups, key=lambda group: group[0]):
            with explain_errors(self.name, file), _open(file) as opened:
                numbers = [number for _, number in numbered]
                tables.append(opened.read_row_groups(numbers, columns=columns, use_threads=False))
        return arrow_columns(self.name, concat_tables(self.name, self.files, tables))


def _open(file: Path) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(str(file), page_checksum_verification=True)
