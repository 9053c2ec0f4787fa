"""`tigon retrieve calibrate`: the recall that sign codes would have, by bits and candidates."""

from __future__ import annotations

import json as encoder
from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.problem import Problem, integers, needs

NAME = "retrieve calibrate"


def calibrate(
    index: Annotated[Path, typer.Argument(help="Folder of an index.")],
    queries: Annotated[Path, typer.Argument(help="File of queries: parquet, csv, json lines or arrow.")],
    vector: Annotated[
        str | None, typer.Option(help="Column of vectors; default: the only one that holds lists of floats.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Items for each query.", min=1, max=2048)] = 100,
    bits: Annotated[str, typer.Option(help="Numbers of signs, separated by commas.")] = "64,128,256,512",
    candidates: Annotated[
        str | None,
        typer.Option(help="Items that are scored exactly, separated by commas; default: 2, 4 and 10 times k."),
    ] = None,
    most: Annotated[int, typer.Option(help="Queries that are taken of the file, the first ones.", min=1)] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recall, bytes and time for searches by codes "sign", on an index's items and your own queries."""
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    from tigon.cli.screen import screen, show
    from tigon.retrieve.cli.files import Source, sentences, vector_column, vectors_of
    from tigon.retrieve.cli.opened import load

    counts = integers(NAME, "--bits", bits)
    many = None if candidates is None else integers(NAME, "--candidates", candidates)
    console = screen(stderr=True)
    found = Source(NAME, [queries])
    column = vector_column(NAME, found, vector)
    asked = vectors_of(NAME, found.column(column), column)[:most]
    with console.status(f"reading {index}"):
        opened = load(NAME, index, device)
    if asked.shape[1] != opened.dim:
        raise Problem(f"{NAME}: queries must have {opened.dim} numbers, as the index has, got {asked.shape[1]}")
    with sentences(NAME), console.status(f"searching for {len(asked):,} queries"):
        made = opened.calibrate(asked, k, counts, many)
    if json:
        rows = [row._asdict() for row in made.rows]
        print(encoder.dumps({"items": made.items, "queries": made.queries, "k": made.k, "rows": rows}))
        return
    from rich.table import Table

    table = Table("bits", "candidates", f"recall@{made.k}", "MB", "ms")
    for row in made.rows:
        name = "exact" if row.bits is None else str(row.bits)
        scored = "all" if row.candidates is None else f"{row.candidates:,}"
        table.add_row(name, scored, f"{row.recall:.4f}", f"{row.bytes / 1e6:,.2f}", f"{row.milliseconds:.3f}")
    show(screen(), table)
    console.print(f"{made.items:,} items, {made.queries:,} queries; bytes and times of one query")
