"""Embedding-bag launches: forward, the weight's dense gradient, the factors' gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan, SymInt, cdiv, launch, launcher, next_power_of_2, view_rows
from tigon.ops.embedding import sum_by_id
from tigon.ops.embedding_bag.kernels import (
    _embedding_bag_factors_kernel,
    _embedding_bag_fwd_kernel,
    _embedding_bag_tokens_kernel,
)


class BagTile(NamedTuple):
    """The forward kernel's tile.

    bags, columns: per program; rows: loaded at a time per bag; pairs: load two ids at once, for bags with an even
    length.
    """

    bags: int
    columns: int
    rows: int
    pairs: bool
    warps: int


def _fwd_tile(H: int, longest: int | None, size: int) -> BagTile:
    """longest: values per bag, None with offsets. size: bytes per table element."""
    block_n = min(1024, max(4, next_power_of_2(H)))
    if longest == 1:
        return BagTile(max(1, 1024 // block_n), block_n, 1, False, 1)
    # Rows of one or two memory sectors: keep eight rows per bag in flight. A single warp never waits for others.
    narrow = block_n * size <= 64
    numbers, rows, warps = (512, 8, 1) if narrow else (1024, 4, 2)
    bags = max(1, numbers // block_n)
    if longest is None:
        return BagTile(bags, block_n, 4, False, warps)
    return BagTile(bags, block_n, min(rows, next_power_of_2(longest)), narrow and longest % 2 == 0 < longest, warps)


def _tokens_tile() -> tuple[int, int, int]:
    """Return bags, values per step and bag, and warps."""
    return 64, 16, 4


def _factors_tile(H: int) -> tuple[int, int, int]:
    """Return values, columns and warps."""
    block_n = min(256, next_power_of_2(H))
    return max(1, 1024 // block_n), block_n, 4


def measure_bags(values: Tensor, offsets: Tensor | None) -> tuple[int, int]:
    """Return the bag count and the bag length, which is 1 with offsets."""
    return (values.shape[0], values.shape[1]) if offsets is None else (offsets.shape[0] - 1, 1)


def _pairs(scale_offset: Tensor) -> Tensor:
    """View (V, 2) fp16 as (V, 1) int32, for a single load; copy if unaligned."""
    if scale_offset.data_ptr() % 4:
        scale_offset = scale_offset.clone()
    return scale_offset.view(torch.int32)


def bag_sums(
    table: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None, factors: Tensor | None,
    scale_offset: Tensor | None, mean: bool, padding_idx: int, y: Tensor,
) -> None:  # fmt: skip
    """Write the table's row sums to y (bags, D), dequantized by scale_offset (V, 2) if given."""
    if not y.numel():
        return
    w = view_rows(table)
    values = values.contiguous()
    offsets, fields, factors, scale_offset = (
        None if t is None else t.contiguous() for t in (offsets, fields, factors, scale_offset)
    )
    if scale_offset is not None:
        scale_offset = _pairs(scale_offset)
    (B, L), (V, H), M, stride = measure_bags(values, offsets), w.shape, values.numel(), w.stride(0)
    count = 1 if fields is None else fields.shape[0] - 1
    sizes = B, M, V, count, H, stride, L, padding_idx
    # Triton uses 16-byte loads only if 16 divides all of these, and else loads single elements.
    words = scale_offset is not None and any(n % 16 for n in (w.data_ptr(), stride, H))
    dtypes = tuple(None if t is None else t.dtype for t in (values, w, y, offsets, fields, factors, scale_offset))

    def plan() -> Plan:
        tile = _fwd_tile(H, L if offsets is None else None, w.element_size())
        constants = mean, offsets is None and L == 1, tile.pairs, words, tile.bags, tile.columns, tile.rows
        return cdiv(B, tile.bags) * cdiv(H, tile.columns), (*sizes, *constants), {"num_warps": tile.warps}

    tensors = values, w, y, offsets, fields, factors, scale_offset
    launch(_embedding_bag_fwd_kernel, (*sizes, mean, words, *dtypes), tensors, plan)


def _embedding_bag_fwd_fake(
    weight: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None, factors: Tensor | None, mean: bool,
    padding_idx: int, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return weight.new_empty((measure_bags(values, offsets)[0], weight.shape[1]), dtype=dtype)


@launcher(_embedding_bag_fwd_fake)
def embedding_bag_fwd(
    weight: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None, factors: Tensor | None, mean: bool,
    padding_idx: int, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    y = _embedding_bag_fwd_fake(weight, values, offsets, fields, factors, mean, padding_idx, dtype)
    bag_sums(weight, values, offsets, fields, factors, None, mean, padding_idx, y)
    return y


def locate_values(
    values: Tensor, offsets: Tensor | None, fields: Tensor | None, V: int, mean: bool, padding_idx: int
) -> tuple[Tensor, int, Tensor | None, Tensor | None]:
    """Return each value's row, the id or row to skip, each value's bag if lengths differ, and 1 / count for means."""
    values, M, (B, L) = values.contiguous(), values.numel(), measure_bags(values, offsets)
    ragged, of_fields = offsets is not None, fields is not None
    if not (ragged or of_fields or mean):
        return values, padding_idx, None, None
    rows = values.new_full((M,), V, dtype=torch.int32) if ragged or of_fields else None
    bag = values.new_empty(M, dtype=torch.int32) if ragged else None
    scale = values.new_empty(B, dtype=torch.float32) if mean else None
    sizes = B, M, V, 1 if fields is None else fields.shape[0] - 1, L, padding_idx

    def plan() -> Plan:
        block_b, block_l, warps = _tokens_tile()
        return cdiv(B, block_b), (*sizes, block_b, block_l), {"num_warps": warps}

    tensors = values, *(None if t is None else t.contiguous() for t in (offsets, fields)), rows, bag, scale
    launch(_embedding_bag_tokens_kernel, (*sizes, values.dtype, ragged, of_fields, mean), tensors, plan)
    return (values, padding_idx, bag, scale) if rows is None else (rows, -1, bag, scale)


def _embedding_bag_bwd_fake(
    dy: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None, factors: Tensor | None, classes: int,
    mean: bool, padding_idx: int, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return dy.new_empty((classes, dy.shape[-1]), dtype=dtype)


@launcher(_embedding_bag_bwd_fake)
def embedding_bag_bwd(
    dy: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None, factors: Tensor | None, classes: SymInt,
    mean: bool, padding_idx: int, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    dw = _embedding_bag_bwd_fake(dy, values, offsets, fields, factors, classes, mean, padding_idx, dtype)
    if not dw.numel() or not values.numel():  # no values: no kernel writes dW
        return dw.zero_()
    ids, padding, bag, scale = locate_values(values, offsets, fields, classes, mean, padding_idx)
    scale = scale if factors is None else factors.contiguous()
    sum_by_id(dy, ids, padding, dw, bag=bag, length=measure_bags(values, offsets)[1], scale=scale, by_bag=mean)
    return dw


def _embedding_bag_factors_fake(dy: Tensor, weight: Tensor, factors: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(factors, memory_format=torch.contiguous_format)


@launcher(_embedding_bag_factors_fake)
def embedding_bag_factors(
    dy: Tensor, weight: Tensor, factors: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None,
    padding_idx: int,
) -> Tensor:  # fmt: skip
    df = _embedding_bag_factors_fake(dy, weight, factors, values, offsets, fields, padding_idx)
    if not df.numel() or not dy.shape[-1]:
        return df.zero_()
    dy, w = view_rows(dy), view_rows(weight)
    M, (V, H), L = values.numel(), w.shape, measure_bags(values, offsets)[1]
    ids, padding, bag, _ = locate_values(values, offsets, fields, V, False, padding_idx)
    sizes = M, V, H, dy.stride(0), w.stride(0), L, padding

    def plan() -> Plan:
        block_m, block_n, warps = _factors_tile(H)
        return cdiv(M, block_m), (*sizes, block_m, block_n), {"num_warps": warps}

    key = (*sizes, ids.dtype, dy.dtype, w.dtype, df.dtype, bag is None)
    launch(_embedding_bag_factors_kernel, key, (ids, dy, w, bag, df), plan)
    return df
