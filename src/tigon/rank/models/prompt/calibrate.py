"""Fit a prompt ranker's calibrations on held-out requests.

Sources: Platt 1999; Zadrozny & Elkan 2002, https://doi.org/10.1145/775047.775151; pool-adjacent-violators, Ayer et al.
1955.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.rank.models.minimize import minimize
from tigon.rank.models.prompt.calibration import EDGE, KINDS, Calibration, Kind
from tigon.rank.models.prompt.model import PromptRanker
from tigon.rank.models.prompt.task import NAME


def calibrate(
    ranker: PromptRanker, requests: Any, kind: Kind = "platt", *, tokens: int = 16384
) -> dict[str, Calibration]:
    """Fit each task's calibration, and store them as `ranker.calibration`.

    Args:
        ranker: a `PromptRanker`.
        requests: with labels, not from training.
        kind: "platt" or "isotonic". Platt needs probabilities: tasks with answers other than 0 and 1 are skipped.
        tokens: per forward pass.
    Raises: ValueError for a task whose rows all have the same class.
    """
    listed = list(ranker.iterate_requests(requests))
    scores, values = ranker.score(listed, tokens=tokens, calibrated=False), ranker.labels(listed)
    for name, own in scores.items():
        if kind == "platt" and set(ranker.prompt.tasks[name].values) != {0.0, 1.0}:
            continue
        known = ~values[name].isnan()
        try:
            ranker.calibration[name] = fit_calibration(own[known], values[name][known], kind)
        except ValueError as error:
            raise ValueError(f"{NAME}: task {name}: {str(error).removeprefix(NAME + ': ')}") from None
    return ranker.calibration


def fit_calibration(scores: Tensor, labels: Tensor, kind: Kind = "platt") -> Calibration:
    """Fit a calibration on held-out rows.

    Args:
        scores: (n,) probabilities.
        labels: (n,) outcomes, 0 and 1; for isotonic any numbers.
        kind: "platt" or "isotonic".
    Raises: ValueError for an unknown kind, for rows with a single class, and for labels unsuitable for Platt scaling.
    """
    if kind not in KINDS:
        raise ValueError(f"{NAME}: calibration must be one of {', '.join(KINDS)}, got {kind!r}.")
    s, y = scores.detach().double().cpu(), labels.detach().double().cpu()
    if not len(y) or bool((y == y[0]).all()):
        got = "no rows" if not len(y) else f"{len(y)} rows that are all {y[0]:g}"
        raise ValueError(f"{NAME}: a calibration needs rows from both classes, got {got}.")
    others = y[(y != 0) & (y != 1)]
    if kind == "platt" and len(others):
        raise ValueError(f"{NAME}: a platt calibration needs labels 0 and 1, got {others[0]:g}.")
    return _platt(s, y) if kind == "platt" else _isotonic(s, y)


def _platt(s: Tensor, y: Tensor) -> Calibration:
    # Platt's smoothed targets: on few separable rows the slope would diverge.
    n1, n0 = y.sum(), (1 - y).sum()
    target, z = torch.where(y > 0, (n1 + 1) / (n1 + 2), 1 / (n0 + 2)), torch.logit(s, EDGE)
    a, b = torch.ones_like(n1).requires_grad_(), torch.zeros_like(n1).requires_grad_()
    minimize([a, b], lambda: F.binary_cross_entropy_with_logits(a * z + b, target))
    # Anti-correlated scores get a slope near 0, which keeps their order.
    return Calibration("platt", (max(a.item(), EDGE), b.item()))


def _isotonic(s: Tensor, y: Tensor) -> Calibration:
    """Pool adjacent violators over the scores; equal scores are merged first."""
    scores, place, count = s.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros_like(scores).index_add_(0, place, y) / count
    blocks: list[list[float]] = []  # mean, weight, first score, last score
    for at, m, n in zip(scores.tolist(), mean.tolist(), count.tolist(), strict=True):
        blocks.append([m, n, at, at])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            m2, n2, _, last = blocks.pop()
            m1, n1, first, _ = blocks[-1]
            blocks[-1] = [(m1 * n1 + m2 * n2) / (n1 + n2), n1 + n2, first, last]
    x, values = [], []
    for m, _, first, last in blocks:
        for at in (first,) if first == last else (first, last):
            x.append(at)
            values.append(m)
    return Calibration("isotonic", tuple(x), tuple(values))
