"""From a batch of completions to the call of the walk."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.losses.head.head import Head, Hidden
from tigon.losses.head.walk import Walk
from tigon.losses.policy.family import COUNTED, Numbers, Policy, Sides, Words
from tigon.losses.policy.options import GRPO, RLOO, Rollout, Sampler
from tigon.losses.token_loss import token_loss


class Objective(NamedTuple):
    """What one call computes: the options of `grpo` or of `rloo` as the family takes them, and those of the batch.

    bonus: the entropy's coefficient. items: the divisor of a type that has one, as in `GRPO`.
    """

    words: Words
    numbers: Numbers
    bonus: float | Tensor
    items: float | Tensor | None
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
            bonus=0.0 if isinstance(c.entropy_coefficient, Tensor) else float(c.entropy_coefficient),
        )  # fmt: skip
        if c.loss_type == "dr_grpo":
            numbers = numbers._replace(divisor=float(c.max_completion_length or 1))
        reference = rollout.ref
        source = "none" if reference is None else "head" if isinstance(reference, Hidden) else "given"
        words = Words(c.loss_type, c.importance_sampling_level, mode or "none", source)  # type: ignore[arg-type]
        return cls(words, numbers, c.entropy_coefficient, items, c.ignore_index, c.temperature)

    @classmethod
    def of_rloo(cls, c: RLOO) -> Objective:
        # The clipped loss of GRPO with one ratio a sequence, that of the sums.
        coefficient = c.entropy_coefficient
        bonus = 0.0 if isinstance(coefficient, Tensor) else float(coefficient)
        numbers = Numbers(c.epsilon, c.epsilon if c.epsilon_high is None else c.epsilon_high, bonus=bonus)
        words = Words("grpo", "total")
        return cls(words, numbers, coefficient, None, c.ignore_index, c.temperature)


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
    S, T = target.shape
    words, numbers = of.words, of.numbers

    def side(argument: str, t: Tensor | None, of_sequences: bool = False) -> Tensor | None:
        """A tensor of the rollout, checked."""
        if t is None:
            return None
        if t.shape != (S, T) and not (of_sequences and t.shape in ((S,), (S, 1))):
            raise ValueError(
                f"{name}: rollout.{argument} must be {'(S,) or ' if of_sequences else ''}(S, T), here S = {S} and "
                f"T = {T}, got {tuple(t.shape)}."
            )
        _check_device(name, f"rollout.{argument}", t, x)
        return t if t.dim() == 1 or t.shape == (S, T) else t.view(S)

    def number(argument: str, t: float | Tensor | None) -> Tensor | None:
        """A 0-d tensor of the options, or None where it is a number, which the host knows."""
        if not isinstance(t, Tensor):
            return None
        if t.device.type != "cpu":  # one of the CPU is a number of the host, which no kernel waits for
            _check_device(name, f"config.{argument}", t, x)
        return t.reshape(())

    hidden = rollout.ref if isinstance(rollout.ref, Hidden) else None
    sampled, ratio = sampler_of(rollout)
    advantages = side("advantages", rollout.advantages, True)
    assert advantages is not None
    old = side("old", rollout.old, words.level == "total")
    reference = None if isinstance(rollout.ref, Hidden) else side("ref", rollout.ref)
    sampled, ratio = side("sampler", sampled), side("sampler.ratio", ratio, True)
    if words.mode == "none" and numbers.drift == math.inf:
        sampled = None  # nothing in the loss looks at it
    if words.loss_type == "vespo" and ratio is not None and ratio.shape != (S, T):
        raise ValueError(f"{name}: vespo wants rollout.sampler.ratio of tokens, (S, T), got {tuple(ratio.shape)}.")
    if target.numel() == 0:
        # A quantile of no tokens does not exist.
        numbers = numbers._replace(top=1.0)
    bonus = number("entropy_coefficient", of.bonus)
    sides = Sides(advantages, old, reference, sampled, ratio, number("num_items_in_batch", of.items), bonus)
    loss, found = token_loss(
        Policy.of(words, numbers, sides), sides, x, head, target, reference=hidden, ignore_index=of.ignore_index,
        temperature=of.temperature, walk=walk, name=name,
    )  # fmt: skip
    return loss, {"logprob": found.pop("logprob"), **found}


def _check_device(name: str, argument: str, t: Tensor, x: Tensor) -> None:
    if t.device != x.device:  # a kernel would read a host address
        raise ValueError(f"{name}: {argument} must be on the device of x, {x.device}, got {t.device}.")
