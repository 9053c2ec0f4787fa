"""`tigon retrieve build`: build an index on disk from item files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.options import argument, option
from tigon.cli.outputs import check_output_folder
from tigon.cli.problem import Problem, check_choice, needs, one_line, sentences
from tigon.cli.progress import Steps
from tigon.cli.screen import screen, show_rows
from tigon.files import check_memory, read_array, read_json

NAME = "retrieve build"
METRICS = ("ip", "cosine", "l2")
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}  # bytes per number
CODES = ("int8", "sign")  # of retrieve.Index


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    items: list[Path] = argument("Files in one format, or a folder with such files: parquet, csv, json lines, arrow.")
    output: Path = option(..., "Folder for the index.", "-o")
    vector: str | None = option(None, "Vector column; default: the only column with lists of floats.")
    vectors: Path | None = option(None, "A .npy file with the vectors, (items, dim), instead of a column.")
    id: str | None = option(None, "Id column, integers or strings; default: id, item_id or row numbers.")
    schema: Path | None = option(None, "JSON file with the filter columns; default: inferred from the files.")
    columns: str | None = option(None, "Filter columns, separated by commas; default: all. Not with --schema.")
    metric: str = option("ip", f"Similarity metric: {', '.join(METRICS)}.")
    dtype: str = option("float16", f"Dtype for the stored vectors: {', '.join(BYTES)}.")
    codes: str | None = option(None, f"Also store short codes, which a GPU scans first: {', '.join(CODES)}.")
    bits: int = option(512, "Signs per vector with --codes sign: 64, 128, 256, 512 or 1024.")
    capacity: int | None = option(None, "Capacity in items; default: all items in the files.", min=1)
    batch_size: int = option(65_536, "Items to read and write at a time.", min=1)
    overwrite: bool = option(False, "Replace an existing index in --output.", "--overwrite", "--force")


def build(options: BuildOptions) -> None:
    """Build an index from files with items and their vectors.

    Filter columns are inferred from their types: strings become categories, lists of strings become tags, numbers and
    times keep their order. The index stores the schema; --schema takes an edited schema.
    """
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    check_choice(NAME, options, metric=METRICS, dtype=BYTES, codes=CODES)
    if options.bits not in (64, 128, 256, 512, 1024):
        raise Problem(f"{NAME}: --bits must be 64, 128, 256, 512 or 1024, got {options.bits}")
    if options.vector is not None and options.vectors is not None:
        raise Problem(f"{NAME}: --vector and --vectors are mutually exclusive")
    if options.schema is not None and options.columns is not None:
        raise Problem(f"{NAME}: --columns is for an inferred schema; with --schema leave --columns out")
    output = options.output
    inputs = [*options.items, *(path for path in (options.vectors, options.schema) if path is not None)]
    check_output_folder(f"{NAME}: --output", output, overwrite=options.overwrite, is_own=_is_index, inputs=inputs)
    from tigon.retrieve.cli.files import IDS, Source, find_ids, find_vector_column
    from tigon.retrieve.storage.folder_lock import check_free

    with sentences(NAME):
        check_free(NAME, output)
    console = screen(stderr=True)
    began = time.monotonic()
    found = Source(NAME, options.items)
    if options.capacity is not None and options.capacity < found.rows:
        raise Problem(
            f"{NAME}: --capacity must be at least the {found.rows:,} rows in {found}, got {options.capacity:,}"
        )
    stored = None if options.vectors is None else _read_vectors(options.vectors, found.rows)
    column = None if stored is not None else find_vector_column(NAME, found, options.vector)
    ids = find_ids(NAME, found, options.id)
    with console.status("reading the filter columns"):
        schema = _find_schema(options, found, {column, ids})
    index: Any = None
    done = 0
    with Steps(console, "items", found.rows) as steps, sentences(NAME):
        for names, matrix, table in _read_pieces(found, column, stored, ids, list(schema), options.batch_size):
            if index is None:
                index = _make_index(options, found.rows, matrix.shape[1], schema)
            if matrix.shape[1] != index.dim:
                raise ValueError(f"every vector must have {index.dim} numbers, like the first, got {matrix.shape[1]}")
            index.upsert(names, matrix, table)
            done += len(matrix)
            steps.show(done)
    with console.status(f"writing {output}"), sentences(NAME):
        index.save(output)
    if len(index) < found.rows:
        console.print(f"{found.rows - len(index):,} rows were replaced by later rows with the same id.")
    if ids is None:
        near = [name for name in found.names if name.lower().endswith("id") and name != column]
        console.print(
            f"note: row numbers serve as ids, since there is no column {', '.join(IDS)}; "
            f"{f'--id {near[0]} selects that column' if near else '--id selects a column'}"
        )
    took = time.monotonic() - began
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    source = f"ids: column {ids}" if ids is not None else "ids: row numbers from 0 (--id selects a column)"
    print(f"{output}: {len(index):,} items × {index.dim}, {size / 2**20:,.1f} MiB, in {took:.1f} s; {source}")


def _make_index(options: BuildOptions, rows: int, dim: int, schema: dict[str, Any]) -> Any:
    from tigon.retrieve import Index, Schema

    given: Any = options
    capacity = given.capacity or rows
    # 9 bytes per item beside the vector: the id, and a live flag.
    check_memory(f"an index with {capacity:,} items", capacity * (dim * BYTES[given.dtype] + 9))
    return Index(dim, capacity, given.dtype, given.metric, Schema(**schema), codes=given.codes, bits=given.bits)


def _is_index(folder: Path) -> bool:
    """Whether `Index.save` has written to a folder. Other files in the folder are ignored."""
    from tigon.retrieve.storage.folder_lock import LOCK

    # A save that ran out of disk space leaves only its lock.
    return (folder / LOCK).is_file() or any(folder.glob("snapshot-*"))


def _find_schema(options: BuildOptions, found: Any, others: set[str | None]) -> dict[str, Any]:
    """The columns to filter by: those in --schema, or inferred from the files; others: columns with another use."""
    from tigon.retrieve import Schema
    from tigon.retrieve.cli.describe import describe
    from tigon.retrieve.cli.files import check_column, split_names

    if options.schema is not None:
        read_json(options.schema)  # reports a file that is not JSON
        try:
            columns = dict(Schema.from_json(options.schema.read_text(encoding="utf-8")).columns)
        except ValueError as error:
            raise Problem(f"{NAME}: --schema {options.schema}: {one_line(error)}") from error
        for name in columns:
            check_column(NAME, found, f"a column of {options.schema}", name)
        return columns
    if options.columns is not None:
        described = describe(found, split_names(NAME, found, "--columns", options.columns))
        for name, reason in described.left_out.items():
            raise Problem(f"{NAME}: --columns: cannot filter by {name}: {reason}")
    else:
        described = describe(found, [name for name in found.names if name not in others])
    rows: list[dict[str, Any]] = [
        {"column": name, "kind": column.kind, "bits": column.bits} for name, column in described.columns.items()
    ]
    rows += [{"column": name, "kind": f"left out: {reason}"} for name, reason in described.left_out.items()]
    if rows:
        show_rows(rows, "filter columns")
    return described.columns


def _read_vectors(path: Path, rows: int) -> Any:
    stored = read_array(path, mapped=True)
    if stored.ndim != 2 or stored.dtype.kind != "f":
        raise Problem(f"{NAME}: --vectors must be floats (items, dim), got {stored.shape} {stored.dtype}")
    if not stored.shape[1]:
        raise Problem(f"{NAME}: --vectors must have at least one number for each item, got {stored.shape}")
    if len(stored) != rows:
        raise Problem(f"{NAME}: --vectors must have a row for each of the {rows:,} items, got {len(stored):,}")
    return stored


def _read_pieces(
    found: Any, from_column: str | None, stored: Any, ids: str | None, filtered: list[str], size: int
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ids, vectors and attributes in pieces."""
    import numpy as np

    from tigon.retrieve.cli.files import parse_vectors

    first = 0
    wanted = list(dict.fromkeys([name for name in (from_column, ids) if name is not None] + filtered))
    for piece in found.pieces(wanted or found.names[:1], size):
        count = piece.num_rows
        names = np.arange(first, first + count) if ids is None else piece.column(ids)
        if from_column is None:
            matrix = np.array(stored[first : first + count], dtype=np.float32)
        else:
            matrix = parse_vectors(NAME, piece.column(from_column), from_column, first)
        yield names, matrix, piece.select(filtered) if filtered else None
        first += count
