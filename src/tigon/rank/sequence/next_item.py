"""The next item of a history, from the whole catalogue: softmax(h · E) with E the embeddings that events have.

The first token is the start of a history alone, without the fields of its request: every event is predicted by what was
known before it, and a request, with its time, its country or its query, comes after all of them.

Source: SASRec, https://arxiv.org/abs/1808.09781, with the cross entropy over all items in place of sampled ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.ops.cross_entropy import CrossEntropy
from tigon.rank.batch import Batch

if TYPE_CHECKING:
    from tigon.rank.sequence.model import LiGR

# Scores that are in memory at once.
MOST = 1 << 28


def loss(ranker: LiGR, batch: Batch) -> Tensor:
    table, item = _table(ranker), _items(ranker, batch)
    x, _, layout = ranker.histories(batch, context=False)
    # The stream before event e of request r, which is the start's for the first, is row e + r.
    offsets = layout.cu_suffix.long() - torch.arange(layout.requests + 1, device=x.device)
    event = torch.arange(len(item), device=x.device)
    request = torch.searchsorted(offsets[1:].contiguous(), event, right=True)
    # Code 0 is no item of the catalogue.
    return linear_cross_entropy(
        _as_wide(ranker, x[event + request]), table[1:], item - 1, config=CrossEntropy(ignore_index=-1)
    )


def scores(ranker: LiGR, batch: Batch) -> Tensor:
    return _scores(ranker, _last(ranker, batch))


def recommend(ranker: LiGR, batch: Batch, k: int, exclude_seen: bool) -> tuple[Tensor, Tensor]:
    catalogue = len(_table(ranker)) - 1
    if not 1 <= k <= catalogue:
        raise ValueError(f"LiGR.recommend: k must lie in [1, {catalogue:,}], the items of the catalogue, got {k}.")
    found = []
    for z, _ in _parts(ranker, batch, exclude_seen):
        best, codes = z.topk(k)
        found.append((torch.where(best > -torch.inf, codes, -1), best))
    if not found:
        z = torch.zeros(0, k, device=ranker.device)
        return z.long(), z
    codes, best = (torch.cat(side) for side in zip(*found, strict=True))
    return codes, best


def ranks(ranker: LiGR, batch: Batch, target: Tensor | None, exclude_seen: bool) -> Tensor:
    if target is None:
        target = _positives(ranker, batch)
    if target.shape != (batch.requests,):
        raise ValueError(f"LiGR.next_item_ranks: target must be ({batch.requests},), got {tuple(target.shape)}.")
    places = [target[:0]]
    for z, part in _parts(ranker, batch, exclude_seen, target):
        wanted = target[part].unsqueeze(1)
        # The target itself is one of those that are at least as good.
        place = (z >= z.gather(1, wanted)).sum(1)
        places.append(torch.where(wanted[:, 0] > 0, place, 0))
    return torch.cat(places)


def _parts(
    ranker: LiGR, batch: Batch, exclude_seen: bool, kept: Tensor | None = None
) -> Iterator[tuple[Tensor, slice]]:
    """(B, codes) scores of slices of the requests. kept: (R,), codes that stay though they were seen."""
    x, table, item = _last(ranker, batch), _table(ranker), _items(ranker, batch)
    offsets = batch.history_offsets.tolist()
    request = torch.repeat_interleave(batch.history_offsets.diff()).to(x.device)
    size = max(1, MOST // len(table))
    for start in range(0, len(x), size):
        part = slice(start, min(start + size, len(x)))
        z = _scores(ranker, x[part])
        if exclude_seen:
            events = slice(offsets[part.start], offsets[part.stop])
            row, seen = request[events] - start, item[events]
            if kept is None:
                z[row, seen] = -torch.inf
            else:
                wanted = kept[part].unsqueeze(1)
                own = z.gather(1, wanted)
                z[row, seen] = -torch.inf
                z.scatter_(1, wanted, own)
        yield z, part


def _scores(ranker: LiGR, x: Tensor) -> Tensor:
    z = nn.functional.linear(_as_wide(ranker, x), _table(ranker))
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z[:, 0] = -torch.inf
    return z


def _last(ranker: LiGR, batch: Batch) -> Tensor:
    """(R, width), the stream of each request's last token."""
    x, _, layout = ranker.histories(batch, context=False)
    return x[layout.cu_suffix[1:].long() - 1]


def _item(ranker: LiGR) -> str:
    return str(ranker.schema.roles.item)  # which LiGR's schema always has


def _table(ranker: LiGR) -> Tensor:
    name = _item(ranker)
    if name not in ranker.schema.history:
        raise ValueError(f"LiGR: the history must have the items' field {name!r} to predict the next of them.")
    return ranker.tokens.of(name).table


def _items(ranker: LiGR, batch: Batch) -> Tensor:
    found = batch.history[_item(ranker)]
    assert isinstance(found, Tensor)
    return found.long()  # a table may hold narrower codes


def _as_wide(ranker: LiGR, x: Tensor) -> Tensor:
    """As wide as the items' embeddings: h · (W e) = (Wᵀ h) · e."""
    project = ranker.tokens.of(_item(ranker)).project
    return x if isinstance(project, nn.Identity) else x @ project.weight.to(x.dtype)


def _positives(ranker: LiGR, batch: Batch) -> Tensor:
    """(R,), the code of each request's first candidate whose first label is positive; 0 where there is none.

    Without labels what was shown is what happened.
    """
    item = batch.items[_item(ranker)].long()
    label = next((batch.labels[name] for name in ranker.labels[:1] if name in batch.labels), torch.ones_like(item))
    request = torch.repeat_interleave(batch.offsets.diff()).to(label.device)
    place = torch.arange(len(label), device=label.device)
    first = torch.full((batch.requests,), len(label), device=label.device)
    first.scatter_reduce_(0, request, torch.where(label > 0, place, len(label)), "amin")
    found: Tensor = torch.cat((item, item.new_zeros(1)))[first]
    return found
