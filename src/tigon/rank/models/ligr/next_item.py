"""Next-item prediction over the whole catalogue: softmax(h · E) with the events' item embeddings E.

The first token marks only the start of a history, without request fields: every event is predicted from the preceding
events, and a request, with its time, country or query, comes after all events.

Source: SASRec, https://arxiv.org/abs/1808.09781, with cross entropy over all items instead of sampled negatives.
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

# Maximum number of scores in memory at once.
MOST = 1 << 28


class NextItemHead(NamedTuple):
    """Product between outputs and item embeddings.

    Attributes:
        table: (codes, D) embeddings; code 0 is not a catalogue item.
        project: (width, D), from embeddings to token width; None if the widths agree.
    """

    table: Tensor
    project: Tensor | None

    @property
    def items(self) -> int:
        """Number of catalogue items."""
        return len(self.table) - 1

    def loss(self, x: Tensor, layout: PrefixLayout, item: Tensor) -> Tensor:
        """Mean cross entropy over each event's item, 0-d.

        x: (R + E, width), outputs for starts and events. item: (E,) codes.
        """
        # Event e in request r is predicted from row e + r, the token before it; for the first event that is the start.
        offsets = layout.cu_suffix.long() - torch.arange(layout.requests + 1, device=x.device)
        event = torch.arange(len(item), device=x.device)
        request = torch.searchsorted(offsets[1:].contiguous(), event, right=True)
        config = CrossEntropy(ignore_index=-1)
        return linear_cross_entropy(self._project(x[event + request]), self.table[1:], item - 1, config=config)

    def scores(self, x: Tensor) -> Tensor:
        """(n, codes) scores in fp32 or wider for outputs (n, width); −∞ for code 0."""
        z = nn.functional.linear(self._project(x), self.table)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        z[:, 0] = -torch.inf
        return z

    def score_parts(
        self, x: Tensor, seen: tuple[Tensor, list[int]] | None, kept: Tensor | None = None
    ) -> Iterator[tuple[Tensor, slice]]:
        """Iterate over (B, codes) scores for slices of the requests.

        x: (R, width). seen: items (E,) and offsets (R + 1,) for events whose items get −∞; None: no exclusions. kept:
            (R,), codes that keep their scores even if seen.
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
        """Project to the item embeddings' width: h · (W e) = (Wᵀ h) · e."""
        return x if self.project is None else x @ self.project.to(x.dtype)


def find_positive_items(batch: Batch, name: str, labels: Sequence[str]) -> Tensor:
    """(R,), item code of each request's first candidate with a positive first label; 0 if there is none.

    Without labels every candidate counts as positive.

    name: the item field.
    """
    item = batch.items[name].long()
    label = next((batch.labels[one] for one in labels[:1] if one in batch.labels), torch.ones_like(item))
    request = torch.repeat_interleave(batch.offsets.diff()).to(label.device)
    place = torch.arange(len(label), device=label.device)
    first = torch.full((batch.requests,), len(label), device=label.device)
    first.scatter_reduce_(0, request, torch.where(label > 0, place, len(label)), "amin")
    code: Tensor = torch.cat((item, item.new_zeros(1)))[first]
    return code
