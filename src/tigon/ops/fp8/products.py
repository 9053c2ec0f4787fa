"""Products of e4m3 factors."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.ops.fp8.recipe import Rows, Weight
from tigon.ops.fp8.reference import multiply_columns_reference, multiply_rows_reference


def multiply_rows(
    rows: Rows, weight: Weight, bias: Tensor | None = None, *, is_exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """rows (M, K) by a weight (N, K) → (M, N) bf16, written to out, contiguous, if given."""
    y = multiply_rows_reference(rows, weight, bias, torch.bfloat16)
    return y if out is None else out.copy_(y)


def multiply_columns(
    a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype, *, is_exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """c · a bᵀ for a (N, M) and b (K, M) → (N, K), written to out, contiguous and in dtype, if given."""
    y = multiply_columns_reference(a, b, c, dtype)
    return y if out is None else out.copy_(y)


def why_unsupported(device: torch.device) -> str:
    """The reason, as a sentence, why FP8 products do not run in FP8 on a device; "" if they do."""
    return ""
