"""The feed-forward layer of a mixture of experts, from the router's choice on: y = Σ_k w_k · expert_k(x).

    expert(x) = down · h + down_bias,   h = act(gate) · up,   gate, up = gate_up · x + gate_up_bias

The choices of all tokens are sorted by expert on the device (routing.py), and the tokens' rows taken in that order into
a workspace (rows.py), so that every product (products.py) is one of neighbouring rows. The activation and its gradient
run between the products, at the memory's speed (units.py). The K results of a token are summed in a fixed order
(rows.py). Nothing is read back by the host: grids are as large as the worst split of tokens over experts needs, and
what is too much of them ends at once.

For the backward pass the inputs are kept, and z = gate_up · x + gate_up_bias. h is half as large and cheap to compute
again where z is read anyway; the experts' outputs are not needed, because the gradient of a token's routing weight,
dy · expert(x), is h · (downᵀ dy), both of which are at hand there.

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
from tigon.ops.experts.launches import _moe_mlp
from tigon.ops.experts.options import DEFAULT, HOMES, Expert, Options
from tigon.ops.experts.reference import moe_mlp_reference

# The stacked weights of all experts alone, or with their biases.
Experts = Tensor | tuple[Tensor, Tensor | None]


def moe_mlp(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Experts, down: Experts, *,
    config: Expert = DEFAULT, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """Each token through its K experts, weighted and summed.

    Args:
        x: (T, D), the tokens.
        top_k_index: (T, K) integers, the experts of each token. What lies outside [0, E) adds nothing and gets no
            gradient: expert parallelism marks the experts of other ranks by E.
        top_k_weights: (T, K), any float dtype: what the results are multiplied by.
        gate_up: (E, 2I, D), x's dtype, gate above up; or a pair of this weight and a bias (E, 2I). A model that stores
            (E, D, 2I) gives gate_up.transpose(1, 2), which is read where it lies, and whose gradient has its strides.
        down: (E, D, I), x's dtype, in any of the two orders too; or a pair of this weight and a bias (E, D).
        config: a `tigon.Expert`: the activation, and whether it is gated, clamped or shifted.
    Returns: (T, D) in x's dtype; summed in fp32 and rounded once.
    Raises: ValueError for shapes, dtypes, devices or options that do not fit.

    Under autocast the products are of its dtype, as `F.linear`'s are.

    Replaces::

        y = torch.zeros_like(x)
        for expert in range(len(gate_up)):
            token, choice = torch.where(top_k_index == expert)
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            z = F.linear(F.silu(gate) * up, down[expert])
            y = y.index_add(0, token, z * top_k_weights[token, choice, None])
    """
    # An option that belongs into `config`, or a bias that belongs beside its weight, gets a sentence that says so.
    if unknown:
        raise unknown_keyword("moe_mlp", unknown, HOMES)
    check_tensors("moe_mlp", x=x, top_k_index=top_k_index, top_k_weights=top_k_weights)
    gate_up_weight, gate_up_bias = weight_and_bias("moe_mlp", "gate_up", gate_up, linear=False)
    down_weight, down_bias = weight_and_bias("moe_mlp", "down", down, linear=False)
    experts = (gate_up_weight, down_weight, gate_up_bias, down_bias)
    # All refusals come before the first cast: a call that raises has allocated nothing.
    dtype = _check(x, top_k_index, top_k_weights, *experts, config.gated)
    # The common case: no cast, and no look at the dtypes of single tensors.
    if autocast_dtype(x.device.type) is None:
        return _moe(x, top_k_index, top_k_weights, *experts, config.options())
    # `to` is differentiable: each parameter's gradient comes back in the parameter's own dtype. The routing weights are
    # not cast, since they multiply in fp32 in any case.
    cast = [t if t is None else t.to(dtype) for t in (x, *experts)]
    with torch.autocast(autocast_device(x.device.type), enabled=False):  # done here, not again inside
        y = _moe(cast[0], top_k_index, top_k_weights, *cast[1:], config.options())  # type: ignore[arg-type,call-arg]
    # x's dtype, so that the residual stream keeps its dtype under autocast. F.linear would return autocast's.
    return y.to(x.dtype)


def _moe(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, options: Options,
) -> Tensor:  # fmt: skip
    experts = (gate_up, down, gate_up_bias, down_bias)
    # Without the index: use_triton asks for float tensors.
    if not use_triton(x, weights, *experts):
        return moe_mlp_reference(x, index, weights, *experts, options)
    wants = (x, weights, gate_up, gate_up_bias, down)  # a bias of `down` alone asks for nothing of z
    # z, the widest tensor of the layer, stays alive for a backward pass alone. The operator has to be told, as what it
    # returns lives on.
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wants)
    return _moe_mlp(x, index, weights, *experts, keep, *options)


def _check(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, gated: bool,
) -> torch.dtype:  # fmt: skip
    """Raise a ValueError for what does not fit, else return the dtype of the products: x's, or autocast's."""
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"moe_mlp: x must be (T, D) floats, got {tuple(x.shape)} {x.dtype}.")
    T, D = x.shape
    if index.dim() != 2 or index.shape[0] != T or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"moe_mlp: top_k_index must be (T, K) int64 or int32 with T = {T}, got {tuple(index.shape)} {index.dtype}."
        )
    # The routing weights may be fp32 beside bf16 tokens, as routers compute them; the experts may not.
    if weights.shape != index.shape or not weights.dtype.is_floating_point:
        raise ValueError(
            f"moe_mlp: top_k_weights must be floats of top_k_index's shape {tuple(index.shape)}, "
            f"got {tuple(weights.shape)} {weights.dtype}."
        )
    if down.dim() != 3 or down.shape[1] != D:
        raise ValueError(f"moe_mlp: down must be (E, D, I) with D = {D}, the width of x, got {tuple(down.shape)}.")
    E, _, width = down.shape
    # gate_up holds both matrices one above the other, or row by row in turn: two products become one.
    width *= 2 if gated else 1
    if gate_up.shape != (E, width, D):
        raise ValueError(
            f"moe_mlp: gate_up must be (E, {'2I' if gated else 'I'}, D) = {(E, width, D)} beside down "
            f"{tuple(down.shape)}, got {tuple(gate_up.shape)}."
        )
    for name, bias, size in (("gate_up", gate_up_bias, width), ("down", down_bias, D)):
        if bias is not None and bias.shape != (E, size):
            raise ValueError(f"moe_mlp: {name} must have a bias that is {(E, size)}, got {tuple(bias.shape)}.")
    # Autocast leaves fp64 alone, as torch's does.
    autocast = autocast_dtype(x.device.type) if x.dtype != torch.float64 else None
    experts = (
        ("gate_up must be", gate_up), ("down must be", down), ("gate_up must have a bias that is", gate_up_bias),
        ("down must have a bias that is", down_bias),
    )  # fmt: skip
    for must, t in (("x must be", x), ("top_k_index must be", index), ("top_k_weights must be", weights), *experts):
        if t is None:
            continue
        # A DTensor's local part would be multiplied as if it were the whole. FSDP has gathered the weights before this
        # call.
        if hasattr(t, "device_mesh"):
            raise ValueError(f"moe_mlp: {must} a plain tensor, got a DTensor: gather it with full_tensor().")
        if t.device != x.device:
            raise ValueError(f"moe_mlp: {must} on x's device {x.device}, got {t.device}.")
    for must, t in experts:
        # Under autocast all of them are cast to one dtype, whatever they have.
        if t is not None and t.dtype != x.dtype and autocast is None:
            raise ValueError(f"moe_mlp: {must} of x's dtype {x.dtype}, got {t.dtype}.")
    return autocast or x.dtype
