"""Time searches of random vectors by `filtered_topk`, beside the hardware's floor and torch.

    python benchmarks/search.py --each --updates 10000 --output results      some 60 s on an H200
    python benchmarks/search.py -k 100,1000 --codes --output results

Ids are compared with a sort in fp64. On a CPU these are times of PyTorch's own operators.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from harness import report
from harness.runner import Settings, measure_ceilings
from harness.search import Bench, SearchRow, list_cases, measure_searches


def split_integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--items", type=int, help="default: 15.5 million on a GPU, 100,000 on a CPU")
    parser.add_argument("--dim", type=int, default=128, help="width of the vectors")
    parser.add_argument("--dtype", default="float16", help="float16, bfloat16, float32 or float8_e4m3fn")
    parser.add_argument("--queries", type=split_integers, default=[1, 16, 256], help="of a search: 1,16,256")
    parser.add_argument("-k", type=split_integers, default=[100], help="items for each query: 100,1000")
    parser.add_argument("--shares", default="1,0.11,0.01", help="of the items that pass; 1: no filter")
    parser.add_argument("--each", action="store_true", help="searches with a filter for each query, too")
    parser.add_argument("--no-peers", action="store_true", help="without torch's product, mask and topk")
    parser.add_argument("--updates", type=int, default=0, help="also searches of an index beside so many a second")
    parser.add_argument("--calls", type=split_integers, default=[256], help="items of an upsert, for --updates")
    parser.add_argument("--codes", action="store_true", help="searches by codes of 8 bits and by signs, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--output", type=Path, help="folder for the results and a chart")
    options = parser.parse_args(arguments)
    options.shares = [float(part) for part in options.shares.split(",")]
    if options.codes and 1.0 not in options.shares:
        options.shares.insert(0, 1.0)  # the plain searches beside them
    options.items = options.items or (15_500_032 if options.device.type == "cuda" else 100_000)
    return options


def main(arguments: list[str] | None = None) -> int:
    """1 if a result of Tigon's is wrong, else 0."""
    options = parse(arguments)
    settings = Settings(1, 10.0, 60.0)
    ceilings = measure_ceilings(options.device, settings)
    bench = Bench(options.dim, getattr(torch, options.dtype), options.device, ceilings, settings)
    cases = list_cases(options.queries, options.k, options.shares, options.each)
    parts: list[Iterable[SearchRow]] = [measure_searches(bench, options.items, cases, not options.no_peers)]
    if options.codes:
        from harness.search_codes import measure_codes

        parts.append(measure_codes(bench, options.items, options.queries, options.k))
    if options.updates:
        from harness.search_latency import measure_latencies

        parts.append(
            measure_latencies(bench, options.items, options.queries, options.k[0], options.updates, options.calls)
        )
    rows: list[SearchRow] = []
    for row in itertools.chain(*parts):
        rows.append(row)
        print(f"{row.queries} × {row.k}, {row.implementation}", file=sys.stderr, flush=True)
        content = report.result("search", rows, device=options.device, ceilings=asdict(ceilings))
        if options.output is not None:
            report.save(options.output / report.file_name(content), content)
    print(report.to_text(content))
    if options.output is not None:
        from harness.plots import plot

        plot(content, (options.output / report.file_name(content)).with_suffix(".png"))
    return int(any(row.status == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
