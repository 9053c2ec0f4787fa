"""Choose a candidate for each layer that minimises the total error within the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tigon.compress.candidates import Candidate

STEPS = 100  # bisection steps: errors span many powers of two


def count_least_bytes(layers: Sequence[Sequence[Candidate]]) -> int:
    """Total bytes with the smallest candidates."""
    return sum(min(one.bytes for one in row) for row in layers)


def plan(layers: Sequence[Sequence[Candidate]], budget: int, weights: Sequence[float]) -> list[Candidate] | None:
    """Choose a candidate per layer; None if even the smallest exceed the budget.

    Minimises Σ weight · error within the budget: bisects the price per byte (Lagrange multiplier) at which the layers'
    best choices just fit, then spends the remaining bytes where they reduce the error most.

    Raises: ValueError for non-finite errors or weights.
    """
    rows = list(zip(layers, weights, strict=True))
    for place, (row, weight) in enumerate(rows):
        if not all(math.isfinite(weight * c.error) for c in row):
            raise ValueError(
                f"feed_forward: errors must be finite, got NaN or infinity for layer {place}: values overflow; load "
                "the model in float32."
            )
    if count_least_bytes(layers) > budget:
        return None

    def choose(price: float) -> list[Candidate]:
        return [min(row, key=lambda c: (weight * c.error + price * c.bytes, c.bytes)) for row, weight in rows]

    # At this price bytes outweigh any error, so each layer takes its smallest candidate.
    low, high = 0.0, max(weight * c.error for row, weight in rows for c in row)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(c.bytes for c in choose(middle)) <= budget else (middle, high)
    chosen = choose(high)
    spare = budget - sum(c.bytes for c in chosen)
    while True:  # upgrade candidates while they fit, largest error reduction per byte first
        upgrades = [
            (weight * (now.error - other.error) / max(other.bytes - now.bytes, 1), place, other)
            for place, ((row, weight), now) in enumerate(zip(rows, chosen, strict=True))
            for other in row
            if weight * (now.error - other.error) > 0 and other.bytes - now.bytes <= spare
        ]
        if not upgrades:
            return chosen
        _, place, best = max(upgrades, key=lambda upgrade: upgrade[0])
        spare -= best.bytes - chosen[place].bytes
        chosen[place] = best
