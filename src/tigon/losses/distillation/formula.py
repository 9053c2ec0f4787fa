"""A row's loss as a value, `Formula`: everything a kernel launch depends on beside tensors."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tigon.losses.operator import record

# The types in `distill`; a kind is a type whose beta is resolved.
LossType = Literal["kl", "reverse_kl", "jsd", "tvd", "cosine"]
Kind = Literal["kl", "reverse", "jsd", "tvd", "cosine"]
Rest = Literal["tail", "renormalize", "drop"]

# A lower bound for the not-given classes' probability, where the student's is not 0: 1 − Σ p is no more accurate.
LEAST_REST = 1e-7


def resolve_kind(loss_type: str, beta: float) -> Kind:
    """jsd at its ends is a KL divergence."""
    if loss_type == "jsd" and beta in (0.0, 1.0):
        return "reverse" if beta else "kl"
    return "reverse" if loss_type == "reverse_kl" else loss_type  # type: ignore[return-value]


class Hard(IntEnum):
    """The cross entropy beside the soft loss."""

    NONE = 0
    SHARED = 1  # at temperature 1: shares the soft loss's softmax
    APART = 2  # at another temperature: needs a second sum


@record
class Transform(NamedTuple):
    """A transform for one side's logits: z = softcap · tanh(scale · x / softcap), or scale · x if softcap is 0."""

    softcap: float = 0.0
    scale: float = 1.0

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """z, and dz/dx."""
        z = logits * self.scale if self.scale != 1.0 else logits
        if not self.softcap:
            return z, self.scale
        t = torch.tanh(z / self.softcap)
        return self.softcap * t, self.scale * (1 - t * t)


class Weights(NamedTuple):
    """Factors on both gradients with respect to the logits z; the soft loss's factor includes 1 / temperature."""

    soft: float
    hard: float


class Formula(NamedTuple):
    """rest: "" with a teacher's head. gradient: the logits become the gradient, times `Rows.factor`."""

    kind: Kind
    rest: Rest | Literal[""]
    beta: float
    temperature: float
    weights: Weights
    ignore_index: int
    student: Transform
    teacher: Transform
    gradient: bool

    @property
    def hard(self) -> Hard:
        if not self.weights.hard:
            return Hard.NONE
        return Hard.SHARED if self.temperature == 1.0 else Hard.APART

    @property
    def k(self) -> float:
        """The factor that turns logit differences into base-2 logarithms, which kernels take."""
        return math.log2(math.e) / self.temperature

    @property
    def caps(self) -> tuple[bool, bool]:
        return self.student.softcap != 0.0, self.teacher.softcap != 0.0


def terms_and_slopes(formula: Formula, lq: Tensor, lp: Tensor) -> tuple[Tensor, Tensor]:
    """Each class's loss, and the derivative along lq, up to a multiple of q, which drops out for a distribution.

    lq, lp: log q and log p, natural. The torch path's side of `tigon.kernels.tiles.divergence.sides`.
    """
    kind, beta = formula.kind, formula.beta
    p, q = lp.exp(), lq.exp()
    # A class with probability 0 adds nothing, also where the logarithm is -inf.
    if kind == "kl":
        return torch.where(p == 0, 0.0, p * (lp - lq)), -p
    if kind == "reverse":
        terms = torch.where(q == 0, 0.0, q * (lq - lp))
        return terms, terms
    if kind == "tvd":
        return 0.5 * (p - q).abs(), 0.5 * q * torch.sign(q - p)
    log_m = log_or_zero(beta * p + (1 - beta) * q)
    of_q = (1 - beta) * torch.where(q == 0, 0.0, q * (lq - log_m))
    return beta * torch.where(p == 0, 0.0, p * (lp - log_m)) + of_q, of_q


def log_or_zero(p: Tensor) -> Tensor:
    """log p, and 0 for p = 0."""
    return torch.where(p == 0, 1.0, p).log()
