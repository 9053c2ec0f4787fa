"""How far a student's distribution Q (the input) is from a teacher's P (the target), one number a row:

    kl_div   KL(P ‖ Q) = Σ p · log(p / q)
    jsd      β · KL(P ‖ M) + (1 − β) · KL(Q ‖ M), M = β · P + (1 − β) · Q;  KL(P ‖ Q) for β = 0, KL(Q ‖ P) for β = 1
    tvd      ½ · Σ |p − q|

Source: generalised JSD for distillation, Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, with β as in TRL's
`GKDTrainer.generalized_jsd_loss` and Liger's `LigerJSD`.

The loss is read from the inputs, and so is its gradient, in the backward pass: nothing as wide as a row is kept besides
them. Given logits, neither side's log-probabilities are ever made: a row keeps five numbers.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor

from tigon.runtime import (
    Plan,
    cdiv,
    differentiable,
    jit,
    launch,
    launcher,
    next_power_of_2,
    rows_of,
    tl,
    uneven,
    unknown_keyword,
    use_triton,
)
from tigon.tiles.constants import LN2, LOG2E, LOWEST
from tigon.tiles.divergence import half_sign, sides
from tigon.tiles.edges import aligned, edges, split
from tigon.tiles.fold import fold

Reduction = Literal["batchmean", "mean", "sum", "rows"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
HOMES = {
    "logits": "temperature=1.0, since with any temperature both sides are logits",
    "labels": "mask=labels != ignore_index",
    "ignore_index": "mask=labels != ignore_index",
}


def kl_div(
    input: Tensor, target: Tensor, *, reduction: Reduction = "batchmean", log_target: bool = True,
    temperature: float | None = None, mask: Tensor | None = None, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """KL(P ‖ Q) of each row: the target's P against the input's Q.

    Args:
        input: (..., V) log-probabilities, or logits; any float dtype.
        target: (..., V), of input's shape: log-probabilities, probabilities or logits. It gets no gradient.
        reduction: "batchmean" divides the sum by the number of rows that count (`F.kl_div` by the first dimension,
            which is the same for (M, V)), "mean" by the number of their elements, "sum" does not divide, "rows" gives
            one value a row.
        log_target: False for a target of probabilities. `F.kl_div` has the other default.
        temperature: both sides are logits, softmaxed here: divides them first, so 1.0 takes them as they are. The loss
            is not multiplied by its square. None: input holds log-probabilities.
        mask: (...), booleans, such as `labels != -100`: False for rows that give 0, no gradient, and do not count.
    Returns: 0-d, or (...) for reduction="rows", in fp32 (fp64 for fp64). A class of probability 0 contributes 0. The
        means over no row are 0, with a gradient of 0.
    Raises: ValueError for shapes, dtypes or options that do not fit, and for a target that requires a gradient.

    Replaces (given a temperature, for two dimensions: with more, torch's "batchmean" divides by the first alone)::

        log_q = F.log_softmax(input.float() / temperature, dim=-1)
        log_p = F.log_softmax(target.float() / temperature, dim=-1)
        loss = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    """
    if unknown:
        raise unknown_keyword("kl_div", unknown, HOMES)
    if temperature is not None and not log_target:
        raise ValueError("kl_div: log_target must be True with a temperature, which softmaxes both sides, got False.")
    form = "logits" if temperature is not None else "log" if log_target else "probabilities"
    return _divergence("kl_div", "kl", form, input, target, reduction, 0.0, temperature, mask)


def jsd(
    input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: Reduction = "batchmean",
    temperature: float | None = None, mask: Tensor | None = None, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """Generalised Jensen-Shannon divergence of each row, as in on-policy distillation.

    Args:
        input, target: (..., V) log-probabilities, or logits; any float dtypes. The target gets no gradient.
        beta: weight of the target in the mixture, in [0, 1]; 0 is KL(target ‖ input), 1 is KL(input ‖ target).
        reduction, temperature, mask: as for `kl_div`.
    Returns: as `kl_div`.
    Raises: ValueError as `kl_div`, and for a beta outside [0, 1].

    Replaces (0 < beta < 1)::

        log_m = torch.logsumexp(torch.stack([log_q + math.log(1 - beta), log_p + math.log(beta)]), dim=0)
        to_p = F.kl_div(log_m, log_p, reduction="batchmean", log_target=True)
        to_q = F.kl_div(log_m, log_q, reduction="batchmean", log_target=True)
        loss = beta * to_p + (1 - beta) * to_q
    """
    if unknown:
        raise unknown_keyword("jsd", unknown, HOMES)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"jsd: beta must lie in [0, 1], got {beta}.")
    kind = "kl" if beta == 0.0 else "reverse" if beta == 1.0 else "jsd"
    form = "log" if temperature is None else "logits"
    return _divergence("jsd", kind, form, input, target, reduction, beta, temperature, mask)


def tvd(
    input: Tensor, target: Tensor, *, reduction: Reduction = "batchmean", temperature: float | None = None,
    mask: Tensor | None = None, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """Total variation distance of each row, ½ · Σ |p − q|, in [0, 1]. Its gradient is 0 where p = q.

    Args:
        input, target: (..., V) probabilities, or logits; any float dtypes. The target gets no gradient.
        reduction, mask: as for `kl_div`.
        temperature: as for `kl_div`; None: both sides are probabilities.
    Returns: as `kl_div`.
    Raises: ValueError as `kl_div`.

    Replaces::

        loss = 0.5 * (input - target).abs().sum(-1).mean()
    """
    if unknown:
        raise unknown_keyword("tvd", unknown, HOMES)
    form = "probabilities" if temperature is None else "logits"
    return _divergence("tvd", "tvd", form, input, target, reduction, 0.0, temperature, mask)


def _divergence(
    name: str, kind: str, form: str, input: Tensor, target: Tensor, reduction: str, beta: float,
    temperature: float | None, mask: Tensor | None,
) -> Tensor:  # fmt: skip
    if reduction not in REDUCTIONS:
        more = " For one value an element there is torch.nn.functional.kl_div." if reduction == "none" else ""
        raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}.{more}")
    if not input.dtype.is_floating_point or input.dim() == 0:
        raise ValueError(f"{name}: input must be (..., V) floats, got {tuple(input.shape)} {input.dtype}.")
    if target.shape != input.shape or not target.dtype.is_floating_point or target.device != input.device:
        raise ValueError(
            f"{name}: target must be floats of input's shape {tuple(input.shape)} on {input.device}, "
            f"got {tuple(target.shape)} {target.dtype} on {target.device}."
        )
    if target.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: target must not require a gradient, as it gets none, got one that does: detach it.")
    if temperature is None:
        temperature = 1.0
    elif not temperature > 0:
        raise ValueError(f"{name}: temperature must be positive or None, got {temperature}.")
    if mask is not None and (mask.shape != input.shape[:-1] or mask.dtype != torch.bool or mask.device != input.device):
        raise ValueError(
            f"{name}: mask must be booleans on {input.device}, one a row, {tuple(input.shape[:-1])}, "
            f"got {tuple(mask.shape)} {mask.dtype} on {mask.device}."
        )
    options = (kind, form, beta, temperature)
    # One value a row comes from either path. What reduces them is plain PyTorch, whose autograd gives each its upstream
    # gradient.
    rows = _rows(input, target, mask, *options) if use_triton(input, target) else None
    if rows is None:
        rows = divergence_reference(input, target, mask, *options)
    if reduction == "rows":
        return rows
    if mask is None:
        # The mean of no row would be NaN: the sum of none is 0.
        total = rows.sum() if reduction == "sum" or not rows.numel() else rows.mean()
    else:
        total = rows.sum()
        # Ignored rows are 0 in the sum. The number of the others stays on the device: nothing waits for it.
        if reduction != "sum":
            total = total / mask.sum().clamp(min=1)  # the mean over no row is 0
    return total / max(1, input.shape[-1]) if reduction == "mean" else total


def divergence_reference(
    input: Tensor, target: Tensor, mask: Tensor | None, kind: str, form: str, beta: float, temperature: float
) -> Tensor:
    """One value a row, (...)."""
    # At least fp32, and fp64 if either side is.
    acc = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    a, b = input.to(acc), target.to(acc)
    if form == "logits":
        a, b = torch.log_softmax(a / temperature, -1), torch.log_softmax(b / temperature, -1)
    if kind == "tvd":
        q, p = (a.exp(), b.exp()) if form == "logits" else (a, b)
        terms = 0.5 * (p - q).abs()
    elif kind == "kl":
        p = b if form == "probabilities" else b.exp()
        # The log of a probability of 0 is -inf, which the select below leaves out.
        log_p = torch.log(p) if form == "probabilities" else b
        terms = p * torch.where(p == 0, 0.0, log_p - a)
    elif kind == "reverse":
        q = a.exp()
        terms = q * torch.where(q == 0, 0.0, a - b)
    elif kind == "jsd":
        q, p = a.exp(), b.exp()
        m = beta * p + (1 - beta) * q
        log_m = torch.where(m == 0, 1.0, m).log()  # the gradient of log 0 would be NaN, whatever it is masked by
        terms = beta * p * torch.where(p == 0, 0.0, b - log_m) + (1 - beta) * q * torch.where(q == 0, 0.0, a - log_m)
    else:
        raise NotImplementedError(f"divergence_reference: {kind!r} has no formula.")
    rows = terms.sum(-1)
    return rows if mask is None else torch.where(mask, rows, 0.0)


# ---------------------------------------------------------------------------------------------------------- kernels
# Kernels take logarithms to the base 2, as the hardware has them: lq and lp are log2 of q and p, and k = log2(e) /
# temperature turns logits into log2. The slope of the loss with respect to lq is a multiple of u.

# KL's sums are taken in units of 2⁴⁰, which changes no digit: a lane that has seen nothing but a mask of the least fp32
# number adds several of them, and ∞ would still be there, as 0 · ∞, when a greater logit leaves the mask no weight.
LITTLE = tl.constexpr(2.0**-40)


@jit
def _split(top, log, k):
    """A row's log-sum-exp, top + log, as two fp32: rounded to one it would put every probability of the row off."""
    # fp64: a log-sum-exp of 1e4 has three digits behind the point left in fp32, and a probability needs them.
    # A few fp64 instructions a row and none an element.
    lse = top.to(tl.float64) + log.to(tl.float64) / k
    high = lse.to(tl.float32)
    # high + low has twice fp32's digits. The backward pass subtracts one after the other from a logit.
    low = (lse - high.to(tl.float64)).to(tl.float32)
    # Beyond 1e9 fp64 too has no digits left for log, and the sum is left undone. An infinite top stays NaN.
    far = (tl.abs(top) > 1e9) & (tl.abs(top) < float("inf"))
    return tl.where(far, top, high), tl.where(far, log / k, low)


@jit
def _fold_both(a, b, top_a, sum_a, top_b, sum_b, value, shift, k, KIND: tl.constexpr):
    """Fold tiles (DEPTH, lanes) of both sides' logits into the running maxima and sums of every lane."""
    # a is the student, b the teacher: only the teacher's exponentials weigh the difference.
    top_a, sum_a, _, _ = fold(a, top_a, sum_a, k)
    top_b, sum_b, shrink, e = fold(b, top_b, sum_b, k)
    if KIND == "kl":
        # Σ e · (b − a), relative to the teacher's maximum as sum_b is: both are rescaled by the same factor.
        difference = tl.fma(b - a, LITTLE, shift * -LITTLE)
        # In masked columns b − a is -inf − (-inf). e is 0 there, as for classes that the teacher excludes, and the
        # select drops the NaN.
        value = value * shrink + tl.sum(tl.where(e == 0.0, 0.0, e * difference), 0)
    return top_a, sum_a, top_b, sum_b, value


@jit
def _terms(a, b, beta, k, KIND: tl.constexpr, FORM: tl.constexpr):
    """The terms of a divergence of probabilities or log-probabilities."""
    if KIND == "tvd":
        # Of probabilities: no exponential, and no unit to convert.
        terms = 0.5 * tl.abs(b - a)
    elif FORM == "probabilities":
        # By a select: 0 · log 0 is 0 here, and NaN in arithmetic.
        terms = tl.where(b == 0.0, 0.0, b * (tl.log2(b) - a * k))
    else:
        # The temperature is 1 here: k is log₂ e, from nats to bits.
        terms, _, _ = sides(a * k, b * k, beta, KIND)
    return terms


@jit
def _both_edges(input_ptr, target_ptr, first, width, V, other: tl.constexpr):
    """Both sides' edges of a row, as tiles (1, lanes)."""
    edge, real = edges(input_ptr, first, width, V)
    # `other` has no share in the form at hand: -inf for logits and logarithms, 0 for probabilities.
    a = tl.load(input_ptr + edge, mask=real, other=other).to(tl.float32)
    b = tl.load(target_ptr + edge, mask=real, other=other).to(tl.float32)
    return a[None, :], b[None, :]


@jit
def _divergence_fwd_kernel(
    input_ptr, target_ptr, mask_ptr, rows_ptr, stats_ptr, V, stride_im, stride_tm, beta, k,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. EDGES: rows begin or end between 16-byte boundaries, as `tigon.tiles.edges` has it."""
    row = tl.program_id(0).to(tl.int64)
    if mask_ptr is not None:
        # One branch for the whole program, before either row is touched.
        counts = tl.load(mask_ptr + row)
        if counts == 0:
            # Neither side of an ignored row is read: a prompt costs no traffic.
            tl.store(rows_ptr + row, 0.0)
            if FORM == "logits":
                # +inf tells the backward pass that the row is ignored: no log-sum-exp is +inf (an infinite logit's is
                # NaN), and the backward then needs no mask.
                tl.store(stats_ptr + 5 * row, float("inf"))
            return
    # Row offsets are int64, columns int32: a row has fewer than 2**31 numbers.
    input_ptr += row * stride_im
    target_ptr += row * stride_tm
    width = V
    input_body, target_body = input_ptr, target_ptr
    if EDGES:
        # Both sides' rows lie alike, as `uneven` was asked: one head and one body serve both.
        first, width = split(input_ptr, V)
        input_body, target_body = aligned(input_ptr, first), aligned(target_ptr, first)
    # DEPTH blocks at a time are folded into one: a running maximum then costs 1/DEPTH of an exponential.
    lane = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # A sum for every lane: lanes meet once, at the end of the row.
    value = tl.zeros((BLOCK,), tl.float32)
    if FORM == "logits":
        # A finite start: a lane that has seen only -inf must not compute inf - inf.
        # Both sides are read together: KL needs logits in pairs, and both loads are on their way together.
        top_a = tl.full((BLOCK,), LOWEST, tl.float32)
        top_b = tl.full((BLOCK,), LOWEST, tl.float32)
        sum_a = tl.zeros((BLOCK,), tl.float32)
        sum_b = tl.zeros((BLOCK,), tl.float32)
        # Only differences of logits count. A constant between the two sides is subtracted first, before it can cost
        # digits.
        shift = tl.load(target_ptr).to(tl.float32) - tl.load(input_ptr).to(tl.float32)
        # Where the first logits are a mask's -inf there is no such constant.
        shift = tl.where(tl.abs(shift) < 1e30, shift, 0.0)
        for start in range(0, width, DEPTH * BLOCK):
            mask = start + lane < width
            a = tl.load(input_body + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
            b = tl.load(target_body + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
            top_a, sum_a, top_b, sum_b, value = _fold_both(a, b, top_a, sum_a, top_b, sum_b, value, shift, k, KIND)
        # Lanes meet here, once for each statistic.
        row_a = tl.max(top_a, 0)
        row_b = tl.max(top_b, 0)
        if EDGES:
            a_edge, b_edge = _both_edges(input_ptr, target_ptr, first, width, V, float("-inf"))
            nothing = tl.zeros((a_edge.shape[1],), tl.float32)
            # The edges have sums of their own, from neutral starts: at most 16 lanes do not fit the body's tile.
            least = nothing + LOWEST
            edge_a, edge_sum_a, edge_b, edge_sum_b, edge_value = _fold_both(
                a_edge, b_edge, least, nothing, least, nothing, nothing, shift, k, KIND
            )
            row_a = tl.maximum(row_a, tl.max(edge_a, 0))
            row_b = tl.maximum(row_b, tl.max(edge_b, 0))
        # From each lane's maximum to the row's. A lane without a logit has a sum of 0, and a finite weight.
        weight = tl.exp2((top_b - row_b) * k)
        whole_a = tl.sum(sum_a * tl.exp2((top_a - row_a) * k), 0)
        if EDGES:
            whole_a += tl.sum(edge_sum_a * tl.exp2((edge_a - row_a) * k), 0)
        log_a = tl.log2(whole_a)
        whole = tl.sum(sum_b * weight, 0)
        if EDGES:
            edge_weight = tl.exp2((edge_b - row_b) * k)
            whole += tl.sum(edge_sum_b * edge_weight, 0)
        log_b = tl.log2(whole)
        high_a, low_a = _split(row_a, log_a, k)
        high_b, low_b = _split(row_b, log_b, k)
        # Five numbers a row: both log-sum-exps, in halves, and the mean slope. KL leaves the fifth unwritten, since its
        # gradient q − p needs none.
        tl.store(stats_ptr + 5 * row, high_a)
        tl.store(stats_ptr + 5 * row + 1, low_a)
        tl.store(stats_ptr + 5 * row + 2, high_b)
        tl.store(stats_ptr + 5 * row + 3, low_b)
        if KIND == "kl":
            # KL = E_p[b − a] − (lse_b − lse_a): one reading gives both, without log-probabilities.
            part = tl.sum(value * weight, 0)
            if EDGES:
                part += tl.sum(edge_value * edge_weight, 0)
            # Back from units of 2⁴⁰, with the shift that was taken out before. The maxima, the large part of both
            # log-sum-exps, are subtracted from each other first.
            gap = tl.fma(part / whole, 1.0 / LITTLE, shift - (row_b - row_a))
            tl.store(rows_ptr + row, (gap * k - (log_b - log_a)) * LN2)
        else:
            # Σ q · u goes with the values: with it the gradient needs one more reading, and no sum of its own.
            # JSD, TVD and the reverse KL need both log-sum-exps before their first term: the rows are read a second
            # time.
            mean_u = tl.zeros((BLOCK,), tl.float32)
            blocks = tl.cdiv(width, DEPTH * BLOCK)
            for i in range(blocks):
                # From the end, which the first reading read last and the cache still holds.
                start = (blocks - 1 - i) * (DEPTH * BLOCK)
                mask = start + lane < width
                a = tl.load(input_body + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
                b = tl.load(target_body + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
                # lq = (a − max) k − log₂ Σ, by the difference first. In masked columns q and p are 0: no kind adds
                # anything there.
                terms, q, u = sides((a - row_a) * k - log_a, (b - row_b) * k - log_b, beta, KIND)
                value += tl.sum(terms, 0)
                mean_u += tl.sum(q * u, 0)
            result_ptr = rows_ptr + row
            all_terms = tl.sum(value, 0)
            if EDGES:
                a, b = _both_edges(input_ptr, target_ptr, first, width, V, float("-inf"))
                terms, q, u = sides((a - row_a) * k - log_a, (b - row_b) * k - log_b, beta, KIND)
                all_terms += tl.sum(tl.sum(terms, 0), 0)
            # From bits to nats. TVD's terms are probabilities already.
            tl.store(result_ptr, all_terms * (1.0 if KIND == "tvd" else LN2))
            mean_ptr = stats_ptr + 5 * row + 4
            all_u = tl.sum(mean_u, 0)
            if EDGES:
                all_u += tl.sum(tl.sum(q * u, 0), 0)
            # In u's unit, bits where it is a logarithm: the backward pass converts u and its mean together.
            tl.store(mean_ptr, all_u)
    else:
        # What masked columns hold has no probability in either form: 0, or its logarithm.
        # Given probabilities or logarithms need no statistics: one reading, and the backward pass has the inputs alone.
        other: tl.constexpr = 0.0 if FORM == "probabilities" else float("-inf")
        for start in range(0, width, DEPTH * BLOCK):
            mask = start + lane < width
            a = tl.load(input_body + start + lane, mask=mask, other=other).to(tl.float32)
            b = tl.load(target_body + start + lane, mask=mask, other=other).to(tl.float32)
            value += tl.sum(_terms(a, b, beta, k, KIND, FORM), 0)
        result_ptr = rows_ptr + row
        all_terms = tl.sum(value, 0)
        if EDGES:
            a, b = _both_edges(input_ptr, target_ptr, first, width, V, other)
            all_terms += tl.sum(tl.sum(_terms(a, b, beta, k, KIND, FORM), 0), 0)
        tl.store(result_ptr, all_terms * (1.0 if KIND == "tvd" else LN2))


@jit
def _write_gradient(
    drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, cols, here, valid, high_a, low_a,
    stride_g, stride_im, stride_tm, stride_dm, beta, k, KIND: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The gradient of some columns of a row. here: columns of the row. high_a, low_a: of logits, None for others."""
    mask = here & valid
    # Ignored rows are not read: their mask is empty.
    b = tl.load(target_ptr + row * stride_tm + cols, mask=mask, other=0.0).to(tl.float32)
    # None for the KL of log-probabilities, whose gradient −p is the target's alone: half of the reading falls away.
    if input_ptr is not None:
        a = tl.load(input_ptr + row * stride_im + cols, mask=mask, other=0.0).to(tl.float32)
    if FORM == "logits":
        # Differences with the high half first, where they are exact; the low half then corrects them.
        # The row's numbers are loaded by each of its programs, from the cache after the first.
        high_b = tl.load(stats_ptr + 5 * row + 2)
        low_b = tl.load(stats_ptr + 5 * row + 3)
        lq = ((a - high_a) - low_a) * k
        lp = ((b - high_b) - low_b) * k
        if KIND == "kl":
            # q − p, with neither the loss nor Σ q · u.
            # Two exponentials an element, and no select: neither probability multiplies a logarithm.
            dx = tl.exp2(lq) - tl.exp2(lp)
        else:
            _, q, u = sides(lq, lp, beta, KIND)
            # The Jacobian of the softmax, applied to q · u: dz = q · (u − Σ q · u).
            dx = q * (u - tl.load(stats_ptr + 5 * row + 4)) * (1.0 if KIND == "tvd" else LN2)
        # k · log 2 is 1 / temperature: from z, which the softmax sees, to the logits.
        dx = dx * (k * LN2)
    elif KIND == "tvd":
        # d(½ |p − q|)/dq, without a softmax in between: input and target are probabilities.
        dx = half_sign(a, b)
    elif KIND == "kl":
        # KL is linear in log q: the slope is −p, and q is not needed.
        dx = -b if FORM == "probabilities" else -tl.exp2(b * k)
    else:
        _, q, u = sides(a * k, b * k, beta, KIND)
        # With respect to log q: the reverse KL, Σ q (log q − log p), has q · (u + 1). In JSD that 1 cancels against the
        # slope of log M.
        dx = q * (u * LN2 + (1.0 if KIND == "reverse" else 0.0))
    # A select, since an ignored row's upstream gradient may be NaN.
    # drows_ptr is fp32, as the rows are; stride_g is 0 where all rows share one upstream gradient.
    dx = tl.where(valid, dx * tl.load(drows_ptr + row * stride_g), 0.0)
    tl.store(dinput_ptr + row * stride_dm + cols, dx.to(dinput_ptr.dtype.element_ty), mask=here)


@jit
def _divergence_bwd_kernel(
    drows_ptr, input_ptr, target_ptr, mask_ptr, stats_ptr, dinput_ptr, V, stride_g, stride_im, stride_tm, beta, k,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # EDGES: a body is at most V // 4 · 4 wide, whatever the dtype. The grid needs one bound for all rows, while a body
    # depends on its row's address.
    blocks = tl.cdiv(V // 4 * 4 if EDGES else V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # A flat grid: with the row's statistics known an element depends on nothing else in its row.
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    valid = True
    high_a, low_a = None, None
    if FORM == "logits":
        high_a = tl.load(stats_ptr + 5 * row)
        low_a = tl.load(stats_ptr + 5 * row + 1)
        # The forward pass has left +inf for an ignored row: the mask is not read again, nor are that row's other
        # statistics used.
        valid = tl.where(high_a == float("inf"), 0, 1) == 1  # of integers: the interpreter has no mask of float scalars
    elif mask_ptr is not None:
        valid = tl.load(mask_ptr + row) != 0
    # dinput is dense.
    width, stride_dm = V, V
    if EDGES:
        target_ptr += row * stride_tm
        if input_ptr is not None:
            input_ptr += row * stride_im
        dinput_ptr += row * V
        # By the target, since there may be no input.
        first, width = split(target_ptr, V)
        if tl.program_id(0) % blocks == 0:
            # The first program of a row has its edges, too.
            edge, real = edges(target_ptr, first, width, V)
            _write_gradient(
                drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, edge, real, valid, high_a, low_a,
                stride_g, 0, 0, 0, beta, k, KIND, FORM,
            )  # fmt: skip
        target_ptr, dinput_ptr = aligned(target_ptr, first), aligned(dinput_ptr, first)
        if input_ptr is not None:
            input_ptr = aligned(input_ptr, first)
        # The pointers are the row's already.
        stride_im, stride_tm, stride_dm = 0, 0, 0
    _write_gradient(
        drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, cols, cols < width, valid, high_a, low_a,
        stride_g, stride_im, stride_tm, stride_dm, beta, k, KIND, FORM,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(v: int, kind: str, form: str) -> tuple[int, int, int]:
    """Blocks folded at a time, columns of a block, and warps. Many warps read a wide row that is read twice: fewer rows
    are then between their readings, and the cache serves more of the second reading."""
    # JSD of log-probabilities keeps both sides, their ratio and a logarithm of every element: depth 1. A block is 8
    # numbers a thread.
    twice = form == "logits" and kind != "kl"
    warps, depth = (8, 2) if twice else (8, 1) if kind == "jsd" else (4, 4)
    block = min(next_power_of_2(v), warps * 32 * 8)
    return max(1, min(depth, next_power_of_2(v) // block)), block, warps


def _bwd_tile(v: int) -> tuple[int, int]:
    # 16 numbers a thread. No sum joins the threads of a row.
    return min(2048, next_power_of_2(v)), 4


def _divergence_fwd_fake(
    input: Tensor, target: Tensor, mask: Tensor | None, kind: str, form: str, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    # fp32 from 16-bit inputs too: whoever sums the rows rounds once, after that.
    rows = input.new_empty(input.shape[:-1], dtype=torch.float32)
    return rows, input.new_empty((rows.numel() if form == "logits" else 0, 5), dtype=torch.float32)


@launcher(
    "(Tensor input, Tensor target, Tensor? mask, str kind, str form, float beta, float temperature)"
    " -> (Tensor, Tensor)",
    _divergence_fwd_fake,
)
def _divergence_fwd(
    input: Tensor, target: Tensor, mask: Tensor | None, kind: str, form: str, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    rows, stats = _divergence_fwd_fake(input, target, mask, kind, form, beta, temperature)
    if input.numel() == 0:
        return rows.zero_(), stats
    # Each side has a row stride of its own: slices of wider rows are read where they lie.
    a, b = rows_of(input), rows_of(target)
    M, V = a.shape
    arguments = (V, a.stride(0), b.stride(0), beta, LOG2E.value / temperature, kind, form, uneven(a, b))
    tensors = (a, b, None if mask is None else mask.contiguous(), rows, stats)
    # `uneven`, which addresses decide, is among the arguments.
    key = (M, arguments, a.dtype, b.dtype, mask is None)

    def plan() -> Plan:
        depth, block, warps = _fwd_tile(V, kind, form)
        return M, (*arguments, depth, block), {"num_warps": warps}

    launch(_divergence_fwd_kernel, key, tensors, plan)
    return rows, stats


def _divergence_bwd_fake(
    drows: Tensor, input: Tensor | None, target: Tensor, mask: Tensor | None, stats: Tensor, kind: str, form: str,
    beta: float, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return target.new_empty(target.shape, dtype=dtype)


@launcher(
    "(Tensor drows, Tensor? input, Tensor target, Tensor? mask, Tensor stats, str kind, str form, float beta,"
    " float temperature, ScalarType dtype) -> Tensor",
    _divergence_bwd_fake,
)
def _divergence_bwd(
    drows: Tensor, input: Tensor | None, target: Tensor, mask: Tensor | None, stats: Tensor, kind: str, form: str,
    beta: float, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    # In the input's dtype, which is an argument: the input itself may not have been saved.
    dinput = target.new_empty(target.shape, dtype=dtype)
    if target.numel() == 0:
        return dinput
    # A reduced loss gives all rows one upstream gradient, a tensor of stride 0, which is read without a copy.
    same = drows.numel() > 1 and not any(drows.stride())
    g = drows.as_strided((drows.numel(),), (0,)) if same else drows.reshape(-1)
    a, b = None if input is None else rows_of(input), rows_of(target)
    M, V = b.shape
    # Without an input its stride is 0: the kernel's arguments are the same in number.
    strides = (g.stride(0), 0 if a is None else a.stride(0), b.stride(0))
    apart = uneven(b, dinput.view(M, V), *(() if a is None else (a,)))
    arguments = (V, *strides, beta, LOG2E.value / temperature, kind, form, apart)
    tensors = (g, a, b, None if mask is None else mask.contiguous(), stats, dinput)
    key = (M, arguments, None if a is None else a.dtype, b.dtype, dtype, mask is None)

    def plan() -> Plan:
        block, warps = _bwd_tile(V)
        # The edges of a row are its first program's: the others share what is left of it.
        return M * cdiv(V // 4 * 4 if apart else V, block), (*arguments, block), {"num_warps": warps}

    launch(_divergence_bwd_kernel, key, tensors, plan)
    return dinput


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, target, mask, *ctx.options = inputs
    # The gradient is computed in the backward pass, where the upstream gradient is known: loss scaling reaches it
    # before it is rounded. An evaluation that goes no further pays for none.
    ctx.dtype = input.dtype
    # The gradient of KL with respect to log-probabilities is −p. It does not depend on the input, which is not saved.
    linear = ctx.options[0] == "kl" and ctx.options[1] != "logits"
    ctx.save_for_backward(None if linear else input, target, mask, output[1])


def _backward(ctx: Any, drows: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dinput = None
    if drows is not None and ctx.needs_input_grad[0]:
        dinput = _divergence_bwd(drows, *ctx.saved_tensors, *ctx.options, ctx.dtype)
    return dinput, None, None, *(None for _ in ctx.options)


_rows = differentiable(_divergence_fwd, _setup_context, _backward)
