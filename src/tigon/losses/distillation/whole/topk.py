"""Rows whose classes are all here, from the K classes that a teacher gave: one launch gives losses and gradient."""

from __future__ import annotations

import torch

from tigon.kernels import do_not_specialize, jit, next_power_of_2, tl, use_triton
from tigon.kernels.tiles.constants import LOG2E
from tigon.losses.distillation import tiles
from tigon.losses.distillation.formula import Formula
from tigon.losses.distillation.reference import given_slopes, write_with_hard
from tigon.losses.distillation.rows import Rows, TopK, launch_rows
from tigon.ops.cross_entropy.launches import _cache_sized


def rows_reference(rows: Rows, teacher: TopK, formula: Formula) -> None:
    """What the kernel computes, in plain PyTorch and without autograd."""
    ids, logprobs = teacher
    z, slope = formula.student(rows.wide)
    given = logprobs != -torch.inf
    # A place that holds no class may have any id, -1 too. It reads and writes index 0 with a value that changes
    # nothing.
    at = torch.where(given, ids, 0).long()
    # A sum and not a scatter of ones: several places that hold no class point at index 0, and must not mark it as
    # given.
    others = torch.zeros_like(z).scatter_add_(-1, at, given.to(z.dtype)) == 0
    all_lq = torch.log_softmax(z / formula.temperature, -1)
    lq = torch.where(given, all_lq.gather(-1, at), -torch.inf)
    # From the classes themselves: 1 − Σ q of the given classes would cancel where these are nearly certain.
    lq_rest = torch.logsumexp(torch.where(others, all_lq, -torch.inf), -1, keepdim=True)
    soft, d, of_rest = given_slopes(formula, lq, logprobs.to(z.dtype), lq_rest, others)
    share = torch.where(others & (all_lq != -torch.inf), (all_lq - lq_rest).exp(), 0.0)
    dz = (share * of_rest).scatter_add_(-1, at, torch.where(given, d, 0.0))
    write_with_hard(rows, soft, dz, z, slope, formula)


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
    # int64: row · stride exceeds 2³¹ in a chunk of more than 4 GiB.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    label = 0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        if label == ignore_index:
            tiles.skip(logits_ptr, soft_ptr, hard_ptr, row, V, GRADIENT, BLOCK)
            return
    none = float("-inf")
    tile = tiles.tile_of(DEPTH, BLOCK)
    # One load each for K ids and log-probabilities. They stay in registers from here to the last store.
    at_k = tl.arange(0, BLOCK_K)
    # One lane beyond K stands for the rest, hence BLOCK_K ≥ K + 1.
    ids = tl.load(ids_ptr + row * stride_i + at_k, mask=at_k < K, other=0)
    log_p = tl.load(logprobs_ptr + row * stride_l + at_k, mask=at_k < K, other=none).to(tl.float32)
    inside = (ids >= 0) & (ids < V)
    given = (log_p != none) & inside
    # K scattered places, so each number costs a sector of memory. The slope is kept too, because the store below
    # destroys the logit.
    z_k, slope_k = tiles.logit(logits_ptr, ids, given, scale, softcap, none, SOFTCAP)
    # An id out of range reads no logit, and makes the loss NaN.
    z_k = tl.where((log_p == none) | inside, z_k, float("nan"))
    log_p = log_p * LOG2E
    z_target = 0.0
    if HARD:
        # Now, because the target may be one of the given classes, whose logits are about to become -inf.
        z_target, _steep = tiles.logit(logits_ptr, label, (label >= 0) & (label < V), scale, softcap, 0.0, SOFTCAP)
    # Any thread may read a logit that another overwrites: all loads, then -inf, then the sum.
    tl.debug_barrier()
    tl.store(logits_ptr + ids, tl.full((BLOCK_K,), none, logits_ptr.dtype.element_ty), mask=given)
    tl.debug_barrier()

    # Renormalised classes know nothing of the rest, unless a cross entropy over all classes does.
    top, total, sum_h = tiles.rest_sums(
        logits_ptr, V, tile, k, softcap, scale, REST != "renormalize" or HARD, HARD, SOFTCAP, DEPTH, BLOCK
    )
    top_rest = tl.max(top, 0)
    # -inf where all classes were given. `given_sides` and `given_results` take that as an empty rest.
    log_rest = tl.log2(tl.sum(total * tl.exp2((top - top_rest) * k), 0))
    lq, lp, row_top, log_all, log_tail = tiles.given_sides(z_k, log_p, given, at_k, K, V, top_rest, log_rest, k, REST)
    # The cross entropy is over all classes: its sum is that of the given ones, in registers, and of the rest.
    log_h = log_all
    if HARD:
        # The rest's sum at temperature 1, brought from the rest's maximum to the row's.
        step = (top_rest - row_top) * LOG2E
        if HARD == 2:
            of_rest = tl.sum(sum_h * tl.exp2((top - top_rest) * LOG2E), 0)
        else:
            of_rest = tl.exp2(log_rest)
        log_h = tl.log2(tl.sum(tl.exp2((z_k - row_top) * LOG2E), 0) + of_rest * tl.exp2(step))
        hard, log_h = tiles.hard_loss(z_target, label, row_top, log_h, V)
        tl.store(hard_ptr + row, hard)

    tiles.given_results(
        logits_ptr, soft_ptr, factor_ptr, row, label, V, K, ids, at_k, given, z_k, slope_k, lq, lp, row_top, top_rest,
        log_rest, log_tail, log_h, soft_weight, hard_weight, beta, k, softcap, scale, KIND, REST, HARD, SOFTCAP,
        GRADIENT, DEPTH, BLOCK,
    )  # fmt: skip


def write_rows(rows: Rows, teacher: TopK, formula: Formula) -> None:
    """As `Classes.from_topk`."""
    ids, logprobs = teacher
    if not use_triton(rows.logits):
        for part in _cache_sized(rows.logits):
            rows_reference(rows.at(part), TopK(ids[part], logprobs[part]), formula)
        return
    V, K = rows.logits.shape[1], ids.shape[1]
    sizes = V, K, rows.logits.stride(0), ids.stride(0), logprobs.stride(0), formula.ignore_index
    numbers = formula.beta, formula.k, *formula.weights, *formula.student
    # BLOCK_K is a power of two above K: tl.arange allows no other length.
    branches = formula.kind, formula.rest, int(formula.hard), formula.caps[0], formula.gradient, next_power_of_2(K + 1)
    # ids and logprobs keep their dtypes: a copy of them in int64 or fp32 would be read once and thrown away.
    tensors = rows.logits, ids, logprobs, rows.labels, rows.soft, rows.hard, rows.factor
    launch_rows(_distill_topk_kernel, rows, formula, tensors, (*sizes, *numbers, *branches))
