"""How long single searches of an index take, alone and beside a writer: the median, and the slowest hundredth."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from tigon.bench.runner import synchronize
from tigon.bench.search import SearchRow
from tigon.retrieve import Index, Number, Schema

# Items of one upsert, and the share that passes the filter.
BATCH, SHARE = 256, 0.11
PIECE = 1 << 20


def measured(
    items: int, dim: int, dtype: str, queries: Sequence[int], k: int, updates: int, device: torch.device,
    seconds: float = 2.0,
) -> list[SearchRow]:  # fmt: skip
    """Two rows for each number of queries, alone and beside so many updates a second. Each search is waited for."""
    index = Index(dim, items, dtype, schema=Schema(part=Number(0, 99, step=1)), device=device)
    draw = np.random.default_rng(0)
    for start in range(0, items, PIECE):
        n = min(PIECE, items - start)
        index.upsert(np.arange(start, start + n), torch.randn(n, dim, device=device), _table(draw, n))
    where = f"part < {round(100 * SHARE)}"
    rows = []
    for count in queries:
        query = torch.randn(count, dim, device=device)
        index.warmup(k, count, where)
        for writes in (0, updates):
            stop, failed = threading.Event(), list[BaseException]()
            writer = threading.Thread(target=_write, args=(index, items, writes, stop, failed))
            if writes:
                writer.start()
            taken, end = [], time.perf_counter() + seconds
            try:
                while time.perf_counter() < end:
                    begun = time.perf_counter()
                    index.search(query, k, where)
                    synchronize(device)
                    taken.append(1e3 * (time.perf_counter() - begun))
            finally:
                stop.set()
                if writes:
                    writer.join()
            p50, p99 = (float(value) for value in np.percentile(taken, (50, 99)))
            row = SearchRow(
                items, dim, dtype, count, k, "one", SHARE, f"Index, {writes:,} updates/s" if writes else "Index, alone",
                ms=p50, p99_ms=p99, updates=writes,
            )  # fmt: skip
            if failed:
                row.status, row.reason = "failed", f"{type(failed[0]).__name__}: {failed[0]}"
            rows.append(row)
    return rows


def _table(draw: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"part": draw.integers(0, 100, n)}


def _write(index: Index, items: int, updates: int, stop: threading.Event, failed: list[BaseException]) -> None:
    """Replace items in batches, at a rate, until stopped."""
    draw, due = np.random.default_rng(1), time.perf_counter()
    batch = min(BATCH, items)
    vectors = torch.randn(batch, index.dim)
    try:
        while not stop.is_set():
            index.upsert(draw.integers(0, items, batch), vectors, _table(draw, batch))
            due += batch / updates
            stop.wait(max(0.0, due - time.perf_counter()))
    except Exception as error:
        failed.append(error)
