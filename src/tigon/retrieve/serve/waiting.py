"""Searches of many requests, gathered in the event loop: a call of the `Batcher` for all that came meanwhile.

A call of the Batcher costs some 50 µs of Python, and its answer wakes the event loop. For each request by itself that
would be as much as all the rest of a request. So requests that come together are one call, with a k and a filter for
each query; one that does not fit the index is found out before it is with others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np

from tigon.retrieve.batching import Batcher, Overloaded
from tigon.retrieve.index.hits import Hits
from tigon.retrieve.serve.counters import Counters
from tigon.retrieve.serve.messages import Answer, Array


class Waiting:
    """Queries of a request, or of several that a front sends together, the k and filter of each, and where the answer
    goes."""

    __slots__ = ("answer", "asked", "k", "query", "where")
    keys = False  # whether the answer has an index's numbers of ids that are strings

    def __init__(self, query: Array, k: list[int], where: list[str | None], answer: asyncio.Future[Answer]) -> None:
        self.query, self.k, self.where, self.answer = query, k, where, answer
        self.asked = time.monotonic()


class Gate:
    """Searches of an event loop's requests.

    Args:
        batcher: that searches; its `most`, `wait` and `queue` count. It has at most two of the gate's calls.
    """

    def __init__(self, batcher: Batcher) -> None:
        self.batcher, self.index = batcher, batcher.index
        self.counters: Counters | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.requests: deque[Waiting] = deque()
        self.queries = 0  # that wait here
        self._running = 0  # calls of the batcher
        self._last = 1  # queries of the last of them
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_is_now = False

    def ask(self, query: Array, k: list[int], where: list[str | None], strict: bool = False) -> asyncio.Future[Answer]:
        """Search for a request's queries, at most `most` of them, in the event loop's thread.

        Cancelled before its search begins, the future's queries are not searched for.

        Raises: Overloaded if more queries wait than the queue holds; ValueError for a filter that does not fit.
        """
        for text in set(where):
            self.check(text, strict)
        if len(query) > self.room():
            waits = f"{self.queries:,} queries wait, and {len(query):,} more are beyond {self.batcher.queue:,}"
            raise Overloaded(f"{waits}.")
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
        waiting = Waiting(query, k, where, self.loop.create_future())
        self.put(waiting)
        return waiting.answer

    def check(self, where: str | None, strict: bool = False) -> None:
        """Raise ValueError if a filter does not fit; if strictly, also if it has a value that no item has."""
        self.index.table.attributes.compile(where, strict)

    def room(self) -> int:
        """How many more queries the queue holds."""
        return self.batcher.queue - self.queries

    def put(self, waiting: Waiting) -> None:
        """Search for queries that were checked."""
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
        self.requests.append(waiting)
        self.queries += len(waiting.query)
        self._consider()

    def keep(self, waiting: Waiting, kept: Array) -> bool:
        """Leave those queries out that are False in kept, if their search has not begun. Returns whether it has not."""
        if waiting not in self.requests:
            return False
        dropped = len(kept) - int(kept.sum())
        self.queries -= dropped
        if self.counters is not None:
            self.counters.dropped.inc(dropped)
        waiting.query = waiting.query[kept]
        waiting.k = [k for k, there in zip(waiting.k, kept, strict=True) if there]
        waiting.where = [where for where, there in zip(waiting.where, kept, strict=True) if there]
        if not len(waiting.query):
            self.requests.remove(waiting)
        return True

    def _consider(self) -> None:
        """Begin a search now, at the end of this turn of the loop, or when the first request has waited enough.

        As the Batcher does: when as many wait as the last search had, no other is to be expected. While a search runs,
        only a full one is lined up behind it; what is left meanwhile gathers.
        """
        assert self.loop is not None
        if not self.requests or self._running > 1 or (self._running and self.queries < self.batcher.most):
            return
        enough = self.queries >= min(self._last, self.batcher.most)
        left = 0.0 if enough else self.requests[0].asked + self.batcher.wait - time.monotonic()
        if self._timer is not None:
            if left > 0 or self._timer_is_now:
                return
            self._timer.cancel()
        self._timer_is_now = left <= 0
        self._timer = self.loop.call_soon(self._begin) if left <= 0 else self.loop.call_later(left, self._begin)

    def _begin(self) -> None:
        self._timer = None
        taken: dict[Any, list[Waiting]] = {}
        queries = dropped = 0
        while self.requests and queries + len(self.requests[0].query) <= self.batcher.most:
            request = self.requests.popleft()
            count = len(request.query)
            self.queries -= count
            if request.answer.cancelled():
                dropped += count
                continue
            taken.setdefault(request.query.dtype, []).append(request)
            queries += count
        if dropped and self.counters is not None:
            self.counters.dropped.inc(dropped)
        for requests in taken.values():  # of one dtype each: products of others have other bits
            self._search(requests)
        if queries:
            self._last = queries
        self._consider()

    def _search(self, requests: list[Waiting]) -> None:
        query = requests[0].query if len(requests) == 1 else np.concatenate([request.query for request in requests])
        ks = [k for request in requests for k in request.k]
        wheres = [where for request in requests for where in request.where]
        k = ks[0] if len(set(ks)) == 1 else ks
        where = wheres[0] if len(set(wheres)) == 1 else wheres
        self._running += 1
        begun = time.monotonic()
        try:
            found = self.batcher.submit(query, k, where)
        except Exception as error:
            self._running -= 1
            self._failed(requests, error)
            return
        loop = self.loop
        assert loop is not None

        def done(found: Future[Hits]) -> None:
            names: Array | None = None
            # Here, in the thread that searched: a hundred thousand strings are no work for the event loop.
            if not found.cancelled() and found.exception() is None and not all(request.keys for request in requests):
                ids = found.result().ids
                names = ids if isinstance(ids, np.ndarray) else ids.numpy()
            loop.call_soon_threadsafe(self._done, requests, found, begun, names)

        found.add_done_callback(done)

    def _done(self, requests: list[Waiting], found: Future[Hits], begun: float, names: Array | None) -> None:
        self._running -= 1
        self._consider()  # first, so that the index searches while answers are written
        if found.cancelled():
            self._failed(requests, RuntimeError("the server is shutting down."))
            return
        error = found.exception()
        if error is not None:
            self._failed(requests, error)
            return
        hits = found.result()
        if self.counters is not None:
            self.counters.search.observe(time.monotonic() - begun)
            self.counters.batch.observe(len(hits))
            self.counters.queries.inc(len(hits))
        keys, scores, exact = hits._keys.numpy(), hits.scores.numpy(), hits.exact.numpy()
        start = 0
        for request in requests:
            rows = slice(start, start + len(request.query))
            start = rows.stop
            if not request.answer.done():
                most = max(request.k)
                of_items = keys if request.keys or names is None else names
                request.answer.set_result(Answer(scores[rows, :most], of_items[rows, :most], exact[rows]))

    def _failed(self, requests: list[Waiting], error: BaseException) -> None:
        """Search for each by itself, so that what is wrong with one is not wrong with all."""
        if len(requests) > 1:
            for request in requests:
                if not request.answer.done():
                    self._search([request])
        elif not requests[0].answer.done():
            requests[0].answer.set_exception(error)
