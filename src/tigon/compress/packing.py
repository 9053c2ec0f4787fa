"""Quantize weights to 2 to 8 bits: round to nearest on a grid per group, and pack codes without wasted bits.

    w ≈ scale · code + offset       an fp16 scale and offset for each group of about 64 numbers in a row

A byte holds the same bit planes from several codes; a 256-entry table unpacks a byte in one lookup. 3-bit codes use two
planes, 2 bits and 1 bit: three bytes hold eight codes.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

WIDTHS = (2, 3, 4, 5, 6, 8)
GROUP = 64  # numbers in a row that share a scale
LARGEST = 65504.0  # fp16 maximum; scales and offsets are fp16
# Fractions of a group's range to try. Clipping outliers costs less than wide steps: at 3 bits the squared error is
# about a fifth smaller.
SPANS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)


def split_groups(width: int, group: int = GROUP) -> tuple[int, int]:
    """Group count and size for a row width: the fewest groups no larger than `group`, as even as possible."""
    count = max(1, math.ceil(width / group))
    return count, math.ceil(width / count)


def count_bytes(rows: int, width: int, bits: int, group: int = GROUP) -> int:
    """Bytes for a quantized matrix: its codes and 4 bytes per group."""
    count, size = split_groups(width, group)
    return math.ceil(rows * count * size / 8) * bits + 4 * rows * count


def choose_grid(numbers: Tensor, bits: int) -> Tensor:
    """(…, 2) fp16: scale and offset per group that minimise the squared rounding error for numbers (…, S)."""
    low, high = numbers.amin(-1), numbers.amax(-1)
    middle, half = (low + high) / 2, (high - low) / 2
    best = least = torch.empty(0)
    for span in SPANS:
        # Compute codes from the rounded scale and offset, so that dequantization repeats the same arithmetic.
        offset = (middle - span * half).half()
        scale = ((middle + span * half - offset.float()) / (2**bits - 1)).half()
        scales = torch.stack((scale, offset), -1)
        codes = round_to_grid(numbers, scales, bits)
        error = (torch.addcmul(offset.float()[..., None], codes, scale.float()[..., None]) - numbers).square().sum(-1)
        if span == SPANS[0]:
            best, least = scales, error
        else:
            best = torch.where((error < least)[..., None], scales, best)
            least = torch.minimum(error, least)
    return best


def round_to_grid(numbers: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes for numbers (…, S) on their groups' grids (…, 2), as floats."""
    scale, offset = scales.float().split(1, -1)
    codes: Tensor = ((numbers - offset) / torch.where(scale == 0, 1, scale)).round().clamp(0, 2**bits - 1)
    return codes


def quantize_groups(weight: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Quantize a matrix by rounding each number to nearest.

    Args:
        weight: (M, N), finite floats within ±65504.
        bits: bits per code, 2 to 8.
        group: maximum numbers in a row that share a scale.
    Returns: codes (M, G, S) uint8 for G groups with S numbers each, and scales (M, G, 2) fp16: scale and offset.
    """
    rows, width = weight.shape
    count, size = split_groups(width, group)
    w = weight.detach().float()
    if count * size > width:  # padding with the last column does not widen a group's range
        w = torch.cat((w, w[:, -1:].expand(rows, count * size - width)), 1)
    w = w.reshape(rows, count, size)
    scales = choose_grid(w, bits)
    return round_to_grid(w, scales, bits).to(torch.uint8), scales


def dequantize_groups(codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Dequantize codes (M, G, S) with scales (M, G, 2) to (M, width); scales may require gradients."""
    # In bf16 an 8-bit code times an 11-bit scale is rounded: sum in fp32 and round once.
    acc = torch.promote_types(scales.dtype, torch.float32)
    scale, offset = scales.to(acc).split(1, -1)
    w = torch.addcmul(offset, codes.to(acc), scale).flatten(1)
    return (w if w.shape[1] == width else w[:, :width]).to(dtype)


def list_planes(bits: int) -> list[int]:
    """Bit-plane widths for a code, low bits first: powers of two, which divide a byte evenly."""
    return [plane for plane in (4, 2, 1) if bits & plane] if bits < 8 else [8]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits into bytes: `bits` bytes per eight codes, plane after plane."""
    flat = codes.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8))
    packed, low = [], 0
    for plane in list_planes(bits):
        per = 8 // plane
        parts = ((flat >> low) & (2**plane - 1)).view(-1, per)
        shifts = torch.arange(per, device=flat.device, dtype=torch.uint8) * plane
        packed.append((parts << shifts).sum(1, dtype=torch.int32).to(torch.uint8))
        low += plane
    return torch.cat(packed)


@functools.cache
def _table(plane: int, device: torch.device) -> Tensor:
    """For each byte value, its unpacked codes as one integer with 8 / plane bytes."""
    per = 8 // plane
    byte = torch.arange(256, device=device)[:, None]
    parts = (byte >> (torch.arange(per, device=device) * plane)) & (2**plane - 1)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[per]
    table: Tensor = parts.to(torch.uint8).view(kind).flatten()
    return table


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes packed by `pack`, uint8."""
    if bits == 8:
        return packed[:count]
    planes = list_planes(bits)
    low, parts = 0, []
    for plane, part in zip(planes, packed.split([math.ceil(count / 8) * plane for plane in planes]), strict=True):
        parts.append(_table(plane, packed.device).index_select(0, part.int()).view(torch.uint8) << low)
        low += plane
    return functools.reduce(torch.bitwise_or, parts)[:count]
