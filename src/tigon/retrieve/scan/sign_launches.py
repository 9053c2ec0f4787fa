"""Kernel launches for 1-bit codes: signs, scan, pick, exact scores for the picked rows; as a single library op."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan as Launch
from tigon.kernels import cdiv, launch, launcher, next_power_of_2, use_triton
from tigon.retrieve.scan.bits import RowBits
from tigon.retrieve.scan.codes import CodedItems
from tigon.retrieve.scan.filters import RowFilter, stack_tables
from tigon.retrieve.scan.launches import (
    Rows,
    _best,
    _descend,
    _key,
    _nodes,
    _number,
    _unit,
    _unit_stride,
    allocate_answer,
    list_rows,
)  # fmt: skip
from tigon.retrieve.scan.plan import KEYS, WORKSPACE, Plan, Sizes, Tile, choose_sizes, list_levels
from tigon.retrieve.scan.sign import (
    ARITY,
    Signs,
    Where,
    choose_group,
    compute_factor,
    count_candidates,
    sign_topk_reference,
)
from tigon.retrieve.scan.sign_kernels import (
    _encode_kernel,
    _sign_rows_kernel,
    _sign_scan_kernel,
)  # fmt: skip

# Groups that a program can select; more are sorted by torch.
MOST_PICKED = KEYS // ARITY
# Warps for a single-query scan.
SCAN_WARPS = 4


class SignPlan(NamedTuple):
    """The plan for a search by signs. picked: groups per query. tree, exact: for the scan, and for the exact scores.

    queries: per scan program. pieces: for the batch.
    """

    picked: int
    tree: Plan
    exact: Plan
    queries: int
    pieces: int


def sign_topk(
    query: Tensor, coded: CodedItems, k: int, attributes: Tensor | None, where: Where | None, live: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, codes, scales, projection = coded.rows, coded.codes, coded.scales, coded.projection
    assert projection is not None
    assert where is None or isinstance(where, (RowFilter, RowBits))
    if not use_triton(query, None if rows.dtype == torch.float8_e4m3fn else rows, bias):
        return sign_topk_reference(query, coded, k, attributes=attributes, where=where, live=live, bias=bias)
    many = count_candidates(k, coded.candidates)
    table, bitmaps = None, None
    if isinstance(where, RowBits):
        attributes, bitmaps = None, where.bits
    elif where is not None:
        table, bitmaps, _ = stack_tables(where, "compact", query.device, query.shape[0])[1]
    else:
        attributes = None
    return _sign_topk(query, rows, codes, scales, projection, k, many, attributes, table, bitmaps, live, bias)


def encode(rows: Tensor, projection: Tensor, *, scaled: bool, query: bool = False) -> Signs:
    """`signs_reference` on a GPU."""
    rows = _unit_stride(rows)
    n, D = rows.shape
    terms, bits = projection.shape
    codes = rows.new_empty((n, bits // 32), dtype=torch.int32)
    more = torch.empty_like(codes) if query else None
    scales = rows.new_empty((n,), dtype=torch.float32 if query else torch.bfloat16) if query or scaled else None
    if not n:
        return Signs(codes, more, scales)
    stored = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows

    def plan() -> Launch:
        unit = _unit(rows)
        sizes = rows.stride(0) // unit, compute_factor(D, bits), D, terms, bits, next_power_of_2(D), unit
        return n, sizes, {"num_warps": 4, "enable_fp_fusion": False}

    key = n, rows.dtype, rows.stride(), D, terms, bits, scaled, query
    launch(_encode_kernel, key, (stored, projection, codes, more, scales), plan)
    return Signs(codes, more, scales)


def _plan(B: int, N: int, W: int, k: int, candidates: int) -> SignPlan:
    G = choose_group(W)
    strip = G * ARITY * ARITY
    groups = cdiv(N, strip) * ARITY * ARITY
    picked = min(candidates, groups)
    places = next_power_of_2(picked)
    sizes = Sizes(G, G * ARITY, strip, min(places, MOST_PICKED))
    tree = _empty_plan(picked, sizes, list_levels(N, sizes))
    # Exact scores are computed in blocks with as many rows as in an exact search, so that their bits are equal.
    block = choose_sizes(k).group
    blocks = cdiv(picked * G, block)
    room = next_power_of_2(blocks)
    exact = _empty_plan(blocks, Sizes(block, 0, room * block, room), ())
    one = 4 * sum(_nodes(N, tree)[0]) + 12 * room * block + (16 * groups if places > MOST_PICKED else 0)
    pieces = cdiv(B, max(1, WORKSPACE // one))
    return SignPlan(picked, tree, exact, 1 if B == 1 else 2 if B == 2 else 4, pieces)


def _empty_plan(groups: int, sizes: Sizes, levels: tuple[int, ...]) -> Plan:
    return Plan("codes", 0, 0, groups, sizes, levels, Tile(1, 1, 1, 4, 1), 1, 0)


_plan_scan = functools.lru_cache(1024)(_plan)


@launcher(
    lambda query, items, codes, scales, projection, k, *_: allocate_answer(query, k),
    "(Tensor query, Tensor items, Tensor codes, Tensor? scales, Tensor projection, int k, int candidates, "
    "Tensor? attributes, Tensor? table, Tensor? bitmaps, Tensor? live, Tensor? bias) -> (Tensor, Tensor)",
)
def _sign_topk(
    query: Tensor, items: Tensor, codes: Tensor, scales: Tensor | None, projection: Tensor, k: int, candidates: int,
    *given: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """given: as in the schema. table: a single filter for all queries. Without attributes, bitmaps holds the bits of
    passing rows."""
    attributes, table, bitmaps, live, bias = given
    (B, _), N = query.shape, items.shape[0]
    scores, found = allocate_answer(query, k)
    if not B or not N:
        return scores.fill_(-torch.inf), found.fill_(-1)
    query, items, attributes, live, bias = map(_unit_stride, (query, items, attributes, live, bias))
    codes = codes.contiguous()
    plan = _plan_scan(B, N, codes.shape[1], k, candidates)
    number = _number((plan, k, _key(query, items, codes, scales, attributes, table, bitmaps, live, bias)))
    stored = items.view(torch.uint8) if items.dtype == torch.float8_e4m3fn else items
    given = Rows(live=live, bias=bias)
    if bitmaps is not None:
        given = list_rows(N, plan.tree.sizes.strip, (attributes, table, bitmaps, live), bias, number)
    size = cdiv(B, plan.pieces)
    for start in range(0, B, size):
        at = slice(start, start + size) if plan.pieces > 1 else slice(None)
        part = query[at]
        key = number, part.shape[0]
        asked = encode(part, projection, scaled=True, query=True)
        picks = _pick(asked, codes, scales, given, plan, key)
        rows, blocks = _make_rows(picks, given, N, plan, key)
        _best(part, stored, rows, blocks, plan.exact, scores[at], found[at], key)
    return scores, found


def _pick(
    asked: Signs, codes: Tensor, scales: Tensor | None, rows: Rows, plan: SignPlan, key: tuple[int, int]
) -> Tensor:
    """(B, places) int32, each query's groups that hold the rows with the best codes, in order; then -1."""
    (N, W), B, tree = codes.shape, asked.codes.shape[0], plan.tree
    counts, starts = _nodes(N, tree)
    of_strips = tree.levels.index(tree.sizes.strip)
    maxima = codes.new_empty((sum(counts), B), dtype=torch.int32)

    def plan_scan() -> Launch:
        blocks = cdiv(B, plan.queries)
        sizes = B, N, blocks, starts[of_strips + 1], starts[of_strips], W, tree.sizes.group, ARITY, plan.queries
        return counts[of_strips] * blocks, sizes, {"num_warps": SCAN_WARPS, "enable_fp_fusion": False}

    given = codes, scales, rows.bias, rows.listed, rows.counts, rows.live
    launch(_sign_scan_kernel, key, (asked.codes, asked.more, asked.scales, *given, maxima), plan_scan)
    if plan.picked > MOST_PICKED:
        return _pick_by_sorting(maxima[: counts[-1]], rows.counts, N, plan)
    return _descend(maxima, rows, N, tree, key)


def _pick_by_sorting(maxima: Tensor, count: Tensor | None, N: int, plan: SignPlan) -> Tensor:
    """Like the kernel, for more groups than a program can select."""
    sizes = plan.tree.sizes
    group = torch.arange(maxima.shape[0], device=maxima.device)
    in_strip = sizes.strip // sizes.group
    there = group * sizes.group < N
    if count is not None:
        there = group % in_strip * sizes.group < count[group // in_strip]
    # The key above, the inverted group below; entries never written count as 0.
    order = (torch.where(there[:, None], maxima, 0).long() << 31) | (0x7FFFFFFF - group)[:, None]
    picks = torch.topk(order.t(), plan.picked, dim=1).indices.sort(dim=1).values
    return torch.where(there[picks], picks, -1).int()


def _make_rows(picks: Tensor, rows: Rows, N: int, plan: SignPlan, key: tuple[int, int]) -> tuple[Rows, Tensor]:
    """The picked groups' rows as a list with a strip per query, and the list's blocks."""
    B, exact, G = picks.shape[0], plan.exact.sizes, plan.tree.sizes.group
    listed = picks.new_empty((B, exact.strip))
    many, blocks = picks.new_empty((B,)), picks.new_empty((B, exact.places))

    def plan_rows() -> Launch:
        sizes = N, plan.picked, G, plan.tree.sizes.strip, picks.shape[1], exact.strip, exact.places
        block = min(2048, next_power_of_2(plan.picked * G))
        return B, (*sizes, block), {"num_warps": 8}

    launch(
        _sign_rows_kernel, (*key, picks.shape[1]), (picks, rows.listed, rows.counts, listed, many, blocks), plan_rows
    )
    return Rows(listed, many, live=rows.live, bias=rows.bias), blocks
