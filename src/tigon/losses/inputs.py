"""Input parsing shared by the head losses, and the plan for the walk over chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.chunks import Chunks, count_spared_bytes
from tigon.losses.head.fp8 import Fp8Projection
from tigon.losses.head.head import Head, Projection, check_head, parse_head
from tigon.losses.head.vocabulary_parallel import Shards, resolve_shards
from tigon.losses.operator import record
from tigon.ops.linear.chunk_size import chunk_budget
from tigon.ops.shard_statistics import IGNORED
from tigon.ops.targets import checked_target


class HeadInputs(NamedTuple):
    """A head's tensors on this device. Functions that take them skip the checks.

    x: (..., H). weight, bias: this device's classes. target: x.shape[:-1], or None where every row counts; with shards,
    labels as in tigon.ops.shard_statistics. compute: dtype for products.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Any
    shards: Shards | None
    compute: torch.dtype
    ignore_index: int
    softcap: float
    scale: float

    @property
    def classes(self) -> int:
        """V, over all devices."""
        return self.weight.shape[0] if self.shards is None else self.shards.classes

    @property
    def widest(self) -> int:
        """The largest class count on any device, which sizes the chunks, since all devices need the same chunks."""
        return self.weight.shape[0] if self.shards is None else self.shards.widest

    @property
    def rows(self) -> Tensor:
        """x as (N, H)."""
        # Not -1: torch cannot infer the size if the width is 0.
        return self.x.reshape(self.x.shape[:-1].numel(), self.x.shape[-1])

    @property
    def labels(self) -> Any:
        """target as (N,), or None."""
        return None if self.target is None else self.target.reshape(-1).contiguous()

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.compute, torch.float32)


def parse_inputs(
    name: str, x: Tensor, head: Head | Tensor | torch.nn.Linear, target: Tensor | None, ignore_index: int,
    accumulate: str, *, sequences: bool = False, beside: tuple[tuple[str, Tensor | None], ...] = (),
) -> HeadInputs:  # fmt: skip
    """Check a loss's tensors. ValueError for shapes, dtypes and devices that do not fit.

    accumulate: as in `ChunkOptions`. sequences: x must be (S, T, H). beside: as in `check_head`.
    """
    parsed = parse_head(name, head)
    x, weight, bias, target, shards = resolve_shards(
        name, x, parsed.weight, parsed.bias, target, parsed.group, accumulate
    )
    compute = check_head(name, x, weight, bias, sequences=sequences, beside=beside)
    classes = weight.shape[0] if shards is None else shards.classes
    if target is not None:
        target = checked_target(name, target, x.shape[:-1], classes, ignore_index, x.device)
        if shards is not None:
            # This device's labels distinguish "counts, but elsewhere" from "does not count".
            target, ignore_index = shards.labels(target, ignore_index), IGNORED
    softcap, scale = float(parsed.softcap or 0.0), float(parsed.scale)
    return HeadInputs(x, weight, bias, target, shards, compute, ignore_index, softcap, scale)


@record
class WalkPlan(NamedTuple):
    """How a loss walks over a head's rows, as the operator takes the plan.

    budget: logits bytes per chunk. fp32: several chunks' dW are summed in fp32. valid: how many targets count,
    −1 if the host does not know. softcap: 0 for none. fp8: products in FP8.
    """

    compute: torch.dtype
    budget: int
    fp32: bool
    need_dx: bool
    need_dw: bool
    need_db: bool
    valid: int
    ignore_index: int
    softcap: float
    scale: float
    fp8: bool = False

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        return self.need_dx, self.need_dw, self.need_db

    @property
    def acc(self) -> torch.dtype:
        """The dtype for losses and sums."""
        return torch.promote_types(self.compute, torch.float32)

    def count_visited(self, rows: int) -> int:
        """How many of a batch's rows the walk visits at most; on a CPU the walk may count fewer."""
        return rows if self.valid < 0 or self.valid > rows else self.valid


def make_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None, plan: WalkPlan, shards: Shards | None,
    budget: int | None = None, dtype: torch.dtype | None = None,
) -> Chunks:  # fmt: skip
    """The walk over a head's rows. Rows are left out only where the host knows the valid count.

    target: None if every row counts. budget, dtype: for logits, if not the plan's.
    """
    valid = -1 if target is None else plan.valid
    if target is None:
        labels = x.new_zeros(1, dtype=torch.long).expand(x.shape[0])  # one zero serves as all labels
    else:
        labels = target
        if valid < 0 and x.device.type == "cpu":
            valid = int((target != plan.ignore_index).sum())  # on a CPU the count costs no synchronisation
    if plan.fp8:
        head: Projection = Fp8Projection.quantize(x, weight, bias, plan.need_dx)
    else:
        head = Projection.cast(x, weight, bias, plan.compute)
    known = None if valid < 0 else valid
    return Chunks(head, labels, plan.ignore_index, known, plan.budget if budget is None else budget, shards, dtype)


def plan_walk(
    inputs: HeadInputs, chunks: ChunkOptions, valid: int, *, row_bytes: int = 0, one_chunk_saves_dw: bool = False
) -> WalkPlan:
    """Plan a loss's walk.

    Args:
        valid: the number of rows that count, or −1. row_bytes: bytes per class and row, over all logits buffers.
        one_chunk_saves_dw: a single chunk needs no fp32 dW sum, whose bytes then may serve logits.
    """
    x, weight, bias = inputs.x, inputs.weight, inputs.bias
    need_dx, need_dw, need_db = (
        t is not None and t.requires_grad and torch.is_grad_enabled() for t in (x, weight, bias)
    )
    spared = 0
    if need_dw and one_chunk_saves_dw:
        spared = count_spared_bytes(weight, inputs.compute, chunks.accumulate, inputs.widest)
    # Sized by the widest shard: every device has to come to the same chunks.
    rows = inputs.x.shape[:-1].numel() if valid < 0 else valid
    budget = chunk_budget(
        x.device, chunks.chunk_bytes, whole=rows * inputs.widest * row_bytes, spared=spared, frozen=not need_dw
    )
    fp32 = chunks.accumulate == "fp32"
    return WalkPlan(
        inputs.compute, budget, fp32, need_dx, need_dw, need_db, valid, inputs.ignore_index, inputs.softcap,
        inputs.scale, chunks.fp8,
    )  # fmt: skip
