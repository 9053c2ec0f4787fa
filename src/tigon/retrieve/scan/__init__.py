"""Exact top-k search: the k rows with the highest scores q · xᵢ + bᵢ that pass a filter, without storing the scores.

Order items by (score descending, row ascending) and split them into groups. The k best items lie in the k groups with
the best maxima: if an item in another group were among them, k groups would each hold a better item. A pass over the
items therefore writes only each group's maximum, the best groups are scored again, and their k best items are the
result. No threshold is guessed, and no item order is unfavourable.

Source: the filter before the scan is LiNR's, Borisyuk et al. 2024, https://arxiv.org/abs/2407.13218.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from tigon.kernels import cdiv, check_plain, check_tensors, use_triton
from tigon.retrieve.scan.bits import RowBits
from tigon.retrieve.scan.coded import _coded_topk
from tigon.retrieve.scan.codes import CodedItems
from tigon.retrieve.scan.encode import encode_items
from tigon.retrieve.scan.filters import RowFilter, stack_tables
from tigon.retrieve.scan.launches import _filtered_topk
from tigon.retrieve.scan.plan import choose_kind
from tigon.retrieve.scan.reference import filtered_topk_reference
from tigon.retrieve.scan.sign import MOST_CANDIDATES, Where, check_bits, count_bins, uses_signs
from tigon.retrieve.scan.sign_launches import sign_topk
from tigon.retrieve.scan.tags import RowTags

__all__ = ["CodedItems", "RowBits", "RowFilter", "RowTags", "encode_items", "filtered_topk", "filtered_topk_reference"]

Plan = Literal["auto", "dense", "compact", "bitmaps", "codes"]
# Beyond that, a query's groups no longer fit the programs that select among them.
MOST = 2048
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


def filtered_topk(
    query: Tensor,
    items: Tensor | CodedItems,
    k: int,
    *,
    attributes: Tensor | None = None,
    where: RowFilter | Sequence[RowFilter | None] | RowBits | None = None,
    live: Tensor | None = None,
    bias: Tensor | None = None,
    tags: RowTags | None = None,
    tag_weights: Tensor | None = None,
    plan: Plan = "auto",
    share: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k best rows of items that pass, for each query: exactly the result of scoring all rows.

    Args:
        query: (B, D): fp16, bf16 or fp32.
        items: (N, D): fp16, bf16, float8_e4m3fn or fp32, with any row stride. `CodedItems` are rows with 8-bit codes,
            which a search reads first where that moves fewer bytes, with the same result. Sign codes make the
            search approximate where they are read: some of the best rows may be missing.
        k: 1 to 2048.
        attributes: (W, N) int64, W words per row, tested by filters and tags. The highest bit is never used.
        where: a `tigon.RowFilter` for all queries, or a sequence with a filter per query, None for all rows. The same
            filter object is tested only once. Create filters with `device=` if the call is compiled. A `tigon.RowBits`
            replaces filters with precomputed bits: a search then reads N/8 bytes per filter, and no attributes.
        live: (⌈N/32⌉,) int32. Bit r % 32 in number r // 32 says that row r exists. Default: all rows exist.
        bias: (N,) fp32, added to a row's scores.
        tags: T attribute values. Create tags with `device=` if the call is compiled.
        tag_weights: (B, T) fp32, finite: per query, the score added to a row for having each value.
            Codes, signs included, are then not read: the result is exact.
        plan: the scan strategy on a GPU: "dense" reads all rows; "compact" reads the rows that pass one filter;
            "bitmaps" reads all rows, with a filter per query; "codes" reads the signs of all rows that pass at most one
            filter. "auto" picks the plan that moves the fewest bytes. Without a filter, the first three read all rows.
            The result is the same, except with signs.
        share: the fraction of rows that pass, from 0 to 1, if known. Used only to choose the plan.

    Returns: scores (B, k) fp32, descending, and rows (B, k) int64; equal scores are ordered by row. If fewer
        than k rows pass, the rest is row -1 with score -inf. Rows with score NaN or -inf are never returned. For
        fp64 the scores are fp64.

    Raises: ValueError for mismatched shapes, dtypes, devices and options, and for tensors that require a gradient: the
        result has none.

    Scores are fp32 sums over the stored numbers. On a GPU the summation order depends only on D and k: a query gets the
    same bits in every batch and plan. On a CPU torch computes the products, whose last bits differ between a single
    query and a batch. Tag weights are added last, in order of word and value; tags with weight 0 change no bit.

    Rows may hold infinities: their scores are then inf, -inf or NaN. This does not hold with per-query filters: a
    row with score inf that fails a filter may keep rows that pass out of a result.

    Replaces::

        s = query.float() @ items.float().t()
        s[:, ~where.mask(attributes)] = -torch.inf
        scores, rows = s.sort(dim=1, descending=True, stable=True)
        scores, rows = scores[:, :k], rows[:, :k]
    """
    coded = items if isinstance(items, CodedItems) else None
    items = items.rows if isinstance(items, CodedItems) else items
    _check(query, items, k, plan, share)
    if coded is not None:
        _check_codes(coded, k)
    _check_rows(query, items.shape[0], attributes, live, bias)
    if _check_tags(query, attributes, tags, tag_weights, plan):
        coded = None
    where = _check_filters(query, items.shape[0], attributes, where, plan)
    given: dict[str, Tensor | None] = {
        "items": items, "attributes": attributes, "live": live, "bias": bias, "tag_weights": tag_weights,
    }  # fmt: skip
    if isinstance(where, RowBits):
        given |= {"where.bits": where.bits, "where.which": where.which, "where.starts": where.starts}
    _check_placement(query, given)
    if uses_signs(query, coded, where, plan, share) and coded is not None:
        return sign_topk(query, coded, k, attributes, where, live, bias)
    # use_triton accepts the floats in DTYPES; the kernels read fp8 as bytes.
    if not use_triton(query, None if items.dtype == torch.float8_e4m3fn else items, bias):
        return filtered_topk_reference(
            query, items, k, attributes=attributes, where=where, live=live, bias=bias, tags=tags,
            tag_weights=tag_weights,
        )  # fmt: skip
    if isinstance(where, RowBits):
        kind = choose_kind(where.filters if where.which is None else 2, share, plan)
        which, starts = (where.which, where.beginnings()) if kind == "bitmaps" else (None, None)
        if kind == "bitmaps" and which is None:
            which = query.new_zeros(query.shape[0], dtype=torch.int32)
        args: tuple[Any, ...] = None, starts, where.bits, which, where.filters, live, bias, kind
    else:
        kind = choose_kind(0 if where is None else 1 if isinstance(where, RowFilter) else 2, share, plan)
        filters, tables = stack_tables(where, kind, query.device, query.shape[0])
        args = attributes, *tables, filters, live, bias, kind
    if coded is not None and coded.scales is not None and coded.error is not None:  # 8-bit codes, no signs
        return _coded_topk(query, items, coded.codes, coded.scales, coded.error, k, *args, share)[:2]
    if tags is None or tag_weights is None or not len(tags):
        return _filtered_topk(query, items, k, *args)
    moved = tags.to(query.device) if tags.table.device != query.device else tags
    weights = query.new_zeros((query.shape[0], moved.table.shape[1]), dtype=torch.float32)
    weights = weights.index_copy(1, moved.places, tag_weights.float())
    return _filtered_topk(query, items, k, *args, attributes, moved.table, weights, moved.width)


def _check(query: Tensor, items: Tensor, k: int, plan: str, share: float | None) -> None:
    check_plain("filtered_topk", query=query, items=items)
    for name, t in (("query", query), ("items", items)):
        if t.dim() != 2 or t.shape[1] < 1:
            raise ValueError(
                f"filtered_topk: {name} must have two dimensions, (B, D) for query and (N, D) for items, D at least 1, "
                f"got {tuple(t.shape)}."
            )
    if query.shape[1] != items.shape[1]:
        raise ValueError(f"filtered_topk: query must be as wide as items, {items.shape[1]}, got {tuple(query.shape)}.")
    if query.dtype not in FLOATS:
        raise ValueError(f"filtered_topk: query must be fp16, bf16 or fp32, got {query.dtype}.")
    if items.dtype not in FLOATS and items.dtype != torch.float8_e4m3fn:
        raise ValueError(f"filtered_topk: items must be fp16, bf16, float8_e4m3fn or fp32, got {items.dtype}.")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST:
        raise ValueError(f"filtered_topk: k must be an int from 1 to {MOST}, got {k!r}.")
    if plan not in get_args(Plan):
        raise ValueError(f"filtered_topk: plan must be one of {', '.join(get_args(Plan))}, got {plan!r}.")
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"filtered_topk: share must be from 0 to 1, got {share}.")
    if items.shape[0] > 2**31 - 4096:  # so that row numbers in the last strip fit 32 bits
        raise ValueError(f"filtered_topk: items must be at most 2**31 - 4096 rows, got {items.shape[0]}.")


def _check_placement(query: Tensor, given: dict[str, Tensor | None]) -> None:
    """All tensors are on the query's device, and none requires a gradient."""
    for name, t in given.items():
        if t is not None and t.device != query.device:
            raise ValueError(f"filtered_topk: {name} must be on {query.device}, as query is, got {t.device}.")
    if torch.is_grad_enabled():
        for name, t in (("query", query), *given.items()):
            if t is not None and t.requires_grad:
                raise ValueError(
                    f"filtered_topk: {name} must not require a gradient, since the result has none, got a tensor that "
                    "does: search under torch.no_grad(), or detach the tensor, and rescore the found rows."
                )


def _check_rows(query: Tensor, N: int, attributes: Tensor | None, live: Tensor | None, bias: Tensor | None) -> None:
    check_tensors("filtered_topk", attributes=attributes, live=live, bias=bias)
    if attributes is not None and (
        attributes.dim() != 2 or attributes.shape[1] != N or attributes.dtype != torch.int64
    ):
        raise ValueError(
            f"filtered_topk: attributes must be (W, {N}) int64, a column for each row of items, got "
            f"{tuple(attributes.shape)} {attributes.dtype}."
        )
    words = (N + 31) // 32
    if live is not None and (live.shape != (words,) or live.dtype != torch.int32):
        raise ValueError(
            f"filtered_topk: live must be ({words},) int32, a bit for each of {N} rows, got {tuple(live.shape)} "
            f"{live.dtype}."
        )
    if bias is not None and (bias.shape != (N,) or bias.dtype not in (torch.float32, torch.float64)):
        raise ValueError(f"filtered_topk: bias must be ({N},) fp32, got {tuple(bias.shape)} {bias.dtype}.")


def _check_tags(
    query: Tensor, attributes: Tensor | None, tags: RowTags | None, tag_weights: Tensor | None, plan: str
) -> bool:
    """Whether there are tags."""
    if tags is None and tag_weights is None:
        return False
    if not isinstance(tags, RowTags):
        raise ValueError(f"filtered_topk: tags must be a tigon.RowTags beside tag_weights, got {type(tags).__name__}.")
    check_tensors("filtered_topk", tag_weights=tag_weights)
    wanted = query.shape[0], len(tags)
    floats = torch.float32, torch.float64
    if tag_weights is None or tag_weights.shape != wanted or tag_weights.dtype not in floats:
        got = "None" if tag_weights is None else f"{tuple(tag_weights.shape)} {tag_weights.dtype}"
        raise ValueError(f"filtered_topk: tag_weights must be {wanted} fp32, a weight per query and tag, got {got}.")
    have = 0 if attributes is None else attributes.shape[0]
    if have < tags.words:
        raise ValueError(f"filtered_topk: attributes must have the {tags.words} words that the tags test, got {have}.")
    if plan == "codes":
        raise ValueError(
            "filtered_topk: plan must not be 'codes' with tags, which sign codes do not cover, got 'codes'."
        )
    return True


def _check_codes(coded: CodedItems, k: int) -> None:
    (N, D), device, projection = coded.rows.shape, coded.rows.device, coded.projection
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]]
    if projection is None:
        wanted = {"codes": ((N, D), torch.int8), "scales": ((N,), torch.float32), "error": ((2,), torch.float32)}
    else:
        bits = projection.shape[-1]
        check_bits("filtered_topk: projection of items", bits)
        wanted = {
            "codes": ((N, bits // 32), torch.int32), "projection": ((cdiv(D, count_bins(D, bits)), bits), torch.int32),
            **({} if coded.scales is None else {"scales": ((N,), torch.bfloat16)}),
        }  # fmt: skip
        many = coded.candidates
        if many is not None and (type(many) is not int or not k <= many <= MOST_CANDIDATES):
            raise ValueError(
                f"filtered_topk: candidates of items must be an int from k, {k}, to {MOST_CANDIDATES}, got {many!r}."
            )
    for name, (shape, dtype) in wanted.items():
        t = getattr(coded, name)
        if not isinstance(t, Tensor) or t.shape != shape or t.dtype != dtype or t.device != device:
            got = f"{tuple(t.shape)} {t.dtype} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(
                f"filtered_topk: {name} of items must be {shape} {str(dtype).removeprefix('torch.')} on {device}, as "
                f"encode_items returns it, got {got}."
            )


def _check_filters(query: Tensor, rows: int, attributes: Tensor | None, where: Where | None, plan: str) -> Where | None:
    """The filter for all queries, or a list with a filter per query; None if all rows pass."""
    if where is None:
        return None
    if isinstance(where, RowBits):
        return _check_bits(query, rows, where, plan)
    if isinstance(where, RowFilter):
        given: Sequence[RowFilter | None] = [where]
    else:
        if isinstance(where, (str, Tensor)) or not isinstance(where, Sequence):
            raise ValueError(
                f"filtered_topk: where must be a tigon.RowFilter or a sequence of them, got {type(where).__name__}."
            )
        given = cast(Sequence[RowFilter | None], where)
        if len(given) != query.shape[0]:
            raise ValueError(
                f"filtered_topk: where must have a filter for each of {query.shape[0]} queries, got {len(given)}."
            )
    words = 0
    for f in given:
        if f is not None:
            if not isinstance(f, RowFilter):
                raise ValueError(f"filtered_topk: where must hold tigon.RowFilters or None, got {type(f).__name__}.")
            words = max(words, f.words)
    if all(f is None for f in given):
        return None
    if attributes is None:
        raise ValueError("filtered_topk: attributes must be the words that the filters test, got None.")
    if words > attributes.shape[0]:
        raise ValueError(
            f"filtered_topk: attributes must have the {words} words that the filters test, got {attributes.shape[0]}."
        )
    first = given[0]
    if first is not None and all(f is first for f in given):
        return first
    if plan in ("dense", "compact"):
        raise ValueError(
            f"filtered_topk: plan must be 'bitmaps' or 'auto' where each query has a filter, got {plan!r}."
        )
    return given


def _check_bits(query: Tensor, rows: int, where: RowBits, plan: str) -> RowBits:
    check_tensors("filtered_topk", bits=where.bits, which=where.which, starts=where.starts)
    bits, words, B = where.bits, (rows + 31) // 32, query.shape[0]
    if bits.dim() != 2 or bits.shape[1] != words or not len(bits) or bits.dtype != torch.int32:
        raise ValueError(
            f"filtered_topk: where.bits must be (filters, {words}) int32, a bit for each of {rows} rows, got "
            f"{tuple(bits.shape)} {bits.dtype}."
        )
    if bits.stride(1) != 1 and words > 1:
        raise ValueError(f"filtered_topk: where.bits must have contiguous rows, got strides {bits.stride()}.")
    for name, t, dtype, size in (("which", where.which, torch.int32, B), ("starts", where.starts, torch.int64, None)):
        if t is not None and (t.dim() != 1 or t.dtype != dtype or (size is not None and len(t) != size)):
            raise ValueError(
                f"filtered_topk: where.{name} must be ({B if size is not None else 'filters'},) {str(dtype)[6:]}, got "
                f"{tuple(t.shape)} {t.dtype}."
            )
    if where.which is not None and plan in ("dense", "compact"):
        raise ValueError(
            f"filtered_topk: plan must be 'bitmaps' or 'auto' where each query has a filter, got {plan!r}."
        )
    return where
