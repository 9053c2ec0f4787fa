"""The ratios of clipped tokens that TRL logs, against a loop over sequences."""

import math

import pytest
import torch

from tigon.losses.policy.metrics import clip_ratios


def ratios(clipped, mask):
    """The share of tokens, and that of each sequence that has any."""
    shares = [c[m].float().mean().item() for c, m in zip(clipped, mask, strict=True) if m.any()]
    return (clipped & mask).sum().item() / max(1, mask.sum().item()), shares


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [1.0, 0.6, 0.0], ids=["every token", "some", "none"])
def test_ratios_of_tokens(kept, dtype, device):
    draw = torch.Generator().manual_seed(2)
    clipped = torch.randint(-1, 2, (7, 33), generator=draw).to(device, dtype)
    mask = (torch.rand(7, 33, generator=draw) < kept).to(device)
    mask[2] = False  # a completion without tokens is in no extreme
    found = {name: value.item() for name, value in clip_ratios(clipped, mask, False, "grpo").items()}
    low, lows = ratios(clipped < 0, mask)
    high, highs = ratios(clipped > 0, mask)
    expected = {
        "clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high,
        "clip_ratio/low_min": min(lows, default=math.nan), "clip_ratio/high_max": max(highs, default=math.nan),
    }  # fmt: skip
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, nan_ok=True, rel=1e-6)
    assert math.isnan(found["clip_ratio/low_min"]) == (kept == 0.0)


def test_no_tokens_at_all():
    found = clip_ratios(torch.empty(2, 0), torch.empty(2, 0, dtype=torch.bool), False, "grpo")
    assert found["clip_ratio/low_mean"].item() == 0.0
    assert found["clip_ratio/high_max"].isnan()
