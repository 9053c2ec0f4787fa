"""Calibration: increasing functions from scores to probabilities.

    platt      p = σ(a · logit(score) + b), a > 0: two parameters, strictly increasing, so the order is unchanged
    isotonic   least-squares increasing step function, interpolated linearly: any shape, with ties

Sources: Platt 1999; Zadrozny & Elkan 2002, https://doi.org/10.1145/775047.775151; pool-adjacent-violators, Ayer et al.
1955.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["platt", "isotonic"]
KINDS = ("platt", "isotonic")
# Clamp probabilities to this distance from 0 and 1 before taking the logit.
EDGE = 1e-6


@dataclass(frozen=True)
class Calibration:
    """An increasing function: piecewise linear in the scores, or a sigmoid that is linear in their logits.

    Args:
        kind: "platt" or "isotonic".
        x: isotonic: increasing scores. platt: (a, b).
        y: isotonic: the value at each score in x; constant beyond both ends. platt: empty.
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
        """Raises: ValueError, TypeError or KeyError for input not from `to_json`."""
        made = cls(told["kind"], tuple(map(float, told["x"])), tuple(map(float, told["y"])))
        rises = all(a < b for a, b in pairwise(made.x))
        is_whole = len(made.x) == 2 and not made.y if made.kind == "platt" else len(made.x) == len(made.y) > 0 and rises
        if made.kind not in KINDS or not is_whole:
            raise ValueError(f"a calibration must be one of {', '.join(KINDS)}, with its numbers, got {told!r}")
        return made
