"""Read table files into one pyarrow.Table, with the format chosen by file suffix.

.parquet .pq                              .csv .tsv, optionally compressed: .gz .bz2 .zst
.jsonl .ndjson .json                      one object per line, same compression
.arrow .feather                           Arrow IPC files

`examples/convert_tables.py` converts RecBole's, FuxiCTR's and libsvm's files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tigon.files import DamagedFileError, check_memory

COMPRESSED = (".gz", ".bz2", ".zst")
# Besides ISO 8601, accept only formats with the year first, where the day-month order is unambiguous.
TIMES = ("%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d")
# pyarrow's maximum block size.
BLOCK = 1 << 30


def read(name: str, paths: Any) -> Any:
    """Read files into one table, concatenated in order.

    Columns are matched by name across files; integer columns become float if another file has floats.

    Args:
        name: prefix for error messages, the calling operation.
        paths: a file, a folder with files, or a list.
    Returns: a pyarrow.Table.
    Raises: ValueError for a missing or unreadable file, an unknown format, or zero rows.
    """
    files = list_files(name, paths)
    tables = []
    for file in files:
        with explain_errors(name, file):
            tables.append(FORMATS[get_suffix(file)](file))
    table = concat_tables(name, files, tables)
    if not table.num_rows:
        raise ValueError(f"{name}: {files[0]} has no rows.")
    check_column_names(name, files[0], table.column_names)
    return table


def get_suffix(path: Path) -> str:
    """A file's suffix, without the compression suffix."""
    path = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return path.suffix.lower()


def list_files(name: str, paths: Any) -> list[Path]:
    """Files named by `paths`; files in a folder are sorted by name."""
    given = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    if not given:
        raise ValueError(f"{name}: there is no file to read.")
    files: list[Path] = []
    for path in given:
        if not path.exists():
            raise ValueError(f"{name}: there is no file {path}.")
        files += _list_folder(name, path) if path.is_dir() else [path]
    for file in files:
        if get_suffix(file) not in FORMATS:
            raise ValueError(f"{name}: a file must end in {', '.join(FORMATS)}, got {file}.")
    return files


def _list_folder(name: str, folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.is_file() and get_suffix(file) in FORMATS)
    if not files:
        raise ValueError(f"{name}: {folder} holds no file that ends in {', '.join(FORMATS)}.")
    if len({FORMATS[get_suffix(file)] for file in files}) > 1:
        kinds = sorted({get_suffix(file) for file in files})
        raise ValueError(f"{name}: all files in {folder} must have the same format, got {', '.join(kinds)}.")
    return files


@contextmanager
def explain_errors(name: str, file: Path) -> Iterator[None]:
    """Turn errors about an unreadable file into a ValueError that names the file."""
    import pyarrow as pa

    try:
        yield
    except DamagedFileError as error:
        raise ValueError(f"{name}: {error}") from error
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {file} cannot be read: {first_line(error)}.") from error


def first_line(error: BaseException) -> str:
    """The first line from an error's message, for use inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")


def concat_tables(name: str, files: Sequence[Path], tables: Sequence[Any]) -> Any:
    """Concatenate the tables in `files`. Raises: ValueError if their columns differ in kind."""
    import pyarrow as pa

    try:
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        said = first_line(error)
        raise ValueError(f"{name}: {files[0]} and later files have different columns: {said}.") from None


def check_column_names(name: str, file: Path, names: Sequence[str]) -> None:
    """Raise a ValueError if two columns have the same name."""
    if twice := sorted({column for column in names if names.count(column) > 1}):
        raise ValueError(f"{name}: {file} must name each column once, but repeats {twice[0]!r}.")


def _read_delimited(path: Path) -> Any:
    """Read csv or tsv. Types are inferred from the first megabyte, or from the whole file if that fails.

    Quoted texts may contain line breaks.
    """
    import pyarrow as pa
    from pyarrow import csv

    delimiter = "\t" if get_suffix(path) == ".tsv" else ","
    convert = csv.ConvertOptions(timestamp_parsers=[csv.ISO8601, *TIMES])
    try:
        table = csv.read_csv(str(path), parse_options=csv.ParseOptions(delimiter=delimiter), convert_options=convert)
    except pa.ArrowInvalid as error:
        # A block may have ended at a quoted line break, hence "CSV parse".
        if not any(words in str(error) for words in ("CSV parse", "conversion error", "straddl")):
            raise
        whole = csv.ReadOptions(block_size=BLOCK)
        parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        table = csv.read_csv(str(path), read_options=whole, parse_options=parse, convert_options=convert)
    for field in table.schema:
        if pa.types.is_binary(field.type):  # pyarrow's type for a column it cannot decode
            raise pa.ArrowInvalid(f"column {field.name!r} must be in UTF-8")
    return table


def _read_json(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import json

    try:
        return json.read_json(str(path))
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):  # a line is longer than a block
            raise
    return json.read_json(str(path), read_options=json.ReadOptions(block_size=BLOCK))


def _read_parquet(path: Path) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(str(path), page_checksum_verification=True) as opened:
        check_memory(path, unpacked_bytes(opened.metadata))
        return opened.read()


# Bytes per value in Arrow's memory, by Parquet's physical type; a text also needs an offset.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8, "BYTE_ARRAY": 4}


def unpacked_bytes(metadata: Any) -> int:
    """Lower bound for the memory a parquet file's values take, according to its metadata."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(place) for group in groups for place in range(group.num_columns))
    return sum(
        max(chunk.num_values * _WIDTHS.get(chunk.physical_type, 1), chunk.total_uncompressed_size) for chunk in chunks
    )


def _read_arrow(path: Path) -> Any:
    from pyarrow import feather

    return feather.read_table(str(path))


FORMATS: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys((".parquet", ".pq"), _read_parquet),
    **dict.fromkeys((".csv", ".tsv"), _read_delimited),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json),
    **dict.fromkeys((".arrow", ".feather"), _read_arrow),
}
