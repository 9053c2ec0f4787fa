"""Embedding-bag kernels: row sums, the row and bag of each value, the factors' gradient."""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.ids import key_of_id


@jit
def _extent(offsets_ptr, bags, B, M, L):
    """Return each bag's first value and length."""
    if offsets_ptr is None:
        first = bags * L
        length = tl.where(bags < B, L, 0).to(tl.int32)
    else:
        first = tl.maximum(tl.load(offsets_ptr + bags, mask=bags < B, other=0), 0)
        last = tl.load(offsets_ptr + bags + 1, mask=bags < B, other=0)
        length = tl.maximum(tl.minimum(last, M) - first, 0).to(tl.int32)
    return first, length


@jit
def _table(fields_ptr, block, bags, B, FIELDS, V, BLOCK_B: tl.constexpr):
    """Return the first row and the row count of the table for each bag's field."""
    if fields_ptr is None:
        low = tl.zeros_like(bags)
        size = low + V
    else:
        # int32, with the program's first bag reduced separately: an int64 remainder would dominate a bag's cost.
        field = (block % FIELDS * (BLOCK_B % FIELDS) + tl.arange(0, BLOCK_B)) % FIELDS
        low = tl.maximum(tl.load(fields_ptr + field, mask=bags < B, other=0), 0)
        size = tl.minimum(tl.load(fields_ptr + field + 1, mask=bags < B, other=0), V) - low
    return low, size


@jit
def _rows_at(values_ptr, at, inside, low, size, padding_idx):
    """Return the stacked tables' rows for the values: −1 for values that add nothing, −2 for ids out of range."""
    ids = tl.load(values_ptr + at, mask=inside, other=0).to(tl.int64)
    # padding_idx = -1 means none; as an id, -1 is out of range.
    counts = inside & ((ids != padding_idx) | (padding_idx < 0))
    known = (ids >= 0) & (ids < size)
    return tl.where(counts, tl.where(known, low + ids, -2), -1)


@jit
def _codes(w_ptr, rows, start, H, stride_w, BLOCK_N: tl.constexpr):
    """Load columns of unaligned byte rows (BLOCK_B, BLOCK_N) as 4-byte words.

    A thread can load a single byte from such a row, or an aligned word. Each word of the row is assembled from two
    aligned words. Only words that contain a byte of the row are loaded, so loads reach less than four bytes beyond the
    row.
    """
    begin = w_ptr.to(tl.int64) + rows * stride_w + start
    past = (begin & 3).to(tl.int32)
    words = (w_ptr + (rows * stride_w + start - past)).to(tl.pointer_type(tl.int32), bitcast=True)
    lane = tl.arange(0, BLOCK_N // 4)[None, :]
    width = tl.minimum(H - start, BLOCK_N)
    many = tl.where(rows >= 0, (past + width + 3) // 4, 0)[:, None]
    low = tl.load(words[:, None] + lane, mask=lane < many, other=0)
    high = tl.load(words[:, None] + (lane + 1), mask=lane + 1 < many, other=0)
    bits = (past * 8)[:, None]
    # Two shifts: a shift by 32 is undefined.
    word = (low.to(tl.uint32, bitcast=True) >> bits) | ((high.to(tl.uint32, bitcast=True) << 1) << (31 - bits))
    code: tl.constexpr = w_ptr.dtype.element_ty
    even = tl.join(word.to(code), (word >> 16).to(code))
    odd = tl.join((word >> 8).to(code), (word >> 24).to(code))
    return tl.reshape(tl.join(even, odd), (rows.shape[0], BLOCK_N))


@jit
def _add_rows(
    total, count, wrong, rows, at, start, cols, w_ptr, factors_ptr, scale_offset_ptr, H, stride_w, WORDS: tl.constexpr,
):  # fmt: skip
    """Add a row, as returned by `_rows_at`, to each bag's total, count and error flag."""
    known = rows >= 0
    # int64: V · H exceeds 2**31 for 200 M rows with 16 columns.
    if WORDS:
        w = _codes(w_ptr, rows, start, H, stride_w, cols.shape[0]).to(tl.float32)
    else:
        mask = known[:, None] & (cols < H)[None, :]
        w = tl.load(w_ptr + rows[:, None] * stride_w + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if scale_offset_ptr is not None:
        # A single load for both halves: bags with narrow rows are bound by the number of accesses, not by bytes.
        pair = tl.load(scale_offset_ptr + rows, mask=known, other=0)
        scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        w = w * scale[:, None] + offset[:, None]
    if factors_ptr is not None:
        w *= tl.load(factors_ptr + at, mask=known, other=0.0).to(tl.float32)[:, None]
    return total + w, count + (rows != -1).to(tl.int32), wrong | (rows == -2).to(tl.int32)


# One program sums BLOCK_B bags × BLOCK_N columns in the order of the values, UNROLL rows per bag at a time: table rows
# are scattered, and many loads in flight hide their latency.
# values, offsets (B + 1,) or None for bags with L values, fields (FIELDS + 1,) or None, factors or None. w (V, H):
# table with stride_w. y (B, H): dense.
# scale_offset (V,) int32 or None: a row's fp16 scale and offset, for quantized tables. M: number of values.
# MEAN: divide by the count. SINGLE: bags with a single id. PAIRS: even bag length, ids loaded two at a time. WORDS:
# unaligned byte rows.
@jit
@do_not_specialize("B", "M", "padding_idx")
def _embedding_bag_fwd_kernel(
    values_ptr, w_ptr, y_ptr, offsets_ptr, fields_ptr, factors_ptr, scale_offset_ptr,
    B, M, V, FIELDS, H, stride_w, L, padding_idx,
    MEAN: tl.constexpr, SINGLE: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(H, BLOCK_N)
    block = tl.program_id(0) // blocks
    bags = block.to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    start = tl.program_id(0) % blocks * BLOCK_N
    cols = start + tl.arange(0, BLOCK_N)
    low, size = _table(fields_ptr, block, bags, B, FIELDS, V, BLOCK_B)
    total = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    count = tl.zeros((BLOCK_B,), tl.int32)
    wrong = tl.zeros((BLOCK_B,), tl.int32)
    if SINGLE:
        rows = _rows_at(values_ptr, bags, bags < B, low, size, padding_idx)
        total, count, wrong = _add_rows(
            total, count, wrong, rows, bags, start, cols, w_ptr, factors_ptr, scale_offset_ptr, H, stride_w, WORDS
        )
    else:
        first, length = _extent(offsets_ptr, bags, B, M, L)
        longest = L
        if offsets_ptr is not None:
            longest = tl.max(length, 0)
        for i in range(0, longest, UNROLL):
            # Strictly sequential, so that the sum's order does not depend on the tile.
            if PAIRS:
                pair = tl.arange(0, 2)
                for u in tl.static_range(0, UNROLL, 2):
                    # Written as an even multiple: the compiler then knows that the address of two 8-byte ids is 16-byte
                    # aligned.
                    begin = bags * (L // 2) * 2 + (i + u)
                    at = begin[:, None] + pair[None, :]
                    inside = tl.broadcast_to((i + u < length)[:, None], (BLOCK_B, 2))
                    both = _rows_at(values_ptr, at, inside, low[:, None], size[:, None], padding_idx)
                    one, two = tl.split(both)
                    total, count, wrong = _add_rows(
                        total, count, wrong, one, begin, start, cols, w_ptr, factors_ptr, scale_offset_ptr, H, stride_w,
                        WORDS,
                    )  # fmt: skip
                    total, count, wrong = _add_rows(
                        total, count, wrong, two, begin + 1, start, cols, w_ptr, factors_ptr, scale_offset_ptr, H,
                        stride_w, WORDS,
                    )  # fmt: skip
            else:
                for u in tl.static_range(UNROLL):
                    at = first + i + u
                    rows = _rows_at(values_ptr, at, i + u < length, low, size, padding_idx)
                    total, count, wrong = _add_rows(
                        total, count, wrong, rows, at, start, cols, w_ptr, factors_ptr, scale_offset_ptr, H, stride_w,
                        WORDS,
                    )  # fmt: skip
    if MEAN:
        total = total / tl.maximum(count, 1).to(tl.float32)[:, None]
    # An id out of range makes its bag NaN: raising would synchronize.
    total = tl.where((wrong != 0)[:, None], float("nan"), total)
    mask = (bags < B)[:, None] & (cols < H)[None, :]
    tl.store(y_ptr + bags[:, None] * H + cols[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


# One program processes BLOCK_B bags, BLOCK_L values at a time. Inputs as in `_embedding_bag_fwd_kernel`; outputs may be
# None.
# rows (M,) int32: row in the stacked tables, V for values without a gradient (as in `key_of_id`). bag (M,) int32. scale
# (B,) fp32: 1 / count, for means.
@jit
@do_not_specialize("B", "M", "padding_idx")
def _embedding_bag_tokens_kernel(
    values_ptr, offsets_ptr, fields_ptr, rows_ptr, bag_ptr, scale_ptr, B, M, V, FIELDS, L, padding_idx,
    BLOCK_B: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Write each value's row and bag, and each bag's mean factor."""
    bags = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    first, length = _extent(offsets_ptr, bags, B, M, L)
    low, size = _table(fields_ptr, tl.program_id(0), bags, B, FIELDS, V, BLOCK_B)
    count = tl.zeros((BLOCK_B,), tl.int32)
    for i in range(0, tl.max(length, 0), BLOCK_L):
        place = i + tl.arange(0, BLOCK_L)[None, :]
        inside = place < length[:, None]
        at = first[:, None] + place
        ids = tl.load(values_ptr + at, mask=inside, other=0).to(tl.int64)
        counts = inside & ((ids != padding_idx) | (padding_idx < 0))
        count += tl.sum(counts.to(tl.int32), 1)
        if rows_ptr is not None:
            known = counts & (ids >= 0) & (ids < size[:, None])
            tl.store(rows_ptr + at, tl.where(known, low[:, None] + ids, V).to(tl.int32), mask=inside)
        if bag_ptr is not None:
            tl.store(bag_ptr + at, (bags[:, None] + tl.zeros_like(at)).to(tl.int32), mask=inside)
    if scale_ptr is not None:
        tl.store(scale_ptr + bags, 1.0 / tl.maximum(count, 1).to(tl.float32), mask=bags < B)


# One program computes BLOCK_M values' factor gradients df (M,), each a dot product of a table row and the bag's
# gradient. bag (M,), or None for bags with L values.
@jit
@do_not_specialize("M", "padding_idx")
def _embedding_bag_factors_kernel(
    ids_ptr, dy_ptr, w_ptr, bag_ptr, df_ptr, M, V, H, stride_dy, stride_w, L, padding_idx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """df = w[row] · dy[bag] per value."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = key_of_id(ids_ptr, at, M, V, padding_idx).to(tl.int64)
    counts = (at < M) & (rows < V)
    if bag_ptr is None:
        bags = at // L
    else:
        bags = tl.load(bag_ptr + at, mask=counts, other=0).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = counts[:, None] & (cols < H)[None, :]
        w = tl.load(w_ptr + rows[:, None] * stride_w + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + bags[:, None] * stride_dy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total += w * dy
    tl.store(df_ptr + at, tl.sum(total, 1).to(df_ptr.dtype.element_ty), mask=at < M)
