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

Sources: beside each; the formulas of kinds and what they are called follow TRL 1.16, which trains with them. GSPO:
https://arxiv.org/abs/2507.18071. RLOO: https://arxiv.org/abs/2402.14740. δ: https://arxiv.org/abs/2505.07291.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.token_loss import ALONE, BATCH, FAMILIES, Family, Part, token_loss
from tigon.ops.logprob import logprob_reference
from tigon.ops.targets import as_labels

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
RATIO_BOUND = 80.0  # nats: its exponential is far beyond any bound, and finite in fp32 times an advantage
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def grpo(
    x: Tensor, weight: Tensor, target: Tensor, *, advantages: Tensor, bias: Tensor | None = None,
    old_logprob: Tensor | None = None, ref_logprob: Tensor | None = None, ref_x: Tensor | None = None,
    ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, loss_type: str = "dapo",
    importance_sampling_level: str = "token", epsilon: float = 0.2, epsilon_high: float | None = None,
    delta: float | None = None, beta: float = 0.0, use_bias_correction_kl: bool = True,
    entropy_coefficient: float | Tensor = 0.0, top_entropy_quantile: float = 1.0,
    num_items_in_batch: float | Tensor | None = None, max_completion_length: int | None = None,
    sampler_logprob: Tensor | None = None, importance_sampling_ratio: Tensor | None = None,
    importance_sampling_mode: str | None = "sequence_mask", importance_sampling_clip_max: float | None = 3.0,
    importance_sampling_clip_min: float | None = None, off_policy_mask_threshold: float | None = None,
    sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    lengths: Any = None, ignore_index: int = -100, temperature: float = 1.0, softcap: float | None = None,
    scale: float = 1.0, chunk_bytes: int | None = None, accumulate: str = "fp32", group: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss of sampled completions whose tokens have advantages, and what to log of it.

    With old_logprob None, right after the sampling, every ratio is 1 and the gradient is the policy's own: REINFORCE.
    With advantages of tokens, as from a critic, loss_type "bnpo" is PPO's. GSPO is loss_type "grpo" with
    importance_sampling_level "sequence".

    Args:
        x: (S, T, H) hidden states of S completions; x[s, t] is what target[s, t] is predicted from.
        weight: (V, H), the head. bias: (V,) or None.
        target: (S, T) the sampled tokens; ignore_index where a token does not count (prompt, padding, tool output).
        advantages: (S,) or (S, T).
        old_logprob: (S, T) log-probabilities, in nats, under the policy before this step's updates: "logprob" of an
            earlier call. None: this policy's own.
        ref_logprob: (S, T) under the reference model, or instead
        ref_x, ref_weight, ref_bias: (S, T, H'), (V, H') and (V,) or None, its hidden states and head. One of these is
            wanted for beta; with beta = 0, "kl" is still reported.
        loss_type: one of "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo".
        importance_sampling_level: "token", or "sequence": one ratio, exp of the mean difference, for all its tokens.
        epsilon: how far below 1 a ratio counts. epsilon_high: how far above, None for the same; with "cispo", which
            has no lower bound, the largest ratio itself (such as 5.0).
        delta: the largest ratio where a clipped one would not be, at negative advantages. None for no bound.
        beta: weight of the KL divergence from the reference.
        use_bias_correction_kl: multiply the KL by the ratio, so that its gradient is not biased.
        entropy_coefficient: weight of the entropy bonus, a number or a 0-d tensor.
        top_entropy_quantile: the share of this batch's tokens, those of highest entropy, that have a loss at all. Below
            1.0 all tokens are seen before any has a gradient: a batch beyond chunk_bytes costs a fourth product.
        num_items_in_batch: what "dapo", "cispo" and "vespo" divide by, a number or a 0-d tensor: the tokens that count
            in the whole step, over the number of ranks. None: those of this batch.
        max_completion_length: "dr_grpo" wants it.
        sampler_logprob: (S, T) as the engine that sampled had them, which is rarely what the trainer computes; NaN
            where it did not say, which means a ratio of 1. The ratio exp(old − sampler) multiplies the loss.
        importance_sampling_mode: "token_…" for a ratio of each token, "sequence_…" for their product; "…_truncate" to
            clip it to [importance_sampling_clip_min, importance_sampling_clip_max], "…_mask" to drop what is outside.
            None bounds (the latter is 3.0) are none. None: no ratio.
        importance_sampling_clip_max, importance_sampling_clip_min: these bounds.
        importance_sampling_ratio: (S,) or (S, T), that ratio where the caller has it already.
        off_policy_mask_threshold: drop sequences of negative advantage whose mean of sampler_logprob (or old_logprob) −
            logprob is larger. In nats; None: never.
        sapo_temperature_pos, sapo_temperature_neg: τ at positive and other advantages.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: k and λ at advantages of either sign.
        lengths: how many targets of each sequence count, a `ValidLengths` or a list: the others then cost nothing.
        ignore_index: see target.
        temperature, softcap, scale: log-probabilities are of softcap · tanh(scale · logits / softcap) / temperature.
        chunk_bytes: as in `tigon.linear_cross_entropy`.
        accumulate: "fp32", or "weight" to sum the weight's gradient in its own dtype.
        group: of a vocabulary-parallel head, as in `tigon.linear_cross_entropy`; both heads are split alike.
    Returns: the 0-d loss, and detached: "logprob" (S, T), 0 where masked; and 0-d, means over tokens that count:
        "entropy"; "kl" with a reference; "clip_ratio/low_mean", "/high_mean", "/region_mean", "/low_min", "/high_max"
        with the clipped types (over sequences, where a ratio is one a sequence); "cispo_clip_ratio";
        "vespo/phi_seq_mean"; "policy_loss", without the entropy bonus, where there is one;
        "sampling/importance_sampling_ratio/min", "/mean" and "/max" with a sampler.
    Raises: ValueError for options that are unknown or do not go together, and shapes that do not fit.

    Replaces, of the default loss_type::

        logits = F.linear(x, weight, bias).float()
        logprob = -F.cross_entropy(logits.transpose(1, 2), target, reduction="none")  # 0 where target is -100
        ratio = (logprob - old_logprob).exp()
        A, mask = advantages.unsqueeze(1), target != -100
        loss = -torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)
        loss = (loss * mask).sum() / mask.sum()
    """
    name = "grpo"
    _one_of(name, "loss_type", loss_type, LOSS_TYPES)
    _one_of(name, "importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    _one_of(name, "importance_sampling_mode", importance_sampling_mode, (*MODES, None))
    high, low = importance_sampling_clip_max, importance_sampling_clip_min
    mode = None if sampler_logprob is None or importance_sampling_ratio is not None else importance_sampling_mode
    if mode is not None:
        if high is None and low is None and mode.endswith("truncate"):
            raise ValueError(f"{name}: importance_sampling_mode {mode!r} wants one importance_sampling_clip at least.")
        if high is not None and low is not None and low >= high:
            raise ValueError(
                f"{name}: importance_sampling_clip_min must be less than …_clip_max, got {low} and {high}."
            )
        if loss_type == "vespo" and mode.startswith("sequence"):
            raise ValueError(f"{name}: vespo wants an importance_sampling_mode of tokens, got {mode!r}.")
    if ref_logprob is not None and ref_x is not None:
        raise ValueError(f"{name}: the reference is either ref_logprob or ref_x and ref_weight, got both.")
    reference = "side" if ref_logprob is not None else "head" if ref_x is not None else "none"
    if beta != 0.0 and reference == "none":
        raise ValueError(f"{name}: beta = {beta} wants a reference: ref_logprob, or ref_x and ref_weight.")
    if loss_type == "dr_grpo" and not (max_completion_length or 0) > 0:
        raise ValueError(f"{name}: dr_grpo wants a positive max_completion_length, got {max_completion_length}.")
    if not 0.0 <= top_entropy_quantile <= 1.0:
        raise ValueError(f"{name}: top_entropy_quantile must be from 0 to 1, got {top_entropy_quantile}.")
    if not (sapo_temperature_pos > 0 and sapo_temperature_neg > 0):
        raise ValueError(
            f"{name}: sapo's temperatures must be positive, got {sapo_temperature_pos} and {sapo_temperature_neg}."
        )
    host_items = isinstance(num_items_in_batch, int | float) and loss_type in ("dapo", "cispo", "vespo")
    numbers = Numbers(
        epsilon, epsilon if epsilon_high is None else epsilon_high, math.inf if delta is None else delta, beta,
        float(use_bias_correction_kl), top_entropy_quantile, math.inf if high is None else high,
        -math.inf if low is None else low,
        math.inf if off_policy_mask_threshold is None else off_policy_mask_threshold, sapo_temperature_pos,
        sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
        max(1.0, float(num_items_in_batch)) if host_items else 0.0,  # type: ignore[arg-type]
    )  # fmt: skip
    given = {
        "advantages": advantages, "old_logprob": old_logprob, "ref_logprob": ref_logprob,
        "sampler_logprob": sampler_logprob, "importance_sampling_ratio": importance_sampling_ratio,
    }  # fmt: skip
    return _policy(
        name, (loss_type, importance_sampling_level, mode or "none", reference), numbers, x, weight, target, bias,
        given, entropy_coefficient, num_items_in_batch, max_completion_length, reference=(ref_x, ref_weight, ref_bias),
        lengths=lengths, ignore_index=ignore_index, temperature=temperature, softcap=softcap, scale=scale,
        chunk_bytes=chunk_bytes, accumulate=accumulate, group=group,
    )  # fmt: skip


def rloo(
    x: Tensor, weight: Tensor, target: Tensor, *, advantages: Tensor, bias: Tensor | None = None,
    old_logprob: Tensor | None = None, epsilon: float = 0.2, epsilon_high: float | None = None,
    entropy_coefficient: float | Tensor = 0.0, lengths: Any = None, ignore_index: int = -100,
    temperature: float = 1.0, softcap: float | None = None, scale: float = 1.0, chunk_bytes: int | None = None,
    accumulate: str = "fp32", group: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """REINFORCE with a completion as one action: mean over sequences of clipped(r), r = exp(Σ logprob − Σ old).

    Args:
        x: (S, T, H). weight: (V, H). bias: (V,) or None. target: (S, T), ignore_index where a token does not count.
        advantages: (S,), each reward less the mean of the others of its prompt.
        old_logprob: (S, T) of the tokens, or (S,) of the sequences; None: this policy's own.
        epsilon, epsilon_high, entropy_coefficient: as in `grpo`.
        lengths, ignore_index, temperature, softcap, scale, chunk_bytes, accumulate, group: as in `grpo`.
    Returns: the 0-d loss, and detached "logprob" (S, T), "entropy" and "clip_ratio/…" as in `grpo`.
    Raises: ValueError for shapes that do not fit.
    """
    numbers = Numbers(epsilon, epsilon if epsilon_high is None else epsilon_high)
    return _policy(
        "rloo", ("grpo", "total", "none", "none"), numbers, x, weight, target, bias,
        {"advantages": advantages, "old_logprob": old_logprob}, entropy_coefficient, None, None, lengths=lengths,
        ignore_index=ignore_index, temperature=temperature, softcap=softcap, scale=scale, chunk_bytes=chunk_bytes,
        accumulate=accumulate, group=group,
    )  # fmt: skip


def _one_of(name: str, argument: str, value: Any, known: tuple) -> None:
    if value not in known:
        raise ValueError(f"{name}: {argument} must be one of {', '.join(map(repr, known))}, got {value!r}.")


# -------------------------------------------------------------------------------------------------------- reference


def grpo_reference(
    x: Tensor, weight: Tensor, target: Tensor, *, advantages: Tensor, bias: Tensor | None = None,
    old_logprob: Tensor | None = None, ref_logprob: Tensor | None = None, ref_x: Tensor | None = None,
    ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, loss_type: str = "dapo",
    importance_sampling_level: str = "token", epsilon: float = 0.2, epsilon_high: float | None = None,
    delta: float | None = None, beta: float = 0.0, use_bias_correction_kl: bool = True,
    entropy_coefficient: float | Tensor = 0.0, top_entropy_quantile: float = 1.0,
    num_items_in_batch: float | Tensor | None = None, max_completion_length: int = 1,
    sampler_logprob: Tensor | None = None, importance_sampling_ratio: Tensor | None = None,
    importance_sampling_mode: str | None = "sequence_mask", importance_sampling_clip_max: float | None = 3.0,
    importance_sampling_clip_min: float | None = None, off_policy_mask_threshold: float | None = None,
    sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    ignore_index: int = -100, temperature: float = 1.0, softcap: float | None = None, scale: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`grpo` on whole logits, by autograd. importance_sampling_level "total" is `rloo`, with loss_type "grpo"."""
    S = target.shape[0]
    options = (ignore_index, temperature, softcap or 0.0, scale)
    mask = target != ignore_index
    counts = mask.sum(1, keepdim=True).clamp(min=1)
    logprob, entropy, *_ = logprob_reference(F.linear(x, weight, bias), target, *options)
    A = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)

    def of_tokens(t: Tensor) -> Tensor:
        return torch.where(mask, t, 0.0)

    old = logprob.detach() if old_logprob is None else of_tokens(old_logprob)
    log_ratio = logprob - old
    log_weight = log_ratio
    if importance_sampling_level != "token":
        log_weight = log_ratio.sum(1, keepdim=True)
    if importance_sampling_level == "sequence":
        log_weight = log_weight / counts
    r = log_weight.exp()

    sampler = importance_sampling_ratio if importance_sampling_ratio is None else importance_sampling_ratio.view(S, -1)
    if sampler_logprob is not None and sampler is None and importance_sampling_mode is not None:
        difference = torch.nan_to_num(old - of_tokens(sampler_logprob), nan=0.0)
        by, what = importance_sampling_mode.split("_")
        sampler = (difference.sum(1, keepdim=True) if by == "sequence" else difference).exp()
        low, high = importance_sampling_clip_min, importance_sampling_clip_max
        if what == "truncate":
            sampler = sampler.clamp(low, high)
        else:
            sampler = torch.where((sampler > (high or math.inf)) | (sampler < (low or 0.0)), 0.0, sampler)

    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "cispo":
        loss = -r.clamp(max=high).detach() * A * logprob
    elif loss_type == "sapo":
        tau = torch.where(A > 0, torch.full_like(A, sapo_temperature_pos), sapo_temperature_neg)
        loss = -A * torch.sigmoid(tau * (r - 1)) * 4 / tau
    elif loss_type == "vespo":
        log_w = of_tokens(log_ratio.detach().clamp(-20.0, 20.0))
        if sampler is not None:
            log_w = log_w + of_tokens(sampler.log().clamp(math.log(1e-8), 20.0))
        log_w = log_w.sum(1, keepdim=True).clamp(math.log(1e-8), 20.0)
        k = torch.where(A >= 0, torch.full_like(A, vespo_k_pos), vespo_k_neg)
        lam = torch.where(A >= 0, torch.full_like(A, vespo_lambda_pos), vespo_lambda_neg).clamp(min=1e-4)
        phi = (lam + k * log_w - lam * log_w.exp()).exp()
        loss = -phi * A * logprob
    else:
        loss = -torch.minimum(r.clamp(max=delta) * A if delta else r * A, r.clamp(1 - epsilon, 1 + high) * A)

    if off_policy_mask_threshold is not None:
        theirs = old if sampler_logprob is None else of_tokens(sampler_logprob)
        drift = torch.nan_to_num(theirs - logprob.detach(), nan=0.0).sum(1, keepdim=True) / counts
        loss = loss * ((A >= 0) | (drift <= off_policy_mask_threshold))
    top = mask
    if top_entropy_quantile < 1.0 and mask.any():
        top = mask & (entropy >= torch.quantile(entropy[mask].detach(), 1 - top_entropy_quantile))
        loss = loss * top
    if sampler is not None and loss_type != "vespo":
        loss = loss * sampler
    metrics = {"logprob": logprob.detach(), "entropy": of_tokens(entropy).sum() / mask.sum()}
    if ref_x is not None and ref_weight is not None:
        ref_logprob = logprob_reference(F.linear(ref_x, ref_weight, ref_bias), target, *options)[0]
    if ref_logprob is not None:
        d = of_tokens(ref_logprob) - logprob
        kl = d.exp() - d - 1
        kl = kl * r if use_bias_correction_kl else kl
        loss = loss + beta * kl
        metrics["kl"] = of_tokens(kl).sum() / mask.sum()

    loss = of_tokens(loss)
    if loss_type in ("grpo", "sapo"):
        total = (loss.sum(1, keepdim=True) / counts).mean()
    elif loss_type == "dr_grpo":
        total = loss.sum() / (S * max_completion_length)
    elif loss_type == "luspo":
        total = loss.sum(1).mean()
    else:
        own = loss_type == "bnpo" or num_items_in_batch is None
        total = loss.sum() / torch.as_tensor(mask.sum() if own else num_items_in_batch).clamp(min=1)
    bonus = torch.where(top, entropy, 0.0).sum() / top.sum().clamp(min=1)
    return total - entropy_coefficient * bonus, metrics


# ----------------------------------------------------------------------------------------------------------- family


class Numbers(NamedTuple):
    """A `Policy`'s numbers, in their order; bounds that are not wanted are infinite."""

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
    """kinds: loss type, level of the ratio, sampler's mode or "none", where the reference is, names of the sides."""

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
        # 1 / the mean's divisor, but short sequences in a long batch may not overflow.
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
        # A clipped ratio has a slope of 0, but 0 · inf is none: it is kept from infinity, unless nothing clips it.
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
        else:
            bounded = ratio.clamp(max=of.delta)
            loss = -torch.minimum(bounded * A, ratio.clamp(1 - of.low, 1 + of.high) * A)
            up, down = (bounded > 1 + of.high) & (A > 0), (bounded < 1 - of.low) & (A < 0)
            found["clipped"] = (up.to(A.dtype) - down.to(A.dtype)).expand_as(mask)

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
            # A completion without tokens has a ratio too, and TRL's mean over sequences counts it: a constant.
            empty = ~mask.any(1, keepdim=True)
            total = total + torch.where(empty, loss[:, :1] * side["share"], 0.0).sum()
        if "bonus" in side:
            found["policy_loss"] = total
            bonus = torch.where(chosen, part.entropy * side["bonus"], 0.0).sum()
            total = total - (bonus / chosen.sum().clamp(min=1) if of.top < 1.0 else bonus)
        return total, found

    def _phi(self, log_ratio: Tensor, sampler: Tensor | None, A: Tensor, mask: Tensor) -> Tensor:
        of, least = self.of, math.log(1e-8)
        log_w = (log_ratio.clamp(-20.0, 20.0) * mask).sum(1, keepdim=True)
        if sampler is not None:
            log_w = log_w + torch.where(mask, sampler.log().clamp(least, 20.0), 0.0).sum(1, keepdim=True)
        log_w = log_w.clamp(least, 20.0)
        k = _by_sign(A >= 0, of.k_pos, of.k_neg, A)
        lam = _by_sign(A >= 0, of.lambda_pos, of.lambda_neg, A).clamp(min=1e-4)
        return (lam + k * log_w - lam * log_w.exp()).exp()


FAMILIES["policy"] = Policy


def sampler_ratio(difference: Tensor, mask: Tensor, mode: str, of: Numbers) -> Tensor:
    """exp(old − sampler) of tokens, (S, T), or sequences, (S, 1), within its bounds."""
    difference = torch.nan_to_num(difference * mask, nan=0.0)  # the sampler may not have said
    if mode.startswith("sequence"):
        difference = difference.sum(1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(of.sampler_low, of.sampler_high)
    return torch.where((ratio < of.sampler_low) | (ratio > of.sampler_high), 0.0, ratio)


def _counts(mask: Tensor) -> Tensor:
    return mask.sum(1, keepdim=True).clamp(min=1)


def _by_sign(positive: Tensor, above: float, below: float, like: Tensor) -> Tensor:
    # Of two plain numbers torch.where makes fp32, in which 1.05 is another number.
    return torch.full_like(like, below).masked_fill(positive, above)


def _quantile(values: Tensor, mask: Tensor, q: float) -> Tensor:
    """torch.quantile(values[mask], q), whatever their number, which stays on the device."""
    ordered = torch.where(mask, values, math.inf).flatten().sort().values
    last = mask.sum().clamp(min=1) - 1
    rank = last.double() * q
    at = torch.stack((rank.floor(), rank.ceil())).long()
    below, above = ordered.gather(0, at).unbind()
    return torch.lerp(below, above, (rank - rank.floor()).to(values.dtype))


# --------------------------------------------------------------------------------------- what a batch is divided by


def _policy(
    name: str, kinds: tuple[str, ...], numbers: Numbers, x: Tensor, weight: Tensor, target: Tensor,
    bias: Tensor | None, given: dict[str, Tensor | None], bonus: float | Tensor, items: float | Tensor | None,
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
        # Padding may be anything, -inf and NaN too.
        sides[argument] = torch.where(mask, t, 0.0) if t.shape == (S, T) else t.view(S)
    sampler = sides.get("importance_sampling_ratio")
    if mode != "none" and "old_logprob" in sides:
        difference = sides["old_logprob"] - sides["sampler_logprob"]
        sampler = sampler_ratio(difference, mask, mode, numbers)
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
        # Of the tokens of high entropy the family knows the number.
        sides["bonus"] = (bonus if numbers.top < 1.0 else bonus / tokens) * torch.ones_like(counts)
    if target.numel() == 0:
        numbers = numbers._replace(top=1.0)
    loss, found = token_loss(
        "policy", (loss_type, level, mode, kinds[3], *sides), numbers, x, weight, target, bias,
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
    """(S,) what a token of each sequence counts for."""
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
        # A 0-d tensor of the host goes with those of the device, without a copy.
        return torch.ones_like(counts) / items.detach().reshape(()).clamp(min=1)
    return torch.full_like(counts, 1 / max(1.0, items))


class _Logged(NamedTuple):
    """Numbers of tokens (S, T), or of sequences (S, 1), and which count."""

    values: Tensor
    mask: Tensor

    def mean(self) -> Tensor:
        return torch.where(self.mask, self.values, 0.0).sum() / self.mask.sum().clamp(min=1)

    def least(self) -> Tensor:
        return -self._replace(values=-self.values).most()

    def most(self) -> Tensor:
        """NaN where nothing counts."""
        if self.values.numel() == 0:
            return self.values.new_full((), math.nan)
        return torch.where(self.mask.any(), torch.where(self.mask, self.values, -math.inf).amax(), math.nan)

    def of_sequences(self) -> _Logged:
        counts = self.mask.sum(1, keepdim=True)
        return _Logged(torch.where(self.mask, self.values, 0.0).sum(1, keepdim=True) / counts, counts > 0)


def _logged(values: Tensor, mask: Tensor, by_sequence: bool) -> _Logged:
    # TRL's means over sequences include those without tokens.
    return _Logged(values[:, :1], torch.ones_like(mask[:, :1])) if by_sequence else _Logged(values, mask)
