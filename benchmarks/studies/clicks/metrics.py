"""AUC, log loss and calibration error of probabilities, by numpy, so that no method is measured by its own library."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# Log loss knows no certainty: where a method says 0 or 1, it is taken for this far from it.
LEAST = 1e-7


def auc(score: Floats, label: Floats) -> float:
    """How often a positive row is above a negative one; equal scores count one half."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    # The mean rank, from 1, of each value's rows.
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    positive = label > 0
    many = positive.sum()
    above = ranks[positive].sum() - many * (many + 1) / 2
    return float(above / (many * (len(label) - many)))


def log_loss(probability: Floats, label: Floats) -> float:
    p = np.clip(probability, LEAST, 1 - LEAST)
    return float(-np.mean(np.where(label > 0, np.log(p), np.log1p(-p))))


def ece(probability: Floats, label: Floats, bins: int = 15) -> float:
    """Σ over bins of equal width of |Σ label − Σ probability| / rows; bin b is (b / bins, (b + 1) / bins]."""
    at = np.clip(np.ceil(probability * bins) - 1, 0, bins - 1).astype(np.int64)
    return float(np.abs(np.bincount(at, label - probability, bins)).sum() / len(label))


def measure_all(probability: Floats, label: Floats) -> dict[str, float]:
    """All three."""
    return {
        "auc": auc(probability, label), "log_loss": log_loss(probability, label), "ece": ece(probability, label)
    }  # fmt: skip
