"""The kernels of layer norm, by width: tiles of rows, one row a program, and rows that are read twice.

Statistics are (M, 2) fp32, each row's mean and 1/std side by side. Row addresses are int64, columns int32.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.reduce import sum2


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
    # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
    x_at = (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi
    x = tl.load(x_ptr + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    # The mean of the centred row corrects the rounding of the first mean. A row of equal numbers then has exactly
    # their mean.
    # Masked columns hold 0, which adds nothing. N divides, not the tile's width.
    mean = tl.sum(x, 1) / N
    centred = tl.where(col_mask, x - mean[:, None], 0.0)
    left = tl.sum(centred, 1) / N
    # fma: with the squares beyond fp32, left² may be too. The difference of two infinities would be NaN, where an
    # infinite variance gives 1/std = 0 and finite numbers.
    rstd = tl.rsqrt(tl.maximum(tl.fma(left * -1.0, left, tl.sum(centred * centred, 1) / N), 0.0) + eps)
    mean += left
    # Both statistics are kept in fp32, 8 bytes a row, side by side: the backward pass reads them with one load.
    tl.store(stats_ptr + 2 * rows, mean, mask=row_mask)
    tl.store(stats_ptr + 2 * rows + 1, rstd, mask=row_mask)
    # x is subtracted before it is scaled: mean · rstd, taken out of the bracket, would round at the size of the
    # mean.
    y = (x - mean[:, None]) * rstd[:, None]
    # Weight and bias are the same for every row: they come from the cache after the first.
    if w_ptr is not None:
        y = y * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y = y + tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _add_pairs(a, b, c, d):
    # For tl.reduce over pairs: two sums share one exchange between warps, and one barrier.
    return a + c, b + d


@jit
def _fold(wide, narrow):
    """narrow plus the pieces of wide of its length: a row in two parts, added within threads before warps exchange."""
    return tl.sum(tl.reshape(wide, (wide.shape[0] // narrow.shape[0], narrow.shape[0])), 0) + narrow


@jit
def _scale_and_shift(x_ptr, w_ptr, b_ptr, y_ptr, cols, mask, mean, rstd):
    # The eviction policy makes this load differ from the first. The compiler would merge two equal loads, and keep the
    # row in registers in between.
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = (x - mean) * rstd
    if w_ptr is not None:
        y = y * tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y = y + tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
@do_not_specialize("M")
def _layer_norm_row_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, inner, stride_xo, stride_xi, eps,
    BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # One row a program, in one part or in two. Once the sums are known the row is read again, from the L1 cache. The
    # registers that do not hold it in between serve another program, which waits for memory while this one sums.
    # Row r begins at (r // inner) · stride_xo + (r % inner) · stride_xi: one head of a packed projection is not copied.
    row = tl.program_id(0)
    # int64: an output of 2**31 elements is 512k rows of 4096. From here on a row is addressed by columns alone, in
    # int32.
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    y_ptr += row.to(tl.int64) * N
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    # The two parts are added lane by lane first, so that one reduction between warps serves both.
    total = x
    if BLOCK_REST > 0:
        # A row of 12288 is 8192 + 4096: as one tile, a power of 2, it would be a quarter padding.
        rest = BLOCK_N + tl.arange(0, BLOCK_REST)
        x_rest = tl.load(x_ptr + rest, mask=rest < N, other=0.0).to(tl.float32)
        total = _fold(x, x_rest)
    mean = tl.sum(total, 0) / N
    # The mean of the centred row corrects the first mean, as in the kernel above; one exchange brings both sums.
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


@jit
@do_not_specialize("M")
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, db_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A persistent grid: each program walks the rows with the grid's stride and keeps its share of dW and dbias in
    # registers. Masked columns need no further mask: dy is zero there, and is a factor of every term.
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < N
    # The weight is the same for every row: it stays in registers for the whole walk.
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    # A share for every row of the tile: rows are added once, at the end, and not in each step.
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask[None, :]
        dy_ptrs = dy_ptr + (rows // inner_dy).to(tl.int64) * stride_dyo + (rows % inner_dy).to(tl.int64) * stride_dyi
        # dy comes first: every result needs it, and with a bias alone wanted nothing else is read.
        dy = tl.load(dy_ptrs[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_DW or dx_ptr is not None:
            x_ptrs = x_ptr + (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi
            # In masked columns xhat is −mean · rstd, which meets a dy of 0 in every product.
            x = tl.load(x_ptrs[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            # Mean and 1/std lie side by side: one load of 8 bytes brings both.
            pair = rows[:, None] * 2 + tl.arange(0, 2)[None, :]
            mean, rstd = tl.split(tl.load(stats_ptr + pair, mask=row_mask[:, None], other=0.0))
            mean, rstd = mean[:, None], rstd[:, None]
            xhat = (x - mean) * rstd
        # With xhat = (x − mean) · rstd, over the rows: dW = Σ dy · xhat and dbias = Σ dy.
        if NEED_DW:
            dw += dy * xhat
        if dx_ptr is not None:
            wdy = dy
            if w_ptr is not None:
                wdy = dy * w[None, :]
            # The two sums are the components of wdy along xhat and along the constant, which a norm cannot pass on.
            along, shift = sum2(wdy * xhat, wdy)
            # dx = rstd · (wdy − mean(wdy) − xhat · mean(wdy · xhat)).
            dx = (wdy - shift[:, None] / N - xhat * (along[:, None] / N)) * rstd
            tl.store(dx_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_DB:
            db += dy
    if NEED_DW or NEED_DB:
        # A row of partial sums for each program; sum_rows adds them in a fixed order, without atomics. A single program
        # stores dW and dbias themselves: dbias to db_ptr, if both are wanted.
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
    # evict_first keeps this load from being merged with the first one. It is also true: nobody reads the row again.
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
            # Unlike the row, the weight is read again for every row of the program: evict_last keeps it cached.
            dy = dy * tl.load(w_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dx = (dy - shift - xhat * along) * rstd
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    return dw, db


@jit
@do_not_specialize("M")
def _layer_norm_row_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, db_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
    SECTORS: tl.constexpr,
):  # fmt: skip
    # As above, for rows so wide that the sums of dW and dbias take half of all registers. The other half does not hold
    # the row while it is summed, so the row is read once more, from the L1 cache. A different eviction policy keeps the
    # compiler from merging the two loads; and it may move nothing out of the loop into a register (disable_licm).
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    # One row at a time: a share for each row of a tile, as in the kernel above, would not fit into registers.
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    # The second part has sums of its own: a tile has one power of 2 for its width.
    if BLOCK_REST > 0:
        rest = BLOCK_N + tl.arange(0, BLOCK_REST)
        dw_rest = tl.zeros((BLOCK_REST,), tl.float32)
        db_rest = tl.zeros((BLOCK_REST,), tl.float32)
    # A sector of the cache is 32 bytes, 16 numbers of 16 bits: the least that a load brings in.
    if SECTORS > 0:
        sectors = tl.arange(0, SECTORS)
        seen = tl.zeros((SECTORS,), tl.float32)
    for r in tl.range(tl.program_id(0), M, tl.num_programs(0), loop_unroll_factor=1, disable_licm=True):
        # int64 by an addition: the loop variable itself is int32, as M is.
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
                # Prefetch: loading one number of each sector of the next row brings the whole row into the cache, and
                # takes one register where the row would take sixteen.
                # Behind the program's last row it is row M − 1, lest a load reach beyond the tensor.
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
        # An arithmetic with None would not compile: without dx there is no address to compute.
        dx_row = dx_ptr if dx_ptr is None else dx_ptr + row * N
        dw, db = _row_gradients(
            dy_row, x_row, w_ptr, dx_row, cols, mask, mean, rstd, along, shift, dw, db, NEED_DW, NEED_DB
        )
        if BLOCK_REST > 0:
            dw_rest, db_rest = _row_gradients(
                dy_row, x_row, w_ptr, dx_row, rest, rest < N, mean, rstd, along, shift, dw_rest, db_rest,
                NEED_DW, NEED_DB,
            )  # fmt: skip
        # Used at the row's end and not where it is loaded, lest the row's own work wait for it.
        if SECTORS > 0 and dx_ptr is not None:
            seen = tl.maximum(seen, hint)
    if SECTORS > 0 and dx_ptr is not None:
        # The mask is never true, which the compiler cannot know. Without a use it would drop the prefetching loads.
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


@jit
@do_not_specialize("M")
def _layer_norm_wide_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, inner, stride_xo, stride_xi, eps,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Two readings, block by block: a row this wide does not stay in registers. Statistics first, then the result.
    row = tl.program_id(0)
    x_ptr += (row // inner).to(tl.int64) * stride_xo + (row % inner).to(tl.int64) * stride_xi
    y_ptr += row.to(tl.int64) * N
    # Sums are taken about the mean of the first block, which lies within sqrt(N / BLOCK_N) standard deviations of the
    # row's mean, whatever the row holds. The difference of squares below therefore keeps its digits.
    cols = tl.arange(0, BLOCK_N)
    # Divided by BLOCK_N and not N: rows of this kernel are longer than a block, so that the first is full.
    about = tl.sum(tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32), 0) / BLOCK_N
    total = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    # Lanes keep sums of their own: they meet once a row, and not once a block.
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        # Masked columns hold 0, not `about`: without the select each would add -about to the sums.
        x = tl.where(cols < N, x - about, 0.0)
        total += x
        squares += x * x
    shift = tl.sum(total, 0) / N
    mean = about + shift
    # fma: shift² is not rounded by itself. Never below 0: rounding could make the variance of equal numbers negative.
    rstd = tl.rsqrt(tl.maximum(tl.fma(shift * -1.0, shift, tl.sum(squares, 0) / N), 0.0) + eps)
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, rstd)
    # The second reading finds in the cache what has stayed there.
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = (tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) - mean) * rstd
        if w_ptr is not None:
            y = y * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if b_ptr is not None:
            y = y + tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
@do_not_specialize("M")
def _layer_norm_wide_dx_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Mean and 1/std are the forward's, so that one reading takes both sums of dx, and a second one writes it.
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
        # x − mean is scaled by rstd once, after the sum, and not element by element.
        products += dy * (tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) - mean)
    # rstd twice: once for the xhat of the sum, once for that of dx below.
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


@jit
@do_not_specialize("M")
def _layer_norm_wide_dw_kernel(
    dy_ptr, x_ptr, stats_ptr, partial_ptr, db_ptr, M, N,
    inner_dy, stride_dyo, stride_dyi, inner, stride_xo, stride_xi, P,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Column blocks are the slow index: programs that run together read neighbouring rows of the same columns.
    part = tl.program_id(0) % P
    cols = tl.program_id(0) // P * BLOCK_N + tl.arange(0, BLOCK_N)
    # dW and dbias need columns only, dx whole rows: in kernels of their own, neither holds what the other sums.
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    # A fixed set of rows in a fixed order: the same bits on every run.
    # dy and x are read once more than for dx: the price of sums that stay in registers over all rows.
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
