"""Search by signs: whether signs are used, checks, and dispatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels import cdiv, use_triton
from tigon.retrieve.scan.bits import RowBits
from tigon.retrieve.scan.codes import CodedItems
from tigon.retrieve.scan.filters import RowFilter, stack_tables
from tigon.retrieve.scan.sign import check_bits, count_bins, count_candidates, pays, sign_topk_reference
from tigon.retrieve.scan.sign_launches import _sign_topk

Where = RowFilter | Sequence[RowFilter | None] | RowBits
# Maximum number of candidates per query.
MOST_CANDIDATES = 65536


def check_signs(coded: CodedItems, k: int) -> None:
    (N, D), device, name = coded.rows.shape, coded.rows.device, "filtered_topk"
    assert coded.projection is not None
    bits = coded.projection.shape[-1]
    check_bits(f"{name}: projection of items", bits)
    wanted = {
        "codes": ((N, bits // 32), torch.int32), "scales": ((N,), torch.bfloat16),
        "projection": ((cdiv(D, count_bins(D, bits)), bits), torch.int32),
    }  # fmt: skip
    for part, (shape, dtype) in wanted.items():
        t = getattr(coded, part)
        if part == "scales" and t is None:
            continue
        if not isinstance(t, Tensor) or t.shape != shape or t.dtype != dtype or t.device != device:
            got = f"{tuple(t.shape)} {t.dtype} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(
                f"{name}: {part} of items must be {shape} {str(dtype).removeprefix('torch.')} on {device}, as "
                f"encode_items makes it, got {got}."
            )
    many = coded.candidates
    if many is not None and (isinstance(many, bool) or not isinstance(many, int) or not k <= many <= MOST_CANDIDATES):
        raise ValueError(f"{name}: candidates of items must be an int from k, {k}, to {MOST_CANDIDATES}, got {many!r}.")


def uses_signs(query: Tensor, coded: CodedItems | None, where: Where | None, plan: str, share: float | None) -> bool:
    """Whether a search reads signs. With a filter per query it reads the rows, which cost as much for all queries."""
    signs = coded is not None and coded.projection is not None
    one = where is None or isinstance(where, RowFilter) or (isinstance(where, RowBits) and where.which is None)
    if plan == "codes" and not (signs and one):
        got = "another kind of items" if not signs else "a filter for each query"
        raise ValueError(
            "filtered_topk: plan may be 'codes' for items with signs, as encode_items(rows, 'sign') makes them, and at "
            f"most one filter, got {got}."
        )
    if coded is None or coded.projection is None or not one or plan not in ("auto", "codes"):
        return False
    passing = None if where is None else 0.5 if share is None else share
    bits = coded.projection.shape[1]
    return plan == "codes" or pays(query.shape[0], coded.rows, bits, coded.scales is not None, passing)


def sign_topk(
    query: Tensor, coded: CodedItems, k: int, attributes: Tensor | None, where: Where | None, live: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, codes, scales, projection = coded.rows, coded.codes, coded.scales, coded.projection
    assert projection is not None
    assert where is None or isinstance(where, (RowFilter, RowBits))
    many = count_candidates(k, coded.candidates)
    if not use_triton(query, None if rows.dtype == torch.float8_e4m3fn else rows, bias):
        return sign_topk_reference(
            query, rows, codes, scales, projection, k, many, attributes=attributes, where=where, live=live, bias=bias
        )
    table, bitmaps = None, None
    if isinstance(where, RowBits):
        attributes, bitmaps = None, where.bits
    elif where is not None:
        table, bitmaps, _ = stack_tables(where, "compact", query.device, query.shape[0])[1]
    else:
        attributes = None
    return _sign_topk(query, rows, codes, scales, projection, k, many, attributes, table, bitmaps, live, bias)
