"""The ranks that share an index, and their collective operations."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tigon.data.columns import read_columns
from tigon.ops.targets import CHECKS
from tigon.retrieve.links.links import LinkWeights

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """A process group's ranks, including this process.

    Args:
        name: the beginning of errors.
        mesh: a one-dimensional DeviceMesh, a process group, or None for all ranks.
        device: None for the current GPU if the mesh is on GPUs, else the CPU.

    Raises: ValueError if there is no process group, or if this process is not in the group.
    """

    def __init__(self, name: str, mesh: Any, device: torch.device | str | None) -> None:
        import torch.distributed as dist

        from tigon.losses.head.vocabulary_parallel import process_group

        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(f"{name}: mesh must have an initialised process group: call init_process_group first.")
        self.group: dist.ProcessGroup | None = None if mesh is None else process_group(name, mesh, "mesh")
        self.own, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.own < 0:
            raise ValueError(f"{name}: this process must be a member of mesh, got a process outside mesh.")
        if device is None:
            gpus = "nccl" in dist.get_backend(self.group)
            device = getattr(mesh, "device_type", None) or ("cuda" if gpus else "cpu")
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def gather(self, own: Tensor) -> Tensor:
        """Gather (ranks, …) from each rank's tensor."""
        if self.count == 1 or not own.numel():
            return own.expand(self.count, *own.shape)
        from tigon.losses.head.vocabulary_parallel import all_gather

        gathered = own.new_empty((self.count, *own.shape))
        all_gather(gathered.view(-1), own.view(-1), group=self.group)
        return gathered

    def sum(self, own: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        import torch.distributed as dist

        dist.all_reduce(own, group=self.group)
        return own

    def run_together(self, kind: type[Exception], said: str, step: Callable[[], T]) -> T:
        """Run a step that succeeds or fails on all ranks together. Ranks that did not fail raise kind(said)."""
        error: Exception | None = None
        try:
            result = step()
        except Exception as raised:
            error = raised
        if self.any(error is not None):
            raise error or kind(said)
        return result

    def any(self, here: bool) -> bool:
        """Whether a condition holds on any rank. The host waits for the others."""
        return bool(self.gather(torch.tensor([here], dtype=torch.int32, device=self.device)).any())

    def are_alike(self, content: bytes) -> bool:
        """Whether all ranks have the same content, by its hash."""
        own = torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.int64).to(self.device)
        return bool((self.gather(own) == own).all())

    def check_alike(self, name: str, *arguments: Any) -> None:
        """With TIGON_CHECKS=1: check that all ranks make the same call, with the same arguments.

        Raises: ValueError on all ranks if they do not.
        """
        if not CHECKS:
            return
        if not self.are_alike(pickle.dumps((name, [_to_plain(argument) for argument in arguments]))):
            raise ValueError(f"ShardedIndex.{name}: all ranks must make this call with the same arguments.")


class _OneRank(Ranks):
    """This process alone, without a process group."""

    def __init__(self) -> None:
        self.group, self.own, self.count, self.device = None, 0, 1, torch.device("cpu")


# The rank of an index on one device.
ALONE = _OneRank()


def _to_plain(argument: Any) -> Any:
    """All values in an argument, for a hash."""
    if isinstance(argument, Tensor):
        argument = argument.detach().cpu().contiguous()
        return str(argument.dtype), argument.shape, argument.view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(argument, LinkWeights):
        return str(argument.values), _to_plain(argument.weights)
    if isinstance(argument, np.ndarray) and argument.dtype != object:
        return str(argument.dtype), argument.shape, argument.tobytes()
    if hasattr(argument, "columns"):  # a table that is not a dict
        argument = read_columns("retrieve", argument)[0]
    if isinstance(argument, dict):
        return [(name, _to_plain(value)) for name, value in argument.items()]
    return str(list(argument)) if hasattr(argument, "__len__") else str(argument)
