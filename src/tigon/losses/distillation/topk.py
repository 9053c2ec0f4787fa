"""Losses and student-logit gradients for a chunk's rows, from the K classes that a teacher gave.

A sum over the rest, the classes that were not given, comes from the rest itself, without the cancellation in 1 − Σ q:
registers hold the given classes' logits, and -inf replaces them in the row. Their gradients are written last. A class
with logit -inf has no probability here, also under a softcap.

Where this device has all classes, one launch does everything. Where classes are split over devices, all devices are
given the K classes; each sends FIXED + K row statistics, and the same kernel merges them: max z and Σ exp(z − max) over
the local rest, the target's logit, that sum at temperature 1, and the K given classes' logits. Another device's logit
is 0, so that sums over the devices are the logits. All devices then compute the same losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import do_not_specialize, jit, next_power_of_2, tl, use_triton
from tigon.kernels.tiles.constants import LN2, LOG2E, LOWEST
from tigon.losses.distillation import tiles
from tigon.losses.distillation.formula import Formula
from tigon.losses.distillation.reference import given_slopes
from tigon.losses.distillation.rows import Rows, TopK, launch_rows
from tigon.losses.distillation.statistics import (
    IGNORED,
    OUTSIDE,
    mask_ignored,
    merge_log_sums,
    one_hot,
    select_target,
)
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.ops import shard_statistics
from tigon.ops.cross_entropy.launches import _cache_sized

# The columns before the given classes' logits.
TOP, SUM, TARGET, SUM_AT_ONE = map(tl.constexpr, range(4))
FIXED = tl.constexpr(4)


def write_rows(rows: Rows, teacher: TopK, formula: Formula, shards: Shards | None) -> None:
    """Write the losses, and with `formula.gradient` the logits' gradient.

    teacher: (M, K), dense. The logits are overwritten even without `formula.gradient`.
    """
    if shards is not None:
        # One exchange: from the K given logits every device computes the whole loss and Σ q · u.
        span = shards.first, shards.classes
        statistics = compute_statistics(rows, teacher, formula, span)
        write_merged(rows, teacher, shards.gather(statistics).wait(), formula, span)
    elif use_triton(rows.logits):
        _launch(rows, teacher, formula, None, (None, None))
    else:
        span = 0, rows.logits.shape[1]
        for part in _cache_sized(rows.logits):
            here, given = rows.select(part).with_local_labels(formula), teacher.select(part)
            write_merged(here, given, compute_statistics(here, given, formula, span).unsqueeze(0), formula, span)


# -------------------------------------------------------------------------------------------------------- reference


def find_local_ids(teacher: TopK, V: int, first: int) -> tuple[Tensor, Tensor]:
    """Which entries hold a local class, and the local index, else 0."""
    # Ids are global, in any integer dtype. long() first: an unsigned id below `first` would wrap around.
    ids = teacher.ids.long() - first
    here = (teacher.logprobs != -torch.inf) & (ids >= 0) & (ids < V)
    return here, torch.where(here, ids, 0)


def mask_given(z: Tensor, here: Tensor, at: Tensor) -> Tensor:
    """(M, V): logits for classes that were not given, −inf elsewhere."""
    # A sum rather than a scatter: other devices' entries point at index 0, and must not mark that class as given.
    others = torch.zeros_like(z).scatter_add_(-1, at, here.to(z.dtype)) == 0
    return torch.where(others, z, -torch.inf)


def statistics_reference(rows: Rows, teacher: TopK, formula: Formula, first: int) -> Tensor:
    z, _ = formula.student(rows.wide)
    here, at = find_local_ids(teacher, z.shape[1], first)
    rest = mask_given(z, here, at)
    top = rest.amax(-1).clamp(min=shard_statistics.LEAST)
    power = rest - top.unsqueeze(-1)
    target = torch.zeros_like(top)
    if formula.hard and rows.labels is not None:
        target = select_target(z, rows.labels)
    fixed = torch.stack([top, (power / formula.temperature).exp().sum(-1), target, power.exp().sum(-1)], -1)
    return mask_ignored(torch.cat([fixed, torch.where(here, z.gather(-1, at), 0.0)], -1), rows.labels)


def merged_reference(rows: Rows, teacher: TopK, parts: Tensor, formula: Formula, span: tuple[int, int], V: int) -> None:
    """Write losses and gradient. V: local class count; if V is 0, `rows` have a stand-in class."""
    first, classes = span
    z, slope = formula.student(rows.wide)
    labels, logprobs, temperature = rows.labels, teacher.logprobs, formula.temperature
    here, at = find_local_ids(teacher, V, first)
    given = logprobs != -torch.inf
    z_k = torch.where(given, parts[..., FIXED:].sum(0), -torch.inf)
    tops, sums, targets, sums_at_one = parts[..., :FIXED].unbind(-1)
    top_rest, log_rest = (v.unsqueeze(-1) for v in merge_log_sums(tops, sums, temperature))
    _, log_one = (v.unsqueeze(-1) for v in merge_log_sums(tops, sums_at_one, 1.0))
    top = torch.maximum(top_rest, z_k.amax(-1, keepdim=True).clamp(min=shard_statistics.LEAST))
    log_tail = (top_rest - top) / temperature + log_rest
    lq = (z_k - top) / temperature
    whole = torch.logsumexp(torch.cat([lq, log_tail], -1), -1, keepdim=True)
    others = given.sum(-1, keepdim=True) < classes
    soft, d, rest_slope = given_slopes(formula, lq - whole, logprobs.to(z.dtype), log_tail - whole, others)
    z_rest = mask_given(z, here, at)
    share = torch.where(z_rest == -torch.inf, 0.0, ((z_rest - top_rest) / temperature - log_rest).exp())
    dz = (share * rest_slope).scatter_add(-1, at, torch.where(here, d, 0.0)) * formula.weights.soft
    hard = None
    if formula.hard and labels is not None:
        log_h = torch.logsumexp(torch.cat([z_k - top, top_rest - top + log_one], -1), -1, keepdim=True)
        log_h = torch.where((labels == shard_statistics.OUTSIDE).unsqueeze(-1), float("nan"), log_h)
        hard = mask_ignored((top - targets.sum(0).unsqueeze(-1) + log_h).squeeze(-1), labels)
        dz = dz + formula.weights.hard * ((z - top - log_h).exp() - one_hot(labels, z))
    rows.write(mask_ignored(soft, labels), hard, mask_ignored(dz * slope, labels) if formula.gradient else None)


# ---------------------------------------------------------------------------------------------------------- kernels


# One program per row with V local logits.
#   ids, logprobs   (M, K) from the teacher; ids are global class indices
#   labels          (M,) as in tigon.ops.shard_statistics, or None
#   out             (M, FIXED + K) receives the statistics
#   first, classes  this device's first global class index, and V over all devices
#   SUMS            compute the rest's maximum and sums
@jit
def _topk_statistics_kernel(
    logits_ptr, ids_ptr, logprobs_ptr, labels_ptr, out_ptr, V, K, first, classes, stride_m, stride_i, stride_l, k,
    softcap, scale, SUMS: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the statistics, and -inf over the given classes' logits, which marks them for the gradient."""
    # int64: row · stride exceeds 2³¹ in a chunk of more than 4 GiB.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    out_ptr += row * (FIXED + K)
    at_k = tl.arange(0, BLOCK_K)
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            # Zeros are needed: the numbers travel, and NaN from uninitialised memory would look like an error.
            for i in tl.static_range(FIXED):
                tl.store(out_ptr + i, 0.0)
            tl.store(out_ptr + FIXED + at_k, tl.zeros((BLOCK_K,), tl.float32), mask=at_k < K)
            return
    none = float("-inf")
    # int64: `first` cannot be subtracted from narrow unsigned ids.
    ids = tl.load(ids_ptr + row * stride_i + at_k, mask=at_k < K, other=0).to(tl.int64)
    log_p = tl.load(logprobs_ptr + row * stride_l + at_k, mask=at_k < K, other=none).to(tl.float32)
    # Checked against all classes, before `first` is subtracted: every device comes to the same verdict.
    outside = (log_p != none) & ((ids < 0) | (ids >= classes))
    ids -= first
    here = (log_p != none) & (ids >= 0) & (ids < V)
    z_k, _steep = tiles.load_logit(logits_ptr, ids, here, scale, softcap, 0.0, SOFTCAP)
    z_k = tl.where(outside, float("nan"), z_k)  # an id out of range reads no logit, and makes the loss NaN
    z_target = 0.0
    if HARD:
        # Before the marks are stored, since the target may be a given class. label ≥ 0: the class is on this device.
        z_target, _slope = tiles.load_logit(logits_ptr, label, label >= 0, scale, softcap, 0.0, SOFTCAP)
    # Any thread may read a logit that another overwrites: all loads, then -inf, then the sum.
    tl.debug_barrier()
    tl.store(logits_ptr + ids, tl.full((BLOCK_K,), none, logits_ptr.dtype.element_ty), mask=here)
    tl.debug_barrier()

    tile = tiles.tile_columns(DEPTH, BLOCK)
    top, total, sum_h = tiles.sum_rest(logits_ptr, V, tile, k, softcap, scale, SUMS, HARD, SOFTCAP, DEPTH, BLOCK)
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * k), 0)
    at_one = row_total
    if HARD == 2:
        at_one = tl.sum(sum_h * tl.exp2((top - row_top) * LOG2E), 0)
    tl.store(out_ptr + TOP, row_top)
    tl.store(out_ptr + SUM, row_total)
    tl.store(out_ptr + TARGET, z_target)
    tl.store(out_ptr + SUM_AT_ONE, at_one)
    tl.store(out_ptr + FIXED + at_k, z_k, mask=at_k < K)


# One program per row with V logits. Labels, losses, factor and weights are as in heads.py.
#   ids, logprobs   (M, K) from the teacher, in BLOCK_K > K lanes; lane K stands for the rest
#   parts           (world, M, FIXED + K) all devices' statistics; the given classes' logits are marked already. None:
#                   this row has all classes, and first, classes, M and world are None
#   first, classes  this device's first global class index, and V over all devices
@jit
@do_not_specialize("ignore_index", "M", "world")
def _distill_topk_kernel(
    logits_ptr, ids_ptr, logprobs_ptr, labels_ptr, soft_ptr, hard_ptr, factor_ptr, parts_ptr,
    V, K, first, classes, M, world, stride_m, stride_i, stride_l, ignore_index, beta, k, soft_weight, hard_weight,
    softcap, scale, KIND: tl.constexpr, REST: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # int64: row · stride exceeds 2³¹ in a chunk of more than 4 GiB.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            tiles.write_zeros(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    none = float("-inf")
    tile = tiles.tile_columns(DEPTH, BLOCK)
    at_k = tl.arange(0, BLOCK_K)
    ids = tl.load(ids_ptr + row * stride_i + at_k, mask=at_k < K, other=0)
    log_p = tl.load(logprobs_ptr + row * stride_l + at_k, mask=at_k < K, other=none).to(tl.float32)
    if parts_ptr is None:
        inside = (ids >= 0) & (ids < V)
        given = (log_p != none) & inside
        # The slope is kept too, because the store below destroys the logit.
        z_k, slope_k = tiles.load_logit(logits_ptr, ids, given, scale, softcap, none, SOFTCAP)
        z_k = tl.where((log_p == none) | inside, z_k, float("nan"))
        log_p = log_p * LOG2E
        z_target = 0.0
        if HARD:
            # Now, because the target may be a given class, whose logits are about to become -inf.
            at_target = (label >= 0) & (label < V)
            z_target, _steep = tiles.load_logit(logits_ptr, label, at_target, scale, softcap, 0.0, SOFTCAP)
        # Any thread may read a logit that another overwrites: all loads, then -inf, then the sum.
        tl.debug_barrier()
        tl.store(logits_ptr + ids, tl.full((BLOCK_K,), none, logits_ptr.dtype.element_ty), mask=given)
        tl.debug_barrier()
        # Renormalised classes do not need the rest, unless there is a cross entropy over all classes.
        top, total, sum_h = tiles.sum_rest(
            logits_ptr, V, tile, k, softcap, scale, REST != "renormalize" or HARD, HARD, SOFTCAP, DEPTH, BLOCK
        )
        top_rest = tl.max(top, 0)
        # -inf where all classes were given, which the functions below take for an empty rest.
        log_rest = tl.log2(tl.sum(total * tl.exp2((top - top_rest) * k), 0))
        lq, lp, row_top, log_all, log_tail = tiles.normalize_given(
            z_k, log_p, given, at_k, K, V, top_rest, log_rest, k, REST
        )
        log_h = log_all
        if HARD:
            step = (top_rest - row_top) * LOG2E
            if HARD == 2:
                at_one = tl.sum(sum_h * tl.exp2((top - top_rest) * LOG2E), 0)
            else:
                at_one = tl.exp2(log_rest)
            log_h = tl.log2(tl.sum(tl.exp2((z_k - row_top) * LOG2E), 0) + at_one * tl.exp2(step))
            hard, log_h = tiles.hard_loss(z_target, label, row_top, log_h, V)
            tl.store(hard_ptr + row, hard)
        tiles.write_given_results(
            logits_ptr, soft_ptr, factor_ptr, row, label, V, K, ids, at_k, given, z_k, slope_k, lq, lp, row_top,
            top_rest, log_rest, log_tail, log_h, soft_weight, hard_weight, beta, k, softcap, scale, KIND, REST, HARD,
            SOFTCAP, GRADIENT, DEPTH, BLOCK,
        )  # fmt: skip
    else:
        ids = ids.to(tl.int64)
        # given: on any device, for the rest's probability. here: columns that this device overwrites.
        given = (log_p != none) & (ids >= 0) & (ids < classes)
        ids -= first
        here = given & (ids >= 0) & (ids < V)
        # Merged in every program: for so few numbers a separate launch would take longer.
        top_rest = LOWEST
        for part in range(world):
            top_rest = tl.maximum(top_rest, tl.load(parts_ptr + (part * M + row) * (FIXED + K) + TOP))
        # In fp32 and in device order: all devices get the same bits, and so the same loss.
        total = 0.0
        at_one = 0.0
        z_target = 0.0
        z_k = tl.zeros((BLOCK_K,), tl.float32)
        for part in range(world):
            own = parts_ptr + (part * M + row) * (FIXED + K)
            # Bounded: a device without a rest has the least maximum, and 0 · inf would be NaN.
            step = tl.load(own + TOP) - top_rest
            total += tl.load(own + SUM) * tl.exp2(tl.maximum(step * k, -1000.0))
            z_target += tl.load(own + TARGET)
            at_one += tl.load(own + SUM_AT_ONE) * tl.exp2(tl.maximum(step * LOG2E, -1000.0))
            z_k += tl.load(own + FIXED + at_k, mask=at_k < K, other=0.0)
        z_k = tl.where(log_p == none, none, z_k)
        log_p = log_p * LOG2E
        log_rest = tl.log2(total)
        lq, lp, row_top, log_all, log_tail = tiles.normalize_given(
            z_k, log_p, given, at_k, K, classes, top_rest, log_rest, k, REST
        )
        log_h = log_all
        if HARD:
            step = (top_rest - row_top) * LOG2E
            log_h = tl.log2(tl.sum(tl.exp2((z_k - row_top) * LOG2E), 0) + at_one * tl.exp2(step))
            # No device has the label's class, and z_target would be 0: loss and gradient become NaN instead.
            log_h = tl.where(label != OUTSIDE, log_h, float("nan"))
            tl.store(hard_ptr + row, (row_top - z_target) + log_h * LN2)
        # None for slope_k: the local slopes were not kept across the exchange, and follow from z_k.
        tiles.write_given_results(
            logits_ptr, soft_ptr, factor_ptr, row, label, V, K, ids, at_k, here, z_k, None, lq, lp, row_top, top_rest,
            log_rest, log_tail, log_h, soft_weight, hard_weight, beta, k, softcap, scale, KIND, REST, HARD, SOFTCAP,
            GRADIENT, DEPTH, BLOCK,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launches


def compute_statistics(rows: Rows, teacher: TopK, formula: Formula, span: tuple[int, int]) -> Tensor:
    """This device's statistics, (M, FIXED + K). The kernel replaces the given classes' logits by -inf.

    span: this device's first global class index, and V over all devices.
    """
    ids, logprobs = teacher
    (M, V), K = rows.logits.shape, ids.shape[1]
    out = rows.soft.new_empty(M, FIXED + K)
    if V == 0:
        # An empty rest: sum 0, and the least finite maximum, which loses against every other device's.
        out.zero_()
        out.select(-1, TOP).fill_(shard_statistics.LEAST)
        return out
    if not use_triton(rows.logits):
        for part in _cache_sized(rows.logits):
            out[part] = statistics_reference(rows.select(part), teacher.select(part), formula, span[0])
        return out
    # The span is part of the launch key: a kernel may be compiled for the numbers' divisibility.
    sizes = V, K, *span, rows.logits.stride(0), ids.stride(0), logprobs.stride(0)
    sums = formula.rest != "renormalize" or formula.hard > 0
    branches = sums, int(formula.hard), formula.caps[0], next_power_of_2(K + 1)
    tensors = rows.logits, ids, logprobs, rows.labels, out
    launch_rows(_topk_statistics_kernel, rows, formula, tensors, (*sizes, formula.k, *formula.student, *branches))
    return out


def write_merged(rows: Rows, teacher: TopK, parts: Tensor, formula: Formula, span: tuple[int, int]) -> None:
    """`write_rows` from all devices' statistics, (devices, M, FIXED + K)."""
    M, V = rows.logits.shape
    if V == 0:  # every device computes all losses: here from a stand-in class with probability 0
        # The buffer has no column to write to. The stand-in's gradient is thrown away.
        rows = rows._replace(logits=rows.logits.new_full((M, 1), -torch.inf))
    if use_triton(rows.logits):
        # The local V, also for the stand-in, so that no mask lets a store pass.
        _launch(rows, teacher, formula, parts, span, V)
        return
    for part in _cache_sized(rows.logits):
        merged_reference(rows.select(part), teacher.select(part), parts[:, part], formula, span, V)


def _launch(rows: Rows, teacher: TopK, formula: Formula, parts: Tensor | None, span: Any, V: int | None = None) -> None:
    ids, logprobs = teacher
    K = ids.shape[1]
    arguments = (
        rows.logits.shape[1] if V is None else V, K, *span,
        *((None, None) if parts is None else (parts.shape[1], parts.shape[0])),
        rows.logits.stride(0), ids.stride(0), logprobs.stride(0),
        formula.ignore_index if parts is None else IGNORED.value,
        formula.beta, formula.k, *formula.weights, *formula.student,
        # BLOCK_K is a power of two above K: tl.arange allows no other length.
        formula.kind, formula.rest, int(formula.hard), formula.caps[0], formula.gradient, next_power_of_2(K + 1),
    )  # fmt: skip
    # ids and logprobs keep their dtypes: an int64 or fp32 copy would be read once and thrown away.
    tensors = rows.logits, ids, logprobs, rows.labels, rows.soft, rows.hard, rows.factor, parts
    launch_rows(_distill_topk_kernel, rows, formula, tensors, arguments)
