"""Indices, item files and query files that commands read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tigon.cli.problem import Problem, find_device, one_line, sentences
from tigon.files import read_array

if TYPE_CHECKING:
    from tigon.retrieve import Hits, Index

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


def find_vector_column(command: str, found: Source, given: str | None) -> str:
    """The vector column: the named column, or the only column that holds lists of floats."""
    if given is not None:
        return check_column(command, found, "--vector", given)
    candidates: list[str] = [name for name, kind in found.types.items() if is_float_list(kind)]
    if len(candidates) != 1:
        said = f"there are {', '.join(candidates)}" if candidates else "no column holds lists of floats"
        raise Problem(f"{command}: --vector must name the vector column in {found}: {said}")
    return candidates[0]


def is_float_list(kind: Any) -> bool:
    """Whether a pyarrow type is a list of floats, as for vectors."""
    import pyarrow.types as types

    return bool(is_list(kind) and types.is_floating(kind.value_type))


def is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def check_column(command: str, found: Source, option: str, name: str) -> str:
    """Check that a column name exists."""
    from tigon.data.arrow import nearest

    if name not in found.names:
        raise Problem(f"{command}: {option} must be a column in {found}, got {name!r}; {nearest(name, found.names)}")
    return name


def find_ids(command: str, found: Source, given: str | None) -> str | None:
    """The column of ids: the named column, or a column by a usual name, if there is one."""
    if given is not None:
        return check_column(command, found, "--id", given)
    return next((name for name in IDS if name in found.names), None)


def parse_vectors(command: str, column: Any, name: str, first: int = 0) -> npt.NDArray[np.float32]:
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
        parsed = [parse_numbers(text) for text in texts]
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
        raise Problem(f"{command}: column {name!r}, row {first + at:,}: the vector is missing")
    widths = np.asarray(compute.list_value_length(column))
    if len(widths) and not widths[0]:
        raise Problem(f"{command}: column {name!r}, row {first:,}: the vector has no numbers")
    if (widths != widths[0]).any():
        at = int(np.argmax(widths != widths[0]))
        raise Problem(
            f"{command}: column {name!r}, row {first + at:,}: every vector must have {widths[0]} numbers, like the "
            f"first vector, got {widths[at]}"
        )
    try:
        flat = np.asarray(column.flatten().cast(pa.float32()).to_numpy(zero_copy_only=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Problem(f"{command}: column {name!r} must hold lists of numbers: {one_line(error)}") from error
    return np.require(flat, requirements="W").reshape(len(column), -1)  # torch warns about read-only arrays


def parse_numbers(text: str | None) -> list[float] | None:
    """Parse the numbers in a text such as "[0.1, 0.2]"; None for any other text."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.strip().strip("[]()").replace(",", " ").split()]
    except ValueError:
        return None


def load_index(command: str, path: Path, device: str) -> Index:
    """Load an index folder onto a device.

    Raises: Problem if there is no index, if the index is damaged, or if there is no such device.
    """
    from tigon.retrieve import Index

    place = find_device(device, command)
    if not path.is_dir():
        raise Problem(f"{command}: there is no index {path}; create an index with tigon retrieve build")
    with sentences(command):
        return Index.load(path, device=place)


def get_ids(hits: Hits) -> Any:
    """(queries, k) in numpy, -1 or None where there is no item."""
    ids = hits.ids
    return ids.cpu().numpy() if hasattr(ids, "cpu") else ids


def parse_query(command: str, index: Index, text: str | None, file: Path | None, like: str | None) -> Any:
    """(queries, dim) from one of three options: numbers, a .npy file, or an index item."""
    import numpy as np

    given = [
        option for option, value in (("--vector", text), ("--vectors", file), ("--like", like)) if value is not None
    ]
    if len(given) != 1:
        got = " and ".join(given) if given else "none"
        raise Problem(f"{command}: exactly one of --vector, --vectors and --like must be given, got {got}")
    if like is not None:
        return _find_item(command, index, like)
    if text is not None:
        values = parse_numbers(text)
        if values is None:
            raise Problem(f"{command}: --vector must be numbers separated by commas, got {text[:60]!r}")
        matrix = np.array([values], dtype=np.float32)
    else:
        assert file is not None
        matrix = read_array(file)
        if matrix.ndim not in (1, 2) or matrix.dtype.kind != "f":
            raise Problem(
                f"{command}: --vectors must be floats (queries, {index.dim}) or ({index.dim},), got {matrix.shape} "
                f"{matrix.dtype}"
            )
        matrix = matrix[None] if matrix.ndim == 1 else matrix
    if matrix.shape[1] != index.dim:
        raise Problem(f"{command}: a query must have {index.dim} numbers, like the index, got {matrix.shape[1]}")
    if not np.isfinite(matrix).all():
        raise Problem(f"{command}: a query must have finite numbers, got NaN or infinity")
    return matrix


def _find_item(command: str, index: Index, like: str) -> Any:
    ids = index.table.directory.ids
    kind = None if ids is None else ids.kind
    wanted: Any = like
    if kind == "int64":
        try:
            wanted = int(like)
        except ValueError:
            raise Problem(f"{command}: --like must be an id in the index, an integer, got {like!r}") from None
    is_too_large = isinstance(wanted, int) and not -(2**63) <= wanted < 2**63
    if ids is None or is_too_large or wanted not in index:
        raise Problem(f"{command}: --like must be an id in the index, got {like}")
    row = int(ids.find([wanted])[1][0])
    return index.embeddings[row : row + 1].float()


def read_queries(command: str, file: Path, column: str | None, index: Index) -> tuple[Source, npt.NDArray[np.float32]]:
    """A file of queries, and its vectors, which must be as wide as the index's."""
    found = Source(command, [file])
    name = find_vector_column(command, found, column)
    vectors = parse_vectors(command, found.column(name), name)
    if vectors.shape[1] != index.dim:
        raise Problem(f"{command}: queries must have {index.dim} numbers, like the index, got {vectors.shape[1]}")
    return found, vectors


def split_names(command: str, found: Source, option: str, text: str) -> list[str]:
    """The columns that an option names, separated by commas."""
    return [check_column(command, found, option, name.strip()) for name in text.split(",") if name.strip()]
