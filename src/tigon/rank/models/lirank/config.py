"""LiRank options, shared by Python, the command line and config.json."""

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
    """Layer sizes and kinds for a `rank.LiRank`.

    Args:
        width: embedding width for fields without `dim`.
        cross: "residual": cross layers with attention between the ranks; "dcn": DCN V2 cross layers; "none".
        layers: number of cross layers. rank: cross-layer rank; None, only with "dcn", for full matrices.
        mlp: layer widths for the MLP beside the cross layers; () for none.
        gate: whether MLP layers gate themselves.
        dropout: in MLP layers, in training.
        calibrate: True for an isotonic layer per label; an `Id` field's name for a function per label and value.
        norm: normalisation in MLP layers: "batch", "layer" or "none".
        towers: name → labels that share hidden layers; None: one tower for all labels.
        tower_mlp: hidden widths in each tower; () for linear heads on the shared layers.
        temperature: τ in the attention.
        bits: embedding-table precision: 32, or 8 as `rank.quantize_tables` makes them.
        blocks: a graph of `rank.Block`s, or dicts with their attributes, instead of cross layers and MLP, as found by
            `rank.search_blocks`; `cross`, `layers`, `rank`, `mlp` and `gate` are then ignored.
        weights: label weights in the score; None for 1 each.
    Raises: ValueError for invalid sizes.
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
            raise ValueError("LiRank: cross 'residual' needs rank, how many numbers attend to each other; got None.")

    def to_dict(self) -> dict[str, Any]:
        """JSON options; `LiRankConfig(**options)` reads them."""
        options = dataclasses.asdict(self)
        for name in ("mlp", "tower_mlp"):
            options[name] = list(options[name])
        del options["blocks"]
        return options | ({"blocks": [block._asdict() for block in self.graph]} if self.graph else {})

    @property
    def graph(self) -> tuple[Block, ...]:
        """Parsed `blocks`; () without blocks."""
        return tuple(block for block in self.blocks or () if isinstance(block, Block))
