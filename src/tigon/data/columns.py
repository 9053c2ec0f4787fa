"""Columns by name from pyarrow, pandas and polars tables, and from dicts with arrays, tensors or lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch


def read_columns(name: str, table: Any) -> tuple[dict[str, Any], int]:
    """A table's columns by name, and its row count.

    name: prefix for error messages, the calling operation.

    Raises: ValueError for an unsupported table type, or if a dict's columns differ in length.
    """
    kind = type(table).__module__.split(".")[0]
    if isinstance(table, Mapping):
        columns = {str(key): _plain(name, column) for key, column in table.items()}
        lengths = {key: len(column) for key, column in columns.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{key!r} has {n:,}" for key, n in lengths.items())
            raise ValueError(f"{name}: the columns of a table must be of one length, but {said}.")
        return columns, next(iter(lengths.values()), 0)
    if kind == "pyarrow" and hasattr(table, "column_names"):
        return {key: _plain(name, table.column(key)) for key in table.column_names}, int(table.num_rows)
    if kind in ("pandas", "polars") and hasattr(table, "columns"):
        return {str(key): _plain(name, table[key]) for key in table.columns}, len(table)
    raise ValueError(
        f"{name}: a table must be a pyarrow.Table, a pandas or polars DataFrame, or a dict of arrays, "
        f"got {type(table).__name__}."
    )


def _plain(name: str, column: Any) -> Any:
    """Convert a column to a pyarrow.Array, a numpy array or a list."""
    kind = type(column).__module__.split(".")[0]
    if kind == "polars":
        column, kind = column.to_arrow(), "pyarrow"
    if kind == "pandas" and hasattr(column, "dtype"):
        import pyarrow as pa

        if column.dtype != object:  # of objects, pyarrow would cut times to dates beside dates
            with suppress(pa.ArrowException):  # pyarrow has no sparse and no complex numbers
                column, kind = pa.Array.from_pandas(column), "pyarrow"
        if kind == "pandas":
            return [None if missing else value for value, missing in zip(column, column.isna(), strict=True)]
    if kind == "pyarrow":
        if hasattr(column, "combine_chunks") and hasattr(column, "chunks"):
            column = column.combine_chunks()
        return column
    if isinstance(column, torch.Tensor):
        column = column.detach().cpu()
        narrow = column.is_floating_point() and column.dtype not in (torch.float16, torch.float32, torch.float64)
        column = (column.float() if narrow else column).resolve_conj().resolve_neg().numpy()
    if isinstance(column, np.ndarray):
        if column.ndim != 1:
            raise ValueError(f"{name}: a column must have one dimension, got shape {column.shape}.")
        return column
    if isinstance(column, Sequence) and not isinstance(column, (str, bytes)):
        return list(column)
    raise ValueError(f"{name}: a column must be an array, a tensor or a list, got {type(column).__name__}.")
