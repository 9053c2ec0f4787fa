"""Hierarchical partitioning: weights sharded over all ranks, with a second shard inside each node.

FSDP2 gathers a layer's weights over all ranks twice in every micro-step, for the forward and for the backward pass.
Weights change once per step. With hpZ the first gather in a step goes over all ranks and leaves a copy, sharded over
the node's GPUs; until the weights change, all later gathers use that copy. Data from other nodes is then gathered once
per k micro-steps rather than 2·k times; the weights are the same bits.

Source: hpZ in ZeRO++, Wang et al. 2023, https://arxiv.org/abs/2306.10209; its race and the fix by synchronising the
host, Dai et al. 2024, https://arxiv.org/abs/2407.01614
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from tigon.training.hpz.gather import NodeGather
from tigon.training.hpz.plan import Plan, blocks, plan

__all__ = ["Hpz", "Plan", "apply_hpz", "plan"]


def apply_hpz(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    group_size: int | Literal["node"] = "node",
    *,
    units: Iterable[nn.Module] | None = None,
    check: bool = True,
    **options: Any,
) -> Hpz:
    """Shard a model with FSDP2, and keep a second shard of the weights in each node.

    Call this instead of `fully_shard` on every layer and on the model, or afterwards on an already sharded model, whose
    units and policies are kept. Losses, gradients and weights are FSDP2's, bit for bit.

    Each unit detects changed weights by steps of any `torch.optim.Optimizer`, and by PyTorch's version counters:
    writing into a parameter, or loading a state dict. `check` catches changes that neither shows (`p.data`,
    `torch._foreach_*` outside an optimizer). All ranks must change their weights together, as FSDP2's own collectives
    require: a single rank that gathers over all ranks would wait for the others.

    Args:
        model: as for FSDP2, or already sharded by FSDP2.
        mesh: 1-D, the ranks that share the weights; default: all. Each group's ranks are consecutive.
        group_size: ranks that share a second shard. "node": as many as there are on each host. 1: each rank keeps all
            weights.
        units: modules that are gathered as a whole, inner modules first; default: the members of the model's outermost
            `nn.ModuleList`s, which are its layers. The rest of the model is another unit.
        check: compare this rank's own weights with the weights that the second shard was made from, on the device, at
            every gather inside the node: an error where they differ. Keeps another copy of those weights.
        options: as for `fully_shard`: mp_policy, offload_policy, …
    Returns: a handle, see Hpz.
    Raises: ValueError if the groups do not divide the mesh, or a parameter cannot have a second shard. RuntimeError if
        this PyTorch's FSDP2 does not accept a custom all-gather.
    """
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise RuntimeError(
            f"apply_hpz: needs an FSDP2 with FSDPModule.set_custom_all_gather, which torch {torch.__version__} lacks."
        )
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator()
        mesh = init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
    if mesh.ndim != 1:
        raise ValueError(
            f"apply_hpz: mesh must have one dimension, the ranks that weights are sharded over, got {mesh.ndim}. If "
            "the mesh has several, pass the sharding dimension: mesh['shard']."
        )
    size = _group_size(mesh, group_size)
    _check_parameters(model, mesh)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        if units is not None or options:
            raise ValueError(
                "apply_hpz: the model is already sharded by fully_shard, with its own units and options; got "
                f"{', '.join(['units'] * (units is not None) + list(options))} besides."
            )
    else:
        for unit in blocks(model) if units is None else units:
            fully_shard(unit, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return Hpz(_attach(model, mesh, size, check), size)


class Hpz:
    """A model's second shards.

    Attributes:
        gathers: one per unit, with `over_all` and `in_node`, how often each kind of gather ran.
        group_size: ranks that share a second shard.
    """

    def __init__(self, gathers: list[NodeGather], group_size: int) -> None:
        self.gathers = gathers
        self.group_size = group_size

    def refresh(self) -> None:
        """Gather over all ranks next time. Call this on all ranks after an undetectable weight change."""
        for gather in self.gathers:
            gather.refresh()

    def release(self) -> None:
        """Free the second shards, if their memory is needed between two steps; the next gathers recreate them."""
        for gather in self.gathers:
            gather.release()

    def __str__(self) -> str:
        over_all, in_node = (sum(getattr(g, name) for g in self.gathers) for name in ("over_all", "in_node"))
        held = sum(g.nbytes for g in self.gathers) / 2**20
        return (
            f"hpZ: {len(self.gathers)} units, groups of {self.group_size} ranks; gathered {over_all} times over all "
            f"ranks, {in_node} times in the group; {held:.1f} MiB in second shards"
        )


def _group_size(mesh: DeviceMesh, group_size: int | Literal["node"]) -> int:
    world = mesh.size()
    if group_size == "node":
        hosts: list[str] = [""] * world
        dist.all_gather_object(hosts, socket.gethostname(), group=mesh.get_group())
        on_each = [len(list(ranks)) for _, ranks in groupby(hosts)]
        if len(set(on_each)) > 1 or len(on_each) != len(set(hosts)):
            raise ValueError(
                f'apply_hpz: group_size="node" needs equally many ranks on each host, adjacent in the mesh, got '
                f"{on_each} ranks in mesh order. Pass a number that divides {world}."
            )
        if len(on_each) == 1:
            raise ValueError(
                f'apply_hpz: group_size="node", and all {world} ranks are on one host: there is no traffic between '
                "nodes to save. Use fully_shard alone, or pass a number to try hpZ."
            )
        return on_each[0]
    if not isinstance(group_size, int) or isinstance(group_size, bool):
        raise ValueError(f'apply_hpz: group_size must be "node" or a number of ranks, got {group_size!r}.')
    if not 0 < group_size < world or world % group_size:
        raise ValueError(
            f"apply_hpz: group_size must divide the {world} ranks of the mesh into several equal groups, got "
            f"{group_size}."
        )
    return group_size


def _check_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, p in model.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        if hasattr(local, "fsdp_pre_all_gather"):
            raise ValueError(
                f"apply_hpz: {name} is a {type(local).__name__}, which recomputes the gathered data (for example "
                "float8) before each gather; the second shard would be stale. Gather the parameter in a "
                "floating-point dtype, or do not use hpZ."
            )
        if isinstance(p, DTensor) and p.device_mesh != mesh:
            raise ValueError(
                f"apply_hpz: {name} is a DTensor over {p.device_mesh}, not over the given mesh {mesh}. "
                "hpZ supports weights sharded by FSDP2 alone, not tensor-parallel weights."
            )


def _attach(model: nn.Module, mesh: DeviceMesh, size: int, check: bool) -> list[NodeGather]:
    """Give every unit in the model its own NodeGather."""
    ranks, world = mesh.mesh.tolist(), mesh.get_group()
    first = mesh.get_local_rank() // size * size
    # Each group is created only by the members, once for all units: NCCL's communicators hold memory.
    node = dist.new_group(ranks[first : first + size], use_local_synchronization=True, group_desc="hpz_node")
    handle = getattr(torch, mesh.device_type)
    side = handle.Stream()
    gathers = []
    for modules, parameters in _units(model):
        gathers.append(NodeGather(parameters, world, node, handle, side, check))
        modules[0].set_custom_all_gather(gathers[-1])
    alive = weakref.WeakSet(gathers)

    # Fused and foreach optimizers do not advance the version counters of DTensors.
    def after_step(*_: Any) -> None:
        for gather in alive:
            gather.refresh()

    weakref.finalize(model, register_optimizer_step_post_hook(after_step).remove)
    return gathers


def _units(model: nn.Module) -> list[tuple[list[Any], list[tuple[nn.Module, str]]]]:
    """A unit that fully_shard gathers as a whole: the modules, and where the parameters are registered."""
    units: dict[int, tuple[list[Any], list[tuple[nn.Module, str]]]] = {}

    def walk(module: nn.Module, above: int | None) -> None:
        if isinstance(module, FSDPModule):
            # fully_shard([norm, head]) gives both the same state, and gathers them together.
            above = id(fully_shard.state(module))  # type: ignore[attr-defined]
            units.setdefault(above, ([], []))[0].append(module)
        if above is not None:
            units[above][1].extend((module, name) for name, p in module._parameters.items() if p is not None)
        for child in module.children():
            walk(child, above)

    walk(model, None)
    return [unit for unit in units.values() if unit[1]]
