"""A gated MLP as an autograd node, all products in FP8: y = (act(x Wgᵀ) · x Wuᵀ) Wdᵀ.

    forward     rows of x;  gate, up = one product;  p = rows of act(gate) · up;  y = p Wdᵀ
    backward    rows of dy;  dp = dy Wd;  rows of dgate, dup, and the bytes of p again, in one pass over gate and up;
                dWd = c · dy'ᵀ p, where p is the wide factor and its scales move into dy;  dW of gate and up;  dx
    saved       gate and up in bf16, or in e4m3 with keep="fp8"; p's scales; and as in `multiply` for x and the weights

Gate and up are private to this node: their memory is released as soon as their gradients are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import is_graph_retained, load_tensors, make_function, save_tensors, use_triton, view_rows
from tigon.ops.acts import ACTS
from tigon.ops.fp8.columns import fold_scales, to_columns, transpose_rows
from tigon.ops.fp8.gated_gradient import gated_gradient
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.gathered import GatheredWeight
from tigon.ops.fp8.multiply import (
    Hooks,
    Products,
    anchor_unsaved,
    differentiate_weights,
    join_biases,
    read_input,
    reshape_rows,
    save_input,
)
from tigon.ops.fp8.normed import Normed
from tigon.ops.fp8.products import multiply_columns, multiply_rows
from tigon.ops.fp8.recipe import Rows
from tigon.ops.fp8.reference import compute_slope
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.store import JointWeight
from tigon.ops.gated import gated_backward

Keep = Literal["bf16", "fp8"]
KEEPS = ("bf16", "fp8")
CHUNK = 512  # tokens whose gradients are in fp32 at a time, for biases


@dataclass(frozen=True)
class Unit:
    """A gated MLP's options. act: a name in `tigon.ops.acts`. keep: how gate and up are kept for the backward pass."""

    act: str = "silu"
    keep: Keep = "bf16"
    products: Products = field(default_factory=Products)


class Stores(NamedTuple):
    """The copies of gate's and up's weights, stacked, and of down's."""

    up: JointWeight
    down: JointWeight


def multiply_gated(
    source: Tensor | Normed, stores: Stores, weights: tuple[Tensor, Tensor | None, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None], unit: Unit, saved_by: Hooks = None,
) -> Tensor:  # fmt: skip
    """down(act(gate(x)) · up(x)).

    Args:
        source: x (..., H) in bf16, fp16 or fp32; or the norm from `norm_to_rows`.
        weights: gate (N, H), up (N, H) and down (M, N); where up is None gate is (2N, H), gate's rows, then up's. All
            sizes are multiples of 16.
        biases: gate's (N,), or (2N,) where up is None, up's and down's; or None for each.
        saved_by: a checkpoint's hooks (pack, unpack), used to save before the layer down runs.
    Returns: (..., M) bf16.
    """
    carrier, normed = (source.handle, source) if isinstance(source, Normed) else (source, None)
    saved_by = saved_by if torch.is_grad_enabled() else None
    # Without a backward pass nothing is made for one.
    inputs = (carrier, *weights, *biases)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    found = _fp8_gated_mlp(carrier, normed, stores, unit, saved_by, trains, *weights, *biases)
    y: Tensor = found[0]
    return y


def _fp8_gated_mlp_fwd(
    ctx: Any, carrier: Tensor, normed: Normed | None, stores: Stores, unit: Unit, saved_by: Hooks, trains: bool,
    *tensors: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    ctx.set_materialize_grads(False)
    gate, up, down, *biases = tensors
    above = (gate,) if up is None else (gate, up)
    need_x, need_above, need_down, need_hidden = _read_needs(ctx)
    is_exact = unit.products.is_exact
    ctx.unit, ctx.shape, ctx.dtypes = unit, carrier.shape, [None if t is None else t.dtype for t in tensors]
    ctx.sizes = [len(w) for w in above]
    ctx.above, ctx.down = stores.up.read(above), stores.down.read((down,))
    ctx.uses_kernels = use_triton(carrier, *(w for w in (*above, down) if type(w) is not GatheredWeight))
    rows = quantize_rows(view_rows(carrier)) if normed is None else normed.rows
    joint = join_biases(above, biases[: len(above)])
    gate_up = multiply_rows(rows, ctx.above.read_rows(above), joint, is_exact=is_exact)
    product, kept = gated_rows(gate_up, unit.act, unit.keep == "fp8" and trains)
    data, scale = (gate_up, None) if kept is None else kept
    saved = [
        *save_input(ctx, carrier, normed, rows, needed=need_above), data, scale, product.scale if need_down else None,
        *((gate, up) if need_x else (None, None)), down if need_hidden or need_down else None,
    ]  # fmt: skip
    del gate_up, data, kept, rows
    # Hooks may keep what they pack, and hand out the same tensor.
    ctx.owns_saved = saved_by is None and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    save_tensors(ctx, saved_by, *saved)
    anchor: tuple[Tensor, ...] = ()
    if saved_by is None:
        anchor = anchor_unsaved(ctx, saved, normed, (carrier, *(None,) * 5, *tensors))
    del saved
    y = multiply_rows(product, ctx.down.read_rows((down,)), biases[2], is_exact=is_exact)
    return reshape_rows(y, carrier.shape), *anchor


def _read_needs(ctx: Any) -> tuple[bool, bool, bool, bool]:
    """Whether x, a weight of gate and up, down's weight, and gate and up themselves need a gradient."""
    needs = ctx.needs_input_grad
    need_above = needs[6] or needs[7]
    return needs[0], need_above, needs[8], needs[0] or need_above or needs[9] or needs[10]


def _backward(ctx: Any, given: Tensor, *_: Any) -> tuple[Any, ...]:
    unit, needs = ctx.unit, ctx.needs_input_grad
    need_x, need_above, need_down, need_hidden = _read_needs(ctx)
    need_biases, is_fp8 = needs[9:12], unit.products.dw == "fp8"
    dy = view_rows(given)
    loaded = load_tensors(ctx)
    saved, (scale, product_scale, gate, up, down) = read_input(ctx, loaded), loaded[5:10]
    is_exact, dtypes = unit.products.is_exact, ctx.dtypes
    gradients: list[Tensor | None] = [None] * 6
    if need_biases[2]:
        gradients[5] = dy.sum(0, dtype=dtypes[5])
    if not (need_hidden or need_down):
        return None, None, None, None, None, None, *gradients
    dy_rows = quantize_rows(dy)
    d = multiply_rows(dy_rows, ctx.down.read_transposed((down,)), is_exact=is_exact)
    if is_fp8:
        rows, product = gated_gradient(d, loaded[4], scale, unit.act, product_scale if need_down else None)
        plain = None
    else:
        plain, again = _differentiate_gated(d, _restore(loaded[4], scale), unit.act, ctx.uses_kernels)
        product = again if need_down else None
        rows = quantize_rows(plain)
        del again
    del d
    _release(loaded, 4, ctx.owns_saved)
    if product is not None:
        if is_fp8:
            # Here the product is the wide factor: its scales go into dy.
            factor, c = fold_scales(product_scale, dy_rows.scale)
            wide = transpose_rows(product)
            product = None
            gradients[2] = multiply_columns(to_columns(dy, factor), wide, c, dtypes[2], is_exact=is_exact)
            del wide
        else:
            gradients[2] = torch.mm(dy.to(product.dtype).t(), product).to(dtypes[2])
            product = None
    del dy_rows
    sizes, count = ctx.sizes, len(ctx.sizes)
    if need_above and is_fp8:
        gradients[:count] = differentiate_weights(rows, saved, sizes, needs[6 : 6 + count], dtypes[:count], is_exact)
    elif need_above and plain is not None:
        x = saved.again()
        gradients[:count] = [
            torch.mm(part.t(), x).to(dtype) if need else None
            for part, dtype, need in zip(plain.split(sizes, 1), dtypes, needs[6:8], strict=False)
        ]
        del x
    if need_biases[0] or need_biases[1]:
        sums = _sum_rows(rows) if plain is None else plain.sum(0, dtype=torch.float32)
        for i, part in enumerate(sums.split(sizes)):
            gradients[3 + i] = part.to(dtypes[3 + i]) if need_biases[i] else None
    del plain
    dx = None
    if need_x:
        above = (gate,) if up is None else (gate, up)
        dx = reshape_rows(multiply_rows(rows, ctx.above.read_transposed(above), is_exact=is_exact), ctx.shape)
    return dx, None, None, None, None, None, *gradients


_fp8_gated_mlp = make_function(_fp8_gated_mlp_fwd, _backward)


def _release(loaded: list[Any], i: int, owned: bool) -> None:
    """Free the memory of a saved tensor that no other code holds: autograd would keep it until the node returns."""
    t, loaded[i] = loaded[i], None
    if owned and type(t) is Tensor and not is_graph_retained() and not t.is_meta:
        t.untyped_storage().resize_(0)


def _restore(gate_up: Tensor, scale: Tensor | None) -> Tensor:
    """gate and up (M, 2N) in bf16, from either form."""
    if scale is None:
        return gate_up
    halves = gate_up.to(torch.bfloat16).view(len(scale), 2, -1)
    return (halves * scale.to(torch.bfloat16).unsqueeze(2)).view(gate_up.shape)  # powers of two: exact


def _differentiate_gated(d: Tensor, gate_up: Tensor, act: str, uses_kernels: bool) -> tuple[Tensor, Tensor]:
    """dgate and dup (M, 2N), and the product (M, N), in bf16. Overwrites d."""
    N = d.shape[1]
    if uses_kernels:
        gradient = torch.empty_like(gate_up)
        halves = gate_up[:, :N], gate_up[:, N:]
        gated_backward(d, *halves, act, 1.0, 1.0, gradient[:, :N], gradient[:, N:], d)
        return gradient, d
    gate, up, dy = gate_up[:, :N].float(), gate_up[:, N:].float(), d.float()
    value = ACTS[act].value(gate)
    return torch.cat([dy * up * compute_slope(act, gate), dy * value], 1).to(d.dtype), (value * up).to(d.dtype)


def _sum_rows(rows: Rows) -> Tensor:
    """Σ rows, (N,) in fp32, a few tokens at a time."""
    total = rows.scale.new_zeros(rows.data.shape[1])
    for start in range(0, len(rows.data), CHUNK):
        part = slice(start, start + CHUNK)
        total += (rows.data[part].float() * rows.scale[part]).sum(0)
    return total
