"""The processes of a run compare what they were given, before they depend on each other.

One that differs would otherwise train another model, or wait for the others until a timeout. Through the launcher's
store, which needs no GPU and no process group.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
import time
from typing import Any

from tigon.cli.problem import Problem

PATIENCE = datetime.timedelta(seconds=300)
_asked = 0
# Kept: with the first process's ends the server, to which others may have come already to make their group.
_kept: Any = None


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def versions() -> dict[str, str]:
    import torch
    import transformers

    from tigon import __version__

    found = {"tigon": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**found, "Python": platform.python_version()}


def agree(mine: dict[str, Any], problem: Problem | None = None) -> None:
    """Wait for all processes of the run; nothing to do where there is one.

    Args:
        mine: what has to be the same everywhere, by what the user calls it; JSON.
        problem: why this process cannot go on.
    Raises: Problem, in every process, naming the first difference and whose it is, or the problem of one of them.
    """
    if processes() == 1:
        if problem is not None:
            raise problem
        return
    told = {"host": socket.gethostname(), "mine": mine, "problem": None if problem is None else str(problem)}
    everyone = _exchange(json.dumps(told, default=str))
    if problem is not None:
        raise problem
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other["problem"]:
            raise Problem(f"rank {rank} ({other['host']}) cannot go on: {other['problem']}")
        for what in dict.fromkeys((*first["mine"], *other["mine"])):
            one, another = first["mine"].get(what), other["mine"].get(what)
            if one != another:
                raise Problem(
                    f"the processes of this run disagree: {what} is {one} on rank 0 ({first['host']}) and {another} on "
                    f"rank {rank} ({other['host']})"
                )


def restarts() -> int:
    """How often the launcher has started the processes again, because one of them ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_again(cpu: bool) -> None:
    """Make the process group of a run that was started again.

    The launcher keeps its store, and in it the addresses of the processes before: those of now go under another prefix.
    """
    import torch

    dist: Any = torch.distributed
    if processes() > 1 and restarts() and not dist.is_initialized():
        store, rank, world = next(dist.rendezvous("env://", timeout=PATIENCE))
        store = dist.PrefixStore(f"tigon/{restarts()}/group", store)
        dist.init_process_group("gloo" if cpu else "nccl", store=store, rank=rank, world_size=world)


def _exchange(text: str) -> list[dict[str, Any]]:
    import torch

    global _asked, _kept
    dist: Any = torch.distributed
    _asked += 1
    _kept = _kept or next(dist.rendezvous("env://", timeout=PATIENCE))
    store, rank, world = _kept
    store = dist.PrefixStore(f"tigon/{restarts()}/{_asked}", store)
    store.set(str(rank), text)
    found = []
    try:
        for other in range(world):
            try:
                found.append(json.loads(store.get(str(other))))
            except RuntimeError as error:
                raise Problem(f"rank {other} has not come within {PATIENCE.seconds} s of rank {rank}") from error
    finally:
        store.add("read", 1)
    # The first process may keep the store, and must not end before the others have read it, or are gone.
    deadline = time.monotonic() + PATIENCE.seconds
    while rank == 0 and store.add("read", 0) < world and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
