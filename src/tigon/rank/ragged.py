"""Lists of different lengths as one tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Ragged(NamedTuple):
    """n lists: list i is values[offsets[i]] … values[offsets[i + 1] − 1].

    Attributes:
        values: (m,) int64.
        offsets: (n + 1,) int64, on the device of the values.
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
        return Ragged(self.values.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True))

    def take(self, rows: Tensor) -> Ragged:
        """The lists of these rows. It waits for the GPU, which alone knows how many values they have."""
        return self.slices(self.offsets[rows], self.lengths[rows])

    def slices(self, first: Tensor, lengths: Tensor) -> Ragged:
        """The values from each `first` on, as many as `lengths` says."""
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        return Ragged(self.values[spans(first, offsets)], offsets)

    def lists(self) -> list[list[int]]:
        """As lists of Python."""
        values, ends = self.values.tolist(), self.offsets.tolist()
        return [values[a:b] for a, b in pairwise(ends)]


def spans(first: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """(total,) int64: from each `first` on, as many numbers as `offsets` (n + 1,) leave room for.

    total: offsets[-1], if the host knows it already.
    """
    total = int(offsets[-1]) if total is None else total
    shift = torch.repeat_interleave(first - offsets[:-1], offsets.diff(), output_size=total)
    return shift + torch.arange(total, device=shift.device)
