"""The factors of experts' weight gradients: which row stands in which column, and scales folded for each expert.

A product sums each expert's columns, which begin at multiples of 16 and are at least 16, filled up with zeros: products
take no empty group. The host knows only how many columns there are at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import do_not_specialize, jit, launch, next_power_of_2, tl, use_triton
from tigon.kernels.tiles.fp8 import compute_amax_tile, larger
from tigon.ops.experts.routing import Routing
from tigon.ops.fp8.recipe import ALIGNMENT, round_up
from tigon.ops.fp8.reference import read_rows


class Columns(NamedTuple):
    """The columns of experts' factors, P of them, all int32.

    rows: (P,), the row sorted by expert, −1 for a column of zeros. tokens: (P,), the row's token, or −1. ends: (E,),
    where each expert's columns end.
    """

    rows: Tensor
    tokens: Tensor
    ends: Tensor


def list_columns(routing: Routing, top_k: int) -> Columns:
    """The columns of sorted choices (S,), top_k of each token."""
    S, E = len(routing.order), len(routing.offsets) - 1
    P = round_up(S) + ALIGNMENT * E
    if not _uses_kernels(routing.order):
        return _list_columns_reference(routing, top_k, P)
    columns = Columns(*(routing.order.new_empty(n) for n in (P, P, E)))
    block, warps = _tile()
    launch(
        _list_columns_kernel, (S, E, top_k), (routing.order, routing.offsets, *columns),
        lambda: (E + 1, (E, P, top_k, next_power_of_2(E), block), {"num_warps": warps}),
    )  # fmt: skip
    return columns


def fold_expert_scales(into: Tensor, weight: Tensor | None, other: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """into · weight / c in columns (P,), with zeros in columns of zeros; and c = max into · |weight| · other, (E,).

    into, weight, other: (S, 1) fp32, for each row sorted by expert. c is at least 2⁻¹²⁰.
    """
    E, P = len(columns.ends), len(columns.rows)
    if not _uses_kernels(into):
        return _fold_expert_scales_reference(into, weight, other, columns)
    factor, c = into.new_empty(P), into.new_empty(E)
    block, warps = _tile()
    launch(
        _fold_expert_scales_kernel, (P, E, weight is None), (into, weight, other, *columns[::2], factor, c),
        lambda: (E + 1, (E, P, block), {"num_warps": warps}),
    )  # fmt: skip
    return factor, c


def _uses_kernels(t: Tensor) -> bool:
    # use_triton expects a float tensor of two or more bytes on t's device.
    return bool(t.numel()) and use_triton(t.new_empty(0, dtype=torch.float32))


def _list_columns_reference(routing: Routing, top_k: int, P: int) -> Columns:
    counts = routing.offsets.diff()
    padded = ((counts + ALIGNMENT - 1) // ALIGNMENT).clamp(min=1) * ALIGNMENT
    ends = padded.cumsum(0)
    column = torch.arange(P, device=ends.device)
    expert = torch.searchsorted(ends, column, right=True)
    inside = expert.clamp(max=len(counts) - 1)
    within = column - (ends - padded)[inside]
    exists = (expert < len(counts)) & (within < counts[inside])
    row = torch.where(exists, routing.offsets[inside] + within, -1)
    token = torch.where(exists, read_rows(routing.order[:, None], row)[:, 0] // top_k, -1)
    return Columns(row.int(), token.int(), ends.int())


def _fold_expert_scales_reference(
    into: Tensor, weight: Tensor | None, other: Tensor, columns: Columns
) -> tuple[Tensor, Tensor]:
    E, P = len(columns.ends), len(columns.rows)
    factor, size = into, into * other
    if weight is not None:
        factor, size = into * weight, size * weight.abs()
    factor, size = (read_rows(t, columns.rows)[:, 0] for t in (factor, size))
    expert = torch.searchsorted(columns.ends, torch.arange(P, device=into.device, dtype=torch.int32), right=True)
    c = into.new_full((E + 1,), 2.0**-120).scatter_reduce(0, expert, size, "amax")
    return torch.where(columns.rows >= 0, factor / c[expert], 0.0), c[:E].contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


# A program: one expert's columns; the last program those behind all experts.
#   order, offsets        `Routing`
#   rows, tokens, ends    `Columns`
@jit
@do_not_specialize("P")
def _list_columns_kernel(
    order_ptr, offsets_ptr, rows_ptr, tokens_ptr, ends_ptr, E, P,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    begins = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0)
    padded = tl.where(experts < E, tl.maximum((ends - begins + 15) // 16, 1) * 16, 0)
    start = tl.sum(tl.where(experts < expert, padded, 0), 0)
    stop = start + tl.sum(tl.where(experts == expert, padded, 0), 0)
    if expert < E:
        tl.store(ends_ptr + expert, stop)
    else:
        stop = P
    row = tl.load(offsets_ptr + expert)
    last = tl.load(offsets_ptr + tl.minimum(expert + 1, E))
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        rows = row + column - start
        exists = rows < last
        slot = tl.load(order_ptr + rows, mask=exists, other=0)
        tl.store(rows_ptr + column, tl.where(exists, rows, -1), mask=column < stop)
        tl.store(tokens_ptr + column, tl.where(exists, slot // TOP_K, -1), mask=column < stop)


@jit
def _load_scales(ptr, row):
    return tl.load(ptr + row, mask=row >= 0, other=0.0)


# A program: one expert's columns, read for the maximum and once more for the quotients; the last program those behind
# all experts.
#   into, weight, other    (S,); weight may be None
#   rows, ends             `Columns`
#   factor, c              into · weight / c (P,), and c (E,)
@jit
@do_not_specialize("P")
def _fold_expert_scales_kernel(
    into_ptr, weight_ptr, other_ptr, rows_ptr, ends_ptr, factor_ptr, c_ptr, E, P, BLOCK: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends_ptr + expert, mask=expert < E, other=P)
    top = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + column, mask=column < stop, other=-1)
        size = _load_scales(into_ptr, row) * _load_scales(other_ptr, row)
        if weight_ptr is not None:
            size *= tl.abs(_load_scales(weight_ptr, row))
        top = larger(top, size)
    c = larger(compute_amax_tile(top, 0), 7.52316384526264e-37)  # 2⁻¹²⁰
    tl.store(c_ptr + expert, c, mask=expert < E)
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + column, mask=column < stop, other=-1)
        factor = _load_scales(into_ptr, row)
        if weight_ptr is not None:
            factor *= _load_scales(weight_ptr, row)
        # Columns of zeros stay zeros where c is NaN.
        tl.store(factor_ptr + column, tl.where(row >= 0, tl.math.div_rn(factor, c), 0.0), mask=column < stop)


# --------------------------------------------------------------------------------------------------------- launches


def _tile() -> tuple[int, int]:
    """Columns that a program reads at a time, and warps: an expert has hundreds to thousands of rows."""
    return 1024, 8
