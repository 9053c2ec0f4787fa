"""Rank all items for query vectors on their device, and measure the ranking.

`evaluate` excludes the items that each query has already had, as recommenders are compared: never against sampled
items. `ranking` computes the same for rows that were ranked before. Search results by id are measured by
`tigon.data.metrics`: `recall(*label_results(ids, right), k=10)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tigon.data.metrics import label_hits
from tigon.data.sorted_groups import SortedGroups
from tigon.data.values import describe, shorten
from tigon.kernels import check_tensors
from tigon.retrieve.arguments import as_int, as_list, read_int, require_tensors
from tigon.retrieve.index.index import Index
from tigon.retrieve.index.search import rank_rows
from tigon.retrieve.scan import RowBits, filtered_topk

# Ranked rows whose metrics are computed at once.
PIECE = 1 << 20
METRICS = ("recall", "ndcg", "mrr", "hit_rate")


def evaluate(
    query: Tensor, items: Tensor | Index, right: Tensor, exclude: Tensor | None = None, k: int | Sequence[int] = 20, *,
    batch_size: int = 1024,
) -> dict[str, float]:  # fmt: skip
    """Rank all items for each query, without the excluded items, and compare with the relevant items.

    Args:
        query: (Q, D) floats, on the items' device.
        items: (N, D), or an `Index` with integer ids.
        right: (P, 2) integers, pairs with a query's row and an item's row, or id for an `Index`. Duplicate pairs count
            once; queries without any are not searched, and are excluded from the means.
        exclude: (E, 2), pairs that are not ranked, such as a query's training items. The search skips them, so the rest
            is ranked exactly, however many there are.
        k: cut-offs, up to 2048.
        batch_size: queries per search; each needs a bit for each item.
    Returns: as `ranking`.
    Raises: ValueError for shapes, dtypes, devices and rows that do not fit.
    """
    name = "metrics.evaluate"
    if not isinstance(getattr(items, "embeddings", items), Tensor):
        raise ValueError(f"{name}: items must be a tensor (N, D) or an Index, got {describe(items)}.")
    table = items if isinstance(items, Tensor) else items.embeddings
    require_tensors(name, query=query, items=table, right=right)
    check_tensors(name, exclude=exclude)
    if table.dim() != 2:
        raise ValueError(f"{name}: items must be (N, D), got {tuple(table.shape)}.")
    if query.dim() != 2 or query.shape[1:] != table.shape[1:] or query.device != table.device:
        raise ValueError(
            f"{name}: query must be (Q, {table.shape[-1]}), as wide as the items, on {table.device}, got "
            f"{tuple(query.shape)} on {query.device}."
        )
    batch_size = read_int(name, "batch_size", batch_size)
    cuts = _cuts(name, k)
    right = _pairs(name, "right", right, len(query), query.device)
    out = torch.zeros(0, 2, dtype=torch.int64) if exclude is None else exclude
    out = _pairs(name, "exclude", out.to(query.device), len(query), query.device)
    if isinstance(items, Tensor):
        for argument, pairs in (("right", right), ("exclude", out)):
            _check_rows(name, argument, pairs, len(table))
    else:
        right, out = _find_rows(name, items, right), _find_rows(name, items, out)
        out = out[out[:, 1] < len(table)]
    asked = right[:, 0].unique()
    bounds = torch.searchsorted(out[:, 0].contiguous(), torch.stack((asked, asked + 1)))
    pieces = []
    for start in range(0, len(asked), batch_size):
        part = slice(start, start + batch_size)
        bits = pack_passing_bits(out, bounds[:, part], len(table))
        pieces.append(_rank(query[asked[part]].detach(), items, max(cuts), bits))
    rows = torch.cat(pieces) if pieces else torch.zeros(0, max(cuts), dtype=torch.int64, device=query.device)
    # The searched queries are renumbered to match `rows`.
    place = torch.stack((torch.searchsorted(asked, right[:, 0].contiguous()), right[:, 1]), 1)
    return ranking(rows, place, cuts, len(table) if isinstance(items, Tensor) else len(items))


def ranking(rows: Tensor, right: Tensor, k: int | Sequence[int], items: int) -> dict[str, float]:
    """Metrics for ranked rows at several cut-offs, on their device.

    Args:
        rows: (Q, K) int64, best first; −1 where there is none.
        right: (P, 2) integers, pairs with a query's number and a relevant item's row.
        k: cut-offs, up to K.
        items: the item count, for the coverage.
    Returns: for each cut-off the means over queries with a relevant item: `recall@k` (the share of **all** relevant
        items that was found, which cannot reach 1 where there are more than k), `ndcg@k`, `mrr@k` and `hit_rate@k`
        (whether any was found), and `coverage@k`, the share of all items that some query found. NaN if no query has a
        relevant item.
    Raises: ValueError for shapes and cut-offs that do not fit.
    """
    name = "metrics.ranking"
    items = read_int(name, "items", items, least=0)
    require_tensors(name, rows=rows, right=right)
    if rows.dim() != 2 or rows.dtype != torch.int64:
        raise ValueError(f"{name}: rows must be (Q, K) int64, got {tuple(rows.shape)} {rows.dtype}.")
    cuts = _cuts(name, k, rows.shape[1])
    right = _pairs(name, "right", right, len(rows), rows.device)
    many = torch.bincount(right[:, 0], minlength=len(rows))
    counted = many > 0
    # Each pair becomes a single number: whether a found row is relevant is a search in a sorted list.
    # Width is the row count plus one, so that −1 matches no row.
    width = int(torch.cat((rows.reshape(-1), right[:, 1])).max()) + 2 if len(rows) else 1
    keys = (right[:, 0] * width + right[:, 1]).contiguous()
    asked = torch.arange(len(rows), device=rows.device)[:, None] * width + rows
    place = torch.searchsorted(keys, asked.contiguous()).clamp(max=max(len(keys) - 1, 0))
    hit = keys[place] == asked if len(keys) else torch.zeros_like(rows, dtype=torch.bool)
    queries, parts = max(PIECE // max(rows.shape[1], 1), 1), []
    for first in range(0, len(rows), queries):
        labelled = label_hits(hit[first : first + queries], many[first : first + queries])
        ranked = SortedGroups.sort(name, *labelled)
        parts.append(torch.stack([getattr(ranked, metric)(cut) for cut in cuts for metric in METRICS]))
    means = torch.cat(parts, 1)[:, counted].mean(1).tolist() if parts else [float("nan")] * len(cuts) * len(METRICS)
    results = dict(zip([f"{metric}@{cut}" for cut in cuts for metric in METRICS], means, strict=True))
    for cut in cuts:
        shown = rows[counted, :cut]
        results[f"coverage@{cut}"] = len(shown[shown >= 0].unique()) / max(items, 1) if len(shown) else float("nan")
    return results


def _cuts(name: str, k: int | Sequence[int], most: int = 2048) -> list[int]:
    listed = as_list(k)
    cuts = sorted({as_int(cut) or 0 for cut in ([k] if listed is None else listed)})
    if not cuts or not 1 <= cuts[0] <= cuts[-1] <= most:
        raise ValueError(f"{name}: k must be integers from 1 to {most:,}, got {shorten(k)}.")
    return cuts


def _pairs(name: str, argument: str, pairs: Tensor, queries: int, device: torch.device) -> Tensor:
    """Distinct pairs, sorted."""
    floats = pairs.dtype.is_floating_point or pairs.dtype == torch.bool
    if pairs.dim() != 2 or pairs.shape[1] != 2 or floats or pairs.device != device:
        raise ValueError(
            f"{name}: {argument} must be (pairs, 2) integers on {device}, each a query and an item, got "
            f"{tuple(pairs.shape)} {pairs.dtype} on {pairs.device}."
        )
    if len(pairs) and not 0 <= int(pairs[:, 0].min()) <= int(pairs[:, 0].max()) < queries:
        wrong = pairs[(pairs[:, 0] < 0) | (pairs[:, 0] >= queries)][0, 0]
        raise ValueError(f"{name}: {argument} must hold queries from 0 to {queries - 1:,}, got {int(wrong)}.")
    distinct: Tensor = torch.unique(pairs.long(), dim=0)
    return distinct


def _check_rows(name: str, argument: str, pairs: Tensor, items: int) -> None:
    wrong = pairs[(pairs[:, 1] < 0) | (pairs[:, 1] >= items)]
    if len(wrong):
        raise ValueError(
            f"{name}: {argument} must hold rows among the {items:,} items, got {int(wrong[0, 1])} for query "
            f"{int(wrong[0, 0])}."
        )


def _find_rows(name: str, index: Index, pairs: Tensor) -> Tensor:
    """Replace ids by rows in pairs; absent ids become distinct numbers beyond all rows."""
    ids = index.table.directory.ids
    if ids is not None and ids.kind != "int64":
        raise ValueError(f"{name}: the index must have integer ids, got strings: pass index.embeddings.")
    rows = torch.full_like(pairs[:, 1], -1)
    if ids is not None and len(pairs):
        rows = torch.from_numpy(np.asarray(ids.find(pairs[:, 1].cpu().numpy())[1])).to(rows)
    beyond = len(index.embeddings) + torch.arange(len(rows), device=rows.device)
    return torch.stack((pairs[:, 0], torch.where(rows < 0, beyond, rows)), 1)


def pack_passing_bits(out: Tensor, bounds: Tensor, items: int) -> RowBits | None:
    """A bit for each query and item: whether the item is ranked. bounds: (2, B), each query's pair range in `out`."""
    counts = bounds[1] - bounds[0]
    if not int(counts.sum()):
        return None
    B, words = bounds.shape[1], (items + 31) // 32
    query = torch.repeat_interleave(torch.arange(B, device=out.device), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts - bounds[0], counts)
    item = out[torch.arange(len(query), device=out.device) - before, 1]
    # Pairs are distinct, so that the sum of a word's bits is the word.
    hidden = torch.zeros(B * words, dtype=torch.int64, device=out.device)
    hidden.index_add_(0, query * words + (item >> 5), torch.ones_like(item) << (item & 31))
    return RowBits((~hidden).to(torch.int32).view(B, words), torch.arange(B, dtype=torch.int32, device=out.device))


def _rank(query: Tensor, items: Tensor | Index, k: int, bits: RowBits | None) -> Tensor:
    """(B, k) rows."""
    if isinstance(items, Tensor):
        return filtered_topk(query, items.detach(), k, where=bits)[1]
    return rank_rows(items.table, items.parse(query, k), bits)
