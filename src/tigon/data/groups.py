"""Ragged row groups: checks and group sums shared by losses and metrics.

Group g contains rows offsets[g] to offsets[g + 1] − 1. Sums are segment reductions without atomics, hence bitwise
reproducible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import check_tensors, is_concrete
from tigon.ops.targets import CHECKS


class Groups(NamedTuple):
    """Group structure for n rows.

    Attributes:
        offsets: (G + 1,) int64, on the rows' device.
        row: (n,) int64, each row's group.
        given: the original offsets, possibly on the host.
    """

    offsets: Tensor
    row: Tensor
    given: Tensor

    @property
    def number(self) -> int:
        return len(self.offsets) - 1

    def longest(self) -> int:
        """Row count in the largest group. Synchronises with the GPU if the offsets were given there."""
        return int(self.given.diff().max()) if self.number else 0

    def sum(self, x: Tensor) -> Tensor:
        """(G,) sums over x (n,), differentiable."""
        if not x.numel():  # segment_reduce rejects empty input
            return x.sum() + x.new_zeros(self.number)
        return torch.segment_reduce(x, "sum", offsets=self.offsets, unsafe=True, initial=0)

    def largest(self, x: Tensor) -> Tensor:
        """(G,) maxima over x (n,), −∞ for empty groups; not differentiable."""
        if not x.numel():
            return x.new_full((self.number,), -torch.inf)
        return torch.segment_reduce(x.detach(), "max", offsets=self.offsets, unsafe=True, initial=-torch.inf)

    def order(self, x: Tensor) -> Tensor:
        """(n,) row indices sorted by group, then by descending x; stable."""
        by_value = x.detach().sort(descending=True, stable=True).indices
        return by_value[self.row[by_value].sort(stable=True).indices]

    def place(self) -> Tensor:
        """(n,) each row's position in its group, from 1."""
        return torch.arange(1, len(self.row) + 1, device=self.row.device) - self.offsets[self.row]


def check_groups(
    name: str, scores: Tensor, labels: Tensor, offsets: Tensor | None, weights: Tensor | None = None
) -> Groups:
    """Validate labels, offsets and weights against scores, and compute each row's group.

    Raises: ValueError for wrong shapes, dtypes and devices; for invalid offsets if they can be read without
        synchronising.
    """
    check_tensors(name, scores=scores, labels=labels, offsets=offsets, weights=weights)
    if scores.dim() != 1 or not scores.dtype.is_floating_point:
        raise ValueError(f"{name}: scores must be (n,) floats, got {tuple(scores.shape)} {scores.dtype}.")
    if labels.dtype.is_complex:
        raise ValueError(f"{name}: labels must be bool, integers or floats, got {labels.dtype}.")
    for argument, value in (("labels", labels), ("weights", weights)):
        if value is not None and (value.shape != scores.shape or value.device != scores.device):
            raise ValueError(
                f"{name}: {argument} must be ({len(scores)},), one per score, on {scores.device}, got "
                f"{tuple(value.shape)} on {value.device}."
            )
    n, device = len(scores), scores.device
    if offsets is None:
        offsets = torch.tensor([0, n])
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64) or len(offsets) < 1 + bool(n):
        raise ValueError(
            f"{name}: offsets must be (groups + 1,) int32 or int64, each group's first row and the end, got "
            f"{tuple(offsets.shape)} {offsets.dtype}."
        )
    if offsets.device != device and offsets.device.type != "cpu":
        raise ValueError(f"{name}: offsets must be on {device} or on the CPU, got {offsets.device}.")
    if (CHECKS or offsets.device.type == "cpu") and is_concrete(offsets):
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != n or (offsets.diff() < 0).any():
            raise ValueError(
                f"{name}: offsets must rise from 0 to {n}, the number of scores, got {first} to {last}"
                f"{', falling between' if (first, last) == (0, n) else ''}."
            )
    given, offsets = offsets, offsets.to(device, torch.int64, non_blocking=True)
    if given.device.type != "cpu":
        # Offsets on the GPU are unchecked: clamp them, so that no read is out of bounds.
        given = offsets = offsets.clamp(0, n).cummax(0).values
    row = torch.searchsorted(offsets[1:].contiguous(), torch.arange(n, device=device), right=True)
    return Groups(offsets, row.clamp(max=max(len(offsets) - 2, 0)), given)


def discounts(place: Tensor) -> Tensor:
    """1 / log₂(1 + place), in fp32 or place's float dtype."""
    return 1 / torch.log2(1 + place)
