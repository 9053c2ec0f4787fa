"""The kernels of distillation: a row's losses, and the student's logits turned into the gradient in place.

One program a row, which reads the row two or three times: first for the normalisers, then for the mean slope (forward
KL needs none), last to write the gradient over the logits, which are scratch memory. The formulas are those of
tigon.ops.divergence. Logarithms are to the base 2: k = log2(e) / temperature turns differences of logits into them.

HARD: 0 without cross entropy; 1 with cross entropy at temperature 1, which shares the softmax of the soft loss; 2 with
cross entropy beside a soft loss at another temperature, which takes a second sum.
"""

from __future__ import annotations

from tigon.ops.cross_entropy.kernels import _cap
from tigon.ops.divergence import _fold, _sides
from tigon.runtime import do_not_specialize, jit, tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Smaller norms are raised to this one, as in torch.nn.functional.cosine_similarity.
LEAST_NORM = tl.constexpr(1e-8)
# The least probability of the classes that a teacher did not give, where the student's is not 0: 1 − Σ p is not known
# more exactly.
LEAST_REST = tl.constexpr(1e-7)


@jit
def _logit(x_ptr, at, mask, scale, softcap, other, SOFTCAP: tl.constexpr):
    """z = softcap · tanh(scale · x / softcap), `other` where masked, and dz/dx."""
    x = tl.load(x_ptr + at, mask=mask, other=other).to(tl.float32)
    slope = scale
    if SOFTCAP:
        z, slope = _cap(x, scale, softcap)
        z = tl.where(mask, z, other)
    else:
        z = x * scale
    return z, slope


@jit
def _fold_at_one(z, before, top, total):
    """A lane's sum at temperature 1, relative to the maximum at the temperature, which went from before to top."""
    return total * tl.exp2((before - top) * LOG2E) + tl.sum(tl.exp2((z - top[None, :]) * LOG2E), 0)


@jit
def _hard_loss(z_target, label, top, log2_sum, V):
    """A row's cross entropy, and log₂ Σ exp(z − max). Both are NaN for a label out of range, which reads no logit."""
    log2_sum = tl.where((label >= 0) & (label < V), log2_sum, float("nan"))
    return (top - z_target) + log2_sum * LN2, log2_sum


@jit
def _skip(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """Results of a row that does not count: losses and gradient are 0."""
    tl.store(soft_ptr + row, 0.0)
    if hard_ptr is not None:
        tl.store(hard_ptr + row, 0.0)
    if GRADIENT:
        # The logits hold the gradient afterwards, and the products read it: zeros have to be written.
        lane = tl.arange(0, BLOCK)
        for start in range(0, V, BLOCK):
            zeros = tl.zeros((BLOCK,), logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + start + lane, zeros, mask=start + lane < V)


@jit
@do_not_specialize("ignore_index")
def _distill_kernel(
    logits_ptr, teacher_ptr, labels_ptr, soft_ptr, hard_ptr, factor_ptr,
    V, stride_m, stride_tm, ignore_index, beta, k, soft_weight, hard_weight, softcap, scale, teacher_softcap,
    teacher_scale, KIND: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    GRADIENT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A divergence of two softmaxes. soft_weight, hard_weight: factors of the gradients with respect to the logits."""
    # int64: row · stride exceeds 2³¹ in a chunk of more than 4 GiB.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            _skip(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    none = float("-inf")
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    # A finite start: a lane that has seen only -inf must not compute inf - inf.
    top_a = tl.full((BLOCK,), LOWEST, tl.float32)
    top_b = tl.full((BLOCK,), LOWEST, tl.float32)
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, DEPTH * BLOCK):
        at = start + tile
        a, _ = _logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
        b, _ = _logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
        before = top_a
        top_a, sum_a, _, _ = _fold(a, top_a, sum_a, k)
        top_b, sum_b, _, _ = _fold(b, top_b, sum_b, k)
        if HARD == 2:
            sum_h = _fold_at_one(a, before, top_a, sum_h)
    row_a = tl.max(top_a, 0)
    row_b = tl.max(top_b, 0)
    # A maximum and a log-sum are kept apart: their sum would be rounded at its own size, and every probability with it.
    log_a = tl.log2(tl.sum(sum_a * tl.exp2((top_a - row_a) * k), 0))
    log_b = tl.log2(tl.sum(sum_b * tl.exp2((top_b - row_b) * k), 0))
    log_h = log_a
    if HARD:
        if HARD == 2:
            log_h = tl.log2(tl.sum(sum_h * tl.exp2((top_a - row_a) * LOG2E), 0))
        z_target, _steep = _logit(logits_ptr, label, (label >= 0) & (label < V), scale, softcap, 0.0, SOFTCAP)
        hard, log_h = _hard_loss(z_target, label, row_a, log_h, V)
        # HARD 2 takes log_h itself, which carries the NaN.
        if HARD == 1:
            hard_weight = tl.where(log_h == log_h, hard_weight, float("nan"))  # NaN where the label is out of range
        tl.store(hard_ptr + row, hard)

    value = tl.zeros((BLOCK,), tl.float32)
    mean_u = 0.0
    # Forward KL has the slope q − p: no mean is needed, and the third reading gives its value as well.
    if KIND != "kl" or not GRADIENT:
        sum_u = tl.zeros((BLOCK,), tl.float32)
        for i in range(blocks):
            # From the end: the first pass read that part last, and it may still be in the cache.
            at = (blocks - 1 - i) * (DEPTH * BLOCK) + tile
            a, _ = _logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
            b, _ = _logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
            terms, q, u = _sides((a - row_a) * k - log_a, (b - row_b) * k - log_b, beta, KIND)
            value += tl.sum(terms, 0)
            if KIND != "kl":
                sum_u += tl.sum(q * u, 0)
        mean_u = tl.sum(sum_u, 0)
    if GRADIENT:
        if factor_ptr is not None:
            factor = tl.load(factor_ptr).to(tl.float32)
            soft_weight *= factor
            hard_weight *= factor
        if KIND == "reverse" or KIND == "jsd":
            soft_weight *= LN2
        # The target's logit is read above by every thread and overwritten below by one.
        tl.debug_barrier()
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
    tl.store(soft_ptr + row, tl.sum(value, 0) * (1.0 if KIND == "tvd" else LN2))


@jit
@do_not_specialize("ignore_index")
def _distill_cosine_kernel(
    logits_ptr, teacher_ptr, labels_ptr, soft_ptr, hard_ptr, factor_ptr,
    V, stride_m, stride_tm, ignore_index, soft_weight, hard_weight, softcap, scale, teacher_softcap, teacher_scale,
    HARD: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 − a·b / (|a| |b|) of the logits themselves."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            _skip(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    blocks = tl.cdiv(V, DEPTH * BLOCK)
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
    # One norm at a time: the product of two large norms may overflow.
    over_a = 1.0 / _at_least(tl.sqrt(tl.sum(sum_aa, 0)))
    over_b = 1.0 / _at_least(tl.sqrt(tl.sum(sum_bb, 0)))
    cosine = tl.sum(sum_ab, 0) * over_a * over_b
    tl.store(soft_ptr + row, 1.0 - cosine)
    row_top = tl.max(top, 0)
    log_h = 0.0
    if HARD:
        log_h = tl.log2(tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0))
        z_target, _steep = _logit(logits_ptr, label, (label >= 0) & (label < V), scale, softcap, 0.0, SOFTCAP)
        hard, log_h = _hard_loss(z_target, label, row_top, log_h, V)
        tl.store(hard_ptr + row, hard)
    if GRADIENT:
        if factor_ptr is not None:
            factor = tl.load(factor_ptr).to(tl.float32)
            soft_weight *= factor
            hard_weight *= factor
        # The target's logit is read above by every thread and overwritten below by one.
        tl.debug_barrier()
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


@jit
def _at_least(norm):
    return tl.where(norm < LEAST_NORM, LEAST_NORM, norm)  # NaN stays


@jit
@do_not_specialize("ignore_index")
def _distill_topk_kernel(
    logits_ptr, ids_ptr, logprobs_ptr, labels_ptr, soft_ptr, hard_ptr, factor_ptr,
    V, K, stride_m, stride_i, stride_l, ignore_index, beta, k, soft_weight, hard_weight, softcap, scale,
    KIND: tl.constexpr, REST: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A divergence over the K classes that a teacher gave and, with REST "tail", one more that stands for all others.

    The given classes' logits are held in registers, and -inf is put in their place in the row. A sum over the row is
    then the rest, without the cancellation of 1 − Σ q. The gradients of the given classes are written last. A class
    whose logit is -inf has no probability here, also under a softcap.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            _skip(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    none = float("-inf")
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at_k = tl.arange(0, BLOCK_K)
    # One lane beyond K stands for the rest, hence BLOCK_K ≥ K + 1.
    ids = tl.load(ids_ptr + row * stride_i + at_k, mask=at_k < K, other=0)
    log_p = tl.load(logprobs_ptr + row * stride_l + at_k, mask=at_k < K, other=none).to(tl.float32)
    inside = (ids >= 0) & (ids < V)
    given = (log_p != none) & inside
    z_k, slope_k = _logit(logits_ptr, ids, given, scale, softcap, none, SOFTCAP)
    # An id out of range reads no logit, and makes the loss NaN.
    z_k = tl.where((log_p == none) | inside, z_k, float("nan"))
    log_p = log_p * LOG2E
    z_target = 0.0
    if HARD:
        z_target, _steep = _logit(logits_ptr, label, (label >= 0) & (label < V), scale, softcap, 0.0, SOFTCAP)
    # Any thread may read a logit that another overwrites: all loads, then -inf, then the sum.
    tl.debug_barrier()
    tl.store(logits_ptr + ids, tl.full((BLOCK_K,), none, logits_ptr.dtype.element_ty), mask=given)
    tl.debug_barrier()

    # The rest: max z, and log₂ Σ exp(z − max).
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    if REST != "renormalize" or HARD:
        for start in range(0, V, DEPTH * BLOCK):
            at = start + tile
            z, _ = _rest(logits_ptr, at, V, scale, softcap, SOFTCAP)
            before = top
            top, total, _, _ = _fold(z, top, total, k)
            if HARD == 2:
                sum_h = _fold_at_one(z, before, top, sum_h)
    top_rest = tl.max(top, 0)
    log_rest = tl.log2(tl.sum(total * tl.exp2((top - top_rest) * k), 0))
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
        tail = tl.where(tl.sum(given.to(tl.int32), 0) == V, 0.0, tail)  # all classes were given: 1 − Σ p is rounding
        lq = tl.where(at_k == K, log_tail, lq)
        lp = tl.where(at_k == K, tl.log2(tail), lp)
    log_h = log_all
    if HARD:
        step = (top_rest - row_top) * LOG2E
        if HARD == 2:
            of_rest = tl.sum(sum_h * tl.exp2((top - top_rest) * LOG2E), 0)
        else:
            of_rest = tl.exp2(log_rest)
        log_h = tl.log2(tl.sum(tl.exp2((z_k - row_top) * LOG2E), 0) + of_rest * tl.exp2(step))
        hard, log_h = _hard_loss(z_target, label, row_top, log_h, V)
        tl.store(hard_ptr + row, hard)

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
        blocks = tl.cdiv(V, DEPTH * BLOCK)
        for i in range(blocks):
            at = (blocks - 1 - i) * (DEPTH * BLOCK) + tile
            z, slope = _rest(logits_ptr, at, V, scale, softcap, SOFTCAP)
            # With "renormalize" the rest has no soft gradient; its logits still become 0.
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
        dx = (dz * slope_k).to(logits_ptr.dtype.element_ty)
        # The loop has written the given classes' places too: their gradients have to come after.
        tl.debug_barrier()
        tl.store(logits_ptr + ids, dx, mask=given)


@jit
def _rest(logits_ptr, at, V, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits of the classes that the teacher did not give; -inf marks those that it gave."""
    x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
    slope = scale
    if SOFTCAP:
        z, slope = _cap(x, scale, softcap)
        z = tl.where(x == float("-inf"), x, z)
    else:
        z = x * scale
    return z, slope


@jit
def _log2_sum(lp):
    """log₂ Σ 2^lp."""
    top = tl.maximum(tl.max(lp, 0), LOWEST)
    return top + tl.log2(tl.sum(tl.exp2(lp - top), 0))
