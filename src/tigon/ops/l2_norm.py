"""Rows of unit length: y = x / sqrt(Σ x² + eps), as delta rules take their queries and keys.

Source: Yang et al. 2024, https://arxiv.org/abs/2406.06484
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import in_order
from tigon.ops.example import ROWS, Example
from tigon.ops.rms_norm import rms_norm


def l2_norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Scale each row of x to unit length, by the kernels of `rms_norm`.

    Args:
        x: (..., N), any float dtype and strides: one head of a packed projection is read in place.
        eps: added to the sum of squares, in squared units of x.
    Returns: (..., N) in x's dtype and memory order, rounded once.
    Raises: ValueError for a scalar x or a dtype that is not a float.

    Replaces::

        y = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
    """
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise ValueError(f"l2_norm: x must be (..., N) floats, got {tuple(x.shape)} {x.dtype}.")
    N = max(1, x.shape[-1])
    # Σ x² + eps = N · (mean(x²) + eps / N).
    return rms_norm(x, eps=eps / N, offset=N**-0.5, cast="gemma")


def l2_norm_reference(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return in_order((wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype), x)


EXAMPLES = {
    "l2_norm": Example("Norms", (ROWS,), l2_norm),
}
