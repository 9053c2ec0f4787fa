"""Probabilities put right on the validation, and measured on the test: Tigon's isotonic layer beside Platt scaling and
scikit-learn's isotonic regression, all from the same scores."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from studies.clicks import metrics
from studies.clicks.metrics import Floats

LEAST = 1e-12


def rows(
    validation: Floats, test: Floats, labels: Tensor, label: Floats, layer: Floats
) -> list[tuple[str, str, dict[str, float]]]:
    """Rows of the part "calibration".

    Args:
        validation, test: probabilities. labels: of the validation. label: of the test.
        layer: probabilities of the test behind the isotonic layer.
    """
    y = labels.double().cpu().numpy()
    found = {"none": test, "isotonic layer": layer, "Platt": platt(validation, y, test)}
    if (stepped := isotonic(validation, y, test)) is not None:
        found["scikit-learn's isotonic"] = stepped
    return [("calibration", name, metrics.measure_all(p, label)) for name, p in found.items()]


def _logits(p: Floats) -> Tensor:
    return torch.from_numpy(np.clip(p, LEAST, 1 - LEAST)).logit()


def platt(validation: Floats, labels: Floats, test: Floats) -> Floats:
    """σ(a z + b) of the logits z, with the a and b of the least log loss on the validation."""
    z, y = _logits(validation), torch.from_numpy(labels)
    ab = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([ab], max_iter=100, line_search_fn="strong_wolfe", tolerance_change=1e-12)

    def closure() -> Tensor:
        solver.zero_grad()
        loss = F.binary_cross_entropy_with_logits(ab[0] * z + ab[1], y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(closure)  # type: ignore[no-untyped-call]
    a, b = ab.detach()
    found: Floats = (a * _logits(test) + b).sigmoid().numpy()
    return found


def isotonic(validation: Floats, labels: Floats, test: Floats) -> Floats | None:
    """scikit-learn's; None where it is not installed."""
    try:
        from sklearn.isotonic import IsotonicRegression
    except ImportError:
        return None
    model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(validation, labels)
    found: Floats = model.predict(test)
    return found
