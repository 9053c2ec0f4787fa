"""Policy gradients for language models: GRPO, its relatives and RLOO, without logits.

    r = exp(logprob − old)                        of a token; or of a sequence, exp of the mean over its tokens (GSPO)
    clipped(r) = −min(min(r, δ) · A, clip(r, 1 − ε, 1 + ε_high) · A)

    grpo     mean over sequences of the mean over tokens of clipped(r)       https://arxiv.org/abs/2402.03300
    bnpo     Σ clipped(r) / tokens of this batch that count
    dr_grpo  Σ clipped(r) / (S · max_completion_length)                      https://arxiv.org/abs/2503.20783
    dapo     Σ clipped(r) / num_items_in_batch                               https://arxiv.org/abs/2503.14476
    luspo    mean over sequences of Σ clipped(r)                             https://arxiv.org/abs/2602.05261
    cispo    Σ −sg(min(r, ε_high)) · A · logprob / num_items_in_batch        https://arxiv.org/abs/2506.13585
    sapo     as grpo, of −A · σ(τ (r − 1)) · 4 / τ, τ by the sign of A       https://arxiv.org/abs/2511.20347
    vespo    Σ −sg(φ(w)) · A · logprob / num_items_in_batch,                 https://arxiv.org/abs/2602.10693
             φ(w) = e^λ · w^k · e^(−λ w), w = Π r over the sequence, k and λ by the sign of A

    + β · kl, kl = (e^d − d − 1) [· r], d = reference − logprob              https://arxiv.org/abs/2512.02556
    − entropy_coefficient · mean entropy

Sources: beside each. Formulas and names of the kinds follow TRL 1.16, which trains with them. GSPO:
https://arxiv.org/abs/2507.18071. RLOO: https://arxiv.org/abs/2402.14740. δ: https://arxiv.org/abs/2505.07291.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.linear.head import Head, Hidden, head_of
from tigon.linear.walk import Walk
from tigon.losses.options import check_choice
from tigon.losses.token_loss import ALONE, BATCH, FAMILIES, Family, Part, token_loss
from tigon.ops.logprob import logprob_reference
from tigon.ops.targets import as_labels

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Level = Literal["token", "sequence"]
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
MODES: tuple[str, ...] = get_args(Mode)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# Types that divide by num_items_in_batch.
COUNTED = ("dapo", "cispo", "vespo")
RATIO_BOUND = 80.0  # nats: its exponential is far beyond any bound, and finite in fp32 times an advantage


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Options of `grpo`, by TRL's names. Frozen: `dataclasses.replace` makes another.

    Args:
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo".
        importance_sampling_level: "token", or "sequence": one ratio, exp of the mean difference, for all its tokens.
        epsilon: how far below 1 a ratio counts.
        epsilon_high: how far above 1 a ratio counts, None for epsilon. With "cispo", which has no lower bound, the
            largest ratio itself (such as 5.0).
        delta: the largest ratio at negative advantages, where clipping has no upper bound. None for no bound.
        beta: weight of the KL divergence from the reference.
        use_bias_correction_kl: multiply the KL by the ratio, so that its gradient is not biased.
        entropy_coefficient: weight of the entropy bonus, a number or a 0-d tensor.
        top_entropy_quantile: the share of this batch's tokens, those of highest entropy, that have a loss at all. Below
            1.0 the loss sees all tokens before it has a gradient: a batch beyond one chunk costs a fourth product.
        num_items_in_batch: the divisor of "dapo", "cispo" and "vespo", a number or a 0-d tensor: the tokens that count
            in the whole step, over the number of ranks. None: the tokens that count in this batch.
        max_completion_length: the divisor of "dr_grpo", per sequence; no other type needs it.
        importance_sampling_mode: how the sampler's ratio is used: "token_…" for one ratio a token, "sequence_…" for
            the product over a sequence; "…_truncate" clips ratios to their bounds, "…_mask" drops tokens whose ratio is
            outside. None: no ratio.
        importance_sampling_clip_max: the upper bound of that ratio, or None.
        importance_sampling_clip_min: the lower bound of that ratio, or None.
        off_policy_mask_threshold: drop sequences of negative advantage whose mean of the sampler's (or the old)
            log-probabilities − logprob is larger. In nats; None: never.
        sapo_temperature_pos: τ of "sapo" at positive advantages.
        sapo_temperature_neg: τ at other advantages.
        vespo_k_pos: k of "vespo" at advantages from 0 on.
        vespo_lambda_pos: λ at advantages from 0 on.
        vespo_k_neg: k at negative advantages.
        vespo_lambda_neg: λ at negative advantages.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    Raises: ValueError for options that are unknown or do not go together.
    """

    loss_type: LossType = "dapo"
    importance_sampling_level: Level = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    entropy_coefficient: float | Tensor = 0.0
    top_entropy_quantile: float = 1.0
    num_items_in_batch: float | Tensor | None = None
    max_completion_length: int | None = None
    importance_sampling_mode: Mode | None = "sequence_mask"
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    temperature: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        name = "grpo"
        check_choice(name, "loss_type", self.loss_type, LOSS_TYPES)
        check_choice(name, "importance_sampling_level", self.importance_sampling_level, get_args(Level))
        check_choice(name, "importance_sampling_mode", self.importance_sampling_mode, (*MODES, None))
        high, low = self.importance_sampling_clip_max, self.importance_sampling_clip_min
        if high is not None and low is not None and low >= high:
            raise ValueError(
                f"{name}: importance_sampling_clip_min must be less than …_clip_max, got {low} and {high}."
            )
        if high is None and low is None and (self.importance_sampling_mode or "").endswith("truncate"):
            raise ValueError(
                f"{name}: importance_sampling_mode {self.importance_sampling_mode!r} wants one "
                "importance_sampling_clip at least."
            )
        if self.loss_type == "dr_grpo" and not (self.max_completion_length or 0) > 0:
            raise ValueError(
                f"{name}: dr_grpo wants a positive max_completion_length, got {self.max_completion_length}."
            )
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise ValueError(f"{name}: top_entropy_quantile must be from 0 to 1, got {self.top_entropy_quantile}.")
        taus = self.sapo_temperature_pos, self.sapo_temperature_neg
        if not (taus[0] > 0 and taus[1] > 0):
            raise ValueError(f"{name}: sapo's temperatures must be positive, got {taus[0]} and {taus[1]}.")

    def numbers(self) -> Numbers:
        high, low = self.importance_sampling_clip_max, self.importance_sampling_clip_min
        items = self.num_items_in_batch if self.loss_type in COUNTED else None
        drift = self.off_policy_mask_threshold
        return Numbers(
            self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high,
            math.inf if self.delta is None else self.delta, self.beta, float(self.use_bias_correction_kl),
            self.top_entropy_quantile, math.inf if high is None else high, -math.inf if low is None else low,
            math.inf if drift is None else drift, self.sapo_temperature_pos, self.sapo_temperature_neg,
            self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg,
            max(1.0, float(items)) if isinstance(items, int | float) else 0.0,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RLOO:
    """Options of `rloo`.

    Args:
        epsilon: how far below 1 a ratio counts.
        epsilon_high: how far above 1 a ratio counts, None for epsilon.
        entropy_coefficient: weight of the entropy bonus, a number or a 0-d tensor.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    entropy_coefficient: float | Tensor = 0.0
    temperature: float = 1.0
    ignore_index: int = -100


class Sampler(NamedTuple):
    """Log-probabilities or ratios from the engine that sampled, which rarely agrees with the trainer to the bit.

    Args:
        logprob: (S, T), the engine's log-probabilities. NaN where the engine reported none means a ratio of 1.
            The ratio exp(old − logprob) multiplies the loss.
        ratio: (S,) or (S, T), that ratio if you have computed it already.
    """

    logprob: Tensor | None = None
    ratio: Tensor | None = None


def grpo(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    target: Tensor,
    advantages: Tensor,
    *,
    old: Tensor | None = None,
    ref: Tensor | Hidden | None = None,
    sampler: Tensor | Sampler | None = None,
    config: GRPO = GRPO(),
    walk: Walk = Walk(),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of sampled completions whose tokens have advantages, and metrics to log.

    Without `old`, right after the sampling, every ratio is 1 and the gradient is the policy's own: REINFORCE. With
    advantages of tokens, as from a critic, loss_type "bnpo" is PPO's. GSPO is loss_type "grpo" with
    importance_sampling_level "sequence".

    Args:
        x: (S, T, H) hidden states of S completions; x[s, t] is what target[s, t] is predicted from.
        head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head`.
        target: (S, T) the sampled tokens; ignore_index where a token does not count (prompt, padding, tool output).
        advantages: (S,) or (S, T).
        old: (S, T) log-probabilities, in nats, under the policy before this step's updates: "logprob" of an earlier
            call. None: this policy's own.
        ref: (S, T) log-probabilities under the reference model, or a `tigon.losses.Hidden`, its hidden states and head.
            beta wants one; with beta = 0, "kl" is still reported.
        sampler: (S, T) log-probabilities of the engine that sampled, or a `Sampler` that holds the ratio.
        config: the kind of loss and its numbers.
        walk: its `valid` are the numbers of tokens that count; the others then cost nothing.
    Returns: the 0-d loss, and detached: "logprob" (S, T), 0 where masked; and 0-d, means over tokens that count:
        "entropy"; "kl" with a reference; "clip_ratio/low_mean", "/high_mean", "/region_mean", "/low_min", "/high_max"
        with the clipped types (over sequences, where a ratio is one a sequence); "cispo_clip_ratio";
        "vespo/phi_seq_mean"; "policy_loss", without the entropy bonus, where there is one;
        "sampling/importance_sampling_ratio/min", "/mean" and "/max" with a sampler.
    Raises: ValueError for options that do not go together, and shapes that do not fit.

    Replaces, of the default loss_type::

        logits = F.linear(x, weight, bias).float()
        logprob = -F.cross_entropy(logits.transpose(1, 2), target, reduction="none")  # 0 where target is -100
        ratio = (logprob - old).exp()
        A, mask = advantages.unsqueeze(1), target != -100
        loss = -torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)
        loss = (loss * mask).sum() / mask.sum()
    """
    name, c = "grpo", config
    sampled, ratio = sampler if isinstance(sampler, Sampler) else Sampler(sampler)
    mode = None if sampled is None or ratio is not None else c.importance_sampling_mode
    if c.loss_type == "vespo" and mode is not None and mode.startswith("sequence"):
        raise ValueError(f"{name}: vespo wants an importance_sampling_mode of tokens, got {mode!r}.")
    reference = "none" if ref is None else "head" if isinstance(ref, Hidden) else "side"
    if c.beta != 0.0 and ref is None:
        raise ValueError(f"{name}: beta = {c.beta} wants a reference, ref: log-probabilities, or a Hidden.")
    given = {
        "advantages": advantages, "old_logprob": old, "ref_logprob": None if isinstance(ref, Hidden) else ref,
        "sampler_logprob": sampled, "importance_sampling_ratio": ratio,
    }  # fmt: skip
    return _policy(
        name, (c.loss_type, c.importance_sampling_level, mode or "none", reference), c.numbers(), x, head, target,
        given, c.entropy_coefficient, c.num_items_in_batch, c.max_completion_length,
        reference=ref if isinstance(ref, Hidden) else None, ignore_index=c.ignore_index, temperature=c.temperature,
        walk=walk,
    )  # fmt: skip


def rloo(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    target: Tensor,
    advantages: Tensor,
    *,
    old: Tensor | None = None,
    config: RLOO = RLOO(),
    walk: Walk = Walk(),
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a completion as one action: mean over sequences of clipped(r), r = exp(Σ logprob − Σ old).

    Args:
        x: (S, T, H) hidden states of S completions.
        head: as in `grpo`.
        target: (S, T), ignore_index where a token does not count. A completion without tokens has a ratio of 1.
        advantages: (S,), each reward less the mean of the others of its prompt.
        old: (S, T) of the tokens, or (S,) of the sequences; None: this policy's own.
        config: the bounds of the ratio.
        walk: as in `grpo`.
    Returns: the 0-d loss, and detached "logprob" (S, T), "entropy" and "clip_ratio/…" as in `grpo`.
    Raises: ValueError for shapes that do not fit.
    """
    c = config
    numbers = Numbers(c.epsilon, c.epsilon if c.epsilon_high is None else c.epsilon_high)
    return _policy(
        "rloo", ("grpo", "total", "none", "none"), numbers, x, head, target,
        {"advantages": advantages, "old_logprob": old}, c.entropy_coefficient, None, None, ignore_index=c.ignore_index,
        temperature=c.temperature, walk=walk,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- reference


def grpo_reference(
    x: Tensor, head: Head | Tensor, target: Tensor, advantages: Tensor, *, old: Tensor | None = None,
    ref: Tensor | Hidden | None = None, sampler: Tensor | Sampler | None = None, config: GRPO = GRPO(),
    level: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`grpo` on whole logits, by autograd. level "total" is `rloo`, with loss_type "grpo"."""
    c, ignore_index, level = config, config.ignore_index, level or config.importance_sampling_level
    weight, bias, softcap, scale, _, _ = head_of("grpo_reference", head)
    sampled, ratio = sampler if isinstance(sampler, Sampler) else Sampler(sampler)
    mode, beta = c.importance_sampling_mode, c.beta
    S = target.shape[0]
    options = (ignore_index, c.temperature, softcap or 0.0, scale)
    mask = target != ignore_index
    counts = mask.sum(1, keepdim=True).clamp(min=1)
    logprob, entropy, *_ = logprob_reference(F.linear(x, weight, bias), target, *options)
    A = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)

    def of_tokens(t: Tensor) -> Tensor:
        return torch.where(mask, t, 0.0)

    old = logprob.detach() if old is None else of_tokens(old)
    log_ratio = logprob - old
    log_weight = log_ratio
    if level != "token":
        log_weight = log_ratio.sum(1, keepdim=True)
    if level == "sequence":
        log_weight = log_weight / counts
    r = log_weight.exp()

    by_ratio = None if ratio is None else ratio.view(S, -1)
    if sampled is not None and by_ratio is None and mode is not None:
        difference = torch.nan_to_num(old - of_tokens(sampled), nan=0.0)
        by, what = mode.split("_")
        by_ratio = (difference.sum(1, keepdim=True) if by == "sequence" else difference).exp()
        low, high = c.importance_sampling_clip_min, c.importance_sampling_clip_max
        if what == "truncate":
            by_ratio = by_ratio.clamp(low, high)
        else:
            by_ratio = torch.where((by_ratio > (high or math.inf)) | (by_ratio < (low or 0.0)), 0.0, by_ratio)

    epsilon, high = c.epsilon, c.epsilon if c.epsilon_high is None else c.epsilon_high
    loss_type = c.loss_type
    if loss_type == "cispo":
        loss = -r.clamp(max=high).detach() * A * logprob
    elif loss_type == "sapo":
        tau = torch.where(A > 0, torch.full_like(A, c.sapo_temperature_pos), c.sapo_temperature_neg)
        loss = -A * torch.sigmoid(tau * (r - 1)) * 4 / tau
    elif loss_type == "vespo":
        log_w = of_tokens(log_ratio.detach().clamp(-20.0, 20.0))
        if by_ratio is not None:
            log_w = log_w + of_tokens(by_ratio.log().clamp(math.log(1e-8), 20.0))
        log_w = log_w.sum(1, keepdim=True).clamp(math.log(1e-8), 20.0)
        k = torch.where(A >= 0, torch.full_like(A, c.vespo_k_pos), c.vespo_k_neg)
        lam = torch.where(A >= 0, torch.full_like(A, c.vespo_lambda_pos), c.vespo_lambda_neg).clamp(min=1e-4)
        phi = (lam + k * log_w - lam * log_w.exp()).exp()
        loss = -phi * A * logprob
    elif loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        loss = -torch.minimum(r.clamp(max=c.delta) * A if c.delta else r * A, r.clamp(1 - epsilon, 1 + high) * A)
    else:
        raise NotImplementedError(f"grpo_reference: {loss_type!r} has no formula.")

    if c.off_policy_mask_threshold is not None:
        theirs = old if sampled is None else of_tokens(sampled)
        drift = torch.nan_to_num(theirs - logprob.detach(), nan=0.0).sum(1, keepdim=True) / counts
        loss = loss * ((A >= 0) | (drift <= c.off_policy_mask_threshold))
    top = mask
    if c.top_entropy_quantile < 1.0 and mask.any():
        top = mask & (entropy >= torch.quantile(entropy[mask].detach(), 1 - c.top_entropy_quantile))
        loss = loss * top
    if by_ratio is not None and loss_type != "vespo":
        loss = loss * by_ratio
    metrics = {"logprob": logprob.detach(), "entropy": of_tokens(entropy).sum() / mask.sum()}
    if isinstance(ref, Hidden):
        other = head_of("grpo_reference", ref.head)
        ref = logprob_reference(F.linear(ref.x, other.weight, other.bias), target, *options)[0]
    if ref is not None:
        d = of_tokens(ref) - logprob
        kl = d.exp() - d - 1
        kl = kl * r if c.use_bias_correction_kl else kl
        loss = loss + beta * kl
        metrics["kl"] = of_tokens(kl).sum() / mask.sum()

    loss = of_tokens(loss)
    if loss_type in ("grpo", "sapo"):
        total = (loss.sum(1, keepdim=True) / counts).mean()
        if level == "total" and S:
            # The mean is over completions without tokens too, whose ratio is 1.
            total = total - torch.where(mask.any(1), 0.0, A[:, 0]).mean()
    elif loss_type == "dr_grpo":
        total = loss.sum() / (S * (c.max_completion_length or 1))
    elif loss_type == "luspo":
        total = loss.sum(1).mean()
    else:
        own = loss_type == "bnpo" or c.num_items_in_batch is None
        total = loss.sum() / torch.as_tensor(mask.sum() if own else c.num_items_in_batch).clamp(min=1)
    bonus = torch.where(top, entropy, 0.0).sum() / top.sum().clamp(min=1)
    return total - c.entropy_coefficient * bonus, metrics


# ----------------------------------------------------------------------------------------------------------- family


class Numbers(NamedTuple):
    """A `Policy`'s numbers, in the order of `Family.numbers`; infinite where a bound is off."""

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


class Policy(Family):
    """GRPO and its relatives, as a family of `token_loss`.

    Token-level ratios need one token at a time. Sequence-level ratios, VESPO and the off-policy mask need the whole
    sequence first, and an entropy quantile the whole batch.
    kinds: loss type, level of the ratio, sampler's mode or "none", where the reference comes from, names of the sides.
    """

    wants_entropy = True

    def __init__(self, kinds: tuple[str, ...], numbers: tuple[float, ...]) -> None:
        super().__init__(kinds, numbers)
        self.loss_type, self.level, self.mode, self.reference, *self.names = kinds
        self.of = Numbers(*numbers)

    @property
    def sums(self) -> tuple[str, ...]:  # type: ignore[override]
        kl = () if self.reference == "none" else ("kl",)
        return ("entropy", *kl, *(("policy_loss",) if "bonus" in self.names else ()))

    @property
    def per_token(self) -> tuple[str, ...]:  # type: ignore[override]
        further = {"sapo": (), "vespo": ("phi",)}.get(self.loss_type, ("clipped",))
        return ("logprob", *further, *(() if self.mode == "none" else ("sampler",)))

    def together(self) -> int:
        if self.of.top < 1.0:
            return BATCH
        sequences = self.level != "token" or self.loss_type == "vespo" or self.of.drift < math.inf
        return 1 if sequences or self.mode.startswith("sequence") else ALONE

    def boost(self, sequences: int, tokens: int) -> float:
        # About the mean's divisor, which fp16 slopes lack. Bounded, so that short sequences in a long batch do not
        # overflow.
        if self.loss_type == "luspo" or self.level == "total":
            return float(max(1, sequences))
        size = float(max(1, sequences * min(tokens, 1024)))
        return min(size, self.of.divisor) if self.of.divisor else size

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        assert part.entropy is not None
        of, mask, logprob = self.of, part.mask, part.logprob
        side = dict(zip(self.names, part.sides, strict=True))
        A, own = side["advantages"], logprob.detach()
        found = {"logprob": own, "entropy": torch.where(mask, part.entropy.detach(), 0.0).sum()}

        if self.level == "total":
            log_ratio = (logprob * mask).sum(1, keepdim=True) - side.get("old_logprob", own).sum(1, keepdim=True)
        else:
            log_ratio = logprob - side.get("old_logprob", own)
        log_weight = log_ratio
        if self.level == "sequence":
            log_weight = (log_ratio * mask).sum(1, keepdim=True) / _counts(mask)
        # A clipped ratio has a slope of 0, but 0 · inf is NaN: ratios that may be clipped are kept finite.
        finite = log_weight.clamp(max=RATIO_BOUND)
        if self.loss_type in CLIPPED and of.delta == math.inf:
            finite = torch.where(A >= 0, finite, log_weight)
        ratio = finite.exp()
        sampler = side.get("importance_sampling_ratio")
        if self.mode != "none":
            sampler = sampler_ratio(own - side["sampler_logprob"], mask, self.mode, of)
            found["sampler"] = sampler.expand_as(mask)

        if self.loss_type == "vespo":
            phi = self._phi(log_ratio.detach(), sampler, A, mask)
            found["phi"] = phi.expand_as(mask)
            loss = -phi * A * logprob
        elif self.loss_type == "sapo":
            tau = _by_sign(A > 0, of.tau_pos, of.tau_neg, A)
            loss = -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * A
        elif self.loss_type == "cispo":
            loss = -ratio.clamp(max=of.high).detach() * A * logprob
            found["clipped"] = ((ratio > of.high) & (A > 0)).expand_as(mask)
        elif self.loss_type in CLIPPED:
            bounded = ratio.clamp(max=of.delta)
            loss = -torch.minimum(bounded * A, ratio.clamp(1 - of.low, 1 + of.high) * A)
            up, down = (bounded > 1 + of.high) & (A > 0), (bounded < 1 - of.low) & (A < 0)
            found["clipped"] = (up.to(A.dtype) - down.to(A.dtype)).expand_as(mask)
        else:
            raise NotImplementedError(f"grpo: {self.loss_type!r} has no formula.")

        if of.drift < math.inf:
            theirs = side["sampler_logprob"] if "sampler_logprob" in side else side.get("old_logprob", own)
            drift = torch.nan_to_num(theirs - own, nan=0.0)
            drift = (drift * mask).sum(1, keepdim=True) / _counts(mask)
            loss = loss * ((A >= 0) | (drift <= of.drift))
        chosen = mask
        if of.top < 1.0:
            chosen = mask & (part.entropy >= _quantile(part.entropy.detach(), mask, 1.0 - of.top))
            loss = loss * chosen
        if sampler is not None and self.loss_type != "vespo":
            loss = loss * sampler
        if self.reference != "none":
            theirs = part.reference if part.reference is not None else side["ref_logprob"]
            d = theirs - logprob
            kl = d.exp() - d - 1
            if of.correct_kl:
                kl = kl * ratio
            found["kl"] = torch.where(mask, kl.detach(), 0.0).sum()
            if of.beta:
                loss = loss + of.beta * kl

        total = torch.where(mask, loss * side["share"], 0.0).sum()
        if self.level == "total":
            # A completion without tokens has a ratio of 1, a constant, which TRL's mean over sequences counts.
            empty = ~mask.any(1, keepdim=True)
            total = total + torch.where(empty, loss[:, :1] * side["share"], 0.0).sum()
        if "bonus" in side:
            found["policy_loss"] = total
            bonus = torch.where(chosen, part.entropy * side["bonus"], 0.0).sum()
            total = total - (bonus / chosen.sum().clamp(min=1) if of.top < 1.0 else bonus)
        return total, found

    def _phi(self, log_ratio: Tensor, sampler: Tensor | None, A: Tensor, mask: Tensor) -> Tensor:
        of, least = self.of, math.log(1e-8)
        # Bounded, so that w^k and e^(−λ w) stay finite.
        log_w = (log_ratio.clamp(-20.0, 20.0) * mask).sum(1, keepdim=True)
        if sampler is not None:
            log_w = log_w + torch.where(mask, sampler.log().clamp(least, 20.0), 0.0).sum(1, keepdim=True)
        log_w = log_w.clamp(least, 20.0)
        k = _by_sign(A >= 0, of.k_pos, of.k_neg, A)
        lam = _by_sign(A >= 0, of.lambda_pos, of.lambda_neg, A).clamp(min=1e-4)
        return (lam + k * log_w - lam * log_w.exp()).exp()


FAMILIES["policy"] = Policy


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


# --------------------------------------------------------------------------------------- what a batch is divided by


def _policy(
    name: str, kinds: tuple[str, ...], numbers: Numbers, x: Tensor, head: Head | Tensor | torch.nn.Linear,
    target: Tensor, given: dict[str, Tensor | None], bonus: float | Tensor, items: float | Tensor | None,
    longest: int | None, *, ignore_index: int, **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    if x.dim() != 3 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{name}: x must be (S, T, H) and target (S, T), got {tuple(x.shape)} and {tuple(target.shape)}."
        )
    (S, T), acc = target.shape, torch.promote_types(x.dtype, torch.float32)
    mask = as_labels(target, ignore_index) != ignore_index
    counts = mask.sum(1).to(acc)
    tokens = counts.sum().clamp(min=1)
    sides: dict[str, Tensor] = {}
    loss_type, level, mode, _ = kinds
    for argument, t in given.items():
        if t is None:
            continue
        alone = argument in ("advantages", "importance_sampling_ratio") or (
            level == "total" and argument != "advantages"
        )
        if t.shape != (S, T) and not (alone and t.shape in ((S,), (S, 1))):
            raise ValueError(
                f"{name}: {argument} must be {'(S,) or ' if alone else ''}(S, T), here S = {S} and T = {T}, got "
                f"{tuple(t.shape)}."
            )
        t = t.detach().to(acc)
        # Padding may hold anything, also -inf and NaN, which 0 · x would keep.
        sides[argument] = torch.where(mask, t, 0.0) if t.shape == (S, T) else t.view(S)
    sampler = sides.get("importance_sampling_ratio")
    if mode != "none" and "old_logprob" in sides:
        difference = sides["old_logprob"] - sides["sampler_logprob"]
        sampler = sampler_ratio(difference, mask, mode, numbers)
        # Old and sampler log-probabilities are both constants: the ratio is computed once, before the walk.
        sides["importance_sampling_ratio"] = sampler
        mode = "none"
    if mode == "none" and numbers.drift == math.inf:
        sides.pop("sampler_logprob", None)
    if loss_type == "vespo" and sampler is not None and sampler.shape != (S, T):
        raise ValueError(
            f"{name}: vespo wants importance_sampling_ratio of tokens, (S, T), got {tuple(sampler.shape)}."
        )

    sides["share"] = _share(loss_type, counts, tokens, items, longest)
    bonus_is_there = not isinstance(bonus, int | float) or bonus != 0.0
    if bonus_is_there:
        # With a quantile only the family knows how many tokens the bonus is a mean over: it divides itself.
        sides["bonus"] = (bonus if numbers.top < 1.0 else bonus / tokens) * torch.ones_like(counts)
    if target.numel() == 0:
        # A quantile of no tokens does not exist.
        numbers = numbers._replace(top=1.0)
    loss, found = token_loss(
        "policy", (loss_type, level, mode, kinds[3], *sides), numbers, x, head, target,
        sides=tuple(sides.values()), ignore_index=ignore_index, name=name, **options,
    )  # fmt: skip

    metrics = {"logprob": found["logprob"], "entropy": found["entropy"] / tokens}
    if "kl" in found:
        metrics["kl"] = found["kl"] / tokens
    if "policy_loss" in found:
        metrics["policy_loss"] = found["policy_loss"]
    by_sequence = sides["advantages"].shape != (S, T)
    if "phi" in found:
        metrics["vespo/phi_seq_mean"] = _logged(found["phi"], mask, by_sequence).mean()
    if "clipped" in found:
        by_sequence = by_sequence and level != "token"
        low, high = (
            _logged(c.to(counts.dtype), mask, by_sequence) for c in (found["clipped"] < 0, found["clipped"] > 0)
        )
        if loss_type == "cispo":
            metrics["cispo_clip_ratio"] = high.mean()
        else:
            metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"] = low.mean(), high.mean()
            metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
            metrics["clip_ratio/low_min"] = low.of_sequences().least()
            metrics["clip_ratio/high_max"] = high.of_sequences().most()
    sampler = found.get("sampler", sampler)
    if sampler is not None:
        by_sequence = sampler.shape != (S, T) or mode.startswith("sequence")
        spread = _logged(sampler.view(S, 1).expand(S, T) if sampler.shape != (S, T) else sampler, mask, by_sequence)
        for what, value in (("min", spread.least()), ("mean", spread.mean()), ("max", spread.most())):
            metrics[f"sampling/importance_sampling_ratio/{what}"] = value
    return loss, metrics


def _share(loss_type: str, counts: Tensor, tokens: Tensor, items: float | Tensor | None, longest: int | None) -> Tensor:
    """(S,) the weight of one token of each sequence in the loss."""
    S = max(1, counts.shape[0])
    if loss_type in ("grpo", "sapo"):
        return 1 / (counts.clamp(min=1) * S)
    if loss_type == "luspo":
        return torch.full_like(counts, 1 / S)
    if loss_type == "dr_grpo":
        return torch.full_like(counts, 1 / (S * (longest or 1)))
    if loss_type == "bnpo" or items is None:
        return torch.ones_like(counts) / tokens
    if isinstance(items, Tensor):
        # A 0-d CPU tensor combines with the device's tensors as a scalar, without a copy.
        return torch.ones_like(counts) / items.detach().reshape(()).clamp(min=1)
    return torch.full_like(counts, 1 / max(1.0, items))


class _Logged(NamedTuple):
    """Values of tokens (S, T), or of sequences (S, 1), and a mask of those that count."""

    values: Tensor
    mask: Tensor

    def mean(self) -> Tensor:
        return torch.where(self.mask, self.values, 0.0).sum() / self.mask.sum().clamp(min=1)

    def least(self) -> Tensor:
        return -self._replace(values=-self.values).most()

    def most(self) -> Tensor:
        """The maximum, NaN if nothing counts."""
        if self.values.numel() == 0:
            return self.values.new_full((), math.nan)
        return torch.where(self.mask.any(), torch.where(self.mask, self.values, -math.inf).amax(), math.nan)

    def of_sequences(self) -> _Logged:
        counts = self.mask.sum(1, keepdim=True)
        return _Logged(torch.where(self.mask, self.values, 0.0).sum(1, keepdim=True) / counts, counts > 0)


def _logged(values: Tensor, mask: Tensor, by_sequence: bool) -> _Logged:
    # TRL's means over sequences include those without tokens.
    return _Logged(values[:, :1], torch.ones_like(mask[:, :1])) if by_sequence else _Logged(values, mask)
