"""Weights in e4m3 with one scale, as they are and transposed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.ops.fp8.recipe import Weight
from tigon.ops.fp8.reference import quantize_weight_reference


def measure_weights(parts: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in several weights, 0-d fp32."""
    return torch.stack([part.detach().abs().amax().float() for part in parts]).amax()


def quantize_weight(parts: Sequence[Tensor], amax: Tensor) -> Weight:
    """Weights (Nᵢ, K) stacked to (N, K)."""
    return quantize_weight_reference(parts, amax)


def quantize_transposed(parts: Sequence[Tensor], amax: Tensor) -> Weight:
    """The transposition (K, N) of `quantize_weight`, the same bytes."""
    weight = quantize_weight_reference(parts, amax)
    return Weight(weight.data.t().contiguous(), weight.scale[:1].expand(weight.data.shape[1]).contiguous())
