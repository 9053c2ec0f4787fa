"""Weights in 2 to 8 bits: round to nearest between the extremes of each group, codes packed without a bit lost.

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


def groups_of(width: int, group: int = GROUP) -> tuple[int, int]:
    """How many groups a row of this width has, and their size: the fewest of at most `group`, as even as can be."""
    count = max(1, math.ceil(width / group))
    return count, math.ceil(width / count)


def stored_bytes(rows: int, width: int, bits: int, group: int = GROUP) -> int:
    """Bytes of a matrix in so many bits: its codes, and 4 for each group."""
    count, size = groups_of(width, group)
    return math.ceil(rows * count * size / 8) * bits + 4 * rows * count


def quantize_groups(weight: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, and what widens them.

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
    low, high = w.amin(-1), w.amax(-1)
    # Codes count from the rounded offset by the rounded scale, so that widening repeats the same arithmetic.
    offset = low.half()
    scale = ((high - offset.float()) / (2**bits - 1)).half()
    step = torch.where(scale == 0, 1, scale).float()
    codes = ((w - offset.float()[..., None]) / step[..., None]).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), torch.stack((scale, offset), -1)


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
