"""Two heads' logits on one device, once the normalisers of all devices are known: values, and the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import do_not_specialize, jit, tl, use_triton
from tigon.kernels.tiles.constants import LN2
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

# -------------------------------------------------------------------------------------------------------- reference


def sides_reference(z: Tensor, t: Tensor, merged: Tensor, formula: Formula) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of the divergence, q and the slopes along log q, (M, V) each."""
    # Columns of shape (M, 1), which broadcast over this device's classes.
    of = merged.unsqueeze(-1).unbind(-2)
    # Maximum and log-sum are subtracted one after the other. Their sum would be rounded at the size of the maximum.
    lq = (z - of[TOP_A]) / formula.temperature - of[LOG_A]
    lp = (t - of[TOP_B]) / formula.temperature - of[LOG_B]
    terms, slopes = terms_and_slopes(formula, lq, lp)
    return terms, lq.exp(), slopes


def values_reference(rows: Rows, teacher: Tensor, merged: Tensor, formula: Formula) -> Tensor:
    z, t = formula.student(rows.wide)[0], formula.teacher(teacher.to(rows.soft.dtype))[0]
    terms, _, slopes = sides_reference(z, t, merged, formula)
    # A part of each row's divergence only: `Split.over_all` adds up the devices' parts once, at the end of the walk.
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
        # The softmax's Jacobian. The slopes of forward KL are −p, and Σ −p over all devices' classes is −1 without
        # asking them.
        dz = slopes - q * (-1.0 if total is None else total.unsqueeze(-1))
        top = of[TOP_A]
        if formula.kind == "kl":
            soft = of_valid(terms.sum(-1), rows.labels)
    # The weights include 1 / temperature, and in fp16 the boost that the backward pass takes out again.
    dz = dz * formula.weights.soft
    if formula.hard and rows.labels is not None:
        dz = dz + formula.weights.hard * ((z - top - of[LOG_H]).exp() - one_hot(rows.labels, z))
    rows.write(soft, None, of_valid(dz * slope, rows.labels))


def one_hot(labels: Tensor, z: Tensor) -> Tensor:
    """(M, V); 0 everywhere in the row of a label of another device."""
    # A comparison and not F.one_hot, which raises for the negative labels of other devices.
    return (torch.arange(z.shape[1], device=z.device) == labels.unsqueeze(-1)).to(z.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _distill_value_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, soft_ptr, mean_ptr, V, stride_m, stride_tm, beta, k, softcap,
    scale, teacher_softcap, teacher_scale, KIND: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This device's part of a row's divergence, and its part of Σ q · u."""
    # int64: row · stride exceeds 2³¹ in a chunk of more than 4 GiB.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    # All devices hold the same merged numbers, to the last bit, so their q and p belong to one softmax.
    merged_ptr += row * MERGED
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            tl.store(soft_ptr + row, 0.0)
            # Written all the same: `mean` is uninitialised memory, and travels to the other devices.
            tl.store(mean_ptr + row, 0.0)
            return
    # Four numbers a row replace the first pass of `whole.heads`: that pass was the statistics kernel's.
    row_a = tl.load(merged_ptr + TOP_A)
    log_a = tl.load(merged_ptr + LOG_A)
    row_b = tl.load(merged_ptr + TOP_B)
    log_b = tl.load(merged_ptr + LOG_B)
    tile = tiles.tile_of(DEPTH, BLOCK)
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    # Terms and slopes are sums over classes, so each device adds up its own. No maximum is involved any more, and parts
    # may simply be added.
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
    # int64, as in the kernel before.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    merged_ptr += row * MERGED
    label = 0
    if labels_ptr is not None:
        # The label of another device's class is negative, and equals no column below.
        label = tl.load(labels_ptr + row)
        if label == IGNORED:
            # None for the hard losses, which the merge has written. The row of zeros is needed, because dX and dW
            # multiply the whole buffer.
            tiles.skip(logits_ptr, soft_ptr, None, row, V, True, BLOCK)
            return
    # The factor is one over the number of valid rows, say, and lies on the device: no host read comes between the
    # launches.
    soft_weight, hard_weight = tiles.weighted(soft_weight, hard_weight, factor_ptr)
    # The slopes of these kinds are logarithms: one factor a row turns them from the base 2 to e.
    if KIND == "reverse" or KIND == "jsd":
        soft_weight *= LN2
    log_h = 0.0
    if HARD:
        # With HARD 1 the column repeats LOG_A, but for the NaN of a label out of range.
        log_h = tl.load(merged_ptr + LOG_H)
        hard_weight = tl.where(log_h == log_h, hard_weight, float("nan"))  # NaN where the label is out of range
    row_a = tl.load(merged_ptr + TOP_A)
    log_a = tl.load(merged_ptr + LOG_A)
    row_b = tl.load(merged_ptr + TOP_B)
    log_b = tl.load(merged_ptr + LOG_B)
    mean_u = 0.0
    if means_ptr is not None:
        # `world` is not specialised: another number of devices needs no other kernel.
        for part in range(world):
            # In the order of the devices: all of them get the same bits.
            mean_u += tl.load(means_ptr + part * M + row)
    tile = tiles.tile_of(DEPTH, BLOCK)
    # Forward KL's own pass for the value is spared: the gradient pass has each term in registers anyway.
    value = tl.zeros((BLOCK,), tl.float32)
    # No barrier before the logits are overwritten: the target's was read by the statistics kernel.
    value = tiles.gradients(
        logits_ptr, teacher_ptr, label, value, V, tile, row_a, log_a, row_b, log_b, log_h, mean_u, soft_weight,
        hard_weight, beta, k, softcap, scale, teacher_softcap, teacher_scale, KIND, HARD, SOFTCAP, TEACHER_SOFTCAP,
        DEPTH, BLOCK,
    )  # fmt: skip
    # The other kinds' values were stored by `_distill_value_kernel`, which had to come before the exchange.
    if KIND == "kl":
        tl.store(soft_ptr + row, tl.sum(value, 0) * LN2)


@jit
def _cosine_gradient_kernel(
    logits_ptr, teacher_ptr, labels_ptr, merged_ptr, soft_ptr, factor_ptr, V, stride_m, stride_tm, soft_weight,
    hard_weight, softcap, scale, teacher_softcap, teacher_scale, HARD: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient, over this device's logits."""
    # int64, as in the kernels before.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    teacher_ptr += row * stride_tm
    merged_ptr += row * MERGED
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        # Every device has the same rows to skip: IGNORED comes from the global target.
        if label == IGNORED:
            tiles.skip(logits_ptr, soft_ptr, None, row, V, True, BLOCK)
            return
    soft_weight, hard_weight = tiles.weighted(soft_weight, hard_weight, factor_ptr)
    # Norms and cosine are over all devices' classes. With them the gradient of a class needs its own two logits alone.
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
    # The soft loss, 1 − cosine, is written by `Split.from_head` from the merged numbers: no device has a part of it.
    tiles.cosine_gradients(
        logits_ptr, teacher_ptr, label, V, blocks, tile, over_a, over_b, cosine, row_top, log_h, soft_weight,
        hard_weight, softcap, scale, teacher_softcap, teacher_scale, HARD, SOFTCAP, TEACHER_SOFTCAP, DEPTH, BLOCK,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launches


def write_values(rows: Rows, teacher: Tensor, merged: Tensor, formula: Formula) -> Tensor:
    """Write this device's part of each row's divergence, and return its part of Σ q · u, (M,)."""
    V = rows.logits.shape[1]
    # fp32, like the losses: all devices' parts are added before they are subtracted from u.
    mean = torch.empty_like(rows.soft)
    if V == 0:  # a device without classes has no part in the sums, which are gathered from it all the same
        rows.soft.zero_()
        return mean.zero_()
    if not use_triton(rows.logits, teacher):
        for part in _cache_sized(rows.logits):
            # `values_reference` writes the losses through `rows.at`, and only its second result comes back.
            mean[part] = values_reference(rows.at(part), teacher[part], merged[part], formula)
        return mean
    sizes = V, rows.logits.stride(0), teacher.stride(0)
    numbers = formula.beta, formula.k, *formula.student, *formula.teacher
    # No factor: losses are not scaled, and this launch writes no gradient.
    tensors = rows.logits, teacher, rows.labels, merged, rows.soft, mean
    # hard=False: this kernel keeps no second softmax in registers, so the tile may be as deep as without cross entropy.
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
            # Uninitialised otherwise. The means of the other kinds were zeroed, and gathered, in `write_values`.
            rows.soft.zero_()
        return
    if not use_triton(rows.logits, teacher):
        # Over the devices, before rows are cut into parts: the torch path then sums in one order for all rows.
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
    # Both ways lead to one kernel: None for the pointer removes the loop when the kernel is compiled.
    world = 0 if means is None else means.shape[0]
    arguments = *sizes, M, world, formula.beta, formula.k, *numbers, formula.kind, *branches
    launch_rows(_distill_gradient_kernel, rows, formula, (*before, means, *after), arguments)
