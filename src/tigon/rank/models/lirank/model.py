"""LiRank: a click model on feature rows; embeddings, cross layers beside an MLP, towers, and calibration.

    x₀ = row features;   h = [cross(x₀), mlp(x₀)];   a label's logit = tower(h) · w + c, then calibrated

With `blocks`, a block graph computes h from x₀.

Rows are scored independently: a request's other rows do not affect a row's score.

Source: LiRank, Borisyuk et al. 2024, https://arxiv.org/abs/2402.06859
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tigon.fusion.engine.patch import is_hooked
from tigon.rank.data.batch import Batch
from tigon.rank.data.fields import Id
from tigon.rank.data.schema import Schema
from tigon.rank.models.lirank import padded_linear
from tigon.rank.models.lirank.blocks import Blocks
from tigon.rank.models.lirank.config import LiRankConfig
from tigon.rank.models.lirank.cross_layers import CrossLayers
from tigon.rank.models.lirank.embedding_tables import EmbeddingTables, Grad
from tigon.rank.models.lirank.inputs import Inputs
from tigon.rank.models.lirank.isotonic import Isotonic
from tigon.rank.models.lirank.towers import MLP, Towers, build_mlp
from tigon.rank.models.ranker import Ranker


class LiRank(Ranker):
    """Feature ranker: scores each row from its features.

    Args:
        schema: the table's `rank.Schema`. Context, item and row fields are read; `Text` and histories are ignored.
        config: `rank.LiRankConfig`.

    Raises: ValueError for a schema without labels or fields, and for a config that does not fit the schema.
    """

    kind = "lirank"
    config_class = LiRankConfig
    config: LiRankConfig

    def __init__(self, schema: Schema, config: LiRankConfig = LiRankConfig()) -> None:
        super().__init__(schema, config)
        if not self.labels:
            raise ValueError("LiRank: the schema must name labels to learn, got none; name labels by labels=….")
        self.inputs = Inputs(schema, config.width, config.bits)
        wide = self.inputs.width
        self.cross: CrossLayers | None = None
        self.mlp: MLP | None = None
        self.blocks: Blocks | None = None
        if config.blocks is not None:
            self.blocks = Blocks(self.inputs.vectors, config)
            shared = self.blocks.width
        else:
            if config.cross != "none":
                self.cross = CrossLayers(config.cross, config.layers, wide, config.rank, config.temperature)
            self.mlp = build_mlp(wide, config.mlp, config.gate, config.norm, config.dropout) if config.mlp else None
            shared = wide * (self.cross is not None or self.mlp is None) + (config.mlp[-1] if config.mlp else 0)
        self.towers = Towers(self.labels, shared, config)
        self.isotonic: nn.ModuleList | None = None
        self.segment = config.calibrate if isinstance(config.calibrate, str) else None
        if config.calibrate:
            segments = 1 if self.segment is None else _count_segments(schema, self.segment)
            self.isotonic = nn.ModuleList(Isotonic(segments) for _ in self.labels)
        self.apply(_init_weights)

    # ------------------------------------------------------------------------------------------------ rows to logits

    def compute_hidden(self, batch: Batch) -> Tensor:
        """(C, width): output of the shared layers, which all towers read."""
        return self.run_layers(self.inputs(batch.context, batch.items, row_requests(batch, self.device)))

    def run_layers(self, x: Tensor) -> Tensor:
        """`compute_hidden` for inputs (C, wide)."""
        return padded_linear.concat_columns(*self.sides(x))

    def sides(self, x: Tensor) -> tuple[list[Tensor], list[int]]:
        """The tensors that `compute_hidden` concatenates, and their widths; zero padding columns may follow."""
        if self.blocks is not None:
            return [self.blocks(x)], [self.blocks.width]
        if self.mlp is None:
            return [x if self.cross is None else self.cross(x)], [self.inputs.width]
        # Launch the MLP's large products first: while they run, the host enqueues the cross layers' small products.
        # Call the MLP module itself if wrapped (FSDP) or hooked.
        plain = type(self.mlp) is MLP and not is_hooked(self.mlp)
        hidden, width = self.mlp.forward_padded(x) if plain else self.mlp(x), self.config.mlp[-1]
        return ([hidden], [width]) if self.cross is None else ([self.cross(x), hidden], [self.inputs.width, width])

    def logits(self, hidden: Tensor) -> dict[str, Tensor]:
        """label → (C,) in fp32 or wider, before calibration."""
        return self._wide(self.towers(hidden))

    def _wide(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: found[name].to(torch.promote_types(found[name].dtype, torch.float32)) for name in self.labels}

    def apply_calibration(self, logits: dict[str, Tensor], segment: Tensor | None) -> dict[str, Tensor]:
        """Apply isotonic layers, if there are any. segment: (C,) codes of the segment field."""
        if self.isotonic is None:
            return logits
        layers = zip(logits.items(), self.isotonic, strict=True)
        return {name: layer(z, segment) for (name, z), layer in layers}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Logits for all rows.

        Args:
            batch: a `tigon.rank.Batch`, on the ranker's device.
        Returns: label → (C,) fp32.
        Raises: ValueError for a missing field.
        """
        return self.apply_calibration(self.raw_logits(batch), self.calibration_segments(batch))

    def raw_logits(self, batch: Batch) -> dict[str, Tensor]:
        """label → (C,) logits before calibration, in fp32 or wider."""
        if type(self) is not LiRank:  # a subclass may override `compute_hidden` or `logits`
            return self.logits(self.compute_hidden(batch))
        sides = self.sides(self.inputs(batch.context, batch.items, row_requests(batch, self.device)))
        return self._wide(self.towers.forward_sides(*sides))

    def features(self, batch: Batch, label: str | None = None) -> Tensor:
        """The last hidden layer; a label's logit, before calibration, is linear in it.

        Args:
            batch: a `tigon.rank.Batch`, on the ranker's device.
            label: None: the first label. Labels in the same tower share the layer.
        Returns: (C, width).
        Raises: ValueError for an unknown label.
        """
        label = self.labels[0] if label is None else label
        if label not in self.labels:
            raise ValueError(f"LiRank.features: label must be one of {', '.join(self.labels)}, got {label!r}.")
        return self.label_features(batch)[label]

    def label_features(self, batch: Batch) -> dict[str, Tensor]:
        """label → `features`, computed together."""
        return self.towers.label_features(self.compute_hidden(batch))

    def last_layer(self) -> dict[str, tuple[Tensor, Tensor]]:
        """label → (width,) weights and the bias that map features to the logit before calibration."""
        found = self.towers.last_layer()
        return {label: found[label] for label in self.labels}

    def calibration_segments(self, batch: Batch) -> Tensor | None:
        """(C,) codes for the calibration field; None without such a field."""
        if self.segment is None:
            return None
        context = self.segment in batch.context
        found: Tensor = (batch.context if context else batch.items)[self.segment].long()
        request = row_requests(batch, self.device) if context else None
        return found if request is None else found[request]

    @property
    def device(self) -> torch.device:
        """The weights' device, where batches must be."""
        return self.inputs.slope.device

    # ------------------------------------------------------------------------------------------------------- tables

    def tables(self) -> list[EmbeddingTables]:
        """The embedding tables, stacked by width."""
        return self.inputs.tables()

    def table_gradients(self, grad: Grad) -> list[nn.Parameter]:
        """Set the tables' gradient mode: "rows" for row-sparse gradients, as `tigon.training.RowAdagrad` requires.

        Args:
            grad: "dense" or "rows".
        Returns: the tables' weights.
        Raises: ValueError for 8-bit tables, which have no gradients.
        """
        if self.config.bits == 8:
            raise ValueError("LiRank: 8-bit tables cannot be trained; train first, then compress.")
        for tables in self.tables():
            tables.grad = grad
        return [tables.weight for tables in self.tables()]


def row_requests(batch: Batch, device: torch.device) -> Tensor | None:
    """(C,) int64, each row's request; None if each row is a separate request."""
    offsets = batch.offsets
    # NumPy on the host: a GPU op here would delay the step's first launch, and torch would wake a thread per core.
    if len(offsets) == batch.candidates + 1 and bool((np.diff(offsets.numpy()) == 1).all()):
        return None
    sizes = offsets.diff().to(device, non_blocking=True)
    return torch.repeat_interleave(sizes, output_size=batch.candidates)


@torch.no_grad()
def _init_weights(module: nn.Module) -> None:
    """Glorot initialisation for weights, 0 for biases."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _count_segments(schema: Schema, name: str) -> int:
    from tigon.data.arrow import nearest

    readable = {**schema.context, **schema.items, **schema.rows}
    field = readable.get(name)
    if not isinstance(field, Id) or field.hash != "mod":
        known = [one for one, of in readable.items() if isinstance(of, Id)]
        raise ValueError(
            f"LiRank: calibrate must be True, False or an Id field's name, got {name!r}; {nearest(name, known)}"
        )
    return field.rows
