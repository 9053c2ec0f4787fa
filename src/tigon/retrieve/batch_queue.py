"""Batching policy: which pending searches form a batch, and when the batch starts.

`BatchQueue` is the policy alone, without a thread, an event loop or a clock. `Batcher` drives a queue from a thread,
the HTTP server from its event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import Any


class Overloaded(RuntimeError):
    """More queries are pending than the queue may hold. Nothing was searched: retry later, or tell the client to.

    Attributes:
        status: 429, the HTTP status of the response.
    """

    status = 429


class PendingSearch:
    """A pending search.

    Attributes:
        query: (queries, dim) on the host, in numpy or torch.
        k, where: the number of results and the filter for each query.
        future: receives the result; a search whose future is cancelled is skipped.
        start: when the search was queued, in seconds on the driver's clock.
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
    """Pending searches, first come first served.

    A batch starts when `max_batch` queries are pending, when the first search has waited for `wait` seconds, or when as
    many queries are pending as the last batch had: then no other search is expected.

    Args:
        max_batch: queries per batch. wait: seconds. max_queue: the most queries that may be pending.
    """

    def __init__(self, max_batch: int, wait: float, max_queue: int) -> None:
        self.max_batch, self.wait, self.max_queue = max_batch, wait, max_queue
        self.queries = 0  # pending
        self._searches: deque[PendingSearch] = deque()
        self._last = 1  # queries in the last batch

    def __bool__(self) -> bool:
        return bool(self._searches)

    def add(self, search: PendingSearch, now: float) -> None:
        """Raises: Overloaded if the queue would hold too many queries."""
        count = len(search.query)
        if self.queries + count > self.max_queue:
            raise Overloaded(
                f"{self.queries:,} queries are waiting, and {count:,} more exceed the queue limit, {self.max_queue:,}."
            )
        search.start = now
        self._searches.append(search)
        self.queries += count

    def select(self, search: PendingSearch, rows: Sequence[bool]) -> bool:
        """Keep the queries in a pending search whose row is True. Returns whether the search is still pending."""
        if search not in self._searches:
            return False
        self.queries -= len(search.query)
        search.select(rows)
        self.queries += len(search.query)
        if not len(search.query):
            self._searches.remove(search)
        return True

    def delay(self, now: float) -> float | None:
        """Seconds until the next batch starts, 0 if due now; None if no search is pending."""
        if not self._searches:
            return None
        if self.queries >= min(self._last, self.max_batch):
            return 0.0
        return max(0.0, self._searches[0].start + self.wait - now)

    def take(self) -> list[list[PendingSearch]]:
        """Take the searches for the next batch, without cancelled searches.

        Returns: a list per query dtype, since products in other dtypes have other bits.
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
        """Empty the queue, and return the pending searches."""
        searches = list(self._searches)
        self._searches.clear()
        self.queries = 0
        return searches
