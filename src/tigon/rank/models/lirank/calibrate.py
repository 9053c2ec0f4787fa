"""Fit isotonic layers on held-out rows, by log loss.

A model is overconfident on its training data. The isotonic layer corrects for this using held-out rows, per segment if
the layer has segments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.rank.data.batches import BatchOptions, BatchSource, check_schema, eval_mode
from tigon.rank.models.lirank.isotonic import LOW, Isotonic, isotonic
from tigon.rank.models.lirank.model import LiRank
from tigon.rank.models.minimize import minimize

NAME = "rank.calibrate"
# Lower bound for the Platt slope, the unit for all slopes: it is 0 or negative for uninformative logits.
LEAST_SLOPE = 1e-3


def calibrate(
    ranker: LiRank, data: BatchSource, batch_options: BatchOptions = BatchOptions(8192), *, strength: float = 1.0
) -> None:
    """Fit a LiRank's isotonic layers in place, on rows not used to train the other layers.

    Args:
        ranker: `rank.LiRank` with `calibrate` in its config.
        data: `rank.Impressions` with labels.
        batch_options: `rank.BatchOptions`, batching for data.
        strength: penalty that keeps slopes near Platt's common slope, and a segment's slopes near those for all rows;
            use more for few rows.
    Raises: ValueError for a ranker without isotonic layers, and for data without labels or with a single class.
    """
    if ranker.isotonic is None:
        raise ValueError(f"{NAME}: the ranker must have isotonic layers, LiRank(…, calibrate=True), got none.")
    if not strength > 0:
        raise ValueError(f"{NAME}: strength must be above 0, got {strength}.")
    if not len(data):
        raise ValueError(f"{NAME}: data has no requests.")
    check_schema(NAME, ranker, data)
    check_classes(data, batch_options)
    logits, labels, weights, segment = _rows(ranker, data, batch_options)
    for name, layer in zip(ranker.labels, ranker.isotonic, strict=True):
        assert isinstance(layer, Isotonic)
        known = ~labels[name].isnan()
        w, s = (None if x is None else x[known] for x in (weights, segment))
        found = fit_isotonic(logits[name][known], labels[name][known], w, s, layer.weight.shape[0], strength)
        with torch.no_grad():
            layer.weight.copy_(found[0])
            layer.bias.copy_(found[1])


def check_classes(data: BatchSource, batch_options: BatchOptions, what: str = "data") -> None:
    """Raise if a label has the same value in all rows. what: the rows' name for the error."""
    parts = [batch.labels for batch in batch_options._replace(history_max=0).batches(data, torch.device("cpu"))]
    for name in parts[0] if parts else ():
        y = torch.cat([part[name] for part in parts])
        many, y = len(y), y[~y.isnan()]
        if many and not len(y):
            raise ValueError(f"{NAME}: {what} must have values for label {name!r}, got none in {many:,} rows.")
        if len(y) and bool((y == y[0]).all()):
            raise ValueError(
                f"{NAME}: {what} must have both classes for label {name!r}, got {y[0].item():g} in all {len(y):,} rows."
            )


def _rows(
    ranker: LiRank, data: BatchSource, batch_options: BatchOptions
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None, Tensor | None]:
    """Uncalibrated logits, labels, weights and segments for all rows."""
    logits, labels, weights, segments = list[dict[str, Tensor]](), list[dict[str, Tensor]](), [], []
    with eval_mode(ranker):
        for batch in batch_options.batches(data, ranker.device):
            if missing := [label for label in ranker.labels if label not in batch.labels]:
                raise ValueError(f"{NAME}: data must have the label {missing[0]!r}, got {sorted(batch.labels)}.")
            with batch_options.autocast(ranker.device):
                logits.append(ranker.raw_logits(batch))
            labels.append(batch.labels)
            weights += [] if batch.weights is None else [batch.weights]
            segment = ranker.calibration_segments(batch)
            segments += [] if segment is None else [segment]
    z, y = ({name: torch.cat([part[name] for part in parts]) for name in ranker.labels} for parts in (logits, labels))
    w, s = (torch.cat(parts) if parts else None for parts in (weights, segments))
    return z, y, w, s


def fit_isotonic(
    x: Tensor, labels: Tensor, weights: Tensor | None, segment: Tensor | None, segments: int, strength: float
) -> tuple[Tensor, Tensor]:
    """Weight and bias that minimise the log loss for labels given logits x, plus a penalty on slopes.

    First fits a x + b (Platt scaling), then slopes w with penalty strength · ½ Σ (w / a − 1)². With several segments,
    each segment's function then deviates from the common function as far as its own rows warrant.

    Args:
        x, labels, weights: (n,). segment: (n,) int64 in [0, segments).
    Returns: (segments, K) and (segments,) fp64.
    """
    x, y, w = x.double(), labels.double(), None if weights is None else weights.double()

    def log_loss(z: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(z, y, w, reduction="sum")

    def fit_near(u0: Tensor, b0: Tensor, segment: Tensor | None, of_bias: float) -> tuple[Tensor, Tensor]:
        """Slopes (segments, K), relative to Platt's, and biases (segments,), regularised towards u0 and b0."""
        u, b = (t.clone().requires_grad_() for t in (u0, b0))

        def loss() -> Tensor:
            away = strength * (u - u0).square().sum() + of_bias * (b - b0).square().sum()
            return log_loss(isotonic(x, a * u, b, segment)) + away / 2

        minimize([u, b], loss)
        return u.detach(), b.detach()

    a, b = _fit_platt(x, log_loss)
    a = a.clamp(min=LEAST_SLOPE)
    u, b = fit_near(torch.ones_like(Isotonic().weight).to(x), b, None, 0.0)
    if segment is not None:
        u, b = fit_near(u.repeat(segments, 1), b.repeat(segments), segment, strength)
    return a * u, b


def _fit_platt(x: Tensor, log_loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """a and b, (1,) each, for the best a x + b."""
    # Scale logits to unit spread, which suits the solver's step size; the penalty bounds steps with few rows.
    spread, middle = x.std(correction=0).clamp(min=1e-12), x.mean()
    a, b = x.new_zeros(1, requires_grad=True), x.new_zeros(1, requires_grad=True)
    scaled = (x - middle) / spread
    minimize([a, b], lambda: log_loss(a * scaled + b) + a.square().sum() / 2)
    slope = a.detach() / spread
    return slope, b.detach() - slope * middle + (slope - 1) * LOW
