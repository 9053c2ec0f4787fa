"""Low-rank adapters beside frozen layers that multiply by themselves: yᵢ = layerᵢ(x) + sᵢ (x Aᵢᵀ) Bᵢᵀ.

The layers are opaque: int8 products, kernels of GPTQ and AWQ, tensor classes of other libraries. Their own forward runs
under autograd, and makes its own gradient of x. Here the adapters are computed around it. x is read once for all
adapters, and the adapters' parts are added to what the layers have computed, forward and backward.

    forward     x' = x, t = x [A…]ᵀ;  yᵢ = layerᵢ(x');  yᵢ += sᵢ tᵢ Bᵢᵀ
    backward    uᵢ = sᵢ dyᵢ Bᵢ;  dBᵢ = sᵢ dyᵢᵀ tᵢ;  the layers: dx' = Σ dyᵢ ∂layerᵢ;  dx = dx' + [u…] [A…];
                d[A…] = [u…]ᵀ x
    kept        x and t, r numbers a token, beside what the layers keep

x' is x under another name: autograd sums the layers' gradients there, and the adapters' part is added to the sum.

Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    autocast_device,
    autocast_dtype,
    load_tensors,
    make_anchor,
    run_once_differentiable,
    save_tensors,
)
from tigon.ops.linear.adapter_products import Group, add_outer_product, outer_product, skinny_product, stacked
from tigon.ops.linear.adapters import adapter_reference
from tigon.ops.linear.lora import LoRA, checked_layers, runs_by_hand
from tigon.ops.lora_dropout import Masks, draw_masks


@dataclass(frozen=True, eq=False)
class Opaque:
    """A frozen layer in the place of a `LoRA.weight`, which nobody but the layer itself multiplies by.

    Args:
        layer: (..., H) → (..., N).
        shape: (N, H).
        device: of the weights.
        fresh: nobody else holds the layer's result or the gradient that it gives to its input, and the layer's backward
            pass does not read the result. Both may then be added to where they are.
        flat: the layer computes the same for rows (M, H). Layers that reshape a result in an autograd Function forbid
            that the result is written to, and rows need no reshaping.
        narrows: the sum has the dtype of the layer's result, where the adapter's part is wider.
        weight: the weight (N, H) as a plain tensor of a dtype, for the gradient of the layer's input. The layer then
            runs without autograd, and what its own autograd Function would keep is not kept. If the layer is fresh and
            flat too, `lora_linear` and its like take it for a weight.
    """

    layer: Callable[[Tensor], Tensor]
    shape: tuple[int, int]
    device: torch.device
    # False by default: a class is fresh only where its forward pass is known not to keep the result, and no hook may
    # see it.
    fresh: bool = False
    flat: bool = False
    narrows: bool = True
    weight: Callable[[torch.dtype], Tensor] | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        # `lora_linear` was given a layer that only `opaque_lora_linear` can take.
        if self.weight is None:
            raise TypeError("lora_linear: a layer that multiplies by itself has no dense weight.")
        return self.weight(dtype)

    @property
    def own_product(self) -> Callable[[Tensor], Tensor] | None:
        """The product alone, of rows, where `lora_linear` may do the rest: it multiplies by the weight backward."""
        # fresh, because the adapter's part is added in place; flat, because `lora_linear` multiplies rows.
        return self.layer if self.weight is not None and self.fresh and self.flat else None

    def product(self, x: Tensor) -> Tensor:
        # Under autograd, or in a Function of ours that keeps no input: bitsandbytes' own keeps x in its context, where
        # neither a checkpoint nor offloading can reach it.
        return self.layer(x) if self.weight is None else _Multiplied.apply(x, self)[0]


def opaque_lora_linear(
    x: Tensor, layers: Sequence[LoRA], *, saved_by: tuple[Any, Any] | None = None
) -> tuple[Tensor, ...]:  # fmt: skip
    """layerᵢ(x) + scaleᵢ · (x Aᵢᵀ) Bᵢᵀ for each layer, keeping x and x Aᵢᵀ for the adapters' gradients.

    Args:
        x: (..., H).
        layers: one or more `LoRA`, whose weights are `Opaque` and whose biases are None: a layer adds its own.
        saved_by: as in `lora_linear`.
    Returns: a tuple of (..., Nᵢ), each in the dtype that its layer gives.
    Raises: ValueError as `lora_linear`.
    """
    layers = tuple(layers)
    dtype, autocast = checked_layers("opaque_lora_linear", x, layers)
    # checked_layers knows a weight by its shape and device, which `Opaque` has too.
    bases: list[Opaque] = [layer.weight for layer in layers]  # type: ignore[misc]
    # The layers themselves run in both branches alike: what is decided here is how the adapters are computed.
    if not runs_by_hand(dtype, autocast, layers, x):
        masks = draw_masks([layer.dropout for layer in layers], x.device)
        return tuple(_reference(x, i, layers[i], base, masks) for i, base in enumerate(bases))
    saved_by = saved_by if torch.is_grad_enabled() else None
    # The group draws the masks of this call, in the order in which the reference draws them.
    group = Group(layers, dtype, wide=not autocast)
    # The adapters' gradient of x is added to the layers' where x needs no cast. Else autograd adds the two.
    # The adapters' x alone: the layers take x as it came, and cast as they are used to.
    narrow = x if x.dtype == dtype else x.to(dtype)
    # The layers have to see the x that comes out of the Function, or their gradients would bypass its backward pass.
    passes = narrow is x and x.requires_grad and torch.is_grad_enabled()
    # One layer that holds on to its input's gradient suffices to forbid writing to the sum: autograd may hand that very
    # tensor on.
    fresh = all(base.fresh for base in bases)
    found = _ThinProducts.apply(narrow, group, passes, fresh, saved_by, *(layer.a for layer in layers))
    # Behind the tᵢ there may be the empty tensor of `make_anchor`: hence zip without strict below.
    given, ts = (found[0], found[1:]) if passes else (x, found)
    # Rows for flat layers alone. Their results are no views then, so the adapter's part may be added in place.
    rows = given.reshape(-1, given.shape[-1]) if any(base.flat for base in bases) else given
    # Saved before the layers run: a checkpoint computes again up to the last tensor that was saved.
    early = [_Early(saved_by, t, layer.b) for t, layer in zip(ts, layers, strict=False)]
    results = []
    # One layer after the other, so that a layer's temporaries, a dequantised weight say, are freed before the next
    # layer runs.
    for layer, base, t, scale, held in zip(layers, bases, ts, group.scales, early, strict=False):
        y = base.product(rows if base.flat else given)
        y = _sum(y, x, layer._replace(scale=scale), base, t, group, held)
        # After the sum: a view that a Function was given could not be written to.
        results.append(y.view(*x.shape[:-1], y.shape[-1]) if base.flat else y)
    return tuple(results)


def _sum(y: Tensor, x: Tensor, layer: LoRA, base: Opaque, t: Tensor, group: Group, early: _Early) -> Tensor:
    """y plus the adapter's part; of the layer's scale 1/(1-p) is a part here."""
    # A subclass, another dtype or another layout is left to torch's own sum, whose promotion rules PEFT's forward has
    # too.
    fits = type(y) is Tensor and y.dtype == group.dtype and y.device == x.device and y.layout is torch.strided
    if fits and y.dim() and y.numel() == t.shape[0] * base.shape[0] and y.shape[-1] == base.shape[0]:
        # Autograd forbids to write to a view that was made inside of a Function.
        # A leaf that requires a gradient is no result of the layer, and in-place writes to it are an error.
        over = base.fresh and y.is_contiguous() and not y._is_view() and not (y.is_leaf and y.requires_grad)
        return _Added.apply(y, t, layer.b, layer.scale, group, early, over)[0]  # type: ignore[no-any-return]
    # The adapter's part as a tensor of its own, which costs a pass over y for the sum.
    low = _Added.apply(None, t, layer.b, layer.scale, group, early, False)[0]
    total: Tensor = y + low.view(*y.shape[:-1], low.shape[1])
    return _narrowed(total, y, base)


def _reference(x: Tensor, i: int, layer: LoRA, base: Opaque, masks: Masks | None) -> Tensor:
    """In torch's operations: the adapter in its dtype where that is wider than x's."""
    y = base.product(x)
    device = x.device.type
    cast = autocast_dtype(device) if x.dtype != torch.float64 else None
    # Under autocast its dtype, without it the widest of x's and the adapter's.
    dtype = cast or torch.promote_types(x.dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
    # The layer ran under autocast above; the adapter's operands are cast by hand, and the sum must not be.
    with torch.autocast(autocast_device(device), enabled=False):
        total = y + adapter_reference(x, i, layer, masks, dtype)
    return _narrowed(total, y, base)


def _narrowed(total: Tensor, y: Tensor, base: Opaque) -> Tensor:
    return total.to(y.dtype) if base.narrows else total


# --------------------------------------------------------------------------------------------------------- autograd


class _ThinProducts(torch.autograd.Function):
    """x, …, A… → x, if it passes, and tᵢ = x Aᵢᵀ (M, r)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, passes: bool, fresh: bool, saved_by: Any, *a: Tensor
    ) -> tuple[Tensor, ...]:
        # The gradient of a result that nobody uses stays None, and its products are left out.
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.group, ctx.passes, ctx.fresh, ctx.shape = True, group, passes, fresh, x.shape
        # All A as one matrix: x is read once, however many layers it goes through.
        t = group.thin_products(x.reshape(-1, x.shape[-1]), stacked(group.thin, a)[0])
        # Of x, group, passes, fresh, saved_by, A…. x is kept for the gradients of A alone.
        needed = any(ctx.needs_input_grad[5:])
        save_tensors(ctx, saved_by, x if needed else None, *a)
        # A second differentiation has to find a way to x, also where x is not saved.
        way: tuple[Tensor, ...] = ()
        if saved_by is None and not needed:
            way = make_anchor(ctx, (x,), (0,))
            if way:
                ctx.save_for_backward(*ctx.to_save, *way)
        # x leaves as it came in. Autograd gives it this node as its origin, and the layers' gradients arrive here,
        # already summed.
        return (*((x,) if passes else ()), *t.split(group.ranks, 1), *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(_thin_products_backward, ctx, *gradients)


def _thin_products_backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    group: Group = ctx.group
    n = group.count
    # dx: what all layers say about x, summed by autograd. us: the uᵢ that `_Added` has computed, (M, rᵢ) each.
    dx, us = (given[0], given[1 : 1 + n]) if ctx.passes else (None, given[:n])
    x, *a = load_tensors(ctx)[: 1 + n]
    present = [i for i, u in enumerate(us) if u is not None]
    needs = ctx.needs_input_grad[5 : 5 + n]
    da: list[Tensor | None] = [None] * n
    # No adapter was used: the layers' gradient passes through unchanged.
    if not present:
        return dx, None, None, None, None, *da
    found = [u for u in us if u is not None]
    # The uᵢ come from different nodes, so they are copied side by side: r columns each, little beside dx.
    u = found[0] if len(found) == 1 else torch.cat(found, 1)
    if ctx.needs_input_grad[0]:
        (own,) = stacked(group.thin, [a[i] for i in present])
        # Contiguous, so that `rows` is a view of dx and not a copy. Without a graph of its own, which a write would
        # corrupt.
        over = dx is not None and ctx.fresh and dx.is_contiguous() and not dx.requires_grad
        rows = None if dx is None else dx.reshape(-1, dx.shape[-1])
        # The kernel of masked products has no epilogue that adds, so the sum takes a pass of its own.
        if group.masks is not None:
            low = group.dropped_outer(u, own, present)
            dx = low if rows is None else rows.add_(low) if over else low.add_(rows)
        else:
            # dx' is read in the epilogue of the adapters' product.
            dx = outer_product(u, own, group.dtype) if rows is None else add_outer_product(rows, u, own, over=over)
        dx = dx.view(ctx.shape)
    if any(needs):
        # d[A…] in one product: x is read once here as well.
        da = group.a_gradients(us, u, x.reshape(-1, x.shape[-1]), a, needs)
    return dx, None, None, None, None, *da


class _Multiplied(torch.autograd.Function):
    """x, the layer → the layer's result. Backward multiplies by its weight, made dense; x is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Opaque) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.base, ctx.dtype = True, base, x.dtype
        # Inside of a forward pass of a Function autograd records nothing: the layer's own node is never made.
        y = base.layer(x)
        way = make_anchor(ctx, (x,), (0,))
        ctx.save_for_backward(*way)
        return (y, *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(_multiplied_backward, ctx, *gradients)


def _multiplied_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None or not ctx.needs_input_grad[0]:
        return None, None
    # The dense weight lives for this product alone. The steps are those of the layer's own backward pass.
    return torch.matmul(dy.to(ctx.dtype), ctx.base.dense(ctx.dtype)), None


class _Early:
    """What `_Added` keeps, saved before its layer runs where a checkpoint gave its hooks."""

    def __init__(self, saved_by: tuple[Any, Any] | None, t: Tensor, b: Tensor) -> None:
        self.held: Any = None
        if saved_by is not None:
            self.held = SimpleNamespace()
            # Detached: what hooks pack outside of autograd's own saving would keep the tensors' graph alive.
            save_tensors(self.held, saved_by, t.detach(), b.detach())


class _Added(torch.autograd.Function):
    """y (…, N) or None, t (M, r), B → y + scale · t Bᵀ, written to y where `over`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor | None, t: Tensor, b: Tensor, scale: float, group: Group, early: _Early, over: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.group, ctx.scale, ctx.held = True, group, float(scale), early.held
        # Else t and B are saved already, before the layer ran.
        if early.held is None:
            save_tensors(ctx, None, t, b)
        factors = t, b.to(group.thin).t()
        # No scale of 1/(1-p) here: it is part of ctx.scale.
        if y is None:
            return (outer_product(*factors, group.dtype, ctx.scale),)
        total = add_outer_product(y.reshape(-1, y.shape[-1]), *factors, ctx.scale, over).view(y.shape)
        if over:
            # Autograd then raises where another node has saved y, and the result is y itself, not a copy.
            ctx.mark_dirty(y)
            total = y
        # y is not saved: the sum's gradient needs neither of its terms.
        way = make_anchor(ctx, (y,), (0,)) if early.held is None else ()
        if way:
            ctx.save_for_backward(*ctx.to_save, *way)
        return (total, *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(_added_backward, ctx, *gradients)


def _added_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 7
    thin, scale = ctx.group.thin, ctx.scale
    t, b = load_tensors(ctx if ctx.held is None else ctx.held)[:2]
    rows = dy.reshape(-1, dy.shape[-1])
    need_y, need_t, need_b = ctx.needs_input_grad[:3]
    # Two skinny products over dy. They cannot be one: u multiplies rows of dy, and dB its columns.
    u = skinny_product(rows, b.to(thin), thin, scale) if need_t else None
    db = skinny_product(rows.t(), t, b.dtype, scale) if need_b else None
    # The sum passes dy on as it is: no copy, and what the layer's backward pass reads is the upstream gradient itself.
    return dy if need_y else None, u, db, None, None, None, None
