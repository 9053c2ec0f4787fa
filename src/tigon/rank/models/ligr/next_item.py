"""The next item of a history, from the whole catalogue: softmax(h · E) with E the embeddings that events have.

The first token is the start of a history alone, without the fields of its request: every event is predicted from the
events before it, and a request, with its time, its country or its query, comes after all of them.

Source: SASRec, https://arxiv.org/abs/1808.09781, with the cross entropy over all items in place of sampled ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.ops.cross_entropy import CrossEntropy
from tigon.ops.prefix_attention import PrefixLayout
from tigon.rank.data.batch import Batch

# Scores that are in memory at once.
MOST = 1 << 28


class NextItemHead(NamedTuple):
    """The product of streams and item embeddings.

    Attributes:
        table: (codes, D) embeddings; code 0 is no item of the catalogue.
        project: (width, D), from embeddings to the stream; None where both have one width.
    """

    table: Tensor
    project: Tensor | None

    @property
    def items(self) -> int:
        """How many items the catalogue has."""
        return len(self.table) - 1

    def loss(self, x: Tensor, layout: PrefixLayout, item: Tensor) -> Tensor:
        """The mean cross entropy of each event's item, 0-d.

        x: (R + E, width), streams of starts and events. item: (E,) codes.
        """
        # The stream before event e of request r, which is the start's for the first, is row e + r.
        offsets = layout.cu_suffix.long() - torch.arange(layout.requests + 1, device=x.device)
        event = torch.arange(len(item), device=x.device)
        request = torch.searchsorted(offsets[1:].contiguous(), event, right=True)
        config = CrossEntropy(ignore_index=-1)
        return linear_cross_entropy(self._project(x[event + request]), self.table[1:], item - 1, config=config)

    def scores(self, x: Tensor) -> Tensor:
        """(n, codes) fp32 or wider of streams (n, width); −∞ for code 0."""
        z = nn.functional.linear(self._project(x), self.table)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        z[:, 0] = -torch.inf
        return z

    def score_parts(
        self, x: Tensor, seen: tuple[Tensor, list[int]] | None, kept: Tensor | None = None
    ) -> Iterator[tuple[Tensor, slice]]:
        """(B, codes) scores of slices of the requests.

        x: (R, width). seen: items (E,) and offsets (R + 1,) of events whose items get −∞; None for no such items.
        kept: (R,), codes that keep their scores though they were seen.
        """
        size = max(1, MOST // len(self.table))
        for start in range(0, len(x), size):
            part = slice(start, min(start + size, len(x)))
            z = self.scores(x[part])
            if seen is not None:
                item, offsets = seen
                lengths = torch.tensor(offsets[part.start : part.stop + 1]).diff()
                row = torch.repeat_interleave(lengths).to(x.device)
                own = None if kept is None else z.gather(1, kept[part].unsqueeze(1))
                z[row, item[offsets[part.start] : offsets[part.stop]]] = -torch.inf
                if kept is not None and own is not None:
                    z.scatter_(1, kept[part].unsqueeze(1), own)
            yield z, part

    def _project(self, x: Tensor) -> Tensor:
        """As wide as the items' embeddings: h · (W e) = (Wᵀ h) · e."""
        return x if self.project is None else x @ self.project.to(x.dtype)


def find_positive_items(batch: Batch, name: str, labels: Sequence[str]) -> Tensor:
    """(R,), the code of each request's first candidate whose first label is positive; 0 where there is none.

    Without labels every candidate counts as positive.

    name: the field of items.
    """
    item = batch.items[name].long()
    label = next((batch.labels[one] for one in labels[:1] if one in batch.labels), torch.ones_like(item))
    request = torch.repeat_interleave(batch.offsets.diff()).to(label.device)
    place = torch.arange(len(label), device=label.device)
    first = torch.full((batch.requests,), len(label), device=label.device)
    first.scatter_reduce_(0, request, torch.where(label > 0, place, len(label)), "amin")
    code: Tensor = torch.cat((item, item.new_zeros(1)))[first]
    return code
