"""The backward pass for y = relu(h + b), from y: dh = dy where y > 0, and db = Σ rows dh, in one pass.

Autograd writes dh in one pass and reads it again for db in another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import Plan, do_not_specialize, jit, launch, launcher, tl, use_triton
from tigon.kernels.tiles.parts import locate_part
from tigon.ops.gated import choose_unit
from tigon.ops.sum_rows import WARPS, cut, shares, sum_rows


def relu_gradient(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(dh, db): dy where y is positive, 0 elsewhere, and the column sums, in fp32 and rounded once.

    dy, y: (M, N), the same float dtype. Where y is NaN, dy passes through, as in torch's threshold.
    """
    if dy.dim() != 2 or dy.shape != y.shape:
        raise ValueError(f"relu_gradient: dy and y must be (M, N), got {tuple(dy.shape)} and {tuple(y.shape)}.")
    if not use_triton(dy, y):
        return relu_gradient_reference(dy, y)
    found: tuple[Tensor, Tensor] = _relu_gradient(dy.contiguous(), y.contiguous())
    return found


def relu_gradient_reference(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    dh = torch.where(y <= 0, 0, dy)
    return dh, dh.sum(0)


# A program owns rows_each rows and BLOCK_N columns: dh, and its part of db. All (M, W · UNIT) tensors are contiguous.
@jit
@do_not_specialize("M", "rows_each")
def _relu_gradient_kernel(
    dy_ptr, y_ptr, dh_ptr, db_ptr, M, W, rows_each,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    part, first, cols, inside = locate_part(W, rows_each, UNIT, BLOCK_N)
    # A separate sum per tile element, reduced across threads once, at the end.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, rows_each, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        rows = first + row
        mask = ((row < rows_each) & (rows < M))[:, None] & inside[None, :]
        at = rows[:, None] * W * UNIT + cols[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0)
        y = tl.load(y_ptr + at, mask=mask, other=0.0)
        dh = tl.where(y <= 0, 0.0, dy.to(tl.float32))
        tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=mask)
        total += dh
    tl.store(db_ptr + part.to(tl.int64) * W * UNIT + cols, tl.sum(total, 0).to(db_ptr.dtype.element_ty), mask=inside)


def _relu_gradient_fake(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape[1])


@launcher(_relu_gradient_fake)
def _relu_gradient(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    (M, N), (dh, db) = y.shape, _relu_gradient_fake(dy, y)
    if not dy.numel():
        return dh, db.zero_()
    how = cut(M, N, y.device)
    partial = shares(how.parts, db)[0]

    def plan() -> Plan:
        unit = choose_unit(N, ())
        return how.parts * how.blocks, (M, N // unit, how.each, unit, how.rows, how.columns), {"num_warps": WARPS}

    launch(_relu_gradient_kernel, (M, N, y.dtype, dy.dtype), (dy, y, dh, partial), plan)
    sum_rows(partial, db)
    return dh, db
