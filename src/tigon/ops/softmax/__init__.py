"""Softmax of scaled, masked scores: y = softmax(scale · x + mask), with dx = scale · y · (dy − Σ dy · y).

Source of the one-pass statistics: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867

This file has the public function and the reference; kernels.py and launches.py follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import use_triton
from tigon.ops.example import ROWS, Example
from tigon.ops.softmax.launches import softmax_of_last as _softmax

__all__ = ["softmax", "softmax_reference"]


def softmax(
    x: Tensor, dim: int, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale · x + mask) over one dimension, computed in fp32 and rounded once.

    Args:
        x: any shape with at least one dimension, any float dtype.
        dim: the dimension that sums to one. Any but the last costs two copies.
        scale: multiplies x; 1/√D for attention scores, 1/temperature for logits.
        mask: added to scale · x; any float dtype, broadcastable to x's shape and never expanded in memory: (B, 1, T, S)
            or (T, S) for x (B, H, T, S). Gets no gradient; add a learned mask to x instead.
        causal: x is (..., T, S), and query t attends to the keys s ≤ t + (S − T): the last query attends to all. The
            other positions are 0, and neither x nor the mask is read there.
        dtype: x is first converted to this dtype, as in torch's functions; None keeps x's.
    Returns: x's shape, contiguous, in x's dtype or `dtype`. A row without any finite score is NaN, as in torch.
    Raises: ValueError for a dtype that is not a float, a dim out of range, a mask that is boolean, does not broadcast
        or requires a gradient, and for causal unless dim is the last of at least two dimensions.

    Replaces::

        y = F.softmax(scale * x.float() + mask, dim=dim).to(x.dtype)

    and, with causal=True::

        unseen = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
        y = F.softmax((scale * x.float() + mask).masked_fill(unseen, -torch.inf), dim=-1).to(x.dtype)
    """
    x = x if dtype is None else x.to(dtype)
    rank = x.dim()
    if not x.dtype.is_floating_point:
        raise ValueError(f"softmax: x must have a float dtype, got {x.dtype}.")
    if not -rank <= dim < rank:
        raise ValueError(f"softmax: dim must name a dimension of x, which has {rank}, got {dim}.")
    last = dim in (-1, rank - 1)
    if causal and not (last and rank > 1):
        raise ValueError(
            f"softmax: causal must come with x (..., T, S) and dim=-1, got x {tuple(x.shape)} and dim={dim}."
        )
    if mask is not None:
        _check_mask(x, mask)
    if not use_triton(x, mask):
        return softmax_reference(x, dim, scale=scale, mask=mask, causal=causal)
    if last:
        return _softmax(x, mask, scale, causal)
    moved = None if mask is None else mask.expand(x.shape).movedim(dim, -1)
    return _softmax(x.movedim(dim, -1), moved, scale, causal).movedim(-1, dim).contiguous()


def _check_mask(x: Tensor, mask: Tensor) -> None:
    if not mask.dtype.is_floating_point:
        raise ValueError(
            f"softmax: mask must be floats that are added to the scores, got {mask.dtype}. Convert a boolean mask "
            "with torch.zeros_like(scores).masked_fill(~keep, -torch.inf)."
        )
    if mask.device != x.device:
        raise ValueError(f"softmax: mask must be on x's device, {x.device}, got {mask.device}.")
    fits = mask.dim() <= x.dim() and all(
        m in (1, n) for m, n in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(f"softmax: mask must broadcast to x's shape {tuple(x.shape)}, got {tuple(mask.shape)}.")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "softmax: mask must not require a gradient, as it gets none, got one that does: detach it, or add a "
            "learned bias to x."
        )


def softmax_reference(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    if scale != 1.0:
        z = z * scale
    if mask is not None:
        z = z + mask.to(z.dtype)
    if causal:
        T, S = x.shape[-2:]
        unseen = torch.arange(S, device=x.device) > (torch.arange(T, device=x.device) + (S - T)).unsqueeze(-1)
        z = z.masked_fill(unseen, -torch.inf)
    return torch.softmax(z, dim).to(x.dtype)


EXAMPLES = {
    "softmax": Example("Softmax", (ROWS,), lambda x: softmax(x, -1)),
}
