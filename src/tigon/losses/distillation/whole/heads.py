"""Rows whose classes are all here, from a teacher's logits: one launch gives the losses and the gradient.

One program a row, which reads the row two or three times: first for the normalisers, then for the mean slope (forward
KL needs none), last to write the gradient over the logits, which are scratch memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import do_not_specialize, jit, tl, use_triton
from tigon.kernels.tiles.constants import LN2, LOG2E, LOWEST
from tigon.kernels.tiles.fold import fold
from tigon.losses.distillation import tiles
from tigon.losses.distillation.formula import Formula
from tigon.losses.distillation.reference import terms_and_slopes, write_with_hard
from tigon.losses.distillation.rows import Rows, launch_rows
from tigon.ops.cross_entropy.launches import _cache_sized


def rows_reference(rows: Rows, teacher: Tensor, formula: Formula) -> None:
    """What the kernels compute, in plain PyTorch and without autograd."""
    # In the dtype of the losses: fp32, or fp64 where the inputs are fp64, so that the path can serve as the tests'
    # oracle.
    z, slope = formula.student(rows.wide)
    t, _ = formula.teacher(teacher.to(z.dtype))
    if formula.kind == "cosine":
        over_z, over_t = (1 / v.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-8) for v in (z, t))
        cosine = (z * t).sum(-1, keepdim=True) * over_z * over_t
        soft, dz = (1 - cosine).squeeze(-1), (z * over_z * cosine - t * over_t) * over_z
    else:
        lq, lp = (torch.log_softmax(side / formula.temperature, -1) for side in (z, t))
        terms, slopes = terms_and_slopes(formula, lq, lp)
        # dz_j = s_j − q_j Σ s, with s the slopes along log q: the softmax's Jacobian.
        soft, dz = terms.sum(-1), slopes - lq.exp() * slopes.sum(-1, keepdim=True)
    write_with_hard(rows, soft, dz, z, slope, formula)


# ---------------------------------------------------------------------------------------------------------- kernels


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
    # A placeholder. Without labels there is no cross entropy (HARD is 0), and nothing reads the value.
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        # The whole program leaves: a row is one program, so the branch does not diverge. The row of zeros still has to
        # be written, since dX and dW multiply the buffer.
        if label == ignore_index:
            tiles.skip(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    none = float("-inf")
    tile = tiles.tile_of(DEPTH, BLOCK)
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    # A finite start: a lane that has seen only -inf must not compute inf - inf.
    top_a = tl.full((BLOCK,), LOWEST, tl.float32)
    top_b = tl.full((BLOCK,), LOWEST, tl.float32)
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, DEPTH * BLOCK):
        at = start + tile
        # Both loads before either sum: two requests are then on their way to memory at a time.
        a, _ = tiles.logit(logits_ptr, at, at < V, scale, softcap, none, SOFTCAP)
        b, _ = tiles.logit(teacher_ptr, at, at < V, teacher_scale, teacher_softcap, none, TEACHER_SOFTCAP)
        before = top_a
        # Each lane has a running maximum of its own. A maximum over the row in each step would be a reduction across
        # warps for every tile.
        top_a, sum_a, _, _ = fold(a, top_a, sum_a, k)
        top_b, sum_b, _, _ = fold(b, top_b, sum_b, k)
        if HARD == 2:
            sum_h = tiles.fold_at_one(a, before, top_a, sum_h)
    # Lanes meet here for the first time: each has had a maximum of its own.
    # log₂ Σ exp2((z − max) · k): each lane's sum is brought from its own maximum to the row's, which only shrinks it.
    row_a = tl.max(top_a, 0)
    row_b = tl.max(top_b, 0)
    log_a = tl.log2(tl.sum(sum_a * tl.exp2((top_a - row_a) * k), 0))
    log_b = tl.log2(tl.sum(sum_b * tl.exp2((top_b - row_b) * k), 0))
    # At temperature 1, k is log₂ e, and log_a is the cross entropy's normaliser as well.
    log_h = log_a
    if HARD:
        if HARD == 2:
            log_h = tl.log2(tl.sum(sum_h * tl.exp2((top_a - row_a) * LOG2E), 0))
        # One number is loaded again: to catch the target's logit in the loop would cost a comparison for each column.
        z_target, _steep = tiles.logit(logits_ptr, label, (label >= 0) & (label < V), scale, softcap, 0.0, SOFTCAP)
        hard, log_h = tiles.hard_loss(z_target, label, row_a, log_h, V)
        # HARD 2 takes log_h itself, which carries the NaN.
        if HARD == 1:
            hard_weight = tl.where(log_h == log_h, hard_weight, float("nan"))  # NaN where the label is out of range
        tl.store(hard_ptr + row, hard)

    value = tl.zeros((BLOCK,), tl.float32)
    mean_u = 0.0
    # Forward KL has the slope q − p: no mean is needed, and the pass that writes the gradient gives its value as well.
    if KIND != "kl" or not GRADIENT:
        value, sum_u = tiles.values(
            logits_ptr, teacher_ptr, V, blocks, tile, row_a, log_a, row_b, log_b, beta, k, softcap, scale,
            teacher_softcap, teacher_scale, KIND, SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip
        # The gradient q · (u − Σ q · u) needs this sum over the row before its first element: hence the third reading.
        mean_u = tl.sum(sum_u, 0)
    if GRADIENT:
        soft_weight, hard_weight = tiles.weighted(soft_weight, hard_weight, factor_ptr)
        # The slopes of these kinds are logarithms: one factor a row turns them from the base 2 to e.
        if KIND == "reverse" or KIND == "jsd":
            soft_weight *= LN2
        # The target's logit is read above by every thread and overwritten below by one.
        tl.debug_barrier()
        # The teacher's row is read again and not kept: a row of 128k classes does not fit in registers.
        value = tiles.gradients(
            logits_ptr, teacher_ptr, label, value, V, tile, row_a, log_a, row_b, log_b, log_h, mean_u, soft_weight,
            hard_weight, beta, k, softcap, scale, teacher_softcap, teacher_scale, KIND, HARD, SOFTCAP, TEACHER_SOFTCAP,
            DEPTH, BLOCK,
        )  # fmt: skip
    # TVD's terms are no logarithms, the others' are to the base 2.
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
    # int64 as above: row · stride passes 2³¹ in large chunks.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            tiles.skip(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    tile = tiles.tile_of(DEPTH, BLOCK)
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    # Two readings of the row suffice: the value of a cosine follows from three sums, and the gradient needs no other
    # sum.
    sum_aa, sum_ab, sum_bb, top, total = tiles.products(
        logits_ptr, teacher_ptr, V, tile, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP,
        TEACHER_SOFTCAP, DEPTH, BLOCK,
    )  # fmt: skip
    # One norm at a time: the product of two large norms may overflow.
    over_a = 1.0 / tiles.at_least(tl.sqrt(tl.sum(sum_aa, 0)))
    over_b = 1.0 / tiles.at_least(tl.sqrt(tl.sum(sum_bb, 0)))
    cosine = tl.sum(sum_ab, 0) * over_a * over_b
    tl.store(soft_ptr + row, 1.0 - cosine)
    row_top = tl.max(top, 0)
    log_h = 0.0
    if HARD:
        log_h = tl.log2(tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0))
        z_target, _steep = tiles.logit(logits_ptr, label, (label >= 0) & (label < V), scale, softcap, 0.0, SOFTCAP)
        # log_h is NaN for a label out of range, and makes the row's whole gradient NaN: an error is not to pass unseen.
        hard, log_h = tiles.hard_loss(z_target, label, row_top, log_h, V)
        tl.store(hard_ptr + row, hard)
    if GRADIENT:
        soft_weight, hard_weight = tiles.weighted(soft_weight, hard_weight, factor_ptr)
        # The target's logit is read above by every thread and overwritten below by one.
        tl.debug_barrier()
        tiles.cosine_gradients(
            logits_ptr, teacher_ptr, label, V, blocks, tile, over_a, over_b, cosine, row_top, log_h, soft_weight,
            hard_weight, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- launch


def write_rows(rows: Rows, teacher: Tensor, formula: Formula) -> None:
    """As `Classes.from_head`."""
    if not use_triton(rows.logits, teacher):
        # A few rows at a time: the reference makes several tensors as wide as the logits.
        for part in _cache_sized(rows.logits):
            rows_reference(rows.at(part), teacher[part], formula)
        return
    # Strides, because rows of the buffer are padded where V is no multiple of 16 bytes (`empty_logits`).
    sizes = rows.logits.shape[1], rows.logits.stride(0), teacher.stride(0), formula.ignore_index
    branches = int(formula.hard), *formula.caps, formula.gradient
    numbers = *formula.weights, *formula.student, *formula.teacher
    tensors = rows.logits, teacher, rows.labels, rows.soft, rows.hard, rows.factor
    if formula.kind == "cosine":
        launch_rows(_distill_cosine_kernel, rows, formula, tensors, (*sizes, *numbers, *branches))
        return
    arguments = *sizes, formula.beta, formula.k, *numbers, formula.kind, *branches
    launch_rows(_distill_kernel, rows, formula, tensors, arguments)
