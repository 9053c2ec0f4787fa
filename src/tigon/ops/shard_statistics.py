"""Statistics for rows of logits whose classes are split over several devices, and how devices merge them.

With z = softcap(scale · logits) / τ, over the classes on device r

    m_r = max z;   s_r = Σ exp(z − m_r);   a_r = Σ exp(z − m_r) · (z − m_r);   z_r = Σ z;   and z[target] if local

and over all classes, with each sum rescaled from its maximum to the common maximum, d_r = m_r − m, m = max m_r:

    s = Σ exp(d_r) · s_r;   a = Σ exp(d_r) · (a_r + s_r · d_r);   logsumexp = m + log s;   entropy = log s − a / s

Three to five numbers per row are communicated instead of the logits. Every device adds the parts in device order, so
that all devices get the same bits. The gradient needs no further communication: tigon.ops.cross_entropy and
tigon.ops.logprob compute the gradient from these statistics.

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

# Local labels count from the device's first class. Negative labels: a class on another device, an ignored target, a
# target out of range.
ELSEWHERE, IGNORED, OUTSIDE = -1, -2, -3
LN_2 = math.log(2.0)
LEAST = torch.finfo(torch.float32).min


def local_labels(target: Tensor, ignore_index: int, first: int, size: int, classes: int) -> Tensor:
    """Map global targets, any integer dtype, to int64 labels for the `size` classes from `first` on."""
    target = target.long()
    here = (target >= first) & (target < first + size)
    labels = torch.where(here, target - first, ELSEWHERE)
    labels = torch.where((target >= 0) & (target < classes), labels, OUTSIDE)
    return torch.where(target == ignore_index, IGNORED, labels)


def columns(along: bool, total: bool) -> int:
    """Return the statistics per row: maximum, sum and target logit; along and total add one number each."""
    return 3 + along + total


# -------------------------------------------------------------------------------------------------------- reference


def _statistics_reference(
    logits: Tensor, labels: Tensor, temperature: float, softcap: float, scale: float, along: bool, total: bool
) -> Tensor:
    k = _units(temperature, softcap, scale)[2]
    z = _cap(logits, softcap, scale)
    top = z.amax(-1, keepdim=True).clamp(min=LEAST)
    power = (z - top) * k
    e = torch.exp2(power)
    here = labels >= 0
    of_target = z.gather(-1, torch.where(here, labels, 0).unsqueeze(-1)).squeeze(-1)
    found = [top.squeeze(-1), e.sum(-1), torch.where(here, of_target, 0.0)]
    if along:
        found.append(torch.where(e == 0, 0.0, e * power).sum(-1))
    if total:
        found.append(z.sum(-1))
    return torch.where((labels == IGNORED).unsqueeze(-1), 0.0, torch.stack(found, -1))


def _cap(logits: Tensor, softcap: float, scale: float) -> Tensor:
    """Return the statistics' z: capped logits or, without a cap, logits before the scale."""
    return _cap_reference(logits, softcap, scale)[0] if softcap else logits


class _Merged(NamedTuple):
    """(M,) each, over all classes: maximum, log₂ of the sum, target logit, entropy and Σ z."""

    top: Tensor
    log2_sum: Tensor
    of_target: Tensor
    entropy: Tensor | None
    sum_z: Tensor | None


def _merge_reference(parts: Tensor, labels: Tensor, k: float, along: bool, total: bool) -> _Merged:
    tops, sums = parts[..., 0], parts[..., 1]
    top = tops.amax(0)
    step = ((tops - top) * k).clamp(min=-1000.0)
    shrink = torch.exp2(step)
    row_sum = (sums * shrink).sum(0)
    log2_sum = torch.where(labels == OUTSIDE, float("nan"), row_sum.log2())
    entropy = None
    if along:
        entropy = (log2_sum - (shrink * (parts[..., 3] + sums * step)).sum(0) / row_sum) * LN_2
    return _Merged(top, log2_sum, parts[..., 2].sum(0), entropy, parts[..., 3 + along].sum(0) if total else None)


# ---------------------------------------------------------------------------------------------------------- kernels


# One program reads a row of this device's logits (M, V) once. EDGES: rows start or end between 16-byte boundaries, as
# in `tigon.kernels.tiles.edges`.
# label (M,): `local_labels`. out (M, COLUMNS) fp32: maximum, sum relative to the maximum (not its logarithm, so that
# sums can be added), target z, and with ALONG and SUM the further sums.
# softcap, unit, k: `_units`. DEPTH blocks of BLOCK columns are folded at a time.
@jit
def _shard_statistics_kernel(
    logits_ptr, label_ptr, out_ptr, V, stride_m, softcap, unit, k,
    SOFTCAP: tl.constexpr, ALONG: tl.constexpr, SUM: tl.constexpr, IGNORED: tl.constexpr, EDGES: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's statistics over the local classes."""
    row = tl.program_id(0).to(tl.int64)
    COLUMNS: tl.constexpr = 3 + ALONG + SUM
    out_ptr += row * COLUMNS
    label = tl.load(label_ptr + row)
    if label == IGNORED:
        # Write zeros: every row is communicated, and uninitialized memory would vary between runs.
        for i in tl.static_range(COLUMNS):
            tl.store(out_ptr + i, 0.0)
        return
    logits_ptr += row * stride_m
    top, total, along, sum_z = row_moments(logits_ptr, V, softcap, unit, k, SOFTCAP, ALONG, SUM, EDGES, DEPTH, BLOCK)
    z_target = tl.load(logits_ptr + label, mask=label >= 0, other=0.0).to(tl.float32)
    if SOFTCAP:
        z_target, _ = cap(z_target, unit, softcap)
    tl.store(out_ptr, top)
    tl.store(out_ptr + 1, total)
    tl.store(out_ptr + 2, z_target)
    if ALONG:
        tl.store(out_ptr + 3, along)
    if SUM:
        tl.store(out_ptr + 3 + ALONG, sum_z)


# Merges BLOCK rows, a row per lane, in two passes over the parts (world, M, COLUMNS): the maximum first, so that every
# sum is rescaled once, identically on all devices. The loop over devices is not unrolled, so that the compiled kernel
# serves any device count.
@jit
def _merged_rows(
    parts_ptr, rows, inside, labels, M, world, k, ALONG: tl.constexpr, SUM: tl.constexpr, OUTSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return max z, log₂ of the sum, target z, entropy in nats and Σ z over all classes, added in device order."""
    COLUMNS: tl.constexpr = 3 + ALONG + SUM
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    for part in range(world):
        top = tl.maximum(top, tl.load(parts_ptr + (part * M + rows) * COLUMNS, mask=inside, other=LOWEST))
    total = tl.zeros((BLOCK,), tl.float32)
    along = tl.zeros((BLOCK,), tl.float32)
    z_target = tl.zeros((BLOCK,), tl.float32)
    sum_z = tl.zeros((BLOCK,), tl.float32)
    for part in range(world):
        at = parts_ptr + (part * M + rows) * COLUMNS
        # Bounded: for a device without classes 0 · inf would be NaN.
        step = tl.maximum((tl.load(at, mask=inside, other=LOWEST) - top) * k, -1000.0)
        own = tl.load(at + 1, mask=inside, other=1.0)
        shrink = tl.exp2(step)
        total += own * shrink
        z_target += tl.load(at + 2, mask=inside, other=0.0)
        if ALONG:
            along += shrink * (tl.load(at + 3, mask=inside, other=0.0) + own * step)
        if SUM:
            sum_z += tl.load(at + 3 + ALONG, mask=inside, other=0.0)
    log2_sum = tl.where(labels == OUTSIDE, float("nan"), tl.log2(total))
    return top, log2_sum, z_target, (log2_sum - along / total) * LN2, sum_z


# One program merges BLOCK rows: loss (M,) and stats (HEAD + 2 M,) in `_cross_entropy_fwd_kernel`'s layout, so that the
# same backward kernel computes each device's gradient.
# parts (world, M, COLUMNS). label (M,): `local_labels`. No class weights: heads, the only callers, have none.
@jit
@do_not_specialize("M", "world")
def _merge_cross_entropy_kernel(
    parts_ptr, label_ptr, loss_ptr, stats_ptr, M, world, classes, smoothing, z_loss, scale, k,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, IGNORED: tl.constexpr, OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < M
    labels = tl.load(label_ptr + rows, mask=inside, other=IGNORED)
    counts = labels != IGNORED
    top, log2_sum, z_target, _entropy, sum_z = _merged_rows(
        parts_ptr, rows, inside, labels, M, world, k, False, SMOOTHING, OUTSIDE, BLOCK
    )
    loss, _, _ = row_loss(
        z_target, 1.0, top, log2_sum, sum_z, 0.0, classes, smoothing, z_loss, scale, False, SMOOTHING, SOFTCAP
    )
    tl.store(loss_ptr + rows, tl.where(counts, loss, 0.0), mask=inside)
    tl.store(stats_ptr + HEAD + 2 * rows, tl.where(counts, top, 0.0), mask=inside)
    tl.store(stats_ptr + HEAD + 2 * rows + 1, tl.where(counts, log2_sum, 0.0), mask=inside)


# One program merges BLOCK rows: logprob (M,), optional entropy, lse, top1 and mean logit (None to skip), and stats (M,
# 3) in `_logprob_fwd_kernel`'s layout for its backward kernel; without an entropy the third number stays unwritten and
# unread.
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
    logprob = ((z_target - top) * k - log2_sum) * LN2
    tl.store(logprob_ptr + rows, tl.where(counts, logprob, 0.0), mask=inside)
    if ALONG:
        tl.store(entropy_ptr + rows, tl.where(counts, entropy, 0.0), mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, tl.where(counts, (top * k + log2_sum) * LN2, 0.0), mask=inside)
    if top1_ptr is not None:
        first = counts & (labels != OUTSIDE) & (z_target >= top)
        tl.store(top1_ptr + rows, first.to(tl.int8), mask=inside)
    if SUM:
        mean = sum_z / classes
        if not SOFTCAP:
            mean = mean * unit
        tl.store(mean_ptr + rows, tl.where(counts, mean, 0.0), mask=inside)
    tl.store(stats_ptr + 3 * rows, tl.where(counts, top, 0.0), mask=inside)
    tl.store(stats_ptr + 3 * rows + 1, tl.where(counts, log2_sum, 0.0), mask=inside)
    if ALONG:
        tl.store(stats_ptr + 3 * rows + 2, tl.where(counts, entropy, 0.0), mask=inside)


# --------------------------------------------------------------------------------------------------------- launches

ROWS = 128  # rows per program in the merge


def _tile(V: int, capped: bool, more: bool) -> tuple[int, int, int]:
    """Return blocks folded at a time (as many as registers allow), columns per block, and warps."""
    # Each further sum takes registers in `row_moments`. 1024 columns on 4 warps are 8 elements per thread, 16 bytes in
    # 16 bits.
    block = min(1024, next_power_of_2(V))
    return max(1, min(2 if capped else 4 if more else 8, next_power_of_2(V) // block)), block, 4


def shard_statistics(
    logits: Tensor, labels: Tensor, out: Tensor, temperature: float, softcap: float, scale: float, *,
    along: bool, total: bool,
) -> None:  # fmt: skip
    """Write the statistics for (M, V) rows over this device's classes; V may be 0.

    labels: (M,) from `local_labels`, dense. out: (M, `columns(along, total)`) fp32 (fp64 for the fp64 reference).
    along: Σ e · log₂ e, for the entropy. total: Σ z, for smoothing and the mean logit.
    """
    M, V = logits.shape
    if M == 0:
        return
    if V == 0:  # no classes: empty sums, and the smallest maximum
        out.zero_()
        out[:, 0] = LEAST
        return
    if not use_triton(logits):
        for part in _cache_sized(logits):
            here = logits[part].to(out.dtype), labels[part]
            out[part] = _statistics_reference(*here, temperature, softcap, scale, along, total)
        return
    sizes = V, logits.stride(0), *_units(temperature, softcap, scale)
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
    """Write each row's loss, and the statistics for the gradient.

    parts: (devices, M, columns), with temperature 1, and with total for smoothing. labels, loss: (M,).
    stats: (4 + 2 M,), as in `tigon.ops.cross_entropy.launches`.
    """
    world, M, _ = parts.shape
    k = _units(1.0, softcap, scale)[2]
    if M == 0:
        return
    if not use_triton(parts):
        merged = _merge_reference(parts, labels, k, False, label_smoothing != 0.0)
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
        stats[4:] = torch.where(counts.unsqueeze(-1), both, 0.0).view(-1)
        return
    sizes = M, world, classes, label_smoothing, z_loss, scale, k
    branches = label_smoothing != 0.0, softcap != 0.0, IGNORED, OUTSIDE, ROWS
    plan = cdiv(M, ROWS), (*sizes, *branches), {"num_warps": 4}
    launch(_merge_cross_entropy_kernel, (sizes, branches), (parts, labels, loss, stats), lambda: plan)


def merge_logprob(
    parts: Tensor, labels: Tensor, results: tuple[Tensor | None, ...], stats: Tensor, classes: int, temperature: float,
    softcap: float, scale: float,
) -> None:  # fmt: skip
    """`tigon.ops.logprob.logprob_rows` from the devices' statistics.

    parts include along if the entropy is wanted, and total if the mean logit is wanted.
    """
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
    values: list[Tensor | None] = list(results)
    if values[3] is not None:
        values[3] = values[3].view(torch.int8)
    sizes = M, world, classes, *units[1:]
    branches = softcap != 0.0, IGNORED, OUTSIDE, ROWS
    key = (sizes, branches, *(t is None for t in values))
    plan = cdiv(M, ROWS), (*sizes, *branches), {"num_warps": 4}
    launch(_merge_logprob_kernel, key, (parts, labels, *values, stats), lambda: plan)
