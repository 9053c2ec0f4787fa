"""`tigon retrieve build`: files of items become an index on the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.problem import Problem, check_writable, needs, one_line

NAME = "retrieve build"
METRICS, DTYPES = ("ip", "cosine", "l2"), ("float16", "bfloat16", "float32", "float8_e4m3fn")
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
    force: Annotated[bool, typer.Option("--force", help="Replace an index that is there.")] = False,
) -> None:
    """Build an index from files of items with their vectors.

    The columns to filter by are found by their types: strings become categories, lists of strings tags, numbers and
    times are kept in their order. The schema that was used is in the index; --schema takes one that you have edited.
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
    if output.is_dir() and any(output.iterdir()) and not force:
        raise Problem(f"{NAME}: --output {output} is not empty; --force replaces an index")
    check_writable(output, f"{NAME}: --output")

    from tigon.cli.retrieve.files import IDS, named, source, vector_column
    from tigon.cli.screen import screen
    from tigon.retrieve import Index, Schema

    chosen: Any = metric
    coding: Any = codes
    console = screen(stderr=True)
    began = time.monotonic()
    found = source(NAME, items)
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
        with console.status("reading the columns to filter by"):
            described = _describe(found, _chosen(found, columns, rest))
    parts = _parts(found, from_column, stored, ids, list(described), batch_size)
    dim = None
    index = None
    with _bar(console, found.rows) as advance:
        for names, matrix, table in parts:
            if index is None:
                dim = matrix.shape[1]
                index = Index(dim, capacity or found.rows, dtype, chosen, Schema(**described), codes=coding, bits=bits)
            try:
                if matrix.shape[1] != dim:
                    raise ValueError(f"every vector must have {dim} numbers, as the first has, got {matrix.shape[1]}")
                index.upsert(names, matrix, table)
            except ValueError as error:
                raise Problem(f"{NAME}: {found}: {one_line(error).removeprefix('Index.upsert: ')}") from error
            advance(len(matrix))
    assert index is not None
    with console.status(f"writing {output}"):
        index.save(output)
    if len(index) < found.rows:
        console.print(f"{found.rows - len(index):,} rows had an id that a later row has, too; the later one counts.")
    took = time.monotonic() - began
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    source = f"ids: column {ids}" if ids is not None else "ids: row numbers from 0 (--id names a column)"
    screen().print(
        f"{output}: {len(index):,} items × {dim}, {size / 2**20:,.1f} MiB, in {took:.1f} s; {source}", soft_wrap=True
    )


def _read_schema(path: Path) -> dict[str, Any]:
    from tigon.retrieve import Schema

    try:
        return dict(Schema.from_json(path.read_text(encoding="utf-8")).columns)
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{NAME}: --schema {path}: cannot be read: {one_line(error)}") from error
    except ValueError as error:
        raise Problem(f"{NAME}: --schema {path}: {one_line(error)}") from error


def _stored(path: Path, rows: int) -> Any:
    import numpy as np

    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise Problem(f"{NAME}: --vectors {path} cannot be read: {one_line(error)}") from error
    if stored.ndim != 2 or stored.dtype.kind != "f":
        raise Problem(f"{NAME}: --vectors must be floats (items, dim), got {stored.shape} {stored.dtype}")
    if len(stored) != rows:
        raise Problem(f"{NAME}: --vectors must have a row for each of the {rows:,} items, got {len(stored):,}")
    return stored


def _chosen(found: Any, columns: str | None, rest: list[str]) -> list[str]:
    from tigon.cli.retrieve.files import named

    if columns is None:
        return rest
    return [named(NAME, found, "--columns", name.strip()) for name in columns.split(",") if name.strip()]


def _describe(found: Any, names: list[str]) -> dict[str, Any]:
    from rich.table import Table

    from tigon.cli.retrieve.describe import describe
    from tigon.cli.screen import screen, show

    described = describe(found, names)
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
    """Ids, vectors and attributes, a piece at a time."""
    import numpy as np

    from tigon.cli.retrieve.files import vectors_of

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
    """A progress bar over the items; called with how many more are done."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def shown() -> Iterator[Any]:
        columns = TextColumn("items"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=total)
            yield lambda count: progress.update(task, advance=count)

    return shown()
