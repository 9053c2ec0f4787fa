"""Liger's losses of logits and of one linear head: liger_cross_entropy and its kin, as functions and as modules.

Losses are fp32 whatever the inputs are, and neither logits nor log-probabilities are overwritten. Where every target is
ignored the loss is 0, as Liger has it; torch has NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.compat.liger.options import Options, accumulate, without_effect
from tigon.losses.chunked import chunk_budget, chunk_rows
from tigon.losses.distillation import distill
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.ops.cross_entropy import cross_entropy
from tigon.ops.divergence import jsd, kl_div, tvd
from tigon.ops.logprob import logprob


@dataclass
class CrossEntropyOutput:
    """What a cross entropy gives that was asked for more than its loss; None for what was not asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


# ---------------------------------------------------------------------------------------------------- cross entropy


def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """`tigon.cross_entropy`, of logits (M, V) that stay as they are.

    Args:
        lse_square_scale: its z_loss.
        size_average, reduce: None; `reduction` says it.
    Returns: the loss, or a `CrossEntropyOutput` if one of return_… is set. token_accuracy is a share of the rows that
        count, one number a row with reduction="none"; predicted_tokens are −1 where ignored.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None:
            raise ValueError(f"liger_cross_entropy: {name} must be None, since reduction says it, got {value!r}.")
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    valid = target != ignore_index
    divisor = valid.sum().clamp(min=1) if reduction == "mean" and weight is None else None
    found = cross_entropy(
        input, target, weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=lse_square_scale, softcap=softcap, divisor=divisor, details=any(wanted),
    )  # type: ignore[call-overload]  # fmt: skip
    if isinstance(found, Tensor):
        return found
    accuracy = _correct(found.predicted, target, valid) if reduction == "none" else found.accuracy
    return _output(wanted, found.loss, found.z_loss, accuracy, found.predicted)


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """`tigon.linear_cross_entropy` of input (M, H) and weight (V, H).

    What it has no argument for (ce_weight, use_token_scaling and what return_… asks for) goes through chunks of logits
    that the backward pass computes again: as little memory, a fourth matrix product.

    Args:
        lse_square_scale: its z_loss, which ce_weight does not weight.
        accum_dtype: what the weight's gradient is summed in: fp32 by default, or the weight's dtype.
        chunk_mem_const: 1; chunks follow a budget in bytes.
    Returns: as `liger_cross_entropy`.
    """
    name = "liger_fused_linear_cross_entropy"
    without_effect(name, chunk_mem_const=(chunk_mem_const, 1))
    summed = accumulate(name, accum_dtype, weight)
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    valid = target != ignore_index
    count = valid.sum().clamp(min=1)
    if ce_weight is None and not use_token_scaling and not any(wanted):
        return linear_cross_entropy(
            input, weight, target, bias=bias, ignore_index=ignore_index, reduction=reduction, z_loss=lse_square_scale,
            label_smoothing=label_smoothing, softcap=softcap, divisor=count if reduction == "mean" else None,
            accumulate=summed,
        )  # fmt: skip

    def rows(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        loss, _, _, predicted = cross_entropy(
            logits, target, weight=ce_weight, ignore_index=ignore_index, reduction="none",
            label_smoothing=label_smoothing, softcap=softcap, details=True,
        )  # fmt: skip
        z = torch.zeros_like(loss)
        if lse_square_scale:  # by itself, since class weights and their sum are none of its business
            z = _z_loss(logits, lse_square_scale, softcap).masked_fill(target == ignore_index, 0.0)
        if use_token_scaling:
            p = logprob(logits.detach(), target, ignore_index=ignore_index, softcap=softcap).logprob.exp()
            loss, z = loss * p, z * p
        return loss, z, predicted

    loss, z, predicted = _in_chunks(rows, input, weight, bias, target, accum_dtype=accum_dtype)
    accuracy = _correct(predicted, target, valid)
    if reduction != "none":
        loss, z, accuracy = loss.sum(), z.sum(), accuracy.sum() / valid.sum()
    if reduction == "mean":
        weights = count
        if ce_weight is not None:
            weights = torch.where(valid, ce_weight.detach()[torch.where(valid, target, 0)], 0.0).sum()
        loss, z = loss / weights, z / count
    return _output(wanted, loss + z, z, accuracy, predicted) if any(wanted) else loss + z


def _z_loss(logits: Tensor, coefficient: float, softcap: float | None) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return coefficient * logits.logsumexp(-1).square()


def _correct(predicted: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    return ((predicted == target) & valid).float()


def _output(wanted: tuple[bool, ...], loss: Tensor, *others: Tensor) -> CrossEntropyOutput:
    return CrossEntropyOutput(
        loss, *(value.detach() if want else None for want, value in zip(wanted, others, strict=True))
    )


def _in_chunks(
    rows: Callable[..., tuple[Tensor, ...]], x: Tensor, weight: Tensor, bias: Tensor | None, *beside: Tensor,
    accum_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What `rows` makes of the logits of x (M, H), one value a row, with a chunk of logits at a time.

    The chunks' gradients of the weight are summed where it enters, so in accum_dtype if one is given.
    """
    wide = weight if accum_dtype is None else weight.to(accum_dtype)

    def chunk(x: Tensor, *beside: Tensor) -> tuple[Tensor, ...]:
        return rows(F.linear(x, wide.to(weight.dtype), bias), *beside)

    M = x.shape[0]
    size = chunk_rows(M, weight.shape[0] * x.element_size(), chunk_budget(x.device))
    results = [
        checkpoint(chunk, *(t[start : start + size] for t in (x, *beside)), use_reentrant=False)
        for start in range(0, max(1, M), size)
    ]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------------------ divergences


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: bool = True, reduce: bool = True, reduction: str = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """`tigon.kl_div`: KL(target ‖ input) of input (M, V), log-probabilities, and target, probabilities by default.

    Args:
        reduction: "mean" over elements, "batchmean" over rows, "sum", or "none" for (M, V).
        size_average, reduce: True; `reduction` says it.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value not in (True, None):
            raise ValueError(f"liger_kl_div: {name} must be True, since reduction says it, got {value!r}.")
    without_effect("liger_kl_div", eps=(eps, 1e-10))
    if reduction == "none":
        input, target = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (input, target.detach()))
        return F.kl_div(input, target, reduction="none", log_target=log_target)
    return kl_div(input, target.detach(), reduction=reduction, log_target=log_target)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """`tigon.jsd`: log-probabilities (M, V) of the student, and of the teacher, whose weight in the mixture is beta.

    beta 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher). The mean is over rows that shift_labels do not ignore.
    """
    return jsd(input, target.detach(), beta=beta, labels=shift_labels, ignore_index=ignore_index)


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """`tigon.tvd`: half the distance of the probabilities (M, V) of the student and the teacher.

    Args:
        reduction: "mean" over elements, "batchmean" over rows, "sum", or "none" for (M, V).
    """
    if reduction == "none":
        input, target = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (input, target.detach()))
        distance = 0.5 * (input - target).abs()
        return distance if shift_labels is None else distance * (shift_labels != ignore_index).unsqueeze(-1)
    return tvd(input, target.detach(), reduction=reduction, labels=shift_labels, ignore_index=ignore_index)


def liger_fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`tigon.losses.distill` with loss_type="jsd"; beta as in `liger_jsd`, accum_dtype as in cross entropy."""
    return distill(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, beta=jsd_beta,
        ignore_index=ignore_index, temperature=temperature,
        accumulate=accumulate("liger_fused_linear_jsd", accum_dtype, student_weight),
    )[0]  # fmt: skip


def liger_fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`tigon.kl_div` of given probabilities (M, V) and a head's, through chunks of logits.

    Args:
        student_input: (M, H). student_weight: (V, H). target: (M, V) probabilities.
        reduction: "batchmean", "mean" or "sum".
    """
    name = "liger_fused_linear_kl_div"
    without_effect(name, eps=(eps, 1e-10))
    accumulate(name, accum_dtype, student_weight)
    if reduction not in ("batchmean", "mean", "sum"):
        raise ValueError(f"{name}: reduction must be 'batchmean', 'mean' or 'sum', got {reduction!r}.")
    M, V = target.shape
    labels = target.new_zeros(M, dtype=torch.int64) if shift_labels is None else shift_labels
    ignored = ignore_index if shift_labels is not None else -1

    def rows(logits: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        log_q = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
        return (kl_div(log_q, target, reduction="rows", log_target=False, labels=labels, ignore_index=ignored),)

    (loss,) = _in_chunks(
        rows, student_input, student_weight, None, target.detach(), labels, accum_dtype=accum_dtype
    )  # fmt: skip
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / ((labels != ignored).sum().clamp(min=1) * (V if reduction == "mean" else 1))


# ---------------------------------------------------------------------------------------------------------- modules


class LigerCrossEntropyLoss(Options):
    """`liger_cross_entropy` with its options fixed: forward(logits, target)."""

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._keep(
            weight=weight, ignore_index=ignore_index, lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing, reduction=reduction, softcap=softcap, return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
        )  # fmt: skip

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return liger_cross_entropy(_input, target, **self.options)


class LigerFusedLinearCrossEntropyLoss(Options):
    """`liger_fused_linear_cross_entropy` with its options fixed: forward(weight, x, target, bias)."""

    def __init__(
        self, ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._keep(
            ce_weight=ce_weight, ignore_index=ignore_index, lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing, reduction=reduction, softcap=softcap, return_z_loss=return_z_loss,
            accum_dtype=accum_dtype, use_token_scaling=use_token_scaling, return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )  # fmt: skip

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options)


class LigerFusedCETVDLoss(Options):
    """Cross entropy and total variation distance from a teacher, one number a row each, of logits (M, V).

    forward(student_logits, teacher_logits, target) → (cross entropy, distance), 0 where target is ignore_index.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index: int
        self._keep(ignore_index=ignore_index)

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        ce = cross_entropy(student_logits, target, ignore_index=self.ignore_index, reduction="none")
        distance = tvd(
            student_logits, teacher_logits.detach(), reduction="rows", logits=True, labels=target,
            ignore_index=self.ignore_index,
        )  # fmt: skip
        return ce, distance


class LigerJSD(Options):
    """`liger_jsd` with its options fixed: forward(log_q of the student, log_p of the teacher, shift_labels)."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self._keep(beta=beta, ignore_index=ignore_index)

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_jsd(log_q, log_p, shift_labels, **self.options)


class LigerKLDIVLoss(nn.KLDivLoss):
    """`liger_kl_div` with the arguments of torch.nn.KLDivLoss after eps: forward(log-probabilities, target)."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return liger_kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps)


class LigerTVDLoss(Options):
    """`liger_tvd` with its options fixed: forward(p of the student, q of the teacher, shift_labels)."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self._keep(reduction=reduction, ignore_index=ignore_index)

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_tvd(p, q, shift_labels, **self.options)


class LigerFusedLinearJSD(Options):
    """`liger_fused_linear_jsd` with its options fixed: forward(x, weight, teacher's x, teacher's weight, labels)."""

    def __init__(
        self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._keep(jsd_beta=jsd_beta, ignore_index=ignore_index, temperature=temperature, accum_dtype=accum_dtype)

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return liger_fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, **self.options
        )


class LigerFusedLinearKLDivLoss(Options):
    """`liger_fused_linear_kl_div` with its options fixed: forward(x, weight, probabilities, labels)."""

    def __init__(
        self, reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._keep(
            reduction=reduction, ignore_index=ignore_index, temperature=temperature, eps=eps, accum_dtype=accum_dtype
        )

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        return liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels, **self.options)
