"""Kernel launches for 1-bit codes: signs, scan, pick, exact scores for the picked rows; as a single library op."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan as Launch
from tigon.kernels import cdiv, launch, launcher, next_power_of_2
from tigon.retrieve.scan.compact import _list_bits_kernel, _list_kernel
from tigon.retrieve.scan.launches import (
    LIST_BLOCK,
    LIST_WARPS,
    Rows,
    _best,
    _descend,
    _key,
    _nodes,
    _number,
    _unit,
    _unit_stride,
)  # fmt: skip
from tigon.retrieve.scan.plan import KEYS, WORKSPACE, Plan, Sizes, Tile, choose_sizes, list_levels
from tigon.retrieve.scan.sign import ARITY, Signs, compute_factor
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
    G = choose_word_group(W)
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


def choose_word_group(W: int) -> int:
    return 512 // (4 * W)


def _empty_plan(groups: int, sizes: Sizes, levels: tuple[int, ...]) -> Plan:
    return Plan("codes", 0, 0, groups, sizes, levels, Tile(1, 1, 1, 4, 1), 1, 0)


_plan_scan = functools.lru_cache(1024)(_plan)


def _sign_topk_fake(
    query: Tensor, items: Tensor, codes: Tensor, scales: Tensor | None, projection: Tensor, k: int, candidates: int,
    attributes: Tensor | None, table: Tensor | None, bitmaps: Tensor | None, live: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B = query.shape[0]
    return query.new_empty((B, k), dtype=torch.float32), query.new_empty((B, k), dtype=torch.int64)


@launcher(_sign_topk_fake)
def _sign_topk(
    query: Tensor, items: Tensor, codes: Tensor, scales: Tensor | None, projection: Tensor, k: int, candidates: int,
    attributes: Tensor | None, table: Tensor | None, bitmaps: Tensor | None, live: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """table: a single filter for all queries. Without attributes, bitmaps holds the bits of passing rows."""
    (B, _), N = query.shape, items.shape[0]
    scores = query.new_empty((B, k), dtype=torch.float32)
    found = query.new_empty((B, k), dtype=torch.int64)
    if not B or not N:
        return scores.fill_(-torch.inf), found.fill_(-1)
    query, items, codes = _unit_stride(query), _unit_stride(items), codes.contiguous()
    attributes = None if attributes is None else _unit_stride(attributes)
    bias = None if bias is None else _unit_stride(bias)
    live = None if live is None else live.contiguous()
    plan = _plan_scan(B, N, codes.shape[1], k, candidates)
    number = _number((plan, k, _key(query, items, codes, scales, attributes, table, bitmaps, live, bias)))
    stored = items.view(torch.uint8) if items.dtype == torch.float8_e4m3fn else items
    given = _list_rows(codes, attributes, table, bitmaps, live, bias, plan.tree, number)
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


def _list_rows(
    codes: Tensor, attributes: Tensor | None, table: Tensor | None, bitmaps: Tensor | None, live: Tensor | None,
    bias: Tensor | None, tree: Plan, number: int,
) -> Rows:  # fmt: skip
    if bitmaps is None:
        return Rows(None, None, None, None, live, bias)
    N, strip = codes.shape[0], tree.sizes.strip
    strips = cdiv(N, strip)
    listed = codes.new_empty((strips * strip,), dtype=torch.int32)
    count = codes.new_empty((strips,), dtype=torch.int32)
    if attributes is None or table is None:

        def plan_bits() -> Launch:
            return strips, (N, strip), {"num_warps": LIST_WARPS}

        launch(_list_bits_kernel, (number,), (bitmaps, live, listed, count), plan_bits)
        return Rows(listed, count, None, None, None, bias)
    literals, stride = table.shape[0], attributes.stride(0)

    def plan() -> Launch:
        return strips, (N, stride, literals, strip, min(strip, LIST_BLOCK)), {"num_warps": LIST_WARPS}

    launch(_list_kernel, (number,), (attributes, table, bitmaps, live, listed, count), plan)
    return Rows(listed, count, None, None, None, bias)


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
    return Rows(listed, many, None, None, rows.live, rows.bias), blocks
