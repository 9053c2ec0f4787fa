"""From a batch of completions to the `token_loss` call."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.head import Head, Hidden
from tigon.losses.policy.family import Policy, PolicyOptions, PolicyTensors
from tigon.losses.policy.options import GRPO, POLICY_LOSSES, Rollout, Sampler
from tigon.losses.token_loss import token_loss


def make_options(config: GRPO, rollout: Rollout, level: Literal["total"] | None = None) -> PolicyOptions:
    """The options as the family takes them. level: "total" for `rloo`."""
    c, name, (sampled, ratio) = config, "grpo", parse_sampler(rollout)
    mode = None if sampled is None or ratio is not None else c.importance_sampling_mode
    if c.loss_type == "vespo" and mode is not None and mode.startswith("sequence"):
        raise ValueError(f"{name}: vespo needs a token-level importance_sampling_mode, got {mode!r}.")
    if c.beta != 0.0 and rollout.ref is None:
        raise ValueError(f"{name}: beta = {c.beta} needs a reference in rollout.ref: log-probabilities, or a Hidden.")
    high, low = c.importance_sampling_clip_max, c.importance_sampling_clip_min
    items = _select_items(config)
    # The host does not know a tensor's value: fp16's grad_scale then does without the divisor.
    divisor = max(1.0, float(items)) if isinstance(items, int | float) else 0.0
    reference, drift = rollout.ref, c.off_policy_mask_threshold
    return PolicyOptions(
        c.loss_type, level or c.importance_sampling_level, low=c.epsilon,
        high=c.epsilon if c.epsilon_high is None else c.epsilon_high, mode=mode or "none",
        reference="none" if reference is None else "head" if isinstance(reference, Hidden) else "given",
        delta=math.inf if c.delta is None else c.delta, beta=c.beta, correct_kl=float(c.use_bias_correction_kl),
        top=c.top_entropy_quantile, sampler_high=math.inf if high is None else high,
        sampler_low=-math.inf if low is None else low, drift=math.inf if drift is None else drift,
        tau_pos=c.sapo_temperature_pos, tau_neg=c.sapo_temperature_neg, k_pos=c.vespo_k_pos,
        lambda_pos=c.vespo_lambda_pos, k_neg=c.vespo_k_neg, lambda_neg=c.vespo_lambda_neg,
        divisor=float(c.max_completion_length or 1) if POLICY_LOSSES[c.loss_type].share == "length" else divisor,
        bonus=0.0 if isinstance(c.entropy_coefficient, Tensor) else float(c.entropy_coefficient),
    )  # fmt: skip


def _select_items(config: GRPO) -> float | Tensor | None:
    """The divisor for types that have one."""
    return config.num_items_in_batch if POLICY_LOSSES[config.loss_type].share == "items" else None


def parse_sampler(rollout: Rollout) -> Sampler:
    return rollout.sampler if isinstance(rollout.sampler, Sampler) else Sampler(rollout.sampler)


def policy_loss(
    name: str, x: Tensor, head: Head | Tensor | torch.nn.Linear, target: Tensor, rollout: Rollout, config: GRPO,
    options: PolicyOptions, chunks: ChunkOptions,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss and metrics for both public functions."""
    if x.dim() != 3 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{name}: x must be (S, T, H) and target (S, T), got {tuple(x.shape)} and {tuple(target.shape)}."
        )
    S, T = target.shape

    def check(argument: str, t: Tensor | None, of_sequences: bool = False) -> Tensor | None:
        """Check a rollout tensor."""
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
        """An option as a 0-d tensor, or None if the option is a number, which the host knows."""
        if not isinstance(t, Tensor):
            return None
        if t.device.type != "cpu":  # a CPU tensor is a host number, which no kernel waits for
            _check_device(name, f"config.{argument}", t, x)
        return t.reshape(())

    hidden = rollout.ref if isinstance(rollout.ref, Hidden) else None
    sampled, ratio = parse_sampler(rollout)
    advantages = check("advantages", rollout.advantages, True)
    assert advantages is not None
    old = check("old", rollout.old, options.level == "total")
    reference = None if isinstance(rollout.ref, Hidden) else check("ref", rollout.ref)
    sampled, ratio = check("sampler", sampled), check("sampler.ratio", ratio, True)
    if options.mode == "none" and options.drift == math.inf:
        sampled = None  # nothing in the loss reads it
    if options.loss_type == "vespo" and ratio is not None and ratio.shape != (S, T):
        raise ValueError(f"{name}: vespo needs a token-level rollout.sampler.ratio, (S, T), got {tuple(ratio.shape)}.")
    if target.numel() == 0:
        # A quantile over no tokens does not exist.
        options = options._replace(top=1.0)
    bonus, items = number("entropy_coefficient", config.entropy_coefficient), _select_items(config)
    tensors = PolicyTensors(advantages, old, reference, sampled, ratio, number("num_items_in_batch", items), bonus)
    loss, results = token_loss(
        Policy.for_tensors(options, tensors), tensors, x, head, target, reference=hidden,
        ignore_index=config.ignore_index, temperature=config.temperature, chunks=chunks, name=name,
    )  # fmt: skip
    return loss, {"logprob": results.pop("logprob"), **results}


def _check_device(name: str, argument: str, t: Tensor, x: Tensor) -> None:
    if t.device != x.device:  # a kernel would read a host address
        raise ValueError(f"{name}: {argument} must be on x's device {x.device}, got {t.device}.")
