"""The k best rows in plain PyTorch: products by chunks of rows, their k best, merged. The specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.ops.filtered_topk.bits import RowBits
from tigon.ops.filtered_topk.filters import RowFilter
from tigon.runtime import is_traced

# Scores of a chunk: 64 MiB of fp32.
SCORES = 1 << 24


def filtered_topk_reference(
    query: Tensor, items: Tensor, k: int, *, attributes: Tensor | None = None,
    where: RowFilter | Sequence[RowFilter | None] | RowBits | None = None, live: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, N = query.shape[0], items.shape[0]
    wide = torch.float64 if torch.float64 in (query.dtype, items.dtype) else torch.float32
    q = query.to(wide)
    scores = torch.full((B, k), -torch.inf, dtype=wide, device=query.device)
    rows = torch.full((B, k), -1, dtype=torch.int64, device=query.device)

    def merged(start: int, stop: int) -> tuple[Tensor, Tensor]:
        s = q @ items[start:stop].to(wide).t()
        if bias is not None:
            s = s + bias[start:stop].to(wide)
        every = torch.arange(start, stop, device=query.device)
        hidden = s.isnan()
        if live is not None:
            hidden = hidden | (((live[every >> 5] >> (every & 31)) & 1) == 0)
        passing = _passing(attributes, where, start, stop)
        if passing is not None:
            hidden = hidden | ~passing
        # Zeros of both signs are equal, and so are their bits.
        s = torch.where(s == 0, 0.0, s).masked_fill(hidden, -torch.inf)
        # What was found in the chunks before comes first, so that position is the order of rows among equals.
        s, at = torch.cat((scores, s), 1), torch.cat((rows, every.expand(B, -1)), 1)
        best = _best(s, k)
        return s.gather(1, best), at.gather(1, best)

    if is_traced(query):  # a graph that is recorded holds for every N: all rows at once
        scores, rows = merged(0, N)
    else:
        size = max(k, SCORES // max(B, 1))
        for start in range(0, N, size):
            scores, rows = merged(start, min(start + size, N))
    return scores, rows.masked_fill(scores == -torch.inf, -1)


def _best(s: Tensor, k: int) -> Tensor:
    """(B, k), where the k largest numbers of each row are, descending, the earlier among equals. None is NaN."""
    if s.dtype == torch.float64:
        return s.sort(dim=1, descending=True, stable=True).indices[:, :k]
    # As one integer, which topk finds without sorting all: the number above, what the position lacks below.
    bits = s.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    lacking = 0x7FFFFFFF - torch.arange(s.shape[1], device=s.device)
    return torch.topk((ordered << 32) | lacking, k, dim=1).indices


def _passing(
    attributes: Tensor | None, where: RowFilter | Sequence[RowFilter | None] | RowBits | None, start: int, stop: int
) -> Tensor | None:
    """(n,) or (B, n) bool, which of these rows pass; None where all do."""
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
