"""A linear layer, its relu and a dropout as a single autograd node: y = dropout(relu(x Wᵀ + b)).

    forward     y = relu(x Wᵀ + b), in the product's epilogue where there is a bias;  y = dropout(y)
    backward    dz = dy where y > 0;  dx = dz W / (1 - p);  dW = dzᵀ x / (1 - p);  db = Σ dz / (1 - p)
    saved       x, W, y

A zero of y says that relu or the dropout has cut the element, so y alone gives the gradient. torch keeps relu's result
and the dropout's mask as well, and for a moment the product's result. Forward results match torch's layers; the
gradient of a dropped result is rounded once less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import make_function
from tigon.ops.linear.projections import linear


def relu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, dropout: float = 0.0) -> Tensor:
    """F.dropout(F.relu(F.linear(x, weight, bias)), dropout), for plain tensors with one dtype on one device.

    Args:
        x: (..., H). weight: (N, H). bias: (N,) or None.
        dropout: the probability of a zero, at least 0 and below 1. Random numbers are drawn as by F.dropout.
    Returns: (..., N).
    """
    y: Tensor = _relu_linear(x, weight, bias, dropout)
    return y


def _relu_linear_fwd(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    ctx.set_materialize_grads(False)
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    if bias is None:
        y = linear(x, weight, None).relu_()
    else:  # a product with relu in its epilogue, where cuBLAS has one
        rows = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
        y = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))
    if dropout:
        y = F.dropout(y, dropout)
    ctx.scale = 1.0 / (1.0 - dropout)
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, y)
    return y


def _backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
    x, weight, y = ctx.saved_tensors
    dz = torch.ops.aten.threshold_backward(given, y, 0).reshape(-1, y.shape[-1])
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        dx = _multiply(dz, weight, ctx.scale).view(*given.shape[:-1], weight.shape[1])
    if ctx.needs_input_grad[1]:
        dw = _multiply(dz.t(), x.reshape(-1, x.shape[-1]), ctx.scale)
    if ctx.needs_input_grad[2]:
        db = dz.sum(0) if ctx.scale == 1.0 else dz.sum(0) * ctx.scale
    return dx, dw, db


def _multiply(one: Tensor, other: Tensor, scale: float) -> Tensor:
    if scale == 1.0:
        return torch.mm(one, other)
    return one.new_empty(one.shape[0], other.shape[1]).addmm_(one, other, beta=0, alpha=scale)


_relu_linear = make_function(_relu_linear_fwd, _backward)
