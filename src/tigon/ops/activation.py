"""An activation without a gate: y = act(x · input_multiplier) · multiplier, for every row in `tigon.ops.acts`.

For modules whose own code writes the activation out in several torch operations. Where torch has a single kernel, that
kernel is as fast. Uses the gated units' kernels without a second factor. `tigon.relu2` is the public operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import dense_like, dense_like_second, differentiable, launcher, use_triton
from tigon.ops.acts import ACTS, Act
from tigon.ops.gated import _gated_bwd_kernel, _gated_fwd_kernel, launch_gated


def activation(x: Tensor, act: Act, *, input_multiplier: float = 1.0, multiplier: float = 1.0) -> Tensor:
    """act(x · input_multiplier) · multiplier, computed in fp32 and rounded once: floats of any shape, x's dtype."""
    if not use_triton(x):
        return activation_reference(x, act, input_multiplier=input_multiplier, multiplier=multiplier)
    return _activation(x, act, input_multiplier, multiplier)


def activation_reference(x: Tensor, act: Act, *, input_multiplier: float = 1.0, multiplier: float = 1.0) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = ACTS[act].value(wide if input_multiplier == 1.0 else wide * input_multiplier)
    return (y if multiplier == 1.0 else y * multiplier).to(x.dtype).contiguous()


# --------------------------------------------------------------------------------------------------------- launches


@launcher(dense_like)
def _activation_fwd(x: Tensor, act: str, input_multiplier: float, multiplier: float) -> Tensor:
    y = dense_like(x)
    if y.numel():
        N = y.shape[-1] if y.dim() else 1
        launch_gated(_gated_fwd_kernel, (x, None, y), N, act, input_multiplier, multiplier, False)
    return y


@launcher(dense_like_second)
def _activation_bwd(dy: Tensor, x: Tensor, act: str, input_multiplier: float, multiplier: float) -> Tensor:
    dx = dense_like(x)
    if dx.numel():
        N = dx.shape[-1] if dx.dim() else 1
        launch_gated(_gated_bwd_kernel, (dy, x, None, dx, None, None), N, act, input_multiplier, multiplier, False)
    return dx


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _activation_bwd(dy, *ctx.saved_tensors, *ctx.options), None, None, None


_activation = differentiable(_activation_fwd, _setup_context, _backward)
