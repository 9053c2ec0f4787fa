"""A row's cross entropy from its logits' statistics, independent of the kernel or device that gathered them."""

from __future__ import annotations

from tigon.kernels import jit, tl
from tigon.kernels.tiles.constants import LN2


@jit
def row_loss(
    z_target, w_target, top, log2_sum, sum_z, sum_w, V, smoothing, z_loss, scale,
    WEIGHTED: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A row's loss, the z-loss share in that loss, and the target distribution's mass, all in fp32.

    z_target, top: the target's z and the row's maximum, before the scale, or after the softcap. log2_sum: log₂ of
    Σ exp(z − top), kept separate from top, since their sum would be rounded at its own size. sum_z, sum_w: Σ w·z and Σ
    w over the classes, used only with SMOOTHING. The gradient is p · mass minus the target distribution.
    """
    unit = scale  # converts z, which the statistics leave unscaled, to logits
    if SOFTCAP:
        unit = 1.0
    lse = top * unit + log2_sum * LN2
    # The difference of two close numbers comes first, where it is exact; only z-loss needs lse itself.
    nll = (top - z_target) * unit + log2_sum * LN2
    mass = 1.0
    if WEIGHTED:
        loss = w_target * nll
        mass = w_target
        if SMOOTHING:
            # Σ w · (lse − z) = Σw · nll + (Σw · z_target − Σ w·z): from nll, to avoid the rounded lse.
            loss = (1.0 - smoothing) * loss + smoothing / V * (sum_w * nll + (sum_w * z_target - sum_z) * unit)
            mass = (1.0 - smoothing) * w_target + smoothing / V * sum_w
    else:
        loss = nll
        if SMOOTHING:
            loss += smoothing * (z_target - sum_z / V) * unit
    z = z_loss * lse * lse
    return loss + z, z, mass
