"""Count the collectives that a piece of code runs, by ranks and pass, and the bytes that each brings to a rank.

with count_traffic() as traffic:
    loss = model(**batch).loss
    loss.backward()
traffic.count_bytes("all_gather", backward=True)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# By operator in torch.ops.c10d: the collective's name, and the position of the argument with all ranks' data.
WHOLE = {"_allgather_base_": ("all_gather", 0), "_reduce_scatter_base_": ("reduce_scatter", 1)}


@dataclass(frozen=True)
class Collective:
    """One call. received: bytes that a rank gets from other ranks, each byte once: all but the rank's own part."""

    name: str
    ranks: tuple[int, ...]
    backward: bool
    received: int


class Traffic(TorchDispatchMode):
    """Attributes: calls, the collectives that have run, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []

    def count_bytes(
        self, name: str | None = None, *, ranks: tuple[int, ...] | None = None, backward: bool | None = None
    ) -> int:
        """Bytes that this rank received, in all collectives or in some.

        Args:
            name: a collective, such as "all_gather_into_tensor"; None for all.
            ranks: a process group's ranks; None for all groups.
            backward: True for the backward pass, False for the rest, None for both.
        """
        return sum(
            call.received
            for call in self.calls
            if name in (None, call.name) and ranks in (None, call.ranks) and backward in (None, call.backward)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (collective := WHOLE.get(func._schema.name.split("::")[1])):
            name, whole = collective
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(group))
            others = args[whole].nbytes // len(ranks) * (len(ranks) - 1)
            self.calls.append(Collective(name, ranks, torch._C._current_graph_task_id() != -1, others))
        return func(*args, **(kwargs or {}))


def count_traffic() -> Traffic:
    """A context that counts this rank's gathers and reduce-scatters of the kinds that FSDP2 runs, whoever runs them.

    Returns: Traffic. Gathers into tensor lists, all-reduces and broadcasts are not counted.
    """
    return Traffic()
