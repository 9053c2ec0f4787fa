"""Layer normalisation: y = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias.

Source: Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450

This file has the public function and the reference; kernels.py and launches.py follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import check_no_shape, check_tensors, use_triton
from tigon.ops.example import ROWS, WEIGHT, Example
from tigon.ops.layer_norm.launches import norm_of_rows


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Normalise each row to zero mean and unit variance, then scale by weight and shift by bias.

    Args:
        x: (..., N), any float dtype. Computed in fp32 (fp64 for fp64). Rows described by two strides, such as one head
            of a packed projection, are read in place.
        weight, bias: (N,), or None for no scale or no shift, independently. Their dtype may differ from x's.
        eps: added to the variance (over N, not N − 1), in squared units of x.
    Returns: (..., N) in x's dtype, rounded once, at the end; also if weight or bias is wider than x. `F.layer_norm`
        does the same where it accepts mixed dtypes (on the CPU; on CUDA it refuses).
    Raises: ValueError for a weight or bias that is not (N,), a scalar x or a dtype that is not a float.

    Replaces::

        y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"layer_norm: x must have a float dtype, got {x.dtype}.")
    shape = x.shape[-1:]
    if not shape:
        raise ValueError("layer_norm: x must have at least one dimension, got a scalar.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and getattr(t, "shape", None) != shape:
            check_no_shape("layer_norm", t)
            check_tensors("layer_norm", **{name: t})
            raise ValueError(
                f"layer_norm: {name} must have shape {tuple(shape)}, the last dimension of x {tuple(x.shape)}, "
                f"got {tuple(t.shape)}."
            )
    if not use_triton(x, weight, bias):
        return layer_norm_reference(x, weight, bias, eps=eps)
    return norm_of_rows(x, weight, bias, eps)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).contiguous()


EXAMPLES = {
    "layer_norm": Example("Norms", (ROWS, WEIGHT, WEIGHT), layer_norm),
}
