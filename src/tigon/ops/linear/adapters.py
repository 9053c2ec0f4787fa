"""Low-rank adapters on frozen linear layers, all layers of one input together: yᵢ = x Wᵢᵀ + bᵢ + sᵢ (x Aᵢᵀ) Bᵢᵀ.

An adapter's products cost nothing in FLOPs and much in memory traffic: written out, every layer reads x and y several
times more than its frozen product does. Here x is read once for all adapters, and y is written by the adapter and then
added to by the frozen product itself, in its epilogue.

    forward     t = x [A…]ᵀ;  yᵢ = sᵢ tᵢ Bᵢᵀ;  yᵢ += x Wᵢᵀ
    backward    uᵢ = sᵢ dyᵢ Bᵢ;  dx = [u…] [A…];  dx += Σ dyᵢ Wᵢ;  d[A…] = [u…]ᵀ x;  dBᵢ = sᵢ dyᵢᵀ tᵢ
    kept        x and t, r numbers a token

The frozen weights get no gradient. A weight in a form of its own, 4-bit say, is made dense in the forward pass, and
again in the backward pass.

Adapters in fp32 beside x in bf16, outside of autocast, compute as if x were widened: each skinny factor stands as the
sum of two bf16 numbers, 16 bits together, and no copy of x is made.

With dropout each adapter has an x of its own, mᵢ ⊙ x / (1-p). The three products of A then go through the kernels of
tigon.ops.lora_dropout, which compute the masks mᵢ again where they read x, and 1/(1-p) is part of sᵢ.

Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import (
    autocast_device,
    autocast_dtype,
    bind_apply,
    is_graph_retained,
    load_tensors,
    make_anchor,
    run_once_differentiable,
    save_tensors,
    use_triton,
)
from tigon.ops.acts import Act, checked_act
from tigon.ops.gated import _gated_fwd, gated_backward, gated_unit
from tigon.ops.linear.adapter_products import Group
from tigon.ops.linear.lora import LoRA, checked_layers, dense, multiplier, runs_by_hand
from tigon.ops.lora_dropout import Masks, draw_masks, keep_mask, kept_share


def lora_linear(
    x: Tensor, layers: Sequence[LoRA], *, saved_by: tuple[Any, Any] | None = None
) -> tuple[Tensor, ...]:  # fmt: skip
    """x Wᵢᵀ + biasᵢ + scaleᵢ · (x Aᵢᵀ) Bᵢᵀ for each layer, keeping x and x Aᵢᵀ for the backward pass.

    Args:
        x: (..., H).
        layers: the layers that x goes through, one or more `tigon.LoRA`: those of queries, keys and values, say. Ranks,
            scales and the dtypes of adapters may differ. Under autocast x, weights and adapters are cast as `F.linear`
            casts them.
        saved_by: a checkpoint's hooks (pack, unpack), to save by before the wide products: a checkpoint computes again
            up to the last tensor that was saved.
    Returns: a tuple of (..., Nᵢ) in x's dtype. Gradients go to x, the adapters and the biases; a gradient has its
        parameter's dtype and is rounded once.
    Raises: ValueError for shapes, dtypes or devices that do not fit, and for a weight that wants a gradient.

    Replaces, for each layer::

        y = F.linear(x, weight, bias) + scale * F.linear(F.linear(x, a), b)

    With a dropout of p, `F.dropout(x, p)` stands before a, with masks of another generator.
    """
    # An iterator is read once here and several times below.
    layers = tuple(layers)
    dtype, autocast = checked_layers("lora_linear", x, layers)
    # The reference takes x as it came: it narrows under autocast itself, and draws masks of its own.
    if not runs_by_hand(dtype, autocast, layers, x):
        return lora_linear_reference(x, layers)
    # Outside of the Function: the recipes of tigon.fusion.memory.recompute know casts of what they can compute again.
    x = x if x.dtype == dtype else x.to(dtype)
    # Without gradients nothing is saved, by a checkpoint's hooks neither.
    saved_by = saved_by if torch.is_grad_enabled() else None
    plan = Group(layers, dtype, wide=not autocast)
    # Tensors go in flat, since autograd looks for them among the arguments and not inside of tuples. What is no tensor
    # travels in the plan.
    result = _lora_linear(x, plan, saved_by, *plan.tensors(layers))
    # Behind the results there may be the empty tensor of `make_anchor`, which is nobody's result.
    return result[: len(layers)]  # type: ignore[no-any-return]


def gated_lora_linear(
    gate: Tensor, up: Tensor | None, layer: LoRA, *, act: Act = "silu", inplace: bool = False,
    saved_by: tuple[Any, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The adapted layer of act(gate) · up, keeping gate and up alone for the backward pass: `gated_linear` with LoRA.

    Args:
        gate: (..., N), or (..., 2N) holding gate and up side by side when up is None.
        up: (..., N), gate's dtype, or None.
        layer: the layer that takes the product; see `lora_linear`.
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (the square of relu) or "sigmoid".
        inplace: the backward pass writes the gradients over gate and up, which nobody else may then read. Not where
            the graph is kept (`retain_graph=True`), nor under torch.compile.
        saved_by: as in `lora_linear`; nothing but gate and up is then kept.
    Returns: (..., M) in gate's dtype.
    Raises: ValueError for shapes, dtypes or an act that do not fit.

    Replaces::

        h = F.silu(gate) * up
        y = F.linear(h, weight, bias) + scale * F.linear(F.linear(h, a), b)
    """
    checked_act("gated_lora_linear", act)
    device = gate.device.type
    # A Function is no operation that autocast knows, so what F.linear would cast is cast here. fp64 stays, as with
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
    # The layer's input in shape and dtype: the checks want x, and the product does not exist yet.
    hidden = gate if up is not None else gate[..., : gate.shape[-1] // 2]
    dtype, autocast = checked_layers("gated_lora_linear", hidden, (layer,))
    parameters = tuple(t for t in (layer.a, layer.b, layer.bias, layer.weight) if isinstance(t, Tensor))
    # The backward pass takes the gated unit's kernel, which has no torch path: it writes over its own inputs.
    if not runs_by_hand(dtype, autocast, (layer,), gate) or not use_triton(gate, up, *parameters):
        return lora_linear(gated_unit(gate, up, act=act), (layer,), saved_by=saved_by)[0]
    saved_by = saved_by if torch.is_grad_enabled() else None
    plan = Group((layer,), dtype, wide=not autocast)
    return _gated_lora_linear(gate, up, plan, act, inplace, saved_by, *plan.tensors((layer,)))[0]  # type: ignore[no-any-return]


def lora_linear_reference(x: Tensor, layers: Sequence[LoRA]) -> tuple[Tensor, ...]:
    """Each layer for itself, in torch's operations: adapters in their dtype where that is wider than x's."""
    device, dtype = x.device.type, autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)
        # Off inside: the operands are cast by now, and the call below has to take the branch without autocast.
        with torch.autocast(autocast_device(device), enabled=False):
            cast = [
                layer._replace(
                    a=layer.a.to(dtype), b=layer.b.to(dtype), bias=None if layer.bias is None else layer.bias.to(dtype)
                )
                for layer in layers
            ]
            return lora_linear_reference(x, cast)
    results = []
    # One draw for all layers, as in the other path: the same seed of torch's generator then gives the same masks here.
    masks = draw_masks([layer.dropout for layer in layers], x.device)
    for i, layer in enumerate(layers):
        # Only a weight that can be made dense goes through F.linear. A layer with a product of its own keeps its
        # rounding.
        if multiplier(layer.weight) is None:
            y = F.linear(x, dense(layer.weight, x.dtype), layer.bias)
        else:
            y = layer.weight.product(x)  # type: ignore[union-attr]
        # fp32 adapters compute in fp32, as PEFT does. The sum is rounded once, to x's dtype.
        wide = torch.promote_types(x.dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
        results.append((y + adapter_reference(x, i, layer, masks, wide)).to(x.dtype))
    return tuple(results)


def adapter_reference(x: Tensor, i: int, layer: LoRA, masks: Masks | None, dtype: torch.dtype) -> Tensor:
    """scale · (dropped(x) Aᵀ) Bᵀ, in torch's operations in dtype; i: the layer's place in its group."""
    scale = layer.scale
    if masks is not None:
        # A select and not a product: an infinite x that is dropped gives 0, while 0 · inf would be NaN.
        x = torch.where(keep_mask(masks, i, x.shape[:-1].numel(), x.shape[-1]).view(x.shape), x, 0.0)
        # The share of kept elements is that of the rounded p, so that the mean stays right to the last of the 16 bits.
        scale = scale / kept_share(layer.dropout)
    return F.linear(F.linear(x.to(dtype), layer.a.to(dtype)), layer.b.to(dtype)) * scale


# --------------------------------------------------------------------------------------------------------- autograd


def _rows(dy: Tensor | None) -> Tensor | None:
    # A view where the rows of dy lie at even distances, else a copy, which all products of dy then share.
    return None if dy is None else dy.reshape(-1, dy.shape[-1])


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Group, saved_by: Any, *tensors: Any) -> tuple[Tensor, ...]:
        # A result that nobody used brings None, and not a tensor of zeros that products would read.
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.plan = True, plan
        a, b, biases, weights = plan.split(tensors)
        # x, plan and saved_by come first: needs_input_grad has a place for every argument, tensor or not.
        need_a, need_b = plan.split(ctx.needs_input_grad[3:])[:2]
        rows = x.reshape(-1, x.shape[-1])
        joined, thin = plan.factors(a, b)
        t = plan.thin_products(rows, joined)
        # x serves the gradients of A alone: where A is frozen, dx needs only the weights.
        own_x = x if any(need_a) else None
        # Before the wide products: a checkpoint that computes again stops at the last tensor saved, and skips them.
        save_tensors(ctx, saved_by, own_x, t if any(need_b) else None, *a, *b, *weights)
        ys = [y.view(*x.shape[:-1], y.shape[1]) for y in plan.results(rows, t, thin, biases, weights)]
        # Of the inputs, x where it is not kept and the biases are not saved; see make_anchor.
        unsaved = [0] * (own_x is None) + [3 + 2 * plan.count + i for i, bias in enumerate(biases) if bias is not None]
        way = (
            ()
            if saved_by is not None or not unsaved
            else make_anchor(ctx, (x, plan, saved_by, *tensors), tuple(unsaved))
        )
        if way:
            ctx.save_for_backward(*ctx.to_save, *way)
        return (*ys, *way)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return run_once_differentiable(_lora_linear_backward, ctx, *dys)


def _lora_linear_backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    plan: Group = ctx.plan
    n = plan.count
    # Before the first return: `load_tensors` also lets go of what a checkpoint's hooks have packed.
    x, t, *rest = load_tensors(ctx)
    dys = [_rows(dy) for dy in given[:n]]
    a, b, weights = (rest[i : i + n] for i in range(0, 3 * n, n))
    need_x, needs = ctx.needs_input_grad[0], plan.split(ctx.needs_input_grad[3:])
    # Possible where only the empty tensor of `make_anchor` was reached.
    if all(dy is None for dy in dys):
        return (None,) * len(ctx.needs_input_grad)
    dx: Tensor | None = None
    da: list[Tensor | None] = [None] * n
    if need_x or any(needs[0]):
        # Cast again and not kept: the narrow copies are small, and one launch makes all of them.
        joined, thin = plan.factors(a, b)
        u = plan.upstream(dys, thin)
        if need_x:
            dx = plan.input_gradient(dys, u, joined, weights)
            # x's shape comes from a gradient: x itself may not have been kept.
            dx = dx.view(*next(dy for dy in given if dy is not None).shape[:-1], dx.shape[1])
        if any(needs[0]):
            # u serves dx and d[A…] both, and is computed once.
            da = plan.a_gradients(dys, u, x.reshape(-1, x.shape[-1]), a, needs[0])
    db = plan.b_gradients(dys, t, b, needs[1]) if any(needs[1]) else [None] * n
    return dx, None, None, *da, *db, *_bias_gradients(dys, needs[2], plan.dtype), *[None] * n


def _bias_gradients(dys: Sequence[Tensor | None], needs: Sequence[bool], dtype: torch.dtype) -> list[Tensor | None]:
    # torch sums half precision in fp32, and rounds the result once.
    return [None if dy is None or not need else dy.sum(0) for dy, need in zip(dys, needs, strict=True)]


class _GatedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, plan: Group, act: str, inplace: bool, saved_by: Any, *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.plan, ctx.act, ctx.inplace = True, plan, act, inplace
        a, b, biases, weights = plan.split(tensors)
        # Of gate, up, plan, act, inplace, saved_by, A, B, bias, weight.
        need_b = ctx.needs_input_grad[7]
        if saved_by is not None:
            # A checkpoint computes no further than here: t takes the product, which the backward pass makes anyway.
            save_tensors(ctx, saved_by, gate, up, None, *a, *b, *weights)
        # Never saved: the backward pass's kernel reads gate and up for their gradients, and writes the product on the
        # way.
        product = _gated_fwd(gate, up, act, 1.0, 1.0).view(-1, a[0].shape[1])
        joined, thin = plan.factors(a, b)
        t = plan.thin_products(product, joined)
        if saved_by is None:
            save_tensors(ctx, saved_by, gate, up, t if need_b else None, *a, *b, *weights)
        y = plan.results(product, t, thin, biases, weights)[0]
        y = y.view(*gate.shape[:-1], y.shape[1])
        way: tuple[Tensor, ...] = ()
        # The bias is the one differentiable input that nothing saved leads to.
        if saved_by is None and biases[0] is not None:
            way = make_anchor(ctx, (gate, up, plan, act, inplace, saved_by, *tensors), (8,))
            if way:
                ctx.save_for_backward(*ctx.to_save, *way)
        return (y, *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(_gated_lora_linear_backward, ctx, *gradients)


def _gated_lora_linear_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    plan: Group = ctx.plan
    gate, up, t, *rest = load_tensors(ctx)
    if dy is None:
        return (None,) * 10
    a, b, weights = (rest[i : i + 1] for i in range(3))
    need_gate, need_up, *_, need_a, need_b, need_bias, _ = ctx.needs_input_grad
    rows = dy.reshape(-1, dy.shape[-1])
    joined, thin = plan.factors(a, b)
    u = plan.upstream([rows], thin)
    dgate = dup = da = db = None
    # t was not kept under a checkpoint's hooks. The product gives it back in one thin product.
    recomputed = need_a or (need_b and t is None)
    if need_gate or need_up:
        # scratch is first the product's gradient. The kernel overwrites it by the product, which dA needs.
        scratch = plan.input_gradient([rows], u, joined, weights)
        # With a kept graph the next backward pass reads gate and up again.
        over = ctx.inplace and not is_graph_retained()
        if need_gate:
            dgate = gate.detach() if over else torch.empty_like(gate, memory_format=torch.contiguous_format)
        if need_up and up is not None:
            dup = up.detach() if over else torch.empty_like(up, memory_format=torch.contiguous_format)
        gated_backward(scratch, gate, up, ctx.act, 1.0, 1.0, dgate, dup, scratch if recomputed else None)
        if over:
            for written in (dgate, dup):
                if written is not None:  # PyTorch then raises where another backward pass saved it
                    torch.autograd.graph.increment_version(written)
    # Neither gate nor up wants a gradient, so no kernel makes the product on its way.
    elif recomputed:
        scratch = _gated_fwd(gate, up, ctx.act, 1.0, 1.0).view(-1, a[0].shape[1])
    if need_b:
        # From the product, not from dgate: scratch holds the product since the kernel above.
        db = plan.b_gradients([rows], plan.thin_products(scratch, joined) if t is None else t, b, [True])[0]
    if need_a:
        da = plan.a_gradients([rows], u, scratch, a, [True])[0]
    return dgate, dup, None, None, None, None, da, db, rows.sum(0) if need_bias else None, None


_lora_linear, _gated_lora_linear = bind_apply(_LoraLinear), bind_apply(_GatedLoraLinear)
