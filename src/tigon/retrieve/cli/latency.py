"""How long single searches of an index take, alone and beside a writer: the median, and the slowest hundredth."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tigon.bench.runner import synchronize
from tigon.bench.search import SearchRow
from tigon.retrieve import Index, Number, Schema

# The share that passes the filter, and how often the sides take turns.
SHARE, TURNS = 0.11, 4
PIECE = 1 << 20


def measured(
    items: int, dim: int, dtype: str, queries: Sequence[int], k: int, updates: int, device: torch.device,
    calls: Sequence[int] = (256,), seconds: float = 2.0,
) -> list[SearchRow]:  # fmt: skip
    """For each number of queries a row alone, and one beside so many updates a second for each size of a call."""
    index = filled(items, dim, dtype, device)
    return [row for count in queries for row in beside(index, count, k, updates, calls, seconds)]


def filled(items: int, dim: int, dtype: str, device: torch.device) -> Index:
    """An index of random items, with a number from 0 to 99 each."""
    index = Index(dim, items, dtype, schema=Schema(part=Number(0, 99, step=1)), device=device)
    draw = np.random.default_rng(0)
    for start in range(0, items, PIECE):
        n = min(PIECE, items - start)
        index.upsert(np.arange(start, start + n), torch.randn(n, dim, device=device), _table(draw, n))
    return index


def beside(
    index: Index, queries: int, k: int, updates: int, calls: Sequence[int], seconds: float
) -> list[SearchRow]:  # fmt: skip
    """Rows of searches, each waited for.

    calls: items of an upsert. seconds: of each row, in turns, so that what disturbs the host disturbs all alike.
    """
    query = torch.randn(queries, index.dim, device=index.device)
    where = f"part < {round(100 * SHARE)}"
    index.warmup(k, queries, where)
    search = functools.partial(index.search, query, k, where)
    sides = [Side(0), *(Side(min(call, len(index))) for call in calls)]
    for _ in range(TURNS):
        for side in sides:
            side.turn(index, search, updates, seconds / TURNS)
    rows = []
    for side in sides:
        name = f"Index, {updates:,} updates/s" if side.call else "Index, alone"
        name += f" in calls of {side.call:,}" if side.call and len(calls) > 1 else ""
        dtype = str(index.dtype).removeprefix("torch.")
        rows.append(side.row(SearchRow(len(index), index.dim, dtype, queries, k, "one", SHARE, name), updates))
    return rows


class Side:
    """Searches beside a thread that writes items in calls of a size; 0: beside none."""

    def __init__(self, call: int) -> None:
        self.call, self.written, self.seconds = call, 0, 0.0
        self.taken: list[float] = []
        self.failed: list[BaseException] = []

    def turn(self, index: Index, search: Callable[[], Any], updates: int, seconds: float) -> None:
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
                self.taken.append(1e3 * (time.perf_counter() - start))
        finally:
            stop.set()
            if self.call:
                writer.join()
        self.seconds += time.perf_counter() - begun

    def _write(self, index: Index, updates: int, stop: threading.Event) -> None:
        """Replace items at a rate until stopped."""
        draw, due = np.random.default_rng(len(self.taken)), time.perf_counter()
        vectors = torch.randn(self.call, index.dim)
        try:
            while not stop.is_set():
                index.upsert(draw.integers(0, index.capacity, self.call), vectors, _table(draw, self.call))
                self.written += self.call
                due += self.call / updates
                stop.wait(max(0.0, due - time.perf_counter()))
        except Exception as error:
            self.failed.append(error)

    def row(self, row: SearchRow, updates: int) -> SearchRow:
        row.ms, row.p99_ms = (float(value) for value in np.percentile(self.taken, (50, 99)))
        row.updates, row.call = updates if self.call else 0, self.call
        rate = self.written / self.seconds
        if self.call and rate < 0.95 * updates:
            row.note = f"{rate:,.0f} updates/s were made"
        if self.failed:
            row.status, row.reason = "failed", f"{type(self.failed[0]).__name__}: {self.failed[0]}"
        return row


def _table(draw: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"part": draw.integers(0, 100, n)}
