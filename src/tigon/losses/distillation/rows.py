"""A chunk's rows on a device, and launches with a program per row."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tigon.kernels import launch, next_power_of_2
from tigon.losses.distillation.formula import Formula, Hard
from tigon.ops.shard_statistics import local_labels


class TopK(NamedTuple):
    """Each row's K likeliest classes under a teacher, from a server or a data set.

    Args:
        ids: (..., K), integers: the classes, each at most once a row; global indices for split heads.
        logprobs: (..., K), any float dtype: log-probabilities among all V classes, at the loss's temperature: they are
            not softened here. An entry with -inf counts as not given, whatever the id.
    """

    ids: Tensor
    logprobs: Tensor

    def select(self, part: slice) -> TopK:
        return TopK(self.ids[part], self.logprobs[part])


class Rows(NamedTuple):
    """A chunk's M rows: the student's logits, and buffers for the results.

    Args:
        logits: (M, V), this device's V classes, unit stride along V: scratch memory, which the gradient overwrites.
        labels: (M,), dense, or None where every row counts. Over several devices, tigon.ops.shard_statistics labels.
        soft, hard: (M,), dense, for the losses; hard is None without cross entropy. Their dtype is the compute dtype.
        factor: 0-d factor on the gradient, or None for 1.
    """

    logits: Tensor
    labels: Tensor | None
    soft: Tensor
    hard: Tensor | None
    factor: Tensor | None

    @property
    def wide(self) -> Tensor:
        """The logits in the results' dtype."""
        return self.logits.to(self.soft.dtype)

    def select(self, part: slice) -> Rows:
        labels = None if self.labels is None else self.labels[part]
        hard = None if self.hard is None else self.hard[part]
        return Rows(self.logits[part], labels, self.soft[part], hard, self.factor)

    def with_local_labels(self, formula: Formula) -> Rows:
        """The rows on a device that has all classes, with tigon.ops.shard_statistics labels."""
        if self.labels is None:
            return self
        V = self.logits.shape[1]
        return self._replace(labels=local_labels(self.labels, formula.ignore_index, 0, V, V))

    def write(self, soft: Tensor | None, hard: Tensor | None, gradient: Tensor | None) -> None:
        """Write the torch path's results, those that are not None."""
        if soft is not None:
            self.soft.copy_(soft)
        if self.hard is not None and hard is not None:
            self.hard.copy_(hard)
        if gradient is not None:
            self.logits.copy_(gradient if self.factor is None else gradient * self.factor)


def launch_rows(
    kernel: Any, rows: Rows, formula: Formula, tensors: tuple[Tensor | None, ...], arguments: tuple[Any, ...], *,
    least: int = 4, hard: bool = True,
) -> None:  # fmt: skip
    """Launch a kernel with a program per row. arguments: those after the tensors, up to DEPTH and BLOCK.

    least: warps for a short row. hard: False for a kernel that leaves the cross entropy to others.
    """
    M, V = rows.logits.shape

    def plan() -> tuple[int, tuple[Any, ...], dict[str, int]]:
        warps, depth, block = _tile(V, formula, least, hard)
        return M, (*arguments, depth, block), {"num_warps": warps}

    launch(kernel, (M, formula, arguments, tuple(t if t is None else t.dtype for t in tensors)), tensors, plan)


def _tile(V: int, formula: Formula, least: int, hard: bool) -> tuple[int, int, int]:
    """Warps, blocks folded at a time, and columns per block.

    Many warps a row keep few rows in flight, so that the L2 cache serves more of a row's second read.
    """
    capped, apart = any(formula.caps), hard and formula.hard is Hard.APART
    # At 16 warps a thread has 128 registers; given classes with a softcap and a second softmax need more.
    most = 8 if formula.rest and capped and apart else 16
    warps = least if V <= 8192 else most
    block = min(next_power_of_2(V), warps * 32 * 8)
    depth = 1 if capped or apart else 2  # as deep as registers allow
    return warps, max(1, min(depth, next_power_of_2(V) // block)), block
