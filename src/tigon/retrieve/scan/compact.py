"""Filter evaluation: a list of passing rows for a single filter, bit words per row for several filters."""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl


@jit
def holds(row_ptr, bitmaps_ptr, attributes_ptr, stride, i, inside):
    """Evaluate a literal, a row in the table (filters.py), for item rows i."""
    word, mask = tl.load(row_ptr), tl.load(row_ptr + 1)
    low, span, flags = tl.load(row_ptr + 2), tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    bits = tl.load(attributes_ptr + word * stride + i, mask=inside, other=0) & mask
    # With unsigned numbers a single comparison covers both bounds: values below the minimum wrap around.
    within = (bits - low).to(tl.uint64, bitcast=True) <= span.to(tl.uint64, bitcast=True)
    if (flags & 8) != 0:
        code = bits >> tl.load(row_ptr + 5)
        known = inside & (code < span)
        found = tl.load(bitmaps_ptr + tl.load(row_ptr + 6) + (code >> 5), mask=known, other=0)
        within = ((found >> (code & 31).to(tl.int32)) & 1) != 0
    return within != ((flags & 1) != 0)


@jit
def is_live(live_ptr, i, inside):
    """Bit i % 32 in number i // 32."""
    return ((tl.load(live_ptr + (i >> 5), mask=inside, other=0) >> (i & 31)) & 1) != 0


@jit
def list_strip(
    strip, attributes_ptr, table_ptr, bitmaps_ptr, live_ptr, list_ptr, count_ptr, N, stride, literals,
    STRIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a strip's passing rows, in order, to the strip's part of the list; return their count."""
    n = 0
    for start in range(0, STRIP, BLOCK):
        i = strip * STRIP + start + tl.arange(0, BLOCK)
        inside = i < N
        keep = inside
        if live_ptr is not None:
            keep = keep & is_live(live_ptr, i, inside)
        some = i < 0
        for literal in range(literals):
            row_ptr = table_ptr + literal * 8
            some = some | holds(row_ptr, bitmaps_ptr, attributes_ptr, stride, i, inside)
            more = (tl.load(row_ptr + 4) & 2) == 0
            keep = keep & (some | more)
            some = some & more
        kept = keep.to(tl.int32)
        at = n + tl.cumsum(kept, 0) - kept
        tl.store(list_ptr + strip * STRIP + at, i, mask=keep)
        n += tl.sum(kept, 0)
    tl.store(count_ptr + strip, n)
    return n


@jit
def live_words(bits_ptr, live_ptr, place, there, N):
    """Bit words for 32 rows each, without deleted rows, and 0 past the end."""
    left = N - place * 32
    word = tl.load(bits_ptr + place, mask=there & (left > 0), other=0)
    word &= tl.where(left >= 32, -1, (1 << tl.minimum(tl.maximum(left, 0), 31)) - 1)
    if live_ptr is not None:
        word &= tl.load(live_ptr + place, mask=there & (left > 0), other=0)
    return word


@jit
def ones(word):
    """Popcount: pairs, nibbles, bytes, then their sum in the highest byte."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@jit
def list_bits(strip, bits_ptr, live_ptr, list_ptr, count_ptr, N, STRIP: tl.constexpr):
    """Like `list_strip`, from bits: a prefix sum over the strip's words, and each row's position within its word."""
    place = strip * (STRIP // 32) + tl.arange(0, STRIP // 32)
    word = live_words(bits_ptr, live_ptr, place, place >= 0, N)
    count = ones(word)
    first = tl.cumsum(count, 0) - count
    bit = tl.arange(0, 32)
    lower = (1 << bit) - 1
    at = first[:, None] + ones(word[:, None] & lower[None, :])
    keep = ((word[:, None] >> bit[None, :]) & 1) != 0
    tl.store(list_ptr + strip * STRIP + at, place[:, None] * 32 + bit[None, :], mask=keep)
    n = tl.sum(count, 0)
    tl.store(count_ptr + strip, n)
    return n


@jit
@do_not_specialize("N")
def _list_bits_kernel(bits_ptr, live_ptr, list_ptr, count_ptr, N, STRIP: tl.constexpr):
    """A strip's list from bits, for several query blocks."""
    list_bits(tl.program_id(0), bits_ptr, live_ptr, list_ptr, count_ptr, N, STRIP)


@jit
@do_not_specialize("N", "stride", "literals")
def _list_kernel(
    attributes_ptr, table_ptr, bitmaps_ptr, live_ptr, list_ptr, count_ptr, N, stride, literals,
    STRIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A strip's list, for several query blocks; with a single block the scan makes the list itself."""
    list_strip(
        tl.program_id(0), attributes_ptr, table_ptr, bitmaps_ptr, live_ptr, list_ptr, count_ptr, N, stride, literals,
        STRIP, BLOCK,
    )  # fmt: skip


@jit
@do_not_specialize("N", "stride", "literals")
def _words_kernel(
    attributes_ptr, table_ptr, bitmaps_ptr, live_ptr, word_ptr, N, stride, literals, BLOCK: tl.constexpr
):  # fmt: skip
    """Bit f % 32 in a row's number f // 32: whether the row passes filter f. All rows' first numbers come first."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    there = inside
    if live_ptr is not None:
        there = there & is_live(live_ptr, i, inside)
    keep, some = there, i < 0
    word = tl.zeros([BLOCK], tl.int32)
    f = 0
    for literal in range(literals):
        row_ptr = table_ptr + literal * 8
        some = some | holds(row_ptr, bitmaps_ptr, attributes_ptr, stride, i, inside)
        flags = tl.load(row_ptr + 4)
        more = (flags & 2) == 0
        keep = keep & (some | more)
        some = some & more
        if (flags & 4) != 0:
            word |= keep.to(tl.int32) << (f & 31)
            keep = there
            f += 1
            # The next filter's bitmaps follow this filter's.
            bitmaps_ptr += tl.load(row_ptr + 7)
            if (f & 31) == 0:
                tl.store(word_ptr + N.to(tl.int64) * (f // 32 - 1) + i, word, mask=inside)
                word = tl.zeros([BLOCK], tl.int32)
    if (f & 31) != 0:
        tl.store(word_ptr + N.to(tl.int64) * (f // 32) + i, word, mask=inside)
