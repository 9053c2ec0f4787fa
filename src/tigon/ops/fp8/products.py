"""Products of e4m3 factors."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.ops.fp8.recipe import Rows, Weight
from tigon.ops.fp8.reference import multiply_columns_reference, multiply_rows_reference


def multiply_rows(rows: Rows, weight: Weight, bias: Tensor | None = None, *, is_exact: bool = False) -> Tensor:
    """rows (M, K) by a weight (N, K) → (M, N) bf16."""
    return multiply_rows_reference(rows, weight, bias, torch.bfloat16)


def multiply_columns(a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype, *, is_exact: bool = False) -> Tensor:
    """c · a bᵀ for a (N, M) and b (K, M) → (N, K)."""
    return multiply_columns_reference(a, b, c, dtype)
