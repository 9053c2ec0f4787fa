"""Constants shared by kernels. Triton reads a global only if it is a constexpr; launches use `.value`."""

from __future__ import annotations

from tigon.kernels import tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x · LOG2E)
LN2 = tl.constexpr(0.6931471805599453)  # log(x) = log2(x) · LN2
# The lowest finite fp32 number, where running maxima start. Starting from -inf, a lane that has seen only -inf would
# compute inf - inf. A greater start would win in a lane that has seen only this number, which many masks use.
LOWEST = tl.constexpr(-3.4028234663852886e38)
