"""Score all rows in a table with a ranker, and compare two rankers' scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.data import metrics
from tigon.rank.data.batches import BatchOptions, BatchSource, check_schema, eval_mode, get_device
from tigon.rank.models.explorer import WeightSampler


class Scores(NamedTuple):
    """Scores for all rows, request by request, on the CPU.

    Attributes:
        offsets: (R + 1,) int64: request r has rows offsets[r] to offsets[r + 1] − 1 in the other tensors.
        rows: (n,) int64, table row numbers.
        logits: by label, (n,) fp32; their sigmoids are the probabilities.
        score: (n,) fp32, the ranking score: probabilities summed with the ranker's weights.
        labels: by label, (n,) fp32, NaN for missing values; {} for a table without labels.
        weights: (n,) fp32, or None.
    """

    offsets: Tensor
    rows: Tensor
    logits: dict[str, Tensor]
    score: Tensor
    labels: dict[str, Tensor]
    weights: Tensor | None

    def take(self, kept: Tensor) -> Scores:
        """Select rows; requests without remaining rows are dropped.

        Args:
            kept: (n,) bool mask.
        """
        before = torch.cat((kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)))
        weights = None if self.weights is None else self.weights[kept]
        logits, labels = ({name: x[kept] for name, x in values.items()} for values in (self.logits, self.labels))
        return Scores(before[self.offsets].unique(), self.rows[kept], logits, self.score[kept], labels, weights)


def score_batches(
    ranker: Any,
    data: BatchSource,
    batch_options: BatchOptions = BatchOptions(),
    *,
    sampler: WeightSampler | None = None,
) -> Iterator[Scores]:
    """Like `score`, one batch at a time, for tables whose scores do not fit in memory."""
    check_schema("rank.score", ranker, data)
    device = get_device(ranker)
    if sampler is not None:
        sampler.explorer.check("rank.score", ranker)
    with eval_mode(ranker):
        for batch in batch_options.batches(data, device):
            with batch_options.autocast(device):
                logits = ranker(batch) if sampler is None else sampler.logits(ranker, batch)
            logits = {name: value.float() for name, value in logits.items()}
            weights = None if batch.weights is None else batch.weights.cpu()
            yield Scores(
                batch.offsets.cpu(), batch.rows.cpu(), {name: value.cpu() for name, value in logits.items()},
                ranker.combine(logits).cpu(), {name: value.cpu() for name, value in batch.labels.items()}, weights,
            )  # fmt: skip


def score(
    ranker: Any,
    data: BatchSource,
    batch_options: BatchOptions = BatchOptions(),
    *,
    sampler: WeightSampler | None = None,
) -> Scores:
    """Score every row in a table on the ranker's device.

    Args:
        ranker: a `rank.Ranker`; scored in evaluation mode.
        data: `rank.Impressions`, with or without labels.
        batch_options: `rank.BatchOptions`, batching for the table; affects scores only through rounding.
        sampler: `rank.sample_weights(ranker, …)`, which draws last-layer weights per request; None: the fitted weights.
    Returns: `rank.Scores`.
    Raises: ValueError if there are no requests, or the sampler was made for other weights.
    """
    if not len(data):
        raise ValueError("rank.score: data has no requests.")
    return concat_scores(list(score_batches(ranker, data, batch_options, sampler=sampler)))


def concat_scores(parts: list[Scores]) -> Scores:
    """Concatenate scores from consecutive batches."""
    sizes = torch.cat([part.offsets.diff() for part in parts])
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    first = parts[0]
    logits = {name: torch.cat([part.logits[name] for part in parts]) for name in first.logits}
    labels = {name: torch.cat([part.labels[name] for part in parts]) for name in first.labels}
    weights = None if first.weights is None else torch.cat([part.weights for part in parts if part.weights is not None])
    rows, order = (torch.cat([getattr(part, name) for part in parts]) for name in ("rows", "score"))
    return Scores(offsets, rows, logits, order, labels, weights)


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
