"""Rows of logits whose classes lie on several devices: statistics of each device's classes, and how they are merged.

With z = softcap(scale · logits) / τ, over the classes of device r

    m_r = max z;   s_r = Σ exp(z − m_r);   a_r = Σ exp(z − m_r) · (z − m_r);   z_r = Σ z;   and z[target] if it is there

and over all classes, with each sum rescaled from its maximum to the common one, d_r = m_r − m, m = max m_r:

    s = Σ exp(d_r) · s_r;   a = Σ exp(d_r) · (a_r + s_r · d_r);   logsumexp = m + log s;   entropy = log s − a / s

Three to five numbers a row travel in place of its logits. Every device adds up the parts in the order of the devices,
so that all devices get the same bits. The gradient then needs nothing more from other devices:
tigon.ops.cross_entropy and tigon.ops.logprob compute it from these statistics.

Source: running maxima, Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867; vocabulary-parallel cross entropy,
Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, do_not_specialize, jit, launch, next_power_of_2, tl, uneven, use_triton
from tigon.kernels.tiles.cap import cap
from tigon.kernels.tiles.constants import LN2, LOWEST
from tigon.kernels.tiles.loss import row_loss
from tigon.kernels.tiles.moments import row_moments
from tigon.ops.cross_entropy.kernels import HEAD
from tigon.ops.cross_entropy.launches import _cache_sized
from tigon.ops.cross_entropy.reference import _cap_reference
from tigon.ops.logprob import _units

# Labels of a device count from its own first class. Negative ones mean: another device's class, an ignored target, a
# target out of range.
ELSEWHERE, IGNORED, OUTSIDE = -1, -2, -3
LN_2 = math.log(2.0)
LEAST = torch.finfo(torch.float32).min


def local_labels(target: Tensor, ignore_index: int, first: int, size: int, classes: int) -> Tensor:
    """Global targets, of any integer dtype, as labels of the `size` classes from `first` on, int64."""
    target = target.long()
    # In int64: a bound beyond a narrow dtype's range would wrap, and the comparison with it be wrong.
    here = (target >= first) & (target < first + size)
    labels = torch.where(here, target - first, ELSEWHERE)
    # Each selection overrides the one before: a class is another device's unless it is here, and no class if out of
    # range. ignore_index comes last, since it may be a valid class.
    labels = torch.where((target >= 0) & (target < classes), labels, OUTSIDE)
    return torch.where(target == ignore_index, IGNORED, labels)


def columns(along: bool, total: bool) -> int:
    """How many numbers a row's statistics are: maximum, sum, the target's logit; along and total add one each."""
    return 3 + along + total


# -------------------------------------------------------------------------------------------------------- reference


def _statistics_reference(
    logits: Tensor, labels: Tensor, temperature: float, softcap: float, scale: float, along: bool, total: bool
) -> Tensor:
    k = _units(temperature, softcap, scale)[2]
    z = _capped(logits, softcap, scale)
    # Finite for a row of -inf alone, of which z − top is then -inf and not NaN.
    top = z.amax(-1, keepdim=True).clamp(min=LEAST)
    power = (z - top) * k
    e = torch.exp2(power)
    here = labels >= 0
    # Column 0 stands in for classes that are elsewhere: what it gives is not taken.
    of_target = z.gather(-1, torch.where(here, labels, 0).unsqueeze(-1)).squeeze(-1)
    found = [top.squeeze(-1), e.sum(-1), torch.where(here, of_target, 0.0)]
    if along:
        found.append(torch.where(e == 0, 0.0, e * power).sum(-1))
    if total:
        found.append(z.sum(-1))
    return torch.where((labels == IGNORED).unsqueeze(-1), 0.0, torch.stack(found, -1))


def _capped(logits: Tensor, softcap: float, scale: float) -> Tensor:
    """The z of the statistics: capped logits or, without a cap, logits before the scale."""
    return _cap_reference(logits, softcap, scale)[0] if softcap else logits


class _Merged(NamedTuple):
    """(M,) each, over all classes: the maximum, log₂ of the sum, the target's logit, entropy and Σ z."""

    top: Tensor
    log2_sum: Tensor
    of_target: Tensor
    entropy: Tensor | None
    sum_z: Tensor | None


def _merge_reference(parts: Tensor, labels: Tensor, k: float, along: bool, total: bool) -> _Merged:
    tops, sums = parts[..., 0], parts[..., 1]
    top = tops.amax(0)
    # As the kernel bounds it: 2⁻¹⁰⁰⁰ is 0, and 0 · step stays 0 for a device without classes.
    step = ((tops - top) * k).clamp(min=-1000.0)
    shrink = torch.exp2(step)
    row_sum = (sums * shrink).sum(0)
    # A target out of range is labelled so on every device: all get NaN, and none has to tell another.
    log2_sum = torch.where(labels == OUTSIDE, float("nan"), row_sum.log2())
    entropy = None
    if along:
        entropy = (log2_sum - (shrink * (parts[..., 3] + sums * step)).sum(0) / row_sum) * LN_2
    return _Merged(top, log2_sum, parts[..., 2].sum(0), entropy, parts[..., 3 + along].sum(0) if total else None)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _shard_statistics_kernel(
    logits_ptr, label_ptr, out_ptr, V, stride_m, softcap, unit, k,
    SOFTCAP: tl.constexpr, ALONG: tl.constexpr, SUM: tl.constexpr, IGNORED: tl.constexpr, EDGES: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. EDGES: rows begin or end between 16-byte boundaries, as `tigon.kernels.tiles.edges` has it."""
    # int64: row times the stride of logits may pass 2**31. Columns stay int32.
    row = tl.program_id(0).to(tl.int64)
    # Three numbers, and one for each further sum that is wanted: what is sent is as small as the call allows.
    COLUMNS: tl.constexpr = 3 + ALONG + SUM
    out_ptr += row * COLUMNS
    # Only IGNORED ends the program here. A row whose target is elsewhere, or nowhere, has a share in the sums.
    label = tl.load(label_ptr + row)
    if label == IGNORED:
        # Written all the same: every row is sent, and memory never written would differ from run to run.
        for i in tl.static_range(COLUMNS):
            tl.store(out_ptr + i, 0.0)
        return
    logits_ptr += row * stride_m
    # The row's one reading: no value of the logits is needed again before the gradient but the target's.
    top, total, along, sum_z = row_moments(logits_ptr, V, softcap, unit, k, SOFTCAP, ALONG, SUM, EDGES, DEPTH, BLOCK)
    # 0 where the class is another device's: the sum over devices is then the logit, without asking who has it.
    z_target = tl.load(logits_ptr + label, mask=label >= 0, other=0.0).to(tl.float32)
    if SOFTCAP:
        # The cap of 0 is 0, so that a class that is elsewhere stays 0.
        z_target, _ = cap(z_target, unit, softcap)
    # Sums are sent relative to this device's maximum, unlogarithmised: they can then be added.
    tl.store(out_ptr, top)
    tl.store(out_ptr + 1, total)
    tl.store(out_ptr + 2, z_target)
    if ALONG:
        tl.store(out_ptr + 3, along)
    if SUM:
        tl.store(out_ptr + 3 + ALONG, sum_z)


@jit
def _merged_rows(
    parts_ptr, rows, inside, labels, M, world, k, ALONG: tl.constexpr, SUM: tl.constexpr, OUTSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Over all classes: max z, log₂ of the sum, the target's z, entropy in nats, Σ z. Added in the order of devices."""
    COLUMNS: tl.constexpr = 3 + ALONG + SUM
    # Rows lie COLUMNS fp32 apart, 12 to 20 bytes: a warp's loads of one statistic skip the others, which the next loads
    # find in the cache.
    # A lane is a row: devices are few, rows many, and no lane has to meet another.
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    # The maximum first, in a reading of its own: with it every sum is rescaled once, and in the same way on all
    # devices.
    # A loop and not unrolled: the number of devices is an argument, so that one compiled kernel serves any.
    for part in range(world):
        # rows is int64, and with it the offset: devices × rows × columns may pass 2**31.
        top = tl.maximum(top, tl.load(parts_ptr + (part * M + rows) * COLUMNS, mask=inside, other=LOWEST))
    total = tl.zeros((BLOCK,), tl.float32)
    along = tl.zeros((BLOCK,), tl.float32)
    z_target = tl.zeros((BLOCK,), tl.float32)
    sum_z = tl.zeros((BLOCK,), tl.float32)
    for part in range(world):
        at = parts_ptr + (part * M + rows) * COLUMNS
        # Bounded: a device without classes has the least maximum, and its 0 · inf would be NaN.
        step = tl.maximum((tl.load(at, mask=inside, other=LOWEST) - top) * k, -1000.0)
        # 1 beyond M, so that the logarithm and the quotient below stay finite there.
        own = tl.load(at + 1, mask=inside, other=1.0)
        shrink = tl.exp2(step)
        # In the order of devices, so that all of them get the same bits.
        total += own * shrink
        # One device has the target's logit, the others 0.
        z_target += tl.load(at + 2, mask=inside, other=0.0)
        if ALONG:
            # A sum that was relative to the device's maximum: its log shifts by step, hence the second term.
            along += shrink * (tl.load(at + 3, mask=inside, other=0.0) + own * step)
        if SUM:
            # Σ z is relative to nothing: it is added as it is.
            sum_z += tl.load(at + 3 + ALONG, mask=inside, other=0.0)
    # A target out of range: NaN for loss and gradient, on every device.
    log2_sum = tl.where(labels == OUTSIDE, float("nan"), tl.log2(total))
    # entropy = log Σ e − Σ e · log e / Σ e. Without ALONG its caller drops it, and the compiler with it.
    return top, log2_sum, z_target, (log2_sum - along / total) * LN2, sum_z


@jit
@do_not_specialize("M", "world")
def _merge_cross_entropy_kernel(
    parts_ptr, label_ptr, loss_ptr, stats_ptr, M, world, classes, smoothing, z_loss, scale, k,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, IGNORED: tl.constexpr, OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < M
    # IGNORED beyond M too: those lanes compute with neutral numbers and store nothing.
    labels = tl.load(label_ptr + rows, mask=inside, other=IGNORED)
    counts = labels != IGNORED
    top, log2_sum, z_target, _entropy, sum_z = _merged_rows(
        parts_ptr, rows, inside, labels, M, world, k, False, SMOOTHING, OUTSIDE, BLOCK
    )
    # Without class weights: they are no option of a head, whose losses alone come here.
    loss, _, _ = row_loss(
        z_target, 1.0, top, log2_sum, sum_z, 0.0, classes, smoothing, z_loss, scale, False, SMOOTHING, SOFTCAP
    )
    # Selected, since the statistics of an ignored row are 0 and their logarithm is not finite.
    tl.store(loss_ptr + rows, tl.where(counts, loss, 0.0), mask=inside)
    # As `_cross_entropy_fwd_kernel` leaves them: the same kernel then computes each device's share of the gradient.
    tl.store(stats_ptr + HEAD + 2 * rows, tl.where(counts, top, 0.0), mask=inside)
    tl.store(stats_ptr + HEAD + 2 * rows + 1, tl.where(counts, log2_sum, 0.0), mask=inside)


@jit
@do_not_specialize("M", "world")
def _merge_logprob_kernel(
    parts_ptr, label_ptr, logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr, M, world, classes, unit, k,
    SOFTCAP: tl.constexpr, IGNORED: tl.constexpr, OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < M
    labels = tl.load(label_ptr + rows, mask=inside, other=IGNORED)
    counts = labels != IGNORED
    ALONG: tl.constexpr = entropy_ptr is not None
    SUM: tl.constexpr = mean_ptr is not None
    top, log2_sum, z_target, entropy, sum_z = _merged_rows(
        parts_ptr, rows, inside, labels, M, world, k, ALONG, SUM, OUTSIDE, BLOCK
    )
    # The difference of close numbers first. The same line as in `_logprob_fwd_kernel`, from merged statistics.
    logprob = ((z_target - top) * k - log2_sum) * LN2
    tl.store(logprob_ptr + rows, tl.where(counts, logprob, 0.0), mask=inside)
    if ALONG:
        tl.store(entropy_ptr + rows, tl.where(counts, entropy, 0.0), mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, tl.where(counts, (top * k + log2_sum) * LN2, 0.0), mask=inside)
    if top1_ptr is not None:
        # z_target is compared with the maximum over all devices, of which one holds it.
        first = counts & (labels != OUTSIDE) & (z_target >= top)
        tl.store(top1_ptr + rows, first.to(tl.int8), mask=inside)
    if SUM:
        # Scaled once, at the end; capped logits have the scale already.
        # Over the classes of all devices.
        mean = sum_z / classes
        if not SOFTCAP:
            mean = mean * unit
        tl.store(mean_ptr + rows, tl.where(counts, mean, 0.0), mask=inside)
    # The layout of `_logprob_fwd_kernel`, whose backward kernel reads it.
    # 0 for ignored rows, since the backward kernel computes with them before it selects 0. Without ALONG the third
    # number stays unwritten, and that kernel does not load it.
    tl.store(stats_ptr + 3 * rows, tl.where(counts, top, 0.0), mask=inside)
    tl.store(stats_ptr + 3 * rows + 1, tl.where(counts, log2_sum, 0.0), mask=inside)
    if ALONG:
        tl.store(stats_ptr + 3 * rows + 2, tl.where(counts, entropy, 0.0), mask=inside)


# --------------------------------------------------------------------------------------------------------- launches

ROWS = 128  # rows of a program of the merge


def _tile(V: int, capped: bool, more: bool) -> tuple[int, int, int]:
    """Blocks folded at a time (as many as registers allow), columns of a block, and warps."""
    # As deep as `row_moments` has registers for: each further sum takes a lane's worth.
    # 1024 columns on 4 warps are 8 numbers a thread, 16 bytes in 16 bits.
    block = min(1024, next_power_of_2(V))
    return max(1, min(2 if capped else 4 if more else 8, next_power_of_2(V) // block)), block, 4


def shard_statistics(
    logits: Tensor, labels: Tensor, out: Tensor, temperature: float, softcap: float, scale: float, *,
    along: bool, total: bool,
) -> None:  # fmt: skip
    """Write the statistics of (M, V) rows of this device's classes; V may be 0.

    labels: (M,) of `local_labels`, dense. out: (M, `columns(along, total)`) fp32 (fp64 for the reference of fp64).
    along: Σ e · log₂ e, for the entropy. total: Σ z, for smoothing and the mean logit.
    """
    M, V = logits.shape
    # An empty batch: a grid of no programs cannot be launched.
    if M == 0:
        return
    if V == 0:  # a device without classes: empty sums, and the least maximum
        out.zero_()
        out[:, 0] = LEAST
        return
    if not use_triton(logits):
        for part in _cache_sized(logits):
            here = logits[part].to(out.dtype), labels[part]
            out[part] = _statistics_reference(*here, temperature, softcap, scale, along, total)
        return
    # One of the units is k, from z to powers of 2, with the temperature in it: exponentials are of z / τ.
    sizes = V, logits.stride(0), *_units(temperature, softcap, scale)
    # IGNORED is a constant of the kernel, which reads no Python global.
    branches = softcap != 0.0, along, total, IGNORED, uneven(logits)
    key = (M, sizes, branches, logits.dtype)

    def plan() -> Plan:
        depth, block, warps = _tile(V, softcap != 0.0, along or total)
        return M, (*sizes, *branches, depth, block), {"num_warps": warps}

    launch(_shard_statistics_kernel, key, (logits, labels, out), plan)


def merge_cross_entropy(
    parts: Tensor, labels: Tensor, loss: Tensor, stats: Tensor, classes: int, label_smoothing: float, z_loss: float,
    softcap: float, scale: float,
) -> None:  # fmt: skip
    """Write each row's loss, and the statistics for its gradient.

    parts: (devices, M, columns), of temperature 1, with total if there is smoothing. labels, loss: (M,).
    stats: (4 + 2 M,), as in `tigon.ops.cross_entropy.launches`.
    """
    world, M, _ = parts.shape
    # Cross entropy has no temperature: k is log₂ e, times the scale where no cap has applied it.
    k = _units(1.0, softcap, scale)[2]
    if M == 0:
        return
    if not use_triton(parts):
        merged = _merge_reference(parts, labels, k, False, label_smoothing != 0.0)
        # `tigon.kernels.tiles.loss.row_loss` in PyTorch, without weights.
        unit = 1.0 if softcap else scale
        log_sum = merged.log2_sum * LN_2
        found = (merged.top - merged.of_target) * unit + log_sum
        if label_smoothing and merged.sum_z is not None:
            found = found + label_smoothing * (merged.of_target - merged.sum_z / classes) * unit
        if z_loss:
            found = found + z_loss * (merged.top * unit + log_sum).square()
        counts = labels != IGNORED
        loss.copy_(torch.where(counts, found, 0.0))
        both = torch.stack([merged.top, merged.log2_sum], -1)
        # The first four numbers are the reduction's, of which a head's loss has none.
        stats[4:] = torch.where(counts.unsqueeze(-1), both, 0.0).view(-1)
        return
    # Many rows a program: the statistics of a row are a few numbers.
    sizes = M, world, classes, label_smoothing, z_loss, scale, k
    branches = label_smoothing != 0.0, softcap != 0.0, IGNORED, OUTSIDE, ROWS
    # The key below needs no dtypes: statistics, losses and labels have one each, fp32 and int64.
    plan = cdiv(M, ROWS), (*sizes, *branches), {"num_warps": 4}
    launch(_merge_cross_entropy_kernel, (sizes, branches), (parts, labels, loss, stats), lambda: plan)


def merge_logprob(
    parts: Tensor, labels: Tensor, results: tuple[Tensor | None, ...], stats: Tensor, classes: int, temperature: float,
    softcap: float, scale: float,
) -> None:  # fmt: skip
    """As `tigon.ops.logprob.logprob_rows`, from the devices' statistics, which have along if the entropy has a place,
    and total if the mean logit has one."""
    world, M, _ = parts.shape
    units = _units(temperature, softcap, scale)
    along, total = results[1] is not None, results[4] is not None
    if M == 0:
        return
    if not use_triton(parts):
        merged = _merge_reference(parts, labels, units[2], along, total)
        counts, k = labels != IGNORED, units[2]
        mean = None if merged.sum_z is None else merged.sum_z / classes * (1.0 if softcap else scale)
        found = (
            ((merged.of_target - merged.top) * k - merged.log2_sum) * LN_2, merged.entropy,
            (merged.top * k + merged.log2_sum) * LN_2,
            (merged.of_target >= merged.top) & (labels != OUTSIDE), mean,
        )  # fmt: skip
        for place, value in zip(results, found, strict=True):
            if place is not None and value is not None:
                place.copy_(torch.where(counts, value, torch.zeros_like(value)))
        for i, value in enumerate((merged.top, merged.log2_sum, merged.entropy)):
            if value is not None:
                stats[:, i] = torch.where(counts, value, 0.0)
        return
    # As in `logprob_rows`: bytes of 0 and 1 are what torch.bool is made of.
    values: list[Tensor | None] = list(results)
    if values[3] is not None:
        values[3] = values[3].view(torch.int8)
    # The softcap's value stays behind: every z is capped already, and the kernel asks only whether there is a cap.
    sizes = M, world, classes, *units[1:]
    branches = softcap != 0.0, IGNORED, OUTSIDE, ROWS
    key = (sizes, branches, *(t is None for t in values))
    plan = cdiv(M, ROWS), (*sizes, *branches), {"num_warps": 4}
    launch(_merge_logprob_kernel, key, (parts, labels, *values, stats), lambda: plan)
