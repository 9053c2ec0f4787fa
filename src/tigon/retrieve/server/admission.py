"""Searches of an event loop's requests, in batches.

A call of the index costs some 100 µs of Python, and its result wakes the event loop. So requests that come together are
one search, with a k and a filter for each query.
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
    """A search of a request, with an asyncio.Future."""

    def convert(self, scores: Array, keys: Array, exact: Array, ids: Ids | None) -> Any:
        """The result of the future, of the search's rows of hits. Called in the thread that searches: a hundred
        thousand ids that are strings are no work for the event loop."""
        return SearchResult(scores, ids.to_ids(keys) if isinstance(ids, StringIds) else keys, exact)


class AdmissionQueue:
    """A `BatchQueue` driven by an event loop, with a thread that searches.

    Args:
        index: that is searched.
        limits: `max_batch`, `wait` and `max_queue` count.
    """

    def __init__(self, index: Index, limits: Limits) -> None:
        self.index = index
        self.queue = BatchQueue(limits.max_batch, limits.wait, max(limits.max_queue, limits.max_batch))
        self.metrics = SearchMetrics(self.count_waiting, lambda: len(index), lambda: index.capacity)
        self._batches: deque[int] = deque()  # queries of the batch that runs, and of that which waits for the thread
        self._timer: asyncio.Handle | None = None
        self._timer_is_due = False
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "tigon.retrieve.server search", _use_own_stream, (index.device,))

    def add(self, search: AdmittedSearch) -> None:
        """Search for queries that were checked.

        Raises: Overloaded if more queries wait than the queue holds; HTTPException, 503, after `close`.
        """
        if self._closed:
            raise HTTPException(503, "the server is shutting down.", RETRY)
        self.queue.add(search, time.monotonic())
        self._schedule()

    def select(self, search: AdmittedSearch, rows: Sequence[bool]) -> bool:
        """Keep the queries of a search whose row is True, if the search has not begun. Returns whether it has not."""
        before = self.queue.queries
        waits = self.queue.select(search, rows)
        self.metrics.dropped.inc(before - self.queue.queries)
        return waits

    def count_waiting(self) -> int:
        """The number of queries whose search has not begun."""
        return self.queue.queries + sum(islice(self._batches, 1, None))

    def close(self) -> None:
        """Take no more searches, and wait for those that the thread has."""
        self._closed = True
        self._thread.shutdown()

    def _schedule(self) -> None:
        """Begin the next batch at the end of this turn of the loop if it is due, or when it will be.

        While a batch runs, only a full one is lined up behind it; other searches gather meanwhile.
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
