"""Linear layers and gated MLPs in FP8 inside compiled graphs.

A graph would keep the answers of the host's checks of weights, so each pass is one operator, whose steps are those of
`multiply` and `mlp`: the bits are the same.

    fp8_linear_fwd   y for stacked weights; the tokens' scales and the weights' largest magnitude
    fp8_linear_bwd   dx, dW and db; from dy, or from e4m3 rows of dy
    fp8_mlp_fwd      y; gate and up in either form, the scales and the largest magnitudes
    fp8_mlp_bwd      dgate and dup, dW and db of down. `fp8_linear_bwd` follows, and gate and up are free before that

Weights are measured in each forward pass and rounded before each product: no copy is kept between calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import differentiable, launcher, use_triton, view_rows
from tigon.ops.fp8.columns import fold_scales, to_columns, transpose_rows
from tigon.ops.fp8.gated_gradient import gated_gradient
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.mlp import _differentiate_gated, _restore, _sum_rows
from tigon.ops.fp8.multiply import Input, Products, differentiate_weights, join_biases, reshape_rows
from tigon.ops.fp8.products import multiply_columns, multiply_rows
from tigon.ops.fp8.recipe import E4M3, Rows
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.weight import measure_weights, quantize_transposed, quantize_weight


def multiply_traced(
    x: Tensor, parameters: Sequence[Tensor], biases: Sequence[Tensor | None], options: Products
) -> tuple[Tensor, ...]:
    """`multiply` of a tensor while torch.compile traces."""
    use_triton(x, *parameters)  # so that the graph is compiled again for another backend
    y = _fp8_linear(x, [*parameters], join_biases(parameters, biases), options.dw, options.is_exact)
    # A split makes the gradients of results that nobody used zeros.
    return (y,) if len(parameters) == 1 else y.split([p.shape[0] for p in parameters], -1)


def multiply_gated_traced(
    x: Tensor, weights: tuple[Tensor, Tensor | None, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None], act: str, keep: str, options: Products,
) -> Tensor:  # fmt: skip
    """`multiply_gated` of a tensor while torch.compile traces."""
    gate, up, down = weights
    use_triton(x, *weights)
    above = [gate] if up is None else [gate, up]
    joint = join_biases(above, biases[: len(above)])
    tensors = (t for t in (x, *weights, *biases) if t is not None)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        keep = "bf16"  # no rows are made for a backward pass that cannot come
    return _fp8_mlp(x, above, down, joint, biases[2], act, keep, options.dw, options.is_exact)


# ------------------------------------------------------------------------------------------------------------- passes


def _count_rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _sum_heights(parts: Sequence[Tensor]) -> int:
    return sum(part.shape[0] for part in parts)


def _fp8_linear_fwd_fake(
    x: Tensor, weights: list[Tensor], bias: Tensor | None, dw: str, is_exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], _sum_heights(weights)), dtype=torch.bfloat16)
    return y, x.new_empty((_count_rows(x), 1), dtype=torch.float32), x.new_empty((), dtype=torch.float32)


@launcher(_fp8_linear_fwd_fake)
def _fp8_linear_fwd(
    x: Tensor, weights: list[Tensor], bias: Tensor | None, dw: str, is_exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the tokens' scales and the weights' largest magnitude. dw: for the backward pass."""
    rows, amax = quantize_rows(view_rows(x)), measure_weights(weights)
    y = multiply_rows(rows, quantize_weight(weights, amax), bias, is_exact=is_exact)
    return reshape_rows(y, x.shape), rows.scale, amax


def _is_joint(wanted: Sequence[bool], weights: Sequence[Tensor]) -> bool:
    """Whether the weights' gradients are parts of one tensor."""
    return all(wanted) and len({w.dtype for w in weights}) == 1


def _fp8_linear_bwd_fake(
    dy: Tensor, dy_scale: Tensor | None, x: Tensor, scale: Tensor, amax: Tensor, weights: list[Tensor],
    needs: list[bool], bias: torch.dtype | None, dw: str, is_exact: bool,
) -> list[Tensor]:  # fmt: skip
    need_x, *wanted = needs
    found = [x.new_empty(x.shape, dtype=torch.bfloat16)] if need_x else []
    if _is_joint(wanted, weights):
        found.append(weights[0].new_empty((_sum_heights(weights), weights[0].shape[1])))
    else:
        found += [w.new_empty(w.shape) for w, is_wanted in zip(weights, wanted, strict=True) if is_wanted]
    if bias is not None:
        found.append(x.new_empty(_sum_heights(weights), dtype=bias))
    return found


@launcher(_fp8_linear_bwd_fake)
def _fp8_linear_bwd(
    dy: Tensor, dy_scale: Tensor | None, x: Tensor, scale: Tensor, amax: Tensor, weights: list[Tensor],
    needs: list[bool], bias: torch.dtype | None, dw: str, is_exact: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of x, of the weights, in one tensor where all are wanted in one dtype, and of the bias.

    dy: (..., ΣN), or with dy_scale e4m3 rows. needs: for x and each weight. bias: its dtype, if its gradient is wanted.
    """
    need_x, *wanted = needs
    found: list[Tensor] = []
    plain = view_rows(dy)
    rows = Rows(plain, dy_scale) if dy_scale is not None else None
    if rows is None and (need_x or (any(wanted) and dw == "fp8")):
        rows = quantize_rows(plain)
    if need_x and rows is not None:
        dx = multiply_rows(rows, quantize_transposed(weights, amax), is_exact=is_exact)
        found.append(reshape_rows(dx, x.shape))
    saved, sizes = Input(x, None, 0.0, scale), [len(w) for w in weights]
    is_joint = _is_joint(wanted, weights)
    if any(wanted) and dw == "fp8" and rows is not None:
        dtypes = [w.dtype for w in weights]
        grouped = ([sum(sizes)], [True], dtypes[:1]) if is_joint else (sizes, wanted, dtypes)
        found += [g for g in differentiate_weights(rows, saved, *grouped, is_exact) if g is not None]
    elif any(wanted):
        again = saved.again()
        parts = [(plain, weights[0])] if is_joint else zip(plain.split(sizes, 1), weights, strict=True)
        chosen = [True] if is_joint else wanted
        found += [
            torch.mm(part.to(again.dtype).t(), again).to(w.dtype)
            for (part, w), is_wanted in zip(parts, chosen, strict=True)
            if is_wanted
        ]
    if bias is not None:
        found.append(plain.sum(0, dtype=bias) if dy_scale is None else _sum_rows(Rows(plain, dy_scale)).to(bias))
    return found


def _differentiate_linear(
    ctx: Any, dy: Tensor, dy_scale: Tensor | None, x: Tensor, scale: Tensor, amax: Tensor, weights: list[Tensor],
    needs: tuple[bool, list[bool], bool],
) -> tuple[Tensor | None, list[Tensor | None], Tensor | None]:  # fmt: skip
    """The gradients of x, of each weight and of the bias. needs: for each of them."""
    need_x, wanted, need_bias = needs[0], [*needs[1]], needs[2]
    if not (need_x or any(wanted) or need_bias):
        return None, [None] * len(weights), None
    bias = ctx.bias if need_bias else None
    found = _fp8_linear_bwd(dy, dy_scale, x, scale, amax, weights, [need_x, *wanted], bias, ctx.dw, ctx.is_exact)
    dx = found.pop(0) if need_x else None
    db = found.pop() if need_bias else None
    if _is_joint(wanted, weights):
        return dx, [*found[0].split([w.shape[0] for w in weights])], db
    parts = iter(found)
    return dx, [next(parts) if is_wanted else None for is_wanted in wanted], db


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, bias, ctx.dw, ctx.is_exact = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, *output[1:], *weights)


def _linear_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, scale, amax, *weights = ctx.saved_tensors
    if dy is None:
        return None, [None] * len(weights), None
    return _differentiate_linear(ctx, dy, None, x, scale, amax, weights, ctx.needs_input_grad[:3])


_fp8_linear = differentiable(_fp8_linear_fwd, _save_linear, _linear_backward)


def _fp8_mlp_fwd_fake(
    x: Tensor, above: list[Tensor], down: Tensor, bias: Tensor | None, down_bias: Tensor | None, act: str, keep: str,
    dw: str, is_exact: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    M, width = _count_rows(x), _sum_heights(above)
    y = x.new_empty((*x.shape[:-1], down.shape[0]), dtype=torch.bfloat16)
    scales = [x.new_empty((M, 1), dtype=torch.float32) for _ in range(2)]
    amaxes = [x.new_empty((), dtype=torch.float32) for _ in range(2)]
    kept = x.new_empty((M, 2) if keep == "fp8" else 0, dtype=torch.float32)
    gate_up = x.new_empty((M, width), dtype=E4M3 if keep == "fp8" else torch.bfloat16)
    return y, gate_up, kept, *scales, *amaxes


@launcher(_fp8_mlp_fwd_fake, results=7)
def _fp8_mlp_fwd(
    x: Tensor, above: list[Tensor], down: Tensor, bias: Tensor | None, down_bias: Tensor | None, act: str, keep: str,
    dw: str, is_exact: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y; gate and up, their scales or nothing; the scales of x and of the product; the largest magnitudes above and of
    down.
    """
    rows, amax, down_amax = quantize_rows(view_rows(x)), measure_weights(above), measure_weights([down])
    gate_up = multiply_rows(rows, quantize_weight(above, amax), bias, is_exact=is_exact)
    product, kept = gated_rows(gate_up, act, keep == "fp8")
    gate_up, kept_scale = (gate_up, amax.new_empty(0)) if kept is None else kept
    y = multiply_rows(product, quantize_weight([down], down_amax), down_bias, is_exact=is_exact)
    return reshape_rows(y, x.shape), gate_up, kept_scale, rows.scale, product.scale, amax, down_amax


def _fp8_mlp_bwd_fake(
    dy: Tensor, gate_up: Tensor, kept: Tensor | None, product_scale: Tensor, down: Tensor, amax: Tensor,
    need_down: bool, act: str, dw: str, is_exact: bool,
) -> list[Tensor]:  # fmt: skip
    M, width = gate_up.shape
    if dw == "fp8":
        found = [gate_up.new_empty((M, width), dtype=E4M3), gate_up.new_empty((M, 1), dtype=torch.float32)]
    else:
        found = [gate_up.new_empty((M, width), dtype=torch.bfloat16)]
    return [*found, down.new_empty(down.shape)] if need_down else found


@launcher(_fp8_mlp_bwd_fake)
def _fp8_mlp_bwd(
    dy: Tensor, gate_up: Tensor, kept: Tensor | None, product_scale: Tensor, down: Tensor, amax: Tensor,
    need_down: bool, act: str, dw: str, is_exact: bool,
) -> list[Tensor]:  # fmt: skip
    """dgate and dup side by side, in e4m3 with their scales, or for a dw of "bf16" in bf16; and dW of down."""
    dy = view_rows(dy)
    dy_rows = quantize_rows(dy)
    d = multiply_rows(dy_rows, quantize_transposed([down], amax), is_exact=is_exact)
    if dw == "fp8":
        rows, product = gated_gradient(d, gate_up, kept, act, product_scale if need_down else None)
        if product is None:
            return [*rows]
        factor, c = fold_scales(product_scale, dy_rows.scale)
        wide = transpose_rows(product)
        return [*rows, multiply_columns(to_columns(dy, factor), wide, c, down.dtype, is_exact=is_exact)]
    gradient, product = _differentiate_gated(d, _restore(gate_up, kept), act, use_triton(d, down))
    return [gradient, torch.mm(dy.to(product.dtype).t(), product).to(down.dtype)] if need_down else [gradient]


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, above, down, bias, down_bias, ctx.act, keep, ctx.dw, ctx.is_exact = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.down_bias, ctx.is_kept = None if down_bias is None else down_bias.dtype, keep == "fp8"
    ctx.save_for_backward(x, *output[1:], down, *above)


def _mlp_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, gate_up, kept, scale, product_scale, amax, down_amax, down, *above = ctx.saved_tensors
    need_x, need_above, need_down, need_bias, need_down_bias = ctx.needs_input_grad[:5]
    if dy is None:
        return None, [None] * len(above), None, None, None
    db = view_rows(dy).sum(0, dtype=ctx.down_bias) if need_down_bias else None
    gradients: list[Tensor | None] = [None] * len(above)
    dx = d_down = db_above = None
    if need_x or any(need_above) or need_down or need_bias:
        first, *found = _fp8_mlp_bwd(
            dy,
            gate_up,
            kept if ctx.is_kept else None,
            product_scale,
            down,
            down_amax,
            need_down,
            ctx.act,
            ctx.dw,
            ctx.is_exact,
        )
        d_scale = found.pop(0) if ctx.dw == "fp8" else None
        d_down = found[0] if need_down else None
        needs = need_x, need_above, need_bias
        dx, gradients, db_above = _differentiate_linear(ctx, first, d_scale, x, scale, amax, above, needs)
    return dx, gradients, d_down, db_above, db


_fp8_mlp = differentiable(_fp8_mlp_fwd, _save_mlp, _mlp_backward)
