"""`tigon retrieve evaluate`: result quality, and agreement with a full scan in fp32."""

from __future__ import annotations

import json as encoder
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.problem import Problem, integers, needs

NAME = "retrieve evaluate"


def evaluate(
    index: Annotated[Path, typer.Argument(help="Folder of an index.")],
    queries: Annotated[Path, typer.Argument(help="File of queries: parquet, csv, json lines or arrow.")],
    vector: Annotated[
        str | None, typer.Option(help="Column of vectors; default: the only one that holds lists of floats.")
    ] = None,
    truth: Annotated[
        str | None, typer.Option(help="Column with the ids, or the list of ids, that are right for each query.")
    ] = None,
    where: Annotated[str | None, typer.Option(help="Filter for all queries.")] = None,
    k: Annotated[str, typer.Option("-k", help="Cut-offs, separated by commas.")] = "10,100",
    batch_size: Annotated[int, typer.Option(help="Queries of one search.", min=1)] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recall against all scores in fp32, and with --truth Recall, NDCG and MRR against the given ids."""
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    import numpy as np

    from tigon.cli.screen import screen
    from tigon.data import metrics
    from tigon.retrieve.cli.files import Source, named, sentences, vector_column, vectors_of
    from tigon.retrieve.cli.opened import ids_of, load

    cuts = sorted(set(integers(NAME, "-k", k, 2048)))
    console = screen(stderr=True)
    found = Source(NAME, [queries])
    column = vector_column(NAME, found, vector)
    asked = vectors_of(NAME, found.column(column), column)
    right = None if truth is None else _right(found, named(NAME, found, "--truth", truth))
    with console.status(f"reading {index}"):
        opened = load(NAME, index, device)
    if asked.shape[1] != opened.dim:
        raise Problem(f"{NAME}: queries must have {opened.dim} numbers, as the index has, got {asked.shape[1]}")
    names, exhaustive, seconds = [], [], 0.0
    with console.status(f"searching for {len(asked):,} queries"):
        for start in range(0, len(asked), batch_size):
            part = asked[start : start + batch_size]
            with sentences(NAME):
                began = time.perf_counter()
                hits = opened.search(part, max(cuts), where)
                hits.scores.cpu()
                seconds += time.perf_counter() - began
                exhaustive.append(_exhaustive(opened, part, max(cuts), where))
            names.append(ids_of(hits))
    ids, all_of_them = np.concatenate(names), np.concatenate(exhaustive)
    rows = []
    for cut in cuts:
        row = {"k": cut, "recall of the scan in fp32": metrics.overlap(ids[:, :cut], all_of_them[:, :cut])}
        if right is not None:
            labelled = metrics.label_results(ids[:, :cut], right)
            measures: dict[str, Any] = {"recall": metrics.recall, "ndcg": metrics.ndcg, "mrr": metrics.mrr}
            row |= {name: measure(*labelled, k=cut).mean for name, measure in measures.items()}
        rows.append(row)
    if json:
        print(encoder.dumps({"queries": len(asked), "seconds": seconds, "rows": rows}))
        return
    _show(rows)
    console.print(f"{len(asked):,} queries in {seconds:.2f} s, {1e3 * seconds / len(asked):.2f} ms each")


def _right(found: Any, name: str) -> list[set[Any]]:
    values = found.column(name).to_pylist()
    return [set(value) if isinstance(value, list) else set() if value is None else {value} for value in values]


def _exhaustive(index: Any, queries: Any, k: int, where: str | None) -> Any:
    """The top ids from a product with all vectors in fp32, computed by the operator's reference."""
    from tigon.kernels import use_backend
    from tigon.retrieve.cli.opened import ids_of

    with use_backend("torch"):
        # With codes "sign" a search may score only some items.
        every = 0 if index.table.format.codes == "sign" else None
        return ids_of(index.search(queries, k, where, candidates=every))


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from tigon.cli.screen import screen, show

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) if isinstance(value, int) else f"{value:.4f}" for value in row.values()))
    show(screen(), table)
