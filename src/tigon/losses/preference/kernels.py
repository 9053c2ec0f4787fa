"""Pair losses for a single-part batch, in two launches: `tigon.losses.preference.families` in kernels.

    per pair     tokens → both sequences' log-probabilities → the loss, slopes, metric terms
    per batch    terms → the loss, the metrics

With few tokens the loss is host-bound, and in PyTorch each step in the formula is a launch, forward and backward. The
types that most runs use have kernels; the families implement the others, and are the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan, do_not_specialize, jit, launch, next_power_of_2, register_limit, tl
from tigon.losses.family import Whole

# A pair's terms, a column each: those in `PAIR_METRICS`, three that differ by family, the loss, the counts.
COLUMNS = 14
# Half a unit in the last place below 1, as in `log1mexp`.
LEAST = tl.constexpr(2.0**-24)
LN2 = tl.constexpr(0.6931471805599453)
# Reads, over all programs, up to which each program counts the chosen tokens itself; beyond, they are counted once.
COUNTED_ANEW = 2**24


class Contrast(NamedTuple):
    """A pair family, as the kernels take it.

    kind: "dpo", "orpo", or how CPO compares rewards: "sigmoid", "hinge", "ipo".
    average: a sequence's log-probability is the mean over tokens.
    gamma: subtracted from the reward difference, before β. weight: on the contrast. nll_weight: on the chosen's NLL.
    """

    kind: str
    average: bool
    beta: float
    gamma: float = 0.0
    smoothing: float = 0.0
    weight: float = 1.0
    nll_weight: float = 0.0


def write_pair_slopes(
    of: Contrast, batch: Whole, reference: Tensor | None, completion: Tensor | None, loss: Tensor, metrics: Tensor,
    slopes: Sequence[Tensor | None], grad_scale: float,
) -> None:  # fmt: skip
    """Write loss, metrics and slopes, as `Family.launch` specifies.

    reference: sequence log-probabilities, (S,). completion: (S, T), the tokens that a mean is over.
    """
    (S, T), target = batch.target.shape, batch.target
    pairs = S // 2
    total = None
    if of.nll_weight and pairs * pairs * T > COUNTED_ANEW:
        total = (target[:pairs] != batch.ignore_index).sum()
    terms = loss.new_empty((COLUMNS, pairs))
    numbers = (
        pairs, T, batch.ignore_index, grad_scale, of.beta, of.gamma, of.smoothing, of.weight, of.nll_weight,
        1 / (2 * of.beta),
    )  # fmt: skip
    constants = of.kind, of.average, of.nll_weight != 0.0
    tensors = (
        target, batch.logprob, batch.entropy, batch.mean_logit, batch.reference, _as_bytes(batch.is_top1),
        None if reference is None else reference.contiguous(), _as_bytes(completion), total, slopes[0], terms,
    )  # fmt: skip
    key = (numbers, constants, *(None if t is None else t.dtype for t in tensors))

    def plan() -> Plan:
        block = min(1024, next_power_of_2(T))
        warps = max(1, block // 128)
        options = {"num_warps": warps, **register_limit(loss.device, 128)}
        return pairs, (*numbers, *constants, block, 256 * min(4, warps)), options

    launch(_pairs_kernel, key, tensors, plan)
    of_batch = pairs, batch.visited, of.nll_weight

    def finish() -> Plan:
        return 1, (*of_batch, of.kind, min(1024, next_power_of_2(pairs))), {"num_warps": 4}

    launch(_pair_metrics_kernel, (of_batch, of.kind), (terms, loss, metrics), finish)


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """Bools as the kernel reads them."""
    if mask is None:
        return None
    mask = mask.contiguous()
    return mask.view(torch.int8) if mask.dtype == torch.bool else mask


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _log_sigmoid(z):
    u = tl.exp(-tl.abs(z))
    # log(1 + u), and the part lost by rounding 1 + u: near 0 that is everything.
    w = 1.0 + u
    return tl.where(z < 0, z, 0.0) - (tl.log(w) + (u - (w - 1.0)) / w)


@jit
def _one_minus_exp(x):
    """1 − exp(x) for x < 0, to the last digits also near 0."""
    # Above −log 2 by a series: expm1(x) = x (1 + x/2 (1 + x/3 (1 + …))).
    series = 1.0
    for i in tl.static_range(9):
        series = 1.0 + series * x / (10 - i)
    return tl.where(x < -LN2, 1.0 - tl.exp(x), -x * series)


@jit
def _log_odds(logp):
    """log p − log(1 − p), and the slope with respect to log p."""
    x = tl.where(logp > -LEAST, -LEAST, logp)
    rest = _one_minus_exp(x)
    return logp - tl.log(rest), 1.0 + tl.where(logp <= -LEAST, tl.exp(x) / rest, 0.0)


@jit
def _in_completion(ptr, at, counts):
    """Whether valid tokens are also in the completion."""
    if ptr is not None:
        here = counts & (tl.load(ptr + at, mask=counts, other=0) != 0)
    else:
        here = counts
    return here


@jit
def _sum_sequence(
    target_ptr, logprob_ptr, entropy_ptr, mean_ptr, theirs_ptr, top1_ptr, completion_ptr, sequence, T, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over a sequence: tokens, completion tokens; log-probabilities over each, the reference's, entropies, mean
    logits; the tokens that no other token beats."""
    count, within = 0, 0
    all_logprob, logprob, theirs, entropy, logits, hits = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        at = sequence * T + t
        counts = (t < T) & (tl.load(target_ptr + at, mask=t < T, other=ignore_index) != ignore_index)
        here = _in_completion(completion_ptr, at, counts)
        count += tl.sum(counts.to(tl.int32), 0)
        within += tl.sum(here.to(tl.int32), 0)
        own = tl.load(logprob_ptr + at, mask=counts, other=0.0)
        all_logprob += tl.sum(own, 0)
        logprob += tl.sum(tl.where(here, own, 0.0), 0)
        logits += tl.sum(tl.load(mean_ptr + at, mask=counts, other=0.0), 0)
        if theirs_ptr is not None:
            theirs += tl.sum(tl.load(theirs_ptr + at, mask=counts, other=0.0), 0)
        if entropy_ptr is not None:
            entropy += tl.sum(tl.load(entropy_ptr + at, mask=counts, other=0.0), 0)
        if top1_ptr is not None:
            hits += tl.sum(tl.load(top1_ptr + at, mask=counts, other=0).to(tl.float32), 0)
    return count, within, all_logprob, logprob, theirs, entropy, logits, hits


@jit
def _write_slopes(
    target_ptr, completion_ptr, dlogprob_ptr, sequence, T, ignore_index, of_completion, of_all, BLOCK: tl.constexpr
):
    """Write each token's slope from the sequence log-probability's slope and the NLL's."""
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        at = sequence * T + t
        counts = (t < T) & (tl.load(target_ptr + at, mask=t < T, other=ignore_index) != ignore_index)
        here = _in_completion(completion_ptr, at, counts)
        slope = tl.where(here, of_completion, 0.0) + tl.where(counts, of_all, 0.0)
        tl.store(dlogprob_ptr + at, slope, mask=t < T)


# One program per pair, for B pairs with T tokens per sequence.
#   target, logprob, entropy, mean, theirs, top1    (2B, T), as in `Whole`; theirs: under the reference model
#   reference       (2B,) given sequence log-probabilities, or None
#   completion      (2B, T) bytes, the tokens that a mean is over, or None for all
#   total           0-d, the valid tokens in all chosen sequences, or None to count them here
#   dlogprob        (2B, T) slopes, times boost, or None; terms: (COLUMNS, B) for `_pair_metrics_kernel`
#   beta … nll_weight, KIND, AVERAGE    as in `Contrast`; ipo: 1 / (2 β). NLL: nll_weight is not 0
@jit
@do_not_specialize("B", "T", "ignore_index")
def _pairs_kernel(
    target_ptr, logprob_ptr, entropy_ptr, mean_ptr, theirs_ptr, top1_ptr, reference_ptr, completion_ptr, total_ptr,
    dlogprob_ptr, terms_ptr,
    B, T, ignore_index, boost, beta, gamma, smoothing, weight, nll_weight, ipo,
    KIND: tl.constexpr, AVERAGE: tl.constexpr, NLL: tl.constexpr, BLOCK: tl.constexpr, COUNT_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per pair: the chosen sequence (…_w), and the rejected sequence (…_l), B sequences behind."""
    w = tl.program_id(0).to(tl.int64)
    l = w + B  # noqa: E741
    count_w, within_w, all_w, logp_w, theirs_w, entropy_w, logits_w, hits_w = _sum_sequence(
        target_ptr, logprob_ptr, entropy_ptr, mean_ptr, theirs_ptr, top1_ptr, completion_ptr, w, T, ignore_index, BLOCK
    )
    count_l, within_l, _, logp_l, theirs_l, entropy_l, logits_l, _ = _sum_sequence(
        target_ptr, logprob_ptr, entropy_ptr, mean_ptr, theirs_ptr, top1_ptr, completion_ptr, l, T, ignore_index, BLOCK
    )
    divisor_w, divisor_l = 1.0, 1.0
    if AVERAGE:
        divisor_w = tl.maximum(within_w, 1).to(tl.float32)
        divisor_l = tl.maximum(within_l, 1).to(tl.float32)
        logp_w, logp_l = logp_w / divisor_w, logp_l / divisor_l
    if reference_ptr is not None:
        theirs_w = tl.load(reference_ptr + w).to(tl.float32)
        theirs_l = tl.load(reference_ptr + l).to(tl.float32)
    first, second, third = 0.0, 0.0, 0.0  # the terms that differ by family
    # slope_w, slope_l: the contrast's slope with respect to each log-probability.
    if KIND == "orpo":
        odds_w, slope_w = _log_odds(logp_w)
        odds_l, slope_l = _log_odds(logp_l)
        odds = odds_w - odds_l
        log_ratio = _log_sigmoid(odds)
        contrast = -beta * log_ratio
        slope = -beta * tl.sigmoid(-odds)
        slope_w, slope_l = slope * slope_w, -slope * slope_l
        first, second, third = -all_w, log_ratio, odds
    else:
        margin = (logp_w - theirs_w) - (logp_l - theirs_l) - gamma
        z = beta * margin
        if KIND == "hinge":
            contrast = tl.where(z < 1.0, 1.0 - z, z * 0.0)
            slope = tl.where(z < 1.0, -beta, 0.0)
        elif KIND == "ipo":
            contrast = (margin - ipo) * (margin - ipo)
            slope = 2.0 * (margin - ipo)
        else:
            contrast = -_log_sigmoid(z)
            contrast = contrast + smoothing * (-_log_sigmoid(-z) - contrast)
            slope = beta * (smoothing * tl.sigmoid(z) - (1.0 - smoothing) * tl.sigmoid(-z))
        slope_w, slope_l = slope, -slope
        if KIND == "dpo":
            first, second = entropy_w + entropy_l, hits_w
        else:
            first = -all_w
    reward_w, reward_l = beta * (logp_w - theirs_w), beta * (logp_l - theirs_l)
    if dlogprob_ptr is not None:
        nll = 0.0
        if NLL:
            if total_ptr is not None:
                total = tl.load(total_ptr)
            else:
                total = tl.zeros((), tl.int64)
                for start in range(0, B * T, COUNT_BLOCK):
                    at = start + tl.arange(0, COUNT_BLOCK)
                    labels = tl.load(target_ptr + at, mask=at < B * T, other=ignore_index)
                    total += tl.sum((labels != ignore_index).to(tl.int32), 0)
            nll = -nll_weight * boost / tl.maximum(total, 1).to(tl.float32)
        share = weight * boost / B
        _write_slopes(
            target_ptr, completion_ptr, dlogprob_ptr, w, T, ignore_index, slope_w * share / divisor_w, nll, BLOCK
        )
        _write_slopes(
            target_ptr, completion_ptr, dlogprob_ptr, l, T, ignore_index, slope_l * share / divisor_l, 0.0, BLOCK
        )
    terms_ptr += w
    tl.store(terms_ptr, reward_w)
    tl.store(terms_ptr + B, reward_l)
    tl.store(terms_ptr + 2 * B, tl.where(reward_w > reward_l, 1.0, 0.0))
    tl.store(terms_ptr + 3 * B, reward_w - reward_l)
    tl.store(terms_ptr + 4 * B, logp_w)
    tl.store(terms_ptr + 5 * B, logp_l)
    tl.store(terms_ptr + 6 * B, logits_w)
    tl.store(terms_ptr + 7 * B, logits_l)
    tl.store(terms_ptr + 8 * B, first)
    tl.store(terms_ptr + 9 * B, second)
    tl.store(terms_ptr + 10 * B, third)
    tl.store(terms_ptr + 11 * B, weight * contrast)
    tl.store(terms_ptr + 12 * B, count_w.to(tl.float32))
    tl.store(terms_ptr + 13 * B, count_l.to(tl.float32))


@jit
def _sum_column(terms_ptr, column, B, BLOCK: tl.constexpr):
    total = 0.0
    for start in range(0, B, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(terms_ptr + column * B + i, mask=i < B, other=0.0), 0)
    return total


# One program.
#   terms           (COLUMNS, B); loss: 0-d; metrics: one number each, in the family's order
#   visited         number of visited tokens
@jit
@do_not_specialize("B", "visited")
def _pair_metrics_kernel(
    terms_ptr, loss_ptr, metrics_ptr, B, visited, nll_weight, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """A single program adds the pairs' terms in a fixed order."""
    count_w, count_l = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, B, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count_w += tl.sum(tl.load(terms_ptr + 12 * B + i, mask=i < B, other=0.0).to(tl.int64), 0)
        count_l += tl.sum(tl.load(terms_ptr + 13 * B + i, mask=i < B, other=0.0).to(tl.int64), 0)
    tokens_w, tokens_l = tl.maximum(count_w, 1).to(tl.float32), tl.maximum(count_l, 1).to(tl.float32)
    pairs = tl.maximum(B, 1).to(tl.float32)
    for i in tl.static_range(6):
        tl.store(metrics_ptr + i, _sum_column(terms_ptr, i, B, BLOCK) / pairs)
    tl.store(metrics_ptr + 6, _sum_column(terms_ptr, 6, B, BLOCK) / tokens_w)
    tl.store(metrics_ptr + 7, _sum_column(terms_ptr, 7, B, BLOCK) / tokens_l)
    loss = _sum_column(terms_ptr, 11, B, BLOCK) / pairs
    first = _sum_column(terms_ptr, 8, B, BLOCK)
    if KIND == "dpo":
        tl.store(metrics_ptr + 8, first / tl.maximum(count_w + count_l, 1).to(tl.float32))
        tl.store(metrics_ptr + 9, _sum_column(terms_ptr, 9, B, BLOCK) / tokens_w)
    else:
        nll = first / tokens_w
        tl.store(metrics_ptr + 8, nll)
        if nll_weight != 0.0:  # 0 · inf would be NaN
            loss += nll_weight * nll
        if KIND == "orpo":
            tl.store(metrics_ptr + 9, _sum_column(terms_ptr, 9, B, BLOCK) / pairs)
            tl.store(metrics_ptr + 10, _sum_column(terms_ptr, 10, B, BLOCK) / pairs)
    # Too few tokens were visited: NaN instead of silently dropping the rest.
    tl.store(loss_ptr, tl.where(count_w + count_l <= visited, loss, float("nan")))
