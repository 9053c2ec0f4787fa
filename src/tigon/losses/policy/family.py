"""Policy losses as functions of the log-probabilities of a part of the batch, in forms that are finite in fp32.

The walk of `tigon.losses.token_loss` passes a part of the batch at a time to `Policy`, which returns the part's share
of the loss. Means over the batch are sums here, weighted by the side tensor `share`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tigon.losses.family import ALONE, BATCH, Family, Part, Takes
from tigon.losses.policy.options import Mode

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
RATIO_BOUND = 80.0  # nats: its exponential is far beyond any bound, and finite in fp32 times an advantage


class Words(NamedTuple):
    """A `Policy`'s options that are words.

    level: what has a ratio; "total" is a sequence's ratio that is not a mean over its tokens. mode: how the sampler's
    ratio is used, "none" if there is nothing left to compute. reference: where its log-probabilities come from.
    """

    loss_type: str
    level: Literal["token", "sequence", "total"]
    mode: Mode | Literal["none"] = "none"
    reference: Literal["none", "given", "head"] = "none"


class Numbers(NamedTuple):
    """A `Policy`'s options that are numbers; infinite where a bound is off."""

    low: float
    high: float
    delta: float = math.inf
    beta: float = 0.0
    correct_kl: float = 0.0
    top: float = 1.0
    sampler_high: float = math.inf
    sampler_low: float = -math.inf
    drift: float = math.inf
    tau_pos: float = 1.0
    tau_neg: float = 1.0
    k_pos: float = 0.0
    lambda_pos: float = 0.0
    k_neg: float = 0.0
    lambda_neg: float = 0.0
    divisor: float = 0.0


class Sides(NamedTuple):
    """A `Policy`'s tensors beside the log-probabilities, (S, T) or (S,): what a `Rollout` has and the loss uses.

    share: (S,) the weight of one token of each sequence in the loss. bonus: (S,) that of a token's entropy.
    """

    advantages: Tensor
    share: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    sampler: Tensor | None = None
    ratio: Tensor | None = None
    bonus: Tensor | None = None


class Policy(Family, key="policy"):
    """GRPO and its relatives, as a family of `token_loss`.

    Token-level ratios need one token at a time. Sequence-level ratios, VESPO and the off-policy mask need the whole
    sequence first, and an entropy quantile the whole batch.
    """

    takes = Takes(Words, Numbers, Sides)
    words: Words
    numbers: Numbers
    wants_entropy = True

    @property
    def sums(self) -> tuple[str, ...]:  # type: ignore[override]
        kl = () if self.words.reference == "none" else ("kl",)
        return ("entropy", *kl, *(("policy_loss",) if "bonus" in self.given else ()))

    @property
    def per_token(self) -> tuple[str, ...]:  # type: ignore[override]
        further = {"sapo": (), "vespo": ("phi",)}.get(self.words.loss_type, ("clipped",))
        return ("logprob", *further, *(() if self.words.mode == "none" else ("sampler",)))

    def together(self) -> int:
        loss_type, level, mode, _ = self.words
        if self.numbers.top < 1.0:
            return BATCH
        sequences = level != "token" or loss_type == "vespo" or self.numbers.drift < math.inf
        return 1 if sequences or mode.startswith("sequence") else ALONE

    def boost(self, sequences: int, tokens: int) -> float:
        # About the mean's divisor, which fp16 slopes lack. Bounded, so that short sequences in a long batch do not
        # overflow.
        if self.words.loss_type == "luspo" or self.words.level == "total":
            return float(max(1, sequences))
        size = float(max(1, sequences * min(tokens, 1024)))
        return min(size, self.numbers.divisor) if self.numbers.divisor else size

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        assert part.entropy is not None
        of, mask, logprob = self.numbers, part.mask, part.logprob
        loss_type, level, mode, reference = self.words
        side: Sides = part.sides
        A, own = side.advantages, logprob.detach()
        # Without `old` every ratio is 1 in value, and its gradient is that of the log-probability.
        old = own if side.old is None else side.old
        found = {"logprob": own, "entropy": part.entropy.detach().sum()}

        if level == "total":
            log_ratio = (logprob * mask).sum(1, keepdim=True) - old.sum(1, keepdim=True)
        else:
            log_ratio = logprob - old
        log_weight = log_ratio
        if level == "sequence":
            log_weight = (log_ratio * mask).sum(1, keepdim=True) / _counts(mask)
        # A clipped ratio has a slope of 0, but 0 · inf is NaN: ratios that may be clipped are kept finite.
        finite = log_weight.clamp(max=RATIO_BOUND)
        if loss_type in CLIPPED and of.delta == math.inf:
            # At negative advantages the smaller term is the one without an upper bound: a ratio there stays infinite.
            finite = torch.where(A >= 0, finite, log_weight)
        ratio = finite.exp()
        sampler = side.ratio
        if mode != "none":
            assert side.sampler is not None
            sampler = sampler_ratio(own - side.sampler, mask, mode, of)
            found["sampler"] = sampler.expand_as(mask)

        if loss_type == "vespo":
            phi = self._phi(log_ratio.detach(), sampler, A, mask)
            found["phi"] = phi.expand_as(mask)
            loss = -phi * A * logprob
        elif loss_type == "sapo":
            tau = _by_sign(A > 0, of.tau_pos, of.tau_neg, A)
            loss = -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * A
        elif loss_type == "cispo":
            loss = -ratio.clamp(max=of.high).detach() * A * logprob
            found["clipped"] = ((ratio > of.high) & (A > 0)).expand_as(mask)
        elif loss_type in CLIPPED:
            bounded = ratio if of.delta == math.inf else ratio.clamp(max=of.delta)
            loss = -torch.minimum(bounded * A, ratio.clamp(1 - of.low, 1 + of.high) * A)
            up, down = (bounded > 1 + of.high) & (A > 0), (bounded < 1 - of.low) & (A < 0)
            # 1 where the upper bound holds, −1 where the lower does: one number a token instead of two masks.
            found["clipped"] = (up.to(A.dtype) - down.to(A.dtype)).expand_as(mask)
        else:
            raise NotImplementedError(f"grpo: {loss_type!r} has no formula.")

        if of.drift < math.inf:
            theirs = old if side.sampler is None else side.sampler
            # NaN where the sampler reported none: such a token has not drifted.
            drift = torch.nan_to_num(theirs - own, nan=0.0)
            drift = (drift * mask).sum(1, keepdim=True) / _counts(mask)
            loss = loss * ((A >= 0) | (drift <= of.drift))
        chosen = mask
        if of.top < 1.0:
            chosen = mask & (part.entropy >= _quantile(part.entropy.detach(), mask, 1.0 - of.top))
            loss = loss * chosen
        if sampler is not None and loss_type != "vespo":  # whose φ has it already
            loss = loss * sampler
        if reference != "none":
            ref = side.ref if part.reference is None else part.reference
            assert ref is not None
            d = ref - logprob
            kl = d.exp() - d - 1
            if of.correct_kl:
                kl = kl * ratio
            found["kl"] = torch.where(mask, kl.detach(), 0.0).sum()
            if of.beta:
                loss = loss + of.beta * kl

        # torch.where, not a product with the mask: padding may have any logits, and 0 · inf is NaN.
        total = torch.where(mask, loss * side.share, 0.0).sum()
        if level == "total":
            # A completion without tokens has a ratio of 1, a constant, which TRL's mean over sequences counts.
            empty = ~mask.any(1, keepdim=True)
            total = total + torch.where(empty, loss[:, :1] * side.share, 0.0).sum()
        if side.bonus is not None:
            found["policy_loss"] = total
            bonus = torch.where(chosen, part.entropy * side.bonus, 0.0).sum()
            total = total - (bonus / chosen.sum().clamp(min=1) if of.top < 1.0 else bonus)
        return total, found

    def _phi(self, log_ratio: Tensor, sampler: Tensor | None, A: Tensor, mask: Tensor) -> Tensor:
        of, least = self.numbers, math.log(1e-8)
        # Bounded, so that w^k and e^(−λ w) stay finite.
        log_w = (log_ratio.clamp(-20.0, 20.0) * mask).sum(1, keepdim=True)
        if sampler is not None:
            log_w = log_w + torch.where(mask, sampler.log().clamp(least, 20.0), 0.0).sum(1, keepdim=True)
        log_w = log_w.clamp(least, 20.0)
        k = _by_sign(A >= 0, of.k_pos, of.k_neg, A)
        lam = _by_sign(A >= 0, of.lambda_pos, of.lambda_neg, A).clamp(min=1e-4)
        # One exponential of the sum: the factors by themselves overflow fp32 where their product does not.
        return (lam + k * log_w - lam * log_w.exp()).exp()


def sampler_ratio(difference: Tensor, mask: Tensor, mode: str, of: Numbers) -> Tensor:
    """exp(old − sampler), clipped or masked to its bounds: (S, T), or (S, 1) for a mode of sequences."""
    difference = torch.nan_to_num(difference * mask, nan=0.0)  # NaN where the sampler reported none: ratio 1
    if mode.startswith("sequence"):
        difference = difference.sum(1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(of.sampler_low, of.sampler_high)
    return torch.where((ratio < of.sampler_low) | (ratio > of.sampler_high), 0.0, ratio)


def _counts(mask: Tensor) -> Tensor:
    return mask.sum(1, keepdim=True).clamp(min=1)


def _by_sign(positive: Tensor, above: float, below: float, like: Tensor) -> Tensor:
    # torch.where of two Python numbers is fp32, which rounds 1.05: wrong for an fp64 loss.
    return torch.full_like(like, below).masked_fill(positive, above)


def _quantile(values: Tensor, mask: Tensor, q: float) -> Tensor:
    """torch.quantile(values[mask], q), of any size. Indexing by the mask would make the host wait for a count."""
    ordered = torch.where(mask, values, math.inf).flatten().sort().values
    last = mask.sum().clamp(min=1) - 1
    rank = last.double() * q
    at = torch.stack((rank.floor(), rank.ceil())).long()
    below, above = ordered.gather(0, at).unbind()
    return torch.lerp(below, above, (rank - rank.floor()).to(values.dtype))
