"""A process in front of that of the index: it reads and writes HTTP and JSON, and has neither torch nor an index.

    python -m tigon.retrieve.serve.front LINK SOCKET NUMBER        # file descriptors; `engine.Fronts` starts it

It refuses what does not fit, and sends searches that come together as one frame. It obeys the process of the index, not
signals, and ends with it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tigon.retrieve.serve import frames, messages
from tigon.retrieve.serve.application import AGAIN, LONG_FILTER, About, Application, Limits, Reply
from tigon.retrieve.serve.connections import Config, Server
from tigon.retrieve.serve.messages import Answer, Array, Wrong

# Seconds between two frames of searches. A search by itself is sent at once. uvloop counts whole
# milliseconds, and takes half of one for none.
HOLD = 1e-3
COUNTS = 1.0  # seconds between two tallies, so that what was counted is not lost with a front


class Asked(NamedTuple):
    """A search that is not answered yet."""

    answer: asyncio.Future[Answer]
    queries: int
    k: int
    query: Array | None = None  # until it is sent, and so on
    ks: list[int] | None = None
    wheres: list[str | None] | None = None
    strict: bool = False


class Front(Application):
    """What a front answers. link: to the process of the index. fronts: how many there are."""

    def __init__(self, hello: dict[str, Any], link: asyncio.Transport) -> None:
        pages = {path: Reply(200, content.encode(), kind.encode()) for path, (kind, content) in hello["pages"].items()}
        super().__init__(About(*hello["about"]), hello["key"], Limits(*hello["limits"]), pages, hello["hosts"])
        self.fronts, self.link = hello["fronts"], link
        self.loop = asyncio.get_running_loop()
        self.posts = {path: partial(self.call, path) for path in hello["posts"]}
        self.posts["/upsert"] = self.upsert
        self.gets = {path: partial(self.call, path) for path in hello["gets"]}
        self.searches: dict[int, Asked] = {}
        self.calls: dict[int, asyncio.Future[Reply]] = {}
        self.queries = 0  # of searches
        self._held: list[int] = []
        self._number = 0
        self._sent = 0.0
        self._waits = False

    def _next(self) -> int:
        self._number = self._number % 0x7FFFFFFF + 1
        return self._number

    # -------------------------------------------------------------------------------------------------------- searches

    async def check_filters(self, wheres: set[str], strict: bool) -> None:
        """The process of the index checks them, with the search."""

    def ask(self, query: Array, ks: list[int], wheres: list[str | None], strict: bool) -> asyncio.Future[Answer]:
        count = len(query)
        # The process of the index counts those of all fronts; two searches it has begun. This holds if it hangs.
        if self.queries + count > self.limits.queue + 2 * self.limits.batch:
            waits = f"{self.queries:,} queries wait, and {count:,} more are beyond {self.limits.queue:,}"
            raise Wrong(429, f"{waits}.", AGAIN)
        answer: asyncio.Future[Answer] = self.loop.create_future()
        number = self._next()
        self.searches[number] = Asked(answer, count, max(ks), query, ks, wheres, strict)
        self.queries += count
        self._held.append(number)
        if not self._waits:
            self._waits = True
            left = self._sent + HOLD - self.loop.time()
            if left > 0:
                self.loop.call_later(left, self._send)
            else:
                self.loop.call_soon(self._send)
        return answer

    def _send(self) -> None:
        """What is held, as frames of searches that can be one."""
        self._waits = False
        self._sent = self.loop.time()
        alike: dict[Any, list[int]] = {}
        for number in self._held:
            asked = self.searches[number]
            assert asked.query is not None
            # A filter that takes long to compile delays no other search.
            alone = number if sum(len(where) for where in asked.wheres or () if where) > LONG_FILTER else 0
            alike.setdefault((asked.query.dtype, asked.strict, alone), []).append(number)
        self._held.clear()
        for (_, strict, _), numbers in alike.items():
            while numbers:
                together = 0
                size = 0
                for number in numbers:
                    size += self.searches[number].queries
                    if together and size > self.limits.batch:
                        break
                    together += 1
                self._send_one(numbers[:together], strict)
                del numbers[:together]

    def _send_one(self, numbers: list[int], strict: bool) -> None:
        queries: list[Array] = []
        ks: list[int] = []
        wheres: list[str | None] = []
        counts = []
        for number in numbers:
            asked = self.searches[number]
            assert asked.query is not None
            assert asked.ks is not None
            assert asked.wheres is not None
            queries.append(asked.query)
            ks += asked.ks
            wheres += asked.wheres
            counts.append(asked.queries)
            self.searches[number] = asked._replace(query=None, ks=None, wheres=None)
        query = queries[0] if len(queries) == 1 else np.concatenate(queries)
        self.link.write(frames.Search(numbers, counts, query, ks, wheres, strict).packed())

    def forget(self, asked: asyncio.Future[Answer]) -> None:
        asked.cancel()
        number = next(number for number, other in self.searches.items() if other.answer is asked)
        if number in self._held:
            self._held.remove(number)
        else:
            self.link.write(frames.frame(frames.CANCEL, number))
        self.queries -= self.searches.pop(number).queries

    def is_crowded(self) -> bool:
        # The others have about as many; of them two searches have begun, and one waits to be.
        return self.queries * self.fronts > 3 * self.limits.batch

    def found(self, body: memoryview) -> None:
        """Answers have come."""
        found = frames.Found.of(body)
        start = 0
        for number, count in zip(found.numbers, found.counts, strict=True):
            rows = slice(start, start + count)
            start = rows.stop
            asked = self.searches.pop(number, None)
            if asked is None:  # its client went away
                continue
            self.queries -= count
            if not asked.answer.done():
                k = asked.k
                asked.answer.set_result(Answer(found.scores[rows, :k], found.ids[rows, :k], found.exact[rows]))

    def refused(self, refusal: dict[str, Any]) -> None:
        """Searches were refused."""
        for number in refusal["numbers"]:
            asked = self.searches.pop(number, None)
            if asked is None:
                continue
            self.queries -= asked.queries
            if not asked.answer.done():
                headers = frames.headers_of(refusal["headers"])
                asked.answer.set_exception(Wrong(refusal["status"], refusal["sentence"], headers))

    # ------------------------------------------------------------------------------------------------------- the others

    async def encoded(
        self, body: messages.SearchBody, tensors: dict[str, Array], content: bytes, binary: bool, receive: Any
    ) -> Reply:
        return await self.call("/search", content, binary)

    async def upsert(self, content: bytes, binary: bool) -> Reply:
        """Numbers of a JSON body are read here, and sent as tensors."""
        if not binary:
            body, tensors = await self.read(messages.UpsertBody, content, binary)
            if body.vectors:
                tensors["vectors"] = self.matrix(body.vectors)
            if "vectors" in tensors:
                content = await self.off_loop(len(content), _pack_items, body, tensors)
                binary = True
        return await self.call("/upsert", content, binary)

    async def call(self, path: str, content: bytes, binary: bool) -> Reply:
        """What the process of the index answers."""
        number = self._next()
        reply = self.calls[number] = self.loop.create_future()
        self.link.write(frames.call(number, path, content, binary))
        try:
            return await reply
        finally:
            del self.calls[number]

    def count(self, number: int = 0) -> None:
        """Send what was counted. number: of the frame that asked for it."""
        self.link.write(frames.of_json(frames.COUNTED, self.tally.take(), number))


def _pack_items(body: messages.UpsertBody, tensors: dict[str, Array]) -> bytes:
    fields: dict[str, Any] = {"table": body.table}
    if "ids" not in tensors:
        fields["ids"] = body.ids
        if body.ids and isinstance(body.ids[0], int) and all(-(2**63) <= id < 2**63 for id in body.ids):
            tensors["ids"] = np.array(fields.pop("ids"), dtype=np.int64)
    return messages.packed(tensors, fields)


class Link(asyncio.Protocol):
    """The front's end of the socket to the process of the index."""

    def __init__(self, number: int) -> None:
        self.number, self.stream = number, frames.Frames()
        self.front: Front | None = None
        self.server: Server | None = None
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.ended = False  # as it was told to
        self.closed = loop.create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for kind, number, body in self.stream.feed(data):
            if kind == frames.HELLO:
                self.hello.set_result(json.loads(bytes(body)))
                continue
            front = self.front
            assert front is not None
            if kind == frames.FOUND:
                front.found(body)
            elif kind == frames.REFUSED:
                front.refused(json.loads(bytes(body)))
            elif kind == frames.REPLIED:
                reply = front.calls.get(number)
                if reply is not None and not reply.done():
                    reply.set_result(frames.reply_of(body))
            elif kind == frames.COUNT:
                front.count(number)
            elif kind == frames.DRAIN:
                front.draining = True
                delay, grace = json.loads(bytes(body))
                asyncio.get_running_loop().call_later(delay, self._end, grace)

    def _end(self, grace: float) -> None:
        assert self.server is not None
        self.server.config.grace = grace
        self.server.should_exit = True  # uvicorn closes the port, and waits for what is not answered yet

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)
        if not self.ended:
            if self.number == 0:
                said = "tigon: retrieve serve: the process that holds the index has ended, and so do its fronts"
                print(said, file=sys.stderr, flush=True)
            os._exit(1)  # nothing can be answered


async def _serve(link: int, bound: int, number: int) -> None:
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_unix_connection(lambda: Link(number), sock=socket.socket(fileno=link))
    front = protocol.front = Front(await protocol.hello, protocol.transport)
    ready = frames.frame(frames.READY, 0)
    server = protocol.server = Server(Config(front, front.limits), lambda: protocol.transport.write(ready))

    def count() -> None:
        if front.tally:
            front.count()
        loop.call_later(COUNTS, count)

    loop.call_later(COUNTS, count)
    settle()
    await server.serve(sockets=[socket.socket(fileno=bound)])
    front.count()
    protocol.ended = True
    protocol.transport.close()
    await protocol.closed  # what was written is sent


def settle() -> None:
    """Before requests come: what is there by now is never looked through for garbage again, which takes tens of
    milliseconds."""
    gc.collect()
    gc.freeze()


def run(main: Any) -> None:
    """An event loop: uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they may be sent to all processes of a group
        signal.signal(ignored, signal.SIG_IGN)
    run(_serve(*map(int, sys.argv[1:4])))
