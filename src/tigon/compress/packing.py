"""Weights in 2 to 8 bits: rounded to nearest on a grid for each group, codes packed without a bit lost.

    w ≈ scale · code + offset       a scale and an offset in fp16 for each group of about 64 numbers of a row

A byte holds the same bits of several codes, and a table of 256 entries takes a byte apart in one look-up. 3 bits are
two planes, of 2 bits and of 1: three bytes hold eight codes.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

WIDTHS = (2, 3, 4, 5, 6, 8)
GROUP = 64  # numbers of a row that share a scale
LARGEST = 65504.0  # of fp16, which scales and offsets have
# Of the way between a group's extremes. Numbers outside are clipped, which costs less than wide steps do: at 3 bits the
# squared error is about a fifth smaller.
SPANS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)


def groups_of(width: int, group: int = GROUP) -> tuple[int, int]:
    """How many groups a row of this width has, and their size: the fewest of at most `group`, as even as can be."""
    count = max(1, math.ceil(width / group))
    return count, math.ceil(width / count)


def stored_bytes(rows: int, width: int, bits: int, group: int = GROUP) -> int:
    """Bytes of a matrix in so many bits: its codes, and 4 for each group."""
    count, size = groups_of(width, group)
    return math.ceil(rows * count * size / 8) * bits + 4 * rows * count


def grid(numbers: Tensor, bits: int) -> Tensor:
    """(…, 2) fp16: scale and offset of each group that round its numbers (…, S) with the least squared error."""
    low, high = numbers.amin(-1), numbers.amax(-1)
    middle, half = (low + high) / 2, (high - low) / 2
    best: Tensor | None = None
    least: Tensor | None = None
    for span in SPANS:
        # Codes count from the rounded offset by the rounded scale, so that widening repeats the same arithmetic.
        offset = (middle - span * half).half()
        scale = ((middle + span * half - offset.float()) / (2**bits - 1)).half()
        found = torch.stack((scale, offset), -1)
        codes = nearest(numbers, found, bits)
        error = (torch.addcmul(offset.float()[..., None], codes, scale.float()[..., None]) - numbers).square().sum(-1)
        if best is None or least is None:
            best, least = found, error
        else:
            best = torch.where((error < least)[..., None], found, best)
            least = torch.minimum(error, least)
    assert best is not None
    return best


def nearest(numbers: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes of numbers (…, S) on the grids of their groups (…, 2), still as floats."""
    scale, offset = scales.float().split(1, -1)
    codes: Tensor = ((numbers - offset) / torch.where(scale == 0, 1, scale)).round().clamp(0, 2**bits - 1)
    return codes


def quantize_groups(weight: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, each number rounded to nearest, and what widens them.

    Args:
        weight: (M, N), finite floats within ±65504.
        bits: of a code, 2 to 8.
        group: the most numbers of a row that share a scale.
    Returns: codes (M, G, S) uint8, S numbers for each of G groups, and scales (M, G, 2) fp16, of scale and offset.
    """
    rows, width = weight.shape
    count, size = groups_of(width, group)
    w = weight.detach().float()
    if count * size > width:  # a copy of the last column widens no group's range
        w = torch.cat((w, w[:, -1:].expand(rows, count * size - width)), 1)
    w = w.reshape(rows, count, size)
    scales = grid(w, bits)
    return nearest(w, scales, bits).to(torch.uint8), scales


def widen_groups(codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(M, width) of codes (M, G, S) and scales (M, G, 2); scales may require a gradient."""
    # 8 bits of a code times 11 of a scale round in bf16: the sum is taken in fp32, and rounded once.
    acc = torch.promote_types(scales.dtype, torch.float32)
    scale, offset = scales.to(acc).split(1, -1)
    w = torch.addcmul(offset, codes.to(acc), scale).flatten(1)
    return (w if w.shape[1] == width else w[:, :width]).to(dtype)


def planes_of(bits: int) -> list[int]:
    """The widths of the planes that a code is cut into, low bits first: powers of two, so that bytes divide evenly."""
    return [plane for plane in (4, 2, 1) if bits & plane] if bits < 8 else [8]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2^bits as bytes: bits bytes for each eight codes, the planes one after the other."""
    flat = codes.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8))
    packed, low = [], 0
    for plane in planes_of(bits):
        per = 8 // plane
        parts = ((flat >> low) & (2**plane - 1)).view(-1, per)
        shifts = torch.arange(per, device=flat.device, dtype=torch.uint8) * plane
        packed.append((parts << shifts).sum(1, dtype=torch.int32).to(torch.uint8))
        low += plane
    return torch.cat(packed)


@functools.cache
def _table(plane: int, device: torch.device) -> Tensor:
    """What each of the 256 bytes holds, as one whole number of 8 / plane bytes."""
    per = 8 // plane
    byte = torch.arange(256, device=device)[:, None]
    parts = (byte >> (torch.arange(per, device=device) * plane)) & (2**plane - 1)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[per]
    table: Tensor = parts.to(torch.uint8).view(kind).flatten()
    return table


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes that `pack` has packed, uint8."""
    if bits == 8:
        return packed[:count]
    eighths, start, low = math.ceil(count / 8), 0, 0
    codes: Tensor | None = None
    for plane in planes_of(bits):
        length = eighths * plane
        part = packed[start : start + length].int()
        found = _table(plane, packed.device).index_select(0, part).view(torch.uint8)
        codes = found << low if codes is None else codes | (found << low)
        start, low = start + length, low + plane
    assert codes is not None
    return codes[:count]
