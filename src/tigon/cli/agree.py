"""The processes of a run compare their options before they depend on each other.

A process with other options would train another model, or make the others wait until a timeout. The processes compare
through the launcher's store, which needs no GPU and no process group.
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
# The store is kept alive: its server ends with the first process's store, and other processes may already be connected
# to make their group.
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
    """Wait for all processes of the run, and compare their values. With one process there is nothing to do.

    Args:
        mine: values that every process must have alike, by the names that the user knows them by; JSON.
        problem: the reason why this process cannot go on; None if it can.
        Raises: Problem, in every process, naming the first difference and its process, or the problem of one process.
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
    """How often the launcher has restarted the processes because one of them ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_again(cpu: bool) -> None:
    """Make the process group of a run that was restarted.

    The launcher keeps its store, which still has the old processes' addresses: the new ones go under another prefix.
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
    # The first process may hold the store, so it must not end before the others have read the store or have ended.
    deadline = time.monotonic() + PATIENCE.seconds
    while rank == 0 and store.add("read", 0) < world and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
