"""Kernel launches: compact or words, scan, pick, rescore, choose; as a single library op."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan as Launch
from tigon.kernels import cdiv, launch, launcher, next_power_of_2
from tigon.kernels import device as facts
from tigon.retrieve.scan.compact import _list_bits_kernel, _list_kernel, _words_kernel
from tigon.retrieve.scan.plan import KEYS, Plan, SearchSizes, count_nodes, plan_scan, tag_steps
from tigon.retrieve.scan.rescore import _rescore_kernel
from tigon.retrieve.scan.scan import _scan_kernel, _split_kernel
from tigon.retrieve.scan.select import _choose_kernel, _fold_kernel, _pick_kernel
from tigon.retrieve.scan.tags import Tagged

# Rows per program that writes words, and per step in a program that writes a strip's list.
WORDS_BLOCK, WORDS_WARPS = 256, 4
LIST_BLOCK, LIST_WARPS = 512, 4
# Rows per step in a scan that lists its strip's rows itself, which hides the filter behind other strips' loads. Not
# used if several query blocks read a list, or if a tile leaves room for only one program.
LISTING = 1024
# Inputs of a filter: attributes, table, bitmaps, live bits. Without attributes bitmaps holds the filter's own bits.
Tests = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

# Repeated sizes reuse the plan: planning takes as long as two launches.
_plan_scan = functools.lru_cache(1024)(plan_scan)
_numbers = itertools.count()


@functools.lru_cache(4096)
def _number(key: tuple[Any, ...]) -> int:
    """The launch key for a search: the plan and tensor layouts, hashed once."""
    return next(_numbers)


class Rows(NamedTuple):
    """The rows that count, as the kernels read them: a list with a count per strip, or words with a bit per filter;
    live bits, biases. which: each query's filter, for several filters. listing: inputs from which the scan makes the
    list itself: attributes, table, bitmaps and live bits, or bits and live bits. starts: offsets into `word` where each
    filter's bits begin, if it holds those. tagged: tag weights."""

    listed: Tensor | None = None
    counts: Tensor | None = None
    word: Tensor | None = None
    which: Tensor | None = None
    live: Tensor | None = None
    bias: Tensor | None = None
    listing: tuple[Tensor | None, ...] | None = None
    starts: Tensor | None = None
    tagged: Tagged | None = None


def allocate_answer(query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores and rows (B, k), not filled."""
    shape = query.shape[0], k
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.int64)


@launcher(
    lambda query, items, k, *_: allocate_answer(query, k),
    "(Tensor query, Tensor items, int k, Tensor? attributes, Tensor? table, Tensor? bitmaps, Tensor? which, "
    "int filters, Tensor? live, Tensor? bias, str kind, Tensor? words=None, Tensor? tags=None, Tensor? weights=None, "
    "int width=0) -> (Tensor, Tensor)",
)
def _filtered_topk(query: Tensor, items: Tensor, k: int, *given: Any) -> tuple[Tensor, Tensor]:
    """given: as in the schema.

    kind: "dense", "compact" or "bitmaps". filters: the number of distinct filters, whose rows are consecutive in table.
    Without attributes, bitmaps holds each filter's row bits, and table (F,) their offsets.
    words: attributes that tags (3, C) test, `width` columns for a word at a time; weights: (B, C) fp32.
    """
    attributes, table, bitmaps, which, filters, live, bias, kind, *tagging = given
    words, tags, weights, width = tagging or (None, None, None, 0)
    (B, D), N = query.shape, items.shape[0]
    scores, rows = allocate_answer(query, k)
    if not B or not N:
        return scores.fill_(-torch.inf), rows.fill_(-1)
    query, items, attributes, live, bias = map(_unit_stride, (query, items, attributes, live, bias))
    high, low, scale = _terms(query, items)
    tagged = None if words is None or tags is None or weights is None else _prepare_tags(words, tags, weights, width)
    plan = _plan_scan(SearchSizes(
        B, k, D, N, items.dtype, filters=filters, live=live is not None, bias=bias is not None, kind=kind,
        two_terms=low is not None, room=facts.shared_memory(query.device), width=width,
        steps=0 if tags is None else tags.shape[1] // width, many=facts.has_copy_engine(query.device),
    ))  # fmt: skip
    tensors = query, high, items, attributes, table, bitmaps, live, bias, words, tags
    number = _number((plan, k, filters, kind, width, _key(*tensors)))
    size = cdiv(B, plan.pieces)
    listed = _rows(size, N, (attributes, table, bitmaps, live), which, filters, bias, plan, number)
    listed = listed if tagged is None else listed._replace(tagged=tagged)
    stored = items.view(torch.uint8) if items.dtype == torch.float8_e4m3fn else items
    if plan.pieces == 1:
        picks = _pick((high, low, scale), stored, listed, filters, plan, (number, B))
        _best(query, stored, listed, picks, plan, scores, rows, (number, B))
        return scores, rows
    for start in range(0, B, size):
        at = slice(start, start + size)
        part = listed if listed.which is None else listed._replace(which=listed.which[at])
        part = part if tagged is None else part._replace(tagged=tagged.part(at))
        terms = high[at], None if low is None else low[at], None if scale is None else scale[at]
        key = number, len(terms[0])
        picks = _pick(terms, stored, part, filters, plan, key)
        _best(query[at], stored, part, picks, plan, scores[at], rows[at], key)
    return scores, rows


def _unit_stride(t: Any) -> Any:
    """A tensor, or None, with its last dimension one behind the other."""
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _key(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors)


def _terms(query: Tensor, items: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The query in the dtype of the scan's products; as scale · (high + low) if that dtype has fewer bits."""
    dtype = items.dtype
    if dtype == torch.float8_e4m3fn:  # fp16 and bf16 represent fp8 exactly
        dtype = query.dtype if query.dtype in (torch.float16, torch.bfloat16) else torch.float16
    if query.dtype == dtype:
        return query, None, None
    if dtype == torch.float32:
        return query.float(), None, None
    return _split(query, dtype)


def _split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x as scale · (high + low), both in a 16-bit dtype."""
    (B, D) = x.shape
    high, low = (x.new_empty((B, D), dtype=dtype) for _ in range(2))
    scale = x.new_empty((B,), dtype=torch.float32)

    def plan() -> Launch:
        return B, (x.stride(0), D, next_power_of_2(D)), {"num_warps": 4}

    launch(_split_kernel, _key(x, high), (x, high, low, scale), plan)
    return high, low, scale


def _prepare_tags(words: Tensor, tags: Tensor, weights: Tensor, width: int) -> Tagged:
    """Tag weights, also as two fp16 terms, which together drop 2⁻²² of each weight."""
    weights = weights.contiguous()
    return Tagged(_unit_stride(words), tags, weights, *_split(weights, torch.float16), width)


def _rows(
    B: int, N: int, tests: Tests, which: Tensor | None, filters: int, bias: Tensor | None, plan: Plan, number: int
) -> Rows:
    attributes, table, bitmaps, live = tests
    if bitmaps is None:
        return Rows(live=live, bias=bias)
    if plan.kind == "compact":
        return list_rows(N, plan.sizes.strip, tests, bias, number, later=B <= plan.tile.queries <= 16)
    if attributes is None or table is None:
        if plan.kind == "bitmaps":
            return Rows(word=bitmaps, which=which, live=live, bias=bias, starts=table)
        # Rows that pass the filter act as live rows.
        return Rows(live=bitmaps[0] if live is None else bitmaps[0] & live, bias=bias)
    word = bitmaps.new_empty((cdiv(filters, 32), N))

    def plan_words() -> Launch:
        sizes = N, attributes.stride(0), table.shape[0], WORDS_BLOCK
        return cdiv(N, WORDS_BLOCK), sizes, {"num_warps": WORDS_WARPS}

    launch(_words_kernel, (number,), (*tests, word), plan_words)
    return Rows(word=word, which=which, bias=bias)


def list_rows(N: int, strip: int, tests: Tests, bias: Tensor | None, number: int, later: bool = False) -> Rows:
    """List the rows that pass a single filter, a part for each strip. later: the scan makes the list itself."""
    attributes, table, bitmaps, live = tests
    assert bitmaps is not None
    strips = cdiv(N, strip)
    # A strip's list entries past its count are never read.
    listed, count = bitmaps.new_empty((strips * strip,)), bitmaps.new_empty((strips,))
    from_bits = attributes is None or table is None
    if later and LISTING:
        return Rows(listed, count, bias=bias, listing=(bitmaps, None, None, live) if from_bits else tests)

    def plan_list() -> Launch:
        if attributes is None or table is None:
            return strips, (N, strip), {"num_warps": LIST_WARPS}
        sizes = N, attributes.stride(0), table.shape[0], strip, min(strip, LIST_BLOCK)
        return strips, sizes, {"num_warps": LIST_WARPS}

    if from_bits:
        launch(_list_bits_kernel, (number,), (bitmaps, live, listed, count), plan_list)
    else:
        launch(_list_kernel, (number,), (*tests, listed, count), plan_list)
    return Rows(listed, count, bias=bias)


def _nodes(N: int, plan: Plan) -> tuple[list[int], list[int]]:
    """Node counts and offsets per level, from the top; the groups come first in memory."""
    counts = count_nodes(N, plan.levels, plan.sizes.strip)
    return counts, [sum(counts[level + 1 :]) for level in range(len(counts))]


def _pick(
    terms: tuple[Tensor, Tensor | None, Tensor | None], items: Tensor, rows: Rows, filters: int, plan: Plan,
    key: tuple[int, int],
) -> Tensor:  # fmt: skip
    """(B, places) int32, each query's groups that hold its best rows, in row order; then -1."""
    B, N = terms[0].shape[0], items.shape[0]
    maxima = terms[0].new_empty((sum(_nodes(N, plan)[0]), B), dtype=torch.float32)
    _launch_scan(terms, items, rows, filters, plan, maxima, key)
    return _descend(maxima, rows, N, plan, key)


def _launch_scan(
    terms: tuple[Tensor, Tensor | None, Tensor | None], items: Tensor, rows: Rows, filters: int, plan: Plan,
    maxima: Tensor, key: tuple[Any, ...], certified: Tensor | None = None,
) -> None:  # fmt: skip
    """Scan: maxima for groups, nodes and strips; skips query blocks in which all are certified."""
    q, low, scale = terms
    (B, D), N, sizes = q.shape, items.shape[0], plan.sizes
    counts, starts = _nodes(N, plan)
    of_strips = plan.levels.index(sizes.strip)
    mode = 0 if rows.word is None else 1 if rows.which is None else 2 if filters <= 32 else 3
    if rows.starts is not None:
        mode = 4 if filters <= 32 else 5
    attributes, table, bitmaps, live = rows.listing or (None, rows.starts, None, rows.live)
    given = rows.listed, rows.counts, rows.word, rows.which, live, rows.bias
    tagged = rows.tagged
    beside_tags = (None,) * 5 if tagged is None else (tagged.words, tagged.table, tagged.high, tagged.low, tagged.scale)
    tensors = (q, low, scale, items, *given, maxima, attributes, table, bitmaps, certified, *beside_tags)

    def plan_scan() -> Launch:
        tile, blocks, unit = plan.tile, cdiv(B, plan.tile.queries), _unit(items)
        middle_at = starts[of_strips + 1] if sizes.middle else 0
        beside = (0 if attributes is None else attributes.stride(0), 0 if table is None else table.shape[0])
        columns = 0 if tagged is None else tagged.table.shape[1]
        width = 0 if tagged is None else tagged.width
        arguments = (
            B, N, blocks, *beside, q.stride(0), items.stride(0) // unit, middle_at, starts[of_strips],
            0 if tagged is None else tagged.words.stride(0), columns, D, sizes.group,
            sizes.middle, sizes.strip, mode, tile.queries, tile.rows, tile.depth, _precision(q), unit,
            min(LISTING, sizes.strip) if rows.listing else 0, tile.stages, width, tag_steps(columns, width),
        )  # fmt: skip
        return counts[of_strips] * blocks, arguments, {"num_warps": tile.warps}

    launch(_scan_kernel, key, tensors, plan_scan)


def _descend(
    maxima: Tensor, rows: Rows, N: int, plan: Plan, key: tuple[Any, ...], certified: Tensor | None = None
) -> Tensor:
    """(B, places) int32, the groups with the largest maxima; nothing is written for certified queries."""
    B, sizes, device = maxima.shape[1], plan.sizes, maxima.device
    counts, starts = _nodes(N, plan)
    for level in range(plan.levels.index(sizes.strip) - 1, -1, -1):
        _launch_fold(maxima, B, plan, counts, starts, level, key)
    picks = maxima.new_empty((B, sizes.places), dtype=torch.int32)

    def plan_pick() -> Launch:
        arities = [up // down for up, down in zip(plan.levels, plan.levels[1:], strict=False)]
        top = max(sizes.places, next_power_of_2(counts[0]))
        widest = max(top, *(sizes.places * arity for arity in arities))
        none = 4 - len(arities)
        arguments = (
            B, N, plan.groups, counts[0], *starts, *[0] * none, top, *plan.levels[1:], *[0] * none, *arities,
            *[0] * none, sizes.strip, sizes.places,
        )  # fmt: skip
        return B, arguments, {"num_warps": _warps(widest, device)}

    launch(_pick_kernel, key, (maxima, rows.counts, picks, certified), plan_pick)
    return picks


def _warps(keys: int, device: torch.device) -> int:
    # 16 keys per thread. A program has at most 1024 threads: 16 warps on AMD.
    return max(4, min(32 if facts.limits_registers(device) else 16, keys // 512))


def _launch_fold(
    maxima: Tensor, B: int, plan: Plan, counts: list[int], starts: list[int], level: int, key: tuple[Any, ...]
) -> None:
    """Compute a level's maxima from the level below."""
    block = 256

    def plan_fold() -> Launch:
        arity = plan.levels[level] // plan.levels[level + 1]
        arguments = counts[level], counts[level + 1], B, starts[level], starts[level + 1], arity, block
        return cdiv(counts[level] * B, block), arguments, {"num_warps": 4}

    launch(_fold_kernel, (*key, level), (maxima,), plan_fold)


def _best(
    query: Tensor, items: Tensor, rows: Rows, picks: Tensor, plan: Plan, scores: Tensor, found: Tensor,
    key: tuple[int, int],
) -> None:  # fmt: skip
    """Rescore the picked groups exactly, and write the k best rows to scores and found."""
    B, k, sizes = query.shape[0], scores.shape[1], plan.sizes
    K, G = plan.groups, plan.sizes.group
    candidates, of_rows = _rescore(query, items, rows, picks, plan, key)
    if sizes.places * G > KEYS:
        _choose_by_sorting(candidates, of_rows, scores, found)
        return
    out = next_power_of_2(k)
    room = query.new_empty((B, out), dtype=torch.int32)

    def plan_choose() -> Launch:
        # At least as many keys as results: few groups may have fewer rows than places.
        M = max(sizes.places * G, out)
        return B, (K * G, k, M, out), {"num_warps": _warps(M, query.device)}

    chosen = candidates, of_rows, room, scores, found
    launch(_choose_kernel, key, chosen, plan_choose)


def _rescore(
    query: Tensor, items: Tensor, rows: Rows, picks: Tensor, plan: Plan, key: tuple[Any, ...],
    certified: Tensor | None = None, best: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores and rows for the picked groups, and each group's maximum to best (B, groups); skips certified queries."""
    (B, D), N, sizes = query.shape, items.shape[0], plan.sizes
    K, G = plan.groups, plan.sizes.group
    candidates = query.new_empty((B, K * G), dtype=torch.float32)
    of_rows = query.new_empty((B, K * G), dtype=torch.int32)
    given = rows.listed, rows.counts, rows.word, rows.which, rows.live, rows.bias
    tagged = rows.tagged
    beside_tags = (None,) * 3 if tagged is None else (tagged.words, tagged.table, tagged.weights)
    tensors = (query, items, *given, picks, candidates, of_rows, rows.starts, certified, best, *beside_tags)

    def plan_rescore() -> Launch:
        depth = max(16, min(128, next_power_of_2(D)))
        unit = _unit(items)
        of_tags = (0, 0) if tagged is None else (tagged.words.stride(0), tagged.table.shape[1])
        arguments = (
            N, K, query.stride(0), items.stride(0) // unit, *of_tags, D, G, sizes.strip, sizes.places, depth, unit,
        )  # fmt: skip
        # No fused multiply-add, so that all compiled kernels round alike.
        return B * K, arguments, {"num_warps": 4, "enable_fp_fusion": False}

    launch(_rescore_kernel, key, tensors, plan_rescore)
    return candidates, of_rows


def _choose_by_sorting(candidates: Tensor, of_rows: Tensor, scores: Tensor, found: Tensor) -> None:
    """Like the kernel, for more candidates than a program can select among."""
    k = scores.shape[1]
    bits = candidates.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    lacking = 0x7FFFFFFF - torch.arange(candidates.shape[1], device=candidates.device)
    many = min(k, candidates.shape[1])
    at = torch.topk((ordered << 32) | lacking, many, dim=1).indices
    best = candidates.gather(1, at)
    scores.fill_(-torch.inf)
    found.fill_(-1)
    scores[:, :many] = best
    found[:, :many] = of_rows.gather(1, at).long().masked_fill(best == -torch.inf, -1)


def _unit(items: Tensor) -> int:
    """The largest power of two, up to 16, that divides the row stride."""
    return math.gcd(items.stride(0), 16)


def _precision(q: Tensor) -> str:
    """fp32 precision: three TF32 products, which drop 2⁻²² of each product, or AMD's native products."""
    return "tf32x3" if q.dtype == torch.float32 and facts.limits_registers(q.device) else "ieee"
