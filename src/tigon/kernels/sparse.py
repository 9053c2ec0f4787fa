"""Sparse matrices from parts that were validated when created."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def make_csr_matrix(starts: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """Build a CSR matrix without checking the parts, because a check synchronizes the host with the device.

    Args:
        starts: (rows + 1,), each row's first position in `values`.
        columns: each value's column.
        values: row after row.
        size: (rows, columns).
    """
    with warnings.catch_warnings():
        # torch warns about every CSR tensor. Here CSR tensors only multiply dense matrices.
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, columns, values, size, check_invariants=False)
