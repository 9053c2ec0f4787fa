"""Preference loss options, checked when they are made, and a trainer's unpaired completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from tigon.losses.head.head import Hidden
from tigon.losses.options import check_choice, check_positive, check_share, check_smoothing
from tigon.losses.preference.families import DPO_LOSSES, CPOType, Divergence, DPOType, KTOType


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Options for `dpo`, by TRL's names.

    Args:
        loss_type: a type from the table in docs/losses/preference.md, such as "sigmoid", "ipo" or "sft", or several,
            which are added up.
        loss_weights: a weight for each of several types; 1 by default.
        beta: β > 0; for "ipo" the paper's τ, for "sppo_hard" the paper's 1 / η.
        label_smoothing: in [0, 1), for "robust" (below 0.5), "exo_pair" (above 0), "aot" and "aot_unpaired".
        reference_free: a reference that finds all completions equally likely, in place of `ref`.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence", which keeps the policy
            near the reference. For types that depend only on pairs' r.
        f_alpha_divergence_coef: α for "alpha_divergence".
        ld_alpha: in [0, 1]: weight of tokens in a pair's longer completion beyond the shorter completion's length.
            Given reference log-probabilities have to be computed with the same ld_alpha.
        discopop_tau: temperature for "discopop".
        bco_delta: "bco_pair" subtracts this from the rewards, a number or 0-d tensor: the running mean of
            (rewards/chosen + rewards/rejected) / 2. 0 by default, as in TRL.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    Raises: ValueError for options that do not fit or do not go together.
    """

    loss_type: DPOType | Sequence[DPOType] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    reference_free: bool = False
    f_divergence_type: Divergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    discopop_tau: float = 0.05
    bco_delta: Tensor | float | None = None
    temperature: float = 1.0
    ignore_index: int = -100

    @property
    def types(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def weights(self) -> tuple[float, ...]:
        return (1.0,) * len(self.types) if self.loss_weights is None else tuple(self.loss_weights)

    def __post_init__(self) -> None:
        types, divergence = self.types, self.f_divergence_type
        for name in types or ("",):
            check_choice("dpo", "loss_type", name, tuple(DPO_LOSSES))
        if len(self.weights) != len(types):
            raise ValueError(f"dpo: loss_weights must hold one weight for each of {types}, got {self.weights}.")
        check_positive("dpo", beta=self.beta, discopop_tau=self.discopop_tau)
        check_smoothing("dpo", self.label_smoothing)
        if "robust" in types and self.label_smoothing >= 0.5:
            raise ValueError(f"dpo: label_smoothing must be below 0.5 for 'robust', got {self.label_smoothing}.")
        if "exo_pair" in types and self.label_smoothing == 0:
            raise ValueError("dpo: label_smoothing must be above 0 for 'exo_pair' (its paper has 1e-3), got 0.")
        check_choice("dpo", "f_divergence_type", divergence, get_args(Divergence))
        only = sorted(name for name in set(types) if not DPO_LOSSES[name].any_divergence)
        if divergence != "reverse_kl" and only:
            raise ValueError(
                f"dpo: f_divergence_type must be 'reverse_kl' for {only}, whose losses depend on more than the reward "
                f"difference, got {divergence!r}."
            )
        check_share("dpo", ld_alpha=self.ld_alpha)
        if self.bco_delta is not None and "bco_pair" not in types:
            raise ValueError(f"dpo: bco_delta must be left out without 'bco_pair', got it for {types}.")


@dataclass(frozen=True, kw_only=True)
class ORPO:
    """Options for `orpo`.

    Args:
        beta: β > 0, the paper's λ.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    """

    beta: float = 0.1
    temperature: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_positive("orpo", beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class CPO:
    """Options for `cpo`, by TRL's names.

    Args:
        loss_type: "sigmoid"; "hinge": relu(1 − β m); "ipo": (m − 1 / 2β)²; "simpo": −log σ(β m − simpo_gamma);
            "alphapo": "simpo" with cpo_alpha = 0. The last three have mean log-probabilities in place of sums.
        beta: β > 0.
        label_smoothing: in [0, 1), for "sigmoid" and "simpo".
        cpo_alpha: weight of the chosen's NLL.
        simpo_gamma: the target margin for "simpo".
        alpha: not 0 for AlphaPO's r = (1 − π(y)^−alpha) / alpha.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    """

    loss_type: CPOType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    cpo_alpha: float = 1.0
    simpo_gamma: float = 0.5
    alpha: float = 0.0
    temperature: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_choice("cpo", "loss_type", self.loss_type, get_args(CPOType))
        check_positive("cpo", beta=self.beta)
        check_smoothing("cpo", self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class SimPO:
    """Options for `simpo`.

    Args:
        loss_type: "sigmoid", or "hinge": relu(1 − β (r_chosen − r_rejected) + γ).
        beta: β > 0.
        gamma_beta_ratio: γ / β, the margin in nats a token.
        label_smoothing: in [0, 1), for "sigmoid".
        sft_weight: weight of the chosen's NLL.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    """

    loss_type: Literal["sigmoid", "hinge"] = "sigmoid"
    beta: float = 2.0
    gamma_beta_ratio: float = 0.25
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    temperature: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_choice("simpo", "loss_type", self.loss_type, ("sigmoid", "hinge"))
        check_positive("simpo", beta=self.beta)
        check_smoothing("simpo", self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class KTO:
    """Options for `kto`.

    Args:
        loss_type: "kto", or "apo_zero_unpaired", which has no KL term.
        beta: β > 0.
        desirable_weight: on desirable completions, to balance unequal numbers.
        undesirable_weight: on the others.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    """

    loss_type: KTOType = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    temperature: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_choice("kto", "loss_type", self.loss_type, get_args(KTOType))
        check_positive("kto", beta=self.beta)


class Mismatched(NamedTuple):
    """Mismatched completions (for other prompts), from which `kto` computes the KL term with the policy's head.

    Args:
        x: (S', T', H) hidden states.
        target: (S', T').
        ref: (S',) sums of log-probabilities under the reference, or a `tigon.losses.Hidden`.
        valid_tokens: valid targets per completion, as in `tigon.losses.ChunkOptions`.
    """

    x: Tensor
    target: Tensor
    ref: Tensor | Hidden
    valid_tokens: Sequence[int] | None = None


class Unpaired(NamedTuple):
    """A trainer's S completions, each good or bad by itself.

    Args:
        label: (S,) bool, True for desirable completions.
        ref: (S,), sums of log-probabilities under the reference, or a `tigon.losses.Hidden`.
        kl: the KL term, which "kto" needs: a number or 0-d tensor, the mean r (as over all processes); or
            (logps, ref_logps), (S',) each, for mismatched completions; or a `Mismatched`, to compute the term from.
    """

    label: Tensor
    ref: Tensor | Hidden
    kl: Tensor | float | tuple[Tensor, Tensor] | Mismatched | None = None
