"""The gradients of gate and up in e4m3 rows, and the product again."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import Plan, do_not_specialize, jit, launch, launcher, tl, use_triton, view_rows
from tigon.kernels.tiles.fp8 import larger
from tigon.ops.acts import ACTS
from tigon.ops.fp8.gated_rows import Tile, choose_tile, find_scale, store_e4m3
from tigon.ops.fp8.recipe import E4M3, Rows
from tigon.ops.fp8.reference import gated_gradient_reference


def gated_gradient(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None
) -> tuple[Rows, Tensor | None]:
    """dgate and dup (M, 2N) in rows, and act(gate) · up (M, N) in e4m3 by product_scale unless that is None.

    Args:
        dy: (M, N), the product's gradient.
        gate_up: (M, 2N), gate and up side by side: floats, or e4m3 with a scale (M, 2) for gate and for up.
        product_scale: (M, 1), the forward pass's. Larger numbers, which e4m3 gate and up may give, saturate.
    """
    return _differentiate_rows(dy, gate_up, scale, act, product_scale, None)[:2]


def weighted_gated_gradient(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None, weight: Tensor
) -> tuple[Rows, Tensor | None, Tensor]:
    """`gated_gradient` of weight · dy, and the weights' gradients: the rows' Σ dy · act(gate) · up, (M, 1) fp32.

    weight: (M, 1) fp32, for each row.
    """
    rows, product, dots = _differentiate_rows(dy, gate_up, scale, act, product_scale, weight)
    assert dots is not None
    return rows, product, dots


def _differentiate_rows(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None, weight: Tensor | None
) -> tuple[Rows, Tensor | None, Tensor | None]:
    if not use_triton(dy, gate_up if scale is None else scale, product_scale, weight) or not dy.numel():
        return gated_gradient_reference(dy, gate_up, scale, act, product_scale, weight)
    data, row_scale, *more = _fp8_gated_gradient(dy, gate_up, scale, act, product_scale, weight)
    dots = None if weight is None else more.pop()
    return Rows(data, row_scale), more[0] if more else None, dots


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _differentiate(dy_ptr, g_ptr, scale_g, scale_u, cols, N, ACT: tl.constexpr):
    """dgate, dup, the product, and the terms of the weight's gradient."""
    dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    u = tl.load(g_ptr + N + cols, mask=cols < N, other=0.0).to(tl.float32)
    if scale_g is not None:
        g *= scale_g
        u *= scale_u
    a, slope = ACT(g)
    dg, du, y = dy * u * slope, dy * a, a * u
    return dg, du, y, dy * y


# Persistent grid: a program takes every num_programs-th row.
#   dy       the product's gradient, (M, N), with a row stride
#   g, gs    gate and up side by side, (M, 2N), with a row stride; in e4m3 with their scales, (M, 2), else gs is None
#   q, s     rows of dgate and dup side by side, (M, 2N), and one scale for both
#   p, ps    the product again, (M, N), by the scales of the forward pass; or both None
#   w, d     a weight for each row of dy, and Σ dy · product, the weights' gradients; or both None
#   WHOLE    the row fits BLOCK columns in registers. Other rows are read twice: for the product and the maximum, and
#            backwards for the rows
#   STAGES   as in `gated_rows`
@jit
@do_not_specialize("M")
def _fp8_gated_gradient_kernel(
    dy_ptr, g_ptr, gs_ptr, q_ptr, s_ptr, p_ptr, ps_ptr, w_ptr, d_ptr, M, N, stride_dy, stride_g,
    ACT: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    for r in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        row = r + tl.full((), 0, tl.int64)
        dy_row, g_row, q_row = dy_ptr + row * stride_dy, g_ptr + row * stride_g, q_ptr + row * 2 * N
        scale_g, scale_u = None, None
        if gs_ptr is not None:
            scale_g, scale_u = tl.load(gs_ptr + 2 * row), tl.load(gs_ptr + 2 * row + 1)
        if w_ptr is not None:
            weight = tl.load(w_ptr + row)
        if p_ptr is not None:
            p_row, product_scale = p_ptr + row * N, tl.load(ps_ptr + row)
        if WHOLE:
            dg, du, y, terms = _differentiate(dy_row, g_row, scale_g, scale_u, cols, N, ACT)
            if w_ptr is not None:
                tl.store(d_ptr + row, tl.sum(terms, 0))
                dg, du = dg * weight, du * weight
            top = larger(tl.abs(dg), tl.abs(du))
            if p_ptr is not None:
                store_e4m3(p_row, y, product_scale, cols, N)
        else:
            top = tl.zeros((BLOCK,), tl.float32)
            terms = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, N, BLOCK):
                dg, du, y, more = _differentiate(dy_row, g_row, scale_g, scale_u, start + cols, N, ACT)
                if w_ptr is not None:
                    terms += more
                    dg, du = dg * weight, du * weight
                top = larger(top, larger(tl.abs(dg), tl.abs(du)))
                if p_ptr is not None:
                    store_e4m3(p_row, y, product_scale, start + cols, N)
            if w_ptr is not None:
                tl.store(d_ptr + row, tl.sum(terms, 0))
        scale = find_scale(top)
        tl.store(s_ptr + row, scale)
        if WHOLE:
            store_e4m3(q_row, dg, scale, cols, N)
            store_e4m3(q_row + N, du, scale, cols, N)
        else:
            last = (N - 1) // BLOCK * BLOCK
            for back in range(0, N, BLOCK):  # the blocks read last are the likeliest to be in L2 still
                start = last - back
                dg, du, _, _ = _differentiate(dy_row, g_row, scale_g, scale_u, start + cols, N, ACT)
                if w_ptr is not None:
                    dg, du = dg * weight, du * weight
                store_e4m3(q_row, dg, scale, start + cols, N)
                store_e4m3(q_row + N, du, scale, start + cols, N)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(dy: Tensor, gate_up: Tensor) -> Tile:
    return choose_tile(dy.shape[1], dy.element_size() + 2 * gate_up.element_size(), True, dy.device)


def _fp8_gated_gradient_fake(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None,
    weight: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    M, N = dy.shape
    wanted = [(2 * N, E4M3), (1, torch.float32)]
    wanted += [] if product_scale is None else [(N, E4M3)]
    wanted += [] if weight is None else [(1, torch.float32)]
    return [torch.empty((M, n), dtype=dtype, device=dy.device) for n, dtype in wanted]


@launcher(_fp8_gated_gradient_fake)
def _fp8_gated_gradient(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None,
    weight: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Rows and scales of dgate and dup, the product if it has a scale, and with weights their gradients."""
    found = _fp8_gated_gradient_fake(dy, gate_up, scale, act, product_scale, weight)
    dy, gate_up = view_rows(dy), view_rows(gate_up)
    scale, product_scale, weight = (None if t is None else t.contiguous() for t in (scale, product_scale, weight))
    M, N = dy.shape
    strides = dy.stride(0), gate_up.stride(0)

    def plan() -> Plan:
        return _tile(dy, gate_up).plan(M, dy.device, N, *strides, ACTS[act].tile)

    product = None if product_scale is None else found[2]
    dots = None if weight is None else found[-1]
    tensors = (dy, gate_up, scale, *found[:2], product, product_scale, weight, dots)
    key = (M, N, *strides, dy.dtype, gate_up.dtype, act, product is None, dots is None)
    launch(_fp8_gated_gradient_kernel, key, tensors, plan)
    return found
