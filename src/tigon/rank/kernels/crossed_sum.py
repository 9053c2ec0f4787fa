"""A cross layer's sum, y = x + x₀ ⊙ (u + b), which also passes x₀ on to the next layer.

Autograd would compute u's and x₀'s gradients in two passes each, accumulate the layers' x₀ gradients in further passes,
and sum b's gradient in another. The backward kernel reads dy, x₀, u and the next layer's x₀ gradient once, and writes
both gradients.

Source: DCN V2, Wang et al. 2021, https://arxiv.org/abs/2008.13535
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


def crossed_sum(x0: Tensor, u: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(x + x0 · (u + bias), x0), computed in fp32 and rounded once.

    x0, u, x: (B, N), the same float dtype. bias: (N,), any float dtype. Only for eager mode with kernels; otherwise use
    torch.
    """
    if x0.dim() != 2 or not x0.shape == u.shape == x.shape or bias.shape != x0.shape[1:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x0, u, x, bias))
        raise ValueError(f"crossed_sum: x0, u and x must be (B, N) and bias (N,), got {shapes}.")
    if not use_triton(x0, u, x, bias) or is_traced(x0) or not (x0.dtype == u.dtype == x.dtype):
        return crossed_sum_reference(x0, u, x, bias), x0
    y, goes_on = _crossed(x0, u, x, bias)
    # A frozen x₀ stays frozen for the next layer.
    return y, goes_on if x0.requires_grad else x0


def crossed_sum_reference(x0: Tensor, u: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    return torch.addcmul(x.to(acc), x0.to(acc), u.to(acc) + bias.to(acc)).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


# y = x + x₀ · (u + b). A program owns a (BLOCK_M, BLOCK_N) tile. All (M, W · UNIT) tensors are contiguous.
@jit
@do_not_specialize("M")
def _crossed_sum_fwd_kernel(
    x0_ptr, u_ptr, x_ptr, b_ptr, y_ptr, M, W, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    _, first, cols, inside = locate_part(W, BLOCK_M, UNIT, BLOCK_N)
    rows = first + tl.arange(0, BLOCK_M)
    mask = (rows < M)[:, None] & inside[None, :]
    at = rows[:, None] * W * UNIT + cols[None, :]
    x0 = tl.load(x0_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x + x0 * (u + b[None, :])).to(y_ptr.dtype.element_ty), mask=mask)


# du = dy · x₀, dx₀ = ds + dy · (u + b), and this program's part of db = Σ rows du, over rows_each rows and BLOCK_N
# columns. dx is dy. ds is None for the last layer, whose x₀ is unused; du, dx0 and db are None if not needed.
@jit
@do_not_specialize("M", "rows_each")
def _crossed_sum_bwd_kernel(
    dy_ptr, ds_ptr, x0_ptr, u_ptr, b_ptr, du_ptr, dx0_ptr, db_ptr, M, W, rows_each,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    part, first, cols, inside = locate_part(W, rows_each, UNIT, BLOCK_N)
    b = tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    # A separate sum per tile element, reduced across threads once, at the end.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, rows_each, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        rows = first + row
        mask = ((row < rows_each) & (rows < M))[:, None] & inside[None, :]
        at = rows[:, None] * W * UNIT + cols[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x0 = tl.load(x0_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if dx0_ptr is not None:
            dx0 = dy * (tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32) + b[None, :])
            if ds_ptr is not None:
                dx0 += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx0_ptr + at, dx0.to(dx0_ptr.dtype.element_ty), mask=mask)
        du = dy * x0
        if du_ptr is not None:
            tl.store(du_ptr + at, du.to(du_ptr.dtype.element_ty), mask=mask)
        total += du
    if db_ptr is not None:
        tl.store(
            db_ptr + part.to(tl.int64) * W * UNIT + cols, tl.sum(total, 0).to(db_ptr.dtype.element_ty), mask=inside
        )


# --------------------------------------------------------------------------------------------------------- launches


def _crossed_sum_fwd_fake(x0: Tensor, u: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@launcher(_crossed_sum_fwd_fake)
def _crossed_sum_fwd(x0: Tensor, u: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    (M, N), y = x.shape, _crossed_sum_fwd_fake(x0, u, x, bias)
    if y.numel():

        def plan() -> Plan:
            (block_m, block_n, warps), unit = (16, 128, 4), choose_unit(N, ())  # 16 numbers per thread
            return cdiv(M, block_m) * cdiv(N, block_n), (M, N // unit, unit, block_m, block_n), {"num_warps": warps}

        launch(_crossed_sum_fwd_kernel, (M, N, x.dtype, bias.dtype), (x0, u, x, bias, y), plan)
    return y


def _crossed_sum_bwd_fake(
    dy: Tensor, ds: Tensor | None, x0: Tensor, u: Tensor, bias: Tensor, need_dx0: bool, need_du: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    needs = (u, need_du), (x0, need_dx0), (bias, need_db)
    du, dx0, db = (t.new_empty(t.shape if need else 0) for t, need in needs)
    return du, dx0, db


@launcher(_crossed_sum_bwd_fake)
def _crossed_sum_bwd(
    dy: Tensor, ds: Tensor | None, x0: Tensor, u: Tensor, bias: Tensor, need_dx0: bool, need_du: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    M, N = dy.shape
    du, dx0, db = _crossed_sum_bwd_fake(dy, ds, x0, u, bias, need_dx0, need_du, need_db)
    if not dy.numel() or not (need_dx0 or need_du or need_db):
        return du, dx0, db.zero_()
    how = cut(M, N, dy.device)
    partial = shares(how.parts, db)[0] if need_db else None

    def plan() -> Plan:
        unit = choose_unit(N, ())
        return how.parts * how.blocks, (M, N // unit, how.each, unit, how.rows, how.columns), {"num_warps": WARPS}

    tensors = dy, ds, x0, u, bias, du if need_du else None, dx0 if need_dx0 else None, partial
    key = M, N, *[None if t is None else t.dtype for t in tensors]
    launch(_crossed_sum_bwd_kernel, key, tensors, plan)
    if partial is not None:
        sum_rows(partial, db)
    return du, dx0, db


# --------------------------------------------------------------------------------------------------------- autograd


class CrossedSum(torch.autograd.Function):
    """x0, u, x, bias → the sum, and x0 unchanged."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, u: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        laid = [t.contiguous() for t in (x0, u, x, bias)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(laid[0], laid[1], laid[3])
        # A returned input becomes a view whose gradient arrives here: no memory traffic.
        return _crossed_sum_fwd(*laid), x0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(_backward, ctx, *gradients)


def _backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
    need_dx0, need_du, need_dx, need_db = ctx.needs_input_grad
    if dy is None:
        return ds, None, None, None
    x0, u, bias = ctx.saved_tensors
    ds = None if ds is None else ds.contiguous()
    du, dx0, db = _crossed_sum_bwd(dy.contiguous(), ds, x0, u, bias, need_dx0, need_du, need_db)
    return dx0 if need_dx0 else None, du if need_du else None, dy if need_dx else None, db if need_db else None


_crossed = bind_apply(CrossedSum)
