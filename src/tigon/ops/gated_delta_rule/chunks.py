"""Chunks of documents: where each begins, and the two matrices by which the tokens of a chunk see one another.

The decays of a chunk are sums a_i = Σ_{j ≤ i} g_j, and E_ij = exp(a_i − a_j) for j ≤ i, else 0. With the state S at the
chunk's start, the tokens' corrected values x and the outputs are

    x = y − B x,   y_i = v_i − exp(a_i) Sᵀ k_i,   B_ij = E_ij β_j (k_i · k_j) for j < i
    o_i = scale · exp(a_i) Sᵀ q_i + Σ_j P_ij x_j,   P_ij = scale · E_ij β_j (q_i · k_j)
    S ← exp(a_C) S + Σ_j exp(a_C − a_j) β_j k_j x_jᵀ

and W = (1 + B)⁻¹ − 1 gives x = y + W y. β stands beside x and not beside v, so that no gradient divides by β.

Normalised keys and queries are never stored: their norms are factors of rows, multiplied into fp32 products.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl

# Rows and columns of the blocks that are inverted row by row.
BLOCK = tl.constexpr(16)
EPS = tl.constexpr(1e-6)


@jit
def load_tile(ptr, row, live, first, width, BLOCK_N: tl.constexpr):
    """Load columns first … first + BLOCK_N of rows that begin at `row`; zeros in rows not live, and from width on."""
    column = first + tl.arange(0, BLOCK_N)
    return tl.load(ptr + row[:, None] + column[None, :], mask=live[:, None] & (column < width)[None, :], other=0.0)


@jit
def load_square(ptr, slot, H: tl.constexpr, h, CHUNK: tl.constexpr):
    """Load a chunk's matrix (CHUNK, CHUNK) from (slots, H, CHUNK, CHUNK)."""
    i = tl.arange(0, CHUNK)
    ptr += (slot.to(tl.int64) * H + h) * (CHUNK * CHUNK)
    return tl.load(ptr + i[:, None] * CHUNK + i[None, :])


@jit
def find_chunk(table_ptr, slot, D, T, CHUNK: tl.constexpr):
    """Return the first token of a chunk, and the one behind its last; equal for a slot without a chunk."""
    if table_ptr is None:
        chunks = tl.cdiv(T, CHUNK)
        start = slot // chunks * T + slot % chunks * CHUNK
        stop = tl.minimum(start + CHUNK, (slot // chunks + 1) * T)
    else:
        start = tl.load(table_ptr + (D + slot) * 4)
        stop = tl.load(table_ptr + (D + slot) * 4 + 1)
    return start, stop


@jit
def find_document(table_ptr, d, T, CHUNK: tl.constexpr):
    """Return a document's range of tokens, the slot of its first chunk, and whether offsets are wrong."""
    if table_ptr is None:
        start = d * T
        stop = start + T
        slot = d * tl.cdiv(T, CHUNK)
        wrong = 0
    else:
        start = tl.load(table_ptr + d * 4)
        stop = tl.load(table_ptr + d * 4 + 1)
        slot = start // CHUNK + d
        wrong = tl.load(table_ptr + d * 4 + 2)
    return start, stop, slot, wrong


# One program writes the entries of a document and of its chunks.
# offsets (D + 1,) int. table (D + slots, 4) int32: D documents' start, stop and whether offsets are wrong; start and
# stop of each slot's chunk. A document's first slot is start // CHUNK + d: documents before it with n tokens have at
# most start // CHUNK + d chunks, so slots need no sum over documents, and some stay empty.
# Wrong offsets make a table of one document, marked as wrong: nothing is read outside of the tensors.
@jit
@do_not_specialize("D", "T")
def _chunks_kernel(offsets_ptr, table_ptr, D, T, CHUNK: tl.constexpr, ENTRIES: tl.constexpr):
    d = tl.program_id(0)
    wrong = (tl.load(offsets_ptr) != 0).to(tl.int32) + (tl.load(offsets_ptr + D) != T).to(tl.int32)
    entry = tl.arange(0, ENTRIES)
    for first in range(0, D, ENTRIES):
        inside = first + entry < D
        begin = tl.load(offsets_ptr + first + entry, mask=inside, other=0)
        end = tl.load(offsets_ptr + first + entry + 1, mask=inside, other=0)
        wrong += tl.sum(((end < begin) | (begin < 0) | (end > T)).to(tl.int32), 0)
    right = wrong == 0
    start = tl.where(right, tl.load(offsets_ptr + d).to(tl.int32), tl.where(d == 0, 0, T))
    stop = tl.where(right, tl.load(offsets_ptr + d + 1).to(tl.int32), T)
    tl.store(table_ptr + d * 4, start)
    tl.store(table_ptr + d * 4 + 1, stop)
    tl.store(table_ptr + d * 4 + 2, (wrong > 0).to(tl.int32))
    slot = start // CHUNK + d
    end_slot = stop // CHUNK + d + 1
    table_ptr += (D + slot) * 4
    for first in range(0, end_slot - slot, ENTRIES):
        number = first + entry
        begin = start + number * CHUNK
        stored = number < end_slot - slot
        live = begin < stop
        tl.store(table_ptr + number * 4, tl.where(live, begin, 0), mask=stored)
        tl.store(table_ptr + number * 4 + 1, tl.where(live, tl.minimum(begin + CHUNK, stop), 0), mask=stored)


@jit
def _invert(b, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + b)⁻¹ − 1 for a strictly lower b (CHUNK, CHUNK), CHUNK 16, 32 or 64.

    Blocks on the diagonal by substitution, all at once; then, with their inverses D and what is left of b, n = D b, and
    (1 + n)⁻¹ = (1 − n)(1 + n²), since n⁴ = 0. Powers of b itself would reach 10¹⁸ where keys are alike, and cancel.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    r = tl.arange(0, BLOCK)[None, :, None]
    at = tl.arange(0, BLOCKS)
    own = at[:, None, None, None] == at[None, None, :, None]
    d = -tl.sum(tl.where(own, tl.reshape(b, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0), 2)
    for n in range(2, BLOCK):
        row = tl.sum(tl.where(r == n, d, 0.0), 1)
        row += tl.sum(row[:, :, None] * d, 1)
        d = tl.where(r == n, row[:, None, :], d)
    d = tl.reshape(tl.where(own, d[:, :, None, :], 0.0), (CHUNK, CHUNK))
    if CHUNK > BLOCK:
        i = tl.arange(0, CHUNK)
        b = tl.where((i // BLOCK)[:, None] > (i // BLOCK)[None, :], b, 0.0)
        n = tl.dot(d, b, b, input_precision=PRECISION)
        if CHUNK > 2 * BLOCK:
            square = tl.dot(n, n, input_precision=PRECISION)
            d = tl.dot(square, d, d + square, input_precision=PRECISION)
        d = d - n - tl.dot(n, d, input_precision=PRECISION)
    return d


# One program makes the matrices and the factors of a chunk for head h, whose key head is h // N.
# q, k: strides (t, g). g, beta: strides (t, h). solve, attend (slots, H, CHUNK, CHUNK) in q's dtype: W and P. Without
# solve nothing corrects the values: x = v, here and in the other kernels.
# factors (4 or 6, H, tokens) fp32, for each token: of its key that reads the state, exp(a); of its key that is written
# to the state, exp(a_C − a) β; of its query, scale · exp(a), these with 1/norm; a; with NORMALIZE 1/norm of key and
# query.
@jit
@do_not_specialize("D", "T", "tokens")
def _matrices_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, table_ptr, solve_ptr, attend_ptr, factors_ptr, D, T, tokens,
    stride_qt, stride_qg, stride_kt, stride_kg, stride_gt, stride_gh, stride_bt, stride_bh, scale,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NORMALIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Make W, P and the rows' factors."""
    slot, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, stop = find_chunk(table_ptr, slot, D, T, CHUNK)
    if start >= stop:
        return
    i = tl.arange(0, CHUNK)
    live = start + i < stop
    token = (start + i).to(tl.int64)
    g = tl.load(g_ptr + token * stride_gt + h * stride_gh, mask=live, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + token * stride_bt + h * stride_bh, mask=live, other=0.0).to(tl.float32)
    k = load_tile(k_ptr, token * stride_kt + h // N * stride_kg, live, 0, K, BLOCK_K)
    seen = i[:, None] >= i[None, :]
    a = tl.sum(tl.where(seen, g[None, :], 0.0), 1)
    last = tl.sum(g, 0)
    # Masked before the exponential: above the diagonal sums are positive and could overflow.
    decay = tl.exp(tl.where(seen, a[:, None] - a[None, :], float("-inf"))) * beta[None, :]
    reader, writer, query = tl.exp(a), tl.exp(last - a) * beta, tl.exp(a) * scale
    factors_ptr += tl.cast(h, tl.int64) * tokens + token
    stride = tl.cast(tokens, tl.int64) * H
    q = load_tile(q_ptr, token * stride_qt + h // N * stride_qg, live, 0, K, BLOCK_K)
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (decay * scale)
    if solve_ptr is not None:
        b = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay
    if NORMALIZE:
        q_norm = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + EPS)
        k_norm = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + EPS)
        tl.store(factors_ptr + 4 * stride, k_norm, mask=live)
        tl.store(factors_ptr + 5 * stride, q_norm, mask=live)
        reader, writer, query = reader * k_norm, writer * k_norm, query * q_norm
        if solve_ptr is not None:
            b *= k_norm[:, None] * k_norm[None, :]
        p *= q_norm[:, None] * k_norm[None, :]
    tl.store(factors_ptr, reader, mask=live)
    tl.store(factors_ptr + stride, writer, mask=live)
    tl.store(factors_ptr + 2 * stride, query, mask=live)
    tl.store(factors_ptr + 3 * stride, a, mask=live)
    at = (slot.to(tl.int64) * H + h) * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
    tl.store(attend_ptr + at, p.to(attend_ptr.dtype.element_ty))
    if solve_ptr is not None:
        w = _invert(tl.where(i[:, None] > i[None, :], b, 0.0), CHUNK, INVERSE)
        tl.store(solve_ptr + at, w.to(solve_ptr.dtype.element_ty))
