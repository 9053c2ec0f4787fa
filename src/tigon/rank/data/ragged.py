"""Variable-length lists in a flat tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Ragged(NamedTuple):
    """n lists: list i is values[offsets[i]] … values[offsets[i + 1] − 1].

    Attributes:
        values: (m,) int64.
        offsets: (n + 1,) int64, on the values' device.
        lengths: (n,) int64. number: n.
    """

    values: Tensor
    offsets: Tensor

    @property
    def number(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def to(self, device: torch.device | str) -> Ragged:
        """Copy the lists to a device.

        Args:
            device: such as "cuda".
        """
        return Ragged(self.values.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True))

    def take(self, rows: Tensor, total: int | None = None) -> Ragged:
        """Select lists.

        Args:
            rows: (r,) int64.
            total: total length of the selected lists; without it the host synchronises with the GPU.
        """
        first = self.offsets[rows]
        return self.slices(first, self.offsets[rows + 1] - first, total)

    def slices(self, first: Tensor, lengths: Tensor, total: int | None = None) -> Ragged:
        """Slices of the values, starting at each `first` with the given lengths."""
        offsets = offsets_from_lengths(lengths)
        return Ragged(self.values[expand_spans(first, offsets, total)], offsets)

    def lists(self) -> list[list[int]]:
        """Convert to Python lists."""
        values, ends = self.values.tolist(), self.offsets.tolist()
        return [values[a:b] for a, b in pairwise(ends)]


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """(n + 1,) offsets for lists with these lengths."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def expand_spans(first: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """(total,) int64: consecutive indices starting at each `first`, with counts given by `offsets` (n + 1,).

    total: offsets[-1], if already known on the host.
    """
    total = int(offsets[-1]) if total is None else total
    shift = torch.repeat_interleave(first - offsets[:-1], offsets.diff(), output_size=total)
    return shift + torch.arange(total, device=shift.device)
