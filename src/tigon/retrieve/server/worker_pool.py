"""The index process behind workers: their frames, and the processes themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

import tigon
from tigon.retrieve.batch_queue import Overloaded
from tigon.retrieve.ids import Ids, StringIds
from tigon.retrieve.server.admission import AdmittedSearch
from tigon.retrieve.server.bodies import Array
from tigon.retrieve.server.connections import freeze_garbage
from tigon.retrieve.server.frames import FrameProtocol, decode_arrays, encode_arrays, join_table
from tigon.retrieve.server.metrics import FOLDER
from tigon.retrieve.server.requests import is_long
from tigon.retrieve.server.service import Service, to_http_exception

PATIENCE = 2.0  # seconds for a worker to exit
QUICK, TRIES = 1.0, 3  # a worker that exits within QUICK seconds is restarted, except the third time in a row


class WorkerError(RuntimeError):
    """The workers do not run."""


class MergedSearch(AdmittedSearch):
    """The searches in one frame: separately, each costs the index process some 20 µs.

    Attributes:
        numbers, counts: each request's number at the worker and its query count.
    """

    __slots__ = ("counts", "numbers")

    def __init__(self, numbers: list[int], counts: list[int], query: Any, k: list[int], where: list[Any]) -> None:
        super().__init__(query, k, where, asyncio.get_running_loop().create_future())
        self.numbers, self.counts = numbers, counts

    def convert(self, scores: Array, keys: Array, exact: Array, ids: Ids | None) -> tuple[Any, ...]:
        """The last arguments of a result frame; string ids become their lengths and their bytes."""
        keys, names = ids.cut(keys) if isinstance(ids, StringIds) else (keys, None)
        return (*map(encode_arrays, (scores, keys, exact)), names)

    def expand(self, requests: Sequence[bool]) -> list[bool]:
        """Expand a flag per request to a flag per query."""
        return [keep for keep, count in zip(requests, self.counts, strict=True) for _ in range(count)]

    def select_requests(self, requests: Sequence[bool]) -> MergedSearch:
        """Select the requests whose flag is True, as another search."""
        rows = self.expand(requests)
        return MergedSearch(
            list(compress(self.numbers, requests)), list(compress(self.counts, requests)), self.query[rows],
            list(compress(self.k, rows)), list(compress(self.where, rows)),
        )  # fmt: skip


class WorkerConnection(FrameProtocol):
    """The index's end of the socket to worker number `place`."""

    def __init__(self, service: Service, place: int, process: Any) -> None:
        super().__init__()
        self.backend, self.place = service.index_backend, place
        self.process: subprocess.Popen[bytes] = process
        self.started = time.monotonic()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[bool] = loop.create_future()  # False: the worker exited before
        self.closed: asyncio.Future[None] = loop.create_future()
        self.searches: set[MergedSearch] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_lost(self, error: Exception | None) -> None:
        for search in self.searches:
            search.future.cancel()
        if not self.ready.done():
            self.ready.set_result(False)
        self.closed.set_result(None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_ready(self) -> None:
        if not self.ready.done():
            self.ready.set_result(True)

    # ------------------------------------------------------------------------------------------------------ searches

    def on_search(
        self, numbers: list[int], counts: list[int], query: Any, k: list[int], where: list[str | None], strict: bool
    ) -> None:
        search = MergedSearch(numbers, counts, decode_arrays(query), k, where)
        new = self.backend.find_new_filters(where, strict)
        if is_long(new):
            self._start(self._compile_and_search(search, new, strict))
        else:
            self._search(search, self.backend.compile_filters(new, strict))

    async def _compile_and_search(self, search: MergedSearch, where: set[str], strict: bool) -> None:
        self._search(search, await self.backend.compile_in_thread(where, strict))

    def _search(self, search: MergedSearch, errors: dict[str | None, HTTPException]) -> None:
        """Run a frame's requests whose filters have no error."""
        if errors:
            where = iter(search.where)
            filters = [list(islice(where, count)) for count in search.counts]
            requests = [next((errors[each] for each in group if each in errors), None) for group in filters]
            for number, error in zip(search.numbers, requests, strict=True):
                if error is not None:
                    self._refuse([number], error)
            search = search.select_requests([error is None for error in requests])
        if search.numbers:
            self._add(search)

    def _add(self, search: MergedSearch) -> None:
        self.searches.add(search)
        search.future.add_done_callback(lambda _: self._finish(search))
        try:
            self.backend.admission.add(search)
        except (Overloaded, HTTPException) as error:
            search.future.set_exception(error)

    def _finish(self, search: MergedSearch) -> None:
        self.searches.discard(search)
        if search.future.cancelled():
            return
        error = search.future.exception()
        if error is None:
            self.send("results", search.numbers, search.counts, *search.future.result())
        elif len(search.numbers) == 1 or isinstance(error, (Overloaded, HTTPException)):
            self._refuse(search.numbers, error)
        else:  # one by one, so that no request fails because of another
            for number in search.numbers:
                self._add(search.select_requests([number == other for other in search.numbers]))

    def on_cancel(self, number: int) -> None:
        """The client of a search disconnected."""
        search = next((search for search in self.searches if number in search.numbers), None)
        if search is None:
            return
        requests = [number != other for other in search.numbers]
        if self.backend.admission.select(search, search.expand(requests)):
            search.numbers = list(compress(search.numbers, requests))
            search.counts = list(compress(search.counts, requests))
            if not search.numbers:
                search.future.cancel()

    def _refuse(self, numbers: list[int], error: BaseException) -> None:
        try:
            refusal = to_http_exception(error)
        except BaseException:
            traceback.print_exception(error)
            refusal = HTTPException(500)
        headers = None if refusal.headers is None else dict(refusal.headers)
        self.send("error", numbers, refusal.status_code, refusal.detail, headers)

    # -------------------------------------------------------------------------------------------- the other requests

    def on_call(self, number: int, method: str, *arguments: Any) -> None:
        self._start(self._answer(number, method, *arguments))

    async def _answer(self, number: int, method: str, *arguments: Any) -> None:
        try:
            decoded = list(map(decode_arrays, arguments))
            if method == "upsert":
                decoded[2] = await asyncio.get_running_loop().run_in_executor(None, join_table, decoded[2])
            self.send("reply", number, encode_arrays(await self.backend.call(method, *decoded)))
        except Exception as error:
            self._refuse([number], error)


class WorkerPool:
    """A service's workers.

    Args:
        service: the service to run.
        sockets: a listening socket per worker.
        delay, grace: as in `run.serve`.
    """

    def __init__(self, service: Service, sockets: list[socket.socket], delay: float, grace: float) -> None:
        self.service, self.sockets, self.delay, self.grace = service, sockets, delay, grace
        self.connections: dict[int, WorkerConnection] = {}
        self._metrics = tempfile.TemporaryDirectory(prefix="tigon-metrics-")

    async def run(self, started: Callable[[], None]) -> None:
        """Serve until a signal, then shut down as described in `run.serve`. started: called when requests are answered.

        Raises: WorkerError if workers do not run.
        """
        loop = asyncio.get_running_loop()
        self.signals: asyncio.Queue[int] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signals.put_nowait, number)
        try:
            connections = await asyncio.gather(*(self._start(place) for place in range(len(self.sockets))))
            ready = asyncio.gather(*(connection.ready for connection in connections))
            signaled = asyncio.ensure_future(self.signals.get())
            await asyncio.wait((signaled, ready), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                return
            if not all(ready.result()):
                raise WorkerError("a worker exited before it was ready; see the error above")
            freeze_garbage()
            started()
            supervision = asyncio.gather(*map(self._supervise, connections))
            await asyncio.wait((signaled, supervision), return_when=asyncio.FIRST_COMPLETED)
            if supervision.done():
                supervision.result()  # raises
            await self._drain()
        finally:
            self.service.draining = True
            for connection in self.connections.values():
                try:
                    connection.process.wait(PATIENCE if connection.closed.done() else 0)
                except subprocess.TimeoutExpired:
                    connection.process.kill()
                    connection.process.wait()
            self._metrics.cleanup()

    async def _start(self, place: int) -> WorkerConnection:
        here, there = socket.socketpair()
        bound = self.sockets[place]
        root = str(Path(tigon.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", FOLDER: self._metrics.name}
        with there:
            arguments = map(str, (there.fileno(), bound.fileno(), place))
            process = subprocess.Popen(
                [sys.executable, "-m", "tigon.retrieve.server.worker", *arguments], stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(), bound.fileno()), env=environment,
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(
            lambda: WorkerConnection(self.service, place, process), sock=here
        )
        self.connections[place] = connection
        self.greet(connection)
        return connection

    def greet(self, connection: WorkerConnection) -> None:
        """Send a worker its configuration."""
        service = self.service
        hosts = None if service.hosts is None else list(service.hosts)
        connection.send("hello", tuple(service.info), service.key, tuple(service.limits), hosts, len(self.sockets))

    async def _supervise(self, connection: WorkerConnection) -> None:
        """Start another worker whenever a worker exits unexpectedly.

        Raises: WorkerError if workers exit as soon as they are started, or cannot be started.
        """
        place, quick = connection.place, 0
        while True:
            await connection.closed
            status = await asyncio.get_running_loop().run_in_executor(None, connection.process.wait)
            if self.service.draining:
                return
            quick = quick + 1 if time.monotonic() - connection.started < QUICK else 0
            if quick >= TRIES:
                raise WorkerError(f"worker {place} exited {TRIES} times right after its start")
            detail = f"worker {place} exited with status {status}, and is restarted"
            print(f"tigon: retrieve serve: {detail}", file=sys.stderr, flush=True)
            try:
                connection = await self._start(place)
            except OSError as error:
                raise WorkerError(f"worker {place} cannot be restarted: {error.strerror}") from None

    async def _drain(self) -> None:
        """Let requests in flight finish within the grace time, unless there is a second signal."""
        self.service.draining = True
        for connection in self.connections.values():
            if connection.ready.done():
                connection.send("drain", self.delay, self.grace)
            else:
                connection.process.kill()
        again = asyncio.ensure_future(self.signals.get())
        ended = asyncio.gather(*(connection.closed for connection in self.connections.values()))
        await asyncio.wait((again, ended), timeout=self.delay, return_when=asyncio.FIRST_COMPLETED)
        for bound in self.sockets:
            bound.close()
        timeout = self.grace + 2 * PATIENCE  # a worker exits within its grace time by itself, unless it hangs
        await asyncio.wait((again, ended), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
