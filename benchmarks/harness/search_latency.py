"""How long single searches of an index take, alone and beside a writer: the median, and the slowest hundredth."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from harness.runner import synchronize
from harness.search import Bench, SearchRow

from tigon.retrieve import Index, Number, Schema

# The share that passes the filter, how often the sides take turns, and the seconds of a row.
SHARE, TURNS, SECONDS = 0.11, 4, 2.0
PIECE = 1 << 20


def measure_latencies(
    bench: Bench, items: int, queries: Sequence[int], k: int, updates: int, calls: Sequence[int] = (256,)
) -> Iterator[SearchRow]:
    """For each number of queries a row alone, and one beside so many updates a second for each size of a call."""
    index = fill_index(items, bench.dim, str(bench.dtype).removeprefix("torch."), bench.device)
    for count in queries:
        yield from measure_beside_updates(bench, index, count, k, updates, calls)


def fill_index(items: int, dim: int, dtype: str, device: torch.device) -> Index:
    """An index of random items, with a number from 0 to 99 each."""
    index = Index(dim, items, dtype, schema=Schema(part=Number(0, 99, step=1)), device=device)
    draw = np.random.default_rng(0)
    for start in range(0, items, PIECE):
        n = min(PIECE, items - start)
        index.upsert(np.arange(start, start + n), torch.randn(n, dim, device=device), _draw_attributes(draw, n))
    return index


def measure_beside_updates(
    bench: Bench, index: Index, queries: int, k: int, updates: int, calls: Sequence[int], seconds: float = SECONDS
) -> Iterator[SearchRow]:
    """Rows of searches, each waited for, in turns, so that what disturbs the host disturbs all rows alike.

    calls: items of an upsert. seconds: of each row.
    """
    query = torch.randn(queries, index.dim, device=index.device)
    where = f"part < {round(100 * SHARE)}"
    index.warmup(query, k, where)
    search = functools.partial(index.search, query, k, where)
    samples = [LatencySample(0), *(LatencySample(min(call, len(index))) for call in calls)]
    for _ in range(TURNS):
        for sample in samples:
            sample.take(index, search, updates, seconds / TURNS)
    for sample in samples:
        name = f"Index, {updates:,} updates/s" if sample.call else "Index, alone"
        name += f" in calls of {sample.call:,}" if sample.call and len(calls) > 1 else ""
        row = bench.make_row(len(index), queries, k, name, filters="one", share=SHARE)
        row.ms, row.p99_ms = (float(value) for value in np.percentile(sample.times_ms, (50, 99)))
        row.updates, row.call = updates if sample.call else 0, sample.call
        rate = sample.written / sample.seconds
        if sample.call and rate < 0.95 * updates:
            row.note = f"{rate:,.0f} updates/s were made"
        if sample.errors:
            row.status, row.reason = "failed", f"{type(sample.errors[0]).__name__}: {sample.errors[0]}"
        yield row


class LatencySample:
    """Searches beside a thread that writes items in calls of a size; 0: beside none."""

    def __init__(self, call: int) -> None:
        self.call, self.written, self.seconds = call, 0, 0.0
        self.times_ms: list[float] = []
        self.errors: list[BaseException] = []

    def take(self, index: Index, search: Callable[[], Any], updates: int, seconds: float) -> None:
        """Searches for some seconds, one after another."""
        stop = threading.Event()
        writer = threading.Thread(target=self._write, args=(index, updates, stop))
        if self.call:
            writer.start()
        begun = time.perf_counter()
        try:
            while (start := time.perf_counter()) < begun + seconds:
                search()
                synchronize(index.device)
                self.times_ms.append(1e3 * (time.perf_counter() - start))
        finally:
            stop.set()
            if self.call:
                writer.join()
        self.seconds += time.perf_counter() - begun

    def _write(self, index: Index, updates: int, stop: threading.Event) -> None:
        """Replace items at a rate until stopped."""
        draw, due = np.random.default_rng(len(self.times_ms)), time.perf_counter()
        vectors = torch.randn(self.call, index.dim)
        try:
            while not stop.is_set():
                index.upsert(draw.integers(0, index.capacity, self.call), vectors, _draw_attributes(draw, self.call))
                self.written += self.call
                due += self.call / updates
                stop.wait(max(0.0, due - time.perf_counter()))
        except Exception as error:
            self.errors.append(error)


def _draw_attributes(draw: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"part": draw.integers(0, 100, n)}
