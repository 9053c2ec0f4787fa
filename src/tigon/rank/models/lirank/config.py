"""The options of a LiRank: one object for Python, the command line and config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tigon.rank.models.lirank.graph import Block, parse_blocks

Cross = Literal["residual", "dcn", "none"]
Norm = Literal["none", "batch", "layer"]
Bits = Literal[32, 8]


@dataclass(frozen=True)
class LiRankConfig:
    """Sizes and kinds of the layers of a `rank.LiRank`.

    Args:
        width: of embeddings, where a field has no `dim`.
        cross: "residual": cross layers whose ranks attend to each other; "dcn": those of DCN V2; "none".
        layers: number of cross layers. rank: of their matrices; None, for "dcn" alone, for full matrices.
        mlp: widths of the layers beside the cross layers; () for none.
        gate: whether the layers of the MLP gate themselves.
        dropout: of the layers of the MLP, in training.
        calibrate: True for an isotonic layer a label; the name of an `Id` field for one a label and value.
        norm: of the layers of the MLP, "batch", "layer" or "none".
        towers: name → labels that share hidden layers; None: one tower for all labels.
        tower_mlp: widths of the hidden layers of a tower; () for a linear function of the shared layers.
        temperature: τ of the attention.
        bits: of the embedding tables: 32, or 8 as `rank.quantize_tables` makes them.
        blocks: a graph of `rank.Block`s, or dicts of their attributes, in place of cross layers and MLP, as
            `rank.search_blocks` finds it; `cross`, `layers`, `rank`, `mlp` and `gate` are ignored then.
        weights: of each label in the score; None for 1 each.
    Raises: ValueError for numbers that make no model.
    """

    width: int = 16
    cross: Cross = "residual"
    layers: int = 3
    rank: int | None = 64
    mlp: Sequence[int] = (256, 256)
    gate: bool = True
    dropout: float = 0.0
    calibrate: bool | str = False
    norm: Norm = "batch"
    towers: Mapping[str, Sequence[str]] | None = None
    tower_mlp: Sequence[int] = ()
    temperature: float = 1.0
    bits: Bits = 32
    blocks: Sequence[Block | Mapping[str, Any]] | None = None
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name in ("mlp", "tower_mlp"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.towers is not None:
            object.__setattr__(self, "towers", {name: list(labels) for name, labels in self.towers.items()})
        if self.width < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"LiRank: width must be positive and dropout in [0, 1), got {self.width} and {self.dropout}."
            )
        if self.bits not in (32, 8):
            raise ValueError(f"LiRank: bits must be 32 or 8, got {self.bits!r}.")
        for name, words in (("cross", Cross), ("norm", Norm)):
            if getattr(self, name) not in get_args(words):
                known = ", ".join(map(repr, get_args(words)))
                raise ValueError(f"LiRank: {name} must be one of {known}, got {getattr(self, name)!r}.")
        if any(width < 1 for width in (*self.mlp, *self.tower_mlp)):
            widths = self.mlp if any(width < 1 for width in self.mlp) else self.tower_mlp
            raise ValueError(f"LiRank: mlp must be positive widths, got {widths}.")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", parse_blocks(self.blocks))
            if not self.temperature > 0:
                raise ValueError(f"LiRank: temperature must be positive, got {self.temperature}.")
        elif self.cross != "none":
            self._check_cross_layers()

    def _check_cross_layers(self) -> None:
        if self.layers < 1 or (self.rank is not None and self.rank < 1) or not self.temperature > 0:
            raise ValueError(
                "LiRank: layers, rank and temperature must be positive, got "
                f"{self.layers}, {self.rank} and {self.temperature}."
            )
        if self.cross == "residual" and self.rank is None:
            raise ValueError("LiRank: cross 'residual' needs a rank, the numbers that attend to each other; got None.")

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON holds them; `LiRankConfig(**options)` reads them."""
        options = dataclasses.asdict(self)
        for name in ("mlp", "tower_mlp"):
            options[name] = list(options[name])
        if self.blocks is None:
            del options["blocks"]
        else:
            options["blocks"] = [{**block._asdict(), "inputs": list(block.inputs)} for block in self.graph]
        return options

    @property
    def graph(self) -> tuple[Block, ...]:
        """`blocks`, parsed; () without."""
        return tuple(block for block in self.blocks or () if isinstance(block, Block))
