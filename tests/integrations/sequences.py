"""Batches of sequences for the tests of Liger's chunked losses, and how their tables become cases."""

from __future__ import annotations

import pytest
import torch

B, T, H, V = 3, 9, 12, 29
S = 2 * B


def batch(dtype=torch.float32, seed=0, width=H, generator=None):
    g = generator or torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(s, generator=g) for s in ((S, T, width), (V, width), (V,)))
    return x.to(dtype), (0.5 * weight).to(dtype), (0.5 * bias).to(dtype)


def drawn(dtype, *widths):
    """For `check`: a batch for each width. The largest error of one draw in bf16 is luck."""
    return lambda g: [t for width in widths for t in batch(dtype, width=width, generator=g)]


def cases(table):
    """All of a table in fp32, and its first in bf16, which the options do not depend on."""
    keys = [(key, torch.float32) for key in table] + [(next(iter(table)), torch.bfloat16)]
    return [
        pytest.param(*(v if isinstance(v := table[key], tuple) else (v,)), dtype, id=f"{key}, {str(dtype)[6:]}")
        for key, dtype in keys
    ]


def targets(seed=0):
    """Completions of different lengths behind prompts of different lengths."""
    target = torch.randint(V, (S, T), generator=torch.Generator().manual_seed(seed))
    for row, (prompt, length) in enumerate([(2, 6), (0, 9), (3, 2), (1, 4), (4, 5), (0, 7)]):
        target[row, :prompt] = -100
        target[row, prompt + length :] = -100
    return target


TARGET = targets()
