"""Codes of 2 to 8 bits: packed without loss, on grids that lose little, and rounded for the inputs of a matrix."""

import itertools
import math

import pytest
import torch

from tigon.compress.packing import WIDTHS, count_bytes, dequantize_groups, pack, quantize_groups, split_groups, unpack
from tigon.compress.rounding import fit_codes


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
    count, size = split_groups(width)
    errors = []
    for bits in WIDTHS:
        codes, scales = quantize_groups(w, bits)
        assert codes.shape == (7, count, size)
        assert int(codes.max()) < 2**bits
        assert len(pack(codes, bits)) + 2 * scales.numel() == count_bytes(7, width, bits)
        every = torch.arange(2**bits) * scales[..., :1].float() + scales[..., 1:].float()  # (7, G, codes)
        padded = torch.nn.functional.pad(w, (0, count * size - width), value=torch.nan).view(7, count, size)
        least = (padded[..., None] - every[:, :, None]).abs().amin(-1).flatten(1)[:, :width]
        off = (dequantize_groups(codes, scales, width, torch.float32) - w).abs()
        torch.testing.assert_close(off, least, atol=1e-6, rtol=0)
        errors.append(float(off.square().sum()))
    assert width == 1 or all(more > 3 * less for more, less in itertools.pairwise(errors[:5]))
    if width == 64:
        plain = float((between_extremes(w[:, None], 3)[:, 0] - w).square().sum())
        assert errors[1] < 0.9 * plain
    constant = torch.full((2, width), 0.25)  # exact in fp16
    assert torch.equal(dequantize_groups(*quantize_groups(constant, 3), width, torch.float32), constant)


def error(x, w, rounded):
    return float((x @ (w - rounded).t()).square().sum() / (x @ w.t()).square().sum())


def dequantize(parts, widths):
    pieces = zip(parts, widths, strict=True)
    return torch.cat([dequantize_groups(*part, columns, torch.float32) for part, (columns, _) in pieces], 1)


@pytest.mark.parametrize("widths", [[(100, 3)], [(30, 4), (70, 3)], [(100, 2)]])
def test_products_with_held_out_inputs_are_kept_far_better(widths):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1200, 20, generator=draw) @ torch.randn(20, 100, generator=draw)  # mixtures, as activations are
    x, held = (x + 0.3 * torch.randn(1200, 100, generator=draw)).split([1000, 200])
    w = torch.randn(24, 100, generator=draw)
    pieces = w.split([columns for columns, _ in widths], 1)
    near = [quantize_groups(piece, bits) for piece, (_, bits) in zip(pieces, widths, strict=True)]
    moment = x.t() @ x / 1000
    before = w.clone(), moment.clone()
    found = fit_codes(w, moment, widths)
    assert torch.equal(w, before[0])
    assert torch.equal(moment, before[1])
    for one, other in zip(found, near, strict=True):
        assert (one[0].shape, one[1].shape) == (other[0].shape, other[1].shape)
        assert (one[0].dtype, one[1].dtype) == (torch.uint8, torch.float16)
    assert error(held, w, dequantize(found, widths)) < 0.5 * error(held, w, dequantize(near, widths))


def test_inputs_that_do_not_go_together_are_rounded_to_nearest():
    w = torch.randn(5, 130, generator=torch.Generator().manual_seed(0))
    moment = torch.diag(torch.arange(130.0))  # the first input never comes
    (codes, scales), (near, near_scales) = fit_codes(w, moment, [(130, 3)])[0], quantize_groups(w, 3)
    assert torch.equal(scales, near_scales)
    assert torch.equal(codes.flatten(1)[:, :130], near.flatten(1)[:, :130])
