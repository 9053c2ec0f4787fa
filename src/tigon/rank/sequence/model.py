"""LiGR: candidates that read one encoded history, each by itself, and in the last layers each other.

    x = [context, events | candidates];  x ← x + σ(x Wg + bg) ⊙ F(LN(x)), F attention, then SwiGLU;  logits = LN(x) W

Events are causal. Their keys depend on nothing behind them, so that they are encoded once for all candidates, and kept.
Attention knows positions by rotations alone: products depend on how far a key lies back from its query, not on where
either stands. A learned number for each position from the end would change with every event that is appended. All
candidates of a request have one position, so that those that read each other are a set without an order.

Source: LiGR, https://arxiv.org/abs/2502.03417; rotary positions: https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.kernels import autocast_dtype
from tigon.ops.prefix_attention import PrefixLayout, prefix_attention
from tigon.ops.rope import rope
from tigon.rank.batch import Batch
from tigon.rank.ranker import Ranker
from tigon.rank.schema import Schema
from tigon.rank.sequence import next_item
from tigon.rank.sequence.cache import Cache
from tigon.rank.sequence.layer import LiGRLayer, Norm
from tigon.rank.sequence.tokens import STD, Tokens, events_of

THETA = 10_000.0


class LiGR(Ranker):
    """A ranker of candidates by a history, in one pass over both.

    Args:
        schema: the table's `tigon.rank.Schema`. `Text` fields are not read.
        width: of the stream of tokens. layers, heads: how many; width / heads must be even.
        setwise_layers: of the last layers, in which the candidates of a request read each other. 0: each candidate is
            scored as if it were alone.
        expansion: of SwiGLU's inner width, in units of width.
        gate: False for plain pre-norm layers.
        actions: False: events do not say what happened, only to which item.
        ages: False: times are not read.
        dropout: of tokens and of what layers add to them, in training.
        weights: of each label in the score; None for 1 each.

    Raises: ValueError for numbers that make no model.
    """

    kind = "ligr"

    def __init__(
        self, schema: Schema, width: int = 256, layers: int = 6, heads: int = 4, *, setwise_layers: int = 1,
        expansion: float = 4.0, gate: bool = True, actions: bool = True, ages: bool = True, dropout: float = 0.0,
        weights: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(schema, weights)
        if schema.roles.item is None:
            raise ValueError(
                "LiGR: the schema must name items, as candidates are; name their column by item=…, or take LiRank, "
                "which reads rows of features."
            )
        if min(width, layers, heads) < 1 or width % (2 * heads):
            raise ValueError(
                "LiGR: width, layers and heads must be positive, width a multiple of 2 · heads, got "
                f"{width}, {layers} and {heads}."
            )
        if not 0 <= setwise_layers <= layers:
            raise ValueError(f"LiGR: setwise_layers must lie in [0, {layers}], got {setwise_layers}.")
        if expansion <= 0 or not 0 <= dropout < 1:
            raise ValueError(f"LiGR: expansion must be positive and dropout in [0, 1), got {expansion} and {dropout}.")
        self.options: dict[str, Any] = {
            "width": width, "layers": layers, "heads": heads, "setwise_layers": setwise_layers, "expansion": expansion,
            "gate": gate, "actions": actions, "ages": ages, "dropout": dropout,
        }  # fmt: skip
        self.head_dim, self.setwise_from = width // heads, layers - setwise_layers
        self.tokens = Tokens(schema, width, actions=actions, ages=ages)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(LiGRLayer(width, heads, expansion, gate, dropout) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, len(self.labels)) if self.labels else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def config(self) -> dict[str, Any]:
        """What `LiGR(schema, …)` takes, without the weights of the labels."""
        return dict(self.options)

    # ------------------------------------------------------------------------------------------------------ the layers

    def through(
        self, x: Tensor, layout: PrefixLayout, past: Cache | None = None,
        kept: list[tuple[Tensor, Tensor]] | None = None, rows: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        """The stream behind all layers and the last norm.

        x: (N, width), the tokens of the layout; with past those of its suffixes alone, whose prefixes past has. kept:
        gets keys and values of each layer. rows: those whose stream is wanted.
        """
        start = 0 if past is None else layout.prefix_rows
        cos, sin = self.angles(layout.positions[start:], autocast_dtype(x.device.type) or x.dtype)
        x = self.dropout(x)
        for number, layer in enumerate(self.layers):
            last = number == len(self.layers) - 1

            def attend(q: Tensor, k: Tensor, v: Tensor, number: int = number) -> Tensor:
                q, k = (t[0] for t in rope(q[None], k[None], cos, sin, unsqueeze_dim=2))
                if kept is not None:
                    kept.append((k, v))
                if past is not None:
                    # Keys stand in for the queries of the prefixes, whose results nobody reads.
                    keys, values = past.keys[number].to(k.dtype), past.values[number].to(v.dtype)
                    q, k, v = torch.cat((keys, q)), torch.cat((keys, k)), torch.cat((values, v))
                across: Literal["none", "suffixes"] = "suffixes" if number >= self.setwise_from else "none"
                return prefix_attention(q, k, v, layout, across=across)[start:]

            x = layer(x, attend, rows if last else slice(None))
        found: Tensor = self.norm(x)
        return found

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, (…, D) for positions (…)."""
        wide = torch.promote_types(dtype, torch.float32)
        turns = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=wide) / self.head_dim
        angle = positions.to(wide).unsqueeze(-1) * THETA**-turns
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def logits(self, x: Tensor) -> dict[str, Tensor]:
        """label → (…,) of streams (…, width), in fp32 or wider."""
        if self.head is None:
            raise ValueError("LiGR: the schema must name labels to score candidates, got none.")
        z = self.head(x)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return dict(zip(self.labels, z.unbind(-1), strict=True))

    # --------------------------------------------------------------------------------------------- requests to logits

    @property
    def device(self) -> torch.device:
        """Where the weights are, which is where batches must be."""
        return self.tokens.start.device

    def layout(self, batch: Batch) -> PrefixLayout:
        """Where the tokens of a batch lie: made on the host, and needed again only for other lengths."""
        candidates = batch.offsets.diff().tolist()
        if 0 in candidates:
            raise ValueError(f"LiGR: every request must have a candidate, got none for request {candidates.index(0)}.")
        lengths = (batch.history_offsets.diff() + 1).tolist()
        return PrefixLayout(lengths, [[1] * n for n in candidates], device=self.device)

    def forward(self, batch: Batch, layout: PrefixLayout | None = None) -> dict[str, Tensor]:
        """The logits of all candidates.

        Args:
            batch: a `tigon.rank.Batch`, on the ranker's device.
            layout: of `layout(batch)`, if you have it from a batch of the same lengths, as a CUDA graph needs.
        Returns: label → (C,) fp32.
        Raises: ValueError for a request without a candidate, and for a field that is missing.
        """
        return self.logits(self._candidates(batch, layout))

    def features_of(self, batch: Batch) -> dict[str, Tensor]:
        """label → (C, width), the candidates' streams behind the last norm, of which logits are linear functions."""
        return dict.fromkeys(self.labels, self._candidates(batch, None))

    def last_layer(self) -> dict[str, tuple[Tensor, Tensor]]:
        """label → (width,) weights and the bias by which its logit is made of its features."""
        if self.head is None:
            return {}
        return dict(zip(self.labels, zip(self.head.weight, self.head.bias, strict=True), strict=True))

    def _candidates(self, batch: Batch, layout: PrefixLayout | None) -> Tensor:
        layout = self.layout(batch) if layout is None else layout
        offsets = layout.cu_prefix.long() - torch.arange(layout.requests + 1, device=layout.device)
        history, newest = events_of(self.tokens, batch, offsets)
        x = torch.cat((history, self.tokens.candidates(batch.items, newest[layout.request])))
        return self.through(x, layout, rows=slice(layout.prefix_rows, None))

    @torch.no_grad()
    def encode(self, batch: Batch) -> Cache:
        """Encode contexts and histories once, for any candidates that come later.

        Args:
            batch: a `tigon.rank.Batch`; its candidates are not read.
        Returns: a `tigon.rank.Cache`.
        Raises: ValueError for a field that is missing.
        """
        kept: list[tuple[Tensor, Tensor]] = []
        _, newest, layout = self.histories(batch, kept)
        keys, values = (torch.stack(side) for side in zip(*kept, strict=True))
        return Cache(self, keys, values, tuple(n for (n,) in layout.suffix_lengths), newest)

    def histories(
        self, batch: Batch, kept: list[tuple[Tensor, Tensor]] | None = None, context: bool = True
    ) -> tuple[Tensor, Tensor, PrefixLayout]:
        """The streams of contexts and events, (R + E, width); the ages of the newest events; the rows' layout.

        context: whether the first token has the fields of the request. They are known at its time, and not yet at those
        of the events.
        """
        lengths = (batch.history_offsets.diff() + 1).tolist()
        # Sequences of their own are suffixes of nothing.
        layout = PrefixLayout([0] * len(lengths), [[n] for n in lengths], device=self.device)
        offsets = layout.cu_suffix.long() - torch.arange(layout.requests + 1, device=layout.device)
        x, newest = events_of(self.tokens, batch, offsets, context=context)
        return self.through(x, layout, None, kept), newest, layout

    @torch.no_grad()
    def score(self, cache: Cache, batch: Batch, elapsed: Tensor | float = 0.0) -> dict[str, Tensor]:
        """The logits of candidates by encoded histories: those of `forward`, without its work on the histories.

        Args:
            cache: of `encode`, perhaps with events appended.
            batch: of the same requests in the same order; its history is not read.
            elapsed: seconds, (R,) or a number, from the request that was encoded to the batch's.
        Returns: label → (C,) fp32.
        Raises: ValueError for a batch of another number of requests, and for a request without a candidate.
        """
        newest = cache.since("LiGR.score", batch, elapsed)
        candidates = batch.offsets.diff().tolist()
        if 0 in candidates:
            raise ValueError(f"LiGR: every request must have a candidate, got none for request {candidates.index(0)}.")
        layout = PrefixLayout(cache.lengths, [[1] * n for n in candidates], device=self.device)
        x = self.tokens.candidates(batch.items, newest[layout.request])
        return self.logits(self.through(x, layout, cache))

    # ------------------------------------------------------------------------------------------------------- next item

    def next_item_loss(self, batch: Batch) -> Tensor:
        """The mean cross entropy of each event's item, over the whole catalogue, by what came before it.

        Fields of the request are not read, here and wherever next items are scored: at the time of an event they lie in
        the future.

        Args:
            batch: a `tigon.rank.Batch`; its candidates are not read. Items unseen in training do not count.
        Returns: 0-d.
        Raises: ValueError for a history without items.
        """
        return next_item.loss(self, batch)

    def next_item_scores(self, batch: Batch) -> Tensor:
        """How well each item of the catalogue would go on with each history.

        Args:
            batch: a `tigon.rank.Batch`; its candidates are not read.
        Returns: (R, codes) fp32, by the codes of the item's field; −∞ for code 0.
        Raises: ValueError for a history without items.
        """
        return next_item.scores(self, batch)

    def recommend(self, batch: Batch, k: int = 10, *, exclude_seen: bool = True) -> tuple[Tensor, Tensor]:
        """The k items of the catalogue that go on best with each history.

        Args:
            batch: a `tigon.rank.Batch`; its candidates are not read.
            k: how many, at most those of the catalogue.
            exclude_seen: leave out the items of the history.
        Returns: (R, k) int64 codes of items, the best first, and (R, k) fp32 scores. Where fewer than k are left, the
            code is −1 and the score −∞.
        Raises: ValueError for another k, and for a history without items.
        """
        return next_item.recommend(self, batch, k, exclude_seen)

    def next_item_ranks(self, batch: Batch, target: Tensor | None = None, *, exclude_seen: bool = True) -> Tensor:
        """The place of one item of each request among all of the catalogue.

        Args:
            batch: a `tigon.rank.Batch`.
            target: (R,) int64 codes; None for each request's first candidate with a positive first label;
                without labels, its first.
            exclude_seen: leave out the items of the history, but for the target itself.
        Returns: (R,) int64, from 1; equal scores count for the others. 0 where there is no target or it is unseen.
        Raises: ValueError for a target of another shape, and for a history without items.
        """
        return next_item.ranks(self, batch, target, exclude_seen)

    # ---------------------------------------------------------------------------------------------------------- export

    def export(self, folder: str | Path) -> list[Path]:
        """Write encode.pt2 and score.pt2, programs of `torch.export` that run without Tigon.

        Args:
            folder: made if it is not there.
        Returns: the files. `tigon.rank.sequence.export` says what goes in and out.
        Raises: ValueError if it is a file.
        """
        from tigon.rank.sequence import export

        return export.write(self, Path(folder))
