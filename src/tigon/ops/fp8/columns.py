"""The factors of a weight gradient: transposed, with the tokens' scales folded into one of them."""

from __future__ import annotations

from torch import Tensor

from tigon.ops.fp8.recipe import Norm
from tigon.ops.fp8.reference import fold_scales_reference, to_columns_reference, transpose_rows_reference


def fold_scales(into: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """into / c (M, 1), and c = max into · other, 0-d."""
    return fold_scales_reference(into, other)


def to_columns(x: Tensor, factor: Tensor, norm: Norm | None = None) -> Tensor:
    """x · factor, or norm(x) · factor, in e4m3, transposed: (N, M padded to 16 with zeros)."""
    return to_columns_reference(x, factor, norm)


def transpose_rows(data: Tensor) -> Tensor:
    """data (M, N) → (N, M padded to 16 with zeros), the same bytes."""
    return transpose_rows_reference(data)
