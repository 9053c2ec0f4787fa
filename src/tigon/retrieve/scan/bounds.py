"""Upper bounds on scores from 8-bit codes: `rescore` never computes a score above the row's bound.

Let a row be x = s · (c + e) with code c, scale s and |e|₂ ≤ E, |c|₂ ≤ C, the two numbers in `CodedItems.error`.
Let a query be q = t · (u + f), with integers u (or u + w/256, two terms), F ≥ |f|₂ and Q ≥ |q|₂ / t. Then

    q · x = s · t · (u · c + f · c + (u + f) · e)  ≤  s · (t · (u · c) + t · (F · C + Q · E)).

The scan computes s · (t · v + A) in fp32, where v is u · c and A the query's slack. The bound must be at least the
result of `rescore`, whose fp32 sum is off by at most (D + 2) · 2⁻²³ · Q · t · s · (C + E), in any summation order:

- u · c is an integer, exact in int32. Conversion to fp32, conversion of w · c, and their sum round by 2⁻²⁴ each, with
  values up to 127² · D: v is off by less than D · 2⁻⁸.
- t · v + A and the product with s round by 2⁻²⁴ each, with values up to s · t · ((Q + F) · C + D · 2⁻⁸) + s · A:
  together less than 2⁻²¹ relative. A fused multiply-add is off by less.
- a bias is added to both, and rounding keeps their order.

A is the sum of all these terms, increased by a factor 1 + 2⁻¹⁰ + D · 2⁻²¹, which exceeds the rounding in Q, F and A:
sums over D squares, and a division that is off by two units in the last place (the 2⁻¹⁴ · √D below). A is at least t,
scales are at least 2⁻⁶⁷ and t at least 2⁻⁵⁷, so that no rounding of numbers near 2⁻¹⁴⁹ reaches the surplus. A query
beyond 2⁵⁰, or with NaN, has t = 0 and A = inf; a row beyond 2⁵⁰, or with NaN, has s = inf and c = 0. Their bounds are
inf.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.retrieve.scan.compact import is_live
from tigon.retrieve.scan.scan import rows_of_strip, write_maxima


@jit
def round_to_code(x):
    """The nearest integer in the code range."""
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), -127.0), 127.0)


@jit
@do_not_specialize("stride")
def _encode_query_kernel(
    q_ptr, error_ptr, code_ptr, low_ptr, step_ptr, slack_ptr, certified_ptr, stride, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A query's codes u, and w for two terms, its step t and slack A; resets its certified flag."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    q = tl.load(q_ptr + b * stride + d, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(q == q, tl.abs(q), float("inf")), 0)
    ordinary = largest <= 1125899906842624.0  # 2⁵⁰
    q = tl.where(ordinary, q, 0.0)
    step = tl.where(ordinary, tl.maximum(largest, 8.881784197001252e-16), 127.0) / 127.0  # at least 2⁻⁵⁰ / 127
    ratio = q / step
    code = round_to_code(ratio)
    rest = ratio - code
    tl.store(code_ptr + b * D + d, code.to(tl.int8), mask=inside)
    if low_ptr is not None:
        low = round_to_code(rest * 256.0)
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
    """A strip of codes and a block of queries: like `_scan_kernel`, with the same arguments, for bounds instead of
    scores.

    word_ptr: bit 0 in a row's word says whether the row passes the single filter; None if all pass, or with a list.
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
        # A bound may be inf: select instead of adding -inf, which would give NaN.
        if word_ptr is not None:
            s = tl.where(((tl.load(word_ptr + i) & 1) != 0)[None, :], s, float("-inf"))
        if live_ptr is not None and LISTING == 0:
            s = tl.where(is_live(live_ptr, i, i >= 0)[None, :], s, float("-inf"))
        m, middle = write_maxima(
            s, middle, maxima_ptr, b, here, B, strip, t, middle_at, BLOCK_B, BLOCK_N, G, MIDDLE, STRIP
        )
        best = tl.maximum(best, m)
    tl.store(maxima_ptr + (strip.to(tl.int64) + strip_at) * B + b, best, mask=here)
