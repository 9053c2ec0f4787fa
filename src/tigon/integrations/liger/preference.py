"""Liger's preference losses as a family of `tigon.losses.token_loss`, with the results that Liger returns beside them.

    pairs      share · f(β · (r_chosen − r_rejected) − γ) + α · NLL(chosen),   r = log π(y) − log π_ref(y)
    unpaired   1 − σ(±β (r − kl))

Unlike `tigon.losses`, whose metrics are TRL's means, they return every sequence's log-probability; a sequence's
log-probability may be a mean over its tokens; and DPO may include an NLL.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.family import Part
from tigon.losses.head.chunks import to_scalar
from tigon.losses.head.head import Head, Hidden
from tigon.losses.operator import record
from tigon.losses.preference.families import DPO_LOSSES, Pair, Pairs, log1mexp
from tigon.losses.token_loss import token_loss

# Except types that see the whole batch, or count tokens: Liger has neither.
DPO_TYPES = (
    "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
)  # fmt: skip


@record
class Formula(NamedTuple):
    """name: a DPO type, "contrast", "orpo" or "kto". average: a sequence's log-probability is a mean over its tokens.

    tau: τ for "discopop". alpha: the NLL's weight.
    """

    name: str
    beta: float
    average: bool = False
    smoothing: float = 0.0
    tau: float = 0.05
    gamma: float = 0.0
    alpha: float = 0.0


class SequenceTensors(NamedTuple):
    """weights, nll_weights: (S, T) per token, in the log-probability and in the NLL. chosen, kl: (S,), for "kto"."""

    share: Tensor
    weights: Tensor
    nll_weights: Tensor | None = None
    chosen: Tensor | None = None
    kl: Tensor | None = None


class LigerPreference(Pairs, key="liger_preference"):
    Options = Formula
    Tensors = SequenceTensors
    options: Formula
    sums = ("nll_loss", "log_odds_ratio", "log_odds_chosen")
    per_sequence = ("logps", "rewards")
    wants_mean_logit = False

    def group_size(self) -> int:
        return 1 if self.options.name == "kto" else 2

    def grad_scale(self, sequences: int, tokens: int) -> float:
        # For a mean over tokens the slopes are smaller by the token count; with an NLL, half-way between.
        scale = super().grad_scale(sequences * (2 // self.group_size()), tokens)
        return scale * (tokens if self.options.average else max(1, tokens) ** 0.5 if self.options.alpha else 1.0)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        name, beta, _, smoothing, tau, gamma, alpha = self.options
        share, weights, nll_weights, chosen, kl = part.tensors
        logps = (part.logprob * weights).sum(1, keepdim=True)
        reference = torch.zeros_like(logps)
        if part.reference is not None:
            reference = (part.reference * weights).sum(1, keepdim=True)
        ratio = logps - reference
        zero = logps.detach().sum() * 0
        results = {"logps": logps, "rewards": beta * ratio, **dict.fromkeys(self.sums, zero)}
        if name == "kto":
            away = beta * (ratio - kl)
            return (share * torch.sigmoid(torch.where(chosen, -away, away))).sum(), results
        (ratio_w, ratio_l), count = self.halves(ratio), torch.ones_like(ratio[::2])
        pair = Pair(
            ratio_w, ratio_l, ratio_w, ratio_l, beta * (ratio_w - ratio_l) - gamma, self.halves(logps),
            self.halves(reference), count, count, 0.0, beta, smoothing, tau,
        )  # fmt: skip
        share = self.halves(share)[0]
        if name == "orpo":
            odds_w, odds_l = self.halves(logps - log1mexp(logps))
            losses = -beta * F.logsigmoid(odds_w - odds_l)
            results["log_odds_ratio"] = (F.logsigmoid(odds_w - odds_l) * share).sum()
            results["log_odds_chosen"] = ((odds_w - odds_l) * share).sum()
        elif name == "contrast":
            losses = torch.lerp(-F.logsigmoid(pair.margin), -F.logsigmoid(-pair.margin), smoothing)
        else:
            formula = DPO_LOSSES[name].formula
            assert formula is not None
            losses = formula(pair)
        results["nll_loss"] = -(part.logprob * nll_weights).sum()
        loss = (losses * share).sum()
        return loss + alpha * results["nll_loss"] if alpha else loss, results


class Sequences(NamedTuple):
    """One call of a preference loss: hidden states (S, T, H), the head, and targets (S, T) with ignored tokens."""

    name: str
    x: Tensor
    head: Head
    target: Tensor
    ignore_index: int
    reference: Hidden | None = None

    def weights(self, average: bool) -> Tensor:
        """The tokens' weights in a sequence's log-probability."""
        counts = self.target != self.ignore_index
        weights = counts.to(torch.promote_types(self.x.dtype, torch.float32))
        return weights / counts.sum(1, keepdim=True).clamp(min=1) if average else weights

    def run(self, formula: Formula, tensors: SequenceTensors, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return token_loss(
            LigerPreference.for_tensors(formula, tensors), tensors, self.x, self.head, labels,
            reference=self.reference, ignore_index=self.ignore_index, name=self.name,
        )  # fmt: skip

    def mean_logit(self, x: Tensor, rows: Tensor | float) -> Tensor:
        """The mean over classes of x Wᵀ + rows · bias, given the row sum x (H,): no logits are needed."""
        with torch.no_grad():
            mean = (x * self.head.weight.mean(0, dtype=x.dtype)).sum()
            return mean if self.head.bias is None else mean + rows * self.head.bias.mean(dtype=x.dtype)


Result = tuple[Tensor, tuple[Tensor, ...]]


def pair_loss(batch: Sequences, formula: Formula, nll: bool, nll_target: Tensor | None = None) -> Result:
    """B chosen sequences and then the B rejected ones. nll: whether to compute the NLL; else it is reported as 0."""
    x, target = batch.x, batch.target
    if x.dim() != 3 or x.shape[0] % 2 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{batch.name}: x must be (2B, T, H), chosen sequences and then as many rejected ones, and target (2B, T), "
            f"got {tuple(x.shape)} and {tuple(target.shape)}."
        )
    if nll_target is not None and nll_target.shape != target.shape:
        raise ValueError(f"{batch.name}: nll_target must be {tuple(target.shape)}, got {tuple(nll_target.shape)}.")
    pairs, weights = x.shape[0] // 2, batch.weights(formula.average)
    counts = target != batch.ignore_index
    labels, in_nll, guard = target, torch.zeros_like(counts), None
    if nll:
        in_nll[:pairs] = counts[:pairs]
        if nll_target is not None:
            in_nll[:pairs] = nll_target[:pairs] != batch.ignore_index
            labels = torch.where(counts | ~in_nll, target, nll_target)
            wrong = counts & in_nll & (target != nll_target)
            guard = torch.where(wrong.any(), float("nan"), 1.0)
    share = to_scalar(1 / max(1, pairs), x.device, weights.dtype).expand(2 * pairs)
    nll_weights = in_nll.to(weights.dtype) / in_nll.sum().clamp(min=1)
    loss, found = batch.run(formula, SequenceTensors(share, weights, nll_weights), labels)
    if guard is not None:
        loss = loss * guard
    logps, rewards = (found[metric].split(pairs) for metric in ("logps", "rewards"))
    means = (batch.mean_logit(t.mean((0, 1), dtype=weights.dtype), 1.0) for t in x.detach().split(max(1, pairs)))
    odds = (found["log_odds_ratio"], found["log_odds_chosen"]) if formula.name == "orpo" else ()
    return loss, (*logps, *means, found["nll_loss"], *rewards, *odds)


def unpaired_loss(batch: Sequences, formula: Formula, label: Tensor | None, kl: Tensor | float | None) -> Result:
    """label: (S,) bool, whether a sequence is a chosen one. kl: a number for all sequences, or (S,)."""
    x, target = batch.x, batch.target
    if x.dim() != 3 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{batch.name}: x must be (S, T, H) and target (S, T), got {tuple(x.shape)} and {tuple(target.shape)}."
        )
    S, T = target.shape
    if label is None or label.dtype != torch.bool or label.shape != (S,):
        got = None if label is None else f"{tuple(label.shape)} {label.dtype}"
        raise ValueError(f"{batch.name}: preference_labels must be ({S},) bool, got {got}.")
    if isinstance(kl, Tensor) and kl.numel() not in (1, S):
        raise ValueError(f"{batch.name}: kl must be a number or ({S},), got {tuple(kl.shape)}.")
    weights = batch.weights(formula.average)
    acc = weights.dtype
    if isinstance(kl, Tensor) and kl.numel() == S != 1:
        kl = kl.detach().reshape(S).to(acc)
    else:
        kl = to_scalar(0.0 if kl is None else kl, x.device, acc).expand(S)
    share = to_scalar(1 / max(1, S), x.device, acc).expand(S)
    loss, found = batch.run(formula, SequenceTensors(share, weights, None, label, kl), target)
    sides = (label, ~label)
    logps, rewards = ([torch.where(side, found[k], 0.0).sum() for side in sides] for k in ("logps", "rewards"))
    totals = [torch.einsum("sth,s->h", x.detach().to(acc), side.to(acc)) for side in sides]
    logits = [
        batch.mean_logit(total, side.sum() * T) * batch.head.weight.shape[0]
        for total, side in zip(totals, sides, strict=True)
    ]
    return loss, (*logps, *logits, *rewards)
