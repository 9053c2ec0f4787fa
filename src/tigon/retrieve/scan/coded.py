"""Search with 8-bit codes: bounds, pick, rescore, choose; then a row scan for queries that stay undecided."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import Plan as Launch
from tigon.kernels import cdiv, launch, launcher, next_power_of_2
from tigon.kernels import device as facts
from tigon.retrieve.scan.bounds import _bounds_kernel, _encode_query_kernel
from tigon.retrieve.scan.launches import (
    LISTING,
    Rows,
    _descend,
    _filtered_topk,
    _key,
    _launch_scan,
    _nodes,
    _number,
    _rescore,
    _rows,
    _terms,
    _unit,
    _unit_stride,
    _warps,
    allocate_answer,
)
from tigon.retrieve.scan.plan import Plan, SearchSizes, plan_coded_scan
from tigon.retrieve.scan.select import _choose_among_groups_kernel

_plan_scan = functools.lru_cache(1024)(plan_coded_scan)


@launcher(
    lambda query, items, codes, scales, error, k, *_: (
        *allocate_answer(query, k),
        query.new_empty(query.shape[:1], dtype=torch.bool),
    ),
    "(Tensor query, Tensor items, Tensor codes, Tensor scales, Tensor error, int k, Tensor? attributes, Tensor? table, "
    "Tensor? bitmaps, Tensor? which, int filters, Tensor? live, Tensor? bias, str kind, float? share) "
    "-> (Tensor, Tensor, Tensor)",
)
def _coded_topk(
    query: Tensor, items: Tensor, codes: Tensor, scales: Tensor, error: Tensor, k: int, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `_filtered_topk`; also returns (B,) bool, whether the codes sufficed per query. If not, rows are scanned.

    Only the device knows whether they sufficed: the second scan's kernels are always launched, and return immediately
    without work. A search therefore never synchronizes, and can be captured in a CUDA graph.
    """
    attributes, table, bitmaps, which, filters, live, bias, kind, share = given
    (B, D), N = query.shape, items.shape[0]
    # For row products in 16 bits, see `_terms`; not for fp32.
    two_terms = query.dtype != items.dtype and items.dtype in (torch.float16, torch.bfloat16)
    plan = None
    if B and N:
        plan = _plan_scan(SearchSizes(
            B, k, D, N, items.dtype, filters=filters, live=live is not None, bias=bias is not None, kind=kind,
            share=share, two_terms=two_terms, room=facts.shared_memory(query.device),
        ))  # fmt: skip
    if plan is None:
        found = _filtered_topk.direct(query, items, k, *given[:-1])  # type: ignore[attr-defined]
        return *found, query.new_zeros(B, dtype=torch.bool)
    query, items, attributes, live, bias = map(_unit_stride, (query, items, attributes, live, bias))
    codes, scales = _unit_stride(codes), _unit_stride(scales)
    scores, rows = allocate_answer(query, k)
    certain = query.new_empty((B,), dtype=torch.int32)
    terms = _terms(query, items)
    tensors = query, terms[0], items, codes, scales, attributes, table, bitmaps, live, bias
    number = _number((plan, k, filters, kind, _key(*tensors)))
    size = cdiv(B, plan.pieces)
    listed = _rows(size, N, (attributes, table, bitmaps, live), which, filters, bias, plan, number)
    stored = items.view(torch.uint8) if items.dtype == torch.float8_e4m3fn else items
    for start in range(0, B, size):
        at = slice(start, start + size)
        high, low, scale = (None if term is None else term[at] for term in terms)
        assert high is not None
        key = number, len(high)
        coded, out = (codes, scales, error), (scores[at], rows[at], certain[at])
        _search(query[at], (high, low, scale), stored, coded, listed, filters, plan, out, key)
    return scores, rows, certain.bool()


def _search(
    query: Tensor, terms: tuple[Tensor, Tensor | None, Tensor | None], items: Tensor,
    coded: tuple[Tensor, Tensor, Tensor], rows: Rows, filters: int, plan: Plan, out: tuple[Tensor, Tensor, Tensor],
    key: tuple[int, int],
) -> None:  # fmt: skip
    """Search one piece of a batch; writes scores, rows, and whether the codes sufficed."""
    B, N, then = query.shape[0], items.shape[0], plan.then
    assert then is not None
    scores, found, certain = out
    unknown, other = (query.new_empty((B,), dtype=torch.int32) for _ in range(2))
    maxima = query.new_empty((sum(_nodes(N, plan)[0]), B), dtype=torch.float32)
    _launch_bounds(query, coded, rows, plan, maxima, unknown, key)
    # The row scan reuses a list made by the bounds scan.
    listed = rows if rows.listing is None else rows._replace(listing=None)
    _choose_best(query, items, listed, plan, maxima, (unknown, certain), (scores, found), key)
    again = *key, 1
    _launch_scan(terms, items, listed, filters, then, maxima, again, certain)
    _choose_best(query, items, listed, then, maxima, (certain, other), (scores, found), again)


def _launch_bounds(
    query: Tensor, coded: tuple[Tensor, Tensor, Tensor], rows: Rows, plan: Plan, maxima: Tensor, unknown: Tensor,
    key: tuple[int, int],
) -> None:  # fmt: skip
    (B, D), (codes, scales, error), N, sizes = query.shape, coded, coded[0].shape[0], plan.sizes
    code = query.new_empty((B, D), dtype=torch.int8)
    low = query.new_empty((B, D), dtype=torch.int8) if plan.terms == 2 else None
    step, slack = (query.new_empty((B,), dtype=torch.float32) for _ in range(2))

    def plan_query() -> Launch:
        return B, (query.stride(0), D, next_power_of_2(D)), {"num_warps": 4}

    launch(_encode_query_kernel, key, (query, error, code, low, step, slack, unknown), plan_query)
    counts, starts = _nodes(N, plan)
    of_strips = plan.levels.index(sizes.strip)
    attributes, table, bitmaps, live = rows.listing or (None, None, None, rows.live)
    given = rows.listed, rows.counts, rows.word, live, rows.bias
    tensors = (code, low, step, slack, codes, scales, *given, maxima, attributes, table, bitmaps)

    def plan_scan() -> Launch:
        tile, blocks, unit = plan.tile, cdiv(B, plan.tile.queries), _unit(codes)
        beside = (0 if attributes is None else attributes.stride(0), 0 if table is None else table.shape[0])
        arguments = (
            B, N, blocks, *beside, codes.stride(0) // unit, starts[of_strips + 1], starts[of_strips], D, sizes.group,
            sizes.middle, sizes.strip, tile.queries, tile.rows, tile.depth, unit,
            min(LISTING, sizes.strip) if rows.listing else 0, tile.stages,
        )  # fmt: skip
        return counts[of_strips] * blocks, arguments, {"num_warps": tile.warps}

    launch(_bounds_kernel, key, tensors, plan_scan)


def _choose_best(
    query: Tensor, items: Tensor, rows: Rows, plan: Plan, maxima: Tensor, flags: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor], key: tuple[int, ...],
) -> None:  # fmt: skip
    """The k best rows in the groups with the largest maxima, for queries that the first flag marks undecided; the
    second flag becomes whether no other row can be among them."""
    (known, certain), (scores, found) = flags, out
    B, k, sizes, K = query.shape[0], scores.shape[1], plan.sizes, plan.groups
    picks = _descend(maxima, rows, items.shape[0], plan, key, known)
    best = query.new_empty((B, K), dtype=torch.float32)
    candidates, of_rows = _rescore(query, items, rows, picks, plan, key, known, best)
    groups, room = (query.new_empty((B, next_power_of_2(k)), dtype=torch.int32) for _ in range(2))

    def plan_choose() -> Launch:
        wide = next_power_of_2(k)
        M = wide * sizes.group
        return B, (B, K, k, sizes.places, M, wide, sizes.group), {"num_warps": _warps(M, query.device)}

    tensors = (candidates, of_rows, best, picks, maxima, groups, room, scores, found, known, certain)
    launch(_choose_among_groups_kernel, key, tensors, plan_choose)
