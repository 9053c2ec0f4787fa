"""Preference losses as functions of sequence log-probabilities, in forms that are stable in fp32.

The walk in `tigon.losses.token_loss` passes a part of the batch at a time to a family, which returns the part's share
of the loss. Batch means are therefore sums here, weighted by shares, which `prepare` puts first. A single-part batch
goes to the kernels in `tigon.losses.preference.kernels`, if these support the type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.family import BATCH, Family, NoTensors, Part, Term, Whole
from tigon.losses.operator import record
from tigon.losses.preference.kernels import Contrast, write_pair_slopes

PAIR_METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected",
)  # fmt: skip


class PairTensors(NamedTuple):
    """Tensors for pair losses; (S,) each.

    pair_share: 1 / pairs. token_share: 1 / valid tokens in all chosen sequences; for rejected sequences, in those.
    """

    pair_share: Tensor
    token_share: Tensor


class Pairs(Family):
    """Chosen sequences, then as many rejected ones. Tensors begin like `PairTensors`, for `pair_metrics`."""

    sums: tuple[str, ...] = PAIR_METRICS
    wants_mean_logit = True

    def group_size(self) -> int:
        return 2

    def shares(self, mask: Tensor, dtype: torch.dtype) -> tuple[PairTensors, Tensor]:
        """The tensors that all pair losses need, and (2,) each half's valid-token count."""
        S = mask.shape[0]
        pair = mask.new_full((), 2 / max(2, S), dtype=dtype).expand(S)
        # By halves: the NLL is a mean over the chosen tokens, and no part sees them all.
        counts = mask.sum(1).view(2, S // 2).sum(1)
        token = counts.clamp(min=1).to(dtype).reciprocal().unsqueeze(1).expand(2, S // 2).reshape(S)
        return PairTensors(pair, token), counts

    def contrast(self) -> Contrast | None:
        """The family as the kernels take it; None if the kernels do not support the type."""
        return None

    def has_kernels(self) -> bool:
        return self.contrast() is not None

    def launch(
        self, batch: Whole, loss: Tensor, metrics: Tensor, slopes: Sequence[Tensor | None], grad_scale: float
    ) -> None:
        contrast, tensors = self.contrast(), batch.tensors
        assert contrast is not None
        reference, completion = getattr(tensors, "reference", None), getattr(tensors, "completion", None)
        write_pair_slopes(contrast, batch, reference, completion, loss, metrics, slopes, grad_scale)

    def halves(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Split (S', ...) into chosen and rejected rows."""
        chosen, rejected = t.split(t.shape[0] // 2) if t.shape[0] else (t, t)
        return chosen, rejected

    def pair_metrics(self, part: Part, logps: Tensor, rewards: Tensor) -> dict[str, Tensor]:
        """logps, rewards: (S', 1)."""
        with torch.no_grad():
            pair, token = part.tensors.pair_share, part.tensors.token_share
            assert part.mean_logit is not None
            logits = (part.mean_logit * part.mask * token).sum(1)
            (r_w, r_l), (share, _) = self.halves(rewards.detach()), self.halves(pair)
            found = {"rewards/accuracies": ((r_w > r_l) * share).sum(), "rewards/margins": ((r_w - r_l) * share).sum()}
            # A single sum for all six: with few sequences, launches take longer than the computation.
            values = torch.cat((rewards * pair, logps * pair, logits.unsqueeze(1)), 1)
            for side, sums in zip(("chosen", "rejected"), values.view(2, -1, 3).sum(1).unbind(), strict=True):
                names = (f"{name}/{side}" for name in ("rewards", "logps", "logits"))
                found |= zip(names, sums.unbind(), strict=True)
            return found

    def grad_scale(self, sequences: int, tokens: int) -> float:
        return max(1.0, sequences / 2)  # slopes of a mean over pairs shrink with the pair count


# -------------------------------------------------------------------------------------------------------------- dpo


class Pair(NamedTuple):
    """Terms for the DPO types, (n, 1) each: w for the chosen (winner), l for the rejected.

    ratio: log πθ(y) / π_ref(y). score: f'(ratio), the ratio itself for the reverse KL. margin: β · score difference.
    count: tokens. delta: bco_pair subtracts this from the rewards.
    """

    ratio_w: Tensor
    ratio_l: Tensor
    score_w: Tensor
    score_l: Tensor
    margin: Tensor
    logps: tuple[Tensor, Tensor]
    reference: tuple[Tensor, Tensor]
    count_w: Tensor
    count_l: Tensor
    delta: Tensor | float
    beta: float
    smoothing: float
    tau: float

    def per_token(self) -> Tensor:
        return self.score_w / self.count_w - self.score_l / self.count_l


def _smooth_log_sigmoid(z: Tensor, smoothing: float) -> Tensor:
    loss = -F.logsigmoid(z)
    # The second logarithm costs a pass over the pairs, which most calls do without.
    return torch.lerp(loss, -F.logsigmoid(-z), smoothing) if smoothing else loss


def _sort(t: Tensor) -> Tensor:
    return torch.sort(t, dim=0, stable=True).values


def _exo_pair(p: Pair) -> Tensor:
    q = torch.sigmoid(p.margin)
    # The label distribution is (1 − ε, ε): the loss is a KL divergence from that, hence ε above 0.
    log_p, log_rest = math.log1p(-p.smoothing), math.log(p.smoothing)
    return q * (F.logsigmoid(p.margin) - log_p) + torch.sigmoid(-p.margin) * (F.logsigmoid(-p.margin) - log_rest)


def _robust(p: Pair) -> Tensor:
    flipped = p.smoothing * F.logsigmoid(-p.margin)
    return (flipped - (1 - p.smoothing) * F.logsigmoid(p.margin)) / (1 - 2 * p.smoothing)


def _nca_pair(p: Pair) -> Tensor:
    chosen, rejected = p.beta * p.ratio_w, p.beta * p.ratio_l
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _aot(p: Pair) -> Tensor:
    # Sorted differences are compared by rank: the policy's distribution with the reference's, not pair with pair.
    between = _sort(p.logps[0] - p.logps[1]) - _sort(p.reference[0] - p.reference[1])
    return _smooth_log_sigmoid(p.beta * between, p.smoothing)


def _discopop(p: Pair) -> Tensor:
    of = p.margin / p.tau
    # exp(-margin) · sigmoid(of) as a single exponential: far below margin 0 the first factor overflows although the
    # product is 0.
    return -F.logsigmoid(p.margin) * torch.sigmoid(-of) + torch.exp(F.logsigmoid(of) - p.margin)


class PairLoss(NamedTuple):
    """A DPO type.

    formula: per pair, (n, 1). None: per token, in the family.
    any_divergence: also defined for divergences other than reverse KL; else the prompt's log Z(x) does not cancel.
    bounded: slopes do not exceed β.
    whole_batch: compares sequences across pairs.
    """

    formula: Callable[[Pair], Tensor] | None
    any_divergence: bool = False
    bounded: bool = False
    whole_batch: bool = False


# By TRL's names. A type is a row here and a literal in DPOType, for type checkers.
DPO_LOSSES: dict[str, PairLoss] = {
    "sigmoid": PairLoss(lambda p: -F.logsigmoid(p.margin), any_divergence=True, bounded=True),
    "hinge": PairLoss(lambda p: torch.relu(1 - p.margin), any_divergence=True, bounded=True),
    "ipo": PairLoss(lambda p: (p.per_token() - 1 / (2 * p.beta)).square(), any_divergence=True),
    "exo_pair": PairLoss(_exo_pair, any_divergence=True),
    "nca_pair": PairLoss(_nca_pair, bounded=True),
    "robust": PairLoss(_robust, any_divergence=True),
    "bco_pair": PairLoss(
        lambda p: -F.logsigmoid(p.beta * p.ratio_w - p.delta) - F.logsigmoid(p.delta - p.beta * p.ratio_l), bounded=True
    ),
    "sppo_hard": PairLoss(lambda p: (p.ratio_w - 0.5 / p.beta).square() + (p.ratio_l + 0.5 / p.beta).square()),
    "aot": PairLoss(_aot, bounded=True, whole_batch=True),
    "aot_unpaired": PairLoss(
        lambda p: _smooth_log_sigmoid(p.beta * (_sort(p.ratio_w) - _sort(p.ratio_l)), p.smoothing),
        bounded=True, whole_batch=True,
    ),
    "apo_zero": PairLoss(
        lambda p: torch.sigmoid(-p.beta * p.ratio_w) + torch.sigmoid(p.beta * p.ratio_l), bounded=True
    ),
    "apo_down": PairLoss(
        lambda p: torch.sigmoid(p.beta * p.ratio_w) + torch.sigmoid(p.beta * (p.ratio_l - p.ratio_w)), bounded=True
    ),
    "discopop": PairLoss(_discopop, any_divergence=True),
    "sigmoid_norm": PairLoss(lambda p: -F.logsigmoid(p.beta * p.per_token()), any_divergence=True, bounded=True),
    "sft": PairLoss(None, any_divergence=True),
}  # fmt: skip
DPOType = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft",
]  # fmt: skip
# For pairs that are already far apart, slopes are much smaller than a bounded type's maximum: in fp16, whose largest
# number is 65504, there is ROOM for all to be larger.
ROOM = 256.0
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
DIVERGENCES: tuple[str, ...] = get_args(Divergence)


def f_score(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(u) for u = exp(ratio)."""
    if divergence == "forward_kl":
        return -torch.expm1(-ratio)
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(ratio)
    if divergence == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
        # The bound is TRL's: exp(80) is near fp32's largest number.
        return torch.expm1(((alpha - 1) * ratio).clamp(max=80.0)) / (alpha - 1)
    return ratio


@record
class DPOOptions(NamedTuple):
    """alpha: the divergence's α. tau: τ for "discopop". terms: rows of `DPO_LOSSES`, which are added up."""

    beta: float
    smoothing: float
    divergence: Divergence
    alpha: float
    tau: float
    terms: tuple[Term, ...]


class DPOTensors(NamedTuple):
    """reference: (S,) given log-probabilities. token_weights: (S, T), in the sequence log-probabilities.
    delta: (S,), which "bco_pair" subtracts from the rewards.
    """

    reference: Tensor | None = None
    token_weights: Tensor | None = None
    delta: Tensor | None = None


class DPOPrepared(NamedTuple):
    """After the common pair tensors, all_tokens_share: (S,), 1 / all valid tokens; and `DPOTensors`."""

    pair_share: Tensor
    token_share: Tensor
    all_tokens_share: Tensor
    reference: Tensor | None = None
    token_weights: Tensor | None = None
    delta: Tensor | None = None


class DPOFamily(Pairs, key="dpo"):
    Options = DPOOptions
    Tensors = DPOTensors
    options: DPOOptions
    sums = (*PAIR_METRICS, "entropy", "mean_token_accuracy")
    wants_entropy = True
    wants_is_top1 = True

    def prepare(self, tensors: DPOTensors, mask: Tensor, dtype: torch.dtype) -> DPOPrepared:
        shares, counts = self.shares(mask, dtype)
        all_tokens = (counts.sum().clamp(min=1).to(dtype).reciprocal()).expand(mask.shape[0])
        return DPOPrepared(*shares, all_tokens, *tensors)

    def contrast(self) -> Contrast | None:
        plain = self.options.divergence == "reverse_kl" and "token_weights" not in self.given
        if not plain or [term.name for term in self.options.terms] != ["sigmoid"]:
            return None
        return Contrast("dpo", average=False, beta=self.options.beta, weight=self.options.terms[0].weight)

    def group_size(self) -> int:
        return BATCH if any(DPO_LOSSES[term.name].whole_batch for term in self.options.terms) else 2

    def grad_scale(self, sequences: int, tokens: int) -> float:
        # "sft" also divides by tokens: the scale is the geometric mean of the scales for "sft" and for the other types.
        if any(term.name == "sft" for term in self.options.terms):
            return float(super().grad_scale(sequences, tokens) * max(1, tokens) ** 0.5)
        bounded = self.options.divergence == "reverse_kl" and all(
            DPO_LOSSES[term.name].bounded for term in self.options.terms
        )
        most = self.options.beta * sum(abs(term.weight) for term in self.options.terms)
        return super().grad_scale(sequences, tokens) * (ROOM / max(1.0, most) if bounded else 1.0)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        beta, smoothing, divergence, alpha, tau, terms = self.options
        tensors: DPOPrepared = part.tensors
        token, given = tensors.token_share, tensors.reference
        weights = part.mask if tensors.token_weights is None else tensors.token_weights
        delta = 0.0 if tensors.delta is None else self.halves(tensors.delta)[0]
        logps = (part.logprob * weights).sum(1, keepdim=True)
        reference = torch.zeros_like(logps) if given is None else given
        if part.reference is not None:
            reference = (part.reference * weights).sum(1, keepdim=True)
        ratio = logps - reference
        ratio_w, ratio_l = self.halves(ratio)
        score_w, score_l = self.halves(f_score(ratio, divergence, alpha))
        # At least 1: an empty completion has probability 1, and the mean over tokens is 0, not NaN.
        count_w, count_l = self.halves(part.mask.sum(1, keepdim=True).clamp(min=1))
        margin = beta * (score_w - score_l)
        of_pair = Pair(
            ratio_w, ratio_l, score_w, score_l, margin, self.halves(logps), self.halves(reference), count_w, count_l,
            delta, beta, smoothing, tau,
        )  # fmt: skip
        share = self.halves(tensors.pair_share)[0]
        # A zero without a graph: the slopes come from the terms alone.
        loss = torch.zeros_like(logps[:0]).sum()
        for name, weight in terms:
            formula = DPO_LOSSES[name].formula
            if formula is None:
                loss = loss - weight * self.halves(part.logprob * part.mask * token)[0].sum()
            else:
                loss = loss + weight * (formula(of_pair) * share).sum()
        found = self.pair_metrics(part, logps, beta * ratio)
        assert part.entropy is not None
        assert part.is_top1 is not None
        found["entropy"] = (part.entropy.detach() * part.mask * tensors.all_tokens_share).sum()
        found["mean_token_accuracy"] = self.halves(part.is_top1 * part.mask * token)[0].sum()
        return loss, found


# ------------------------------------------------------------------------------------------------- without reference


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0, exact on both sides of −log 2, with gradients that stay finite.

    An x that rounds to 0, a probability of 1, counts as half a unit in the last place below.
    """
    # torch.where multiplies the derivative of the branch not taken by 0. The clamp keeps that derivative finite, since
    # 0 · inf would be NaN.
    x = x.clamp(max=-torch.finfo(x.dtype).eps / 2)
    return torch.where(x < -math.log(2), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


def _average(logprob: Tensor, mask: Tensor) -> Tensor:
    return (logprob * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


@record
class Beta(NamedTuple):
    beta: float


class ORPOTensors(NamedTuple):
    """completion: (S, T), the tokens that enter the odds, if not all."""

    completion: Tensor | None = None


class ORPOPrepared(NamedTuple):
    """The common pair tensors, then `ORPOTensors`."""

    pair_share: Tensor
    token_share: Tensor
    completion: Tensor | None = None


class ORPOFamily(Pairs, key="orpo"):
    Options = Beta
    Tensors = ORPOTensors
    options: Beta
    sums = (*PAIR_METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def prepare(self, tensors: ORPOTensors, mask: Tensor, dtype: torch.dtype) -> ORPOPrepared:
        return ORPOPrepared(*self.shares(mask, dtype)[0], *tensors)

    def contrast(self) -> Contrast | None:
        return Contrast("orpo", average=True, beta=self.options.beta, nll_weight=1.0)

    def grad_scale(self, sequences: int, tokens: int) -> float:
        return max(1.0, sequences * tokens / 2)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        beta = self.options.beta
        pair, token, completion = part.tensors
        mask = part.mask if completion is None else part.mask & completion.bool()
        logps = _average(part.logprob, mask)
        nll = -self.halves(part.logprob * part.mask * token)[0].sum()
        log_odds_w, log_odds_l = self.halves(logps - log1mexp(logps))
        log_odds = log_odds_w - log_odds_l
        ratio = F.logsigmoid(log_odds)
        share = self.halves(pair)[0]
        of_ratio = (ratio * share).sum()
        found = self.pair_metrics(part, logps, beta * logps)
        found |= {"nll_loss": nll, "log_odds_ratio": of_ratio, "log_odds_chosen": (log_odds * share).sum()}
        return nll - beta * of_ratio, found


CPOType = Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"]
CPO_TYPES: tuple[str, ...] = get_args(CPOType)
AVERAGED = ("ipo", "simpo", "alphapo")


@record
class CPOOptions(NamedTuple):
    """average: a sequence's log-probability is the mean over tokens. gamma: γ / β. alpha: AlphaPO's α."""

    loss_type: CPOType
    average: bool
    beta: float
    gamma: float
    smoothing: float
    nll_weight: float
    alpha: float = 0.0


class CPOFamily(Pairs, key="cpo"):
    Options = CPOOptions
    options: CPOOptions
    sums = (*PAIR_METRICS, "nll_loss")

    def prepare(self, tensors: NoTensors, mask: Tensor, dtype: torch.dtype) -> PairTensors:
        return self.shares(mask, dtype)[0]

    def contrast(self) -> Contrast | None:
        loss_type, average, beta, gamma, smoothing, nll_weight, alpha = self.options
        if alpha != 0.0:
            return None
        kind = loss_type if loss_type in ("hinge", "ipo") else "sigmoid"
        return Contrast(kind, average, beta, gamma, smoothing, nll_weight=nll_weight)

    def grad_scale(self, sequences: int, tokens: int) -> float:
        average, nll = self.options.average, self.options.nll_weight != 0
        return float(
            super().grad_scale(sequences, tokens) * (tokens if average else max(1, tokens) ** 0.5 if nll else 1.0)
        )

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        loss_type, average, beta, gamma, smoothing, nll_weight, alpha = self.options
        pair, token = part.tensors
        logps = _average(part.logprob, part.mask) if average else (part.logprob * part.mask).sum(1, keepdim=True)
        # (1 − p^−α) / α, which is log p at α = 0. expm1, since at small α the 1 would take all digits.
        reward = logps if alpha == 0 else -torch.expm1(-alpha * logps) / alpha
        reward_w, reward_l = self.halves(reward)
        margin = reward_w - reward_l - gamma
        if loss_type == "hinge":
            losses = torch.relu(1 - beta * margin)
        elif loss_type == "ipo":
            losses = (margin - 1 / (2 * beta)).square()
        else:
            losses = _smooth_log_sigmoid(beta * margin, smoothing)
        nll = -self.halves(part.logprob * part.mask * token)[0].sum()
        loss = (losses * self.halves(pair)[0]).sum()
        if nll_weight:
            loss = loss + nll_weight * nll
        return loss, {**self.pair_metrics(part, logps, beta * reward), "nll_loss": nll}


# -------------------------------------------------------------------------------------------------------------- kto

KTOType = Literal["kto", "apo_zero_unpaired"]
KTO_TYPES: tuple[str, ...] = get_args(KTOType)
KTO_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "logps/chosen",
    "logps/rejected",
    "logits/chosen",
    "logits/rejected",
)


class KTOTensors(NamedTuple):
    """(S,) each. weight: in the loss. label: whether the sequence is desirable. kl: the KL term, the same for all."""

    weight: Tensor
    label: Tensor
    kl: Tensor
    reference: Tensor | None = None


class KTOFamily(Family, key="kto"):
    """Results are sums over sequences, or over tokens."""

    Options = Beta
    Tensors = KTOTensors
    options: Beta
    sums = (*KTO_METRICS, "entropy")
    wants_entropy = True
    wants_mean_logit = True

    def group_size(self) -> int:
        return 1

    def grad_scale(self, sequences: int, tokens: int) -> float:
        return max(1.0, float(sequences)) * ROOM / max(1.0, self.options.beta)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        weight, label, kl, given = part.tensors
        beta = self.options.beta
        logps = (part.logprob * part.mask).sum(1, keepdim=True)
        ratio = logps - _sequence_reference(part, given)
        away = beta * (ratio - kl)
        # 1 − σ(z) as σ(−z): near z = 0 both are exact, far above the first is 0 in fp32.
        loss = (weight * torch.sigmoid(torch.where(label, -away, away))).sum()
        with torch.no_grad():
            found = {}
            assert part.mean_logit is not None
            assert part.entropy is not None
            logits = (part.mean_logit * part.mask).sum(1, keepdim=True)
            for name, values in (("rewards", beta * ratio), ("logps", logps), ("logits", logits)):
                found[f"{name}/chosen"] = torch.where(label, values, 0.0).sum()
                found[f"{name}/rejected"] = torch.where(label, 0.0, values).sum()
            found["entropy"] = (part.entropy * part.mask).sum()
        return loss, found


class MeanRatioTensors(NamedTuple):
    weight: Tensor
    reference: Tensor | None = None


class MeanRatio(Family, key="kto_kl"):
    """Σ weight · log πθ(y) / π_ref(y), the estimate of KTO's KL term."""

    Tensors = MeanRatioTensors

    def group_size(self) -> int:
        return 1

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        weight, given = part.tensors
        logps = (part.logprob * part.mask).sum(1, keepdim=True)
        return (weight * (logps - _sequence_reference(part, given))).sum(), {}


def _sequence_reference(part: Part, given: Tensor | None) -> Tensor | float:
    if part.reference is not None:
        return (part.reference * part.mask).sum(1, keepdim=True)
    return 0.0 if given is None else given
