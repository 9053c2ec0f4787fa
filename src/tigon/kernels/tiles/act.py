"""Activations on an fp32 tile: each returns (act(g), act'(g)). `tigon.ops.acts` maps names to functions.

If a kernel needs only the value, the compiler removes the derivative's arithmetic.
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def silu(g):
    """g · sigmoid(g)."""
    # From exp(-|g|): 1 - s loses all digits where s is near 1, and the factor g magnifies the error.
    e = tl.exp(-tl.abs(g))
    r = 1.0 / (1.0 + e)
    s = tl.where(g >= 0, r, e * r)
    ds = e * r * r
    return g * s, s + g * ds


@jit
def gelu_tanh(g):
    """0.5 g (1 + tanh(√(2/π) (g + 0.044715 g³)))."""
    # 0.5 · (1 + tanh(z / 2)) is sigmoid(z): one exponential, no cancellation for negative g.
    # z is twice tanh's argument: 1.5957… = 2 · √(2/π), 0.0713… = 1.5957… · 0.044715, and 0.2140… = 3 · 0.0713… (dz/dg).
    square = g * g
    z = g * (1.5957691216057308 + 0.07135481282970877 * square)
    dz = 1.5957691216057308 + 0.2140644384891263 * square
    e = tl.exp(-tl.abs(z))
    r = 1.0 / (1.0 + e)
    s = tl.where(z >= 0, r, e * r)
    ds = e * r * r * dz
    return g * s, s + g * ds


@jit
def gelu(g):
    """g Φ(g), with the standard normal Φ."""
    s = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    ds = 0.3989422804014327 * tl.exp(-0.5 * g * g)
    return g * s, s + g * ds


@jit
def relu(g):
    """max(g, 0); the derivative at 0 is 0, as in torch."""
    # A comparison: tl.maximum would turn NaN into 0.
    return tl.where(g <= 0, 0.0, g), tl.where(g <= 0, 0.0, 1.0)


@jit
def relu2(g):
    """max(g, 0)²."""
    r = tl.where(g <= 0, 0.0, g)
    return r * r, 2.0 * r


@jit
def sigmoid(g):
    """1 / (1 + exp(-g))."""
    e = tl.exp(-tl.abs(g))
    r = 1.0 / (1.0 + e)
    return tl.where(g >= 0, r, e * r), e * r * r
