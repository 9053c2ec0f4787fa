"""tanh and its derivative, from one exponential and without a branch."""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def tanh(z):
    """tanh(z) and its derivative 1 - tanh(z)², each to a few roundings relative to its value, however small."""
    size = tl.abs(z)
    e = tl.exp2(size * -2.8853900817779268)  # exp(-2 |z|): nothing overflows
    r = 1.0 / (1.0 + e)
    t = (1.0 - e) * r
    # Near zero 1 - e loses digits: an odd polynomial (Cephes' tanhf) replaces it. Far from zero 1 - t² loses digits:
    # the slope is computed from e.
    square = z * z
    p = -0.0537397156 + square * (0.0206390887 + square * -0.00570498873)
    p = z + z * (square * (-0.333332819 + square * (0.133314422 + square * p)))
    near = size < 0.625
    return tl.where(near, p, tl.where(z < 0, -t, t)), tl.where(near, 1.0 - p * p, 4.0 * e * r * r)
