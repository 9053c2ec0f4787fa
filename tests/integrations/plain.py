"""The formulas of Liger's cross entropy and divergences, in plain PyTorch. Statistics are fp32, fp64 for fp64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def log_softmax(x: Tensor, weight: Tensor, bias: Tensor | None, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, weight, bias)
    return wide(logits), (wide(logits) / temperature).log_softmax(-1)


# ------------------------------------------------------------------------------------------------------------ losses


def cross_entropy(
    logits, target, weight=None, *, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, softcap=None,
    reduction="mean", token_scaling=False,
):  # fmt: skip
    """Loss, z-loss, accuracy and predicted classes."""
    z = wide(logits)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    valid = target != ignore_index
    count = valid.sum()
    weights = None if weight is None else weight.to(z.dtype)
    rows = F.cross_entropy(
        z, target, weights, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    of_z = torch.where(valid, lse_square_scale * z.logsumexp(-1) ** 2, 0.0)
    p = torch.ones_like(rows)
    if token_scaling:
        p = z.softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).detach()
    divisor = count if weight is None else weights[target[valid]].sum()
    predicted = torch.where(valid, z.argmax(-1), -1)
    correct = (predicted == target).float()
    rows, of_z = rows * p, of_z * p
    if reduction == "none":
        return rows + of_z, of_z.detach(), correct, predicted
    if reduction == "sum":
        return (rows + of_z).sum(), of_z.sum().detach(), correct.sum() / count, predicted
    return rows.sum() / divisor + of_z.sum() / count, of_z.sum().detach() / count, correct.sum() / count, predicted


def kl_div(log_q, target, *, reduction="mean", log_target=False):
    return F.kl_div(wide(log_q), wide(target).detach(), reduction=reduction, log_target=log_target)


def jsd_rows(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """beta is the teacher's weight; 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher)."""
    if beta == 0:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return (beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)).sum(-1)


def jsd(log_q, log_p, labels=None, *, beta=0.5):
    rows = jsd_rows(wide(log_q), wide(log_p).detach(), beta)
    return rows.mean() if labels is None else rows[labels != -100].sum() / (labels != -100).sum()


def tvd(p, q, labels=None, *, reduction="mean"):
    elements = 0.5 * (wide(p) - wide(q).detach()).abs()
    if labels is not None:
        elements = elements * (labels != -100).unsqueeze(-1)
    if reduction == "none":
        return elements
    rows = len(elements) if labels is None else (labels != -100).sum()
    return elements.sum() / {"sum": 1, "batchmean": rows, "mean": rows * elements.shape[-1]}[reduction]
