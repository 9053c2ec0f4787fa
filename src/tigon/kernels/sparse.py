"""Sparse matrices of parts that were checked when they were made."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def make_csr_matrix(starts: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """A matrix in CSR layout, without a check of the parts, for which the host would wait for the device.

    Args:
        starts: (rows + 1,), where the values of each row begin.
        columns: of each value.
        values: row after row.
        size: rows and columns.
    """
    with warnings.catch_warnings():
        # torch says so of every CSR tensor. Here CSR tensors only multiply dense matrices.
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, columns, values, size, check_invariants=False)
