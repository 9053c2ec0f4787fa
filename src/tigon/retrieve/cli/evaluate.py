"""`tigon retrieve evaluate`: result quality, and agreement with a full scan in fp32."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from tigon.cli.options import option
from tigon.cli.problem import needs, parse_integers, sentences
from tigon.cli.screen import screen, show_rows
from tigon.retrieve.cli.calibrate import QueryFileOptions

NAME = "retrieve evaluate"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(QueryFileOptions):
    truth: str | None = option(None, "Column with each query's relevant id, or list of relevant ids.")
    where: str | None = option(None, "Filter for all queries.")
    k: str = option("10,100", "Cut-offs, separated by commas.", "-k")
    batch_size: int = option(256, "Queries per search.", min=1)


def evaluate(options: EvaluateOptions) -> None:
    """Recall against all scores in fp32, and with --truth Recall, NDCG and MRR against the given ids."""
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    import numpy as np

    from tigon.data import metrics
    from tigon.retrieve.cli.files import check_column, get_ids, load_index, read_queries

    cuts = sorted(set(parse_integers(NAME, "-k", options.k, 2048)))
    console = screen(stderr=True)
    with console.status(f"reading {options.index}"):
        index = load_index(NAME, options.index, options.device)
    found, queries = read_queries(NAME, options.queries, options.vector, index)
    right = None
    if options.truth is not None:
        values = found.column(check_column(NAME, found, "--truth", options.truth)).to_pylist()
        right = [set(value) if isinstance(value, list) else set() if value is None else {value} for value in values]
    names, exhaustive, seconds = [], [], 0.0
    with sentences(NAME), console.status(f"searching for {len(queries):,} queries"):
        for start in range(0, len(queries), options.batch_size):
            part = queries[start : start + options.batch_size]
            began = time.perf_counter()
            hits = index.search(part, max(cuts), options.where)
            hits.scores.cpu()
            seconds += time.perf_counter() - began
            exhaustive.append(_search_exhaustively(index, part, max(cuts), options.where))
            names.append(get_ids(hits))
    ids, all_of_them = np.concatenate(names), np.concatenate(exhaustive)
    rows = []
    for cut in cuts:
        row = {"k": cut, "recall of the scan in fp32": metrics.overlap(ids[:, :cut], all_of_them[:, :cut])}
        if right is not None:
            labelled = metrics.label_results(ids[:, :cut], right)
            measures: dict[str, Any] = {"recall": metrics.recall, "ndcg": metrics.ndcg, "mrr": metrics.mrr}
            row |= {name: measure(*labelled, k=cut).mean for name, measure in measures.items()}
        rows.append(row)
    if options.json:
        print(json.dumps({"queries": len(queries), "seconds": seconds, "rows": rows}))
        return
    show_rows(rows)
    console.print(f"{len(queries):,} queries in {seconds:.2f} s, {1e3 * seconds / len(queries):.2f} ms each")


def _search_exhaustively(index: Any, queries: Any, k: int, where: str | None) -> Any:
    """The top ids from a product with all vectors in fp32, computed by the operator's reference."""
    from tigon.kernels import use_backend
    from tigon.retrieve.cli.files import get_ids

    with use_backend("torch"):
        # With codes "sign" a search may score only some items.
        every = 0 if index.table.format.codes == "sign" else None
        return get_ids(index.search(queries, k, where, candidates=every))
