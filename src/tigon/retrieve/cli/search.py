"""`tigon retrieve search`: the best items in an index that pass a filter."""

from __future__ import annotations

import json as encoder
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.problem import Problem, needs

NAME = "retrieve search"


def search(
    index: Annotated[Path, typer.Argument(help="Folder of an index.")],
    vector: Annotated[str | None, typer.Option(help="The query: numbers separated by commas.")] = None,
    vectors: Annotated[Path | None, typer.Option(help="A .npy file of queries, (queries, dim) or (dim,).")] = None,
    like: Annotated[str | None, typer.Option(help="The id of an item: what is nearest to it.")] = None,
    where: Annotated[
        str | None, typer.Option(help="Filter, such as \"country in ('us', 'ca') and price <= 30\".")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Items for each query.", min=1, max=2048)] = 10,
    table: Annotated[
        list[Path] | None, typer.Option(help="The files that the index was built from, to show their columns.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="With --table: its column of ids.")] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="With --table: the columns to show, separated by commas; default: all but vectors."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what the filter does and which plan is taken, too.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Search an index. Every item that passes the filter is scored: the result is exact."""
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    from tigon.cli.screen import screen
    from tigon.retrieve.cli.files import sentences
    from tigon.retrieve.cli.opened import ids_of, load, query

    if table is None and (id is not None or columns is not None):
        raise Problem(f"{NAME}: --id and --columns go with --table")
    console = screen(stderr=True)
    with console.status(f"reading {index}"):
        opened = load(NAME, index, device)
    asked = query(NAME, opened, vector, vectors, like)
    with sentences(NAME):
        if explain:
            console.print(str(opened.explain(where, k, len(asked))))
        began = time.perf_counter()
        hits = opened.search(asked, k, where)
        scores = hits.scores.cpu()
        took = time.perf_counter() - began
    names = ids_of(hits).tolist()
    known = {} if table is None else _rows_of(table, id, columns, {name for row in names for name in row})
    rows = [
        {"query": q, "rank": rank, "id": name, "score": score, **known.get(name, {})}
        for q, (row, values) in enumerate(zip(names, scores.tolist(), strict=True))
        for rank, (name, score) in enumerate(zip(row, values, strict=True), 1)
        if score > float("-inf")
    ]
    if json:
        for row in rows:
            print(encoder.dumps(row, ensure_ascii=False, default=str))
        return
    _show(rows, len(asked))
    found = f"{len(rows):,} of at most {len(asked) * k:,}" if len(rows) < len(asked) * k else f"{len(rows):,}"
    console.print(f"{found} found among {len(opened):,} items in {1e3 * took:.1f} ms")


def _rows_of(paths: list[Path], id: str | None, columns: str | None, wanted: set[Any]) -> dict[Any, dict[str, Any]]:
    """Find the rows with the wanted ids in files."""
    import pyarrow as pa

    from tigon.retrieve.cli.files import IDS, Source, holds_floats, named

    found = Source(NAME, paths)
    key = next((name for name in IDS if name in found.names), None) if id is None else named(NAME, found, "--id", id)
    if columns is not None:
        shown = [named(NAME, found, "--columns", name.strip()) for name in columns.split(",") if name.strip()]
    else:
        vectors = {name for name, kind in found.types.items() if holds_floats(kind)}
        shown = [name for name in found.names if name != key and name not in vectors]
    rows: dict[Any, dict[str, Any]] = {}
    first = 0
    for piece in found.pieces(shown + ([key] if key else []), 65_536):
        ids = piece.column(key) if key else pa.array(range(first, first + piece.num_rows))
        first += piece.num_rows
        values = ids.to_pylist()
        at = [i for i, value in enumerate(values) if value in wanted]
        for i, row in zip(at, piece.select(shown).take(at).to_pylist() if at else [], strict=True):
            rows[values[i]] = row
    return rows


def _show(rows: list[dict[str, Any]], queries: int) -> None:
    from rich.table import Table

    from tigon.cli.screen import screen, show

    # A pipe has no width, for which rich would fold the table to 80 columns.
    console = screen(width=None if sys.stdout.isatty() else 10_000)
    if not rows:
        console.print("no item passes")
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    if queries == 1:
        names.remove("query")
    table = Table(*names)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    show(console, table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.4f}"
        if isinstance(value, float)
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
