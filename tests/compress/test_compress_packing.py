"""Codes of 2 to 8 bits: packed without loss, and on grids that lose little."""

import itertools
import math

import pytest
import torch

from tigon.compress.packing import WIDTHS, groups_of, pack, quantize_groups, stored_bytes, unpack, widen_groups


@pytest.mark.parametrize(("bits", "count"), itertools.product(WIDTHS, (1, 8, 1003)))  # least, a block, one begun
def test_every_code_comes_back(bits, count):
    codes = torch.randint(2**bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    codes[0] = 2**bits - 1
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == math.ceil(count / 8) * bits
    assert torch.equal(unpack(packed, bits, count), codes)


def between_extremes(w, bits):
    """What the plain grid, from the least to the largest number of each group, makes of them."""
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return ((w - low) / step).round() * step + low


@pytest.mark.parametrize("width", [1, 64, 100])  # least, a group, groups that do not divide
def test_numbers_go_to_the_nearest_code_of_the_better_grid(width):
    w = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    count, size = groups_of(width)
    errors = []
    for bits in WIDTHS:
        codes, scales = quantize_groups(w, bits)
        assert codes.shape == (7, count, size)
        assert int(codes.max()) < 2**bits
        every = torch.arange(2**bits) * scales[..., :1].float() + scales[..., 1:].float()  # (7, G, codes)
        padded = torch.nn.functional.pad(w, (0, count * size - width), value=torch.nan).view(7, count, size)
        least = (padded[..., None] - every[:, :, None]).abs().amin(-1).flatten(1)[:, :width]
        off = (widen_groups(codes, scales, width, torch.float32) - w).abs()
        torch.testing.assert_close(off, least, atol=1e-6, rtol=0)
        errors.append(float(off.square().sum()))
    assert width == 1 or all(more > 3 * less for more, less in itertools.pairwise(errors[:5]))
    if width == 64:
        plain = float((between_extremes(w[:, None], 3)[:, 0] - w).square().sum())
        assert errors[1] < 0.9 * plain


def test_a_constant_group_is_exact_in_fp16():
    w = torch.full((2, 64), 0.25)
    assert torch.equal(widen_groups(*quantize_groups(w, 3), 64, torch.float32), w)


def test_what_is_stored_is_what_is_counted():
    for rows, width, bits in ((8, 64, 3), (3, 100, 4), (5, 7, 6)):
        codes, scales = quantize_groups(torch.randn(rows, width), bits)
        assert len(pack(codes, bits)) + 2 * scales.numel() == stored_bytes(rows, width, bits)
