"""The process of a server: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from tigon.retrieve.serve.app import Service


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


def serve(service: Service, host: str, port: int, grace: float = 0.0, said: Any = None) -> None:
    """Answer until a signal comes, then close the service.

    Args:
        said: called with the address when the socket is bound.

    Raises: OSError if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            bound.listen(2048)
            config = uvicorn.Config(
                service, log_level="warning", access_log=False, ws="none", server_header=False, date_header=False,
                timeout_keep_alive=75, backlog=2048,
            )  # fmt: skip
            if said is not None:
                said(bound.getsockname()[1])
            Server(config, service, grace).run(sockets=[bound])
    finally:
        service.close()
