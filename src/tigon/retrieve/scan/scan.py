"""The scan: products of all queries with all rows that count, reduced to maxima per group, node and strip."""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.retrieve.scan.compact import is_live, list_bits, list_strip, live_words
from tigon.retrieve.scan.tags import has_tags


@jit
def numbers(x, dtype: tl.constexpr):
    """x in dtype; a byte is a float8_e4m3fn."""
    if x.dtype == tl.uint8:
        # fp8's exponent bias is 8 less than fp16's: shifting into place and multiplying by 2⁸ is exact, subnormals
        # included. GPUs before the H100 have no instruction for this.
        wide = x.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        x = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    return x.to(dtype)


@jit
@do_not_specialize("stride")
def _split_kernel(q_ptr, high_ptr, low_ptr, scale_ptr, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """A query as scale · (high + low), both in a 16-bit dtype, with a power-of-two scale: all numbers stay in range."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    q = tl.load(q_ptr + b * stride + d, mask=d < D, other=0.0).to(tl.float32)
    # The largest magnitude's exponent, clamped so that neither the power of two nor its inverse leaves fp32.
    exponent = tl.max(tl.abs(q), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 252)
    q = q * ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    high = q.to(high_ptr.dtype.element_ty)
    if high_ptr.dtype.element_ty == tl.float16:
        # Smallest subnormals instead of zeros: 0 times an infinite row element would be NaN.
        least = tl.where(q < 0, -5.960464477539063e-08, 5.960464477539063e-08)
        high = tl.where((high == 0) & (q != 0), least, high).to(tl.float16)
    tl.store(high_ptr + b * D + d, high, mask=d < D)
    tl.store(low_ptr + b * D + d, (q - high.to(tl.float32)).to(low_ptr.dtype.element_ty), mask=d < D)
    tl.store(scale_ptr + b, ((exponent + 1) << 23).to(tl.float32, bitcast=True))


@jit
def fail_columns(bits_ptr, known, live_ptr, place, N, BLOCK_N: tl.constexpr):
    """(BLOCK_N, 32): 2⁶³ where the row fails the filter, or is deleted. place: index of the first 32 rows.

    bits_ptr: (32,), where each filter's numbers begin. known: whether the filter exists.
    """
    places = place + tl.arange(0, BLOCK_N // 32)
    word = live_words(bits_ptr[None, :], live_ptr, places[:, None], known[None, :], N)
    bit = tl.arange(0, 32)
    passes = ((word[:, None, :] >> bit[None, :, None]) & 1) != 0
    return tl.reshape(tl.where(passes, 0.0, 9223372036854775808.0).to(tl.bfloat16), [BLOCK_N, 32])


@jit
def rows_of_strip(
    strip, attributes_ptr, table_ptr, bitmaps_ptr, live_ptr, list_ptr, count_ptr, N, stride_a, literals,
    STRIP: tl.constexpr, LISTING: tl.constexpr,
):  # fmt: skip
    """The number of rows that count in a strip: the length of its list, made here if LISTING > 0, or all rows."""
    if LISTING > 0:
        if table_ptr is not None:
            n = list_strip(
                strip, attributes_ptr, table_ptr, bitmaps_ptr, live_ptr, list_ptr, count_ptr, N, stride_a, literals,
                STRIP, LISTING,
            )  # fmt: skip
        else:
            n = list_bits(strip, attributes_ptr, live_ptr, list_ptr, count_ptr, N, STRIP)
        tl.debug_barrier()
    elif list_ptr is not None:
        n = tl.load(count_ptr + strip)
    else:
        n = tl.minimum(N - strip * STRIP, STRIP)
    return n


@jit
def write_maxima(
    s, middle, maxima_ptr, b, here, B, strip, t, middle_at,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, G: tl.constexpr, MIDDLE: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Store the maxima of a tile's groups, and the node's running maximum. Returns the tile's and the node's."""
    P: tl.constexpr = BLOCK_N // G
    # tl.max ignores NaN.
    if P == 1:
        m = tl.max(s, 1)
        leaf = strip * (STRIP // G) + t
        tl.store(maxima_ptr + leaf.to(tl.int64) * B + b, m, mask=here)
    else:
        m = tl.max(tl.reshape(s, [BLOCK_B, P, G]), 2)
        leaf = strip * (STRIP // G) + t * P + tl.arange(0, P)
        tl.store(maxima_ptr + leaf.to(tl.int64)[None, :] * B + b[:, None], m, mask=here[:, None])
        m = tl.max(m, 1)
    if MIDDLE > 0:
        # The node's running maximum: each tile in the node stores it, the last tile completes it.
        TILES: tl.constexpr = MIDDLE // BLOCK_N
        middle = tl.where(t % TILES == 0, m, tl.maximum(middle, m))
        node = strip * (STRIP // MIDDLE) + t // TILES
        tl.store(maxima_ptr + (node.to(tl.int64) + middle_at) * B + b, middle, mask=here)
    return m, middle


@jit
@do_not_specialize(
    "B", "N", "blocks", "stride_a", "literals", "units_x", "middle_at", "strip_at", "stride_w", "columns"
)
def _scan_kernel(
    q_ptr, low_ptr, scale_ptr, x_ptr, list_ptr, count_ptr, word_ptr, which_ptr, live_ptr, bias_ptr, maxima_ptr,
    attributes_ptr, table_ptr, bitmaps_ptr, certified_ptr,
    words_ptr, tags_ptr, weight_ptr, weight_low_ptr, weight_scale_ptr,
    B, N, blocks, stride_a, literals, stride_q, units_x, middle_at, strip_at, stride_w, columns,
    D: tl.constexpr, G: tl.constexpr, MIDDLE: tl.constexpr,
    STRIP: tl.constexpr, FILTERS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, LISTING: tl.constexpr, STAGES: tl.constexpr, TAGS: tl.constexpr,
    TAG_STEPS: tl.constexpr,
):  # fmt: skip
    """A strip of rows and a block of queries.

    FILTERS: words with a bit per filter. 0: no filter. 1: a filter for all queries. 2: a filter per query, at most
    32 filters. 3: a filter per query, more than 32. 4 and 5: like 2 and 3, but each filter has separate bits, 32 rows
    per number: filter f's start at word_ptr + table[f], and there are `literals` filters.
    UNIT divides the rows' stride: for an argument the compiler only learns whether 16 divides it.
    LISTING: rows per step in which the program lists its strip's passing rows; 0 if a list exists or is not needed.
    Without a table the list is made from bits, which are then passed as the attributes.
    certified_ptr: per query, whether the result is known. A block with only such queries scans nothing.
    TAGS: columns per step of the tag product; 0 without tags. TAG_STEPS: 1 or 2 steps, whose weights are
    loaded once, or 0: `columns / TAGS` steps, loaded again for each tile.
    """
    strip = tl.program_id(0) // blocks
    b = tl.program_id(0) % blocks * BLOCK_B + tl.arange(0, BLOCK_B)
    here = b < B
    if certified_ptr is not None:  # noqa: SIM102 - what is None has no address to load from
        if tl.min(tl.load(certified_ptr + b, mask=here, other=1), 0) != 0:
            return
    d = tl.arange(0, BLOCK_D)
    q_at = b.to(tl.int64)[:, None] * stride_q + d[None, :]
    ONCE: tl.constexpr = D <= BLOCK_D
    WHOLE: tl.constexpr = D % BLOCK_D == 0
    if ONCE:
        q = tl.load(q_ptr + q_at, mask=here[:, None] & (d < D)[None, :], other=0.0)
        if low_ptr is not None:
            low = tl.load(low_ptr + q_at, mask=here[:, None] & (d < D)[None, :], other=0.0)
    if (bias_ptr is not None or TAGS > 0) and scale_ptr is not None:
        scale = tl.load(scale_ptr + b, mask=here, other=1.0)
    if FILTERS >= 2:
        # A filter is a column in the product: -2⁶⁴ in its queries' rows and 2⁶³ in failing items' rows. The tensor
        # cores thus push such scores below all others; a comparison per score would take longer.
        mine = tl.load(which_ptr + b, mask=here, other=0)
        bit = tl.arange(0, 32)
        first_word, last_word = 0, 0
        if FILTERS == 2 or FILTERS == 4:
            chosen = tl.where(mine[:, None] == bit[None, :], -18446744073709551616.0, 0.0).to(tl.bfloat16)
        else:
            # Filters are numbered in query order, so that a block's filters are adjacent.
            first_word = tl.min(tl.where(here, mine, 0x7FFFFFFF), 0) // 32
            last_word = tl.max(mine, 0) // 32
        if FILTERS == 4:
            known = bit < literals
            bits_ptr = word_ptr + tl.load(table_ptr + bit, mask=known, other=0)
    if TAGS > 0:
        tag = tl.arange(0, TAGS)
        weight_scale = tl.load(weight_scale_ptr + b, mask=here, other=0.0)
        weight_at = b.to(tl.int64)[:, None] * columns + tag[None, :]
        if TAG_STEPS > 0:
            weight = tl.load(weight_ptr + weight_at, mask=here[:, None], other=0.0)
            weight_low = tl.load(weight_low_ptr + weight_at, mask=here[:, None], other=0.0)
            word = tl.load(tags_ptr)
            tag_mask = tl.load(tags_ptr + columns + tag)
            tag_value = tl.load(tags_ptr + 2 * columns + tag)
        if TAG_STEPS > 1:
            weight_2 = tl.load(weight_ptr + weight_at + TAGS, mask=here[:, None], other=0.0)
            weight_low_2 = tl.load(weight_low_ptr + weight_at + TAGS, mask=here[:, None], other=0.0)
            word_2 = tl.load(tags_ptr + TAGS)
            tag_mask_2 = tl.load(tags_ptr + columns + TAGS + tag)
            tag_value_2 = tl.load(tags_ptr + 2 * columns + TAGS + tag)
    first = strip * STRIP
    n = rows_of_strip(
        strip, attributes_ptr, table_ptr, bitmaps_ptr, live_ptr, list_ptr, count_ptr, N, stride_a, literals, STRIP,
        LISTING,
    )  # fmt: skip
    best = tl.full([BLOCK_B], float("-inf"), tl.float32)
    middle = tl.full([BLOCK_B], float("-inf"), tl.float32)
    for t in tl.range(0, tl.cdiv(n, BLOCK_N), num_stages=STAGES if ONCE else 1):
        # Past the end the last row is read again. That changes no maximum in its own group, and groups past the end are
        # ignored: no score needs a mask.
        j = tl.minimum(t * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
        if list_ptr is not None:
            i = tl.load(list_ptr + first + j)
        else:
            i = first + j
        x_at = x_ptr + i.to(tl.int64)[:, None] * (units_x * UNIT) + d[None, :]
        if ONCE:
            if WHOLE:
                x = tl.load(x_at)
            else:
                x = tl.load(x_at, mask=(d < D)[None, :], other=0)
            x = tl.trans(numbers(x, q_ptr.dtype.element_ty))
            s = tl.dot(q, x, input_precision=PRECISION)
            if low_ptr is not None:
                s_low = tl.dot(low, x, input_precision=PRECISION)
        else:
            s = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
            if low_ptr is not None:
                s_low = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
            for step in tl.range(0, D, BLOCK_D, num_stages=STAGES):
                if WHOLE:
                    x = tl.load(x_at + step)
                    q = tl.load(q_ptr + q_at + step, mask=here[:, None], other=0.0)
                else:
                    x = tl.load(x_at + step, mask=(step + d < D)[None, :], other=0)
                    q = tl.load(q_ptr + q_at + step, mask=here[:, None] & (step + d < D)[None, :], other=0.0)
                x = tl.trans(numbers(x, q_ptr.dtype.element_ty))
                s = tl.dot(q, x, s, input_precision=PRECISION)
                if low_ptr is not None:
                    low = tl.load(low_ptr + q_at + step, mask=here[:, None] & (step + d < D)[None, :], other=0.0)
                    s_low = tl.dot(low, x, s_low, input_precision=PRECISION)
        if low_ptr is not None:
            # For a row with an infinite element use only the first term: the second has zeros, and differing signs.
            s = s + tl.where(tl.abs(s_low) < float("inf"), s_low, 0.0)
        if FILTERS == 2:
            w = tl.load(word_ptr + i)
            fails = tl.where(((w[:, None] >> bit[None, :]) & 1) != 0, 0.0, 9223372036854775808.0).to(tl.bfloat16)
            s = tl.dot(chosen, tl.trans(fails), s)
        if FILTERS == 3:
            for v in range(first_word, last_word + 1):
                w = tl.load(word_ptr + N.to(tl.int64) * v + i)
                fails = tl.where(((w[:, None] >> bit[None, :]) & 1) != 0, 0.0, 9223372036854775808.0).to(tl.bfloat16)
                of_word = tl.where((mine - v * 32)[:, None] == bit[None, :], -18446744073709551616.0, 0.0)
                s = tl.dot(of_word.to(tl.bfloat16), tl.trans(fails), s)
        if FILTERS == 4:
            fails = fail_columns(bits_ptr, known, live_ptr, first // 32 + t * (BLOCK_N // 32), N, BLOCK_N)
            s = tl.dot(chosen, tl.trans(fails), s)
        if FILTERS == 5:
            for v in range(first_word, last_word + 1):
                known = v * 32 + bit < literals
                bits_ptr = word_ptr + tl.load(table_ptr + v * 32 + bit, mask=known, other=0)
                fails = fail_columns(bits_ptr, known, live_ptr, first // 32 + t * (BLOCK_N // 32), N, BLOCK_N)
                of_word = tl.where((mine - v * 32)[:, None] == bit[None, :], -18446744073709551616.0, 0.0)
                s = tl.dot(of_word.to(tl.bfloat16), tl.trans(fails), s)
        if (bias_ptr is not None or TAGS > 0) and scale_ptr is not None:
            s = s * scale[:, None]
        if bias_ptr is not None:
            s = s + tl.load(bias_ptr + i)[None, :]
        if TAGS > 0:
            # The rows' tags are columns in another product, with ones and zeros in fp16.
            if TAG_STEPS > 0:
                has = tl.trans(has_tags(words_ptr, stride_w, i, word, tag_mask, tag_value))
                v = tl.dot(weight, has)
                v = tl.dot(weight_low, has, v)
            else:
                v = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
                for column in range(0, columns, TAGS):
                    weight = tl.load(weight_ptr + weight_at + column, mask=here[:, None], other=0.0)
                    weight_low = tl.load(weight_low_ptr + weight_at + column, mask=here[:, None], other=0.0)
                    tag_mask = tl.load(tags_ptr + columns + column + tag)
                    tag_value = tl.load(tags_ptr + 2 * columns + column + tag)
                    has = tl.trans(
                        has_tags(words_ptr, stride_w, i, tl.load(tags_ptr + column), tag_mask, tag_value)
                    )  # fmt: skip
                    v = tl.dot(weight, has, v)
                    v = tl.dot(weight_low, has, v)
            if TAG_STEPS > 1:
                has_2 = tl.trans(has_tags(words_ptr, stride_w, i, word_2, tag_mask_2, tag_value_2))
                v = tl.dot(weight_2, has_2, v)
                v = tl.dot(weight_low_2, has_2, v)
            s = s + v * weight_scale[:, None]
        # Two comparisons per row, and an addition per score.
        if FILTERS == 1:
            s = s + tl.where((tl.load(word_ptr + i) & 1) != 0, 0.0, float("-inf"))[None, :]
        if live_ptr is not None and LISTING == 0 and FILTERS < 4:
            s = s + tl.where(is_live(live_ptr, i, i >= 0), 0.0, float("-inf"))[None, :]
        m, middle = write_maxima(
            s, middle, maxima_ptr, b, here, B, strip, t, middle_at, BLOCK_B, BLOCK_N, G, MIDDLE, STRIP
        )
        best = tl.maximum(best, m)
    tl.store(maxima_ptr + (strip.to(tl.int64) + strip_at) * B + b, best, mask=here)
