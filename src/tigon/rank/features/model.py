"""LiRank: a model of clicks on rows of features; embeddings, cross layers beside an MLP, towers, and calibration.

    x₀ = features of a row;   h = [cross(x₀), mlp(x₀)];   logit of a label = tower(h) · w + c, then calibrated

With `blocks` h is what a graph of them makes of x₀.

Each row is scored by itself. What the other rows of a request are does not matter to it.

Source: LiRank, Borisyuk et al. 2024, https://arxiv.org/abs/2402.06859
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tigon.fusion.engine.patch import is_hooked
from tigon.rank.batch import Batch
from tigon.rank.features import aligned
from tigon.rank.features.blocks import Block, Blocks, blocks_of
from tigon.rank.features.calibrate import calibrate
from tigon.rank.features.cross import Cross, CrossLayers, check_kind
from tigon.rank.features.inputs import Inputs
from tigon.rank.features.isotonic import Isotonic
from tigon.rank.features.tables import Bits, Grad, Tables
from tigon.rank.features.towers import MLP, Normed, Towers
from tigon.rank.features.towers import mlp as made_mlp
from tigon.rank.fields import Id
from tigon.rank.ranker import Ranker
from tigon.rank.schema import Schema
from tigon.rank.scoring import Batched, Drawing


class LiRank(Ranker):
    """A ranker of rows by their features.

    Args:
        schema: the table's `tigon.rank.Schema`. Context, items and rows are read; `Text` and histories are not.
        width: of embeddings, where a field has no `dim`.
        cross: "residual": cross layers whose ranks attend to each other; "dcn": those of DCN V2; "none".
        layers: of cross layers. rank: of their matrices; None, for "dcn" alone, for full ones.
        mlp: widths of the layers beside them; () for none.
        gate: whether these layers gate themselves. norm: of these layers, "batch", "layer" or "none".
        dropout: of these layers, in training.
        calibrate: True for an isotonic layer a label; the name of an `Id` for one a label and value.
        towers: name → labels that share hidden layers of their own; None: one for all.
        tower_mlp: the widths of these layers; () for a linear function of what all labels share.
        temperature: τ of the attention.
        weights: of each label in the score; None for 1 each.
        blocks: a graph of `rank.Block`s, or dicts of their attributes, in place of cross layers and MLP, as
            `rank.search` finds it; `cross`, `layers`, `rank`, `mlp` and `gate` are not looked at then.
        bits: of the tables: 32, or 8 as `compress` makes them.

    Raises: ValueError for a schema without labels or fields, and for numbers that make no model.
    """

    kind = "lirank"

    def __init__(
        self, schema: Schema, width: int = 16, cross: Cross = "residual", layers: int = 3, rank: int | None = 64,
        mlp: Sequence[int] = (256, 256), gate: bool = True, dropout: float = 0.0, calibrate: bool | str = False, *,
        norm: Normed = "batch", towers: Mapping[str, Sequence[str]] | None = None, tower_mlp: Sequence[int] = (),
        temperature: float = 1.0, weights: dict[str, float] | None = None,
        blocks: Sequence[Block | Mapping[str, Any]] | None = None, bits: Bits = 32,
    ) -> None:  # fmt: skip
        super().__init__(schema, weights)
        if not self.labels:
            raise ValueError("LiRank: the schema must name labels, which it learns, got none; name them by labels=….")
        if width < 1 or not 0 <= dropout < 1:
            raise ValueError(f"LiRank: width must be positive and dropout in [0, 1), got {width} and {dropout}.")
        if bits not in (32, 8):
            raise ValueError(f"LiRank: bits must be 32 or 8, got {bits!r}.")
        check_kind(cross)
        self.options: dict[str, Any] = {
            "width": width, "cross": cross, "layers": layers, "rank": rank, "mlp": list(mlp), "gate": gate,
            "dropout": dropout, "calibrate": calibrate, "norm": norm,
            "towers": None if towers is None else {name: list(of) for name, of in towers.items()},
            "tower_mlp": list(tower_mlp), "temperature": temperature, "bits": bits,
        }  # fmt: skip
        self.inputs = Inputs(schema, width, bits)
        wide = self.inputs.width
        self.cross: CrossLayers | None = None
        self.mlp: MLP | None = None
        self.blocks: Blocks | None = None
        if blocks is not None:
            checked = blocks_of(blocks)
            self.options["blocks"] = [{**block._asdict(), "inputs": list(block.inputs)} for block in checked]
            self.blocks = Blocks(checked, self.inputs.vectors, width, norm, dropout, temperature)
            shared = self.blocks.width
        else:
            self.cross = None if cross == "none" else CrossLayers(cross, layers, wide, rank, temperature)
            self.mlp = made_mlp(wide, mlp, gate, norm, dropout) if mlp else None
            shared = wide * (self.cross is not None or self.mlp is None) + (mlp[-1] if mlp else 0)
        self.towers = Towers(
            self.labels, towers or {"all": self.labels}, shared, tower_mlp, gate, norm, dropout
        )  # fmt: skip
        self.isotonic: nn.ModuleList | None = None
        self.segment = calibrate if isinstance(calibrate, str) else None
        if calibrate:
            segments = 1 if self.segment is None else _segments(schema, self.segment)
            self.isotonic = nn.ModuleList(Isotonic(segments) for _ in self.labels)
        self.apply(_begun)

    def config(self) -> dict[str, Any]:
        """What `LiRank(schema, …)` takes, without the weights of the labels."""
        return dict(self.options)

    # ------------------------------------------------------------------------------------------------ rows to logits

    def hidden(self, batch: Batch) -> Tensor:
        """(C, width): what all towers read."""
        return self.through(self.inputs(batch.context, batch.items, request_of(batch, self.device)))

    def through(self, x: Tensor) -> Tensor:
        """`hidden` of inputs (C, wide)."""
        return aligned.beside(*self.sides(x))

    def sides(self, x: Tensor) -> tuple[list[Tensor], list[int]]:
        """What stands side by side in `hidden`, and the widths; behind those there may be columns of zeros."""
        if self.blocks is not None:
            return [self.blocks(x)], [self.blocks.width]
        if self.mlp is None:
            return [x if self.cross is None else self.cross(x)], [self.inputs.width]
        # The large products first: while they run, the host is ahead with the small ones of the cross layers.
        # What wraps the MLP, as FSDP does, or looks at it has to see its call.
        plain = type(self.mlp) is MLP and not is_hooked(self.mlp)
        mlp, width = self.mlp.padded(x) if plain else self.mlp(x), self.options["mlp"][-1]
        return ([mlp], [width]) if self.cross is None else ([self.cross(x), mlp], [self.inputs.width, width])

    def logits(self, hidden: Tensor) -> dict[str, Tensor]:
        """label → (C,) in fp32 or wider, before calibration."""
        return self._wide(self.towers(hidden))

    def _wide(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: found[name].to(torch.promote_types(found[name].dtype, torch.float32)) for name in self.labels}

    def calibrated(self, logits: dict[str, Tensor], segment: Tensor | None) -> dict[str, Tensor]:
        """Logits behind the isotonic layers, where there are any. segment: (C,) codes of the segments' field."""
        if self.isotonic is None:
            return logits
        layers = zip(logits.items(), self.isotonic, strict=True)
        return {name: layer(z, segment) for (name, z), layer in layers}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The logits of all rows.

        Args:
            batch: a `tigon.rank.Batch`, on the ranker's device.
        Returns: label → (C,) fp32.
        Raises: ValueError for a field that is missing.
        """
        return self.calibrated(self.uncalibrated(batch), self.segments_of(batch))

    def uncalibrated(self, batch: Batch) -> dict[str, Tensor]:
        """label → (C,) logits before calibration, in fp32 or wider."""
        if type(self) is not LiRank:  # whose `hidden` or `logits` may be its own
            return self.logits(self.hidden(batch))
        sides = self.sides(self.inputs(batch.context, batch.items, request_of(batch, self.device)))
        return self._wide(self.towers.of_sides(*sides))

    def features(self, batch: Batch, label: str | None = None) -> Tensor:
        """The last hidden layer, of which a label's logit, before calibration, is a linear function.

        Args:
            batch: a `tigon.rank.Batch`, on the ranker's device.
            label: whose; None: the first one's. Labels of one tower share it.
        Returns: (C, width).
        Raises: ValueError for a label that is not there.
        """
        label = self.labels[0] if label is None else label
        if label not in self.labels:
            raise ValueError(f"LiRank.features: label must be one of {', '.join(self.labels)}, got {label!r}.")
        return self.towers.features(self.hidden(batch), label)

    def features_of(self, batch: Batch) -> dict[str, Tensor]:
        """label → `features`, computed together."""
        return self.towers.features_of(self.hidden(batch))

    def last_layer(self) -> dict[str, tuple[Tensor, Tensor]]:
        """label → (width,) weights and the bias by which its logit, before calibration, is made of its features."""
        found = self.towers.last_layer()
        return {label: found[label] for label in self.labels}

    def segments_of(self, batch: Batch) -> Tensor | None:
        """(C,) codes of the field that calibration goes by; None without one."""
        if self.segment is None:
            return None
        context = self.segment in batch.context
        found: Tensor = (batch.context if context else batch.items)[self.segment].long()
        request = request_of(batch, self.device) if context else None
        return found if request is None else found[request]

    @property
    def device(self) -> torch.device:
        """Where the weights are, which is where batches must be."""
        return self.inputs.slope.device

    # ------------------------------------------------------------------------------------------------------- tables

    def tables(self) -> list[Tables]:
        """The tables of embeddings, one below the other for each width."""
        return self.inputs.tables()

    def table_gradients(self, grad: Grad) -> list[nn.Parameter]:
        """Choose how gradients of tables come: "rows" for those that occur, as `tigon.training.RowAdagrad` takes them.

        Args:
            grad: "dense" or "rows".
        Returns: the weights of the tables.
        Raises: ValueError for tables of 8 bits, which have none.
        """
        if self.options["bits"] == 8:
            raise ValueError("LiRank: tables of 8 bits cannot be trained; train first, and compress then.")
        for tables in self.tables():
            tables.grad = grad
        return [tables.weight for tables in self.tables()]

    def compress(self) -> LiRank:
        """This ranker with tables of 8 bits a number, and a scale and an offset a row: for scoring alone.

        Returns: another LiRank, in evaluation mode; this one stays as it is.
        Raises: ValueError for one that is compressed already, and for numbers that fp16 does not hold.
        """
        from tigon.rank.compress_tables import compressed

        return compressed(self)

    # -------------------------------------------------------------------------------------------------- calibration

    def calibrate(self, data: Batched, drawing: Drawing = Drawing(8192), *, strength: float = 1.0) -> None:
        """Fit the isotonic layers alone, on rows that the rest was not trained on.

        Args:
            data: `rank.Impressions` with labels.
            drawing: `rank.Drawing`, how it is cut into batches.
            strength: of what keeps the slopes near Platt's, one for all logits, and those of a segment near those of
                all rows; more where rows are few.
        Raises: ValueError for a ranker without isotonic layers, and for data without labels or with one class alone.
        """
        calibrate(self, data, drawing, strength)

    # ------------------------------------------------------------------------------------------------------- export

    def export(self, folder: str | Path) -> list[Path]:
        """Write score.pt2, a program of `torch.export` that runs without Tigon.

        Args:
            folder: made if it is not there.
        Returns: the file. `tigon.rank.features.export` says what goes in and out.
        Raises: ValueError if it is a file.
        """
        from tigon.rank.features import export

        return export.write(self, Path(folder))


def request_of(batch: Batch, device: torch.device) -> Tensor | None:
    """(C,) int64, the request of each row; None if each row is a request of its own."""
    offsets = batch.offsets
    # By NumPy: a GPU waits for what is done before a step's first launch, and torch would wake a thread for each core.
    if len(offsets) == batch.candidates + 1 and bool((np.diff(offsets.numpy()) == 1).all()):
        return None
    sizes = offsets.diff().to(device, non_blocking=True)
    return torch.repeat_interleave(sizes, output_size=batch.candidates)


@torch.no_grad()
def _begun(module: nn.Module) -> None:
    """Weights by the law of Glorot and Bengio, biases 0."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _segments(schema: Schema, name: str) -> int:
    from tigon.data.arrow import nearest

    readable = {**schema.context, **schema.items, **schema.rows}
    field = readable.get(name)
    if not isinstance(field, Id) or field.hash != "mod":
        known = [one for one, of in readable.items() if isinstance(of, Id)]
        raise ValueError(
            f"LiRank: calibrate must be True, False or the name of a field Id, got {name!r}; {nearest(name, known)}"
        )
    return field.rows
