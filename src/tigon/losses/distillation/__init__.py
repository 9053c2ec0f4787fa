"""Distillation of a linear head from a teacher's, without either's logits: the loss and all gradients in one walk.

    loss = (1 − h) · soft + h · cross entropy, h the hard weight; soft, of Q = softmax(z / τ) and the teacher's P:

    kl           KL(P ‖ Q)
    reverse_kl   KL(Q ‖ P)
    jsd          β · KL(P ‖ M) + (1 − β) · KL(Q ‖ M), M = β · P + (1 − β) · Q;  KL(P ‖ Q) for β = 0, KL(Q ‖ P) for β = 1
    tvd          ½ · Σ |p − q|
    cosine       1 − cos(z, the teacher's z)

Sources: Hinton et al. 2015, https://arxiv.org/abs/1503.02531; generalised JSD on policy, Agarwal et al. 2023,
https://arxiv.org/abs/2306.13649; reverse KL, Gu et al. 2023, https://arxiv.org/abs/2306.08543; TVD, Wen et al. 2023,
https://arxiv.org/abs/2307.15190.

The family in the usual order: here the promise, then reference.py, kernels.py, rows.py (launches), walk.py (autograd).
Of classes on several devices: parts_reference.py, parts_kernels.py and parts_topk_kernels.py, parts.py (launches).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsInt

import torch
from torch import Tensor

from tigon.linear.chunks import chunk_budget, nan_if_more, scalar, spared_by_one_chunk
from tigon.linear.head import check_accumulate, check_head, logit_bytes, logits_dtype_of
from tigon.linear.vocabulary_parallel import Shards, shards_of
from tigon.losses.distillation.reference import distill_reference, distill_topk_reference, kind_of
from tigon.losses.distillation.walk import logits_dtypes, walk, walk_over_shards
from tigon.ops.shard_statistics import IGNORED
from tigon.ops.targets import checked_target
from tigon.runtime import can_look

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

__all__ = ["distill", "distill_reference", "distill_topk", "distill_topk_reference"]

LOSS_TYPES = ("kl", "reverse_kl", "jsd", "tvd", "cosine")
REDUCTIONS = ("batchmean", "mean", "sum")
RESTS = ("tail", "renormalize", "drop")


def distill(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    loss_type: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    hard_weight: float = 0.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    reduction: str = "batchmean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_scale: float = 1.0,
    num_valid: SupportsInt | None = None,
    chunk_bytes: int | None = None,
    accumulate: str = "fp32",
    logits_dtype: torch.dtype | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The distillation loss of the logits x Wᵀ + bias from a teacher's, neither of which are all in memory at once.

    Args:
        x: (..., H), bf16, fp16, fp32 or fp64: hidden states that enter the student's head.
        weight: (V, H), x's dtype; under autocast both are cast as `F.linear` casts them.
        teacher_x: (..., H'), aligned with x; of a width and dtype of its own. Nothing of the teacher gets a gradient.
        teacher_weight: (V, H'), teacher_x's dtype; the same V classes: cut padding off the longer of two vocabularies.
        target: (...), integer class indices: where they are ignore_index, a row is left out. None: every row counts.
        loss_type: "jsd", "kl" (forward: teacher ‖ student), "reverse_kl", "tvd" or "cosine".
        beta: weight of the teacher in the mixture of "jsd", in [0, 1].
        temperature: τ, divides both sides' logits for the soft loss; 1 for "cosine", which would not change.
        temperature_squared: multiply the soft loss by τ², as Hinton et al. do, so that its gradients do not shrink. TRL
            and Liger do not.
        hard_weight: h in [0, 1], the share of the cross entropy with target, at temperature 1.
        bias, teacher_bias: (V,) or None.
        reduction: "batchmean" divides by the rows that count, "mean" the soft loss also by V, as torch's and TRL's mean
            over elements does, "sum" by nothing. Where no row counts the loss is 0.
        divisor: with the two means, what divides in place of the rows that count: a number or a 0-d tensor (TRL's
            num_items_in_batch, the count of a whole gradient-accumulation step), without gradient.
        ignore_index: targets that do not count.
        softcap, scale, teacher_softcap, teacher_scale: z = softcap · tanh(scale · logits / softcap), of either side.
        num_valid: how many targets are not ignore_index, when the host knows (an int or a
            `tigon.losses.ValidCount`). The other rows are then left out: time and memory follow the valid tokens. Too
            small a number gives a NaN loss. On a CPU it is counted.
        chunk_bytes: logits held at a time, both sides' together; else as in `tigon.linear_cross_entropy`.
        accumulate: "fp32" adds the chunks' weight gradients in fp32 and rounds once; "weight" in the weight's dtype.
        logits_dtype: torch.float32 for logits of both sides that are not rounded to the dtype of the products. Where
            distributions are peaked (logits of std 30), bf16's rounding puts the gradient of x off by 13 to 18 %, and
            fp32 logits by less than 1 %. A chunk of the same bytes then holds 2/5 of the rows.
        group: as in `tigon.linear_cross_entropy`, for heads whose classes are split over several ranks: the teacher's
            is split as the student's is, into the same sizes, both plain with `group` or both DTensors. teacher_x is
            whole on all ranks, or a DTensor as x may be.
    Returns: the loss, 0-d, in fp32 (fp64 for fp64 inputs), and metrics without gradient: "soft_loss" and, with a hard
        weight, "hard_loss", each reduced, before the weights.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Four matrix products a token, one of them the teacher's: the gradients are computed in the forward pass. A row whose
    logits are NaN gives a NaN loss.

    Replaces::

        p, q = (F.linear(*head).float().log_softmax(-1) for head in ((teacher_x, teacher_weight), (x, weight)))
        log_m = torch.logsumexp(torch.stack([q + math.log(1 - beta), p + math.log(beta)]), dim=0)
        to_p = F.kl_div(log_m, p, reduction="batchmean", log_target=True)
        loss = beta * to_p + (1 - beta) * F.kl_div(log_m, q, reduction="batchmean", log_target=True)
    """
    name = "distill"
    if hasattr(weight, "device_mesh") != hasattr(teacher_weight, "device_mesh"):
        raise ValueError(f"{name}: weight and teacher_weight must both be DTensors, or both plain tensors.")
    x, weight, bias, target, shards = shards_of(name, x, weight, bias, target, group, accumulate)
    teacher_x, teacher_weight, teacher_bias, _, others = shards_of(
        f"{name}: of the teacher", teacher_x, teacher_weight, teacher_bias, None, group, accumulate
    )
    if shards is not None or others is not None:
        ours, theirs = ("whole" if of is None else of.where() for of in (shards, others))
        if ours != theirs:
            raise ValueError(f"{name}: teacher_weight must be split over the ranks as weight is, {ours}, got {theirs}.")
    compute = check_head(name, x, weight, bias)
    teacher_compute = check_head(name, teacher_x, teacher_weight, teacher_bias, prefix="teacher_")
    if teacher_x.shape[:-1] != x.shape[:-1] or teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"{name}: teacher_x must be (..., H') and teacher_weight (V, H') beside x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}, got {tuple(teacher_x.shape)} and {tuple(teacher_weight.shape)}."
        )
    _check_device(name, x, teacher_x=teacher_x)
    _check_positive(name, teacher_softcap=teacher_softcap, teacher_scale=teacher_scale)
    if loss_type == "cosine" and temperature != 1.0:
        raise ValueError(f"{name}: temperature must be 1 for loss_type='cosine', got {temperature}.")
    teacher = (
        teacher_x.reshape(-1, teacher_x.shape[-1]).detach(), teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
    )  # fmt: skip
    return _distill(
        name, x, weight, bias, teacher, target, compute, teacher_compute, "", LOSS_TYPES, loss_type, beta, temperature,
        temperature_squared, hard_weight, reduction, divisor, ignore_index, softcap, scale, teacher_softcap,
        teacher_scale, num_valid, chunk_bytes, accumulate, logits_dtype, shards,
    )  # fmt: skip


def distill_topk(
    x: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    target: Tensor | None = None,
    *,
    rest: str = "tail",
    loss_type: str = "kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    hard_weight: float = 0.0,
    bias: Tensor | None = None,
    reduction: str = "batchmean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    scale: float = 1.0,
    num_valid: SupportsInt | None = None,
    chunk_bytes: int | None = None,
    accumulate: str = "fp32",
    logits_dtype: torch.dtype | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The distillation loss from the K likeliest classes that a teacher gave of each row: a server, or a data set.

    Args:
        x, weight: the student's head, as in `distill`.
        teacher_ids: (..., K), integers: the classes, each at most once a row.
        teacher_logprobs: (..., K), any float dtype: their log-probabilities among all V classes, at the temperature of
            the loss: they are not softened here. A place that holds -inf counts as not given, whatever its id.
        target: (...) or None, as in `distill`.
        rest: what becomes of the classes that were not given. "tail": they are one class more, of probability
            1 − Σ p and 1 − Σ q, the teacher's at least 1e-7 where the student's is not 0. "renormalize": they are left
            out, and both sides' given probabilities divided by their sums. "drop": they are left out, and nothing is
            divided: the loss is the given classes' share, which for "kl" may be negative.
        loss_type: "kl", "reverse_kl", "jsd" or "tvd", of these probabilities.
        beta, temperature_squared, hard_weight, bias, reduction, divisor, ignore_index, softcap, scale, num_valid: as in
            `distill`. The cross entropy is over all classes.
        temperature: τ, divides the student's logits for the soft loss.
        chunk_bytes, accumulate, logits_dtype: as in `distill`; the student's logits have the budget to themselves.
        group: as in `tigon.linear_cross_entropy`. What the teacher gave is whole on all ranks, with global ids.
    Returns: as `distill`.
    Raises: ValueError for shapes, dtypes or options that do not fit. An id outside [0, V) gives a NaN loss on the GPU,
        and a ValueError on the CPU.

    Three matrix products a token.

    Replaces (rest="drop")::

        q = F.linear(x, weight).float().log_softmax(-1).gather(-1, teacher_ids)
        loss = F.kl_div(q, teacher_logprobs, reduction="batchmean", log_target=True)
    """
    name = "distill_topk"
    x, weight, bias, target, shards = shards_of(name, x, weight, bias, target, group, accumulate)
    compute = check_head(name, x, weight, bias)
    classes = weight.shape[0] if shards is None else shards.classes
    for argument, t in (("teacher_ids", teacher_ids), ("teacher_logprobs", teacher_logprobs)):
        if hasattr(t, "device_mesh"):
            raise ValueError(f"{name}: {argument} must be a plain tensor, whole on every rank, got a DTensor.")
    if rest not in RESTS:
        raise ValueError(f"{name}: rest must be one of {RESTS}, got {rest!r}.")
    shape = teacher_ids.shape
    if shape[:-1] != x.shape[:-1] or teacher_logprobs.shape != shape or not 0 < shape[-1] <= classes:
        raise ValueError(
            f"{name}: teacher_ids and teacher_logprobs must be (..., K) beside x {tuple(x.shape)}, with K from 1 to "
            f"{classes}, got {tuple(shape)} and {tuple(teacher_logprobs.shape)}."
        )
    if teacher_ids.dtype.is_floating_point or not teacher_logprobs.dtype.is_floating_point:
        raise ValueError(
            f"{name}: teacher_ids must be integers and teacher_logprobs floats, got {teacher_ids.dtype} and "
            f"{teacher_logprobs.dtype}."
        )
    _check_device(name, x, teacher_ids=teacher_ids, teacher_logprobs=teacher_logprobs)
    _check_ids(name, teacher_ids, teacher_logprobs, classes)
    K = shape[-1]
    teacher = teacher_ids.reshape(-1, K).contiguous(), teacher_logprobs.detach().reshape(-1, K).contiguous(), None
    return _distill(
        name, x, weight, bias, teacher, target, compute, compute, rest, LOSS_TYPES[:-1], loss_type, beta, temperature,
        temperature_squared, hard_weight, reduction, divisor, ignore_index, softcap, scale, None, 1.0, num_valid,
        chunk_bytes, accumulate, logits_dtype, shards,
    )  # fmt: skip


def _distill(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, teacher: tuple[Tensor, Tensor, Tensor | None],
    target: Tensor | None, compute: torch.dtype, teacher_compute: torch.dtype, rest: str, loss_types: tuple[str, ...],
    loss_type: str, beta: float, temperature: float, temperature_squared: bool, hard_weight: float, reduction: str,
    divisor: Tensor | float | None, ignore_index: int, softcap: float | None, scale: float,
    teacher_softcap: float | None, teacher_scale: float, num_valid: SupportsInt | None, chunk_bytes: int | None,
    accumulate: str, logits_dtype: torch.dtype | None, shards: Shards | None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """What the two have in common."""
    check_accumulate(name, accumulate)
    for argument, value, choices in (("loss_type", loss_type, loss_types), ("reduction", reduction, REDUCTIONS)):
        if value not in choices:
            raise ValueError(f"{name}: {argument} must be one of {choices}, got {value!r}.")
    for argument, share in (("beta", beta), ("hard_weight", hard_weight)):
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name}: {argument} must lie in [0, 1], got {share}.")
    _check_positive(name, temperature=temperature, softcap=softcap, scale=scale)
    if divisor is not None and reduction == "sum":
        raise ValueError(f"{name}: divisor goes with reduction='batchmean' or 'mean', got reduction='sum'.")
    if isinstance(divisor, Tensor) and divisor.dim() != 0:
        raise ValueError(f"{name}: divisor must be a number or a 0-d tensor, got shape {tuple(divisor.shape)}.")
    if target is None and (hard_weight or num_valid is not None):
        argument = "hard_weight" if hard_weight else "num_valid"
        raise ValueError(f"{name}: {argument} goes with a target, got None.")
    classes, widest = (weight.shape[0],) * 2 if shards is None else (shards.classes, shards.widest)
    if target is not None:
        target = checked_target(name, target, x.shape[:-1], classes, ignore_index, x.device)
    rows = x.reshape(-1, x.shape[-1])
    labels = None if target is None else target.reshape(-1).contiguous()
    if shards is not None and labels is not None:
        labels, ignore_index = shards.labels(labels, ignore_index), IGNORED
    valid = -1 if num_valid is None else int(num_valid)
    loss_dtype = torch.promote_types(compute, torch.float32)
    inverse = _inverse(rows, labels, ignore_index, reduction, divisor, loss_dtype)
    if valid >= 0 and labels is not None:
        guard = nan_if_more(labels, ignore_index, valid, loss_dtype)
        inverse = guard if inverse is None else inverse * guard
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (rows, weight, bias)]
    wide_logits = logits_dtype_of(name, compute, logits_dtype) != compute
    dtype, teacher_dtype = logits_dtypes(compute, teacher_compute, wide_logits)
    sides = logit_bytes(compute, dtype) + (0 if rest else teacher_dtype.itemsize)
    whole = (rows.shape[0] if valid < 0 else valid) * widest * sides
    spared = spared_by_one_chunk(weight, compute, accumulate, widest) if needs[1] and inverse is not None else 0
    budget = chunk_budget(x.device, chunk_bytes, whole=whole, spared=spared)
    arguments = (
        rows, weight, bias, *teacher, labels, inverse, valid, compute, teacher_compute, wide_logits, budget,
        accumulate == "fp32", *needs, reduction == "mean",
        kind_of(loss_type, beta), rest, beta, temperature, temperature**2 if temperature_squared else 1.0, hard_weight,
        ignore_index, softcap or 0.0, scale, teacher_softcap or 0.0, teacher_scale,
    )  # fmt: skip
    loss, soft, hard = walk(*arguments) if shards is None else walk_over_shards(*arguments, {"shards": shards})
    metrics = {"soft_loss": soft.detach()}
    if hard_weight:
        metrics["hard_loss"] = hard.detach()
    return loss, metrics


def _inverse(
    rows: Tensor, labels: Tensor | None, ignore_index: int, reduction: str, divisor: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """1 / what the summed loss is divided by, 0-d, on the device. Nothing here waits for it."""
    if reduction == "sum":
        return None
    if isinstance(divisor, Tensor):
        return scalar(divisor, rows.device, dtype).reciprocal()
    if divisor is not None:
        return scalar(1.0 / divisor if divisor else float("inf"), rows.device, dtype)
    if labels is None:
        return scalar(max(rows.shape[0], 1), rows.device, dtype).reciprocal()
    return (labels != ignore_index).sum().clamp(min=1).to(dtype).reciprocal()


def _check_ids(name: str, ids: Tensor, logprobs: Tensor, classes: int) -> None:
    """On a GPU it would wait: there the kernel answers NaN."""
    if ids.device.type == "cpu" and can_look(ids):
        wrong = (logprobs != -torch.inf) & ((ids < 0) | (ids >= classes))
        if wrong.any():
            raise ValueError(f"{name}: teacher_ids must lie in [0, {classes}), got {int(ids[wrong].flatten()[0])}.")


def _check_device(name: str, x: Tensor, **others: Tensor) -> None:
    for argument, t in others.items():
        if t.device != x.device:
            raise ValueError(f"{name}: {argument} must be on x's device {x.device}, got {t.device}.")


def _check_positive(name: str, **values: float | None) -> None:
    for argument, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {argument} must be positive, got {value}.")
