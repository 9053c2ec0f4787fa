"""From a batch of completions to the call of the walk, and from what the walk returns to TRL's metrics."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.linear.head import Head, Hidden
from tigon.linear.walk import Walk
from tigon.losses.policy.family import Numbers, Policy, Sides, Words, sampler_ratio
from tigon.losses.policy.options import GRPO, RLOO, Rollout, Sampler
from tigon.losses.token_loss import token_loss
from tigon.ops.targets import as_labels

# Types that divide by num_items_in_batch.
COUNTED = ("dapo", "cispo", "vespo")


class Objective(NamedTuple):
    """What one call computes: the options of `grpo` or of `rloo` as the family takes them, and those of the batch.

    bonus: the entropy's coefficient. items, longest: divisors, as in `GRPO`.
    """

    words: Words
    numbers: Numbers
    bonus: float | Tensor
    items: float | Tensor | None
    longest: int | None
    ignore_index: int
    temperature: float

    @classmethod
    def of_grpo(cls, c: GRPO, rollout: Rollout) -> Objective:
        name, (sampled, ratio) = "grpo", sampler_of(rollout)
        mode = None if sampled is None or ratio is not None else c.importance_sampling_mode
        if c.loss_type == "vespo" and mode is not None and mode.startswith("sequence"):
            raise ValueError(f"{name}: vespo wants an importance_sampling_mode of tokens, got {mode!r}.")
        if c.beta != 0.0 and rollout.ref is None:
            raise ValueError(f"{name}: beta = {c.beta} wants a reference, rollout.ref: log-probabilities, or a Hidden.")
        high, low = c.importance_sampling_clip_max, c.importance_sampling_clip_min
        items = c.num_items_in_batch if c.loss_type in COUNTED else None
        drift = c.off_policy_mask_threshold
        numbers = Numbers(
            low=c.epsilon, high=c.epsilon if c.epsilon_high is None else c.epsilon_high,
            delta=math.inf if c.delta is None else c.delta, beta=c.beta, correct_kl=float(c.use_bias_correction_kl),
            top=c.top_entropy_quantile, sampler_high=math.inf if high is None else high,
            sampler_low=-math.inf if low is None else low, drift=math.inf if drift is None else drift,
            tau_pos=c.sapo_temperature_pos, tau_neg=c.sapo_temperature_neg, k_pos=c.vespo_k_pos,
            lambda_pos=c.vespo_lambda_pos, k_neg=c.vespo_k_neg, lambda_neg=c.vespo_lambda_neg,
            # Of a tensor the host does not know the value: the boost of fp16 then does without it.
            divisor=max(1.0, float(items)) if isinstance(items, int | float) else 0.0,
        )  # fmt: skip
        reference = rollout.ref
        source = "none" if reference is None else "head" if isinstance(reference, Hidden) else "given"
        words = Words(c.loss_type, c.importance_sampling_level, mode or "none", source)  # type: ignore[arg-type]
        return cls(
            words, numbers, c.entropy_coefficient, c.num_items_in_batch, c.max_completion_length, c.ignore_index,
            c.temperature,
        )  # fmt: skip

    @classmethod
    def of_rloo(cls, c: RLOO) -> Objective:
        # The clipped loss of GRPO with one ratio a sequence, that of the sums.
        numbers = Numbers(c.epsilon, c.epsilon if c.epsilon_high is None else c.epsilon_high)
        words = Words("grpo", "total")
        return cls(words, numbers, c.entropy_coefficient, None, None, c.ignore_index, c.temperature)


def sampler_of(rollout: Rollout) -> Sampler:
    return rollout.sampler if isinstance(rollout.sampler, Sampler) else Sampler(rollout.sampler)


def policy_loss(
    name: str, x: Tensor, head: Head | Tensor | torch.nn.Linear, target: Tensor, rollout: Rollout, of: Objective,
    walk: Walk,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss of an objective, and its metrics."""
    if x.dim() != 3 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{name}: x must be (S, T, H) and target (S, T), got {tuple(x.shape)} and {tuple(target.shape)}."
        )
    (S, T), acc = target.shape, torch.promote_types(x.dtype, torch.float32)
    words, numbers = of.words, of.numbers
    mask = as_labels(target, of.ignore_index) != of.ignore_index
    counts = mask.sum(1).to(acc)
    tokens = counts.sum().clamp(min=1)  # 0-d, on the device: the mean over no token is 0

    def side(argument: str, t: Tensor | None, of_sequences: bool = False) -> Tensor | None:
        """A tensor of the rollout in the dtype of the loss, checked, and without what padding holds."""
        if t is None:
            return None
        if t.shape != (S, T) and not (of_sequences and t.shape in ((S,), (S, 1))):
            raise ValueError(
                f"{name}: rollout.{argument} must be {'(S,) or ' if of_sequences else ''}(S, T), here S = {S} and "
                f"T = {T}, got {tuple(t.shape)}."
            )
        t = t.detach().to(acc)
        # Padding may hold anything, also -inf and NaN, which 0 · x would keep.
        return torch.where(mask, t, 0.0) if t.shape == (S, T) else t.view(S)

    hidden = rollout.ref if isinstance(rollout.ref, Hidden) else None
    sampled, ratio = sampler_of(rollout)
    advantages = side("advantages", rollout.advantages, True)
    assert advantages is not None
    old = side("old", rollout.old, words.level == "total")
    reference = None if isinstance(rollout.ref, Hidden) else side("ref", rollout.ref)
    sampled, ratio = side("sampler", sampled), side("sampler.ratio", ratio, True)
    if words.mode != "none" and old is not None and sampled is not None:
        # Old and sampler log-probabilities are both constants: the ratio is computed once, before the walk.
        ratio = sampler_ratio(old - sampled, mask, words.mode, numbers)
        words = words._replace(mode="none")
    if words.mode == "none" and numbers.drift == math.inf:
        sampled = None  # nothing in the walk looks at it
    if words.loss_type == "vespo" and ratio is not None and ratio.shape != (S, T):
        raise ValueError(f"{name}: vespo wants rollout.sampler.ratio of tokens, (S, T), got {tuple(ratio.shape)}.")

    bonus = None
    if not isinstance(of.bonus, int | float) or of.bonus != 0.0:
        # With a quantile only the family knows how many tokens the bonus is a mean over: it divides itself.
        bonus = (of.bonus if numbers.top < 1.0 else of.bonus / tokens) * torch.ones_like(counts)
    if target.numel() == 0:
        # A quantile of no tokens does not exist.
        numbers = numbers._replace(top=1.0)
    # What a token counts for is known before the walk, and the walk then only sums.
    share = _share(words.loss_type, counts, tokens, of.items, of.longest)
    sides = Sides(advantages, share, old, reference, sampled, ratio, bonus)
    loss, found = token_loss(
        Policy.of(words, numbers, sides), sides, x, head, target, reference=hidden, ignore_index=of.ignore_index,
        temperature=of.temperature, walk=walk, name=name,
    )  # fmt: skip

    metrics = {"logprob": found["logprob"], "entropy": found["entropy"] / tokens}
    if "kl" in found:
        metrics["kl"] = found["kl"] / tokens
    if "policy_loss" in found:
        metrics["policy_loss"] = found["policy_loss"]
    # TRL logs by the shape of what it has: means over sequences where advantages are of sequences.
    by_sequence = advantages.shape != (S, T)
    if "phi" in found:
        metrics["vespo/phi_seq_mean"] = _logged(found["phi"], mask, by_sequence).mean()
    if "clipped" in found:
        by_ratio = by_sequence and words.level != "token"
        metrics |= _clip_ratios(found["clipped"], mask, by_ratio, words.loss_type, acc)
    ratio = found.get("sampler", ratio)
    if ratio is not None:
        by_sequence = ratio.shape != (S, T) or words.mode.startswith("sequence")
        spread = _logged(ratio.view(S, 1).expand(S, T) if ratio.shape != (S, T) else ratio, mask, by_sequence)
        for what, value in (("min", spread.least()), ("mean", spread.mean()), ("max", spread.most())):
            metrics[f"sampling/importance_sampling_ratio/{what}"] = value
    return loss, metrics


def _clip_ratios(
    clipped: Tensor, mask: Tensor, by_sequence: bool, loss_type: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """clipped: (S, T), above 0 where the upper bound holds, below 0 where the lower does."""
    if loss_type == "cispo":  # which has no lower bound
        return {"cispo_clip_ratio": _logged((clipped > 0).to(dtype), mask, by_sequence).mean()}
    clipped, mask = _logged(clipped, mask, by_sequence)
    # Both bounds together: of short completions the launches take longer than the numbers.
    hits = (torch.stack((clipped < 0, clipped > 0)) & mask).sum(-1, dtype=dtype)
    counts = mask.sum(-1)
    low, high = (hits.sum(-1) / counts.sum().clamp(min=1)).unbind()
    # A sequence without tokens, 0 / 0, is in no extreme; without any other sequence the extremes are NaN.
    lows, highs = (hits / counts).unbind()
    least, most = (torch.full_like(low, math.nan),) * 2
    if counts.numel():
        least = lows.nan_to_num(nan=math.inf).amin().nan_to_num(nan=math.nan, posinf=math.nan)
        most = highs.nan_to_num(nan=-math.inf).amax().nan_to_num(nan=math.nan, neginf=math.nan)
    return {
        "clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high,
        "clip_ratio/low_min": least, "clip_ratio/high_max": most,
    }  # fmt: skip


def _share(loss_type: str, counts: Tensor, tokens: Tensor, items: float | Tensor | None, longest: int | None) -> Tensor:
    """(S,) the weight of one token of each sequence in the loss."""
    S = max(1, counts.shape[0])
    if loss_type in ("grpo", "sapo"):
        return (counts.clamp(min=1) * S).reciprocal()
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
    """Values of tokens (…, S, T), or of sequences (…, S, 1); the mask of those that count has the last two sizes."""

    values: Tensor
    mask: Tensor

    def mean(self) -> Tensor:
        return torch.where(self.mask, self.values, 0.0).sum((-2, -1)) / self.mask.sum().clamp(min=1)

    def least(self) -> Tensor:
        return -self._replace(values=-self.values).most()

    def most(self) -> Tensor:
        """The maximum, NaN if nothing counts."""
        if self.values.numel() == 0:
            return self.values.new_full(self.values.shape[:-2], math.nan)
        return torch.where(self.mask.any(), torch.where(self.mask, self.values, -math.inf).amax((-2, -1)), math.nan)


def _logged(values: Tensor, mask: Tensor, by_sequence: bool) -> _Logged:
    # TRL's means over sequences include those without tokens.
    return _Logged(values[..., :1], torch.ones_like(mask[:, :1])) if by_sequence else _Logged(values, mask)
