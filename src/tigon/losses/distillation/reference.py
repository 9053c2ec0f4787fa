"""Distillation in plain PyTorch: the specification, on whole logits, and formulas for the torch path's chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.distillation.formula import LEAST_REST, Formula, log_or_zero, resolve_kind, terms_and_slopes
from tigon.losses.distillation.options import Distill, DistillTopK
from tigon.losses.distillation.rows import TopK
from tigon.losses.head.head import Head, Hidden, parse_head
from tigon.ops.cross_entropy import cross_entropy_reference
from tigon.ops.divergence import divergence_reference


def distill_reference(
    x: Tensor, head: Head, teacher: Hidden, target: Tensor | None = None, *, config: Distill = Distill()
) -> tuple[Tensor, dict[str, Tensor]]:
    """`distill` on whole logits."""
    z = _compute_logits(x, head)
    with torch.no_grad():
        t = _compute_logits(teacher.x, parse_head("distill_reference", teacher.head)).to(z.dtype)
    if config.loss_type == "cosine":
        rows = 1 - F.cosine_similarity(z, t, dim=-1)
    else:
        kind = resolve_kind(config.loss_type, config.beta)
        rows = divergence_reference(z, t, None, kind, "logits", config.beta, config.temperature)
    return _reduce(rows, z, target, config)


def distill_topk_reference(
    x: Tensor, head: Head, teacher: TopK, target: Tensor | None = None, *, config: DistillTopK = DistillTopK()
) -> tuple[Tensor, dict[str, Tensor]]:
    """`distill_topk` on whole logits."""
    z, (ids, logprobs), beta = _compute_logits(x, head), teacher, config.beta
    log_q = torch.log_softmax(z / config.temperature, -1)
    given = logprobs != -torch.inf
    at = torch.where(given, ids, 0).long()
    p = torch.where(given, logprobs.to(log_q.dtype).exp(), 0.0)
    q = torch.where(given, log_q.gather(-1, at).exp(), 0.0)
    if config.rest == "renormalize":
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    elif config.rest == "tail":
        others = torch.zeros_like(log_q).scatter_add(-1, at, given.to(log_q.dtype)) == 0
        q_rest = torch.where(others, log_q.exp(), 0.0).sum(-1, keepdim=True)
        p, q = torch.cat([p, _rest_probability(p, q_rest, others)], -1), torch.cat([q, q_rest], -1)
    kind = resolve_kind(config.loss_type, beta)
    if kind == "tvd":
        terms = 0.5 * (p - q).abs()
    else:
        if kind not in ("kl", "reverse", "jsd"):
            raise NotImplementedError(f"distill_topk_reference: {config.loss_type!r} has no formula.")
        m = {"kl": q, "reverse": p}.get(kind, beta * p + (1 - beta) * q)
        of_p = torch.where(p == 0, 0.0, p * (log_or_zero(p) - log_or_zero(m)))
        of_q = torch.where(q == 0, 0.0, q * (log_or_zero(q) - log_or_zero(m)))
        terms = {"kl": of_p, "reverse": of_q}.get(kind, beta * of_p + (1 - beta) * of_q)
    return _reduce(terms.sum(-1), z, target, config)


def _compute_logits(x: Tensor, head: Head) -> Tensor:
    logits = F.linear(x, head.weight, head.bias)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * head.scale
    return head.softcap * torch.tanh(z / head.softcap) if head.softcap else z


def _reduce(rows: Tensor, z: Tensor, target: Tensor | None, config: Distill) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its parts, from row losses."""
    valid = torch.ones_like(rows, dtype=torch.bool) if target is None else target != config.ignore_index
    count = valid.sum().clamp(min=1) if config.divisor is None else config.divisor
    over = 1 if config.reduction == "sum" else count
    soft = torch.where(valid, rows, 0.0).sum() / over
    if config.temperature_squared:
        soft = soft * config.temperature**2
    if config.reduction == "mean":
        soft = soft / z.shape[-1]
    h = config.hard_weight
    loss, metrics = (1 - h) * soft, {"soft_loss": soft.detach()}
    if h and target is not None:
        hard = cross_entropy_reference(z, target, config.ignore_index, 0.0, 0.0, 0.0, 1.0).sum() / over
        loss, metrics["hard_loss"] = loss + h * hard, hard.detach()
    return loss, metrics


def _rest_probability(p: Tensor, q_rest: Tensor, others: Tensor) -> Tensor:
    """The probability that the given p leave to the other classes, (..., 1)."""
    rest = 1 - p.sum(-1, keepdim=True)
    rest = torch.where(rest < LEAST_REST, torch.where(q_rest == 0, 0.0, LEAST_REST), rest)
    return torch.where(others.any(-1, keepdim=True), rest, 0.0)


# --------------------------------------------------------------------------- what the kernels compute, chunk by chunk
# Without autograd, and with natural logarithms: lq and lp are log q and log p.


def given_slopes(
    formula: Formula, lq: Tensor, lp: Tensor, lq_rest: Tensor, others: Tensor
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Soft losses (M,); slopes along the given classes' logits (M, K), and along the rest as an extra class (M, 1).

    lq_rest: (M, 1), the rest's q. others: (M, V) or (M, 1), whether there are other classes.
    """
    K = lq.shape[-1]
    if formula.rest == "renormalize":
        lq, lp = lq - torch.logsumexp(lq, -1, keepdim=True), lp - torch.logsumexp(lp, -1, keepdim=True)
    elif formula.rest == "tail":
        lp_rest = _rest_probability(lp.exp(), lq_rest.exp(), others).log()
        lq, lp = torch.cat([lq, lq_rest], -1), torch.cat([lp, lp_rest], -1)
    terms, slopes = terms_and_slopes(formula, lq, lp)
    if formula.kind == "reverse" and formula.rest == "drop":
        slopes = slopes + lq.exp()  # without the rest the probabilities are not a distribution, whose sum has no slope
    total = slopes.sum(-1, keepdim=True)
    d = slopes - lq.exp() * total
    rest_slope: Tensor | float = 0.0
    if formula.rest == "tail":
        rest_slope = d[..., -1:]
    elif formula.rest == "drop":
        rest_slope = -lq_rest.exp() * total
    return terms.sum(-1), d[..., :K], rest_slope
