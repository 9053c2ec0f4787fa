"""The results that Liger's preference losses return beside their loss, as families of `tigon.losses.token_loss`.

    pairs      share · f(β · (r_chosen − r_rejected) − γ) + α · NLL(chosen),   r = log π(y) − log π_ref(y)
    unpaired   1 − σ(±β (r − kl))

Unlike `tigon.losses`, whose metrics are TRL's means, they return every sequence's log-probability; a sequence's
log-probability may be a mean over its tokens; and DPO may include an NLL.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.family import Family, Part
from tigon.losses.head.chunks import to_scalar
from tigon.losses.head.head import Head, Hidden
from tigon.losses.operator import record
from tigon.losses.preference.families import DPO_LOSSES, Pair, Pairs, log1mexp
from tigon.losses.token_loss import token_loss

Reference = tuple[Tensor | None, Tensor | None, Tensor | None]


def hidden_of(reference: Reference) -> Hidden | None:
    """x, weight and bias as one value."""
    x, weight, bias = reference
    return None if x is None or weight is None else Hidden(x, Head(weight, bias))


# Except types that see the whole batch, or count tokens: Liger has neither.
DPO_TYPES = (
    "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
)  # fmt: skip


@record
class PairOptions(NamedTuple):
    """formula: a DPO type, "contrast" or "orpo". logps: how a sequence's log-probability is reduced over tokens.

    tau: τ for "discopop". alpha: the NLL's weight, 0 for none.
    """

    formula: str
    logps: Literal["mean", "sum"]
    beta: float
    smoothing: float
    tau: float
    gamma: float
    alpha: float


class PairTensors(NamedTuple):
    """share: (S,) 1 / pairs. weights, nll_weights: (S, T) per token, in the log-probability and in the NLL."""

    share: Tensor
    weights: Tensor
    nll_weights: Tensor


class LigerPairs(Pairs, key="liger_pairs"):
    Options = PairOptions
    Tensors = PairTensors
    options: PairOptions
    sums = ("nll_loss", "log_odds_ratio", "log_odds_chosen")
    per_sequence = ("logps", "rewards")
    wants_mean_logit = False

    def grad_scale(self, sequences: int, tokens: int) -> float:
        # For a mean over tokens the slopes are smaller by the token count; with an NLL, half-way between.
        mean, nll = self.options.logps == "mean", self.options.alpha != 0
        return super().grad_scale(sequences, tokens) * (tokens if mean else max(1, tokens) ** 0.5 if nll else 1.0)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        formula, _, beta, smoothing, tau, gamma, alpha = self.options
        share, weights, nll_weights = part.tensors
        logps = (part.logprob * weights).sum(1, keepdim=True)
        reference = torch.zeros_like(logps)
        if part.reference is not None:
            reference = (part.reference * weights).sum(1, keepdim=True)
        ratio = logps - reference
        (ratio_w, ratio_l), count = self.halves(ratio), torch.ones_like(ratio[::2])
        pair = Pair(
            ratio_w, ratio_l, ratio_w, ratio_l, beta * (ratio_w - ratio_l) - gamma, self.halves(logps),
            self.halves(reference), count, count, 0.0, beta, smoothing, tau,
        )  # fmt: skip
        zero = logps.detach().sum() * 0
        found = {"logps": logps, "rewards": beta * ratio, "log_odds_ratio": zero, "log_odds_chosen": zero}
        share = self.halves(share)[0]
        if formula == "orpo":
            odds_w, odds_l = self.halves(logps - log1mexp(logps))
            losses = -beta * F.logsigmoid(odds_w - odds_l)
            found["log_odds_ratio"] = (F.logsigmoid(odds_w - odds_l) * share).sum()
            found["log_odds_chosen"] = ((odds_w - odds_l) * share).sum()
        elif formula == "contrast":
            losses = torch.lerp(-F.logsigmoid(pair.margin), -F.logsigmoid(-pair.margin), smoothing)
        else:
            of_pair = DPO_LOSSES[formula].formula
            assert of_pair is not None
            losses = of_pair(pair)
        nll = -(part.logprob * nll_weights).sum()
        found["nll_loss"] = nll
        loss = (losses * share).sum()
        return loss + alpha * nll if alpha else loss, found


@record
class UnpairedOptions(NamedTuple):
    logps: Literal["mean", "sum"]
    beta: float


class UnpairedTensors(NamedTuple):
    """share: (S,) 1 / sequences. chosen, kl: (S,). weights: (S, T) per token in the sequence's log-probability."""

    share: Tensor
    chosen: Tensor
    kl: Tensor
    weights: Tensor


class LigerUnpaired(Family, key="liger_unpaired"):
    Options = UnpairedOptions
    Tensors = UnpairedTensors
    options: UnpairedOptions
    sums = ("logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected")

    def group_size(self) -> int:
        return 1

    def grad_scale(self, sequences: int, tokens: int) -> float:
        return max(1.0, float(sequences)) * (tokens if self.options.logps == "mean" else 1.0)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        share, chosen, kl, weights = part.tensors
        ratio = logps = (part.logprob * weights).sum(1, keepdim=True)
        if part.reference is not None:
            ratio = logps - (part.reference * weights).sum(1, keepdim=True)
        away = self.options.beta * (ratio - kl)
        loss = (share * torch.sigmoid(torch.where(chosen, -away, away))).sum()
        found = {}
        for name, values in (("logps", logps.detach()), ("rewards", self.options.beta * ratio.detach())):
            found[f"{name}/chosen"] = torch.where(chosen, values, 0.0).sum()
            found[f"{name}/rejected"] = torch.where(chosen, 0.0, values).sum()
        return loss, found


def pairwise(
    name: str, kind: str, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    reference: Reference = (None, None, None), *, beta: float, smoothing: float = 0.0, tau: float = 0.05,
    gamma: float = 0.0, alpha: float | None, average: bool, nll_target: Tensor | None = None, ignore_index: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """alpha: the NLL's weight, or None for none, which is then reported as 0."""
    if x.dim() != 3 or x.shape[0] % 2 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{name}: x must be (2B, T, H), chosen sequences and then as many rejected ones, and target (2B, T), got "
            f"{tuple(x.shape)} and {tuple(target.shape)}."
        )
    if nll_target is not None and nll_target.shape != target.shape:
        raise ValueError(f"{name}: nll_target must be {tuple(target.shape)}, got {tuple(nll_target.shape)}.")
    pairs, acc = x.shape[0] // 2, torch.promote_types(x.dtype, torch.float32)
    counts = target != ignore_index
    labels, in_nll, guard = target, torch.zeros_like(counts), None
    if alpha is not None:
        in_nll[:pairs] = counts[:pairs]
        if nll_target is not None:
            in_nll[:pairs] = nll_target[:pairs] != ignore_index
            labels = torch.where(counts | ~in_nll, target, nll_target)
            wrong = counts & in_nll & (target != nll_target)
            guard = torch.where(wrong.any(), float("nan"), 1.0)
    weights = counts.to(acc)
    if average:
        weights = weights / counts.sum(1, keepdim=True).clamp(min=1)
    tensors = PairTensors(
        to_scalar(1 / max(1, pairs), x.device, acc).expand(2 * pairs), weights,
        in_nll.to(acc) / in_nll.sum().clamp(min=1),
    )  # fmt: skip
    options = PairOptions(kind, "mean" if average else "sum", beta, smoothing, tau, gamma, alpha or 0.0)
    loss, found = token_loss(
        LigerPairs.for_tensors(options, tensors), tensors, x, Head(weight, bias), labels,
        reference=hidden_of(reference), ignore_index=ignore_index, name=name,
    )  # fmt: skip
    if guard is not None:
        loss = loss * guard
    halves = [found[metric].split(pairs) for metric in ("logps", "rewards")]
    means = (_logits(t.mean((0, 1), dtype=acc), weight, bias, 1.0) for t in x.detach().split(max(1, pairs)))
    results = (*halves[0], *means, found["nll_loss"], *halves[1])
    odds = (found["log_odds_ratio"], found["log_odds_chosen"]) if kind == "orpo" else ()
    return loss, (*results, *odds)


def unpaired(
    name: str, x: Tensor, weight: Tensor, target: Tensor, label: Tensor, bias: Tensor | None, reference: Reference, *,
    kl: Tensor | float | None, beta: float, average: bool, ignore_index: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    if x.dim() != 3 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{name}: x must be (S, T, H) and target (S, T), got {tuple(x.shape)} and {tuple(target.shape)}."
        )
    S, T = target.shape
    if label.dtype != torch.bool or label.shape != (S,):
        raise ValueError(f"{name}: preference_labels must be ({S},) bool, got {tuple(label.shape)} {label.dtype}.")
    if isinstance(kl, Tensor) and kl.numel() not in (1, S):
        raise ValueError(f"{name}: kl must be a number or ({S},), got {tuple(kl.shape)}.")
    acc = torch.promote_types(x.dtype, torch.float32)
    weights = (target != ignore_index).to(acc)
    if average:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    if isinstance(kl, Tensor) and kl.numel() == S != 1:
        kl = kl.detach().reshape(S).to(acc)
    else:
        kl = to_scalar(0.0 if kl is None else kl, x.device, acc).expand(S)
    tensors = UnpairedTensors(to_scalar(1 / max(1, S), x.device, acc).expand(S), label, kl, weights)
    options = UnpairedOptions("mean" if average else "sum", beta)
    loss, found = token_loss(
        LigerUnpaired.for_tensors(options, tensors), tensors, x, Head(weight, bias), target,
        reference=hidden_of(reference), ignore_index=ignore_index, name=name,
    )  # fmt: skip
    logits = []
    for of in (label, ~label):
        total = torch.einsum("sth,s->h", x.detach().to(acc), of.to(acc))
        logits.append(_logits(total, weight, bias, of.sum() * T) * weight.shape[0])
    return loss, (
        found["logps/chosen"], found["logps/rejected"], *logits, found["rewards/chosen"], found["rewards/rejected"]
    )  # fmt: skip


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | float) -> Tensor:
    """The mean over classes of x Wᵀ + rows · bias, given the row sum x (H,): no logits are needed."""
    with torch.no_grad():
        mean = (x * weight.mean(0, dtype=x.dtype)).sum()
        return mean if bias is None else mean + rows * bias.mean(dtype=x.dtype)
