"""Linear layers of one input, with one node in autograd's graph: yᵢ = x Wᵢᵀ + bᵢ.

torch records four nodes for each layer of a (B, T, D) input: a view, the weight's transposition, the product, a view.
Each layer's backward pass writes a gradient of x, and autograd sums the gradients in passes of their own. Here the
second product adds to the first where it stands, in its epilogue:

    forward     yᵢ = x Wᵢᵀ + bᵢ
    backward    dx = dy₁ W₁;  dx += dy₂ W₂;  …;  dWᵢ = dyᵢᵀ x;  dbᵢ = Σ dyᵢ
    kept        x, and the weights where x wants a gradient

Forward pass and dW have the bits of torch's layers. dx is rounded once for each layer. torch rounds each layer's
product, and each sum of two once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import bind_apply, make_anchor, run_once_differentiable


def projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """F.linear(x, weight, bias) for each weight, where all tensors are plain and have one dtype and device.

    Args:
        x: (..., H).
        weights: (Nᵢ, H). biases: (Nᵢ,) or None, one for each weight.
    Returns: a tuple of (..., Nᵢ), and behind these, where autograd needs it, an empty tensor that is nobody's result.
    """
    ys: tuple[Tensor, ...] = _projections(x, len(weights), *weights, *biases)
    return ys


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, with a result that may be written to when it has left an autograd Function."""
    y = F.linear(x, weight, bias)
    # With a bias torch gives a view of the product's rows. Autograd refuses writes to views that a Function has made.
    return y if bias is None or not y._is_view() else torch.ops.aten._unsafe_view(y, y.shape)


class Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        # The gradient of a result that nobody used stays None, and its products are left out.
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.count = True, count
        weights, biases = tensors[:count], tensors[count:]
        # x serves the weights' gradients alone: where all weights are frozen, it is not kept.
        own_x = ctx.own_x = True in ctx.needs_input_grad[2 : 2 + count]
        saved = (x, *weights) if own_x else weights
        ctx.save_for_backward(*saved)
        # Of the inputs, x where it is not kept and the biases are not saved; see make_anchor.
        unsaved = [] if own_x else [0]
        if biases != (None,) * count:
            unsaved += [2 + count + i for i, bias in enumerate(biases) if bias is not None]
        way = make_anchor(ctx, (x, count, *tensors), tuple(unsaved)) if unsaved else ()
        if way:
            ctx.save_for_backward(*saved, *way)
        ys = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        needs = ctx.needs_input_grad
        if not needs[0]:
            # A frozen layer of an input without a gradient: attention is to compute none for its result.
            dead = [y for i, y in enumerate(ys) if not (needs[2 + i] or needs[2 + count + i])]
            ctx.mark_non_differentiable(*dead)
        return (*ys, *way)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return run_once_differentiable(_backward, ctx, *dys)


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
        # A view where the rows of dy lie at even distances, else a copy, which the three products share.
        dy = given_here.reshape(-1, given_here.shape[-1])
        if needs[0]:
            # The fp32 sum of the product is added to what stands there, and rounded.
            dx = torch.mm(dy, weights[i]) if dx is None else dx.addmm_(dy, weights[i])
        if needs[2 + i]:
            gradients[i] = torch.mm(dy.t(), rows)
        if needs[2 + count + i]:
            gradients[count + i] = dy.sum(0)
    if dx is not None:
        # x's shape comes from a gradient: x itself may not have been kept.
        dx = dx.view(*next(dy for dy in given if dy is not None).shape[:-1], dx.shape[1])
    return dx, None, *gradients


_projections = bind_apply(Projections)
