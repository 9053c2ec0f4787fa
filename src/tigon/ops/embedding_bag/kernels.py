"""Kernels of bags: the sum of rows, the row and bag of each value, the gradient of its factor."""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.ids import key_of_id


@jit
def _extent(offsets_ptr, bags, B, M, L):
    """Where each bag's values begin, and how many there are."""
    if offsets_ptr is None:
        first = bags * L
        length = tl.where(bags < B, L, 0).to(tl.int32)
    else:
        # Offsets that do not ascend, or leave the values, read nothing out of bounds.
        first = tl.maximum(tl.load(offsets_ptr + bags, mask=bags < B, other=0), 0)
        last = tl.load(offsets_ptr + bags + 1, mask=bags < B, other=0)
        length = tl.maximum(tl.minimum(last, M) - first, 0).to(tl.int32)
    return first, length


@jit
def _table(fields_ptr, block, bags, B, FIELDS, V, BLOCK_B: tl.constexpr):
    """The first row of the table of each bag's field, and how many rows it has."""
    if fields_ptr is None:
        low = tl.zeros_like(bags)
        size = low + V
    else:
        # In int32, and the program's first bag apart: a remainder of int64 takes longer than all else that a bag costs.
        field = (block % FIELDS * (BLOCK_B % FIELDS) + tl.arange(0, BLOCK_B)) % FIELDS
        low = tl.maximum(tl.load(fields_ptr + field, mask=bags < B, other=0), 0)
        size = tl.minimum(tl.load(fields_ptr + field + 1, mask=bags < B, other=0), V) - low
    return low, size


@jit
def _rows_at(values_ptr, at, inside, low, size, padding_idx):
    """The row of the stacked tables of the values there: −1 for what adds nothing, −2 for an id out of range."""
    ids = tl.load(values_ptr + at, mask=inside, other=0).to(tl.int64)
    # padding_idx is -1 where there is none, which as an id is one out of range.
    counts = inside & ((ids != padding_idx) | (padding_idx < 0))
    known = (ids >= 0) & (ids < size)
    return tl.where(counts, tl.where(known, low + ids, -2), -1)


@jit
def _codes(w_ptr, rows, start, H, stride_w, BLOCK_N: tl.constexpr):
    """Columns of rows of bytes (BLOCK_B, BLOCK_N) that begin anywhere, by words of four bytes.

    A thread can load one byte of such a row, or a word that begins at a boundary. A word of the row is made of two of
    those. Words are loaded that have a byte of the row: what else is in them lies within four bytes of it.
    """
    begin = w_ptr.to(tl.int64) + rows * stride_w + start
    past = (begin & 3).to(tl.int32)
    words = (w_ptr + (rows * stride_w + start - past)).to(tl.pointer_type(tl.int32), bitcast=True)
    lane = tl.arange(0, BLOCK_N // 4)[None, :]
    # In words: how many have a byte of these columns.
    width = tl.minimum(H - start, BLOCK_N)
    many = tl.where(rows >= 0, (past + width + 3) // 4, 0)[:, None]
    low = tl.load(words[:, None] + lane, mask=lane < many, other=0)
    high = tl.load(words[:, None] + (lane + 1), mask=lane + 1 < many, other=0)
    bits = (past * 8)[:, None]
    # By two shifts: one by 32 is undefined.
    word = (low.to(tl.uint32, bitcast=True) >> bits) | ((high.to(tl.uint32, bitcast=True) << 1) << (31 - bits))
    code: tl.constexpr = w_ptr.dtype.element_ty
    even = tl.join(word.to(code), (word >> 16).to(code))
    odd = tl.join((word >> 8).to(code), (word >> 24).to(code))
    return tl.reshape(tl.join(even, odd), (rows.shape[0], BLOCK_N))


@jit
def _add_rows(
    total, count, wrong, rows, at, start, cols, w_ptr, factors_ptr, scale_offset_ptr, H, stride_w, WORDS: tl.constexpr,
):  # fmt: skip
    """Each bag's total, count and error with one row more, as `_rows_at` has it."""
    known = rows >= 0
    # int64: V · H exceeds 2**31 for 200 M rows of 16 numbers.
    if WORDS:
        w = _codes(w_ptr, rows, start, H, stride_w, cols.shape[0]).to(tl.float32)
    else:
        mask = known[:, None] & (cols < H)[None, :]
        w = tl.load(w_ptr + rows[:, None] * stride_w + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if scale_offset_ptr is not None:
        # Both halves by one load: what limits bags of narrow rows is how many places are asked for, not their bytes.
        pair = tl.load(scale_offset_ptr + rows, mask=known, other=0)
        scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        w = w * scale[:, None] + offset[:, None]
    if factors_ptr is not None:
        w *= tl.load(factors_ptr + at, mask=known, other=0.0).to(tl.float32)[:, None]
    return total + w, count + (rows != -1).to(tl.int32), wrong | (rows == -2).to(tl.int32)


@jit
@do_not_specialize("B", "M", "padding_idx")
def _embedding_bag_fwd_kernel(
    values_ptr, w_ptr, y_ptr, offsets_ptr, fields_ptr, factors_ptr, scale_offset_ptr,
    B, M, V, FIELDS, H, stride_w, L, padding_idx,
    MEAN: tl.constexpr, SINGLE: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    # Rows of the table lie anywhere: many loads in flight hide their latency. A flat grid over bags and columns, and
    # UNROLL rows of each bag at a time. SINGLE: bags of one id. PAIRS: bags of an even number, whose ids are loaded two
    # at a time. WORDS: rows of bytes that begin anywhere.
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
        # As long as the longest of these bags; values of the others are masked meanwhile.
        longest = L
        if offsets_ptr is not None:
            longest = tl.max(length, 0)
        for i in range(0, longest, UNROLL):
            # One value after the other, whatever the tile: the order of the sum is that of the values.
            if PAIRS:
                pair = tl.arange(0, 2)
                for u in tl.static_range(0, UNROLL, 2):
                    # `first` as twice a number: the compiler sees that 16 divides the address of two ids of 8 bytes.
                    begin = bags * (L // 2) * 2 + (i + u)
                    at = begin[:, None] + pair[None, :]
                    # Of an even number of ids both are there or neither is.
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
    # An id out of range makes its bag NaN: raising would make the host wait for the device.
    total = tl.where((wrong != 0)[:, None], float("nan"), total)
    mask = (bags < B)[:, None] & (cols < H)[None, :]
    tl.store(y_ptr + bags[:, None] * H + cols[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


@jit
@do_not_specialize("B", "M", "padding_idx")
def _embedding_bag_tokens_kernel(
    values_ptr, offsets_ptr, fields_ptr, rows_ptr, bag_ptr, scale_ptr, B, M, V, FIELDS, L, padding_idx,
    BLOCK_B: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Of each value the row of the stacked tables and the bag; of each bag what a mean multiplies by."""
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
            # V is the key of what has no gradient; `key_of_id` takes it for that.
            known = counts & (ids >= 0) & (ids < size[:, None])
            tl.store(rows_ptr + at, tl.where(known, low[:, None] + ids, V).to(tl.int32), mask=inside)
        if bag_ptr is not None:
            tl.store(bag_ptr + at, (bags[:, None] + tl.zeros_like(at)).to(tl.int32), mask=inside)
    if scale_ptr is not None:
        tl.store(scale_ptr + bags, 1.0 / tl.maximum(count, 1).to(tl.float32), mask=bags < B)


@jit
@do_not_specialize("M", "padding_idx")
def _embedding_bag_factors_kernel(
    ids_ptr, dy_ptr, w_ptr, bag_ptr, df_ptr, M, V, H, stride_dy, stride_w, L, padding_idx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of each value's factor: the product of its row and of its bag's gradient."""
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
