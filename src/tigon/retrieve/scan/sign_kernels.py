"""Kernels for 1-bit codes: a vector's signs, the scan over all rows' signs, the picked groups' rows."""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.retrieve.scan.compact import is_live, ones
from tigon.retrieve.scan.scan import numbers


@jit
def find_exponent(x):
    """The fp32 exponent of the largest among non-negative numbers, clamped to avoid both ends."""
    return tl.minimum(tl.maximum(tl.max(x, 0).to(tl.int32, bitcast=True) >> 23, 15), 254)


@jit
def power(exponent):
    """The power of two with this fp32 exponent."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@jit
def pack_words(bits, BITS: tl.constexpr):
    """Pack bits into 32-bit numbers, the first in the lowest bit."""
    place = tl.reshape(tl.arange(0, BITS), [BITS // 32, 32]) % 32
    return tl.sum(tl.reshape(bits.to(tl.int32), [BITS // 32, 32]) << place, 1)


@jit
@do_not_specialize("units_x")
def _encode_kernel(
    x_ptr, projection_ptr, code_ptr, more_ptr, scale_ptr, units_x, factor, D: tl.constexpr, TERMS: tl.constexpr,
    BITS: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A row: its signs, and its norm if there are scales. For a query also the large projections and the scale.

    All fp32 sums have a fixed order, and all others are integer sums: a CPU computes the same bits.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (units_x * UNIT)
    j = tl.arange(0, BITS)
    y = tl.zeros([BITS], tl.float32)
    for t in range(TERMS):
        p = tl.load(projection_ptr + t * BITS + j)
        x = numbers(tl.load(x_ptr + (p >> 1), mask=p >= 0, other=0), tl.float32)
        y += tl.where((p & 1) != 0, -x, x)
    word = tl.arange(0, BITS // 32)
    tl.store(code_ptr + row * (BITS // 32) + word, pack_words(y >= 0, BITS))
    if more_ptr is not None:
        size = tl.abs(y)
        size = tl.where(size < float("inf"), size, 0.0)
        exponent = find_exponent(size)
        u = (size * power(268 - exponent)).to(tl.int32)
        # Large means at least 1.25 times the mean: levels 1 and 3 then have the least error for normally distributed
        # numbers.
        large = u * (4 * BITS) >= 5 * tl.sum(u, 0)
        tl.store(more_ptr + row * (BITS // 32) + word, pack_words(large, BITS))
        v = tl.where(large, 3, 1)
        step = tl.div_rn(tl.sum(u * v, 0).to(tl.float32), tl.sum(v * v, 0).to(tl.float32))
        tl.store(scale_ptr + row, step * factor * power(exponent - 14))
    elif scale_ptr is not None:
        d = tl.arange(0, BLOCK_D)
        size = tl.abs(numbers(tl.load(x_ptr + d, mask=d < D, other=0), tl.float32))
        size = tl.where(size < float("inf"), size, 0.0)
        exponent = find_exponent(size)
        u = (size * power(268 - exponent)).to(tl.int64)
        norm = tl.sqrt_rn(tl.sum(u * u, 0).to(tl.float32)) * power(exponent - 14)
        tl.store(scale_ptr + row, norm.to(scale_ptr.dtype.element_ty))


@jit
@do_not_specialize("B", "N", "blocks", "middle_at", "strip_at")
def _sign_scan_kernel(
    sign_ptr, more_ptr, step_ptr, code_ptr, scale_ptr, bias_ptr, list_ptr, count_ptr, live_ptr, maxima_ptr, B, N,
    blocks, middle_at, strip_at, W: tl.constexpr, G: tl.constexpr, ARITY: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """A strip of rows and a few queries: the largest key per group, per node with ARITY groups, and for the strip.

    A row's key is 4096 minus the weights of the signs in which the row differs from the query. With scales the score is
    estimated, and the key is the estimate's 20 highest bits. A deleted row has key 0, below all.
    """
    strip = tl.program_id(0) // blocks
    first_query = tl.program_id(0) % blocks * QUERIES
    TILE: tl.constexpr = G * ARITY
    STRIP: tl.constexpr = TILE * ARITY
    first = strip * STRIP
    word = tl.arange(0, W)
    group = tl.arange(0, ARITY)
    if list_ptr is not None:
        n = tl.load(count_ptr + strip)
    else:
        n = tl.minimum(N - first, STRIP)
    best = tl.full([QUERIES], 0, tl.int32)
    which = tl.arange(0, QUERIES)
    for t in range(tl.cdiv(n, TILE)):
        # Past the end the last row is read again, as in the vector scan.
        j = tl.minimum(t * TILE + tl.arange(0, TILE), n - 1)
        if list_ptr is not None:
            i = tl.load(list_ptr + first + j)
        else:
            i = first + j
        if list_ptr is None and W == 2:
            # Two rows are 16 bytes, which a thread reads at once if all rows of the tile exist.
            at = tl.arange(0, TILE * W)
            if (t + 1) * TILE <= n:
                x = tl.load(code_ptr + (first + t * TILE).to(tl.int64) * W + at)
            else:
                last = tl.minimum(t * TILE + at // W, n - 1)
                x = tl.load(code_ptr + (first + last).to(tl.int64) * W + at % W)
            x = tl.reshape(x, [TILE, W])
        else:
            x = tl.load(code_ptr + i.to(tl.int64)[:, None] * W + word[None, :])
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + i).to(tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + i)
        if live_ptr is not None:
            there = is_live(live_ptr, i, i >= 0)
        for number in tl.static_range(QUERIES):
            b = tl.minimum(first_query + number, B - 1)
            sign = tl.load(sign_ptr + b * W + word)
            more = tl.load(more_ptr + b * W + word)
            differs = x ^ sign[None, :]
            # Written so that the compiler uses the GPU's popcount for `ones`; popcount(differs) + 2 · popcount(large)
            # would not.
            key = 4096 - tl.sum(ones(differs & ~more[None, :]) + 3 * ones(differs & more[None, :]), 1)
            if scale_ptr is not None or bias_ptr is not None:
                # The sum of the query's levels, each with the row's sign.
                levels = 32 * W + 2 * tl.sum(ones(more), 0)
                s = (2 * key + (levels - 8192)).to(tl.float32)
                if scale_ptr is not None:
                    s = s * scale
                if bias_ptr is not None:
                    s = s * tl.load(step_ptr + b) + bias
                s = tl.where(s == s, tl.where(s == 0, 0.0, s), float("-inf"))
                bits = s.to(tl.int32, bitcast=True)
                key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 12) + 0x80001
            if live_ptr is not None:
                key = tl.where(there, key, 0)
            m = tl.max(tl.reshape(key, [ARITY, G]), 1)
            here = first_query + number < B
            leaf = strip * (ARITY * ARITY) + t * ARITY + group
            tl.store(maxima_ptr + leaf.to(tl.int64) * B + b, m, mask=here)
            m = tl.max(m, 0)
            node = (strip * ARITY + t).to(tl.int64) + middle_at
            tl.store(maxima_ptr + node * B + b, m, mask=here)
            best = tl.where(which == number, tl.maximum(best, m), best)
    b = first_query + which
    tl.store(maxima_ptr + (strip.to(tl.int64) + strip_at) * B + b, best, mask=b < B)


@jit
@do_not_specialize("N", "K")
def _sign_rows_kernel(
    pick_ptr, list_ptr, count_ptr, row_ptr, many_ptr, block_ptr, N, K, G: tl.constexpr, STRIP: tl.constexpr,
    PICKS: tl.constexpr, ROOM: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A query: its picked groups' rows as a strip of a list, the strip's count, and the list's block numbers.

    Exact scores are then computed per block with as many rows as in an exact search: the same bits.
    """
    b = tl.program_id(0)
    total = 0
    for start in range(0, K * G, BLOCK):
        n = start + tl.arange(0, BLOCK)
        group = tl.load(pick_ptr + b.to(tl.int64) * PICKS + n // G, mask=n < K * G, other=-1)
        row = group * G + n % G
        if list_ptr is not None:
            there = (group >= 0) & (row % STRIP < tl.load(count_ptr + row // STRIP, mask=group >= 0, other=0))
            row = tl.load(list_ptr + row, mask=there, other=0)
        else:
            there = (group >= 0) & (row < N)
        kept = there.to(tl.int32)
        at = total + tl.cumsum(kept, 0) - kept
        tl.store(row_ptr + b.to(tl.int64) * ROOM + at, row, mask=there)
        total += tl.sum(kept, 0)
    tl.store(many_ptr + b, total)
    place = tl.arange(0, PLACES)
    number = tl.where(place * (ROOM // PLACES) < total, b * PLACES + place, -1)
    tl.store(block_ptr + b.to(tl.int64) * PLACES + place, number)
