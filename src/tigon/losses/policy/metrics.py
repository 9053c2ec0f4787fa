"""Policy loss metrics, by TRL's names: clipped-ratio shares, means and extremes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

CLIP_NAMES = tuple(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"))
SAMPLER_NAMES = tuple(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max"))


def clip_metric_names(formula: str) -> tuple[str, ...]:
    """Names for the `clip_ratios` results."""
    return {"cispo": ("cispo_clip_ratio",), "sapo": (), "vespo": ()}.get(formula, CLIP_NAMES)


def clip_ratios(clipped: Tensor, mask: Tensor, by_sequence: bool, formula: str) -> dict[str, Tensor]:
    """clipped: (S, T), above 0 where the upper bound holds, below 0 where the lower does."""
    if formula == "cispo":  # which has no lower bound
        return {"cispo_clip_ratio": select_counted((clipped > 0).to(clipped.dtype), mask, by_sequence).mean()}
    clipped, mask = select_counted(clipped, mask, by_sequence)
    # Both bounds together: with short completions the launches take longer than the computation.
    hits = (torch.stack((clipped < 0, clipped > 0)) & mask).sum(-1, dtype=clipped.dtype)
    counts = mask.sum(-1)
    low, high = (hits.sum(-1) / counts.sum().clamp(min=1)).unbind()
    # A sequence without tokens, 0 / 0, does not enter the extremes; without any other sequence the extremes are NaN.
    lows, highs = (hits / counts).unbind()
    least, most = (torch.full_like(low, math.nan),) * 2
    if counts.numel():
        least = lows.nan_to_num(nan=math.inf).amin().nan_to_num(nan=math.nan, posinf=math.nan)
        most = highs.nan_to_num(nan=-math.inf).amax().nan_to_num(nan=math.nan, neginf=math.nan)
    return dict(zip(CLIP_NAMES, (low, high, low + high, least, most), strict=True))


class CountedValues(NamedTuple):
    """Token values (…, S, T), or sequence values (…, S, 1), and the valid mask in the last two sizes."""

    values: Tensor
    mask: Tensor

    def mean(self) -> Tensor:
        return torch.where(self.mask, self.values, 0.0).sum((-2, -1)) / self.mask.sum().clamp(min=1)

    def least(self) -> Tensor:
        return -self._replace(values=-self.values).most()

    def most(self) -> Tensor:
        """The maximum, NaN if nothing counts."""
        if self.values.numel() == 0:
            return self.values.new_full(self.values.shape[:-2], math.nan)
        return torch.where(self.mask.any(), torch.where(self.mask, self.values, -math.inf).amax((-2, -1)), math.nan)


def select_counted(values: Tensor, mask: Tensor, by_sequence: bool) -> CountedValues:
    # TRL's means over sequences include those without tokens.
    return CountedValues(values[..., :1], torch.ones_like(mask[:, :1])) if by_sequence else CountedValues(values, mask)
