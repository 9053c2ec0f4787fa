"""Codes that keep a matrix's products, where rounding to nearest keeps its numbers.

    least over Ŵ  E‖(W − Ŵ) x‖²,   by the second moment of the inputs x

Columns are rounded one after the other, and the error of each is made good in those that are not rounded yet, as far as
the inputs go together. A column is an input: heavy ones come first, so that the others, in fewer bits, carry what they
leave.

Source: GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.compress.packing import LARGEST, grid, groups_of, nearest

DAMPING = 0.01  # of the mean square of the inputs: as little as that no input explains another that it never met


def fitted(weight: Tensor, moment: Tensor, widths: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales of a matrix, cut into parts by columns.

    Args:
        weight: (M, N), finite.
        moment: (N, N) fp32, the mean of x xᵀ over the inputs.
        widths: of each part its columns and their bits, together all N columns.
    Returns: for each part what `quantize_groups` gives.
    """
    w, root = weight.detach().float().clone(), _root(moment)
    parts, start = [], 0
    for columns, bits in widths:
        count, size = groups_of(columns)
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
    """U, upper triangular, with Uᵀ U = the moment's inverse: row i says how inputs after i make good for i."""
    eye = torch.eye(len(moment), device=moment.device, dtype=moment.dtype)
    damped = moment + (DAMPING * moment.diagonal().mean() + 1e-12) * eye
    root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return root


def _group(own: Tensor, root: Tensor, later: Tensor, bits: int, codes: Tensor) -> Tensor:
    """Round one group's columns into `codes`, and correct the columns after it in place; the group's scales."""
    own = own.clamp(-LARGEST, LARGEST)
    scales = grid(own, bits)
    scale, offset = scales.float().unbind(-1)
    left_over = torch.empty_like(own)
    for i in range(own.shape[1]):
        code = nearest(own[:, i : i + 1], scales, bits)[:, 0]
        codes[:, i] = code.to(torch.uint8)
        left_over[:, i] = (own[:, i] - torch.addcmul(offset, code, scale)) / root[i, i]
        own[:, i + 1 :] -= left_over[:, i, None] * root[i, i + 1 : own.shape[1]]
    later -= left_over @ root[:, own.shape[1] :]
    return scales
