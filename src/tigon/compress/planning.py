"""Which candidate each layer takes, so that all together fit the budget and their errors are least."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tigon.compress.candidates import Candidate

STEPS = 100  # of the bisection: errors range over many powers of two


def least_bytes(layers: Sequence[Sequence[Candidate]]) -> int:
    """What the smallest candidates take together."""
    return sum(min(one.bytes for one in row) for row in layers)


def plan(layers: Sequence[Sequence[Candidate]], budget: int, weights: Sequence[float]) -> list[Candidate] | None:
    """One candidate of each layer; None where even the smallest are too large.

    Minimises Σ weight · error within the bytes: by the price of a byte at which the layers' own best choices just fit
    (Lagrange), and then by spending what the price leaves over where it helps most.

    Raises: ValueError for an error or a weight that is not finite.
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

    # At this price a byte costs more than any error does, and each layer takes its smallest candidate.
    low, high = 0.0, max(weight * c.error for row, weight in zip(layers, weights, strict=True) for c in row)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(c.bytes for c in at(middle)) <= budget else (middle, high)
    return _spent(layers, weights, at(high), budget)


def _spent(
    layers: Sequence[Sequence[Candidate]], weights: Sequence[float], chosen: list[Candidate], budget: int
) -> list[Candidate]:  # fmt: skip
    """The same with better candidates while they fit, the most error a byte first."""
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
