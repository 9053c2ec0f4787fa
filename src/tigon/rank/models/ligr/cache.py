"""Cache for encoded histories: keys and values per layer, to which events can be appended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.rank.data.batch import Batch


@dataclass(frozen=True)
class Cache:
    """Encoded histories for R requests, for `LiGR.score`. Tensors are never modified in place.

    Attributes:
        keys, values: (layers, P, heads, D), a row per context and event, request by request.
        lengths: R ints, rows per request, including the context.
        newest: (R,) fp64, seconds from the newest event to the request, infinite without events.
    """

    keys: Tensor
    values: Tensor
    lengths: tuple[int, ...]
    newest: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes in keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def to(self, device: torch.device | str) -> Cache:
        """Copy the tensors to a device; scoring requires the ranker's device."""
        return Cache(
            self.keys.to(device), self.values.to(device), self.lengths, self.newest.to(device)
        )  # fmt: skip

    def select(self, requests: Sequence[int]) -> Cache:
        """Select requests, in the given order.

        Args:
            requests: indices from 0; duplicates are allowed.
        Raises: ValueError for an index out of range.
        """
        for r in requests:
            if not 0 <= r < len(self):
                raise ValueError(f"Cache.select: requests must lie in [0, {len(self)}), got {r}.")
        starts = torch.tensor((0, *self.lengths)).cumsum(0).tolist()
        rows = [torch.arange(starts[r], starts[r] + self.lengths[r]) for r in requests]
        row = torch.cat(rows or [torch.arange(0)]).to(self.keys.device)
        lengths = tuple(self.lengths[r] for r in requests)
        newest = self.newest[torch.tensor(list(requests), dtype=torch.int64, device=self.newest.device)]
        return Cache(self.keys[:, row], self.values[:, row], lengths, newest)

    def extend(self, keys: Tensor, values: Tensor, new: Sequence[int], newest: Tensor) -> Cache:
        """Append rows to each request.

        Args:
            keys, values: (layers, Σ new, heads, D), request by request.
            new: R ints, new rows per request.
            newest: (R,) fp64, as the attribute.
        """
        lengths = tuple(old + n for old, n in zip(self.lengths, new, strict=True))
        order, old, fresh = [], 0, sum(self.lengths)
        for length, n in zip(self.lengths, new, strict=True):
            order += [torch.arange(old, old + length), torch.arange(fresh, fresh + n)]
            old, fresh = old + length, fresh + n
        row = torch.cat(order).to(self.keys.device)
        keys = torch.cat((self.keys, keys), 1)[:, row]
        values = torch.cat((self.values, values), 1)[:, row]
        return Cache(keys, values, lengths, newest)

    def newest_age(self, name: str, batch: Batch, elapsed: Tensor | float) -> Tensor:
        """(R,), the newest event's age at the time of the batch's requests."""
        if batch.requests != len(self):
            raise ValueError(f"{name}: batch must have the cache's {len(self)} requests, got {batch.requests}.")
        return self.newest + elapsed
