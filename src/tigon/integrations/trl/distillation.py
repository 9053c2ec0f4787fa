"""The divergence from a teacher: from hidden states and heads in DistillationTrainer, from logits in GKDTrainer."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch import Tensor

from tigon.fusion.logits.split import is_split
from tigon.integrations.trl.swap import Side, Swaps, bind, clone, read_signature
from tigon.losses.distillation import Distill, distill
from tigon.losses.head.head import Head
from tigon.losses.linear_logprob import linear_logprob

DIVERGENCE = "_chunked_divergence_loss"
DIVERGENCE_ARGUMENTS = {
    "completion_mask", "beta", "num_items_in_batch", "temperature",
    *(f"{side}_{name}" for side in ("student", "teacher") for name in (
        "hidden_states", "lm_head_weight", "lm_head_bias", "logit_scale", "final_logit_softcapping",
    )),
}  # fmt: skip
JSD_ARGUMENTS = {"student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction", "num_items_in_batch"}
WHAT = "divergence from the teacher by tigon.losses.distill"


def replace_divergence(trainer: Any, swaps: Swaps) -> None:
    function = type(trainer)._compute_loss
    own = function.__globals__[DIVERGENCE]
    signature = read_signature(own, DIVERGENCE_ARGUMENTS)
    if signature is None:
        swaps.record_kept("policy", f"{own.__name__} takes arguments that Tigon does not know")
        return

    def divergence(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        a = bind(signature, args, kwargs)
        sides = [
            Side(
                a[f"{s}_hidden_states"],
                Head(
                    a[f"{s}_lm_head_weight"], a[f"{s}_lm_head_bias"], a[f"{s}_final_logit_softcapping"],
                    a[f"{s}_logit_scale"],
                ),
            ).gather() for s in ("student", "teacher")
        ]  # fmt: skip
        reason = sides[0].unusual() or sides[1].unusual()
        if reason is not None:
            swaps.left[reason] += 1
            return own(*args, **kwargs)
        valid = a["completion_mask"] != 0
        student, teacher = (side.rows(valid).in_one_dtype() for side in sides)
        loss = _distill_sides(student, teacher, a)
        swaps.count("distill", "policy", "teacher")
        with torch.no_grad():  # only a metric that the trainer logs
            target = torch.zeros(student.x.shape[0], dtype=torch.int64, device=student.x.device)
            entropy = linear_logprob(student.x, student.head, target, temperature=a["temperature"]).entropy.sum()
        return loss, entropy, valid.sum()

    cloned = clone(function, **{DIVERGENCE: divergence})

    def _compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not swaps.active:
            return function(self, *args, **kwargs)
        swaps.new_forward()
        return cloned(self, *args, **kwargs)

    swaps.put(trainer, "_compute_loss", types.MethodType(_compute_loss, trainer))
    swaps.record_replaced("policy", WHAT)


def replace_jsd(trainer: Any, swaps: Swaps) -> None:
    own, compute_loss = trainer.generalized_jsd_loss, trainer.compute_loss
    signature = read_signature(own, JSD_ARGUMENTS)
    if signature is None:
        swaps.record_kept("policy", "generalized_jsd_loss takes arguments that Tigon does not know")
        return

    def generalized_jsd_loss(*args: Any, **kwargs: Any) -> Tensor:
        if not swaps.active:
            return own(*args, **kwargs)
        a = bind(signature, args, kwargs)
        student, teacher = Side.from_logits(a["student_logits"]), Side.from_logits(a["teacher_logits"])
        reason = None
        if student is None or teacher is None or student.autocast != teacher.autocast:
            reason = "the student's or the teacher's logits are built: its head is not fused, or FSDP2 frees it"
        elif split_over(student) != split_over(teacher):
            reason = "the heads of the student and the teacher are split differently over devices"
        elif a["labels"] is None or (a["num_items_in_batch"] is None and a["reduction"] != "batchmean"):
            reason = "a loss without labels, or with another reduction"
        if reason is not None or student is None or teacher is None:
            swaps.left[str(reason)] += 1
            return own(*args, **kwargs)
        valid = a["labels"] != -100
        with student.as_in_its_forward():
            loss = _distill_sides(student.rows(valid).in_one_dtype(), teacher.rows(valid).in_one_dtype(), a)
        swaps.count("distill", "policy", "teacher")
        return loss

    def lazily(self: Any, *args: Any, **kwargs: Any) -> Any:
        with swaps.lazily() if swaps.active else contextlib.nullcontext():
            return compute_loss(*args, **kwargs)

    swaps.put(trainer, "generalized_jsd_loss", generalized_jsd_loss)
    swaps.put(trainer, "compute_loss", types.MethodType(lazily, trainer))
    swaps.record_replaced("policy", WHAT)


def split_over(side: Side) -> tuple[Any, ...] | None:
    """The mesh over which a split head's classes are sharded, and the class count; None for a whole head."""
    weight: Any = side.head.weight
    return (weight.device_mesh, weight.shape[0]) if is_split(weight) else None


def _distill_sides(student: Side, teacher: Side, a: dict[str, Any]) -> Tensor:
    config = Distill(
        loss_type="jsd", beta=float(a["beta"]), temperature=a["temperature"], divisor=a["num_items_in_batch"]
    )
    return distill(student.x, student.head, teacher.as_hidden, config=config)[0]
