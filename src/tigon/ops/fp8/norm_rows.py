"""The residual sum, its RMS norm, and the norm in e4m3 rows, in one pass."""

from __future__ import annotations

from torch import Tensor

from tigon.ops.fp8.recipe import Rows
from tigon.ops.fp8.reference import norm_rows_reference


def norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Rows]:
    """x + residual (x itself without a residual), its 1/rms (M,), and its norm in rows."""
    return norm_rows_reference(x, residual, weight, eps, offset, cast)
