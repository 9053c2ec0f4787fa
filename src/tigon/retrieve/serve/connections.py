"""uvicorn with limits on connections: how many there are, how large their heads are, and how long clients may take."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tigon.retrieve.serve.application import Limits

LARGEST_HEAD = 1 << 16
IDLE = 75  # seconds that a connection stays open without a request
SPARE = 256  # files of a process that are no connections
PATIENCE = 2  # seconds in which handlers end whose connections were closed


class Config(uvicorn.Config):
    """How uvicorn serves an application, in a worker or beside the index."""

    def __init__(self, application: Any, limits: Limits, grace: float = 0.0) -> None:
        super().__init__(
            application, http=Protocol, ws="none", log_level="warning", access_log=False, server_header=False,
            date_header=False, timeout_keep_alive=IDLE, backlog=2048,
        )  # fmt: skip
        self.limits, self.grace = limits, grace
        files = _open_files()
        self.most = max(1, min(limits.connections, files - min(SPARE, files // 2)))


def _open_files() -> int:
    """How many files this process may have open."""
    try:
        import resource
    except ImportError:  # not on Windows
        return sys.maxsize
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if files == resource.RLIM_INFINITY else files


class Protocol(HttpToolsProtocol):
    """A connection that answers 431 to a large head, 408 to a request that takes too long to come, and 503 if there are
    too many; and that is closed if its client does not read."""

    config: Config

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.answering: Any = None
        self.received = 0  # bytes since the last head was whole
        # The request that was not whole when it was last looked at, since when, and since when answers wait.
        self.seen: Any = None
        self.since = self.loop.time()
        self.unread_since: float | None = None
        if len(self.connections) > self.config.most:
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"the server has {self.config.most:,} connections already.")

    def connection_lost(self, error: Exception | None) -> None:
        # uvicorn tells the last of several pipelined requests alone, and the one that is answered would write on.
        if self.answering is not None:
            self.answering.disconnected = True
        super().connection_lost(error)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.answering = cycle
        HttpToolsProtocol._start_asgi_task(self, cycle, app)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        HttpToolsProtocol.data_received(self, data)
        if not self.is_in_head():
            if self.received > LARGEST_HEAD and self.is_head_large():
                self.refuse_head()
            self.received = 0
        elif self.received > LARGEST_HEAD:
            self.refuse_head()

    def is_in_head(self) -> bool:
        """Whether a request has begun whose head is not whole."""
        return self.scope is not None and (self.cycle is None or self.cycle.scope is not self.scope)

    def is_head_large(self) -> bool:
        return (
            self.scope is not None
            and len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > LARGEST_HEAD
        )

    def is_waiting(self) -> bool:
        """Whether something of a request is still to come that was begun, or should have been."""
        cycle = self.cycle
        if cycle is None or self.is_in_head():
            return True
        if cycle.response_complete:  # otherwise uvicorn's own timer waits for the next request
            return self.timeout_keep_alive_task is None
        return bool(cycle.more_body)

    def refuse_head(self) -> None:
        sentence = f"a request's head must be at most {LARGEST_HEAD:,} bytes."
        self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, sentence)

    def send_400_response(self, msg: str) -> None:
        if self.received > LARGEST_HEAD and self.is_head_large():  # uvicorn cannot read such a path
            self.refuse_head()
        else:
            self.refuse(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1.")

    def refuse(self, status: HTTPStatus, sentence: str) -> None:
        """Answer what is no whole request, if no answer has begun, and close the connection."""
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
        if self.seen is not self.scope:
            self.seen, self.since = self.scope, now
        # While the application does not read, the client is not to blame.
        if not self.is_waiting() or self.flow.read_paused:
            self.since = now
        elif self.since < limit:
            if self.scope is None:  # it has sent nothing
                self.transport.close()
            else:
                sentence = f"the request did not come within {self.config.limits.request_timeout:g} s."
                self.refuse(HTTPStatus.REQUEST_TIMEOUT, sentence)


class Server(uvicorn.Server):
    """A server that ends within the grace time of its configuration, whatever its clients do. Another object handles
    signals.

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
        # Handlers end with their connections; one that hangs is cancelled.
        self.config.timeout_graceful_shutdown = math.ceil(self.config.grace) + PATIENCE
        asyncio.get_running_loop().call_later(self.config.grace, self.close_connections)
        await super().shutdown(sockets)

    def close_connections(self) -> None:
        """Close all connections, whatever their clients do."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
