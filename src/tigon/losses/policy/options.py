"""Policy loss options, checked when they are made, and a trainer's sampled completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from tigon.losses.head.head import Hidden
from tigon.losses.options import check_choice

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Level = Literal["token", "sequence"]


class PolicyLoss(NamedTuple):
    """A policy loss type.

    formula: per token; the branch in `Policy` that computes the loss.
    share: the divisor of the token sum. "sequence": sequences · the token's sequence length; "tokens": all valid
        tokens; "items": num_items_in_batch; "sequences"; "length": sequences · max_completion_length.
    """

    formula: Literal["clipped", "cispo", "sapo", "vespo"]
    share: Literal["sequence", "tokens", "items", "sequences", "length"]


# By TRL's names. A type is a row here and a literal in LossType, for type checkers.
POLICY_LOSSES = {
    "grpo": PolicyLoss("clipped", "sequence"),
    "bnpo": PolicyLoss("clipped", "tokens"),
    "dr_grpo": PolicyLoss("clipped", "length"),
    "dapo": PolicyLoss("clipped", "items"),
    "luspo": PolicyLoss("clipped", "sequences"),
    "cispo": PolicyLoss("cispo", "items"),
    "sapo": PolicyLoss("sapo", "sequence"),
    "vespo": PolicyLoss("vespo", "items"),
}
LOSS_TYPES: tuple[str, ...] = tuple(POLICY_LOSSES)
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Options for `grpo`, by TRL's names. Frozen: use `dataclasses.replace` for changes.

    Args:
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo".
        importance_sampling_level: "token", or "sequence": a single ratio, exp of the mean difference, for all tokens.
        epsilon: how far below 1 a ratio counts.
        epsilon_high: how far above 1 a ratio counts, None for epsilon. With "cispo", which has no lower bound, the
            largest ratio itself (such as 5.0).
        delta: the largest ratio at negative advantages, where clipping has no upper bound. None for no bound.
        beta: weight of the KL divergence from the reference.
        use_bias_correction_kl: multiply the KL by the ratio, so that the gradient is not biased.
        entropy_coefficient: weight of the entropy bonus, a number or a 0-d tensor.
        top_entropy_quantile: the share of this batch's tokens, those with the highest entropy, that have a loss at all.
            Below 1.0 the loss sees all tokens before the gradient: a batch beyond one chunk costs a fourth product.
        num_items_in_batch: the divisor for "dapo", "cispo" and "vespo", a number or a 0-d tensor: valid tokens in the
            whole step, over the number of ranks. None: valid tokens in this batch.
        max_completion_length: the divisor for "dr_grpo", per sequence; no other type needs this.
        importance_sampling_mode: how the sampler's ratio is used: "token_…" for one ratio a token, "sequence_…" for
            the product over a sequence; "…_truncate" clips ratios to their bounds, "…_mask" drops tokens whose ratio is
            outside. None: no ratio.
        importance_sampling_clip_max: the upper bound of that ratio, or None.
        importance_sampling_clip_min: the lower bound of that ratio, or None.
        off_policy_mask_threshold: drop sequences with negative advantage whose mean difference, the sampler's (or old)
            log-probabilities − logprob, is larger. In nats; None: never.
        sapo_temperature_pos: τ of "sapo" at positive advantages.
        sapo_temperature_neg: τ at other advantages.
        vespo_k_pos: k of "vespo" at advantages from 0 on.
        vespo_lambda_pos: λ at advantages from 0 on.
        vespo_k_neg: k at negative advantages.
        vespo_lambda_neg: λ at negative advantages.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    Raises: ValueError for options that are unknown or do not go together.
    """

    loss_type: LossType = "dapo"
    importance_sampling_level: Level = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    entropy_coefficient: float | Tensor = 0.0
    top_entropy_quantile: float = 1.0
    num_items_in_batch: float | Tensor | None = None
    max_completion_length: int | None = None
    importance_sampling_mode: Mode | None = "sequence_mask"
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    temperature: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        name = "grpo"
        check_choice(name, "loss_type", self.loss_type, LOSS_TYPES)
        check_choice(name, "importance_sampling_level", self.importance_sampling_level, get_args(Level))
        check_choice(name, "importance_sampling_mode", self.importance_sampling_mode, (*MODES, None))
        high, low = self.importance_sampling_clip_max, self.importance_sampling_clip_min
        if high is not None and low is not None and low >= high:
            raise ValueError(
                f"{name}: importance_sampling_clip_min must be less than …_clip_max, got {low} and {high}."
            )
        if high is None and low is None and (self.importance_sampling_mode or "").endswith("truncate"):
            raise ValueError(
                f"{name}: importance_sampling_mode {self.importance_sampling_mode!r} needs at least one "
                "importance_sampling_clip."
            )
        if POLICY_LOSSES[self.loss_type].share == "length" and not (self.max_completion_length or 0) > 0:
            raise ValueError(
                f"{name}: {self.loss_type} needs a positive max_completion_length, got {self.max_completion_length}."
            )
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise ValueError(f"{name}: top_entropy_quantile must be from 0 to 1, got {self.top_entropy_quantile}.")
        taus = self.sapo_temperature_pos, self.sapo_temperature_neg
        if not (taus[0] > 0 and taus[1] > 0):
            raise ValueError(f"{name}: sapo's temperatures must be positive, got {taus[0]} and {taus[1]}.")


@dataclass(frozen=True, kw_only=True)
class RLOO:
    """Options for `rloo`.

    Args:
        epsilon: how far below 1 a ratio counts.
        epsilon_high: how far above 1 a ratio counts, None for epsilon.
        entropy_coefficient: weight of the entropy bonus, a number or a 0-d tensor.
        temperature: divides the logits.
        ignore_index: targets that do not count.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    entropy_coefficient: float | Tensor = 0.0
    temperature: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        # GRPO's clipped loss, with a ratio per sequence that is computed from sums.
        own = {field: getattr(self, field) for field in self.__dataclass_fields__}
        config = GRPO(loss_type="grpo", importance_sampling_mode=None, use_bias_correction_kl=False, **own)
        object.__setattr__(self, "clipped", config)


class Sampler(NamedTuple):
    """Log-probabilities or ratios from the engine that sampled, which rarely agrees with the trainer to the bit.

    Args:
        logprob: (S, T), the engine's log-probabilities. NaN where the engine reported none means a ratio of 1.
            The ratio exp(old − logprob) multiplies the loss.
        ratio: (S,) or (S, T), that ratio if you have already computed it.
    """

    logprob: Tensor | None = None
    ratio: Tensor | None = None


class Rollout(NamedTuple):
    """A trainer's S sampled completions with at most T tokens. A loss also takes the advantages alone.

    Args:
        advantages: (S,) or (S, T); (S,) for `rloo`, each reward less the mean of the prompt's other rewards.
        old: (S, T) log-probabilities, in nats, under the policy before this step's updates: "logprob" from an earlier
            call. `rloo` also takes sequence sums, (S,). None: this policy's own.
        ref: (S, T) log-probabilities under the reference model, or a `tigon.losses.Hidden` with the model's hidden
            states and head. Needed for beta > 0; with beta = 0, "kl" is still reported. For `grpo` only.
        sampler: (S, T) log-probabilities from the sampling engine, or a `Sampler` with the ratio. For `grpo` only.
    """

    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | Hidden | None = None
    sampler: Tensor | Sampler | None = None


def parse_rollout(name: str, rollout: Rollout | Tensor) -> Rollout:
    """The argument as a Rollout; a ValueError if the argument is neither that nor advantages."""
    if isinstance(rollout, Tensor):
        return Rollout(rollout)
    if not isinstance(rollout, Rollout):
        raise ValueError(f"{name}: rollout must be advantages or a tigon.losses.Rollout, got {type(rollout).__name__}.")
    return rollout
