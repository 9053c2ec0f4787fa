"""LiGR: candidates attend to a shared encoded history, and in the last layers to each other.

    x = [context, events | candidates];  x ← x + σ(x Wg + bg) ⊙ F(LN(x)), F attention, then SwiGLU;  logits = LN(x) W

Events are causal. Their keys do not depend on later tokens, so events are encoded once for all candidates and cached.
Positions enter attention only through rotary embeddings, which depend on the distance between query and key. Learned
positions counted from the end would change with every appended event. All candidates in a request share a position, so
that candidates that attend to each other form an unordered set.

Source: LiGR, https://arxiv.org/abs/2502.03417; rotary positions: https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tigon.rank.models.ligr.tokens import Tokens, event_tokens
from tigon.rank.models.ranker import Ranker

THETA = 10_000.0


class LiGR(Ranker):
    """Sequence ranker: scores candidates against a history in a single pass over both.

    Args:
        schema: the table's `rank.Schema`, with items. `Text` fields are ignored.
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
                "LiGR: the schema must name candidate items; name the item column by item=…, or use LiRank, "
                "which reads feature rows."
            )
        self.head_dim, self.setwise_from = config.width // config.heads, config.layers - config.setwise_layers
        self.tokens = Tokens(schema, config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(LiGRLayer(config) for _ in range(config.layers))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, len(self.labels)) if self.labels else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # Variance 1 / inputs: with smaller weights, logits would hardly depend on the events at first, and item
                # embeddings would memorise rows before they learn which items are alike.
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    # ------------------------------------------------------------------------------------------------------ the layers

    def run_layers(
        self, x: Tensor, layout: PrefixLayout, past: Cache | None = None,
        kept: list[tuple[Tensor, Tensor]] | None = None, rows: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        """Outputs after all layers and the final norm.

        x: (N, width), the layout's tokens; with `past`, only the suffixes' tokens, since past holds the prefixes. kept:
            a list that receives each layer's keys and values. rows: the rows to return.
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
                    # Use keys as dummy queries for the prefixes, whose outputs are discarded.
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
        """label → (…,) logits for outputs (…, width), in fp32 or wider."""
        if self.head is None:
            raise ValueError("LiGR: the schema must name labels to score candidates, got none.")
        z = self.head(x)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return dict(zip(self.labels, z.unbind(-1), strict=True))

    # --------------------------------------------------------------------------------------------- requests to logits

    @property
    def device(self) -> torch.device:
        """The weights' device, where batches must be."""
        return self.tokens.start.device

    def layout(self, batch: Batch) -> PrefixLayout:
        """Token layout for a batch: computed on the host, and reusable for batches with the same lengths."""
        return self._candidate_layout((batch.history_offsets.diff() + 1).tolist(), batch)

    def _candidate_layout(self, lengths: Sequence[int], batch: Batch) -> PrefixLayout:
        candidates = batch.offsets.diff().tolist()
        if 0 in candidates:
            raise ValueError(f"LiGR: every request must have a candidate, got none for request {candidates.index(0)}.")
        return PrefixLayout(lengths, [[1] * n for n in candidates], device=self.device)

    def forward(self, batch: Batch, layout: PrefixLayout | None = None) -> dict[str, Tensor]:
        """Logits for all candidates.

        Args:
            batch: a `tigon.rank.Batch`, on the ranker's device.
            layout: from `layout(batch)`, reusable for batches with the same lengths, as CUDA graphs require.
        Returns: label → (C,) fp32.
        Raises: ValueError for a request without candidates, and for a missing field.
        """
        return self.logits(self._candidates(batch, layout))

    def label_features(self, batch: Batch) -> dict[str, Tensor]:
        """label → (C, width), the candidates' outputs after the final norm; logits are linear in them."""
        return dict.fromkeys(self.labels, self._candidates(batch, None))

    def last_layer(self) -> dict[str, tuple[Tensor, Tensor]]:
        """label → (width,) weights and the bias that map features to the logit."""
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
        """Encode contexts and histories once, for any later candidates.

        Args:
            batch: a `tigon.rank.Batch`; its candidates are ignored.
        Returns: a `tigon.rank.Cache`.
        Raises: ValueError for a missing field.
        """
        kept: list[tuple[Tensor, Tensor]] = []
        _, newest, layout = self.encode_histories(batch, kept)
        keys, values = (torch.stack(side) for side in zip(*kept, strict=True))
        return Cache(keys, values, tuple(n for (n,) in layout.suffix_lengths), newest)

    def encode_histories(
        self, batch: Batch, kept: list[tuple[Tensor, Tensor]] | None = None, context: bool = True
    ) -> tuple[Tensor, Tensor, PrefixLayout]:
        """Context and event outputs, (R + E, width); the newest events' ages; the layout.

        context: whether the first token contains the request's fields, which are known at request time but not at event
            time.
        """
        lengths = (batch.history_offsets.diff() + 1).tolist()
        # Encode histories as suffixes with empty prefixes.
        layout = PrefixLayout([0] * len(lengths), [[n] for n in lengths], device=self.device)
        offsets = layout.cu_suffix.long() - torch.arange(layout.requests + 1, device=layout.device)
        x, newest = event_tokens(self.tokens, batch, offsets, context=context)
        return self.run_layers(x, layout, None, kept), newest, layout

    @torch.no_grad()
    def append(self, cache: Cache, batch: Batch, elapsed: Tensor | float = 0.0) -> Cache:
        """Append a batch's events to a cache; equivalent to encoding all events together.

        Args:
            cache: from `encode`.
            batch: the same requests in the same order; its history contains only the new events. Context and candidates
                are ignored.
            elapsed: seconds, (R,) or a number, from the encoded request to the batch's request, which is the reference
                for the new events' ages.
        Returns: a new Cache, for the batch's requests.
        Raises: ValueError for a different number of requests.
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
        """Logits for candidates given encoded histories: equal to `forward`, without encoding the histories again.

        Args:
            cache: from `encode`, optionally with appended events.
            batch: the same requests in the same order; its history is ignored.
            elapsed: seconds, (R,) or a number, from the encoded request to the batch's.
        Returns: label → (C,) fp32.
        Raises: ValueError for a different number of requests, and for a request without candidates.
        """
        newest = cache.newest_age("LiGR.score", batch, elapsed)
        layout = self._candidate_layout(cache.lengths, batch)
        x = self.tokens.candidates(batch.items, newest[layout.request])
        return self.logits(self.run_layers(x, layout, cache))

    # ------------------------------------------------------------------------------------------------------- next item

    def next_item_loss(self, batch: Batch) -> Tensor:
        """Mean cross entropy for each event's item, over the whole catalogue, given the preceding events.

        Request fields are never read for next items: they lie in an event's future.

        Args:
            batch: `rank.Batch`; its candidates are ignored. Items unseen in training are excluded.
        Returns: 0-d.
        Raises: ValueError for a history without items.
        """
        head = self._next_item_head()
        x, _, layout = self.encode_histories(batch, context=False)
        return head.loss(x, layout, self._history_items(batch))

    def next_item_scores(self, batch: Batch) -> Tensor:
        """Score every catalogue item as the next item in each history.

        Args:
            batch: `rank.Batch`; its candidates are ignored.
        Returns: (R, codes) fp32, indexed by item code; −∞ for code 0.
        Raises: ValueError for a history without items.
        """
        return torch.cat([z for z, _ in self._score_items(batch, False)])

    def recommend(self, batch: Batch, k: int = 10, *, exclude_seen: bool = True) -> tuple[Tensor, Tensor]:
        """The k highest-scoring next items for each history.

        Args:
            batch: `rank.Batch`; its candidates are ignored.
            k: number of items, at most the catalogue size.
            exclude_seen: exclude items in the history.
        Returns: (R, k) int64 item codes, best first, and (R, k) fp32 scores. Padded with code −1 and score −∞ if fewer
            than k items remain.
        Raises: ValueError for an invalid k, and for a history without items.
        """
        items = self._next_item_head().items
        if not 1 <= k <= items:
            raise ValueError(f"LiGR.recommend: k must lie in [1, {items:,}], the number of items, got {k}.")
        parts = [z.topk(k) for z, _ in self._score_items(batch, exclude_seen)]
        scores, codes = (torch.cat(side) for side in zip(*parts, strict=True))
        return torch.where(scores > -torch.inf, codes, -1), scores

    def next_item_ranks(self, batch: Batch, target: Tensor | None = None, *, exclude_seen: bool = True) -> Tensor:
        """Rank of a target item per request among all catalogue items.

        Args:
            batch: `rank.Batch`.
            target: (R,) int64 codes; None: each request's first candidate with a positive first label, or without
                labels its first candidate.
            exclude_seen: exclude items in the history, except the target.
        Returns: (R,) int64, from 1; ties rank the target last. 0 if the target is missing or unknown.
        Raises: ValueError for a target with another shape, and for a history without items.
        """
        if target is None:
            target = find_positive_items(batch, str(self.schema.roles.item), self.labels)
        if target.shape != (batch.requests,):
            raise ValueError(f"LiGR.next_item_ranks: target must be ({batch.requests},), got {tuple(target.shape)}.")
        ranks = []
        for z, part in self._score_items(batch, exclude_seen, target):
            # The count includes the target itself.
            ranks.append((z >= z.gather(1, target[part].unsqueeze(1))).sum(1))
        return torch.where(target > 0, torch.cat(ranks), 0)

    def _next_item_head(self) -> NextItemHead:
        name = str(self.schema.roles.item)
        if name not in self.schema.history:
            raise ValueError(f"LiGR: the history must have the items' field {name!r} to predict the next item.")
        field = self.tokens.field_tokens(name)
        return NextItemHead(field.table, None if isinstance(field.project, nn.Identity) else field.project.weight)

    def _history_items(self, batch: Batch) -> Tensor:
        items = batch.history[str(self.schema.roles.item)]
        assert isinstance(items, Tensor)
        return items.long()  # tables may store narrower codes

    def _score_items(
        self, batch: Batch, exclude_seen: bool, kept: Tensor | None = None
    ) -> Iterator[tuple[Tensor, slice]]:
        """Iterate over (B, codes) next-item scores for slices of the requests. kept: (R,), codes never excluded."""
        head = self._next_item_head()
        x, _, layout = self.encode_histories(batch, context=False)
        seen = (self._history_items(batch), batch.history_offsets.tolist()) if exclude_seen else None
        return head.score_parts(x[layout.cu_suffix[1:].long() - 1], seen, kept)
