"""Histories that are encoded: keys and values of each layer, to which events can be appended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tigon.ops.prefix_attention import PrefixLayout
from tigon.rank.batch import Batch
from tigon.rank.sequence.tokens import events_of

if TYPE_CHECKING:
    from tigon.rank.sequence.model import LiGR


@dataclass(frozen=True)
class Cache:
    """The encoded histories of R requests, for `LiGR.score`. Nothing in it is ever written over.

    Attributes:
        ranker: the `LiGR` that encoded them.
        keys, values: (layers, P, heads, D), a row for each context and event, request by request.
        lengths: R ints, the rows of each request, its context counted.
        newest: (R,) fp64, the seconds before the request of its newest event, infinite where there is none.
    """

    ranker: LiGR
    keys: Tensor
    values: Tensor
    lengths: tuple[int, ...]
    newest: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def to(self, device: torch.device | str) -> Cache:
        """The cache with its tensors on a device, which must be the ranker's when it is used."""
        return Cache(
            self.ranker, self.keys.to(device), self.values.to(device), self.lengths, self.newest.to(device)
        )  # fmt: skip

    def select(self, requests: Sequence[int]) -> Cache:
        """The cache of some requests, in this order.

        Args:
            requests: numbers from 0; one may come several times.
        Raises: ValueError for a number that is not there.
        """
        for r in requests:
            if not 0 <= r < len(self):
                raise ValueError(f"Cache.select: requests must lie in [0, {len(self)}), got {r}.")
        starts = torch.tensor((0, *self.lengths)).cumsum(0).tolist()
        rows = [torch.arange(starts[r], starts[r] + self.lengths[r]) for r in requests]
        row = torch.cat(rows or [torch.arange(0)]).to(self.keys.device)
        lengths = tuple(self.lengths[r] for r in requests)
        newest = self.newest[torch.tensor(list(requests), dtype=torch.int64, device=self.newest.device)]
        return Cache(self.ranker, self.keys[:, row], self.values[:, row], lengths, newest)

    @torch.no_grad()
    def append(self, batch: Batch, elapsed: Tensor | float = 0.0) -> Cache:
        """The cache with the events of a batch behind its own: the numbers that encoding all of them gives.

        Args:
            batch: of the same requests in the same order; its history holds the new events alone. Context and
                candidates are not read.
            elapsed: seconds, (R,) or a number, from the request that was encoded to the batch's, which ages of the
                new events count from.
        Returns: a new Cache, as of the batch's requests.
        Raises: ValueError for a batch of another number of requests.
        """
        since = self.since("Cache.append", batch, elapsed)
        ranker, device = self.ranker, self.keys.device
        offsets = batch.history_offsets.to(device, non_blocking=True)
        new = batch.history_offsets.diff().tolist()
        more = [r for r, n in enumerate(new) if n]
        x, newest = events_of(ranker.tokens, batch, offsets, since)
        if not more:
            return Cache(ranker, self.keys, self.values, self.lengths, newest)
        past = self if len(more) == len(self) else self.select(more)
        layout = PrefixLayout(past.lengths, [[new[r]] for r in more], device=device)
        kept: list[tuple[Tensor, Tensor]] = []
        ranker.through(x, layout, past, kept)
        lengths = tuple(old + n for old, n in zip(self.lengths, new, strict=True))
        order, old, fresh = [], 0, sum(self.lengths)
        for length, n in zip(self.lengths, new, strict=True):
            order += [torch.arange(old, old + length), torch.arange(fresh, fresh + n)]
            old, fresh = old + length, fresh + n
        row = torch.cat(order).to(device)
        keys, values = (
            torch.cat((before, torch.stack([pair[side] for pair in kept])), 1)[:, row]
            for side, before in enumerate((self.keys, self.values))
        )
        return Cache(ranker, keys, values, lengths, newest)

    def since(self, name: str, batch: Batch, elapsed: Tensor | float) -> Tensor:
        """(R,), the age of each newest event at the requests of a batch."""
        if batch.requests != len(self):
            raise ValueError(f"{name}: batch must have the cache's {len(self)} requests, got {batch.requests}.")
        return self.newest + elapsed
