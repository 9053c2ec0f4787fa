"""The product of each row with a vector: z = x · w, the head for a single-logit model.

torch's matrix-vector product rounds the logits to x's dtype, and its backward pass reads x in one kernel and writes dx,
an outer product, in a slow one. Here a single kernel does both, and z stays in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    bind_apply,
    cdiv,
    do_not_specialize,
    is_traced,
    jit,
    launch,
    launcher,
    run_once_differentiable,
    tl,
    use_triton,
)
from tigon.kernels.tiles.parts import locate_part
from tigon.ops.gated import choose_unit
from tigon.ops.sum_rows import WARPS, cut, shares, sum_rows


def row_dot(x: Tensor, weight: Tensor) -> Tensor:
    """(M,) fp32, or fp64 for fp64: each row of x times the weight, summed in fp32.

    x: (M, K), any float dtype, K ≥ N: columns after the first N are ignored and get gradient 0. weight: (N,).
    Only for eager mode with kernels; otherwise use torch.
    """
    if x.dim() != 2 or weight.dim() != 1 or weight.shape[0] > x.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"row_dot: x must be (M, K), and weight (N,) with N up to K, got {shapes}.")
    if not use_triton(x, weight) or is_traced(x):
        return row_dot_reference(x, weight)
    found: Tensor = _row_dot(x, weight)
    return found


def row_dot_reference(x: Tensor, weight: Tensor) -> Tensor:
    acc = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return torch.mv(x[:, : len(weight)].to(acc), weight.to(acc))


# ---------------------------------------------------------------------------------------------------------- kernels


# z (M,) = x · w. A program owns BLOCK_M rows and loops over N columns. x has W · UNIT columns, of which N count.
@jit
@do_not_specialize("M")
def _row_dot_fwd_kernel(
    x_ptr, w_ptr, z_ptr, M, N, W, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        # Masked by W · UNIT, not N: a mask by N, which need not be a multiple of UNIT, would make the loads narrow.
        mask = (rows < M)[:, None] & (cols < W * UNIT)[None, :]
        # int64: a batch may have more than 2**31 numbers.
        at = rows.to(tl.int64)[:, None] * W * UNIT + cols[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        # Columns after N may hold NaN.
        total += tl.where((cols < N)[None, :], x * w[None, :], 0.0)
    tl.store(z_ptr + rows, tl.sum(total, 1), mask=rows < M)


# dx = dz ⊗ w, and this program's part of dw = Σ rows dz · x, over rows_each rows and BLOCK_N columns. dx and dw are
# None if not needed.
@jit
@do_not_specialize("M", "rows_each")
def _row_dot_bwd_kernel(
    dz_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, M, N, W, rows_each,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    part, first, cols, inside = locate_part(W, rows_each, UNIT, BLOCK_N)
    counts = cols < N
    w = tl.load(w_ptr + cols, mask=counts, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, rows_each, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        rows = first + row
        there = (row < rows_each) & (rows < M)
        dz = tl.load(dz_ptr + rows, mask=there, other=0.0).to(tl.float32)[:, None]
        at, mask = rows[:, None] * W * UNIT + cols[None, :], there[:, None] & inside[None, :]
        if dw_ptr is not None:
            total += dz * tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if dx_ptr is not None:
            # 0 after the first N columns even for an infinite dz.
            dx = tl.where(counts[None, :], dz * w[None, :], 0.0).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + at, dx, mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + part.to(tl.int64) * N + cols, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), mask=counts)


# --------------------------------------------------------------------------------------------------------- launches


def _row_dot_fwd_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


@launcher(_row_dot_fwd_fake)
def _row_dot_fwd(x: Tensor, weight: Tensor) -> Tensor:
    (M, K), N, z = x.shape, weight.shape[0], _row_dot_fwd_fake(x, weight)

    def plan() -> Plan:
        (block_m, block_n, warps), unit = (16, 256, 4), choose_unit(K, ())  # 32 numbers per thread
        return cdiv(M, block_m), (M, N, K // unit, unit, block_m, block_n), {"num_warps": warps}

    if M:
        launch(_row_dot_fwd_kernel, (M, N, K, x.dtype, weight.dtype), (x, weight, z), plan)
    return z


def _row_dot_bwd_fake(
    dz: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dw: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape if need_dx else 0), weight.new_empty(weight.shape if need_dw else 0)


@launcher(_row_dot_bwd_fake)
def _row_dot_bwd(dz: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dw: bool) -> tuple[Tensor, Tensor]:
    (M, K), N = x.shape, weight.shape[0]
    dx, dw = _row_dot_bwd_fake(dz, x, weight, need_dx, need_dw)
    if not M or not K:
        return dx, dw.zero_()
    how = cut(M, K, x.device)
    partial = shares(how.parts, dw)[0] if need_dw else None

    def plan() -> Plan:
        unit = choose_unit(K, ())
        sizes = M, N, K // unit, how.each, unit, how.rows, how.columns
        return how.parts * how.blocks, sizes, {"num_warps": WARPS}

    tensors = dz, x, weight, dx if need_dx else None, partial
    launch(_row_dot_bwd_kernel, (M, N, K, *[None if t is None else t.dtype for t in tensors]), tensors, plan)
    if partial is not None:
        sum_rows(partial, dw)
    return dx, dw


# --------------------------------------------------------------------------------------------------------- autograd


class RowDot(torch.autograd.Function):
    """x, weight → x · weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return _row_dot_fwd(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(_backward, ctx, *gradients)


def _backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dw = ctx.needs_input_grad
    dx, dw = _row_dot_bwd(dz.contiguous(), *ctx.saved_tensors, need_dx, need_dw)
    return dx if need_dx else None, dw if need_dw else None


_row_dot = bind_apply(RowDot)
