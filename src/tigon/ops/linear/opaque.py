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

from tigon.kernels import add_anchor, autocast_device, autocast_dtype, load_tensors, make_function, save_tensors
from tigon.ops.linear.adapter_products import Group, add_outer_product, outer_product, skinny_product, stack_factors
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
        if self.weight is None:
            raise TypeError("lora_linear: a layer with its own product has no dense weight.")
        return self.weight(dtype)

    @property
    def own_product(self) -> Callable[[Tensor], Tensor] | None:
        """The layer's row product, if `lora_linear` may do the rest: its backward multiplies by the weight."""
        # fresh: the adapter's part is added in place; flat: `lora_linear` multiplies rows.
        return self.layer if self.weight is not None and self.fresh and self.flat else None

    def product(self, x: Tensor) -> Tensor:
        # Under autograd, or in our own Function that saves no input: bitsandbytes' Function keeps x in its context, out
        # of reach for checkpoints and offloading.
        return self.layer(x) if self.weight is None else _multiply(x, self)[0]


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
    bases: list[Opaque] = [layer.weight for layer in layers]  # type: ignore[misc]
    if not runs_by_hand(dtype, autocast, layers, x):
        masks = draw_masks([layer.dropout for layer in layers], x.device)
        return tuple(_reference(x, i, layers[i], base, masks) for i, base in enumerate(bases))
    saved_by = saved_by if torch.is_grad_enabled() else None
    group = Group(layers, dtype, wide=not autocast)
    # The adapters' dx is accumulated onto the layers' dx if x needs no cast; otherwise autograd adds them. The cast is
    # for the adapters only: the layers take x unchanged and cast as usual.
    narrow = x if x.dtype == dtype else x.to(dtype)
    # The layers must use the Function's output x: with the input x, their gradients would bypass this backward pass.
    passes = narrow is x and x.requires_grad and torch.is_grad_enabled()
    # A single layer that keeps its input's gradient forbids in-place writes to the sum: autograd may pass that tensor
    # on.
    fresh = all(base.fresh for base in bases)
    found = _thin_products(narrow, group, passes, fresh, saved_by, *(layer.a for layer in layers))
    # `add_anchor` may have appended an empty tensor after the tᵢ: hence zip without strict below.
    given, ts = (found[0], found[1:]) if passes else (x, found)
    # Rows for flat layers only: their results are then not views, so the adapter part may be added in place.
    rows = given.reshape(-1, given.shape[-1]) if any(base.flat for base in bases) else given
    # Saved before the layers run: a checkpoint recomputes up to the last saved tensor.
    early = [_Early(saved_by, t, layer.b) for t, layer in zip(ts, layers, strict=False)]
    results = []
    for layer, base, t, scale, held in zip(layers, bases, ts, group.scales, early, strict=False):
        y = base.product(rows if base.flat else given)
        y = _sum(y, x, layer._replace(scale=scale), base, t, group, held)
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
        return _add(y, t, layer.b, layer.scale, group, early, over)[0]  # type: ignore[no-any-return]
    low = _add(None, t, layer.b, layer.scale, group, early, False)[0]
    total: Tensor = y + low.view(*y.shape[:-1], low.shape[1])
    return _narrow(total, y, base)


def _reference(x: Tensor, i: int, layer: LoRA, base: Opaque, masks: Masks | None) -> Tensor:
    """The layer in torch operations, with the adapter computed in its dtype if wider than x's."""
    y = base.product(x)
    device = x.device.type
    cast = autocast_dtype(device) if x.dtype != torch.float64 else None
    dtype = cast or torch.promote_types(x.dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
    with torch.autocast(autocast_device(device), enabled=False):
        total = y + adapter_reference(x, i, layer, masks, dtype)
    return _narrow(total, y, base)


def _narrow(total: Tensor, y: Tensor, base: Opaque) -> Tensor:
    return total.to(y.dtype) if base.narrows else total


# --------------------------------------------------------------------------------------------------------- autograd


def _thin_products_fwd(
    ctx: Any, x: Tensor, group: Group, passes: bool, fresh: bool, saved_by: Any, *a: Tensor
) -> tuple[Tensor, ...]:
    """x, …, A… → x, if passes, and tᵢ = x Aᵢᵀ (M, r)."""
    ctx.set_materialize_grads(False)
    ctx.group, ctx.passes, ctx.fresh, ctx.shape = group, passes, fresh, x.shape
    t = group.thin_products(x.reshape(-1, x.shape[-1]), stack_factors(group.thin, a)[0])
    needed = any(ctx.needs_input_grad[5:])
    save_tensors(ctx, saved_by, x if needed else None, *a)
    # Double backward must find a path to x even if x is not saved.
    anchor = add_anchor(ctx, (x,), (0,)) if saved_by is None and not needed else ()
    # x is returned unchanged: this node becomes its origin in autograd, and receives the layers' summed gradients.
    return (*((x,) if passes else ()), *t.split(group.ranks, 1), *anchor)


def _thin_products_bwd(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    group: Group = ctx.group
    n = group.count
    # dx: the layers' gradient of x, summed by autograd. us: the uᵢ from `_add`, (M, rᵢ) each.
    dx, us = (given[0], given[1 : 1 + n]) if ctx.passes else (None, given[:n])
    x, *a = load_tensors(ctx)[: 1 + n]
    present = [i for i, u in enumerate(us) if u is not None]
    needs = ctx.needs_input_grad[5 : 5 + n]
    if not present:
        return (dx,)
    da: list[Tensor | None] = [None] * n
    found = [u for u in us if u is not None]
    u = found[0] if len(found) == 1 else torch.cat(found, 1)
    if ctx.needs_input_grad[0]:
        (own,) = stack_factors(group.thin, [a[i] for i in present])
        # Contiguous, so that `rows` is a view of dx. Without requires_grad, because a write would corrupt dx's graph.
        over = dx is not None and ctx.fresh and dx.is_contiguous() and not dx.requires_grad
        rows = None if dx is None else dx.reshape(-1, dx.shape[-1])
        if group.masks is not None:
            low = group.dropped_outer(u, own, present)
            dx = low if rows is None else rows.add_(low) if over else low.add_(rows)
        else:
            dx = outer_product(u, own, group.dtype) if rows is None else add_outer_product(rows, u, own, over=over)
        dx = dx.view(ctx.shape)
    if any(needs):
        da = group.a_gradients(us, u, x.reshape(-1, x.shape[-1]), a, needs)
    return dx, None, None, None, None, *da


def _multiply_fwd(ctx: Any, x: Tensor, base: Opaque) -> tuple[Tensor, ...]:
    """x, the layer → the layer's result. Backward multiplies by the dense weight; x is not saved."""
    ctx.set_materialize_grads(False)
    ctx.base, ctx.dtype = base, x.dtype
    y = base.layer(x)
    return (y, *add_anchor(ctx, (x,), (0,)))


def _multiply_bwd(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (torch.matmul(dy.to(ctx.dtype), ctx.base.dense(ctx.dtype)),) if ctx.needs_input_grad[0] else ()


class _Early:
    """`_add`'s saved tensors, saved before the layer runs if a checkpoint gave hooks."""

    def __init__(self, saved_by: tuple[Any, Any] | None, t: Tensor, b: Tensor) -> None:
        self.held: Any = None
        if saved_by is not None:
            self.held = SimpleNamespace()
            # Detached: tensors packed by hooks outside autograd's own saving would keep their graph alive.
            save_tensors(self.held, saved_by, t.detach(), b.detach())


def _add_fwd(
    ctx: Any, y: Tensor | None, t: Tensor, b: Tensor, scale: float, group: Group, early: _Early, over: bool
) -> tuple[Tensor, ...]:
    """y (…, N) or None, t (M, r), B → y + scale · t Bᵀ, in place if `over`."""
    ctx.set_materialize_grads(False)
    ctx.group, ctx.scale, ctx.held = group, float(scale), early.held
    if early.held is None:
        save_tensors(ctx, None, t, b)
    factors = t, b.to(group.thin).t()
    if y is None:
        return (outer_product(*factors, group.dtype, ctx.scale),)
    total = add_outer_product(y.reshape(-1, y.shape[-1]), *factors, ctx.scale, over).view(y.shape)
    if over:
        ctx.mark_dirty(y)
        total = y
    return (total, *(add_anchor(ctx, (y,), (0,)) if early.held is None else ()))


def _add_bwd(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    thin, scale = ctx.group.thin, ctx.scale
    t, b = load_tensors(ctx if ctx.held is None else ctx.held)[:2]
    rows = dy.reshape(-1, dy.shape[-1])
    need_y, need_t, need_b = ctx.needs_input_grad[:3]
    u = skinny_product(rows, b.to(thin), thin, scale) if need_t else None
    db = skinny_product(rows.t(), t, b.dtype, scale) if need_b else None
    return dy if need_y else None, u, db


_thin_products = make_function(_thin_products_fwd, _thin_products_bwd)
_multiply, _add = make_function(_multiply_fwd, _multiply_bwd), make_function(_add_fwd, _add_bwd)
