"""Vocabulary-parallel losses: the head's classes are split over several devices.

Each device in a group holds consecutive weight rows, and all tokens of x. The local classes' logits stay on the device.
The devices exchange

    once per token chunk       3 to 5 numbers a token, the statistics from tigon.ops.shard_statistics; in distillation
                               others, twice (tigon.losses.distillation.heads)
    once per token chunk       the devices' dx sum, while the chunk's dw is computed

dW needs nothing from other devices. `linear_logprob` sends all tokens' numbers at once, 5 in fp32 from each device, and
a token loss those for a part: both need all of them before the gradient.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tigon.kernels import check_tensors
from tigon.losses.head.head import Projection
from tigon.ops.linear.padded_product import product_into
from tigon.ops.shard_statistics import local_labels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Shard sizes by weight: exchanging sizes makes the host wait for the device.
# Weak keys: a freed weight drops its entry, and a new tensor at the same address is not mistaken for it.
_SIZES: Any = WeakTensorKeyDictionary()


class PendingTensor(NamedTuple):
    """A tensor that a collective is filling. Holding source and work keeps both alive until `wait`."""

    value: Tensor
    work: Any
    source: Tensor | None = None

    def wait(self) -> Tensor:
        """The tensor, for work queued from now on. On a GPU the stream waits, and the host does not."""
        self.work.wait()
        return self.value


class Shards(NamedTuple):
    """This device's classes, and collectives with the devices that hold the other classes.

    sizes: class counts in rank order. wide: dx is summed over the devices in fp32, and rounded once.
    """

    group: ProcessGroup
    rank: int
    sizes: tuple[int, ...]
    wide: bool = True

    @property
    def classes(self) -> int:
        return sum(self.sizes)

    @property
    def widest(self) -> int:
        """The largest class count on any device, which sizes the chunks, since all devices need the same chunks."""
        # Not the local shard: ranks with different chunk counts would call different numbers of collectives, and hang.
        return max(self.sizes)

    @property
    def first(self) -> int:
        """This device's first global class index."""
        return sum(self.sizes[: self.rank])

    def describe(self) -> str:
        """For error messages: which ranks have how many classes."""
        import torch.distributed as dist

        return f"{self.sizes} classes on ranks {tuple(dist.get_process_group_ranks(self.group))}"

    def labels(self, target: Tensor, ignore_index: int) -> Tensor:
        """Global targets as this device's labels (`tigon.ops.shard_statistics`)."""
        # int64, whatever the targets' dtype: a narrow unsigned dtype could not hold the negative marks.
        return local_labels(target, ignore_index, self.first, self.sizes[self.rank], self.classes)

    def gather(self, own: Tensor) -> PendingTensor:
        """Gather all devices' (M, K), dense: (devices, M, K)."""
        world = len(self.sizes)
        # A gather, not a reduction: each rank adds the parts in rank order, and all get the same bits.
        parts = own.new_empty(world * own.shape[0], *own.shape[1:])
        work = all_gather(parts, own, group=self.group, async_op=True)
        # `own` is held too: the allocator does not know that the collective's stream still reads it.
        return PendingTensor(parts.view(world, *own.shape), work, own)

    def sum(self, t: Tensor) -> PendingTensor:
        """Replace t, dense, by its sum over the devices."""
        import torch.distributed as dist

        return PendingTensor(t, dist.all_reduce(t, group=self.group, async_op=True))


class InputGradient:
    """dx (N, H), chunk by chunk: a product with the chunk's dlogits, and a sum over the devices.

    A chunk's sum travels until the next chunk arrives, while the device computes the chunk's share of dw.
    """

    def __init__(self, head: Projection, shards: Shards | None) -> None:
        self.head, self.shards = head, shards
        self._on_the_way: tuple[PendingTensor, Tensor | slice, Tensor] | None = None

    def add(
        self, dx: Tensor, rows: Tensor | slice, dlogits: Tensor, more: tuple[Tensor, Tensor, float] | None = None
    ) -> None:
        """dx[rows] = dlogits W. `more` = (a, b, alpha) adds alpha · a b."""
        # `apart`: rows are an index where ignored rows are left out, and a product cannot write to scattered rows.
        dtype, apart = dx.dtype, isinstance(rows, Tensor)
        if self.shards is not None and self.shards.wide:
            # fp32 on the wire, 4 bytes a number: rounding each rank's share to bf16 first would more than double dx's
            # error.
            dtype = torch.promote_types(dtype, torch.float32)
        own = dx.new_empty(dlogits.shape[0], dx.shape[1], dtype=dtype) if apart or dtype != dx.dtype else dx[rows]
        self.head.input_gradient(dlogits, own)
        if more is not None and dtype == dx.dtype:
            # An adapter's share enters before the sum over ranks: each rank has different rows of B, and so a different
            # share.
            own.addmm_(more[0], more[1], alpha=more[2])
        elif more is not None:
            product_into(own, more[0] * more[2], more[1], first=False)
        if self.shards is not None:
            self.flush()
            self._on_the_way = self.shards.sum(own), rows, dx
        elif isinstance(rows, Tensor):
            dx.index_copy_(0, rows, own)

    def flush(self) -> None:
        """Write the pending chunk. Call this at the end of a walk."""
        if self._on_the_way is None:
            return
        sum_, rows, dx = self._on_the_way
        # A wide sum is rounded once, here: rounding shares before they are added doubles dx's error.
        here = sum_.wait()
        if isinstance(rows, Tensor):
            dx.index_copy_(0, rows, here.to(dx.dtype))
        elif here.dtype != dx.dtype:
            dx[rows].copy_(here)
        self._on_the_way = None


def is_sharded(weight: Any, group: Any) -> bool:
    # hasattr avoids importing torch.distributed.tensor in a process that never uses DTensors.
    return group is not None or hasattr(weight, "device_mesh")


def resolve_shards(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None, group: Any, accumulate: str
) -> tuple[Tensor, Tensor, Tensor | None, Any, Shards | None]:
    """This device's plain tensors, and their `Shards`, None if a single device holds all classes.

    Args:
        weight, bias: DTensors with Shard(0) on a one-dimensional mesh; or plain tensors, with `group`.
        x: replicated; or a DTensor on the same mesh, Replicate, or Shard on a token dimension.
        target: as x, but whole everywhere.
        group: a ProcessGroup or a one-dimensional DeviceMesh.
        accumulate: "fp32" or "weight": how dx is summed over the devices.
    """
    check_tensors(name, x=x, weight=weight, bias=bias, target=target)
    if not is_sharded(weight, group):
        return x, weight, bias, target, None
    if torch.compiler.is_compiling():  # which breaks its graph at the call, or passes this on with fullgraph=True
        raise ValueError(f"{name}: collective operations are not traced: call the loss outside torch.compile.")
    wide = accumulate == "fp32"
    if hasattr(weight, "device_mesh"):
        return _resolve_dtensors(name, x, weight, bias, target, group, wide)
    for argument, t in (("x", x), ("bias", bias), ("target", target)):
        if hasattr(t, "device_mesh"):
            raise ValueError(f"{name}: {argument} must be a plain tensor beside a plain weight, got a DTensor.")
    group = process_group(name, group)
    import torch.distributed as dist

    if weight.dim() != 2:
        raise ValueError(f"{name}: weight must be (V, H), got {tuple(weight.shape)}.")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{name}: this process must be a member of the group, which it is not.")
    sizes = _exchange_sizes(weight, group)
    # A group with a single rank takes the plain path: no collective, and torch.compile's operator.
    return x, weight, bias, target, Shards(group, rank, sizes, wide) if len(sizes) > 1 else None


def _resolve_dtensors(
    name: str, x: Any, weight: Any, bias: Any, target: Any, group: Any, wide: bool
) -> tuple[Tensor, Tensor, Tensor | None, Any, Shards | None]:
    from torch.distributed.tensor import Replicate

    # One dimension only: the mesh's group is then the group for every collective here.
    mesh = weight.device_mesh
    if mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        raise ValueError(
            f"{name}: weight must be Shard(0), rows of classes, on a 1-d mesh, got "
            f"{tuple(weight.placements)} on {mesh.ndim}: gather it with full_tensor()."
        )
    if group is not None and process_group(name, group) is not mesh.get_group():
        raise ValueError(f"{name}: group must be left out beside a DTensor, which says where its shards are.")
    if bias is not None and (not hasattr(bias, "device_mesh") or bias.placements != weight.placements):
        raise ValueError(f"{name}: bias must be a DTensor that is Shard(0), as the weight is.")
    if hasattr(x, "device_mesh"):
        if x.device_mesh != mesh or x.placements[0].is_shard(x.dim() - 1):
            raise ValueError(
                f"{name}: x must be on the weight's mesh, whole or split by tokens, got {tuple(x.placements)} on "
                f"{x.device_mesh}."
            )
        # dx is the whole sum here: for a split sequence, each device takes its tokens.
        x = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
    if hasattr(target, "device_mesh"):
        target = target.full_tensor()
    world, V = mesh.size(), weight.shape[0]
    chunk = -(-V // world)
    sizes = tuple(max(0, min(V, (r + 1) * chunk) - r * chunk) for r in range(world))  # as torch.chunk
    local, rank = weight.to_local(), mesh.get_local_rank()
    # An uneven layout would silently give wrong global indices.
    if local.shape[0] != sizes[rank]:
        raise ValueError(f"{name}: weight must be split as torch.chunk splits {V} rows, got {local.shape[0]}.")
    bias = None if bias is None else bias.to_local()
    return x, local, bias, target, Shards(mesh.get_group(), rank, sizes, wide) if world > 1 else None


def localize_adapter(name: str, a: Any, b: Any) -> tuple[Tensor | None, Tensor | None]:
    """An adapter's factors on this device: all of A, and the rows of B for this device's classes."""
    if hasattr(a, "device_mesh"):
        from torch.distributed.tensor import Replicate

        if any(not placement.is_replicate() for placement in a.placements):
            raise ValueError(f"{name}: lora A must be whole on every device, got {tuple(a.placements)}.")
        # The returned gradient is the whole sum on every rank: `linear_logprob` sums dA over the ranks.
        a = a.to_local(grad_placements=[Replicate()] * a.device_mesh.ndim)
    return a, b.to_local() if hasattr(b, "device_mesh") else b


def process_group(name: str, group: Any, argument: str = "group") -> ProcessGroup:
    """A one-dimensional mesh's group, or the group itself."""
    if not hasattr(group, "get_group"):
        return group  # type: ignore[no-any-return]
    if group.ndim != 1:
        raise ValueError(f"{name}: {argument} must be a 1-d mesh, got {group.ndim}: take one dimension.")
    return group.get_group()  # type: ignore[no-any-return]


def _exchange_sizes(weight: Tensor, group: ProcessGroup) -> tuple[int, ...]:
    """Class counts by device. The ranks exchange sizes when they first see a weight."""
    import torch.distributed as dist

    # The local size is part of the check: a resized weight has new sizes everywhere.
    known = _SIZES.get(weight)
    # The group too: the same weight may be used under two groups, whose ranks differ.
    if known is not None and known[0] is group and known[1] == weight.shape[0]:
        return known[2]  # type: ignore[no-any-return]
    world = dist.get_world_size(group)
    found = torch.empty(world, dtype=torch.int64, device=weight.device)
    # Blocking, once per weight: the sizes decide the host's loop, so the host has to have them.
    all_gather(found, torch.full((1,), weight.shape[0], device=weight.device), group=group)
    sizes = tuple(found.tolist())
    _SIZES[weight] = group, weight.shape[0], sizes
    return sizes


def all_gather(out: Tensor, own: Tensor, **options: Any) -> Any:
    """Gather all ranks' tensors into out, in rank order."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return gather(out, own, **options)
