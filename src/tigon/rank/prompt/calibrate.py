"""Calibration: a rising function from scores to the shares of positives that held-out rows have at these scores.

    platt      p = σ(a · logit(score) + b), a > 0: two numbers, and the order of scores stays
    isotonic   the rising step function of least squares, linear between its steps: any shape, with ties

Sources: Platt 1999; Zadrozny & Elkan 2002, https://doi.org/10.1145/775047.775151; pool-adjacent-violators, Ayer et al.
1955.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from tigon.rank.prompt.task import NAME

Kind = Literal["platt", "isotonic"]
KINDS = ("platt", "isotonic")
# Scores are probabilities, kept this far from 0 and 1 before their logit is taken.
EDGE = 1e-6


@dataclass(frozen=True)
class Calibration:
    """A rising, piecewise linear function from scores, or from their logits through σ.

    Args:
        kind: "platt" or "isotonic".
        x: isotonic: rising scores. platt: (a, b).
        y: isotonic: the value at each score of x; flat before the first and after the last. platt: empty.
    """

    kind: Kind
    x: tuple[float, ...]
    y: tuple[float, ...] = ()

    def __call__(self, scores: Tensor) -> Tensor:
        """(n,) scores → (n,) calibrated scores in fp32."""
        s = scores.double()
        if self.kind == "platt":
            a, b = self.x
            return torch.sigmoid(a * torch.logit(s, EDGE) + b).float()
        x, y = (torch.tensor(t, dtype=torch.float64, device=s.device) for t in (self.x, self.y))
        if len(x) == 1:
            return y.expand(s.shape).float().clone()
        after = torch.searchsorted(x, s).clamp(1, len(x) - 1)
        share = ((s - x[after - 1]) / (x[after] - x[after - 1])).clamp(0, 1)
        return (y[after - 1] + share * (y[after] - y[after - 1])).float()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "x": list(self.x), "y": list(self.y)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Calibration:
        """Raises: ValueError, TypeError or KeyError for what `to_json` has not made."""
        made = cls(told["kind"], tuple(map(float, told["x"])), tuple(map(float, told["y"])))
        rises = all(a < b for a, b in pairwise(made.x))
        is_whole = len(made.x) == 2 and not made.y if made.kind == "platt" else len(made.x) == len(made.y) > 0 and rises
        if made.kind not in KINDS or not is_whole:
            raise ValueError(f"a calibration must be one of {', '.join(KINDS)}, with its numbers, got {told!r}")
        return made


def calibration(scores: Tensor, labels: Tensor, kind: Kind = "platt") -> Calibration:
    """Fit a calibration on rows that were not trained on.

    Args:
        scores: (n,) probabilities.
        labels: (n,) what happened, 0 and 1; for isotonic any numbers.
        kind: "platt" or "isotonic".
    Raises: ValueError for an unknown kind, for rows of one class, of which nothing can be learned, and for labels that
        Platt's curve cannot be fitted on.
    """
    if kind not in KINDS:
        raise ValueError(f"{NAME}: calibration must be one of {', '.join(KINDS)}, got {kind!r}.")
    s, y = scores.detach().double().cpu(), labels.detach().double().cpu()
    if not len(y) or bool((y == y[0]).all()):
        got = "no rows" if not len(y) else f"{len(y)} rows that are all {y[0]:g}"
        raise ValueError(f"{NAME}: a calibration needs rows of both classes, got {got}.")
    others = y[(y != 0) & (y != 1)]
    if kind == "platt" and len(others):
        raise ValueError(f"{NAME}: a platt calibration needs labels of 0 and 1, got {others[0]:g}.")
    return _platt(s, y) if kind == "platt" else _isotonic(s, y)


def _platt(s: Tensor, y: Tensor) -> Calibration:
    z = torch.logit(s, EDGE)
    # Platt's targets: of few rows without an overlap the slope would grow without end.
    n1, n0 = y.sum(), (1 - y).sum()
    target = torch.where(y > 0, (n1 + 1) / (n1 + 2), 1 / (n0 + 2))
    # The cross entropy is convex in (a, b): Newton steps, halved where they are too long.
    rows = torch.stack((z, torch.ones_like(z)), 1)
    at = rows.new_tensor([1.0, 0.0])
    for _ in range(100):
        p = torch.sigmoid(rows @ at)
        slope = rows.mT @ (p - target)
        if float(slope.abs().max()) < 1e-9 * len(y):
            break
        curve = (rows * (p * (1 - p)).unsqueeze(1)).mT @ rows + 1e-9 * torch.eye(2, dtype=rows.dtype)
        step, before = torch.linalg.solve(curve, slope), _loss(rows @ at, target)
        while float(_loss(rows @ (at - step), target)) > float(before) and float(step.abs().max()) > 1e-9:
            step = step / 2
        at = at - step
    # Scores that say the opposite are worth nothing; their order stays all the same.
    return Calibration("platt", (max(float(at[0]), EDGE), float(at[1])))


def _loss(z: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(z, target, reduction="sum")


def _isotonic(s: Tensor, y: Tensor) -> Calibration:
    """Pool adjacent violators over the scores, equal scores first."""
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
