"""Mixture-of-experts feed-forward layer, given the router's choices: y = Σ_k w_k · expert_k(x).

    expert(x) = down · h + down_bias,   h = act(gate) · up,   gate, up = gate_up · x + gate_up_bias

Sort the choices by expert on the device (routing.py) and gather the tokens' rows in that order into a workspace
(rows.py), so that every matrix product (products.py) reads contiguous rows. Apply the activation and its gradient
between the products, at memory bandwidth (units.py). Sum the K results per token in a fixed order (rows.py). The host
reads nothing back: launch grids cover the worst split of tokens over experts, and surplus programs exit at once.

The backward pass needs the inputs and z = gate_up · x + gate_up_bias. It recomputes h, which is half as large as z and
cheap wherever z is read anyway. The experts' outputs are not saved: the gradient for a routing weight, dy · expert(x),
equals h · (downᵀ dy), and the backward pass has both factors.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; grouped products: Gale et al. 2022 (MegaBlocks),
https://arxiv.org/abs/2211.15841; the clamped unit: gpt-oss, https://arxiv.org/abs/2508.10925.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from tigon.kernels import (
    autocast_device,
    autocast_dtype,
    check_tensors,
    unknown_keyword,
    use_triton,
    weight_and_bias,
)
from tigon.ops.example import Example
from tigon.ops.experts.adapter import ExpertAdapter, Factors, cast_factors, check_adapter
from tigon.ops.experts.launches import _moe_mlp
from tigon.ops.experts.options import DEFAULT, HOMES, Expert, Options
from tigon.ops.experts.quantized import QuantizedExperts
from tigon.ops.experts.reference import moe_mlp_reference

# A stack of weights for all experts, and stacks without or with biases.
Stack = Tensor | QuantizedExperts
Experts = Stack | tuple[Stack, Tensor | None]


def moe_mlp(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Experts, down: Experts, *,
    config: Expert = DEFAULT, gate_up_adapter: ExpertAdapter | None = None,
    down_adapter: ExpertAdapter | None = None, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """Run each token through its K experts, and sum the weighted results.

    Args:
        x: (T, D), the tokens.
        top_k_index: (T, K) int64 or int32, the experts chosen for each token. Indices outside [0, E) add nothing and
            get no gradient; expert parallelism marks experts on other ranks by E.
        top_k_weights: (T, K), any float dtype, the routing weights that multiply the experts' results.
        gate_up: (E, 2I, D), x's dtype, gate above up; or a pair (weight, bias) with a bias (E, 2I). For weights stored
            as (E, D, 2I) pass gate_up.transpose(1, 2): the kernels read the view without a copy, and the gradient has
            the same strides.
        down: (E, D, I), x's dtype, in either memory order; or a pair (weight, bias) with a bias (E, D). In place of a
            weight both arguments take a `tigon.QuantizedExperts`, which stays in 4 bits and gets no gradient: the
            result is that of its `dequantize(x.dtype)`.
        config: a `tigon.Expert`: activation, gate, clamp and offset.
        gate_up_adapter: a `tigon.ExpertAdapter`, A (E, r, D) and B (E, 2I, r): adds scale · B (A x) to gate_up's
            product. The sum of weight and adapter is never built.
        down_adapter: likewise for down, A (E, r, I) and B (E, D, r). The two ranks may differ.
    Returns: (T, D) in x's dtype; summed in fp32 and rounded once.
    Raises: ValueError for invalid shapes, dtypes, devices or options.

    Under autocast the products use autocast's dtype, as `F.linear` does.

    Replaces::

        y = torch.zeros_like(x)
        for expert in range(len(gate_up)):
            token, choice = torch.where(top_k_index == expert)
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            z = F.linear(F.silu(gate) * up, down[expert])
            y = y.index_add(0, token, z * top_k_weights[token, choice, None])
    """
    if unknown:
        raise unknown_keyword("moe_mlp", unknown, HOMES)
    check_tensors("moe_mlp", x=x, top_k_index=top_k_index, top_k_weights=top_k_weights)
    gate_up_weight, gate_up_bias = _read_experts("gate_up", gate_up)
    down_weight, down_bias = _read_experts("down", down)
    experts = (gate_up_weight, down_weight, gate_up_bias, down_bias)
    dtype = _check(x, top_k_index, top_k_weights, *experts, config.gated)
    check_adapter("gate_up_adapter", gate_up_adapter, tuple(gate_up_weight.shape), x)
    check_adapter("down_adapter", down_adapter, tuple(down_weight.shape), x)
    factors = [cast_factors(adapter, dtype) for adapter in (gate_up_adapter, down_adapter)]
    if autocast_dtype(x.device.type) is None:
        return _moe(x, top_k_index, top_k_weights, *experts, *factors, config.options())
    # `to` is differentiable: each gradient returns in its parameter's dtype. Routing weights multiply in fp32, so they
    # need no cast.
    cast = [t.to(dtype) if isinstance(t, Tensor) else t for t in (x, *experts)]
    with torch.autocast(autocast_device(x.device.type), enabled=False):  # tensors are cast already
        y = _moe(cast[0], top_k_index, top_k_weights, *cast[1:], *factors, config.options())  # type: ignore[arg-type,call-arg]
    return y.to(x.dtype)


def _read_experts(argument: str, layer: Experts) -> tuple[Stack, Tensor | None]:
    """The weights and the bias of gate_up or down."""
    weight, bias = layer if isinstance(layer, tuple) and len(layer) == 2 else (layer, None)
    if isinstance(weight, QuantizedExperts) and (bias is None or isinstance(bias, Tensor)):
        return weight, bias
    return weight_and_bias("moe_mlp", argument, layer, linear=False)


def _moe(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Stack, down: Stack, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, gate_up_factors: Factors, down_factors: Factors, options: Options,
) -> Tensor:  # fmt: skip
    stacks = [w.pack() if isinstance(w, QuantizedExperts) else w for w in (gate_up, down)]
    biases = (gate_up_bias, down_bias)
    # top_k_index is omitted: use_triton expects float tensors.
    tensors = (w if isinstance(w, Tensor) else w.table for w in stacks)
    if not use_triton(x, weights, *tensors, *biases) or gate_up_factors[0] is not None or down_factors[0] is not None:
        dense = (w.dequantize(x.dtype) if isinstance(w, QuantizedExperts) else w for w in (gate_up, down))
        return moe_mlp_reference(x, index, weights, *dense, *biases, options, gate_up_factors, down_factors)
    experts = [w if isinstance(w, Tensor) else w.codes for w in stacks] + [*biases]
    frozen = [t for w in stacks for t in ((None, None) if isinstance(w, Tensor) else w[1:])]
    wants = (x, weights, *experts[:3])  # the gradient for down's bias does not need z
    # Save z, the layer's widest tensor, only if a backward pass can follow: an operator's outputs stay allocated.
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wants)
    return _moe_mlp(x, index, weights, *experts, keep, *frozen, *options)


def _check(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Stack, down: Stack, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, gated: bool,
) -> torch.dtype:  # fmt: skip
    """Raise a ValueError for invalid arguments, else return the products' dtype: x's, or autocast's."""
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"moe_mlp: x must be (T, D) floats, got {tuple(x.shape)} {x.dtype}.")
    T, D = x.shape
    if index.dim() != 2 or index.shape[0] != T or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"moe_mlp: top_k_index must be (T, K) int64 or int32 with T = {T}, got {tuple(index.shape)} {index.dtype}."
        )
    if weights.shape != index.shape or not weights.dtype.is_floating_point:
        raise ValueError(
            f"moe_mlp: top_k_weights must be floats of top_k_index's shape {tuple(index.shape)}, "
            f"got {tuple(weights.shape)} {weights.dtype}."
        )
    if len(down.shape) != 3 or down.shape[1] != D:
        raise ValueError(f"moe_mlp: down must be (E, D, I) with D = {D}, the width of x, got {tuple(down.shape)}.")
    E, _, width = down.shape
    width *= 2 if gated else 1
    if gate_up.shape != (E, width, D):
        raise ValueError(
            f"moe_mlp: gate_up must be (E, {'2I' if gated else 'I'}, D) = {(E, width, D)} beside down "
            f"{tuple(down.shape)}, got {tuple(gate_up.shape)}."
        )
    for name, bias, size in (("gate_up", gate_up_bias, width), ("down", down_bias, D)):
        if bias is not None and bias.shape != (E, size):
            raise ValueError(f"moe_mlp: {name} must have a bias that is {(E, size)}, got {tuple(bias.shape)}.")
    autocast = autocast_dtype(x.device.type) if x.dtype != torch.float64 else None
    experts = (
        ("gate_up must be", gate_up), ("down must be", down), ("gate_up must have a bias that is", gate_up_bias),
        ("down must have a bias that is", down_bias),
    )  # fmt: skip
    for must, t in (("x must be", x), ("top_k_index must be", index), ("top_k_weights must be", weights), *experts):
        if t is None:
            continue
        # A DTensor's local shard would silently be used as the full weight. FSDP gathers the weights before this call.
        if hasattr(t, "device_mesh"):
            raise ValueError(f"moe_mlp: {must} a plain tensor, got a DTensor: gather it with full_tensor().")
        if t.device != x.device:
            raise ValueError(f"moe_mlp: {must} on x's device {x.device}, got {t.device}.")
    for must, t in experts:
        if isinstance(t, Tensor) and t.dtype != x.dtype and autocast is None:
            raise ValueError(f"moe_mlp: {must} of x's dtype {x.dtype}, got {t.dtype}.")
    return autocast or x.dtype


def _route_in_turn(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    token = torch.arange(len(x), device=x.device)
    index = torch.stack((token % len(down), (token + 3) % len(down)), 1)
    return moe_mlp(x, index, weights, (gate_up, None), (down, None))


EXAMPLES = {
    "moe_mlp": Example("Experts", ((64, 128), (64, 2), (8, 128, 128), (8, 128, 64)), _route_in_turn),
}
