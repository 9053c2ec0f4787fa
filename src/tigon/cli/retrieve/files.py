"""Files of items and of queries, a piece at a time, and the vectors in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tigon.cli.problem import Problem, one_line

# The endings, and what pyarrow calls the format.
FORMATS = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json",
    ".arrow": "ipc", ".feather": "feather",
}  # fmt: skip
IDS = ("id", "item_id", "ids")


class Source(NamedTuple):
    """Files of one form. data: a pyarrow dataset. rows: how many there are."""

    paths: list[Path]
    data: Any
    rows: int

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @property
    def names(self) -> list[str]:
        return list(self.data.schema.names)

    def column(self, name: str) -> Any:
        """A whole column, as a pyarrow.ChunkedArray."""
        return self.data.to_table(columns=[name]).column(0)

    def pieces(self, columns: list[str], size: int) -> Iterator[Any]:
        """Tables of these columns, of about `size` rows."""
        import pyarrow as pa

        waiting: list[Any] = []
        count = 0
        for batch in self.data.to_batches(columns=columns, batch_size=size):
            waiting.append(batch)
            count += batch.num_rows
            if count >= size:
                yield pa.Table.from_batches(waiting)
                waiting, count = [], 0
        if count:
            yield pa.Table.from_batches(waiting)


def source(command: str, paths: list[Path]) -> Source:
    """Files of one format, by their endings.

    Raises: Problem if a file is missing, of no known format, not of the format that its ending says, or empty.
    """
    from pyarrow import dataset

    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(p for p in path.iterdir() if p.suffix in FORMATS)
        elif path.is_file():
            files.append(path)
        else:
            raise Problem(f"{command}: there is no file {path}")
    if not files:
        raise Problem(f"{command}: {paths[0]} holds no file that ends in {', '.join(FORMATS)}")
    formats = {FORMATS.get(path.suffix.lower()) for path in files}
    if None in formats:
        wrong = next(path for path in files if path.suffix.lower() not in FORMATS)
        raise Problem(f"{command}: a file must end in {', '.join(FORMATS)}, got {wrong}")
    if len(formats) > 1:
        raise Problem(f"{command}: all files must be of one format, got {', '.join(sorted(map(str, formats)))}")
    try:
        data = dataset.dataset([str(path) for path in files], format=formats.pop())
        rows = data.count_rows()
    except (OSError, ValueError) as error:
        raise Problem(f"{command}: {files[0]} cannot be read: {one_line(error)}") from error
    if not rows:
        raise Problem(f"{command}: {files[0]} has no rows")
    return Source(files, data, rows)


def vector_column(command: str, found: Source, given: str | None) -> str:
    """The column of vectors: the one that was named, or the only one that holds lists of floats."""
    if given is not None:
        return named(command, found, "--vector", given)
    candidates: list[str] = [field.name for field in found.data.schema if holds_floats(field.type)]
    if len(candidates) != 1:
        said = f"there are {', '.join(candidates)}" if candidates else "no column holds lists of floats"
        raise Problem(f"{command}: --vector must name the column of vectors in {found}: {said}")
    return candidates[0]


def holds_floats(kind: Any) -> bool:
    """Whether a pyarrow type is of lists of floats, as vectors are."""
    import pyarrow.types as types

    return bool(is_list(kind) and types.is_floating(kind.value_type))


def is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def named(command: str, found: Source, option: str, name: str) -> str:
    """A column's name, which has to be there."""
    if name not in found.names:
        raise Problem(f"{command}: {option} must be a column of {found}, {', '.join(found.names)}; got {name}")
    return name


def vectors_of(command: str, column: Any, name: str, first: int = 0) -> npt.NDArray[np.float32]:
    """(rows, dim) of a column of lists, or of texts such as "[0.1, 0.2]".

    Raises: Problem if a row has no vector, or one of another width.
    """
    import pyarrow as pa
    import pyarrow.types as types

    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(column, pa.ChunkedArray):  # of no chunk
        column = pa.array([], type=column.type)
    if types.is_string(column.type) or types.is_large_string(column.type):
        column = pa.array([numbers(text) for text in column.to_pylist()], type=pa.list_(pa.float32()))
    if not is_list(column.type):
        raise Problem(f"{command}: column {name!r} must hold lists of numbers, got {column.type}")
    if column.null_count:
        at = column.is_null().to_pylist().index(True)
        raise Problem(f"{command}: column {name!r}, row {first + at:,}: there is no vector")
    widths = np.asarray(pa.compute.list_value_length(column))
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
    return np.require(flat, requirements="W").reshape(len(column), -1)  # torch warns of what cannot be written


def numbers(text: str | None) -> list[float] | None:
    """The numbers of a text such as "[0.1, 0.2]"; None if it holds anything else."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.strip().strip("[]()").replace(",", " ").split()]
    except ValueError:
        return None
