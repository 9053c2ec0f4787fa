"""The logit softcap, as in Gemma 2: z = softcap · tanh(scale · x / softcap)."""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def cap(x, scale, softcap):
    """z = softcap · tanh(u), u = scale · x / softcap, and dz/dx. x, scale, softcap: fp32, softcap > 0.

    tanh is computed from exp(-2|u|), which does not overflow. For small u, the usual case for logits under a cap of 30,
    1 - exp(-2|u|) cancels: below 0.3 a series to u⁹ replaces tanh, exact to fp32. An infinite x gives ±softcap: callers
    restore -inf where a mask had set it. NaN stays NaN.
    """
    u = x * scale / softcap
    e = tl.exp(-2.0 * tl.abs(u))
    t = tl.where(u >= 0, 1.0, -1.0) * (1.0 - e) / (1.0 + e)
    s = u * u
    series = u + u * s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835))))
    t = tl.where(tl.abs(u) < 0.3, series, t)
    # dtanh = 1 − tanh²: near the cap, where t rounds to ±1, the slope is 0, as in PyTorch.
    return softcap * t, scale * (1.0 - t * t)
