"""Tensors cast into one buffer: equal to casting each, whatever their number, size and dtype."""

from __future__ import annotations

import pytest
import torch

from tigon.ops.cast_together import MOST, cast_together
from tigon.ops.linear.adapter_products import stack_factors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 6, MOST, MOST + 1, 2 * MOST + 3])
def test_as_each_for_itself(count, dtype, backend, device):
    generator = torch.Generator().manual_seed(count)
    kinds = [torch.float32, torch.bfloat16, torch.float32]
    sizes = [(1 + 37 * i % 5, 3 + 641 * i % 2100) for i in range(count)]  # one of several blocks, one of 3 numbers
    tensors = [torch.randn(*s, generator=generator).to(kinds[i % 3]).to(device) for i, s in enumerate(sizes)]
    got = cast_together(tensors, dtype)
    assert torch.equal(got, torch.cat([t.reshape(-1).to(dtype) for t in tensors]))


def test_empty_and_strided(backend, device):
    wide = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(device)
    tensors = [wide[:0], wide.t(), wide[:, ::2], wide[:0]]
    assert torch.equal(cast_together(tensors, torch.bfloat16), torch.cat([t.reshape(-1) for t in tensors]).bfloat16())
    assert cast_together([wide[:0]], torch.bfloat16).numel() == 0


def test_stacks(backend, device):
    a, b, c = (torch.full((n, 4), float(n), device=device) for n in (2, 3, 5))
    narrow = c.bfloat16()
    joined, alone, same = stack_factors(torch.bfloat16, (a, b), (c,), (narrow,))
    assert torch.equal(joined, torch.cat((a, b)).bfloat16())
    assert torch.equal(alone, narrow)
    assert same is narrow
