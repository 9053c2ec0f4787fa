"""Distillation from a teacher's linear head without either's logits: the loss and all gradients in one walk.

    loss = (1 − h) · soft + h · cross entropy, with hard weight h; soft, for Q = softmax(z / τ) and the teacher's P:

    kl           KL(P ‖ Q)
    reverse_kl   KL(Q ‖ P)
    jsd          β · KL(P ‖ M) + (1 − β) · KL(Q ‖ M), M = β · P + (1 − β) · Q;  KL(P ‖ Q) for β = 0, KL(Q ‖ P) for β = 1
    tvd          ½ · Σ |p − q|
    cosine       1 − cos(z, the teacher's z)

Sources: Hinton et al. 2015, https://arxiv.org/abs/1503.02531; generalised JSD on policy, Agarwal et al. 2023,
https://arxiv.org/abs/2306.13649; reverse KL, Gu et al. 2023, https://arxiv.org/abs/2306.08543; TVD, Wen et al. 2023,
https://arxiv.org/abs/2307.15190.

File order: the public functions here, then reference.py; formula.py and rows.py, the values passed between them; the
kernels in heads.py and topk.py, with device functions in tiles.py and the exchange between devices in statistics.py;
walk.py, the walk over chunks, and autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import is_concrete
from tigon.losses.distillation.formula import Transform, resolve_kind
from tigon.losses.distillation.options import Distill, DistillTopK
from tigon.losses.distillation.reference import distill_reference, distill_topk_reference
from tigon.losses.distillation.rows import TopK
from tigon.losses.distillation.walk import Options, Tensors, distill_rows
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.chunks import guard_valid_count, to_scalar
from tigon.losses.head.head import Head, Hidden, check_head, choose_logits_dtype, logit_bytes, parse_head
from tigon.losses.head.vocabulary_parallel import resolve_shards
from tigon.losses.inputs import HeadInputs, parse_inputs, plan_walk
from tigon.losses.operator import with_floats
from tigon.ops.example import HEAD, Example

__all__ = ["Distill", "DistillTopK", "TopK", "distill", "distill_reference", "distill_topk", "distill_topk_reference"]


def distill(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    teacher: Hidden,
    target: Tensor | None = None,
    *,
    config: Distill = Distill(),
    chunks: ChunkOptions = ChunkOptions(),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The distillation loss between the logits x Wᵀ + bias and a teacher's, neither of which are all in memory at once.

    Args:
        x: (..., H), bf16, fp16, fp32 or fp64: hidden states that enter the student's head.
        head: the student's weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap, scale or group.
        teacher: a `tigon.losses.Hidden`: the teacher's hidden states (..., H'), aligned with x, in any width and dtype,
            and the teacher's head (V, H'), with its own bias, softcap and scale. Over a group the teacher's head is
            split into the same sizes as the student's, both plain with the student's group or both DTensors.
        target: (...), integer class indices; rows with ignore_index are left out. None: every row counts.
        config: the divergence and its parameters.
        chunks: which rows are left out, and the walk's cost. `chunk_bytes` counts both sides' logits together. With
            `logits_dtype=torch.float32` the logits are not rounded to the products' dtype: where distributions are
            peaked (logits with std 30), bf16 rounding puts dx off by 13 to 18 %, and fp32 logits by less than 1 %. A
            chunk with the same bytes then holds 2/5 as many rows.
    Returns: the loss, 0-d, in fp32 (fp64 for fp64 inputs), and metrics without gradient: "soft_loss" and, with a hard
        weight, "hard_loss", each reduced, before the weights.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Each token costs four matrix products, the teacher's included: the gradients are computed in the forward pass. A row
    with NaN logits gives a NaN loss.

    Replaces::

        p, q = (F.linear(*side).float().log_softmax(-1) for side in ((teacher_x, teacher_weight), (x, weight)))
        log_m = torch.logsumexp(torch.stack([q + math.log(1 - beta), p + math.log(beta)]), dim=0)
        to_p = F.kl_div(log_m, p, reduction="batchmean", log_target=True)
        loss = beta * to_p + (1 - beta) * F.kl_div(log_m, q, reduction="batchmean", log_target=True)
    """
    name = "distill"
    if not isinstance(teacher, Hidden):
        raise ValueError(f"{name}: teacher must be a tigon.losses.Hidden, got {type(teacher).__name__}.")
    given, theirs = parse_head(name, head), parse_head(name, teacher.head, "teacher.head")
    if hasattr(given.weight, "device_mesh") != hasattr(theirs.weight, "device_mesh"):
        raise ValueError(f"{name}: head and teacher.head must both be DTensors, or both plain tensors.")
    student = _parse_student(name, x, given, target, config, chunks)
    teacher_x, weight, bias, _, others = resolve_shards(
        f"{name}: of the teacher", teacher.x, theirs.weight, theirs.bias, None, theirs.group or given.group,
        chunks.accumulate,
    )  # fmt: skip
    if student.shards is not None or others is not None:
        here, there = ("whole" if shards is None else shards.describe() for shards in (student.shards, others))
        if here != there:
            raise ValueError(f"{name}: teacher.head must be split over the ranks as head is, {here}, got {there}.")
    compute = check_head(name, teacher_x, weight, bias, prefix="teacher.")
    if teacher_x.shape[:-1] != student.x.shape[:-1] or weight.shape[0] != student.weight.shape[0]:
        raise ValueError(
            f"{name}: teacher.x must be (..., H') and teacher.head's weight (V, H') beside x {tuple(student.x.shape)} "
            f"and weight {tuple(student.weight.shape)}, got {tuple(teacher_x.shape)} and {tuple(weight.shape)}."
        )
    _check_device(name, student.x, **{"teacher.x": teacher_x})
    rows, bias = teacher_x.reshape(-1, teacher_x.shape[-1]).detach(), None if bias is None else bias.detach()
    transform = Transform(float(theirs.softcap or 0.0), float(theirs.scale))
    return _distill(name, student, _Teacher(rows, weight.detach(), bias, compute, transform), config, chunks)


def distill_topk(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    teacher: TopK,
    target: Tensor | None = None,
    *,
    config: DistillTopK = DistillTopK(),
    chunks: ChunkOptions = ChunkOptions(),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The distillation loss from each row's K likeliest classes under a teacher, from a server or a data set.

    Args:
        x: (..., H), as in `distill`.
        head: the student's head, as in `distill`.
        teacher: a `TopK`, ids and log-probabilities (..., K), whole on all ranks.
        target: (...) or None, as in `distill`.
        config: the divergence, its parameters, and the treatment of the other classes. The cross entropy from
            `hard_weight` is over all classes.
        chunks: as in `distill`; the student's logits have all the bytes.
    Returns: as `distill`.
    Raises: ValueError for shapes, dtypes or options that do not fit. An id outside [0, V) gives a NaN loss on the GPU,
        and a ValueError on the CPU.

    Each token costs three matrix products.

    Replaces (rest="drop")::

        q = F.linear(x, weight).float().log_softmax(-1).gather(-1, teacher.ids)
        loss = F.kl_div(q, teacher.logprobs, reduction="batchmean", log_target=True)
    """
    name = "distill_topk"
    if not isinstance(teacher, TopK):
        raise ValueError(f"{name}: teacher must be a tigon.losses.TopK, got {type(teacher).__name__}.")
    student = _parse_student(name, x, parse_head(name, head), target, config, chunks)
    ids, logprobs = teacher
    for argument, t in (("teacher.ids", ids), ("teacher.logprobs", logprobs)):
        if hasattr(t, "device_mesh"):
            raise ValueError(f"{name}: {argument} must be a plain tensor, whole on every rank, got a DTensor.")
    classes = student.classes
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
    return _distill(name, student, _Teacher(*rows, None, student.compute, Transform()), config, chunks)


class _Teacher(NamedTuple):
    """The teacher's tensors: (N, H'), (V, H') and (V,) for a head; or ids and log-probabilities (N, K)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    compute: torch.dtype
    transform: Transform


def _parse_student(
    name: str, x: Tensor, head: Head, target: Tensor | None, config: Distill, chunks: ChunkOptions
) -> HeadInputs:
    chunks.check_unused(name, "keep_bytes", "fp8")
    if target is None and (config.hard_weight or chunks.valid_tokens is not None):
        field = "hard_weight" if config.hard_weight else "chunks.valid_tokens"
        raise ValueError(f"{name}: {field} goes with a target, got None.")
    return parse_inputs(name, x, head, target, config.ignore_index, chunks.accumulate)


def _distill(
    name: str, student: HeadInputs, teacher: _Teacher, config: Distill, chunks: ChunkOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss for both public functions, from parsed tensors."""
    rows, labels, dtype, valid = student.rows, student.labels, student.loss_dtype, chunks.read_valid_tokens(name)
    inverse = _inverse_divisor(rows, labels, student.ignore_index, config, dtype)
    if valid >= 0 and labels is not None:
        guard = guard_valid_count(labels, student.ignore_index, valid, dtype)
        inverse = guard if inverse is None else inverse * guard
    rest = config.rest if isinstance(config, DistillTopK) else ""
    logits, theirs = (choose_logits_dtype(side, chunks.logits_dtype) for side in (student.compute, teacher.compute))
    # With a top-k teacher the student's logits have the whole budget.
    row_bytes = logit_bytes(student.compute, logits) + (0 if rest else theirs.itemsize)
    plan = plan_walk(student, chunks, valid, row_bytes=row_bytes, one_chunk_saves_dw=inverse is not None)
    unit = config.temperature**2 if config.temperature_squared else 1.0
    options = Options(
        plan, logits, teacher.compute, theirs, teacher.transform, config.reduction == "mean",
        resolve_kind(config.loss_type, config.beta), rest, config.beta, config.temperature, unit, config.hard_weight,
    )  # fmt: skip
    tensors = Tensors(rows, student.weight, student.bias, teacher.x, teacher.weight, teacher.bias, labels, inverse)
    loss, soft, hard = distill_rows(tensors, with_floats(options), student.shards)
    metrics = {"soft_loss": soft.detach()}
    if config.hard_weight:
        metrics["hard_loss"] = hard.detach()
    return loss, metrics


def _inverse_divisor(
    rows: Tensor, labels: Tensor | None, ignore_index: int, config: Distill, dtype: torch.dtype
) -> Tensor | None:
    """1 / the summed loss's divisor, 0-d, on the device. Nothing here waits for the device."""
    divisor = config.divisor
    if config.reduction == "sum":
        return None
    if isinstance(divisor, Tensor):
        return to_scalar(divisor, rows.device, dtype).reciprocal()
    if divisor is not None:
        return to_scalar(1.0 / divisor if divisor else float("inf"), rows.device, dtype)
    if labels is None:
        return to_scalar(max(rows.shape[0], 1), rows.device, dtype).reciprocal()
    return (labels != ignore_index).sum().clamp(min=1).to(dtype).reciprocal()


def _check_ids(name: str, ids: Tensor, logprobs: Tensor, classes: int) -> None:
    """Check ids on the CPU only: a GPU check would wait, so the kernel gives NaN instead."""
    if ids.device.type == "cpu" and is_concrete(ids):
        wrong = (logprobs != -torch.inf) & ((ids < 0) | (ids >= classes))
        if wrong.any():
            raise ValueError(f"{name}: teacher.ids must lie in [0, {classes}), got {int(ids[wrong].flatten()[0])}.")


def _check_device(name: str, x: Tensor, **others: Tensor) -> None:
    for argument, t in others.items():
        if t.device != x.device:
            raise ValueError(f"{name}: {argument} must be on x's device {x.device}, got {t.device}.")


EXAMPLES = {
    "distill": Example(
        None,
        ((128, 64), HEAD, (128, 64), HEAD),
        lambda x, w, tx, tw: distill(x, w, Hidden(tx.detach(), tw.detach()), config=Distill(loss_type="jsd"))[0],
    ),
}
