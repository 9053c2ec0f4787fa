"""Embedding bags over byte rows, dequantized in registers: y = Σ (scale · code + offset), scale and offset per row.

    bytes per row     D codes, plus 4 for scale and offset in fp16: 34 at D = 30, where fp32 takes 120

Source: Guan et al. 2019, Post-training 4-bit quantization on embedding tables, https://arxiv.org/abs/1911.02079,
row-wise asymmetric scheme; in rankers: Borisyuk et al. 2024, LiRank, https://arxiv.org/abs/2402.06859
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tigon.kernels import check_tensors, launcher, use_triton
from tigon.ops.embedding_bag import embedding_bag_reference
from tigon.ops.embedding_bag.checks import bags_shape, check_bags, complete_offsets, flat_bags
from tigon.ops.embedding_bag.launches import bag_sums, measure_bags
from tigon.ops.example import HEAD, Example, make_ids

LARGEST = 65504.0  # largest fp16 number


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to 8-bit codes between its minimum and maximum: w ≈ scale · code + offset.

    Args:
        weight: (N, D), any float dtype. Checking the values synchronizes once.
    Returns: codes (N, D) uint8, and scale_offset (N, 2) fp16, on the weight's device. offset is the minimum rounded
        down to fp16; scale is rounded up, so that code 255 reaches the maximum: the error is at most half a scale.
        scale is (max - min) / 255 to within fp16's rounding. It is larger for rows with a range below 0.016, where fp16
        only has multiples of 2⁻²⁴, and for rows far from 0 relative to their range, where offset is rounded.
        A constant row has codes 1. The value is exact if representable as a sum of two fp16 numbers, as every fp16
        number is; else the error is at most 2⁻²² relative, or 2⁻²⁵.
    Raises: ValueError unless weight is a float matrix with finite values within fp16's range, ±65504.

    Replaces::

        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        codes = ((weight - low) / (high - low) * 255).round().to(torch.uint8)
    """
    check_tensors("quantize_rows", weight=weight)
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise ValueError(f"quantize_rows: weight must be (N, D) floats, got {tuple(weight.shape)} {weight.dtype}.")
    w = weight.detach().double()
    if w.numel() and not bool((w.abs() <= LARGEST).all()):  # also rejects NaN
        raise ValueError(
            "quantize_rows: weight must be finite and within ±65504, as its scales are fp16, got other values."
        )
    N, D = w.shape
    if not w.numel():
        return weight.new_empty((N, D), dtype=torch.uint8), weight.new_zeros((N, 2), dtype=torch.float16)
    low, high = w.amin(1), w.amax(1)
    offset = _round(low, down=True)
    scale = _round((high - offset.double()) / 255, down=False)
    constant = low == high
    near = low.half()
    offset = torch.where(constant, near, offset)
    scale = torch.where(constant, (low - near.double()).half(), scale)
    codes = (w - offset.double()[:, None]) / torch.where(scale == 0, 1, scale).double()[:, None]
    codes = torch.where(constant[:, None], 1.0, codes.round().clamp(0, 255))
    return codes.to(torch.uint8), torch.stack((scale, offset), 1)


def _round(x: Tensor, down: bool) -> Tensor:
    """Round x to fp16, towards −∞ or +∞."""
    near = x.half()
    beyond = near.double() > x if down else near.double() < x
    # torch has no fp16 nextafter on every device.
    bits = near.view(torch.int16).int()
    ordered = torch.where(bits < 0, -(bits & 0x7FFF), bits) + (-1 if down else 1)
    neighbour = torch.where(ordered < 0, -ordered | -0x8000, ordered).to(torch.int16).view(torch.float16)
    return torch.where(beyond, neighbour, near)


def quantized_embedding(
    codes: Tensor, scale_offset: Tensor, values: Tensor, offsets: Tensor | None = None, *,
    mode: Literal["sum", "mean"] = "mean", per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None, field_offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """`embedding_bag` over quantized rows, without a gradient.

    Args:
        codes: (N, D) uint8 or int8.
        scale_offset: (N, 2) fp16, as from `quantize_rows`: row r is scale_offset[r, 0] · codes[r] + scale_offset[r, 1].
        values, offsets, mode, include_last_offset, padding_idx, field_offsets: as in `embedding_bag`.
        per_sample_weights: as in `embedding_bag`, but without a gradient.
        dtype: the result's dtype: fp32, bf16, fp16 or fp64.
    Returns: (B, D), with field_offsets (B, F, D). Rows are dequantized and summed in fp32, and rounded once.
    Raises: ValueError for invalid shapes, dtypes or options, and for tensors that require a gradient.

    A row takes D + 4 bytes: 34 at width 30, where fp32 takes 120. The dense table never exists in memory.

    Replaces::

        weight = codes.float() * scale_offset[:, :1].float() + scale_offset[:, 1:].float()
        y = F.embedding_bag(values, weight, mode=mode)
    """
    name = "quantized_embedding"
    check_tensors(name, codes=codes, scale_offset=scale_offset, values=values, offsets=offsets,
                  per_sample_weights=per_sample_weights, field_offsets=field_offsets)  # fmt: skip
    if codes.dim() != 2 or codes.dtype not in (torch.uint8, torch.int8):
        raise ValueError(f"{name}: codes must be (N, D) uint8 or int8, got {tuple(codes.shape)} {codes.dtype}.")
    if scale_offset.shape != (codes.shape[0], 2) or scale_offset.dtype != torch.float16:
        raise ValueError(
            f"{name}: scale_offset must be ({codes.shape[0]}, 2) float16, got {tuple(scale_offset.shape)} "
            f"{scale_offset.dtype}."
        )
    if scale_offset.device != codes.device:
        raise ValueError(
            f"{name}: scale_offset must be on the codes' device {codes.device}, got {scale_offset.device}."
        )
    if not dtype.is_floating_point:
        raise ValueError(f"{name}: dtype must be a float dtype, got {dtype}.")
    for what, t in (("scale_offset", scale_offset), ("per_sample_weights", per_sample_weights)):
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: {what} must not require a gradient, which 8-bit codes do not have.")
    offsets = complete_offsets(values, offsets, include_last_offset)
    padding = check_bags(name, codes, values, offsets, mode, per_sample_weights, padding_idx, field_offsets)
    # use_triton expects float tensors: scale_offset is on the codes' device. A fp64 result is rejected if kernels are
    # forced.
    other = (scale_offset.new_empty(0, dtype=dtype),) if dtype == torch.float64 else ()
    if not use_triton(scale_offset, per_sample_weights, *other):
        return quantized_embedding_reference(
            codes, scale_offset, values, offsets, mode=mode, per_sample_weights=per_sample_weights,
            include_last_offset=True, padding_idx=padding_idx, field_offsets=field_offsets, dtype=dtype,
        )  # fmt: skip
    shape = bags_shape(values, offsets, field_offsets)
    values, per_sample_weights = (flat_bags(t, field_offsets) for t in (values, per_sample_weights))
    with torch.no_grad():
        y = _quantized_embedding(
            codes, scale_offset, values, offsets, field_offsets, per_sample_weights, mode == "mean", padding, dtype
        )
    return y.view(*shape, codes.shape[1])


def quantized_embedding_reference(
    codes: Tensor, scale_offset: Tensor, values: Tensor, offsets: Tensor | None = None, *,
    mode: str = "mean", per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None, field_offsets: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    acc = torch.promote_types(dtype, torch.float32)
    scale, offset = scale_offset.to(acc).split(1, 1)
    y = embedding_bag_reference(
        values, codes.to(acc) * scale + offset, offsets, mode=mode, per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset, padding_idx=padding_idx, field_offsets=field_offsets,
    )  # fmt: skip
    return y.to(dtype)


def _quantized_embedding_fake(
    codes: Tensor, scale_offset: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None,
    factors: Tensor | None, mean: bool, padding_idx: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return codes.new_empty((measure_bags(values, offsets)[0], codes.shape[1]), dtype=dtype)


@launcher(_quantized_embedding_fake)
def _quantized_embedding(
    codes: Tensor, scale_offset: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None,
    factors: Tensor | None, mean: bool, padding_idx: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    y = _quantized_embedding_fake(codes, scale_offset, values, offsets, fields, factors, mean, padding_idx, dtype)
    bag_sums(codes, values, offsets, fields, factors, scale_offset, mean, padding_idx, y)
    return y


def _quantize_and_look_up(weight: Tensor) -> Tensor:
    codes, scale_offset = quantize_rows(weight.detach().float())
    return quantized_embedding(codes, scale_offset, make_ids(weight, 64, 4), mode="sum")


EXAMPLES = {
    "quantized_embedding": Example("Embedding", (HEAD,), _quantize_and_look_up),
}
