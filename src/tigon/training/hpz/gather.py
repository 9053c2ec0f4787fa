"""A unit's all-gather, over all ranks when the weights have changed, and inside the node otherwise.

After the first gather of W rows, R = world / group rows are copied to this rank's second shard. A node's ranks together
hold all W rows in order, so that gathering the second shards reproduces the first gather's result.

Four orders must hold between three streams: FSDP2's stream for copies into the gather, its gather stream, and a side
stream for the second shard.

    gather over all ranks   →  copy into the second shard       the side stream follows the gather
    copy                    →  gather of the second shard       ZeRO++ leaves this one out: the race
    copy                    →  reuse of the memory copied from  the same event, waited for by the stream that allocates
    gather of the shard     →  the next copy into it            the side stream follows the gather

All orders are enforced by events, for which the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

STALE = (
    "tigon.training.hpz: weights have changed without notice (writes through p.data, torch._foreach_* outside "
    "of an optimizer): call refresh() on the result of apply_hpz after changing weights."
)
# Weights are compared as bits, so that NaN equals itself.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NodeGather:
    """FSDP2's all-gather interface (`FSDPModule.set_custom_all_gather`) for one unit's weights.

    Args:
        parameters: where the unit's weights are registered: module and name.
        world, node: the groups of ranks that share the weights, and those that share a second shard.
        handle: the device module: `torch.cuda`, `torch.cpu`.
        side: the stream for copies into second shards.
        check: compare this rank's own weights with those that the second shard was made from.
    """

    def __init__(
        self, parameters: Sequence[tuple[nn.Module, str]], world: Any, node: Any, handle: Any, side: Any, check: bool
    ) -> None:
        self.parameters, self.world, self.node = parameters, world, node
        self.handle, self.side, self.check = handle, side, check
        self.over_all = self.in_node = 0
        self.copied = handle.Event()
        self.allocating = handle.current_stream()
        self.shard: Tensor | None = None
        self.own: Tensor | None = None
        self.made_from: tuple[Any, ...] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocating = self.handle.current_stream()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather every rank's input_tensor, (n,), into output_tensor, (W·n,)."""
        if group.group_name != self.world.group_name:  # for a smaller mesh: reshard_after_forward=8
            return _all_gather(output_tensor, input_tensor, group, async_op)
        current, weights = self.handle.current_stream(), self._weights()
        if self.made_from == weights:
            self.in_node += 1
            self._after_copy(current)
            if self.check:
                torch._assert_async(_same(input_tensor, self.own), STALE)
            work = _all_gather(output_tensor, self.shard, self.node, async_op)
            self._side_follows(current, work)
        else:
            self.over_all += 1
            work = _all_gather(output_tensor, input_tensor, group, async_op)
            self._side_follows(current, work)
            self._keep(output_tensor, input_tensor)
            # FSDP2 frees the copy's source without knowing about the copy.
            self._after_copy(self.allocating)
            self.made_from = weights
        return work

    def refresh(self) -> None:
        self.made_from = None

    def release(self) -> None:
        # Safe to free: the shards were allocated on the side stream, whose later work follows their last gather.
        self.made_from = self.shard = self.own = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.shard, self.own) if x is not None)

    def _keep(self, output: Tensor, own: Tensor) -> None:
        """Copy this rank's rows from the result, and with `check` its weights, on the side stream."""
        numel = output.numel() // self.node.size()
        with self.handle.stream(self.side):
            if self.shard is None or self.shard.numel() != numel or self.shard.dtype != output.dtype:
                self.shard = _empty(numel, output)
                self.own = _empty(own.numel(), output) if self.check else None
            _copy(self.shard, output.narrow(0, numel * self.node.rank(), numel))
            if self.own is not None:
                _copy(self.own, own)
            self.copied.record(self.side)

    def _after_copy(self, stream: Any) -> None:
        """Order all later work on this stream after the copy into the second shard."""
        stream.wait_event(self.copied)

    def _side_follows(self, current: Any, work: Any) -> None:
        if work is None:
            self.side.wait_stream(current)
        else:  # the backend's own stream, which the current stream does not order
            with self.handle.stream(self.side):
                work.wait()

    def _weights(self) -> tuple[Any, ...]:
        """A fingerprint of the weights: the registered tensors, their memory, and their version counters."""
        fingerprint: list[Any] = []
        for module, name in self.parameters:
            p = module._parameters[name]
            assert p is not None
            local = p.to_local() if isinstance(p, DTensor) else p
            # A write into a DTensor raises only its own counter, a write into the local tensor only that tensor's.
            fingerprint += (id(p), p._version, local.data_ptr(), local._version)
        return tuple(fingerprint)


# A separate function, so that tests can delay, corrupt and emulate gathers.


def _all_gather(output: Tensor, x: Tensor | None, group: Any, async_op: bool) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    return gather(output, x, group=group, async_op=async_op)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _empty(numel: int, like: Tensor) -> Tensor:
    return torch.empty(numel, dtype=like.dtype, device=like.device)


def _same(x: Tensor, y: Tensor | None) -> Tensor:
    assert y is not None
    bits = BITS[x.element_size()]
    return (x.view(bits) == y.view(bits)).all()
