"""`tigon retrieve calibrate`: the recall that sign codes would have, by bits and candidates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tigon.cli.options import argument, device_option, json_option, option
from tigon.cli.problem import needs, parse_integers, sentences
from tigon.cli.screen import screen, show_rows

NAME = "retrieve calibrate"


@dataclass(frozen=True, kw_only=True)
class QueryFileOptions:
    """Options of the commands that read an index and a file of queries."""

    index: Path = argument("Folder of an index.")
    queries: Path = argument("Query file: parquet, csv, json lines or arrow.")
    vector: str | None = option(None, "Vector column; default: the only column with lists of floats.")
    device: str = device_option()
    json: bool = json_option()


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(QueryFileOptions):
    k: int = option(100, "Items for each query.", "-k", min=1, max=2048)
    bits: str = option("64,128,256,512", "Signs per vector to try, separated by commas.")
    candidates: str | None = option(None, "Items to score exactly, separated by commas; default: 2, 4 and 10 times k.")
    most: int = option(256, "Maximum number of queries, taken from the file's start.", min=1)


def calibrate(options: CalibrateOptions) -> None:
    """Recall, bytes and time for searches by codes "sign", on an index's items and your own queries."""
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    from tigon.retrieve.cli.files import load_index, read_queries

    counts = parse_integers(NAME, "--bits", options.bits)
    many = None if options.candidates is None else parse_integers(NAME, "--candidates", options.candidates)
    console = screen(stderr=True)
    with console.status(f"reading {options.index}"):
        index = load_index(NAME, options.index, options.device)
    queries = read_queries(NAME, options.queries, options.vector, index)[1][: options.most]
    with sentences(NAME), console.status(f"searching for {len(queries):,} queries"):
        made = index.calibrate(queries, options.k, counts, many)
    if options.json:
        rows = [row._asdict() for row in made.rows]
        print(json.dumps({"items": made.items, "queries": made.queries, "k": made.k, "rows": rows}))
        return
    show_rows([
        {
            "bits": "exact" if row.bits is None else row.bits,
            "candidates": "all" if row.candidates is None else f"{row.candidates:,}",
            f"recall@{made.k}": row.recall, "MB": f"{row.bytes / 1e6:,.2f}", "ms": f"{row.milliseconds:.3f}",
        }
        for row in made.rows
    ])  # fmt: skip
    console.print(f"{made.items:,} items, {made.queries:,} queries; bytes and time per query")
