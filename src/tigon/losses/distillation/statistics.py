"""Row statistics for two heads' logits, exchanged between devices, and their merge.

Labels follow tigon.ops.shard_statistics: a label for another device's class is negative, and no logit is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, tl, use_triton
from tigon.kernels.tiles.constants import LN2, LOG2E, LOWEST
from tigon.kernels.tiles.fold import fold
from tigon.losses.distillation import tiles
from tigon.losses.distillation.formula import Formula, Hard
from tigon.losses.distillation.rows import Rows, launch_rows
from tigon.ops import shard_statistics
from tigon.ops.cross_entropy.launches import _cache_sized

# Columns in a device's row statistics. Two softmaxes: the student's maximum of z over local classes, and
# Σ exp((z − maximum) / τ); the teacher's; for a cross entropy the target's z, and the student's sum at temperature 1.
TOP, SUM, TEACHER_TOP, TEACHER_SUM, TARGET, SUM_AT_ONE = map(tl.constexpr, range(6))
# Cosine: a·a, a·b, b·b; for a cross entropy the target's z, and maximum and sum at temperature 1.
AA, AB, BB, COSINE_TARGET, COSINE_TOP, COSINE_SUM = map(tl.constexpr, range(6))
# Columns after the merge over all devices. Two softmaxes: both sides' maxima, and the sums' logarithms, to base 2 in
# the kernels; kept apart, since a combined value would be rounded at its larger magnitude. Cosine: 1 / |a|, 1 / |b|,
# the cosine. LOG_H: the student's log-sum at temperature 1.
TOP_A, LOG_A, TOP_B, LOG_B, LOG_H = map(tl.constexpr, range(5))
OVER_A, OVER_B, COSINE, COSINE_TOP_A = map(tl.constexpr, range(4))
MERGED = tl.constexpr(5)
IGNORED, OUTSIDE = tl.constexpr(shard_statistics.IGNORED), tl.constexpr(shard_statistics.OUTSIDE)
ROWS = 128  # rows per merge program


def count_columns(formula: Formula) -> int:
    """The number of columns."""
    if formula.kind == "cosine":
        return 6 if formula.hard else 3
    return 4 + formula.hard


# -------------------------------------------------------------------------------------------------------- reference


def statistics_reference(rows: Rows, teacher: Tensor, formula: Formula) -> Tensor:
    """The columns, in order."""
    z, _ = formula.student(rows.wide)
    t, _ = formula.teacher(teacher.to(z.dtype))
    # Finite also where every local class is -inf: −inf − (−inf) would make the merge's sums NaN on all devices.
    top = z.amax(-1).clamp(min=shard_statistics.LEAST)
    power = z - top.unsqueeze(-1)
    target = [select_target(z, rows.labels)] if formula.hard and rows.labels is not None else []
    if formula.kind == "cosine":
        found = [z.square().sum(-1), (z * t).sum(-1), t.square().sum(-1), *target]
        found += [top, power.exp().sum(-1)] if formula.hard else []
    else:
        top_t = t.amax(-1).clamp(min=shard_statistics.LEAST)
        found = [top, (power / formula.temperature).exp().sum(-1), top_t]
        found += [((t - top_t.unsqueeze(-1)) / formula.temperature).exp().sum(-1), *target]
        found += [power.exp().sum(-1)] if formula.hard is Hard.APART else []
    return mask_ignored(torch.stack(found, -1), rows.labels)


def select_target(z: Tensor, labels: Tensor) -> Tensor:
    """The target's z where this device has the class, else 0: the sum over devices is the target's z."""
    here = labels >= 0
    return torch.where(here, z.gather(-1, torch.where(here, labels, 0).unsqueeze(-1)).squeeze(-1), 0.0)


def mask_ignored(values: Tensor, labels: Tensor | None) -> Tensor:
    """Values (M, ...), 0 in ignored rows."""
    if labels is None:
        return values
    counts = (labels != shard_statistics.IGNORED).view(-1, *[1] * (values.dim() - 1))
    return torch.where(counts, values, 0.0)


def one_hot(labels: Tensor, z: Tensor) -> Tensor:
    """(M, V); 0 everywhere in rows whose label is on another device."""
    # A comparison rather than F.one_hot, which raises for other devices' negative labels.
    return (torch.arange(z.shape[1], device=z.device) == labels.unsqueeze(-1)).to(z.dtype)


def merge_log_sums(tops: Tensor, sums: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The maximum over all devices and the sum's logarithm, from each device's maximum and sum."""
    top = tops.amax(0)
    return top, (sums * ((tops - top) / temperature).exp()).sum(0).log()


def merge_reference(parts: Tensor, rows: Rows, formula: Formula) -> Tensor:
    said, cosine = parts.unbind(-1), formula.kind == "cosine"
    top = log_h = torch.zeros_like(said[0][0])
    if cosine:
        over_a, over_b = (1 / said[square].sum(0).sqrt().clamp(min=1e-8) for square in (AA, BB))
        merged = [over_a, over_b, said[AB].sum(0) * over_a * over_b]
        if formula.hard:
            top, log_h = merge_log_sums(said[COSINE_TOP], said[COSINE_SUM], 1.0)
        merged.append(top)
    else:
        top, log_a = merge_log_sums(said[TOP], said[SUM], formula.temperature)
        merged = [top, log_a, *merge_log_sums(said[TEACHER_TOP], said[TEACHER_SUM], formula.temperature)]
        if formula.hard:
            log_h = log_a if formula.hard is Hard.SHARED else merge_log_sums(said[TOP], said[SUM_AT_ONE], 1.0)[1]
    if formula.hard and rows.labels is not None:
        # No device has that class, so all targets would add up to z = 0: a plausible but wrong loss.
        log_h = torch.where(rows.labels == shard_statistics.OUTSIDE, float("nan"), log_h)
        hard = (top - said[COSINE_TARGET if cosine else TARGET].sum(0)) + log_h
        rows.write(None, mask_ignored(hard, rows.labels), None)
    return torch.stack([*merged, log_h], -1)


# ---------------------------------------------------------------------------------------------------------- kernels


# One program per row with V local logits.
#   logits, teacher (M, V) with row strides; labels: (M,) as in tigon.ops.shard_statistics, or None
#   out             (M, COLUMNS) receives the statistics
#   k               log2(e) / temperature
@jit
def _distill_statistics_kernel(
    logits_ptr, teacher_ptr, labels_ptr, out_ptr, V, stride_m, stride_tm, k, softcap, scale, teacher_softcap,
    teacher_scale, IS_COSINE: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's statistics."""
    # int64: row · stride exceeds 2³¹ in a chunk of more than 4 GiB.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    out_ptr += row * COLUMNS
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            # Zeros are needed: the numbers travel, and NaN from uninitialised memory would look like an error.
            for i in tl.static_range(COLUMNS):
                tl.store(out_ptr + i, 0.0)
            return
    tile = tiles.tile_columns(DEPTH, BLOCK)
    if IS_COSINE:
        sum_aa, sum_ab, sum_bb, top, total = tiles.sum_products(
            logits_ptr, teacher_ptr, V, tile, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP,
            TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
        tl.store(out_ptr + AA, tl.sum(sum_aa, 0))
        tl.store(out_ptr + AB, tl.sum(sum_ab, 0))
        tl.store(out_ptr + BB, tl.sum(sum_bb, 0))
        if HARD:
            row_top = tl.max(top, 0)
            tl.store(out_ptr + COSINE_TOP, row_top)
            tl.store(out_ptr + COSINE_SUM, tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0))
    else:
        _store_normalisers(
            logits_ptr, teacher_ptr, out_ptr, V, tile, k, softcap, scale, teacher_softcap, teacher_scale, HARD,
            SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
    if HARD:
        # 0 except on the target's device, so that the sum over devices is the target's z. No launch has overwritten the
        # logits yet.
        z_target, _steep = tiles.load_logit(logits_ptr, label, label >= 0, scale, softcap, 0.0, SOFTCAP)
        tl.store(out_ptr + (COSINE_TARGET if IS_COSINE else TARGET), z_target)


@jit
def _store_normalisers(
    logits_ptr, teacher_ptr, out_ptr, V, tile, k, softcap, scale, teacher_softcap, teacher_scale, HARD: tl.constexpr,
    SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first pass for a whole row in another order: each side's tile is folded before the next load.

    Loading both sides before either sum, as there, takes registers that this kernel does not have.
    """
    none = float("-inf")
    # A finite start: a lane that has seen only -inf must not compute inf - inf.
    top_a = tl.full((BLOCK,), LOWEST, tl.float32)
    top_b = tl.full((BLOCK,), LOWEST, tl.float32)
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, DEPTH * BLOCK):
        at = start + tile
        a, _ = tiles.load_logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
        before = top_a
        top_a, sum_a, _, _ = fold(a, top_a, sum_a, k)
        if HARD == 2:
            sum_h = tiles.fold_at_one(a, before, top_a, sum_h)
        # The teacher's tile is loaded once the student's is folded, which saves registers but keeps fewer loads in
        # flight.
        b, _ = tiles.load_logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
        top_b, sum_b, _, _ = fold(b, top_b, sum_b, k)
    row_a = tl.max(top_a, 0)
    row_b = tl.max(top_b, 0)
    tl.store(out_ptr + TOP, row_a)
    tl.store(out_ptr + SUM, tl.sum(sum_a * tl.exp2((top_a - row_a) * k), 0))
    tl.store(out_ptr + TEACHER_TOP, row_b)
    tl.store(out_ptr + TEACHER_SUM, tl.sum(sum_b * tl.exp2((top_b - row_b) * k), 0))
    if HARD == 2:
        tl.store(out_ptr + SUM_AT_ONE, tl.sum(sum_h * tl.exp2((top_a - row_a) * LOG2E), 0))


@jit
def _log2_sums(
    parts_ptr, rows, inside, M, world, k, TOP: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The maximum over all devices and their sum's log₂, from each device's columns TOP and SUM."""
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    for part in range(world):
        top = tl.maximum(top, tl.load(parts_ptr + (part * M + rows) * COLUMNS + TOP, mask=inside, other=LOWEST))
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(world):
        at = parts_ptr + (part * M + rows) * COLUMNS
        # Bounded: a device without classes has the least maximum, and 0 · inf would be NaN.
        step = tl.maximum((tl.load(at + TOP, mask=inside, other=LOWEST) - top) * k, -1000.0)
        # other is 1: lanes beyond M then take the logarithm of a positive number.
        total += tl.load(at + SUM, mask=inside, other=1.0) * tl.exp2(step)
    return top, tl.log2(total)


@jit
def _sum_parts(parts_ptr, rows, inside, M, world, AT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(world):
        # Devices in order: the sums have the same bits everywhere, so all devices' gradients agree.
        total += tl.load(parts_ptr + (part * M + rows) * COLUMNS + AT, mask=inside, other=0.0)
    return total


# One program per BLOCK rows.
#   parts           (world, M, COLUMNS) all devices' statistics; labels: (M,)
#   merged          (M, MERGED) receives the normalisers; hard: (M,) receives the cross entropy
@jit
@do_not_specialize("M", "world")
def _merge_distill_kernel(
    parts_ptr, labels_ptr, hard_ptr, merged_ptr, M, world, k, IS_COSINE: tl.constexpr, HARD: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK rows, and write hard losses. A row is a few numbers, so each lane has a row."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < M
    merged_ptr += rows * MERGED
    if IS_COSINE:
        # Divide by each norm in turn: the product of two large norms may overflow.
        over_a = 1.0 / tiles.bound_norm(tl.sqrt(_sum_parts(parts_ptr, rows, inside, M, world, AA, COLUMNS, BLOCK)))
        over_b = 1.0 / tiles.bound_norm(tl.sqrt(_sum_parts(parts_ptr, rows, inside, M, world, BB, COLUMNS, BLOCK)))
        cosine = _sum_parts(parts_ptr, rows, inside, M, world, AB, COLUMNS, BLOCK) * over_a * over_b
        tl.store(merged_ptr + OVER_A, over_a, mask=inside)
        tl.store(merged_ptr + OVER_B, over_b, mask=inside)
        tl.store(merged_ptr + COSINE, cosine, mask=inside)
        if HARD:
            top, log_h = _log2_sums(parts_ptr, rows, inside, M, world, LOG2E, COSINE_TOP, COSINE_SUM, COLUMNS, BLOCK)
            tl.store(merged_ptr + COSINE_TOP_A, top, mask=inside)
    else:
        top, log_a = _log2_sums(parts_ptr, rows, inside, M, world, k, TOP, SUM, COLUMNS, BLOCK)
        top_b, log_b = _log2_sums(parts_ptr, rows, inside, M, world, k, TEACHER_TOP, TEACHER_SUM, COLUMNS, BLOCK)
        tl.store(merged_ptr + TOP_A, top, mask=inside)
        tl.store(merged_ptr + LOG_A, log_a, mask=inside)
        tl.store(merged_ptr + TOP_B, top_b, mask=inside)
        tl.store(merged_ptr + LOG_B, log_b, mask=inside)
        log_h = log_a
        if HARD == 2:
            _, log_h = _log2_sums(parts_ptr, rows, inside, M, world, LOG2E, TOP, SUM_AT_ONE, COLUMNS, BLOCK)
    if HARD:
        labels = tl.load(labels_ptr + rows, mask=inside, other=IGNORED)
        z_target = _sum_parts(parts_ptr, rows, inside, M, world, COSINE_TARGET if IS_COSINE else TARGET, COLUMNS, BLOCK)
        log_h = tl.where(labels != OUTSIDE, log_h, float("nan"))
        hard = (top - z_target) + log_h * LN2
        # Every device writes the same loss, so the hard losses need no sum at the end of the walk.
        tl.store(hard_ptr + rows, tl.where(labels != IGNORED, hard, 0.0), mask=inside)
        tl.store(merged_ptr + LOG_H, log_h, mask=inside)


# --------------------------------------------------------------------------------------------------------- launches


def compute_statistics(rows: Rows, teacher: Tensor, formula: Formula) -> Tensor:
    """This device's statistics, (M, columns); V may be 0."""
    M, V = rows.logits.shape
    COLUMNS, cosine = count_columns(formula), formula.kind == "cosine"
    # In the losses' dtype: fp32 on the wire, since bf16 statistics would round every probability in the row.
    out = rows.soft.new_empty(M, COLUMNS)
    if V == 0:  # a device without classes: empty sums, and the least maxima
        out.zero_()
        tops = (TOP, TEACHER_TOP) if not cosine else (COSINE_TOP,) if formula.hard else ()
        # Column by column: a list index would be copied to the device, and the host would wait.
        for top in tops:
            out.select(-1, top).fill_(shard_statistics.LEAST)
        return out
    if not use_triton(rows.logits, teacher):
        for part in _cache_sized(rows.logits):
            out[part] = statistics_reference(rows.select(part), teacher[part], formula)
        return out
    sizes = V, rows.logits.stride(0), teacher.stride(0)
    numbers = formula.k, *formula.student, *formula.teacher
    arguments = *sizes, *numbers, cosine, int(formula.hard), *formula.caps, COLUMNS
    tensors = rows.logits, teacher, rows.labels, out
    # More than four warps for short rows too: with four, ptxas aims at an occupancy that forces spills.
    launch_rows(_distill_statistics_kernel, rows, formula, tensors, arguments, least=8)
    return out


def merge(parts: Tensor, rows: Rows, formula: Formula) -> Tensor:
    """Merge (devices, M, columns) into (M, MERGED), and write the hard losses."""
    if not use_triton(parts):
        return merge_reference(parts, rows, formula)
    world, M, COLUMNS = parts.shape
    # With a cosine and no cross entropy the last two columns stay uninitialised; the gradient kernel reads them only
    # with HARD.
    merged = parts.new_empty(M, MERGED)
    arguments = M, world, formula.k, formula.kind == "cosine", int(formula.hard), COLUMNS, ROWS
    plan = cdiv(M, ROWS), arguments, {"num_warps": 4}
    # A missing pointer compiles to another kernel, so the key records whether labels are present.
    key = arguments, rows.labels is None
    launch(_merge_distill_kernel, key, (parts, rows.labels, rows.hard, merged), lambda: plan)
    return merged
