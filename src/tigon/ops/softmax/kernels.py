"""Softmax kernels: for rows that stay in registers, and for rows that are read twice, whole or in parts.

    x, dy, y    M rows with strides xm, dym, ym; y in the forward pass and dx are dense
    mask        up to three row dimensions (sizes D1 and D2 for the last two) with strides m0, m1, m2, and column stride
                mn; a stride is 0 where the mask is broadcast
    T           queries per head, for CAUSAL: row i is query i % T; with T < S the queries are the last of the keys
    SCALED      scale != 1
    seen, near  columns that a query attends to, and the same rounded up for loads (`_causal`)

dx = scale · y · (dy − Σ dy · y): the gradient needs y, not the scores, so neither x nor the mask is saved.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.constants import LOG2E, LOWEST
from tigon.kernels.tiles.edges import align, edges, split


@jit
def _causal(cols, last, inside):
    """Return the columns that a query attends to, and those up to the end of the 32-byte sector, for 16-byte loads."""
    # A mask that changed within a thread's neighbouring numbers would split the load into single numbers. Rounded up to
    # 16 columns the mask changes between threads only, at a cost of at most 15 unused numbers per row.
    return inside & (cols <= last), inside & (cols // 16 <= last // 16)


@jit
def _scores(x, mask_ptr, at, seen, near, scale, HIDE: tl.constexpr):
    """scale · x + mask in fp32, and -inf at columns not seen. HIDE: x may differ from -inf at those columns."""
    z = x.to(tl.float32) * scale
    # `near`, so that the mask too is loaded 16 bytes per thread. Where the mask holds -inf the sum is -inf.
    if mask_ptr is not None:
        z += tl.load(mask_ptr + at, mask=near, other=0.0).to(tl.float32)
    if HIDE:
        # Masked loads give -inf, which a scale of 0 turns into NaN and a negative scale into inf; causal loads pass
        # `last`.
        z = tl.where(seen, z, float("-inf"))
    return z


@jit
def _again(x):
    """x in fp32 for a second use. Equal conversions would be merged and the result kept: twice the registers."""
    if x.dtype == tl.bfloat16:
        # bf16 is the upper half of fp32, so a shift converts it, unlike the cast of the first use. fp16 and fp32 have
        # no second conversion: their widest rows are loaded twice (RELOAD).
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def _mask_row(rows, D1, D2, stride_m0, stride_m1, stride_m2):
    """Where these rows' mask begins."""
    k, j, i = rows % D2, rows // D2 % D1, rows // D2 // D1
    return i.to(tl.int64) * stride_m0 + j.to(tl.int64) * stride_m1 + k.to(tl.int64) * stride_m2


# A program: BLOCK_M rows in registers; wide rows take a persistent grid, and STAGES prefetches the next rows while the
# current row is summed and stored.
@jit
@do_not_specialize("M", "T", "D1", "D2")
def _softmax_fwd_kernel(
    x_ptr, mask_ptr, y_ptr, M, N, T, D1, D2, stride_xm, stride_m0, stride_m1, stride_m2, stride_mn, scale,
    SCALED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        seen, near = inside, inside
        if CAUSAL:
            seen, near = _causal(cols[None, :], (rows % T + (N - T))[:, None], inside)
        row = rows.to(tl.int64)[:, None]
        x = tl.load(x_ptr + row * stride_xm + cols[None, :], mask=near, other=float("-inf"))
        at = cols[None, :]
        if mask_ptr is not None:
            at = _mask_row(rows, D1, D2, stride_m0, stride_m1, stride_m2)[:, None] + cols[None, :] * stride_mn
        z = _scores(x, mask_ptr, at, seen, near, scale, SCALED or CAUSAL)
        # Subtract first, exact where precision matters. A row with only -inf computes -inf − (-inf) = NaN, torch's
        # answer; rows beyond M as well, but they are not stored.
        e = tl.exp2((z - tl.max(z, 1)[:, None]) * LOG2E)
        y = e * (1.0 / tl.sum(e, 1))[:, None]
        tl.store(y_ptr + row * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


# A program: BLOCK_M rows in registers, no persistent grid: with two inputs prefetching was slower (`_prefetch`).
# RELOAD: registers are short, so both inputs are read from the L1 cache again after the sums.
@jit
@do_not_specialize("M", "T")
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, T, stride_dym, stride_ym, scale,
    CAUSAL: tl.constexpr, RELOAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    seen, near = inside, inside
    if CAUSAL:
        seen, near = _causal(cols[None, :], (rows % T + (N - T))[:, None], inside)
    row = rows.to(tl.int64)[:, None]
    dy_at = dy_ptr + row * stride_dym + cols[None, :]
    y_at = y_ptr + row * stride_ym + cols[None, :]
    dy = tl.load(dy_at, mask=near, other=0.0)
    y = tl.load(y_at, mask=near, other=0.0)
    products = dy.to(tl.float32) * y.to(tl.float32)
    if CAUSAL:
        products = tl.where(seen, products, 0.0)
    total = tl.sum(products, 1)[:, None]
    if RELOAD:
        # The barrier keeps the compiler from merging the loads, so neither tensor holds registers while warps exchange
        # sums.
        tl.debug_barrier()
        dy = tl.load(dy_at, mask=near, other=0.0)
        y = tl.load(y_at, mask=near, other=0.0)
    dx = _again(y) * (_again(dy) - total) * scale
    if CAUSAL:
        dx = tl.where(seen, dx, 0.0)
    tl.store(dx_ptr + row * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@jit
def _statistics(
    x_ptr, mask_ptr, N, start, stop, last, stride_mn, scale, SCALED: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the maximum of a row's scores from start to stop, and Σ exp(score − maximum)."""
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    # Blocks beyond the last column that the row attends to are skipped. With EDGES columns count from the body's first,
    # and `last` may be negative: the loop is then empty.
    for at in range(start, tl.minimum(stop, last + 1), BLOCK):
        cols = at + lane
        seen, near = _causal(cols, last, cols < N)
        x = tl.load(x_ptr + cols, mask=near, other=float("-inf"))
        z = _scores(x, mask_ptr, cols * stride_mn, seen, near, scale, SCALED or CAUSAL)
        # Either the old maximum or the new element is the larger, with exponential 1: compute only the other
        # exponential.
        e = tl.exp2(-tl.abs(z - top) * LOG2E)
        # NaN compares as false, so the sum takes its exponential, NaN, although the maximum drops it. +inf becomes NaN
        # where the row's maximum is subtracted, as in torch.
        total = tl.where(z > top, total * e + 1.0, total + e)
        top = tl.maximum(top, z)
    row_top = tl.max(top, 0)
    return row_top, tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)


@jit
def _write_softmax(
    x_ptr, mask_ptr, y_ptr, N, start, stop, last, stride_mn, scale, row_top, inverse,
    SCALED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A part is a multiple of BLOCK wide, so no block reaches into another program's part. A part that begins after the
    # body's end has no blocks.
    blocks = tl.cdiv(stop - start, BLOCK)
    for i in range(blocks):
        cols = start + (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        seen, near = _causal(cols, last, cols < N)
        x = tl.load(x_ptr + cols, mask=near, other=float("-inf"))
        z = _scores(x, mask_ptr, cols * stride_mn, seen, near, scale, SCALED or CAUSAL)
        y = tl.exp2((z - row_top) * LOG2E) * inverse
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
def _products(dy_ptr, y_ptr, N, start, stop, last, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Σ dy · y from start to stop of a row."""
    products = tl.zeros((BLOCK,), tl.float32)
    for at in range(start, tl.minimum(stop, last + 1), BLOCK):
        cols = at + tl.arange(0, BLOCK)
        seen, near = _causal(cols, last, cols < N)
        dy = tl.load(dy_ptr + cols, mask=near, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=near, other=0.0).to(tl.float32)
        products += tl.where(seen, dy * y, 0.0) if CAUSAL else dy * y
    return tl.sum(products, 0)


@jit
def _write_gradient(dy_ptr, y_ptr, dx_ptr, N, start, stop, last, scale, total, BLOCK: tl.constexpr):
    blocks = tl.cdiv(stop - start, BLOCK)
    for i in range(blocks):
        cols = start + (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        seen, near = _causal(cols, last, cols < N)
        dy = tl.load(dy_ptr + cols, mask=near, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=near, other=0.0).to(tl.float32)
        dx = tl.where(seen, y * (dy - total) * scale, 0.0)
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


@jit
def _last(row, N, T, CAUSAL: tl.constexpr):
    """Return the last column that a row attends to."""
    last = N - 1
    if CAUSAL:
        last = row % T + (N - T)
    return last


@jit
def _body(ptr, N, start, stop, last):
    """Split a row into edges and body.

    Returns the edge columns, masks of those that exist and that are seen, the body's first column and width, the end of
    this part, the last column seen (counted from the body's first) and the body's pointer. The edges belong to a row's
    first part.
    """
    first, width = split(ptr, N)
    edge, real = edges(ptr, first, width, N)
    real &= start == 0
    return edge, real, real & (edge <= last), first, width, tl.minimum(stop, width), last - first, align(ptr, first)


# A program: a row that is too wide for registers or has edges (STEP 0), or a part of such a row, `width` columns, P
# parts per row. Parts take two launches: STEP 1 writes each part's statistics, STEP 2 combines them and writes the
# result.
#   partial     (M, P, 2) fp32, each part's maximum and Σ exp(score − maximum); the end of the launch is the barrier
#               between parts, without atomics
#   EDGES       rows begin or end between 16-byte boundaries; there is no mask, and the body from the first boundary on
#               is treated as a row
# P and width depend on the row count, which must not trigger recompilation, so neither is a constant. P is not
# specialized; width is, since the compiler must know that 16 divides width to keep a part's loads wide.
@jit
@do_not_specialize("T", "D1", "D2", "P")
def _softmax_wide_fwd_kernel(
    x_ptr, mask_ptr, y_ptr, partial_ptr, N, T, D1, D2, stride_xm, stride_m0, stride_m1, stride_m2, stride_mn, scale,
    SCALED: tl.constexpr, CAUSAL: tl.constexpr, P, width,
    STEP: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, stop = 0, N
    if STEP > 0:
        start = row % P * width
        stop = tl.minimum(start + width, N)
        row = row // P
    x_ptr += row.to(tl.int64) * stride_xm
    y_ptr += row.to(tl.int64) * N
    if mask_ptr is not None:
        mask_ptr += _mask_row(row, D1, D2, stride_m0, stride_m1, stride_m2)
    last = _last(row, N, T, CAUSAL)
    if EDGES:
        x_row, y_row = x_ptr, y_ptr
        edge, real, seen, first, N, stop, last, x_ptr = _body(x_row, N, start, stop, last)
        y_ptr = align(y_row, first)
    if STEP < 2:
        top, total = _statistics(x_ptr, mask_ptr, N, start, stop, last, stride_mn, scale, SCALED, CAUSAL, BLOCK)
        if EDGES:
            x_edge = tl.load(x_row + edge, mask=seen, other=float("-inf"))
            z_edge = _scores(x_edge, None, edge, seen, seen, scale, SCALED or CAUSAL)
            # Only the first part sees edges; elsewhere z_edge is -inf, the maximum stays, and the factor is 1.
            body_top = top
            top = tl.maximum(top, tl.max(z_edge, 0))
            total = total * tl.exp2((body_top - top) * LOG2E) + tl.sum(tl.exp2((z_edge - top) * LOG2E), 0)
    else:
        parts = tl.arange(0, BLOCK_P)
        partial_ptr += row * P * 2
        # Every program adds up all parts in the same tree: the same bits in each, without a third launch. A part that
        # the row does not attend to has the least maximum and a sum of 0.
        tops = tl.load(partial_ptr + 2 * parts, mask=parts < P, other=LOWEST)
        totals = tl.load(partial_ptr + 2 * parts + 1, mask=parts < P, other=0.0)
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp2((tops - top) * LOG2E), 0)
    if STEP == 1:
        tl.store(partial_ptr + 2 * tl.program_id(0), top)
        tl.store(partial_ptr + 2 * tl.program_id(0) + 1, total)
    else:
        _write_softmax(
            x_ptr, mask_ptr, y_ptr, N, start, stop, last, stride_mn, scale, top, 1.0 / total, SCALED, CAUSAL, BLOCK
        )
        if EDGES:
            x_edge = tl.load(x_row + edge, mask=seen, other=float("-inf"), eviction_policy="evict_first")
            z_edge = _scores(x_edge, None, edge, seen, seen, scale, SCALED or CAUSAL)
            y_edge = tl.exp2((z_edge - top) * LOG2E) * (1.0 / total)
            tl.store(y_row + edge, y_edge.to(y_ptr.dtype.element_ty), mask=real)


# As the forward kernel: STEP 0 for whole rows; STEP 1 sums each part into partial (M, P), STEP 2 adds the parts in
# order and writes dx.
@jit
@do_not_specialize("T", "P")
def _softmax_wide_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, partial_ptr, N, T, stride_dym, stride_ym, scale, CAUSAL: tl.constexpr,
    P, width, STEP: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, stop = 0, N
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
        y_ptr, dx_ptr = align(y_row, first), align(dx_row, first)
        dy_edge = tl.load(dy_row + edge, mask=seen, other=0.0).to(tl.float32)
        y_edge = tl.load(y_row + edge, mask=seen, other=0.0).to(tl.float32)
    if STEP < 2:
        total = _products(dy_ptr, y_ptr, N, start, stop, last, CAUSAL, BLOCK)
        if EDGES:
            total += tl.sum(dy_edge * y_edge, 0)
    else:
        parts = tl.arange(0, BLOCK_P)
        total = tl.sum(tl.load(partial_ptr + row * P + parts, mask=parts < P, other=0.0), 0)
    if STEP == 1:
        tl.store(partial_ptr + tl.program_id(0), total)
    else:
        _write_gradient(dy_ptr, y_ptr, dx_ptr, N, start, stop, last, scale, total, BLOCK)
        if EDGES:
            dx_edge = tl.where(seen, y_edge * (dy_edge - total) * scale, 0.0)
            tl.store(dx_row + edge, dx_edge.to(dx_ptr.dtype.element_ty), mask=real)
