"""Codes of 2 to 8 bits: packed without loss, and as near to the weights as rounding to nearest can be."""

import math

import pytest
import torch

from tigon.compress.packing import WIDTHS, groups_of, pack, quantize_groups, stored_bytes, unpack, widen_groups


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("count", [1, 8, 1003])  # least, one block, a block begun
def test_every_code_comes_back(bits, count):
    codes = torch.randint(2**bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    codes[0] = 2**bits - 1
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == math.ceil(count / 8) * bits
    assert torch.equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("width", [1, 64, 100])  # least, a group, groups that do not divide
def test_no_number_is_off_by_more_than_half_a_step(bits, width):
    w = torch.randn(7, width, generator=torch.Generator().manual_seed(0)).double()
    codes, scales = quantize_groups(w, bits)
    count, size = groups_of(width)
    assert codes.shape == (7, count, size)
    assert int(codes.max()) < 2**bits
    off = (widen_groups(codes, scales, width, torch.float32).double() - w).abs()
    padded = torch.nn.functional.pad(off, (0, count * size - width)).view(7, count, size)
    # Offset and scale are rounded to fp16: 2⁻¹¹ of the numbers, over and above half a step.
    assert (padded <= 0.5001 * scales[..., :1].double() + 2**-10 * w.abs().max()).all()
    assert float(off.max()) > 0 or width == 1


def test_a_constant_group_is_exact_in_fp16():
    w = torch.full((2, 64), 0.25)
    assert torch.equal(widen_groups(*quantize_groups(w, 3), 64, torch.float32), w)


def test_what_is_stored_is_what_is_counted():
    for rows, width, bits in ((8, 64, 3), (3, 100, 4), (5, 7, 6)):
        codes, scales = quantize_groups(torch.randn(rows, width), bits)
        assert len(pack(codes, bits)) + 2 * scales.numel() == stored_bytes(rows, width, bits)
