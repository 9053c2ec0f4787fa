"""e4m3 numbers: the largest magnitude of a tile, a scale, and four tiles joined into words.

A scale is a power of two: scaling loses nothing, and the scaled number is rounded to e4m3 once.
"""

from __future__ import annotations

from tigon.kernels import jit, tl
from tigon.kernels.tiles.divergence import INTERPRETED, is_cuda


@jit
def larger(a, b):
    """The larger number; NaN if either is NaN, which a plain maximum would drop."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def compute_amax_tile(x, AXIS: tl.constexpr):
    """The largest magnitude along an axis; NaN if a number is NaN."""
    return tl.reduce(tl.abs(x), AXIS, larger)


@jit
def compute_scale_tile(amax):
    """The power of two at or above amax / 448, at least 2⁻¹²⁶. Infinite for an infinite amax, NaN for NaN."""
    s = tl.maximum(amax * (1.0 / 448.0), 1.1754943508222875e-38)
    power = ((s.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax == amax, power, amax)


@jit
def join_words(a, b, c, d):
    """Four e4m3 tiles as one tile of 32-bit words, a in the lowest byte: a transposition then moves words."""
    a, b = a.to(tl.uint8, bitcast=True).to(tl.int32), b.to(tl.uint8, bitcast=True).to(tl.int32)
    c, d = c.to(tl.uint8, bitcast=True).to(tl.int32), d.to(tl.uint8, bitcast=True).to(tl.int32)
    return a | (b << 8) | (c << 16) | (d << 24)


@jit
def round_to_words(a, b, c, d):
    """Four fp32 tiles rounded to e4m3 as one tile of 32-bit words, a in the lowest byte."""
    if INTERPRETED:
        words = join_words(a.to(tl.float8e4nv), b.to(tl.float8e4nv), c.to(tl.float8e4nv), d.to(tl.float8e4nv))
    elif is_cuda():
        # As `join_words` of four conversions, which ptxas before 13.0 compiles to wrong bytes: it reads a converted
        # pair's high byte from an undefined register where the pair is also widened with an undefined upper half.
        words = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [a, b, c, d],
            tl.int32,
            True,
            1,
        )
    else:
        words = join_words(a.to(tl.float8e4nv), b.to(tl.float8e4nv), c.to(tl.float8e4nv), d.to(tl.float8e4nv))
    return words
