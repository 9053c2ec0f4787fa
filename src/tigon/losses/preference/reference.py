"""Preference losses on whole logits: the specification, in plain PyTorch and as the papers write the formulas.

Options as in the public functions; logits (S, T, V) after softcap, scale and temperature. ref: log-probabilities of
sequences under the reference, or the reference's logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.preference.options import CPO, DPO, KTO, ORPO, SimPO


def token_logps(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """(S, T), 0 where the target does not count."""
    logp = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    mask = target != ignore_index
    return torch.where(mask, logp.gather(-1, torch.where(mask, target, 0).unsqueeze(-1)).squeeze(-1), 0.0)


def dpo_reference(
    logits: Tensor, target: Tensor, ref: tuple[Tensor, Tensor] | Tensor | None = None, *, config: DPO = DPO()
) -> Tensor:
    c, beta, ignore_index = config, config.beta, config.ignore_index
    logps = token_logps(logits, target, ignore_index)
    mask = target != ignore_index
    weights = mask.to(logps.dtype)
    if c.ld_alpha is not None:
        shared = torch.minimum(*mask.sum(1).chunk(2)).repeat(2)
        weights = torch.where(mask.cumsum(1) > shared.unsqueeze(1), weights * c.ld_alpha, weights)
    w, l = (logps * weights).sum(1).chunk(2)  # noqa: E741
    if isinstance(ref, Tensor):
        ref_w, ref_l = (token_logps(ref, target, ignore_index) * weights).sum(1).detach().chunk(2)
    else:
        ref_w, ref_l = ref or (torch.zeros_like(w), torch.zeros_like(l))
    r_w, r_l = w - ref_w, l - ref_l
    a, bco_delta = c.f_alpha_divergence_coef, 0.0 if c.bco_delta is None else c.bco_delta
    by_divergence: dict[str, Callable[[Tensor], Tensor]] = {
        "reverse_kl": lambda r: r,
        "forward_kl": lambda r: 1 - torch.exp(-r),
        "js_divergence": lambda r: math.log(2) + torch.log(torch.sigmoid(r)),
        "alpha_divergence": lambda r: (torch.exp((a - 1) * r) - 1) / (a - 1),
    }
    scores = by_divergence[c.f_divergence_type]
    s_w, s_l = scores(r_w), scores(r_l)
    n_w, n_l = mask.sum(1).clamp(min=1).chunk(2)
    z, per_token = beta * (s_w - s_l), s_w / n_w - s_l / n_l
    e, sigma = c.label_smoothing, torch.sigmoid

    def smooth(z: Tensor) -> Tensor:
        return -(1 - e) * sigma(z).log() - e * sigma(-z).log()

    def evaluate(name: str) -> Tensor:
        if name == "sigmoid":
            return -sigma(z).log()
        if name == "hinge":
            return torch.relu(1 - z)
        if name == "ipo":
            return (per_token - 1 / (2 * beta)).square()
        if name == "exo_pair":
            return sigma(z) * (sigma(z) / (1 - e)).log() + sigma(-z) * (sigma(-z) / e).log()
        if name == "nca_pair":
            return -sigma(beta * r_w).log() - 0.5 * sigma(-beta * r_w).log() - 0.5 * sigma(-beta * r_l).log()
        if name == "robust":
            return (-(1 - e) * sigma(z).log() + e * sigma(-z).log()) / (1 - 2 * e)
        if name == "bco_pair":
            return -sigma(beta * r_w - bco_delta).log() - sigma(-(beta * r_l - bco_delta)).log()
        if name == "sppo_hard":
            return (r_w - 0.5 / beta) ** 2 + (r_l + 0.5 / beta) ** 2
        if name == "aot":
            return smooth(beta * ((w - l).sort().values - (ref_w - ref_l).sort().values))
        if name == "aot_unpaired":
            return smooth(beta * (r_w.sort().values - r_l.sort().values))
        if name == "apo_zero":
            return 1 - sigma(beta * r_w) + sigma(beta * r_l)
        if name == "apo_down":
            return sigma(beta * r_w) + 1 - sigma(beta * (r_w - r_l))
        if name == "discopop":
            mix = sigma(z / c.discopop_tau)
            return -sigma(z).log() * (1 - mix) + torch.exp(-z) * mix
        if name == "sigmoid_norm":
            return -sigma(beta * per_token).log()
        if name == "sft":
            return -logps.chunk(2)[0].sum() / n_w_total
        raise NotImplementedError(f"dpo_reference: {name!r} has no formula.")

    n_w_total = mask.chunk(2)[0].sum().clamp(min=1)
    return torch.stack([weight * evaluate(name).mean() for name, weight in zip(c.types, c.weights, strict=True)]).sum()


def _averages(logps: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return ((logps * mask).sum(1) / mask.sum(1).clamp(min=1)).chunk(2)


def _nll(logps: Tensor, mask: Tensor) -> Tensor:
    return -logps.chunk(2)[0].sum() / mask.chunk(2)[0].sum().clamp(min=1)


def orpo_reference(
    logits: Tensor, target: Tensor, completion_mask: Tensor | None = None, *, config: ORPO = ORPO()
) -> Tensor:
    logps, mask = token_logps(logits, target, config.ignore_index), target != config.ignore_index
    among = mask if completion_mask is None else mask & completion_mask
    # A probability that rounds to 1 counts as the next value below.
    log_p = [p.clamp(max=-torch.finfo(p.dtype).eps / 2) for p in _averages(logps, among)]
    odds_w, odds_l = (p.exp() / -torch.expm1(p) for p in log_p)
    return _nll(logps, mask) - config.beta * torch.log(torch.sigmoid(torch.log(odds_w / odds_l))).mean()


def cpo_reference(logits: Tensor, target: Tensor, *, config: CPO = CPO()) -> Tensor:
    loss_type, beta, alpha, e = config.loss_type, config.beta, config.alpha, config.label_smoothing
    logps, mask = token_logps(logits, target, config.ignore_index), target != config.ignore_index
    averaged = loss_type in ("ipo", "simpo", "alphapo")
    w, l = _averages(logps, mask) if averaged else logps.sum(1).chunk(2)  # noqa: E741
    if alpha != 0:
        w, l = ((1 - torch.exp(-alpha * p)) / alpha for p in (w, l))  # noqa: E741
    if loss_type == "hinge":
        losses = torch.relu(1 - beta * (w - l))
    elif loss_type == "ipo":
        losses = (w - l - 1 / (2 * beta)) ** 2
    elif loss_type in ("sigmoid", "simpo", "alphapo"):
        z = beta * (w - l) - (config.simpo_gamma if loss_type in ("simpo", "alphapo") else 0.0)
        losses = -(1 - e) * torch.sigmoid(z).log() - e * torch.sigmoid(-z).log()
    else:
        raise NotImplementedError(f"cpo_reference: {loss_type!r} has no formula.")
    return losses.mean() + (0.0 if loss_type == "alphapo" else config.cpo_alpha) * _nll(logps, mask)


def simpo_reference(logits: Tensor, target: Tensor, *, config: SimPO = SimPO()) -> Tensor:
    logps, mask = token_logps(logits, target, config.ignore_index), target != config.ignore_index
    w, l = _averages(logps, mask)  # noqa: E741
    z, e = config.beta * (w - l - config.gamma_beta_ratio), config.label_smoothing
    losses = -(1 - e) * torch.sigmoid(z).log() - e * torch.sigmoid(-z).log()
    if config.loss_type == "hinge":
        losses = torch.relu(1 - z)
    elif config.loss_type != "sigmoid":
        raise NotImplementedError(f"simpo_reference: {config.loss_type!r} has no formula.")
    return losses.mean() + config.sft_weight * _nll(logps, mask)


def kto_reference(
    logits: Tensor, target: Tensor, label: Tensor, ref: Tensor, kl: Tensor | float = 0.0, *, config: KTO = KTO()
) -> Tensor:
    """kl: the mean log π(y) / π_ref(y) over mismatched completions."""
    c, logps = config, token_logps(logits, target, config.ignore_index).sum(1)
    theirs = ref if ref.dim() == 1 else token_logps(ref, target, c.ignore_index).sum(1).detach()
    if c.loss_type not in ("kto", "apo_zero_unpaired"):
        raise NotImplementedError(f"kto_reference: {c.loss_type!r} has no formula.")
    kl = torch.as_tensor(kl, dtype=logps.dtype).detach().clamp(min=0) if c.loss_type == "kto" else 0.0
    z = c.beta * (logps - theirs - kl)
    desirable, undesirable = c.desirable_weight * (1 - torch.sigmoid(z)), c.undesirable_weight * (1 - torch.sigmoid(-z))
    return torch.where(label, desirable, undesirable).mean()
