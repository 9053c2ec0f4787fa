"""hpZ's costs and savings before anything is sharded: GPU memory, and bytes over the links per step.

For M bytes on W ranks in nodes of N, and k micro-steps, a rank gets

    gather over all ranks      M·(W − N) / (W·N) from other nodes        at least: each node gets each missing byte once
    gather in the node         M·(N − 1) / N     from its node           and nothing from others
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

SIDES = ("FSDP2", "FSDP2, N", "hpZ")


@dataclass(frozen=True)
class Plan:
    """The numbers from `plan`, in bytes; printed as a table. By side: "FSDP2", "FSDP2, N" and "hpZ".

    Attributes:
        memory: per rank, by side: weights, gradients, optimizer, second shard, gathered (the root and two layers).
        across: bytes per step that a rank gets from other nodes, by side: forward, backward, and by one reduction.
        inside: the same from its own node.
    """

    parameters: int
    world_size: int
    group_size: int
    micro_steps: int
    memory: dict[str, dict[str, int]]
    across: dict[str, dict[str, int]]
    inside: dict[str, dict[str, int]]

    def __str__(self) -> str:
        nodes = self.world_size // self.group_size
        lines = [
            f"{self.parameters:,} parameters on {self.world_size} GPUs: {nodes} nodes of N = {self.group_size}; "
            f"micro-steps: {self.micro_steps}"
        ]
        for title, table in (
            ("memory per GPU, MiB", self.memory),
            ("to a GPU from other nodes, MiB", self.across),
            ("to a GPU from its node, MiB", self.inside),
        ):
            lines += ["", f"{title:32}" + "".join(f"{side:>12}" for side in SIDES)]
            rows = {row: [table[side][row] for side in SIDES] for row in table[SIDES[0]]}
            for row, values in rows.items():
                lines.append(f"  {row:30}" + "".join(f"{value / 2**20:12,.1f}" for value in values))
        return "\n".join(lines)


def plan(
    model: nn.Module,
    world_size: int,
    group_size: int,
    *,
    micro_steps: int = 1,
    dtype: torch.dtype | None = None,
    optimizer_bytes: float = 8,
) -> Plan:
    """Compute a step's memory and traffic under plain FSDP2, FSDP2 with `reshard_after_forward=group_size` and hpZ.

    Layers are units, as in `apply_hpz`, and the other weights are the root's, which FSDP2 keeps from the forward to the
    backward pass.

    Args:
        model: sharded or not, on any device, including meta.
        world_size, group_size: ranks in total, and per node.
        micro_steps: forward and backward passes per optimizer step.
        dtype: the gathered weights' dtype, `param_dtype` in FSDP2's policy; default: the weights' own.
        optimizer_bytes: state for each trained parameter; 8 for Adam in fp32.
    Returns: Plan.
    Raises: ValueError if group_size does not divide world_size.
    """
    if not 0 < group_size < world_size or world_size % group_size:
        raise ValueError(
            f"plan: group_size must divide world_size, {world_size}, into several equal groups, got {group_size}."
        )
    layers = [_sizes(block.parameters(), world_size, dtype) for block in blocks(model)]
    inner = {id(p) for block in blocks(model) for p in block.parameters()}
    root = _sizes((p for p in model.parameters() if id(p) not in inner), world_size, dtype)
    units = [*layers, root]
    weights, gathered, trained = (sum(unit[i] for unit in units) for i in range(3))
    gradients, in_layers = (sum(unit[3] for unit in units), gathered - root[1])
    kept = {"FSDP2": 0, "FSDP2, N": in_layers // group_size, "hpZ": gathered // group_size + gathered // world_size}
    memory = {
        side: {
            "weights": weights // world_size,
            "gradients": gradients // world_size,
            "optimizer": round(trained * optimizer_bytes / world_size),
            "second shard": kept[side],
            "gathered": root[1] + sum(sorted(layer[1] for layer in layers)[-2:]),
        }
        for side in SIDES
    }
    # Gather counts for everything, and for everything except the root: over all ranks, in the node.
    k = micro_steps
    forward = {"FSDP2": (k, 0), "FSDP2, N": (k, 0), "hpZ": (1, k - 1)}
    backward = {"FSDP2": (k, 0), "FSDP2, N": (0, k), "hpZ": (0, k)}
    across, inside = {}, {}
    for side in SIDES:
        parts = {"forward": (gathered, forward[side]), "backward": (in_layers, backward[side])}
        parts["one reduction"] = gathered, (1, 0)
        from_others = world_size - group_size
        across[side] = {
            name: size * times[0] * from_others // (world_size * group_size) for name, (size, times) in parts.items()
        }
        inside[side] = {
            name: size * times[0] * (world_size - 1) // world_size
            - across[side][name]
            + size * times[1] * (group_size - 1) // group_size
            for name, (size, times) in parts.items()
        }
    count = sum(p.numel() for p in model.parameters())
    return Plan(count, world_size, group_size, micro_steps, memory, across, inside)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members with parameters in the outermost module lists: a model's layers."""
    if isinstance(model, nn.ModuleList):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in blocks(child)]


def _sizes(parameters: object, world: int, dtype: torch.dtype | None) -> tuple[int, int, int, int]:
    """Bytes of weights, bytes gathered, trained parameters and gradient bytes, padded as FSDP2 does."""
    weights = gathered = trained = gradients = 0
    for p in parameters:  # type: ignore[attr-defined]
        # FSDP2 pads the first dimension to a multiple of the rank count.
        rows = math.ceil(p.shape[0] / world) * world if p.ndim else world
        numel = rows * math.prod(p.shape[1:])
        itemsize = dtype.itemsize if dtype is not None and p.is_floating_point() else p.element_size()
        weights += numel * p.element_size()
        gathered += numel * itemsize
        trained += numel * p.requires_grad
        gradients += numel * p.element_size() * p.requires_grad
    return weights, gathered, trained, gradients
