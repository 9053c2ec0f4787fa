"""Device functions for the distillation kernels.

Kernels take base-2 logarithms: k = log2(e) / temperature converts logit differences. The formulas are those in
tigon.kernels.tiles.divergence.

HARD is `formula.Hard`: 0 without cross entropy; 1 with cross entropy at temperature 1, which shares the soft loss's
softmax; 2 with cross entropy beside a soft loss at another temperature, which takes a second sum.
"""

from __future__ import annotations

from tigon.kernels import jit, tl
from tigon.kernels.tiles.cap import cap
from tigon.kernels.tiles.constants import LN2, LOG2E, LOWEST
from tigon.kernels.tiles.divergence import sides
from tigon.kernels.tiles.fold import fold
from tigon.losses.distillation import formula

# Smaller norms are raised to this value, as in torch.nn.functional.cosine_similarity.
LEAST_NORM = tl.constexpr(1e-8)
LEAST_REST = tl.constexpr(formula.LEAST_REST)


# ------------------------------------------------------------------------------------------------------- any of them


@jit
def tile_columns(DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns in the DEPTH blocks folded together: a running maximum then costs 1/DEPTH exponentials per column."""
    return tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@jit
def load_logit(x_ptr, at, mask, scale, softcap, other, SOFTCAP: tl.constexpr):
    """z = softcap · tanh(scale · x / softcap), `other` where masked, and dz/dx."""
    # fp32 at once: z − max is multiplied by k and exponentiated, so a rounding error in the difference would be a
    # relative error in the probability.
    x = tl.load(x_ptr + at, mask=mask, other=other).to(tl.float32)
    slope = scale
    if SOFTCAP:
        z, slope = cap(x, scale, softcap)
        # The tanh of a masked -inf is -1, a logit like any other.
        z = tl.where(mask, z, other)
    else:
        z = x * scale
    return z, slope


@jit
def multiply_weights(soft_weight, hard_weight, factor_ptr):
    """The gradient weights times the device-side factor, if present: the host never reads the factor."""
    if factor_ptr is not None:
        factor = tl.load(factor_ptr).to(tl.float32)
        soft_weight *= factor
        hard_weight *= factor
    return soft_weight, hard_weight


@jit
def fold_at_one(z, before, top, total):
    """A lane's sum at temperature 1, relative to the running maximum, which went from before to top."""
    # The old sum shrinks by e^(before − top) at any temperature: both sums are relative to the same maximum. From
    # LOWEST the factor is 0, and so is the old sum.
    return total * tl.exp2((before - top) * LOG2E) + tl.sum(tl.exp2((z - top[None, :]) * LOG2E), 0)


@jit
def hard_loss(z_target, label, top, log2_sum, V):
    """A row's cross entropy, and log₂ Σ exp(z − max). Both are NaN for a label out of range, which reads no logit."""
    # A label out of range was loaded as `other`, a plausible logit. Only NaN shows that the label is wrong.
    log2_sum = tl.where((label >= 0) & (label < V), log2_sum, float("nan"))
    return (top - z_target) + log2_sum * LN2, log2_sum


@jit
def write_zeros(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """Write zero losses and gradient for an ignored row."""
    tl.store(soft_ptr + row, 0.0)
    if hard_ptr is not None:
        tl.store(hard_ptr + row, 0.0)
    if GRADIENT:
        # The products read the logits as the gradient, so zeros have to be written.
        lane = tl.arange(0, BLOCK)
        for start in range(0, V, BLOCK):
            zeros = tl.zeros((BLOCK,), logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + start + lane, zeros, mask=start + lane < V)


# ------------------------------------------------------------------------------------------------------ two softmaxes
# a, b: student and teacher logits. row_a, row_b: row maxima; log_a, log_b: log₂ Σ exp2((z − max) · k). Maximum and
# log-sum are kept apart: their sum would be rounded at a larger magnitude, and every probability with it.


@jit
def sum_values(
    logits_ptr, teacher_ptr, V, blocks, tile, row_a, log_a, row_b, log_b, beta, k, softcap, scale, teacher_softcap,
    teacher_scale, KIND: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each lane's share of the divergence, and of Σ q · u."""
    none = float("-inf")
    value = tl.zeros((BLOCK,), tl.float32)
    sum_u = tl.zeros((BLOCK,), tl.float32)
    for i in range(blocks):
        at = (blocks - 1 - i) * (DEPTH * BLOCK) + tile
        a, _ = load_logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
        b, _ = load_logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
        terms, q, u = sides((a - row_a) * k - log_a, (b - row_b) * k - log_b, beta, KIND)
        value += tl.sum(terms, 0)
        if KIND != "kl":
            sum_u += tl.sum(q * u, 0)
    return value, sum_u


@jit
def write_gradients(
    logits_ptr, teacher_ptr, label, value, V, tile, row_a, log_a, row_b, log_b, log_h, mean_u, soft_weight,
    hard_weight, beta, k, softcap, scale, teacher_softcap, teacher_scale, KIND: tl.constexpr, HARD: tl.constexpr,
    SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite the logits with the gradient. Returns value plus, for forward KL, the terms (no other pass needed)."""
    none = float("-inf")
    for start in range(0, V, DEPTH * BLOCK):
        at = start + tile
        a, slope = load_logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
        b, _ = load_logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
        lq = (a - row_a) * k - log_a
        terms, q, u = sides(lq, (b - row_b) * k - log_b, beta, KIND)
        if KIND == "kl":
            value += tl.sum(terms, 0)
            dz = (q - u) * soft_weight
        else:
            dz = q * (u - mean_u) * soft_weight
        if HARD:
            of_hard = q if HARD == 1 else tl.exp2((a - row_a) * LOG2E - log_h)
            # softmax − one-hot. Another device's label is negative and equals no column.
            dz += hard_weight * (of_hard - tl.where(at == label, 1.0, 0.0))
        dx = (dz * slope).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + at, dx, mask=at < V)
    return value


# ------------------------------------------------------------------------------------------------------------- cosine


@jit
def sum_products(
    logits_ptr, teacher_ptr, V, tile, softcap, scale, teacher_softcap, teacher_scale, HARD: tl.constexpr,
    SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each lane's a·a, a·b, b·b, and with HARD the maximum and sum for the student's softmax at temperature 1."""
    sum_aa = tl.zeros((BLOCK,), tl.float32)
    sum_ab = tl.zeros((BLOCK,), tl.float32)
    sum_bb = tl.zeros((BLOCK,), tl.float32)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, DEPTH * BLOCK):
        at = start + tile
        a, _ = load_logit(logits_ptr, at, at < V, scale, softcap, 0.0, SOFTCAP)
        b, _ = load_logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, 0.0, TEACHER_SOFTCAP)
        sum_aa += tl.sum(a * a, 0)
        # A single pass gives all three products, so each side is read from DRAM once. fp32: a bf16 sum over V squares
        # would stop growing.
        sum_ab += tl.sum(a * b, 0)
        sum_bb += tl.sum(b * b, 0)
        if HARD:
            top, total, _, _ = fold(tl.where(at < V, a, float("-inf")), top, total, LOG2E)
    return sum_aa, sum_ab, sum_bb, top, total


@jit
def bound_norm(norm):
    return tl.where(norm < LEAST_NORM, LEAST_NORM, norm)  # NaN stays


@jit
def write_cosine_gradients(
    logits_ptr, teacher_ptr, label, V, blocks, tile, over_a, over_b, cosine, row_top, log_h, soft_weight, hard_weight,
    softcap, scale, teacher_softcap, teacher_scale, HARD: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite the logits with the gradient. over_a, over_b: 1 / |a|, 1 / |b|."""
    for i in range(blocks):
        # From the end: the previous pass read that part last, so the cache may still hold it.
        at = (blocks - 1 - i) * (DEPTH * BLOCK) + tile
        a, slope = load_logit(logits_ptr, at, at < V, scale, softcap, 0.0, SOFTCAP)
        b, _ = load_logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, 0.0, TEACHER_SOFTCAP)
        # Each side by its norm first: a / |a| is at most 1, while a · b or |a|² may overflow.
        dz = (a * over_a * cosine - b * over_b) * over_a * soft_weight
        if HARD:
            p = tl.exp2((a - row_top) * LOG2E - log_h)
            dz += hard_weight * (p - tl.where(at == label, 1.0, 0.0))
        dx = (dz * slope).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + at, dx, mask=at < V)


# ----------------------------------------------------------------------------------------- the classes a teacher gave
# z_k, log_p, lq, lp: for the given classes, in BLOCK_K lanes; lane K stands for the rest, all classes not given.
# top_rest, log_rest: the rest's maximum, and its sum's log₂ relative to that maximum.


@jit
def load_rest(logits_ptr, at, V, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits for classes that the teacher did not give; -inf marks the given classes."""
    # -inf stands both for a masked column and for a given class: neither belongs to the rest.
    x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
    slope = scale
    if SOFTCAP:
        z, slope = cap(x, scale, softcap)
        z = tl.where(x == float("-inf"), x, z)
    else:
        z = x * scale
    return z, slope


@jit
def sum_rest(
    logits_ptr, V, tile, k, softcap, scale, SUM: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each lane's maximum and sum over the rest; with HARD 2 the sum at temperature 1. Without SUM: LOWEST and 0."""
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    if SUM:
        for start in range(0, V, DEPTH * BLOCK):
            at = start + tile
            z, _ = load_rest(logits_ptr, at, V, scale, softcap, SOFTCAP)
            before = top
            top, total, _, _ = fold(z, top, total, k)
            if HARD == 2:
                sum_h = fold_at_one(z, before, top, sum_h)
    return top, total, sum_h


@jit
def log2_sum(lp):
    """log₂ Σ 2^lp."""
    # Finite, where all lanes hold -inf: inf - inf would be NaN.
    top = tl.maximum(tl.max(lp, 0), LOWEST)
    return top + tl.log2(tl.sum(tl.exp2(lp - top), 0))


@jit
def normalize_given(z_k, log_p, given, at_k, K, classes, top_rest, log_rest, k, REST: tl.constexpr):
    """lq and lp; the row's maximum, the sum's log₂, and log₂ of the rest's share in that sum."""
    # Finite, where no class was given: inf - inf would be NaN.
    top_k = tl.maximum(tl.max(z_k, 0), LOWEST)
    row_top = tl.maximum(top_rest, top_k)
    if REST == "renormalize":
        # Relative to the given classes' maximum: the row's may be so far above that every exponential is 0.
        log_all = tl.log2(tl.sum(tl.exp2((z_k - top_k) * k), 0))
        lq = (z_k - top_k) * k - log_all
        lp = log_p - log2_sum(log_p)
    else:
        whole = tl.sum(tl.exp2((z_k - row_top) * k), 0) + tl.exp2((top_rest - row_top) * k + log_rest)
        log_all = tl.log2(whole)
        lq = (z_k - row_top) * k - log_all
        lp = log_p
    log_tail = (top_rest - row_top) * k + log_rest - log_all
    if REST == "tail":
        # p for the rest is a difference, since the teacher's other classes are unknown. q for the rest is a sum.
        tail = 1.0 - tl.sum(tl.exp2(lp), 0)
        tail = tl.where(tail < LEAST_REST, tl.where(log_tail == float("-inf"), 0.0, LEAST_REST), tail)
        # All classes were given: 1 − Σ p is rounding.
        tail = tl.where(tl.sum(given.to(tl.int32), 0) == classes, 0.0, tail)
        lq = tl.where(at_k == K, log_tail, lq)
        lp = tl.where(at_k == K, tl.log2(tail), lp)
    return lq, lp, row_top, log_all, log_tail


@jit
def write_given_results(
    logits_ptr, soft_ptr, factor_ptr, row, label, V, K, ids, at_k, here, z_k, slope_k, lq, lp, row_top, top_rest,
    log_rest, log_tail, log_h, soft_weight, hard_weight, beta, k, softcap, scale, KIND: tl.constexpr,
    REST: tl.constexpr, HARD: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the soft loss, and with GRADIENT the logits' gradient. here: given classes that this row holds.

    slope_k: dz/dx for the given classes, or None to derive the slopes from z_k.
    """
    terms, q, u = sides(lq, lp, beta, KIND)
    tl.store(soft_ptr + row, tl.sum(terms, 0) * (1.0 if KIND == "tvd" else LN2))
    if GRADIENT:
        if KIND == "kl":
            # u = p, and the slope along log q is −p. Σ p is kept rather than set to 1: with "drop" the given classes' p
            # are not a distribution.
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
        soft_weight, hard_weight = multiply_weights(soft_weight, hard_weight, factor_ptr)
        tile = tile_columns(DEPTH, BLOCK)
        blocks = tl.cdiv(V, DEPTH * BLOCK)
        for i in range(blocks):
            # From the end: the previous pass read that part last, so the cache may still hold it.
            at = (blocks - 1 - i) * (DEPTH * BLOCK) + tile
            z, slope = load_rest(logits_ptr, at, V, scale, softcap, SOFTCAP)
            dz = tl.zeros((DEPTH, BLOCK), tl.float32)
            if REST != "renormalize":
                # Without a rest log_rest is -inf, and the exponent NaN.
                share = tl.where(z == float("-inf"), 0.0, tl.exp2((z - top_rest) * k - log_rest))
                dz = soft_weight * of_rest * share
            if HARD:
                dz += hard_weight * (tl.exp2((z - row_top) * LOG2E - log_h) - tl.where(at == label, 1.0, 0.0))
            dx = (dz * slope).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + at, dx, mask=at < V)
        # The given classes are written from registers: their logits in memory were marked before the row was first
        # read.
        dz = d * soft_weight
        if HARD:
            dz += hard_weight * (tl.exp2((z_k - row_top) * LOG2E - log_h) - tl.where(ids == label, 1.0, 0.0))
        if slope_k is None:
            slope_k = scale
            if SOFTCAP:
                t = z_k / softcap  # the tanh, from the capped logit: the raw logit has been overwritten
                slope_k = scale * (1.0 - t * t)
        dx = (dz * slope_k).to(logits_ptr.dtype.element_ty)
        # The loop also wrote the given classes' columns: their gradients have to come after.
        tl.debug_barrier()
        tl.store(logits_ptr + ids, dx, mask=here)
