"""`tigon retrieve build`: build an index on disk from item files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.outputs import check_output_folder
from tigon.cli.problem import Problem, needs, one_line
from tigon.files import check_memory, read_array, read_json

NAME = "retrieve build"
METRICS = ("ip", "cosine", "l2")
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}  # bytes per number
DTYPES = tuple(BYTES)
CODES = ("int8", "sign")  # of retrieve.Index


def build(
    items: Annotated[
        list[Path], typer.Argument(help="Files of one format, or a folder of them: parquet, csv, json lines, arrow.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the index.")],
    vector: Annotated[
        str | None, typer.Option(help="Column of vectors; default: the only one that holds lists of floats.")
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(help="A .npy file with the vectors, (items, dim), instead of a column.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option("--id", help="Column of ids, integers or strings; default: id, item_id or row numbers."),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="JSON file with the columns to filter by; default: what the files hold.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns to filter by, separated by commas; default: all. Not with --schema.")
    ] = None,
    metric: Annotated[str, typer.Option(help="ip, cosine or l2.")] = "ip",
    dtype: Annotated[str, typer.Option(help=f"Of the stored vectors: {', '.join(DTYPES)}.")] = "float16",
    codes: Annotated[
        str | None, typer.Option(help=f"{', '.join(CODES)}: fewer bits of each vector as well, read first on a GPU.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Signs of each vector with --codes sign: 64, 128, 256, 512 or 1024.")] = 512,
    capacity: Annotated[
        int | None, typer.Option(help="Items that there is room for; default: those of the files.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Items that are read and written at a time.", min=1)] = 65_536,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", "--force", help="Replace an index that is in --output.")
    ] = False,
) -> None:
    """Build an index from files with items and their vectors.

    Filter columns are inferred from their types: strings become categories, lists of strings become tags, numbers and
    times keep their order. The index stores the schema; --schema takes an edited schema.
    """
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    if metric not in METRICS:
        raise Problem(f"{NAME}: --metric must be one of {', '.join(METRICS)}, got {metric}")
    if dtype not in DTYPES:
        raise Problem(f"{NAME}: --dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if codes is not None and codes not in CODES:
        raise Problem(f"{NAME}: --codes must be one of {', '.join(CODES)}, got {codes}")
    if bits not in (64, 128, 256, 512, 1024):
        raise Problem(f"{NAME}: --bits must be 64, 128, 256, 512 or 1024, got {bits}")
    if vector is not None and vectors is not None:
        raise Problem(f"{NAME}: --vector and --vectors exclude each other")
    if schema is not None and columns is not None:
        raise Problem(f"{NAME}: --columns is for a schema that is found; with --schema leave it out")
    inputs = [*items, *(path for path in (vectors, schema) if path is not None)]
    check_output_folder(f"{NAME}: --output", output, overwrite=overwrite, is_own=_is_index, inputs=inputs)

    from tigon.cli.screen import screen
    from tigon.retrieve import Index, Schema
    from tigon.retrieve.cli.files import IDS, Source, named, sentences, vector_column
    from tigon.retrieve.storage.folder_lock import check_free

    with sentences(NAME):
        check_free(NAME, output)
    chosen: Any = metric
    coding: Any = codes
    console = screen(stderr=True)
    began = time.monotonic()
    found = Source(NAME, items)
    if capacity is not None and capacity < found.rows:
        raise Problem(f"{NAME}: --capacity must be at least the {found.rows:,} rows of {found}, got {capacity:,}")
    stored = None if vectors is None else _stored(vectors, found.rows)
    from_column = None if stored is not None else vector_column(NAME, found, vector)
    ids = next((name for name in IDS if name in found.names), None) if id is None else named(NAME, found, "--id", id)
    rest = [name for name in found.names if name not in (from_column, ids)]
    if schema is not None:
        described = _read_schema(schema)
        for name in described:
            named(NAME, found, f"a column of {schema}", name)
    else:
        chosen_columns = _chosen(found, columns, rest)
        with console.status("reading the columns to filter by"):
            described = _describe(found, chosen_columns, asked=columns is not None)
    parts = _parts(found, from_column, stored, ids, list(described), batch_size)
    dim = None
    index = None
    with _bar(console, found.rows) as advance:
        for names, matrix, table in parts:
            with sentences(NAME):
                if index is None:
                    dim = matrix.shape[1]
                    # 9 bytes per item beside the vector: the id, and a live flag.
                    check_memory(f"an index of {capacity or found.rows:,} items", (capacity or found.rows) * (
                        dim * BYTES[dtype] + 9))  # fmt: skip
                    index = Index(
                        dim, capacity or found.rows, dtype, chosen, Schema(**described), codes=coding, bits=bits
                    )  # fmt: skip
                if matrix.shape[1] != dim:
                    raise ValueError(f"every vector must have {dim} numbers, as the first has, got {matrix.shape[1]}")
                index.upsert(names, matrix, table)
            advance(len(matrix))
    assert index is not None
    with console.status(f"writing {output}"), sentences(NAME):
        index.save(output)
    if len(index) < found.rows:
        console.print(f"{found.rows - len(index):,} rows had an id that a later row has, too; the later one counts.")
    if ids is None:
        near = [name for name in found.names if name.lower().endswith("id") and name != from_column]
        console.print(
            f"note: ids are the numbers of the rows, as there is no column {', '.join(IDS)}; "
            f"{f'--id {near[0]} takes that column' if near else '--id names one'}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    took = time.monotonic() - began
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    source = f"ids: column {ids}" if ids is not None else "ids: row numbers from 0 (--id names a column)"
    screen().print(
        f"{output}: {len(index):,} items × {dim}, {size / 2**20:,.1f} MiB, in {took:.1f} s; {source}", soft_wrap=True
    )


def _is_index(folder: Path) -> bool:
    """Whether `Index.save` has written to a folder. Other files in the folder are ignored."""
    from tigon.retrieve.storage.folder_lock import LOCK

    # A save that ran out of disk space leaves only its lock.
    return (folder / LOCK).is_file() or any(folder.glob("snapshot-*"))


def _read_schema(path: Path) -> dict[str, Any]:
    from tigon.retrieve import Schema

    read_json(path)  # reports a file that is not JSON
    try:
        return dict(Schema.from_json(path.read_text(encoding="utf-8")).columns)
    except ValueError as error:
        raise Problem(f"{NAME}: --schema {path}: {one_line(error)}") from error


def _stored(path: Path, rows: int) -> Any:
    stored = read_array(path, mapped=True)
    if stored.ndim != 2 or stored.dtype.kind != "f":
        raise Problem(f"{NAME}: --vectors must be floats (items, dim), got {stored.shape} {stored.dtype}")
    if not stored.shape[1]:
        raise Problem(f"{NAME}: --vectors must have a number for each item or more, got {stored.shape}")
    if len(stored) != rows:
        raise Problem(f"{NAME}: --vectors must have a row for each of the {rows:,} items, got {len(stored):,}")
    return stored


def _chosen(found: Any, columns: str | None, rest: list[str]) -> list[str]:
    from tigon.retrieve.cli.files import named

    if columns is None:
        return rest
    return [named(NAME, found, "--columns", name.strip()) for name in columns.split(",") if name.strip()]


def _describe(found: Any, names: list[str], asked: bool) -> dict[str, Any]:
    """Infer a schema's columns. asked: whether the names were given, so that none may be left out."""
    from rich.table import Table

    from tigon.cli.screen import screen, show
    from tigon.retrieve.cli.describe import describe

    described = describe(found, names)
    for name, reason in described.left_out.items() if asked else ():
        raise Problem(f"{NAME}: --columns: {name} cannot be filtered by: {reason}")
    if names:
        table = Table("column", "kind", "bits", title="columns to filter by")
        for name, column in described.columns.items():
            table.add_row(name, column.kind, str(column.bits))
        for name, reason in described.left_out.items():
            table.add_row(name, f"left out: {reason}", "")
        show(screen(), table)
    return described.columns


def _parts(
    found: Any, from_column: str | None, stored: Any, ids: str | None, filtered: list[str], size: int
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ids, vectors and attributes in pieces."""
    import numpy as np

    from tigon.retrieve.cli.files import vectors_of

    first = 0
    wanted = list(dict.fromkeys([name for name in (from_column, ids) if name is not None] + filtered))
    for piece in found.pieces(wanted or found.names[:1], size):
        count = piece.num_rows
        names = np.arange(first, first + count) if ids is None else piece.column(ids)
        if from_column is None:
            matrix = np.array(stored[first : first + count], dtype=np.float32)
        else:
            matrix = vectors_of(NAME, piece.column(from_column), from_column, first)
        yield names, matrix, piece.select(filtered) if filtered else None
        first += count


def _bar(console: Any, total: int) -> Any:
    """A progress bar over the items; call with the number of newly finished items."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def shown() -> Iterator[Any]:
        columns = TextColumn("items"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=total)
            yield lambda count: progress.update(task, advance=count)

    return shown()
