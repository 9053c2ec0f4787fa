"""Files of tables, by their endings, as one pyarrow.Table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The endings, and what pyarrow calls the format.
FORMATS = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json",
    ".arrow": "ipc", ".feather": "feather",
}  # fmt: skip
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read(name: str, paths: Any) -> Any:
    """The rows of files, one file after another.

    Args:
        name: what errors begin with, the operation that wants the table.
        paths: a file, a folder of files, or a list of files, all of one format.
    Returns: a pyarrow.Table.
    Raises: ValueError if a file is missing, of no known format, or cannot be read, and if there are no rows.
    """
    from pyarrow import ArrowException, dataset

    files = listed(name, paths)
    formats = {FORMATS[path.suffix.lower()] for path in files}
    if len(formats) > 1:
        raise ValueError(f"{name}: all files must be of one format, got {', '.join(sorted(formats))}.")
    try:
        table = dataset.dataset([str(path) for path in files], format=formats.pop()).to_table()
    except (OSError, ArrowException) as error:
        said = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"{name}: {files[0]} cannot be read: {said}.") from error
    if not table.num_rows:
        raise ValueError(f"{name}: {files[0]} has no rows.")
    return table


def listed(name: str, paths: Any) -> list[Path]:
    """The files that paths name, those of a folder in the order of their names."""
    given = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    files: list[Path] = []
    for path in given:
        if path.is_dir():
            files += sorted(file for file in path.iterdir() if file.suffix.lower() in FORMATS)
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(f"{name}: there is no file {path}.")
    if not files:
        raise ValueError(f"{name}: {given[0]} holds no file that ends in {', '.join(FORMATS)}.")
    for file in files:
        if file.suffix.lower() not in FORMATS:
            raise ValueError(f"{name}: a file must end in {', '.join(FORMATS)}, got {file}.")
    return files
