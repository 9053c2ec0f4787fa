"""Softmax of scaled, masked scores: y = softmax(scale · x + mask), with dx = scale · y · (dy − Σ dy · y).

Source of the one-pass statistics: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.runtime import (
    Plan,
    cdiv,
    differentiable,
    do_not_specialize,
    is_hopper,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    rows_of,
    shared_memory,
    tl,
    uneven,
    use_triton,
)
from tigon.tiles.constants import LOG2E, LOWEST
from tigon.tiles.edges import aligned, edges, split

# A row up to this width stays in registers, so that memory is read once; wider rows are read twice, block by block.
# 32768 columns in a tile of 32 warps are 32 numbers a thread.
MAX_TILE = 32768
# Wide rows that are fewer than the multiprocessors are cut into parts, of this many columns or a multiple, until there
# are so many programs for each multiprocessor. 0: never.
PART, PARTED = 4096, 8


def softmax(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """softmax(scale · x + mask) over one dimension, in fp32, rounded once.

    Args:
        x: any shape with at least one dimension, any float dtype.
        dim: the dimension that sums to one. Any but the last costs a copy.
        scale: multiplies x; 1/√D for attention scores, 1/temperature for logits.
        mask: added to scale · x; any float dtype, broadcastable to x's shape and never expanded in memory: (B, 1, T, S)
            or (T, S) for x (B, H, T, S). It gets no gradient: one that has to learn is added to x by the caller.
        causal: x is (..., T, S), and query t sees the keys s ≤ t + (S − T): the last query sees all. What it does not
            see is 0, and neither x nor the mask is read there.
    Returns: x's shape and dtype. A row without any finite score is NaN, as in torch.
    Raises: ValueError for a dtype that is not a float, a dim out of range, a mask that is boolean, does not broadcast
        or requires a gradient, and for causal over another dimension than the last of two.

    Replaces::

        y = F.softmax(scale * x.float() + mask, dim=dim).to(x.dtype)

    and, with causal=True::

        unseen = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
        y = F.softmax((scale * x.float() + mask).masked_fill(unseen, -torch.inf), dim=-1).to(x.dtype)
    """
    rank = x.dim()
    if not x.dtype.is_floating_point:
        raise ValueError(f"softmax: x must have a float dtype, got {x.dtype}.")
    if not -rank <= dim < rank:
        raise ValueError(f"softmax: dim must name a dimension of x, which has {rank}, got {dim}.")
    last = dim in (-1, rank - 1)
    if causal and not (last and rank > 1):
        raise ValueError(
            f"softmax: causal must come with x (..., T, S) and dim=-1, got x {tuple(x.shape)} and dim={dim}."
        )
    if mask is not None:
        _check_mask(x, mask)
    if not use_triton(x, mask):
        return softmax_reference(x, dim, scale=scale, mask=mask, causal=causal)
    if last:
        return _softmax(x, mask, scale, causal)
    # An expanded mask has strides of 0 where it is broadcast, which moving a dimension keeps: nothing is copied.
    moved = None if mask is None else mask.expand(x.shape).movedim(dim, -1)
    return _softmax(x.movedim(dim, -1), moved, scale, causal).movedim(-1, dim)


def _check_mask(x: Tensor, mask: Tensor) -> None:
    if not mask.dtype.is_floating_point:
        raise ValueError(
            f"softmax: mask must be floats that are added to the scores, got {mask.dtype}. A boolean one becomes such "
            "by torch.zeros_like(scores).masked_fill(~keep, -torch.inf)."
        )
    if mask.device != x.device:
        raise ValueError(f"softmax: mask must be on x's device, {x.device}, got {mask.device}.")
    fits = mask.dim() <= x.dim() and all(
        m in (1, n) for m, n in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(f"softmax: mask must broadcast to x's shape {tuple(x.shape)}, got {tuple(mask.shape)}.")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "softmax: mask must not require a gradient, as it gets none, got one that does: detach it, or add a "
            "learned bias to x."
        )


def softmax_reference(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    # fp64 stays fp64, which is what tests compare with.
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    if scale != 1.0:
        z = z * scale
    if mask is not None:
        z = z + mask.to(z.dtype)
    if causal:
        T, S = x.shape[-2:]
        unseen = torch.arange(S, device=x.device) > (torch.arange(T, device=x.device) + (S - T)).unsqueeze(-1)
        z = z.masked_fill(unseen, -torch.inf)
    return torch.softmax(z, dim).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _causal(cols, last, inside):
    """The columns that a query sees, and those to the end of the memory sector: loads stay 16 bytes a thread."""
    # A mask that changed within a thread's neighbouring numbers would make each of them a load by itself. Rounded up to
    # 16 columns, 32 bytes in 16 bits, it changes between threads alone, for at most 15 numbers a row that nobody needs.
    return inside & (cols <= last), inside & (cols // 16 <= last // 16)


@jit
def _scores(x, mask_ptr, at, seen, near, scale, HIDE: tl.constexpr):
    """scale · x + mask in fp32, and -inf at columns that are not seen. HIDE: x may not be -inf at those columns."""
    # A product, then a sum, as PyTorch computes scores · scale + mask. The mask is not scaled.
    z = x.to(tl.float32) * scale
    # `near` and not `seen`, so that the mask too is loaded 16 bytes a thread. Where it holds -inf the sum is -inf.
    if mask_ptr is not None:
        z += tl.load(mask_ptr + at, mask=near, other=0.0).to(tl.float32)
    if HIDE:
        # A scale of 0 makes NaN of the -inf that masked loads give, a negative one inf; causal loads reach past `last`.
        z = tl.where(seen, z, float("-inf"))
    return z


@jit
def _again(x):
    """x in fp32, for a second use. A compiler would merge equal conversions and keep one: twice the registers."""
    if x.dtype == tl.bfloat16:
        # bf16 is the upper half of fp32: a shift converts it, in another operation than the cast of the first use. fp16
        # and fp32 have no such second spelling: their widest rows are loaded twice (RELOAD).
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def _mask_row(rows, D1, D2, stride_m0, stride_m1, stride_m2):
    """Where these rows' mask begins. The mask has up to three row dimensions; a stride is 0 where it is broadcast."""
    # Row numbers become three indices by int32 divisions of rows: no element pays for one.
    k, j, i = rows % D2, rows // D2 % D1, rows // D2 // D1
    # int64: a mask of its own for every head of 128k queries and keys exceeds 2**31.
    return i.to(tl.int64) * stride_m0 + j.to(tl.int64) * stride_m1 + k.to(tl.int64) * stride_m2


@jit
@do_not_specialize("M", "T", "D1", "D2")
def _softmax_fwd_kernel(
    x_ptr, mask_ptr, y_ptr, M, N, T, D1, D2, stride_xm, stride_m0, stride_m1, stride_m2, stride_mn, scale,
    SCALED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Wide rows: a persistent grid, whose next rows are on their way while this one is summed and stored.
    cols = tl.arange(0, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        # Without CAUSAL all three are one mask, and the compiler keeps one.
        seen, near = inside, inside
        if CAUSAL:
            # Rows are queries of all heads in turn, T of each; with T < S the queries are the last ones of the keys.
            seen, near = _causal(cols[None, :], (rows % T + (N - T))[:, None], inside)
        # int64: row * stride reaches 2**31 at 64k rows of width 32768.
        row = rows.to(tl.int64)[:, None]
        # -inf where masked: its exponential is 0, so neither maximum nor sum needs a select.
        x = tl.load(x_ptr + row * stride_xm + cols[None, :], mask=near, other=float("-inf"))
        at = cols[None, :]
        if mask_ptr is not None:
            at = _mask_row(rows, D1, D2, stride_m0, stride_m1, stride_m2)[:, None] + cols[None, :] * stride_mn
        z = _scores(x, mask_ptr, at, seen, near, scale, SCALED or CAUSAL)
        # Differences first, which are exact where they matter; then powers of two, the exponential of the hardware.
        # A row of -inf alone computes -inf − (-inf): NaN, which is torch's answer. Rows beyond M do as well, and are
        # not stored.
        e = tl.exp2((z - tl.max(z, 1)[:, None]) * LOG2E)
        # One division a row; elements are multiplied.
        # The maximum has exponential 1, so that no sum is below 1 and its reciprocal is finite.
        y = e * (1.0 / tl.sum(e, 1))[:, None]
        # Columns that a query does not see are written too: they hold 0, and the product with the values reads them.
        tl.store(y_ptr + row * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
@do_not_specialize("M", "T")
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, T, stride_dym, stride_ym, scale,
    CAUSAL: tl.constexpr, RELOAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program a tile, no persistent grid: with two inputs a prefetch was slower, as `_prefetch` says.
    cols = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    seen, near = inside, inside
    if CAUSAL:
        seen, near = _causal(cols[None, :], (rows % T + (N - T))[:, None], inside)
    row = rows.to(tl.int64)[:, None]
    dy_at = dy_ptr + row * stride_dym + cols[None, :]
    # The gradient needs the result and not the scores: x is not saved, and mask and scale are not applied again.
    y_at = y_ptr + row * stride_ym + cols[None, :]
    dy = tl.load(dy_at, mask=near, other=0.0)
    y = tl.load(y_at, mask=near, other=0.0)
    # In fp32 before the product: Σ dy · y cancels in part, and 16 bits would round each of its terms.
    products = dy.to(tl.float32) * y.to(tl.float32)
    if CAUSAL:
        # Loads reach to the end of the sector, where dy may hold anything.
        products = tl.where(seen, products, 0.0)
    total = tl.sum(products, 1)[:, None]
    if RELOAD:  # registers are short: both come from the L1 cache again; the barrier keeps loads from being merged
        # Thereby neither tensor takes registers while the warps exchange their sums.
        tl.debug_barrier()
        dy = tl.load(dy_at, mask=near, other=0.0)
        y = tl.load(y_at, mask=near, other=0.0)
    # total is Σ dy · y: what a softmax cannot pass on, since its outputs sum to 1.
    dx = _again(y) * (_again(dy) - total) * scale
    if CAUSAL:
        # y is 0 here, but 0 · dy is NaN where the unread part of dy holds an inf.
        dx = tl.where(seen, dx, 0.0)
    tl.store(dx_ptr + row * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@jit
def _statistics(
    x_ptr, mask_ptr, N, start, stop, last, stride_mn, scale, SCALED: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The maximum of a row's scores from start to stop, and Σ exp(score − maximum)."""
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    # A lane that no column reaches keeps the least maximum and a sum of 0, which counts for nothing below.
    total = tl.zeros((BLOCK,), tl.float32)
    # With EDGES, columns count from the body's first and `last` may be negative: the loop then runs over nothing.
    # Blocks beyond the last column that the row sees have no share.
    for at in range(start, tl.minimum(stop, last + 1), BLOCK):
        cols = at + lane
        seen, near = _causal(cols, last, cols < N)
        x = tl.load(x_ptr + cols, mask=near, other=float("-inf"))
        z = _scores(x, mask_ptr, cols * stride_mn, seen, near, scale, SCALED or CAUSAL)
        # One of the old maximum and the new element is the larger, with exponential 1: only the other's is computed.
        e = tl.exp2(-tl.abs(z - top) * LOG2E)
        # NaN compares as false: then the sum takes its exponential, which is NaN, though the maximum drops it. +inf
        # becomes NaN where the row's maximum is taken off, as in torch.
        total = tl.where(z > top, total * e + 1.0, total + e)
        top = tl.maximum(top, z)
    # One exchange between warps for the maximum and one for the sum, a row or part, and none a block.
    row_top = tl.max(top, 0)
    return row_top, tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)


@jit
def _write_softmax(
    x_ptr, mask_ptr, y_ptr, N, start, stop, last, stride_mn, scale, row_top, inverse,
    SCALED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A part is a multiple of BLOCK wide: no block reaches into the next part, which is another program's. A part that
    # begins behind the body's end has no blocks.
    # The row is read a second time instead of being held: a wide row does not fit into registers.
    blocks = tl.cdiv(stop - start, BLOCK)
    for i in range(blocks):
        # From the end, which the first reading read last and the cache still holds.
        cols = start + (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        # Every column is written, also those that are not seen: they hold 0.
        seen, near = _causal(cols, last, cols < N)
        x = tl.load(x_ptr + cols, mask=near, other=float("-inf"))
        z = _scores(x, mask_ptr, cols * stride_mn, seen, near, scale, SCALED or CAUSAL)
        # The statistics are whole by now: an element needs nothing of its neighbours, and blocks follow one another
        # without an exchange.
        y = tl.exp2((z - row_top) * LOG2E) * inverse
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
def _products(dy_ptr, y_ptr, N, start, stop, last, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Σ dy · y from start to stop of a row."""
    # A sum of every lane: a block costs no exchange between warps.
    products = tl.zeros((BLOCK,), tl.float32)
    # Up to the last column that the row sees: y is 0 behind it.
    for at in range(start, tl.minimum(stop, last + 1), BLOCK):
        cols = at + tl.arange(0, BLOCK)
        seen, near = _causal(cols, last, cols < N)
        dy = tl.load(dy_ptr + cols, mask=near, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=near, other=0.0).to(tl.float32)
        # Loads reach to the end of the sector, where dy may hold anything.
        products += tl.where(seen, dy * y, 0.0) if CAUSAL else dy * y
    return tl.sum(products, 0)


@jit
def _write_gradient(dy_ptr, y_ptr, dx_ptr, N, start, stop, last, scale, total, BLOCK: tl.constexpr):
    # dx = scale · y · (dy − Σ dy · y). Two rows are read again, so that the cache holds half as many columns of each as
    # forward.
    # From the end, as in `_write_softmax`: the end of the row was read last.
    blocks = tl.cdiv(stop - start, BLOCK)
    for i in range(blocks):
        cols = start + (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        seen, near = _causal(cols, last, cols < N)
        dy = tl.load(dy_ptr + cols, mask=near, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=near, other=0.0).to(tl.float32)
        # A select in every case: beyond the last column nothing has been loaded, and 0 · inf would be NaN.
        dx = tl.where(seen, y * (dy - total) * scale, 0.0)
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


@jit
def _last(row, N, T, CAUSAL: tl.constexpr):
    """The last column that a row sees."""
    last = N - 1
    if CAUSAL:
        last = row % T + (N - T)
    return last


@jit
def _body(ptr, N, start, stop, last):
    """A row without its edges: which columns those are, which of them there are and are seen; where the body begins,
    its width, the end of this part of it, the last column seen, counted from the first of the body; and its pointer.

    The edges belong to the first part of a row.
    """
    # One tensor's address decides for all: `uneven` lets a launch have EDGES only if all rows lie alike.
    first, width = split(ptr, N)
    edge, real = edges(ptr, first, width, N)
    # `start` is 0 for whole rows and for the first of several parts.
    real &= start == 0
    return edge, real, real & (edge <= last), first, width, tl.minimum(stop, width), last - first, aligned(ptr, first)


@jit
@do_not_specialize("T", "D1", "D2", "P")
def _softmax_wide_fwd_kernel(
    x_ptr, mask_ptr, y_ptr, partial_ptr, N, T, D1, D2, stride_xm, stride_m0, stride_m1, stride_m2, stride_mn, scale,
    SCALED: tl.constexpr, CAUSAL: tl.constexpr, P, width,
    STEP: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # P and width are not constants: they follow from the number of rows, and no number of rows is to compile anew. P is
    # not even specialized. width is, so that the compiler knows that 16 divides it and a part's loads stay wide.
    # STEP 0 does a whole row. A row in P parts takes two launches: step 1 writes each part's statistics, step 2
    # combines them and writes its part of the result. EDGES: rows begin or end between 16-byte boundaries; there is no
    # mask, and from the first boundary on the body of a row is treated as a row.
    row = tl.program_id(0)
    start, stop = 0, N
    # Parts of a row are neighbours in the grid. Each finds the row's edges and body by itself.
    if STEP > 0:
        start = row % P * width
        stop = tl.minimum(start + width, N)
        row = row // P
    x_ptr += row.to(tl.int64) * stride_xm
    y_ptr += row.to(tl.int64) * N
    if mask_ptr is not None:
        mask_ptr += _mask_row(row, D1, D2, stride_m0, stride_m1, stride_m2)
    # One row, one query: blocks behind the last column it sees are not even read.
    last = _last(row, N, T, CAUSAL)
    if EDGES:
        x_row, y_row = x_ptr, y_ptr
        edge, real, seen, first, N, stop, last, x_ptr = _body(x_row, N, start, stop, last)
        y_ptr = aligned(y_row, first)
    # A part's statistics: its maximum, and Σ exp(score − that maximum).
    if STEP < 2:
        top, total = _statistics(x_ptr, mask_ptr, N, start, stop, last, stride_mn, scale, SCALED, CAUSAL, BLOCK)
        if EDGES:
            x_edge = tl.load(x_row + edge, mask=seen, other=float("-inf"))
            z_edge = _scores(x_edge, None, edge, seen, seen, scale, SCALED or CAUSAL)
            # In other parts than the first no edge is seen: z_edge is -inf, the maximum stays, and the factor is 1.
            body_top = top
            top = tl.maximum(top, tl.max(z_edge, 0))
            total = total * tl.exp2((body_top - top) * LOG2E) + tl.sum(tl.exp2((z_edge - top) * LOG2E), 0)
    else:
        parts = tl.arange(0, BLOCK_P)
        partial_ptr += row * P * 2
        # Every program of a row adds up all parts, in one tree: the same bits in each, without a third launch.
        # A part that the row does not see has the least maximum and a sum of 0: it adds nothing.
        tops = tl.load(partial_ptr + 2 * parts, mask=parts < P, other=LOWEST)
        totals = tl.load(partial_ptr + 2 * parts + 1, mask=parts < P, other=0.0)
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp2((tops - top) * LOG2E), 0)
    if STEP == 1:
        # Every program has two numbers to itself: no atomics. The end of the launch is the barrier between the parts.
        tl.store(partial_ptr + 2 * tl.program_id(0), top)
        tl.store(partial_ptr + 2 * tl.program_id(0) + 1, total)
    else:
        # One division a row; elements are multiplied by the inverse.
        _write_softmax(
            x_ptr, mask_ptr, y_ptr, N, start, stop, last, stride_mn, scale, top, 1.0 / total, SCALED, CAUSAL, BLOCK
        )
        if EDGES:
            # From the cache, as the body: kept in registers, they might leave none for a second program.
            x_edge = tl.load(x_row + edge, mask=seen, other=float("-inf"), eviction_policy="evict_first")
            z_edge = _scores(x_edge, None, edge, seen, seen, scale, SCALED or CAUSAL)
            y_edge = tl.exp2((z_edge - top) * LOG2E) * (1.0 / total)
            tl.store(y_row + edge, y_edge.to(y_ptr.dtype.element_ty), mask=real)


@jit
@do_not_specialize("T", "P")
def _softmax_wide_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, partial_ptr, N, T, stride_dym, stride_ym, scale, CAUSAL: tl.constexpr,
    P, width, STEP: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, stop = 0, N
    # As in the forward: step 1 sums each part, step 2 adds the parts in their order and writes.
    if STEP > 0:
        start = row % P * width
        stop = tl.minimum(start + width, N)
        row = row // P
    dy_ptr += row.to(tl.int64) * stride_dym
    y_ptr += row.to(tl.int64) * stride_ym
    dx_ptr += row.to(tl.int64) * N
    last = _last(row, N, T, CAUSAL)
    if EDGES:
        dy_row, y_row, dx_row = dy_ptr, y_ptr, dx_ptr
        edge, real, seen, first, N, stop, last, dy_ptr = _body(dy_row, N, start, stop, last)
        y_ptr, dx_ptr = aligned(y_row, first), aligned(dx_row, first)
        # Kept from here to the end, where the forward loads its edge again: two tensors of at most 16 lanes.
        dy_edge = tl.load(dy_row + edge, mask=seen, other=0.0).to(tl.float32)
        y_edge = tl.load(y_row + edge, mask=seen, other=0.0).to(tl.float32)
    if STEP < 2:
        total = _products(dy_ptr, y_ptr, N, start, stop, last, CAUSAL, BLOCK)
        if EDGES:
            total += tl.sum(dy_edge * y_edge, 0)
    else:
        parts = tl.arange(0, BLOCK_P)
        # One tree over the parts, the same in every program of the row.
        total = tl.sum(tl.load(partial_ptr + row * P + parts, mask=parts < P, other=0.0), 0)
    if STEP == 1:
        tl.store(partial_ptr + tl.program_id(0), total)
    else:
        _write_gradient(dy_ptr, y_ptr, dx_ptr, N, start, stop, last, scale, total, BLOCK)
        if EDGES:
            # 0 at edges that the query does not see: dx is fresh memory, and they have to be written.
            dx_edge = tl.where(seen, y_edge * (dy_edge - total) * scale, 0.0)
            tl.store(dx_row + edge, dx_edge.to(dx_ptr.dtype.element_ty), mask=real)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(n: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps. Narrow rows share a tile, so that every warp has wide loads to make."""
    # 2048 numbers a tile at least: 4 warps then have 16 numbers a thread, two loads of 16 bytes in 16 bits.
    block_n = next_power_of_2(n)
    warps = 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16 if block_n <= 16384 else 32
    return max(1, 2048 // block_n), block_n, warps


def _prefetch(row_bytes: int, x: Tensor) -> int:
    """Stages of the forward pass. A row of 64 KiB has a multiprocessor to itself; its next two rows are on their way
    into shared memory, if they fit. The backward pass, which loads two such rows, is faster without prefetch."""
    return 3 if row_bytes >= 65536 and 3 * row_bytes + 4096 <= shared_memory(x.device) else 1


def _parts(M: int, N: int, device: torch.device) -> tuple[int, int]:
    """How many parts each of M wide rows has, and a part's columns: 1, N if the rows alone are programs enough."""
    # Cut only if whole rows would leave multiprocessors idle: parts cost a second launch and a trip of their
    # statistics.
    programs = multiprocessors(device)
    # The lesser of two counts: what gives each multiprocessor PARTED programs, and what leaves a part PART columns.
    parts = min(PARTED * programs // M, cdiv(N, PART)) if programs > M else 1
    if parts < 2:
        return 1, N
    # Whole blocks, shared out evenly: rounding up may leave fewer parts than were asked for, and none is empty.
    width = cdiv(cdiv(N, PART), parts) * PART
    return cdiv(N, width), width


def _wide_tile(N: int, edges: bool, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Columns that a program of a whole row takes at a time, and Triton's options.

    Narrower rows than MAX_TILE are read twice as well if their edges would not fit into the tile that holds the rest.
    Rows of up to 64 KiB come from the L1 cache the second time: the wider the row, the fewer share a multiprocessor.
    """
    warps = 32 if N > 16384 else 16 if N > 8192 else 8 if N > 2048 else 4
    options = {"num_warps": warps}
    # 65,536 registers of a multiprocessor for 2 · 1024 threads are 32 a thread.
    # The edges take a few registers more than leave room for two programs of 32 warps. The compiler, asked, saves them.
    if edges and is_hopper(device):
        options["maxnreg"] = 32
    return warps * 256, options


def _launch_wide(
    kernel: Any, key: tuple[Any, ...], tensors: tuple[Tensor | None, ...], arguments: tuple[Any, ...], M: int, N: int,
    numbers: int, edges: bool,
) -> None:  # fmt: skip
    """One launch of whole rows; or two of rows in parts, with `numbers` fp32 statistics of each part in between."""
    # The key names `edges`, which an address decides: rows of one shape and stride may begin anywhere.
    device = tensors[-1].device  # type: ignore[union-attr]
    parts, width = _parts(M, N, device) if N > MAX_TILE else (1, N)
    if parts == 1:
        block, options = _wide_tile(N, edges, device)
        whole = M, (*arguments, 1, N, 0, edges, block, 1), options
        launch(kernel, (*key, edges), (*tensors, None), lambda: whole)
        return
    # Never read before it is written: step 1 stores every part, also parts without a visible column.
    partial = torch.empty(M * parts * numbers, dtype=torch.float32, device=device)
    # A power of 2 that bounds the number of parts. It follows from N alone, lest another number of rows compile a
    # kernel.
    block_p = next_power_of_2(cdiv(N, PART))
    for step in (1, 2):

        def plan(step: int = step) -> Plan:
            return M * parts, (*arguments, parts, width, step, edges, PART, block_p), {"num_warps": 8}

        launch(kernel, (*key, step, edges), (*tensors, partial), plan)


def _mask_layout(mask: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, ...]]:
    """The mask as the kernels walk it: the sizes of its last two row dimensions, three row strides, the column stride.

    Dimensions that one stride describes are merged: for (B, H, T, S), a mask (B, 1, T, S) has three, (T, S) two.
    """
    mask = mask.expand(shape)
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], mask.stride()[:-1], strict=True):
        # A dimension of 1 has any stride, and would only keep its neighbours from being merged.
        if size == 1:
            continue
        # True of dense neighbours, and of two that are both broadcast, with strides of 0.
        if dims and dims[-1][1] == stride * size:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    if len(dims) > 3:  # broadcast in every other dimension of a tensor with five and more
        return _mask_layout(mask.contiguous(), shape)
    (_, s0), (d1, s1), (d2, s2) = [(1, 0)] * (3 - len(dims)) + dims
    return mask, (d1, d2, s0, s1, s2, mask.stride(-1))


def _softmax_fwd_fake(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return x.new_empty(x.shape)


@launcher("(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor", _softmax_fwd_fake)
def _softmax_fwd(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    y = _softmax_fwd_fake(x, mask, scale, causal)
    if x.numel() == 0:
        return y
    layout: tuple[int, ...] = (1, 1, 0, 0, 0, 0)
    if mask is not None:
        mask, layout = _mask_layout(mask, x.shape)
    # T counts a query's row within its head: only the causal mask asks.
    T = x.shape[-2] if causal else 1
    x = rows_of(x)
    M, N = x.shape
    arguments = (N, T, *layout[:2], x.stride(0), *layout[2:], scale, scale != 1.0, causal)
    key = (M, arguments, x.dtype, None if mask is None else mask.dtype)
    # A mask's rows lie elsewhere than x's, and would have edges of their own: with a mask, odd rows are moved number by
    # number.
    edges = mask is None and uneven(x, y.view(M, N))
    if N > MAX_TILE or edges:
        _launch_wide(_softmax_wide_fwd_kernel, key, (x, mask, y), arguments, M, N, 2, edges)
    else:

        def tiled() -> Plan:
            block_m, block_n, warps = _tile(N)
            tiles, stages = cdiv(M, block_m), _prefetch(block_n * x.element_size(), x)
            # Persistent only with a prefetch: otherwise one program a tile lets the hardware balance the load.
            grid = tiles if stages == 1 else min(tiles, multiprocessors(x.device))
            return grid, (M, *arguments, block_m, block_n, stages), {"num_warps": warps}

        launch(_softmax_fwd_kernel, key, (x, mask, y), tiled)
    return y


def _softmax_bwd_fake(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    return y.new_empty(y.shape)


@launcher("(Tensor dy, Tensor y, float scale, bool causal) -> Tensor", _softmax_bwd_fake)
def _softmax_bwd(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    dx = _softmax_bwd_fake(dy, y, scale, causal)
    if y.numel() == 0:
        return dx
    # T counts a query's row within its head: only the causal mask asks.
    T = y.shape[-2] if causal else 1
    dy, y = rows_of(dy), rows_of(y)
    M, N = y.shape
    arguments = (N, T, dy.stride(0), y.stride(0), scale, causal)
    key = (M, arguments, dy.dtype, y.dtype)
    edges = uneven(dy, y, dx.view(M, N))
    if N > MAX_TILE or edges:
        _launch_wide(_softmax_wide_bwd_kernel, key, (dy, y, dx), arguments, M, N, 1, edges)
    else:

        def tiled() -> Plan:
            block_m, block_n, warps = _tile(N)
            # Up to 16384 columns registers hold both tensors in fp32. Beyond, bf16 stays as it is loaded, in half as
            # many.
            reload = block_n > 16384 and y.dtype != torch.bfloat16
            if block_n * y.element_size() > 65536:  # 16 warps wait less for two such rows than 32 do
                warps = 16
            return cdiv(M, block_m), (M, *arguments, reload, block_m, block_n), {"num_warps": warps}

        launch(_softmax_bwd_kernel, key, (dy, y, dx), tiled)
    return dx


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.scale, ctx.causal = inputs
    # Only the result: scores can be freed, and usually are.
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None or not ctx.needs_input_grad[0]:
        return None, None, None, None
    (y,) = ctx.saved_tensors
    return _softmax_bwd(dy, y, ctx.scale, ctx.causal), None, None, None


_softmax = differentiable(_softmax_fwd, _setup_context, _backward)
