"""What the processes that run the examples find around them."""

import os
import socket

import pytest

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session")
def environment():
    """A user's: without the interpreter, and no part of a distributed run that the tests are started in.

    Where a process group is made nevertheless, it meets at a port of its own: others may run at the same time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", *LAUNCHER)}
    return plain | {"MASTER_PORT": str(port)}
