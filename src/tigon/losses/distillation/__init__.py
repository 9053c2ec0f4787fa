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

The family in the usual order: here the promise, then reference.py; formula.py and rows.py, the values that are handed
on; the kernels for heads that are `whole` on this device or `split` over several, both made of tiles.py; walk.py, the
one walk over chunks, and autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.kernels import is_concrete
from tigon.losses.distillation.formula import Rest, Transform, kind_of
from tigon.losses.distillation.reference import distill_reference, distill_topk_reference
from tigon.losses.distillation.rows import TopK
from tigon.losses.distillation.walk import Call, classes_of, distilled, distilled_over_shards
from tigon.losses.head.chunks import chunk_budget, nan_if_more, scalar, spared_by_one_chunk
from tigon.losses.head.head import Head, Hidden, check_head, head_of, logit_bytes, logits_dtype_of
from tigon.losses.head.vocabulary_parallel import Shards, shards_of
from tigon.losses.head.walk import Walk
from tigon.losses.options import check_choice, check_positive, check_share
from tigon.ops.shard_statistics import IGNORED
from tigon.ops.targets import checked_target

__all__ = ["Distill", "DistillTopK", "TopK", "distill", "distill_reference", "distill_topk", "distill_topk_reference"]

LossType = Literal["kl", "reverse_kl", "jsd", "tvd", "cosine"]
Reduction = Literal["batchmean", "mean", "sum"]
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
TOPK_LOSS_TYPES = tuple(kind for kind in LOSS_TYPES if kind != "cosine")


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Options of `distill`.

    Args:
        loss_type: "jsd", "kl" (forward: teacher ‖ student), "reverse_kl", "tvd" or "cosine".
        beta: weight of the teacher in the mixture of "jsd", in [0, 1].
        temperature: τ, divides both sides' logits for the soft loss; 1 for "cosine", which would not change.
        temperature_squared: multiply the soft loss by τ², as Hinton et al. do, so that its gradients do not shrink. TRL
            and Liger do not.
        hard_weight: h in [0, 1], the share of the cross entropy with target, at temperature 1.
        reduction: "batchmean" divides by the rows that count, "mean" the soft loss also by V, as torch's and TRL's mean
            over elements does, "sum" by nothing. Where no row counts the loss is 0.
        divisor: with the two means, what divides in place of the rows that count: a number or a 0-d tensor (TRL's
            num_items_in_batch, the count of a whole gradient-accumulation step), without gradient.
        ignore_index: targets that do not count.
    Raises: ValueError for options that do not fit.
    """

    loss_type: LossType = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    temperature_squared: bool = False
    hard_weight: float = 0.0
    reduction: Reduction = "batchmean"
    divisor: Tensor | float | None = None
    ignore_index: int = -100

    def __post_init__(self) -> None:
        self.check("distill", LOSS_TYPES)
        if self.loss_type == "cosine" and self.temperature != 1.0:
            raise ValueError(f"distill: temperature must be 1 for loss_type='cosine', got {self.temperature}.")

    def check(self, name: str, loss_types: tuple[str, ...]) -> None:
        check_choice(name, "loss_type", self.loss_type, loss_types)
        check_choice(name, "reduction", self.reduction, get_args(Reduction))
        check_share(name, beta=self.beta, hard_weight=self.hard_weight)
        check_positive(name, temperature=self.temperature)
        if self.divisor is not None and self.reduction == "sum":
            raise ValueError(f"{name}: divisor goes with reduction='batchmean' or 'mean', got reduction='sum'.")
        if isinstance(self.divisor, Tensor) and self.divisor.dim() != 0:
            raise ValueError(
                f"{name}: divisor must be a number or a 0-d tensor, got shape {tuple(self.divisor.shape)}."
            )


@dataclass(frozen=True, kw_only=True)
class DistillTopK(Distill):
    """Options of `distill_topk`: those of `Distill`, of the classes that the teacher gave.

    Args:
        loss_type: "kl", "reverse_kl", "jsd" or "tvd".
        rest: what becomes of the classes that were not given. "tail": they are one class more, of probability
            1 − Σ p and 1 − Σ q, the teacher's at least 1e-7 where the student's is not 0. "renormalize": they are left
            out, and both sides' given probabilities divided by their sums. "drop": they are left out, and nothing is
            divided: the loss is the given classes' share, which for "kl" may be negative.
        temperature: τ, divides the student's logits for the soft loss.
        beta: as in `Distill`.
        temperature_squared: as in `Distill`.
        hard_weight: as in `Distill`; the cross entropy is over all classes.
        reduction: as in `Distill`.
        divisor: as in `Distill`.
        ignore_index: as in `Distill`.
    """

    loss_type: LossType = "kl"
    rest: Rest = "tail"

    def __post_init__(self) -> None:
        self.check("distill_topk", TOPK_LOSS_TYPES)
        check_choice("distill_topk", "rest", self.rest, get_args(Rest))


def distill(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    teacher: Hidden,
    target: Tensor | None = None,
    *,
    config: Distill = Distill(),
    walk: Walk = Walk(),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The distillation loss of the logits x Wᵀ + bias from a teacher's, neither of which are all in memory at once.

    Args:
        x: (..., H), bf16, fp16, fp32 or fp64: hidden states that enter the student's head.
        head: the student's: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap, scale or
            group.
        teacher: a `tigon.losses.Hidden`: the teacher's hidden states (..., H'), aligned with x, of a width and dtype of
            their own, and its head (V, H'), with a bias, softcap and scale of its own. Over a group it is split as the
            student's head is, into the same sizes, both plain with the student's group or both DTensors.
        target: (...), integer class indices: where they are ignore_index, a row is left out. None: every row counts.
        config: the kind of divergence and its numbers.
        walk: which rows are left out, and what the walk over the others costs. `chunk_bytes` are of both sides' logits
            together. With `logits_dtype=torch.float32` the logits of both sides are not rounded to the dtype of the
            products: where distributions are peaked (logits of std 30), bf16's rounding puts the gradient of x off by
            13 to 18 %, and fp32 logits by less than 1 %. A chunk of the same bytes then holds 2/5 of the rows.
    Returns: the loss, 0-d, in fp32 (fp64 for fp64 inputs), and metrics without gradient: "soft_loss" and, with a hard
        weight, "hard_loss", each reduced, before the weights.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Four matrix products a token, one of them the teacher's: the gradients are computed in the forward pass. A row whose
    logits are NaN gives a NaN loss.

    Replaces::

        p, q = (F.linear(*side).float().log_softmax(-1) for side in ((teacher_x, teacher_weight), (x, weight)))
        log_m = torch.logsumexp(torch.stack([q + math.log(1 - beta), p + math.log(beta)]), dim=0)
        to_p = F.kl_div(log_m, p, reduction="batchmean", log_target=True)
        loss = beta * to_p + (1 - beta) * F.kl_div(log_m, q, reduction="batchmean", log_target=True)
    """
    name = "distill"
    if not isinstance(teacher, Hidden):
        raise ValueError(f"{name}: teacher must be a tigon.losses.Hidden, got {type(teacher).__name__}.")
    given, theirs = head_of(name, head), head_of(name, teacher.head, "teacher.head")
    if hasattr(given.weight, "device_mesh") != hasattr(theirs.weight, "device_mesh"):
        raise ValueError(f"{name}: head and teacher.head must both be DTensors, or both plain tensors.")
    student = _student(name, x, given, target, walk)
    teacher_x, teacher_weight, teacher_bias, _, others = shards_of(
        f"{name}: of the teacher", teacher.x, theirs.weight, theirs.bias, None, theirs.group or given.group,
        walk.accumulate,
    )  # fmt: skip
    weight = student.weight
    if student.shards is not None or others is not None:
        here, there = ("whole" if of is None else of.where() for of in (student.shards, others))
        if here != there:
            raise ValueError(f"{name}: teacher.head must be split over the ranks as head is, {here}, got {there}.")
    teacher_compute = check_head(name, teacher_x, teacher_weight, teacher_bias, prefix="teacher.")
    if teacher_x.shape[:-1] != student.x.shape[:-1] or teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"{name}: teacher.x must be (..., H') and teacher.head's weight (V, H') beside x {tuple(student.x.shape)} "
            f"and weight {tuple(weight.shape)}, got {tuple(teacher_x.shape)} and {tuple(teacher_weight.shape)}."
        )
    _check_device(name, student.x, **{"teacher.x": teacher_x})
    check_positive(name, **{"teacher.head.softcap": theirs.softcap, "teacher.head.scale": theirs.scale})
    beside = _Teacher(
        teacher_x.reshape(-1, teacher_x.shape[-1]).detach(), teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(), None, teacher_compute, _transform(theirs),
    )  # fmt: skip
    return _distill(name, student, beside, config, walk)


def distill_topk(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    teacher: TopK,
    target: Tensor | None = None,
    *,
    config: DistillTopK = DistillTopK(),
    walk: Walk = Walk(),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The distillation loss from the K likeliest classes that a teacher gave of each row: a server, or a data set.

    Args:
        x: (..., H), as in `distill`.
        head: the student's, as in `distill`.
        teacher: a `TopK`, ids and log-probabilities (..., K), whole on all ranks.
        target: (...) or None, as in `distill`.
        config: the kind of divergence, its numbers, and what becomes of the other classes. The cross entropy of
            `hard_weight` is over all classes.
        walk: as in `distill`; the student's logits have the bytes to themselves.
    Returns: as `distill`.
    Raises: ValueError for shapes, dtypes or options that do not fit. An id outside [0, V) gives a NaN loss on the GPU,
        and a ValueError on the CPU.

    Three matrix products a token.

    Replaces (rest="drop")::

        q = F.linear(x, weight).float().log_softmax(-1).gather(-1, teacher.ids)
        loss = F.kl_div(q, teacher.logprobs, reduction="batchmean", log_target=True)
    """
    name = "distill_topk"
    if not isinstance(teacher, TopK):
        raise ValueError(f"{name}: teacher must be a tigon.losses.TopK, got {type(teacher).__name__}.")
    given = head_of(name, head)
    student = _student(name, x, given, target, walk)
    ids, logprobs = teacher
    for argument, t in (("teacher.ids", ids), ("teacher.logprobs", logprobs)):
        if hasattr(t, "device_mesh"):
            raise ValueError(f"{name}: {argument} must be a plain tensor, whole on every rank, got a DTensor.")
    classes = classes_of(student.weight, student.shards).total
    if ids.shape[:-1] != student.x.shape[:-1] or logprobs.shape != ids.shape or not 0 < ids.shape[-1] <= classes:
        raise ValueError(
            f"{name}: teacher.ids and teacher.logprobs must be (..., K) beside x {tuple(student.x.shape)}, with K from "
            f"1 to {classes}, got {tuple(ids.shape)} and {tuple(logprobs.shape)}."
        )
    if ids.dtype.is_floating_point or not logprobs.dtype.is_floating_point:
        raise ValueError(
            f"{name}: teacher.ids must be integers and teacher.logprobs floats, got {ids.dtype} and {logprobs.dtype}."
        )
    _check_device(name, student.x, **{"teacher.ids": ids, "teacher.logprobs": logprobs})
    _check_ids(name, ids, logprobs, classes)
    K = ids.shape[-1]
    rows = ids.reshape(-1, K).contiguous(), logprobs.detach().reshape(-1, K).contiguous()
    beside = _Teacher(*rows, None, config.rest, student.compute, Transform())
    return _distill(name, student, beside, config, walk)


class _Student(NamedTuple):
    """This device's tensors, checked."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    shards: Shards | None
    compute: torch.dtype
    transform: Transform


class _Teacher(NamedTuple):
    """The teacher's tensors: (N, H'), (V, H') and (V,) of a head; with `rest` ids and log-probabilities (N, K)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    rest: Rest | None
    compute: torch.dtype
    transform: Transform


def _transform(head: Head) -> Transform:
    return Transform(head.softcap or 0.0, head.scale)


def _student(name: str, x: Tensor, head: Head, target: Tensor | None, walk: Walk) -> _Student:
    walk.check_unused(name, "keep_bytes")
    check_positive(name, softcap=head.softcap, scale=head.scale)
    tensors = shards_of(name, x, head.weight, head.bias, target, head.group, walk.accumulate)
    return _Student(*tensors, check_head(name, *tensors[:3]), _transform(head))


def _distill(
    name: str, student: _Student, teacher: _Teacher, config: Distill, walk: Walk
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the two have in common."""
    ignore_index, hard_weight = config.ignore_index, config.hard_weight
    x, weight, bias, target, shards, compute, transform = student
    if target is None and (hard_weight or walk.valid is not None):
        raise ValueError(f"{name}: {'hard_weight' if hard_weight else 'walk.valid'} goes with a target, got None.")
    classes = classes_of(weight, shards)
    if target is not None:
        target = checked_target(name, target, x.shape[:-1], classes.total, ignore_index, x.device)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    labels = None if target is None else target.reshape(-1).contiguous()
    if shards is not None and labels is not None:
        labels, ignore_index = shards.labels(labels, ignore_index), IGNORED
    valid = walk.number(name)
    loss_dtype = torch.promote_types(compute, torch.float32)
    inverse = _inverse(rows, labels, ignore_index, config.reduction, config.divisor, loss_dtype)
    if valid >= 0 and labels is not None:
        guard = nan_if_more(labels, ignore_index, valid, loss_dtype)
        inverse = guard if inverse is None else inverse * guard
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (rows, weight, bias)]
    need_dx, need_dw, need_db = needs
    logits, theirs = (logits_dtype_of(side, walk.logits_dtype) for side in (compute, teacher.compute))
    # Beside K given classes the student's logits have the budget to themselves.
    sides = logit_bytes(compute, logits) + (0 if teacher.rest else theirs.itemsize)
    whole = (rows.shape[0] if valid < 0 else valid) * classes.widest * sides
    spared = 0
    if need_dw and inverse is not None:
        spared = spared_by_one_chunk(weight, compute, walk.accumulate, classes.widest)
    budget = chunk_budget(x.device, walk.chunk_bytes, whole=whole, spared=spared, frozen=not need_dw)
    unit = config.temperature**2 if config.temperature_squared else 1.0
    call = Call(
        rows, weight, bias, teacher.x, teacher.weight, teacher.bias, labels, inverse, valid, compute, logits,
        teacher.compute, theirs, budget, walk.accumulate == "fp32", need_dx, need_dw, need_db,
        config.reduction == "mean", kind_of(config.loss_type, config.beta), teacher.rest, config.beta,
        config.temperature, unit, hard_weight, ignore_index, *transform, *teacher.transform,
    )  # fmt: skip
    loss, soft, hard = distilled(*call) if shards is None else distilled_over_shards(*call, {"shards": shards})
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
    if ids.device.type == "cpu" and is_concrete(ids):
        wrong = (logprobs != -torch.inf) & ((ids < 0) | (ids >= classes))
        if wrong.any():
            raise ValueError(f"{name}: teacher.ids must lie in [0, {classes}), got {int(ids[wrong].flatten()[0])}.")


def _check_device(name: str, x: Tensor, **others: Tensor) -> None:
    for argument, t in others.items():
        if t.device != x.device:
            raise ValueError(f"{name}: {argument} must be on x's device {x.device}, got {t.device}.")
