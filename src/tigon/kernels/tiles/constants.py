"""Numbers that kernels share. Triton reads a global only if it is a constexpr; a launch takes its `.value`."""

from __future__ import annotations

from tigon.kernels import tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x · LOG2E)
LN2 = tl.constexpr(0.6931471805599453)  # log(x) = log2(x) · LN2
# The least finite fp32 number: where a running maximum starts. From -inf, a lane that has seen only -inf would compute
# inf - inf. A greater start would be the maximum of a lane that has seen only a mask of this number, as many masks are.
LOWEST = tl.constexpr(-3.4028234663852886e38)
