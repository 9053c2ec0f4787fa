"""LiGR options, shared by Python, the command line and config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LiGRConfig:
    """Sizes for a `rank.LiGR`.

    Args:
        width: token width.
        layers, heads: numbers of layers and attention heads; width / heads must be even.
        setwise_layers: number of final layers in which a request's candidates attend to each other. 0: candidates are
            scored independently.
        expansion: SwiGLU's inner width, as a multiple of width.
        gate: False for plain pre-norm layers.
        actions: False: ignore event outcomes and use only the items.
        ages: False: ignore times.
        dropout: on tokens and each layer's output, in training.
        weights: label weights in the score; None for 1 each.
    Raises: ValueError for invalid sizes.
    """

    width: int = 256
    layers: int = 6
    heads: int = 4
    setwise_layers: int = 1
    expansion: float = 4.0
    gate: bool = True
    actions: bool = True
    ages: bool = True
    dropout: float = 0.0
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads) < 1 or self.width % (2 * self.heads):
            raise ValueError(
                "LiGR: width, layers and heads must be positive, width a multiple of 2 · heads, got "
                f"{self.width}, {self.layers} and {self.heads}."
            )
        if not 0 <= self.setwise_layers <= self.layers:
            raise ValueError(f"LiGR: setwise_layers must lie in [0, {self.layers}], got {self.setwise_layers}.")
        if self.expansion <= 0 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"LiGR: expansion must be positive and dropout in [0, 1), got {self.expansion} and {self.dropout}."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON options; `LiGRConfig(**options)` reads them."""
        return dataclasses.asdict(self)
