"""e4m3 numbers: the largest magnitude of a tile, a scale, and four tiles joined into words.

A scale is a power of two: scaling loses nothing, and the scaled number is rounded to e4m3 once.
"""

from __future__ import annotations

from tigon.kernels import jit, tl


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
