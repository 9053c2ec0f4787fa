"""`tigon retrieve search`: the best items in an index that pass a filter."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.options import argument, device_option, option
from tigon.cli.problem import Problem, needs, sentences
from tigon.cli.screen import screen, show_rows

NAME = "retrieve search"


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    index: Path = argument("Folder of an index.")
    vector: str | None = option(None, "Query vector: numbers separated by commas.")
    vectors: Path | None = option(None, "A .npy file with query vectors, (queries, dim) or (dim,).")
    like: str | None = option(None, "Item id: search for the nearest items.")
    where: str | None = option(None, "Filter, such as \"country in ('us', 'ca') and price <= 30\".")
    k: int = option(10, "Items for each query.", "-k", min=1, max=2048)
    table: list[Path] | None = option(None, "Files that the index was built from, to show their columns.")
    id: str | None = option(None, "With --table: the id column.")
    columns: str | None = option(None, "With --table: columns to show, separated by commas; default: all but vectors.")
    explain: bool = option(False, "Also explain the filter and the chosen plan.")
    device: str = device_option()
    json: bool = option(False, "Print JSON lines.")


def search(options: SearchOptions) -> None:
    """Search an index. Every item that passes the filter is scored: the result is exact."""
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    from tigon.retrieve.cli.files import get_ids, load_index, parse_query

    if not options.table and (options.id is not None or options.columns is not None):
        raise Problem(f"{NAME}: --id and --columns need --table")
    k, console = options.k, screen(stderr=True)
    with console.status(f"reading {options.index}"):
        index = load_index(NAME, options.index, options.device)
    queries = parse_query(NAME, index, options.vector, options.vectors, options.like)
    with sentences(NAME):
        if options.explain:
            console.print(str(index.explain(options.where, k, len(queries))))
        began = time.perf_counter()
        hits = index.search(queries, k, options.where)
        scores = hits.scores.cpu()
        took = time.perf_counter() - began
    names = get_ids(hits).tolist()
    known = _find_rows(options, {name for row in names for name in row}) if options.table else {}
    rows = [
        {"query": q, "rank": rank, "id": name, "score": score, **known.get(name, {})}
        for q, (row, values) in enumerate(zip(names, scores.tolist(), strict=True))
        for rank, (name, score) in enumerate(zip(row, values, strict=True), 1)
        if score > float("-inf")
    ]
    if options.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False, default=str))
        return
    if rows:
        show_rows(rows if len(queries) > 1 else [{k: v for k, v in row.items() if k != "query"} for row in rows])
    else:
        print("no item passes")
    found = f"{len(rows):,} of at most {len(queries) * k:,}" if len(rows) < len(queries) * k else f"{len(rows):,}"
    console.print(f"{found} found among {len(index):,} items in {1e3 * took:.1f} ms")


def _find_rows(options: SearchOptions, wanted: set[Any]) -> dict[Any, dict[str, Any]]:
    """Find the rows with the wanted ids in --table."""
    import pyarrow as pa

    from tigon.retrieve.cli.files import Source, find_ids, is_float_list, split_names

    found = Source(NAME, options.table or [])
    key = find_ids(NAME, found, options.id)
    if options.columns is not None:
        shown = split_names(NAME, found, "--columns", options.columns)
    else:
        shown = [name for name, kind in found.types.items() if name != key and not is_float_list(kind)]
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
