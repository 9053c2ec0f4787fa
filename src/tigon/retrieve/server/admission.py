"""Batch the searches from an event loop's requests.

A call to the index costs some 100 µs in Python, and its result wakes the event loop. So requests that arrive together
become one search, with a k and a filter per query.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import torch
from starlette.exceptions import HTTPException

from tigon.retrieve.batch_queue import BatchQueue, PendingSearch
from tigon.retrieve.batcher import run_batch, split_rows
from tigon.retrieve.ids import Ids, StringIds
from tigon.retrieve.index.index import Index
from tigon.retrieve.server.app import RETRY
from tigon.retrieve.server.bodies import Array, SearchResult
from tigon.retrieve.server.metrics import SearchMetrics
from tigon.retrieve.server.requests import Limits


class AdmittedSearch(PendingSearch):
    """A request's search, with an asyncio.Future."""

    def convert(self, scores: Array, keys: Array, exact: Array, ids: Ids | None) -> Any:
        """Convert the search's hits to the future's result. Runs in the search thread: a hundred thousand string ids
        would block the event loop.
        """
        return SearchResult(scores, ids.to_ids(keys) if isinstance(ids, StringIds) else keys, exact)


class AdmissionQueue:
    """A `BatchQueue` driven by an event loop, with a search thread.

    Args:
        index: the index to search.
        limits: `max_batch`, `wait` and `max_queue` are used.
    """

    def __init__(self, index: Index, limits: Limits) -> None:
        self.index = index
        self.queue = BatchQueue(limits.max_batch, limits.wait, max(limits.max_queue, limits.max_batch))
        self.metrics = SearchMetrics(self.count_waiting, lambda: len(index), lambda: index.capacity)
        self._batches: deque[int] = deque()  # query counts: the running batch, and the batch lined up for the thread
        self._timer: asyncio.Handle | None = None
        self._timer_is_due = False
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "tigon.retrieve.server search", _use_own_stream, (index.device,))

    def add(self, search: AdmittedSearch) -> None:
        """Queue a search with checked queries.

        Raises: Overloaded if more queries are pending than the queue holds; HTTPException, 503, after `close`.
        """
        if self._closed:
            raise HTTPException(503, "the server is shutting down.", RETRY)
        self.queue.add(search, time.monotonic())
        self._schedule()

    def select(self, search: AdmittedSearch, rows: Sequence[bool]) -> bool:
        """Keep the queries in a search whose row is True, if the search has not started. Returns whether it has not."""
        before = self.queue.queries
        waits = self.queue.select(search, rows)
        self.metrics.dropped.inc(before - self.queue.queries)
        return waits

    def count_waiting(self) -> int:
        """The number of queries whose search has not started."""
        return self.queue.queries + sum(islice(self._batches, 1, None))

    def close(self) -> None:
        """Refuse new searches, and wait for those in the thread."""
        self._closed = True
        self._thread.shutdown()

    def _schedule(self) -> None:
        """Start the next batch at the end of this loop iteration if due, otherwise when it will be due.

        While a batch runs, only a full batch is lined up behind it; other searches gather meanwhile.
        """
        if self._timer_is_due or len(self._batches) > 1:
            return
        if self._batches and self.queue.queries < self.queue.max_batch:
            return
        delay = self.queue.delay(time.monotonic())
        if delay is None:
            return
        if self._timer is not None:
            if delay:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer_is_due = not delay
        self._timer = loop.call_later(delay, self._begin) if delay else loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._timer, self._timer_is_due = None, False
        before = self.queue.queries
        batch = self.queue.take()
        taken = sum(len(search.query) for searches in batch for search in searches)
        if dropped := before - self.queue.queries - taken:
            self.metrics.dropped.inc(dropped)
        loop = asyncio.get_running_loop()
        for searches in batch:
            count = sum(len(search.query) for search in searches)
            self._batches.append(count)
            future = loop.run_in_executor(self._thread, self._run, searches, count)
            future.add_done_callback(partial(self._finish, searches))
        self._schedule()

    def _run(self, searches: list[Any], count: int) -> list[Any]:
        start = time.monotonic()
        results: list[Any] = []
        for part, hits in run_batch(self.index, searches):
            if isinstance(hits, Exception):
                results.append(hits)
                continue
            scores, keys, exact = hits.scores.numpy(), hits._keys.numpy(), hits.exact.numpy()
            for search, (rows, k) in zip(part, split_rows(part), strict=True):
                results.append(search.convert(scores[rows, :k], keys[rows, :k], exact[rows], hits._ids))
        self.metrics.seconds.observe(time.monotonic() - start)
        self.metrics.batch.observe(count)
        self.metrics.queries.inc(count)
        return results

    def _finish(self, searches: list[Any], future: asyncio.Future[list[Any]]) -> None:
        self._batches.popleft()
        self._schedule()  # first, so that the index searches while responses are written
        error = future.exception()
        results = future.result() if error is None else [error] * len(searches)
        for search, result in zip(searches, results, strict=True):
            if search.future.done():
                continue
            if isinstance(result, BaseException):
                search.future.set_exception(result)
            else:
                search.future.set_result(result)


def _use_own_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))
