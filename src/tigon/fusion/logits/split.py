"""Split heads: the weight is a DTensor with part of the classes on each device, and every device gathers all logits.

Tigon knows two ways to split a head like this, and accepts no other: torch's `ColwiseParallel(output_layouts=
Replicate())`, which puts hooks around the head's forward, and transformers' "colwise_gather_output", which replaces
the forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_split(t: Any) -> bool:
    return hasattr(t, "device_mesh")


def here(t: Any) -> Any:
    """This device's part of a DTensor, outside autograd."""
    return t._local_tensor if is_split(t) else t


def whole_input(hidden: Any, weight: Any, bias: Any) -> Tensor | None:
    """The hidden states as a plain tensor; None if the head is not split by classes, or the hidden states are split."""
    if weight.device_mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        return None
    if bias is not None and (not is_split(bias) or bias.placements != weight.placements):
        return None
    if not is_split(hidden):
        return hidden  # type: ignore[no-any-return]
    if hidden.device_mesh != weight.device_mesh or not hidden.placements[0].is_replicate():
        return None
    local = hidden.to_local(grad_placements=hidden.placements)
    return local if type(local) is Tensor else local.clone()  # an AsyncCollectiveTensor: clone() waits for the data


def gathered_linear(hidden: Tensor, weight: Any, bias: Any) -> Tensor:
    """The plain logits: the operations that both ways to split a head run, in their order."""
    from torch.distributed.tensor import DTensor, Replicate

    rows = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits = F.linear(rows, weight, bias)
    return logits.redistribute(placements=[Replicate()]).to_local()  # type: ignore[attr-defined, no-any-return]


def on_any_device(flag: Tensor, weight: Any) -> Tensor:
    """Whether `flag` is true on any device that the weight is split over. A collective."""
    import torch.distributed as dist

    count = flag.to(torch.int32)
    dist.all_reduce(count, dist.ReduceOp.MAX, group=weight.device_mesh.get_group())
    return count > 0


def is_gathered(head: nn.Module) -> bool:
    """Whether this head's DTensor logits are gathered and made a plain tensor, with no further processing."""
    hooks = list(head._forward_hooks.values())
    if not hooks:
        patch = vars(head).get("_tigon")
        return is_gathering_forward(vars(head).get("forward") if patch is None else patch.before)
    from torch.distributed.tensor.parallel import ColwiseParallel

    cells = [c.cell_contents for c in getattr(hooks[0], "__closure__", None) or ()]
    after = [c for c in cells if isinstance(c, functools.partial) and c.func is ColwiseParallel._prepare_output_fn]
    if len(hooks) > 1 or len(after) != 1 or len(after[0].args) != 2:
        return False
    placements, local = after[0].args
    return local is True and all(p.is_replicate() for p in placements)


def is_gathering_forward(forward: Any) -> bool:
    """Whether transformers puts this forward in place of a split head's."""
    code = getattr(forward, "__code__", None)
    if code is None or getattr(forward, "__module__", None) != "transformers.distributed.tensor_parallel":
        return False
    cells = dict(zip(code.co_freevars, forward.__closure__ or (), strict=False))
    if not {"self", "original_forward"} <= set(cells):
        return False
    style, inner = cells["self"].cell_contents, cells["original_forward"].cell_contents
    return (
        type(style).__name__ == "ColwiseParallel"
        and type(style).__module__ == forward.__module__
        and getattr(inner, "__func__", None) is nn.Linear.forward
        and all(getattr(style, name).is_replicate() for name in ("input_layouts", "output_layouts"))
        and style.use_local_output is True
    )
