"""Metrics for ranking and retrieval: over all rows and over ragged groups, computed in fp64 on the scores' device.

Group g, the rows shown for a request, contains rows offsets[g] to offsets[g + 1] − 1; without offsets all rows form one
group.

    auc, log_loss, ece                      over all rows: a float
    gauc, ndcg, mrr, hit_rate, recall,      per group: `GroupMetric`, the mean over groups for which the metric is
    precision                               defined, per-group values, and the number of undefined groups

**Ties** are averaged over all orders of the tied rows, as in scikit-learn's `roc_auc_score` and `ndcg_score`: metrics
do not depend on the row order.

`label_results` turns search results and relevant ids into scores, labels and offsets for these metrics.
`bootstrap_interval` resamples groups for a confidence interval.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.data.groups import Groups, check_groups
from tigon.data.sorted_groups import SortedGroups, check_labels, check_positive, check_values, check_weights
from tigon.data.values import describe

__all__ = [
    "GroupMetric",
    "Interval",
    "LabelledResults",
    "auc",
    "bootstrap_interval",
    "ece",
    "gauc",
    "hit_rate",
    "label_results",
    "log_loss",
    "mrr",
    "ndcg",
    "overlap",
    "precision",
    "recall",
]

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
    ranked = SortedGroups.sort("metrics.auc", scores, labels, None, binary=True, weights=weights)
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
    name = "metrics.gauc"
    ranked = SortedGroups.sort(name, scores, labels, offsets, binary=True)
    rows = ranked.groups.offsets.diff().double()
    return average_groups(name, ranked.auc(), rows if weights is None else weights)


def log_loss(probabilities: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> float:
    """Mean negative log likelihood of the labels.

    Probabilities are clamped to [2⁻⁵², 1 − 2⁻⁵²], as scikit-learn does in fp64: a confident mistake costs 36 nats.

    Args:
        probabilities: (n,) floats in [0, 1], for label 1. labels: (n,), 0 or 1.
        weights: (n,) row multiplicities, ≥ 0.
    Returns: nats; NaN without rows.
    Raises: ValueError for wrong shapes, dtypes and devices, and values out of range.
    """
    p, y, w = _probabilities("metrics.log_loss", probabilities, labels, weights)
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
    name = "metrics.ece"
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
    if gain not in get_args(Gain):
        raise ValueError(f"metrics.ndcg: gain must be one of {', '.join(get_args(Gain))}, got {gain!r}.")
    ranked = SortedGroups.sort("metrics.ndcg", scores, labels, offsets, k)
    return average_groups("metrics.ndcg", ranked.ndcg(k or len(scores), linear=gain == "linear"), weights)


def mrr(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int | None = None,
    weights: Tensor | None = None,
) -> GroupMetric:  # fmt: skip
    """Mean reciprocal rank: 1 / rank of the first positive row, 0 if the rank exceeds k.

    Args:
        scores, offsets, k, weights: as in `ndcg`.
        labels: (n,) bool, integers or floats; above 0 is positive.
    Returns: `GroupMetric`; groups without a positive row are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.
    """
    ranked = SortedGroups.sort("metrics.mrr", scores, labels, offsets, k)
    return average_groups("metrics.mrr", ranked.mrr(k or len(scores)), weights)


def hit_rate(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """Fraction of groups with a positive row among the first k.

    Args:
        scores, labels, offsets, weights: as in `mrr`.
        k: rank cut-off.
    Returns: `GroupMetric`; groups without a positive row are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.
    """
    return _measure_top_k("hit_rate", scores, labels, offsets, k, weights)


def recall(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """Fraction of a group's positive rows among the first k. Cannot reach 1 for groups with more than k positives.

    Args:
        scores, labels, offsets, weights: as in `mrr`.
        k: rank cut-off.
    Returns: `GroupMetric`; groups without a positive row are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.
    """
    return _measure_top_k("recall", scores, labels, offsets, k, weights)


def precision(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, k: int, weights: Tensor | None = None
) -> GroupMetric:
    """Positive rows among a group's first k, divided by k even if the group is smaller.

    Args:
        scores, labels, offsets, weights: as in `mrr`.
        k: rank cut-off.
    Returns: `GroupMetric`; groups without a positive row are skipped.
    Raises: ValueError for invalid inputs, NaN scores and negative labels.
    """
    return _measure_top_k("precision", scores, labels, offsets, k, weights)


def _measure_top_k(
    metric: str, scores: Tensor, labels: Tensor, offsets: Tensor | None, k: int, weights: Tensor | None
) -> GroupMetric:
    name = f"metrics.{metric}"
    check_positive(name, "k", k)
    return average_groups(name, getattr(SortedGroups.sort(name, scores, labels, offsets, k), metric)(k), weights)


# ----------------------------------------------------------------------------------------------------- search results


class LabelledResults(NamedTuple):
    """Search results in the form of the metrics: a group for each query.

    Attributes:
        scores: (n,), −rank for the K results of a query, and −∞ for its relevant items that were not found.
        labels: (n,), 1 for relevant items.
        offsets: (queries + 1,) int64.
    """

    scores: Tensor
    labels: Tensor
    offsets: Tensor


def label_results(ids: Any, right: Sequence[Collection[Any]]) -> LabelledResults:
    """Label search results by the relevant ids, for `recall(*label_results(ids, right), k=10)`.

    Args:
        ids: (queries, k), a tensor or an array, best first; −1 and None mean no item.
        right: a set of relevant ids for each query. Metrics skip queries without any.
    Returns: `LabelledResults`.
    Raises: ValueError if ids is not an array, or right has another length.
    """
    rows, is_list = _list_rows("ids", ids), isinstance(right, Sequence) and not isinstance(right, (str, bytes))
    if not is_list or any(isinstance(one, (str, bytes)) or not hasattr(one, "__iter__") for one in right):
        raise ValueError(f"metrics: right must be a list with a set of ids per query, got {describe(right)}.")
    if len(right) != len(rows):
        raise ValueError(
            f"metrics: right must have a set of ids for each of {len(rows):,} queries, got {len(right):,}."
        )
    sets = [set(one) for one in right]
    hits = torch.tensor([[name in one for name in row] for row, one in zip(rows, sets, strict=True)], dtype=torch.bool)
    return label_hits(hits.reshape(ids.shape), torch.tensor([len(one) for one in sets], dtype=torch.int64))


def label_hits(hits: Tensor, relevant: Tensor) -> LabelledResults:
    """Label results from (Q, K) hits, best first, and (Q,) numbers of relevant items, found or not."""
    K = hits.shape[1]
    sizes = K + (relevant - hits.sum(1)).clamp(min=0)  # an id may be repeated
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    place = torch.arange(int(offsets[-1]), device=hits.device) - offsets[:-1].repeat_interleave(sizes)
    labels = torch.ones(len(place), dtype=torch.float64, device=hits.device)
    labels[place < K] = hits.reshape(-1).double()
    return LabelledResults(torch.where(place < K, -place.double(), -torch.inf), labels, offsets)


def overlap(ids: Any, others: Any) -> float:
    """The share of the other results' items that are in these results: a search's recall against another search.

    Args:
        ids, others: (queries, k), tensors or arrays.
    Returns: 0 to 1; NaN if the other results are empty.
    Raises: ValueError if they have different query counts.
    """
    rows = [[name for name in row if name is not None and name != -1] for row in _list_rows("others", others)]
    return recall(*label_results(ids, rows), k=max(ids.shape[1], 1)).mean


def _list_rows(argument: str, ids: Any) -> list[list[Any]]:
    if not hasattr(ids, "tolist") or getattr(ids, "ndim", None) != 2:
        raise ValueError(f"metrics: {argument} must be an array (queries, k), got {describe(ids)}.")
    rows: list[list[Any]] = ids.tolist()
    return rows


# ------------------------------------------------------------------------------------------------- means and intervals


def average_groups(name: str, values: Tensor, weights: Tensor | None = None) -> GroupMetric:
    """Average (G,) values over the groups where they are not NaN. name: prefix for error messages."""
    weights = torch.ones_like(values) if weights is None else weights
    if weights.shape != values.shape or weights.device != values.device:
        raise ValueError(
            f"{name}: weights must be ({len(values)},), one per group, on {values.device}, got {tuple(weights.shape)} "
            f"on {weights.device}."
        )
    weights = check_weights(name, weights)
    counted = ~values.isnan()
    mean = (values[counted] * weights[counted]).sum() / weights[counted].sum()
    return GroupMetric(float(mean), values, weights, int((~counted).sum()))


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
    name = "metrics.bootstrap_interval"
    check_positive(name, "draws", draws)
    if not 0 < level < 1:
        raise ValueError(f"{name}: level must lie between 0 and 1, got {level}.")
    if isinstance(metric, GroupMetric) != (offsets is None):
        raise ValueError(f"{name}: offsets must be given for a function, and left out for a GroupMetric.")
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
