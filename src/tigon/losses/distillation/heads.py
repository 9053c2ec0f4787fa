"""Losses and student-logit gradients for a chunk's rows, from a teacher's logits.

Where this device has all classes, a launch reads each row two or three times: for the normalisers, for the mean slope
(forward KL needs none), and to write the gradient. Where classes are split over devices, the same kernel runs each
step as a separate launch, and in between the devices exchange

    1  both sides' maxima and sums (cosine: products), 3 to 6 numbers a row, as statistics.py has them
    2  except for kl and cosine, partial sums Σ q · u, 1 number a row

They sum the rows' divergences at the end of the walk. Every device adds parts in device order, so that all devices get
the same bits. The torch path always takes the multi-device steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import do_not_specialize, jit, tl, use_triton
from tigon.kernels.tiles.constants import LN2, LOG2E, LOWEST
from tigon.kernels.tiles.fold import fold
from tigon.losses.distillation import statistics, tiles
from tigon.losses.distillation.formula import Formula, terms_and_slopes
from tigon.losses.distillation.rows import Rows, launch_rows
from tigon.losses.distillation.statistics import (
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
    mask_ignored,
    one_hot,
)
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.ops.cross_entropy.launches import _cache_sized


def write_rows(rows: Rows, teacher: Tensor, formula: Formula, shards: Shards | None) -> None:
    """Write losses, and with `formula.gradient` overwrite the logits with the gradient. teacher: logits, same rows."""
    if shards is not None:
        _write_in_steps(rows, teacher, formula, shards)
    elif use_triton(rows.logits, teacher):
        values = formula.kind != "kl" or not formula.gradient
        _launch(rows, teacher, formula, hard=rows.hard, values=values, gradient=formula.gradient)
    else:
        # A few rows at a time: the steps make several tensors as wide as the logits.
        for part in _cache_sized(rows.logits):
            _write_in_steps(rows.select(part).with_local_labels(formula), teacher[part], formula, None)


def _write_in_steps(rows: Rows, teacher: Tensor, formula: Formula, shards: Shards | None) -> None:
    own = statistics.compute_statistics(rows, teacher, formula)
    # Waiting right away is faster: a second logits buffer would overlap the exchange with the next chunk's product, but
    # chunks would be half as large and add to dW twice as often.
    merged = statistics.merge(_gather(own, shards), rows, formula)
    means = None
    if formula.kind == "cosine":
        rows.soft.copy_(mask_ignored(1.0 - merged.select(-1, COSINE), rows.labels))
    elif formula.kind != "kl" or not formula.gradient:
        # For forward KL the gradient pass also gives the value, and Σ q · u is not needed.
        mean = write_values(rows, teacher, merged, formula)
        if formula.kind != "kl" and formula.gradient:
            means = _gather(mean, shards)
    if formula.gradient:
        write_gradients(rows, teacher, merged, means, formula)


def _gather(own: Tensor, shards: Shards | None) -> Tensor:
    return own.unsqueeze(0) if shards is None else shards.gather(own).wait()


def sum_over_devices(soft: Tensor, formula: Formula, shards: Shards | None) -> Tensor:
    """The rows' soft losses over all classes, from this device's parts."""
    if shards is None or formula.rest or formula.kind == "cosine" or not soft.numel():
        return soft
    # Gather and sum instead of all-reduce: all devices then add in the same order.
    return torch.sum(shards.gather(soft).wait(), 0)


# -------------------------------------------------------------------------------------------------------- reference


def evaluate_classes(z: Tensor, t: Tensor, merged: Tensor, formula: Formula) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence's terms, q, and the slopes along log q, (M, V) each."""
    columns = merged.unsqueeze(-1).unbind(-2)  # (M, 1) each
    # Maximum and log-sum are subtracted in turn. Their sum would be rounded at the maximum's magnitude.
    lq = (z - columns[TOP_A]) / formula.temperature - columns[LOG_A]
    lp = (t - columns[TOP_B]) / formula.temperature - columns[LOG_B]
    terms, slopes = terms_and_slopes(formula, lq, lp)
    return terms, lq.exp(), slopes


def values_reference(rows: Rows, teacher: Tensor, merged: Tensor, formula: Formula) -> Tensor:
    z, t = formula.student(rows.wide)[0], formula.teacher(teacher.to(rows.soft.dtype))[0]
    terms, _, slopes = evaluate_classes(z, t, merged, formula)
    rows.write(mask_ignored(terms.sum(-1), rows.labels), None, None)
    return mask_ignored(slopes.sum(-1), rows.labels)


def gradients_reference(rows: Rows, teacher: Tensor, merged: Tensor, total: Tensor | None, formula: Formula) -> None:
    """total: Σ slopes over all classes, (M,); None for forward KL, whose total is −1."""
    z, slope = formula.student(rows.wide)
    t, _ = formula.teacher(teacher.to(rows.soft.dtype))
    columns, soft = merged.unsqueeze(-1).unbind(-2), None
    if formula.kind == "cosine":
        dz = (z * columns[OVER_A] * columns[COSINE] - t * columns[OVER_B]) * columns[OVER_A]
        top = columns[COSINE_TOP_A]
    else:
        terms, q, slopes = evaluate_classes(z, t, merged, formula)
        # The softmax Jacobian. Forward KL's slopes are −p, and Σ −p over all devices' classes is −1.
        dz = slopes - q * (-1.0 if total is None else total.unsqueeze(-1))
        top = columns[TOP_A]
        if formula.kind == "kl":
            soft = mask_ignored(terms.sum(-1), rows.labels)
    dz = dz * formula.weights.soft
    if formula.hard and rows.labels is not None:
        dz = dz + formula.weights.hard * ((z - top - columns[LOG_H]).exp() - one_hot(rows.labels, z))
    rows.write(soft, None, mask_ignored(dz * slope, rows.labels))


# ---------------------------------------------------------------------------------------------------------- kernels

# One program per row: V logits for this device's classes, overwritten by the gradient. a: student, b: teacher.
#   labels          (M,) or None. A row with ignore_index gets zero losses and gradient
#   soft, hard      (M,), the losses; factor: 0-d, multiplies the gradient, or None
#   merged          (M, MERGED) normalisers over all devices; None: this device has all classes, and computes them here
#   mean, means     (M,) receives this device's part of Σ q · u; (world, M), all devices' parts. None: no exchange
#   soft_weight, hard_weight    factors on both gradients with respect to the logits
#   VALUES          compute the divergence before the gradient. GRADIENT: write the gradient


@jit
@do_not_specialize("ignore_index", "M", "world")
def _distill_kernel(
    logits_ptr, teacher_ptr, labels_ptr, soft_ptr, hard_ptr, factor_ptr, merged_ptr, mean_ptr, means_ptr,
    V, stride_m, stride_tm, ignore_index, M, world, beta, k, soft_weight, hard_weight, softcap, scale, teacher_softcap,
    teacher_scale, KIND: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    VALUES: tl.constexpr, GRADIENT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # int64: row · stride exceeds 2³¹ in a chunk of more than 4 GiB.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            tiles.write_zeros(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            if mean_ptr is not None:
                tl.store(mean_ptr + row, 0.0)
            return
    none = float("-inf")
    tile = tiles.tile_columns(DEPTH, BLOCK)
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    if merged_ptr is None:
        # A finite start: a lane that has seen only -inf must not compute inf - inf.
        top_a = tl.full((BLOCK,), LOWEST, tl.float32)
        top_b = tl.full((BLOCK,), LOWEST, tl.float32)
        sum_a = tl.zeros((BLOCK,), tl.float32)
        sum_b = tl.zeros((BLOCK,), tl.float32)
        sum_h = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, DEPTH * BLOCK):
            at = start + tile
            # Both loads before either sum: two memory requests are then in flight.
            a, _ = tiles.load_logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
            b, _ = tiles.load_logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
            before = top_a
            top_a, sum_a, _, _ = fold(a, top_a, sum_a, k)
            top_b, sum_b, _, _ = fold(b, top_b, sum_b, k)
            if HARD == 2:
                sum_h = tiles.fold_at_one(a, before, top_a, sum_h)
        row_a = tl.max(top_a, 0)
        row_b = tl.max(top_b, 0)
        log_a = tl.log2(tl.sum(sum_a * tl.exp2((top_a - row_a) * k), 0))
        log_b = tl.log2(tl.sum(sum_b * tl.exp2((top_b - row_b) * k), 0))
        log_h = log_a
        if HARD:
            if HARD == 2:
                log_h = tl.log2(tl.sum(sum_h * tl.exp2((top_a - row_a) * LOG2E), 0))
            inside = (label >= 0) & (label < V)
            z_target, _steep = tiles.load_logit(logits_ptr, label, inside, scale, softcap, 0.0, SOFTCAP)
            hard, log_h = tiles.hard_loss(z_target, label, row_a, log_h, V)
            if HARD == 1:  # HARD 2 takes log_h itself, which carries the NaN of a label out of range
                hard_weight = tl.where(log_h == log_h, hard_weight, float("nan"))
            tl.store(hard_ptr + row, hard)
    else:
        merged_ptr += row * MERGED
        row_a = tl.load(merged_ptr + TOP_A)
        log_a = tl.load(merged_ptr + LOG_A)
        row_b = tl.load(merged_ptr + TOP_B)
        log_b = tl.load(merged_ptr + LOG_B)
        log_h = log_a
        if HARD:
            log_h = tl.load(merged_ptr + LOG_H)
            hard_weight = tl.where(log_h == log_h, hard_weight, float("nan"))

    value = tl.zeros((BLOCK,), tl.float32)
    mean_u = 0.0
    if VALUES:
        value, sum_u = tiles.sum_values(
            logits_ptr, teacher_ptr, V, blocks, tile, row_a, log_a, row_b, log_b, beta, k, softcap, scale,
            teacher_softcap, teacher_scale, KIND, SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
        # The gradient q · (u − Σ q · u) needs the whole row's sum first: hence the third read.
        mean_u = tl.sum(sum_u, 0)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean_u)
    if means_ptr is not None:
        for part in range(world):
            mean_u += tl.load(means_ptr + part * M + row)
    if GRADIENT:
        soft_weight, hard_weight = tiles.multiply_weights(soft_weight, hard_weight, factor_ptr)
        # These kinds' slopes are base-2 logarithms: a factor per row converts them to natural logarithms.
        if KIND == "reverse" or KIND == "jsd":
            soft_weight *= LN2
        if merged_ptr is None:
            # Every thread has read the target's logit above; one thread overwrites it below.
            tl.debug_barrier()
        value = tiles.write_gradients(
            logits_ptr, teacher_ptr, label, value, V, tile, row_a, log_a, row_b, log_b, log_h, mean_u, soft_weight,
            hard_weight, beta, k, softcap, scale, teacher_softcap, teacher_scale, KIND, HARD, SOFTCAP, TEACHER_SOFTCAP,
            DEPTH, BLOCK,
        )  # fmt: skip
    if VALUES or KIND == "kl":
        # TVD's terms are not logarithms, the others' are to base 2.
        tl.store(soft_ptr + row, tl.sum(value, 0) * (1.0 if KIND == "tvd" else LN2))


# As above; the soft loss is 1 − a·b / (|a| |b|) on the logits themselves. With merged the soft loss is already written.
@jit
@do_not_specialize("ignore_index")
def _distill_cosine_kernel(
    logits_ptr, teacher_ptr, labels_ptr, soft_ptr, hard_ptr, factor_ptr, merged_ptr,
    V, stride_m, stride_tm, ignore_index, soft_weight, hard_weight, softcap, scale, teacher_softcap, teacher_scale,
    HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # int64: row · stride exceeds 2³¹ in a chunk of more than 4 GiB.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            tiles.write_zeros(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    tile = tiles.tile_columns(DEPTH, BLOCK)
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    if merged_ptr is None:
        sum_aa, sum_ab, sum_bb, top, total = tiles.sum_products(
            logits_ptr, teacher_ptr, V, tile, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP,
            TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
        # Divide by each norm in turn: the product of two large norms may overflow.
        over_a = 1.0 / tiles.bound_norm(tl.sqrt(tl.sum(sum_aa, 0)))
        over_b = 1.0 / tiles.bound_norm(tl.sqrt(tl.sum(sum_bb, 0)))
        cosine = tl.sum(sum_ab, 0) * over_a * over_b
        tl.store(soft_ptr + row, 1.0 - cosine)
        row_top = tl.max(top, 0)
        log_h = 0.0
        if HARD:
            log_h = tl.log2(tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0))
            inside = (label >= 0) & (label < V)
            z_target, _steep = tiles.load_logit(logits_ptr, label, inside, scale, softcap, 0.0, SOFTCAP)
            # log_h is NaN for a label out of range, and makes the row's whole gradient NaN.
            hard, log_h = tiles.hard_loss(z_target, label, row_top, log_h, V)
            tl.store(hard_ptr + row, hard)
    else:
        merged_ptr += row * MERGED
        over_a = tl.load(merged_ptr + OVER_A)
        over_b = tl.load(merged_ptr + OVER_B)
        cosine = tl.load(merged_ptr + COSINE)
        row_top = 0.0
        log_h = 0.0
        if HARD:  # without a cross entropy these two columns are never written
            row_top = tl.load(merged_ptr + COSINE_TOP_A)
            log_h = tl.load(merged_ptr + LOG_H)
    if GRADIENT:
        soft_weight, hard_weight = tiles.multiply_weights(soft_weight, hard_weight, factor_ptr)
        if merged_ptr is None:
            # Every thread has read the target's logit above; one thread overwrites it below.
            tl.debug_barrier()
        tiles.write_cosine_gradients(
            logits_ptr, teacher_ptr, label, V, blocks, tile, over_a, over_b, cosine, row_top, log_h, soft_weight,
            hard_weight, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launches


def write_values(rows: Rows, teacher: Tensor, merged: Tensor, formula: Formula) -> Tensor:
    """Write this device's part of each row's divergence, and return the device's part of Σ q · u, (M,)."""
    # fp32, like the losses: all devices' parts are added before they are subtracted from u.
    mean = torch.empty_like(rows.soft)
    if rows.logits.shape[1] == 0:  # a device without classes adds nothing to the sums, which all devices gather
        rows.soft.zero_()
        return mean.zero_()
    if not use_triton(rows.logits, teacher):
        for part in _cache_sized(rows.logits):
            mean[part] = values_reference(rows.select(part), teacher[part], merged[part], formula)
        return mean
    _launch(rows, teacher, formula, merged=merged, mean=mean, values=True, gradient=False)
    return mean


def write_gradients(rows: Rows, teacher: Tensor, merged: Tensor, means: Tensor | None, formula: Formula) -> None:
    """Overwrite this device's logits with the gradient; for "kl" also write the device's part of each row's divergence.

    means: (devices, M) from `write_values`. None for "kl", where Σ q · u is known, and for "cosine", which has none.
    """
    if rows.logits.shape[1] == 0:
        if formula.kind == "kl":  # uninitialised otherwise
            rows.soft.zero_()
        return
    if not use_triton(rows.logits, teacher):
        total = None if means is None else means.sum(0)
        for part in _cache_sized(rows.logits):
            here = None if total is None else total[part]
            gradients_reference(rows.select(part), teacher[part], merged[part], here, formula)
    else:
        _launch(rows, teacher, formula, merged=merged, means=means, values=False, gradient=True)


def _launch(
    rows: Rows, teacher: Tensor, formula: Formula, *, hard: Tensor | None = None, merged: Tensor | None = None,
    mean: Tensor | None = None, means: Tensor | None = None, values: bool, gradient: bool,
) -> None:  # fmt: skip
    """values: compute the divergence, which a cosine's normalisers hold already."""
    M, V = rows.logits.shape
    # With merged the merge has written the hard losses; values alone need no second softmax.
    kind_of_hard = int(formula.hard) if gradient or merged is None else 0
    ignore_index = formula.ignore_index if merged is None else IGNORED.value
    # Strides, because buffer rows are padded where V is not a multiple of 16 bytes (`empty_logits`).
    sizes: tuple[Any, ...] = V, rows.logits.stride(0), teacher.stride(0), ignore_index
    numbers: tuple[Any, ...] = *formula.weights, *formula.student, *formula.teacher
    tensors: tuple[Tensor | None, ...] = rows.logits, teacher, rows.labels, rows.soft, hard, rows.factor, merged
    if formula.kind == "cosine":
        branches: tuple[Any, ...] = kind_of_hard, *formula.caps, gradient
        launch_rows(_distill_cosine_kernel, rows, formula, tensors, (*sizes, *numbers, *branches))
        return
    exchange = (None, None) if means is None else (M, means.shape[0])
    arguments = *sizes, *exchange, formula.beta, formula.k, *numbers
    branches = formula.kind, kind_of_hard, *formula.caps, values, gradient
    tensors = *tensors, mean, means
    launch_rows(_distill_kernel, rows, formula, tensors, (*arguments, *branches), hard=kind_of_hard > 0)
