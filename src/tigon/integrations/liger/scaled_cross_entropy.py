"""Liger's negative log-likelihood and entropy of each token: of a head, of a head split by classes, of given logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.integrations.liger.options import without_effect
from tigon.losses.head.head import Head
from tigon.losses.linear_logprob import linear_logprob
from tigon.ops.logprob import logprob


class LigerFusedLinearScaledCrossEntropyFunction:
    """−log-probability of each token, and its entropy if that is asked for, by `tigon.linear_logprob`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100,
        m_tiles_per_cluster: int = 1, return_entropy: bool = False, selected_token_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """
        Args:
            _input: (M, H). weight: (V, H). target: (M,), class indices.
            temperature: divides the logits. ignore_index: rows with this target give 0.
            m_tiles_per_cluster: 1; it chooses how Liger computes.
            selected_token_ids: None; the log-probabilities of further classes are not computed here.
        Returns: (M,) fp32, or two of them with return_entropy. Both are differentiable.
        """
        if selected_token_ids is not None:
            raise ValueError(
                "LigerFusedLinearScaledCrossEntropyFunction: selected_token_ids must be None, since only the target's "
                "log-probability is computed here, got ids."
            )
        without_effect("LigerFusedLinearScaledCrossEntropyFunction", m_tiles_per_cluster=(m_tiles_per_cluster, 1))
        return _rows(_input, weight, target, temperature, ignore_index, return_entropy)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """As `LigerFusedLinearScaledCrossEntropyFunction`, of a head whose classes are split over tp_group."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0,
        ignore_index: int = -100, tiles_per_reduce: int = 1, return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """
        Args:
            weight: (V / ranks, H), the rows of this rank's classes. target: (M,), classes of the whole head.
            tiles_per_reduce: 1; it chooses how Liger computes.
        Returns: as `LigerFusedLinearScaledCrossEntropyFunction`. The gradient of _input is the sum over all ranks.
        """
        without_effect("LigerFusedLinearScaledCrossEntropyTPFunction", tiles_per_reduce=(tiles_per_reduce, 1))
        return _rows(_input, weight, target, temperature, ignore_index, return_entropy, group=tp_group)


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0, ignore_index: int = -100,
    tiles_per_reduce: int = 1, return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`LigerFusedLinearScaledCrossEntropyTPFunction` as a function."""
    return LigerFusedLinearScaledCrossEntropyTPFunction.apply(
        input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy
    )


def _rows(
    x: Tensor, weight: Tensor, target: Tensor, temperature: float, ignore_index: int, entropy: bool, group: Any = None
) -> Tensor | tuple[Tensor, Tensor]:
    head = Head(weight, group=group)
    found = linear_logprob(x, head, target, temperature=temperature, ignore_index=ignore_index)
    return (-found.logprob, found.entropy) if entropy else -found.logprob


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of input_ids' last T tokens under logits (B, T + 1, V), by `tigon.logprob`, without a gradient.

    Args:
        mask: (B, T) or longer; where it is 0 the result is 0.
    Returns: (B, T), fp32.
    """
    T = logits.shape[1] - 1
    ids = input_ids[:, input_ids.shape[1] - T :]
    found = logprob(logits[:, :T], ids, temperature=temperature).logprob
    return found if mask is None else found.masked_fill(mask[:, mask.shape[1] - T :] == 0, 0.0)
