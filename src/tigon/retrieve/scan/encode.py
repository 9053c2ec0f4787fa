"""Encode rows: 8-bit codes with bounds on their errors, or signs."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tigon.kernels import check_tensors, use_triton
from tigon.retrieve.scan import sign
from tigon.retrieve.scan.codes import CodedItems
from tigon.retrieve.scan.sign_launches import encode

Codes = Literal["int8", "sign"]
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
# Numbers encoded at once, in fp32 copies.
PIECE = 1 << 24
# Rows whose largest magnitude lies between these have codes. A smaller row is encoded as if at the minimum; a larger
# row, or a row with NaN, has scale inf and bound inf, so that it is always scored exactly.
LEAST, MOST = 2.0**-60, 2.0**50


def encode_items(rows: Tensor, codes: Codes = "int8", *, bits: int = 512, seed: int = 0) -> CodedItems:
    """Encode rows for `tigon.filtered_topk`.

    Args:
        rows: (N, D) fp16, bf16, float8_e4m3fn or fp32.
        codes: "int8": D + 4 bytes per row, read before the rows in searches with up to 64 queries, with the same
            result. "sign": bits / 8 + 2 bytes per row, from which searches with few queries estimate candidates: some
            best rows may then be missing, and the returned scores are exact.
        bits: signs only: 64, 128, 256, 512 or 1024.
        seed: signs only: the projections' seed. Rows that are searched together need the same seed.

    Returns: `CodedItems` whose rows is the given tensor itself. Encode rows again when they change.

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
    """The rows' signs, and their norms if scaled."""
    # use_triton accepts the floats in DTYPES; the kernel reads fp8 as bytes.
    one_byte = rows.dtype == torch.float8_e4m3fn
    if use_triton(projection.new_empty(0, dtype=torch.float16) if one_byte else rows):
        return encode(rows, projection, scaled=scaled)
    return sign.signs_reference(rows, projection, scaled=scaled)


def _int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and upper bounds on the two norms."""
    D = x.shape[1]
    largest = x.abs().amax(1)
    ordinary = largest <= MOST  # false for NaN
    scale = torch.where(ordinary, largest.clamp(min=LEAST) / 127, 1.0)
    ratio = torch.where(ordinary[:, None], x / scale[:, None], 0.0)
    code = ratio.round().clamp(-127, 127)
    # Each ratio is rounded by at most 127 · 2⁻²⁴, and so is the difference from the code: together below 2⁻¹⁵. A sum
    # over D squares has a relative error below D · 2⁻²³.
    margin = 1 + D * 2.0**-22
    errors = (ratio - code).square().sum(1).amax().sqrt() * margin + D**0.5 * 2.0**-15
    norms = code.square().sum(1).amax().sqrt() * margin
    return code.to(torch.int8), torch.where(ordinary, scale, torch.inf), torch.stack((errors, norms))
