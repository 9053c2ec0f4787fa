"""What is sharded; and norms on DTensors, as sequence parallelism makes them: each rank's rows, on local memory.

A norm works on rows in the last dimension, so a tensor that is sharded along any other dimension, or replicated, needs
no data from other ranks. The weight is replicated; each rank's rows give a partial weight gradient, which DTensor sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def is_dtensor(x: Any) -> bool:
    if type(x) in (Tensor, nn.Parameter) or not hasattr(x, "device_mesh"):  # the common case, without an import
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def find_class(module: Any) -> type:
    """The class of a module before FSDP2's `fully_shard`, which derives another from it with the same forward."""
    kind = type(module)
    first, *others = kind.__bases__
    return others[0] if len(others) == 1 and _is_of_torch(first, "FSDPModule") else kind


def is_alone_in_shards(module: Any) -> bool:
    """Whether a module is an FSDP unit by itself whose weights are not gathered now."""
    if find_class(module) is not type(module):
        return any(map(is_dtensor, module.parameters()))
    return _is_of_torch(type(module), "FullyShardedDataParallel")


def list_inside_fsdp(model: nn.Module) -> set[nn.Module]:
    """The modules inside units of FSDP, whether their weights are gathered now or not."""
    names = ("FSDPModule", "FullyShardedDataParallel")
    units = [m for m in model.modules() if any(_is_of_torch(kind, name) for kind in type(m).__mro__ for name in names)]
    return {m for unit in units for m in unit.modules()}


def _is_of_torch(kind: type, name: str) -> bool:  # by its name, since an import of FSDP takes long
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed.")


def rows_are_whole(x: Any, *parameters: Any) -> bool:
    """Whether each rank has whole rows in the DTensor x, and all parameters."""
    from torch.distributed.tensor import Replicate

    def whole(t: Any) -> bool:
        if t is None or not is_dtensor(t):
            return t is None
        return t.device_mesh == x.device_mesh and all(isinstance(p, Replicate) for p in t.placements)

    last = x.dim() - 1
    placed = all(isinstance(p, Replicate) or (p.is_shard() and p.dim not in (last, -1)) for p in x.placements)
    return placed and all(map(whole, parameters))


def on_own_rows(norm: Callable[..., Tensor], x: Any, *parameters: Any) -> Tensor:
    """norm(x, *parameters) on DTensors for which `rows_are_whole`, with x's placements."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = x.device_mesh, x.placements
    summed = [Replicate() if isinstance(p, Replicate) else Partial() for p in placements]
    own = [None if p is None else p.to_local(grad_placements=summed) for p in parameters]
    y = norm(x.to_local(), *own)
    return DTensor.from_local(y, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())
