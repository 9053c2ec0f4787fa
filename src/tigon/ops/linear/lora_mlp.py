"""A gated MLP whose three frozen layers carry adapters, as a unit: y = down(act(gate(x)) · up(x)).

Like `lora_linear` followed by `gated_lora_linear`, but gate's and up's adapter parts are never written to memory: the
frozen products are written alone, and the gated unit adds the adapters to the loaded tiles (tigon.ops.gated_lora).
The backward pass does the same with the gradient that comes through the layer down.

    forward     t = x [Ag; Au]ᵀ;  g = x Wgᵀ, u = x Wuᵀ;  h = act(g + sg tg Bgᵀ) · (u + su tu Buᵀ);  y = down(h)
                with a residual stream r in the last pass over y: r + (h Wdᵀ + sd td Bdᵀ)
    backward    dh = dy Wd, and the adapter's part in the kernel that gives dg, du and h again; then as for any layers
    saved       x, t, g, u

A checkpoint's recomputation stops before h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import add_anchor, is_graph_retained, load_tensors, make_function, save_tensors, use_triton
from tigon.ops.acts import Act, checked_act
from tigon.ops.adapted_sum import adapted_sum
from tigon.ops.gated_lora import (
    WIDEST,
    Added,
    gated_lora_backward,
    gated_lora_forward,
    gated_lora_gradients,
    sums_along,
)
from tigon.ops.linear.adapter_products import Group, stack_factors
from tigon.ops.linear.adapters import gated_lora_linear, lora_linear
from tigon.ops.linear.lora import LoRA, check_mlp, list_tensors, runs_by_hand, widest_dtype


def lora_mlp(
    x: Tensor, layers: tuple[LoRA, LoRA, LoRA], *, act: Act = "silu", inplace: bool = True,
    saved_by: tuple[Any, Any] | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """down(act(gate(x)) · up(x)) with adapters on all three layers, saving x and gate's and up's frozen results.

    Args:
        x: (..., H).
        layers: gate, up and down, each a `tigon.LoRA`: (N, H), (N, H) and (H', N).
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (relu squared) or "sigmoid".
        inplace: the backward pass overwrites gate and up, which are private, with their gradients. Ignored if the
            graph is retained (`retain_graph=True`).
        saved_by: as in `lora_linear`.
        residual: (..., H'), added to the result, or None. down's adapter part, the frozen product and the residual
            stream are then added in one pass, and the sum is rounded once.

    Returns: (..., H') in x's dtype; with a residual, in the promoted dtype.

    Raises: ValueError as `lora_linear`, and for layers whose sizes do not match.

    Replaces::

        g, u = (F.linear(x, w) + s * F.linear(F.linear(x, a), b) for w, a, b, s, *_ in layers[:2])
        h = F.silu(g) * u
        w, a, b, s, *_ = layers[2]
        y = residual + (F.linear(h, w) + s * F.linear(F.linear(h, a), b))
    """
    checked_act("lora_mlp", act)
    gate, up, down = layers
    dtype, autocast = check_mlp(x, layers)
    saved_by = saved_by if torch.is_grad_enabled() else None
    # The unit's kernel adds adapters on the tensor cores: half precision only, factors in the same dtype, and no bias.
    one_pass = (
        dtype in (torch.bfloat16, torch.float16)
        and use_triton(x, *list_tensors(layers))
        and all(runs_by_hand(dtype, autocast, (layer,), x) for layer in layers)
        and gate.bias is None
        and up.bias is None
        and max(layer.a.shape[0] for layer in layers) <= WIDEST
        and (autocast or widest_dtype(layers, dtype) == dtype)
    )
    # Otherwise two separate units: g and u are written with their adapter parts, which is always correct but moves more
    # bytes.
    if not one_pass:
        g, u = lora_linear(x, (gate, up), saved_by=saved_by)
        y = gated_lora_linear(g, u, down, act=act, inplace=inplace, saved_by=saved_by)
        return y if residual is None else residual + y
    # torch's sum handles a residual that needs promotion or broadcasting. A bias would be another operand in the pass,
    # and no model family has one.
    joined = (
        residual is not None
        and (residual.dtype, residual.shape) == (dtype, (*x.shape[:-1], down.weight.shape[0]))
        and down.bias is None
        and use_triton(residual)
    )
    x = x if x.dtype == dtype else x.to(dtype)
    # A group draws its masks on construction, so construct groups only where this operator runs.
    plans = Group((gate, up), dtype, wide=not autocast), Group((down,), dtype, wide=not autocast)
    # tensors() gives A, B, biases and weights, two each: [6:] leaves the two weights, as gate and up have no bias here.
    own = (gate.a, up.a, gate.b, up.b, *plans[0].tensors((gate, up))[6:], *plans[1].tensors((down,)))
    y, *_ = _lora_mlp(x, plans, act, inplace, saved_by, residual if joined else None, *own)
    return y if joined or residual is None else residual + y  # type: ignore[no-any-return]


def _lora_mlp_fwd(
    ctx: Any, x: Tensor, plans: tuple[Group, Group], act: str, inplace: bool, saved_by: Any,
    residual: Tensor | None, *tensors: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """x, …, the residual, gate's and up's A and B, their weights, and down's A, B, bias and weight → y."""
    ctx.set_materialize_grads(False)
    ctx.plans, ctx.act, ctx.inplace = plans, act, inplace
    first, last = plans
    ag, au, bg, bu, wg, wu, ad, bd, bias, wd = tensors
    rows = x.reshape(-1, x.shape[-1])
    # A single launch casts all factors that need it. gate's and up's B stay: the unit's kernel narrows them on
    # load.
    joined, own_ad, own_bd = stack_factors(first.dtype, (ag, au), (ad,), (bd,))
    t = first.thin_products(rows, joined)
    g, u = first.products(rows, (wg, wu))
    # A checkpoint recomputes up to here: h, its thin product and down's product are skipped. The backward pass then
    # makes td.
    if saved_by is not None:
        save_tensors(ctx, saved_by, x, t, g, u, None, *tensors)
    h = gated_lora_forward(g, u, _split_adapters(first, t, (bg, bu)), act)
    td = last.thin_products(h, own_ad)
    if saved_by is None:
        save_tensors(ctx, saved_by, x, t, g, u, td, *tensors)
    if residual is None:
        y = last.results(h, td, (own_bd,), (bias,), (wd,))[0]
        return (y.view(*x.shape[:-1], y.shape[1]),)
    # The frozen product stays separate, and the pass that adds the residual also adds the adapter's part. With the
    # residual as the product's addend, the sum would be rounded twice at the residual's magnitude.
    (y,) = last.products(h, (wd,))
    y = adapted_sum(residual.reshape(y.shape), y, td, own_bd, last.scales[0])
    # The residual is the only input that no saved tensor leads to.
    anchor = () if saved_by is not None else add_anchor(ctx, (x, plans, act, inplace, saved_by, residual), (5,))
    return (y.view(residual.shape), *anchor)


def _split_adapters(plan: Group, t: Tensor, b: tuple[Tensor, Tensor]) -> tuple[Added, Added]:
    one, other = t.split_with_sizes(plan.ranks, 1)
    return Added(one, b[0], plan.scales[0]), Added(other, b[1], plan.scales[1])


def _lora_mlp_bwd(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    first, last = ctx.plans
    x, t, g, u, td, ag, au, bg, bu, wg, wu, ad, bd, _, wd = load_tensors(ctx)[:15]
    # Arguments 1 to 4 are the plans and options; the frozen weights are skipped.
    need_x, need_residual, need_ag, need_au, need_bg, need_bu, _, _, need_ad, need_bd, need_bias, _ = (
        ctx.needs_input_grad[i] for i in (0, *range(5, 16))
    )
    rows = dy.reshape(-1, dy.shape[-1])
    joined, own_ad, own_bd = stack_factors(first.dtype, (ag, au), (ad,), (bd,))
    ud = last.upstream([rows], (own_bd,))
    behind = None
    if last.masks is None:
        # Only the frozen layer's part: the kernel adds ud A. dh is then written once; otherwise the adapter's part
        # would be written, read and written again at that width.
        dh, behind = last.frozen_gradient([rows], (wd,)), Added(ud, ad)
    else:
        # Masks act on the columns of u A, so the part cannot be added as a plain outer product of tiles.
        dh = last.input_gradient([rows], ud, own_ad, (wd,))
    if ctx.inplace and not is_graph_retained():
        dg, du = g, u
    else:
        dg, du = torch.empty_like(g), torch.empty_like(u)
    added = (*_split_adapters(first, t, (bg, bu)), behind)
    recomputes = need_bd and td is None
    # Up to a rank that fits in registers, the pass makes the adapters' products from loaded tiles, so that six thin
    # products need not read dgate, dup and h again.
    along = sums_along(g, (*first.ranks, *last.ranks))
    # The kernel writes h over dh if down's adapter needs h and the kernel cannot compute that gradient, for example
    # because of masks.
    h = dh if (need_ad or recomputes) and (behind is None or not along) else None
    if along:
        found = gated_lora_gradients(
            dh, g, u, added, ctx.act, (dg, du), h, b=need_bg or need_bu, a=need_ad and h is None,
            t=recomputes and h is None,
        )  # fmt: skip
        up_stream, td = found.u, td if found.t is None else found.t
        dad, dbg, dbu = (
            None if not need or d is None else d.to(like.dtype)
            for d, need, like in ((found.da, need_ad, ad), (found.db_gate, need_bg, bg), (found.db_up, need_bu, bu))
        )
    else:
        gated_lora_backward(dh, g, u, added, ctx.act, (dg, du), h)
        up_stream = first.upstream((dg, du), stack_factors(first.dtype, (bg,), (bu,)))
        dbg, dbu = first.b_gradients((dg, du), t, (bg, bu), (need_bg, need_bu))
        dad = None
    if h is not None:
        dad = last.a_gradients([rows], ud, h, (ad,), (need_ad,))[0]
        td = last.thin_products(h, own_ad) if recomputes else td
    # Freed before dx: the tensor is as wide as g, and dx's products do not need it.
    del dh, h
    dbd = last.b_gradients([rows], td, (bd,), (True,))[0] if need_bd else None
    dx = None
    if need_x:
        dx = first.input_gradient((dg, du), up_stream, joined, (wg, wu)).view(*dy.shape[:-1], x.shape[-1])
    dags = first.a_gradients((dg, du), up_stream, x.reshape(-1, x.shape[-1]), (ag, au), (need_ag, need_au))
    dbias = rows.sum(0) if need_bias else None
    dresidual = dy if need_residual else None
    return dx, None, None, None, None, dresidual, *dags, dbg, dbu, None, None, dad, dbd, dbias


_lora_mlp = make_function(_lora_mlp_fwd, _lora_mlp_bwd)
