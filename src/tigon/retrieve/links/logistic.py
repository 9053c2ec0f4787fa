"""Logistic regression with an L1 penalty over binary features, by accelerated proximal gradient steps.

With weights w, an intercept c, and the features F(p) that example p has, it minimises

    (1/P) Σ_p [log(1 + exp(z_p)) − y_p z_p] + l1 Σ_j |w_j|,    z_p = c + Σ_{j in F(p)} w_j.

The penalty keeps weights at exactly 0 whose gradient stays below l1: the solution is sparse.

Source: Beck & Teboulle 2009, https://doi.org/10.1137/080716542 (FISTA); the momentum restarts where it points
against the step, O'Donoghue & Candès 2015, https://arxiv.org/abs/1204.3982.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, softplus

# Converged once the proximal gradient, which is 0 at the optimum, is below TOLERANCE · l1, or · TINY for l1 = 0.
TOLERANCE, TINY = 1e-3, 1e-5
# Power iterations that estimate the initial curvature. An estimate that is too small is doubled.
GUESSES = 8


class FitResult(NamedTuple):
    """weights (features,) and intercept in fp64; whether the fit converged, and the step count."""

    weights: Tensor
    intercept: float
    converged: bool
    steps: int


class Examples:
    """Each example's features, for sums over an example's features and over a feature's examples. Both sums have a
    fixed order, so that a fit has the same bits on every run.
    """

    def __init__(self, features: Tensor, starts: Tensor, count: int) -> None:
        P, n = len(starts), len(features)
        self.features, self.starts, self.count = features, starts, count
        sizes = torch.diff(torch.cat((starts, starts.new_tensor([n]))))
        of_example = torch.repeat_interleave(torch.arange(P, device=features.device), sizes, output_size=n)
        order = torch.sort(features, stable=True).indices
        self.examples = of_example[order]
        self.ends = torch.cumsum(torch.bincount(features, minlength=count), 0)

    def logits(self, w: Tensor) -> Tensor:
        """(P,), from (count + 1,): the weights, then the intercept."""
        if not len(self.features):
            return w[-1].expand(len(self.starts)).clone()
        return embedding_bag(self.features, w[:-1, None], self.starts, mode="sum")[:, 0] + w[-1]

    def sum_by_feature(self, r: Tensor) -> Tensor:
        """(count + 1,): sums of r (P,) over the examples that have a feature, and over all."""
        if not len(self.features):
            return torch.cat((r.new_zeros(self.count), r.sum()[None]))
        starts = torch.cat((self.ends.new_zeros(1), self.ends[:-1]))
        return torch.cat((embedding_bag(self.examples, r[:, None], starts, mode="sum")[:, 0], r.sum()[None]))


def fit(features: Tensor, starts: Tensor, target: Tensor, count: int, l1: float, steps: int) -> FitResult:
    """Find the weights and the intercept that minimise the formula above.

    Args:
        features: (n,) int64, all examples' features concatenated. starts: (P,) int64, each example's first position.
        target: (P,) fp64, 1 or 0, both present.
        count: the feature count. l1: at least 0. steps: at most.
    """
    examples, P = Examples(features, starts, count), len(target)
    odds = target.mean()
    w = target.new_zeros(count + 1)
    w[-1] = torch.log(odds / (1 - odds))
    y, z_w = w, examples.logits(w)
    z_y, momentum = z_w, 1.0
    curvature = 0.25 * _estimate_curvature(examples, P)

    def loss(z: Tensor) -> Tensor:
        return (softplus(z) - target * z).mean()

    for step in range(1, steps + 1):
        value = loss(z_y)
        g = examples.sum_by_feature((torch.sigmoid(z_y) - target) / P)
        while True:
            new = y - g / curvature
            new[:-1] = new[:-1].sign() * (new[:-1].abs() - l1 / curvature).clamp(min=0)
            z_new, moved = examples.logits(new), new - y
            # The loss lies below a parabola with this curvature, so that the step descends.
            bound = value + (g * moved).sum() + curvature / 2 * moved.square().sum()
            if bool(loss(z_new) <= bound + 1e-12 * value.abs()):
                break
            curvature *= 2
        if float(curvature * moved.abs().max()) <= TOLERANCE * max(l1, TINY):
            return FitResult(new[:-1], float(new[-1]), True, step)
        if float((moved * (new - w)).sum()) < 0:
            momentum = 1.0
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        push = (momentum - 1) / following
        # Logits are linear in the weights: the next point's logits need no pass.
        y, z_y = new + push * (new - w), z_new + push * (z_new - z_w)
        w, z_w, momentum = new, z_new, following
    return FitResult(w[:-1], float(w[-1]), False, steps)


def _estimate_curvature(examples: Examples, P: int) -> float:
    """Estimate the largest eigenvalue of FᵀF / P, with the intercept as a feature that all examples have."""
    v = examples.sum_by_feature(torch.ones(P, dtype=torch.float64, device=examples.starts.device))
    size = 1.0
    for _ in range(GUESSES):
        v = v / v.norm()
        v = examples.sum_by_feature(examples.logits(v)) / P
        size = float(v.norm())
    return size
