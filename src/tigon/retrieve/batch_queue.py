"""Which searches that wait become one batch, and when it begins.

`BatchQueue` is the policy alone: it has no thread, no event loop and no clock. `Batcher` drives a queue from a thread,
the HTTP server from its event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import Any


class Overloaded(RuntimeError):
    """More queries wait than the queue may hold. Nothing was searched: try again later, or tell the client to.

    Attributes:
        status: 429, of the answer of an HTTP server.
    """

    status = 429


class PendingSearch:
    """A search that waits.

    Attributes:
        query: (queries, dim) on the host, of numpy or torch.
        k, where: the number of results and the filter of each query.
        future: of the result; a search whose future is cancelled is not made.
        start: when the search began to wait, in seconds of the driver's clock.
    """

    __slots__ = ("future", "k", "query", "start", "where")

    def __init__(self, query: Any, k: list[int], where: list[Any], future: Any) -> None:
        self.query, self.k, self.where, self.future = query, k, where, future
        self.start = 0.0

    def select(self, rows: Sequence[bool]) -> None:
        """Keep the queries whose row is True."""
        self.query = self.query[rows]
        self.k = list(compress(self.k, rows))
        self.where = list(compress(self.where, rows))


class BatchQueue:
    """Searches that wait, in their order.

    A batch begins when `max_batch` queries wait, when the first search has waited for `wait` seconds, or when as many
    queries wait as the last batch had: then no other search is to be expected.

    Args:
        max_batch: queries of a batch. wait: seconds. max_queue: queries that may wait.
    """

    def __init__(self, max_batch: int, wait: float, max_queue: int) -> None:
        self.max_batch, self.wait, self.max_queue = max_batch, wait, max_queue
        self.queries = 0  # that wait
        self._searches: deque[PendingSearch] = deque()
        self._last = 1  # queries of the last batch

    def __bool__(self) -> bool:
        return bool(self._searches)

    def add(self, search: PendingSearch, now: float) -> None:
        """Raises: Overloaded if the queue would hold too many queries."""
        count = len(search.query)
        if self.queries + count > self.max_queue:
            raise Overloaded(
                f"{self.queries:,} queries wait, and {count:,} more are beyond {self.max_queue:,}, the queue."
            )
        search.start = now
        self._searches.append(search)
        self.queries += count

    def select(self, search: PendingSearch, rows: Sequence[bool]) -> bool:
        """Keep the queries of a search whose row is True, if the search still waits. Returns whether it does."""
        if search not in self._searches:
            return False
        self.queries -= len(search.query)
        search.select(rows)
        self.queries += len(search.query)
        if not len(search.query):
            self._searches.remove(search)
        return True

    def delay(self, now: float) -> float | None:
        """Seconds until the next batch begins, 0 if it is due; None if no search waits."""
        if not self._searches:
            return None
        if self.queries >= min(self._last, self.max_batch):
            return 0.0
        return max(0.0, self._searches[0].start + self.wait - now)

    def take(self) -> list[list[PendingSearch]]:
        """The searches of the next batch, without those that were cancelled.

        Returns: a list for each dtype of queries, since products of other dtypes have other bits.
        """
        alike: dict[Any, list[PendingSearch]] = {}
        queries = 0
        while self._searches and queries + len(self._searches[0].query) <= self.max_batch:
            search = self._searches.popleft()
            self.queries -= len(search.query)
            if not search.future.cancelled():
                alike.setdefault(search.query.dtype, []).append(search)
                queries += len(search.query)
        if queries:
            self._last = queries
        return list(alike.values())

    def clear(self) -> list[PendingSearch]:
        """Empty the queue, and return the searches that waited."""
        searches = list(self._searches)
        self._searches.clear()
        self.queries = 0
        return searches
