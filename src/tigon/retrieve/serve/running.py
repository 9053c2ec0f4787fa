"""The processes of a server: sockets, signals, end."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from tigon.retrieve.serve.app import Service
from tigon.retrieve.serve.engine import Fronts
from tigon.retrieve.serve.front import config_of, run, settle

# Seconds after which a thread lets another one have the interpreter. Beside that of the batcher the loop of requests
# would wait 5 ms, Python's default, in each of its turns.
SWITCH = 2e-4


class Server(uvicorn.Server):
    """Takes nothing new from the first signal on, and ends when all is answered, or at the second signal.

    Args:
        service: that is served. grace: seconds in which a signal is answered by refusals before the socket closes, so
            that a load balancer that asks /health hears of it.
    """

    def __init__(self, config: uvicorn.Config, service: Service, grace: float = 0.0) -> None:
        super().__init__(config)
        self.service, self.grace = service, grace
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.should_exit: bool

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.service.draining or self._loop is None or not self.started:
            super().handle_exit(sig, frame)
            return
        self.service.draining = True
        self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await asyncio.sleep(self.grace)
        self.should_exit = True  # uvicorn closes the port, and waits for what is not answered yet


def serve(
    service: Service, host: str, port: int, grace: float = 0.0, said: Callable[[int], None] | None = None,
    workers: int = 0,
) -> None:  # fmt: skip
    """Answer until a signal comes, then close the service.

    Args:
        said: called with the port when requests are answered.
        workers: processes that read and write HTTP, in front of this one; 0 or 1: this one does.

    Raises: OSError if the address cannot be had; `engine.Broken` if fronts end as soon as they are started.
    """
    sockets: list[socket.socket] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        sockets = _bound(host, port, workers if workers > 1 else 1)
        port = sockets[0].getsockname()[1]

        def begun() -> None:
            if said is not None:
                said(port)

        if workers > 1:
            run(Fronts(service, sockets, grace).run(begun))
        else:
            settle()
            begun()
            Server(config_of(service), service, grace).run(sockets=sockets)
    finally:
        for each in sockets:
            each.close()
        service.close()
        sys.setswitchinterval(before)


def _bound(host: str, port: int, count: int) -> list[socket.socket]:
    """Listening sockets of one port, among which the system deals out connections."""
    first = _socket(host, port, shared=False)  # fails where another process listens, as a shared one may not
    if count == 1:
        first.listen(2048)
        return [first]
    port = first.getsockname()[1]
    first.close()
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(_socket(host, port, shared=True))
            sockets[-1].listen(2048)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def _socket(host: str, port: int, shared: bool) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
