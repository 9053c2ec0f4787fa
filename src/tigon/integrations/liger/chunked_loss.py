"""Liger's losses with Liger's own signatures, however long: cross entropy, preferences, policies and distillation.

The functions of its chunked_loss.functional are here by their names; the modules fix their options. Tensors, results
and their order match Liger's. Losses of a head use the walk in `tigon.losses`: three matrix products per token, and a
fourth for a reference's head.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.integrations.liger import absent
from tigon.integrations.liger.cross_entropy import CrossEntropyOutput, HeadCrossEntropy, make_output, mark_correct
from tigon.integrations.liger.options import make_loss_module, without_effect
from tigon.integrations.liger.preference import DPO_TYPES, Formula, Result, Sequences, pair_loss, unpaired_loss
from tigon.losses.distillation import Distill, distill
from tigon.losses.head.head import Head, Hidden
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.losses.policy import GRPO, Rollout, Sampler, grpo
from tigon.ops.cross_entropy import CrossEntropy, cross_entropy

IGNORED = -100


def __getattr__(name: str) -> Any:
    raise AttributeError(absent(name, __name__))


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
            raise ValueError(f"liger_cross_entropy: {name} must be None, since reduction covers it, got {value!r}.")
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    config = CrossEntropy(
        ignore_index=ignore_index, reduction=reduction,  # type: ignore[arg-type]
        label_smoothing=label_smoothing, z_loss=lse_square_scale, softcap=softcap,
    )  # fmt: skip
    found = cross_entropy(input, target, weight, config=config, details=any(wanted))  # type: ignore[call-overload]
    if isinstance(found, Tensor):
        return found
    right = mark_correct(found.predicted, target, ignore_index)
    accuracy = right if reduction == "none" else found.accuracy
    return make_output(wanted, found.loss, found.z_loss, accuracy, found.predicted)


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
    name = "liger_fused_linear_cross_entropy"
    without_effect(name, chunk_mem_const=(chunk_mem_const, 1))
    loss = HeadCrossEntropy(
        name=name, ignore_index=ignore_index, lse_square_scale=lse_square_scale, label_smoothing=label_smoothing,
        reduction=reduction, softcap=softcap, accum_dtype=accum_dtype, use_token_scaling=use_token_scaling,
        wanted=(return_z_loss, return_token_accuracy, return_predicted_tokens),
    )  # fmt: skip
    return loss(input, weight, target, bias, ce_weight)


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
    reference = _read_reference(name, use_ref_model, ref_input, ref_weight, ref_bias)
    batch = Sequences(name, _input, Head(weight, bias), target, ignore_index, reference)
    weight_of_nll = alpha if compute_nll_loss else 0.0
    formula = Formula(
        loss_type, beta, average_log_prob, label_smoothing, tau=discopop_tau, alpha=weight_of_nll
    )  # fmt: skip
    return pair_loss(batch, formula, compute_nll_loss)


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
    name = "liger_fused_linear_orpo"
    without_effect(name, chunk_size=(chunk_size, 1))
    batch = Sequences(name, _input, Head(weight, bias), target, ignore_index)
    formula = Formula("orpo", beta, average=True, alpha=float(compute_nll_loss))
    return pair_loss(batch, formula, compute_nll_loss, nll_target)


def liger_fused_linear_cpo(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = True,
    compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
) -> Result:  # fmt: skip
    """CPO of pairs: −log σ(beta · difference) + alpha · NLL(chosen). Tensors and results as in DPO."""
    name = "liger_fused_linear_cpo"
    without_effect(name, chunk_size=(chunk_size, 1))
    batch = Sequences(name, _input, Head(weight, bias), target, ignore_index)
    formula = Formula(
        "contrast", beta, average_log_prob, label_smoothing, alpha=alpha if compute_nll_loss else 0.0
    )  # fmt: skip
    return pair_loss(batch, formula, compute_nll_loss)


def liger_fused_linear_simpo(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = False,
    compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
) -> Result:  # fmt: skip
    """SimPO of pairs: −log σ(beta · difference of means − gamma). Tensors and results as in DPO.

    compute_nll_loss adds alpha · NLL(chosen).
    """
    name = "liger_fused_linear_simpo"
    without_effect(name, chunk_size=(chunk_size, 1))
    batch = Sequences(name, _input, Head(weight, bias), target, ignore_index)
    formula = Formula(
        "contrast", beta, True, label_smoothing, gamma=gamma, alpha=alpha if compute_nll_loss else 0.0
    )  # fmt: skip
    return pair_loss(batch, formula, compute_nll_loss)


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
    without_effect(name, chunk_size=(chunk_size, 1))
    reference = _read_reference(name, use_ref_model, ref_input, ref_weight, ref_bias)
    batch = Sequences(name, _input, Head(weight, bias), target, ignore_index, reference)
    return unpaired_loss(batch, Formula("kto", beta, average_log_prob), preference_labels, kl)


def _read_reference(
    name: str, is_used: bool, x: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Hidden | None:
    if not is_used:
        return None
    if x is None or weight is None:
        raise ValueError(f"{name}: use_ref_model=True must come with ref_input and ref_weight.")
    return Hidden(x, Head(weight, bias))


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


# --------------------------------------------------------------------------------------------------------- policies


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
            f"{importance_sampling_level!r} and {beta}: otherwise Liger's mean includes masked tokens too."
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
    # Advantages of tokens, so that the clipped share counts tokens: beside one ratio a sequence it counts sequences.
    advantages = advantages.unsqueeze(1).expand_as(mask) if sequence else advantages
    rollout = Rollout(advantages, old_per_token_logps, ref, sampler)
    target = torch.where(mask, selected_token_ids, IGNORED)
    loss, found = grpo(_input, Head(weight, bias), target, rollout, config=config)
    clipped = found.get("cispo_clip_ratio", found.get("clip_ratio/region_mean"))
    clipped = torch.zeros_like(loss.detach()) if clipped is None else clipped  # "sapo" and "vespo" clip nothing
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
    student = Hidden(student_input, Head(student_weight, student_bias))
    teacher = Hidden(teacher_input, Head(teacher_weight, teacher_bias))
    return _distill(
        "jsd", student, teacher, true_labels, (weight_hard_loss, weight_soft_loss, 1.0), return_soft_hard_loss,
        beta=beta, ignore_index=ignore_index, temperature=temperature,
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
    student = Hidden(student_input, Head(student_weight, student_bias))
    teacher = Hidden(teacher_input, Head(teacher_weight, teacher_bias))
    return _distill(
        "cosine", student, teacher, true_labels, (weight_hard_loss, weight_soft_loss, beta), return_soft_hard_loss,
        ignore_index=ignore_index,
    )  # fmt: skip


def _distill(
    loss_type: Literal["jsd", "cosine"], student: Hidden, teacher: Hidden, target: Tensor,
    weights: tuple[float, float, float], parts: bool, *, ignore_index: int, **options: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """hard · cross entropy + soft · factor · soft loss, in one walk: the weights may be normalised to sum to one."""
    hard, soft, factor = weights
    soft *= factor
    total = hard + soft
    config = Distill(
        loss_type=loss_type, hard_weight=hard / total if total else 0.0, ignore_index=ignore_index, **options
    )
    loss, found = distill(student.x, student.head, teacher, target, config=config)
    loss = loss * total
    if not parts:
        return loss
    hard_loss = found.get("hard_loss")
    if hard_loss is None:  # the caller wants the hard loss despite a zero weight
        with torch.no_grad():
            count = (target != ignore_index).sum().clamp(min=1)
            divided = CrossEntropy(ignore_index=ignore_index, divisor=count)
            hard_loss = linear_cross_entropy(student.x, student.head, target, config=divided)
    return loss, found["soft_loss"] * factor, hard_loss


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
