"""Searches of an index whose items are split over several GPUs, against one GPU that holds all of them.

    torchrun --nproc-per-node 2 -m studies.sharded_search --output results
    torchrun --nproc-per-node 2 -m studies.sharded_search --device cpu --items 5000 --dim 16 --queries 1 16

Before a search is timed, its ids and the bits of its scores are compared with those of one index, and so are those of
an index of small whole numbers, of which thousands are equal. A time is the median over samples of some searches in a
row, of the rank that took longest: as called, and in a CUDA graph that holds the all-gather, too. Beside the sides:

    exchange     packing, all-gather and merge of answers alone
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import report
from torch import Tensor

from studies.vocabulary_parallel import Clock, slowest
from tigon import retrieve
from tigon.retrieve.scan.merge import merge_answers, pack_answer

PIECE = 1 << 20
WHERE = "chance < 11"
Index = retrieve.Index | retrieve.ShardedIndex


@dataclass
class Row:
    """One search. share: of the items that pass. same: whether ids and bits of scores are those of one index."""

    items: int
    dim: int
    dtype: str
    queries: int
    k: int
    filters: str
    share: float
    side: str
    status: str = "ok"
    reason: str = ""
    ms: float | None = None
    samples_ms: list[float] = field(default_factory=list)
    graph_ms: float | None = None
    same: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fill_table(index: Index, count: int, dim: int, device: torch.device, whole: bool = False) -> Index:
    """Items by pieces: normal numbers in fp16, or small whole ones; and a number by which a filter chooses."""
    draw, chance = torch.Generator(device).manual_seed(0), np.random.default_rng(0)
    for start in range(0, count, PIECE):
        n = min(PIECE, count - start)
        if whole:
            vectors = torch.randint(-1, 2, (n, dim), generator=draw, device=device)
        else:
            vectors = torch.randn(n, dim, generator=draw, device=device)
        index.upsert(np.arange(start, start + n), vectors.half(), {"chance": chance.integers(0, 100, n)})
    return index


def both(count: int, dim: int, device: torch.device, whole: bool = False) -> tuple[Index, Index]:
    schema = retrieve.Schema(chance=retrieve.Number(0, 99, step=1))
    one = retrieve.Index(dim, count, schema=schema, device=device)
    split = retrieve.ShardedIndex(dim, count, schema=schema, device=device)
    return fill_table(one, count, dim, device, whole), fill_table(split, count, dim, device, whole)


def same(one: Index, split: Index, query: Tensor, k: int, where: str | None) -> bool:
    mine, theirs = (index.search(query, k, where) for index in (split, one))
    bits = torch.equal(mine.scores.view(torch.int32), theirs.scores.view(torch.int32))
    return bits and bool(torch.equal(mine.ids, theirs.ids))


def capture_search(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph. Other threads of NCCL ask the driver meanwhile."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = call()
    graph.kept = kept
    return graph.replay


def measure(row: Row, call: Callable[[], Any], clock: Clock, graph: bool) -> Row:
    row.samples_ms = clock(call)
    row.ms = statistics.median(row.samples_ms)
    if graph:
        try:
            row.graph_ms = statistics.median(clock(capture_search(call)))
        except Exception as error:
            row.reason = f"no graph: {type(error).__name__}"
    return row


def exchange(index: retrieve.ShardedIndex, queries: int, k: int) -> Callable[[], Any]:
    """What a search does beside the scan of the rank's own items."""
    hits = index.run(index.parse(torch.ones(queries, index.dim, device=index.device), k))
    rows = torch.arange(k, device=index.device).expand(queries, k).contiguous()
    scores, ranks = hits.scores.contiguous(), index.ranks

    def call() -> Any:
        own = pack_answer(scores, rows, index.table.item_ids, None, ranks.own, ranks.count)
        return merge_answers(ranks.gather(own))

    return call


def table(rows: list[Row], world: int) -> str:
    lines = [f"{'queries':>8} {'filter':>7}  {'side':<20} {'called ms':>10} {'graph ms':>9}  x one GPU  same"]
    for row in rows:
        one = next(r for r in rows if (r.queries, r.filters, r.side) == (row.queries, row.filters, "tigon, one GPU"))
        ms, graph = (f"{x:.4f}" if x else "-" for x in (row.ms, row.graph_ms))
        ratio = f"{row.ms / one.ms:.3f}" if row.ms and one.ms else "-"
        if row.graph_ms and one.graph_ms:
            ratio += f" {row.graph_ms / one.graph_ms:.3f}"
        said = "" if row.same is None else row.same
        lines.append(
            f"{row.queries:>8} {row.filters:>7}  {row.side:<20} {ms:>10} {graph:>9}  {ratio:<9}  {said} {row.reason}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the record")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--items", type=int, default=15_500_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--queries", type=int, nargs="*", default=[1, 16, 256])
    parser.add_argument("--ties", type=int, default=200_000, help="items of small whole numbers")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--seconds", type=float, default=110, help="no further search is begun after that")
    options = parser.parse_args()
    began = time.monotonic()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=60),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    world, count, dim, k = dist.get_world_size(), options.items, options.dim, options.k
    clock = Clock(device, options.samples, options.passes)
    most, graph = max(options.queries), device.type == "cuda" and not options.eager

    one, split = both(options.ties, dim, device, whole=True)
    asked = torch.randint(-1, 2, (most, dim), generator=torch.Generator(device).manual_seed(1), device=device).half()
    gone = np.arange(0, options.ties, 7)
    ties = one.delete(gone) == split.delete(gone)
    for where in (None, WHERE):
        ties = same(one, split, asked, k, where) and ties  # in this order: all ranks search
    one, split = both(count, dim, device)
    if dist.get_rank() == 0:
        said = "the same" if ties else "NOT THE SAME"
        print(f"answers among equal items: {said}; filled after {time.monotonic() - began:.0f} s", flush=True)

    asked = torch.randn(most, dim, generator=torch.Generator(device).manual_seed(2), device=device).half()
    rows: list[Row] = []
    for where, queries in ((where, n) for where in (None, WHERE) for n in options.queries):
        if slowest([time.monotonic() - began], device)[0] > options.seconds:
            break
        kind = (count, dim, "float16", queries, k, "one" if where else "none", 0.11 if where else 1.0)
        query = asked[:queries].contiguous()
        for _ in range(3):  # a filter that comes again is kept as bits
            equal = same(one, split, query, k, where) and ties
        for side, index in (("tigon, one GPU", one), (f"tigon, {world} GPUs", split)):
            row = measure(Row(*kind, side), functools.partial(index.search, query, k, where), clock, graph)
            if index is split:
                row.same = not slowest([float(not equal)], device)[0]
                row.status, row.reason = ("ok", row.reason) if row.same else ("wrong", "other ids or other bits")
            rows.append(row)
        if where is None:
            rows.append(measure(Row(*kind, "exchange"), exchange(split, queries, k), clock, graph))
        if dist.get_rank() == 0 and options.output is not None:
            content = report.result("sharded-search", rows, device=device, gpus=world)
            report.save(options.output / report.file_name(content), content)
    if dist.get_rank() == 0:
        print(table(rows, world))
        print(f"{time.monotonic() - began:.0f} s")
    dist.destroy_process_group()
    return int(any(row.status == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
