"""Losses of (M, V) rows of logits, and the logits turned into the gradient in place: the launches."""

from __future__ import annotations

from torch import Tensor

from tigon.losses.distillation.kernels import (
    LOG2E,
    _distill_cosine_kernel,
    _distill_kernel,
    _distill_topk_kernel,
)
from tigon.losses.distillation.reference import rows_reference, topk_rows_reference
from tigon.runtime import launch, next_power_of_2, use_triton


def _tile(V: int, capped: bool, own: bool, most: int = 16, least: int = 4) -> tuple[int, int, int]:
    """Warps, blocks folded at a time, and columns of a block.

    Many warps a row keep few rows in flight, so that the L2 cache serves more of a row's second reading.
    own: the cross entropy has a softmax of its own. most, least: warps of a long row, and of a short row.
    """
    warps = least if V <= 8192 else most
    block = min(next_power_of_2(V), warps * 32 * 8)
    depth = 1 if capped or own else 2  # as deep as registers allow
    return warps, max(1, min(depth, next_power_of_2(V) // block)), block


def _hard(hard: Tensor | None, temperature: float) -> int:
    return 0 if hard is None else 1 if temperature == 1.0 else 2


def distill_rows(
    logits: Tensor, teacher: Tensor, labels: Tensor | None, soft: Tensor, hard: Tensor | None, factor: Tensor | None,
    weights: tuple[float, float], gradient: bool, kind: str, beta: float, temperature: float, ignore_index: int,
    softcap: float, scale: float, teacher_softcap: float, teacher_scale: float,
) -> None:  # fmt: skip
    """Write each row's soft loss, and its cross entropy if hard is not None. With `gradient` overwrite the logits.

    logits, teacher: (M, V) with unit stride along V; labels, soft, hard: (M,), dense; factor: 0-d or None.
    weights: factors of the soft and the hard gradient; the soft factor includes 1 / temperature.
    """
    options = (kind, beta, temperature, ignore_index, softcap, scale, teacher_softcap, teacher_scale)
    if not use_triton(logits, teacher):
        for part in _cache_sized(logits):
            here = None if labels is None else labels[part]
            acc = logits[part].to(soft.dtype)
            results = rows_reference(acc, teacher[part], here, weights, gradient, *options)
            _keep(results, part, logits, soft, hard, factor)
        return
    M, V = logits.shape
    mode = _hard(hard, temperature)
    sizes = (V, logits.stride(0), teacher.stride(0), ignore_index)
    transforms = (softcap, scale, teacher_softcap, teacher_scale)
    branches = (mode, softcap != 0.0, teacher_softcap != 0.0, gradient)
    label = None if labels is None else labels.dtype
    # Every number that the plan reads is in the key: a plan is kept for the next launch with the same key.
    key = (M, sizes, options, weights, branches, logits.dtype, teacher.dtype, label, factor is None)
    tensors = (logits, teacher, labels, soft, hard, factor)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        warps, depth, block = _tile(V, softcap != 0.0 or teacher_softcap != 0.0, mode == 2)
        if kind == "cosine":
            return M, (*sizes, *weights, *transforms, *branches, depth, block), {"num_warps": warps}
        k = LOG2E.value / temperature
        return M, (*sizes, beta, k, *weights, *transforms, kind, *branches, depth, block), {"num_warps": warps}

    launch(_distill_cosine_kernel if kind == "cosine" else _distill_kernel, key, tensors, plan)


def topk_rows(
    logits: Tensor, ids: Tensor, logprobs: Tensor, labels: Tensor | None, soft: Tensor, hard: Tensor | None,
    factor: Tensor | None, weights: tuple[float, float], gradient: bool, kind: str, rest: str, beta: float,
    temperature: float, ignore_index: int, softcap: float, scale: float,
) -> None:  # fmt: skip
    """As `distill_rows`, for a teacher's (M, K) classes. The logits are overwritten even without `gradient`."""
    options = (kind, rest, beta, temperature, ignore_index, softcap, scale)
    if not use_triton(logits):
        for part in _cache_sized(logits):
            here = None if labels is None else labels[part]
            acc = logits[part].to(soft.dtype)
            results = topk_rows_reference(acc, ids[part], logprobs[part], here, weights, gradient, *options)
            _keep(results, part, logits, soft, hard, factor)
        return
    (M, V), K = logits.shape, ids.shape[1]
    mode = _hard(hard, temperature)
    sizes = (V, K, logits.stride(0), ids.stride(0), logprobs.stride(0), ignore_index)
    numbers = (beta, LOG2E.value / temperature, *weights, softcap, scale)
    branches = (kind, rest, mode, softcap != 0.0, gradient, next_power_of_2(K + 1))
    label = None if labels is None else labels.dtype
    key = (M, sizes, numbers, branches, logits.dtype, ids.dtype, logprobs.dtype, label, factor is None)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        # In a program of 16 warps a thread has 128 registers; softcap and a second softmax together need more.
        warps, depth, block = _tile(V, softcap != 0.0, mode == 2, 8 if softcap and mode == 2 else 16)
        return M, (*sizes, *numbers, *branches, depth, block), {"num_warps": warps}

    launch(_distill_topk_kernel, key, (logits, ids, logprobs, labels, soft, hard, factor), plan)


def _keep(
    results: tuple[Tensor, Tensor | None, Tensor | None], part: slice, logits: Tensor, soft: Tensor,
    hard: Tensor | None, factor: Tensor | None,
) -> None:  # fmt: skip
    soft[part] = results[0]
    if hard is not None and results[1] is not None:
        hard[part] = results[1]
    if results[2] is not None:
        logits[part] = results[2] if factor is None else results[2] * factor


def _cache_sized(logits: Tensor) -> list[slice]:
    """A few rows at a time: the temporaries of the torch path then stay in a CPU's caches and out of the peak."""
    step = max(1, 2**20 // max(1, logits.shape[1]))
    return [slice(i, i + step) for i in range(0, logits.shape[0], step)]
