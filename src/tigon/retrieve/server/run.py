"""Server processes: sockets, signals, shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from tigon.retrieve.server.connections import Config, Server, freeze_garbage, run_loop
from tigon.retrieve.server.service import Service
from tigon.retrieve.server.worker_pool import WorkerPool

# Python's thread switch interval in seconds. Beside the search thread, the event loop would wait 5 ms, Python's
# default, in each iteration.
SWITCH_INTERVAL = 2e-4
GRACE = 10.0


async def _run(service: Service, sockets: list[socket.socket], delay: float, grace: float, ready: Any) -> None:
    """Serve in this process until a signal, then shut down as described in `serve`."""
    loop = asyncio.get_running_loop()
    server = Server(Config(service, service.limits, grace), ready)

    def end() -> None:
        if service.draining:  # a second signal
            server.should_exit = server.force_exit = True
            server.close_connections()
            return
        service.draining = True
        loop.call_later(delay, setattr, server, "should_exit", True)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
    await server.serve(sockets)


def serve(
    service: Service, host: str, port: int, delay: float = 0.0, started: Callable[[int], None] | None = None,
    workers: int = 0, grace: float = GRACE,
) -> None:  # fmt: skip
    """Answer requests until a signal arrives, then close the service.

    Args:
        delay: seconds after the signal during which new requests are refused before the port closes, so that a load
            balancer polling /health notices.
        started: called with the port when requests are answered.
        grace: seconds from then on in which requests are still answered; slower clients are disconnected. A second
            signal stops the server at once.
        workers: processes that handle HTTP in front of this process; 0 or 1: this process does.

    Raises: OSError if the address cannot be bound; `worker_pool.WorkerError` if workers exit as soon as they are
        started.
    """
    sockets: list[socket.socket] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        sockets = bind_sockets(host, port, workers if workers > 1 else 1)
        port = sockets[0].getsockname()[1]

        def call_started() -> None:
            if started is not None:
                started(port)

        if workers > 1:
            run_loop(WorkerPool(service, sockets, delay, grace).run(call_started))
        else:
            freeze_garbage()
            run_loop(_run(service, sockets, delay, grace, call_started))
    finally:
        for each in sockets:
            each.close()
        service.close()
        sys.setswitchinterval(interval)


def bind_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Listening sockets on one port, among which the system distributes connections."""
    first = _bind_socket(host, port, shared=False)  # fails where another process listens, unlike a shared socket
    if count == 1:
        first.listen(2048)
        return [first]
    port = first.getsockname()[1]
    first.close()
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(_bind_socket(host, port, shared=True))
            sockets[-1].listen(2048)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def _bind_socket(host: str, port: int, shared: bool) -> socket.socket:
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
