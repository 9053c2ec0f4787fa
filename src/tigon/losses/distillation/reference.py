"""Distillation in plain PyTorch: the specification, on whole logits, and the formulas of the torch path's chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.distillation.formula import LEAST_REST, Formula, kind_of
from tigon.losses.distillation.rows import Rows
from tigon.ops.cross_entropy import cross_entropy_reference
from tigon.ops.divergence import divergence_reference


def distill_reference(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, target: Tensor | None = None, *,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, softcap: float | None = None, scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_scale: float = 1.0, loss_type: str = "jsd", beta: float = 0.5,
    temperature: float = 1.0, ignore_index: int = -100, **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`distill` on whole logits. options: those of `_reduced`."""
    logits = F.linear(x, weight, bias)
    z = _capped(logits, softcap, scale)
    with torch.no_grad():
        t = _capped(F.linear(teacher_x, teacher_weight, teacher_bias), teacher_softcap, teacher_scale).to(z.dtype)
    if loss_type == "cosine":
        rows = 1 - F.cosine_similarity(z, t, dim=-1)
    else:
        kind = kind_of(loss_type, beta)
        rows = divergence_reference(z, t, None, kind, "logits", beta, temperature)
    return _reduced(rows, logits, target, temperature, ignore_index, softcap, scale, **options)


def distill_topk_reference(
    x: Tensor, weight: Tensor, teacher_ids: Tensor, teacher_logprobs: Tensor, target: Tensor | None = None, *,
    rest: str = "tail", bias: Tensor | None = None, softcap: float | None = None, scale: float = 1.0,
    loss_type: str = "kl", beta: float = 0.5, temperature: float = 1.0, ignore_index: int = -100, **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`distill_topk` on whole logits. options: those of `_reduced`."""
    logits = F.linear(x, weight, bias)
    log_q = torch.log_softmax(_capped(logits, softcap, scale) / temperature, -1)
    given = teacher_logprobs != -torch.inf
    p = torch.where(given, teacher_logprobs.to(log_q.dtype).exp(), 0.0)
    q = torch.where(given, log_q.gather(-1, torch.where(given, teacher_ids, 0).long()).exp(), 0.0)
    if rest == "renormalize":
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    elif rest == "tail":
        at = torch.where(given, teacher_ids, 0).long()
        others = torch.zeros_like(log_q).scatter_add(-1, at, given.to(log_q.dtype)) == 0
        q_rest = torch.where(others, log_q.exp(), 0.0).sum(-1, keepdim=True)
        p, q = torch.cat([p, _rest_of(p, q_rest, others)], -1), torch.cat([q, q_rest], -1)
    kind = kind_of(loss_type, beta)
    if kind == "tvd":
        terms = 0.5 * (p - q).abs()
    else:
        if kind not in ("kl", "reverse", "jsd"):
            raise NotImplementedError(f"distill_topk_reference: {loss_type!r} has no formula.")
        m = {"kl": q, "reverse": p}.get(kind, beta * p + (1 - beta) * q)
        of_p = torch.where(p == 0, 0.0, p * (_log(p) - _log(m)))
        of_q = torch.where(q == 0, 0.0, q * (_log(q) - _log(m)))
        terms = {"kl": of_p, "reverse": of_q}.get(kind, beta * of_p + (1 - beta) * of_q)
    return _reduced(terms.sum(-1), logits, target, temperature, ignore_index, softcap, scale, **options)


def _rest_of(p: Tensor, q_rest: Tensor, others: Tensor) -> Tensor:
    """What the given p leave to the others, (..., 1)."""
    rest = 1 - p.sum(-1, keepdim=True)
    rest = torch.where(rest < LEAST_REST, torch.where(q_rest == 0, 0.0, LEAST_REST), rest)
    return torch.where(others.any(-1, keepdim=True), rest, 0.0)


def _log(p: Tensor) -> Tensor:
    return torch.where(p == 0, 1.0, p).log()


def _capped(logits: Tensor, softcap: float | None, scale: float) -> Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return softcap * torch.tanh(z / softcap) if softcap else z


def _reduced(
    rows: Tensor, logits: Tensor, target: Tensor | None, temperature: float, ignore_index: int, softcap: float | None,
    scale: float, *, hard_weight: float = 0.0, temperature_squared: bool = False, reduction: str = "batchmean",
    divisor: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss and its parts, of the soft losses of the rows."""
    valid = torch.ones_like(rows, dtype=torch.bool) if target is None else target != ignore_index
    count = valid.sum().clamp(min=1) if divisor is None else divisor
    over = 1 if reduction == "sum" else count
    soft = torch.where(valid, rows, 0.0).sum() / over
    if temperature_squared:
        soft = soft * temperature**2
    if reduction == "mean":
        soft = soft / logits.shape[-1]
    loss, metrics = (1 - hard_weight) * soft, {"soft_loss": soft.detach()}
    if hard_weight and target is not None:
        hard = cross_entropy_reference(logits, target, ignore_index, 0.0, 0.0, softcap or 0.0, scale).sum() / over
        loss, metrics["hard_loss"] = loss + hard_weight * hard, hard.detach()
    return loss, metrics


# --------------------------------------------------------------------------- what the kernels compute, chunk by chunk
# Without autograd, and with natural logarithms: lq and lp are log q and log p.


def terms_and_slopes(formula: Formula, lq: Tensor, lp: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each class, and its derivative along lq, up to a multiple of q: of a distribution it drops out."""
    kind, beta = formula.kind, formula.beta
    p, q = lp.exp(), lq.exp()
    # A class of probability 0 adds nothing, also where its logarithm is -inf.
    if kind == "kl":
        return torch.where(p == 0, 0.0, p * (lp - lq)), -p
    if kind == "reverse":
        terms = torch.where(q == 0, 0.0, q * (lq - lp))
        return terms, terms
    if kind == "tvd":
        return 0.5 * (p - q).abs(), 0.5 * q * torch.sign(q - p)
    log_m = _log(beta * p + (1 - beta) * q)
    of_q = (1 - beta) * torch.where(q == 0, 0.0, q * (lq - log_m))
    return beta * torch.where(p == 0, 0.0, p * (lp - log_m)) + of_q, of_q


def given_slopes(
    formula: Formula, lq: Tensor, lp: Tensor, lq_rest: Tensor, others: Tensor
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Soft losses (M,); their slopes along the given classes' logits (M, K), and along the rest's as one class (M, 1).

    lq_rest: (M, 1), what q leaves to the others. others: (M, V) or (M, 1), whether there are any.
    """
    K = lq.shape[-1]
    if formula.rest == "renormalize":
        lq, lp = lq - torch.logsumexp(lq, -1, keepdim=True), lp - torch.logsumexp(lp, -1, keepdim=True)
    elif formula.rest == "tail":
        lq, lp = torch.cat([lq, lq_rest], -1), torch.cat([lp, _rest_of(lp.exp(), lq_rest.exp(), others).log()], -1)
    terms, slopes = terms_and_slopes(formula, lq, lp)
    if formula.kind == "reverse" and formula.rest == "drop":
        slopes = slopes + lq.exp()  # what is left out makes the probabilities no distribution, whose sum has no slope
    total = slopes.sum(-1, keepdim=True)
    d = slopes - lq.exp() * total
    of_rest: Tensor | float = 0.0
    if formula.rest == "tail":
        of_rest = d[..., -1:]
    elif formula.rest == "drop":
        of_rest = -lq_rest.exp() * total
    return terms.sum(-1), d[..., :K], of_rest


def write_with_hard(rows: Rows, soft: Tensor, dz: Tensor, z: Tensor, slope: Tensor | float, formula: Formula) -> None:
    """Write the losses of rows of which all classes are here, and the gradient. dz: the soft loss's, before weights."""
    hard, labels, weights = None, rows.labels, formula.weights
    dz = dz * weights.soft
    if labels is not None:
        valid = labels != formula.ignore_index
        if weights.hard:
            at = torch.where(valid, labels, 0).long().unsqueeze(-1)
            logp = torch.log_softmax(z, -1)
            hard = torch.where(valid, -logp.gather(-1, at).squeeze(-1), 0.0)
            # In place: at this point z, logp and dz are all alive, and each is as wide as the logits.
            dz.add_(logp.exp_(), alpha=weights.hard)
            dz.scatter_add_(-1, at, dz.new_full((), -weights.hard).expand(at.shape))
        soft = torch.where(valid, soft, 0.0)
        dz = torch.where(valid.unsqueeze(-1), dz, 0.0)
    rows.write(soft, hard, dz * slope if formula.gradient else None)
