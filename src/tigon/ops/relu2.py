"""Squared relu, an activation without a gate: y = relu(x)² · multiplier.

Source: So et al. 2021 (Primer), https://arxiv.org/abs/2109.08668; Nemotron-4, https://arxiv.org/abs/2402.16819
Uses the gated units' kernels without a second factor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import dense_like, dense_like_second, differentiable, launcher, use_triton
from tigon.ops.example import ROWS, Example
from tigon.ops.gated import _gated_bwd_kernel, _gated_fwd_kernel, launch_gated


def relu2(x: Tensor, *, multiplier: float = 1.0) -> Tensor:
    """relu(x)² · multiplier, computed in fp32 and rounded once.

    Args:
        x: any shape, any float dtype.
        multiplier: factor for the result.
    Returns: x's shape and dtype.
    Raises: ValueError for a non-float dtype.

    Replaces::

        y = F.relu(x).square()
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"relu2: x must have a float dtype, got {x.dtype}.")
    if not use_triton(x):
        return relu2_reference(x, multiplier=multiplier)
    return _relu2(x, multiplier)


def relu2_reference(x: Tensor, *, multiplier: float = 1.0) -> Tensor:
    y = F.relu(x.to(torch.promote_types(x.dtype, torch.float32))).square()
    return (y if multiplier == 1.0 else y * multiplier).to(x.dtype).contiguous()


# --------------------------------------------------------------------------------------------------------- launches


@launcher(dense_like)
def _relu2_fwd(x: Tensor, multiplier: float) -> Tensor:
    y = dense_like(x)
    if y.numel():
        N = y.shape[-1] if y.dim() else 1
        launch_gated(_gated_fwd_kernel, (x, None, y), N, "relu2", 1.0, multiplier, False)
    return y


@launcher(dense_like_second)
def _relu2_bwd(dy: Tensor, x: Tensor, multiplier: float) -> Tensor:
    dx = dense_like(x)
    if dx.numel():
        N = dx.shape[-1] if dx.dim() else 1
        tensors = (dy, x, None, dx, None, None)
        launch_gated(_gated_bwd_kernel, tensors, N, "relu2", 1.0, multiplier, False)
    return dx


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.multiplier = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
    return (_relu2_bwd(dy, *ctx.saved_tensors, ctx.multiplier),)


_relu2 = differentiable(_relu2_fwd, _setup_context, _backward)


EXAMPLES = {
    "relu2": Example("Gated units", (ROWS,), relu2),
}
