"""The options of a LiGR: one object for Python, the command line and config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LiGRConfig:
    """Sizes of a `rank.LiGR`.

    Args:
        width: of the stream of tokens.
        layers, heads: numbers of layers and of attention heads; width / heads must be even.
        setwise_layers: number of last layers in which the candidates of a request read each other. 0: each candidate is
            scored as if it were alone.
        expansion: inner width of SwiGLU, in units of width.
        gate: False for plain pre-norm layers.
        actions: False: events do not say what happened, only to which item.
        ages: False: times are not read.
        dropout: of tokens and of the output of each layer, in training.
        weights: of each label in the score; None for 1 each.
    Raises: ValueError for numbers that make no model.
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
        """The options as JSON holds them; `LiGRConfig(**options)` reads them."""
        return dataclasses.asdict(self)
