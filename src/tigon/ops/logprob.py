"""Per-token quantities for preference tuning and reinforcement learning. With z = softcap(scale · logits) / τ:

    logsumexp = log Σ exp z;   logprob = z[target] − logsumexp;   p = exp(z − logsumexp);   entropy = −Σ p · log p

    d logprob / dz = 1[target] − p;   d entropy / dz = −p · (log p + entropy)

Source: the definitions; a single pass over each row by running maxima, Milakov & Gimelshein 2018,
https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import (
    Parts,
    Plan,
    cdiv,
    dense_like,
    differentiable,
    do_not_specialize,
    find_sum_parts,
    fold_warps,
    jit,
    launch,
    launcher,
    next_power_of_2,
    part_tile,
    tl,
    uneven,
    use_triton,
    view_rows,
)
from tigon.kernels.tiles.cap import cap
from tigon.kernels.tiles.constants import LN2
from tigon.kernels.tiles.edges import align, edges, split
from tigon.kernels.tiles.moments import moments_of_parts, row_moments
from tigon.kernels.tiles.parts import locate_part_of_row
from tigon.ops.example import LOGITS, Example, make_ids
from tigon.ops.targets import checked_target


class LogProb(NamedTuple):
    """Result of `logprob` and `linear_logprob`: (...) each, 0 (False) for targets equal to ignore_index.

    logprob: the target's, in nats. entropy: the distribution's, in nats. These two have gradients.
    logsumexp: over z. is_top1: whether no class is likelier than the target. mean_logit: mean of
        softcap(scale · logits), before the temperature. These have no gradients.
    """

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    is_top1: Tensor
    mean_logit: Tensor


def logprob(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> LogProb:
    """Log-probability of each target, with the logits' entropy, log-sum-exp, top-1 hit and mean, in a single reading.

    Args:
        logits: (..., V), any float dtype.
        target: (...), integer class indices.
        ignore_index: rows with this target are not read; their results and gradients are 0.
        temperature: τ > 0, divides the capped logits.
        softcap: c > 0 for c · tanh(scale · logits / c); None for none.
        scale: multiplies the logits, before the softcap; positive.
    Returns: `LogProb` of (...), fp32 (fp64 for fp64 logits), is_top1 bool.
    Raises: ValueError for invalid shapes, dtypes or options. A target outside [0, V) gives NaN on the GPU, and a
        ValueError on the CPU or with TIGON_CHECKS=1.

    Replaces::

        logp = F.log_softmax(logits.float() / temperature, dim=-1)
        logprob = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
    """
    check_transform("logprob", temperature, softcap, scale)
    if not logits.dtype.is_floating_point or logits.dim() == 0:
        raise ValueError(f"logprob: logits must be (..., V) floats, got {tuple(logits.shape)} {logits.dtype}.")
    shape, classes = logits.shape[:-1], logits.shape[-1]
    target = checked_target("logprob", target, shape, classes, ignore_index, logits.device)
    options = (ignore_index, temperature, softcap or 0.0, scale)
    if not use_triton(logits):
        result = logprob_reference(logits, target, *options)
    else:
        result = LogProb(*_logprob(logits, target, *options))
    return LogProb(*result[:2], *(t.detach() for t in result[2:]))


def check_transform(name: str, temperature: float, softcap: float | None, scale: float) -> None:
    for argument, value in (("temperature", temperature), ("softcap", softcap), ("scale", scale)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {argument} must be positive, got {value}.")


def logprob_reference(
    logits: Tensor, target: Tensor, ignore_index: int, temperature: float, softcap: float, scale: float
) -> LogProb:
    valid = target != ignore_index
    # Ignored rows have a gradient of 0, whatever they hold: 0 · NaN would not be 0.
    logits = torch.where(valid.unsqueeze(-1), logits, 0.0)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    at = torch.where(valid, target, 0).long().unsqueeze(-1)
    mean = z.mean(-1)
    z = z / temperature
    logp = torch.log_softmax(z, -1)
    of_target = logp.gather(-1, at).squeeze(-1)
    p = logp.exp()
    entropy = -(p * torch.where(p == 0, 0.0, logp)).sum(-1)
    top = z.amax(-1) if z.shape[-1] else of_target  # no classes, so no rows
    results = of_target, entropy, torch.logsumexp(z, -1), z.gather(-1, at).squeeze(-1) >= top, mean
    # A select, not a product: an ignored row's target may be no class, with NaN results.
    return LogProb(*(torch.where(valid, r, torch.zeros_like(r)) for r in results))


def _gradient_reference(
    logits: Tensor, target: Tensor, dlogprob: Tensor | None, dentropy: Tensor | None, ignore_index: int,
    temperature: float, softcap: float, scale: float, *, stats: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel's gradient formula in PyTorch, (M, V): an operator has no autograd inside.

    stats: statistics over all classes, if the logits cover only some classes.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    slope: Tensor | float = scale / temperature
    if softcap:
        t = torch.tanh(z / softcap)
        z, slope = softcap * t, slope * (1 - t * t)
    entropy = None
    if stats is None:
        logp = torch.log_softmax(z / temperature, -1)
    else:
        top, log2_sum, entropy = stats.split(1, dim=-1)
        unit = 1.0 if softcap else scale
        logp = (z - top * unit) / temperature - log2_sum * math.log(2.0)
    p = logp.exp()
    valid = (target != ignore_index).unsqueeze(-1)
    dz = torch.zeros_like(p)
    if dlogprob is not None:
        d = dlogprob.to(p.dtype).unsqueeze(-1)
        here = valid & ((target >= 0) & (target < p.shape[-1])).unsqueeze(-1)
        at = torch.where(here.squeeze(-1), target, 0).long().unsqueeze(-1)
        dz = (-d * p).scatter_add_(-1, at, torch.where(here, d, 0.0))
    if dentropy is not None:
        terms = torch.where(p == 0, 0.0, p * logp)
        entropy = -terms.sum(-1, keepdim=True) if entropy is None else entropy
        dz = dz - dentropy.to(p.dtype).unsqueeze(-1) * (terms + p * entropy)
    return torch.where(valid, dz * slope, 0.0)


# ---------------------------------------------------------------------------------------------------------- kernels
#
#   logits, dlogits   (M, V) with row strides m and dm, unit stride along V
#   target            (M,) class indices; rows with ignore_index are not read
#   results           logprob, entropy, lse, top1 (int8) and mean, (M,) each; all but logprob may be None, and their
#                     arithmetic is then compiled out
#   stats             (M, 3) fp32 for the backward pass: maximum, log₂ Σ exp and entropy. Maximum and log-sum stay
#                     apart: the rounding of their sum would enter every probability of the row
#   unit              factor from stored numbers to logits, before the temperature
#   k                 factor from z to powers of 2
#   EDGES             rows begin or end between 16-byte boundaries, as described in `tigon.kernels.tiles.edges`


@jit
def _store_nothing(logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr, row):
    """Write zeros for an ignored row."""
    tl.store(logprob_ptr + row, 0.0)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, 0.0)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, 0.0)
    if top1_ptr is not None:
        tl.store(top1_ptr + row, 0)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, 0.0)
    if stats_ptr is not None:
        for i in tl.static_range(3):
            tl.store(stats_ptr + 3 * row + i, 0.0)


@jit
def _store_results(
    logits_ptr, target, logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr, row, V,
    row_top, row_total, along, sum_z, softcap, unit, k, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write a row's results and statistics from its moments. logits_ptr: the row's first element."""
    # The sum is at least 1, the maximum's exponential. A row with only -inf gives 0, and a NaN logprob, as in torch.
    log2_sum = tl.log2(row_total)
    # A target out of range reads nothing and turns the row's results and gradient into NaN.
    valid = (target >= 0) & (target < V)
    log2_sum = tl.where(valid, log2_sum, float("nan"))
    z_target = tl.load(logits_ptr + target, mask=valid, other=0.0).to(tl.float32)
    if SOFTCAP:
        z_target, _ = cap(z_target, unit, softcap)
    tl.store(logprob_ptr + row, ((z_target - row_top) * k - log2_sum) * LN2)
    entropy = 0.0
    if entropy_ptr is not None:
        # log Σ e − Σ e · log e / Σ e: no probability is formed, so none underflows.
        entropy = (log2_sum - along / row_total) * LN2
        tl.store(entropy_ptr + row, entropy)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (row_top * k + log2_sum) * LN2)
    if top1_ptr is not None:
        tl.store(top1_ptr + row, ((z_target >= row_top) & valid).to(tl.int8))
    if mean_ptr is not None:
        mean = sum_z / V
        if not SOFTCAP:
            mean = mean * unit
        tl.store(mean_ptr + row, mean)
    if stats_ptr is not None:
        tl.store(stats_ptr + 3 * row, row_top)
        tl.store(stats_ptr + 3 * row + 1, log2_sum)
        tl.store(stats_ptr + 3 * row + 2, entropy)


@jit
@do_not_specialize("ignore_index")
def _logprob_fwd_kernel(
    logits_ptr, target_ptr, logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr,
    V, stride_m, ignore_index, softcap, unit, k,
    SOFTCAP: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's results, in a single reading."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        _store_nothing(logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr, row)
        return
    ENTROPY: tl.constexpr = entropy_ptr is not None
    MEAN: tl.constexpr = mean_ptr is not None
    row_top, row_total, along, sum_z = row_moments(
        logits_ptr, V, softcap, unit, k, SOFTCAP, ENTROPY, MEAN, EDGES, DEPTH, BLOCK
    )
    _store_results(
        logits_ptr, target, logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr, row, V,
        row_top, row_total, along, sum_z, softcap, unit, k, SOFTCAP,
    )  # fmt: skip


# A program: part of a row, `width` columns, for a few wide rows (`tigon.kernels.row_parts`).
#   partial   (M, 4, P): maximum, Σ exp, Σ exp · log exp and Σ z of each part; unwritten and unread for ignored rows
@jit
@do_not_specialize("ignore_index", "P")
def _logprob_parts_kernel(
    logits_ptr, target_ptr, partial_ptr, V, stride_m, ignore_index, softcap, unit, k, P, width,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a part's moments."""
    row, start, columns = locate_part_of_row(P, width, V)
    if tl.load(target_ptr + row) == ignore_index:
        return
    top, total, along, sum_z = row_moments(
        logits_ptr + row * stride_m + start, columns, softcap, unit, k, SOFTCAP, ENTROPY, MEAN, EDGES, DEPTH, BLOCK
    )
    partial_ptr += row * 4 * P + tl.program_id(0) % P
    tl.store(partial_ptr, top)
    tl.store(partial_ptr + P, total)
    if ENTROPY:
        tl.store(partial_ptr + 2 * P, along)
    if MEAN:
        tl.store(partial_ptr + 3 * P, sum_z)


# A program: one row; combines its parts' moments and writes as `_logprob_fwd_kernel`.
@jit
@do_not_specialize("ignore_index", "P")
def _logprob_fold_kernel(
    logits_ptr, target_ptr, logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr, partial_ptr,
    V, stride_m, ignore_index, softcap, unit, k, P, SOFTCAP: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write a row's results from its parts' moments."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        _store_nothing(logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr, row)
        return
    ENTROPY: tl.constexpr = entropy_ptr is not None
    MEAN: tl.constexpr = mean_ptr is not None
    row_top, row_total, along, sum_z = moments_of_parts(partial_ptr, row, P, k, ENTROPY, MEAN, BLOCK_P)
    _store_results(
        logits_ptr + row * stride_m, target, logprob_ptr, entropy_ptr, lse_ptr, top1_ptr, mean_ptr, stats_ptr, row, V,
        row_top, row_total, along, sum_z, softcap, unit, k, SOFTCAP,
    )  # fmt: skip


@jit
def _write_gradient(
    logits_ptr, dlogits_ptr, first, cols, here, target, counts, dlogprob_ptr, dentropy_ptr, stats_ptr,
    row, stride_p, stride_e, stride_m, stride_dm, softcap, unit, k, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write a row's gradient for some columns, with classes first + cols. here: columns inside the row."""
    mask = here & counts
    top = tl.load(stats_ptr + 3 * row)
    log2_sum = tl.load(stats_ptr + 3 * row + 1)
    z = tl.load(logits_ptr + row * stride_m + cols, mask=mask, other=0.0).to(tl.float32)
    slope = k * LN2
    if SOFTCAP:
        z, steep = cap(z, unit, softcap)
        slope = slope * steep
    log2_p = (z - top) * k - log2_sum
    p = tl.exp2(log2_p)
    dz = tl.zeros(cols.shape, tl.float32)
    if dlogprob_ptr is not None:
        dlogprob = tl.load(dlogprob_ptr + row * stride_p).to(tl.float32)
        # d logprob / dz = 1[target] − p. No column matches if the target is in another shard.
        dz += dlogprob * (tl.where(first + cols == target, 1.0, 0.0) - p)
    if dentropy_ptr is not None:
        dentropy = tl.load(dentropy_ptr + row * stride_e).to(tl.float32)
        entropy = tl.load(stats_ptr + 3 * row + 2)
        # d entropy / dz = −p · (log p + entropy), and p · log p → 0 where log p is -inf. The upstream gradient is
        # inside the select, so that an infinite gradient never meets a 0.
        dz -= tl.where(p == 0.0, 0.0, dentropy * p * (log2_p * LN2 + entropy))
    # A select: an ignored row's upstream gradient may be NaN.
    dx = tl.where(counts, dz * slope, 0.0)
    tl.store(dlogits_ptr + row * stride_dm + cols, dx.to(dlogits_ptr.dtype.element_ty), mask=here)


# A program: a row's BLOCK columns; the row's statistics are all that its elements share, so the grid is flat. A row's
# blocks are neighbours in the grid and share the cached statistics.
#   dlogprob, dentropy   (M,) upstream gradients with strides p and e, or None
# dlogits may alias logits: the thread that writes an element has read that element.
@jit
@do_not_specialize("ignore_index")
def _logprob_bwd_kernel(
    logits_ptr, target_ptr, dlogprob_ptr, dentropy_ptr, stats_ptr, dlogits_ptr,
    V, stride_p, stride_e, stride_m, stride_dm, ignore_index, softcap, unit, k,
    SOFTCAP: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dlogits."""
    # A body is at most V // 4 · 4 wide for any dtype. The grid needs a bound for all rows, but a body depends on the
    # row's address.
    blocks = tl.cdiv(V // 4 * 4 if EDGES else V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    first, width = 0, V
    if EDGES:
        logits_ptr += row * stride_m
        dlogits_ptr += row * stride_dm
        first, width = split(logits_ptr, V)
        if tl.program_id(0) % blocks == 0:
            # The first program of a row also writes the edges, which share no element with the body: in place, neither
            # overwrites unread elements.
            edge, real = edges(logits_ptr, first, width, V)
            _write_gradient(
                logits_ptr, dlogits_ptr, 0, edge, real, target, counts, dlogprob_ptr, dentropy_ptr, stats_ptr,
                row, stride_p, stride_e, 0, 0, softcap, unit, k, SOFTCAP,
            )  # fmt: skip
        logits_ptr = align(logits_ptr, first)
        dlogits_ptr = align(dlogits_ptr, first)
        stride_m, stride_dm = 0, 0
    _write_gradient(
        logits_ptr, dlogits_ptr, first, cols, cols < width, target, counts, dlogprob_ptr, dentropy_ptr, stats_ptr,
        row, stride_p, stride_e, stride_m, stride_dm, softcap, unit, k, SOFTCAP,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(V: int, softcap: float) -> tuple[int, int, int]:
    """Blocks folded at a time (as many as registers allow), columns per block, and warps."""
    # 1024 columns on 4 warps are 8 numbers per thread, 16 bytes in 16 bits. Cross entropy's plain pass folds 8 blocks
    # at a time. Here Σ e · log e and Σ z take the registers of four blocks, and a tanh those of two more.
    block = min(1024, next_power_of_2(V))
    return max(1, min(2 if softcap else 4, next_power_of_2(V) // block)), block, 4


def _bwd_tile(V: int) -> tuple[int, int]:
    return min(2048, next_power_of_2(V)), 4


def _units(temperature: float, softcap: float, scale: float) -> tuple[float, float, float]:
    """softcap, the factor from stored numbers to logits, and k, the factor from compared numbers to powers of 2."""
    return softcap, scale, (1.0 if softcap else scale) / temperature / math.log(2.0)


def logprob_rows(
    logits: Tensor, target: Tensor, results: tuple[Tensor | None, ...], stats: Tensor | None,
    ignore_index: int, temperature: float, softcap: float, scale: float,
) -> None:  # fmt: skip
    """Write logprob, entropy, logsumexp, is_top1 and mean_logit of (M, V) rows into `results`; None skips a result.

    stats: (M, 3) fp32 for `logprob_gradient_rows`; the entropy is valid only if entropy is requested.
    """
    M, V = logits.shape
    if M == 0:
        return
    if not use_triton(logits):
        found = logprob_reference(logits, target, ignore_index, temperature, softcap, scale)
        for place, value in zip(results, found, strict=True):
            if place is not None:
                place.copy_(value)
        return
    values: list[Tensor | None] = list(results)
    if values[3] is not None:
        # The kernel stores bytes of 0 and 1, torch.bool's representation.
        values[3] = values[3].view(torch.int8)
    arguments = (
        V,
        logits.stride(0),
        ignore_index,
        *_units(temperature, softcap, scale),
        softcap != 0.0,
        uneven(logits),
    )
    # The key includes the requested results, since None changes the kernel, and `uneven`, which addresses decide.
    key = (M, arguments, logits.dtype, target.dtype, stats is None, *(t is None for t in values))
    parts = find_sum_parts(M, V, logits.device)
    if parts is not None:
        _launch_parts((logits, target, *values, stats), key, arguments, M, parts)
        return

    def plan() -> Plan:
        depth, block, warps = _fwd_tile(V, softcap)
        return M, (*arguments, depth, block), {"num_warps": warps}

    launch(_logprob_fwd_kernel, key, (logits, target, *values, stats), plan)


def _launch_parts(
    tensors: tuple[Tensor | None, ...], key: tuple[Any, ...], arguments: tuple[Any, ...], M: int, parts: Parts
) -> None:
    """Two launches: parts, then rows."""
    logits, target, *values, _ = tensors
    *sizes, capped, edges = arguments
    count, width, most = parts
    key = *key, parts
    partial = torch.empty(M * 4 * count, dtype=torch.float32, device=logits.device)  # type: ignore[union-attr]

    def plan_parts() -> Plan:
        depth, block, warps = part_tile(*_fwd_tile(sizes[0], sizes[3]))
        wanted = values[1] is not None, values[4] is not None
        return M * count, (*sizes, count, width, capped, *wanted, edges, depth, block), {"num_warps": warps}

    launch(_logprob_parts_kernel, key, (logits, target, partial), plan_parts)
    launch(
        _logprob_fold_kernel, key, (*tensors, partial),
        lambda: (M, (*sizes, count, capped, most), {"num_warps": fold_warps(most)}),
    )  # fmt: skip


def logprob_gradient_rows(
    logits: Tensor, target: Tensor, stats: Tensor | None, dlogprob: Tensor | None, dentropy: Tensor | None,
    dlogits: Tensor, *options: Any, merged: bool = False,
) -> None:  # fmt: skip
    """dlogits = dlogprob · d(logprob)/d(logits) + dentropy · d(entropy)/d(logits) for (M, V) rows; may be the logits.

    dlogprob, dentropy: (M,), one stride each, or None. stats: from `logprob_rows`; None if that ran without Triton.
    merged: statistics cover all classes, the V classes are a shard, and a target may be in another shard.
    """
    M, V = logits.shape
    if M * V == 0:
        return
    if stats is None or not use_triton(logits):
        known = stats if merged else None
        dlogits.copy_(_gradient_reference(logits, target, dlogprob, dentropy, *options, stats=known))
        return
    ignore_index, temperature, softcap, scale = options
    strides = tuple(0 if d is None else d.stride(0) for d in (dlogprob, dentropy))
    units = _units(temperature, softcap, scale)
    apart = uneven(logits, dlogits)
    arguments = (V, *strides, logits.stride(0), dlogits.stride(0), ignore_index, *units, softcap != 0.0, apart)
    dtypes = [None if d is None else d.dtype for d in (dlogprob, dentropy)]
    key = (M, arguments, logits.dtype, target.dtype, *dtypes)

    def plan() -> Plan:
        block, warps = _bwd_tile(V)
        return M * cdiv(V // 4 * 4 if apart else V, block), (*arguments, block), {"num_warps": warps}

    launch(_logprob_bwd_kernel, key, (logits, target, dlogprob, dentropy, stats, dlogits), plan)


_OPTIONS = "int ignore_index, float temperature, float softcap, float scale"


def _logprob_fwd_fake(logits: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, ...]:
    one = logits.new_empty(target.shape, dtype=torch.float32)
    top1 = logits.new_empty(target.shape, dtype=torch.bool)
    stats = logits.new_empty((target.numel(), 3), dtype=torch.float32)
    return one, torch.empty_like(one), torch.empty_like(one), top1, torch.empty_like(one), stats


@launcher(_logprob_fwd_fake, rest=_OPTIONS, results=6)
def _logprob_fwd(logits: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    *results, stats = _logprob_fwd_fake(logits, target, *options)
    if logits.numel():
        logprob_rows(view_rows(logits), target.reshape(-1).contiguous(), tuple(results), stats, *options)
    elif target.numel():  # without classes every target is out of range
        for result in results:
            result.copy_(torch.where(target == options[0], 0.0, 0.0 if result.dtype == torch.bool else float("nan")))
    return *results, stats


@launcher(dense_like, rest=_OPTIONS)
def _logprob_bwd(
    logits: Tensor, target: Tensor, stats: Tensor, dlogprob: Tensor | None, dentropy: Tensor | None, *options: Any
) -> Tensor:
    # A new tensor: the caller owns the logits here. Chunked losses, which own their logits, call
    # `logprob_gradient_rows` in place.
    dlogits = dense_like(logits)
    if logits.numel():
        rows = dlogits.view(-1, logits.shape[-1])
        dlogprob, dentropy = (None if d is None else d.reshape(-1) for d in (dlogprob, dentropy))
        labels = target.reshape(-1).contiguous()
        logprob_gradient_rows(view_rows(logits), labels, stats, dlogprob, dentropy, rows, *options)
    return dlogits


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[5])


def _backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if (dlogprob is None and dentropy is None) or not ctx.needs_input_grad[0]:
        return ()
    return (_logprob_bwd(*ctx.saved_tensors, dlogprob, dentropy, *ctx.options),)


_logprob = differentiable(_logprob_fwd, _setup_context, _backward, outputs=5)


EXAMPLES = {
    "logprob": Example("Losses", (LOGITS,), lambda x: tuple(logprob(x, make_ids(x, 256))[:2])),
}
