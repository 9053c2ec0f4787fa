"""The formulas that Liger's names promise, in plain PyTorch with whole logits. Statistics are fp32, fp64 for fp64."""

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


# --------------------------------------------------------------------------------------------------- chunked losses


def sequences(x, weight, target, bias, average):
    """Logits, token log-probabilities and those of sequences, of (S, T, H)."""
    logits, logp = log_softmax(x, weight, bias)
    mask = target != -100
    tokens = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * mask
    return logits, logp, tokens.sum(1) / (mask.sum(1) if average else 1)


def smoothed(z, e):
    return -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)


def pairs(
    x, weight, target, bias=None, ref_x=None, ref_weight=None, ref_bias=None, nll_target=None, *, kind="sigmoid",
    beta=0.1, label_smoothing=0.0, tau=0.05, gamma=0.0, alpha=None, average=False,
):  # fmt: skip
    """The loss, and what Liger returns beside it, in its order."""
    B = x.shape[0] // 2
    logits, logp, logps = sequences(x, weight, target, bias, average)
    ref = torch.zeros_like(logps)
    if ref_x is not None:
        ref = sequences(ref_x, ref_weight, target, ref_bias, average)[2].detach()
    (w, l), (rw, rl) = logps.split(B), ref.split(B)  # noqa: E741
    a, b, e = w - rw, l - rl, label_smoothing
    z = beta * (a - b) - gamma
    odds = w - torch.log1p(-w.exp()) - l + torch.log1p(-l.exp())
    losses = {
        "sigmoid": lambda: -F.logsigmoid(z),
        "contrast": lambda: smoothed(z, e),
        "orpo": lambda: -beta * F.logsigmoid(odds),
        "hinge": lambda: torch.relu(1 - z),
        "exo_pair": lambda: (
            z.sigmoid() * (F.logsigmoid(z) - math.log(1 - e)) + (-z).sigmoid() * (F.logsigmoid(-z) - math.log(e))
        ),
        "nca_pair": lambda: (
            -F.logsigmoid(beta * a) - 0.5 * F.logsigmoid(-beta * a) - 0.5 * F.logsigmoid(-beta * b)
        ),
        "robust": lambda: (-(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e),
        "bco_pair": lambda: -F.logsigmoid(beta * a) - F.logsigmoid(-beta * b),
        "sppo_hard": lambda: (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - (beta * a).sigmoid() + (beta * b).sigmoid(),
        "apo_down": lambda: (beta * a).sigmoid() + 1 - z.sigmoid(),
        "discopop": lambda: (
            -F.logsigmoid(z) * (1 - (z / tau).sigmoid()) + torch.exp(-z) * (z / tau).sigmoid()
        ),
    }[kind]()  # fmt: skip
    loss, nll = losses.mean(), torch.zeros_like(losses.sum())
    if alpha is not None:
        labels = (target if nll_target is None else nll_target)[:B]
        nll = F.nll_loss(logp[:B].flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss = loss + alpha * nll
    aux = [w, l, logits[:B].mean(), logits[B:].mean(), nll, beta * a, beta * b]
    if kind == "orpo":
        aux += [F.logsigmoid(odds).mean(), odds.mean()]
    return loss, *(t.detach() for t in aux)


def kto(
    x, weight, target, label, bias=None, ref_x=None, ref_weight=None, ref_bias=None, kl=None, *, beta=0.1,
    average=False,
):  # fmt: skip
    logits, _, logps = sequences(x, weight, target, bias, average)
    ratio = logps
    if ref_x is not None:
        ratio = logps - sequences(ref_x, ref_weight, target, ref_bias, average)[2].detach()
    sign = torch.where(label, 1.0, -1.0).to(ratio.dtype)
    loss = (1 - torch.sigmoid(beta * (ratio - (0.0 if kl is None else kl)) * sign)).mean()
    aux = [t[side].sum() for t in (logps, logits, beta * ratio) for side in (label, ~label)]
    return loss, *(t.detach() for t in aux)


def distill(x, weight, teacher_x, teacher_weight, target, bias=None, teacher_bias=None, *, kind="jsd", hard=0.5,
            soft=0.5, beta=0.5, temperature=1.0):  # fmt: skip
    logits, log_q = log_softmax(x, weight, bias, temperature)
    teacher_logits, log_p = log_softmax(teacher_x, teacher_weight, teacher_bias, temperature)
    valid = target != -100
    if kind == "jsd":
        rows = jsd_rows(log_q, log_p.detach(), beta)
    else:
        rows = beta * (1 - F.cosine_similarity(logits, teacher_logits.detach(), dim=-1))
    soft_loss = rows[valid].sum() / valid.sum()
    hard_loss = F.cross_entropy(logits, target)
    return hard * hard_loss + soft * soft_loss, soft_loss.detach(), hard_loss.detach()


def grpo(
    x, weight, ids, mask, advantages, bias=None, ref_logps=None, old=None, ratio=None, *, loss_type="dapo", beta=0.04,
    low=0.2, high=0.2, longest=1, level="token", temperature=1.0, delta=None, correct=False, items=None,
):  # fmt: skip
    """The loss, and the means of KL (unless beta is 0) and of what is clipped."""
    logp = log_softmax(x, weight, bias, temperature)[1].gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    m = mask.to(logp.dtype)
    count, A = m.sum(1, keepdim=True).clamp(min=1), advantages.to(logp.dtype).unsqueeze(1)
    old = logp.detach() if old is None else old
    ref = logp.detach() if ref_logps is None else ref_logps
    log_ratio = (logp - old) * m
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / count
    r = log_ratio.exp()
    cut = torch.zeros_like(r, dtype=torch.bool)
    if loss_type == "cispo":
        loss, cut = -r.clamp(max=high).detach() * A * logp, (r > high) & (A > 0)
    elif loss_type == "sapo":
        tau = torch.where(A > 0, 1.0, 1.05).to(r.dtype)
        loss = -A * torch.sigmoid(tau * (r - 1)) * 4 / tau
    elif loss_type == "vespo":
        log_w = (log_ratio.detach().clamp(-20, 20) * m).sum(1, keepdim=True)
        if ratio is not None:
            log_w = log_w + ratio.to(logp.dtype).log().view(len(m), -1).sum(1, keepdim=True)
        log_w = log_w.clamp(math.log(1e-8), 20)
        k, lam = (torch.where(A >= 0, up, down).to(r.dtype) for up, down in ((2.0, 3.0), (3.0, 2.0)))
        loss = -(lam + k * log_w - lam * log_w.exp()).exp() * A * logp
    else:
        bounded = r if delta is None else r.clamp(max=delta)
        loss = -torch.minimum(bounded * A, r.clamp(1 - low, 1 + high) * A)
        cut = ((r > 1 + high) & (A > 0)) | ((r < 1 - low) & (A < 0))
    if ratio is not None and loss_type != "vespo":
        loss = loss * ratio.to(logp.dtype).view(len(m), -1)
    d = (ref - logp) * m
    kl = d.exp() - d - 1
    kl = kl * r if correct else kl
    if beta:
        loss = loss + beta * kl
    S, n = len(m), m.sum()
    if loss_type in ("grpo", "sapo"):
        loss = ((loss * m).sum(1, keepdim=True) / count).mean()
    elif loss_type == "luspo":
        loss = (loss * m.sum(1, keepdim=True)).mean()
    else:
        divisor = {"bnpo": n, "dr_grpo": torch.tensor(S * longest)}.get(loss_type, n if items is None else items)
        loss = (loss * m).sum() / divisor
    metrics = [(kl * m).sum() / n] if beta else []
    return loss, *(t.detach() for t in (*metrics, (cut * m).sum() / n))
