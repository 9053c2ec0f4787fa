"""Isotonic layer: an increasing piecewise linear function of a logit, learned with the model.

    z = low + Σ_{j<k} s relu(w_j) + relu(w_k) (x − low − k s) + b,    k = ⌊(x − low) / s⌋ clamped to its 501 buckets

The sum is a prefix sum over the buckets, computed once; a row gathers its entry: O(1) per row where a mask over all
buckets is O(501). The implementation computes x + Σ_{j<k} s (relu(w_j) − 1) + …, which equals x to the last bit while
all w are 1. Logits beyond the ends use the last bucket's slope.

Source: Borisyuk et al. 2024, LiRank, https://arxiv.org/abs/2402.06859, section 3.5
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.embedding import embedding

LOW, HIGH, STEP = -17.0, 8.0, 0.05


def isotonic(x: Tensor, weight: Tensor, bias: Tensor, segment: Tensor | None = None) -> Tensor:
    """Calibrate logits.

    Args:
        x: (n,) logits, fp32 or wider.
        weight: (segments, K), slope per bucket, clamped at 0. bias: (segments,).
        segment: (n,) int64 from 0; None: the first.
    Returns: (n,) in x's dtype.
    """
    K = weight.shape[1]
    slope = weight.relu() - 1
    before = F.pad(STEP * slope[:, :-1].cumsum(1), (1, 0))
    bucket = ((x.detach() - LOW) / STEP).floor().nan_to_num(0.0).clamp(0, K - 1).long()
    row = bucket if segment is None else segment * K + bucket
    # Store a table row per bucket: the gather's gradient then sums in a fixed order.
    table = torch.stack((before, slope, bias.unsqueeze(1).expand_as(slope)), -1).flatten(0, 1)
    found = embedding(row, table)
    # Keep x's dtype: an integer tensor times a Python float would be fp32.
    within = x - LOW - STEP * bucket.to(x.dtype)
    return x + found[:, 0] + found[:, 1] * within + found[:, 2]


class Isotonic(nn.Module):
    """Increasing functions of a label's logits, one per segment; initialised to the identity.

    Args:
        segments: number of functions.
    """

    def __init__(self, segments: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(segments, round((HIGH - LOW) / STEP) + 1))
        self.bias = nn.Parameter(torch.zeros(segments))

    def forward(self, x: Tensor, segment: Tensor | None = None) -> Tensor:
        return isotonic(x, self.weight, self.bias, segment)
