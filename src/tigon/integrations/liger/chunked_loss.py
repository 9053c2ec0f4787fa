"""Liger's losses of a head for preferences, policies and distillation, by the names of its chunked_loss.

The functions match chunked_loss.functional; the modules fix their options. Tensors, results and their order match
Liger's. They use the walk in `tigon.losses`: three matrix products per token, and a fourth for a reference's head.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tigon.integrations.liger import absent
from tigon.integrations.liger.options import make_loss_module, without_effect
from tigon.integrations.liger.pairs import DPO_TYPES, pairwise, unpaired
from tigon.integrations.liger.policy import LigerFusedLinearGRPOLoss, liger_fused_linear_grpo
from tigon.losses.distillation import Distill, distill
from tigon.losses.head.head import Head, Hidden
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.ops.cross_entropy import CrossEntropy

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
    "liger_fused_linear_cosine",
    "liger_fused_linear_cpo",
    "liger_fused_linear_dpo",
    "liger_fused_linear_grpo",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kto",
    "liger_fused_linear_orpo",
    "liger_fused_linear_simpo",
]

Result = tuple[Tensor, tuple[Tensor, ...]]


def __getattr__(name: str) -> Any:
    raise AttributeError(absent(name, __name__))


# ------------------------------------------------------------------------------------------------------ preferences
#
# The pair losses take x (2B, T, H), B chosen sequences and then the rejected sequences, and target (2B, T). They return
# the loss and chosen_logps (B,), rejected_logps (B,), the mean logits of the chosen and of the rejected (over all
# positions), the chosen's negative log-likelihood, chosen_rewards (B,), rejected_rewards (B,).


def liger_fused_linear_dpo(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, ignore_index: int = -100, beta: float = 0.1,
    compute_nll_loss: bool = False, compiled: bool = True, use_ref_model: bool = True,
    average_log_prob: bool = False, chunk_size: int = 1, loss_type: str = "sigmoid", label_smoothing: float = 0.0,
    discopop_tau: float = 0.05, alpha: float = 1.0,
) -> Result:  # fmt: skip
    """DPO of pairs, with the formulas of `tigon.losses.dpo`.

    Args:
        _input: (2B, T, H), B chosen sequences, then the rejected. weight: (V, H). target: (2B, T).
        ref_input, ref_weight, ref_bias: the reference's, with the same shapes; unused with use_ref_model=False.
        compute_nll_loss: add alpha · NLL(chosen).
        compiled, chunk_size: have no effect.
    Returns: the loss, and a tuple: chosen_logps (B,), rejected_logps (B,), the mean logits of the chosen and of the
        rejected, the chosen's NLL, chosen_rewards (B,), rejected_rewards (B,).
    """
    name = "liger_fused_linear_dpo"
    without_effect(name, chunk_size=(chunk_size, 1))
    _check_dpo(name, loss_type, label_smoothing)
    if use_ref_model and (ref_input is None or ref_weight is None):
        raise ValueError(f"{name}: use_ref_model=True must come with ref_input and ref_weight.")
    reference = (ref_input, ref_weight, ref_bias) if use_ref_model else (None, None, None)
    return pairwise(
        name, loss_type, _input, weight, target, bias, reference, beta=beta, smoothing=label_smoothing,
        tau=discopop_tau, alpha=alpha if compute_nll_loss else None, average=average_log_prob,
        ignore_index=ignore_index,
    )  # fmt: skip


def liger_fused_linear_orpo(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    beta: float = 0.1, compute_nll_loss: bool = True, nll_target: Tensor | None = None, compiled: bool = True,
    chunk_size: int = 1,
) -> Result:  # fmt: skip
    """ORPO of pairs; tensors as in `liger_fused_linear_dpo`.

    Args:
        nll_target: (2B, T), NLL labels, which TRL takes over prompt and completion. Where target counts too, both must
            be the same token: if not, the loss is NaN.
    Returns: as `liger_fused_linear_dpo`, and the mean log σ(log odds ratio) and mean log odds ratio.
    """
    without_effect("liger_fused_linear_orpo", chunk_size=(chunk_size, 1))
    return pairwise(
        "liger_fused_linear_orpo", "orpo", _input, weight, target, bias, beta=beta,
        alpha=1.0 if compute_nll_loss else None, average=True, nll_target=nll_target, ignore_index=ignore_index,
    )  # fmt: skip


def liger_fused_linear_cpo(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = True,
    compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
) -> Result:  # fmt: skip
    """CPO of pairs: −log σ(beta · difference) + alpha · NLL(chosen). Tensors and results as in DPO."""
    without_effect("liger_fused_linear_cpo", chunk_size=(chunk_size, 1))
    return pairwise(
        "liger_fused_linear_cpo", "contrast", _input, weight, target, bias, beta=beta, smoothing=label_smoothing,
        alpha=alpha if compute_nll_loss else None, average=average_log_prob, ignore_index=ignore_index,
    )  # fmt: skip


def liger_fused_linear_simpo(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = False,
    compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
) -> Result:  # fmt: skip
    """SimPO of pairs: −log σ(beta · difference of means − gamma). Tensors and results as in DPO.

    compute_nll_loss adds alpha · NLL(chosen).
    """
    without_effect("liger_fused_linear_simpo", chunk_size=(chunk_size, 1))
    return pairwise(
        "liger_fused_linear_simpo", "contrast", _input, weight, target, bias, beta=beta, smoothing=label_smoothing,
        gamma=gamma, alpha=alpha if compute_nll_loss else None, average=True, ignore_index=ignore_index,
    )  # fmt: skip


def liger_fused_linear_kto(
    _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor, bias: Tensor | None = None,
    ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    kl: Tensor | float | None = None, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True,
    use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
) -> Result:  # fmt: skip
    """KTO of sequences: the mean of 1 − σ(±beta · (log-probability − reference − kl)).

    Args:
        _input: (S, T, H). target: (S, T). preference_labels: (S,) bool, True for the chosen.
        kl: a number, a one-element tensor, or (S,), subtracted unchanged; None is 0.
    Returns: the loss, and sums over the chosen and over the rejected: log-probabilities, logits, rewards.
    """
    name = "liger_fused_linear_kto"
    if preference_labels is None:
        raise ValueError(f"{name}: preference_labels must be (S,) bool, got None.")
    without_effect(name, chunk_size=(chunk_size, 1))
    if use_ref_model and (ref_input is None or ref_weight is None):
        raise ValueError(f"{name}: use_ref_model=True must come with ref_input and ref_weight.")
    reference = (ref_input, ref_weight, ref_bias) if use_ref_model else (None, None, None)
    return unpaired(
        name, _input, weight, target, preference_labels, bias, reference, kl=kl, beta=beta, average=average_log_prob,
        ignore_index=ignore_index,
    )  # fmt: skip


def _check_dpo(name: str, loss_type: str, label_smoothing: float, **_: Any) -> None:
    if loss_type not in DPO_TYPES:
        raise ValueError(
            f"{name}: loss_type must be one of {', '.join(DPO_TYPES)}, got {loss_type!r}; tigon.losses.dpo has more."
        )
    if loss_type == "exo_pair" and label_smoothing <= 0:
        raise ValueError(f"{name}: label_smoothing must be above 0 for 'exo_pair', got {label_smoothing}.")
    if loss_type == "robust" and not 0 <= label_smoothing < 0.5:
        raise ValueError(f"{name}: label_smoothing must lie in [0, 0.5) for 'robust', got {label_smoothing}.")


LigerFusedLinearDPOLoss = make_loss_module(
    "LigerFusedLinearDPOLoss", liger_fused_linear_dpo,
    "lin_weight=weight _input target bias ref_input ref_weight ref_bias",
    "ignore_index beta alpha compute_nll_loss compiled use_ref_model average_log_prob chunk_size loss_type "
    "label_smoothing discopop_tau", check=_check_dpo,
)  # fmt: skip
LigerFusedLinearORPOLoss = make_loss_module(
    "LigerFusedLinearORPOLoss", liger_fused_linear_orpo, "lin_weight=weight _input target bias nll_target",
    "ignore_index beta compute_nll_loss compiled chunk_size",
)  # fmt: skip
LigerFusedLinearCPOLoss = make_loss_module(
    "LigerFusedLinearCPOLoss", liger_fused_linear_cpo, "lin_weight=weight _input target bias",
    "ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size",
)  # fmt: skip
LigerFusedLinearSimPOLoss = make_loss_module(
    "LigerFusedLinearSimPOLoss", liger_fused_linear_simpo, "lin_weight=weight _input target bias",
    "ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size", compute_nll_loss=True,
)  # fmt: skip
LigerFusedLinearKTOLoss = make_loss_module(
    "LigerFusedLinearKTOLoss", liger_fused_linear_kto,
    "_input lin_weight=weight target bias preference_labels ref_input ref_weight ref_bias kl",
    "ignore_index beta compiled use_ref_model average_log_prob chunk_size", use_ref_model=False,
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------- distillation
#
# These losses return the loss, or with return_soft_hard_loss also the soft and the hard loss: means over targets that
# count.


def liger_fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, true_labels: Tensor,
    student_bias: Tensor | None = None, teacher_bias: Tensor | None = None, weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """weight_hard_loss · cross entropy + weight_soft_loss · JSD: `tigon.losses.distill` with loss_type="jsd".

    Args:
        student_input, teacher_input: (M, H), each model's own width. student_weight, teacher_weight: (V, H).
        true_labels: (M,) class indices.
        compiled, chunk_size: have no effect.
    Returns: the loss, or with return_soft_hard_loss the loss, the soft and the hard loss: means over counted targets.
    """
    without_effect("liger_fused_linear_jsd", chunk_size=(chunk_size, 1024))
    return _distill(
        "jsd", student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
        weight_hard_loss, weight_soft_loss, 1.0, return_soft_hard_loss, beta=beta, ignore_index=ignore_index,
        temperature=temperature,
    )  # fmt: skip


def liger_fused_linear_cosine(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, true_labels: Tensor,
    student_bias: Tensor | None = None, teacher_bias: Tensor | None = None, weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """weight_hard_loss · cross entropy + weight_soft_loss · beta · (1 − cosine): loss_type="cosine" of `distill`.

    Arguments and results are those of `liger_fused_linear_jsd`. temperature has no effect: cosines are scale-invariant.
    """
    without_effect("liger_fused_linear_cosine", chunk_size=(chunk_size, 1024))
    return _distill(
        "cosine", student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias,
        teacher_bias, weight_hard_loss, weight_soft_loss, beta, return_soft_hard_loss, ignore_index=ignore_index,
    )  # fmt: skip


def _distill(
    loss_type: Literal["jsd", "cosine"], x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor,
    target: Tensor, bias: Tensor | None, teacher_bias: Tensor | None, hard: float, soft: float, of_soft: float,
    parts: bool, ignore_index: int, **options: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """hard · cross entropy + soft · of_soft · soft loss, in one walk: the weights may be normalised to sum to one."""
    soft *= of_soft
    total = hard + soft
    head, teacher = Head(weight, bias), Hidden(teacher_x, Head(teacher_weight, teacher_bias))
    config = Distill(
        loss_type=loss_type, hard_weight=hard / total if total else 0.0, ignore_index=ignore_index, **options
    )
    loss, found = distill(x, head, teacher, target, config=config)
    loss = loss * total
    if not parts:
        return loss
    hard_loss = found.get("hard_loss")
    if hard_loss is None:  # the caller wants the hard loss despite a zero weight
        with torch.no_grad():
            count = (target != ignore_index).sum().clamp(min=1)
            hard_loss = linear_cross_entropy(
                x, head, target, config=CrossEntropy(ignore_index=ignore_index, divisor=count)
            )
    return loss, found["soft_loss"] * of_soft, hard_loss


def _check_temperature(name: str, temperature: float, **_: Any) -> None:
    if temperature == 0:
        raise ValueError(f"{name}: temperature must not be 0.")


_TENSORS = "student_input student_weight teacher_input teacher_weight true_labels student_bias teacher_bias"
_OPTIONS = "weight_hard_loss weight_soft_loss beta ignore_index temperature compiled chunk_size return_soft_hard_loss"
LigerFusedLinearJSDLoss = make_loss_module(
    "LigerFusedLinearJSDLoss", liger_fused_linear_jsd, _TENSORS, _OPTIONS, check=_check_temperature
)
LigerFusedLinearCosineSimilarityLoss = make_loss_module(
    "LigerFusedLinearCosineSimilarityLoss", liger_fused_linear_cosine, _TENSORS, _OPTIONS, check=_check_temperature
)
