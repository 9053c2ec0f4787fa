"""Two heads' logits on one device, once the normalisers of all devices are known: values, and the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.losses.distillation import tiles
from tigon.losses.distillation.formula import Formula
from tigon.losses.distillation.reference import terms_and_slopes
from tigon.losses.distillation.rows import Rows, launch_rows
from tigon.losses.distillation.split.statistics import (
    COSINE,
    COSINE_TOP_A,
    IGNORED,
    LOG_A,
    LOG_B,
    LOG_H,
    MERGED,
    OVER_A,
    OVER_B,
    TOP_A,
    TOP_B,
    of_valid,
)
from tigon.ops.cross_entropy.launches import _cache_sized
from tigon.runtime import do_not_specialize, jit, tl, use_triton
from tigon.tiles.constants import LN2

# -------------------------------------------------------------------------------------------------------- reference


def sides_reference(z: Tensor, t: Tensor, merged: Tensor, formula: Formula) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of the divergence, q and the slopes along log q, (M, V) each."""
    of = merged.unsqueeze(-1).unbind(-2)
    lq = (z - of[TOP_A]) / formula.temperature - of[LOG_A]
    lp = (t - of[TOP_B]) / formula.temperature - of[LOG_B]
    terms, slopes = terms_and_slopes(formula, lq, lp)
    return terms, lq.exp(), slopes


def values_reference(rows: Rows, teacher: Tensor, merged: Tensor, formula: Formula) -> Tensor:
    z, t = formula.student(rows.wide)[0], formula.teacher(teacher.to(rows.soft.dtype))[0]
    terms, _, slopes = sides_reference(z, t, merged, formula)
    rows.write(of_valid(terms.sum(-1), rows.labels), None, None)
    return of_valid(slopes.sum(-1), rows.labels)


def gradients_reference(rows: Rows, teacher: Tensor, merged: Tensor, total: Tensor | None, formula: Formula) -> None:
    """total: Σ of the slopes over all classes, (M,); of forward KL, whose total is −1, None."""
    z, slope = formula.student(rows.wide)
    t, _ = formula.teacher(teacher.to(rows.soft.dtype))
    of, soft = merged.unsqueeze(-1).unbind(-2), None
    if formula.kind == "cosine":
        dz = (z * of[OVER_A] * of[COSINE] - t * of[OVER_B]) * of[OVER_A]
        top = of[COSINE_TOP_A]
    else:
        terms, q, slopes = sides_reference(z, t, merged, formula)
        dz = slopes - q * (-1.0 if total is None else total.unsqueeze(-1))
        top = of[TOP_A]
        if formula.kind == "kl":
            soft = of_valid(terms.sum(-1), rows.labels)
    dz = dz * formula.weights.soft
    if formula.hard and rows.labels is not None:
        dz = dz + formula.weights.hard * ((z - top - of[LOG_H]).exp() - one_hot(rows.labels, z))
    rows.write(soft, None, of_valid(dz * slope, rows.labels))


def one_hot(labels: Tensor, z: Tensor) -> Tensor:
    """(M, V); 0 everywhere in the row of a label of another device."""
    return (torch.arange(z.shape[1], device=z.device) == labels.unsqueeze(-1)).to(z.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _distill_value_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, soft_ptr, mean_ptr, V, stride_m, stride_tm, beta, k, softcap,
    scale, teacher_softcap, teacher_scale, KIND: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This device's part of a row's divergence, and its part of Σ q · u."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    merged_ptr += row * MERGED
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            tl.store(soft_ptr + row, 0.0)
            tl.store(mean_ptr + row, 0.0)
            return
    row_a = tl.load(merged_ptr + TOP_A)
    log_a = tl.load(merged_ptr + LOG_A)
    row_b = tl.load(merged_ptr + TOP_B)
    log_b = tl.load(merged_ptr + LOG_B)
    tile = tiles.tile_of(DEPTH, BLOCK)
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    value, sum_u = tiles.values(
        logits_ptr, teacher_ptr, V, blocks, tile, row_a, log_a, row_b, log_b, beta, k, softcap, scale, teacher_softcap,
        teacher_scale, KIND, SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
    )  # fmt: skip
    # TVD's terms are no logarithms, the others' are to the base 2. Σ q · u stays in the units of u: the gradient kernel
    # subtracts it from u.
    tl.store(soft_ptr + row, tl.sum(value, 0) * (1.0 if KIND == "tvd" else LN2))
    tl.store(mean_ptr + row, tl.sum(sum_u, 0))


@jit
@do_not_specialize("M", "world")
def _distill_gradient_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, means_ptr, soft_ptr, factor_ptr, V, stride_m, stride_tm, M, world,
    beta, k, soft_weight, hard_weight, softcap, scale, teacher_softcap, teacher_scale, KIND: tl.constexpr,
    HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient over this device's logits; for "kl" also a part of the divergence. means: (devices, M)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    merged_ptr += row * MERGED
    label = 0
    if labels_ptr is not None:
        # The label of another device's class is negative, and equals no column below.
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            tiles.skip(logits_ptr, soft_ptr, None, row, V, True, BLOCK)
            return
    soft_weight, hard_weight = tiles.weighted(soft_weight, hard_weight, factor_ptr)
    # The slopes of these kinds are logarithms: one factor a row turns them from the base 2 to e.
    if KIND == "reverse" or KIND == "jsd":
        soft_weight *= LN2
    log_h = 0.0
    if HARD:
        log_h = tl.load(merged_ptr + LOG_H)
        hard_weight = tl.where(log_h == log_h, hard_weight, float("nan"))  # NaN where the label is out of range
    row_a = tl.load(merged_ptr + TOP_A)
    log_a = tl.load(merged_ptr + LOG_A)
    row_b = tl.load(merged_ptr + TOP_B)
    log_b = tl.load(merged_ptr + LOG_B)
    mean_u = 0.0
    if means_ptr is not None:
        for part in range(world):
            # In the order of the devices: all of them get the same bits.
            mean_u += tl.load(means_ptr + part * M + row)
    tile = tiles.tile_of(DEPTH, BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    # No barrier before the logits are overwritten: the target's was read by the statistics kernel.
    value = tiles.gradients(
        logits_ptr, teacher_ptr, label, value, V, tile, row_a, log_a, row_b, log_b, log_h, mean_u, soft_weight,
        hard_weight, beta, k, softcap, scale, teacher_softcap, teacher_scale, KIND, HARD, SOFTCAP, TEACHER_SOFTCAP,
        DEPTH, BLOCK,
    )  # fmt: skip
    if KIND == "kl":
        tl.store(soft_ptr + row, tl.sum(value, 0) * LN2)


@jit
def _cosine_gradient_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, soft_ptr, factor_ptr, V, stride_m, stride_tm, soft_weight,
    hard_weight, softcap, scale, teacher_softcap, teacher_scale, HARD: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient, over this device's logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    merged_ptr += row * MERGED
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            tiles.skip(logits_ptr, soft_ptr, None, row, V, True, BLOCK)
            return
    soft_weight, hard_weight = tiles.weighted(soft_weight, hard_weight, factor_ptr)
    over_a = tl.load(merged_ptr + OVER_A)
    over_b = tl.load(merged_ptr + OVER_B)
    cosine = tl.load(merged_ptr + COSINE)
    row_top = 0.0
    log_h = 0.0
    if HARD:
        # Without a cross entropy these two columns are never written.
        row_top = tl.load(merged_ptr + COSINE_TOP_A)
        log_h = tl.load(merged_ptr + LOG_H)
    tile = tiles.tile_of(DEPTH, BLOCK)
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    tiles.cosine_gradients(
        logits_ptr, teacher_ptr, label, V, blocks, tile, over_a, over_b, cosine, row_top, log_h, soft_weight,
        hard_weight, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launches


def write_values(rows: Rows, teacher: Tensor, merged: Tensor, formula: Formula) -> Tensor:
    """Write this device's part of each row's divergence, and return its part of Σ q · u, (M,)."""
    V = rows.logits.shape[1]
    mean = torch.empty_like(rows.soft)
    if V == 0:  # a device without classes has no part in the sums, which are gathered from it all the same
        rows.soft.zero_()
        return mean.zero_()
    if not use_triton(rows.logits, teacher):
        for part in _cache_sized(rows.logits):
            mean[part] = values_reference(rows.at(part), teacher[part], merged[part], formula)
        return mean
    sizes = V, rows.logits.stride(0), teacher.stride(0)
    numbers = formula.beta, formula.k, *formula.student, *formula.teacher
    tensors = rows.logits, teacher, rows.labels, merged, rows.soft, mean
    arguments = *sizes, *numbers, formula.kind, *formula.caps
    launch_rows(_distill_value_kernel, rows, formula, tensors, arguments, hard=False)
    return mean


def write_gradients(rows: Rows, teacher: Tensor, merged: Tensor, means: Tensor | None, formula: Formula) -> None:
    """Overwrite this device's logits with their gradient; for "kl" also write its part of each row's divergence.

    means: (devices, M) of `write_values`. None for "kl", whose Σ q · u is known, and for "cosine", which has none.
    """
    M, V = rows.logits.shape
    if V == 0:
        if formula.kind == "kl":
            rows.soft.zero_()
        return
    if not use_triton(rows.logits, teacher):
        total = None if means is None else means.sum(0)
        for part in _cache_sized(rows.logits):
            here = None if total is None else total[part]
            gradients_reference(rows.at(part), teacher[part], merged[part], here, formula)
        return
    sizes = V, rows.logits.stride(0), teacher.stride(0)
    numbers = *formula.weights, *formula.student, *formula.teacher
    branches = int(formula.hard), *formula.caps
    before, after = (rows.logits, teacher, rows.labels, merged), (rows.soft, rows.factor)
    if formula.kind == "cosine":
        launch_rows(_cosine_gradient_kernel, rows, formula, (*before, *after), (*sizes, *numbers, *branches))
        return
    world = 0 if means is None else means.shape[0]
    arguments = *sizes, M, world, formula.beta, formula.k, *numbers, formula.kind, *branches
    launch_rows(_distill_gradient_kernel, rows, formula, (*before, means, *after), arguments)
