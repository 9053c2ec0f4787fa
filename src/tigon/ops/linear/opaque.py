"""Low-rank adapters beside frozen layers that run their own forward: yᵢ = layerᵢ(x) + sᵢ (x Aᵢᵀ) Bᵢᵀ.

The layers are opaque: int8 products, GPTQ and AWQ kernels, other libraries' tensor classes. Their forward runs under
autograd and produces the gradient of x. The adapters are computed around them: x is read once for all adapters, and
the adapter parts are added to the layers' results, forward and backward.

    forward     x' = x, t = x [A…]ᵀ;  yᵢ = layerᵢ(x');  yᵢ += sᵢ tᵢ Bᵢᵀ
    backward    uᵢ = sᵢ dyᵢ Bᵢ;  dBᵢ = sᵢ dyᵢᵀ tᵢ;  the layers: dx' = Σ dyᵢ ∂layerᵢ;  dx = dx' + [u…] [A…];
                d[A…] = [u…]ᵀ x
    saved       x and t, r numbers per token, in addition to the layers' saved tensors

x' is x as a separate autograd output: autograd sums the layers' gradients there, and the adapter part is added to the
sum.

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
    """A frozen layer in place of a `LoRA.weight` that only the layer itself can multiply by.

    Args:
        layer: (..., H) → (..., N).
        shape: (N, H).
        device: the weights' device.
        fresh: no other code holds the layer's result or its input gradient, and the layer's backward pass does not read
            the result. Both may then be modified in place.
        flat: the layer accepts rows (M, H) with the same result. Layers that reshape a result in an autograd Function
            forbid in-place writes to the result, and rows need no reshaping.
        narrows: the sum has the dtype of the layer's result even if the adapter's part is wider.
        weight: returns the weight (N, H) as a plain tensor in a given dtype, for the gradient of the layer's input. The
            layer then runs without autograd, and the layer's own Function saves nothing. If the layer is fresh and flat
            too, `lora_linear` and related operators accept the layer as a weight.
    """

    layer: Callable[[Tensor], Tensor]
    shape: tuple[int, int]
    device: torch.device
    # False by default: a class is fresh only if its forward pass is known not to keep the result, and no hook sees the
    # result.
    fresh: bool = False
    flat: bool = False
    narrows: bool = True
    weight: Callable[[torch.dtype], Tensor] | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        # `lora_linear` got a layer that only `opaque_lora_linear` supports.
        if self.weight is None:
            raise TypeError("lora_linear: a layer that multiplies by itself has no dense weight.")
        return self.weight(dtype)

    @property
    def own_product(self) -> Callable[[Tensor], Tensor] | None:
        """The layer's row product, if `lora_linear` may do the rest: its backward multiplies by the weight."""
        # fresh: the adapter's part is added in place; flat: `lora_linear` multiplies rows.
        return self.layer if self.weight is not None and self.fresh and self.flat else None

    def product(self, x: Tensor) -> Tensor:
        # Under autograd, or in our own Function that saves no input: bitsandbytes' Function keeps x in its context, out
        # of reach for checkpoints and offloading.
        return self.layer(x) if self.weight is None else _Multiplied.apply(x, self)[0]


def opaque_lora_linear(
    x: Tensor, layers: Sequence[LoRA], *, saved_by: tuple[Any, Any] | None = None
) -> tuple[Tensor, ...]:  # fmt: skip
    """layerᵢ(x) + scaleᵢ · (x Aᵢᵀ) Bᵢᵀ for each layer, saving x and x Aᵢᵀ for the adapters' gradients.

    Args:
        x: (..., H).
        layers: one or more `LoRA` with `Opaque` weights and bias None: the layers add their biases.
        saved_by: as in `lora_linear`.

    Returns: a tuple of (..., Nᵢ), each in the layer's result dtype.

    Raises: ValueError as `lora_linear`.
    """
    layers = tuple(layers)
    dtype, autocast = checked_layers("opaque_lora_linear", x, layers)
    # checked_layers needs a weight's shape and device, which `Opaque` has too.
    bases: list[Opaque] = [layer.weight for layer in layers]  # type: ignore[misc]
    if not runs_by_hand(dtype, autocast, layers, x):
        masks = draw_masks([layer.dropout for layer in layers], x.device)
        return tuple(_reference(x, i, layers[i], base, masks) for i, base in enumerate(bases))
    saved_by = saved_by if torch.is_grad_enabled() else None
    # The group draws this call's masks in the reference's order.
    group = Group(layers, dtype, wide=not autocast)
    # The adapters' dx is accumulated onto the layers' dx if x needs no cast; otherwise autograd adds them. The cast is
    # for the adapters only: the layers take x unchanged and cast as usual.
    narrow = x if x.dtype == dtype else x.to(dtype)
    # The layers must use the Function's output x: with the input x, their gradients would bypass this backward pass.
    passes = narrow is x and x.requires_grad and torch.is_grad_enabled()
    # A single layer that keeps its input's gradient forbids in-place writes to the sum: autograd may pass that tensor
    # on.
    fresh = all(base.fresh for base in bases)
    found = _ThinProducts.apply(narrow, group, passes, fresh, saved_by, *(layer.a for layer in layers))
    # `make_anchor` may have appended an empty tensor after the tᵢ: hence zip without strict below.
    given, ts = (found[0], found[1:]) if passes else (x, found)
    # Rows for flat layers only: their results are then not views, so the adapter part may be added in place.
    rows = given.reshape(-1, given.shape[-1]) if any(base.flat for base in bases) else given
    # Saved before the layers run: a checkpoint recomputes up to the last saved tensor.
    early = [_Early(saved_by, t, layer.b) for t, layer in zip(ts, layers, strict=False)]
    results = []
    # Sequential, so that a layer's temporaries, such as a dequantised weight, are freed before the next layer runs.
    for layer, base, t, scale, held in zip(layers, bases, ts, group.scales, early, strict=False):
        y = base.product(rows if base.flat else given)
        y = _sum(y, x, layer._replace(scale=scale), base, t, group, held)
        # View after the sum: a Function cannot write in place to a view.
        results.append(y.view(*x.shape[:-1], y.shape[-1]) if base.flat else y)
    return tuple(results)


def _sum(y: Tensor, x: Tensor, layer: LoRA, base: Opaque, t: Tensor, group: Group, early: _Early) -> Tensor:
    """y plus the adapter's part; layer.scale already includes 1/(1-p)."""
    # A subclass, another dtype or another layout uses torch's sum, with the same promotion rules as in PEFT's forward.
    fits = type(y) is Tensor and y.dtype == group.dtype and y.device == x.device and y.layout is torch.strided
    if fits and y.dim() and y.numel() == t.shape[0] * base.shape[0] and y.shape[-1] == base.shape[0]:
        # Autograd forbids writes to a view made inside a Function. A leaf that requires a gradient is not the layer's
        # result, and in-place writes to a leaf are an error.
        over = base.fresh and y.is_contiguous() and not y._is_view() and not (y.is_leaf and y.requires_grad)
        return _Added.apply(y, t, layer.b, layer.scale, group, early, over)[0]  # type: ignore[no-any-return]
    low = _Added.apply(None, t, layer.b, layer.scale, group, early, False)[0]
    total: Tensor = y + low.view(*y.shape[:-1], low.shape[1])
    return _narrowed(total, y, base)


def _reference(x: Tensor, i: int, layer: LoRA, base: Opaque, masks: Masks | None) -> Tensor:
    """The layer in torch operations, with the adapter computed in its dtype if wider than x's."""
    y = base.product(x)
    device = x.device.type
    cast = autocast_dtype(device) if x.dtype != torch.float64 else None
    # autocast's dtype, else the widest among x's and the adapter's.
    dtype = cast or torch.promote_types(x.dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
    # The layer ran under autocast above; the adapter's operands are cast explicitly, and the sum must stay uncast.
    with torch.autocast(autocast_device(device), enabled=False):
        total = y + adapter_reference(x, i, layer, masks, dtype)
    return _narrowed(total, y, base)


def _narrowed(total: Tensor, y: Tensor, base: Opaque) -> Tensor:
    return total.to(y.dtype) if base.narrows else total


# --------------------------------------------------------------------------------------------------------- autograd


class _ThinProducts(torch.autograd.Function):
    """x, …, A… → x, if passes, and tᵢ = x Aᵢᵀ (M, r)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, passes: bool, fresh: bool, saved_by: Any, *a: Tensor
    ) -> tuple[Tensor, ...]:
        # An unused result's gradient stays None, and the products are skipped.
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.group, ctx.passes, ctx.fresh, ctx.shape = True, group, passes, fresh, x.shape
        t = group.thin_products(x.reshape(-1, x.shape[-1]), stacked(group.thin, a)[0])
        # Skip x, group, passes, fresh, saved_by. Only A's gradients need x.
        needed = any(ctx.needs_input_grad[5:])
        save_tensors(ctx, saved_by, x if needed else None, *a)
        # Double backward must find a path to x even if x is not saved.
        way: tuple[Tensor, ...] = ()
        if saved_by is None and not needed:
            way = make_anchor(ctx, (x,), (0,))
            if way:
                ctx.save_for_backward(*ctx.to_save, *way)
        # x is returned unchanged: this node becomes its origin in autograd, and receives the layers' summed gradients.
        return (*((x,) if passes else ()), *t.split(group.ranks, 1), *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(_thin_products_backward, ctx, *gradients)


def _thin_products_backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    group: Group = ctx.group
    n = group.count
    # dx: the layers' gradient of x, summed by autograd. us: the uᵢ from `_Added`, (M, rᵢ) each.
    dx, us = (given[0], given[1 : 1 + n]) if ctx.passes else (None, given[:n])
    x, *a = load_tensors(ctx)[: 1 + n]
    present = [i for i, u in enumerate(us) if u is not None]
    needs = ctx.needs_input_grad[5 : 5 + n]
    da: list[Tensor | None] = [None] * n
    if not present:
        return dx, None, None, None, None, *da
    found = [u for u in us if u is not None]
    # The uᵢ come from different nodes, so they are concatenated: r columns each, little compared with dx.
    u = found[0] if len(found) == 1 else torch.cat(found, 1)
    if ctx.needs_input_grad[0]:
        (own,) = stacked(group.thin, [a[i] for i in present])
        # Contiguous, so that `rows` is a view of dx. Without requires_grad, because a write would corrupt dx's graph.
        over = dx is not None and ctx.fresh and dx.is_contiguous() and not dx.requires_grad
        rows = None if dx is None else dx.reshape(-1, dx.shape[-1])
        # The masked-product kernel has no accumulating epilogue, so the sum takes a separate pass.
        if group.masks is not None:
            low = group.dropped_outer(u, own, present)
            dx = low if rows is None else rows.add_(low) if over else low.add_(rows)
        else:
            dx = outer_product(u, own, group.dtype) if rows is None else add_outer_product(rows, u, own, over=over)
        dx = dx.view(ctx.shape)
    if any(needs):
        da = group.a_gradients(us, u, x.reshape(-1, x.shape[-1]), a, needs)
    return dx, None, None, None, None, *da


class _Multiplied(torch.autograd.Function):
    """x, the layer → the layer's result. Backward multiplies by the dense weight; x is not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Opaque) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.base, ctx.dtype = True, base, x.dtype
        # Inside a Function's forward autograd records nothing: the layer's own node is never made.
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
    # The dense weight lives only for this product. The steps match the layer's own backward pass.
    return torch.matmul(dy.to(ctx.dtype), ctx.base.dense(ctx.dtype)), None


class _Early:
    """`_Added`'s saved tensors, saved before the layer runs if a checkpoint gave hooks."""

    def __init__(self, saved_by: tuple[Any, Any] | None, t: Tensor, b: Tensor) -> None:
        self.held: Any = None
        if saved_by is not None:
            self.held = SimpleNamespace()
            # Detached: tensors packed by hooks outside autograd's own saving would keep their graph alive.
            save_tensors(self.held, saved_by, t.detach(), b.detach())


class _Added(torch.autograd.Function):
    """y (…, N) or None, t (M, r), B → y + scale · t Bᵀ, in place if `over`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor | None, t: Tensor, b: Tensor, scale: float, group: Group, early: _Early, over: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.group, ctx.scale, ctx.held = True, group, float(scale), early.held
        if early.held is None:
            save_tensors(ctx, None, t, b)
        factors = t, b.to(group.thin).t()
        if y is None:
            return (outer_product(*factors, group.dtype, ctx.scale),)
        total = add_outer_product(y.reshape(-1, y.shape[-1]), *factors, ctx.scale, over).view(y.shape)
        if over:
            # Autograd then raises if another node has saved y; the result is y itself, not a copy.
            ctx.mark_dirty(y)
            total = y
        # y is not saved: the sum's gradient needs neither term.
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
    # Two skinny products over dy that cannot be merged: u multiplies dy's rows, dB its columns.
    u = skinny_product(rows, b.to(thin), thin, scale) if need_t else None
    db = skinny_product(rows.t(), t, b.dtype, scale) if need_b else None
    # dy passes through the sum without a copy: the layer's backward pass reads the upstream gradient itself.
    return dy if need_y else None, u, db, None, None, None, None
