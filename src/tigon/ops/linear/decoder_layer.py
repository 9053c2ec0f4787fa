"""A plain decoder layer on both sides of its attention, an autograd node each.

    enter_attention   y = norm(x);  q = y Wqᵀ, k = y Wkᵀ, v = y Wvᵀ;  q and k are normed by head, if the layer has such
                      norms, and rotated
    leave_attention   s = x + a Woᵀ;  z = norm(s);  g = z Wgᵀ, u = z Wuᵀ;  out = s + (act(g) · u) Wdᵀ

The kernels and products are those of `rms_norm`, `projections`, `qk_norm_rope` or `rope`, `add_rms_norm` and
`dense_mlp`, in the same order on the same numbers: results and gradients have the same bits. What goes is what lies
between them: six nodes of autograd, the views and transpositions that autograd records, and the checks of each call.

    saved    x and q, k before the rotation; a, s, g, u; y and z unless recomputed from x and s
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import is_graph_retained, make_function
from tigon.ops.acts import Act
from tigon.ops.add_rms_norm import _add_rms_norm_fwd
from tigon.ops.gated import _gated_fwd, gated_backward
from tigon.ops.linear.projections import linear
from tigon.ops.qk_norm_rope import _qk_norm_rope_bwd, _qk_norm_rope_fwd
from tigon.ops.rms_norm import _rms_norm_bwd, _rms_norm_fwd
from tigon.ops.rope import _rope_launch

# A norm's eps, offset and cast, as `rms_norm` takes them.
NormOptions = tuple[float, float, str]
_NO_PLANES = (-1, -1)  # rope's: angles for one axis alone


class Heads(NamedTuple):
    """How q and k are cut into heads and turned.

    width: a head's. interleaved: as in `tigon.Rope`. norm: the head norms' options, None without head norms.
    """

    width: int
    interleaved: bool
    norm: NormOptions | None


class Entered(NamedTuple):
    """The inputs of attention, (B, H, T, D) each, and the residual stream.

    before: q and k before norm and rotation, without a gradient; None unless asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    stream: Tensor
    before: tuple[Tensor, Tensor] | None


def enter_attention(
    x: Tensor, norm_weight: Tensor, weights: list[Tensor], biases: list[Tensor | None],
    head_weights: tuple[Tensor, Tensor] | tuple[None, None], angles: tuple[Tensor, Tensor], *,
    norm: NormOptions, heads: Heads, recompute: bool, show_before: bool = False,
) -> Entered:  # fmt: skip
    """The work before attention. All tensors are plain, with one dtype, on one device that has kernels.

    Args:
        x: (B, T, N), contiguous.
        norm_weight: (N,).
        weights, biases: q's, k's and v's: (Hᵢ · D, N), and (Hᵢ · D,) or None.
        head_weights: (D,) for q and for k, or None for both.
        angles: cos and sin, (B, T, R) or (1, T, R), without a gradient.
        norm, heads: options.
        recompute: compute the norm's result again in the backward pass instead of saving it.
        show_before: return q and k before norm and rotation too.
    """
    options = _Before(norm, heads, recompute, show_before)
    q, k, v, *more = _enter(x, options, norm_weight, *weights, *biases, *head_weights, *angles)
    before = (more[0], more[1]) if show_before else None
    return Entered(q, k, v, more[2 * show_before] if x.requires_grad else x, before)


def leave_attention(
    a: Tensor, x: Tensor, norm_weight: Tensor, weights: list[Tensor], biases: list[Tensor | None], *,
    norm: NormOptions, act: Act, product: bool, recompute: bool,
) -> Tensor:  # fmt: skip
    """The work after attention. All tensors are plain, with one dtype, on one device that has kernels.

    Args:
        a: (B, T, H · D), attention's result.
        x: (B, T, N), contiguous: the residual stream.
        norm_weight: (N,).
        weights, biases: the output projection's (N, H · D), gate's and up's (F, N), and down's (N, F), and their
            biases or None.
        norm, act: options.
        product: recompute act(g) · u in the backward pass. recompute: the norm's result too.
    Returns: (B, T, N).
    """
    y: Tensor = _leave(a, _After(norm, act, product, recompute), x, norm_weight, *weights, *biases)[0]
    return y


# ------------------------------------------------------------------------------------------------ before attention


class _Before(NamedTuple):
    norm: NormOptions
    heads: Heads
    recompute: bool
    show_before: bool


def _enter_fwd(ctx: Any, x: Tensor, options: _Before, *tensors: Any) -> tuple[Tensor, ...]:
    wn, wq, wk, wv, bq, bk, bv, nq, nk, cos, sin = tensors
    norm, heads, recompute, show_before = options
    # An unused result's gradient stays None, and its products are skipped.
    ctx.set_materialize_grads(False)
    ctx.options = options
    y, rstd = _rms_norm_fwd.direct(x, wn, *norm)  # type: ignore[attr-defined]
    B, T, N = x.shape
    rows = y.view(-1, N)
    q, k, v = (
        linear(rows, w, b).view(B, T, -1, heads.width).transpose(1, 2) for w, b in ((wq, bq), (wk, bk), (wv, bv))
    )
    if heads.norm is None:
        turn: tuple[Any, ...] = (1, heads.interleaved, *_NO_PLANES, False, False, x.dtype)
        turned = _rope_launch.direct(q, k, cos, sin, *turn)  # type: ignore[attr-defined]
        before: tuple[Any, ...] = None, None, None, None
    else:
        turn = (*_round_heads(heads.norm), 1, heads.interleaved, x.dtype)
        turned = _qk_norm_rope_fwd.direct(q, k, nq, nk, cos, sin, *turn)  # type: ignore[attr-defined]
        before = q, k, nq, nk
    kept = None if recompute or not any(ctx.needs_input_grad[3:6]) else y
    ctx.save_for_backward(x, wn, rstd, kept, wq, wk, wv, cos, sin, *before)
    if show_before:
        ctx.mark_non_differentiable(q, k)
    # A returned input becomes a view whose gradient arrives here; no memory is copied.
    return (*turned, v, *((q, k) if show_before else ()), *((x,) if x.requires_grad else ()))


def _round_heads(norm: NormOptions) -> tuple[float, float, bool]:
    eps, offset, cast = norm
    return eps, offset, cast == "llama"


def _enter_bwd(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *more: Any) -> tuple[Any, ...]:
    norm, heads, _, shows = ctx.options
    ds: Tensor | None = more[-1] if len(more) > 2 * shows else None
    x, wn, rstd, y, wq, wk, wv, cos, sin, q, k, nq, nk = ctx.saved_tensors
    need_x, _, need_wn, *need = ctx.needs_input_grad
    dnq = dnk = None
    need_before = need_x or need_wn
    need_q, need_k = (given is not None and (need_before or need[i] or need[3 + i]) for i, given in enumerate((dq, dk)))
    if heads.norm is None:
        dq, dk = dq if need_q else None, dk if need_k else None
        if dq is not None or dk is not None:
            one, other = (dq, dk) if dq is not None else (dk, None)
            turned = _rope_launch(one, other, cos, sin, 1, heads.interleaved, *_NO_PLANES, False, True, x.dtype)
            dq, dk = (turned[0], turned[1] if dk is not None else None) if dq is not None else (None, turned[0])
    else:
        wanted = [need_q, need_k, dq is not None and need[6], dk is not None and need[7]]
        if any(wanted):
            turn = (*_round_heads(heads.norm), 1, heads.interleaved)
            made = _qk_norm_rope_bwd(q, k, nq, nk, wanted, cos, sin, dq, dk, *turn)
            dq, dk, dnq, dnk = (g if w else None for g, w in zip(made, wanted, strict=True))
        else:
            dq = dk = None
    if y is None and any(need[:3]):
        y = _rms_norm_fwd.direct(x, wn, *norm)[0]  # type: ignore[attr-defined]
    rows: Any = None if y is None else y.view(-1, x.shape[-1])
    dy = None
    gradients: list[Tensor | None] = [None] * 6
    for i, (given, weight) in enumerate(((dq, wq), (dk, wk), (dv, wv))):
        if given is None:
            continue
        d = given.transpose(1, 2).reshape(-1, weight.shape[0])
        if need_x or need_wn:
            dy = torch.mm(d, weight) if dy is None else dy.addmm_(d, weight)
        if need[i]:
            gradients[i] = torch.mm(d.t(), rows)
        if need[3 + i]:
            gradients[3 + i] = d.sum(0)
    if dy is None:
        return ds, None, None, *gradients, dnq, dnk
    dx, dwn = _rms_norm_bwd(dy, ds, x, wn, rstd, *norm, need_x, need_wn)
    return dx if need_x else None, None, dwn if need_wn else None, *gradients, dnq, dnk


_enter = make_function(_enter_fwd, _enter_bwd, "enter_attention")


# ------------------------------------------------------------------------------------------------- after attention


class _After(NamedTuple):
    norm: NormOptions
    act: Act
    product: bool
    recompute: bool


def _leave_fwd(ctx: Any, a: Tensor, options: _After, *tensors: Any) -> tuple[Tensor, ...]:
    x, wn, wo, wg, wu, wd, bo, bg, bu, bd = tensors
    norm, act, product, recompute = options
    ctx.set_materialize_grads(False)
    ctx.options, N = options, x.shape[-1]
    _, _, _, _, _, need_wg, need_wu, need_wd, *_ = ctx.needs_input_grad
    o = linear(a.reshape(-1, wo.shape[1]), wo, bo)
    z, s, rstd = _add_rms_norm_fwd.direct(o, x, wn, *norm)  # type: ignore[attr-defined]
    rows = z.view(-1, N)
    g, u = linear(rows, wg, bg), linear(rows, wu, bu)
    h = _gated_fwd.direct(g, u, act, 1.0, 1.0)  # type: ignore[attr-defined]
    y = linear(h.view(*x.shape[:-1], wd.shape[1]), wd, bd)
    kept = None if recompute or not (need_wg or need_wu) else z
    # x is saved as the way to the input, for `run_once_differentiable`: the node before attention keeps it anyway.
    ctx.save_for_backward(a, x, wn, wo, s, rstd, kept, g, u, None if product or not need_wd else h, wg, wu, wd)
    return (y.add_(s),)


def _leave_bwd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    a, _, wn, wo, s, rstd, z, g, u, h, wg, wu, wd = ctx.saved_tensors
    norm, act, _, _ = ctx.options
    need_a, _, need_x, need_wn, need_wo, need_wg, need_wu, need_wd, need_bo, need_bg, need_bu, need_bd = (
        ctx.needs_input_grad
    )
    dwo = dwg = dwu = dwd = dbo = dbg = dbu = dbd = da = dwn = None
    dy = dout.reshape(-1, dout.shape[-1])
    need_s = need_a or need_x or need_wo or need_bo
    need_z = need_s or need_wn
    scratch: Any = None
    again = need_wd and h is None
    if need_z or need_wg or need_wu or need_bg or need_bu:
        scratch = torch.mm(dy, wd)
        # Gate and up are private to this node. With a retained graph the next backward pass reads them again.
        over = not is_graph_retained()
        dg, du = (g, u) if over else (torch.empty_like(g), torch.empty_like(u))
        gated_backward(scratch, g, u, act, 1.0, 1.0, dg, du, scratch if again else None)
    elif again:
        scratch = _gated_fwd.direct(g, u, act, 1.0, 1.0)  # type: ignore[attr-defined]
    if need_wd:
        dwd = torch.mm(dy.t(), scratch if again else h)
    if need_bd:
        dbd = dy.sum(0)
    scratch = h = None
    if z is None and (need_wg or need_wu):
        z = _rms_norm_fwd.direct(s, wn, *norm)[0]  # type: ignore[attr-defined]
    rows: Any = None if z is None else z.view(-1, s.shape[-1])
    dz = torch.mm(dg, wg) if need_z else None
    if need_wg:
        dwg = torch.mm(dg.t(), rows)
    if dz is not None:
        dz.addmm_(du, wu)
    if need_wu:
        dwu = torch.mm(du.t(), rows)
    if need_bg:
        dbg = dg.sum(0)
    if need_bu:
        dbu = du.sum(0)
    if dz is None:
        return da, None, None, dwn, dwo, dwg, dwu, dwd, dbo, dbg, dbu, dbd
    ds, dw = _rms_norm_bwd(dz, dout, s, wn, rstd, *norm, need_s, need_wn)
    if need_wn:
        dwn = dw
    if need_s:
        do = ds.view(-1, s.shape[-1])
        if need_a:
            da = torch.mm(do, wo).view(a.shape)
        if need_wo:
            dwo = torch.mm(do.t(), a.reshape(-1, wo.shape[1]))
        if need_bo:
            dbo = do.sum(0)
    return da, None, ds if need_x else None, dwn, dwo, dwg, dwu, dwd, dbo, dbg, dbu, dbd


_leave = make_function(_leave_fwd, _leave_bwd, "leave_attention")
