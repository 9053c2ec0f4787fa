"""Detect failed fits: performance at chance level, stopped too early, or still improving at the end."""

from __future__ import annotations

import math

import torch

from tigon.rank.data.batches import BatchSource
from tigon.rank.evaluation.evaluate import find_best, is_better

# A metric within this many standard errors is at chance level.
ERRORS = 2.0
# A log loss above this multiple of the label entropy counts as worse than the base rate.
WORSE = 1.02
MORE = "Try more steps (epochs=…, or a smaller batch_size=…), another lr=…, or fewer weights (width=…, layers=…)"


def count_classes(data: BatchSource) -> dict[str, tuple[int, int]]:
    """label → row counts for 1 and for 0."""
    ones, zeros = dict[str, int](), dict[str, int]()
    for batch in data.batches(requests=1 << 16, history_max=0):
        for label, y in batch.labels.items():
            ones[label] = ones.get(label, 0) + int((y > 0).sum())
            zeros[label] = zeros.get(label, 0) + int((y <= 0).sum())
    return {label: (ones[label], zeros[label]) for label in ones}


def auc_error(ones: int, zeros: int) -> float:
    """Standard error of the AUC for scores independent of the labels."""
    return math.sqrt((ones + zeros + 1) / (12 * ones * zeros)) if ones and zeros else math.inf


def find_problems(
    row: dict[str, float] | None, history: list[dict[str, float]], monitor: str, classes: dict[str, tuple[int, int]],
    *, steps: int, warmup: float, ended: bool, probabilities: bool, more: str = MORE,
) -> list[str]:  # fmt: skip
    """Messages for each sign of a failed or short fit, with the option to change.

    Args:
        row: the best evaluation in the history; None without evaluations.
        monitor: the metric that early stopping monitored.
        classes: `count_classes` on the validation rows; {} if the objective is the next item.
        steps: steps done. warmup: warm-up steps.
        ended: whether the fit ended with the last epoch rather than early stopping.
        probabilities: whether the loss trains probabilities, which are then compared with the base rate.
        more: what to change.
    """
    result = []
    if steps <= warmup:
        result.append(
            f"the fit has {steps:,} steps, all within the learning-rate warm-up of {warmup:,.0f} steps. Use a "
            "lower warmup=… or more epochs=…"
        )
    if row is None:
        return result
    aucs = {
        label: row[f"{label}:auc"] for label in classes if row.get(f"{label}:auc", math.nan) == row.get(f"{label}:auc")
    }
    errors = {label: auc_error(*classes[label]) for label in aucs}
    if aucs and all(auc < 0.5 + ERRORS * errors[label] for label, auc in aucs.items()):
        said = ", ".join(
            f"{auc:.3f} for {label} (chance: 0.5 ± {ERRORS * errors[label]:.3f})" for label, auc in aucs.items()
        )
        result.append(
            f"after {steps:,} steps the validation AUC is no better than chance: {said}. {more}. "
            "Check with `tigon rank inspect` whether any field predicts the label"
        )
    elif probabilities:
        result += _find_poor_probabilities(row, aucs, classes)
    gain = _late_gain(row, history, monitor)
    if ended and gain is not None and gain > max(errors.values(), default=0.02 * abs(row[monitor])):
        result.append(
            f"{monitor} was still improving, by {gain:.3f} in the last quarter, when the fit ended. Raise epochs=…"
        )
    return result


def _find_poor_probabilities(
    row: dict[str, float], labels: dict[str, float], classes: dict[str, tuple[int, int]]
) -> list[str]:
    result = []
    for label in labels:
        share = torch.tensor(classes[label][0] / sum(classes[label]), dtype=torch.float64)
        entropy = float(torch.distributions.Bernoulli(share).entropy())
        if row[f"{label}:log_loss"] > WORSE * entropy:
            result.append(
                f"the ranking by {label} is better than chance, but its probabilities are worse than the base "
                f"rate: validation log loss {row[f'{label}:log_loss']:.3f}, base rate "
                f"{entropy:.3f}. "
                "metric='log_loss' keeps the weights with the best probabilities"
            )
    return result


def _late_gain(row: dict[str, float], history: list[dict[str, float]], monitor: str) -> float | None:
    """Improvement of the last evaluation over those before the last quarter; None unless the last is the best."""
    if len(history) < 4 or row is not history[-1]:
        return None
    best = find_best(history[: len(history) * 3 // 4], monitor)
    assert best is not None
    return abs(row[monitor] - best[monitor]) if is_better(monitor, row[monitor], best[monitor]) else None
