"""Lazily read parquet files, by column or by row group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tigon.data.arrow import arrow_columns, nearest
from tigon.data.formats import ending, listed, said
from tigon.data.values import Ints

ENDINGS = (".parquet", ".pq")


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
        from pyarrow import parquet

        self.name, self.files = name, listed(name, paths)
        self.groups: list[tuple[Path, int]] = []
        self._names: list[str] = []
        self.types: dict[str, Any] = {}
        self._rows: Ints | None = None
        self.bytes, sizes = 0, []
        for file in self.files:
            if ending(file) not in ENDINGS:
                raise ValueError(
                    f"{name}: row groups are read of files that end in {' or '.join(ENDINGS)}, got {file}."
                )
            try:
                about = parquet.ParquetFile(str(file), page_checksum_verification=True)
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{name}: {file} cannot be read: {said(error)}.") from error
            names = about.schema_arrow.names
            if twice := sorted({column for column in names if names.count(column) > 1}):
                raise ValueError(f"{name}: {file} must name each column once, but has {twice[0]!r} more often.")
            if self._names and set(names) != set(self._names):
                raise ValueError(f"{name}: {self.files[0]} and {file} must have the same columns, got {names}.")
            if not self._names:
                self._names = names
                fields = {field.name: field.type for field in about.schema_arrow}
                self.types = {k: t.value_type if pa.types.is_dictionary(t) else t for k, t in fields.items()}
            for number in range(about.num_row_groups):
                group = about.metadata.row_group(number)
                if group.num_rows:
                    self.groups.append((file, number))
                    sizes.append(group.num_rows)
                    self.bytes += group.total_byte_size
        if not sizes:
            raise ValueError(f"{name}: {self.files[0]} has no rows.")
        self.starts: Ints = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        found = self._read(self.groups, [name])[name]
        return found if self._rows is None else found.take(self._rows)

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
            if column not in self._names:
                raise ValueError(f"{self.name}: there is no column {column!r}; {nearest(column, self._names)}")
        a, b = bisect_right(self.starts.tolist(), first) - 1, int(np.searchsorted(self.starts, last))
        found = self._read(self.groups[a:b], list(columns))
        start = int(self.starts[a])
        return {name: column.slice(first - start, last - first) for name, column in found.items()}

    def pieces(self, size: int, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Iterate over all rows in pieces with at most `size` rows.

        Raises: ValueError for a file with damage beyond its metadata.
        """
        import pyarrow as pa
        from pyarrow import parquet

        for file in self.files:
            try:
                with parquet.ParquetFile(str(file), page_checksum_verification=True) as opened:
                    for batch in opened.iter_batches(size, columns=list(columns), use_threads=False):
                        yield arrow_columns(self.name, pa.Table.from_batches([batch]))
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{self.name}: {file} cannot be read: {said(error)}.") from error

    def _read(self, groups: Sequence[tuple[Path, int]], columns: list[str]) -> dict[str, Any]:
        import pyarrow as pa
        from pyarrow import parquet

        tables = []
        by_file: dict[Path, list[int]] = {}
        for file, number in groups:
            by_file.setdefault(file, []).append(number)
        for file, numbers in by_file.items():
            try:
                with parquet.ParquetFile(str(file), page_checksum_verification=True) as opened:
                    tables.append(opened.read_row_groups(numbers, columns=columns, use_threads=False))
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{self.name}: {file} cannot be read: {said(error)}.") from error
        try:
            whole = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise ValueError(
                f"{self.name}: {self.files[0]} and the files after it differ in their columns: {said(error)}."
            ) from None
        return arrow_columns(self.name, whole)
