"""LiGR: candidates that read one encoded history, and in the last layers each other.

    x = [context, events | candidates];  x ← x + σ(x Wg + bg) ⊙ F(LN(x)), F attention, then SwiGLU;  logits = LN(x) W

Events are causal. Their keys depend on nothing behind them, so that they are encoded once for all candidates, and kept.
Attention knows positions by rotations alone: products depend on how far a key lies back from its query, not on where
either stands. A learned number for each position from the end would change with every event that is appended. All
candidates of a request have one position, so that those that read each other are a set without an order.

Source: LiGR, https://arxiv.org/abs/2502.03417; rotary positions: https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tigon.kernels import autocast_dtype
from tigon.ops.prefix_attention import PrefixLayout, prefix_attention
from tigon.ops.rope import rope
from tigon.rank.data.batch import Batch
from tigon.rank.data.schema import Schema
from tigon.rank.models.ligr.cache import Cache
from tigon.rank.models.ligr.config import LiGRConfig
from tigon.rank.models.ligr.layers import LiGRLayer, Norm
from tigon.rank.models.ligr.next_item import NextItemHead, find_positive_items
from tigon.rank.models.ligr.tokens import STD, Tokens, event_tokens
from tigon.rank.models.ranker import Ranker

THETA = 10_000.0


class LiGR(Ranker):
    """A ranker of candidates by a history, in one pass over both.

    Args:
        schema: the table's `rank.Schema`, with items. `Text` fields are not read.
        config: `rank.LiGRConfig`.

    Raises: ValueError for a schema without items.
    """

    kind = "ligr"
    config_class = LiGRConfig
    config: LiGRConfig

    def __init__(self, schema: Schema, config: LiGRConfig = LiGRConfig()) -> None:
        super().__init__(schema, config)
        if schema.roles.item is None:
            raise ValueError(
                "LiGR: the schema must name items, as candidates are; name their column by item=…, or take LiRank, "
                "which reads rows of features."
            )
        width = config.width
        self.head_dim, self.setwise_from = width // config.heads, config.layers - config.setwise_layers
        self.tokens = Tokens(schema, width, actions=config.actions, ages=config.ages)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            LiGRLayer(width, config.heads, config.expansion, config.gate, config.dropout) for _ in range(config.layers)
        )
        self.norm = Norm(width)
        self.head = nn.Linear(width, len(self.labels)) if self.labels else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    # ------------------------------------------------------------------------------------------------------ the layers

    def run_layers(
        self, x: Tensor, layout: PrefixLayout, past: Cache | None = None,
        kept: list[tuple[Tensor, Tensor]] | None = None, rows: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        """The stream behind all layers and the last norm.

        x: (N, width), the tokens of the layout; with past those of its suffixes alone, whose prefixes past has. kept:
        gets keys and values of each layer. rows: those whose stream is wanted.
        """
        start = 0 if past is None else layout.prefix_rows
        cos, sin = self.rotary_angles(layout.positions[start:], autocast_dtype(x.device.type) or x.dtype)
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
        out: Tensor = self.norm(x)
        return out

    def rotary_angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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

    def label_features(self, batch: Batch) -> dict[str, Tensor]:
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
        history, newest = event_tokens(self.tokens, batch, offsets)
        x = torch.cat((history, self.tokens.candidates(batch.items, newest[layout.request])))
        return self.run_layers(x, layout, rows=slice(layout.prefix_rows, None))

    @torch.no_grad()
    def encode(self, batch: Batch) -> Cache:
        """Encode contexts and histories once, for any candidates that come later.

        Args:
            batch: a `tigon.rank.Batch`; its candidates are not read.
        Returns: a `tigon.rank.Cache`.
        Raises: ValueError for a field that is missing.
        """
        kept: list[tuple[Tensor, Tensor]] = []
        _, newest, layout = self.encode_histories(batch, kept)
        keys, values = (torch.stack(side) for side in zip(*kept, strict=True))
        return Cache(keys, values, tuple(n for (n,) in layout.suffix_lengths), newest)

    def encode_histories(
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
        x, newest = event_tokens(self.tokens, batch, offsets, context=context)
        return self.run_layers(x, layout, None, kept), newest, layout

    @torch.no_grad()
    def append(self, cache: Cache, batch: Batch, elapsed: Tensor | float = 0.0) -> Cache:
        """The cache with the events of a batch behind its own events: the numbers that encoding all of them gives.

        Args:
            cache: of `encode`.
            batch: the same requests in the same order; its history holds the new events alone. Context and candidates
                are not read.
            elapsed: seconds, (R,) or a number, from the request that was encoded to the batch's request, which ages of
                the new events count from.
        Returns: a new Cache, for the batch's requests.
        Raises: ValueError for a batch of another number of requests.
        """
        since = cache.newest_age("LiGR.append", batch, elapsed)
        offsets = batch.history_offsets.to(self.device, non_blocking=True)
        new = batch.history_offsets.diff().tolist()
        x, newest = event_tokens(self.tokens, batch, offsets, since)
        more = [r for r, n in enumerate(new) if n]
        if not more:
            return Cache(cache.keys, cache.values, cache.lengths, newest)
        past = cache if len(more) == len(cache) else cache.select(more)
        layout = PrefixLayout(past.lengths, [[new[r]] for r in more], device=self.device)
        kept: list[tuple[Tensor, Tensor]] = []
        self.run_layers(x, layout, past, kept)
        keys, values = (torch.stack(side) for side in zip(*kept, strict=True))
        return cache.extend(keys, values, new, newest)

    @torch.no_grad()
    def score(self, cache: Cache, batch: Batch, elapsed: Tensor | float = 0.0) -> dict[str, Tensor]:
        """The logits of candidates by encoded histories: equal to `forward`, without encoding the histories again.

        Args:
            cache: of `encode`, perhaps with events appended.
            batch: of the same requests in the same order; its history is not read.
            elapsed: seconds, (R,) or a number, from the request that was encoded to the batch's.
        Returns: label → (C,) fp32.
        Raises: ValueError for a batch of another number of requests, and for a request without a candidate.
        """
        newest = cache.newest_age("LiGR.score", batch, elapsed)
        candidates = batch.offsets.diff().tolist()
        if 0 in candidates:
            raise ValueError(f"LiGR: every request must have a candidate, got none for request {candidates.index(0)}.")
        layout = PrefixLayout(cache.lengths, [[1] * n for n in candidates], device=self.device)
        x = self.tokens.candidates(batch.items, newest[layout.request])
        return self.logits(self.run_layers(x, layout, cache))

    # ------------------------------------------------------------------------------------------------------- next item

    def next_item_loss(self, batch: Batch) -> Tensor:
        """The mean cross entropy of each event's item, over the whole catalogue, by the events before it.

        Fields of the request are not read, here and wherever next items are scored: at the time of an event they lie in
        the future.

        Args:
            batch: `rank.Batch`; its candidates are not read. Items unseen in training do not count.
        Returns: 0-d.
        Raises: ValueError for a history without items.
        """
        head = self._next_item_head()
        x, _, layout = self.encode_histories(batch, context=False)
        return head.loss(x, layout, self._history_items(batch))

    def next_item_scores(self, batch: Batch) -> Tensor:
        """How well each item of the catalogue continues each history.

        Args:
            batch: `rank.Batch`; its candidates are not read.
        Returns: (R, codes) fp32, by the codes of the item's field; −∞ for code 0.
        Raises: ValueError for a history without items.
        """
        head = self._next_item_head()
        return head.scores(self._last_states(batch))

    def recommend(self, batch: Batch, k: int = 10, *, exclude_seen: bool = True) -> tuple[Tensor, Tensor]:
        """The k items of the catalogue that continue each history best.

        Args:
            batch: `rank.Batch`; its candidates are not read.
            k: how many, at most the items of the catalogue.
            exclude_seen: leave out the items of the history.
        Returns: (R, k) int64 codes of items, the best first, and (R, k) fp32 scores. Where fewer than k are left, the
            code is −1 and the score −∞.
        Raises: ValueError for another k, and for a history without items.
        """
        head = self._next_item_head()
        if not 1 <= k <= head.items:
            raise ValueError(f"LiGR.recommend: k must lie in [1, {head.items:,}], the items of the catalogue, got {k}.")
        codes, scores = [], []
        for z, _ in head.score_parts(self._last_states(batch), self._seen_items(batch, exclude_seen)):
            best, code = z.topk(k)
            codes.append(torch.where(best > -torch.inf, code, -1))
            scores.append(best)
        if not codes:
            none = torch.zeros(0, k, device=self.device)
            return none.long(), none
        return torch.cat(codes), torch.cat(scores)

    def next_item_ranks(self, batch: Batch, target: Tensor | None = None, *, exclude_seen: bool = True) -> Tensor:
        """The rank of one item of each request among all items of the catalogue.

        Args:
            batch: `rank.Batch`.
            target: (R,) int64 codes; None for each request's first candidate with a positive first label;
                without labels, its first.
            exclude_seen: leave out the items of the history, but not the target.
        Returns: (R,) int64, from 1; equal scores count for the others. 0 where there is no target or it is unseen.
        Raises: ValueError for a target of another shape, and for a history without items.
        """
        if target is None:
            target = find_positive_items(batch, str(self.schema.roles.item), self.labels)
        if target.shape != (batch.requests,):
            raise ValueError(f"LiGR.next_item_ranks: target must be ({batch.requests},), got {tuple(target.shape)}.")
        head, ranks = self._next_item_head(), [target[:0]]
        for z, part in head.score_parts(self._last_states(batch), self._seen_items(batch, exclude_seen), target):
            wanted = target[part].unsqueeze(1)
            # The target itself is one of the items that are at least as good.
            rank = (z >= z.gather(1, wanted)).sum(1)
            ranks.append(torch.where(wanted[:, 0] > 0, rank, 0))
        return torch.cat(ranks)

    def _next_item_head(self) -> NextItemHead:
        name = str(self.schema.roles.item)
        if name not in self.schema.history:
            raise ValueError(f"LiGR: the history must have the items' field {name!r} to predict the next of them.")
        field = self.tokens.field_tokens(name)
        return NextItemHead(field.table, None if isinstance(field.project, nn.Identity) else field.project.weight)

    def _history_items(self, batch: Batch) -> Tensor:
        items = batch.history[str(self.schema.roles.item)]
        assert isinstance(items, Tensor)
        return items.long()  # a table may hold narrower codes

    def _seen_items(self, batch: Batch, exclude_seen: bool) -> tuple[Tensor, list[int]] | None:
        return (self._history_items(batch), batch.history_offsets.tolist()) if exclude_seen else None

    def _last_states(self, batch: Batch) -> Tensor:
        """(R, width), the stream of each request's last token."""
        x, _, layout = self.encode_histories(batch, context=False)
        return x[layout.cu_suffix[1:].long() - 1]
