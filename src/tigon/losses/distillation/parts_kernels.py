"""The kernels of distillation where classes lie on several devices: those of kernels.py, cut where numbers are sent.

A merged row has MERGED numbers. For softmaxes: the student's max z and log-sum, the teacher's, and the student's
log-sum at temperature 1. For cosine: 1 / |a|, 1 / |b|, the cosine, max z and log-sum at temperature 1. Labels are those
of tigon.ops.shard_statistics: the label of another device's class is negative, and no logit is read for it.
"""

from __future__ import annotations

from tigon.losses.distillation.kernels import LN2, LOG2E, LOWEST, _at_least, _fold_at_one, _logit, _skip
from tigon.ops.divergence import _fold, _sides
from tigon.runtime import do_not_specialize, jit, tl

# ------------------------------------------------------------------------------------- what a device says of its own


@jit
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
        _products(
            logits_ptr, teacher_ptr, out_ptr, V, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP,
            TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
    else:
        _normalisers(
            logits_ptr, teacher_ptr, out_ptr, V, k, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP,
            TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
    if HARD:
        z_target, _steep = _logit(logits_ptr, label, label >= 0, scale, softcap, 0.0, SOFTCAP)
        tl.store(out_ptr + (3 if COSINE else 4), z_target)


@jit
def _normalisers(
    logits_ptr, teacher_ptr, out_ptr, V, k, softcap, scale, teacher_softcap, teacher_scale, HARD: tl.constexpr,
    SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """max z and Σ exp(z − max) of either side, and with HARD 2 the student's sum at temperature 1."""
    none = float("-inf")
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # A finite start: a lane that has seen only -inf must not compute inf - inf.
    top_a = tl.full((BLOCK,), LOWEST, tl.float32)
    top_b = tl.full((BLOCK,), LOWEST, tl.float32)
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, DEPTH * BLOCK):
        at = start + tile
        a, _ = _logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
        before = top_a
        top_a, sum_a, _, _ = _fold(a, top_a, sum_a, k)
        if HARD == 2:
            sum_h = _fold_at_one(a, before, top_a, sum_h)
        b, _ = _logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
        top_b, sum_b, _, _ = _fold(b, top_b, sum_b, k)
    row_a = tl.max(top_a, 0)
    row_b = tl.max(top_b, 0)
    tl.store(out_ptr, row_a)
    tl.store(out_ptr + 1, tl.sum(sum_a * tl.exp2((top_a - row_a) * k), 0))
    tl.store(out_ptr + 2, row_b)
    tl.store(out_ptr + 3, tl.sum(sum_b * tl.exp2((top_b - row_b) * k), 0))
    if HARD == 2:
        tl.store(out_ptr + 5, tl.sum(sum_h * tl.exp2((top_a - row_a) * LOG2E), 0))


@jit
def _products(
    logits_ptr, teacher_ptr, out_ptr, V, softcap, scale, teacher_softcap, teacher_scale, HARD: tl.constexpr,
    SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a·a, a·b, b·b, and max z and Σ exp(z − max) of the student's softmax at temperature 1."""
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    sum_aa = tl.zeros((BLOCK,), tl.float32)
    sum_ab = tl.zeros((BLOCK,), tl.float32)
    sum_bb = tl.zeros((BLOCK,), tl.float32)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, DEPTH * BLOCK):
        at = start + tile
        a, _ = _logit(logits_ptr, at, at < V, scale, softcap, 0.0, SOFTCAP)
        b, _ = _logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, 0.0, TEACHER_SOFTCAP)
        sum_aa += tl.sum(a * a, 0)
        sum_ab += tl.sum(a * b, 0)
        sum_bb += tl.sum(b * b, 0)
        if HARD:
            top, total, _, _ = _fold(tl.where(at < V, a, float("-inf")), top, total, LOG2E)
    tl.store(out_ptr, tl.sum(sum_aa, 0))
    tl.store(out_ptr + 1, tl.sum(sum_ab, 0))
    tl.store(out_ptr + 2, tl.sum(sum_bb, 0))
    if HARD:
        row_top = tl.max(top, 0)
        tl.store(out_ptr + 4, row_top)
        tl.store(out_ptr + 5, tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0))


# ---------------------------------------------------------------------------------------------- what all say together


@jit
def _log2_sums(
    parts_ptr, rows, inside, M, world, k, TOP: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The maximum over all devices and log₂ of their sum, from each device's maximum and sum in columns TOP and SUM."""
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    for part in range(world):
        top = tl.maximum(top, tl.load(parts_ptr + (part * M + rows) * COLUMNS + TOP, mask=inside, other=LOWEST))
    total = tl.zeros((BLOCK,), tl.float32)
    # In the order of the devices: all of them get the same bits.
    for part in range(world):
        at = parts_ptr + (part * M + rows) * COLUMNS
        step = tl.maximum((tl.load(at + TOP, mask=inside, other=LOWEST) - top) * k, -1000.0)
        total += tl.load(at + SUM, mask=inside, other=1.0) * tl.exp2(step)
    return top, tl.log2(total)


@jit
def _total(parts_ptr, rows, inside, M, world, AT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(world):
        total += tl.load(parts_ptr + (part * M + rows) * COLUMNS + AT, mask=inside, other=0.0)
    return total


@jit
@do_not_specialize("M", "world")
def _merge_distill_kernel(
    parts_ptr, labels_ptr, hard_ptr, merged_ptr, M, world, k, COSINE: tl.constexpr, HARD: tl.constexpr,
    COLUMNS: tl.constexpr, MERGED: tl.constexpr, IGNORED: tl.constexpr, OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of BLOCK rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < M
    merged_ptr += rows * MERGED
    if COSINE:
        # One norm at a time: the product of two large norms may overflow.
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
        # A maximum and a log-sum are kept apart: their sum would be rounded at its own size.
        top, log_a = _log2_sums(parts_ptr, rows, inside, M, world, k, 0, 1, COLUMNS, BLOCK)
        top_b, log_b = _log2_sums(parts_ptr, rows, inside, M, world, k, 2, 3, COLUMNS, BLOCK)
        tl.store(merged_ptr, top, mask=inside)
        tl.store(merged_ptr + 1, log_a, mask=inside)
        tl.store(merged_ptr + 2, top_b, mask=inside)
        tl.store(merged_ptr + 3, log_b, mask=inside)
        log_h = log_a
        if HARD == 2:
            _, log_h = _log2_sums(parts_ptr, rows, inside, M, world, LOG2E, 0, 5, COLUMNS, BLOCK)
    if HARD:
        labels = tl.load(labels_ptr + rows, mask=inside, other=IGNORED)
        z_target = _total(parts_ptr, rows, inside, M, world, 3 if COSINE else 4, COLUMNS, BLOCK)
        log_h = tl.where(labels != OUTSIDE, log_h, float("nan"))
        hard = (top - z_target) + log_h * LN2
        tl.store(hard_ptr + rows, tl.where(labels != IGNORED, hard, 0.0), mask=inside)
        tl.store(merged_ptr + 4, log_h, mask=inside)


# ----------------------------------------------------------------------------------------------- values and gradients


@jit
def _distill_value_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, soft_ptr, mean_ptr, V, stride_m, stride_tm, beta, k, softcap,
    scale, teacher_softcap, teacher_scale, KIND: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    MERGED: tl.constexpr, IGNORED: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
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
    row_a = tl.load(merged_ptr)
    log_a = tl.load(merged_ptr + 1)
    row_b = tl.load(merged_ptr + 2)
    log_b = tl.load(merged_ptr + 3)
    none = float("-inf")
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    sum_u = tl.zeros((BLOCK,), tl.float32)
    for i in range(blocks):
        # From the end: the statistics kernel read that part last, and it may still be in the cache.
        at = (blocks - 1 - i) * (DEPTH * BLOCK) + tile
        a, _ = _logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
        b, _ = _logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
        terms, q, u = _sides((a - row_a) * k - log_a, (b - row_b) * k - log_b, beta, KIND)
        value += tl.sum(terms, 0)
        if KIND != "kl":
            sum_u += tl.sum(q * u, 0)
    tl.store(soft_ptr + row, tl.sum(value, 0) * (1.0 if KIND == "tvd" else LN2))
    tl.store(mean_ptr + row, tl.sum(sum_u, 0))


@jit
@do_not_specialize("M", "world")
def _distill_gradient_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, means_ptr, soft_ptr, factor_ptr, V, stride_m, stride_tm, M, world,
    beta, k, soft_weight, hard_weight, softcap, scale, teacher_softcap, teacher_scale, KIND: tl.constexpr,
    HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, MERGED: tl.constexpr,
    IGNORED: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient over this device's logits; for "kl" also a part of the divergence. means: (devices, M)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    merged_ptr += row * MERGED
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            _skip(logits_ptr, soft_ptr, None, row, V, True, BLOCK)
            return
    if factor_ptr is not None:
        factor = tl.load(factor_ptr).to(tl.float32)
        soft_weight *= factor
        hard_weight *= factor
    if KIND == "reverse" or KIND == "jsd":
        soft_weight *= LN2
    log_h = 0.0
    if HARD:
        log_h = tl.load(merged_ptr + 4)
        hard_weight = tl.where(log_h == log_h, hard_weight, float("nan"))  # NaN where the label is out of range
    row_a = tl.load(merged_ptr)
    log_a = tl.load(merged_ptr + 1)
    row_b = tl.load(merged_ptr + 2)
    log_b = tl.load(merged_ptr + 3)
    mean_u = 0.0
    if means_ptr is not None:
        for part in range(world):
            # In the order of the devices: all of them get the same bits.
            mean_u += tl.load(means_ptr + part * M + row)
    none = float("-inf")
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, DEPTH * BLOCK):
        at = start + tile
        a, slope = _logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
        b, _ = _logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
        lq = (a - row_a) * k - log_a
        terms, q, u = _sides(lq, (b - row_b) * k - log_b, beta, KIND)
        if KIND == "kl":
            value += tl.sum(terms, 0)
            dz = (q - u) * soft_weight
        else:
            dz = q * (u - mean_u) * soft_weight
        if HARD:
            of_hard = q if HARD == 1 else tl.exp2((a - row_a) * LOG2E - log_h)
            dz += hard_weight * (of_hard - tl.where(at == label, 1.0, 0.0))
        dx = (dz * slope).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + at, dx, mask=at < V)
    if KIND == "kl":
        tl.store(soft_ptr + row, tl.sum(value, 0) * LN2)


@jit
def _cosine_gradient_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, soft_ptr, factor_ptr, V, stride_m, stride_tm, soft_weight,
    hard_weight, softcap, scale, teacher_softcap, teacher_scale, HARD: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr, MERGED: tl.constexpr, IGNORED: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
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
            _skip(logits_ptr, soft_ptr, None, row, V, True, BLOCK)
            return
    if factor_ptr is not None:
        factor = tl.load(factor_ptr).to(tl.float32)
        soft_weight *= factor
        hard_weight *= factor
    over_a = tl.load(merged_ptr)
    over_b = tl.load(merged_ptr + 1)
    cosine = tl.load(merged_ptr + 2)
    row_top = 0.0
    log_h = 0.0
    if HARD:
        row_top = tl.load(merged_ptr + 3)
        log_h = tl.load(merged_ptr + 4)
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    for i in range(blocks):
        at = (blocks - 1 - i) * (DEPTH * BLOCK) + tile
        a, slope = _logit(logits_ptr, at, at < V, scale, softcap, 0.0, SOFTCAP)
        b, _ = _logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, 0.0, TEACHER_SOFTCAP)
        dz = (a * over_a * cosine - b * over_b) * over_a * soft_weight
        if HARD:
            p = tl.exp2((a - row_top) * LOG2E - log_h)
            dz += hard_weight * (p - tl.where(at == label, 1.0, 0.0))
        dx = (dz * slope).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + at, dx, mask=at < V)
