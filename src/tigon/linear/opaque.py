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

from tigon.linear.adapters import (
    Group,
    LoRA,
    _outer,
    _plus,
    _skinny,
    adapter_reference,
    checked_layers,
    runs_by_hand,
    stacked,
)
from tigon.ops.lora_dropout import Masks, draw_masks
from tigon.runtime import autocast_device, autocast_dtype, first_order, keep, kept, way_back


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
    fresh: bool = False
    flat: bool = False
    narrows: bool = True
    weight: Callable[[torch.dtype], Tensor] | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        if self.weight is None:
            raise TypeError("lora_linear: a layer that multiplies by itself has no dense weight.")
        return self.weight(dtype)

    @property
    def own_product(self) -> Callable[[Tensor], Tensor] | None:
        """The product alone, of rows, where `lora_linear` may do the rest: it multiplies by the weight backward."""
        return self.layer if self.weight is not None and self.fresh and self.flat else None

    def product(self, x: Tensor) -> Tensor:
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
    bases: list[Opaque] = [layer.weight for layer in layers]  # type: ignore[misc]
    if not runs_by_hand(dtype, autocast, layers, x):
        masks = draw_masks([layer.dropout for layer in layers], x.device)
        return tuple(_reference(x, i, layers[i], base, masks) for i, base in enumerate(bases))
    saved_by = saved_by if torch.is_grad_enabled() else None
    group = Group(layers, dtype, wide=not autocast)
    # The adapters' gradient of x is added to the layers' where x needs no cast. Else autograd adds the two.
    narrow = x if x.dtype == dtype else x.to(dtype)
    passes = narrow is x and x.requires_grad and torch.is_grad_enabled()
    fresh = all(base.fresh for base in bases)
    found = _ThinProducts.apply(narrow, group, passes, fresh, saved_by, *(layer.a for layer in layers))
    given, ts = (found[0], found[1:]) if passes else (x, found)
    rows = given.reshape(-1, given.shape[-1]) if any(base.flat for base in bases) else given
    # Saved before the layers run: a checkpoint computes again up to the last tensor that was saved.
    early = [_Early(saved_by, t, layer.b) for t, layer in zip(ts, layers, strict=False)]
    results = []
    for layer, base, t, scale, held in zip(layers, bases, ts, group.scales, early, strict=False):
        y = base.product(rows if base.flat else given)
        y = _sum(y, x, layer._replace(scale=scale), base, t, group, held)
        results.append(y.view(*x.shape[:-1], y.shape[-1]) if base.flat else y)
    return tuple(results)


def _sum(y: Tensor, x: Tensor, layer: LoRA, base: Opaque, t: Tensor, group: Group, early: _Early) -> Tensor:
    """y plus the adapter's part; of the layer's scale 1/(1-p) is a part here."""
    fits = type(y) is Tensor and y.dtype == group.dtype and y.device == x.device and y.layout is torch.strided
    if fits and y.dim() and y.numel() == t.shape[0] * base.shape[0] and y.shape[-1] == base.shape[0]:
        # Autograd forbids to write to a view that was made inside of a Function.
        over = base.fresh and y.is_contiguous() and not y._is_view() and not (y.is_leaf and y.requires_grad)
        return _Added.apply(y, t, layer.b, layer.scale, group, early, over)[0]  # type: ignore[no-any-return]
    low = _Added.apply(None, t, layer.b, layer.scale, group, early, False)[0]
    total: Tensor = y + low.view(*y.shape[:-1], low.shape[1])
    return _narrowed(total, y, base)


def _reference(x: Tensor, i: int, layer: LoRA, base: Opaque, masks: Masks | None) -> Tensor:
    """In torch's operations: the adapter in its dtype where that is wider than x's."""
    y = base.product(x)
    device = x.device.type
    cast = autocast_dtype(device) if x.dtype != torch.float64 else None
    dtype = cast or torch.promote_types(x.dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
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
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.group, ctx.passes, ctx.fresh, ctx.shape = True, group, passes, fresh, x.shape
        t = group.thin_products(x.reshape(-1, x.shape[-1]), stacked(group.thin, a)[0])
        needed = any(ctx.needs_input_grad[5:])
        keep(ctx, saved_by, x if needed else None, *a)
        way: tuple[Tensor, ...] = ()
        if saved_by is None and not needed:
            way = way_back(ctx, (x,), (0,))
            if way:
                ctx.save_for_backward(*ctx.to_save, *way)
        return (*((x,) if passes else ()), *t.split(group.ranks, 1), *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return first_order(_thin_products_backward, ctx, *gradients)


def _thin_products_backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    group: Group = ctx.group
    n = group.count
    dx, us = (given[0], given[1 : 1 + n]) if ctx.passes else (None, given[:n])
    x, *a = kept(ctx)[: 1 + n]
    present = [i for i, u in enumerate(us) if u is not None]
    needs = ctx.needs_input_grad[5 : 5 + n]
    da: list[Tensor | None] = [None] * n
    if not present:
        return dx, None, None, None, None, *da
    found = [u for u in us if u is not None]
    u = found[0] if len(found) == 1 else torch.cat(found, 1)
    if ctx.needs_input_grad[0]:
        (own,) = stacked(group.thin, [a[i] for i in present])
        over = dx is not None and ctx.fresh and dx.is_contiguous() and not dx.requires_grad
        rows = None if dx is None else dx.reshape(-1, dx.shape[-1])
        if group.masks is not None:
            low = group.dropped_outer(u, own, present)
            dx = low if rows is None else rows.add_(low) if over else low.add_(rows)
        else:
            dx = _outer(u, own, group.dtype) if rows is None else _plus(rows, u, own, over=over)
        dx = dx.view(ctx.shape)
    if any(needs):
        da = group.a_gradients(us, u, x.reshape(-1, x.shape[-1]), a, needs)
    return dx, None, None, None, None, *da


class _Multiplied(torch.autograd.Function):
    """x, the layer → the layer's result. Backward multiplies by its weight, made dense; x is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Opaque) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.base, ctx.dtype = True, base, x.dtype
        y = base.layer(x)
        way = way_back(ctx, (x,), (0,))
        ctx.save_for_backward(*way)
        return (y, *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return first_order(_multiplied_backward, ctx, *gradients)


def _multiplied_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None or not ctx.needs_input_grad[0]:
        return None, None
    return torch.matmul(dy.to(ctx.dtype), ctx.base.dense(ctx.dtype)), None


class _Early:
    """What `_Added` keeps, saved before its layer runs where a checkpoint gave its hooks."""

    def __init__(self, saved_by: tuple[Any, Any] | None, t: Tensor, b: Tensor) -> None:
        self.held: Any = None
        if saved_by is not None:
            self.held = SimpleNamespace()
            keep(self.held, saved_by, t.detach(), b.detach())


class _Added(torch.autograd.Function):
    """y (…, N) or None, t (M, r), B → y + scale · t Bᵀ, written to y where `over`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor | None, t: Tensor, b: Tensor, scale: float, group: Group, early: _Early, over: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.group, ctx.scale, ctx.held = True, group, float(scale), early.held
        if early.held is None:
            keep(ctx, None, t, b)
        factors = t, b.to(group.thin).t()
        if y is None:
            return (_outer(*factors, group.dtype, ctx.scale),)
        total = _plus(y.reshape(-1, y.shape[-1]), *factors, ctx.scale, over).view(y.shape)
        if over:
            ctx.mark_dirty(y)
            total = y
        way = way_back(ctx, (y,), (0,)) if early.held is None else ()
        if way:
            ctx.save_for_backward(*ctx.to_save, *way)
        return (total, *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return first_order(_added_backward, ctx, *gradients)


def _added_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 7
    thin, scale = ctx.group.thin, ctx.scale
    t, b = kept(ctx if ctx.held is None else ctx.held)[:2]
    rows = dy.reshape(-1, dy.shape[-1])
    need_y, need_t, need_b = ctx.needs_input_grad[:3]
    u = _skinny(rows, b.to(thin), thin, scale) if need_t else None
    db = _skinny(rows.t(), t, b.dtype, scale) if need_b else None
    return dy if need_y else None, u, db, None, None, None, None
