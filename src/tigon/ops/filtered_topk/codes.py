"""Codes: rows once more in fewer bits, by which a search finds candidates that it then scores by the rows.

"int8": a row x is s · (c + e), with a scale s, a code c of whole numbers from -127 to 127, and an error e. A scan of
the codes bounds every score from above, so the answer stays exact.

"sign": signs of random projections (sign.py), by which a search guesses: the answer is approximate.

Source: bounds from few bits, and exact scores for what they leave, are the VA-file's, Weber, Schek and Blott 1998,
https://www.vldb.org/conf/1998/p194.pdf
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.ops.filtered_topk import sign
from tigon.ops.filtered_topk.sign_launches import encode
from tigon.runtime import check_tensors, use_triton

Codes = Literal["int8", "sign"]
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
        codes: (N, D) int8; or of signs (N, bits / 32) int32, whose lowest bits come first.
        scales: (N,) fp32, of a row and its code. inf for a row that its code says nothing of. Of signs (N,) bf16, the
            norms of the rows; None where all have the same.
        error: (2,) fp32, rounded up: no row has a larger |x / scale - code|₂, and none a larger |code|₂. For rows that
            come from several calls of `encode_items` the larger numbers of all of them.
        candidates: of signs: how many rows a query scores exactly, those with the best codes, and with them the rows
            beside these. None: 5 k, and at least 256.
        projection: of signs: (terms, bits) int32, of which numbers of a row each sign is one.
    """

    rows: Tensor
    codes: Tensor
    scales: Tensor | None = None
    error: Tensor | None = None
    candidates: int | None = None
    projection: Tensor | None = None


def encode_items(rows: Tensor, codes: Codes = "int8", *, bits: int = 512, seed: int = 0) -> CodedItems:
    """Rows with their codes, for `tigon.filtered_topk`.

    Args:
        rows: (N, D) fp16, bf16, float8_e4m3fn or fp32.
        codes: "int8": D + 4 bytes a row, which searches of up to 64 queries read before they read rows. They find the
            same. "sign": bits / 8 + 2 bytes a row, from which searches of few queries guess their candidates: an answer
            then lacks some of the best rows, and the scores of those that it has are exact.
        bits: of signs: 64, 128, 256, 512 or 1024.
        seed: of signs: of their projections. Rows that are searched together need the same.
    Returns: `CodedItems`, of which rows is the tensor itself. Encode rows again when they change.
    Raises: ValueError for another shape or dtype, unknown codes, or another number of bits.

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
    if codes == "sign":
        sign.check_bits("encode_items", bits)
        projection = sign.make_projection(rows.shape[1], bits, seed).to(rows.device)
        made = encode_signs(rows.detach(), projection, scaled=True)
        return CodedItems(rows, made.codes, made.scales, None, None, projection)
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


def encode_signs(rows: Tensor, projection: Tensor, *, scaled: bool) -> sign.Signs:
    """The signs of rows, and their norms where they are scaled."""
    # use_triton asks for floats of DTYPES; of fp8 the kernel reads the bytes.
    one_byte = rows.dtype == torch.float8_e4m3fn
    if use_triton(projection.new_empty(0, dtype=torch.float16) if one_byte else rows):
        return encode(rows, projection, scaled=scaled)
    return sign.signs_reference(rows, projection, scaled=scaled)


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
