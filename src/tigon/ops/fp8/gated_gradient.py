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
    if not use_triton(dy, gate_up if scale is None else scale, product_scale) or not dy.numel():
        return gated_gradient_reference(dy, gate_up, scale, act, product_scale)
    data, row_scale, *product = _fp8_gated_gradient(dy, gate_up, scale, act, product_scale)
    return Rows(data, row_scale), product[0] if product else None


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _differentiate(dy_ptr, g_ptr, scale_g, scale_u, cols, N, ACT: tl.constexpr):
    """dgate, dup, and the product."""
    dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    u = tl.load(g_ptr + N + cols, mask=cols < N, other=0.0).to(tl.float32)
    if scale_g is not None:
        g *= scale_g
        u *= scale_u
    a, slope = ACT(g)
    return dy * u * slope, dy * a, a * u


# Persistent grid: a program takes every num_programs-th row.
#   dy       the product's gradient, (M, N), with a row stride
#   g, gs    gate and up side by side, (M, 2N), with a row stride; in e4m3 with their scales, (M, 2), else gs is None
#   q, s     rows of dgate and dup side by side, (M, 2N), and one scale for both
#   p, ps    the product again, (M, N), by the scales of the forward pass; or both None
#   WHOLE    the row fits BLOCK columns in registers. Other rows are read twice: for the product and the maximum, and
#            backwards for the rows
#   STAGES   as in `gated_rows`
@jit
@do_not_specialize("M")
def _fp8_gated_gradient_kernel(
    dy_ptr, g_ptr, gs_ptr, q_ptr, s_ptr, p_ptr, ps_ptr, M, N, stride_dy, stride_g,
    ACT: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    for r in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        row = r + tl.full((), 0, tl.int64)
        dy_row, g_row, q_row = dy_ptr + row * stride_dy, g_ptr + row * stride_g, q_ptr + row * 2 * N
        scale_g, scale_u = None, None
        if gs_ptr is not None:
            scale_g, scale_u = tl.load(gs_ptr + 2 * row), tl.load(gs_ptr + 2 * row + 1)
        if p_ptr is not None:
            p_row, product_scale = p_ptr + row * N, tl.load(ps_ptr + row)
        if WHOLE:
            dg, du, y = _differentiate(dy_row, g_row, scale_g, scale_u, cols, N, ACT)
            top = larger(tl.abs(dg), tl.abs(du))
            if p_ptr is not None:
                store_e4m3(p_row, y, product_scale, cols, N)
        else:
            top = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, N, BLOCK):
                dg, du, y = _differentiate(dy_row, g_row, scale_g, scale_u, start + cols, N, ACT)
                top = larger(top, larger(tl.abs(dg), tl.abs(du)))
                if p_ptr is not None:
                    store_e4m3(p_row, y, product_scale, start + cols, N)
        scale = find_scale(top)
        tl.store(s_ptr + row, scale)
        if WHOLE:
            store_e4m3(q_row, dg, scale, cols, N)
            store_e4m3(q_row + N, du, scale, cols, N)
        else:
            last = (N - 1) // BLOCK * BLOCK
            for back in range(0, N, BLOCK):  # the blocks read last are the likeliest to be in L2 still
                start = last - back
                dg, du, _ = _differentiate(dy_row, g_row, scale_g, scale_u, start + cols, N, ACT)
                store_e4m3(q_row, dg, scale, start + cols, N)
                store_e4m3(q_row + N, du, scale, start + cols, N)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(dy: Tensor, gate_up: Tensor) -> Tile:
    return choose_tile(dy.shape[1], dy.element_size() + 2 * gate_up.element_size(), True, dy.device)


def _fp8_gated_gradient_fake(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None
) -> list[Tensor]:
    M, N = dy.shape
    found = [
        torch.empty((M, 2 * N), dtype=E4M3, device=dy.device),
        torch.empty((M, 1), dtype=torch.float32, device=dy.device),
    ]
    return found if product_scale is None else [*found, torch.empty((M, N), dtype=E4M3, device=dy.device)]


@launcher(_fp8_gated_gradient_fake)
def _fp8_gated_gradient(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None
) -> list[Tensor]:
    """Rows and scales of dgate and dup, and the product if it has a scale."""
    found = _fp8_gated_gradient_fake(dy, gate_up, scale, act, product_scale)
    dy, gate_up = view_rows(dy), view_rows(gate_up)
    scale = None if scale is None else scale.contiguous()
    product_scale = None if product_scale is None else product_scale.contiguous()
    M, N = dy.shape
    strides = dy.stride(0), gate_up.stride(0)

    def plan() -> Plan:
        return _tile(dy, gate_up).plan(M, dy.device, N, *strides, ACTS[act].tile)

    product = None if product_scale is None else found[2]
    tensors = (dy, gate_up, scale, *found[:2], product, product_scale)
    key = (M, N, *strides, dy.dtype, gate_up.dtype, act, product is None)
    launch(_fp8_gated_gradient_kernel, key, tensors, plan)
    return found
