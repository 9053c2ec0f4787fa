"""Metrics of scores: over all rows and over ragged groups, on the scores' device, in fp64.

Group g, what one request showed, is the rows offsets[g] to offsets[g + 1] − 1; without offsets all rows are one group.

    auc, log_loss, ece                      of all rows together: a float
    gauc, ndcg, mrr, hit_rate, recall,      of each group: `GroupMetric`, the mean over groups for which the metric is
    precision                               defined, per-group values, and the number of undefined groups

**Equal scores** count as the mean over all orders of the rows that have them, as in scikit-learn's `roc_auc_score` and
`ndcg_score`: no metric depends on how rows stand. `tigon.retrieve.metrics` has those of rankings of all items.

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
# Numbers that are drawn at once.
DRAWN = 1 << 22


class GroupMetric(NamedTuple):
    """A metric of groups.

    Attributes:
        mean: over the groups with a value, by their weights; NaN if there is none.
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
        low, high: between them lies the metric of as many draws as `level` says; NaN if no draw has one.
        left_out: draws in which the metric is not defined, such as the AUC of one class.
    """

    low: float
    high: float
    left_out: int


def auc(scores: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> float:
    """Area under the ROC curve: how likely a positive row scores above a negative one, equal scores as a half.

    Args:
        scores: (n,) floats, in any scale. labels: (n,), 0 or 1.
        weights: (n,), how often each row counts; not negative.
    Returns: 0 to 1; NaN if there is one class only.
    Raises: ValueError for shapes, dtypes and devices that do not fit, NaN scores, and labels that are not 0 or 1.

    Source: Mann & Whitney 1947, https://doi.org/10.1214/aoms/1177730491; equal to scikit-learn's `roc_auc_score`.
    """
    ranked = SortedGroups.sort("rank.metrics.auc", scores, labels, None, binary=True, weights=weights)
    return float(ranked.auc()[0])


def gauc(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None
) -> GroupMetric:  # fmt: skip
    """AUC within each group; the mean by the groups' numbers of rows. Groups of one class are left out.

    Args:
        scores: (n,) floats. labels: (n,), 0 or 1.
        offsets: (G + 1,) int32 or int64, where groups begin, and n. None: one group.
        weights: (G,), of groups; ones for the plain mean. None: how many rows each has.
    Returns: `GroupMetric`.
    Raises: ValueError for what does not fit, NaN scores, and labels that are not 0 or 1.

    Source: Zhu et al. 2017, https://doi.org/10.1145/3097983.3098134; Zhou et al. 2018, https://arxiv.org/abs/1706.06978
    """
    name = "rank.metrics.gauc"
    ranked = SortedGroups.sort(name, scores, labels, offsets, binary=True)
    rows = ranked.groups.offsets.diff().double()
    return _mean(name, ranked.auc(), rows if weights is None else weights)


def log_loss(probabilities: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> float:
    """Mean of −log of the probability that a row's label was given.

    Probabilities are held within 2⁻⁵² of 0 and 1, as scikit-learn does with fp64: a sure mistake costs 36.

    Args:
        probabilities: (n,) floats from 0 to 1, of label 1. labels: (n,), 0 or 1.
        weights: (n,), how often each row counts; not negative.
    Returns: nats; NaN without rows.
    Raises: ValueError for shapes, dtypes and devices that do not fit, and values out of range.
    """
    p, y, w = _probabilities("rank.metrics.log_loss", probabilities, labels, weights)
    epsilon = torch.finfo(torch.float64).eps
    p = p.clamp(epsilon, 1 - epsilon)
    return float((w * -torch.where(y > 0, p, 1 - p).log()).sum() / w.sum())


def ece(probabilities: Tensor, labels: Tensor, *, bins: int = 15, weights: Tensor | None = None) -> float:
    """Expected calibration error: Σ over bins of |mean label − mean probability| · the bin's share of the rows.

    Args:
        probabilities: (n,) floats from 0 to 1, of label 1. labels: (n,), 0 or 1.
        bins: of equal width; bin b is (b / bins, (b + 1) / bins], and 0 is in the first.
        weights: (n,), how often each row counts; not negative.
    Returns: 0 to 1; NaN without rows.
    Raises: ValueError for shapes, dtypes and devices that do not fit, and values out of range.

    Source: Naeini et al. 2015, https://doi.org/10.1609/aaai.v29i1.9602; bins of Guo et al. 2017,
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
    """Normalised discounted cumulative gain: Σ G / log₂(1 + rank) over the first k, by its value in the best order.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats, not negative: grades of relevance.
        offsets: (G + 1,) int32 or int64, where groups begin, and n. None: one group.
        k: how many rows of a group count. None: all.
        gain: "exponential", G = 2^y − 1; "linear", G = y, as scikit-learn's `ndcg_score`. Alike for labels of 0 and 1.
        weights: (G,), of groups. None: all alike.
    Returns: `GroupMetric`; groups without a positive label are left out.
    Raises: ValueError for what does not fit, NaN scores and negative labels.

    Source: Järvelin & Kekäläinen 2002, https://doi.org/10.1145/582415.582418; the exponential gain, Burges et al. 2005,
    https://doi.org/10.1145/1102351.1102363; equal scores, McSherry & Najork 2008,
    https://doi.org/10.1007/978-3-540-78646-7_38
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
    # Without equal scores the discount itself, exactly; else the mean over the places that rows of one score share.
    sums = torch.cat((discount.new_zeros(1), discount.cumsum(0)))
    shared = torch.where(many == 1, discount[first], (sums[first + many] - sums[first]) / many)
    best = groups.sum(value[groups.order(value)] * discount[ranked.place - 1])
    return _mean(name, groups.sum(value * shared) / torch.where(best > 0, best, torch.nan), weights)


def mrr(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int | None = None,
    weights: Tensor | None = None,
) -> GroupMetric:  # fmt: skip
    """Mean reciprocal rank: 1 / rank of the first positive row, 0 if it is not among the first k.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats; above 0 is positive.
        offsets: (G + 1,) int32 or int64, where groups begin, and n. None: one group.
        k: how many rows of a group count. None: all.
        weights: (G,), of groups. None: all alike.
    Returns: `GroupMetric`; groups without a positive row are left out.
    Raises: ValueError for what does not fit, NaN scores and negative labels.
    """
    name = "rank.metrics.mrr"
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    return _mean(name, ranked.mean_at_first_positive(1 / ranked.place.double(), k or len(scores)), weights)


def hit_rate(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """Whether any of a group's first k rows is positive.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats; above 0 is positive.
        offsets: (G + 1,) int32 or int64, where groups begin, and n. None: one group.
        k: how many rows of a group count.
        weights: (G,), of groups. None: all alike.
    Returns: `GroupMetric`; groups without a positive row are left out.
    Raises: ValueError for what does not fit, NaN scores and negative labels.
    """
    name = "rank.metrics.hit_rate"
    check_positive(name, "k", k)
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    return _mean(name, ranked.mean_at_first_positive(torch.ones_like(ranked.label), k), weights)


def recall(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """The share of a group's positive rows that are among its first k. It cannot reach 1 where there are more than k.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats; above 0 is positive.
        offsets: (G + 1,) int32 or int64, where groups begin, and n. None: one group.
        k: how many rows of a group count.
        weights: (G,), of groups. None: all alike.
    Returns: `GroupMetric`; groups without a positive row are left out.
    Raises: ValueError for what does not fit, NaN scores and negative labels.
    """
    name = "rank.metrics.recall"
    check_positive(name, "k", k)
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    return _mean(name, ranked.count_hits(k) / ranked.positives(), weights)


def precision(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """The share of positive rows among the first k of a group, by k also where the group has fewer.

    Args:
        scores: (n,) floats. labels: (n,) bool, integers or floats; above 0 is positive.
        offsets: (G + 1,) int32 or int64, where groups begin, and n. None: one group.
        k: how many rows of a group count.
        weights: (G,), of groups. None: all alike.
    Returns: `GroupMetric`; groups without a positive row are left out.
    Raises: ValueError for what does not fit, NaN scores and negative labels.
    """
    name = "rank.metrics.precision"
    check_positive(name, "k", k)
    ranked = SortedGroups.sort(name, scores, labels, offsets, k)
    return _mean(name, torch.where(ranked.positives() > 0, ranked.count_hits(k) / k, torch.nan), weights)


def bootstrap_interval(
    metric: GroupMetric | Callable[[Tensor], float], offsets: Tensor | None = None, *, draws: int = 1000,
    level: float = 0.95, seed: int = 0,
) -> Interval:  # fmt: skip
    """Bootstrap interval of a metric: groups are drawn again, since the rows of one are not independent.

    Args:
        metric: what a metric of groups returned: those that count are drawn, with replacement. Or a function that takes
            (n,) weights, how often each row was drawn, for metrics of all rows:
            `lambda weights: auc(scores, labels, weights=weights)`.
        offsets: (G + 1,) int32 or int64, for a function alone; its weights are on the device of the offsets.
        draws: how many samples.
        level: the share of them between the ends.
        seed: of the draws, which are the same on every device.
    Returns: `Interval`.
    Raises: ValueError for options out of range, for offsets missing or beside a `GroupMetric`.

    Source: the percentile interval of Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
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
    """(draws,) means of as many values as there are, drawn with replacement."""
    found = []
    size = max(DRAWN // max(len(values), 1), 1)
    for first in range(0, draws, size) if len(values) else ():
        shape = min(size, draws - first), len(values)
        chosen = torch.randint(len(values), shape, generator=generator).to(values.device)
        found.append((values * weights)[chosen].sum(1) / weights[chosen].sum(1))
    return torch.cat(found) if found else values.new_full((draws,), torch.nan)


def _times(sizes: Tensor, generator: torch.Generator) -> Tensor:
    """(n,) how often each row is there when groups of these sizes are drawn with replacement."""
    G = len(sizes)
    times = torch.bincount(torch.randint(max(G, 1), (G,), generator=generator), minlength=G)
    return times.to(sizes.device).double().repeat_interleave(sizes)


def _probabilities(name: str, p: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    check_groups(name, p, labels, None, weights)
    check_values(name, "probabilities", p, "lie between 0 and 1", (p >= 0) & (p <= 1))
    check_labels(name, labels, binary=True)
    p = p.detach().double()
    return p, labels.double(), torch.ones_like(p) if weights is None else check_weights(name, weights)
