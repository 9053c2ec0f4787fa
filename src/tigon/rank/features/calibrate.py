"""Isotonic layers fitted on held-out rows: the log loss of their labels, by what the rest of the ranker says of them.

A model that has seen its training data for long is too sure of it. On rows that it has not seen, the isotonic layer
learns by how much, and for each segment where it has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.rank.features.isotonic import Isotonic, isotonic
from tigon.rank.scoring import Batched, Drawing, check_schema, evaluating

if TYPE_CHECKING:
    from tigon.rank.features.model import LiRank

NAME = "LiRank.calibrate"


def calibrate(ranker: LiRank, data: Batched, drawing: Drawing, strength: float) -> None:
    """`LiRank.calibrate`."""
    if ranker.isotonic is None:
        raise ValueError(f"{NAME}: the ranker must have isotonic layers, LiRank(…, calibrate=True), got none.")
    if not strength > 0:
        raise ValueError(f"{NAME}: strength must be above 0, got {strength}.")
    if not len(data):
        raise ValueError(f"{NAME}: data has no requests.")
    check_schema(NAME, ranker, data)
    check_classes(data, drawing)
    logits, labels, weights, segment = _rows(ranker, data, drawing)
    for name, layer in zip(ranker.labels, ranker.isotonic, strict=True):
        assert isinstance(layer, Isotonic)
        found = calibrated(logits[name], labels[name], weights, segment, layer.weight.shape[0], strength)
        with torch.no_grad():
            layer.weight.copy_(found[0])
            layer.bias.copy_(found[1])


def check_classes(data: Batched, drawing: Drawing, what: str = "data") -> None:
    """Raise if a label is the same in all rows. what: the rows are called in the sentence."""
    parts = [batch.labels for batch in drawing._replace(history_max=0).batches(data, torch.device("cpu"))]
    for name in parts[0] if parts else ():
        y = torch.cat([part[name] for part in parts])
        if len(y) and bool((y == y[0]).all()):
            raise ValueError(
                f"{NAME}: {what} must have both classes of label {name!r}, got {y[0].item():g} in all {len(y):,} rows."
            )


def _rows(
    ranker: LiRank, data: Batched, drawing: Drawing
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None, Tensor | None]:
    """Logits before calibration, labels, weights and segments of all rows."""
    parts = []
    with evaluating(ranker):
        for batch in drawing.batches(data, ranker.device):
            if missing := [label for label in ranker.labels if label not in batch.labels]:
                raise ValueError(f"{NAME}: data must have the label {missing[0]!r}, got {sorted(batch.labels)}.")
            with drawing.autocast(ranker.device):
                found = ranker.logits(ranker.hidden(batch))
            parts.append((found, batch.labels, batch.weights, ranker.segments_of(batch)))
    logits, labels = ({name: torch.cat([part[n][name] for part in parts]) for name in ranker.labels} for n in (0, 1))
    weights, segment = (None if parts[0][n] is None else torch.cat([part[n] for part in parts]) for n in (2, 3))
    return logits, labels, weights, segment


def calibrated(
    x: Tensor, labels: Tensor, weights: Tensor | None, segment: Tensor | None, segments: int, strength: float
) -> tuple[Tensor, Tensor]:
    """The weight and the bias that minimise the log loss of labels by logits x, and strength · ½ Σ (w − w₀)².

    With several segments w₀ is one function for all of them, fitted first, from which each departs as far as its own
    rows say; else it is the identity.

    Args:
        x, labels, weights: (n,). segment: (n,) int64 in [0, segments).
    Returns: (segments, K) and (segments,) fp64.
    """
    x, y = x.double(), labels.double()
    like = Isotonic(1)
    w0, b0 = like.weight.detach().double().to(x.device), like.bias.detach().double().to(x.device)
    w0, b0 = _minimised(x, y, weights, None, w0, b0, strength, 0.0)
    if segment is None:
        return w0, b0
    return _minimised(x, y, weights, segment, w0.repeat(segments, 1), b0.repeat(segments), strength, strength)


def _minimised(
    x: Tensor, y: Tensor, weights: Tensor | None, segment: Tensor | None, w0: Tensor, b0: Tensor, strength: float,
    of_bias: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    w, b = (t.clone().requires_grad_() for t in (w0, b0))
    # Convex in relu(w) and b: one minimum, the same from wherever it starts.
    solver = torch.optim.LBFGS([w, b], max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        z = isotonic(x, w, b, segment)
        rows = F.binary_cross_entropy_with_logits(z, y, reduction="none")
        rows = rows if weights is None else rows * weights.double()
        away = strength * (w - w0).square().sum() + of_bias * (b - b0).square().sum()
        total = (rows.sum() + away / 2) / len(x)
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(loss)
    return w.detach(), b.detach()
