"""RecBole's atomic files: tab-separated columns, a `name:type` header, and space-separated lists.

Source: https://recbole.io/docs/user_guide/data/atomic_files.html
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tigon.data.values import Malformed

ENDINGS = (".inter", ".item", ".user")
TYPES = ("token", "token_seq", "float", "float_seq")


def atomic(path: Path, delimited: Callable[..., Any]) -> Any:
    """Read an atomic file: tokens as strings, floats as numbers, sequences as lists.

    delimited: a reader like `tigon.data.formats.delimited`.
    Raises: Malformed if the header does not match the format.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    with open(path, encoding="utf-8") as handle:
        header = handle.readline().rstrip("\r\n").split("\t")
    types: dict[str, str] = {}
    for column in header:
        kind = column.rpartition(":")[2]
        if kind not in TYPES or kind == column:
            raise Malformed(f"the header must name columns as name:type with {', '.join(TYPES)}, got {column!r}")
        types[column] = kind
    told = {column: pa.float64() if kind == "float" else pa.string() for column, kind in types.items()}
    table = delimited(path, "\t", quoted=False, column_types=told)
    columns = {}
    for column, kind in types.items():
        values = table.column(column)
        if kind.endswith("_seq"):
            values = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(values))
            # Splitting an empty text returns a list with an empty string.
            empty = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(table.column(column))), 0)
            values = pc.if_else(empty, pa.scalar([], values.type), values)
            values = values.cast(pa.list_(pa.float64())) if kind == "float_seq" else values
        columns[column.rpartition(":")[0]] = values
    return pa.table(columns)


def beside(path: Path) -> dict[str, Path]:
    """Item and user files for a RecBole folder or .inter file: {"items": …, "users": …}.

    Takes the file with the same name, or the folder's only item or user file if interactions span several files.
    """
    folder = path if path.is_dir() else path.parent
    if path.suffix != ".inter" and not (path.is_dir() and any(path.glob("*.inter"))):
        return {}
    found = {}
    for side, end in (("items", ".item"), ("users", ".user")):
        named, files = path.with_suffix(end), sorted(folder.glob(f"*{end}"))
        if named in files or len(files) == 1:
            found[side] = named if named in files else files[0]
    return found
