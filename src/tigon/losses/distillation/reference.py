"""Distillation in plain PyTorch: the specification, on whole logits, and the formula of the kernels elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.cross_entropy import cross_entropy_reference
from tigon.ops.divergence import divergence_reference

# The least probability of all that a teacher did not give, where the student has some left: what it gave is not known
# more exactly.
LEAST_REST = 1e-7


def kind_of(loss_type: str, beta: float) -> str:
    """jsd at its ends is a KL divergence."""
    if loss_type == "reverse_kl" or (loss_type == "jsd" and beta == 1.0):
        return "reverse"
    return "kl" if loss_type == "jsd" and beta == 0.0 else loss_type


def distill_reference(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, target: Tensor | None = None, *,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, softcap: float | None = None, scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_scale: float = 1.0, loss_type: str = "jsd", beta: float = 0.5,
    temperature: float = 1.0, ignore_index: int = -100, **options,
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
    loss_type: str = "kl", beta: float = 0.5, temperature: float = 1.0, ignore_index: int = -100, **options,
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


# ----------------------------------------------------------------------------- what the kernels compute, elsewhere


def rows_reference(
    logits: Tensor, teacher: Tensor, labels: Tensor | None, weights: tuple[float, float], gradient: bool,
    kind: str, beta: float, temperature: float, ignore_index: int, softcap: float, scale: float,
    teacher_softcap: float, teacher_scale: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Soft and hard loss of each row and the gradient along the logits, all without autograd. Arguments as there."""
    z, slope = _cap(logits, softcap, scale)
    t, _ = _cap(teacher.to(z.dtype), teacher_softcap, teacher_scale)
    if kind == "cosine":
        over_z, over_t = (1 / v.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-8) for v in (z, t))
        cosine = (z * t).sum(-1, keepdim=True) * over_z * over_t
        soft, dz = (1 - cosine).squeeze(-1), (z * over_z * cosine - t * over_t) * over_z
    else:
        lq, lp = torch.log_softmax(z / temperature, -1), torch.log_softmax(t / temperature, -1)
        terms, slopes = _terms_and_slopes(kind, lq, lp, beta)
        soft, dz = terms.sum(-1), slopes - lq.exp() * slopes.sum(-1, keepdim=True)
    return _with_hard(soft, dz, z, slope, labels, ignore_index, weights, gradient)


def topk_rows_reference(
    logits: Tensor, ids: Tensor, logprobs: Tensor, labels: Tensor | None, weights: tuple[float, float], gradient: bool,
    kind: str, rest: str, beta: float, temperature: float, ignore_index: int, softcap: float, scale: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """As `rows_reference`."""
    z, slope = _cap(logits, softcap, scale)
    given = logprobs != -torch.inf
    at = torch.where(given, ids, 0).long()
    others = torch.zeros_like(z).scatter_add_(-1, at, given.to(z.dtype)) == 0
    all_lq = torch.log_softmax(z / temperature, -1)
    lq = torch.where(given, all_lq.gather(-1, at), -torch.inf)
    lp = logprobs.to(z.dtype)
    lq_rest = torch.logsumexp(torch.where(others, all_lq, -torch.inf), -1, keepdim=True)
    if rest == "renormalize":
        lq, lp = lq - torch.logsumexp(lq, -1, keepdim=True), lp - torch.logsumexp(lp, -1, keepdim=True)
    elif rest == "tail":
        lq, lp = torch.cat([lq, lq_rest], -1), torch.cat([lp, _rest_of(lp.exp(), lq_rest.exp(), others).log()], -1)
    terms, slopes = _terms_and_slopes(kind, lq, lp, beta)
    if kind == "reverse" and rest == "drop":
        slopes = slopes + lq.exp()  # what is left out makes the probabilities no distribution, whose sum has no slope
    total = slopes.sum(-1, keepdim=True)
    d = slopes - lq.exp() * total
    share = torch.where(others & (all_lq != -torch.inf), (all_lq - lq_rest).exp(), 0.0)
    if rest == "tail":
        dz = share * d[..., -1:]
        d = d[..., :-1]
    else:
        dz = share * (-lq_rest.exp() * total if rest == "drop" else 0.0)
    dz = dz.scatter_add_(-1, at, torch.where(given, d, 0.0))
    return _with_hard(terms.sum(-1), dz, z, slope, labels, ignore_index, weights, gradient)


def _terms_and_slopes(kind: str, lq: Tensor, lp: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The loss of each class, and its derivative along lq, up to a multiple of q: of a distribution it drops out."""
    p, q = lp.exp(), lq.exp()
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


def _with_hard(
    soft: Tensor, dz: Tensor, z: Tensor, slope: Tensor | float, labels: Tensor | None, ignore_index: int,
    weights: tuple[float, float], gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    hard = None
    dz = dz * weights[0]
    valid = None if labels is None else labels != ignore_index
    if weights[1] and labels is not None and valid is not None:
        at = torch.where(valid, labels, 0).long().unsqueeze(-1)
        logp = torch.log_softmax(z, -1)
        hard = torch.where(valid, -logp.gather(-1, at).squeeze(-1), 0.0)
        dz.add_(logp.exp_(), alpha=weights[1]).scatter_add_(-1, at, dz.new_full((), -weights[1]).expand(at.shape))
    if valid is not None:
        soft = torch.where(valid, soft, 0.0)
        dz = torch.where(valid.unsqueeze(-1), dz, 0.0)
    return soft, hard, dz * slope if gradient else None


def _cap(logits: Tensor, softcap: float, scale: float) -> tuple[Tensor, Tensor | float]:
    z = logits * scale if scale != 1.0 else logits
    if not softcap:
        return z, scale
    t = torch.tanh(z / softcap)
    return softcap * t, scale * (1 - t * t)
