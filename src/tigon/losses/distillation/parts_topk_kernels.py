"""The kernels of a teacher's K classes where classes lie on several devices: the kernel of kernels.py, cut in two.

A device's statistics of a row are 4 + K numbers: max z and Σ exp(z − max) of its classes that the teacher did not give,
the target's logit, that sum at temperature 1, and the K given classes' logits. A logit of another device is 0, so that
sums over the devices are the logits.
"""

from __future__ import annotations

from tigon.losses.distillation.kernels import (
    LEAST_REST,
    LN2,
    LOG2E,
    LOWEST,
    _fold_at_one,
    _log2_sum,
    _logit,
    _rest,
    _skip,
)
from tigon.ops.divergence import _fold, _sides
from tigon.runtime import do_not_specialize, jit, tl


@jit
def _topk_statistics_kernel(
    logits_ptr, ids_ptr, logprobs_ptr, labels_ptr, out_ptr, V, K, first, classes, stride_m, stride_i, stride_l, k,
    softcap, scale, SUM: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, IGNORED: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the statistics, and -inf over the given classes' logits, which marks them for the gradient."""
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
    z_k = tl.where(outside, float("nan"), z_k)  # an id out of range reads no logit, and makes the loss NaN
    z_target = 0.0
    if HARD:
        z_target, _slope = _logit(logits_ptr, label, label >= 0, scale, softcap, 0.0, SOFTCAP)
    tl.debug_barrier()
    tl.store(logits_ptr + ids, tl.full((BLOCK_K,), none, logits_ptr.dtype.element_ty), mask=here)
    tl.debug_barrier()

    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    if SUM:
        for start in range(0, V, DEPTH * BLOCK):
            at = start + tile
            z, _ = _rest(logits_ptr, at, V, scale, softcap, SOFTCAP)
            before = top
            top, total, _, _ = _fold(z, top, total, k)
            if HARD == 2:
                sum_h = _fold_at_one(z, before, top, sum_h)
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * k), 0)
    at_one = row_total
    if HARD == 2:
        at_one = tl.sum(sum_h * tl.exp2((top - row_top) * LOG2E), 0)
    tl.store(out_ptr, row_top)
    tl.store(out_ptr + 1, row_total)
    tl.store(out_ptr + 2, z_target)
    tl.store(out_ptr + 3, at_one)
    tl.store(out_ptr + 4 + at_k, z_k, mask=at_k < K)


@jit
@do_not_specialize("M", "world")
def _topk_gradient_kernel(
    logits_ptr, ids_ptr, logprobs_ptr, labels_ptr, parts_ptr, soft_ptr, hard_ptr, factor_ptr, V, K, M, world, first,
    classes, stride_m, stride_i, stride_l, beta, k, soft_weight, hard_weight, softcap, scale, KIND: tl.constexpr,
    REST: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, IGNORED: tl.constexpr,
    OUTSIDE: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the losses, the same on all devices, and the gradient over this device's logits."""
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

    # Merged over the devices: the rest's max z and sums, and the logits that a single device has.
    top_rest = LOWEST
    for part in range(world):
        top_rest = tl.maximum(top_rest, tl.load(parts_ptr + (part * M + row) * (4 + K)))
    total = 0.0
    at_one = 0.0
    z_target = 0.0
    z_k = tl.zeros((BLOCK_K,), tl.float32)
    for part in range(world):
        own = parts_ptr + (part * M + row) * (4 + K)
        step = tl.load(own) - top_rest
        total += tl.load(own + 1) * tl.exp2(tl.maximum(step * k, -1000.0))
        z_target += tl.load(own + 2)
        at_one += tl.load(own + 3) * tl.exp2(tl.maximum(step * LOG2E, -1000.0))
        z_k += tl.load(own + 4 + at_k, mask=at_k < K, other=0.0)
    z_k = tl.where(log_p == none, none, z_k)
    log_p = log_p * LOG2E
    log_rest = tl.log2(total)

    top_k = tl.maximum(tl.max(z_k, 0), LOWEST)
    row_top = tl.maximum(top_rest, top_k)
    if REST == "renormalize":
        log_all = tl.log2(tl.sum(tl.exp2((z_k - top_k) * k), 0))
        lq = (z_k - top_k) * k - log_all
        lp = log_p - _log2_sum(log_p)
    else:
        whole = tl.sum(tl.exp2((z_k - row_top) * k), 0) + tl.exp2((top_rest - row_top) * k + log_rest)
        log_all = tl.log2(whole)
        lq = (z_k - row_top) * k - log_all
        lp = log_p
    log_tail = (top_rest - row_top) * k + log_rest - log_all
    if REST == "tail":
        tail = 1.0 - tl.sum(tl.exp2(lp), 0)
        tail = tl.where(tail < LEAST_REST, tl.where(log_tail == none, 0.0, LEAST_REST), tail)
        tail = tl.where(tl.sum(given.to(tl.int32), 0) == classes, 0.0, tail)  # all classes given: 1 − Σ p is rounding
        lq = tl.where(at_k == K, log_tail, lq)
        lp = tl.where(at_k == K, tl.log2(tail), lp)
    log_h = log_all
    if HARD:
        step = (top_rest - row_top) * LOG2E
        log_h = tl.log2(tl.sum(tl.exp2((z_k - row_top) * LOG2E), 0) + at_one * tl.exp2(step))
        log_h = tl.where(label != OUTSIDE, log_h, float("nan"))
        tl.store(hard_ptr + row, (row_top - z_target) + log_h * LN2)

    terms, q, u = _sides(lq, lp, beta, KIND)
    tl.store(soft_ptr + row, tl.sum(terms, 0) * (1.0 if KIND == "tvd" else LN2))
    if GRADIENT:
        # d: the derivative with respect to each given class's logit, and to the rest's as if it were one class.
        if KIND == "kl":
            mean = -tl.sum(u, 0)
            d = -u - q * mean
        else:
            if KIND != "tvd":
                u = u * LN2
            if KIND == "reverse" and REST == "drop":
                u += 1.0  # the given classes' q do not sum to 1, so the slope of Σ q does not vanish
            mean = tl.sum(q * u, 0)
            d = q * (u - mean)
        of_rest = 0.0
        if REST == "tail":
            of_rest = tl.sum(tl.where(at_k == K, d, 0.0), 0)
        elif REST == "drop":
            of_rest = -mean * tl.exp2(log_tail)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr).to(tl.float32)
            soft_weight *= factor
            hard_weight *= factor
        tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        blocks = tl.cdiv(V, DEPTH * BLOCK)
        for i in range(blocks):
            at = (blocks - 1 - i) * (DEPTH * BLOCK) + tile
            z, slope = _rest(logits_ptr, at, V, scale, softcap, SOFTCAP)
            dz = tl.zeros((DEPTH, BLOCK), tl.float32)
            if REST != "renormalize":
                # Without a rest log_rest is -inf, and the exponent NaN.
                share = tl.where(z == none, 0.0, tl.exp2((z - top_rest) * k - log_rest))
                dz = soft_weight * of_rest * share
            if HARD:
                dz += hard_weight * (tl.exp2((z - row_top) * LOG2E - log_h) - tl.where(at == label, 1.0, 0.0))
            dx = (dz * slope).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + at, dx, mask=at < V)
        dz = d * soft_weight
        if HARD:
            dz += hard_weight * (tl.exp2((z_k - row_top) * LOG2E - log_h) - tl.where(ids == label, 1.0, 0.0))
        slope_k = scale
        if SOFTCAP:
            t = z_k / softcap  # the tanh, from the capped logit: the raw one has been overwritten
            slope_k = scale * (1.0 - t * t)
        dx = (dz * slope_k).to(logits_ptr.dtype.element_ty)
        tl.debug_barrier()
        tl.store(logits_ptr + ids, dx, mask=here)
