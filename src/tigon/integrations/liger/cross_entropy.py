"""Liger's cross entropy of logits and of a head, as functions and as modules.

Losses are fp32 whatever the inputs are, and the logits are not overwritten. Where every target is ignored the loss is
0, as in Liger; torch returns NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tigon.integrations.liger.options import accumulate, make_loss_module, without_effect
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.head import Head
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.ops.cross_entropy import CrossEntropy, cross_entropy
from tigon.ops.linear.chunk_size import chunk_budget, chunk_rows
from tigon.ops.logprob import logprob


@dataclass
class CrossEntropyOutput:
    """A loss with the results that return_… asked for; what was not asked for is None."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


# ---------------------------------------------------------------------------------------------------- cross entropy


def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """`tigon.cross_entropy` by Liger's arguments. The logits are not overwritten.

    Args:
        input: logits (M, V), any float dtype. target: (M,) class indices.
        weight: class weights (V,).
        lse_square_scale: z_loss in `tigon.cross_entropy`.
        size_average, reduce: must be None; use `reduction`.
    Returns: the loss, () or (M,) with reduction="none"; or a `CrossEntropyOutput` if any return_… is set.
        token_accuracy is the share of counted rows that are right, a number per row with reduction="none";
        predicted_tokens (M,) are −1 where the target is ignored.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None:
            raise ValueError(f"liger_cross_entropy: {name} must be None, since reduction says it, got {value!r}.")
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    valid = target != ignore_index
    config = CrossEntropy(
        ignore_index=ignore_index, reduction=reduction,  # type: ignore[arg-type]
        label_smoothing=label_smoothing, z_loss=lse_square_scale, softcap=softcap,
    )  # fmt: skip
    found = cross_entropy(input, target, weight, config=config, details=any(wanted))  # type: ignore[call-overload]
    if isinstance(found, Tensor):
        return found
    accuracy = _correct(found.predicted, target, valid) if reduction == "none" else found.accuracy
    return _output(wanted, found.loss, found.z_loss, accuracy, found.predicted)


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """`tigon.linear_cross_entropy` by Liger's arguments.

    `tigon.linear_cross_entropy` has no argument for ce_weight, use_token_scaling and return_…. With any of these the
    loss goes through logit chunks that are recomputed in the backward pass: as little memory, a fourth matrix product.

    Args:
        input: (M, H). weight: (V, H). target: (M,) class indices. bias: (V,).
        ce_weight: class weights (V,).
        lse_square_scale: z_loss in `tigon.linear_cross_entropy`. ce_weight does not weight this term.
        accum_dtype: dtype in which the weight's gradient is summed: None for fp32, or the weight's dtype.
        chunk_mem_const: has no effect; chunks follow a budget in bytes.
    Returns: as `liger_cross_entropy`.
    """
    without_effect("liger_fused_linear_cross_entropy", chunk_mem_const=(chunk_mem_const, 1))
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    return head_cross_entropy(
        "liger_fused_linear_cross_entropy", input, weight, target, bias, ce_weight, wanted, None,
        ignore_index=ignore_index, lse_square_scale=lse_square_scale, label_smoothing=label_smoothing,
        reduction=reduction, softcap=softcap, accum_dtype=accum_dtype, use_token_scaling=use_token_scaling,
    )  # fmt: skip


def head_cross_entropy(
    name: str, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ce_weight: Tensor | None,
    wanted: tuple[bool, bool, bool], items: Tensor | float | None, *, ignore_index: int, lse_square_scale: float,
    label_smoothing: float, reduction: str, softcap: float | None, accum_dtype: torch.dtype | None,
    use_token_scaling: bool,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """wanted: z-loss, accuracy and predicted classes. items: the mean's divisor in place of the token count."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")
    summed = accumulate(name, accum_dtype, weight)
    valid = target != ignore_index
    count = valid.sum().clamp(min=1) if items is None else items
    if ce_weight is None and not use_token_scaling and not any(wanted):
        config = CrossEntropy(
            ignore_index=ignore_index, reduction=reduction,  # type: ignore[arg-type]
            z_loss=lse_square_scale, label_smoothing=label_smoothing, divisor=count if reduction == "mean" else None,
        )  # fmt: skip
        head, chunks = Head(weight, bias, softcap), ChunkOptions(accumulate=summed)
        return linear_cross_entropy(input, head, target, config=config, chunks=chunks)

    def rows(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        config = CrossEntropy(
            ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing, softcap=softcap
        )
        loss, _, _, predicted = cross_entropy(logits, target, ce_weight, config=config, details=True)
        z = torch.zeros_like(loss)
        if lse_square_scale:  # separate, since class weights do not apply to the z-loss
            z = _z_loss(logits, lse_square_scale, softcap).masked_fill(target == ignore_index, 0.0)
        if use_token_scaling:
            p = logprob(logits.detach(), target, ignore_index=ignore_index, softcap=softcap).logprob.exp()
            loss, z = loss * p, z * p
        return loss, z, predicted

    loss, z, predicted = in_chunks(rows, input, weight, bias, target, accum_dtype=accum_dtype)
    accuracy = _correct(predicted, target, valid)
    if reduction != "none":
        loss, z, accuracy = loss.sum(), z.sum(), accuracy.sum() / valid.sum()
    if reduction == "mean":
        weights = count
        if ce_weight is not None and items is None:
            weights = torch.where(valid, ce_weight.detach()[torch.where(valid, target, 0)], 0.0).sum()
            weights = torch.where(valid.any(), weights, 1.0)
        loss, z = loss / weights, z / count
    return _output(wanted, loss + z, z, accuracy, predicted) if any(wanted) else loss + z


def _z_loss(logits: Tensor, coefficient: float, softcap: float | None) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return coefficient * logits.logsumexp(-1).square()


def _correct(predicted: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    return ((predicted == target) & valid).float()


def _output(wanted: tuple[bool, ...], loss: Tensor, *others: Tensor) -> CrossEntropyOutput:
    return CrossEntropyOutput(
        loss, *(value.detach() if want else None for want, value in zip(wanted, others, strict=True))
    )


def in_chunks(
    rows: Callable[..., tuple[Tensor, ...]], x: Tensor, weight: Tensor, bias: Tensor | None, *beside: Tensor,
    accum_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Apply `rows` to the logits of x (M, H), a value per row, one chunk of logits at a time.

    The weight's gradient is summed over the chunks in accum_dtype, if given.
    """
    wide = weight if accum_dtype is None else weight.to(accum_dtype)

    def chunk(x: Tensor, *beside: Tensor) -> tuple[Tensor, ...]:
        return rows(F.linear(x, wide.to(weight.dtype), bias), *beside)

    M = x.shape[0]
    size = chunk_rows(M, weight.shape[0] * x.element_size(), chunk_budget(x.device))
    results = [
        checkpoint(chunk, *(t[start : start + size] for t in (x, *beside)), use_reentrant=False)
        for start in range(0, max(1, M), size)
    ]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


LigerCrossEntropyLoss = make_loss_module(
    "LigerCrossEntropyLoss", liger_cross_entropy, "_input=input target",
    "weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss return_token_accuracy "
    "return_predicted_tokens",
)  # fmt: skip
LigerFusedLinearCrossEntropyLoss = make_loss_module(
    "LigerFusedLinearCrossEntropyLoss", liger_fused_linear_cross_entropy,
    "lin_weight=weight _input=input target bias",
    "ce_weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss accum_dtype "
    "use_token_scaling return_token_accuracy return_predicted_tokens",
)  # fmt: skip


# -------------------------------------------------------------------------- the loss of a causal language model


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
    Returns: the loss, or a `CrossEntropyOutput` if any return_… is set.
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
        kwargs: as in `fixed_fused_linear_cross_entropy`. Models also pass arguments meant for other parts, which are
            ignored.
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
