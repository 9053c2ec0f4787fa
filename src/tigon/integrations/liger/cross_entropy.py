"""Liger's cross entropy of a head, in chunks of logits, and the loss of a causal language model.

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

from tigon.integrations.liger.options import accumulate, without_effect
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


# eq=False: Dynamo before torch 2.13 hashes the object while it has no attributes yet.
@dataclass(frozen=True, kw_only=True, eq=False)
class HeadCrossEntropy:
    """The cross entropy of a head's logits, with Liger's options.

    name: the caller, for messages. wanted: z-loss, accuracy and predicted classes. items: the mean's divisor in place
    of the token count.
    """

    name: str
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    wanted: tuple[bool, bool, bool] = (False, False, False)
    items: Tensor | float | None = None

    def __call__(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ce_weight: Tensor | None
    ) -> Tensor | CrossEntropyOutput:
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"{self.name}: reduction must be 'mean', 'sum' or 'none', got {self.reduction!r}.")
        summed = accumulate(self.name, self.accum_dtype, weight)
        valid = target != self.ignore_index
        count = valid.sum().clamp(min=1) if self.items is None else self.items
        if ce_weight is None and not self.use_token_scaling and not any(self.wanted):
            config = CrossEntropy(
                ignore_index=self.ignore_index, reduction=self.reduction,  # type: ignore[arg-type]
                z_loss=self.lse_square_scale, label_smoothing=self.label_smoothing,
                divisor=count if self.reduction == "mean" else None,
            )  # fmt: skip
            head, chunks = Head(weight, bias, self.softcap), ChunkOptions(accumulate=summed)
            return linear_cross_entropy(x, head, target, config=config, chunks=chunks)

        def rows(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            return self._rows(logits, target, ce_weight)

        loss, z, predicted = in_chunks(rows, x, weight, bias, target, accum_dtype=self.accum_dtype)
        accuracy = mark_correct(predicted, target, self.ignore_index)
        if self.reduction != "none":
            loss, z, accuracy = loss.sum(), z.sum(), accuracy.sum() / valid.sum()
        if self.reduction == "mean":
            weights = count
            if ce_weight is not None and self.items is None:
                weights = torch.where(valid, ce_weight.detach()[torch.where(valid, target, 0)], 0.0).sum()
                weights = torch.where(valid.any(), weights, 1.0)
            loss, z = loss / weights, z / count
        return make_output(self.wanted, loss + z, z, accuracy, predicted) if any(self.wanted) else loss + z

    def _rows(self, logits: Tensor, target: Tensor, ce_weight: Tensor | None) -> tuple[Tensor, ...]:
        """Each row's loss, z-loss and predicted class."""
        config = CrossEntropy(
            ignore_index=self.ignore_index, reduction="none", label_smoothing=self.label_smoothing, softcap=self.softcap
        )
        loss, _, _, predicted = cross_entropy(logits, target, ce_weight, config=config, details=True)
        z = torch.zeros_like(loss)
        if self.lse_square_scale:  # separate, since class weights do not apply to the z-loss
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if self.softcap is not None:
                wide = self.softcap * torch.tanh(wide / self.softcap)
            z = self.lse_square_scale * wide.logsumexp(-1).square()
            z = z.masked_fill(target == self.ignore_index, 0.0)
        if self.use_token_scaling:
            scale = logprob(logits.detach(), target, ignore_index=self.ignore_index, softcap=self.softcap).logprob.exp()
            loss, z = loss * scale, z * scale
        return loss, z, predicted


def mark_correct(predicted: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """1 where the prediction is the target, 0 elsewhere and where the target is ignored."""
    return ((predicted == target) & (target != ignore_index)).float()


def make_output(wanted: tuple[bool, ...], loss: Tensor, *others: Tensor) -> CrossEntropyOutput:
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
    bias, ce_weight = kwargs.pop("bias", None), kwargs.pop("ce_weight", None)
    unknown = set(kwargs) - {"lse_square_scale", "label_smoothing", "use_token_scaling"}
    if unknown:
        raise TypeError(f"{name}: got an unexpected keyword argument {min(unknown)!r}.")
    loss = HeadCrossEntropy(
        name=name, ignore_index=ignore_index, softcap=final_logit_softcapping, accum_dtype=accum_dtype,
        wanted=(False, return_token_accuracy, return_predicted_tokens), items=num_items_in_batch, **kwargs,
    )  # fmt: skip
    return loss(hidden_states, lm_head_weight, target, bias, ce_weight)


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
