"""Exact top-k in plain PyTorch: products by row chunks, each chunk's k best, merged. The specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels import is_traced
from tigon.retrieve.scan.bits import RowBits
from tigon.retrieve.scan.filters import RowFilter
from tigon.retrieve.scan.tags import RowTags

# Scores per chunk: 64 MiB in fp32.
SCORES = 1 << 24


def filtered_topk_reference(
    query: Tensor, items: Tensor, k: int, *, attributes: Tensor | None = None,
    where: RowFilter | Sequence[RowFilter | None] | RowBits | None = None, live: Tensor | None = None,
    bias: Tensor | None = None, tags: RowTags | None = None, tag_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, N = query.shape[0], items.shape[0]
    wide = torch.float64 if torch.float64 in (query.dtype, items.dtype) else torch.float32
    q = query.to(wide)
    scores = torch.full((B, k), -torch.inf, dtype=wide, device=query.device)
    rows = torch.full((B, k), -1, dtype=torch.int64, device=query.device)

    def merge(start: int, stop: int) -> tuple[Tensor, Tensor]:
        s = q @ items[start:stop].to(wide).t()
        if bias is not None:
            s = s + bias[start:stop].to(wide)
        if tags is not None and tag_weights is not None and attributes is not None and len(tags):
            s = s + tag_weights.to(wide) @ tags.has(attributes[:, start:stop]).to(wide)
        hidden = find_hidden(attributes, where, live, start, stop)
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        if looks:
            s, at = _best_on_host(s, k)
        else:
            s, at = normalize(s), torch.arange(stop - start, device=s.device).expand(B, -1)
        # Earlier chunks' results come first, so that position is the row order among equal scores.
        s, at = torch.cat((scores, s), 1), torch.cat((rows, at + start), 1)
        best = _order(s, k)
        return s.gather(1, best), at.gather(1, best)

    # Reading scores is impossible in a traced graph, and would synchronize a GPU.
    looks = query.device.type == "cpu" and not is_traced(query)
    if is_traced(query):  # a traced graph must hold for every N: all rows at once
        scores, rows = merge(0, N)
    else:
        size = max(k, SCORES // max(B, 1))
        for start in range(0, N, size):
            scores, rows = merge(start, min(start + size, N))
    return scores, rows.masked_fill(scores == -torch.inf, -1)


def _best_on_host(s: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's k largest numbers, descending, and their indices, the earlier first among equals. NaN counts as -inf.

    torch's topk returns equal numbers in any order, and NaN first. Its result is checked, and recomputed where that
    matters.
    """
    many = min(k, s.shape[1])
    values, at = s.topk(many)
    last = values[:, -1:]
    if values.isnan().any() or (((s == last).sum(1) > (values == last).sum(1)) & (last[:, 0] > -torch.inf)).any():
        s = normalize(s)
        at = _order(s, many)
        return s.gather(1, at), at
    at = at.sort(1).values
    values = normalize(s.gather(1, at))
    order = values.sort(dim=1, descending=True, stable=True).indices
    return values.gather(1, order), at.gather(1, order)


def normalize(s: Tensor) -> Tensor:
    """Normalize: -0 becomes +0, so that equal zeros have equal bits; NaN becomes -inf."""
    return torch.where(s == 0, 0.0, s).masked_fill(s.isnan(), -torch.inf)


def _order(s: Tensor, k: int) -> Tensor:
    """(B, k), the indices of each row's k largest numbers, descending, the earlier first among equals. No NaN."""
    if s.dtype == torch.float64:
        return s.sort(dim=1, descending=True, stable=True).indices[:, :k]
    # As a combined integer, which topk finds without a full sort: the number above, the inverted position below.
    bits = s.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    lacking = 0x7FFFFFFF - torch.arange(s.shape[1], device=s.device)
    return torch.topk((ordered << 32) | lacking, k, dim=1).indices


def find_hidden(
    attributes: Tensor | None, where: RowFilter | Sequence[RowFilter | None] | RowBits | None, live: Tensor | None,
    start: int, stop: int,
) -> Tensor | None:  # fmt: skip
    """(n,) or (B, n) bool, whether each row is deleted or fails the filter; None if no row is hidden."""
    hidden = None
    if live is not None:
        every = torch.arange(start, stop, device=live.device)
        hidden = ((live[every >> 5] >> (every & 31)) & 1) == 0
    passing = _passing(attributes, where, start, stop)
    if passing is None:
        return hidden
    return ~passing if hidden is None else hidden | ~passing


def _passing(
    attributes: Tensor | None, where: RowFilter | Sequence[RowFilter | None] | RowBits | None, start: int, stop: int
) -> Tensor | None:
    """(n,) or (B, n) bool, whether each row passes; None if all pass."""
    if isinstance(where, RowBits):
        return where.mask(start, stop)
    if where is None or attributes is None:
        return None
    words = attributes[:, start:stop]
    if isinstance(where, RowFilter):
        return where.mask(words)
    masks = {0: torch.ones_like(words[0], dtype=torch.bool)}
    keys = [0 if f is None else id(f) for f in where]  # PyTorch 2.11 cannot trace id(None)
    for key, f in zip(keys, where, strict=True):
        if f is not None and key not in masks:
            masks[key] = f.mask(words)
    return torch.stack([masks[key] for key in keys]) if where else None
