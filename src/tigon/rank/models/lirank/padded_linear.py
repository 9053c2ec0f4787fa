"""Linear layers of any width at the speed of a width that is a multiple of 8.

The rows of a matrix of 3,500 numbers of 16 bits begin at multiples of 8 bytes, where a GPU's fast loads need 16: its
products then take more than twice the time of those of 3,504. Here weights and activations get columns of zeros up to
the next multiple of 8; the weights that are trained and stored stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.fusion.engine.patch import is_hooked
from tigon.kernels import bind_apply, cdiv, is_traced, run_once_differentiable, use_triton
from tigon.rank.kernels.relu_gradient import relu_gradient

COLUMNS = 8  # numbers of 16 bits in 16 bytes
# rows · inputs · outputs from which a product saves more than the launches that put zeros beside its weights cost.
LEAST = 2**33


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)`, with columns of zeros behind it where that is faster.

    Args:
        x: (C, inputs), or wider by columns that are multiplied by 0, as another call gives it.
    Returns: (C, outputs), or (C, outputs rounded up to 8), with zeros.
    """
    if not is_plain(layer) or (x.shape[-1] == layer.in_features and not is_padding_faster(layer, x)):
        out: Tensor = layer(first_columns(x, layer.in_features))
        return out
    return F.linear(*_widen_operands(layer, x))


def linear_relu(layer: nn.Linear, x: Tensor) -> Tensor:
    """`relu(linear(layer, x))`; with kernels the relu is a product's last step in training, and its gradient one pass.

    Such a step may take NaN for 0. Without gradients, as in an evaluation, relu is torch's, which keeps NaN.
    """
    if not is_plain(layer) or layer.bias is None or x.dim() != 2 or not torch.is_grad_enabled():
        return F.relu(linear(layer, x))
    dtype = _computed_in(x)
    same = torch.is_autocast_enabled(x.device.type) or dtype == layer.weight.dtype == layer.bias.dtype
    if not same or not use_triton(x, layer.weight, layer.bias) or is_traced(x):
        return F.relu(linear(layer, x))
    if x.shape[-1] == layer.in_features and not is_padding_faster(layer, x):
        result: Tensor = _linear_relu(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
    else:
        result = _linear_relu(*_widen_operands(layer, x))
    return result


class LinearRelu(torch.autograd.Function):
    """x, weight, bias → relu(x weightᵀ + bias)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch._addmm_activation(bias, x, weight.t())
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(_linear_relu_backward, ctx, *gradients)


def _linear_relu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, y = ctx.saved_tensors
    need_dx, need_dw, need_db = ctx.needs_input_grad
    dh, db = relu_gradient(dy, y)
    return dh @ weight if need_dx else None, dh.t() @ x if need_dw else None, db if need_db else None


_linear_relu = bind_apply(LinearRelu)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is its weight and its bias alone, not an adapter, nor one with hooks."""
    return type(layer) is nn.Linear and not is_hooked(layer)


def _widen_operands(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias in the dtype of the product, with columns of zeros up to multiples of 8."""
    dtype = _computed_in(x)
    inputs, outputs = (cdiv(width, COLUMNS) * COLUMNS for width in (layer.in_features, layer.out_features))
    behind = outputs - layer.out_features
    x = widen(x.to(dtype), max(inputs, x.shape[-1]))
    # To 16 bits first: what is padded is half as large.
    weight = F.pad(layer.weight.to(dtype), (0, x.shape[-1] - layer.in_features, 0, behind))
    return x, weight, None if layer.bias is None else F.pad(layer.bias.to(dtype), (0, behind))


def first_columns(x: Tensor, columns: int) -> Tensor:
    """The first columns of x; x itself where it has no more, since a slice's gradient is a copy."""
    return x if x.shape[-1] == columns else x[..., :columns]


def concat_columns(sides: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """The first columns of each side, side by side."""
    found = [first_columns(x, width) for x, width in zip(sides, widths, strict=True)]
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def widen(x: Tensor, columns: int) -> Tensor:
    """x with columns of zeros behind it; x itself where it has as many."""
    return x if x.shape[-1] == columns else F.pad(x, (0, columns - x.shape[-1]))


def is_padding_faster(layer: nn.Linear, x: Tensor) -> bool:
    """Whether zeros behind the columns make the product faster: on a GPU, in 16 bits."""
    if not x.is_cuda or _computed_in(x).itemsize != 2:
        return False  # without a look at the rows, whose number a program of torch.export leaves open
    return is_slow(x.numel() // max(1, x.shape[-1]), layer.in_features, layer.out_features)


def is_slow(rows: int, inputs: int, outputs: int) -> bool:
    """Whether a product has a width that is no multiple of 8, and is large."""
    return bool(inputs % COLUMNS or outputs % COLUMNS) and rows * inputs * outputs >= LEAST


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
