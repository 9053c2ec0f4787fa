"""Liger's divergences of a student from a teacher, of probabilities, of logits and of heads.

Losses are fp32 whatever the inputs are, and no gradient flows to the teacher.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.integrations.liger.options import accumulate, make_loss_module, without_effect
from tigon.losses.distillation import Distill, distill
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.head import Hidden
from tigon.ops.divergence import jsd, kl_div, tvd
from tigon.ops.targets import as_labels

Reduction = Literal["batchmean", "mean", "sum", "none"]


def _mask(labels: Tensor | None, ignore_index: int) -> Tensor | None:
    """Which rows count."""
    return None if labels is None else as_labels(labels, ignore_index) != ignore_index


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: bool = True, reduce: bool = True, reduction: Reduction = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """`tigon.kl_div` by Liger's arguments: KL(target ‖ input).

    Args:
        input: log-probabilities (M, V), any float dtype.
        target: probabilities (M, V), or log-probabilities with log_target.
        reduction: "mean" over elements, "batchmean" over rows, "sum", or "none" for (M, V).
        size_average, reduce: must be True; use `reduction`.
        eps: has no effect; log-probabilities need none.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value not in (True, None):
            raise ValueError(f"liger_kl_div: {name} must be True, since reduction covers it, got {value!r}.")
    without_effect("liger_kl_div", eps=(eps, 1e-10))
    if reduction == "none":
        input, target = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (input, target.detach()))
        return F.kl_div(input, target, reduction="none", log_target=log_target)
    return kl_div(input, target.detach(), reduction=reduction, log_target=log_target)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """`tigon.jsd` by Liger's arguments.

    Args:
        input, target: the student's and the teacher's log-probabilities (M, V).
        shift_labels: (M,); rows with ignore_index do not count.
        beta: the teacher's weight in the mixture. 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher).
    Returns: (), the mean over the rows that count.
    """
    return jsd(input, target.detach(), beta=beta, mask=_mask(shift_labels, ignore_index))


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: Reduction = "mean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """`tigon.tvd` by Liger's arguments: ½ Σ |input − target|.

    Args:
        input, target: the student's and the teacher's probabilities (M, V).
        shift_labels: (M,); rows with ignore_index do not count.
        reduction: "mean" over elements, "batchmean" over rows, "sum", or "none" for (M, V).
    """
    if reduction == "none":
        input, target = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (input, target.detach()))
        distance = 0.5 * (input - target).abs()
        return distance if shift_labels is None else distance * (shift_labels != ignore_index).unsqueeze(-1)
    mask = _mask(shift_labels, ignore_index)
    return tvd(input, target.detach(), reduction=reduction, mask=mask)


def liger_fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`tigon.losses.distill` with loss_type="jsd", of fp32 logits, which Liger has from 0.8.5 on.

    Args:
        student_input, teacher_input: (M, H), each model's own width. student_weight, teacher_weight: (V, H).
        shift_labels: (M,); rows with ignore_index do not count.
        jsd_beta: beta in `liger_jsd`.
        temperature: divides the logits of both.
        accum_dtype: dtype in which the weight's gradient is summed: None for fp32, or the weight's dtype.
    """
    summed = accumulate("liger_fused_linear_jsd", accum_dtype, student_weight)
    return distill(
        student_input, student_weight, Hidden(teacher_input, teacher_weight), shift_labels,
        config=Distill(beta=jsd_beta, ignore_index=ignore_index, temperature=temperature),
        chunks=ChunkOptions(accumulate=summed, logits_dtype=torch.float32),
    )[0]  # fmt: skip


LigerJSD = make_loss_module("LigerJSD", liger_jsd, "log_q=input log_p=target shift_labels", "beta ignore_index")
LigerTVDLoss = make_loss_module(
    "LigerTVDLoss", liger_tvd, "p=input q=target shift_labels", "reduction ignore_index", reduction="batchmean"
)
LigerFusedLinearJSD = make_loss_module(
    "LigerFusedLinearJSD", liger_fused_linear_jsd,
    "student_input student_weight teacher_input teacher_weight shift_labels",
    "jsd_beta ignore_index temperature accum_dtype",
)  # fmt: skip


class LigerKLDIVLoss(nn.KLDivLoss):
    """`liger_kl_div` with the arguments of torch.nn.KLDivLoss after eps: forward(log-probabilities, target)."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        reduction = cast(Reduction, self.reduction)
        return liger_kl_div(y_pred, y_true, reduction=reduction, log_target=self.log_target, eps=self.eps)
