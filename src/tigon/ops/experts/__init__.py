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

import torch
from torch import Tensor

from tigon.ops.acts import Act, checked_act
from tigon.ops.experts.launches import _moe_mlp
from tigon.ops.experts.options import Options
from tigon.ops.experts.reference import moe_mlp_reference
from tigon.runtime import autocast_device, autocast_dtype, check_tensors, use_triton


def moe_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: Act = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Each token through its K experts, weighted and summed.

    Args:
        x: (T, D), the tokens.
        top_k_index: (T, K) integers, the experts of each token. What lies outside [0, E) adds nothing and gets no
            gradient: expert parallelism marks the experts of other ranks by E.
        top_k_weights: (T, K), any float dtype: what the results are multiplied by.
        gate_up: (E, 2I, D), x's dtype, gate above up. A model that stores (E, D, 2I) gives gate_up.transpose(1, 2),
            which is read where it lies, and whose gradient has its strides.
        down: (E, D, I), x's dtype, in any of the two orders too.
        gate_up_bias, down_bias: (E, 2I) and (E, D), x's dtype, or None.
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu" or "relu2" (the square of relu).
        gated: False where h = act(up), and gate_up is (E, I, D), up alone.
        interleaved: gate and up alternate, row by row of gate_up, as in gpt-oss.
        alpha: h = act(alpha · gate) / alpha · up; with silu this is gate · sigmoid(alpha · gate).
        limit: gate is held to at most this, and up to between −limit and limit.
        up_offset: added to up. gpt-oss has alpha 1.702, limit 7 and up_offset 1.
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
    check_tensors("moe_mlp", x=x, top_k_weights=top_k_weights, gate_up=gate_up, down=down)
    options = Options(act, gated, interleaved, float(alpha), None if limit is None else float(limit), float(up_offset))
    _check_options(options)
    dtype = _check(x, top_k_index, top_k_weights, gate_up, down, gate_up_bias, down_bias, gated)
    floats = (x, gate_up, down, gate_up_bias, down_bias)
    if any(t is not None and t.dtype != dtype for t in floats):
        cast = [t if t is None else t.to(dtype) for t in floats]
        with torch.autocast(autocast_device(x.device.type), enabled=False):  # done here, not again inside
            y = moe_mlp(cast[0], top_k_index, top_k_weights, *cast[1:], **options._asdict())  # type: ignore[arg-type]
        return y.to(x.dtype)
    if autocast_dtype(x.device.type) is not None:
        with torch.autocast(autocast_device(x.device.type), enabled=False):
            return moe_mlp(x, top_k_index, top_k_weights, gate_up, down, gate_up_bias, down_bias, **options._asdict())
    tensors = (gate_up, down, gate_up_bias, down_bias)
    if not use_triton(x, top_k_weights, *tensors):
        return moe_mlp_reference(x, top_k_index, top_k_weights, *tensors, options)
    wants = (x, top_k_weights, gate_up, gate_up_bias, down)  # a bias of `down` alone asks for nothing of z
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wants)
    return _moe_mlp(x, top_k_index, top_k_weights, *tensors, keep, *options)


def _check_options(options: Options) -> None:
    checked_act("moe_mlp", options.act)
    if options.alpha != 1.0 and options.act != "silu":
        raise ValueError(f"moe_mlp: alpha must be 1 where act is not 'silu', got {options.alpha} and {options.act!r}.")
    if not options.alpha > 0.0:
        raise ValueError(f"moe_mlp: alpha must be positive, got {options.alpha}.")
    if options.limit is not None and not options.limit > 0.0:
        raise ValueError(f"moe_mlp: limit must be positive or None, got {options.limit}.")
    plain = Options(options.act, gated=False)
    if not options.gated and options != plain:
        given = (f"{n} = {v}" for n, v, other in zip(Options._fields, options, plain, strict=True) if v != other)
        raise ValueError(
            "moe_mlp: interleaved, alpha, limit and up_offset must be left out where gated is False, got "
            f"{' and '.join(given)}."
        )


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
    if weights.shape != index.shape or not weights.dtype.is_floating_point:
        raise ValueError(
            f"moe_mlp: top_k_weights must be floats of top_k_index's shape {tuple(index.shape)}, "
            f"got {tuple(weights.shape)} {weights.dtype}."
        )
    if down.dim() != 3 or down.shape[1] != D:
        raise ValueError(f"moe_mlp: down must be (E, D, I) with D = {D}, the width of x, got {tuple(down.shape)}.")
    E, _, width = down.shape
    width *= 2 if gated else 1
    if gate_up.shape != (E, width, D):
        raise ValueError(
            f"moe_mlp: gate_up must be (E, {'2I' if gated else 'I'}, D) = {(E, width, D)} beside down "
            f"{tuple(down.shape)}, got {tuple(gate_up.shape)}."
        )
    for name, bias, size in (("gate_up_bias", gate_up_bias, width), ("down_bias", down_bias, D)):
        if bias is not None and bias.shape != (E, size):
            raise ValueError(f"moe_mlp: {name} must be {(E, size)}, got {tuple(bias.shape)}.")
    autocast = autocast_dtype(x.device.type) if x.dtype != torch.float64 else None
    named = (("gate_up", gate_up), ("down", down), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias))
    for name, t in (("x", x), ("top_k_index", index), ("top_k_weights", weights), *named):
        if t is None:
            continue
        if hasattr(t, "device_mesh"):
            raise ValueError(f"moe_mlp: {name} must be a plain tensor, got a DTensor: gather it with full_tensor().")
        if t.device != x.device:
            raise ValueError(f"moe_mlp: {name} must be on x's device {x.device}, got {t.device}.")
    for name, t in named:
        if t is not None and t.dtype != x.dtype and autocast is None:
            raise ValueError(f"moe_mlp: {name} must have x's dtype {x.dtype}, got {t.dtype}.")
    return autocast or x.dtype
