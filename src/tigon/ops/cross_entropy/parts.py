"""Cross entropy of few wide rows, each split into parts for several programs; see `tigon.kernels.row_parts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import Parts, do_not_specialize, fold_warps, jit, launch, part_tile, tl
from tigon.kernels.tiles.constants import LOG2E, LOWEST
from tigon.kernels.tiles.parts import locate_part_of_row, numbers_of_parts
from tigon.ops.cross_entropy.kernels import NOWHERE, row_sums, store_ignored, store_row

# Numbers per part: maximum, Σ exp, Σ w·z, Σ w, the largest logit and its column.
SUMS = tl.constexpr(6)


# A program: a part of a row, `width` columns.
#   partial   (M, SUMS, P) fp32; unwritten and unread for ignored rows
@jit
@do_not_specialize("ignore_index", "P")
def _cross_entropy_parts_kernel(
    logits_ptr, target_ptr, weight_ptr, partial_ptr, V, stride_m, ignore_index, softcap, scale, P, width,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, PREDICT: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of a part of a row."""
    row, start, columns = locate_part_of_row(P, width, V)
    if tl.load(target_ptr + row) == ignore_index:
        return
    if weight_ptr is not None:
        weight_ptr += start
    top, total, _, sum_z, sum_w, peak, column = row_sums(
        logits_ptr + row * stride_m + start, weight_ptr, columns, softcap, scale,
        SMOOTHING, SOFTCAP, PREDICT, "", EDGES, DEPTH, BLOCK,
    )  # fmt: skip
    partial_ptr += row * SUMS * P + tl.program_id(0) % P
    tl.store(partial_ptr, top)
    tl.store(partial_ptr + P, total)
    if SMOOTHING:
        tl.store(partial_ptr + 2 * P, sum_z)
        tl.store(partial_ptr + 3 * P, sum_w)
    if PREDICT:
        tl.store(partial_ptr + 4 * P, peak)
        # int32 stored bitwise: fp32 cannot count beyond 2**24.
        tl.store(partial_ptr + 5 * P, (start + column).to(tl.float32, bitcast=True))


# A program: one row. Combines the sums of the row's parts and writes as `_cross_entropy_fwd_kernel`.
@jit
@do_not_specialize("ignore_index", "P")
def _cross_entropy_fold_kernel(
    logits_ptr, target_ptr, weight_ptr, loss_ptr, stats_ptr, z_ptr, predicted_ptr, partial_ptr,
    V, stride_m, ignore_index, smoothing, z_loss, softcap, scale, P,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, STATS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write a row's results from the sums of its parts."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        store_ignored(loss_ptr, stats_ptr, z_ptr, predicted_ptr, row, STATS)
        return
    k = LOG2E if SOFTCAP else scale * LOG2E
    tops = numbers_of_parts(partial_ptr, row, 0, P, LOWEST, SUMS, BLOCK_P)
    totals = numbers_of_parts(partial_ptr, row, 1, P, 0.0, SUMS, BLOCK_P)
    top = tl.max(tops, 0)
    log2_sum = tl.log2(tl.sum(totals * tl.exp2((tops - top) * k), 0))
    sum_z, sum_w, column = 0.0, V * 1.0, 0
    if SMOOTHING:
        sum_z = tl.sum(numbers_of_parts(partial_ptr, row, 2, P, 0.0, SUMS, BLOCK_P), 0)
        if weight_ptr is not None:
            sum_w = tl.sum(numbers_of_parts(partial_ptr, row, 3, P, 0.0, SUMS, BLOCK_P), 0)
    if predicted_ptr is not None:
        peaks = numbers_of_parts(partial_ptr, row, 4, P, float("-inf"), SUMS, BLOCK_P)
        columns = numbers_of_parts(partial_ptr, row, 5, P, 0.0, SUMS, BLOCK_P).to(tl.int32, bitcast=True)
        # The first column among equal peaks; a part without a logit above -inf gives the part's first column.
        parts = tl.arange(0, BLOCK_P)
        column = tl.min(tl.where((peaks == tl.max(peaks, 0)) & (parts < P), columns, NOWHERE), 0)
        column = tl.where(column < V, column, 0)
    store_row(
        logits_ptr + row * stride_m, target, weight_ptr, loss_ptr, stats_ptr, z_ptr, predicted_ptr, row, V,
        top, log2_sum, sum_z, sum_w, column, smoothing, z_loss, softcap, scale, SMOOTHING, SOFTCAP, STATS,
    )  # fmt: skip


def launch_parts(
    tensors: tuple[Tensor | None, ...], key: tuple[Any, ...], sizes: tuple[Any, ...], branches: tuple[Any, ...],
    edges: bool, M: int, parts: Parts, tile: tuple[int, int, int],
) -> None:  # fmt: skip
    """As `_launch_rows`, in two launches: parts, then rows. tile: from `_fwd_tile`."""
    logits, target, weight, *_, predicted = tensors
    V, stride, ignore_index, _, _, softcap, scale = sizes
    smooth, capped, _ = branches
    count, width, most = parts
    key = *key, parts
    partial = torch.empty(M * SUMS.value * count, dtype=torch.float32, device=logits.device)  # type: ignore[union-attr]

    warps, depth, block = tile
    depth, block, warps = part_tile(depth, block, warps)
    own = V, stride, ignore_index, softcap, scale, count, width
    more = smooth, capped, predicted is not None, edges, depth, block
    launch(
        _cross_entropy_parts_kernel, key, (logits, target, weight, partial),
        lambda: (M * count, (*own, *more), {"num_warps": warps}),
    )  # fmt: skip
    launch(
        _cross_entropy_fold_kernel, key, (*tensors, partial),
        lambda: (M, (*sizes, count, *branches, most), {"num_warps": fold_warps(most)}),
    )  # fmt: skip
