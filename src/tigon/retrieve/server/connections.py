"""uvicorn with limits on connections: their number, the size of request heads, and time limits for clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tigon.retrieve.server.requests import Limits

MAX_HEAD = 1 << 16  # bytes
IDLE = 75  # seconds that an idle connection stays open
SPARE_FILES = 256  # a process's open files that are not connections
PATIENCE = 2  # seconds for handlers to end after their connections were closed


class Config(uvicorn.Config):
    """uvicorn settings for an application, in a worker or in the index process."""

    def __init__(self, application: Any, limits: Limits, grace: float = 0.0) -> None:
        super().__init__(
            application, http=Protocol, ws="none", log_level="warning", access_log=False, server_header=False,
            date_header=False, timeout_keep_alive=IDLE, backlog=2048,
        )  # fmt: skip
        self.limits, self.grace = limits, grace
        files = _max_open_files()
        self.max_connections = max(1, min(limits.max_connections, files - min(SPARE_FILES, files // 2)))


def _max_open_files() -> int:
    """The limit on this process's open files."""
    try:
        import resource
    except ImportError:  # not on Windows
        return sys.maxsize
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if files == resource.RLIM_INFINITY else files


class Protocol(HttpToolsProtocol):
    """A connection that answers 431 to a large head, 408 to a request that arrives too slowly, and 503 beyond the
    connection limit; and that is closed if its client does not read.
    """

    config: Config

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.active_cycle: Any = None  # being answered by the application
        self.head_bytes = 0  # in an incomplete head, without the piece of data in which the head started
        # The incomplete request at the last check, since when it has been incomplete, and since when responses are not
        # read.
        self.incomplete: Any = None
        self.incomplete_since = self.loop.time()
        self.unread_since: float | None = None
        limit = self.config.max_connections
        if len(self.connections) > limit:
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"the server has {limit:,} connections already.")

    def connection_lost(self, error: Exception | None) -> None:
        # uvicorn notifies only the last pipelined request, and the active request would continue writing.
        if self.active_cycle is not None:
            self.active_cycle.disconnected = True
        super().connection_lost(error)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.active_cycle = cycle
        HttpToolsProtocol._start_asgi_task(self, cycle, app)

    def data_received(self, data: bytes) -> None:
        head = self.scope if self.is_in_head() else None
        HttpToolsProtocol.data_received(self, data)
        if self.is_in_head():
            # The piece in which a head starts may hold other requests.
            self.head_bytes = self.head_bytes + len(data) if self.scope is head else 0
            if self.head_bytes > MAX_HEAD:
                self.refuse_head()
        elif (head is not None or len(data) > MAX_HEAD) and self.is_head_large():
            self.refuse_head()

    def is_in_head(self) -> bool:
        """Whether a request has started whose head is incomplete."""
        return self.scope is not None and (self.cycle is None or self.cycle.scope is not self.scope)

    def is_head_large(self) -> bool:
        return (
            self.scope is not None
            and len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD
        )

    def is_waiting(self) -> bool:
        """Whether the server waits for the client: for the rest of a request, or for the first request."""
        cycle = self.cycle
        if cycle is None or self.is_in_head():
            return True
        if cycle.response_complete:  # otherwise uvicorn's own timer waits for the next request
            return self.timeout_keep_alive_task is None
        return bool(cycle.more_body)

    def refuse_head(self) -> None:
        sentence = f"a request's head must be at most {MAX_HEAD:,} bytes."
        self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, sentence)

    def send_400_response(self, msg: str) -> None:
        if self.is_head_large():  # uvicorn cannot read such a path
            self.refuse_head()
        else:
            self.refuse(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request.")

    def refuse(self, status: HTTPStatus, sentence: str) -> None:
        """Answer an incomplete request, if no response has started, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            content = to_json({"detail": sentence})
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
        self.transport.close()

    def check(self, now: float) -> None:
        """Close the connection if its client takes too long."""
        limit = now - self.config.limits.request_timeout
        if not self.transport.get_write_buffer_size():
            self.unread_since = None
        elif self.unread_since is None:
            self.unread_since = now
        elif self.unread_since < limit:
            self.transport.abort()
            return
        if self.incomplete is not self.scope:
            self.incomplete, self.incomplete_since = self.scope, now
        # While the application does not read, the delay is not the client's.
        if not self.is_waiting() or self.flow.read_paused:
            self.incomplete_since = now
        elif self.incomplete_since < limit:
            if self.scope is None:  # nothing received
                self.transport.close()
            else:
                sentence = f"the request did not arrive within {self.config.limits.request_timeout:g} s."
                self.refuse(HTTPStatus.REQUEST_TIMEOUT, sentence)


class Server(uvicorn.Server):
    """A server that stops within its configured grace time, whatever its clients do. Signals are not handled here.

    ready: called when requests are answered.
    """

    config: Config
    should_exit: bool

    def __init__(self, config: Config, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self.ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # each second
            now = asyncio.get_running_loop().time()
            connections: Any = list(self.server_state.connections)
            for connection in connections:
                connection.check(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Handlers end with their connections; a handler that hangs is cancelled.
        self.config.timeout_graceful_shutdown = math.ceil(self.config.grace) + PATIENCE
        asyncio.get_running_loop().call_later(self.config.grace, self.close_connections)
        await super().shutdown(sockets)

    def close_connections(self) -> None:
        """Close all connections, whatever their clients do."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def freeze_garbage() -> None:
    """Before requests arrive: exempt all present objects from garbage collection, which takes tens of milliseconds."""
    gc.collect()
    gc.freeze()


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run an event loop: uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
