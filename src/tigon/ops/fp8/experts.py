"""Mixture-of-experts feed-forward layer in FP8, given the router's choices: `tigon.moe_mlp` by the recipe.

    forward     rows of x, gathered by expert;  gate, up = one grouped product;  h = rows of act(gate) · up;
                y = h · down, summed with the routing weights w
    backward    rows of dy, gathered;  dh = dy · downᵀ;  rows of w · dgate and w · dup, the bytes of h again, and
                dw = h · dh, in one pass;  d down = c · (w · dy)'ᵀ h, where h is the wide factor;  d gate_up;  dx
    saved       the inputs, the rows' scales, gate and up in bf16 or e4m3, and the sorted choices

A token has one scale for all its experts, an expert's weight one, and so has each expert's weight gradient: c is the
maximum over the expert's rows. Weights are quantised at each use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import make_function, view_rows
from tigon.ops.experts.routing import Routing
from tigon.ops.fp8.columns import to_columns, transpose_rows
from tigon.ops.fp8.expert_columns import fold_expert_scales, list_columns
from tigon.ops.fp8.expert_rows import (
    gather_quantized_rows,
    gather_rows,
    gather_weight_gradients,
    sort_choices,
    sum_rows,
)
from tigon.ops.fp8.gated_gradient import weighted_gated_gradient
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.grouped import multiply_grouped_columns, multiply_grouped_rows
from tigon.ops.fp8.mlp import Unit
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.untraced import run_untraced
from tigon.ops.fp8.weight import measure_stack, quantize_stack, transpose_stack


def multiply_by_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, unit: Unit) -> Tensor:
    """Run each token through its K experts, and sum the weighted results.

    Args:
        x: (T, D) bf16.
        index: (T, K) int64 or int32, the experts chosen for each token; those outside [0, E) add nothing.
        weights: (T, K), any float dtype, the routing weights.
        gate_up: (E, 2I, D) bf16 or fp32, gate above up. Weights that are not contiguous are copied.
        down: (E, D, I), likewise. D and I are multiples of 16, and E is at most 1,024.
        unit: its products' gradients are in FP8.
    Returns: (T, D) bf16.
    """
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, gate_up, down))
    y: Tensor = run_untraced(_fp8_experts, x, index, weights, gate_up, down, unit, trains)
    return y


def _fp8_experts_fwd(
    ctx: Any, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, unit: Unit, trains: bool
) -> Tensor:
    ctx.set_materialize_grads(False)
    ctx.unit = unit
    E, top_k, is_exact = len(down), index.shape[1], unit.products.is_exact
    routing = sort_choices(x, index, E)
    ends = routing.offsets[1:]
    rows = gather_quantized_rows(quantize_rows(view_rows(x)), routing, top_k)
    above, below = measure_stack(gate_up), measure_stack(down)
    z = multiply_grouped_rows(rows, quantize_stack(gate_up, above), ends, is_exact=is_exact)
    scale = rows.scale
    del rows
    product, kept = gated_rows(z, unit.act, unit.keep == "fp8" and trains)
    data, kept_scale = (z, None) if kept is None else kept
    ctx.save_for_backward(
        x, index, weights, gate_up, down, *routing, scale, data, kept_scale, product.scale, above, below
    )
    del z, data, kept
    results = multiply_grouped_rows(product, quantize_stack(down, below), ends, is_exact=is_exact)
    return sum_rows(results, routing, weights, x.shape)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    x, index, weights, gate_up, down, *saved = ctx.saved_tensors
    routing = Routing(*saved[:4])
    scale, data, kept_scale, product_scale, above, below = saved[4:]
    need_x, _, need_weights, need_above, need_down = ctx.needs_input_grad[:5]
    top_k, ends, is_exact = index.shape[1], routing.offsets[1:], ctx.unit.products.is_exact
    dy = view_rows(dy)
    rows = gather_quantized_rows(quantize_rows(dy), routing, top_k)
    dy_scale = rows.scale
    dh = multiply_grouped_rows(rows, transpose_stack(down, below), ends, is_exact=is_exact)
    del rows
    weight = gather_rows(weights.float().reshape(-1, 1), routing, 1)
    rows, product, dots = weighted_gated_gradient(
        dh, data, kept_scale, ctx.unit.act, product_scale if need_down else None, weight
    )
    del dh, data, saved
    d_weights = gather_weight_gradients(dots, routing, index, weights) if need_weights else None
    columns = list_columns(routing, top_k) if need_above or need_down else None
    d_down = d_above = dx = None
    if columns is not None and product is not None:
        factor, c = fold_expert_scales(product_scale, weight, dy_scale, columns)
        narrow, wide = to_columns(dy, factor, rows=columns.tokens), transpose_rows(product, columns.rows)
        d_down = multiply_grouped_columns(narrow, wide, c, columns.ends, is_exact=is_exact).to(down.dtype)
        del narrow, wide, product
    if columns is not None and need_above:
        factor, c = fold_expert_scales(rows.scale, None, scale, columns)
        narrow, wide = to_columns(view_rows(x), factor, rows=columns.tokens), transpose_rows(rows.data, columns.rows)
        d_above = multiply_grouped_columns(wide, narrow, c, columns.ends, is_exact=is_exact).to(gate_up.dtype)
        del narrow, wide
    if need_x:
        results = multiply_grouped_rows(rows, transpose_stack(gate_up, above), ends, is_exact=is_exact)
        dx = sum_rows(results, routing, None, x.shape)
    return dx, None, d_weights, d_above, d_down, None, None


_fp8_experts = make_function(_fp8_experts_fwd, _backward)
