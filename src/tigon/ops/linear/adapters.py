"""Low-rank adapters on frozen linear layers, all layers that share an input: yᵢ = x Wᵢᵀ + bᵢ + sᵢ (x Aᵢᵀ) Bᵢᵀ.

An adapter's products cost almost no FLOPs but much memory traffic: written out, every layer reads x and y several
times more often than its frozen product does. Here x is read once for all adapters; the adapter writes y, and the
frozen product accumulates onto y in the epilogue.

    forward     t = x [A…]ᵀ;  yᵢ = sᵢ tᵢ Bᵢᵀ;  yᵢ += x Wᵢᵀ
    backward    uᵢ = sᵢ dyᵢ Bᵢ;  dx = [u…] [A…];  dx += Σ dyᵢ Wᵢ;  d[A…] = [u…]ᵀ x;  dBᵢ = sᵢ dyᵢᵀ tᵢ
    saved       x and t, r numbers per token

The frozen weights get no gradient. A weight in another representation, such as 4-bit, is made dense in the forward pass
and again in the backward pass.

With fp32 adapters and bf16 x, outside autocast, results are as if x were widened: each skinny factor is represented as
the sum of two bf16 numbers, 16 bits together, and x is not copied.

With dropout each adapter has a separate input, mᵢ ⊙ x / (1-p). A's three products then use the kernels in
tigon.ops.lora_dropout, which recompute the masks mᵢ where they read x; 1/(1-p) is part of sᵢ.

Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import (
    add_anchor,
    autocast_device,
    autocast_dtype,
    is_graph_retained,
    load_tensors,
    make_function,
    save_tensors,
    use_triton,
)
from tigon.ops.acts import Act, checked_act
from tigon.ops.gated import _gated_fwd, gated_backward, gated_unit
from tigon.ops.linear.adapter_products import Group, multiply_frozen, multiply_frozen_transposed
from tigon.ops.linear.lora import FrozenFP8, LoRA, checked_layers, dense, is_fp8, list_tensors, multiplier, runs_by_hand
from tigon.ops.lora_dropout import Masks, draw_masks, keep_mask, kept_share


def lora_linear(
    x: Tensor, layers: Sequence[LoRA], *, saved_by: tuple[Any, Any] | None = None
) -> tuple[Tensor, ...]:  # fmt: skip
    """x Wᵢᵀ + biasᵢ + scaleᵢ · (x Aᵢᵀ) Bᵢᵀ for each layer, saving x and x Aᵢᵀ for the backward pass.

    Args:
        x: (..., H).
        layers: one or more `tigon.LoRA` that share the input x, such as queries, keys and values. Ranks, scales and
            adapter dtypes may differ. Under autocast x, weights and adapters are cast as in `F.linear`.
        saved_by: a checkpoint's hooks (pack, unpack), used to save before the wide products: a checkpoint recomputes
            up to the last saved tensor.

    Returns: a tuple of (..., Nᵢ) in x's dtype. x, the adapters and the biases get gradients; a gradient has its
        parameter's dtype and is rounded once.

    Raises: ValueError for mismatched shapes, dtypes or devices, and for a weight that requires a gradient.

    Replaces, for each layer::

        y = F.linear(x, weight, bias) + scale * F.linear(F.linear(x, a), b)

    With a dropout of p, `F.dropout(x, p)` stands before a, with masks of another generator.
    """
    layers = tuple(layers)
    dtype, autocast = checked_layers("lora_linear", x, layers)
    if not runs_by_hand(dtype, autocast, layers, x):
        return lora_linear_reference(x, layers)
    # Outside the Function: the recipes in tigon.fusion.memory.recompute recognise casts of tensors they can recompute.
    x = x if x.dtype == dtype else x.to(dtype)
    saved_by = saved_by if torch.is_grad_enabled() else None
    plan = Group(layers, dtype, wide=not autocast)
    result = _lora_linear(x, plan, saved_by, *plan.tensors(layers))
    # `add_anchor` may have appended an empty tensor.
    return result[: len(layers)]  # type: ignore[no-any-return]


def gated_lora_linear(
    gate: Tensor, up: Tensor | None, layer: LoRA, *, act: Act = "silu", inplace: bool = False,
    saved_by: tuple[Any, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The adapted layer of act(gate) · up, saving only gate and up: `gated_linear` with LoRA.

    Args:
        gate: (..., N), or (..., 2N) holding gate and up side by side when up is None.
        up: (..., N), gate's dtype, or None.
        layer: the layer applied to the product; see `lora_linear`.
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (relu squared) or "sigmoid".
        inplace: the backward pass overwrites gate and up with their gradients, so no other code may read them. Ignored
            if the graph is retained (`retain_graph=True`) and under torch.compile.
        saved_by: as in `lora_linear`; only gate and up are then saved.

    Returns: (..., M) in gate's dtype.

    Raises: ValueError for mismatched shapes or dtypes, or an unknown act.

    Replaces::

        h = F.silu(gate) * up
        y = F.linear(h, weight, bias) + scale * F.linear(F.linear(h, a), b)
    """
    checked_act("gated_lora_linear", act)
    device = gate.device.type
    # Autocast does not see into a Function, so the casts that F.linear would make are made here. fp64 stays, as in
    # F.linear.
    cast = autocast_dtype(device)
    if cast is not None and gate.dtype != torch.float64:
        gate, up = gate.to(cast), None if up is None else up.to(cast)
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise ValueError(
            f"gated_lora_linear: up must match gate, {tuple(gate.shape)} {gate.dtype}, got {tuple(up.shape)} "
            f"{up.dtype}."
        )
    if gate.dim() == 0 or (up is None and gate.shape[-1] % 2):
        raise ValueError(f"gated_lora_linear: gate must be (..., 2N) where up is None, got {tuple(gate.shape)}.")
    hidden = gate if up is not None else gate[..., : gate.shape[-1] // 2]
    dtype, autocast = checked_layers("gated_lora_linear", hidden, (layer,))
    # The backward pass needs the gated unit's kernel, which overwrites the inputs and has no torch path.
    if not runs_by_hand(dtype, autocast, (layer,), gate) or not use_triton(gate, up, *list_tensors((layer,))):
        return lora_linear(gated_unit(gate, up, act=act), (layer,), saved_by=saved_by)[0]
    saved_by = saved_by if torch.is_grad_enabled() else None
    plan = Group((layer,), dtype, wide=not autocast)
    return _gated_lora_linear(gate, up, plan, act, inplace, saved_by, *plan.tensors((layer,)))[0]  # type: ignore[no-any-return]


def lora_linear_reference(x: Tensor, layers: Sequence[LoRA]) -> tuple[Tensor, ...]:
    """Each layer separately, in torch operations: adapters compute in their dtype if wider than x's."""
    device, dtype = x.device.type, autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)
        with torch.autocast(autocast_device(device), enabled=False):
            cast = [
                layer._replace(
                    a=layer.a.to(dtype), b=layer.b.to(dtype), bias=None if layer.bias is None else layer.bias.to(dtype)
                )
                for layer in layers
            ]
            return lora_linear_reference(x, cast)
    results = []
    # A single draw for all layers, as in the fused path: equal torch seeds then give equal masks.
    masks = draw_masks([layer.dropout for layer in layers], x.device)
    for i, layer in enumerate(layers):
        if is_fp8(layer.weight) and x.dtype is torch.bfloat16:
            y = _multiply_frozen(x, layer.weight)[0]
            y = y if layer.bias is None else y + layer.bias
        elif multiplier(layer.weight) is None:
            y = F.linear(x, dense(layer.weight, x.dtype), layer.bias)
        else:
            y = layer.weight.product(x)  # type: ignore[union-attr]
        # fp32 adapters compute in fp32, as in PEFT. The sum is rounded once, to x's dtype.
        wide = torch.promote_types(x.dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
        results.append((y + adapter_reference(x, i, layer, masks, wide)).to(x.dtype))
    return tuple(results)


def adapter_reference(x: Tensor, i: int, layer: LoRA, masks: Masks | None, dtype: torch.dtype) -> Tensor:
    """scale · (dropped(x) Aᵀ) Bᵀ, in torch operations in dtype; i: the layer's index in the group."""
    scale = layer.scale
    if masks is not None:
        # A select, not a product: a dropped infinite x gives 0, whereas 0 · inf would be NaN.
        x = torch.where(keep_mask(masks, i, x.shape[:-1].numel(), x.shape[-1]).view(x.shape), x, 0.0)
        scale = scale / kept_share(layer.dropout)
    return F.linear(F.linear(x.to(dtype), layer.a.to(dtype)), layer.b.to(dtype)) * scale


# --------------------------------------------------------------------------------------------------------- autograd


def _rows(dy: Tensor | None) -> Tensor | None:
    return None if dy is None else dy.reshape(-1, dy.shape[-1])


def _lora_linear_fwd(ctx: Any, x: Tensor, plan: Group, saved_by: Any, *tensors: Any) -> tuple[Tensor, ...]:
    ctx.set_materialize_grads(False)
    ctx.plan = plan
    a, b, biases, weights = plan.split(tensors)
    need_a, need_b = plan.split(ctx.needs_input_grad[3:])[:2]
    rows = x.reshape(-1, x.shape[-1])
    joined, thin = plan.factors(a, b)
    t = plan.thin_products(rows, joined)
    own_x = x if any(need_a) else None
    # Before the wide products: a checkpoint's recomputation stops at the last saved tensor and skips them.
    save_tensors(ctx, saved_by, own_x, t if any(need_b) else None, *a, *b, *weights)
    ys = [y.view(*x.shape[:-1], y.shape[1]) for y in plan.results(rows, t, thin, biases, weights)]
    if saved_by is not None:
        return tuple(ys)
    unsaved = [0] * (own_x is None) + [3 + 2 * plan.count + i for i, bias in enumerate(biases) if bias is not None]
    return (*ys, *add_anchor(ctx, (x, plan, saved_by, *tensors), tuple(unsaved)))


def _lora_linear_bwd(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    plan: Group = ctx.plan
    n = plan.count
    x, t, *rest = load_tensors(ctx)
    dys = [_rows(dy) for dy in given[:n]]
    a, b, weights = (rest[i : i + n] for i in range(0, 3 * n, n))
    need_x, needs = ctx.needs_input_grad[0], plan.split(ctx.needs_input_grad[3:])
    dx: Tensor | None = None
    da: list[Tensor | None] = [None] * n
    if need_x or any(needs[0]):
        joined, thin = plan.factors(a, b)
        u = plan.upstream(dys, thin)
        if need_x:
            dx = plan.input_gradient(dys, u, joined, weights)
            dx = dx.view(*next(dy for dy in given if dy is not None).shape[:-1], dx.shape[1])
        if any(needs[0]):
            da = plan.a_gradients(dys, u, x.reshape(-1, x.shape[-1]), a, needs[0])
    db = plan.b_gradients(dys, t, b, needs[1]) if any(needs[1]) else [None] * n
    dbias = [None if dy is None or not need else dy.sum(0) for dy, need in zip(dys, needs[2], strict=True)]
    return dx, None, None, *da, *db, *dbias


def _gated_lora_linear_fwd(
    ctx: Any, gate: Tensor, up: Tensor | None, plan: Group, act: str, inplace: bool, saved_by: Any, *tensors: Any
) -> tuple[Tensor, ...]:
    ctx.set_materialize_grads(False)
    ctx.plan, ctx.act, ctx.inplace = plan, act, inplace
    a, b, biases, weights = plan.split(tensors)
    need_b = ctx.needs_input_grad[7]
    if saved_by is not None:
        # A checkpoint recomputes no further than this: t needs the product, which the backward pass makes anyway.
        save_tensors(ctx, saved_by, gate, up, None, *a, *b, *weights)
    product = _gated_fwd(gate, up, act, 1.0, 1.0).view(-1, a[0].shape[1])
    joined, thin = plan.factors(a, b)
    t = plan.thin_products(product, joined)
    if saved_by is None:
        save_tensors(ctx, saved_by, gate, up, t if need_b else None, *a, *b, *weights)
    y = plan.results(product, t, thin, biases, weights)[0]
    y = y.view(*gate.shape[:-1], y.shape[1])
    # The bias is the only differentiable input that no saved tensor leads to.
    if saved_by is None and biases[0] is not None:
        return (y, *add_anchor(ctx, (gate, up, plan, act, inplace, saved_by, *tensors), (8,)))
    return (y,)


def _gated_lora_linear_bwd(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    plan: Group = ctx.plan
    gate, up, t, *rest = load_tensors(ctx)
    a, b, weights = (rest[i : i + 1] for i in range(3))
    need_gate, need_up, *_, need_a, need_b, need_bias, _ = ctx.needs_input_grad
    rows = dy.reshape(-1, dy.shape[-1])
    joined, thin = plan.factors(a, b)
    u = plan.upstream([rows], thin)
    dgate = dup = da = db = None
    recomputed = need_a or (need_b and t is None)
    if need_gate or need_up:
        # scratch first holds the product's gradient. The kernel overwrites scratch with the product, which dA needs.
        scratch = plan.input_gradient([rows], u, joined, weights)
        over = ctx.inplace and not is_graph_retained()
        if need_gate:
            dgate = gate.detach() if over else torch.empty_like(gate, memory_format=torch.contiguous_format)
        if need_up and up is not None:
            dup = up.detach() if over else torch.empty_like(up, memory_format=torch.contiguous_format)
        gated_backward(scratch, gate, up, ctx.act, 1.0, 1.0, dgate, dup, scratch if recomputed else None)
        if over:
            for written in (dgate, dup):
                if written is not None:  # so that PyTorch raises if another backward pass saved the tensor
                    torch.autograd.graph.increment_version(written)
    elif recomputed:
        scratch = _gated_fwd(gate, up, ctx.act, 1.0, 1.0).view(-1, a[0].shape[1])
    if need_b:
        db = plan.b_gradients([rows], plan.thin_products(scratch, joined) if t is None else t, b, [True])[0]
    if need_a:
        da = plan.a_gradients([rows], u, scratch, a, [True])[0]
    return dgate, dup, None, None, None, None, da, db, rows.sum(0) if need_bias else None


def _multiply_frozen_fwd(ctx: Any, x: Tensor, weight: FrozenFP8) -> tuple[Tensor, ...]:
    """x, an FP8 weight → x Wᵀ, alone and without bias. x is not saved."""
    ctx.set_materialize_grads(False)
    ctx.weight = weight
    y = multiply_frozen(x.reshape(-1, x.shape[-1]), weight)
    return (y.view(*x.shape[:-1], y.shape[1]), *add_anchor(ctx, (x,), (0,)))


def _multiply_frozen_bwd(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    dx = multiply_frozen_transposed(dy.reshape(-1, dy.shape[-1]), ctx.weight)
    return dx.view(*dy.shape[:-1], dx.shape[1]), None


_multiply_frozen = make_function(_multiply_frozen_fwd, _multiply_frozen_bwd)
_lora_linear = make_function(_lora_linear_fwd, _lora_linear_bwd)
_gated_lora_linear = make_function(_gated_lora_linear_fwd, _gated_lora_linear_bwd)
