"""Rounding that preserves a matrix's products rather than its entries (GPTQ).

    minimise over Ŵ  E‖(W − Ŵ) x‖²,   from the inputs' second moment

Columns are rounded in sequence; each column's error is compensated in the remaining columns through input correlations.
A column corresponds to an input. Heavy inputs come first, so that the low-bit columns absorb their error.

Source: GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.compress.packing import LARGEST, choose_grid, round_to_grid, split_groups

DAMPING = 0.01  # relative to the inputs' mean square; just enough that inputs do not explain unrelated inputs


def fit_codes(weight: Tensor, moment: Tensor, widths: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Quantize a matrix in column blocks.

    Args:
        weight: (M, N), finite.
        moment: (N, N) fp32, mean x xᵀ over the inputs.
        widths: (columns, bits) per block; the columns add up to N.
    Returns: codes and scales per block, as from `quantize_groups`.
    """
    w, root = weight.detach().float().clone(), _root(moment)
    parts, start = [], 0
    for columns, bits in widths:
        count, size = split_groups(columns)
        codes = torch.zeros(len(w), count, size, dtype=torch.uint8, device=w.device)
        scales = torch.zeros(len(w), count, 2, dtype=torch.float16, device=w.device)
        for group in range(count):
            left = start + group * size
            right = min(left + size, start + columns)
            own = codes[:, group, : right - left]
            scales[:, group] = _group(w[:, left:right], root[left:right, left:], w[:, right:], bits, own)
        parts.append((codes, scales))
        start += columns
    return parts


def _root(moment: Tensor) -> Tensor:
    """Upper triangular U with Uᵀ U = moment⁻¹: row i gives the compensation for input i by later inputs."""
    eye = torch.eye(len(moment), device=moment.device, dtype=moment.dtype)
    damped = moment + (DAMPING * moment.diagonal().mean() + 1e-12) * eye
    root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return root


def _group(own: Tensor, root: Tensor, later: Tensor, bits: int, codes: Tensor) -> Tensor:
    """Round a group's columns into `codes`, correct later columns in place, and return the group's scales."""
    own = own.clamp(-LARGEST, LARGEST)
    scales = choose_grid(own, bits)
    scale, offset = scales.float().unbind(-1)
    left_over = torch.empty_like(own)
    for i in range(own.shape[1]):
        code = round_to_grid(own[:, i : i + 1], scales, bits)[:, 0]
        codes[:, i] = code.to(torch.uint8)
        left_over[:, i] = (own[:, i] - torch.addcmul(offset, code, scale)) / root[i, i]
        own[:, i + 1 :] -= left_over[:, i, None] * root[i, i + 1 : own.shape[1]]
    later -= left_over @ root[:, own.shape[1] :]
    return scales
