"""The kernels of softmax: of rows that stay in registers, and of rows that are read twice, whole or in parts."""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.constants import LOG2E, LOWEST
from tigon.kernels.tiles.edges import aligned, edges, split


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
