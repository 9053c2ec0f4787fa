"""Hard negatives from the index in training, and the items allowed by rules.

`mine` searches for more items than requested, and drops the query's positives: at most P items in the top k + skip + P
are positives, so the result is exact. Under `Index.over` the search uses the present weights.

Source: in-batch negatives first, hard negatives after a schedule, Shen et al. 2024, https://arxiv.org/abs/2402.13435.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tigon.kernels import next_power_of_2
from tigon.retrieve.arguments import read_int
from tigon.retrieve.filters.expressions import Where
from tigon.retrieve.ids import StringIds
from tigon.retrieve.index.index import Index
from tigon.retrieve.index.request import SearchRequest, broadcast_filters, parse_query
from tigon.retrieve.index.search import rank_rows
from tigon.retrieve.metrics import pack_passing_bits
from tigon.retrieve.scan import RowBits
from tigon.retrieve.scan.bits import write_bits
from tigon.retrieve.scan.filters import EVERY, RowFilter
from tigon.retrieve.transfer import array_to_device

# Least and most rows per search, and how many queries are searched at once where there are more positives.
LEAST, MOST, PIECE = 16, 2048, 256
# Queries whose filters test all their rows at once.
TESTED = 64


@overload
def mine(
    index: Index, query: Tensor, positives: Any, k: int, *, skip_first: int = 0, where: Where | Sequence[Where] = None,
    ids: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def mine(
    index: Index, query: Tensor, positives: Any, k: int, *, skip_first: int = 0, where: Where | Sequence[Where] = None,
    ids: bool,
) -> Tensor | npt.NDArray[Any]: ...  # fmt: skip


@torch.no_grad()
def mine(
    index: Index, query: Tensor, positives: Any, k: int, *, skip_first: int = 0, where: Where | Sequence[Where] = None,
    ids: bool = False,
) -> Tensor | npt.NDArray[Any]:  # fmt: skip
    """Mine hard negatives: for each query the k best items in the index that are not among its positives.

    Args:
        index: the item index. Over a parameter (`Index.over`) it is never stale.
        query: (B, dim) floats.
        positives: ids to exclude as relevant to a query: (B,), or (B, P) with −1 (None among strings) where a query has
            fewer; or a tuple with two vectors, a query number and an item id for each pair, such as `pairs.unbind(1)`.
            Ids that the index does not have are ignored.
        k: negatives per query, from 1.
        skip_first: how many of the best remaining items are dropped as well: the likeliest to be relevant after all.
        where: an expression or its text, or one per query: only passing items, which could have been shown.
        ids: whether ids are returned in place of rows.
    Returns: (B, k) int64, index rows, which under `Index.over` are the parameter's, best first; −1 where fewer pass.
        With ids as `Hits.ids`.
    Raises: ValueError for shapes, numbers, ids and filters that do not fit.

    The host never waits where positives are an integer tensor (B,) or (B, P) on the index's device and k + skip_first +
    P is at most 2048. In an index with updates, rows may later hold other items: use ids there. With codes "sign" the
    items are as close to the best as search results are.
    """
    name = "negatives.mine"
    if not isinstance(index, Index):
        raise ValueError(f"{name}: index must be an Index, got {type(index).__name__}.")
    k, skip_first = read_int(name, "k", k), read_int(name, "skip_first", skip_first, least=0)
    if k + skip_first > MOST:
        raise ValueError(f"{name}: k + skip_first must be at most {MOST:,}, got {k + skip_first:,}.")
    q = parse_query(query, index.dim)
    B, table, ids_table = len(q), index.table, index.table.directory.ids
    keys = _parse_positives(name, index, positives, B)
    rows: Tensor
    if k + skip_first + keys.shape[1] <= MOST:
        # Kernels are compiled for each width: batches with somewhat more or fewer positives share a width.
        width = min(MOST, max(LEAST, next_power_of_2(k + skip_first + keys.shape[1])))
        negatives: list[Tensor] = []

        def finish(scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            places, is_there = _select_others(table.item_ids, keys, rows, k, skip_first)
            negatives.append(rows.gather(1, places).masked_fill(~is_there, -1))
            return scores.gather(1, places).masked_fill(~is_there, -torch.inf), negatives[0]

        hits = index.run(index.parse(q, width, where), finish)
        return hits.ids if ids else negatives[0]
    parts = []
    each = broadcast_filters(where, B) if isinstance(where, (list, tuple)) else None
    request = index.parse(q, k + skip_first)
    for start in range(0, B, PIECE):
        part = slice(start, start + PIECE)
        own = where if each is None else each[part]
        piece = replace(request, query=request.query[part])
        parts.append(_search_by_bits(index, piece, keys[part], own)[:, skip_first:])
    rows = torch.cat(parts)
    if not ids:
        return rows
    keys_found = table.keys_of_rows(rows)
    return keys_found if ids_table is None or ids_table.kind == "int64" else ids_table.to_ids(keys_found.cpu().numpy())


def _select_others(item_ids: Tensor, keys: Tensor, rows: Tensor, k: int, skip: int) -> tuple[Tensor, Tensor]:
    """The positions (B, k) in rows (B, W), best first, that hold no positives, and whether there are k such positions.

    keys: (B, P), the positives' keys as in `item_ids`, −1 for none.
    """
    keep = rows >= 0
    if keys.shape[1]:
        # By a search in each query's sorted keys: comparing all pairs would take B · W · P bits.
        candidates, sorted_keys = item_ids[rows.clamp(min=0)], keys.sort(1).values
        at = torch.searchsorted(sorted_keys, candidates).clamp(max=keys.shape[1] - 1)
        keep &= sorted_keys.gather(1, at) != candidates
    order = keep.cumsum(1)
    wanted = torch.arange(skip + 1, skip + k + 1, device=rows.device).expand(len(rows), k).contiguous()
    at = torch.searchsorted(order, wanted)
    return at.clamp(max=rows.shape[1] - 1), at < rows.shape[1]


def _search_by_bits(index: Index, request: SearchRequest, keys: Tensor, where: Any) -> Tensor:
    """(B, k) rows, by a bit for each query and row that says whether the row passes and is not a positive."""
    q, table, ids = request.query, index.table, index.table.directory.ids
    query, place = (keys != -1).nonzero(as_tuple=True)
    items = keys[query, place].cpu().numpy()
    if isinstance(ids, StringIds):
        rows = ids.rows[items].astype(np.int64)
    else:
        rows = np.full(len(items), -1) if ids is None else ids.find(items)[1]
    pairs = torch.stack((query, torch.from_numpy(np.asarray(rows)).to(query)), 1)
    pairs = pairs[pairs[:, 1] >= 0].unique(dim=0)
    bounds = torch.searchsorted(pairs[:, 0].contiguous(), torch.arange(len(q) + 1, device=pairs.device))
    bits = pack_passing_bits(pairs, torch.stack((bounds[:-1], bounds[1:])), len(table.item_ids))
    filters = _compile_filters(index, where, len(q))
    if filters is None:
        return rank_rows(index.table, request, bits)
    with table.scheduler.search_turn(table.device):
        words, which = _test_rows(filters, table.words, len(q))
    words = words[which.long()]
    if bits is not None:
        words = words & bits.bits
    which = torch.arange(len(q), dtype=torch.int32, device=words.device)
    return rank_rows(index.table, request, RowBits(words, which))


# ---------------------------------------------------------------------------------------------------------- positives


def _parse_positives(name: str, index: Index, positives: Any, B: int) -> Tensor:
    """(B, P) int64 on the index's device: the positives' keys as in `index.item_ids`, −1 for none.

    Raises: ValueError for ids with another type, and for shapes that do not fit.
    """
    pairs = isinstance(positives, tuple)
    if pairs and len(positives) != 2:
        raise ValueError(f"{name}: positives as a tuple must be (queries, ids), got {len(positives)} values.")
    keys = _look_up_keys(name, index, positives[1] if pairs else positives)
    if not pairs:
        keys = keys.unsqueeze(1) if keys.dim() == 1 else keys
        if keys.dim() != 2 or len(keys) != B:
            raise ValueError(
                f"{name}: positives must be ({B},) or ({B}, P) ids, or a tuple (queries, ids), got {tuple(keys.shape)}."
            )
        return keys
    query = torch.as_tensor(positives[0]).to(index.device)
    if query.dim() != 1 or query.dtype.is_floating_point or query.shape != keys.shape:
        raise ValueError(
            f"{name}: positives as a tuple must be two equally long vectors, integers and ids, got "
            f"{tuple(query.shape)} {query.dtype} and {tuple(keys.shape)}."
        )
    if not len(query):
        return keys.new_empty(B, 0)
    query, order = query.long().sort(stable=True)
    starts = torch.searchsorted(query, torch.arange(B, device=query.device))
    place = torch.arange(len(query), device=query.device) - starts[query.clamp(0, B - 1)]
    least, most, width = torch.stack((query[0], query[-1], place.max())).tolist()
    if least < 0 or most >= B:
        wrong = least if least < 0 else most
        raise ValueError(f"{name}: positives must have queries from 0 to {B - 1:,}, got {wrong}.")
    padded = keys.new_full((B, width + 1), -1)
    padded[query, place] = keys[order]
    return padded


def _look_up_keys(name: str, index: Index, ids: Any) -> Tensor:
    """Convert ids to keys, on the index's device and in the same shape."""
    table = index.table.directory.ids
    if not isinstance(ids, Tensor):
        ids = np.asarray(ids)
        if ids.dtype.kind in "OU":
            listed = ids.ravel().tolist()
            texts = ["" if value is None else value for value in listed]
            if not isinstance(table, StringIds) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{name}: positives must be ids with the index's type, got {ids.dtype} {ids.shape}.")
            keys, _ = table.find(texts)
            keys = np.where([value is None for value in listed], -1, keys).reshape(ids.shape)
            return array_to_device(keys, index.device)
        if ids.dtype.kind not in "biufc":
            raise ValueError(f"{name}: positives must be ids with the index's type, got {ids.dtype} {ids.shape}.")
        ids = torch.as_tensor(ids)
    if ids.dtype.is_floating_point or ids.dtype in (torch.bool, torch.complex64) or isinstance(table, StringIds):
        wanted = "strings" if isinstance(table, StringIds) else "integers"
        raise ValueError(f"{name}: positives must be {wanted}, like the index's ids, got {ids.dtype}.")
    moved: Tensor = ids.to(index.device, torch.int64)
    return moved


# -------------------------------------------------------------------------------------------------------------- rules


@torch.no_grad()
def find_allowed(index: Index, where: Where | Sequence[Where], rows: Tensor) -> Tensor:
    """Find the items that queries could have been shown, by their filters: the mask for `Negatives(rows, allowed=…)`.

    Args:
        index: the index whose attributes are tested.
        where: an expression or its text, None for all items; or a list for B queries.
        rows: (K,) or (B, K) integers, index rows, such as the batch's or drawn negatives; −1 for none.
    Returns: bool on the index's device: (B, K) for a filter per query, in rows' shape for a single filter. False for −1
        and for rows without an item.
    Raises: ValueError for shapes and for filters that do not fit.

    Only these rows' attributes are read. With the same `where` in `mine`, its negatives need no mask.
    """
    name = "negatives.find_allowed"
    if not isinstance(index, Index):
        raise ValueError(f"{name}: index must be an Index, got {type(index).__name__}.")
    each = isinstance(where, (list, tuple))
    many = len(where) if isinstance(where, (list, tuple)) else 1
    shaped = isinstance(rows, Tensor) and not rows.dtype.is_floating_point and rows.dtype != torch.bool
    if not shaped or rows.dim() not in (1, 2) or (each and rows.dim() == 2 and len(rows) != many):
        got = f"{tuple(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        wanted = f"(K,) or ({many}, K)" if each else "(K,) or (B, K)"
        raise ValueError(f"{name}: rows must be {wanted} integers, got {got}.")
    table = index.table
    rows = rows.to(table.device, torch.int64)
    there = (rows >= 0) & (rows < len(table.item_ids))
    at = torch.where(there, rows, 0)
    filters = _compile_filters(index, where, many)
    with table.scheduler.search_turn(table.device):
        there = there & ((table.live[at >> 5] >> (at & 31).int()) & 1 != 0)
        if filters is None:
            return there.expand(many, -1) if each and rows.dim() == 1 else there
        if rows.dim() == 1 or not each:
            tested = table.words[:, at.reshape(-1)]
            words, which = _test_rows(filters, tested, len(filters))
            passes = RowBits(words, which).mask(0, at.numel())
            return there & (passes if each else passes.reshape(rows.shape))
        parts = []
        for start in range(0, len(rows), TESTED):
            part = at[start : start + TESTED]
            n, K = part.shape
            words, which = _test_rows(filters[start : start + n], table.words[:, part.reshape(-1)], n)
            # Each query's filter has tested all n queries' rows; its own rows are a diagonal block.
            passes = RowBits(words, which).mask(0, n * K).view(n, n, K)
            parts.append(passes.diagonal().mT)
        return there & torch.cat(parts) if parts else there


def _compile_filters(index: Index, where: Any, B: int) -> list[RowFilter] | None:
    """A compiled filter per query, or for all; None where every row passes."""
    if isinstance(where, (list, tuple)):
        compiled = [index.table.attributes.compile(one) for one in broadcast_filters(where, B)]
    else:
        compiled = [index.table.attributes.compile(where)]
    if all(one is None for one in compiled):
        return None
    return [EVERY if one is None else one.filter for one in compiled]


def _test_rows(filters: list[RowFilter], attributes: Tensor, B: int) -> tuple[Tensor, Tensor]:
    """The distinct filters' bits, (F, ⌈N/32⌉), and (B,) each query's filter."""
    number: dict[RowFilter, int] = {}
    which = np.array([number.setdefault(f, len(number)) for f in filters], dtype=np.int32)
    words = (attributes.shape[1] + 31) // 32
    bits = torch.empty(len(number), words, dtype=torch.int32, device=attributes.device)
    starts = array_to_device(np.arange(len(number), dtype=np.int64) * words, attributes.device)
    write_bits(list(number), attributes, bits, starts)
    moved = array_to_device(which, attributes.device)
    return bits, moved.expand(B) if len(filters) == 1 else moved
