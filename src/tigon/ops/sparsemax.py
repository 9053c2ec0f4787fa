"""Sparsemax, the Euclidean projection onto the probability simplex: y = max(x − τ, 0), with τ such that Σ y = 1.

No sort: with S the elements above τ, Newton's step on Σ max(x − τ, 0) = 1 is τ ← (Σ_S x − 1) / |S|. The sum is convex
and falls with τ, so that from below the steps never pass the root; each but the last drops elements from S, so that
there are few, and the last one is exact.

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

# Up to this width a row stays in registers while its threshold is computed; wider rows are read once a step.
# In fp32 and on 16 warps, a row of 32768 is 64 registers a thread.
MAX_TILE = 32768


def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """The nearest point of the probability simplex: like softmax, but most of it is exactly 0. fp32, rounded once.

    Args:
        x: any shape with at least one dimension, any float dtype.
        dim: the dimension that sums to one. Any but the last costs two copies.
    Returns: x's shape and dtype, contiguous. The gradient is dy less its mean over the support, there, and 0 elsewhere.
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
    # A shift leaves the projection as it is, and smaller numbers sum more exactly.
    z = z - z.amax(-1, keepdim=True).detach()
    ordered = z.detach().sort(-1, descending=True).values
    k = torch.ones_like(ordered).cumsum(-1)  # an arange, but a DTensor where x is one
    # At least one element: a row of NaN has no support.
    size = (k * ordered > ordered.cumsum(-1) - 1).sum(-1, keepdim=True).clamp(min=1)
    support = z >= ordered.gather(-1, size - 1)
    tau = (torch.where(support, z, 0.0).sum(-1, keepdim=True) - 1) / size
    nan = z.detach().amax(-1, keepdim=True)  # NaN if the row's maximum was NaN or infinite, else 0
    return (torch.where(support, z - tau, 0.0) + nan).movedim(-1, dim).to(x.dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
@do_not_specialize("M")
def _sparsemax_fwd_kernel(x_ptr, y_ptr, M, N, stride_xm, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # int64: row · stride exceeds 2**31 at 64k rows of width 32768.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    # Rows beyond M hold -inf alone, and -inf − (-inf) is NaN. A comparison with NaN is false: such a row has no
    # support, asks for no further step, and is not stored.
    # sparsemax does not change when a constant is added: differences are exact where they matter.
    x = x - tl.max(x, 1)[:, None]
    # Comparisons drop NaN from the support: it is carried aside and added to the whole row.
    nan = tl.sum(tl.where(x == x, 0.0, x), 1)
    # The maximum is now 0, so that τ lies in [-1, 0). The elements above -1 are a small first guess of the support.
    above = x > -1.0
    # Counts in fp32: exact, as a row of this kernel is narrower than 2**24.
    size = tl.sum(above.to(tl.float32), 1)
    total = tl.sum(tl.where(above, x, 0.0), 1) - 1.0
    dropped = 1
    # The support only shrinks. It is final once a step drops no element.
    while dropped > 0:
        above = size[:, None] * x > total[:, None]  # x > total / size without rounding a quotient: ties stay outside
        # Michelot's step: τ of the support so far is total / size, and elements not above it leave. The elements, in
        # registers, are compared anew in each step: a mask kept in between would be one more tile.
        left = tl.sum(above.to(tl.float32), 1)
        sums = tl.sum(tl.where(above, x, 0.0), 1) - 1.0
        # One flag for the tile: its rows go on together until the last is done.
        dropped = tl.max((left < size).to(tl.int32), 0)
        # A row that dropped nothing is done: its sum and size stay as they are while the tile goes on.
        total = tl.where(left < size, sums, total)
        size = tl.minimum(left, size)
    above = size[:, None] * x > total[:, None]
    # One division a row; and by the same products that have decided the support, so that no y in it is below 0.
    y = tl.where(above, (size[:, None] * x - total[:, None]) * (1.0 / size)[:, None], 0.0) + nan[:, None]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
@do_not_specialize("M")
def _sparsemax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, stride_dym, stride_ym, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # A row wider than a tile is read twice, the second time from its end, which is still cached. Narrow rows share a
    # tile.
    # int64 as in the forward: rows times N or a stride.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    size = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # One kernel for every width: a narrow row is a single block, and is read twice from the cache.
    blocks = tl.cdiv(N, BLOCK_N)
    for i in range(blocks):
        cols = i * BLOCK_N + lane
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + rows[:, None] * stride_ym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # The result itself says what the support is: x is not saved, nor is τ.
        # What has been given up: an element of the support whose y rounds to 0 in y's dtype gets no gradient. The
        # reference, which has fp32, gives it one.
        total += tl.where(y > 0, dy, 0.0)
        size += tl.where(y > 0, 1.0, 0.0)
    # On the support y = x − τ, and τ moves with the mean of x there. Every row has a support: its sum is 1.
    # 0 / 0 in a row of NaN and beyond M: y > 0 is false there, so that the NaN of the mean is selected by no element.
    mean = tl.sum(total, 1) / tl.sum(size, 1)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK_N + lane
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + rows[:, None] * stride_ym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dx = tl.where(y > 0, dy - mean[:, None], 0.0)
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


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
        # tl.maximum drops NaN: the next line keeps it aside.
        top = tl.maximum(top, x)
        nan += tl.where(x == x, 0.0, x)
    # The maximum in a reading of its own: relative to it sums are of numbers in (-1, 0], as exact as in the kernel
    # above.
    row_top = tl.max(top, 0)
    bad = tl.sum(nan, 0) + (row_top - row_top)  # NaN for a row whose maximum is infinite
    # As in the kernel above: with size 1 and total -1 the first support is the elements above -1.
    size, total = 1.0, -1.0
    dropped = 1
    first = 1
    # Each step reads the row again: it does not fit into registers.
    # The count falls in every step but the first and the last. It is an integer, so that no rounding of a sum can keep
    # the loop going.
    while dropped > 0:
        # By lane: lanes meet once a step.
        sums = tl.zeros((BLOCK,), tl.float32)
        left = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            x = tl.load(x_ptr + start + lane, mask=start + lane < N, other=float("-inf")).to(tl.float32) - row_top
            # -inf at masked columns is outside of every support, and the select keeps it out of the sum.
            sums += tl.where(size * x > total, x, 0.0)
            left += tl.where(size * x > total, 1.0, 0.0)
        count = tl.sum(left, 0)
        # The first guess, size 1, is not a count: the first step is a step whatever it finds.
        dropped = ((count < size) | (first > 0)).to(tl.int32)
        total = tl.where(dropped > 0, tl.sum(sums, 0) - 1.0, total)
        size = tl.where(dropped > 0, count, size)
        first = 0
    # A row whose maximum is infinite ends with size 0: no element is selected, and its y is the NaN of `bad`.
    # One division a row.
    inverse = 1.0 / size
    for start in range(0, N, BLOCK):
        cols = start + lane
        x = tl.load(x_ptr + cols, mask=cols < N, other=float("-inf")).to(tl.float32) - row_top
        y = tl.where(size * x > total, (size * x - total) * inverse, 0.0) + bad
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(n: int) -> tuple[int, int, int]:
    """Rows and columns a tile, and warps."""
    block_n = next_power_of_2(n)
    # Few rows a tile, since a tile iterates until the last of its rows is done.
    return (
        max(1, 1024 // block_n),
        block_n,
        2 if block_n <= 1024 else 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16,
    )


def _bwd_tile(n: int) -> tuple[int, int, int]:
    # Two inputs of 8192 columns leave room for the two sums of every lane. Wider rows are read in such blocks.
    block_n = min(8192, next_power_of_2(n))
    return (
        max(1, 1024 // block_n),
        block_n,
        2 if block_n <= 1024 else 4 if block_n <= 2048 else 8 if block_n <= 4096 else 16,
    )


def _sparsemax_fwd_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@launcher("(Tensor x) -> Tensor", _sparsemax_fwd_fake)
def _sparsemax_fwd(x: Tensor) -> Tensor:
    y = _sparsemax_fwd_fake(x)
    if x.numel() == 0:
        return y
    x = view_rows(x)
    M, N = x.shape
    stride = x.stride(0)
    key = (M, N, stride, x.dtype)
    if N > MAX_TILE:
        # 1024 threads, 8 neighbouring columns each: a load of 16 bytes a thread in 16 bits.
        launch(_sparsemax_wide_fwd_kernel, key, (x, y), lambda: (M, (N, stride, 8192), {"num_warps": 32}))
    else:

        def tiled() -> Plan:
            block_m, block_n, warps = _fwd_tile(N)
            return cdiv(M, block_m), (M, N, stride, block_m, block_n), {"num_warps": warps}

        launch(_sparsemax_fwd_kernel, key, (x, y), tiled)
    return y


def _sparsemax_bwd_fake(dy: Tensor, y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@launcher("(Tensor dy, Tensor y) -> Tensor", _sparsemax_bwd_fake)
def _sparsemax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    dx = _sparsemax_bwd_fake(dy, y)
    if y.numel() == 0:
        return dx
    dy, y = view_rows(dy), view_rows(y)
    M, N = y.shape
    # dx is dense and has no stride of its own. A dy that one number was expanded to has no unit stride: `view_rows`
    # copies it.
    strides = dy.stride(0), y.stride(0)

    def tiled() -> Plan:
        block_m, block_n, warps = _bwd_tile(N)
        return cdiv(M, block_m), (M, N, *strides, block_m, block_n), {"num_warps": warps}

    launch(_sparsemax_bwd_kernel, (M, N, *strides, dy.dtype, y.dtype), (dy, y, dx), tiled)
    return dx


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None or not ctx.needs_input_grad[0]:
        return (None,)
    return (_sparsemax_bwd(dy, *ctx.saved_tensors),)


_sparsemax = differentiable(_sparsemax_fwd, _setup_context, _backward)
