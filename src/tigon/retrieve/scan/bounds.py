"""Upper bounds of scores from 8-bit codes: what `rescore` computes of a row is never above the bound of its row.

Let a row be x = s · (c + e) with its code c, its scale s and |e|₂ ≤ E, |c|₂ ≤ C, the two numbers of `CodedItems.error`.
Let a query be q = t · (u + f), with whole numbers u (or u + w/256, two terms), F ≥ |f|₂ and Q ≥ |q|₂ / t. Then

    q · x = s · t · (u · c + f · c + (u + f) · e)  ≤  s · (t · (u · c) + t · (F · C + Q · E)).

The scan computes s · (t · v + A) in fp32, where v is u · c and A the slack of the query. It must be at least what
`rescore` returns, whose sum in fp32 is off by at most (D + 2) · 2⁻²³ · Q · t · s · (C + E), in any order of the sum:

- u · c is a whole number, exact in int32. Its conversion to fp32, that of w · c, and their sum round by 2⁻²⁴ each, of
  at most 127² · D: v is off by less than D · 2⁻⁸.
- t · v + A and the product with s round by 2⁻²⁴ each, of at most s · t · ((Q + F) · C + D · 2⁻⁸) + s · A: together less
  than 2⁻²¹ of it. A product and a sum in one rounding are off by less.
- a bias is added to both, and rounding keeps their order.

A is the sum of all that, and more by 2⁻¹⁰ + D · 2⁻²¹ of itself, which is beyond the rounding of Q, F and A: sums of D
squares, and a division that is off by two units in the last place (the 2⁻¹⁴ · √D below). A is at least t, scales are at
least 2⁻⁶⁷ and t at least 2⁻⁵⁷, so that no rounding of numbers near 2⁻¹⁴⁹ reaches the surplus. A query beyond 2⁵⁰, or
with NaN, has t = 0 and A = inf; a row beyond 2⁵⁰, or with NaN, has s = inf and c = 0. Their bounds are inf.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.retrieve.scan.compact import is_live
from tigon.retrieve.scan.scan import rows_of_strip, write_maxima


@jit
def rounded(x):
    """The nearest whole number that a code has."""
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), -127.0), 127.0)


@jit
@do_not_specialize("stride")
def _encode_query_kernel(
    q_ptr, error_ptr, code_ptr, low_ptr, step_ptr, slack_ptr, certified_ptr, stride, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A query's codes u, and w where there are two terms, its step t and its slack A; and that it is not certified."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    q = tl.load(q_ptr + b * stride + d, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(q == q, tl.abs(q), float("inf")), 0)
    ordinary = largest <= 1125899906842624.0  # 2⁵⁰
    q = tl.where(ordinary, q, 0.0)
    step = tl.where(ordinary, tl.maximum(largest, 8.881784197001252e-16), 127.0) / 127.0  # at least 2⁻⁵⁰ / 127
    ratio = q / step
    code = rounded(ratio)
    rest = ratio - code
    tl.store(code_ptr + b * D + d, code.to(tl.int8), mask=inside)
    if low_ptr is not None:
        low = rounded(rest * 256.0)
        rest = rest - low / 256.0
        tl.store(low_ptr + b * D + d, low.to(tl.int8), mask=inside)
    MARGIN: tl.constexpr = 1.0 + D * 2.0**-21 + 2.0**-10
    DIVISION: tl.constexpr = D**0.5 * 2.0**-14
    F = tl.sqrt(tl.sum(rest * rest, 0)) + DIVISION
    Q = tl.sqrt(tl.sum(ratio * ratio, 0)) + DIVISION
    E, C = tl.load(error_ptr), tl.load(error_ptr + 1)
    ROUNDING: tl.constexpr = (D + 2) * 2.0**-23 + 2.0**-21
    slack = (Q * E + F * C + (Q + F) * (C + E) * ROUNDING + D * 2.0**-8 + 1.0) * MARGIN
    tl.store(step_ptr + b, tl.where(ordinary, step, 0.0))
    tl.store(slack_ptr + b, tl.where(ordinary, step * slack, float("inf")))
    tl.store(certified_ptr + b, 0)


@jit
@do_not_specialize("B", "N", "blocks", "stride_a", "literals", "units_x", "middle_at", "strip_at")
def _bounds_kernel(
    q_ptr, low_ptr, step_ptr, slack_ptr, x_ptr, scale_ptr, list_ptr, count_ptr, word_ptr, live_ptr, bias_ptr,
    maxima_ptr, attributes_ptr, table_ptr, bitmaps_ptr,
    B, N, blocks, stride_a, literals, units_x, middle_at, strip_at, D: tl.constexpr, G: tl.constexpr,
    MIDDLE: tl.constexpr, STRIP: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr, LISTING: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One strip of codes, one block of queries: as `_scan_kernel`, whose words these are, of bounds instead of scores.

    word_ptr: bit 0 of a row's word is whether it passes the one filter; None where all do, or where there is a list.
    """
    strip = tl.program_id(0) // blocks
    b = tl.program_id(0) % blocks * BLOCK_B + tl.arange(0, BLOCK_B)
    here = b < B
    d = tl.arange(0, BLOCK_D)
    q_at = b.to(tl.int64)[:, None] * D + d[None, :]
    ONCE: tl.constexpr = D <= BLOCK_D
    WHOLE: tl.constexpr = D % BLOCK_D == 0
    if ONCE:
        q = tl.load(q_ptr + q_at, mask=here[:, None] & (d < D)[None, :], other=0)
        if low_ptr is not None:
            low = tl.load(low_ptr + q_at, mask=here[:, None] & (d < D)[None, :], other=0)
    step = tl.load(step_ptr + b, mask=here, other=0.0)
    slack = tl.load(slack_ptr + b, mask=here, other=0.0)
    first = strip * STRIP
    n = rows_of_strip(
        strip, attributes_ptr, table_ptr, bitmaps_ptr, live_ptr, list_ptr, count_ptr, N, stride_a, literals, STRIP,
        LISTING,
    )  # fmt: skip
    best = tl.full([BLOCK_B], float("-inf"), tl.float32)
    middle = tl.full([BLOCK_B], float("-inf"), tl.float32)
    for t in tl.range(0, tl.cdiv(n, BLOCK_N), num_stages=STAGES if ONCE else 1):
        j = tl.minimum(t * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
        if list_ptr is not None:
            i = tl.load(list_ptr + first + j)
        else:
            i = first + j
        x_at = x_ptr + i.to(tl.int64)[:, None] * (units_x * UNIT) + d[None, :]
        scale = tl.load(scale_ptr + i)
        if ONCE:
            if WHOLE:
                x = tl.load(x_at)
            else:
                x = tl.load(x_at, mask=(d < D)[None, :], other=0)
            x = tl.trans(x)
            v = tl.dot(q, x)
            if low_ptr is not None:
                v_low = tl.dot(low, x)
        else:
            v = tl.zeros([BLOCK_B, BLOCK_N], tl.int32)
            v_low = tl.zeros([BLOCK_B, BLOCK_N], tl.int32)
            for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
                if WHOLE:
                    x = tl.load(x_at + start)
                    q = tl.load(q_ptr + q_at + start, mask=here[:, None], other=0)
                else:
                    x = tl.load(x_at + start, mask=(start + d < D)[None, :], other=0)
                    q = tl.load(q_ptr + q_at + start, mask=here[:, None] & (start + d < D)[None, :], other=0)
                x = tl.trans(x)
                v = tl.dot(q, x, v, out_dtype=tl.int32)
                if low_ptr is not None:
                    low = tl.load(low_ptr + q_at + start, mask=here[:, None] & (start + d < D)[None, :], other=0)
                    v_low = tl.dot(low, x, v_low, out_dtype=tl.int32)
        s = v.to(tl.float32)
        if low_ptr is not None:
            s = s + v_low.to(tl.float32) * (1.0 / 256.0)
        s = (s * step[:, None] + slack[:, None]) * scale[None, :]
        if bias_ptr is not None:
            s = s + tl.load(bias_ptr + i)[None, :]
        # A bound may be inf: no sum with -inf, which would be NaN.
        if word_ptr is not None:
            s = tl.where(((tl.load(word_ptr + i) & 1) != 0)[None, :], s, float("-inf"))
        if live_ptr is not None and LISTING == 0:
            s = tl.where(is_live(live_ptr, i, i >= 0)[None, :], s, float("-inf"))
        m, middle = write_maxima(
            s, middle, maxima_ptr, b, here, B, strip, t, middle_at, BLOCK_B, BLOCK_N, G, MIDDLE, STRIP
        )
        best = tl.maximum(best, m)
    tl.store(maxima_ptr + (strip.to(tl.int64) + strip_at) * B + b, best, mask=here)
