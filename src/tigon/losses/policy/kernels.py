"""Policy losses for a single-part batch, in two launches; `tigon.losses.policy.family` in kernels.

    per sequence   tokens → sums for loss and metrics; d loss / d logprob and d loss / d entropy per token
    per batch      sums → the loss, the metrics

With few tokens the loss is host-bound, and in PyTorch each step in the formula is a launch, forward and backward.
`Policy` is the specification; slopes match autograd, ties and infinities included: half to each side where both terms
in a minimum are equal, a select and no product where 0 would meet an infinite number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan, do_not_specialize, jit, launch, next_power_of_2, register_limit, tl
from tigon.losses.family import Whole

# A sequence's sums, a column each.
COUNT, LOSS, ENTROPY, KL, BONUS, LOW, HIGH, PHI, RATIO, LEAST, MOST = (tl.constexpr(i) for i in range(11))
COLUMNS = 11
# As in `family`.
RATIO_BOUND = tl.constexpr(80.0)
LOG_LEAST = tl.constexpr(math.log(1e-8))
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
INFINITY = tl.constexpr(math.inf)
# Reads, over all programs, up to which each program counts the batch's tokens itself; beyond, they are counted once.
COUNTED_ANEW = 2**24


KERNEL_FORMULAS = ("clipped", "cispo", "sapo", "vespo")


class Formula(NamedTuple):
    """A `Policy`, as the kernels take it.

    kind: the formula, as in `PolicyLoss`. options: `PolicyOptions`.
    share: a token's weight: 1 over S and over the "sequence" length, over all "tokens", over "items", a tensor; or a
        "number".
    number: that number times S, if `per_sequence`.
    places: each metric's index in the result.
    """

    kind: str
    share: str
    number: float
    per_sequence: bool
    options: Any
    places: dict[str, int]


def write_policy_slopes(
    formula: Formula, batch: Whole, loss: Tensor, metrics: Tensor, slopes: Sequence[Tensor | None], grad_scale: float
) -> None:
    """Write loss, metrics and slopes, as `Family.launch` specifies."""
    (S, T), of, target = batch.target.shape, formula.options, batch.target
    rows = [None if t is None else _as_contiguous_floats(t) for t in batch.tensors]
    A, old, ref, sampler, ratio, items, bonus = rows
    ref = batch.reference if of.reference == "head" else ref
    by_tokens = [t is not None and t.shape == target.shape for t in (A, old, ratio)]
    items, bonus = (None if t is None else _on_device(t, loss) for t in (items, bonus))
    has_bonus = bonus is not None or of.bonus != 0.0
    total = None
    if (formula.share == "tokens" or has_bonus) and S * S * T > COUNTED_ANEW:
        total = (target != batch.ignore_index).sum()
    sums = loss.new_empty((COLUMNS, S))
    number = formula.number / S if formula.per_sequence else formula.number
    delta, drift = of.delta < math.inf, of.drift < math.inf
    numbers = (
        S, T, batch.ignore_index, grad_scale, number, of.bonus, 1.0 - of.low, 1.0 + of.high, of.high, of.delta, of.beta,
        of.sampler_low, of.sampler_high, of.drift, of.tau_pos, of.tau_neg, of.k_pos, of.k_neg, of.lambda_pos,
        of.lambda_neg,
    )  # fmt: skip
    constants = (
        formula.kind, of.level, of.mode, formula.share, *by_tokens, delta, drift, of.reference != "none",
        bool(of.beta), bool(of.correct_kl), has_bonus,
    )  # fmt: skip
    tensors = (
        target, batch.logprob, batch.entropy, A, old, ref, sampler, ratio, items, bonus, total, *slopes, sums,
    )  # fmt: skip
    key = (numbers, constants, *(None if t is None else t.dtype for t in tensors))

    def plan() -> Plan:
        block = min(1024, next_power_of_2(T))
        warps = max(1, block // 128)
        # Without a limit the assembler takes 64 registers and spills one, although more are available.
        options = {"num_warps": warps, **register_limit(loss.device, 128)}
        return S, (*numbers, *constants, block, 256 * min(4, warps)), options

    launch(_policy_kernel, key, tensors, plan)
    logged = not by_tokens[0] and of.level != "token", not by_tokens[0]
    of_sequences = (ratio is not None and not by_tokens[2]) or of.mode.startswith("sequence")
    names = "entropy", "kl", "policy_loss", "vespo/phi_seq_mean", "cispo_clip_ratio", "clip_ratio/low_mean"
    places = [formula.places.get(name, -1) for name in (*names, "sampling/importance_sampling_ratio/min")]
    constants = (*logged, of_sequences, *places)

    def finish() -> Plan:
        return 1, (S, batch.visited, *constants, min(1024, next_power_of_2(S))), {"num_warps": 4}

    launch(_metrics_kernel, (S, batch.visited, constants), (sums, loss, metrics), finish)


def _as_contiguous_floats(t: Tensor) -> Tensor:
    """A tensor as the kernel reads it: contiguous floats."""
    return t.contiguous() if t.dtype.is_floating_point else t.float().contiguous()


def _on_device(t: Tensor, like: Tensor) -> Tensor:
    """A 0-d tensor where kernels can read it. A CPU tensor is filled in: no copy makes the host wait."""
    return like.new_full((), float(t)) if t.device.type == "cpu" != like.device.type else t


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _load_tokens(ptr, sequence, at, valid, BY_TOKENS: tl.constexpr):
    """Token values, or the sequence's value for each token; 0 for ignored tokens."""
    if BY_TOKENS:
        values = tl.load(ptr + at, mask=valid, other=0.0).to(tl.float32)
    else:
        values = tl.zeros(valid.shape, tl.float32) + tl.load(ptr + sequence).to(tl.float32)
    return values


@jit
def _clamp(x, least, most):
    """As torch clamps: a NaN stays NaN."""
    return tl.where(x < least, least, tl.where(x > most, most, x))


@jit
def _nan_to_zero(x):
    """torch.nan_to_num(x, nan=0.0)."""
    return tl.where(x != x, 0.0, _clamp(x, -LARGEST, LARGEST))


@jit
def _bound_ratio(difference, low, high, MODE: tl.constexpr):
    """The sampler's ratio, clipped or masked to the bounds."""
    ratio = tl.exp(difference)
    if MODE == "token_truncate" or MODE == "sequence_truncate":
        bounded = _clamp(ratio, low, high)
    else:
        bounded = tl.where((ratio < low) | (ratio > high), 0.0, ratio)
    return bounded


@jit
def _load_sampler_ratio(
    ratio_ptr, sampler_ptr, sequence, at, valid, near, of_sequence, low, high, MODE: tl.constexpr,
    BY_TOKENS: tl.constexpr,
):  # fmt: skip
    """The given ratio, of_sequence, or the token ratio. near: old log-probabilities, or the policy's."""
    if ratio_ptr is not None:
        ratio = _load_tokens(ratio_ptr, sequence, at, valid, BY_TOKENS)
    elif MODE == "sequence_truncate" or MODE == "sequence_mask":
        ratio = tl.zeros(valid.shape, tl.float32) + of_sequence
    else:
        theirs = tl.load(sampler_ptr + at, mask=valid, other=0.0).to(tl.float32)
        ratio = _bound_ratio(tl.where(valid, _nan_to_zero(near - theirs), 0.0), low, high, MODE)
    return ratio


@jit
def _sum_where(x, which):
    return tl.sum(tl.where(which, x, 0.0), 0)


@jit
def _load_valid(target_ptr, at, inside, ignore_index):
    return inside & (tl.load(target_ptr + at, mask=inside, other=ignore_index) != ignore_index)


@jit
def _sum_sequence(
    target_ptr, logprob_ptr, old_ptr, sampler_ptr, ratio_ptr, sequence, T, ignore_index, sampler_low, sampler_high,
    KIND: tl.constexpr, LEVEL: tl.constexpr, MODE: tl.constexpr, OLD_BY_TOKENS: tl.constexpr,
    RATIO_BY_TOKENS: tl.constexpr, DRIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over a sequence that the formula needs before any token.

    Returns: count; Σ over the log-ratio, the drift, and old − sampler; log w for "vespo".
    """
    HAS_RATIO: tl.constexpr = (ratio_ptr is not None) or (MODE != "none")
    OF_SEQUENCE: tl.constexpr = (MODE == "sequence_truncate") or (MODE == "sequence_mask")
    lanes = tl.arange(0, BLOCK)
    count = 0
    log_weight_sum, drift_sum, difference_sum, log_w = 0.0, 0.0, 0.0, 0.0
    for start in range(0, T, BLOCK):
        t = start + lanes
        at = sequence * T + t
        valid = _load_valid(target_ptr, at, t < T, ignore_index)
        count += tl.sum(valid.to(tl.int32), 0)
        if LEVEL != "token" or DRIFT or OF_SEQUENCE or KIND == "vespo":
            logprob = tl.load(logprob_ptr + at, mask=valid, other=0.0)
            old = logprob
            if old_ptr is not None and OLD_BY_TOKENS:
                old = tl.load(old_ptr + at, mask=valid, other=0.0).to(tl.float32)
            if LEVEL == "total" and old_ptr is not None and not OLD_BY_TOKENS:
                log_weight_sum += tl.sum(logprob, 0)
            elif LEVEL != "token":
                log_weight_sum += tl.sum(logprob - old, 0)
            if DRIFT:
                theirs = old
                if sampler_ptr is not None:
                    theirs = tl.load(sampler_ptr + at, mask=valid, other=0.0).to(tl.float32)
                drift_sum += _sum_where(_nan_to_zero(theirs - logprob), valid)
            if OF_SEQUENCE:
                theirs = tl.load(sampler_ptr + at, mask=valid, other=0.0).to(tl.float32)
                difference_sum += _sum_where(_nan_to_zero(old - theirs), valid)
            if KIND == "vespo":
                # Bounded, so that w^k and e^(−λ w) stay finite.
                log_w += _sum_where(_clamp(logprob - old, -20.0, 20.0), valid)
                if HAS_RATIO:
                    sampled = _load_sampler_ratio(
                        ratio_ptr, sampler_ptr, sequence, at, valid, old, 1.0, sampler_low, sampler_high, MODE,
                        RATIO_BY_TOKENS,
                    )  # fmt: skip
                    log_w += _sum_where(_clamp(tl.log(sampled), LOG_LEAST, 20.0), valid)
    return count, log_weight_sum, drift_sum, difference_sum, log_w


@jit
def _count_tokens(target_ptr, total_ptr, S, T, ignore_index, COUNT_BLOCK: tl.constexpr):
    """Valid tokens in the batch, at least 1."""
    if total_ptr is not None:
        total = tl.load(total_ptr)
    else:
        total = tl.zeros((), tl.int64)
        for start in range(0, S * T, COUNT_BLOCK):
            at = start + tl.arange(0, COUNT_BLOCK)
            labels = tl.load(target_ptr + at, mask=at < S * T, other=ignore_index)
            total += tl.sum((labels != ignore_index).to(tl.int32), 0)
    return tl.maximum(total, 1).to(tl.float32)


@jit
def _clip_loss(A, ratio, open_, low, high, delta, DELTA: tl.constexpr):
    """The "clipped" loss per token, the slope along the ratio, and where the upper and the lower bound hold."""
    bounded, unbounded = ratio, open_ | True
    if DELTA:
        bounded, unbounded = tl.where(ratio > delta, delta, ratio), ratio <= delta
    one, other = bounded * A, _clamp(ratio, low, high) * A
    loss = -tl.where(one < other, one, other)
    # torch's slope for a minimum: half for each of two equal terms.
    of_one = tl.where(one == other, 0.5, tl.where(one > other, 0.0, 1.0))
    of_other = tl.where(one == other, 0.5, tl.where(one < other, 0.0, 1.0))
    dratio = -tl.where(unbounded, of_one * A, 0.0)
    dratio -= tl.where((ratio >= low) & (ratio <= high), of_other * A, 0.0)
    return loss, dratio, (bounded > high) & (A > 0), (bounded < low) & (A < 0)


@jit
def _vespo_weight(A, log_w, k_pos, k_neg, lambda_pos, lambda_neg):
    k, lam = tl.where(A >= 0, k_pos, k_neg), tl.where(A >= 0, lambda_pos, lambda_neg)
    lam = tl.where(lam < 1e-4, 1e-4, lam)
    # A single exponential of the sum: the factors overflow fp32 where their product does not.
    return tl.exp(lam + k * log_w - lam * tl.exp(log_w))


# One program per sequence with T tokens; S sequences.
#   target, logprob, entropy        (S, T) for the policy; 0 at ignored tokens
#   A, old, ref, sampler, ratio     from the rollout, (S, T), or (S,) where …_BY_TOKENS is off; None if not given
#   items, bonus, total             0-d on the device: num_items_in_batch, the entropy's coefficient, the valid-token
#                                   count; None where the number is an argument, or counted here
#   dlogprob, dentropy              (S, T) slopes, times boost, or None; sums: (COLUMNS, S)
#   low, high, cispo_high, delta    ratio bounds; number: a token's weight with SHARE "number"
#   KIND, LEVEL, MODE, SHARE        the formula; token or sequence ratio; the sampler's ratio; a token's weight
@jit
@do_not_specialize("S", "T", "ignore_index")
def _policy_kernel(
    target_ptr, logprob_ptr, entropy_ptr, A_ptr, old_ptr, ref_ptr, sampler_ptr, ratio_ptr, items_ptr, bonus_ptr,
    total_ptr, dlogprob_ptr, dentropy_ptr, sums_ptr,
    S, T, ignore_index, boost, number, bonus, low, high, cispo_high, delta, beta, sampler_low, sampler_high, drift_most,
    tau_pos, tau_neg, k_pos, k_neg, lambda_pos, lambda_neg,
    KIND: tl.constexpr, LEVEL: tl.constexpr, MODE: tl.constexpr, SHARE: tl.constexpr, A_BY_TOKENS: tl.constexpr,
    OLD_BY_TOKENS: tl.constexpr, RATIO_BY_TOKENS: tl.constexpr, DELTA: tl.constexpr, DRIFT: tl.constexpr,
    REF: tl.constexpr, BETA: tl.constexpr, CORRECT_KL: tl.constexpr, WITH_BONUS: tl.constexpr, BLOCK: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    HAS_RATIO: tl.constexpr = (ratio_ptr is not None) or (MODE != "none")
    OF_SEQUENCE: tl.constexpr = (MODE == "sequence_truncate") or (MODE == "sequence_mask")
    count, log_weight_of_sequence, drift_sum, difference_sum, log_w = _sum_sequence(
        target_ptr, logprob_ptr, old_ptr, sampler_ptr, ratio_ptr, sequence, T, ignore_index, sampler_low, sampler_high,
        KIND, LEVEL, MODE, OLD_BY_TOKENS, RATIO_BY_TOKENS, DRIFT, BLOCK,
    )  # fmt: skip
    at_least_one = tl.maximum(count, 1).to(tl.float32)
    if LEVEL == "sequence":
        log_weight_of_sequence = log_weight_of_sequence / at_least_one
    if LEVEL == "total" and old_ptr is not None and not OLD_BY_TOKENS:
        log_weight_of_sequence = log_weight_of_sequence - tl.load(old_ptr + sequence).to(tl.float32)
    drifted = drift_sum / at_least_one
    sampled_of_sequence = 1.0
    if OF_SEQUENCE:
        sampled_of_sequence = _bound_ratio(difference_sum, sampler_low, sampler_high, MODE)
    log_w = _clamp(log_w, LOG_LEAST, 20.0)

    tokens = 1.0
    if SHARE == "tokens" or WITH_BONUS:
        tokens = _count_tokens(target_ptr, total_ptr, S, T, ignore_index, COUNT_BLOCK)
    if SHARE == "sequence":
        share = 1.0 / (at_least_one * S)
    elif SHARE == "tokens":
        share = 1.0 / tokens
    elif SHARE == "items":
        items = tl.load(items_ptr).to(tl.float32)
        share = 1.0 / tl.where(items < 1.0, 1.0, items)
    else:
        share = number
    if WITH_BONUS:
        if bonus_ptr is not None:
            bonus = tl.load(bonus_ptr).to(tl.float32)
        bonus = bonus / tokens
    slope = share * boost

    loss_sum, entropy_sum, kl_sum, low_sum, high_sum, phi_sum, ratio_sum = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    ratio_least, ratio_most, dlog_weight_sum = INFINITY, -INFINITY, 0.0
    for start in range(0, T, BLOCK):
        t = start + lanes
        at = sequence * T + t
        valid = _load_valid(target_ptr, at, t < T, ignore_index)
        logprob = tl.load(logprob_ptr + at, mask=valid, other=0.0)
        A = _load_tokens(A_ptr, sequence, at, valid, A_BY_TOKENS)
        old = logprob
        if old_ptr is not None and OLD_BY_TOKENS:
            old = tl.load(old_ptr + at, mask=valid, other=0.0).to(tl.float32)
        # A sequence-level value is logged at the first token's column, whether that token counts or not.
        first = t == 0
        logged = valid
        if LEVEL != "token" and not A_BY_TOKENS:
            logged = first
        counts = valid
        if LEVEL == "total":
            counts = valid | (first & (count == 0))
        if LEVEL == "token":
            log_weight = logprob - old
        else:
            log_weight = tl.zeros((BLOCK,), tl.float32) + log_weight_of_sequence
        # A clipped ratio has slope 0, but 0 · inf is NaN: ratios that may be clipped are kept finite.
        finite = tl.where(log_weight > RATIO_BOUND, RATIO_BOUND, log_weight)
        open_ = log_weight <= RATIO_BOUND
        if KIND == "clipped" and not DELTA:
            # At negative advantages the minimum is the term without an upper bound: a ratio there stays infinite.
            finite = tl.where(A >= 0, finite, log_weight)
            open_ = open_ | (A < 0)
        ratio = tl.exp(finite)
        dratio = tl.zeros((BLOCK,), tl.float32)
        dlogprob = tl.zeros((BLOCK,), tl.float32)
        if KIND == "clipped":
            loss, dratio, up, down = _clip_loss(A, ratio, open_, low, high, delta, DELTA)
            low_sum += tl.sum((down & logged).to(tl.float32), 0)
            high_sum += tl.sum((up & logged).to(tl.float32), 0)
        elif KIND == "cispo":
            weight = tl.where(ratio > cispo_high, cispo_high, ratio) * A
            loss, dlogprob = -weight * logprob, -weight
            high_sum += tl.sum(((ratio > cispo_high) & (A > 0) & logged).to(tl.float32), 0)
        elif KIND == "sapo":
            tau = tl.where(A > 0, tau_pos, tau_neg)
            gate = tl.sigmoid(tau * (ratio - 1.0))
            loss = -gate * (4.0 / tau) * A
            dratio = -4.0 * A * (1.0 - gate) * gate
        else:
            phi = _vespo_weight(A, log_w, k_pos, k_neg, lambda_pos, lambda_neg)
            loss, dlogprob = -phi * A * logprob, -phi * A
            phi_sum += _sum_where(phi, valid if A_BY_TOKENS else first)
        if DRIFT:
            keep = tl.where((A >= 0) | (drifted <= drift_most), 1.0, 0.0)
            loss, dratio, dlogprob = loss * keep, dratio * keep, dlogprob * keep
        if HAS_RATIO:
            sampled = _load_sampler_ratio(
                ratio_ptr, sampler_ptr, sequence, at, valid, old, sampled_of_sequence, sampler_low, sampler_high, MODE,
                RATIO_BY_TOKENS,
            )  # fmt: skip
            if KIND != "vespo":  # vespo's φ includes the ratio
                loss, dratio, dlogprob = loss * sampled, dratio * sampled, dlogprob * sampled
            seen = valid
            if OF_SEQUENCE or (ratio_ptr is not None and not RATIO_BY_TOKENS):
                seen = first
            ratio_sum += _sum_where(sampled, seen)
            ratio_least = tl.minimum(ratio_least, tl.min(tl.where(seen, sampled, INFINITY), 0))
            ratio_most = tl.maximum(ratio_most, tl.max(tl.where(seen, sampled, -INFINITY), 0))
        if REF:
            d = tl.load(ref_ptr + at, mask=valid, other=0.0).to(tl.float32) - logprob
            exp_d = tl.exp(d)
            kl = exp_d - d - 1.0
            dkl = 1.0 - exp_d
            of_ratio = kl
            if CORRECT_KL:
                kl, dkl = kl * ratio, dkl * ratio
            kl_sum += _sum_where(kl, valid)
            if BETA:
                loss, dlogprob = loss + beta * kl, dlogprob + beta * dkl
                if CORRECT_KL:
                    dratio += beta * of_ratio
        # A select, not a product with the mask: padding may have any logits, and 0 · inf is NaN.
        loss_sum += _sum_where(loss * share, counts)
        entropy_sum += tl.sum(tl.load(entropy_ptr + at, mask=valid, other=0.0), 0)
        if dlogprob_ptr is not None:
            dlog_weight = tl.where(valid & open_, dratio * slope * ratio, 0.0)
            own = tl.where(valid, dlogprob * slope, 0.0)
            if LEVEL == "token":
                own += dlog_weight
            else:
                dlog_weight_sum += tl.sum(dlog_weight, 0)
            tl.store(dlogprob_ptr + at, own, mask=t < T)
        if dentropy_ptr is not None:
            tl.store(dentropy_ptr + at, tl.where(valid, -bonus * boost, 0.0), mask=t < T)

    if LEVEL != "token" and dlogprob_ptr is not None:
        # The slope of the sequence-level ratio, for each token.
        of_each = dlog_weight_sum
        if LEVEL == "sequence":
            of_each = dlog_weight_sum / at_least_one
        tl.debug_barrier()  # other threads may have written the values read again below
        for start in range(0, T, BLOCK):
            t = start + lanes
            at = sequence * T + t
            valid = _load_valid(target_ptr, at, t < T, ignore_index)
            own = tl.load(dlogprob_ptr + at, mask=valid, other=0.0)
            tl.store(dlogprob_ptr + at, own + of_each, mask=valid)
    tl.store(sums_ptr + COUNT * S + sequence, count.to(tl.float32))
    tl.store(sums_ptr + LOSS * S + sequence, loss_sum)
    tl.store(sums_ptr + ENTROPY * S + sequence, entropy_sum)
    tl.store(sums_ptr + KL * S + sequence, kl_sum)
    tl.store(sums_ptr + BONUS * S + sequence, bonus * entropy_sum if WITH_BONUS else 0.0)
    tl.store(sums_ptr + LOW * S + sequence, low_sum)
    tl.store(sums_ptr + HIGH * S + sequence, high_sum)
    tl.store(sums_ptr + PHI * S + sequence, phi_sum)
    tl.store(sums_ptr + RATIO * S + sequence, ratio_sum)
    tl.store(sums_ptr + LEAST * S + sequence, ratio_least)
    tl.store(sums_ptr + MOST * S + sequence, ratio_most)


# One program.
#   sums            (COLUMNS, S) from `_policy_kernel`; loss: 0-d; metrics: one number each
#   visited         number of visited tokens
#   …_OF_SEQUENCES  the metric averages over sequences instead of tokens
@jit
@do_not_specialize("S", "visited")
def _metrics_kernel(
    sums_ptr, loss_ptr, metrics_ptr, S, visited,
    CLIPS_OF_SEQUENCES: tl.constexpr, PHI_OF_SEQUENCES: tl.constexpr, RATIO_OF_SEQUENCES: tl.constexpr,
    AT_ENTROPY: tl.constexpr, AT_KL: tl.constexpr, AT_LOSS: tl.constexpr, AT_PHI: tl.constexpr, AT_CISPO: tl.constexpr,
    AT_CLIPS: tl.constexpr, AT_RATIO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A single program adds the sequences' sums in a fixed order. AT_…: a metric's index, -1 if there is none."""
    total = tl.zeros((), tl.int64)
    loss, entropy, kl, bonus, lows, highs, phi, ratio = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    low_least, high_most, ratio_least, ratio_most = INFINITY, -INFINITY, INFINITY, -INFINITY
    for start in range(0, S, BLOCK):
        i = start + tl.arange(0, BLOCK)
        here = i < S
        i = sums_ptr + i
        count = tl.load(i + COUNT * S, mask=here, other=0.0)
        total += tl.sum(count.to(tl.int64), 0)
        loss += tl.sum(tl.load(i + LOSS * S, mask=here, other=0.0), 0)
        entropy += tl.sum(tl.load(i + ENTROPY * S, mask=here, other=0.0), 0)
        bonus += tl.sum(tl.load(i + BONUS * S, mask=here, other=0.0), 0)
        if AT_KL >= 0:
            kl += tl.sum(tl.load(i + KL * S, mask=here, other=0.0), 0)
        if AT_PHI >= 0:
            phi += tl.sum(tl.load(i + PHI * S, mask=here, other=0.0), 0)
        if AT_CLIPS >= 0 or AT_CISPO >= 0:
            low = tl.load(i + LOW * S, mask=here, other=0.0)
            high = tl.load(i + HIGH * S, mask=here, other=0.0)
            lows += tl.sum(low, 0)
            highs += tl.sum(high, 0)
            # A sequence without tokens, 0 / 0, does not enter the extremes.
            each = tl.where(count > 0, count, 1.0)
            some = here & (count > 0)
            if CLIPS_OF_SEQUENCES:
                each, some = tl.where(here, 1.0, 1.0), here
            low_least = tl.minimum(low_least, tl.min(tl.where(some, low / each, INFINITY), 0))
            high_most = tl.maximum(high_most, tl.max(tl.where(some, high / each, -INFINITY), 0))
        if AT_RATIO >= 0:
            ratio += tl.sum(tl.load(i + RATIO * S, mask=here, other=0.0), 0)
            ratio_least = tl.minimum(ratio_least, tl.min(tl.load(i + LEAST * S, mask=here, other=INFINITY), 0))
            ratio_most = tl.maximum(ratio_most, tl.max(tl.load(i + MOST * S, mask=here, other=-INFINITY), 0))
    tokens, sequences = tl.maximum(total, 1).to(tl.float32), tl.maximum(S, 1).to(tl.float32)
    # Too few tokens were visited: NaN instead of silently dropping the rest.
    tl.store(loss_ptr, tl.where(total <= visited, loss - bonus, float("nan")))
    tl.store(metrics_ptr + AT_ENTROPY, entropy / tokens)
    if AT_KL >= 0:
        tl.store(metrics_ptr + AT_KL, kl / tokens)
    if AT_LOSS >= 0:
        tl.store(metrics_ptr + AT_LOSS, loss)
    if AT_PHI >= 0:
        tl.store(metrics_ptr + AT_PHI, phi / (sequences if PHI_OF_SEQUENCES else tokens))
    all_clips = sequences if CLIPS_OF_SEQUENCES else tokens
    if AT_CISPO >= 0:
        tl.store(metrics_ptr + AT_CISPO, highs / all_clips)
    if AT_CLIPS >= 0:
        tl.store(metrics_ptr + AT_CLIPS, lows / all_clips)
        tl.store(metrics_ptr + AT_CLIPS + 1, highs / all_clips)
        tl.store(metrics_ptr + AT_CLIPS + 2, lows / all_clips + highs / all_clips)
        # Without any sequence the extremes are NaN.
        tl.store(metrics_ptr + AT_CLIPS + 3, tl.where(low_least == INFINITY, float("nan"), low_least))
        tl.store(metrics_ptr + AT_CLIPS + 4, tl.where(high_most == -INFINITY, float("nan"), high_most))
    if AT_RATIO >= 0:
        mean = ratio / (sequences if RATIO_OF_SEQUENCES else tokens)
        # A comparison drops a NaN, which a sum keeps.
        nothing = (mean != mean) | ((total == 0) & (not RATIO_OF_SEQUENCES))
        tl.store(metrics_ptr + AT_RATIO, tl.where(nothing, float("nan"), ratio_least))
        tl.store(metrics_ptr + AT_RATIO + 1, mean)
        tl.store(metrics_ptr + AT_RATIO + 2, tl.where(nothing, float("nan"), ratio_most))
