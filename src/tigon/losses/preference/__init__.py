"""Preference tuning without logits for a linear head: DPO and related losses, ORPO, CPO, SimPO and KTO.

    log π(y) = Σ_t log softmax(softcap(scale · (x Wᵀ + bias)) / temperature)[target_t]       over targets that count
    loss     = mean over pairs of f(log π(chosen), log π(rejected), the same under a reference)

Names and semantics follow TRL 1.16. All functions take their tensors and common options alike:

    x: (S, T, H), bf16, fp16, fp32 or fp64: hidden states that enter the head. For pairs S = 2B: B chosen sequences,
        then the B rejected ones in the same order.
    head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap, scale or group.
    target: (S, T), integers: the token that x[s, t] predicts (already shifted), or ignore_index where it does not count
        (prompt, padding).
    ref: the reference model: sequence log-probabilities, or a `tigon.losses.Hidden` with the model's hidden states
        and head, from which log-probabilities are then computed along the way. No gradient.
    config: a frozen object with the family's options, each with a `temperature`, which divides the logits, and an
        `ignore_index`.
    chunks: a `tigon.losses.ChunkOptions`. `valid_tokens` holds valid-target counts per sequence: other tokens are
        then left out, and time and memory follow the valid tokens.

They return the loss, 0-d in fp32 (fp64 for fp64), and metrics by the names TRL logs, 0-d tensors on the device, without
gradient. An empty completion counts as having probability 1; an empty batch has loss 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from tigon.losses.family import NoOptions, NoTensors, Term
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.chunks import to_scalar
from tigon.losses.head.head import Head, Hidden
from tigon.losses.options import make_keyword_error
from tigon.losses.preference.families import (
    AVERAGED,
    Beta,
    CPOFamily,
    CPOOptions,
    DPOFamily,
    DPOOptions,
    DPOTensors,
    KTOFamily,
    KTOTensors,
    MeanRatio,
    MeanRatioTensors,
    ORPOFamily,
    ORPOTensors,
)
from tigon.losses.preference.options import CPO, DPO, KTO, ORPO, Mismatched, SimPO, Unpaired
from tigon.losses.token_loss import token_loss
from tigon.ops.example import HEAD, SEQUENCES, Example, make_ids
from tigon.ops.targets import as_labels

__all__ = [
    "CPO", "DPO", "KTO", "ORPO", "Mismatched", "SimPO", "Unpaired", "cpo", "dpo", "kto", "orpo", "simpo",
]  # fmt: skip

Result = tuple[Tensor, dict[str, Tensor]]
AnyHead = Head | Tensor | torch.nn.Linear


def dpo(
    x: Tensor,
    head: AnyHead,
    target: Tensor,
    ref: tuple[Tensor, Tensor] | Hidden | None = None,
    *,
    config: DPO = DPO(),
    chunks: ChunkOptions = ChunkOptions(),
    **unknown: NoReturn,
) -> Result:
    """Direct preference optimisation: with r = log π(y) − log π_ref(y) for the chosen and the rejected completion,

        loss = mean over pairs of −log σ(β (r_chosen − r_rejected))        for "sigmoid"

    Args:
        x: (2B, T, H).
        head: as in `tigon.losses.preference`, as are x, target and chunks.
        target: (2B, T).
        ref: (chosen, rejected), (B,) each, sums of log-probabilities under the reference; or a `tigon.losses.Hidden`
            with the reference's hidden states and head; None with `reference_free`.
        config: the loss types and their parameters.
        chunks: which tokens are left out, and the walk's cost.
    Returns: the loss, and rewards/chosen, /rejected, /accuracies, /margins (β r), logps/chosen, /rejected (sums),
        logits/chosen, /rejected (means over valid tokens, before the temperature), entropy (in nats a token),
        mean_token_accuracy (share of chosen tokens that no other token beats).
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Types that sort the batch, "aot" and "aot_unpaired", need all log-probabilities before the first gradient: a batch
    whose logits do not fit a chunk then costs a fourth matrix product a token.

    Sources: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; for each type in docs/losses/preference.md.

    Replaces::

        logp = F.log_softmax(F.linear(x, weight, bias).float(), dim=-1)
        logps = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(target == -100, 0).sum(-1)
        chosen, rejected = logps.chunk(2)
        margin = beta * ((chosen - ref[0]) - (rejected - ref[1]))
        loss = -F.logsigmoid(margin).mean()
    """
    if unknown:
        raise make_keyword_error("dpo", unknown, DPO)
    c, pairs = config, _count_pairs("dpo", x, target)
    if (ref is None) != c.reference_free:
        raise ValueError(
            "dpo: ref must be (chosen, rejected) log-probabilities or a Hidden, or left out with reference_free=True, "
            f"got {'none' if ref is None else 'one'} with reference_free={c.reference_free}."
        )
    # Sequence log-probabilities enter as a tensor; a Hidden goes through the walk's buffer.
    given = () if ref is None or isinstance(ref, Hidden) else tuple(ref)
    for t, side in zip(given, ("chosen", "rejected"), strict=True) if given else ():
        _check_logps("dpo", f"ref's {side}", t, pairs)
    weights = None
    if c.ld_alpha is not None:
        mask = as_labels(target, c.ignore_index) != c.ignore_index
        weights = _token_weights(mask, c.ld_alpha, torch.promote_types(x.dtype, torch.float32))
    delta = None if c.bco_delta is None else _fill_sequences(x, c.bco_delta)
    tensors = DPOTensors(torch.cat(given) if given else None, weights, delta)
    terms = tuple(Term(name, weight) for name, weight in zip(c.types, c.weights, strict=True))
    options = DPOOptions(
        c.beta, c.label_smoothing, c.f_divergence_type, c.f_alpha_divergence_coef, c.discopop_tau, terms
    )
    return token_loss(
        DPOFamily.for_tensors(options, tensors), tensors, x, head, target, reference=_hidden_or_none(ref),
        ignore_index=c.ignore_index, temperature=c.temperature, chunks=chunks,
    )  # fmt: skip


def orpo(
    x: Tensor,
    head: AnyHead,
    target: Tensor,
    completion_mask: Tensor | None = None,
    *,
    config: ORPO = ORPO(),
    chunks: ChunkOptions = ChunkOptions(),
    **unknown: NoReturn,
) -> Result:
    """Odds ratio preference optimisation: with p = exp(mean token log-probability), odds = p / (1 − p),

        loss = NLL(chosen) − β · mean over pairs of log σ(log odds(chosen) − log odds(rejected))

    Args:
        x: (2B, T, H).
        head: as in `tigon.losses.preference`, as are x, target and chunks.
        target: (2B, T).
        completion_mask: (2B, T) bool, the tokens in `target` that enter the odds; all by default. The NLL is over all
            chosen tokens: TRL takes the NLL over prompt and completion, the odds over the completion.
        config: β.
        chunks: which tokens are left out, and the walk's cost.
    Returns: the loss, and `dpo`'s metrics except the last two, with rewards β · mean log-probability and logps means;
        nll_loss, log_odds_ratio (mean log σ), log_odds_chosen (mean log odds difference).
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Hong et al. 2024, https://arxiv.org/abs/2403.07691
    """
    if unknown:
        raise make_keyword_error("orpo", unknown, ORPO)
    c = config
    _count_pairs("orpo", x, target)
    if completion_mask is not None and completion_mask.shape != target.shape:
        raise ValueError(
            f"orpo: completion_mask must have target's shape {tuple(target.shape)}, got {tuple(completion_mask.shape)}."
        )
    tensors = ORPOTensors(completion_mask)
    return token_loss(
        ORPOFamily.for_tensors(Beta(c.beta), tensors), tensors, x, head, target, ignore_index=c.ignore_index,
        temperature=c.temperature, chunks=chunks,
    )  # fmt: skip


def cpo(
    x: Tensor,
    head: AnyHead,
    target: Tensor,
    *,
    config: CPO = CPO(),
    chunks: ChunkOptions = ChunkOptions(),
    **unknown: NoReturn,
) -> Result:
    """Contrastive preference optimisation, without a reference: with m = r(chosen) − r(rejected), r = log π(y),

        loss = mean over pairs of −log σ(β m) + cpo_alpha · NLL(chosen)

    Args:
        x: (2B, T, H).
        head: as in `tigon.losses.preference`, as are x, target and chunks.
        target: (2B, T).
        config: the loss type and its parameters.
        chunks: which tokens are left out, and the walk's cost.
    Returns: the loss, and `dpo`'s metrics except the last two, with rewards β r; nll_loss.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Sources: Xu et al. 2024, https://arxiv.org/abs/2401.08417; AlphaPO, https://arxiv.org/abs/2501.03884
    """
    if unknown:
        raise make_keyword_error("cpo", unknown, CPO)
    c = config
    # The family subtracts γ / β from the margin, before β multiplies it.
    gamma = c.simpo_gamma / c.beta if c.loss_type in ("simpo", "alphapo") else 0.0
    nll_weight = 0.0 if c.loss_type == "alphapo" else c.cpo_alpha
    average = c.loss_type in AVERAGED
    options = CPOOptions(c.loss_type, average, c.beta, gamma, c.label_smoothing, nll_weight, c.alpha)
    return _contrast("cpo", options, x, head, target, c, chunks)


def simpo(
    x: Tensor,
    head: AnyHead,
    target: Tensor,
    *,
    config: SimPO = SimPO(),
    chunks: ChunkOptions = ChunkOptions(),
    **unknown: NoReturn,
) -> Result:
    """Simple preference optimisation: with r the mean token log-probability, and no reference,

        loss = mean over pairs of −log σ(β (r_chosen − r_rejected) − γ) + sft_weight · NLL(chosen)

    Args:
        x: (2B, T, H).
        head: as in `tigon.losses.preference`, as are x, target and chunks.
        target: (2B, T).
        config: the loss type and its parameters.
        chunks: which tokens are left out, and the walk's cost.
    Returns: the loss, and `cpo`'s metrics.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Meng et al. 2024, https://arxiv.org/abs/2405.14734

    Replaces::

        logp = F.log_softmax(F.linear(x, weight, bias).float(), dim=-1)
        logps = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(target == -100, 0).sum(-1)
        chosen, rejected = (logps / (target != -100).sum(-1)).chunk(2)
        loss = -F.logsigmoid(beta * (chosen - rejected - gamma_beta_ratio)).mean()
    """
    if unknown:
        raise make_keyword_error("simpo", unknown, SimPO)
    c = config
    options = CPOOptions(c.loss_type, True, c.beta, c.gamma_beta_ratio, c.label_smoothing, c.sft_weight)
    return _contrast("simpo", options, x, head, target, c, chunks)


def kto(
    x: Tensor,
    head: AnyHead,
    target: Tensor,
    unpaired: Unpaired,
    *,
    config: KTO = KTO(),
    chunks: ChunkOptions = ChunkOptions(),
    **unknown: NoReturn,
) -> Result:
    """Kahneman-Tversky optimisation, for unpaired good or bad completions: with r = log π(y) / π_ref(y),

        loss = mean over sequences of w · (1 − σ(±β (r − KL)))      + and desirable_weight if desirable, else −
        KL   = max(0, mean r over mismatched completions)           no gradient

    Args:
        x: (S, T, H), a completion per sequence.
        head: as in `tigon.losses.preference`, as are x, target and chunks.
        target: (S, T).
        unpaired: a `tigon.losses.Unpaired`: which completions are desirable, their log-probabilities under the
            reference, and the KL term.
        config: the loss type and its parameters.
        chunks: which tokens are left out, and the walk's cost.
    Returns: the loss, and rewards/chosen, /rejected, /margins, logps/chosen, /rejected, logits/chosen, /rejected, means
        over the desirable sequences and over the others (for logits: over their tokens), NaN where there are none;
        entropy, in nats a token; kl.
    Raises: ValueError for shapes, dtypes or options that do not fit.

    Source: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306; "apo_zero_unpaired":
    https://arxiv.org/abs/2408.06266
    """
    if unknown:
        raise make_keyword_error("kto", unknown, KTO, unpaired=Unpaired)
    c = config
    if not isinstance(unpaired, Unpaired):
        raise ValueError(f"kto: unpaired must be a tigon.losses.Unpaired, got {type(unpaired).__name__}.")
    label, ref, kl = unpaired
    if x.dim() != 3 or target.shape != x.shape[:2]:
        raise ValueError(f"kto: x must be (S, T, H) and target (S, T), got {tuple(x.shape)} and {tuple(target.shape)}.")
    S = x.shape[0]
    if label.dtype != torch.bool or label.shape != (S,):
        raise ValueError(f"kto: unpaired.label must be ({S},) bool, got {tuple(label.shape)} {label.dtype}.")
    if (kl is None) == (c.loss_type == "kto"):
        raise ValueError(
            f"kto: unpaired.kl must be {'given' if kl is None else 'left out'} for loss_type {c.loss_type!r}, got "
            f"{'none' if kl is None else type(kl).__name__}."
        )
    _check_ref("kto", "unpaired.ref", ref, S)
    if isinstance(kl, Mismatched):
        kl = _estimate_kl(kl, head, c, chunks)
    elif isinstance(kl, tuple):
        if kl[0].shape != kl[1].shape:
            raise ValueError(
                f"kto: unpaired.kl's two must have one shape, got {tuple(kl[0].shape)} and {tuple(kl[1].shape)}."
            )
        kl = (kl[0].detach() - kl[1].detach()).mean()
    # Numbers become device tensors by arithmetic: a copy from the host would make the host wait.
    zero = to_scalar(0.0, x.device, torch.promote_types(x.dtype, torch.float32))
    kl = (zero if kl is None else zero + kl).detach().clamp(min=0)
    sequence_weight = torch.where(label, zero + c.desirable_weight, zero + c.undesirable_weight) / max(1, S)
    tensors = KTOTensors(sequence_weight, label, _fill_sequences(x, kl), _logps_or_none(ref))
    loss, results = token_loss(
        KTOFamily.for_tensors(Beta(c.beta), tensors), tensors, x, head, target, reference=_hidden_or_none(ref),
        ignore_index=c.ignore_index, temperature=c.temperature, chunks=chunks,
    )  # fmt: skip
    # The walk sums over sequences, since parts do not know the sequence count: the means are taken here. Without
    # sequences of a kind they are 0 / 0, NaN.
    tokens = (as_labels(target, c.ignore_index) != c.ignore_index).sum(1)
    chosen, tokens_chosen, all_tokens = label.sum(), torch.where(label, tokens, 0).sum(), tokens.sum()
    for name, of_chosen, of_all in (
        ("rewards", chosen, S),
        ("logps", chosen, S),
        ("logits", tokens_chosen, all_tokens),
    ):
        results[f"{name}/chosen"] = results[f"{name}/chosen"] / of_chosen
        results[f"{name}/rejected"] = results[f"{name}/rejected"] / (of_all - of_chosen)
    results["rewards/margins"] = results["rewards/chosen"] - results["rewards/rejected"]
    results["entropy"] = results["entropy"] / all_tokens.clamp(min=1)
    return loss, {**results, "kl": kl}


# ----------------------------------------------------------------------------------------------------------- checks


def _count_pairs(name: str, x: Tensor, target: Tensor) -> int:
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


def _check_ref(name: str, argument: str, ref: object, count: int) -> None:
    if isinstance(ref, Hidden):
        return
    if not isinstance(ref, Tensor):
        raise ValueError(f"{name}: {argument} must be log-probabilities or a Hidden, got {type(ref).__name__}.")
    _check_logps(name, argument, ref, count)


def _logps_or_none(ref: Tensor | Hidden) -> Tensor | None:
    return None if isinstance(ref, Hidden) else ref


def _hidden_or_none(ref: object) -> Hidden | None:
    return ref if isinstance(ref, Hidden) else None


# ------------------------------------------------------------------------------------------------------------ sides


def _fill_sequences(x: Tensor, value: Tensor | float) -> Tensor:
    """The same number for each sequence."""
    return to_scalar(value, x.device, torch.promote_types(x.dtype, torch.float32)).expand(x.shape[0])


def _token_weights(mask: Tensor, ld_alpha: float, dtype: torch.dtype) -> Tensor:
    """Token weights: 1 up to the length of the pair's shorter completion, ld_alpha for tokens beyond."""
    # A token's index among the valid tokens in the sequence: prompts have different lengths.
    nth, counts = mask.cumsum(1), mask.sum(1)
    shared = torch.minimum(*counts.chunk(2)).repeat(2).unsqueeze(1) if mask.shape[0] else counts.unsqueeze(1)
    ones = mask.to(dtype)
    return torch.where(nth <= shared, ones, ld_alpha * ones)


def _contrast(
    name: str, options: CPOOptions, x: Tensor, head: AnyHead, target: Tensor, config: CPO | SimPO,
    chunks: ChunkOptions,
) -> Result:  # fmt: skip
    _count_pairs(name, x, target)
    tensors = NoTensors()
    return token_loss(
        CPOFamily.for_tensors(options, tensors), tensors, x, head, target, ignore_index=config.ignore_index,
        temperature=config.temperature, chunks=chunks, name=name,
    )  # fmt: skip


def _estimate_kl(kl: Mismatched, head: AnyHead, config: KTO, chunks: ChunkOptions) -> Tensor:
    """Mean log π(y) / π_ref(y) over the sequences, without gradient."""
    _check_ref("kto", "unpaired.kl.ref", kl.ref, kl.x.shape[0])
    tensors = MeanRatioTensors(_fill_sequences(kl.x, 1 / max(1, kl.x.shape[0])), _logps_or_none(kl.ref))
    with torch.no_grad():
        return token_loss(
            MeanRatio.for_tensors(NoOptions(), tensors), tensors, kl.x, head, kl.target,
            reference=_hidden_or_none(kl.ref), ignore_index=config.ignore_index, temperature=config.temperature,
            chunks=replace(chunks, valid_tokens=kl.valid_tokens),
        )[0]  # fmt: skip


EXAMPLES = {
    "dpo": Example(
        None,
        (SEQUENCES, HEAD, SEQUENCES, HEAD),
        lambda x, w, rx, rw: dpo(x, w, make_ids(x, 4, 32), Hidden(rx.detach(), rw.detach()), config=DPO(beta=0.01))[0],
    ),
    "orpo": Example(None, (SEQUENCES, HEAD), lambda x, w: orpo(x, w, make_ids(x, 4, 32), config=ORPO())[0]),
}
