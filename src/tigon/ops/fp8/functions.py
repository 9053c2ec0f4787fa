"""The public functions of `tigon.fp8`: linear layers, and tensors in e4m3.

All sizes along which products sum or write rows are multiples of 16. Where the device has no FP8 products
(`is_supported`), the reference computes the same numbers, in fp32 and slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tigon.kernels import Layer, autocast_dtype, check_tensors, unknown_keyword, weight_and_bias
from tigon.kernels.dispatch import _PLAIN
from tigon.ops.acts import Act, checked_act
from tigon.ops.fp8 import rows, weight
from tigon.ops.fp8.compiled import multiply_gated_traced, multiply_traced
from tigon.ops.fp8.mlp import KEEPS, Keep, Stores, Unit, multiply_gated
from tigon.ops.fp8.multiply import Products, multiply
from tigon.ops.fp8.products import why_unsupported
from tigon.ops.fp8.recipe import ALIGNMENT, Rows, Weight
from tigon.ops.fp8.store import JointWeight

DTYPES = (torch.bfloat16, torch.float32)  # of parameters
PRODUCTS = Products()


def is_supported(device: torch.device | str | int) -> bool:
    """Whether products on this device run in FP8: an NVIDIA GPU with compute capability 9.0, and CUDA 12.9 or later."""
    return not why_unsupported(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias; the product and those of the backward pass in FP8.

    Each token of x and of the gradient has one scale, and so has the weight; all three are rounded to e4m3:
    see `tigon.ops.fp8.recipe`. Saves x and 4 bytes a token.

    Args:
        x: (..., K) bf16; under autocast to bf16 any float dtype.
        weight: (N, K) bf16 or fp32. N and K are multiples of 16.
        bias: (N,) bf16 or fp32, or None.
    Returns: (..., N) bf16. Gradients have the parameters' dtypes. A token with an infinite or NaN element gives NaN.
    Raises: ValueError for other shapes, dtypes, devices or tensor classes.

    Source: the format, Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433

    Replaces::

        y = F.linear(x, weight, bias)
    """
    return multiply_by(JointWeight("use"), "linear", x, [weight], [bias])[0]


def projections(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """`linear` for several layers with one input, such as query, key and value: one product, and one scale.

    Args:
        x: (..., K), as for `linear`.
        weights: (Nᵢ, K) each, as for `linear`.
        biases: (Nᵢ,) or None for each weight; None for no bias at all.
    Returns: (..., Nᵢ) bf16 for each weight.
    Raises: ValueError as `linear`, and if there are no weights, or not as many biases.
    """
    found: list[Tensor | None] = [None] * len(weights) if biases is None else [*biases]
    if not weights or len(found) != len(weights):
        raise ValueError(
            f"projections: weights and biases must be as many, at least one, got {len(weights)} and {len(found)}."
        )
    return multiply_by(JointWeight("use"), "projections", x, [*weights], found)


def gated_mlp(
    x: Tensor, gate: Layer, up: Layer | None, down: Layer, *, act: Act = "silu", keep: Keep = "bf16",
    **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """down(act(gate(x)) · up(x)) for three linear layers; all products in FP8.

    Args:
        x: (..., H), as for `linear`.
        gate: a weight (N, H), a pair (weight, bias (N,)), or a `torch.nn.Linear`. Where up is None gate has 2N rows:
            gate's, then up's.
        up: likewise, (N, H); or None.
        down: likewise, (M, N). All sizes are multiples of 16, all parameters bf16 or fp32.
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (relu squared) or "sigmoid".
        keep: how gate and up are kept for the backward pass: "bf16", or in half the memory as "fp8", rounded with a
            scale for each token.
    Returns: (..., M) bf16.
    Raises: ValueError as `linear`, and for an unknown act or keep.

    Source: the unit, Shazeer 2020, https://arxiv.org/abs/2002.05202
    """
    if unknown:
        raise unknown_keyword("gated_mlp", unknown, {})
    checked_act("gated_mlp", act)
    if keep not in KEEPS:
        raise ValueError(f"gated_mlp: keep must be one of {KEEPS}, got {keep!r}.")
    gate_weight, gate_bias = weight_and_bias("gated_mlp", "gate", gate)
    up_weight, up_bias = (None, None) if up is None else weight_and_bias("gated_mlp", "up", up)
    down_weight, down_bias = weight_and_bias("gated_mlp", "down", down)
    x = _check_input("gated_mlp", x)
    H = x.shape[-1]
    _check_layer("gated_mlp", "gate", gate_weight, gate_bias, x, H)
    N = gate_weight.shape[0]
    if up_weight is not None:
        _check_layer("gated_mlp", "up", up_weight, up_bias, x, H, N)
    elif N % (2 * ALIGNMENT):
        raise ValueError(f"gated_mlp: gate must have a multiple of {2 * ALIGNMENT} rows where up is None, got {N}.")
    _check_layer("gated_mlp", "down", down_weight, down_bias, x, N if up_weight is not None else N // 2)
    weights, biases = (gate_weight, up_weight, down_weight), (gate_bias, up_bias, down_bias)
    if torch.compiler.is_compiling():
        return multiply_gated_traced(x, weights, biases, act, keep, PRODUCTS)
    stores = Stores(JointWeight("use"), JointWeight("use"))
    return multiply_gated(x, stores, weights, biases, Unit(act, keep))


def quantize_rows(x: Tensor) -> Rows:
    """x in e4m3 with a scale for each row: x ≈ data · scale.

    Args:
        x: (M, N) bf16, fp16 or fp32.
    Returns: data (M, N) e4m3; scale (M, 1) fp32, powers of two.
    Raises: ValueError unless x is a matrix of floats.
    """
    _check_matrix("quantize_rows", "x", x)
    return rows.quantize_rows(x.detach())


def quantize_weight(*weights: Tensor) -> Weight:
    """A weight, or several stacked weights with one input, in e4m3 with a single scale: W ≈ data · scale[0].

    Args:
        weights: (Nᵢ, K) bf16, fp16 or fp32.
    Returns: data (N, K) e4m3; scale (N,) fp32, the same power of two N times.
    Raises: ValueError unless there are matrices of floats with one width.
    """
    for part in weights:
        _check_matrix("quantize_weight", "each weight", part)
    if len({part.shape[1] for part in weights}) != 1:
        raise ValueError(
            f"quantize_weight: weights must have one width K, got shapes {[tuple(part.shape) for part in weights]}."
        )
    parts = [part.detach() for part in weights]
    return weight.quantize_weight(parts, weight.measure_weights(parts))


# ------------------------------------------------------------------------------------------------------------- checks


def multiply_by(
    store: JointWeight, name: str, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]
) -> tuple[Tensor, ...]:
    """`multiply` with the copies in store, after checks with an operator's name."""
    x = _check_input(name, x)
    for weight_, bias in zip(weights, biases, strict=True):
        _check_layer(name, "weight", weight_, bias, x, x.shape[-1])
    if torch.compiler.is_compiling():
        return multiply_traced(x, weights, biases, PRODUCTS)
    return multiply(x, store, weights, biases, PRODUCTS)


def _check_input(name: str, x: Tensor) -> Tensor:
    """x, cast as autocast does."""
    check_tensors(name, x=x)
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype.is_floating_point and x.dtype != torch.float64:
        x = x.to(dtype)
    if x.dtype != torch.bfloat16 or x.dim() == 0:
        raise ValueError(f"{name}: x must be (..., K) torch.bfloat16, got {tuple(x.shape)} {x.dtype}.")
    if x.shape[-1] % ALIGNMENT or not x.shape[-1]:
        raise ValueError(f"{name}: x must have a width that is a multiple of {ALIGNMENT}, got {tuple(x.shape)}.")
    return x


def _check_layer(
    name: str, argument: str, weight: Tensor, bias: Tensor | None, x: Tensor, width: int, rows: int | None = None
) -> None:
    check_tensors(name, **{argument: weight, "bias": bias})
    if type(weight) not in _PLAIN:
        raise ValueError(f"{name}: {argument} must be a plain tensor, got {type(weight).__name__}.")
    N = weight.shape[0] if weight.dim() == 2 and rows is None else rows
    if tuple(weight.shape) != (N, width) or weight.dtype not in DTYPES or weight.device != x.device:
        raise ValueError(
            f"{name}: {argument} must be ({'N' if rows is None else rows}, {width}), bf16 or fp32, on {x.device}, "
            f"got {tuple(weight.shape)} {weight.dtype} on {weight.device}."
        )
    if weight.shape[0] % ALIGNMENT or not weight.shape[0]:
        raise ValueError(f"{name}: {argument} must have a multiple of {ALIGNMENT} rows, got {tuple(weight.shape)}.")
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype not in DTYPES or bias.device != x.device):
        raise ValueError(
            f"{name}: the bias of {argument} must be ({N},), bf16 or fp32, on {x.device}, got {tuple(bias.shape)} "
            f"{bias.dtype} on {bias.device}."
        )


def _check_matrix(name: str, argument: str, t: Tensor) -> None:
    check_tensors(name, **{argument.replace(" ", "_"): t})
    if t.dim() != 2 or t.dtype not in (*DTYPES, torch.float16):
        raise ValueError(f"{name}: {argument} must be a matrix in bf16, fp16 or fp32, got {tuple(t.shape)} {t.dtype}.")
