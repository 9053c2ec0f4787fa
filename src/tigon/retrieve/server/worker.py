"""A process that handles HTTP in front of the index process, with neither torch nor an index.

    python -m tigon.retrieve.server.worker CONNECTION SOCKET NUMBER        # file descriptors; `WorkerPool` starts it

Workers check requests, and send concurrent searches as one frame. A worker obeys the index process, not signals, and
exits with the index process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from starlette.exceptions import HTTPException

from tigon.retrieve.server.app import RETRY, Application
from tigon.retrieve.server.bodies import Array, SearchResult
from tigon.retrieve.server.connections import Config, Server, freeze_garbage, run_loop
from tigon.retrieve.server.frames import FrameProtocol, decode_arrays, encode_arrays, split_table
from tigon.retrieve.server.requests import IndexInfo, Limits, is_long

# Seconds between two search frames. An isolated search is sent at once. uvloop counts whole milliseconds, and rounds
# half a millisecond to zero.
HOLD = 1e-3


class HeldSearch(NamedTuple):
    """A search that has not been sent."""

    number: int
    query: Array
    k: list[int]
    where: list[str | None]
    strict: bool


class RemoteBackend(FrameProtocol):
    """The index process as a `Backend`: the worker's end of the socket."""

    limits: Limits
    workers: int
    end: Callable[[float], None]  # shuts the worker down, given the grace time

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[Application] = self.loop.create_future()
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self.is_ended = False  # as the index process announced
        self.queries = 0  # in unanswered searches
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self._held: list[HeldSearch] = []
        self._is_scheduled = False
        self._last_number, self._last_frame = 0, 0.0

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        """The next request number, and a future for the result."""
        self._last_number += 1
        future = self.pending[self._last_number] = self.loop.create_future()
        return self._last_number, future

    # ------------------------------------------------------------------------------------------------------ searches

    def is_crowded(self) -> bool:
        # Other workers have about as many queries; two batches have started, and a third waits.
        return self.queries * self.workers > 3 * self.limits.max_batch

    async def search(self, query: Array, k: list[int], where: list[str | None], strict: bool) -> SearchResult:
        count = len(query)
        # The index process counts all workers' queries. This limit applies if that process hangs.
        if self.queries + count > self.limits.max_queue + 2 * self.limits.max_batch:
            waiting = f"{self.queries:,} queries are waiting, and {count:,} more exceed {self.limits.max_queue:,}"
            raise HTTPException(429, f"{waiting}, the queue limit.", RETRY)
        number, future = self._expect()
        search = HeldSearch(number, query, k, where, strict)
        self.queries += count
        self._held.append(search)
        if not self._is_scheduled:
            self._is_scheduled = True
            delay = self._last_frame + HOLD - self.loop.time()
            if delay > 0:
                self.loop.call_later(delay, self._send_held)
            else:
                self.loop.call_soon(self._send_held)
        try:
            scores, ids, exact = await future
        except asyncio.CancelledError:
            if not any(held is search for held in self._held):
                self.send("cancel", number)
            self._held = [held for held in self._held if held is not search]
            raise
        finally:
            self.queries -= count
            self.pending.pop(number, None)
        most = max(k)
        return SearchResult(scores[:, :most], ids[:, :most], exact)

    def _send_held(self) -> None:
        """Send the held searches, merged into frames where possible."""
        self._is_scheduled = False
        self._last_frame = self.loop.time()
        groups: dict[Any, list[HeldSearch]] = {}
        for search in self._held:
            # Slow-to-compile filters are sent separately, so that they delay no other search.
            alone = search.number if is_long(search.where) else 0
            groups.setdefault((search.query.dtype, search.strict, alone), []).append(search)
        self._held.clear()
        for group in groups.values():
            while group:
                sizes = accumulate(len(search.query) for search in group)
                count = max(1, sum(size <= self.limits.max_batch for size in sizes))
                self._send_together(group[:count])
                del group[:count]

    def _send_together(self, searches: list[HeldSearch]) -> None:
        same: dict[str | None, str | None] = {}  # equal texts are sent once
        self.send(
            "search", [search.number for search in searches], [len(search.query) for search in searches],
            encode_arrays(np.concatenate([search.query for search in searches])),
            [k for search in searches for k in search.k],
            [same.setdefault(where, where) for search in searches for where in search.where], searches[0].strict,
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------- the other requests

    async def call(self, method: str, *arguments: Any) -> Any:
        if method == "upsert":
            *others, table = arguments
            arguments = *others, await self.loop.run_in_executor(None, split_table, table)
        number, future = self._expect()
        self.send("call", number, method, *map(encode_arrays, arguments))
        try:
            return decode_arrays(await future)
        finally:
            del self.pending[number]

    # ---------------------------------------------------------------------------------- frames of the index process

    def on_hello(self, info: Any, key: str | None, limits: Any, hosts: list[str] | None, workers: int) -> None:
        self.limits, self.workers = Limits(*limits), workers
        self.hello.set_result(Application(self, IndexInfo(*info), key, self.limits, hosts))

    def on_results(
        self, numbers: list[int], counts: list[int], scores: Any, ids: Any, exact: Any, names: bytes | None
    ) -> None:
        scores, ids, exact = map(decode_arrays, (scores, ids, exact))
        if names is not None:
            ids = _decode_strings(ids, names)
        start = 0
        for number, count in zip(numbers, counts, strict=True):
            rows = slice(start, start + count)
            start = rows.stop
            self.on_reply(number, (scores[rows], ids[rows], exact[rows]))

    def on_reply(self, number: int, result: Any) -> None:
        future = self.pending.get(number)
        if future is not None and not future.done():  # otherwise its client disconnected
            future.set_result(result)

    def on_error(self, numbers: list[int], status: int, detail: str, headers: dict[str, str] | None) -> None:
        for number in numbers:
            future = self.pending.get(number)
            if future is not None and not future.done():
                future.set_exception(HTTPException(status, detail, headers))

    def on_drain(self, delay: float, grace: float) -> None:
        self.hello.result().draining = True
        self.loop.call_later(delay, self.end, grace)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)
        if not self.is_ended:
            if self.number == 0:
                detail = "the index process has exited, and the workers exit with it"
                print(f"tigon: retrieve serve: {detail}", file=sys.stderr, flush=True)
            os._exit(1)  # no request can be answered


def _decode_strings(lengths: Array, names: bytes) -> Array:
    """Split concatenated strings (queries, k) by their lengths in bytes; None where a length is −1."""
    strings = np.empty(lengths.size, dtype=object)
    ends = np.cumsum(np.maximum(lengths, 0).reshape(-1)).tolist()
    start = 0
    for i, (length, end) in enumerate(zip(lengths.reshape(-1).tolist(), ends, strict=True)):
        strings[i] = names[start:end].decode() if length >= 0 else None
        start = end
    return strings.reshape(lengths.shape)


async def _serve(connection: int, bound: int, number: int) -> None:
    loop = asyncio.get_running_loop()
    end = socket.socket(fileno=connection)
    _, backend = await loop.create_unix_connection(lambda: RemoteBackend(number), sock=end)
    app = await backend.hello
    server = Server(Config(app, app.limits), lambda: backend.send("ready"))

    def end_server(grace: float) -> None:
        server.config.grace = grace
        server.should_exit = True  # uvicorn closes the port, and waits for unanswered requests

    backend.end = end_server
    freeze_garbage()
    await server.serve(sockets=[socket.socket(fileno=bound)])
    backend.is_ended = True
    backend.transport.close()
    await backend.closed  # all frames are sent


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM):  # may be sent to a whole process group
        signal.signal(ignored, signal.SIG_IGN)
    run_loop(_serve(*map(int, sys.argv[1:4])))
