"""Policy losses as functions of log-probabilities for a part of the batch, in forms that are finite in fp32.

The walk in `tigon.losses.token_loss` passes a part of the batch at a time to `Policy`, which returns the part's share
of the loss. Batch means are sums here, weighted by the tensor `share`. A single-part batch goes to the kernels in
`tigon.losses.policy.kernels`, which compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tigon.losses.family import ALONE, BATCH, Family, Part, Whole
from tigon.losses.operator import record
from tigon.losses.policy.kernels import KERNEL_FORMULAS, Formula, write_policy_slopes
from tigon.losses.policy.metrics import SAMPLER_NAMES, clip_metric_names, clip_ratios, select_counted
from tigon.losses.policy.options import POLICY_LOSSES, Mode, PolicyLoss

RATIO_BOUND = 80.0  # nats: the exponential is far beyond any bound, and finite in fp32 times an advantage


@record
class PolicyOptions(NamedTuple):
    """A `Policy`'s options; bounds are infinite where they are off.

    level: whether tokens or sequences have a ratio; "total" is a sequence ratio without the mean over tokens.
    mode: how the sampler's ratio is used, "none" if nothing is left to compute. reference: the source of reference
    log-probabilities.
    divisor: for "dapo", "cispo" and "vespo", 0 for a tensor or the token count; for "dr_grpo", per sequence.
    bonus: the entropy's coefficient, unless that is a tensor.
    """

    loss_type: str
    level: Literal["token", "sequence", "total"]
    low: float
    high: float
    mode: Mode | Literal["none"] = "none"
    reference: Literal["none", "given", "head"] = "none"
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
    bonus: float = 0.0


class PolicyTensors(NamedTuple):
    """A `Policy`'s tensors beside the log-probabilities, (S, T) or (S,): the `Rollout` tensors that the loss uses.

    Padding may hold anything. items, bonus: 0-d, the divisor and the entropy's coefficient if these are tensors.
    """

    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    sampler: Tensor | None = None
    ratio: Tensor | None = None
    items: Tensor | None = None
    bonus: Tensor | None = None


class Prepared(NamedTuple):
    """`PolicyTensors` as a part sees them, in the loss's dtype, 0 where masked.

    share: (S,) each sequence's weight per token in the loss. bonus: (S,) the weight of a token's entropy.
    """

    advantages: Tensor
    share: Tensor
    old: Tensor | None
    ref: Tensor | None
    sampler: Tensor | None
    ratio: Tensor | None
    bonus: Tensor | None


class Policy(Family, key="policy"):
    """GRPO and related losses, as a `token_loss` family.

    Token-level ratios need a token at a time. Sequence-level ratios, VESPO and the off-policy mask need the whole
    sequence first, and an entropy quantile the whole batch.
    """

    Options = PolicyOptions
    Tensors = PolicyTensors
    options: PolicyOptions
    wants_entropy = True
    finishes = True

    @property
    def loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.options.loss_type]

    @property
    def mode(self) -> str:
        """How the sampler's ratio is computed along the walk; "none" if `old` and sampler already give the ratio."""
        return "none" if "old" in self.given else self.options.mode

    @property
    def has_ratio(self) -> bool:
        return self.options.mode != "none" or "ratio" in self.given

    def has_entropy_slope(self) -> bool:
        return self.options.bonus != 0.0 or "bonus" in self.given

    @property
    def sums(self) -> tuple[str, ...]:  # type: ignore[override]
        kl = () if self.options.reference == "none" else ("kl",)
        return ("entropy", *kl, *(("policy_loss",) if self.has_entropy_slope() else ()))

    @property
    def per_token(self) -> tuple[str, ...]:  # type: ignore[override]
        further = {"sapo": (), "vespo": ("phi",)}.get(self.loss.formula, ("clipped",))
        return ("logprob", *further, *(() if self.mode == "none" else ("sampler",)))

    @property
    def internal(self) -> int:  # type: ignore[override]
        return len(self.per_token) - 1

    @property
    def metrics(self) -> tuple[str, ...]:
        phi = ("vespo/phi_seq_mean",) if self.loss.formula == "vespo" else ()
        ratio = SAMPLER_NAMES if self.has_ratio else ()
        return (*self.sums, *phi, *clip_metric_names(self.loss.formula), *ratio)

    def group_size(self) -> int:
        if self.options.top < 1.0:
            return BATCH
        sequences = self.options.level != "token" or self.loss.formula == "vespo" or self.options.drift < math.inf
        return 1 if sequences or self.mode.startswith("sequence") else ALONE

    def grad_scale(self, sequences: int, tokens: int) -> float:
        # About the mean's divisor, which fp16 slopes lack. Bounded, so that short sequences in a long batch do not
        # overflow.
        if self.loss.share == "sequences" or self.options.level == "total":
            return float(max(1, sequences))
        size = float(max(1, sequences * min(tokens, 1024)))
        return min(size, self.options.divisor) if self.options.divisor and self.loss.share == "items" else size

    def prepare(self, tensors: PolicyTensors, mask: Tensor, dtype: torch.dtype) -> Prepared:
        # Token weights are known before the walk, which then only sums.
        counts = mask.sum(1).to(dtype)
        tokens = counts.sum().clamp(min=1)  # the mean over no tokens is 0

        def widen(t: Tensor | None) -> Tensor | None:
            # Padding may hold anything, also -inf and NaN, which 0 · x would keep.
            return t if t is None else torch.where(mask, t.to(dtype), 0.0) if t.shape == mask.shape else t.to(dtype)

        (A, old, ref, sampler, ratio), (items, bonus) = map(widen, tensors[:5]), tensors[5:]
        assert A is not None
        if self.options.mode != "none" and old is not None and sampler is not None:
            # Old and sampler log-probabilities are both constants: the ratio is computed once.
            ratio = sampler_ratio(old - sampler, mask, self.options.mode, self.options)
        if self.mode == "none" and self.options.drift == math.inf:
            sampler = None  # nothing in the walk reads it
        by_token = None
        if self.has_entropy_slope():
            # With a quantile only the parts know the bonus mean's token count: they divide themselves.
            of_all = self.options.bonus if bonus is None else bonus
            by_token = (of_all if self.options.top < 1.0 else of_all / tokens) * torch.ones_like(counts)
        return Prepared(A, self._share(counts, tokens, items), old, ref, sampler, ratio, by_token)

    def _share(self, counts: Tensor, tokens: Tensor, items: Tensor | None) -> Tensor:
        """(S,) each sequence's weight per token in the loss."""
        share, divisor, S = self.loss.share, self.options.divisor, max(1, counts.shape[0])
        if share == "sequence":
            return (counts.clamp(min=1) * S).reciprocal()
        if share == "sequences":
            return torch.full_like(counts, 1 / S)
        if share == "length":
            return torch.full_like(counts, 1 / (S * divisor))
        if share == "tokens" or (items is None and not divisor):
            return torch.ones_like(counts) / tokens
        if items is not None:
            # A 0-d CPU tensor combines with the device's tensors as a scalar, without a copy.
            return torch.ones_like(counts) / items.clamp(min=1)
        return torch.full_like(counts, 1 / divisor)

    def finish(self, results: dict[str, Tensor], tensors: Prepared, mask: Tensor) -> list[Tensor]:
        level = self.options.level
        tokens = mask.sum().clamp(min=1)
        metrics = [results[name] if name == "policy_loss" else results[name] / tokens for name in self.sums]
        # As TRL logs: means over sequences if advantages are per sequence.
        by_sequence = tensors.advantages.shape != mask.shape
        if "phi" in results:
            metrics.append(select_counted(results["phi"], mask, by_sequence).mean())
        if "clipped" in results:
            by_ratio = by_sequence and level != "token"
            metrics += clip_ratios(results["clipped"], mask, by_ratio, self.loss.formula).values()
        ratio = results.get("sampler", tensors.ratio)
        if ratio is not None:
            by_sequence = ratio.shape != mask.shape or self.options.mode.startswith("sequence")
            spread = select_counted(ratio.view(len(mask), -1).expand(mask.shape), mask, by_sequence)
            metrics += spread.least(), spread.mean(), spread.most()
        return metrics

    def has_kernels(self) -> bool:
        return self.options.top == 1.0 and self.loss.formula in KERNEL_FORMULAS  # a quantile needs a sort

    def launch(
        self, batch: Whole, loss: Tensor, metrics: Tensor, slopes: Sequence[Tensor | None], grad_scale: float
    ) -> None:
        write_policy_slopes(self.formula(), batch, loss, metrics, slopes, grad_scale)

    def formula(self) -> Formula:
        """The options as the kernels take them."""
        of, (formula, share) = self.options, self.loss
        per_sequence = share in ("sequences", "length")
        weight = "number" if per_sequence else share
        if share == "items" and "items" not in self.given:
            weight = "number" if of.divisor else "tokens"
        places = {name: i for i, name in enumerate(self.metrics)}
        return Formula(formula, weight, 1 / (of.divisor or 1.0), per_sequence, of, places)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        assert part.entropy is not None
        of, mode, mask, logprob = self.options, self.mode, part.mask, part.logprob
        formula, level, reference = self.loss.formula, of.level, of.reference
        given: Prepared = part.tensors
        A, own = given.advantages, logprob.detach()
        # Without `old` every ratio is 1 in value, with the log-probability's gradient.
        old = own if given.old is None else given.old
        results = {"logprob": own, "entropy": part.entropy.detach().sum()}

        if level == "total":
            log_ratio = (logprob * mask).sum(1, keepdim=True) - old.sum(1, keepdim=True)
        else:
            log_ratio = logprob - old
        log_weight = log_ratio
        if level == "sequence":
            log_weight = (log_ratio * mask).sum(1, keepdim=True) / _counts(mask)
        # A clipped ratio has slope 0, but 0 · inf is NaN: ratios that may be clipped are kept finite.
        finite = log_weight.clamp(max=RATIO_BOUND)
        if formula == "clipped" and of.delta == math.inf:
            # At negative advantages the minimum is the term without an upper bound: a ratio there stays infinite.
            finite = torch.where(A >= 0, finite, log_weight)
        ratio = finite.exp()
        sampler = given.ratio
        if mode != "none":
            assert given.sampler is not None
            sampler = sampler_ratio(own - given.sampler, mask, mode, of)
            results["sampler"] = sampler.expand_as(mask)

        if formula == "vespo":
            phi = self._phi(log_ratio.detach(), sampler, A, mask)
            results["phi"] = phi.expand_as(mask)
            loss = -phi * A * logprob
        elif formula == "sapo":
            tau = _by_sign(A > 0, of.tau_pos, of.tau_neg, A)
            loss = -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * A
        elif formula == "cispo":
            loss = -ratio.clamp(max=of.high).detach() * A * logprob
            results["clipped"] = ((ratio > of.high) & (A > 0)).expand_as(mask)
        elif formula == "clipped":
            bounded = ratio if of.delta == math.inf else ratio.clamp(max=of.delta)
            loss = -torch.minimum(bounded * A, ratio.clamp(1 - of.low, 1 + of.high) * A)
            up, down = (bounded > 1 + of.high) & (A > 0), (bounded < 1 - of.low) & (A < 0)
            # 1 where the upper bound holds, −1 where the lower does: a number per token instead of two masks.
            results["clipped"] = (up.to(A.dtype) - down.to(A.dtype)).expand_as(mask)
        else:
            raise NotImplementedError(f"grpo: {of.loss_type!r} has no formula {formula!r}.")

        if of.drift < math.inf:
            theirs = old if given.sampler is None else given.sampler
            # NaN where the sampler reported none: such a token has not drifted.
            drift = torch.nan_to_num(theirs - own, nan=0.0)
            drift = (drift * mask).sum(1, keepdim=True) / _counts(mask)
            loss = loss * ((A >= 0) | (drift <= of.drift))
        chosen = mask
        if of.top < 1.0:
            chosen = mask & (part.entropy >= _quantile(part.entropy.detach(), mask, 1.0 - of.top))
            loss = loss * chosen
        if sampler is not None and formula != "vespo":  # vespo's φ includes the ratio
            loss = loss * sampler
        if reference != "none":
            ref = given.ref if part.reference is None else part.reference
            assert ref is not None
            d = ref - logprob
            kl = d.exp() - d - 1
            if of.correct_kl:
                kl = kl * ratio
            results["kl"] = torch.where(mask, kl.detach(), 0.0).sum()
            if of.beta:
                loss = loss + of.beta * kl

        # torch.where, not a product with the mask: padding may have any logits, and 0 · inf is NaN.
        total = torch.where(mask, loss * given.share, 0.0).sum()
        if level == "total":
            # A completion without tokens has ratio 1, a constant, which TRL's mean over sequences counts.
            empty = ~mask.any(1, keepdim=True)
            total = total + torch.where(empty, loss[:, :1] * given.share, 0.0).sum()
        if given.bonus is not None:
            results["policy_loss"] = total
            bonus = torch.where(chosen, part.entropy * given.bonus, 0.0).sum()
            total = total - (bonus / chosen.sum().clamp(min=1) if of.top < 1.0 else bonus)
        return total, results

    def _phi(self, log_ratio: Tensor, sampler: Tensor | None, A: Tensor, mask: Tensor) -> Tensor:
        of, least = self.options, math.log(1e-8)
        # Bounded, so that w^k and e^(−λ w) stay finite.
        log_w = (log_ratio.clamp(-20.0, 20.0) * mask).sum(1, keepdim=True)
        if sampler is not None:
            log_w = log_w + torch.where(mask, sampler.log().clamp(least, 20.0), 0.0).sum(1, keepdim=True)
        log_w = log_w.clamp(least, 20.0)
        k = _by_sign(A >= 0, of.k_pos, of.k_neg, A)
        lam = _by_sign(A >= 0, of.lambda_pos, of.lambda_neg, A).clamp(min=1e-4)
        # A single exponential of the sum: the factors overflow fp32 where their product does not.
        return (lam + k * log_w - lam * log_w.exp()).exp()


def sampler_ratio(difference: Tensor, mask: Tensor, mode: str, of: PolicyOptions) -> Tensor:
    """exp(old − sampler), clipped or masked to the bounds: (S, T), or (S, 1) for a sequence mode."""
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
    # torch.where on two Python numbers is fp32, which rounds 1.05: wrong for an fp64 loss.
    return torch.full_like(like, below).masked_fill(positive, above)


def _quantile(values: Tensor, mask: Tensor, q: float) -> Tensor:
    """torch.quantile(values[mask], q), for any size. Indexing by the mask would make the host wait for a count."""
    ordered = torch.where(mask, values, math.inf).flatten().sort().values
    last = mask.sum().clamp(min=1) - 1
    rank = last.double() * q
    at = torch.stack((rank.floor(), rank.ceil())).long()
    below, above = ordered.gather(0, at).unbind()
    return torch.lerp(below, above, (rank - rank.floor()).to(values.dtype))
