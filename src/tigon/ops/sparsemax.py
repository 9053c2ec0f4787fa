"""Sparsemax, the Euclidean projection onto the probability simplex: y = max(x − τ, 0), with τ such that Σ y = 1.

No sort: with S the elements above τ, Newton's step on Σ max(x − τ, 0) = 1 is τ ← (Σ_S x − 1) / |S|. The sum is convex
and decreases with τ, so steps from below never pass the root. Each step but the last drops elements from S, hence there
are few steps, and the last is exact.

Sources: Martins & Astudillo 2016, https://arxiv.org/abs/1602.02068; the iteration, Michelot 1986,
https://doi.org/10.1007/BF00938486, and Condat 2016, https://doi.org/10.1007/s10107-015-0946-6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    dense_like,
    dense_like_second,
    differentiable,
    do_not_specialize,
    jit,
    launch,
    launcher,
    next_power_of_2,
    tl,
    use_triton,
    view_rows,
)
from tigon.ops.example import ROWS, Example

# Widest row that stays in registers while its threshold is computed; wider rows are read once per step. In fp32 on 16
# warps, a row of 32768 takes 64 registers per thread.
MAX_TILE = 32768


def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """The nearest point of the probability simplex: like softmax, but mostly exact zeros. In fp32, rounded once.

    Args:
        x: any shape with at least one dimension, any float dtype.
        dim: the dimension that sums to one. Any but the last costs two copies.
    Returns: x's shape and dtype, contiguous. The gradient is dy minus its mean over the support, and 0 elsewhere.
    Raises: ValueError for a dtype that is not a float and a dim out of range.

    Replaces::

        z = torch.sort(x.float(), dim=-1, descending=True).values
        total = z.cumsum(-1) - 1
        k = torch.arange(1, x.shape[-1] + 1)
        support = (k * z > total).sum(-1, keepdim=True)
        y = (x - total.gather(-1, support - 1) / support).clamp(min=0).to(x.dtype)
    """
    rank = x.dim()
    if not x.dtype.is_floating_point:
        raise ValueError(f"sparsemax: x must have a float dtype, got {x.dtype}.")
    if not -rank <= dim < rank:
        raise ValueError(f"sparsemax: dim must name a dimension of x, which has {rank}, got {dim}.")
    if not use_triton(x):
        return sparsemax_reference(x, dim)
    return _sparsemax(x) if dim in (-1, rank - 1) else _sparsemax(x.movedim(dim, -1)).movedim(-1, dim).contiguous()


def sparsemax_reference(x: Tensor, dim: int = -1) -> Tensor:
    z = x.to(torch.promote_types(x.dtype, torch.float32)).movedim(dim, -1)
    if z.numel() == 0:
        return x.clone()
    z = z - z.amax(-1, keepdim=True).detach()
    ordered = z.detach().sort(-1, descending=True).values
    k = torch.ones_like(ordered).cumsum(-1)  # an arange, but a DTensor if x is
    size = (k * ordered > ordered.cumsum(-1) - 1).sum(-1, keepdim=True).clamp(min=1)
    support = z >= ordered.gather(-1, size - 1)
    tau = (torch.where(support, z, 0.0).sum(-1, keepdim=True) - 1) / size
    nan = z.detach().amax(-1, keepdim=True)  # NaN if the row's maximum was NaN or infinite, else 0
    return (torch.where(support, z - tau, 0.0) + nan).movedim(-1, dim).to(x.dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


# A program: BLOCK_M rows in registers. x has row stride xm, y is dense. Each step of the loop compares the elements
# anew: a mask kept in between would take as many registers as another tile. The tile's rows iterate together until the
# last row is done.
@jit
@do_not_specialize("M")
def _sparsemax_fwd_kernel(x_ptr, y_ptr, M, N, stride_xm, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    # Rows beyond M hold only -inf, and -inf − (-inf) is NaN, for which comparisons are false: such a row has no
    # support, needs no further step, and is not stored.
    x = x - tl.max(x, 1)[:, None]
    # Comparisons drop NaN from the support: kept aside and added to the whole row.
    nan = tl.sum(tl.where(x == x, 0.0, x), 1)
    # The maximum is now 0, so τ lies in [-1, 0). The elements above -1 are a small first guess of the support.
    above = x > -1.0
    size = tl.sum(above.to(tl.float32), 1)
    total = tl.sum(tl.where(above, x, 0.0), 1) - 1.0
    dropped = 1
    while dropped > 0:
        above = size[:, None] * x > total[:, None]  # no rounded quotient: ties stay outside
        # Michelot's step: τ of the current support is total / size, and elements not above τ leave.
        left = tl.sum(above.to(tl.float32), 1)
        sums = tl.sum(tl.where(above, x, 0.0), 1) - 1.0
        dropped = tl.max((left < size).to(tl.int32), 0)
        total = tl.where(left < size, sums, total)
        size = tl.minimum(left, size)
    above = size[:, None] * x > total[:, None]
    y = tl.where(above, (size[:, None] * x - total[:, None]) * (1.0 / size)[:, None], 0.0) + nan[:, None]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


# A program: BLOCK_M rows of any width, read twice, the second time from the end, which is still cached. Narrow rows
# share a tile and are a single block. y tells the support, so neither x nor τ is saved. Cost: a support element whose y
# rounds to 0 in y's dtype gets no gradient, unlike in the fp32 reference.
@jit
@do_not_specialize("M")
def _sparsemax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, stride_dym, stride_ym, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    size = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    blocks = tl.cdiv(N, BLOCK_N)
    for i in range(blocks):
        cols = i * BLOCK_N + lane
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + rows[:, None] * stride_ym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.where(y > 0, dy, 0.0)
        size += tl.where(y > 0, 1.0, 0.0)
    # On the support y = x − τ, and τ moves with the mean of x there. 0 / 0 in a row of NaN and beyond M: y > 0 is false
    # there, so no element selects the NaN mean.
    mean = tl.sum(total, 1) / tl.sum(size, 1)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK_N + lane
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + rows[:, None] * stride_ym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dx = tl.where(y > 0, dy - mean[:, None], 0.0)
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


# A program: one row too wide for registers, read once for the maximum, once per step and once for the result.
@jit
def _sparsemax_wide_fwd_kernel(x_ptr, y_ptr, N, stride_xm, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    nan = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + start + lane, mask=start + lane < N, other=float("-inf")).to(tl.float32)
        # tl.maximum drops NaN, which the next line keeps aside.
        top = tl.maximum(top, x)
        nan += tl.where(x == x, 0.0, x)
    # Relative to the maximum all sums are over numbers in (-1, 0], as exact as in the kernel above.
    row_top = tl.max(top, 0)
    bad = tl.sum(nan, 0) + (row_top - row_top)  # NaN if the row's maximum is infinite
    # With size 1 and total -1 the first support is the elements above -1, as in the kernel above.
    size, total = 1.0, -1.0
    dropped = 1
    first = 1
    # The count falls in every step but the first and the last, and is an integer: no rounded sum can keep the loop
    # going.
    while dropped > 0:
        sums = tl.zeros((BLOCK,), tl.float32)
        left = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            x = tl.load(x_ptr + start + lane, mask=start + lane < N, other=float("-inf")).to(tl.float32) - row_top
            # -inf at masked columns is outside every support, and the select keeps -inf out of the sum.
            sums += tl.where(size * x > total, x, 0.0)
            left += tl.where(size * x > total, 1.0, 0.0)
        count = tl.sum(left, 0)
        # The first guess, size 1, is not a count, so the first step always counts as a step.
        dropped = ((count < size) | (first > 0)).to(tl.int32)
        total = tl.where(dropped > 0, tl.sum(sums, 0) - 1.0, total)
        size = tl.where(dropped > 0, count, size)
        first = 0
    # A row with an infinite maximum ends with size 0: no element is selected, and y is the NaN of `bad`.
    inverse = 1.0 / size
    for start in range(0, N, BLOCK):
        cols = start + lane
        x = tl.load(x_ptr + cols, mask=cols < N, other=float("-inf")).to(tl.float32) - row_top
        y = tl.where(size * x > total, (size * x - total) * inverse, 0.0) + bad
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(n: int) -> tuple[int, int, int]:
    """Rows and columns per tile, and warps."""
    block_n = next_power_of_2(n)
    # Few rows per tile, since a tile iterates until its last row is done.
    return (
        max(1, 1024 // block_n),
        block_n,
        2 if block_n <= 1024 else 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16,
    )


def _bwd_tile(n: int) -> tuple[int, int, int]:
    # Two inputs of 8192 columns leave room for two sums per lane. Wider rows are read in such blocks.
    block_n = min(8192, next_power_of_2(n))
    return (
        max(1, 1024 // block_n),
        block_n,
        2 if block_n <= 1024 else 4 if block_n <= 2048 else 8 if block_n <= 4096 else 16,
    )


@launcher(dense_like)
def _sparsemax_fwd(x: Tensor) -> Tensor:
    y = dense_like(x)
    if x.numel() == 0:
        return y
    x = view_rows(x)
    M, N = x.shape
    stride = x.stride(0)
    key = (M, N, stride, x.dtype)
    if N > MAX_TILE:
        # 1024 threads with 8 neighbouring columns each: a 16-byte load per thread in 16 bits.
        launch(_sparsemax_wide_fwd_kernel, key, (x, y), lambda: (M, (N, stride, 8192), {"num_warps": 32}))
    else:

        def plan_tile() -> Plan:
            block_m, block_n, warps = _fwd_tile(N)
            return cdiv(M, block_m), (M, N, stride, block_m, block_n), {"num_warps": warps}

        launch(_sparsemax_fwd_kernel, key, (x, y), plan_tile)
    return y


@launcher(dense_like_second)
def _sparsemax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    dx = dense_like(y)
    if y.numel() == 0:
        return dx
    dy, y = view_rows(dy), view_rows(y)
    M, N = y.shape
    # dx is dense. An expanded dy has no unit stride, and `view_rows` copies it.
    strides = dy.stride(0), y.stride(0)

    def plan_tile() -> Plan:
        block_m, block_n, warps = _bwd_tile(N)
        return cdiv(M, block_m), (M, N, *strides, block_m, block_n), {"num_warps": warps}

    launch(_sparsemax_bwd_kernel, (M, N, *strides, dy.dtype, y.dtype), (dy, y, dx), plan_tile)
    return dx


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
    return (_sparsemax_bwd(dy, *ctx.saved_tensors),)


_sparsemax = differentiable(_sparsemax_fwd, _setup_context, _backward)


EXAMPLES = {
    "sparsemax": Example("Softmax", (ROWS,), sparsemax),
}
