"""Codes: rows once more in fewer bits, by which a search finds candidates that it then scores by the rows.

"int8": a row x is s · (c + e), with a scale s, a code c of whole numbers from -127 to 127, and an error e. A scan of
the codes bounds every score from above, so the answer stays exact.

Source: bounds from few bits, and exact scores for what they leave, are the VA-file's, Weber, Schek and Blott 1998,
https://www.vldb.org/conf/1998/p194.pdf
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.runtime import check_tensors

Codes = Literal["int8"]
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
# Rows that are encoded at once, in copies of fp32.
PIECE = 1 << 24
# Rows whose largest number is in between have codes. A smaller one is encoded as if it were the least; a larger one, or
# NaN, has scale inf: its bound is above all, so that it is always scored exactly.
LEAST, MOST = 2.0**-60, 2.0**50


class CodedItems(NamedTuple):
    """Rows and their codes, which `tigon.filtered_topk` takes in place of items. `encode_items` makes them.

    Attributes:
        rows: (N, D) fp16, bf16, float8_e4m3fn or fp32, by which every returned score is computed.
        codes: (N, D) int8.
        scales: (N,) fp32, of a row and its code. inf for a row that its code says nothing of.
        error: (2,) fp32, rounded up: no row has a larger |x / scale - code|₂, and none a larger |code|₂. For rows that
            come from several calls of `encode_items` the larger numbers of all of them.
    """

    rows: Tensor
    codes: Tensor
    scales: Tensor | None = None
    error: Tensor | None = None


def encode_items(rows: Tensor, codes: Codes = "int8") -> CodedItems:
    """Rows with their codes, for `tigon.filtered_topk`.

    Args:
        rows: (N, D) fp16, bf16, float8_e4m3fn or fp32.
        codes: "int8": D + 4 bytes a row, which searches of up to 64 queries read before they read rows. They find the
            same.
    Returns: `CodedItems`, of which rows is the tensor itself. Encode rows again when they change.
    Raises: ValueError for another shape or dtype, or unknown codes.

    Replaces::

        scales = rows.float().abs().amax(1) / 127
        codes = (rows.float() / scales[:, None]).round().to(torch.int8)
    """
    check_tensors("encode_items", rows=rows)
    if rows.dim() != 2 or rows.shape[1] < 1 or rows.dtype not in FLOATS:
        raise ValueError(
            f"encode_items: rows must be (N, D) fp16, bf16, float8_e4m3fn or fp32, D at least 1, got "
            f"{tuple(rows.shape)} {rows.dtype}."
        )
    if codes not in get_args(Codes):
        raise ValueError(f"encode_items: codes must be one of {', '.join(map(repr, get_args(Codes)))}, got {codes!r}.")
    N, D = rows.shape
    whole = rows.new_empty((N, D), dtype=torch.int8)
    scales = rows.new_empty((N,), dtype=torch.float32)
    error = rows.new_zeros((2,), dtype=torch.float32)
    size = max(1, PIECE // D)
    for start in range(0, N, size):
        part = slice(start, start + size)
        whole[part], scales[part], largest = _int8(rows.detach()[part].float())
        error = torch.maximum(error, largest)
    return CodedItems(rows, whole, scales, error)


def _int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the two norms, each at least the exact one."""
    D = x.shape[1]
    largest = x.abs().amax(1)
    ordinary = largest <= MOST  # NaN is not
    scale = torch.where(ordinary, largest.clamp(min=LEAST) / 127, 1.0)
    ratio = torch.where(ordinary[:, None], x / scale[:, None], 0.0)
    code = ratio.round().clamp(-127, 127)
    # Each ratio is rounded by at most 127 · 2⁻²⁴, and so is its difference from the code: together below 2⁻¹⁵. A sum of
    # D squares is off by less than D · 2⁻²³ of itself.
    margin = 1 + D * 2.0**-22
    errors = (ratio - code).square().sum(1).amax().sqrt() * margin + D**0.5 * 2.0**-15
    norms = code.square().sum(1).amax().sqrt() * margin
    return code.to(torch.int8), torch.where(ordinary, scale, torch.inf), torch.stack((errors, norms))
