"""Run searches over an index's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.retrieve.ids import Ids
from tigon.retrieve.index.hits import Hits
from tigon.retrieve.index.request import SearchRequest
from tigon.retrieve.index.table import RowTable
from tigon.retrieve.links.resolve import HitLinks
from tigon.retrieve.scan import CodedItems, RowBits, filtered_topk
from tigon.retrieve.scan.sign import uses_signs
from tigon.retrieve.transfer import array_to_device

# Maps a search's scores and rows to those of its hits.
Finish = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class RowHits(NamedTuple):
    """scores and rows: (B, k). is_exact: whether all items that pass were scored."""

    scores: Tensor
    rows: Tensor
    is_exact: bool


def run_search(table: RowTable, request: SearchRequest, finish: Finish | None = None) -> Hits:
    """Run a request. The caller holds the read lock.

    finish: computes the hits' scores and rows from the scan's, before an update can change a row.
    """
    table.cache.prepare(request.filters, table)
    with table.scheduler.search_turn(table.device):
        scores, rows, is_exact = scan_rows(table, request)
        scores, rows = finalize_scores(request, scores, rows)
        if finish is not None:
            scores, rows = finish(scores, rows)
        keys = table.keys_of_rows(rows)
        words = None if finish is not None else link_words(table, request)
        words = None if words is None else words[:, rows.clamp(min=0)]
    return make_hits(request, scores, keys, is_exact, words, table.directory.ids)


def scan_rows(table: RowTable, request: SearchRequest, read_live: bool = False) -> RowHits:
    """Find each query's best rows. Out of memory, the batch is scanned in halves once.

    read_live: whether live bits are read although all rows hold items.
    """
    B, k = len(request.query), request.k
    if not table.rows.end or not B:
        scores = torch.full((B, k), -torch.inf, device=table.device)
        return RowHits(scores, torch.full((B, k), -1, dtype=torch.int64, device=table.device), True)
    without_codes = request.candidates == 0 or request.links is not None  # codes do not include links
    end = table.rows.end
    items = table.embeddings[:end] if without_codes else table.items(request.candidates)
    has_tags = request.links is not None and len(request.links.tags) > 0
    bits = table.cache.find(request.filters, end)
    filters = request.filters if bits is None else bits
    bias = table.score_bias()
    needs_words = has_tags or (bits is None and filters is not None)
    options: dict[str, Any] = {
        "attributes": table.words[:, :end] if needs_words else None,
        "live": table.live_words(read_live),
        "bias": bias if bias is None or request.alpha == 1 else bias * request.alpha,
        "share": request.share,
    }  # fmt: skip

    def scan_part(part: slice) -> RowHits:
        query, where = request.query[part], filters
        if isinstance(where, list):
            where = where[part]
        elif isinstance(where, RowBits) and where.which is not None:
            where = where._replace(which=where.which[part])
        if request.links is not None and has_tags:
            options.update(tags=request.links.tags, tag_weights=request.links.weights[part])
        scores, rows = filtered_topk(query, items, k, where=where, **options)
        coded = items if isinstance(items, CodedItems) else None
        return RowHits(scores, rows, not uses_signs(query, coded, where, "auto", request.share))

    try:
        return scan_part(slice(None))
    except torch.OutOfMemoryError as error:
        if B == 1:
            raise _make_memory_error(1) from error
    try:
        first, second = (scan_part(part) for part in (slice(B // 2), slice(B // 2, B)))
    except torch.OutOfMemoryError as error:
        raise _make_memory_error(B - B // 2) from error
    return RowHits(
        torch.cat((first.scores, second.scores)), torch.cat((first.rows, second.rows)),
        first.is_exact and second.is_exact,
    )  # fmt: skip


@torch.no_grad()
def rank_rows(table: RowTable, request: SearchRequest, bits: RowBits | None) -> Tensor:
    """(B, k), the exhaustive search's rows among those whose bits are set; None: among all rows."""
    with table.scheduler.read_lock(), table.scheduler.search_turn(table.device):
        end = table.rows.end
        if not end:
            return torch.full((len(request.query), request.k), -1, dtype=torch.int64, device=table.device)
        if bits is not None:
            bits = bits._replace(bits=bits.bits[:, : (end + 31) // 32])
        live, bias = table.live_words(), table.score_bias()
        return filtered_topk(request.query, table.embeddings[:end], request.k, where=bits, live=live, bias=bias)[1]


def warm_kernels(table: RowTable, request: SearchRequest) -> None:
    """Scan for a request by attributes and by cached filter bits, with and without free rows."""
    for _ in range(3):
        with table.scheduler.search_turn(table.device):
            for read_live in (False, True):
                scan_rows(table, request, read_live)
        table.cache.prepare(request.filters, table)
    table.cache.warm(table.words)


def finalize_scores(request: SearchRequest, scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the hits' scores and rows from the scan's."""
    if request.norms is not None:
        scores = scores - request.norms
    if request.ks is not None:
        ks = array_to_device(np.asarray(request.ks), scores.device)[:, None]
        beyond = torch.arange(request.k, device=scores.device) >= ks
        scores, rows = scores.masked_fill(beyond, -torch.inf), rows.masked_fill(beyond, -1)
    return scores, rows


def link_words(table: RowTable, request: SearchRequest) -> Tensor | None:
    """The attribute words that a request's links test, (W', rows); None without links."""
    return None if request.links is None else table.words[: request.links.tags.words]


def make_hits(
    request: SearchRequest, scores: Tensor, keys: Tensor, is_exact: bool, words: Tensor | None, ids: Ids | None
) -> Hits:
    """Build the hits. words: (W', B, k), the hits' attribute words, for a request with links."""
    exact = torch.full((len(scores),), is_exact, device=scores.device)
    links = None if words is None or request.links is None else HitLinks(request.links, words)
    return Hits(scores, keys, exact, ids, links)


def _make_memory_error(queries: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"Index.search: not enough device memory for {queries} {'query' if queries == 1 else 'queries'} at "
        "once; the index is unchanged: search smaller batches, or free memory."
    )
