"""Activations of a tile in fp32: each returns (act(g), act'(g)). `tigon.ops.acts` says which name stands for which.

A kernel that needs the value alone drops the derivative, and the compiler removes its arithmetic.
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def silu(g):
    """g · sigmoid(g)."""
    # From exp(-|g|): 1 - s would lose all digits where s is near 1, and the factor g would magnify the error.
    e = tl.exp(-tl.abs(g))
    r = 1.0 / (1.0 + e)
    s = tl.where(g >= 0, r, e * r)
    # s · (1 − s), which is even in g: from e and r it needs neither the select nor the difference.
    ds = e * r * r
    return g * s, s + g * ds


@jit
def gelu_tanh(g):
    """0.5 g (1 + tanh(√(2/π) (g + 0.044715 g³)))."""
    # 0.5 · (1 + tanh(z / 2)) is sigmoid(z): one exponential, no cancellation for negative g.
    # z is twice tanh's argument. 1.5957… is 2 · √(2/π), 0.0713… is that times 0.044715, and 0.2140…, for dz/dg, is
    # three times 0.0713….
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
    """g Φ(g), Φ the normal distribution."""
    # The two constants are 1/√2 and 1/√(2π); s is Φ(g) and ds its density.
    # 1 + erf cancels for negative g, as in PyTorch's own formula: the error is a rounding at 1, not at Φ(g).
    s = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    ds = 0.3989422804014327 * tl.exp(-0.5 * g * g)
    return g * s, s + g * ds


@jit
def relu(g):
    """max(g, 0); its derivative at 0 is 0, as torch has it."""
    # By a comparison: maximum would turn NaN into 0.
    return tl.where(g <= 0, 0.0, g), tl.where(g <= 0, 0.0, 1.0)


@jit
def relu2(g):
    """max(g, 0)²."""
    r = tl.where(g <= 0, 0.0, g)
    # From r and not from g: NaN has passed the comparison, and stays.
    return r * r, 2.0 * r


@jit
def sigmoid(g):
    """1 / (1 + exp(-g))."""
    # As in silu: from exp(-|g|), so that the slope needs no difference of numbers near 1.
    e = tl.exp(-tl.abs(g))
    r = 1.0 / (1.0 + e)
    return tl.where(g >= 0, r, e * r), e * r * r
