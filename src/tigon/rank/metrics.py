"""Ranking metrics, over all rows and over ragged groups, computed in fp64 on the scores' device.

Group g, the rows shown for a request, contains rows offsets[g] to offsets[g + 1] − 1; without offsets all rows form one
group.

    auc, log_loss, ece                      over all rows: a float
    gauc, ndcg, mrr, hit_rate, recall,      per group: `GroupMetric`, the mean over groups for which the metric is
    precision                               defined, per-group values, and the number of undefined groups

**Ties** are averaged over all orders of the tied rows, as in scikit-learn's `roc_auc_score` and `ndcg_score`: metrics
do not depend on the row order. For rankings over a full catalogue see `tigon.retrieve.metrics`.

`bootstrap_interval` resamples groups for a confidence interval.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.rank.groups import Groups, check_groups, discounts
from tigon.rank.sorted_groups import SortedGroups, check_labels, check_positive, check_values, check_weights

__all__ = [
    "GroupMetric",
    "Interval",
    "auc",
    "bootstrap_interval",
    "ece",
    "gauc",
    "hit_rate",
    "log_loss",
    "mrr",
    "ndcg",
    "precision",
    "recall",
]  # fmt: skip

Gain = Literal["exponential", "linear"]
# Maximum random numbers in memory at once.
DRAWN = 1 << 22


class GroupMetric(NamedTuple):
    """A group metric.

    Attributes:
        mean: weighted mean over groups with a value; NaN if there are none.
        values: (G,) fp64, NaN for undefined groups.
        weights: (G,) fp64.
        left_out: number of groups for which the metric is undefined.
    """

    mean: float
    values: Tensor
    weights: Tensor
    left_out: int


class Interval(NamedTuple):
    """A bootstrap interval.

    Attributes:
        low, high: interval bounds, which contain a fraction `level` of the draws; NaN if the metric is undefined in all
            draws.
        left_out: number of draws in which the metric is undefined, such as AUC with a single class.
    """

    low: float
    high: float
    left_out: int


def auc(scores: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> float:
    """Area under the ROC curve: the probability that a positive row scores above a negative row; ties count one half.

    Args:
        scores: (n,) floats, in any scale. labels: (n,), 0 or 1.
        weights: (n,) row multiplicities, ≥ 0.
    Returns: 0 to 1; NaN with a single class.
    Raises: ValueError for wrong shapes, dtypes and devices, NaN scores, and labels other than 0 and 1.

    Source: Mann & Whitney 1947, https://doi.org/10.1214/aoms/1177730491; equal to scikit-learn's `roc_auc_score`.
    """
    ranked = SortedGroups.sort("rank.metrics.auc", scores, labels, None, binary=True, weights=weights)
    return float(ranked.auc()[0])


def gauc(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None
) -> GroupMetric:  # fmt: skip
    """AUC within each group, averaged with group sizes as weights. Groups with a single class are skipped.

    Args:
        scores: (n,) floats. labels: (n,), 0 or 1.
        offsets: (G + 1,) int32 or int64, group starts, then n. None: one group.
        weights: (G,) group weights; use ones for the plain mean. None: group sizes.
    Returns: `GroupMetric`.
    Raises: ValueError for invalid inputs, NaN scores, and labels other than 0 and 1.

    Source: Zhu et al. 2017, https://doi.org/10.1145/3097983.3098134; Zhou et al. 2018, https://arxiv.org/abs/1706.06978
    """
    name = "rank.metrics.gauc"
    ranked = SortedGroups.sort(name, scores, labels, offsets, binary=True)
    rows = ranked.groups.offsets.diff().double()
    return _mean(name, ranked.auc(), rows if weights is None else weights)


def log_loss(probabilities: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> float:
    """Mean negative log likelihood of the labels.

    Probabilities are clamped to [2⁻⁵², 1 − 2⁻⁵²], as scikit-learn does in fp64: a confident mistake costs 36 nats.

    Args:
        probabilities: (n,) floats in [0, 1], for label 1. labels: (n,), 0 or 1.
        weights: (n,) row multiplicities, ≥ 0.
    Returns: nats; NaN without rows.
    Raises: ValueError for wrong shapes, dtypes and devices, and values out of range.
    """
    p, y, w = _probabilities("rank.metrics.log_loss", probabilities, labels, weights)
    epsilon = torch.finfo(torch.float64).eps
    p = p.clamp(epsilon, 1 - epsilon)
    return float((w * -torch.where(y > 0, p, 1 - p).log()).sum() / w.sum())


def ece(probabilities: Tensor, labels: Tensor, *, bins: int = 15, weights: Tensor | None = None) -> float:
    """Expected calibration error: Σ over bins of |mean label − mean probability| · the bin's share of the rows.

    Args:
        probabilities: (n,) floats in [0, 1], for label 1. labels: (n,), 0 or 1.
        bins: number of equal-width bins; bin b is (b / bins, (b + 1) / bins], and 0 is in the first.
        weights: (n,) row multiplicities, ≥ 0.
    Returns: 0 to 1; NaN without rows.
    Raises: ValueError for wrong shapes, dtypes and devices, and values out of range.

    Source: Naeini et al. 2015, https://doi.org/10.1609/aaai.v29i1.9602; bins as in Guo et al. 2017,
    https://arxiv.org/abs/1706.04599
    """
    name = "rank.metrics.ece"
    check_positive(name, "bins", bins)
    p, y, w = _probabilities(name, probabilities, labels, weights)
    edges = torch.arange(1, bins, dtype=p.dtype, device=p.device) / bins
    order = torch.bucketize(p, edges).sort(stable=True)
    ends = torch.searchsorted(order.values, torch.arange(bins, device=p.device), right=True)
    offsets = torch.cat((ends.new_zeros(1), ends))
    groups = Groups(offsets, order.values, offsets)
    return float(groups.sum((w * (y - p))[order.indices]).abs().sum() / w.sum())


def ndcg(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int | None = None,
    gain: Gain = "exponential", weights: Tensor | None = None,
) -> GroupMetric:  # fmt: skip
    """Normalised discounted cumulative gain: Σ G / log₂(1 + rank) over the first k, divided by the best order's value.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats ≥ 0, relevance grades.
        offsets: (G + 1,) int32 or int64, group starts, then n. None: one group.
        k: rank cut-off; None: all rows.
        gain: "exponential", G = 2^y − 1; "linear", G = y, as scikit-learn's `ndcg_score`. Both agree for labels 0 and
            1.
        weights: (G,) group weights; None: equal.
    Returns: `GroupMetric`; groups without a positive label are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.

    Source: Järvelin & Kekäläinen 2002, https://doi.org/10.1145/582415.582418; exponential gain, Burges et al. 2005,
    https://doi.org/10.1145/1102351.1102363; ties, McSherry & Najork 2008, https://doi.org/10.1007/978-3-540-78646-7_38
    """
    name = "rank.metrics.ndcg"
    if gain not in get_args(Gain):
        raise ValueError(f"{name}: gain must be one of {', '.join(get_args(Gain))}, got {gain!r}.")
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    value = torch.exp2(ranked.label) - 1 if gain == "exponential" else ranked.label
    groups, k = ranked.groups, k or len(scores)
    place = torch.arange(1, max(groups.longest(), 1) + 1, dtype=torch.float64, device=value.device)
    discount = torch.where(place <= k, discounts(place), 0.0)
    first, many = ranked.before, ranked.equal
    # Without ties this is exactly the discount; with ties, the mean over the tied positions.
    sums = torch.cat((discount.new_zeros(1), discount.cumsum(0)))
    shared = torch.where(many == 1, discount[first], (sums[first + many] - sums[first]) / many)
    best = groups.sum(value[groups.order(value)] * discount[ranked.place - 1])
    return _mean(name, groups.sum(value * shared) / torch.where(best > 0, best, torch.nan), weights)


def mrr(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int | None = None,
    weights: Tensor | None = None,
) -> GroupMetric:  # fmt: skip
    """Mean reciprocal rank: 1 / rank of the first positive row, 0 if the rank exceeds k.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats; above 0 is positive.
        offsets: (G + 1,) int32 or int64, group starts, then n. None: one group.
        k: rank cut-off; None: all rows.
        weights: (G,) group weights; None: equal.
    Returns: `GroupMetric`; groups without a positive row are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.
    """
    name = "rank.metrics.mrr"
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    return _mean(name, ranked.mean_at_first_positive(1 / ranked.place.double(), k or len(scores)), weights)


def hit_rate(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """Fraction of groups with a positive row among the first k.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats; above 0 is positive.
        offsets: (G + 1,) int32 or int64, group starts, then n. None: one group.
        k: rank cut-off.
        weights: (G,) group weights; None: equal.
    Returns: `GroupMetric`; groups without a positive row are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.
    """
    name = "rank.metrics.hit_rate"
    check_positive(name, "k", k)
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    return _mean(name, ranked.mean_at_first_positive(torch.ones_like(ranked.label), k), weights)


def recall(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """Fraction of a group's positive rows among the first k. Cannot reach 1 for groups with more than k positives.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats; above 0 is positive.
        offsets: (G + 1,) int32 or int64, group starts, then n. None: one group.
        k: rank cut-off.
        weights: (G,) group weights; None: equal.
    Returns: `GroupMetric`; groups without a positive row are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.
    """
    name = "rank.metrics.recall"
    check_positive(name, "k", k)
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    return _mean(name, ranked.count_hits(k) / ranked.positives(), weights)


def precision(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """Positive rows among a group's first k, divided by k even if the group is smaller.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats; above 0 is positive.
        offsets: (G + 1,) int32 or int64, group starts, then n. None: one group.
        k: rank cut-off.
        weights: (G,) group weights; None: equal.
    Returns: `GroupMetric`; groups without a positive row are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.
    """
    name = "rank.metrics.precision"
    check_positive(name, "k", k)
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    return _mean(name, torch.where(ranked.positives() > 0, ranked.count_hits(k) / k, torch.nan), weights)


def bootstrap_interval(
    metric: GroupMetric | Callable[[Tensor], float], offsets: Tensor | None = None, *, draws: int = 1000,
    level: float = 0.95, seed: int = 0,
) -> Interval:  # fmt: skip
    """Bootstrap interval for a metric. Resamples groups, since rows within a group are not independent.

    Args:
        metric: a `GroupMetric`: groups with a value are resampled with replacement. Or a function from (n,) row
            multiplicities to a metric over all rows: `lambda weights: auc(scores, labels, weights=weights)`.
        offsets: (G + 1,) int32 or int64, required with a function; its weights are on the offsets' device.
        draws: number of bootstrap samples.
        level: coverage of the interval.
        seed: for the draws, which are identical on every device.
    Returns: `Interval`.
    Raises: ValueError for options out of range, missing offsets, and offsets together with a `GroupMetric`.

    Source: percentile interval, Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    name = "rank.metrics.bootstrap_interval"
    check_positive(name, "draws", draws)
    if not 0 < level < 1:
        raise ValueError(f"{name}: level must lie between 0 and 1, got {level}.")
    if isinstance(metric, GroupMetric) != (offsets is None):
        raise ValueError(f"{name}: offsets must be given for a function of weights, and not beside a GroupMetric.")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(metric, GroupMetric):
        counted = ~metric.values.isnan()
        found = _drawn_means(metric.values[counted], metric.weights[counted], draws, generator)
    else:
        assert offsets is not None
        sizes = offsets.diff()
        found = torch.tensor([metric(_times(sizes, generator)) for _ in range(draws)], dtype=torch.float64)
    defined = found[~found.isnan()]
    if not len(defined):
        return Interval(float("nan"), float("nan"), draws)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=found.device)
    low, high = torch.quantile(defined, ends).tolist()
    return Interval(low, high, draws - len(defined))


def _mean(name: str, values: Tensor, weights: Tensor | None) -> GroupMetric:
    weights = torch.ones_like(values) if weights is None else weights
    if weights.shape != values.shape or weights.device != values.device:
        raise ValueError(
            f"{name}: weights must be ({len(values)},), one a group, on {values.device}, got {tuple(weights.shape)} on "
            f"{weights.device}."
        )
    weights = check_weights(name, weights)
    counted = ~values.isnan()
    mean = (values[counted] * weights[counted]).sum() / weights[counted].sum()
    return GroupMetric(float(mean), values, weights, int((~counted).sum()))


def _drawn_means(values: Tensor, weights: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """(draws,) means over samples with replacement, each as large as `values`."""
    found = []
    size = max(DRAWN // max(len(values), 1), 1)
    for first in range(0, draws, size) if len(values) else ():
        shape = min(size, draws - first), len(values)
        chosen = torch.randint(len(values), shape, generator=generator).to(values.device)
        found.append((values * weights)[chosen].sum(1) / weights[chosen].sum(1))
    return torch.cat(found) if found else values.new_full((draws,), torch.nan)


def _times(sizes: Tensor, generator: torch.Generator) -> Tensor:
    """(n,) row multiplicities when groups with these sizes are drawn with replacement."""
    G = len(sizes)
    times = torch.bincount(torch.randint(max(G, 1), (G,), generator=generator), minlength=G)
    return times.to(sizes.device).double().repeat_interleave(sizes)


def _probabilities(name: str, p: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    check_groups(name, p, labels, None, weights)
    check_values(name, "probabilities", p, "lie between 0 and 1", (p >= 0) & (p <= 1))
    check_labels(name, labels, binary=True)
    p = p.detach().double()
    return p, labels.double(), torch.ones_like(p) if weights is None else check_weights(name, weights)
