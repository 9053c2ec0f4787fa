"""Rows sorted by group and descending score, for metrics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.data.groups import Groups, check_groups, discounts
from tigon.kernels import check_tensors


class SortedGroups(NamedTuple):
    """Rows sorted by group, then by descending score.

    Attributes:
        place: (n,) rank in the group, from 1. label, weight: (n,) fp64.
        before, equal: (n,) number of rows in the group with a higher score, and with the same score.
        start: (n,) index of the first row with the same score.
    """

    groups: Groups
    place: Tensor
    label: Tensor
    weight: Tensor
    before: Tensor
    equal: Tensor
    start: Tensor

    @classmethod
    def sort(
        cls, name: str, scores: Tensor, labels: Tensor, offsets: Tensor | None, k: int | None = None, *,
        binary: bool = False, weights: Tensor | None = None,
    ) -> SortedGroups:  # fmt: skip
        if k is not None:
            check_positive(name, "k", k)
        check_tensors(name, offsets=offsets)
        # On the host the offsets can be checked, and give the longest group's size.
        groups = check_groups(name, scores, labels, None if offsets is None else offsets.cpu(), weights)
        check_values(name, "scores", scores, "not be NaN", ~scores.isnan())
        check_labels(name, labels, binary)
        scores = scores.detach()
        order = groups.order(scores)
        sorted_scores, place, rows = scores[order], groups.place(), torch.arange(len(order), device=order.device)
        new = place == 1
        new[1:] |= sorted_scores[1:] != sorted_scores[:-1]
        starts = rows[new]
        block = new.cumsum(0) - 1
        equal = torch.cat((starts, starts.new_tensor([len(rows)]))).diff()[block]
        start = starts[block]
        label = labels.detach().double()[order]
        weight = torch.ones_like(label) if weights is None else check_weights(name, weights)[order]
        return cls(groups, place, label, weight, start - groups.offsets[groups.row], equal, start)

    def auc(self) -> Tensor:
        """(G,), NaN for groups with a single class. Weights are only supported for a single group."""
        positive, negative = self.weight * self.label, self.weight * (1 - self.label)
        so_far = torch.cat((negative.new_zeros(1), negative.cumsum(0)))
        # Negatives in the group with a higher score, plus half of the tied negatives.
        before = so_far[self.groups.offsets[self.groups.row]]
        above = (so_far[self.start] + so_far[self.start + self.equal]) / 2 - before
        P, N = self.groups.sum(positive), self.groups.sum(negative)
        both = (P > 0) & (N > 0)
        return torch.where(both, 1 - self.groups.sum(positive * above) / torch.where(both, P * N, 1.0), torch.nan)

    def positives(self) -> Tensor:
        """(G,) number of positives, NaN instead of 0."""
        count = self.groups.sum((self.label > 0).double())
        return torch.where(count > 0, count, torch.nan)

    def ndcg(self, k: int, *, linear: bool = False) -> Tensor:
        """(G,) NDCG over the first k, NaN without positives. linear: whether the gain is the label, not 2^label − 1."""
        value = self.label if linear else torch.exp2(self.label) - 1
        place = torch.arange(1, max(self.groups.longest(), 1) + 1, dtype=torch.float64, device=value.device)
        discount = torch.where(place <= k, discounts(place), 0.0)
        # Without ties this is exactly the discount; with ties, the mean over the tied positions.
        sums = torch.cat((discount.new_zeros(1), discount.cumsum(0)))
        mean = (sums[self.before + self.equal] - sums[self.before]) / self.equal
        shared = torch.where(self.equal == 1, discount[self.before], mean)
        best = self.groups.sum(value[self.groups.order(value)] * discount[self.place - 1])
        return self.groups.sum(value * shared) / torch.where(best > 0, best, torch.nan)

    def count_hits(self, k: int) -> Tensor:
        """(G,) expected positives among the first k: a tied row counts by the fraction of tied positions within k."""
        share = ((k - self.before).double() / self.equal).clamp(0, 1)
        return self.groups.sum(torch.where(self.label > 0, share, 0.0))

    def recall(self, k: int) -> Tensor:
        return self.count_hits(k) / self.positives()

    def precision(self, k: int) -> Tensor:
        return torch.where(self.positives() > 0, self.count_hits(k) / k, torch.nan)

    def mrr(self, k: int) -> Tensor:
        return self._mean_at_first_positive(1 / self.place.double(), k)

    def hit_rate(self, k: int) -> Tensor:
        return self._mean_at_first_positive(torch.ones_like(self.label), k)

    def _mean_at_first_positive(self, value: Tensor, k: int) -> Tensor:
        """(G,) mean of value at the first positive's position, 0 beyond k; NaN without positives."""
        positive = (self.label > 0).double()
        so_far = torch.cat((positive.new_zeros(1), positive.cumsum(0)))
        earlier = so_far[self.start] - so_far[self.groups.offsets[self.groups.row]]
        p, t = so_far[self.start + self.equal] - so_far[self.start], self.equal.double()
        # Among t tied rows with p positives, the first positive is row m with probability C(t − m, p − 1) / C(t, p).
        m = (self.place - self.before).double()
        possible = (earlier == 0) & (p > 0) & (t - m >= p - 1) & (self.place <= k)
        chance = (_log_choose(t - m, p - 1) - _log_choose(t, p)).exp()
        mean = self.groups.sum(torch.where(possible, chance * value, 0.0))
        return torch.where(self.positives() > 0, mean, torch.nan)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def check_labels(name: str, labels: Tensor, binary: bool) -> None:
    right = (labels == 0) | (labels == 1) if binary else labels >= 0
    check_values(name, "labels", labels, "be 0 or 1" if binary else "not be negative or NaN", right)


def check_weights(name: str, weights: Tensor) -> Tensor:
    check_values(name, "weights", weights, "not be negative or NaN", weights >= 0)
    return weights.detach().double()


def check_values(name: str, argument: str, value: Tensor, expected: str, right: Tensor) -> None:
    if not right.all():
        row = int((~right).nonzero()[0])
        raise ValueError(f"{name}: {argument} must {expected}, got {value[row].item():g} at {row}.")


def check_positive(name: str, argument: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {argument} must be a positive integer, got {value!r}.")
