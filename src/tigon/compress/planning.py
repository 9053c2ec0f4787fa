"""Choose a candidate for each layer that minimises the total error within the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tigon.compress.candidates import Candidate

STEPS = 100  # bisection steps: errors span many powers of two


def least_bytes(layers: Sequence[Sequence[Candidate]]) -> int:
    """Total bytes with the smallest candidates."""
    return sum(min(one.bytes for one in row) for row in layers)


def plan(layers: Sequence[Sequence[Candidate]], budget: int, weights: Sequence[float]) -> list[Candidate] | None:
    """Choose a candidate per layer; None if even the smallest exceed the budget.

    Minimises Σ weight · error within the budget: bisects the price per byte (Lagrange multiplier) at which the layers'
    best choices just fit, then spends the remaining bytes where they reduce the error most.

    Raises: ValueError for non-finite errors or weights.
    """
    for place, (row, weight) in enumerate(zip(layers, weights, strict=True)):
        if not all(math.isfinite(weight * c.error) for c in row):
            raise ValueError(
                f"feed_forward: errors must be finite to be compared, and one of layer {place} is not (NaN or "
                "infinite): its numbers overflow; give the model in float32."
            )
    if least_bytes(layers) > budget:
        return None

    def at(price: float) -> list[Candidate]:
        return [
            min(row, key=lambda c: (weight * c.error + price * c.bytes, c.bytes))
            for row, weight in zip(layers, weights, strict=True)
        ]

    # At this price bytes outweigh any error, so each layer takes its smallest candidate.
    low, high = 0.0, max(weight * c.error for row, weight in zip(layers, weights, strict=True) for c in row)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(c.bytes for c in at(middle)) <= budget else (middle, high)
    return _spent(layers, weights, at(high), budget)


def _spent(
    layers: Sequence[Sequence[Candidate]], weights: Sequence[float], chosen: list[Candidate], budget: int
) -> list[Candidate]:  # fmt: skip
    """Upgrade candidates while they fit, largest error reduction per byte first."""
    spare = budget - sum(c.bytes for c in chosen)
    while True:
        best = None
        for place, (row, weight, now) in enumerate(zip(layers, weights, chosen, strict=True)):
            for other in row:
                more, gain = other.bytes - now.bytes, weight * (now.error - other.error)
                if gain > 0 and more <= spare and (best is None or gain / max(more, 1) > best[0]):
                    best = gain / max(more, 1), place, other
        if best is None:
            return chosen
        spare -= best[2].bytes - chosen[best[1]].bytes
        chosen = [*chosen[: best[1]], best[2], *chosen[best[1] + 1 :]]
