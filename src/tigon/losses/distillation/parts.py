"""Rows of distillation whose classes lie on several devices, teacher's and student's alike.

    1  each device sends its maxima and sums of both sides (cosine: products), 3 to 6 numbers a row
    2  from all of these it computes its part of the divergence and, except for kl and cosine, of Σ q · u, which it
       sends: 1 number a row
    3  from the total of Σ q · u it computes the gradient of its own logits

With a teacher's K classes step 1 sends the student's K logits too, and step 2 is left out: all devices then compute the
same losses. The devices sum the rows' divergences at the end of the walk. Every device adds up parts in the order of
the devices, so that all devices get the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.linear.vocabulary_parallel import Shards
from tigon.losses.distillation.kernels import LOG2E
from tigon.losses.distillation.parts_kernels import (
    _cosine_gradient_kernel,
    _distill_gradient_kernel,
    _distill_statistics_kernel,
    _distill_value_kernel,
    _merge_distill_kernel,
)
from tigon.losses.distillation.parts_reference import (
    _gradient_reference,
    _local_ids,
    _merge_reference,
    _of_valid,
    _sides_reference,
    _statistics_reference,
    _topk_reference,
    _topk_statistics_reference,
)
from tigon.losses.distillation.parts_topk_kernels import _topk_gradient_kernel, _topk_statistics_kernel
from tigon.losses.distillation.reference import _cap
from tigon.losses.distillation.rows import _cache_sized, _hard, _tile
from tigon.ops.shard_statistics import IGNORED, LEAST, OUTSIDE
from tigon.runtime import cdiv, launch, next_power_of_2, use_triton

MERGED = 5  # numbers of a row once its parts are merged
ROWS = 128  # rows of a program of the merge


def distill_statistics(
    logits: Tensor, teacher: Tensor, labels: Tensor | None, out_dtype: torch.dtype, kind: str, mode: int,
    temperature: float, softcap: float, scale: float, teacher_softcap: float, teacher_scale: float,
) -> Tensor:  # fmt: skip
    """This device's statistics of its (M, V) logits, (M, columns); V may be 0. labels: of `local_labels`, or None."""
    M, V = logits.shape
    cosine = kind == "cosine"
    columns = (6 if mode else 3) if cosine else 4 + mode
    out = logits.new_empty(M, columns, dtype=out_dtype)
    if V == 0:  # a device without classes: empty sums, and the least maxima
        out.zero_()
        # Column by column: an index that is a list would be copied to the device, and the host would wait.
        for top in (0, 2) if not cosine else (4,) if mode else ():
            out[:, top] = LEAST
        return out
    if not use_triton(logits, teacher):
        for part in _cache_sized(logits):
            z, t = _cap(logits[part].to(out_dtype), softcap, scale)[0], teacher[part].to(out_dtype)
            here = None if labels is None else labels[part]
            found = _statistics_reference(z, _cap(t, teacher_softcap, teacher_scale)[0], here, kind, mode, temperature)
            out[part] = _of_valid(found, here)
        return out
    sizes = (V, logits.stride(0), teacher.stride(0))
    numbers = (LOG2E.value / temperature, softcap, scale, teacher_softcap, teacher_scale)
    branches = (cosine, mode, softcap != 0.0, teacher_softcap != 0.0, columns, IGNORED)
    key = (M, sizes, numbers, branches, logits.dtype, teacher.dtype, labels is None)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        # More than four warps for short rows too: with four, ptxas aims at an occupancy at which it has to spill.
        warps, depth, block = _tile(V, softcap != 0.0 or teacher_softcap != 0.0, mode == 2, least=8)
        return M, (*sizes, *numbers, *branches, depth, block), {"num_warps": warps}

    launch(_distill_statistics_kernel, key, (logits, teacher, labels, out), plan)
    return out


def merge_distill(
    parts: Tensor, labels: Tensor | None, hard: Tensor | None, kind: str, mode: int, temperature: float
) -> Tensor:
    """Merge (devices, M, columns) into (M, MERGED), and write the hard losses."""
    world, M, columns = parts.shape
    if not use_triton(parts):
        found, merged = _merge_reference(parts, labels, kind, mode, temperature)
        if hard is not None:
            hard.copy_(found)
        return merged
    merged = parts.new_empty(M, MERGED)
    k = LOG2E.value / temperature
    branches = (kind == "cosine", mode, columns, MERGED, IGNORED, OUTSIDE, ROWS)
    plan = cdiv(M, ROWS), (M, world, k, *branches), {"num_warps": 4}
    launch(_merge_distill_kernel, (M, world, k, branches, labels is None), (parts, labels, hard, merged), lambda: plan)
    return merged


def distill_values(
    logits: Tensor, teacher: Tensor, labels: Tensor | None, merged: Tensor, soft: Tensor, kind: str, beta: float,
    temperature: float, softcap: float, scale: float, teacher_softcap: float, teacher_scale: float,
) -> Tensor:  # fmt: skip
    """Write this device's part of each row's divergence, and return its part of Σ q · u, (M,)."""
    M, V = logits.shape
    mean = torch.empty_like(soft)
    if V == 0:
        soft.zero_()
        return mean.zero_()
    if not use_triton(logits, teacher):
        for part in _cache_sized(logits):
            z, t = _cap(logits[part].to(soft.dtype), softcap, scale)[0], teacher[part].to(soft.dtype)
            t, here = _cap(t, teacher_softcap, teacher_scale)[0], None if labels is None else labels[part]
            terms, _, slopes = _sides_reference(z, t, merged[part], kind, beta, temperature)
            soft[part], mean[part] = _of_valid(terms.sum(-1), here), _of_valid(slopes.sum(-1), here)
        return mean
    sizes = (V, logits.stride(0), teacher.stride(0))
    numbers = (beta, LOG2E.value / temperature, softcap, scale, teacher_softcap, teacher_scale)
    branches = (kind, softcap != 0.0, teacher_softcap != 0.0, MERGED, IGNORED)
    key = (M, sizes, numbers, branches, logits.dtype, teacher.dtype, labels is None)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        warps, depth, block = _tile(V, softcap != 0.0 or teacher_softcap != 0.0, False)
        return M, (*sizes, *numbers, *branches, depth, block), {"num_warps": warps}

    launch(_distill_value_kernel, key, (logits, teacher, labels, merged, soft, mean), plan)
    return mean


def distill_gradients(
    logits: Tensor, teacher: Tensor, labels: Tensor | None, merged: Tensor, means: Tensor | None, soft: Tensor,
    factor: Tensor | None, weights: tuple[float, float], kind: str, mode: int, beta: float, temperature: float,
    softcap: float, scale: float, teacher_softcap: float, teacher_scale: float,
) -> None:  # fmt: skip
    """Overwrite this device's logits with their gradient; for "kl" also write its part of each row's divergence.

    means: (devices, M) of `distill_values`. None for "kl", whose Σ q · u is known, and for "cosine", which has none.
    """
    M, V = logits.shape
    if V == 0:
        if kind == "kl":
            soft.zero_()
        return
    if not use_triton(logits, teacher):
        total = None if means is None else means.sum(0)
        for part in _cache_sized(logits):
            z, slope = _cap(logits[part].to(soft.dtype), softcap, scale)
            t, here = teacher[part].to(soft.dtype), None if labels is None else labels[part]
            t = _cap(t, teacher_softcap, teacher_scale)[0]
            of_all = -1.0 if total is None else total[part]
            options = weights, kind, beta, temperature, mode
            dz = _gradient_reference(z, t, slope, here, merged[part], of_all, *options)
            if kind == "kl":
                terms = _sides_reference(z, t, merged[part], kind, beta, temperature)[0]
                soft[part] = _of_valid(terms.sum(-1), here)
            logits[part] = dz if factor is None else dz * factor
        return
    world = 0 if means is None else means.shape[0]
    sizes = (V, logits.stride(0), teacher.stride(0))
    slopes = (M, world, beta, LOG2E.value / temperature)
    numbers = (*weights, softcap, scale, teacher_softcap, teacher_scale)
    branches = (mode, softcap != 0.0, teacher_softcap != 0.0, MERGED, IGNORED)
    key = (sizes, slopes, numbers, kind, branches, logits.dtype, teacher.dtype, labels is None, factor is None)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        warps, depth, block = _tile(V, softcap != 0.0 or teacher_softcap != 0.0, mode == 2)
        if kind == "cosine":
            return M, (*sizes, *numbers, *branches, depth, block), {"num_warps": warps}
        return M, (*sizes, *slopes, *numbers, kind, *branches, depth, block), {"num_warps": warps}

    if kind == "cosine":
        launch(_cosine_gradient_kernel, key, (logits, teacher, labels, merged, soft, factor), plan)
    else:
        launch(_distill_gradient_kernel, key, (logits, teacher, labels, merged, means, soft, factor), plan)


def topk_statistics(
    logits: Tensor, ids: Tensor, logprobs: Tensor, labels: Tensor | None, out_dtype: torch.dtype, rest: str, mode: int,
    first: int, classes: int, temperature: float, softcap: float, scale: float,
) -> Tensor:  # fmt: skip
    """This device's statistics, (M, 4 + K), of its (M, V) logits, whose first class is `first`. The kernel replaces the
    given classes' logits by -inf."""
    (M, V), K = logits.shape, ids.shape[1]
    out = logits.new_empty(M, 4 + K, dtype=out_dtype)
    if V == 0:
        out.zero_()
        out[:, 0] = LEAST
        return out
    if not use_triton(logits):
        for part in _cache_sized(logits):
            z, own = _cap(logits[part].to(out_dtype), softcap, scale)[0], None if labels is None else labels[part]
            here, at = _local_ids(ids[part], logprobs[part], V, first)
            out[part] = _of_valid(_topk_statistics_reference(z, here, at, own, mode, temperature), own)
        return out
    sizes = (V, K, first, classes, logits.stride(0), ids.stride(0), logprobs.stride(0))
    numbers = (LOG2E.value / temperature, softcap, scale)
    branches = (rest != "renormalize" or mode > 0, mode, softcap != 0.0, IGNORED, next_power_of_2(K + 1))
    key = (M, sizes, numbers, branches, logits.dtype, ids.dtype, logprobs.dtype, labels is None)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        warps, depth, block = _tile(V, softcap != 0.0, mode == 2, 8 if softcap and mode == 2 else 16)
        return M, (*sizes, *numbers, *branches, depth, block), {"num_warps": warps}

    launch(_topk_statistics_kernel, key, (logits, ids, logprobs, labels, out), plan)
    return out


def topk_gradients(
    logits: Tensor, ids: Tensor, logprobs: Tensor, labels: Tensor | None, parts: Tensor, soft: Tensor,
    hard: Tensor | None, factor: Tensor | None, weights: tuple[float, float], gradient: bool, kind: str, rest: str,
    mode: int, first: int, classes: int, beta: float, temperature: float, softcap: float, scale: float,
) -> None:  # fmt: skip
    """Write each row's losses; with `gradient` overwrite this device's logits with their gradient."""
    (M, V), K = logits.shape, ids.shape[1]
    if V == 0:  # every device computes all losses: here from rows of one class of no probability
        logits = logits.new_full((M, 1), -torch.inf)
    if not use_triton(logits):
        for part in _cache_sized(logits):
            z, slope = _cap(logits[part].to(soft.dtype), softcap, scale)
            own = None if labels is None else labels[part]
            here, at = _local_ids(ids[part], logprobs[part], V, first)
            options = weights, kind, rest, beta, temperature, mode, classes
            results = _topk_reference(z, slope, here, at, logprobs[part], parts[:, part], own, *options)
            soft[part] = results[0]
            if hard is not None:
                hard[part] = results[1]
            if gradient:
                logits[part] = results[2] if factor is None else results[2] * factor
        return
    world = parts.shape[0]
    sizes = (V, K, M, world, first, classes, logits.stride(0), ids.stride(0), logprobs.stride(0))
    numbers = (beta, LOG2E.value / temperature, *weights, softcap, scale)
    branches = (kind, rest, mode, softcap != 0.0, gradient, IGNORED, OUTSIDE, next_power_of_2(K + 1))
    key = (sizes, numbers, branches, logits.dtype, ids.dtype, logprobs.dtype, labels is None, factor is None)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        warps, depth, block = _tile(max(V, 1), softcap != 0.0, mode == 2, 8 if softcap and mode == 2 else 16)
        return M, (*sizes, *numbers, *branches, depth, block), {"num_warps": warps}

    launch(_topk_gradient_kernel, key, (logits, ids, logprobs, labels, parts, soft, hard, factor), plan)


def distill_part(
    logits: Tensor, teacher: Tensor, labels: Tensor | None, soft: Tensor, hard: Tensor | None, factor: Tensor | None,
    weights: tuple[float, float], gradient: bool, kind: str, beta: float, temperature: float, *transforms: float,
    shards: Shards,
) -> None:  # fmt: skip
    """As `distill_rows`, for this device's classes. soft is its part of the divergence; for "cosine" the whole."""
    mode = _hard(hard, temperature)
    both = logits, teacher, labels
    own = distill_statistics(*both, soft.dtype, kind, mode, temperature, *transforms)
    merged = merge_distill(shards.gather(own).wait(), labels, hard, kind, mode, temperature)
    means = None
    if kind == "cosine":
        soft.copy_(_of_valid(1.0 - merged[:, 2], labels))
    elif kind != "kl" or not gradient:
        mean = distill_values(*both, merged, soft, kind, beta, temperature, *transforms)
        means = shards.gather(mean).wait() if kind != "kl" and gradient else None
    if gradient:
        distill_gradients(*both, merged, means, soft, factor, weights, kind, mode, beta, temperature, *transforms)


def topk_part(
    logits: Tensor, ids: Tensor, logprobs: Tensor, labels: Tensor | None, soft: Tensor, hard: Tensor | None,
    factor: Tensor | None, weights: tuple[float, float], gradient: bool, kind: str, rest: str, beta: float,
    temperature: float, *transforms: float, shards: Shards,
) -> None:  # fmt: skip
    """As `topk_rows`, for this device's classes; ids are global. soft is whole on every device."""
    given = logits, ids, logprobs, labels
    span = _hard(hard, temperature), shards.first, shards.classes
    own = topk_statistics(*given, soft.dtype, rest, *span, temperature, *transforms)
    parts = shards.gather(own).wait()
    topk_gradients(
        *given, parts, soft, hard, factor, weights, gradient, kind, rest, *span, beta, temperature, *transforms
    )
