"""LigerFusedLinearGRPOLoss over tigon.losses.grpo, with the two numbers that Liger returns beside the loss."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.integrations.liger.options import make_loss_module, without_effect
from tigon.losses.head.head import Head, Hidden
from tigon.losses.policy import GRPO, Rollout, Sampler, grpo

Result = tuple[Tensor, tuple[Tensor, ...]]
IGNORED = -100


def liger_fused_linear_grpo(
    _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor,
    bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None, old_per_token_logps: Tensor | None = None,
    ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    beta: float = 0.04, epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
    max_completion_length: int | None = None, importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
    compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1, vllm_is_ratio: Tensor | None = None,
    delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    num_items_in_batch: float | Tensor | None = None,
) -> Result:  # fmt: skip
    """`tigon.losses.grpo`, with arguments by Liger's names.

    Args:
        _input: (S, T, H). selected_token_ids, attention_mask: (S, T). advantages: (S,).
        ref_per_token_logps, or ref_input, ref_weight and ref_bias: the reference, read with use_ref_model only.
        vllm_is_ratio: (S,), (S, 1) or (S, T), multiplies the loss.
        num_items_in_batch: tokens over all ranks, divided by the rank count. None: counts this batch's tokens over all
            ranks.
        loss_type: "luspo" needs importance_sampling_level="sequence" and beta=0: otherwise Liger's mean counts masked
            tokens, which `tigon.losses.grpo` leaves out.
    Returns: the loss, the mean KL divergence over tokens, unless beta is 0, and the mean clipped share.
    """
    name = "liger_fused_linear_grpo"
    without_effect(name, chunk_size=(chunk_size, 1))
    sequence = importance_sampling_level == "sequence"
    if sequence and loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(f"{name}: importance_sampling_level must be 'token' for loss_type={loss_type!r}.")
    if loss_type == "luspo" and (not sequence or beta):
        raise ValueError(
            f"{name}: loss_type='luspo' must have importance_sampling_level='sequence' and beta=0, got "
            f"{importance_sampling_level!r} and {beta}: elsewhere Liger's mean is over masked tokens too."
        )
    if use_ref_model and ref_per_token_logps is None and ref_input is None:
        raise ValueError(f"{name}: use_ref_model=True must come with ref_per_token_logps or ref_input.")
    if use_ref_model and ref_per_token_logps is not None and ref_input is not None:
        warnings.warn(f"{name}: ref_input has no effect beside ref_per_token_logps.", stacklevel=2)
    mask = attention_mask.bool()
    ref: Tensor | Hidden | None = None
    if use_ref_model:
        ref = ref_per_token_logps
    if use_ref_model and ref is None:
        if ref_input is None or ref_weight is None:
            raise ValueError(f"{name}: ref_input must come with ref_weight.")
        ref = Hidden(ref_input, Head(ref_weight, ref_bias))
    config = GRPO(
        loss_type=loss_type, importance_sampling_level=importance_sampling_level,  # type: ignore[arg-type]
        epsilon=epsilon_low, epsilon_high=epsilon_high, delta=delta,
        beta=0.0 if ref is None else beta,  # without a reference the policy itself is the reference
        use_bias_correction_kl=use_bias_correction_kl,
        num_items_in_batch=_items(mask, num_items_in_batch) if loss_type in ("dapo", "cispo", "vespo") else None,
        max_completion_length=max_completion_length, temperature=temperature,
        sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg, vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos, vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
        ignore_index=IGNORED,
    )  # fmt: skip
    sampler = Sampler(ratio=_ratio(name, vllm_is_ratio, mask, loss_type))
    rollout = Rollout(advantages, old_per_token_logps, ref, sampler)
    target = torch.where(mask, selected_token_ids, IGNORED)
    loss, found = grpo(_input, Head(weight, bias), target, rollout, config=config)
    clipped = _clipped(
        found["logprob"], old_per_token_logps, mask, advantages, loss_type, sequence, epsilon_low, epsilon_high
    )
    kl = (found["kl"] if ref is not None else torch.zeros_like(clipped),) if beta else ()
    return loss, (*kl, clipped)


def _ratio(name: str, ratio: Tensor | None, mask: Tensor, loss_type: str) -> Tensor | None:
    if ratio is None:
        return None
    S, T = mask.shape
    if ratio.shape not in ((S,), (S, 1), (S, T)):
        raise ValueError(f"{name}: vllm_is_ratio must be ({S},), ({S}, 1) or ({S}, {T}), got {tuple(ratio.shape)}.")
    if loss_type == "vespo" and (ratio.shape != (S, T) or T == 1):
        # Multiplies the tokens' ratios once: through the first token's.
        first = mask & (mask.cumsum(1) == 1)
        return torch.where(first, ratio.reshape(S, 1), 1.0)
    return ratio


def _items(mask: Tensor, items: float | Tensor | None) -> Tensor | float | None:
    """A rank's divisor, chosen so that the mean over ranks is the mean over all their tokens."""
    if not (dist.is_available() and dist.is_initialized()):
        return items
    if items is None:
        items = mask.sum().float()
        dist.all_reduce(items)
    return items / dist.get_world_size()


def _clipped(
    logprob: Tensor, old: Tensor | None, mask: Tensor, advantages: Tensor, loss_type: str, sequence: bool, low: float,
    high: float,
) -> Tensor:  # fmt: skip
    """The share of tokens whose ratio is clipped, 0-d."""
    if loss_type in ("sapo", "vespo"):
        return torch.zeros_like(logprob).sum()
    old = logprob if old is None else old
    log_ratio = torch.where(mask, logprob - old, 0.0)
    if sequence:
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio, positive = log_ratio.exp(), advantages.unsqueeze(1) > 0
    if loss_type == "cispo":
        cut = (ratio > high) & positive
    else:
        cut = ((ratio > 1 + high) & positive) | ((ratio < 1 - low) & (advantages.unsqueeze(1) < 0))
    return (cut & mask).sum() / mask.sum().clamp(min=1)


def _check_positive(name: str, **options: Any) -> None:
    for option in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):
        if options[option] is not None and options[option] <= 0:
            raise ValueError(f"{name}: {option} must be positive, got {options[option]}.")


LigerFusedLinearGRPOLoss = make_loss_module(
    "LigerFusedLinearGRPOLoss", liger_fused_linear_grpo,
    "_input lin_weight=weight selected_token_ids attention_mask advantages bias ref_per_token_logps "
    "old_per_token_logps ref_input ref_weight ref_bias vllm_is_ratio num_items_in_batch",
    "beta compiled use_ref_model chunk_size epsilon_low epsilon_high loss_type max_completion_length "
    "importance_sampling_level sapo_temperature_pos sapo_temperature_neg temperature delta use_bias_correction_kl "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", check=_check_positive,
)  # fmt: skip
