"""The matrix products over rows that are sorted by expert.

There are two kinds. An expert's rows times its weight: a program takes a tile of the expert's rows, as routing.py lists
them, and a block of columns. An expert's rows times its rows, for the weight's gradient: a program takes a block of the
weight and walks over all rows of the expert. Programs are numbered so that those that run together share tiles in L2.

DESCRIBED: the operands come as tensor descriptors, and the GPU's copy engine brings their tiles into shared memory.
Otherwise, where there is no such engine or rows do not begin at multiples of 16 bytes, threads load them.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl


@jit
def _tile(
    tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """This program's expert (E: a surplus program), first row, rows, mask of the expert's, and block of columns."""
    pid = tl.program_id(0)
    # Programs in groups of GROUP tiles: a group walks down its tiles before it goes to the next block of columns, so
    # that neighbours share a block of the weight.
    first = pid // (GROUP * BLOCKS) * GROUP
    size = tl.minimum(M_TILES - first, GROUP)
    within = pid % (GROUP * BLOCKS)
    tile = first + within % size
    expert = tl.load(tiles_ptr + tile)
    start = tl.load(tiles_ptr + TILES + tile)
    # A surplus tile has expert E: the minimum keeps its read within the offsets.
    end = tl.load(offsets_ptr + tl.minimum(expert + 1, E))
    rows = start + tl.arange(0, BLOCK_M)
    return expert, start, rows, rows < end, within // size


@jit
@do_not_specialize("M_TILES", "TILES")
def _rows_kernel(
    y_ptr, a, w, bias_ptr, tiles_ptr, offsets_ptr,
    M_TILES, TILES, E, N, K, BLOCKS, stride_we, stride_wn, stride_wk,
    DESCRIBED: tl.constexpr, BY_COLUMNS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = a · wᵀ + bias. w: (E, N, K), or as a descriptor where BY_COLUMNS (E, K, N), as it lies in memory."""
    expert, start, rows, inside, block = _tile(tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP, BLOCK_M)
    # Grids are sized for the worst split, since only the GPU knows the split.
    if expert >= E:
        return
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    # fp32, rounded once, where it is stored.
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Rows beyond the expert's last belong to the next expert or to nobody: their results are computed and not stored.
    if DESCRIBED:
        for k in range(0, K, BLOCK_K):
            # The descriptor loads a tile by one thread, into shared memory, and fills what lies beyond the tensor
            # with 0.
            rows_of_a = a.load([start, k])
            if BY_COLUMNS:
                weight = w.load([expert, k, block * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            else:
                weight = w.load([expert, block * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
            # The compiler pipelines this loop by num_stages: the next tiles are on their way while the tensor cores
            # multiply.
            acc = tl.dot(rows_of_a, weight, acc, input_precision=PRECISION)
    else:
        ks = tl.arange(0, BLOCK_K)
        # Rows that are not this expert's read its first row instead: loads then need no mask.
        a_ptrs = a + tl.where(inside, rows, start).to(tl.int64)[:, None] * K + ks[None, :]
        w_ptrs = w + expert.to(tl.int64) * stride_we + cols.to(tl.int64)[None, :] * stride_wn + ks[:, None] * stride_wk
        for k in range(0, K, BLOCK_K):
            # A mask along K costs a comparison a load: only where the last step is not full.
            if EVEN_K:
                rows_of_a = tl.load(a_ptrs)
                weight = tl.load(w_ptrs, mask=mask[None, :], other=0.0)
            else:
                rows_of_a = tl.load(a_ptrs, mask=(ks < K - k)[None, :], other=0.0)
                weight = tl.load(w_ptrs, mask=(ks < K - k)[:, None] & mask[None, :], other=0.0)
            acc = tl.dot(rows_of_a, weight, acc, input_precision=PRECISION)
            a_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * stride_wk
    if bias_ptr is not None:
        # Into the fp32 sum: the bias is not rounded by itself.
        acc += tl.load(bias_ptr + expert * N + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    y_ptr += rows.to(tl.int64)[:, None] * N + cols[None, :]
    # The mask is of the expert's own rows: a tile overlaps the next expert's first rows, which another program
    # writes.
    tl.store(y_ptr, acc.to(y_ptr.dtype.element_ty), mask=inside[:, None] & mask[None, :])


@jit
def _weight_bwd_kernel(
    dw_ptr, a, b, offsets_ptr, M, N, BLOCKS_M, BLOCKS_N, stride_we, stride_wm,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dw[expert] = Σ over its rows of aᵀ b."""
    pid = tl.program_id(0)
    expert = pid // (BLOCKS_M * BLOCKS_N)
    pid = pid % (BLOCKS_M * BLOCKS_N)
    # As in `_tile`: neighbours share blocks of a and b.
    first = pid // (GROUP * BLOCKS_N) * GROUP
    size = tl.minimum(BLOCKS_M - first, GROUP)
    within = pid % (GROUP * BLOCKS_N)
    m = (first + within % size) * BLOCK_M
    n = within // size * BLOCK_N
    ms = m + tl.arange(0, BLOCK_M)
    ns = n + tl.arange(0, BLOCK_N)
    # The expert's range comes from the device: the host knows neither its begin nor its end.
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    # One program sums all rows of the expert, in their order. An expert without rows writes zeros.
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if DESCRIBED:
        # Whole steps need no mask; only the last one is cleared.
        full = end - (end - start) % BLOCK_R
        for r in range(start, full, BLOCK_R):
            acc = tl.dot(a.load([r, m]).T, b.load([r, n]), acc, input_precision=PRECISION)
        if full < end:
            # Rows beyond the last may hold anything, and 0 · NaN is NaN: both operands are cleared.
            inside = (full + tl.arange(0, BLOCK_R) < end)[:, None]
            rows_of_a = tl.where(inside, a.load([full, m]), 0.0)
            rows_of_b = tl.where(inside, b.load([full, n]), 0.0)
            acc = tl.dot(rows_of_a.T, rows_of_b, acc, input_precision=PRECISION)
    else:
        for r in range(start, end, BLOCK_R):
            rows = r + tl.arange(0, BLOCK_R)
            inside = (rows < end)[:, None]
            # int64: rows · width exceeds 2**31 at 512k slots of width 4096.
            at = rows.to(tl.int64)[:, None]
            rows_of_a = tl.load(a + at * M + ms[None, :], mask=inside & (ms < M)[None, :], other=0.0)
            rows_of_b = tl.load(b + at * N + ns[None, :], mask=inside & (ns < N)[None, :], other=0.0)
            acc = tl.dot(tl.trans(rows_of_a), rows_of_b, acc, input_precision=PRECISION)
    dw_ptr += expert.to(tl.int64) * stride_we + ms.to(tl.int64)[:, None] * stride_wm + ns[None, :]
    tl.store(dw_ptr, acc.to(dw_ptr.dtype.element_ty), mask=(ms < M)[:, None] & (ns < N)[None, :])
