"""Read table files into one pyarrow.Table, with the format chosen by file suffix.

.parquet .pq                              .csv, .tsv, optionally compressed: .gz .bz2 .zst
.jsonl .ndjson .json                      one object per line, same compression
.arrow .feather                           Arrow IPC files
.inter .item .user                        RecBole's atomic files
.libsvm .svm .libfm                       a label and index:value pairs per line
a folder with dataset_config.yaml         FuxiCTR's, see `tigon.data.fuxictr`
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tigon.data import fuxictr, libsvm, recbole
from tigon.data.values import Malformed
from tigon.files import DamagedFileError, check_memory

COMPRESSED = (".gz", ".bz2", ".zst")
# Besides ISO 8601, accept only formats with the year first, where the day-month order is unambiguous.
TIMES = ("%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
# pyarrow's maximum block size.
BLOCK = 1 << 30


def read(name: str, paths: Any) -> Any:
    """Read files into one table, concatenated in order.

    Columns are matched by name across files; integer columns become float if another file has floats.

    Args:
        name: prefix for error messages, the calling operation.
        paths: a file, a folder with files, or a list. A RecBole folder stands for its .inter file, a FuxiCTR folder for
            its training data.
    Returns: a pyarrow.Table.
    Raises: ValueError for a missing or unreadable file, an unknown format, or zero rows.
    """
    import pyarrow as pa

    files = listed(name, paths)
    tables = [_read(name, path) for path in files]
    try:
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise ValueError(f"{name}: {files[0]} and the files after it differ in their columns: {said(error)}.") from None
    if not table.num_rows:
        raise ValueError(f"{name}: {files[0]} has no rows.")
    twice = {column for column in table.column_names if table.column_names.count(column) > 1}
    if twice:
        raise ValueError(f"{name}: {files[0]} must name each column once, but has {sorted(twice)[0]!r} more often.")
    return table


def ending(path: Path) -> str:
    """A file's suffix, without the compression suffix."""
    path = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return path.suffix.lower()


def listed(name: str, paths: Any) -> list[Path]:
    """Files named by `paths`; files in a folder are sorted by name."""
    given = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    if not given:
        raise ValueError(f"{name}: there is no file to read.")
    files: list[Path] = []
    for path in given:
        if path.is_dir():
            files += _within(name, path)
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(f"{name}: there is no file {path}.")
    for file in files:
        if ending(file) not in FORMATS:
            raise ValueError(f"{name}: a file must end in {', '.join(FORMATS)}, got {file}.")
    return files


def _within(name: str, folder: Path) -> list[Path]:
    if (folder / fuxictr.CONFIG).exists():
        return [fuxictr.config(name, folder).file(name, "train_data")]
    files = sorted(file for file in folder.iterdir() if file.is_file() and ending(file) in FORMATS)
    if rows := [file for file in files if file.suffix == ".inter"]:
        return rows
    if not files:
        raise ValueError(f"{name}: {folder} holds no file that ends in {', '.join(FORMATS)}.")
    if len({FORMATS[ending(file)] for file in files}) > 1:
        kinds = sorted({ending(file) for file in files})
        raise ValueError(f"{name}: all files of {folder} must be of one format, got {', '.join(kinds)}.")
    return files


def _read(name: str, path: Path) -> Any:
    import pyarrow as pa

    try:
        if (path.parent / fuxictr.CONFIG).exists():
            return _of_fuxictr(name, path)
        return FORMATS[ending(path)](path)
    except DamagedFileError as error:
        raise ValueError(f"{name}: {error}") from error
    except (OSError, pa.ArrowException, UnicodeDecodeError, Malformed) as error:
        raise ValueError(f"{name}: {path} cannot be read: {said(error)}.") from error


def _of_fuxictr(name: str, path: Path) -> Any:
    told = fuxictr.config(name, path.parent)
    if ending(path) not in DELIMITERS:
        return told.split(FORMATS[ending(path)](path))
    return told.split(delimited(path, DELIMITERS[ending(path)], column_types=told.types()))


def said(error: BaseException) -> str:
    """The first line from an error's message, for use inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")


def delimited(path: Path, delimiter: str, quoted: bool = True, **options: Any) -> Any:
    """Read a delimited file. Types are inferred from the first megabyte, or from the whole file if that fails.

    Quoted texts may contain line breaks.

    options: passed to pyarrow.csv.ConvertOptions.
    Raises: Malformed for text that is not UTF-8.
    """
    import pyarrow as pa
    from pyarrow import csv

    convert = csv.ConvertOptions(timestamp_parsers=[csv.ISO8601, *TIMES], **options)
    parse = csv.ParseOptions(delimiter=delimiter, quote_char='"' if quoted else False)
    try:
        table = csv.read_csv(str(path), parse_options=parse, convert_options=convert)
    except pa.ArrowInvalid as error:
        cut = quoted and "CSV parse" in str(error)  # a block may have ended at a quoted line break
        if not cut and not any(words in str(error) for words in ("conversion error", "straddl")):
            raise
        whole = csv.ReadOptions(block_size=BLOCK)
        parse = csv.ParseOptions(delimiter=delimiter, quote_char=parse.quote_char, newlines_in_values=quoted)
        table = csv.read_csv(str(path), read_options=whole, parse_options=parse, convert_options=convert)
    for field in table.schema:
        if pa.types.is_binary(field.type):  # pyarrow's type for a column it cannot decode
            raise Malformed(f"column {field.name!r} must be in UTF-8")
    return table


def _json(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import json

    try:
        return json.read_json(str(path))
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):  # a line is longer than a block
            raise
    return json.read_json(str(path), read_options=json.ReadOptions(block_size=BLOCK))


def _parquet(path: Path) -> Any:
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


def _arrow(path: Path) -> Any:
    from pyarrow import feather

    return feather.read_table(str(path))


FORMATS: dict[str, Callable[[Path], Any]] = {
    ".parquet": _parquet,
    ".pq": _parquet,
    **{end: lambda path: delimited(path, DELIMITERS[ending(path)]) for end in DELIMITERS},
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".arrow": _arrow,
    ".feather": _arrow,
    **{end: lambda path: recbole.atomic(path, delimited) for end in recbole.ENDINGS},
    **dict.fromkeys(libsvm.ENDINGS, libsvm.read),
}
