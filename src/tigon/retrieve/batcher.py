"""Batch the calls from many threads into one index search.

Sixteen queries cost little more than a single query: the items are read once for all. A thread gathers calls, runs one
search with a k and a filter per query, and distributes the results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import shorten
from tigon.retrieve.arguments import as_number, read_int
from tigon.retrieve.batch_queue import BatchQueue, Overloaded, PendingSearch
from tigon.retrieve.filters.expressions import Where
from tigon.retrieve.fork import Forkable
from tigon.retrieve.index.hits import Hits
from tigon.retrieve.index.index import Index
from tigon.retrieve.index.request import broadcast_filters, parse_k, parse_query, unique_filters

S = TypeVar("S", bound=PendingSearch)

__all__ = ["Batcher", "Overloaded", "run_batch"]


class Batcher(Forkable):
    """Batch searches from many threads, each with its own k and filter.

    A call waits until `max_batch` queries are pending, or for `wait` seconds, or until as many queries are pending as
    the last search had: then no other call is expected. Calls that arrive during a search join the next search. Index
    updates continue, and become visible between two searches.

    Args:
        index: the index to search. Call its `warmup` for the expected batches to save the first callers seconds.
        max_batch: queries per search.
        wait: the longest time in seconds that a call waits for others.
        max_queue: the most pending queries; beyond, a call raises `Overloaded`.

    Raises: ValueError for numbers that are not positive, or a queue smaller than a single search.

        with Batcher(index) as batcher:
            hits = batcher.search(query, k=10, where="country == 'us'")     # from any thread
    """

    def __init__(self, index: Index, max_batch: int = 256, wait: float = 1e-3, max_queue: int = 4096) -> None:
        if not isinstance(index, Index):
            raise ValueError(f"Batcher: index must be an Index, got {type(index).__name__}.")
        max_batch = read_int("Batcher", "max_batch", max_batch)
        max_queue = read_int("Batcher", "max_queue", max_queue)
        if max_queue < max_batch:
            raise ValueError(
                f"Batcher: max_queue must be at least max_batch, {max_batch:,} queries, got {max_queue:,}."
            )
        seconds = as_number(wait)
        if seconds is None or not 0 <= seconds < float("inf"):
            raise ValueError(f"Batcher: wait must be in seconds, 0 or more, got {shorten(wait)}.")
        self.index = index
        self._queue = BatchQueue(max_batch, seconds, max_queue)
        self._changed = threading.Condition()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="tigon.retrieve.Batcher", daemon=True)
        self._worker.start()
        self.survive_forks()

    def after_fork(self, is_child: bool) -> None:
        if is_child:  # the thread does not exist here
            self._closed = True
            self._queue.clear()
            self._changed = threading.Condition()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __len__(self) -> int:
        """The number of pending queries."""
        return self._queue.queries

    def search(
        self,
        query: Any,
        k: int | Sequence[int] = 100,
        where: Where | Sequence[Where] = None,
        *,
        strict: bool = False,
        timeout: float | None = None,
    ) -> Hits:
        """Search as `Index.search` does, as part of a larger batch.

        Args:
            query, k, where, strict: as in `Index.search`.
            timeout: seconds; None: no limit. A call that has not started by then is cancelled.

        Returns: `Hits` on the host.
        Raises: TimeoutError if there is no result in time; ValueError as `Index.search`; Overloaded as `submit`;
            RuntimeError as `submit`.
        """
        future = self.submit(query, k, where, strict=strict)
        try:
            return future.result(timeout)
        except (FutureTimeout, TimeoutError):
            if not future.cancel() and future.done():  # finished at this moment
                return future.result()
            raise TimeoutError(
                f"Batcher.search: no result within {timeout} s; {len(self):,} queries waiting."
            ) from None
        except CancelledError:
            raise RuntimeError("Batcher.search: the batcher was closed before the search began.") from None

    def submit(
        self,
        query: Any,
        k: int | Sequence[int] = 100,
        where: Where | Sequence[Where] = None,
        *,
        strict: bool = False,
    ) -> Future[Hits]:
        """Start a call without waiting for the result.

        Args:
            query, k, where, strict: as in `Index.search`; at most `max_batch` queries.

        Returns: a Future with the `Hits`. A call that is cancelled before its search starts is skipped.
        Raises: ValueError as `Index.search`; Overloaded if too many queries are pending; RuntimeError after `close`.
        """
        search = _parse_search(self.index, query, k, where, strict, self._queue.max_batch)
        future: Future[Hits] = search.future
        if not len(search.query):  # no query, so no k
            future.set_result(_copy_to_host(self.index.search(query, k, where)))
            return future
        with self._changed:
            if self._closed:
                raise RuntimeError(
                    "Batcher.search: the batcher is closed, or was created before this process was forked: create "
                    "another batcher."
                )
            was_empty, now = not self._queue, time.monotonic()
            self._queue.add(search, now)
            # Calls that arrive while others are gathered need not wake the thread.
            if was_empty or not self._queue.delay(now):
                self._changed.notify_all()
        return future

    def close(self, drain: bool = True) -> None:
        """Refuse new calls, and stop.

        Args:
            drain: whether pending calls are answered first. Otherwise they are cancelled.
        """
        with self._changed:
            self._closed = True
            if not drain:
                for search in self._queue.clear():
                    search.future.cancel()
            self._changed.notify_all()
        if threading.current_thread() is not self._worker:  # a future's callback may close
            self._worker.join()

    # -------------------------------------------------------------------------------------------------------- worker

    def _work(self) -> None:
        cuda = self.index.device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(self.index.device)) if cuda else nullcontext():
            while (batch := self._next_batch()) is not None:
                for group in batch:
                    searches = [search for search in group if search.future.set_running_or_notify_cancel()]
                    if not searches:
                        continue
                    for part, hits in run_batch(self.index, searches):
                        for search, (rows, k) in zip(part, split_rows(part), strict=True):
                            if isinstance(hits, Exception):
                                search.future.set_exception(hits)
                            else:
                                parts = hits.scores[rows, :k], hits._keys[rows, :k], hits.exact[rows]
                                search.future.set_result(Hits(*parts, hits._ids))

    def _next_batch(self) -> list[list[PendingSearch]] | None:
        """Wait until a batch is due; None when the thread must stop."""
        with self._changed:
            while True:
                delay = self._queue.delay(time.monotonic())
                if delay is None and self._closed:
                    return None
                if delay == 0 or (self._closed and delay is not None):
                    return self._queue.take()
                self._changed.wait(delay)


def _parse_search(index: Index, query: Any, k: Any, where: Any, strict: bool, max_batch: int) -> PendingSearch:
    """Check a call's arguments, and compile its filters.

    Raises: ValueError as `Index.search`.
    """
    q = parse_query(query, index.dim).cpu()
    count = len(q)
    if count > max_batch:
        raise ValueError(f"Batcher.search: query must be at most {max_batch:,} queries (max_batch), got {count:,}.")
    most, ks = parse_k(k, count, "Batcher.search")
    is_one = where is None or not isinstance(where, (list, tuple))
    wheres = [where] * count if is_one else list(broadcast_filters(where, count))
    for each in [where] if is_one else unique_filters(wheres).values():
        index.table.attributes.compile(each, strict)
    return PendingSearch(q, [most] * count if ks is None else list(ks), wheres, Future())


def run_batch(index: Index, searches: list[S]) -> list[tuple[list[S], Hits | Exception]]:
    """Run searches as one batch; if that fails, run each separately, so that no search fails because of another.

    Args:
        searches: checked, with queries in one dtype.

    Returns: the searches with their joint hits on the host, or each search with its own hits or error.
    """
    try:
        return [(searches, _search_together(index, searches))]
    except Exception as error:
        if len(searches) == 1:
            return [(searches, error)]
    return [result for search in searches for result in run_batch(index, [search])]


def split_rows(searches: Sequence[PendingSearch]) -> Iterator[tuple[slice, int]]:
    """Each search's rows in the joint hits, and its largest k."""
    start = 0
    for search in searches:
        yield slice(start, start + len(search.query)), max(search.k)
        start += len(search.query)


def _search_together(index: Index, searches: Sequence[PendingSearch]) -> Hits:
    queries = [search.query for search in searches]
    query = torch.cat(queries) if isinstance(queries[0], Tensor) else torch.from_numpy(np.concatenate(queries))
    ks = [k for search in searches for k in search.k]
    wheres = [where for search in searches for where in search.where]
    is_one = all(where is wheres[0] or (isinstance(where, str) and where == wheres[0]) for where in wheres)
    return _copy_to_host(index.search(query, ks[0] if len(set(ks)) == 1 else ks, wheres[0] if is_one else wheres))


def _copy_to_host(hits: Hits) -> Hits:
    scores, keys, exact = (part.to("cpu", non_blocking=True) for part in (hits.scores, hits._keys, hits.exact))
    if hits.scores.device.type == "cuda":
        torch.cuda.current_stream(hits.scores.device).synchronize()
    return Hits(scores, keys, exact, hits._ids)
