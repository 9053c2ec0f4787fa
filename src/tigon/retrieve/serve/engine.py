"""The process of the index behind fronts: their frames, what becomes of them, and the processes themselves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tigon
from tigon.retrieve.ids import StringIds
from tigon.retrieve.serve import frames
from tigon.retrieve.serve.app import Service
from tigon.retrieve.serve.application import LONG_FILTER, Reply
from tigon.retrieve.serve.front import settle
from tigon.retrieve.serve.messages import Answer, Array
from tigon.retrieve.serve.waiting import Waiting

PATIENCE = 2.0  # seconds that /metrics waits for the fronts' tallies
QUICK, TRIES = 1.0, 3  # a front that ends within QUICK seconds is started again, but for the third time in a row


class Broken(RuntimeError):
    """Fronts do not run."""


class Together(Waiting):
    """Requests of one frame. numbers, counts: of each, as the front knows it, and how many queries it has."""

    __slots__ = ("counts", "numbers")
    keys = True

    def __init__(self, search: frames.Search, answer: asyncio.Future[Answer]) -> None:
        super().__init__(search.query, search.ks, search.wheres, answer)
        self.numbers, self.counts = search.numbers, search.counts

    def of_query(self) -> Array:
        """The place of the request that a query belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class Link(asyncio.Protocol):
    """The index's end of the socket to a front, number `place`."""

    def __init__(self, fronts: Fronts, place: int, process: subprocess.Popen[bytes]) -> None:
        self.fronts, self.place, self.process = fronts, place, process
        self.service, self.gate = fronts.service, fronts.service.gate
        self.stream = frames.Frames()
        self.begun = time.monotonic()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[bool] = loop.create_future()  # False: it ended before
        self.closed: asyncio.Future[None] = loop.create_future()
        self.counted: dict[int, asyncio.Future[None]] = {}
        self.waiting: set[Together] = set()
        self.answers: list[frames.Found] = []  # of this turn of the loop
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for waiting in self.waiting:
            waiting.answer.cancel()
        for counted in self.counted.values():
            if not counted.done():
                counted.set_result(None)
        if not self.ready.done():
            self.ready.set_result(False)
        self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        searches: list[frames.Search] = []
        for kind, number, body in self.stream.feed(data):
            if kind == frames.SEARCH:
                searches.append(frames.Search.of(body, self.service.about.dim))
                continue
            self._search_all(searches)
            if kind == frames.CALL:
                self._start(self.answer(number, *frames.called(body)))
            elif kind == frames.CANCEL:
                self.cancel(number)
            elif kind == frames.COUNTED:
                self.service.tally.add(json.loads(bytes(body)))
                if (counted := self.counted.get(number)) is not None and not counted.done():
                    counted.set_result(None)
            elif kind == frames.READY and not self.ready.done():
                self.ready.set_result(True)
        self._search_all(searches)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _search_all(self, searches: list[frames.Search]) -> None:
        """The more there is to do, the more frames come at once, and are one."""
        if not searches:
            return
        quick: list[frames.Search] = []
        for search in searches:
            distinct = {where for where in search.wheres if where is not None}
            attributes = self.service.index.table.attributes
            new = {where for where in distinct if not attributes.is_compiled(where, search.strict)}
            if sum(map(len, new)) > LONG_FILTER:
                self._start(self._search_compiled(search, new))
            else:
                quick.append(search)
        searches.clear()
        for search in frames.joined(quick, self.gate.batcher.most):
            self.search(search)

    async def _search_compiled(self, search: frames.Search, new: set[str]) -> None:
        """Search when filters that take long are compiled."""
        wrong = await self.service.compile_filters(new, search.strict)
        self.search(search, new, wrong)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    # -------------------------------------------------------------------------------------------------------- searches

    def search(
        self, search: frames.Search, compiled: Collection[str] = (), errors: Mapping[str | None, Exception] = {}
    ) -> None:
        """Search for the requests of a frame. compiled: filters that were checked before. errors: what was found."""
        wrong = dict(errors)
        for where in set(search.wheres).difference(compiled):
            try:
                self.gate.check(where, search.strict)
            except Exception as error:
                wrong[where] = error
        waiting = Together(search, asyncio.get_running_loop().create_future())
        if wrong:
            self._refuse_filters(waiting, wrong)
        if len(waiting.query) > (room := self.gate.room()):
            within = np.cumsum(waiting.counts) <= room
            said = f"{self.gate.queries:,} queries wait, and more are beyond {self.gate.batcher.queue:,}."
            numbers = [number for number, fits in zip(waiting.numbers, within, strict=True) if not fits]
            self._say(numbers, 429, said, [["retry-after", "1"]])
            _keep(waiting, within)
        if waiting.numbers:
            self._put(waiting)

    def _put(self, waiting: Together) -> None:
        self.waiting.add(waiting)
        waiting.answer.add_done_callback(lambda answer: self._done(waiting, answer))
        self.gate.put(waiting)

    def _refuse_filters(self, waiting: Together, wrong: dict[str | None, Exception]) -> None:
        kept = np.ones(len(waiting.counts), dtype=bool)
        for request, where in zip(waiting.of_query().tolist(), waiting.where, strict=True):
            if kept[request] and where in wrong:
                kept[request] = False
                self._refuse([waiting.numbers[request]], wrong[where])
        _keep(waiting, kept)

    def _refuse(self, numbers: list[int], error: BaseException) -> None:
        reply = self._reply(error)
        self._say(numbers, reply.status, json.loads(reply.content)["detail"], frames.about_of(reply)[1])

    def _say(self, numbers: list[int], status: int, sentence: str, headers: list[list[str]]) -> None:
        said = {"numbers": numbers, "status": status, "sentence": sentence, "headers": headers}
        self.write(frames.of_json(frames.REFUSED, said))

    def _reply(self, error: BaseException) -> Reply:
        try:
            assert isinstance(error, Exception)
            return self.service.refusal(error)
        except Exception:
            traceback.print_exception(error)
            return Reply(500, b'{"detail":"Internal Server Error"}')

    def _done(self, waiting: Together, answer: asyncio.Future[Answer]) -> None:
        self.waiting.discard(waiting)
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            found = answer.result()
            ids, names = found.ids, None
            known = self.service.index.table.directory.ids
            if isinstance(known, StringIds):
                ids, names = known.cut(found.ids)
            if not self.answers:
                asyncio.get_running_loop().call_soon(self._send)
            self.answers.append(frames.Found(waiting.numbers, waiting.counts, found.scores, ids, found.exact, names))
        elif len(waiting.numbers) == 1:
            self._refuse(waiting.numbers, error)
        else:  # one by one, so that what is wrong with one is not wrong with all
            of_query = waiting.of_query()
            for request in range(len(waiting.numbers)):
                loop = asyncio.get_running_loop()
                alone = Together(frames.Search(waiting.numbers, waiting.counts, waiting.query, waiting.k,
                    waiting.where, False), loop.create_future())  # fmt: skip
                _keep(alone, np.arange(len(waiting.numbers)) == request, of_query)
                self._put(alone)

    def _send(self) -> None:
        """All answers of a search."""
        for found in frames.Found.joined(self.answers):
            self.write(found.packed())
        self.answers.clear()

    def cancel(self, number: int) -> None:
        """The client of a request went away."""
        waiting = next((one for one in self.waiting if number in one.numbers), None)
        if waiting is None:
            return
        kept = np.array([other != number for other in waiting.numbers])
        if self.gate.keep(waiting, kept[waiting.of_query()]):
            _keep_requests(waiting, kept)
            if not waiting.numbers:
                waiting.answer.cancel()

    # ------------------------------------------------------------------------------------------------------- the others

    async def answer(self, number: int, path: str, content: bytes, binary: bool) -> None:
        service = self.service
        try:
            if path == "/search":  # of texts
                reply = await service.search(content, binary)
            else:
                reply = await (service.posts.get(path) or service.gets[path])(content, binary)
        except Exception as error:
            reply = self._reply(error)
        self.write(frames.replied(number, reply))

    async def count(self, number: int) -> None:
        """The front's tally, added to the service's."""
        counted = self.counted[number] = asyncio.get_running_loop().create_future()
        self.write(frames.frame(frames.COUNT, number))
        await asyncio.wait([counted], timeout=PATIENCE)
        del self.counted[number]


def _keep(waiting: Together, kept: Array, of_query: Array | None = None) -> None:
    """Leave requests out that are False in kept, before they wait."""
    rows = kept[waiting.of_query() if of_query is None else of_query]
    waiting.query = waiting.query[rows]
    waiting.k = [k for k, there in zip(waiting.k, rows, strict=True) if there]
    waiting.where = [where for where, there in zip(waiting.where, rows, strict=True) if there]
    _keep_requests(waiting, kept)


def _keep_requests(waiting: Together, kept: Array) -> None:
    waiting.numbers = [number for number, there in zip(waiting.numbers, kept, strict=True) if there]
    waiting.counts = [count for count, there in zip(waiting.counts, kept, strict=True) if there]


class Fronts:
    """The processes in front of a service.

    Args:
        service: that is served. sockets: a listening one for each front. delay, grace: as of `running.serve`.
    """

    def __init__(self, service: Service, sockets: list[socket.socket], delay: float, grace: float) -> None:
        self.service, self.sockets, self.delay, self.grace = service, sockets, delay, grace
        self.links: dict[int, Link] = {}
        self.restarts: set[asyncio.Task[None]] = set()
        self._quick = [0] * len(sockets)
        self._count = 0
        service.gets["/metrics"] = self.metrics

    def _hello(self) -> bytes:
        service = self.service
        pages = {path: [page.kind.decode(), page.content.decode()] for path, page in service.pages.items()}
        return frames.of_json(frames.HELLO, {
            "about": service.about, "key": service.key, "limits": service.limits, "pages": pages,
            "posts": list(service.posts), "gets": list(service.gets), "fronts": len(self.sockets),
            "hosts": service.hosts,
        })  # fmt: skip

    async def run(self, said: Any) -> None:
        """Serve until a signal, then end as told in `running.serve`.

        Raises: Broken if fronts do not run.
        """
        loop = asyncio.get_running_loop()
        self.signals: asyncio.Queue[int] = asyncio.Queue()
        self.failed: asyncio.Future[str] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signals.put_nowait, number)
        try:
            places = range(len(self.sockets))
            links = await asyncio.gather(*(self._start(place) for place in places))
            ready = asyncio.gather(*(link.ready for link in links))
            signaled = asyncio.ensure_future(self.signals.get())
            await asyncio.wait((signaled, ready), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                return
            if not all(ready.result()):
                raise Broken("a front ended before it was ready; what it said stands above")
            for link in links:
                self._watch(link)
            settle()
            said()
            await asyncio.wait((signaled, self.failed), return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise Broken(self.failed.result())
            await self._drain()
        finally:
            self.service.draining = True
            for link in self.links.values():
                try:
                    link.process.wait(PATIENCE if link.closed.done() else 0)
                except subprocess.TimeoutExpired:
                    link.process.kill()
                    link.process.wait()

    async def _start(self, place: int) -> Link:
        here, there = socket.socketpair()
        bound = self.sockets[place]
        root = str(Path(tigon.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with there:
            arguments = map(str, (there.fileno(), bound.fileno(), place))
            process = subprocess.Popen(
                [sys.executable, "-m", "tigon.retrieve.serve.front", *arguments], stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(), bound.fileno()), env=environment,
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: Link(self, place, process), sock=here)
        self.links[place] = link
        link.write(self._hello())
        return link

    def _watch(self, link: Link) -> None:
        task = asyncio.ensure_future(self._restart(link))
        self.restarts.add(task)
        task.add_done_callback(self.restarts.discard)

    async def _restart(self, link: Link) -> None:
        """Start another front when one ends that should not."""
        await link.closed
        status = await asyncio.get_running_loop().run_in_executor(None, link.process.wait)
        if self.service.draining:
            return
        self._quick[link.place] = self._quick[link.place] + 1 if time.monotonic() - link.begun < QUICK else 0
        if self._quick[link.place] >= TRIES:
            if not self.failed.done():
                self.failed.set_result(f"front {link.place} ended {TRIES} times as soon as it was started")
            return
        said = f"front {link.place} ended with status {status}, and is started again"
        print(f"tigon: retrieve serve: {said}", file=sys.stderr, flush=True)
        try:
            self._watch(await self._start(link.place))
        except OSError as error:
            self.failed.set_result(f"front {link.place} cannot be started again: {error.strerror}")

    async def _drain(self) -> None:
        """Let all that is in flight be answered within the grace time, unless there is a second signal."""
        self.service.draining = True
        for link in self.links.values():
            if link.ready.done():
                link.write(frames.of_json(frames.DRAIN, [self.delay, self.grace]))
            else:
                link.process.kill()
        again = asyncio.ensure_future(self.signals.get())
        ended = asyncio.gather(*(link.closed for link in self.links.values()))
        await asyncio.wait((again, ended), timeout=self.delay, return_when=asyncio.FIRST_COMPLETED)
        for bound in self.sockets:
            bound.close()
        timeout = self.grace + 2 * PATIENCE  # a front ends within its grace time by itself, unless it hangs
        await asyncio.wait((again, ended), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    async def metrics(self, content: bytes = b"", binary: bool = False) -> Reply:
        """The service's counters, with what all fronts have counted."""
        self._count += 1
        links = [link for link in self.links.values() if link.ready.done() and not link.closed.done()]
        await asyncio.gather(*(link.count(self._count) for link in links))
        return await self.service.metrics()
