"""The terms of a divergence between two distributions, per class.

Shared by the kernels for `tigon.ops.divergence` and distillation, independent of how a row is read.
"""

from __future__ import annotations

from tigon.kernels import INTERPRET, jit, tl

# Log of a probability far below fp32's smallest: 2^LEAST_LOG is 0, and LEAST_LOG is finite.
LEAST_LOG = tl.constexpr(-1e4)
INTERPRETED = tl.constexpr(INTERPRET)

KNOWS_TARGET = True  # whether kernels can ask for the GPU's vendor
try:
    from triton.language.target_info import is_cuda as is_cuda
except ImportError:
    KNOWS_TARGET = False

    @jit
    def is_cuda():
        return False


@jit
def log2_of_normal(x):
    """log₂ x for normal x, to 2⁻²² near 1: a single NVIDIA instruction, where tl.log2 takes twenty."""
    if INTERPRETED:
        y = tl.log2(x)
    elif is_cuda():
        # ftz: subnormals count as 0, hence the function's name.
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.log2(x)
    return y


@jit
def sides(lq, lp, beta, KIND: tl.constexpr):
    """A class's divergence term in bits (TVD's as it is), q, and u, from lq = log₂ q and lp = log₂ p.

    q is the student, p the teacher. The divergence's slope with respect to lq is a multiple of u; Σ q · u over the
    classes then gives the slope with respect to a logit, q · (u − Σ q · u). For forward KL u is p, and the slope q − p.
    beta weighs JSD's mixture M = beta · p + (1 − beta) · q. A class with probability 0 adds nothing, even if its
    logarithm is -inf. NaN stays NaN.
    """
    if KIND == "kl":
        p, q = tl.exp2(lp), tl.exp2(lq)
        u = p
        # At p = 0 the term is 0: 0 · (-inf) must not become NaN. At q = 0 with p > 0 it stays infinite, as KL is.
        terms = tl.where(p == 0.0, 0.0, p * (lp - lq))
    elif KIND == "reverse":
        q = tl.exp2(lq)
        # At q = 0: 0 · (−inf) must not become NaN.
        u = tl.where(q == 0.0, 0.0, lq - lp)
        terms = q * u
    elif KIND == "tvd":
        p, q = tl.exp2(lp), tl.exp2(lq)
        u = half_sign(q, p)
        terms = 0.5 * tl.abs(p - q)
    else:
        # Computed from max(p, q) and the ratio: two exponentials instead of three. Where p and q are close and terms
        # cancel, the logarithm's argument is near 1. Both logs are kept finite, so that a probability of 0 adds 0.
        lp = tl.maximum(lp, LEAST_LOG, propagate_nan=tl.PropagateNan.ALL)
        lq = tl.maximum(lq, LEAST_LOG, propagate_nan=tl.PropagateNan.ALL)
        d = lp - lq
        ratio = tl.exp2(-tl.abs(d))
        large = tl.exp2(tl.maximum(lp, lq))
        small = large * ratio
        up = d >= 0.0
        p = tl.where(up, large, small)
        q = tl.where(up, small, large)
        weight = tl.where(up, beta, 1.0 - beta)
        log_m = log2_of_normal(weight + (1.0 - weight) * ratio)  # log2 of M / max(p, q)
        u = (1.0 - beta) * (-tl.maximum(d, 0.0) - log_m)
        terms = beta * p * (tl.minimum(d, 0.0) - log_m) + q * u
    return terms, q, u


@jit
def half_sign(q, p):
    """½ sign(q − p), TVD's slope with respect to q; 0 where they are equal or either is NaN."""
    # Two comparisons, both false for NaN: a sign by division would be NaN at q = p.
    return tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))
