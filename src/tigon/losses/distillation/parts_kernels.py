"""The kernels of distillation where classes lie on several devices: those of kernels.py, taken apart.

Once the parts of a row are put together it has MERGED numbers. Of softmaxes: the student's max z and log-sum, the
teacher's, and the student's log-sum at temperature 1; of cosine: 1 / |a|, 1 / |b|, cosine, max z and log-sum at
temperature 1.
"""

from __future__ import annotations

from tigon.backend import tl, triton
from tigon.losses.distillation.kernels import (
    LN2,
    LOG2E,
    LOWEST,
    _at_least,
    _factored,
    _hard_loss,
    _logit,
    _normalisers,
    _products,
    _skip,
    _take_out,
    _topk_rows,
    _value_and_mean,
    _write_cosine_gradient,
    _write_gradient,
)


@triton.jit
def _distill_statistics_kernel(
    logits_ptr, teacher_ptr, labels_ptr, out_ptr, V, stride_m, stride_tm, k, softcap, scale, teacher_softcap,
    teacher_scale, COSINE: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr, IGNORED: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    out_ptr += row * COLUMNS
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            for i in tl.static_range(COLUMNS):
                tl.store(out_ptr + i, 0.0)
            return
    if COSINE:
        sum_aa, sum_ab, sum_bb, top, total = _products(
            logits_ptr, teacher_ptr, V, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP, TEACHER_SOFTCAP,
            DEPTH, BLOCK,
        )  # fmt: skip
        tl.store(out_ptr, sum_aa)
        tl.store(out_ptr + 1, sum_ab)
        tl.store(out_ptr + 2, sum_bb)
        if HARD:
            tl.store(out_ptr + 4, top)
            tl.store(out_ptr + 5, total)
    else:
        row_a, sum_a, row_b, sum_b, sum_h = _normalisers(
            logits_ptr, teacher_ptr, V, k, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP,
            TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
        tl.store(out_ptr, row_a)
        tl.store(out_ptr + 1, sum_a)
        tl.store(out_ptr + 2, row_b)
        tl.store(out_ptr + 3, sum_b)
        if HARD == 2:
            tl.store(out_ptr + 5, sum_h)
    if HARD:
        z_target, _steep = _logit(logits_ptr, label, label >= 0, scale, softcap, 0.0, SOFTCAP)
        tl.store(out_ptr + (3 if COSINE else 4), z_target)


@triton.jit
def _log2_sums(
    parts_ptr, rows, inside, M, world, k, TOP: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of all devices the maximum, and log₂ of the sum, given those of each in these columns."""
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    for part in range(world):
        top = tl.maximum(top, tl.load(parts_ptr + (part * M + rows) * COLUMNS + TOP, mask=inside, other=LOWEST))
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(world):
        at = parts_ptr + (part * M + rows) * COLUMNS
        step = tl.maximum((tl.load(at + TOP, mask=inside, other=LOWEST) - top) * k, -1000.0)
        total += tl.load(at + SUM, mask=inside, other=1.0) * tl.exp2(step)
    return top, tl.log2(total)


@triton.jit
def _total(parts_ptr, rows, inside, M, world, AT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(world):
        total += tl.load(parts_ptr + (part * M + rows) * COLUMNS + AT, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["M", "world"])
def _merge_distill_kernel(
    parts_ptr, labels_ptr, hard_ptr, merged_ptr, M, world, k, COSINE: tl.constexpr, HARD: tl.constexpr,
    COLUMNS: tl.constexpr, MERGED: tl.constexpr, IGNORED: tl.constexpr, OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < M
    merged_ptr += rows * MERGED
    if COSINE:
        over_a = 1.0 / _at_least(tl.sqrt(_total(parts_ptr, rows, inside, M, world, 0, COLUMNS, BLOCK)))
        over_b = 1.0 / _at_least(tl.sqrt(_total(parts_ptr, rows, inside, M, world, 2, COLUMNS, BLOCK)))
        cosine = _total(parts_ptr, rows, inside, M, world, 1, COLUMNS, BLOCK) * over_a * over_b
        tl.store(merged_ptr, over_a, mask=inside)
        tl.store(merged_ptr + 1, over_b, mask=inside)
        tl.store(merged_ptr + 2, cosine, mask=inside)
        if HARD:
            top, log_h = _log2_sums(parts_ptr, rows, inside, M, world, LOG2E, 4, 5, COLUMNS, BLOCK)
            tl.store(merged_ptr + 3, top, mask=inside)
    else:
        top, log_a = _log2_sums(parts_ptr, rows, inside, M, world, k, 0, 1, COLUMNS, BLOCK)
        row_b, log_b = _log2_sums(parts_ptr, rows, inside, M, world, k, 2, 3, COLUMNS, BLOCK)
        tl.store(merged_ptr, top, mask=inside)
        tl.store(merged_ptr + 1, log_a, mask=inside)
        tl.store(merged_ptr + 2, row_b, mask=inside)
        tl.store(merged_ptr + 3, log_b, mask=inside)
        log_h = log_a
        if HARD == 2:
            _, log_h = _log2_sums(parts_ptr, rows, inside, M, world, LOG2E, 0, 5, COLUMNS, BLOCK)
    if HARD:
        labels = tl.load(labels_ptr + rows, mask=inside, other=IGNORED)
        z_target = _total(parts_ptr, rows, inside, M, world, 3 if COSINE else 4, COLUMNS, BLOCK)
        hard, log_h = _hard_loss(z_target, labels != OUTSIDE, top, log_h)
        tl.store(hard_ptr + rows, tl.where(labels != IGNORED, hard, 0.0), mask=inside)
        tl.store(merged_ptr + 4, log_h, mask=inside)


@triton.jit
def _distill_value_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, soft_ptr, mean_ptr, V, stride_m, stride_tm, beta, k, softcap,
    scale, teacher_softcap, teacher_scale, KIND: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    MERGED: tl.constexpr, IGNORED: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This device's part of a row's divergence, and of Σ q · u."""
    row = tl.program_id(0).to(tl.int64)
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            tl.store(soft_ptr + row, 0.0)
            tl.store(mean_ptr + row, 0.0)
            return
    at = merged_ptr + row * MERGED
    value, mean_u = _value_and_mean(
        logits_ptr + row * stride_m, teacher_ptr + row * stride_tm, V, tl.load(at), tl.load(at + 1), tl.load(at + 2),
        tl.load(at + 3), beta, k, softcap, scale, teacher_softcap, teacher_scale, KIND, SOFTCAP, TEACHER_SOFTCAP,
        DEPTH, BLOCK,
    )  # fmt: skip
    tl.store(soft_ptr + row, value * (1.0 if KIND == "tvd" else LN2))
    tl.store(mean_ptr + row, mean_u)


@triton.jit(do_not_specialize=["M", "world"])
def _distill_gradient_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, means_ptr, soft_ptr, factor_ptr, V, M, world, stride_m, stride_tm,
    beta, k, soft_weight, hard_weight, softcap, scale, teacher_softcap, teacher_scale, KIND: tl.constexpr,
    HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, MERGED: tl.constexpr,
    IGNORED: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Over this device's logits; of "kl" its part of the divergence as well. means: (devices, M), or None."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            _skip(logits_ptr, soft_ptr, None, row, V, True, BLOCK)
            return
    at = merged_ptr + row * MERGED
    soft_weight, hard_weight = _factored(soft_weight, hard_weight, factor_ptr)
    log_h = 0.0
    if HARD:
        log_h = tl.load(at + 4)
        hard_weight = tl.where(log_h == log_h, hard_weight, float("nan"))
    if KIND == "cosine":
        top = 0.0
        if HARD:
            top = tl.load(at + 3)
        _write_cosine_gradient(
            logits_ptr, teacher_ptr, label, V, tl.load(at), tl.load(at + 1), tl.load(at + 2), top, log_h, soft_weight,
            hard_weight, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
    else:
        mean_u = 0.0
        if KIND != "kl":
            for part in range(world):
                mean_u += tl.load(means_ptr + part * M + row)
        value = _write_gradient(
            logits_ptr, teacher_ptr, label, V, tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), log_h,
            mean_u, beta, k, soft_weight, hard_weight, softcap, scale, teacher_softcap, teacher_scale, KIND, HARD,
            SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
        if KIND == "kl":
            tl.store(soft_ptr + row, value * LN2)


@triton.jit
def _topk_statistics_kernel(
    logits_ptr, ids_ptr, logprobs_ptr, labels_ptr, out_ptr, V, K, first, classes, stride_m, stride_i, stride_l, k,
    softcap, scale, SUM: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, IGNORED: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the classes that were not given max z and sums, the target's logit, and the K logits of those given."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    out_ptr += row * (4 + K)
    at_k = tl.arange(0, BLOCK_K)
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            for i in tl.static_range(4):
                tl.store(out_ptr + i, 0.0)
            tl.store(out_ptr + 4 + at_k, tl.zeros((BLOCK_K,), tl.float32), mask=at_k < K)
            return
    none = float("-inf")
    ids = tl.load(ids_ptr + row * stride_i + at_k, mask=at_k < K, other=0).to(tl.int64)
    log_p = tl.load(logprobs_ptr + row * stride_l + at_k, mask=at_k < K, other=none).to(tl.float32)
    outside = (log_p != none) & ((ids < 0) | (ids >= classes))
    ids -= first
    here = (log_p != none) & (ids >= 0) & (ids < V)
    z_k, _steep = _logit(logits_ptr, ids, here, scale, softcap, 0.0, SOFTCAP)
    z_k = tl.where(outside, float("nan"), z_k)  # one out of range reads nothing, and is loud
    z_target = 0.0
    if HARD:
        z_target, _slope = _logit(logits_ptr, label, label >= 0, scale, softcap, 0.0, SOFTCAP)
    top, total, of_rest = _take_out(logits_ptr, ids, here, V, k, softcap, scale, SUM, HARD, SOFTCAP, DEPTH, BLOCK)
    tl.store(out_ptr, top)
    tl.store(out_ptr + 1, total)
    tl.store(out_ptr + 2, z_target)
    tl.store(out_ptr + 3, of_rest)
    tl.store(out_ptr + 4 + at_k, z_k, mask=at_k < K)


@triton.jit(do_not_specialize=["M", "world"])
def _topk_gradient_kernel(
    logits_ptr, ids_ptr, logprobs_ptr, labels_ptr, parts_ptr, soft_ptr, hard_ptr, factor_ptr, V, K, M, world, first,
    classes, stride_m, stride_i, stride_l, beta, k, soft_weight, hard_weight, softcap, scale, KIND: tl.constexpr,
    REST: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, IGNORED: tl.constexpr,
    OUTSIDE: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The losses, which are the same on all devices, and over this device's logits the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            _skip(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    none = float("-inf")
    at_k = tl.arange(0, BLOCK_K)
    ids = tl.load(ids_ptr + row * stride_i + at_k, mask=at_k < K, other=0).to(tl.int64)
    log_p = tl.load(logprobs_ptr + row * stride_l + at_k, mask=at_k < K, other=none).to(tl.float32)
    given = (log_p != none) & (ids >= 0) & (ids < classes)
    ids -= first
    here = given & (ids >= 0) & (ids < V)
    top = LOWEST
    for part in range(world):
        top = tl.maximum(top, tl.load(parts_ptr + (part * M + row) * (4 + K)))
    total = 0.0
    of_rest = 0.0
    z_target = 0.0
    z_k = tl.zeros((BLOCK_K,), tl.float32)
    for part in range(world):
        at = parts_ptr + (part * M + row) * (4 + K)
        step = tl.load(at) - top
        total += tl.load(at + 1) * tl.exp2(tl.maximum(step * k, -1000.0))
        of_rest += tl.load(at + 3) * tl.exp2(tl.maximum(step * LOG2E, -1000.0))
        z_target += tl.load(at + 2)
        z_k += tl.load(at + 4 + at_k, mask=at_k < K, other=0.0)
    z_k = tl.where(log_p == none, none, z_k)
    slope_k = scale
    if SOFTCAP:
        t = z_k / softcap  # of a tanh, which is gone with the logit
        slope_k = scale * (1.0 - t * t)
    _topk_rows(
        logits_ptr, soft_ptr + row, hard_ptr + row if hard_ptr is not None else None, factor_ptr, ids, at_k, log_p,
        z_k, slope_k, given, here, label, label != OUTSIDE, z_target, top, total, of_rest, V, classes, K, beta, k,
        soft_weight, hard_weight, softcap, scale, KIND, REST, HARD, SOFTCAP, GRADIENT, DEPTH, BLOCK,
    )  # fmt: skip
