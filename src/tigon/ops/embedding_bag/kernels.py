"""Kernels of bags: the sum of rows, the row and bag of each value, the gradient of its factor."""

from __future__ import annotations

from tigon.runtime import do_not_specialize, jit, tl
from tigon.tiles.ids import key_of_id


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
def _table(fields_ptr, bags, B, FIELDS, V):
    """The first row of the table of each bag's field, and how many rows it has."""
    if fields_ptr is None:
        low = tl.zeros_like(bags)
        size = low + V
    else:
        field = bags % FIELDS
        low = tl.maximum(tl.load(fields_ptr + field, mask=bags < B, other=0), 0)
        size = tl.minimum(tl.load(fields_ptr + field + 1, mask=bags < B, other=0), V) - low
    return low, size


@jit
@do_not_specialize("B", "M", "padding_idx")
def _embedding_bag_fwd_kernel(
    values_ptr, w_ptr, y_ptr, offsets_ptr, fields_ptr, factors_ptr, scale_offset_ptr,
    B, M, V, FIELDS, H, stride_w, L, padding_idx,
    MEAN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    # Rows of the table lie anywhere: many loads in flight hide their latency. A flat grid over bags and columns, and
    # UNROLL rows of each bag at a time.
    blocks = tl.cdiv(H, BLOCK_N)
    bags = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    first, length = _extent(offsets_ptr, bags, B, M, L)
    low, size = _table(fields_ptr, bags, B, FIELDS, V)
    total = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    count = tl.zeros((BLOCK_B,), tl.int32)
    wrong = tl.zeros((BLOCK_B,), tl.int32)
    # As long as the longest of these bags; values of the others are masked meanwhile.
    for i in range(0, tl.max(length, 0), UNROLL):
        for u in tl.static_range(UNROLL):
            inside = i + u < length
            at = first + i + u
            ids = tl.load(values_ptr + at, mask=inside, other=0).to(tl.int64)
            # padding_idx is -1 where there is none, which as an id is one out of range.
            counts = inside & ((ids != padding_idx) | (padding_idx < 0))
            known = counts & (ids >= 0) & (ids < size)
            count += counts.to(tl.int32)
            wrong |= (counts & ~known).to(tl.int32)
            # int64: V · H exceeds 2**31 for 200 M rows of 16 numbers.
            rows = low + ids
            mask = known[:, None] & (cols < H)[None, :]
            w = tl.load(w_ptr + rows[:, None] * stride_w + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            if scale_offset_ptr is not None:
                scale = tl.load(scale_offset_ptr + rows * 2, mask=known, other=0.0).to(tl.float32)
                offset = tl.load(scale_offset_ptr + rows * 2 + 1, mask=known, other=0.0).to(tl.float32)
                w = w * scale[:, None] + offset[:, None]
            if factors_ptr is not None:
                w *= tl.load(factors_ptr + at, mask=known, other=0.0).to(tl.float32)[:, None]
            # One value after the other, whatever the tile: the order of the sum is that of the values.
            total += w
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
    low, size = _table(fields_ptr, bags, B, FIELDS, V)
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
