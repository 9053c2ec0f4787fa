"""Layer norm kernels by width: tiles of rows, a row per program, and rows that are read twice.

    x, dy       (M, N); row i starts at (i // inner) · stride_o + (i % inner) · stride_i, so that one head of a packed
                projection is not copied. dy has separate strides (inner_dy, stride_dyo, stride_dyi)
    w, b        weight and bias, (N,) or None
    y, dx       dense
    stats       (M, 2) fp32, each row's mean and rstd side by side, loaded together
    partial     (programs, NEED_DW + NEED_DB, N) fp32 partial sums of dW and dbias, added by sum_rows in a fixed order
                without atomics. A single program writes dW and dbias themselves: dbias to db_ptr if both are needed

With xhat = (x − mean) · rstd and wdy = weight · dy:  dx = rstd · (wdy − mean(wdy) − xhat · mean(wdy · xhat)),
dW = Σ dy · xhat, dbias = Σ dy. Row addresses are int64, columns int32.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.reduce import sum2


# A program: BLOCK_M rows in registers. The mean is corrected by the mean of the centred row, so that a row of equal
# numbers has exactly that mean.
@jit
@do_not_specialize("M")
def _layer_norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, inner, stride_xo, stride_xi, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    col_mask = (cols < N)[None, :]
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    mask = row_mask[:, None] & col_mask
    x_at = (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi
    x = tl.load(x_ptr + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / N
    centred = tl.where(col_mask, x - mean[:, None], 0.0)
    left = tl.sum(centred, 1) / N
    # fma: left² may overflow when the squares do. inf − inf would be NaN; an infinite variance gives rstd = 0 and
    # finite numbers.
    rstd = tl.rsqrt(tl.maximum(tl.fma(left * -1.0, left, tl.sum(centred * centred, 1) / N), 0.0) + eps)
    mean += left
    tl.store(stats_ptr + 2 * rows, mean, mask=row_mask)
    tl.store(stats_ptr + 2 * rows + 1, rstd, mask=row_mask)
    # Subtract before scaling: a separate mean · rstd would round at the mean's magnitude.
    y = (x - mean[:, None]) * rstd[:, None]
    if w_ptr is not None:
        y = y * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y = y + tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _add_pairs(a, b, c, d):
    # For tl.reduce over pairs: two sums share one exchange between warps and one barrier.
    return a + c, b + d


@jit
def _fold(wide, narrow):
    """Add the pieces of wide to narrow: a row in two parts, summed within threads before warps exchange."""
    return tl.sum(tl.reshape(wide, (wide.shape[0] // narrow.shape[0], narrow.shape[0])), 0) + narrow


@jit
def _scale_and_shift(x_ptr, w_ptr, b_ptr, y_ptr, cols, mask, mean, rstd):
    # evict_first makes this load differ from the first load. The compiler would merge equal loads and keep the row in
    # registers in between.
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = (x - mean) * rstd
    if w_ptr is not None:
        y = y * tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y = y + tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# A program: one row, in one part or two (BLOCK_REST > 0: 12288 is 8192 + 4096, which as a single power of 2 would be a
# quarter padding). After the sums the row is read again from the L1 cache; the registers saved in between let another
# program be resident, which waits for memory while this program sums.
@jit
@do_not_specialize("M")
def _layer_norm_row_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, inner, stride_xo, stride_xi, eps,
    BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    y_ptr += row.to(tl.int64) * N
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    total = x
    if BLOCK_REST > 0:
        rest = BLOCK_N + tl.arange(0, BLOCK_REST)
        x_rest = tl.load(x_ptr + rest, mask=rest < N, other=0.0).to(tl.float32)
        total = _fold(x, x_rest)
    mean = tl.sum(total, 0) / N
    centred = tl.where(mask, x - mean, 0.0)
    squares = centred * centred
    if BLOCK_REST > 0:
        centred_rest = tl.where(rest < N, x_rest - mean, 0.0)
        squares = _fold(squares, centred_rest * centred_rest)
        centred = _fold(centred, centred_rest)
    left, square = tl.reduce((centred, squares), 0, _add_pairs)
    left = left / N
    rstd = tl.rsqrt(tl.maximum(tl.fma(left * -1.0, left, square / N), 0.0) + eps)
    mean += left
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, rstd)
    _scale_and_shift(x_ptr, w_ptr, b_ptr, y_ptr, cols, mask, mean, rstd)
    if BLOCK_REST > 0:
        _scale_and_shift(x_ptr, w_ptr, b_ptr, y_ptr, rest, rest < N, mean, rstd)


# Persistent grid: a program takes every num_programs-th tile of BLOCK_M rows and keeps partial dW and dbias in
# registers. STAGES: tiles prefetched into shared memory. dx is None if not needed.
@jit
@do_not_specialize("M")
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, db_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < N
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask[None, :]
        dy_ptrs = dy_ptr + (rows // inner_dy).to(tl.int64) * stride_dyo + (rows % inner_dy).to(tl.int64) * stride_dyi
        dy = tl.load(dy_ptrs[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_DW or dx_ptr is not None:
            x_ptrs = x_ptr + (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi
            x = tl.load(x_ptrs[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            pair = rows[:, None] * 2 + tl.arange(0, 2)[None, :]
            mean, rstd = tl.split(tl.load(stats_ptr + pair, mask=row_mask[:, None], other=0.0))
            mean, rstd = mean[:, None], rstd[:, None]
            xhat = (x - mean) * rstd
        if NEED_DW:
            dw += dy * xhat
        if dx_ptr is not None:
            wdy = dy
            if w_ptr is not None:
                wdy = dy * w[None, :]
            along, shift = sum2(wdy * xhat, wdy)
            dx = (wdy - shift[:, None] / N - xhat * (along[:, None] / N)) * rstd
            tl.store(dx_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_DB:
            db += dy
    if NEED_DW or NEED_DB:
        partial_ptr += tl.program_id(0).to(tl.int64) * (NEED_DW + NEED_DB) * N + cols
    if NEED_DW:
        tl.store(partial_ptr, tl.sum(dw, 0), mask=col_mask)
    if NEED_DB:
        db_ptrs = partial_ptr + NEED_DW * N if db_ptr is None else db_ptr + cols
        tl.store(db_ptrs, tl.sum(db, 0), mask=col_mask)


@jit
def _row_terms(dy_row, x_row, w_ptr, cols, mask, mean, rstd):
    dy = tl.load(dy_row + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
    xhat = (x - mean) * rstd
    if w_ptr is not None:
        dy = dy * tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    return dy * xhat, dy


@jit
def _row_gradients(
    dy_row, x_row, w_ptr, dx_ptr, cols, mask, mean, rstd, along, shift, dw, db,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
):  # fmt: skip
    # evict_first keeps the compiler from merging this load with the first; the row is not read again.
    dy = tl.load(dy_row + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if NEED_DB:
        db += dy
    if NEED_DW or dx_ptr is not None:
        x = tl.load(x_row + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        xhat = (x - mean) * rstd
    if NEED_DW:
        dw += dy * xhat
    if dx_ptr is not None:
        if w_ptr is not None:
            # The weight, unlike the row, is read again for every row: evict_last keeps the weight cached.
            dy = dy * tl.load(w_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dx = (dy - shift - xhat * along) * rstd
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    return dw, db


# As `_layer_norm_bwd_kernel`, for rows so wide that dW and dbias take half of all registers. The other half cannot hold
# the row during the sums, so the row is read again from the L1 cache, under another eviction policy to keep the
# compiler from merging the loads. disable_licm: nothing may move out of the loop into registers.
#   BLOCK_N, BLOCK_REST   the row in two parts, as in the forward pass
#   SECTORS               32-byte cache sectors per row (16 numbers of 16 bits), for the prefetch; 0: none
@jit
@do_not_specialize("M")
def _layer_norm_row_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, db_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
    SECTORS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    if BLOCK_REST > 0:
        rest = BLOCK_N + tl.arange(0, BLOCK_REST)
        dw_rest = tl.zeros((BLOCK_REST,), tl.float32)
        db_rest = tl.zeros((BLOCK_REST,), tl.float32)
    if SECTORS > 0:
        sectors = tl.arange(0, SECTORS)
        seen = tl.zeros((SECTORS,), tl.float32)
    for r in tl.range(tl.program_id(0), M, tl.num_programs(0), loop_unroll_factor=1, disable_licm=True):
        # int64 by an addition: the loop variable is int32, as M is.
        row = r + tl.full((), 0, tl.int64)
        dy_row = dy_ptr + row // inner_dy * stride_dyo + row % inner_dy * stride_dyi
        x_row = x_ptr + row // inner * stride_xo + row % inner * stride_xi
        mean = tl.load(stats_ptr + 2 * row)
        rstd = tl.load(stats_ptr + 2 * row + 1)
        along = 0.0
        shift = 0.0
        if dx_ptr is not None:
            products, total = _row_terms(dy_row, x_row, w_ptr, cols, mask, mean, rstd)
            if SECTORS > 0:
                # Prefetch: one number from each sector of the next row brings the whole row into the cache, with 1
                # register where the row would take 16. The index is clamped to M − 1 to stay inside the tensor.
                ahead = tl.minimum(row + tl.num_programs(0), M - 1)
                dy_ahead = dy_ptr + ahead // inner_dy * stride_dyo + ahead % inner_dy * stride_dyi + sectors * 16
                x_ahead = x_ptr + ahead // inner * stride_xo + ahead % inner * stride_xi + sectors * 16
                hint = tl.load(dy_ahead, mask=sectors * 16 < N, other=0.0).to(tl.float32)
                hint += tl.load(x_ahead, mask=sectors * 16 < N, other=0.0).to(tl.float32)
            if BLOCK_REST > 0:
                products_rest, total_rest = _row_terms(dy_row, x_row, w_ptr, rest, rest < N, mean, rstd)
                products = _fold(products, products_rest)
                total = _fold(total, total_rest)
            along, shift = tl.reduce((products, total), 0, _add_pairs)
            along = along / N
            shift = shift / N
        dx_row = dx_ptr if dx_ptr is None else dx_ptr + row * N
        dw, db = _row_gradients(
            dy_row, x_row, w_ptr, dx_row, cols, mask, mean, rstd, along, shift, dw, db, NEED_DW, NEED_DB
        )
        if BLOCK_REST > 0:
            dw_rest, db_rest = _row_gradients(
                dy_row, x_row, w_ptr, dx_row, rest, rest < N, mean, rstd, along, shift, dw_rest, db_rest,
                NEED_DW, NEED_DB,
            )  # fmt: skip
        if SECTORS > 0 and dx_ptr is not None:
            seen = tl.maximum(seen, hint)
    if SECTORS > 0 and dx_ptr is not None:
        # This mask is never true, which the compiler cannot know: without a use it would drop the prefetch.
        tl.store(stats_ptr + sectors, seen, mask=sectors + M < 0)
    if NEED_DW or NEED_DB:
        partial_ptr += tl.program_id(0).to(tl.int64) * (NEED_DW + NEED_DB) * N
    if NEED_DW:
        tl.store(partial_ptr + cols, dw, mask=mask)
        if BLOCK_REST > 0:
            tl.store(partial_ptr + rest, dw_rest, mask=rest < N)
    if NEED_DB:
        to_ptr = partial_ptr + NEED_DW * N if db_ptr is None else db_ptr
        tl.store(to_ptr + cols, db, mask=mask)
        if BLOCK_REST > 0:
            tl.store(to_ptr + rest, db_rest, mask=rest < N)


# A program: a row too wide for registers, read twice in blocks: statistics first, then the result.
@jit
@do_not_specialize("M")
def _layer_norm_wide_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, inner, stride_xo, stride_xi, eps,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    y_ptr += row.to(tl.int64) * N
    # Sums are about the first block's mean, which lies within sqrt(N / BLOCK_N) standard deviations of the row's mean,
    # so that the difference of squares below keeps its digits.
    cols = tl.arange(0, BLOCK_N)
    about = tl.sum(tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32), 0) / BLOCK_N
    total = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - about, 0.0)
        total += x
        squares += x * x
    shift = tl.sum(total, 0) / N
    mean = about + shift
    # fma: shift² is not rounded separately. Rounding could make the variance of equal numbers negative, hence the max.
    rstd = tl.rsqrt(tl.maximum(tl.fma(shift * -1.0, shift, tl.sum(squares, 0) / N), 0.0) + eps)
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, rstd)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = (tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) - mean) * rstd
        if w_ptr is not None:
            y = y * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if b_ptr is not None:
            y = y + tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


# dx for rows too wide for registers. A program: one row. The first reading takes both sums, the second writes dx.
@jit
@do_not_specialize("M")
def _layer_norm_wide_dx_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dy_ptr += (row // inner_dy).to(tl.int64) * stride_dyo + (row % inner_dy).to(tl.int64) * stride_dyi
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    dx_ptr += row.to(tl.int64) * N
    mean = tl.load(stats_ptr + 2 * row)
    rstd = tl.load(stats_ptr + 2 * row + 1)
    products = tl.zeros((BLOCK_N,), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy = dy * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += dy
        products += dy * (tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) - mean)
    along = tl.sum(products, 0) * rstd * rstd / N
    shift = tl.sum(total, 0) / N
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy = dy * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        dx = (dy - shift - (x - mean) * along) * rstd
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


# dW and dbias for rows too wide for registers; a separate kernel, because dx needs whole rows while these sums need
# columns. A program: BLOCK_N columns of every P-th row, a fixed set in a fixed order, so results are reproducible.
# Programs that run together read neighbouring rows of the same columns. dy and x are read once more than for dx: the
# price of sums that stay in registers over all rows.
@jit
@do_not_specialize("M")
def _layer_norm_wide_dw_kernel(
    dy_ptr, x_ptr, stats_ptr, partial_ptr, db_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi, P,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % P
    cols = tl.program_id(0) // P * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    for r in range(part, M, P):
        row = r + tl.full((), 0, tl.int64)
        dy_at = row // inner_dy * stride_dyo + row % inner_dy * stride_dyi
        dy = tl.load(dy_ptr + dy_at + cols, mask=cols < N, other=0.0).to(tl.float32)
        if NEED_DB:
            db += dy
        if NEED_DW:
            x_at = row // inner * stride_xo + row % inner * stride_xi
            x = tl.load(x_ptr + x_at + cols, mask=cols < N, other=0.0).to(tl.float32)
            dw += dy * ((x - tl.load(stats_ptr + 2 * row)) * tl.load(stats_ptr + 2 * row + 1))
    partial_ptr += part.to(tl.int64) * (NEED_DW + NEED_DB) * N + cols
    if NEED_DW:
        tl.store(partial_ptr, dw, mask=cols < N)
    if NEED_DB:
        db_ptrs = partial_ptr + NEED_DW * N if db_ptr is None else db_ptr + cols
        tl.store(db_ptrs, db, mask=cols < N)
