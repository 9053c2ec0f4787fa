"""What `feed_forward` takes for its method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tigon.compress.packing import WIDTHS

Name = Literal["bits", "rank", "prune", "svd"]
Method = Literal["bits", "rank", "prune", "svd", "auto"]
NAMES: tuple[Name, ...] = ("bits", "rank", "prune", "svd")


@dataclass(frozen=True)
class Bits:
    """One split by bits for all layers, in the place of a budget.

    heavy, rest: bits of the weights of the heavy neurons and of the others, among 2, 3, 4, 5, 6 and 8.
    share: of the neurons that are heavy, from 0 to 1.
    chosen: False takes neurons at random in their place: what the choice is worth. Seeded by the layer.
    """

    heavy: int = 4
    rest: int = 3
    share: float = 0.25
    chosen: bool = True

    def __post_init__(self) -> None:
        for name in ("heavy", "rest"):
            if getattr(self, name) not in WIDTHS:
                raise ValueError(
                    f"Bits: {name} must be one of {', '.join(map(str, WIDTHS))}, got {getattr(self, name)}."
                )
        if not 0 <= self.share <= 1:
            raise ValueError(f"Bits: share must be from 0 to 1, a share of the neurons, got {self.share}.")
