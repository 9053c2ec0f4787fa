"""Round rows to e4m3 with a scale each."""

from __future__ import annotations

from torch import Tensor

from tigon.ops.fp8.recipe import Rows
from tigon.ops.fp8.reference import quantize_rows_reference


def quantize_rows(x: Tensor, *beside: Tensor, out: Rows | None = None) -> Rows:
    """Rows of x (M, N), or of x and the tensors beside it side by side, in e4m3 with one scale a row.

    out: contiguous rows to write into.
    """
    rows = quantize_rows_reference(x, *beside)
    return rows if out is None else Rows(out.data.copy_(rows.data), out.scale.copy_(rows.scale))
