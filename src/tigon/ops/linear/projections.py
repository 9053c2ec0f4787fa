"""Linear layers that share an input, as a single autograd node: yᵢ = x Wᵢᵀ + bᵢ.

torch records four nodes per layer for a (B, T, D) input: a view, the weight's transposition, the product, a view. Each
layer's backward pass writes a gradient for x, and autograd sums the gradients in separate passes. Here the second
product accumulates onto the first in the epilogue:

    forward     yᵢ = x Wᵢᵀ + bᵢ
    backward    dx = dy₁ W₁;  dx += dy₂ W₂;  …;  dWᵢ = dyᵢᵀ x;  dbᵢ = Σ dyᵢ
    saved       x, and the weights if x needs a gradient

The forward pass and dW match torch's layers bit for bit. dx is rounded once per layer. torch rounds each layer's
product, and each pairwise sum once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import add_anchor, make_function


def projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """F.linear(x, weight, bias) for each weight; all tensors are plain and share dtype and device.

    Args:
        x: (..., H).
        weights: (Nᵢ, H).
        biases: (Nᵢ,) or None, per weight.

    Returns: a tuple of (..., Nᵢ), followed by an empty tensor where autograd needs an anchor.
    """
    ys: tuple[Tensor, ...] = _projections(x, len(weights), *weights, *biases)
    return ys


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, with a result that may be modified in place after leaving an autograd Function."""
    y = F.linear(x, weight, bias)
    # With a bias torch returns a view. Autograd forbids writes to views made inside a Function.
    return y if bias is None or not y._is_view() else torch.ops.aten._unsafe_view(y, y.shape)


def _projections_fwd(ctx: Any, x: Tensor, count: int, *tensors: Any) -> tuple[Tensor, ...]:
    # An unused result's gradient stays None, and the products are skipped.
    ctx.set_materialize_grads(False)
    ctx.count, weights, biases = count, tensors[:count], tensors[count:]
    # Only the weights' gradients need x: with all weights frozen, x is not saved.
    own_x = ctx.own_x = True in ctx.needs_input_grad[2 : 2 + count]
    ctx.save_for_backward(*((x, *weights) if own_x else weights))
    unsaved = [] if own_x else [0]
    if biases != (None,) * count:
        unsaved += [2 + count + i for i, bias in enumerate(biases) if bias is not None]
    anchor = add_anchor(ctx, (x, count, *tensors), tuple(unsaved)) if unsaved else ()
    ys = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    needs = ctx.needs_input_grad
    if not needs[0]:
        # A frozen layer on an input without a gradient: attention must not compute a gradient for the result.
        dead = [y for i, y in enumerate(ys) if not (needs[2 + i] or needs[2 + count + i])]
        ctx.mark_non_differentiable(*dead)
    return (*ys, *anchor)


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    count, saved, needs = ctx.count, ctx.saved_tensors, ctx.needs_input_grad
    x, weights = (saved[0], saved[1:]) if ctx.own_x else (None, saved)
    rows: Any = None if x is None else x.reshape(-1, x.shape[-1])
    dx: Tensor | None = None
    gradients: list[Tensor | None] = [None] * (2 * count)
    for i in range(count):
        given_here = given[i]
        if given_here is None:
            continue
        dy = given_here.reshape(-1, given_here.shape[-1])
        if needs[0]:
            dx = torch.mm(dy, weights[i]) if dx is None else dx.addmm_(dy, weights[i])
        if needs[2 + i]:
            gradients[i] = torch.mm(dy.t(), rows)
        if needs[2 + count + i]:
            gradients[count + i] = dy.sum(0)
    if dx is not None:
        dx = dx.view(*next(dy for dy in given if dy is not None).shape[:-1], dx.shape[1])
    return dx, None, *gradients


_projections = make_function(_projections_fwd, _backward)
