"""Compare two rankers' scores on a table."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tigon.data import metrics
from tigon.rank.data.batches import BatchOptions, BatchSource
from tigon.rank.evaluation.score import score


class ScoreDifference(NamedTuple):
    """Score differences between two rankers on a table.

    Attributes:
        largest, mean: absolute differences between label probabilities.
        auc: by label, (before, after), if the table has the label.
    """

    largest: float
    mean: float
    auc: dict[str, tuple[float, float]]


def compare_scores(
    before: Any, after: Any, data: BatchSource, batch_options: BatchOptions = BatchOptions()
) -> ScoreDifference:
    """Score a table with a ranker and with its copy from `rank.quantize_tables`.

    Args:
        before, after: `rank.LiRank`. data: `rank.Impressions`.
        batch_options: batching for data.
    Raises: ValueError if there are no requests.
    """
    first, second = (score(ranker, data, batch_options) for ranker in (before, after))
    off = torch.stack([(first.logits[name].sigmoid() - z.sigmoid()).abs() for name, z in second.logits.items()])
    auc = {}
    for name, y in first.labels.items():
        known = ~y.isnan()
        weights = None if first.weights is None else first.weights[known]
        both = tuple(metrics.auc(one.logits[name][known], y[known], weights=weights) for one in (first, second))
        if both[0] == both[0]:
            auc[name] = (both[0], both[1])
    return ScoreDifference(float(off.max()), float(off.double().mean()), auc)
