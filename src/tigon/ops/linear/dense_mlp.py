"""A gated MLP with three plain linear layers as a single autograd node: y = (act(x Wgᵀ) · x Wuᵀ) Wdᵀ.

    forward     g = x Wgᵀ, u = x Wuᵀ;  h = act(g) · u;  y = h Wdᵀ
    backward    dh = dy Wd;  dg, du and h in one pass over g and u;  dx = dg Wg;  dx += du Wu;  each dW
    saved       x, g, u, and h unless recomputed

Gate, up and their product are private to this node, so the backward pass overwrites gate and up with their gradients.
dx is rounded once for each of the two products. Separate layers also round the sum, in an additional pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import add_anchor, is_graph_retained, load_tensors, make_function, save_tensors
from tigon.ops.acts import Act
from tigon.ops.gated import _gated_fwd, gated_backward
from tigon.ops.linear.projections import linear

Layers = tuple[Tensor, Tensor | None, Tensor]


def dense_mlp(
    x: Tensor, weights: Layers, biases: tuple[Tensor | None, ...], *, act: Act, product: bool,
    saved_by: tuple[Any, Any] | None = None,
) -> Tensor:  # fmt: skip
    """down(act(gate(x)) · up(x)) for plain tensors with one dtype, on one device that has kernels.

    Args:
        x: (..., H).
        weights: gate (N, H), up (N, H) and down (M, N). Where up is None, gate is (2N, H), holding both.
        biases: gate's, up's and down's, or None for each.
        act: a name in `tigon.ops.acts`.
        product: recompute the product of gate and up in the backward pass instead of saving the product.
        saved_by: a checkpoint's hooks (pack, unpack), used to save before the layer down runs.

    Returns: (..., M).
    """
    y: Tensor = _dense_mlp(x, act, product, saved_by, *weights, *biases)[0]
    return y


def _dense_mlp_fwd(
    ctx: Any, x: Tensor, act: Act, product: bool, saved_by: Any, wg: Tensor, wu: Tensor | None, wd: Tensor,
    *biases: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    ctx.set_materialize_grads(False)
    ctx.act, needs = act, ctx.needs_input_grad
    # Only the gradients of gate's and up's weights need x.
    own_x = x if needs[4] or needs[5] else None
    g = linear(x, wg, biases[0])
    u = None if wu is None else linear(x, wu, biases[1])
    # A checkpoint recomputes up to the last saved tensor: stop before the product, or directly after.
    if saved_by is not None and product:
        save_tensors(ctx, saved_by, own_x, g, u, None, wg, wu, wd)
    h = _gated_fwd(g, u, act, 1.0, 1.0)
    if saved_by is None or not product:
        save_tensors(ctx, saved_by, own_x, g, u, None if product or not needs[6] else h, wg, wu, wd)
    y = linear(h, wd, biases[2])
    if saved_by is None and (own_x is None or biases != (None, None, None)):
        unsaved = [0] * (own_x is None) + [7 + i for i, bias in enumerate(biases) if bias is not None]
        return y, *add_anchor(ctx, (x, act, product, saved_by, wg, wu, wd, *biases), tuple(unsaved))
    return (y,)


def _backward(ctx: Any, given: Tensor, *_: Any) -> tuple[Any, ...]:
    x, g, u, h, wg, wu, wd = load_tensors(ctx)[:7]
    need_x, _, _, _, need_wg, need_wu, need_wd, need_bg, need_bu, need_bd = ctx.needs_input_grad
    need_g, need_u = need_x or need_wg or need_bg, u is not None and (need_x or need_wu or need_bu)
    dy = given.reshape(-1, given.shape[-1])
    scratch: Any = None
    dx = dwg = dwu = dwd = dg = du = None
    again = need_wd and h is None
    if need_g or need_u:
        scratch = torch.mm(dy, wd)
        # Gate and up are private to this node. With a retained graph the next backward pass reads them again.
        over = not is_graph_retained()
        if need_g:
            dg = g if over else torch.empty_like(g)
        if need_u:
            du = u if over else torch.empty_like(u)
        gated_backward(scratch, g, u, ctx.act, 1.0, 1.0, dg, du, scratch if again else None)
    elif again:
        scratch = _gated_fwd(g, u, ctx.act, 1.0, 1.0).view(-1, wd.shape[1])
    if need_wd:
        dwd = torch.mm(dy.t(), scratch if again else h.view(-1, wd.shape[1]))
    scratch = h = None
    rows: Any = None if x is None else x.reshape(-1, x.shape[-1])
    if dg is not None:
        dg = dg.view(-1, wg.shape[0])
        if need_x:
            dx = torch.mm(dg, wg)
        if need_wg:
            dwg = torch.mm(dg.t(), rows)
    if du is not None:
        du = du.view(-1, wu.shape[0])
        if dx is not None:
            dx.addmm_(du, wu)
        if need_wu:
            dwu = torch.mm(du.t(), rows)
    if dx is not None:
        dx = dx.view(*given.shape[:-1], dx.shape[1])
    biases = (
        dg.sum(0) if need_bg and dg is not None else None,
        du.sum(0) if need_bu and du is not None else None,
        dy.sum(0) if need_bd else None,
    )
    return dx, None, None, None, dwg, dwu, dwd, *biases


_dense_mlp = make_function(_dense_mlp_fwd, _backward)
