"""Preference tuning without logits: DPO and its relatives, ORPO, CPO, SimPO and KTO, of a linear head.

    log π(y) = Σ_t log softmax(softcap(scale · (x Wᵀ + bias)) / temperature)[target_t]       over targets that count
    loss     = mean over pairs of f(log π(chosen), log π(rejected), the same under a reference)

Names and semantics are those of TRL 1.16. All functions take their tensors and common options alike:

    x: (S, T, H), bf16, fp16, fp32 or fp64: hidden states that enter the head. For pairs S = 2B: B chosen sequences,
        then the B rejected ones in the same order.
    head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap, scale or group.
    target: (S, T), integers: the token that x[s, t] predicts (already shifted), or ignore_index where it does not count
        (prompt, padding).
    ref: what the reference model says: log-probabilities of the sequences, or a `tigon.losses.Hidden`, its hidden
        states and head, whose log-probabilities are then computed along the way. No gradient.
    config: a frozen object of the family's options, each with a `temperature`, which divides the logits, and an
        `ignore_index`.
    walk: a `tigon.losses.Walk`. Its `valid` are the numbers of targets of the sequences that count: the other tokens
        are then left out, and time and memory follow those that count.

They return the loss, 0-d in fp32 (fp64 for fp64), and metrics by the names TRL logs, 0-d tensors on the device, without
gradient. An empty completion counts as one of probability 1, an empty batch has a loss of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.linear.chunks import scalar
from tigon.linear.head import Head, Hidden
from tigon.linear.walk import Walk
from tigon.losses.options import check_choice, check_positive, check_share, check_smoothing
from tigon.losses.preference.families import (
    AVERAGED,
    DPO_LOSSES,
    CPOType,
    Divergence,
    DPOType,
    KTOType,
)
from tigon.losses.token_loss import token_loss
from tigon.ops.targets import as_labels

Result = tuple[Tensor, dict[str, Tensor]]
AnyHead = Head | Tensor | torch.nn.Linear


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Options of `dpo`, by TRL's names.

    Args:
        loss_type: a type of the table in docs/losses/preference.md, such as "sigmoid", "ipo" or "sft", or several that
            are added up.
        loss_weights: a weight for each of several; 1 by default.
        beta: β > 0; for "ipo" the paper's τ, for "sppo_hard" its 1 / η.
        label_smoothing: in [0, 1), of "robust" (below 0.5), "exo_pair" (above 0), "aot" and "aot_unpaired".
        reference_free: a reference that finds all completions equally likely, in place of `ref`.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence": what keeps the policy near
            the reference. Of types that see r of pairs alone.
        f_alpha_divergence_coef: α of "alpha_divergence".
        ld_alpha: in [0, 1]: weight of the tokens of a pair's longer completion that the shorter has no counterpart for.
            Reference log-probabilities that are given have to be computed with it as well.
        discopop_tau: temperature of "discopop".
        bco_delta: what "bco_pair" subtracts from the rewards, a number or 0-d tensor: the running mean of
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
            raise ValueError(f"dpo: loss_weights must hold one for each of {types}, got {self.weights}.")
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
                f"dpo: f_divergence_type must be 'reverse_kl' for {only}, whose "
                f"losses do not depend on the difference of rewards alone, got {divergence!r}."
            )
        check_share("dpo", ld_alpha=self.ld_alpha)
        if self.bco_delta is not None and "bco_pair" not in types:
            raise ValueError(f"dpo: bco_delta must be left out without 'bco_pair', got it for {types}.")


@dataclass(frozen=True, kw_only=True)
class ORPO:
    """Options of `orpo`.

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
    """Options of `cpo`, by TRL's names.

    Args:
        loss_type: "sigmoid"; "hinge": relu(1 − β m); "ipo": (m − 1 / 2β)²; "simpo": −log σ(β m − simpo_gamma);
            "alphapo": "simpo" with cpo_alpha = 0. The last three have mean log-probabilities in place of sums.
        beta: β > 0.
        label_smoothing: in [0, 1), of "sigmoid" and "simpo".
        cpo_alpha: weight of the chosen's NLL.
        simpo_gamma: the margin that "simpo" wants.
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
    """Options of `simpo`.

    Args:
        loss_type: "sigmoid", or "hinge": relu(1 − β (r_chosen − r_rejected) + γ).
        beta: β > 0.
        gamma_beta_ratio: γ / β, the margin in nats a token.
        label_smoothing: in [0, 1), of "sigmoid".
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
    """Options of `kto`.

    Args:
        loss_type: "kto", or "apo_zero_unpaired", which has no KL term.
        beta: β > 0.
        desirable_weight: of desirable completions, to balance unequal numbers.
        undesirable_weight: of the others.
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
    """Completions that belong to other prompts, of which `kto` computes its KL term with the policy's head.

    Args:
        x: (S', T', H) hidden states.
        target: (S', T').
        ref: (S',) sums of log-probabilities under the reference, or a `tigon.losses.Hidden`.
        valid: how many targets of each count, as in `tigon.losses.Walk`.
    """

    x: Tensor
    target: Tensor
    ref: Tensor | Hidden
    valid: Sequence[int] | None = None


def dpo(
    x: Tensor,
    head: AnyHead,
    target: Tensor,
    ref: tuple[Tensor, Tensor] | Hidden | None = None,
    *,
    config: DPO = DPO(),
    walk: Walk = Walk(),
) -> Result:
    """Direct preference optimisation: with r = log π(y) − log π_ref(y) of the chosen and of the rejected completion,

        loss = mean over pairs of −log σ(β (r_chosen − r_rejected))        for "sigmoid"

    Args:
        x: (2B, T, H).
        head: as in `tigon.losses.preference`, as are x, target and walk.
        target: (2B, T).
        ref: (chosen, rejected), (B,) each, sums of log-probabilities under the reference; or a `tigon.losses.Hidden`,
            its hidden states and head; None with `reference_free`.
        config: the kinds of loss and their numbers.
        walk: how the tokens are walked over.
    Returns: the loss, and rewards/chosen, /rejected, /accuracies, /margins (β r), logps/chosen, /rejected (sums),
        logits/chosen, /rejected (means over tokens that count, before the temperature), entropy (in nats a token),
        mean_token_accuracy (share of the chosen's tokens than which none is likelier).
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Types that sort the batch, "aot" and "aot_unpaired", need the log-probabilities of all of it before the first
    gradient: a batch whose logits do not fit a chunk then costs a fourth matrix product a token.

    Sources: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; the types' in docs/losses/preference.md.

    Replaces::

        logp = F.log_softmax(F.linear(x, weight, bias).float(), dim=-1)
        logps = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(target == -100, 0).sum(-1)
        chosen, rejected = logps.chunk(2)
        margin = beta * ((chosen - ref[0]) - (rejected - ref[1]))
        loss = -F.logsigmoid(margin).mean()
    """
    c, pairs = config, _pairs("dpo", x, target)
    if (ref is None) != c.reference_free:
        raise ValueError(
            "dpo: ref must be (chosen, rejected) log-probabilities or a Hidden, or left out with reference_free=True, "
            f"got {'none' if ref is None else 'one'} with reference_free={c.reference_free}."
        )
    given = () if ref is None or isinstance(ref, Hidden) else tuple(ref)
    for t, side in zip(given, ("chosen", "rejected"), strict=True) if given else ():
        _check_logps("dpo", f"ref's {side}", t, pairs)
    source = "free" if ref is None else "given" if given else "head"
    mask = as_labels(target, c.ignore_index) != c.ignore_index
    shares, counts = _shares(x, mask)
    sides = [*shares, _filled(x, 1.0) / counts.sum().clamp(min=1)]
    if given:
        sides.append(torch.cat(given))
    extra = ""
    if c.ld_alpha is not None:
        extra = "weighted"
        sides.append(_token_weights(mask, c.ld_alpha, shares[0].dtype))
    if c.bco_delta is not None:
        extra += "+delta"
        sides.append(_filled(x, c.bco_delta))
    numbers = (c.beta, c.label_smoothing, c.f_alpha_divergence_coef, c.discopop_tau, *c.weights)
    return token_loss(
        "dpo", (source, c.f_divergence_type, extra, *c.types), numbers, x, head, target, reference=_hidden(ref),
        sides=sides, ignore_index=c.ignore_index, temperature=c.temperature, walk=walk,
    )  # fmt: skip


def orpo(
    x: Tensor,
    head: AnyHead,
    target: Tensor,
    completion_mask: Tensor | None = None,
    *,
    config: ORPO = ORPO(),
    walk: Walk = Walk(),
) -> Result:
    """Odds ratio preference optimisation: with p = exp(mean over tokens of the log-probability), odds = p / (1 − p),

        loss = NLL(chosen) − β · mean over pairs of log σ(log odds(chosen) − log odds(rejected))

    Args:
        x: (2B, T, H).
        head: as in `tigon.losses.preference`, as are x, target and walk.
        target: (2B, T).
        completion_mask: (2B, T) bool, the tokens that the odds are of, among those of `target`; all of them by default.
            The NLL is over all of the chosen's: TRL has it over prompt and completion, the odds over the completion.
        config: β.
        walk: how the tokens are walked over.
    Returns: the loss, and the metrics of `dpo` but its last two, with rewards β · mean log-probability and logps means;
        nll_loss, log_odds_ratio (mean of log σ), log_odds_chosen (mean of the difference of log odds).
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Hong et al. 2024, https://arxiv.org/abs/2403.07691
    """
    c = config
    _pairs("orpo", x, target)
    sides, _ = _shares(x, as_labels(target, c.ignore_index) != c.ignore_index)
    if completion_mask is not None:
        if completion_mask.shape != target.shape:
            raise ValueError(
                f"orpo: completion_mask must have target's shape {tuple(target.shape)}, got "
                f"{tuple(completion_mask.shape)}."
            )
        sides.append(completion_mask)
    return token_loss(
        "orpo", (), (c.beta,), x, head, target, sides=sides, ignore_index=c.ignore_index, temperature=c.temperature,
        walk=walk,
    )  # fmt: skip


def cpo(x: Tensor, head: AnyHead, target: Tensor, *, config: CPO = CPO(), walk: Walk = Walk()) -> Result:
    """Contrastive preference optimisation, without a reference: with m = r(chosen) − r(rejected), r = log π(y),

        loss = mean over pairs of −log σ(β m) + cpo_alpha · NLL(chosen)

    Args:
        x: (2B, T, H).
        head: as in `tigon.losses.preference`, as are x, target and walk.
        target: (2B, T).
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over.
    Returns: the loss, and the metrics of `dpo` but its last two, with rewards β r; nll_loss.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Sources: Xu et al. 2024, https://arxiv.org/abs/2401.08417; AlphaPO, https://arxiv.org/abs/2501.03884
    """
    c = config
    averaged = c.loss_type in AVERAGED
    gamma = c.simpo_gamma / c.beta if c.loss_type in ("simpo", "alphapo") else 0.0
    cpo_alpha = 0.0 if c.loss_type == "alphapo" else c.cpo_alpha
    kinds, numbers = (c.loss_type, "average" if averaged else "sum"), (c.beta, gamma, c.label_smoothing, cpo_alpha)
    return _contrast("cpo", kinds, (*numbers, c.alpha), x, head, target, c.ignore_index, c.temperature, walk)


def simpo(x: Tensor, head: AnyHead, target: Tensor, *, config: SimPO = SimPO(), walk: Walk = Walk()) -> Result:
    """Simple preference optimisation: with r the mean over tokens of the log-probability, and no reference,

        loss = mean over pairs of −log σ(β (r_chosen − r_rejected) − γ) + sft_weight · NLL(chosen)

    Args:
        x: (2B, T, H).
        head: as in `tigon.losses.preference`, as are x, target and walk.
        target: (2B, T).
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over.
    Returns: the loss, and the metrics of `cpo`.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Meng et al. 2024, https://arxiv.org/abs/2405.14734

    Replaces::

        logp = F.log_softmax(F.linear(x, weight, bias).float(), dim=-1)
        logps = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(target == -100, 0).sum(-1)
        chosen, rejected = (logps / (target != -100).sum(-1)).chunk(2)
        loss = -F.logsigmoid(beta * (chosen - rejected - gamma_beta_ratio)).mean()
    """
    c = config
    numbers = (c.beta, c.gamma_beta_ratio, c.label_smoothing, c.sft_weight, 0.0)
    kinds = c.loss_type, "average"
    return _contrast("simpo", kinds, numbers, x, head, target, c.ignore_index, c.temperature, walk)


def kto(
    x: Tensor,
    head: AnyHead,
    target: Tensor,
    label: Tensor,
    *,
    ref: Tensor | Hidden,
    kl: Tensor | float | tuple[Tensor, Tensor] | Mismatched | None = None,
    config: KTO = KTO(),
    walk: Walk = Walk(),
) -> Result:
    """Kahneman-Tversky optimisation, of completions that are good or bad by themselves: with r = log π(y) / π_ref(y),

        loss = mean over sequences of w · (1 − σ(±β (r − KL)))      + and desirable_weight for desirable ones, else −
        KL   = max(0, mean of r over completions that belong to other prompts)                 no gradient

    Args:
        x: (S, T, H), one completion a sequence.
        head: as in `tigon.losses.preference`, as are x, target and walk.
        target: (S, T).
        label: (S,) bool, True for desirable ones.
        ref: (S,), sums of log-probabilities under the reference, or a `tigon.losses.Hidden`.
        kl: the KL term, which "kto" wants: a number or 0-d tensor, the mean of r (as over all processes); or
            (logps, ref_logps), (S',) each, of mismatched completions; or a `Mismatched`, of which it is computed.
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over.
    Returns: the loss, and rewards/chosen, /rejected, /margins, logps/chosen, /rejected, logits/chosen, /rejected, means
        over the desirable sequences and over the others (of logits: over their tokens), NaN where there are none;
        entropy, in nats a token; kl.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306; "apo_zero_unpaired":
    https://arxiv.org/abs/2408.06266
    """
    c = config
    if x.dim() != 3 or target.shape != x.shape[:2]:
        raise ValueError(f"kto: x must be (S, T, H) and target (S, T), got {tuple(x.shape)} and {tuple(target.shape)}.")
    S = x.shape[0]
    if label.dtype != torch.bool or label.shape != (S,):
        raise ValueError(f"kto: label must be ({S},) bool, got {tuple(label.shape)} {label.dtype}.")
    if (kl is None) == (c.loss_type == "kto"):
        raise ValueError(
            f"kto: kl must be {'given' if kl is None else 'left out'} for loss_type {c.loss_type!r}, got "
            f"{'none' if kl is None else type(kl).__name__}."
        )
    given = _logps_of("kto", "ref", ref, S)
    if isinstance(kl, Mismatched):
        kl = _divergence(kl, head, c, walk)
    elif isinstance(kl, tuple):
        if kl[0].shape != kl[1].shape:
            raise ValueError(f"kto: kl's two must have one shape, got {tuple(kl[0].shape)} and {tuple(kl[1].shape)}.")
        kl = (kl[0].detach() - kl[1].detach()).mean()
    zero = scalar(0.0, x.device, torch.promote_types(x.dtype, torch.float32))
    kl = (zero if kl is None else zero + kl).detach().clamp(min=0)
    sequence_weight = torch.where(label, zero + c.desirable_weight, zero + c.undesirable_weight) / max(1, S)
    sides = [sequence_weight, label, _filled(x, kl), *given]
    loss, found = token_loss(
        "kto", ("given" if given else "head",), (c.beta,), x, head, target, reference=_hidden(ref), sides=sides,
        ignore_index=c.ignore_index, temperature=c.temperature, walk=walk,
    )  # fmt: skip
    tokens = (as_labels(target, c.ignore_index) != c.ignore_index).sum(1)
    chosen, tokens_chosen, all_tokens = label.sum(), torch.where(label, tokens, 0).sum(), tokens.sum()
    for name, of_chosen, of_all in (
        ("rewards", chosen, S),
        ("logps", chosen, S),
        ("logits", tokens_chosen, all_tokens),
    ):
        found[f"{name}/chosen"] = found[f"{name}/chosen"] / of_chosen
        found[f"{name}/rejected"] = found[f"{name}/rejected"] / (of_all - of_chosen)
    found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    found["entropy"] = found["entropy"] / all_tokens.clamp(min=1)
    return loss, {**found, "kl": kl}


# ----------------------------------------------------------------------------------------------------------- checks


def _pairs(name: str, x: Tensor, target: Tensor) -> int:
    """The number of pairs; a ValueError unless x and target hold pairs."""
    if x.dim() != 3 or x.shape[0] % 2 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{name}: x must be (2B, T, H), chosen sequences and then as many rejected ones, and target (2B, T), got "
            f"{tuple(x.shape)} and {tuple(target.shape)}."
        )
    return x.shape[0] // 2


def _check_logps(name: str, argument: str, t: Tensor, count: int) -> None:
    if t.shape != (count,):
        raise ValueError(f"{name}: {argument} must have shape ({count},), got {tuple(t.shape)}.")


def _logps_of(name: str, argument: str, ref: Tensor | Hidden, count: int) -> tuple[Tensor, ...]:
    """(ref,) if ref holds log-probabilities of sequences, () if it is a Hidden."""
    if isinstance(ref, Hidden):
        return ()
    if not isinstance(ref, Tensor):
        raise ValueError(f"{name}: {argument} must be log-probabilities or a Hidden, got {type(ref).__name__}.")
    _check_logps(name, argument, ref, count)
    return (ref,)


def _hidden(ref: object) -> Hidden | None:
    return ref if isinstance(ref, Hidden) else None


# ------------------------------------------------------------------------------------------------------------ sides


def _filled(x: Tensor, value: Tensor | float) -> Tensor:
    """The same number for each sequence."""
    return scalar(value, x.device, torch.promote_types(x.dtype, torch.float32)).expand(x.shape[0])


def _shares(x: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor]:
    """The first sides of `Pairs`, 1 / pairs and 1 / tokens of a sequence's half, and (2,) tokens of the halves."""
    S = x.shape[0]
    pair = _filled(x, 2 / max(2, S))
    counts = mask.sum(1).view(2, S // 2).sum(1)
    token = counts.clamp(min=1).to(pair.dtype).reciprocal().unsqueeze(1).expand(2, S // 2).reshape(S)
    return [pair, token], counts


def _token_weights(mask: Tensor, ld_alpha: float, dtype: torch.dtype) -> Tensor:
    """Weights of tokens: 1 up to the length of the pair's shorter completion, ld_alpha for tokens beyond it."""
    nth, counts = mask.cumsum(1), mask.sum(1)
    shared = torch.minimum(*counts.chunk(2)).repeat(2).unsqueeze(1) if mask.shape[0] else counts.unsqueeze(1)
    ones = mask.to(dtype)
    return torch.where(nth <= shared, ones, ld_alpha * ones)


def _contrast(
    name: str, kinds: tuple[str, ...], numbers: tuple[float, ...], x: Tensor, head: AnyHead, target: Tensor,
    ignore_index: int, temperature: float, walk: Walk,
) -> Result:  # fmt: skip
    _pairs(name, x, target)
    sides, _ = _shares(x, as_labels(target, ignore_index) != ignore_index)
    return token_loss(
        "cpo", kinds, numbers, x, head, target, sides=sides, ignore_index=ignore_index, temperature=temperature,
        walk=walk, name=name,
    )  # fmt: skip


def _divergence(kl: Mismatched, head: AnyHead, config: KTO, walk: Walk) -> Tensor:
    """Mean of log π(y) / π_ref(y) over the sequences, without gradient."""
    given = _logps_of("kto", "kl.ref", kl.ref, kl.x.shape[0])
    sides = [_filled(kl.x, 1 / max(1, kl.x.shape[0])), *given]
    with torch.no_grad():
        return token_loss(
            "kto_kl", (), (), kl.x, head, kl.target, reference=_hidden(kl.ref), sides=sides,
            ignore_index=config.ignore_index, temperature=config.temperature, walk=replace(walk, valid=kl.valid),
        )[0]  # fmt: skip
