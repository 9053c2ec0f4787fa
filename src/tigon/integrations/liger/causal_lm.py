"""Liger's loss of a causal language model, for forwards that people have written around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.integrations.liger.cross_entropy import CrossEntropyOutput, head_cross_entropy
from tigon.integrations.liger.options import without_effect


def unpack_cross_entropy_result(result: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, z-loss, accuracy and predicted classes of a loss, of a `CrossEntropyOutput` or of a tuple of some."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    found = tuple(result) if isinstance(result, tuple) else (result,)
    return (*found, None, None, None)[:4]


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor, lm_head_weight: Tensor, target: Tensor, num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100, final_logit_softcapping: float | None = None, accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, **kwargs: Any,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """`liger_fused_linear_cross_entropy`, whose mean is over num_items_in_batch if that is given.

    Args:
        kwargs: bias, ce_weight, lse_square_scale, label_smoothing, use_token_scaling.
    Returns: the loss, or a `CrossEntropyOutput` if one of return_… is set.
    """
    name = "fixed_fused_linear_cross_entropy"
    without_effect(name, chunk_mem_const=(kwargs.pop("chunk_mem_const", 1), 1))
    options = {"lse_square_scale": 0.0, "label_smoothing": 0.0, "use_token_scaling": False}
    bias, ce_weight = kwargs.pop("bias", None), kwargs.pop("ce_weight", None)
    unknown = set(kwargs) - set(options)
    if unknown:
        raise TypeError(f"{name}: got an unexpected keyword argument {min(unknown)!r}.")
    return head_cross_entropy(
        name, hidden_states, lm_head_weight, target, bias, ce_weight,
        (False, return_token_accuracy, return_predicted_tokens), num_items_in_batch, ignore_index=ignore_index,
        reduction="mean", softcap=final_logit_softcapping, accum_dtype=accum_dtype, **{**options, **kwargs},
    )  # fmt: skip


def LigerForCausalLMLoss(
    hidden_states: Tensor, lm_head_weight: Tensor, labels: Tensor, hidden_size: int,
    num_items_in_batch: int | Tensor | None = None, ignore_index: int = -100, shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, **kwargs: Any,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """`fixed_fused_linear_cross_entropy` of labels, which it shifts by one: position t predicts the label at t + 1.

    Args:
        hidden_states: (B, T, H). labels: (B, T), or shift_labels, shifted already. hidden_size: H.
        kwargs: those of `fixed_fused_linear_cross_entropy`. Models hand on others too, which are for other parts.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    known = ("bias", "ce_weight", "lse_square_scale", "label_smoothing", "use_token_scaling", "accum_dtype")
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size), lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device), num_items_in_batch, ignore_index, final_logit_softcapping,
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in known},
    )  # fmt: skip
