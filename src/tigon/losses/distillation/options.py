"""Distillation options, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from tigon.losses.distillation.formula import LossType, Rest
from tigon.losses.options import check_choice, check_positive, check_share

Reduction = Literal["batchmean", "mean", "sum"]
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
TOPK_LOSS_TYPES = tuple(kind for kind in LOSS_TYPES if kind != "cosine")


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Options for `distill`.

    Args:
        loss_type: "jsd", "kl" (forward: teacher ‖ student), "reverse_kl", "tvd" or "cosine".
        beta: weight of the teacher in the "jsd" mixture, in [0, 1].
        temperature: τ, divides both sides' logits for the soft loss; 1 for "cosine", which would not change.
        temperature_squared: multiply the soft loss by τ², as Hinton et al. do, so that its gradients do not shrink. TRL
            and Liger do not.
        hard_weight: h in [0, 1], the share of the cross entropy with target, at temperature 1.
        reduction: "batchmean" divides by the valid rows; "mean" divides the soft loss also by V, as torch's and TRL's
            elementwise mean does; "sum" does not divide. Without valid rows the loss is 0.
        divisor: replaces the valid-row count in both means: a number or a 0-d tensor (TRL's num_items_in_batch, the
            count for a whole gradient-accumulation step), without gradient.
        ignore_index: targets that do not count.
    Raises: ValueError for options that do not fit.
    """

    loss_type: LossType = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    temperature_squared: bool = False
    hard_weight: float = 0.0
    reduction: Reduction = "batchmean"
    divisor: Tensor | float | None = None
    ignore_index: int = -100

    def __post_init__(self) -> None:
        self.check("distill", LOSS_TYPES)
        if self.loss_type == "cosine" and self.temperature != 1.0:
            raise ValueError(f"distill: temperature must be 1 for loss_type='cosine', got {self.temperature}.")

    def check(self, name: str, loss_types: tuple[str, ...]) -> None:
        check_choice(name, "loss_type", self.loss_type, loss_types)
        check_choice(name, "reduction", self.reduction, get_args(Reduction))
        check_share(name, beta=self.beta, hard_weight=self.hard_weight)
        check_positive(name, temperature=self.temperature)
        if self.divisor is not None and self.reduction == "sum":
            raise ValueError(f"{name}: divisor goes with reduction='batchmean' or 'mean', got reduction='sum'.")
        if isinstance(self.divisor, Tensor) and self.divisor.dim() != 0:
            raise ValueError(
                f"{name}: divisor must be a number or a 0-d tensor, got shape {tuple(self.divisor.shape)}."
            )


@dataclass(frozen=True, kw_only=True)
class DistillTopK(Distill):
    """Options for `distill_topk`: those of `Distill`, over the classes that the teacher gave.

    Args:
        loss_type: "kl", "reverse_kl", "jsd" or "tvd".
        rest: the treatment of classes that were not given. "tail": they form an extra class with probability 1 − Σ p
            and 1 − Σ q, the teacher's at least 1e-7 where the student's is not 0. "renormalize": they are left out, and
            both sides' given probabilities are divided by their sums. "drop": they are left out, and nothing is
            divided: the loss is the given classes' share, which for "kl" may be negative.
        temperature: τ, divides the student's logits for the soft loss.
        beta: as in `Distill`.
        temperature_squared: as in `Distill`.
        hard_weight: as in `Distill`; the cross entropy is over all classes.
        reduction: as in `Distill`.
        divisor: as in `Distill`.
        ignore_index: as in `Distill`.
    """

    loss_type: LossType = "kl"
    rest: Rest = "tail"

    def __post_init__(self) -> None:
        self.check("distill_topk", TOPK_LOSS_TYPES)
        check_choice("distill_topk", "rest", self.rest, get_args(Rest))
