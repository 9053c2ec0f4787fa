"""Evaluate a ranker's scores per label, with bootstrap intervals, over all rows and over parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.data import metrics
from tigon.data.metrics import GroupMetric
from tigon.data.sorted_groups import SortedGroups, check_positive
from tigon.rank.data.batches import BatchOptions, BatchSource, eval_mode, get_device
from tigon.rank.evaluation.score import Scores, concat_scores

# Metrics for which smaller is better.
ERRORS = ("log_loss", "ece")
OBJECTIVES = ("impressions", "next-item")
MISSING, OTHERS, BY_SCORE = "(missing)", "others", " by score"
# Metrics that early stopping can monitor, by objective.
OF_ORDER = r"mrr|(?:ndcg|hr)@[1-9]\d*"
METRICS = {"impressions": rf"auc|log_loss|ece|gauc|{OF_ORDER}", "next-item": OF_ORDER}


class MetricValue(NamedTuple):
    """A metric value.

    Attributes:
        value: NaN if undefined, such as AUC with a single class.
        low, high: bounds for its bootstrap interval; None without draws.
        left_out: the number of requests for which the metric is undefined; 0 for row metrics.
    """

    value: float
    low: float | None
    high: float | None
    left_out: int


class Evaluation(NamedTuple):
    """A ranker's metrics.

    Attributes:
        labels: by label, then by metric. Over rows: "auc", "log_loss" and "ece". Over requests, if any request has
            several rows: "gauc", "mrr", and for each k "ndcg@k" and "hr@k".
        rows, requests: counts.
        notes: messages about undefined metrics and skipped rows, with the reason.
    """

    labels: dict[str, dict[str, MetricValue]]
    rows: int
    requests: int
    notes: list[str]

    def value(self, metric: str) -> float:
        """Look up a metric by name.

        Args:
            metric: such as "auc" or "ndcg@10" for the mean over labels; "click:auc" for a single label.
        Raises: ValueError for an unknown metric.
        """
        label, _, name = metric.rpartition(":")
        alone = {known: found for known, found in self.labels.items() if not known.endswith(BY_SCORE)}
        chosen = {label: self.labels.get(label, {})} if label else alone
        if not all(name in found for found in chosen.values()):
            measured = next(iter(alone.values()), {})
            why = "" if "mrr" in measured else "; each request has a single row, so there is no order to measure"
            raise ValueError(
                f"rank.evaluate: a metric must be one of {', '.join(measured)}, or LABEL:METRIC with a label from "
                f"{', '.join(self.labels)}, got {metric!r}{why}."
            )
        return sum(found[name].value for found in chosen.values()) / len(chosen)


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a metric value is better than another; any value is better than NaN."""
    sign = -1 if metric.rpartition(":")[2] in ERRORS else 1
    return sign * value > sign * than or (than != than and value == value)


def find_best(history: Sequence[dict[str, float]], metric: str) -> dict[str, float] | None:
    """The first of the best evaluations; None without evaluations."""
    best = None
    for row in history:
        if best is None or is_better(metric, row[metric], best[metric]):
            best = row
    return best


def parse_cutoffs(metric: str) -> tuple[int, ...]:
    """The k in a metric name such as "ndcg@10"; () if there is none."""
    found = re.fullmatch(r".*@([1-9]\d*)", metric)
    return (int(found[1]),) if found else ()


def monitored_value(found: Evaluation, metric: str) -> float:
    """The early-stopping metric's value.

    Raises: ValueError for an unknown or undefined metric.
    """
    value = found.value(metric)
    if value != value:
        why = f": {'; '.join(found.notes)}" if found.notes else ""
        raise ValueError(f"rank.fit: metric {metric} is not defined on val{why}.")
    return value


def check_monitor(data: BatchSource, metric: str) -> None:
    """Raise the errors from `monitored_value` before training, based on rows and labels alone.

    Args:
        data: with labels. metric: an impression metric.
    """
    parts = []
    for batch in data.batches(requests=1 << 16, history_max=0):
        labels = {label: y.cpu() for label, y in batch.labels.items()}
        zeros = torch.zeros(len(batch.rows))
        weights = None if batch.weights is None else batch.weights.cpu()
        logits = dict.fromkeys(labels, zeros)
        parts.append(Scores(batch.offsets.cpu(), batch.rows.cpu(), logits, zeros, labels, weights))
    monitored_value(evaluate(concat_scores(parts), parse_cutoffs(metric)), metric)


def evaluate(
    scored: Scores, at: Sequence[int] = (1, 5, 10), *, draws: int = 0, level: float = 0.95, seed: int = 0
) -> Evaluation:
    """Evaluate scores against their labels.

    AUC, log loss and ECE use a label's probabilities, the sigmoids of its logits. GAUC, NDCG, MRR and hit rate use the
    logits' order within requests. With several labels, the order by `scored.score`, which is used in serving, is also
    evaluated against each label, as "LABEL by score". Order metrics are skipped if each request has a single row. Rows
    without a label value are excluded from that label's metrics.

    Args:
        scored: the result from `rank.score` for a table with labels.
        at: the cut-offs k for NDCG and hit rate.
        draws: bootstrap samples for the intervals; 0: no intervals.
        level: coverage of the intervals.
        seed: for the draws.
    Returns: `rank.Evaluation`.
    Raises: ValueError if there are no labels, and for non-positive cut-offs.
    """
    if not scored.labels:
        raise ValueError("rank.evaluate: scored must have labels, got scores from a table without labels.")
    for k in at:
        check_positive("rank.evaluate", "at", k)
    draw = Bootstrap(draws, level, seed)
    found: dict[str, dict[str, MetricValue]] = {}
    notes: list[str] = []
    ordered = bool((scored.offsets.diff() > 1).any())
    known = {label: _labelled_rows(scored, y) for label, y in scored.labels.items()}
    for label, own in known.items():
        y = own.labels[label]
        found[label] = _row_metrics(own, label, draw)
        if ordered:
            found[label] |= _order_metrics(own, own.logits[label], y, at, draw)
        if len(y) < len(scored.rows):
            gaps = len(scored.rows) - len(y)
            notes.append(f"{label}: {gaps:,} of {len(scored.rows):,} rows have no value: left out")
        notes += _notes(label, y, own.offsets, found[label])
    if len(scored.labels) > 1 and ordered:
        for label, own in known.items():
            found[f"{label}{BY_SCORE}"] = _order_metrics(own, own.score, own.labels[label], at, draw)
    return Evaluation(found, len(scored.rows), len(scored.offsets) - 1, notes)


def _labelled_rows(scored: Scores, y: Tensor) -> Scores:
    """The rows with a label value."""
    missing = y.isnan()
    return scored.take(~missing) if bool(missing.any()) else scored


def evaluate_next_items(
    ranker: Any, data: BatchSource, at: Sequence[int] = (1, 5, 10), batch_options: BatchOptions = BatchOptions(), *,
    draws: int = 0, seed: int = 0,
) -> Evaluation:  # fmt: skip
    """Full ranking evaluation: each request's positive item is ranked among all items outside its history.

    Args:
        ranker: provides `next_item_ranks(batch)`, (R,) ranks from 1, such as `rank.LiGR`.
        data: `rank.Impressions`, requests with one positive row each; without labels, each request's first row is
            taken.
        at: the cut-offs k for NDCG and hit rate.
        batch_options: `rank.BatchOptions`, batching for the table.
        draws, seed: as for `rank.evaluate`.
    Returns: `rank.Evaluation` with one label, "next item".
    Raises: ValueError if the ranker cannot rank all items, or there are no requests.
    """
    if not hasattr(ranker, "next_item_ranks"):
        raise ValueError(f"rank.evaluate_next_items: {type(ranker).__name__} does not rank all items.")
    if not len(data):
        raise ValueError("rank.evaluate_next_items: data has no requests.")
    device, places = get_device(ranker), []
    with eval_mode(ranker):
        for batch in batch_options.batches(data, device):
            with batch_options.autocast(device):
                places.append(ranker.next_item_ranks(batch).cpu())
    place = torch.cat(places).double()
    place = torch.where(place > 0, place, torch.nan)  # 0: request without a positive row
    draw = Bootstrap(draws, 0.95, seed)
    values = {"mrr": 1 / place}
    for k in at:
        check_positive("rank.evaluate_next_items", "at", k)
        values |= {f"ndcg@{k}": (place <= k) / torch.log2(1 + place), f"hr@{k}": (place <= k).double()}
    found, without = {}, int(place.isnan().sum())
    for metric, value in values.items():
        value = torch.where(place.isnan(), torch.nan, value)
        found[metric] = draw.measure_requests(metrics.average_groups("rank.evaluate_next_items", value))
    why = "have no positive row, or its item is unknown to the schema: left out"
    notes = [f"{without:,} of {len(place):,} requests {why}"] if without else []
    return Evaluation({"next item": found}, len(place), len(place), notes)


def split_by_column(scored: Scores, column: Sequence[Any], most: int = 20) -> dict[str, Scores]:
    """Split rows by a column's values, for metrics per part.

    Numeric columns with more than `most` values are split at their quartiles. For other columns the `most` most
    frequent values each form a part; the rest is "others".

    Args:
        scored: the result from `rank.score`.
        column: n values, in request order, as `data.column(name)` from `rank.Impressions`; None or NaN: missing.
        most: maximum number of parts, besides "others".
    Returns: scores by part name; a part omits requests without rows in the part.
    """
    values = [None if value != value else value for value in column]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    there = sum(value is not None for value in values)
    if len(set(map(str, values))) > most and len(numbers) == there:
        ends = np.quantile(numbers, (0, 0.25, 0.5, 0.75, 1)).tolist()  # torch.quantile is limited to 2²⁴ numbers
        names = [f"{low:g} … {high:g}" for low, high in pairwise(ends)]
        keys = [MISSING if x is None else names[sum(x > end for end in ends[1:-1])] for x in values]
        order = [*names, MISSING]
    else:
        keys = [MISSING if value is None else str(value) for value in values]
        counts = Counter(keys)
        number = {str(value): value for value in numbers}
        if len(counts) <= most:  # numbers in ascending order
            order = sorted(counts, key=lambda key: (key not in number, number.get(key, 0), key))
        else:
            order = sorted(counts, key=lambda key: (-counts[key], key))[:most]
        keys = [key if key in order else OTHERS for key in keys]
        order.append(OTHERS)
    return {name: scored.take(torch.tensor([key == name for key in keys])) for name in order if name in keys}


class Bootstrap(NamedTuple):
    """Options for bootstrap intervals; 0 draws: no intervals."""

    draws: int
    level: float
    seed: int

    def measure_requests(self, found: GroupMetric) -> MetricValue:
        return self._measure(found.mean, found, None, found.left_out)

    def measure_rows(self, measure: Callable[[Tensor | None], float], scored: Scores) -> MetricValue:
        def measure_resampled(weights: Tensor) -> float:
            return measure(weights if scored.weights is None else weights * scored.weights)

        return self._measure(measure(scored.weights), measure_resampled, scored.offsets, 0)

    def _measure(
        self, value: float, metric: GroupMetric | Callable[[Tensor], float], offsets: Tensor | None, left_out: int
    ) -> MetricValue:
        if not self.draws or value != value:
            return MetricValue(value, None, None, left_out)
        interval = metrics.bootstrap_interval(metric, offsets, **self._asdict())
        return MetricValue(value, interval.low, interval.high, left_out)


def _row_metrics(scored: Scores, label: str, draw: Bootstrap) -> dict[str, MetricValue]:
    y, logits = scored.labels[label], scored.logits[label]
    p = logits.double().sigmoid()
    return {
        "auc": draw.measure_rows(lambda weights: metrics.auc(logits, y, weights=weights), scored),
        "log_loss": draw.measure_rows(lambda weights: metrics.log_loss(p, y, weights=weights), scored),
        "ece": draw.measure_rows(lambda weights: metrics.ece(p, y, weights=weights), scored),
    }


def _order_metrics(
    scored: Scores, order: Tensor, y: Tensor, at: Sequence[int], draw: Bootstrap
) -> dict[str, MetricValue]:
    name, ranked = "rank.evaluate", SortedGroups.sort("rank.evaluate", order, y, scored.offsets, binary=True)
    values = {"mrr": ranked.mrr(len(y))}
    for k in at:
        values |= {f"ndcg@{k}": ranked.ndcg(k), f"hr@{k}": ranked.hit_rate(k)}
    found = {"gauc": metrics.average_groups(name, ranked.auc(), scored.offsets.diff())}
    found |= {metric: metrics.average_groups(name, value) for metric, value in values.items()}
    return {metric: draw.measure_requests(value) for metric, value in found.items()}


def _notes(label: str, y: Tensor, offsets: Tensor, found: dict[str, MetricValue]) -> list[str]:
    if not len(y):
        return [f"{label}: there are no rows"]
    if found["auc"].value != found["auc"].value:
        return [f"{label}: all rows are {y[0]:g}, so AUC and ranking metrics are undefined"]
    left_out = (("mrr", "no positive row", "NDCG, MRR and HR"), ("gauc", "one class", "GAUC"))
    return [
        f"{label}: {found[name].left_out:,} of {len(offsets) - 1:,} requests have {why}: left out of {metrics}"
        for name, why, metrics in left_out
        if name in found and found[name].left_out
    ]
