"""Searches that many threads ask for at once, made as one.

Sixteen queries cost a search little more than one does: the items are read once for all of them. So a thread of its own
gathers what is asked, makes one search of it with a k and a filter for each query, and hands out the parts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.data.values import shorten
from tigon.retrieve.arguments import as_number, read_int
from tigon.retrieve.filters.expressions import Where
from tigon.retrieve.fork import Forkable
from tigon.retrieve.index.hits import Hits
from tigon.retrieve.index.index import Index
from tigon.retrieve.index.request import broadcast_filters, parse_k, parse_query, unique_filters


class Overloaded(RuntimeError):
    """More queries wait than a `Batcher` may hold. Nothing was searched: ask again later, or tell the client to."""


class Request(NamedTuple):
    """One call: queries on the host, the k and the filter of each, the largest k, and where its answer goes."""

    query: Tensor
    most: int
    ks: list[int]
    where: list[Any]
    answer: Future[Hits]
    asked: float


class Batcher(Forkable):
    """One search for the calls of many threads, each with its k and its filter.

    A call waits until `most` queries are there, or for `wait` seconds, or until as many calls wait as the last search
    answered: then no other is to be expected. What is asked while a search runs is in the next. Updates of the index go
    on as ever, and become visible between two searches.

    Args:
        index: that is searched. Its `warmup` for the batches to come saves the first callers seconds.
        most: queries of one search.
        wait: seconds that a call waits for others at most.
        queue: queries that may wait; beyond, a call raises `Overloaded`.

    Raises: ValueError for numbers that are not positive, or a queue that holds less than one search.

        with Batcher(index) as batcher:
            hits = batcher.search(query, k=10, where="country == 'us'")     # from any thread
    """

    def __init__(self, index: Index, most: int = 256, wait: float = 1e-3, queue: int = 4096) -> None:
        if not isinstance(index, Index):
            raise ValueError(f"Batcher: index must be an Index, got {type(index).__name__}.")
        most, queue = read_int("Batcher", "most", most), read_int("Batcher", "queue", queue)
        if queue < most:
            raise ValueError(f"Batcher: queue must be at least most, {most:,} queries, got {queue:,}.")
        seconds = as_number(wait)
        if seconds is None or not 0 <= seconds < float("inf"):
            raise ValueError(f"Batcher: wait must be a number of seconds, 0 or more, got {shorten(wait)}.")
        self.index, self.most, self.wait, self.queue = index, most, seconds, queue
        self._closed = False
        self._reset()
        self._worker = threading.Thread(target=self._work, name="tigon.retrieve.Batcher", daemon=True)
        self._worker.start()
        self.survive_forks()

    def _reset(self) -> None:
        self._requests: deque[Request] = deque()
        self._queries = 0  # that wait
        self._answered = 1  # calls of the last search
        self._changed = threading.Condition()

    def after_fork(self, is_child: bool) -> None:
        if is_child:  # where the thread is not
            self._closed = True
            self._reset()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __len__(self) -> int:
        """How many queries wait."""
        return self._queries

    def search(
        self,
        query: Any,
        k: int | Sequence[int] = 100,
        where: Where | Sequence[Where] = None,
        *,
        strict: bool = False,
        timeout: float | None = None,
    ) -> Hits:
        """What `Index.search` finds, as one part of a larger search.

        Args:
            query, k, where, strict: as of `Index.search`.
            timeout: seconds; None: as long as it takes. A call that has not begun by then is given up.

        Returns: `Hits` on the host.
        Raises: TimeoutError if there is no answer in time; ValueError as `Index.search`; Overloaded as `submit`;
            RuntimeError as `submit`.
        """
        answer = self.submit(query, k, where, strict=strict)
        try:
            return answer.result(timeout)
        except (FutureTimeout, TimeoutError):
            if not answer.cancel() and answer.done():  # just now
                return answer.result()
            raise TimeoutError(f"Batcher.search: no answer within {timeout} s; {len(self):,} queries wait.") from None
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
        """As `search`, without waiting: for asyncio, `await asyncio.wrap_future(batcher.submit(…))`.

        What does not fit the index raises here, before it can disturb others. Vectors that are on a GPU are waited for.

        Args:
            query, k, where, strict: as of `Index.search`; at most `most` queries.

        Returns: the Future of the `Hits`. Cancelled before its search begins, it is not searched.
        Raises: ValueError as `Index.search`; Overloaded if too many queries wait; RuntimeError after `close`.
        """
        q = parse_query(query, self.index.dim).cpu()
        count = len(q)
        if count > self.most:
            raise ValueError(f"Batcher.search: query must be at most {self.most:,} queries (most), got {count:,}.")
        most, ks = parse_k(k, count, "Batcher.search")
        one = where is None or not isinstance(where, (list, tuple))
        wheres = [where] * count if one else list(broadcast_filters(where, count))
        for each in [where] if one else unique_filters(wheres).values():
            self.index.table.attributes.compile(each, strict)
        request = Request(q, most, [most] * count if ks is None else list(ks), wheres, Future(), time.monotonic())
        with self._changed:
            if self._closed:
                raise RuntimeError(
                    "Batcher.search: the batcher is closed, or was made before this process was forked: make another."
                )
            if self._queries + count > self.queue:
                waits = f"{self._queries:,} queries wait, and {count:,} more are beyond {self.queue:,}, the queue"
                raise Overloaded(f"Batcher.search: {waits}.")
            self._requests.append(request)
            self._queries += count
            # Others that come while calls are gathered wake nobody up.
            if len(self._requests) == 1 or self._is_full():
                self._changed.notify_all()
        return request.answer

    def close(self, drain: bool = True) -> None:
        """Take no more calls, and stop.

        Args:
            drain: whether calls that wait are answered first. Otherwise they are cancelled.
        """
        with self._changed:
            self._closed = True
            if not drain:
                while self._requests:
                    self._requests.popleft().answer.cancel()
                self._queries = 0
            self._changed.notify_all()
        if threading.current_thread() is not self._worker:  # a callback of an answer may close
            self._worker.join()

    # -------------------------------------------------------------------------------------------------------- worker

    def _is_full(self) -> bool:
        return self._closed or self._queries >= self.most or len(self._requests) >= self._answered

    def _work(self) -> None:
        cuda = self.index.device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(self.index.device)) if cuda else nullcontext():
            while requests := self._gathered():
                asked = [request for request in requests if request.answer.set_running_or_notify_cancel()]
                kinds: dict[Any, list[Request]] = {}
                for request in asked:  # products of other dtypes have other bits, and a call without queries has no k
                    kinds.setdefault((request.query.dtype, len(request.ks) > 0), []).append(request)
                for alike in kinds.values():
                    self._answer(alike)

    def _gathered(self) -> list[Request]:
        """The calls of the next search, none when it is time to stop."""
        with self._changed:
            while True:
                while not self._requests:
                    if self._closed:
                        return []
                    self._changed.wait()
                end = self._requests[0].asked + self.wait
                while self._requests and not self._is_full() and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._requests:  # or they were cancelled meanwhile
                    break
            taken: list[Request] = []
            queries = 0
            while self._requests and queries + len(self._requests[0].query) <= self.most:
                taken.append(self._requests.popleft())
                queries += len(taken[-1].query)
            self._queries -= queries
            self._answered = len(taken)
            return taken

    def _answer(self, requests: list[Request]) -> None:
        try:
            answers = self._searched(requests)
        except Exception as error:
            if len(requests) == 1:
                requests[0].answer.set_exception(error)
                return
            for request in requests:  # so that what is wrong with one is not wrong with all
                self._answer([request])
            return
        for request, hits in zip(requests, answers, strict=True):
            request.answer.set_result(hits)

    def _searched(self, requests: list[Request]) -> list[Hits]:
        query = torch.cat([request.query for request in requests])
        ks = [k for request in requests for k in request.ks]
        k: Any = ks if len(set(ks)) > 1 else max(request.most for request in requests)
        wheres = [where for request in requests for where in request.where]
        alike = all(where is wheres[0] or (isinstance(where, str) and where == wheres[0]) for where in wheres)
        found = self.index.search(query, k, wheres[0] if wheres and alike else wheres)
        scores, keys, exact = (part.to("cpu", non_blocking=True) for part in (found.scores, found._keys, found.exact))
        if self.index.device.type == "cuda":
            torch.cuda.current_stream(self.index.device).synchronize()
        answers, start = [], 0
        for request in requests:
            rows = slice(start, start + len(request.query))
            answers.append(Hits(scores[rows, : request.most], keys[rows, : request.most], exact[rows], found._ids))
            start = rows.stop
        return answers
