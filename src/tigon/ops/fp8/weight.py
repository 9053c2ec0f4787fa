"""Weights in e4m3 with one scale, as they are and transposed: 2 bytes read, 1 written. Stacks have a scale a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, jit, launch, launcher, tl, use_triton
from tigon.kernels.tiles.fp8 import compute_scale_tile, round_to_words
from tigon.ops.fp8.columns import transpose_rows
from tigon.ops.fp8.recipe import ALIGNMENT, E4M3, Weight
from tigon.ops.fp8.reference import quantize_stack_reference, quantize_weight_reference


def measure_weights(parts: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in several weights, 0-d fp32; weights without elements count as 0. Reads each once."""
    weights = [part.detach() for part in parts if part.numel()]
    if not weights:
        return parts[0].new_zeros((), dtype=torch.float32)
    if use_triton(*weights):
        return _fp8_amax(weights[0], weights[1:])
    return torch.stack(torch._foreach_norm(weights, torch.inf)).amax().float()


def quantize_weight(parts: Sequence[Tensor], amax: Tensor) -> Weight:
    """Weights (Nᵢ, K) in bf16, fp16 or fp32, stacked to (N, K) in e4m3.

    amax: 0-d fp32, at least the largest magnitude in the weights; larger numbers saturate.
    """
    if not use_triton(amax, *parts):
        return quantize_weight_reference(parts, amax)
    return Weight(*_fp8_weight(amax, list(parts)))


def quantize_transposed(parts: Sequence[Tensor], amax: Tensor) -> Weight:
    """The transposition (K, N) of `quantize_weight`, the same bytes."""
    if use_triton(amax, *parts) and all(len(part) % ALIGNMENT == 0 for part in parts):
        return Weight(*_fp8_transposed(amax, list(parts)))
    weight = quantize_weight(parts, amax)
    N, K = weight.data.shape
    return Weight(transpose_rows(weight.data)[:, :N].contiguous(), weight.scale[:1].expand(K).contiguous())


def measure_stack(stack: Tensor) -> Tensor:
    """The largest magnitude of each weight in a stack (E, N, K), (E,) fp32."""
    if use_triton(stack) and stack.numel():
        stack = stack.detach().contiguous()
        found = stack.new_zeros(len(stack), dtype=torch.float32)
        _launch_amax(stack, found)
        return found
    amax: Tensor = torch.linalg.vector_norm(stack.detach(), torch.inf, dim=(1, 2))
    return amax.float()


def quantize_stack(stack: Tensor, amax: Tensor) -> Weight:
    """A stack (E, N, K) in e4m3, a scale for each weight: data (E, N, K), scale (E, N). amax: `measure_stack`'s."""
    if not use_triton(amax, stack) or not stack.numel():
        return quantize_stack_reference(stack, amax)
    stack = stack.contiguous()
    data, scale = torch.empty_like(stack, dtype=E4M3), amax.new_empty(stack.shape[:2])
    _launch_weight(amax, stack, data, scale)
    return Weight(data, scale)


def transpose_stack(stack: Tensor, amax: Tensor) -> Weight:
    """The transpositions of `quantize_stack`, the same bytes: data (E, K, N), scale (E, K). N is a multiple of 16."""
    if not use_triton(amax, stack) or not stack.numel():
        data, scale = quantize_stack_reference(stack, amax)
        return Weight(data.transpose(1, 2).contiguous(), scale[:, :1].expand(-1, stack.shape[2]).contiguous())
    E, N, K = stack.shape
    data, scale = torch.empty((E, K, N), dtype=E4M3, device=stack.device), amax.new_empty((E, K))
    _launch_transposed(amax, stack.contiguous(), data.view(torch.int32), scale)
    return Weight(data, scale)


# ---------------------------------------------------------------------------------------------------------- kernels


# A program: ROUNDS · BLOCK numbers of a weight of `size` numbers. The bits of floats without a sign are ordered as the
# floats, with NaN above all, and the largest integer is the same in any order.
#   programs  of a weight: those of the next weight in a stack follow, with their own amax
@jit
def _measure_kernel(w_ptr, amax_ptr, size, programs, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    which = (tl.program_id(0) // programs).to(tl.int64)
    at = (tl.program_id(0) % programs).to(tl.int64) * (ROUNDS * BLOCK) + tl.arange(0, BLOCK)
    w_ptr += which * size
    most = tl.zeros((BLOCK,), dtype=tl.int32)
    for _ in tl.static_range(ROUNDS):
        w = tl.load(w_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        most = tl.maximum(most, w.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        at += BLOCK
    tl.atomic_max(amax_ptr + which, tl.max(most, 0), sem="relaxed")


# A program: BLOCK numbers of a weight (N, K) → e4m3, `size` numbers in all. The first programs write the N scales.
#   programs  of a weight: those of the next weight in a stack follow, with their own amax
@jit
def _quantize_weight_kernel(amax_ptr, w_ptr, q_ptr, s_ptr, size, N, programs, BLOCK: tl.constexpr):
    which = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int64) * BLOCK
    w_ptr += which * size
    q_ptr += which * size
    s_ptr += which * N
    at = start + tl.arange(0, BLOCK)
    s = compute_scale_tile(tl.load(amax_ptr + which).to(tl.float32))
    w = tl.load(w_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(q_ptr + at, (w * (1.0 / s)).to(tl.float8e4nv), mask=at < size)
    if start < N:
        tl.store(s_ptr + at, s, mask=at < N)


@jit
def _round_every_fourth_row(w_ptr, i, first, K, cols, mask, inverse):
    at = (4 * i + first).to(tl.int64)[:, None] * K + cols[None, :]
    return tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32) * inverse


# A program: 4 · BLOCK_I rows by BLOCK_K columns of a weight (N, K) → e4m3, transposed. Four rows are joined into
# words, which are transposed in shared memory, and stored 16 bytes a thread.
#   t        words (K, T), T = 4 · units_t; this weight's first word
#   s        (K,), or None for all weights but the first
#   units    N / 16, and words of a row of t / 4: Triton then knows that rows of t begin at multiples of 16 bytes
#   programs as for `_quantize_weight_kernel`
@jit
def _transpose_weight_kernel(
    amax_ptr, w_ptr, t_ptr, s_ptr, K, units, units_t, programs, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr
):
    which = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    w_ptr += which * (16 * units) * K
    t_ptr += which * (4 * units_t) * K
    tiles = tl.cdiv(K, BLOCK_K)
    i = program // tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    cols = program % tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (i < 4 * units)[:, None] & (cols < K)[None, :]
    s = compute_scale_tile(tl.load(amax_ptr + which).to(tl.float32))
    inverse = 1.0 / s
    words = round_to_words(
        _round_every_fourth_row(w_ptr, i, 0, K, cols, mask, inverse),
        _round_every_fourth_row(w_ptr, i, 1, K, cols, mask, inverse),
        _round_every_fourth_row(w_ptr, i, 2, K, cols, mask, inverse),
        _round_every_fourth_row(w_ptr, i, 3, K, cols, mask, inverse),
    )
    at = cols.to(tl.int64)[:, None] * (4 * units_t) + i[None, :]
    tl.store(t_ptr + at, tl.trans(words), mask=(cols < K)[:, None] & (i < 4 * units)[None, :])
    if s_ptr is not None:
        tl.store(s_ptr + which * K + cols, s, mask=(cols < K) & (program < tiles))


# --------------------------------------------------------------------------------------------------------- launches


def _transposed_tile() -> tuple[int, int, int]:
    """Words and columns of a tile, and warps: 128 × 128 numbers, read in rows of 256 bytes, written in rows of 128."""
    return 32, 128, 4


def _fp8_amax_fake(weight: Tensor, others: list[Tensor]) -> Tensor:
    return weight.new_empty((), dtype=torch.float32)


@launcher(_fp8_amax_fake)
def _fp8_amax(weight: Tensor, others: list[Tensor]) -> Tensor:
    amax = weight.new_zeros((), dtype=torch.float32)
    for part in (weight, *others):
        _launch_amax(part.contiguous(), amax)
    return amax


def _launch_amax(weight: Tensor, amax: Tensor) -> None:
    """weight: (N, K) or a stack (E, N, K). amax: 0-d or (E,), zeros."""
    count, rounds, block = amax.numel(), 4, 4096
    size = weight.numel() // count
    programs = cdiv(size, rounds * block)
    launch(
        _measure_kernel, (count, size, weight.dtype), (weight, amax.view(torch.int32)),
        lambda: (count * programs, (size, programs, rounds, block), {"num_warps": 4}),
    )  # fmt: skip


def _fp8_weight_fake(amax: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    N = sum(len(part) for part in parts)
    return amax.new_empty((N, parts[0].shape[1]), dtype=E4M3), amax.new_empty(N, dtype=torch.float32)


@launcher(_fp8_weight_fake)
def _fp8_weight(amax: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    data, scale = _fp8_weight_fake(amax, parts)
    sizes = [len(part) for part in parts]
    for part, q, s in zip(parts, data.split(sizes), scale.split(sizes), strict=True):
        _launch_weight(amax, part.contiguous(), q, s)
    return data, scale


def _launch_weight(amax: Tensor, weight: Tensor, q: Tensor, s: Tensor) -> None:
    """weight: (N, K), or a stack (E, N, K) with an amax each."""
    count, N, size = amax.numel(), weight.shape[-2], weight.shape[-2] * weight.shape[-1]
    programs = cdiv(size, 8192)  # 32 numbers a thread: four 16-byte loads of 16-bit numbers
    if size:
        launch(
            _quantize_weight_kernel, (count, size, N, weight.dtype, amax.dtype), (amax, weight, q, s),
            lambda: (count * programs, (size, N, programs, 8192), {"num_warps": 8}),
        )  # fmt: skip


def _fp8_transposed_fake(amax: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    N, K = sum(len(part) for part in parts), parts[0].shape[1]
    return amax.new_empty((K, N), dtype=E4M3), amax.new_empty(K, dtype=torch.float32)


@launcher(_fp8_transposed_fake)
def _fp8_transposed(amax: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    data, scale = _fp8_transposed_fake(amax, parts)
    sizes = [len(part) // 4 for part in parts]
    for i, (part, t) in enumerate(zip(parts, data.view(torch.int32).split(sizes, 1), strict=True)):
        _launch_transposed(amax, part.contiguous(), t, scale if i == 0 else None)
    return data, scale


def _launch_transposed(amax: Tensor, weight: Tensor, t: Tensor, s: Tensor | None) -> None:
    """weight: (N, K), or a stack (E, N, K) with an amax each."""
    count, (N, K), stride = amax.numel(), weight.shape[-2:], t.stride(-2)

    def plan() -> Plan:
        block_i, block_k, warps = _transposed_tile()
        programs = cdiv(N // 4, block_i) * cdiv(K, block_k)
        return count * programs, (K, N // ALIGNMENT, stride // 4, programs, block_i, block_k), {"num_warps": warps}

    if weight.numel():
        key = (count, N, K, stride, s is None, weight.dtype, amax.dtype)
        launch(_transpose_weight_kernel, key, (amax, weight, t, s), plan)
