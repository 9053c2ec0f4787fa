"""Low-rank adapters on stacked experts: y_e += scale · B_e (A_e x), without the sum of weight and adapter."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A, B and the scale; without an adapter no tensors.
Factors = tuple[Tensor | None, Tensor | None, float]
NO_FACTORS: Factors = (None, None, 1.0)


class ExpertAdapter(NamedTuple):
    """LoRA adapters on stacked experts, for `moe_mlp`: expert e's product gains scale · B_e (A_e x).

    Args:
        a: A (E, r, in), any float dtype and strides. Ranks of at least 1.
        b: B (E, out, r), likewise.
        scale: the adapters' scale, such as alpha / r.

    The products cast A and B to x's dtype, or autocast's; the gradients return in the parameters' dtype.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


def check_adapter(name: str, adapter: ExpertAdapter | None, weight: tuple[int, ...], x: Tensor) -> None:
    """Raise a ValueError for an adapter that does not fit a weight (E, out, in)."""
    if adapter is None:
        return
    if not isinstance(adapter, ExpertAdapter):
        raise ValueError(f"moe_mlp: {name} must be a tigon.ExpertAdapter or None, got {type(adapter).__name__}.")
    a, b, scale = adapter
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or isinstance(scale, Tensor):
        kinds = ", ".join(type(t).__name__ for t in adapter)
        raise ValueError(f"moe_mlp: {name} must hold two tensors and a number, got {kinds}.")
    E, rows, columns = weight
    fits = a.dim() == b.dim() == 3 and a.shape[1] == b.shape[2] >= 1
    if not fits or (a.shape[0], a.shape[2]) != (E, columns) or tuple(b.shape[:2]) != (E, rows):
        raise ValueError(
            f"moe_mlp: {name} must have A ({E}, r, {columns}) and B ({E}, {rows}, r) with a rank r of at least 1, got "
            f"{tuple(a.shape)} and {tuple(b.shape)}."
        )
    for t in (a, b):
        if hasattr(t, "device_mesh"):
            raise ValueError(f"moe_mlp: {name} must hold plain tensors, got a DTensor: gather it with full_tensor().")
        if t.device != x.device:
            raise ValueError(f"moe_mlp: {name} must be on x's device {x.device}, got {t.device}.")
        if not t.dtype.is_floating_point:
            raise ValueError(f"moe_mlp: {name} must hold floats, got {t.dtype}.")


def cast_factors(adapter: ExpertAdapter | None, dtype: torch.dtype) -> Factors:
    """A and B in the products' dtype, contiguous: small beside the weight. Differentiable."""
    if adapter is None:
        return NO_FACTORS
    # PEFT stores the experts of B innermost: a tile's loads would touch a cache line for each element.
    a, b = (t.to(dtype).contiguous() for t in adapter[:2])
    return a, b, float(adapter.scale)


def multiply_adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float
) -> Tensor:
    """One expert's x Wᵀ + bias + scale · (x Aᵀ) Bᵀ in plain PyTorch."""
    y = F.linear(x, weight, bias)
    if a is None or b is None:
        return y
    return torch.add(y, F.linear(F.linear(x, a), b), alpha=scale)
