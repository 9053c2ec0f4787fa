"""Preference tuning without logits: DPO and its relatives, ORPO, CPO, SimPO and KTO, of a linear head.

    log π(y) = Σ_t log softmax(softcap(scale · (x Wᵀ + bias)) / temperature)[target_t]       over targets that count
    loss     = mean over pairs of f(log π(chosen), log π(rejected), the same under a reference)

Names and semantics are those of TRL 1.16. All functions take their tensors and common options alike:

    x: (S, T, H), bf16, fp16, fp32 or fp64: hidden states that enter the head. For pairs S = 2B: B chosen sequences,
        then the B rejected ones in the same order.
    weight: (V, H), x's dtype; under autocast both are cast as `F.linear` casts them. bias: (V,) or None.
    target: (S, T), integers: the token that x[s, t] predicts (already shifted), or ignore_index where it does not count
        (prompt, padding).
    ref_x, ref_weight, ref_bias: (S, T, H'), (V, H'), (V,) or None: the reference model's hidden states and head, whose
        log-probabilities are then computed along the way. No gradient.
    lengths: how many targets of each sequence count, when the host knows: a list, or a `tigon.losses.ValidLengths`.
        The other tokens are then left out: time and memory follow those that count. Too small a number gives a NaN
        loss. On a CPU they are counted.
    temperature, softcap, scale: of the logits, see above.
    chunk_bytes: logits held at a time; as in `tigon.linear_cross_entropy`.
    accumulate: "fp32" adds the weight's gradient in fp32 and rounds once; "weight" adds in the weight's dtype.
    group: of a vocabulary-parallel head, as in `tigon.linear_cross_entropy`; both heads are split alike.

They return the loss, 0-d in fp32 (fp64 for fp64), and metrics by the names TRL logs, 0-d tensors on the device, without
gradient. An empty completion counts as one of probability 1, an empty batch has a loss of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.linear.chunks import scalar
from tigon.losses.preference.families import (
    ANY_DIVERGENCE,
    AVERAGED,
    CPO_TYPES,
    DIVERGENCES,
    DPO_TYPES,
    KTO_TYPES,
)
from tigon.losses.token_loss import token_loss
from tigon.ops.targets import as_labels

Result = tuple[Tensor, dict[str, Tensor]]


def dpo(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None,
    ref_x: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    reference_free: bool = False,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    discopop_tau: float = 0.05,
    bco_delta: Tensor | float | None = None,
    lengths: Any = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_bytes: int | None = None,
    accumulate: str = "fp32",
    group: Any = None,
) -> Result:
    """Direct preference optimisation: with r = log π(y) − log π_ref(y) of the chosen and of the rejected completion,

        loss = mean over pairs of −log σ(β (r_chosen − r_rejected))        for "sigmoid"

    Args:
        x, weight, target, bias and what follows bco_delta: as in `tigon.losses.preference`.
        loss_type: one of "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
            "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft", or several that are added up.
        loss_weights: a weight for each of several; 1 by default.
        beta: β > 0; for "ipo" the paper's τ, for "sppo_hard" its 1 / η.
        label_smoothing: in [0, 1), of "robust" (below 0.5), "exo_pair" (above 0), "aot" and "aot_unpaired".
        ref_chosen_logps, ref_rejected_logps: (B,) each, sums of log-probabilities under the reference; or
        ref_x, ref_weight, ref_bias: the reference's head; or
        reference_free: a reference that finds all completions equally likely.
        f_divergence_type: what keeps the policy near the reference, "reverse_kl", "forward_kl", "js_divergence" or
            "alpha_divergence". Of types that see r of pairs alone.
        f_alpha_divergence_coef: α of "alpha_divergence".
        ld_alpha: in [0, 1]: weight of the tokens of a pair's longer completion that the shorter has no counterpart for.
            Reference log-probabilities that are given have to be computed with it as well.
        discopop_tau: temperature of "discopop".
        bco_delta: what "bco_pair" subtracts from the rewards, a number or 0-d tensor: the running mean of
            (rewards/chosen + rewards/rejected) / 2. 0 by default, as in TRL.
    Returns: the loss, and rewards/chosen, /rejected, /accuracies, /margins (β r), logps/chosen, /rejected (sums),
        logits/chosen, /rejected (means over tokens that count, before the temperature), entropy (in nats a token),
        mean_token_accuracy (share of the chosen's tokens than which none is likelier).
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Types that sort the batch, "aot" and "aot_unpaired", need the log-probabilities of all of it before the first
    gradient: a batch whose logits do not fit chunk_bytes then costs a fourth matrix product a token.

    Sources: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; the types' in docs/losses/preference.md.

    Replaces::

        logp = F.log_softmax(F.linear(x, weight, bias).float(), dim=-1)
        logps = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(target == -100, 0).sum(-1)
        chosen, rejected = logps.chunk(2)
        margin = beta * ((chosen - ref_chosen_logps) - (rejected - ref_rejected_logps))
        loss = -F.logsigmoid(margin).mean()
    """
    types = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
    for name in types or ("",):
        _check_choice("dpo", "loss_type", name, DPO_TYPES)
    weights = (1.0,) * len(types) if loss_weights is None else tuple(loss_weights)
    if len(weights) != len(types):
        raise ValueError(f"dpo: loss_weights must hold one for each of {types}, got {weights}.")
    _check_positive("dpo", beta=beta, discopop_tau=discopop_tau)
    _check_smoothing("dpo", label_smoothing)
    if "robust" in types and label_smoothing >= 0.5:
        raise ValueError(f"dpo: label_smoothing must be below 0.5 for 'robust', got {label_smoothing}.")
    if "exo_pair" in types and label_smoothing == 0:
        raise ValueError("dpo: label_smoothing must be above 0 for 'exo_pair' (its paper has 1e-3), got 0.")
    _check_choice("dpo", "f_divergence_type", f_divergence_type, DIVERGENCES)
    if f_divergence_type != "reverse_kl" and not set(types) <= set(ANY_DIVERGENCE):
        raise ValueError(
            f"dpo: f_divergence_type must be 'reverse_kl' for {sorted(set(types) - set(ANY_DIVERGENCE))}, whose losses "
            f"do not depend on the difference of rewards alone, got {f_divergence_type!r}."
        )
    if ld_alpha is not None and not 0 <= ld_alpha <= 1:
        raise ValueError(f"dpo: ld_alpha must lie in [0, 1], got {ld_alpha}.")
    if bco_delta is not None and "bco_pair" not in types:
        raise ValueError(f"dpo: bco_delta must be left out without 'bco_pair', got it for {types}.")
    pairs = _pairs("dpo", x, target)
    given = _given("dpo", pairs, ref_chosen_logps=ref_chosen_logps, ref_rejected_logps=ref_rejected_logps)
    source = _source("dpo", "ref_chosen_logps and ref_rejected_logps", given, ref_x, reference_free)
    mask = as_labels(target, ignore_index) != ignore_index
    shares, counts = _shares(x, mask)
    sides = [*shares, _filled(x, 1.0) / counts.sum().clamp(min=1)]
    if given:
        sides.append(torch.cat(given))
    extra = ""
    if ld_alpha is not None:
        extra = "weighted"
        sides.append(_token_weights(mask, ld_alpha, shares[0].dtype))
    if bco_delta is not None:
        extra += "+delta"
        sides.append(_filled(x, bco_delta))
    numbers = (beta, label_smoothing, f_alpha_divergence_coef, discopop_tau, *weights)
    return token_loss(
        "dpo", (source, f_divergence_type, extra, *types), numbers, x, weight, target, bias,
        reference=(ref_x, ref_weight, ref_bias), sides=sides, lengths=lengths, ignore_index=ignore_index,
        temperature=temperature, softcap=softcap, scale=scale, chunk_bytes=chunk_bytes, accumulate=accumulate,
        group=group,
    )  # fmt: skip


def orpo(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    beta: float = 0.1,
    completion_mask: Tensor | None = None,
    lengths: Any = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_bytes: int | None = None,
    accumulate: str = "fp32",
    group: Any = None,
) -> Result:
    """Odds ratio preference optimisation: with p = exp(mean over tokens of the log-probability), odds = p / (1 − p),

        loss = NLL(chosen) − β · mean over pairs of log σ(log odds(chosen) − log odds(rejected))

    Args:
        x, weight, target, bias and what follows completion_mask: as in `tigon.losses.preference`.
        beta: β > 0, the paper's λ.
        completion_mask: (2B, T) bool, the tokens that the odds are of, among those of `target`; all of them by default.
            The NLL is over all of the chosen's: TRL has it over prompt and completion, the odds over the completion.
    Returns: the loss, and the metrics of `dpo` but its last two, with rewards β · mean log-probability and logps means;
        nll_loss, log_odds_ratio (mean of log σ), log_odds_chosen (mean of the difference of log odds).
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Hong et al. 2024, https://arxiv.org/abs/2403.07691
    """
    _check_positive("orpo", beta=beta)
    _pairs("orpo", x, target)
    sides, _ = _shares(x, as_labels(target, ignore_index) != ignore_index)
    if completion_mask is not None:
        if completion_mask.shape != target.shape:
            raise ValueError(
                f"orpo: completion_mask must have target's shape {tuple(target.shape)}, got "
                f"{tuple(completion_mask.shape)}."
            )
        sides.append(completion_mask)
    return token_loss(
        "orpo", (), (beta,), x, weight, target, bias, sides=sides, lengths=lengths, ignore_index=ignore_index,
        temperature=temperature, softcap=softcap, scale=scale, chunk_bytes=chunk_bytes, accumulate=accumulate,
        group=group,
    )  # fmt: skip


def cpo(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
    simpo_gamma: float = 0.5,
    alpha: float = 0.0,
    lengths: Any = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_bytes: int | None = None,
    accumulate: str = "fp32",
    group: Any = None,
) -> Result:
    """Contrastive preference optimisation, without a reference: with m = r(chosen) − r(rejected), r = log π(y),

        loss = mean over pairs of −log σ(β m) + cpo_alpha · NLL(chosen)

    Args:
        x, weight, target, bias and what follows alpha: as in `tigon.losses.preference`.
        loss_type: "sigmoid"; "hinge": relu(1 − β m); "ipo": (m − 1 / 2β)²; "simpo": −log σ(β m − simpo_gamma);
            "alphapo": "simpo" with cpo_alpha = 0. The last three have mean log-probabilities in place of sums.
        beta: β > 0.
        label_smoothing: in [0, 1), of "sigmoid" and "simpo".
        cpo_alpha: weight of the chosen's NLL.
        simpo_gamma: the margin that "simpo" wants.
        alpha: not 0 for AlphaPO's r = (1 − π(y)^−alpha) / alpha.
    Returns: the loss, and the metrics of `dpo` but its last two, with rewards β r; nll_loss.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Sources: Xu et al. 2024, https://arxiv.org/abs/2401.08417; AlphaPO, https://arxiv.org/abs/2501.03884
    """
    _check_choice("cpo", "loss_type", loss_type, CPO_TYPES)
    _check_positive("cpo", beta=beta)
    kinds = loss_type, "average" if loss_type in AVERAGED else "sum"
    if loss_type == "alphapo":
        cpo_alpha = 0.0
    gamma = simpo_gamma / beta if loss_type in ("simpo", "alphapo") else 0.0
    return _contrast(
        "cpo", kinds, (beta, gamma, label_smoothing, cpo_alpha, alpha), x, weight, target, bias, lengths=lengths,
        ignore_index=ignore_index, temperature=temperature, softcap=softcap, scale=scale, chunk_bytes=chunk_bytes,
        accumulate=accumulate, group=group,
    )  # fmt: skip


def simpo(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    loss_type: str = "sigmoid",
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.25,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    lengths: Any = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_bytes: int | None = None,
    accumulate: str = "fp32",
    group: Any = None,
) -> Result:
    """Simple preference optimisation: with r the mean over tokens of the log-probability, and no reference,

        loss = mean over pairs of −log σ(β (r_chosen − r_rejected) − γ) + sft_weight · NLL(chosen)

    Args:
        x, weight, target, bias and what follows sft_weight: as in `tigon.losses.preference`.
        loss_type: "sigmoid", or "hinge": relu(1 − β (r_chosen − r_rejected) + γ).
        beta: β > 0.
        gamma_beta_ratio: γ / β, the margin in nats a token.
        label_smoothing: in [0, 1), of "sigmoid".
        sft_weight: weight of the chosen's NLL.
    Returns: the loss, and the metrics of `cpo`.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Meng et al. 2024, https://arxiv.org/abs/2405.14734

    Replaces::

        logp = F.log_softmax(F.linear(x, weight, bias).float(), dim=-1)
        logps = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(target == -100, 0).sum(-1)
        chosen, rejected = (logps / (target != -100).sum(-1)).chunk(2)
        loss = -F.logsigmoid(beta * (chosen - rejected - gamma_beta_ratio)).mean()
    """
    _check_choice("simpo", "loss_type", loss_type, ("sigmoid", "hinge"))
    _check_positive("simpo", beta=beta)
    numbers = (beta, gamma_beta_ratio, label_smoothing, sft_weight, 0.0)
    return _contrast(
        "simpo", (loss_type, "average"), numbers, x, weight, target, bias, lengths=lengths, ignore_index=ignore_index,
        temperature=temperature, softcap=softcap, scale=scale, chunk_bytes=chunk_bytes, accumulate=accumulate,
        group=group,
    )  # fmt: skip


def kto(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    label: Tensor,
    *,
    bias: Tensor | None = None,
    loss_type: str = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    ref_logps: Tensor | None = None,
    ref_x: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl: Tensor | float | None = None,
    kl_logps: Tensor | None = None,
    ref_kl_logps: Tensor | None = None,
    kl_x: Tensor | None = None,
    kl_target: Tensor | None = None,
    ref_kl_x: Tensor | None = None,
    kl_lengths: Any = None,
    lengths: Any = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_bytes: int | None = None,
    accumulate: str = "fp32",
    group: Any = None,
) -> Result:
    """Kahneman-Tversky optimisation, of completions that are good or bad by themselves: with r = log π(y) / π_ref(y),

        loss = mean over sequences of w · (1 − σ(±β (r − KL)))      + and desirable_weight for desirable ones, else −
        KL   = max(0, mean of r over completions that belong to other prompts)                 no gradient

    Args:
        x, weight, target, bias and what follows kl_lengths: as in `tigon.losses.preference`, one completion a sequence.
        label: (S,) bool, True for desirable ones.
        loss_type: "kto", or "apo_zero_unpaired", which has no KL term.
        beta: β > 0.
        desirable_weight, undesirable_weight: to balance unequal numbers.
        ref_logps: (S,), sums of log-probabilities under the reference.
        ref_x, ref_weight, ref_bias: in their place, the reference's hidden states and head.
        kl: the KL term, of "kto" alone: a number or 0-d tensor, the mean of r (as over all processes). Or in its place
        kl_logps, ref_kl_logps: (S',) each, sums of the mismatched completions' log-probabilities. Or
        kl_x, kl_target: (S', T', H) and (S', T'), from which they are computed with this head, and, for the
            reference, ref_kl_logps or ref_kl_x.
        ref_kl_x: (S', T', H'), with ref_weight and ref_bias.
        kl_lengths: as lengths.
    Returns: the loss, and rewards/chosen, /rejected, /margins, logps/chosen, /rejected, logits/chosen, /rejected, means
        over the desirable sequences and over the others (of logits: over their tokens), NaN where there are none;
        entropy, in nats a token; kl.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306; "apo_zero_unpaired":
    https://arxiv.org/abs/2408.06266
    """
    _check_choice("kto", "loss_type", loss_type, KTO_TYPES)
    _check_positive("kto", beta=beta)
    if x.dim() != 3 or target.shape != x.shape[:2]:
        raise ValueError(f"kto: x must be (S, T, H) and target (S, T), got {tuple(x.shape)} and {tuple(target.shape)}.")
    S = x.shape[0]
    if label.dtype != torch.bool or label.shape != (S,):
        raise ValueError(f"kto: label must be ({S},) bool, got {tuple(label.shape)} {label.dtype}.")
    given = _given("kto", S, ref_logps=ref_logps)
    source = _source("kto", "ref_logps", given, ref_x, False)
    walk: dict[str, Any] = {
        "ignore_index": ignore_index, "temperature": temperature, "softcap": softcap, "scale": scale,
        "chunk_bytes": chunk_bytes, "accumulate": accumulate, "group": group,
    }  # fmt: skip
    wanted = loss_type == "kto"
    ways = (kl is not None, kl_logps is not None, kl_x is not None)
    if sum(ways) != int(wanted):
        raise ValueError(
            f"kto: loss_type {loss_type!r} must have {'one' if wanted else 'none'} of kl, kl_logps and kl_x, got "
            f"{[name for name, way in zip(('kl', 'kl_logps', 'kl_x'), ways, strict=True) if way]}."
        )
    kl_head = (ref_kl_x, ref_weight, ref_bias)
    if kl_x is not None:
        if kl_target is None or (ref_kl_logps is None) == (ref_kl_x is None):
            raise ValueError("kto: kl_x must come with kl_target, and with one of ref_kl_logps and ref_kl_x.")
        kl = _divergence(kl_x, weight, kl_target, bias, ref_kl_logps, kl_head, {**walk, "lengths": kl_lengths})
    elif kl_logps is not None:
        if ref_kl_logps is None or kl_logps.shape != ref_kl_logps.shape:
            raise ValueError("kto: kl_logps must come with ref_kl_logps, one for each.")
        kl = (kl_logps.detach() - ref_kl_logps.detach()).mean()
    zero = scalar(0.0, x.device, torch.promote_types(x.dtype, torch.float32))
    kl = (zero if kl is None else zero + kl).detach().clamp(min=0)
    sequence_weight = torch.where(label, zero + desirable_weight, zero + undesirable_weight) / max(1, S)
    sides = [sequence_weight, label, _filled(x, kl), *given]
    loss, found = token_loss(
        "kto", (source,), (beta,), x, weight, target, bias, reference=(ref_x, ref_weight, ref_bias), sides=sides,
        lengths=lengths, **walk,
    )  # fmt: skip
    tokens = (as_labels(target, ignore_index) != ignore_index).sum(1)
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


def _check_choice(name: str, argument: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: {argument} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_positive(name: str, **options: float) -> None:
    for argument, value in options.items():
        if not value > 0:
            raise ValueError(f"{name}: {argument} must be positive, got {value}.")


def _check_smoothing(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}: label_smoothing must lie in [0, 1), got {value}.")


def _pairs(name: str, x: Tensor, target: Tensor) -> int:
    """How many there are."""
    if x.dim() != 3 or x.shape[0] % 2 or target.shape != x.shape[:2]:
        raise ValueError(
            f"{name}: x must be (2B, T, H), chosen sequences and then as many rejected ones, and target (2B, T), got "
            f"{tuple(x.shape)} and {tuple(target.shape)}."
        )
    return x.shape[0] // 2


def _given(name: str, count: int, **logps: Tensor | None) -> list[Tensor]:
    """The log-probabilities of a reference, none or all."""
    given = [t for t in logps.values() if t is not None]
    if given and len(given) < len(logps):
        raise ValueError(f"{name}: {' and '.join(logps)} go together.")
    for argument, t in logps.items():
        if t is not None and t.shape != (count,):
            raise ValueError(f"{name}: {argument} must have shape ({count},), got {tuple(t.shape)}.")
    return given


def _source(name: str, logps: str, given: list[Tensor], ref_x: Tensor | None, free: bool) -> str:
    """Where the reference comes from: exactly one place."""
    if (len(given) > 0) + (ref_x is not None) + free != 1:
        places = f"{logps}, or ref_x and ref_weight" + (", or reference_free=True" if name == "dpo" else "")
        raise ValueError(f"{name}: the reference must come from one of {places}.")
    return "given" if given else "free" if free else "head"


# ------------------------------------------------------------------------------------------------------------ sides


def _filled(x: Tensor, value: Tensor | float) -> Tensor:
    """The same number for each sequence."""
    return scalar(value, x.device, torch.promote_types(x.dtype, torch.float32)).expand(x.shape[0])


def _shares(x: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor]:
    """What `Pairs` wants of each sequence, 1 / pairs and 1 / tokens of its half, and (2,) tokens of the halves."""
    S = x.shape[0]
    pair = _filled(x, 2 / max(2, S))
    counts = mask.sum(1).view(2, S // 2).sum(1)
    token = counts.clamp(min=1).to(pair.dtype).reciprocal().unsqueeze(1).expand(2, S // 2).reshape(S)
    return [pair, token], counts


def _token_weights(mask: Tensor, ld_alpha: float, dtype: torch.dtype) -> Tensor:
    """1 for as many tokens of a completion as the other of its pair has, ld_alpha for those beyond."""
    nth, counts = mask.cumsum(1), mask.sum(1)
    shared = torch.minimum(*counts.chunk(2)).repeat(2).unsqueeze(1) if mask.shape[0] else counts.unsqueeze(1)
    ones = mask.to(dtype)
    return torch.where(nth <= shared, ones, ld_alpha * ones)


def _contrast(
    name: str, kinds: tuple[str, ...], numbers: tuple[float, ...], x: Tensor, weight: Tensor, target: Tensor,
    bias: Tensor | None, *, ignore_index: int, **walk: Any,
) -> Result:  # fmt: skip
    _check_smoothing(name, numbers[2])
    _pairs(name, x, target)
    sides, _ = _shares(x, as_labels(target, ignore_index) != ignore_index)
    return token_loss(
        "cpo", kinds, numbers, x, weight, target, bias, sides=sides, ignore_index=ignore_index, name=name, **walk
    )


def _divergence(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ref_logps: Tensor | None,
    head: tuple[Tensor | None, Tensor | None, Tensor | None], walk: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Mean of log π(y) / π_ref(y) over the sequences, without gradient."""
    given = _given("kto", x.shape[0], ref_kl_logps=ref_logps)
    sides = [_filled(x, 1 / max(1, x.shape[0])), *given]
    with torch.no_grad():
        reference = (None, None, None) if given else head
        return token_loss("kto_kl", (), (), x, weight, target, bias, reference=reference, sides=sides, **walk)[0]
