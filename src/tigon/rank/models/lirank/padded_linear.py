"""Linear layers with arbitrary widths at the speed of a multiple of 8.

Rows with 3,500 16-bit numbers are aligned to 8 bytes, while fast GPU loads need 16: such products take more than twice
the time of width 3,504. Weights and activations are padded with zero columns to the next multiple of 8; trained and
stored weights are unchanged.
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

COLUMNS = 8  # 16-bit numbers in 16 bytes
# Minimum rows · inputs · outputs for which the faster product outweighs the extra padding launches.
LEAST = 2**33


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)`, with zero padding columns where padding is faster.

    Args:
        x: (C, inputs), or wider, with padding columns from an earlier call.
    Returns: (C, outputs), or (C, outputs rounded up to 8), padded with zeros.
    """
    if not is_plain(layer) or (x.shape[-1] == layer.in_features and not is_padding_faster(layer, x)):
        out: Tensor = layer(first_columns(x, layer.in_features))
        return out
    return F.linear(*_widen_operands(layer, x))


def linear_relu(layer: nn.Linear, x: Tensor) -> Tensor:
    """`relu(linear(layer, x))`, fused by kernels in training, with a single backward pass for relu.

    The fused version may turn NaN into 0. Without gradients, as in evaluation, torch's relu is used, which keeps NaN.
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
    """Whether a layer is just weight and bias: no adapter and no hooks."""
    return type(layer) is nn.Linear and not is_hooked(layer)


def _widen_operands(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias in the product's dtype, with zero columns up to multiples of 8."""
    dtype = _computed_in(x)
    inputs, outputs = (cdiv(width, COLUMNS) * COLUMNS for width in (layer.in_features, layer.out_features))
    behind = outputs - layer.out_features
    x = widen(x.to(dtype), max(inputs, x.shape[-1]))
    # Cast to 16 bits before padding, to halve the padded size.
    weight = F.pad(layer.weight.to(dtype), (0, x.shape[-1] - layer.in_features, 0, behind))
    return x, weight, None if layer.bias is None else F.pad(layer.bias.to(dtype), (0, behind))


def first_columns(x: Tensor, columns: int) -> Tensor:
    """The first columns of x; x itself if there is no padding, since a slice's gradient is a copy."""
    return x if x.shape[-1] == columns else x[..., :columns]


def concat_columns(sides: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Concatenate the first columns of each side."""
    found = [first_columns(x, width) for x, width in zip(sides, widths, strict=True)]
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def widen(x: Tensor, columns: int) -> Tensor:
    """Pad x with zero columns; x itself if already wide enough."""
    return x if x.shape[-1] == columns else F.pad(x, (0, columns - x.shape[-1]))


def is_padding_faster(layer: nn.Linear, x: Tensor) -> bool:
    """Whether zero padding makes the product faster: on a GPU, in 16 bits."""
    if not x.is_cuda or _computed_in(x).itemsize != 2:
        return False  # without reading the row count, which is dynamic in torch.export
    return is_slow(x.numel() // max(1, x.shape[-1]), layer.in_features, layer.out_features)


def is_slow(rows: int, inputs: int, outputs: int) -> bool:
    """Whether a product is large and has a width that is not a multiple of 8."""
    return bool(inputs % COLUMNS or outputs % COLUMNS) and rows * inputs * outputs >= LEAST


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
