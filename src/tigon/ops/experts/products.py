"""Matrix products over rows sorted by expert.

`_rows_kernel` multiplies an expert's rows by its weight: a program owns a row tile from routing.py's list and a block
of columns. Adapters add a product over their rank to the sums of the tile. `_weight_bwd_kernel` computes the gradient
of the weight: a program owns a weight block and walks over all rows of the expert. Programs are numbered such that
concurrent programs share tiles in L2.

DESCRIBED: the operands are tensor descriptors, and the GPU's copy engine loads tiles into shared memory. Without such
an engine, or if rows are not aligned to 16 bytes, threads load the tiles.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl


@jit
def find_tile(
    tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return the program's expert (E for a surplus program), first row, rows, row mask, and column block."""
    pid = tl.program_id(0)
    # A group of GROUP tiles finishes a column block before it starts the next, so that neighbours share a weight block.
    first = pid // (GROUP * BLOCKS) * GROUP
    size = tl.minimum(M_TILES - first, GROUP)
    within = pid % (GROUP * BLOCKS)
    tile = first + within % size
    expert = tl.load(tiles_ptr + tile)
    start = tl.load(tiles_ptr + TILES + tile)
    end = tl.load(offsets_ptr + tl.minimum(expert + 1, E))
    rows = start + tl.arange(0, BLOCK_M)
    return expert, start, rows, rows < end, within // size


@jit
def add_low_rank(
    acc, s_ptr, b_ptr, expert, rows, inside, cols, mask, RANK, stride_be, stride_bn, stride_br,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return acc + s · bᵀ, an adapter's share of a tile: s (S, RANK) sorted by expert, b (E, N, RANK) of any strides.

    rows, inside (BLOCK_M,): the tile's rows, and which of them are this expert's. cols, mask (BLOCK_N,): its columns.
    """
    rs = tl.arange(0, BLOCK_R)
    s_ptrs = s_ptr + rows.to(tl.int64)[:, None] * RANK + rs[None, :]
    b_ptrs = b_ptr + expert.to(tl.int64) * stride_be + cols.to(tl.int64)[None, :] * stride_bn + rs[:, None] * stride_br
    # One stage: the ranks are few, and the tile's sums leave no registers to load ahead.
    for r in tl.range(0, RANK, BLOCK_R, num_stages=1):
        s = tl.load(s_ptrs, mask=inside[:, None] & (rs < RANK - r)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(rs < RANK - r)[:, None] & mask[None, :], other=0.0)
        acc = tl.dot(s, b, acc, input_precision=PRECISION)
        s_ptrs += BLOCK_R
        b_ptrs += BLOCK_R * stride_br
    return acc


# One program computes BLOCK_M rows × BLOCK_N columns of y for a single expert; the grid covers the worst split, and
# surplus programs exit.
# a (S, K), y (S, N): rows sorted by expert. w: (E, N, K), or with BY_COLUMNS a descriptor (E, K, N) in memory order;
# bias (E, N) or None.
# s (S, RANK), b (E, N, RANK): an adapter's share, or None; see add_low_rank. scale: multiplies y, or None.
# tiles (2, TILES): expert and first row per tile, M_TILES of them visited; offsets (E + 1,); BLOCKS: column blocks.
# EVEN_K: K is a multiple of BLOCK_K, so loads need no mask along K. GROUP: tiles that share a weight block in L2.
@jit
@do_not_specialize("M_TILES", "TILES")
def _rows_kernel(
    y_ptr, a, w, bias_ptr, tiles_ptr, offsets_ptr, s_ptr, b_ptr,
    M_TILES, TILES, E, N, K, BLOCKS, stride_we, stride_wn, stride_wk, RANK, stride_be, stride_bn, stride_br, scale,
    DESCRIBED: tl.constexpr, BY_COLUMNS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = scale · (a · wᵀ + s · bᵀ + bias), accumulated in fp32 and rounded once."""
    expert, start, rows, inside, block = find_tile(tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP, BLOCK_M)
    if expert >= E:
        return
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if DESCRIBED:
        for k in range(0, K, BLOCK_K):
            rows_of_a = a.load([start, k])
            if BY_COLUMNS:
                weight = w.load([expert, k, block * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            else:
                weight = w.load([expert, block * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
            acc = tl.dot(rows_of_a, weight, acc, input_precision=PRECISION)
    else:
        ks = tl.arange(0, BLOCK_K)
        a_ptrs = a + tl.where(inside, rows, start).to(tl.int64)[:, None] * K + ks[None, :]
        w_ptrs = w + expert.to(tl.int64) * stride_we + cols.to(tl.int64)[None, :] * stride_wn + ks[:, None] * stride_wk
        for k in range(0, K, BLOCK_K):
            if EVEN_K:
                rows_of_a = tl.load(a_ptrs)
                weight = tl.load(w_ptrs, mask=mask[None, :], other=0.0)
            else:
                rows_of_a = tl.load(a_ptrs, mask=(ks < K - k)[None, :], other=0.0)
                weight = tl.load(w_ptrs, mask=(ks < K - k)[:, None] & mask[None, :], other=0.0)
            acc = tl.dot(rows_of_a, weight, acc, input_precision=PRECISION)
            a_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * stride_wk
    if s_ptr is not None:
        acc = add_low_rank(
            acc, s_ptr, b_ptr, expert, rows, inside, cols, mask, RANK, stride_be, stride_bn, stride_br, PRECISION,
            BLOCK_R,
        )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    if scale is not None:
        acc *= scale
    y_ptr += rows.to(tl.int64)[:, None] * N + cols[None, :]
    # A tile overlaps the next expert's first rows, which another program writes: the mask is required.
    tl.store(y_ptr, acc.to(y_ptr.dtype.element_ty), mask=inside[:, None] & mask[None, :])


# One program sums a BLOCK_M × BLOCK_N block of dw[expert] over all rows of that expert, in order, BLOCK_R rows per
# step. An expert without rows writes zeros.
# a (S, M), b (S, N): rows sorted by expert, or descriptors. dw (E, M, N): unit stride along N. offsets (E + 1,): row
# ranges, known only on the device.
@jit
def _weight_bwd_kernel(
    dw_ptr, a, b, offsets_ptr, M, N, BLOCKS_M, BLOCKS_N, stride_we, stride_wm,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dw[expert] = aᵀ b over the expert's rows."""
    pid = tl.program_id(0)
    expert = pid // (BLOCKS_M * BLOCKS_N)
    pid = pid % (BLOCKS_M * BLOCKS_N)
    first = pid // (GROUP * BLOCKS_N) * GROUP
    size = tl.minimum(BLOCKS_M - first, GROUP)
    within = pid % (GROUP * BLOCKS_N)
    m = (first + within % size) * BLOCK_M
    n = within // size * BLOCK_N
    ms = m + tl.arange(0, BLOCK_M)
    ns = n + tl.arange(0, BLOCK_N)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if DESCRIBED:
        # Only the last, partial step needs a mask.
        full = end - (end - start) % BLOCK_R
        for r in range(start, full, BLOCK_R):
            acc = tl.dot(a.load([r, m]).T, b.load([r, n]), acc, input_precision=PRECISION)
        if full < end:
            # Rows beyond the end may hold NaN, and 0 · NaN is NaN: clear both operands.
            inside = (full + tl.arange(0, BLOCK_R) < end)[:, None]
            rows_of_a = tl.where(inside, a.load([full, m]), 0.0)
            rows_of_b = tl.where(inside, b.load([full, n]), 0.0)
            acc = tl.dot(rows_of_a.T, rows_of_b, acc, input_precision=PRECISION)
    else:
        for r in range(start, end, BLOCK_R):
            rows = r + tl.arange(0, BLOCK_R)
            inside = (rows < end)[:, None]
            # int64: rows · width exceeds 2**31 at 512k slots with width 4096.
            at = rows.to(tl.int64)[:, None]
            rows_of_a = tl.load(a + at * M + ms[None, :], mask=inside & (ms < M)[None, :], other=0.0)
            rows_of_b = tl.load(b + at * N + ns[None, :], mask=inside & (ns < N)[None, :], other=0.0)
            acc = tl.dot(tl.trans(rows_of_a), rows_of_b, acc, input_precision=PRECISION)
    dw_ptr += expert.to(tl.int64) * stride_we + ms.to(tl.int64)[:, None] * stride_wm + ns[None, :]
    tl.store(dw_ptr, acc.to(dw_ptr.dtype.element_ty), mask=(ms < M)[:, None] & (ns < N)[None, :])
