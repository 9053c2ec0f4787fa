"""Gradients that a loss computes in its forward pass: their memory, and a backward pass that only scales them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.losses.head.upstream import scale_gradients
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.losses.inputs import WalkPlan
from tigon.ops.linear import weight_gradient


class EarlyGradients(NamedTuple):
    """dx (N, H), dW in the two tensors of `weight_gradient.places`, and db (V,); empty where not needed."""

    dx: Tensor
    dw: Tensor
    more: Tensor
    db: Tensor


def empty_gradients(
    x: Tensor, weight: Tensor, plan: WalkPlan, shards: Shards | None, visited: int, *, needs_sum: bool = False,
    class_bytes: int | None = None, budget: int | None = None,
) -> EarlyGradients:  # fmt: skip
    """Allocate the gradients; a traced graph and a launch thus agree about shapes and dtypes.

    Args:
        x: (..., H). weight: this device's classes.
        visited: how many rows the walk visits. If one chunk holds them all, dW is a single product, which rounds once,
            into the weight's dtype.
        needs_sum: dW stays wide in any case: a divisor arrives with the upstream gradient, and would round again.
        class_bytes, budget: of a row's logits per class, and of a chunk's logits, if not the plan's.
    """
    narrow = plan.compute.itemsize
    class_bytes, budget = class_bytes or narrow, plan.budget if budget is None else budget
    is_one_chunk = visited * (weight.shape[0] if shards is None else shards.widest) * class_bytes <= budget
    wide = plan.fp32 and (needs_sum or not is_one_chunk)
    # fp32 master weights under autocast: the accumulator is the gradient. In fp16 the sum would overflow.
    wide = wide or weight.dtype != plan.compute or plan.compute == torch.float16
    # Wide logits become a narrow gradient in another buffer: dW's product then has no factor to keep.
    only = visited if is_one_chunk and shards is None and class_bytes == narrow else 0
    dw, more = weight_gradient.places(weight, plan.compute, wide, plan.budget, plan.need_dw, only)
    # Not Size.numel(), which makes a traced size a number: another number of rows would compile again.
    dx = x.new_empty((math.prod(x.shape[:-1]), x.shape[-1]) if plan.need_dx else (0,), dtype=plan.compute)
    return EarlyGradients(dx, dw, more, x.new_empty(weight.shape[0] if plan.need_db else 0, dtype=plan.acc))


def save_gradients(
    ctx: Any, inputs: Sequence[Any], plan: WalkPlan, gradients: Sequence[Tensor], *, inverse: Tensor | None = None,
    grad_scale: float = 1.0,
) -> None:  # fmt: skip
    """Save the gradients in place of the inputs, which begin with x, weight and bias.

    inverse: 1 / the divisor; in fp16 the gradients lack the divisor, which would make them underflow. grad_scale: a
    factor that the gradients have.
    """
    x, weight, bias = inputs[:3]
    ctx.needs, ctx.shape, ctx.grad_scale = plan.needs, x.shape, grad_scale
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(*gradients, inverse if plan.compute == torch.float16 else None)


def scale_saved_gradients(ctx: Any, dloss: Tensor | None, *_: Any) -> Sequence[Tensor | None]:
    """dx, dw and db: the saved gradients, times the upstream gradient."""
    if dloss is None:
        return ()
    dx, dw, more, db, inverse, *_ = ctx.saved_tensors
    factor = dloss if inverse is None else dloss * inverse
    # Applied to the fp32 factor rather than the gradients, which would leave fp16's range again.
    factor = factor if ctx.grad_scale == 1.0 else factor / ctx.grad_scale
    scaled_dx, scaled_dw, scaled_db = scale_gradients((dx, (dw, more), db), factor, ctx.dtypes, ctx.needs)
    return None if scaled_dx is None else scaled_dx.view(ctx.shape), scaled_dw, scaled_db
