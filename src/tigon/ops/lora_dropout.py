"""Thin adapter products with dropout on the input, a separate mask per layer, without a dropped copy of x.

    t     = […, (mᵢ ⊙ x) Aᵢᵀ, …]    dropped_product     forward
    dx    = Σ mᵢ ⊙ (uᵢ Aᵢ)          dropped_outer       backward
    d[A…] = […, uᵢᵀ (mᵢ ⊙ x), …]    dropped_gradient    backward

The masks mᵢ (zeros and ones) are never written to memory: each kernel recomputes them per tile, from a seed, the layer
index, and the element's row and column. The factor 1/(1-p) is part of the adapter's scale. a and u may be fp32 with x
in bf16.

A mask depends only on these numbers, and is the same on every device, in every dtype and for every tile size.
Philox4x32 with 7 rounds, the fewest that pass BigCrush, turns

    counter   (column // 8, row, layer, 0), key: the seed's 64 bits

into 128 bits, 16 for each of eight columns: p is rounded to a multiple of 2⁻¹⁶. A kernel on x's device draws the seed
from torch's generator: `torch.manual_seed` and checkpoints reproduce the masks, the host does not synchronize, and a
replayed CUDA graph draws new masks.

Source: Srivastava et al. 2014, Dropout, https://jmlr.org/papers/v15/srivastava14a.html; Salmon et al. 2011, Parallel
random numbers: as easy as 1, 2, 3, https://doi.org/10.1145/2063384.2063405
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    do_not_specialize,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    tl,
)
from tigon.ops.sum_rows import sum_rows

# Thresholds have 16 bits, like the random fields. 32 bits per element would give p more digits and double the integer
# arithmetic that bounds the kernels.
STEPS = 65536
# torch's CUDA generator uses 10 rounds. 7 are the fewest that pass BigCrush, and rounds dominate a mask's cost.
ROUNDS = 7


class Masks(NamedTuple):
    """Masks for a group of layers with a shared input, recomputed wherever needed.

    seed: (1,) int64, per call. layers: each layer's index in its group. thresholds: 65536 · p per layer.
    row: index of the first row, if the input is a tile. kernels: whether the kernels use these masks; decided in the
    forward pass, for the backward pass too.
    """

    seed: Tensor
    layers: tuple[int, ...]
    thresholds: tuple[int, ...]
    row: int = 0
    kernels: bool = False

    def select(self, positions: Sequence[int], row: int = 0) -> Masks:
        """The masks for these layers only, for a tile that starts at `row`."""
        layers, thresholds = (tuple(numbers[i] for i in positions) for numbers in (self.layers, self.thresholds))
        return self._replace(layers=layers, thresholds=thresholds, row=row)


def draw_masks(probabilities: Sequence[float], device: torch.device, kernels: bool = False) -> Masks | None:
    """Draw masks for layers with these dropout probabilities; None, and no number drawn, if all are 0."""
    if not any(probabilities):
        return None
    # The seed stays on the device: reading it would synchronize the host. A kernel draws the seed, so that a replayed
    # CUDA graph draws again, and advances torch's generator, so that a checkpoint that restores the generator restores
    # the masks.
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    thresholds = tuple(_threshold(p) for p in probabilities)
    return Masks(seed, tuple(range(len(thresholds))), thresholds, kernels=kernels)


def _threshold(p: float) -> int:
    return min(round(p * STEPS), STEPS - 1)


def kept_share(p: float) -> float:
    """The expected share of kept elements: 1 - p, with p rounded."""
    # The adapter's scale is divided by the share for the rounded p. With the requested p, the expectation would be off
    # by the rounding.
    return 1.0 - _threshold(p) / STEPS


def keep_mask(masks: Masks, i: int, rows: int, columns: int) -> Tensor:
    """The i-th layer's mask, (rows, columns) booleans, in torch: bitwise equal to the kernels'."""
    device = masks.seed.device
    c0 = torch.arange(cdiv(columns, 8), device=device)[None, :].expand(rows, -1)
    c1 = torch.arange(rows, device=device)[:, None].expand_as(c0) + masks.row
    words = torch.stack(_philox(masks.seed, c0, c1, masks.layers[i]), -1)
    bits = torch.stack((words & 0xFFFF, words >> 16), -1)
    return bits.flatten(1)[:, :columns] >= masks.thresholds[i]


def _philox(seed: Tensor, c0: Tensor, c1: Tensor, layer: int) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter (c0, c1, layer, 0), in int64."""
    # torch cannot multiply unsigned 32-bit words with a high half. Words are int64, and products are computed in 16-bit
    # halves, so that no intermediate number reaches the sign bit.
    low = 0xFFFFFFFF

    def product(factor: int, c: Tensor) -> tuple[Tensor, Tensor]:
        """The upper and lower half of a word product, without a sum beyond 2⁴⁹."""
        upper, lower = factor * (c >> 16), factor * (c & 0xFFFF)
        return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & low

    k0, k1 = seed & low, (seed >> 32) & low
    c2, c3 = torch.full_like(c0, layer), torch.zeros_like(c0)
    for _ in range(ROUNDS):
        (high_a, low_a), (high_b, low_b) = product(0xD2511F53, c0), product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


# --------------------------------------------------------------------------------------------------------- products


def dropped_product_reference(x: Tensor, a: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    own = a.to(_wide(x)).split(list(ranks))
    return torch.cat([_drop(x, masks, i) @ part.t() for i, part in enumerate(own)], 1).to(dtype)


def dropped_outer_reference(u: Tensor, a: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    total = u.new_zeros((u.shape[0], a.shape[1]), dtype=_wide(u))
    for i, (left, right) in enumerate(zip(u.split(list(ranks), 1), a.split(list(ranks)), strict=True)):
        total += _drop(left.to(total.dtype) @ right.to(total.dtype), masks, i)
    return total.to(dtype)


def dropped_gradient_reference(u: Tensor, x: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    own = u.to(_wide(x)).split(list(ranks), 1)
    return torch.cat([part.t() @ _drop(x, masks, i) for i, part in enumerate(own)]).to(dtype)


def _drop(x: Tensor, masks: Masks, i: int) -> Tensor:
    # A select, not a product with the mask: 0 · inf would be NaN.
    return torch.where(keep_mask(masks, i, *x.shape), x.to(_wide(x)), 0.0)


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _keep(seed_ptr, layer, rows, start, threshold, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile's mask: rows (BLOCK_M,), and BLOCK_K columns from `start`, a multiple of 8, on."""
    # Counters must stay int32, so do not cast `rows` before this call: with int64 counters, Triton's Philox is another
    # generator, with 64-bit words and bits that differ from the reference.
    c0 = rows[:, None] * 0 + (start // 8 + tl.arange(0, BLOCK_K // 8))[None, :]
    c1 = c0 * 0 + rows[:, None]
    zero = c0 * 0
    # The layer is part of the counter, so that a group's layers get independent masks from a single seed.
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, zero + layer, zero, ROUNDS)
    # Interleaved: words 0, 1, 2, 3, each with lower then upper half. A thread's eight bits stay in the thread that
    # loads the same eight elements of x.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    bits = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(bits, (BLOCK_M, BLOCK_K)).to(tl.int32) >= threshold


@jit
def _high(t, like):
    return t.to(like.dtype)


@jit
def _low(t, like):
    """The part of an fp32 number that `_high` drops: together they hold 16 bits."""
    # The subtraction is exact in fp32. Two bf16 tensor-core products replace an fp32 product without tensor cores.
    return (t - t.to(like.dtype).to(tl.float32)).to(like.dtype)


# t (M, LAYERS · RANK) = (m ⊙ x) Aᵀ. A program owns BLOCK_M rows and BLOCK_R ranks for a single layer, and loops over K.
# Grid, fastest first: rank blocks, layers, row blocks, so that concurrent programs share x rows through the cache.
# Layers drop different elements, so x cannot be multiplied with all layers' A in one product.
#   x, a, t, seed: (M, K), (LAYERS · RANK, K), (M, …), (1,) int64. a is in x's dtype, or fp32 with x in bf16.
#   threshold, first_row, first_layer, ROUNDS: the mask's parameters; see `_keep`.
# 1/(1-p) is part of the adapter's scale. Neither the mask nor m ⊙ x is stored.
@jit
@do_not_specialize("M", "threshold", "first_row", "first_layer")
def _dropped_product_kernel(
    x_ptr, a_ptr, t_ptr, seed_ptr, M, K, stride_xm, stride_tm, threshold, first_row, first_layer, LAYERS: tl.constexpr,
    RANK: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    layer = tl.program_id(0) // parts % LAYERS
    r = tl.program_id(0) % parts * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = tl.program_id(0) // (parts * LAYERS) * BLOCK_M + tl.arange(0, BLOCK_M)
    # RANK is padded to BLOCK_R, at least 16: A's rows beyond RANK are the next layer's, and are read as 0.
    here, own = (rows < M)[:, None], (r < RANK)[:, None]
    x_ptr += rows.to(tl.int64)[:, None] * stride_xm
    a_ptr += (layer * RANK + r).to(tl.int64)[:, None] * K
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    # BLOCK_K is a multiple of 8, so that a Philox counter is never split between two steps.
    for start in range(0, K, BLOCK_K):
        cols = (start + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptr + cols, mask=here & (cols < K), other=0.0)
        a = tl.load(a_ptr + cols, mask=own & (cols < K), other=0.0)
        keep = _keep(seed_ptr, first_layer + layer, first_row + rows, start, threshold, ROUNDS, BLOCK_M, BLOCK_K)
        x = tl.where(keep, x, 0.0)
        # "ieee": fp32 factors are multiplied without TF32.
        acc = tl.dot(x, _high(a, x).T, acc, input_precision="ieee")
        if a.dtype != x.dtype:
            acc = tl.dot(x, _low(a, x).T, acc, input_precision="ieee")
    out = t_ptr + rows.to(tl.int64)[:, None] * stride_tm + (layer * RANK + r)[None, :]
    tl.store(out, acc.to(t_ptr.dtype.element_ty), mask=here & (r < RANK)[None, :])


# dx (M, K) = Σ m ⊙ (u A). A program owns a tile (BLOCK_M, BLOCK_K) and sums over the launch's layers in registers: dx
# is written once.
#   u, a, dx, seed: (M, …) with row stride stride_um, (LAYERS · RANK, K), (M, K), (1,) int64. u and a may be fp32.
#   threshold, first_row, first_layer, ROUNDS: the mask's parameters; see `_keep`.
#   ADD: an earlier launch has written dx for layers with another rank or probability; dx is rounded once per launch.
@jit
@do_not_specialize("M", "threshold", "first_row", "first_layer")
def _dropped_outer_kernel(
    u_ptr, a_ptr, dx_ptr, seed_ptr, M, K, stride_um, threshold, first_row, first_layer, ADD: tl.constexpr,
    LAYERS: tl.constexpr, RANK: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(K, BLOCK_K)
    rows = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(0) % blocks * BLOCK_K
    cols = (start + tl.arange(0, BLOCK_K))[None, :]
    here = (rows < M)[:, None]
    u_ptr += rows.to(tl.int64)[:, None] * stride_um
    dx_ptr += rows.to(tl.int64)[:, None] * K + cols
    mask = here & (cols < K)
    if ADD:
        acc = tl.load(dx_ptr, mask=mask, other=0.0).to(tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    # `range`, not `static_range`: without unrolling, a single layer's product tile is alive at a time.
    for layer in range(LAYERS):
        own = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for first in range(0, RANK, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            u = tl.load(u_ptr + (layer * RANK + r)[None, :], mask=here & (r < RANK)[None, :], other=0.0)
            at = a_ptr + (layer * RANK + r).to(tl.int64)[:, None] * K + cols
            a = tl.load(at, mask=(r < RANK)[:, None] & (cols < K), other=0.0)
            like = tl.zeros((1,), dx_ptr.dtype.element_ty)
            own = tl.dot(_high(u, like), _high(a, like), own, input_precision="ieee")
            if u.dtype != like.dtype:
                own = tl.dot(_high(u, like), _low(a, like), own, input_precision="ieee")
                own = tl.dot(_low(u, like), _high(a, like), own, input_precision="ieee")
        keep = _keep(seed_ptr, first_layer + layer, first_row + rows, start, threshold, ROUNDS, BLOCK_M, BLOCK_K)
        acc += tl.where(keep, own, 0.0)
    tl.store(dx_ptr, acc.to(dx_ptr.dtype.element_ty), mask=mask)


# dA (LAYERS · RANK, K) = uᵀ (m ⊙ x). A program owns BLOCK_R ranks and BLOCK_K columns for a single layer, and loops
# over STEP rows: without the split along rows there would be too few programs, since dA is small and M is long.
# Grid, fastest first: rank blocks, layers, column blocks, row shares, so that concurrent programs share x rows.
#   u, x, da, seed: (M, …), (M, K), (shares, LAYERS · RANK, K), (1,) int64. u is in x's dtype or fp32.
#   threshold, first_row, first_layer, ROUNDS: the mask's parameters, equal to the forward pass's; see `_keep`.
# Several shares are stored in fp32, and sum_rows adds them in a fixed order: atomics would not be deterministic. A
# single share is the result itself, in its dtype.
@jit
@do_not_specialize("M", "threshold", "first_row", "first_layer", "STEP")
def _dropped_gradient_kernel(
    u_ptr, x_ptr, da_ptr, seed_ptr, M, K, stride_um, stride_xm, threshold, first_row, first_layer, STEP,
    LAYERS: tl.constexpr, RANK: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    layer = tl.program_id(0) // parts % LAYERS
    r = tl.program_id(0) % parts * BLOCK_R + tl.arange(0, BLOCK_R)
    blocks = tl.cdiv(K, BLOCK_K)
    start = tl.program_id(0) // (parts * LAYERS) % blocks * BLOCK_K
    share = tl.program_id(0) // (parts * LAYERS) // blocks
    cols = (start + tl.arange(0, BLOCK_K))[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for first in range(share * STEP, min(M, share * STEP + STEP), BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        here = (rows < M)[:, None]
        wide = rows.to(tl.int64)[:, None]
        x = tl.load(x_ptr + wide * stride_xm + cols, mask=here & (cols < K), other=0.0)
        at = u_ptr + wide * stride_um + (layer * RANK + r)[None, :]
        u = tl.load(at, mask=here & (r < RANK)[None, :], other=0.0)
        keep = _keep(seed_ptr, first_layer + layer, first_row + rows, start, threshold, ROUNDS, BLOCK_M, BLOCK_K)
        x = tl.where(keep, x, 0.0)
        acc = tl.dot(_high(u, x).T, x, acc, input_precision="ieee")
        if u.dtype != x.dtype:
            acc = tl.dot(_low(u, x).T, x, acc, input_precision="ieee")
    out = da_ptr + ((share * LAYERS + layer) * RANK + r).to(tl.int64)[:, None] * K + cols
    tl.store(out, acc.to(da_ptr.dtype.element_ty), mask=(r < RANK)[:, None] & (cols < K))


# --------------------------------------------------------------------------------------------------------- launches


class _Run(NamedTuple):
    """Consecutive layers that share a launch: equal rank and threshold.

    at: offset of their ranks. first: index of the first layer. size: layer count.
    """

    at: int
    first: int
    size: int
    rank: int
    threshold: int

    @property
    def width(self) -> int:
        return self.size * self.rank


def _runs(ranks: list[int], layers: list[int], thresholds: list[int]) -> Iterator[_Run]:
    """Group the layers into as few launches as possible: one, unless ranks or probabilities differ."""
    at = begin = 0
    for i in range(1, len(ranks) + 1):
        # Thresholds are runtime numbers and ranks are constexpr; both must be equal within a launch, since the layer is
        # derived from the program id. Layer indices must be consecutive.
        last = i == len(ranks)
        if last or (ranks[i], thresholds[i], layers[i]) != (ranks[begin], thresholds[begin], layers[i - 1] + 1):
            yield _Run(at, layers[begin], i - begin, ranks[begin], thresholds[begin])
            at, begin = at + (i - begin) * ranks[begin], i


def _tile(rank: int, dtype: torch.dtype, most: int) -> tuple[int, int, int]:
    """Rows, columns and ranks per tile.

    32 rows, so that single warps compute the tile's products and take the dropped tile from registers.
    Ranks beyond `most` belong to other programs.
    """
    return 32, 64 if dtype == torch.float32 else 128, min(most, max(16, next_power_of_2(rank)))


def _unit(t: Tensor) -> Tensor:
    return t if t.stride(1) == 1 else t.contiguous()


_NUMBERS = "int[] ranks, int[] layers, int[] thresholds, int row, ScalarType dtype"


def _dropped_product_fake(x: Tensor, a: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], a.shape[0]), dtype=others[-1])


@launcher(_dropped_product_fake, rest=_NUMBERS)
def _dropped_product(x: Tensor, a: Tensor, seed: Tensor, *numbers: Any) -> Tensor:
    *groups, row, dtype = numbers
    t = _dropped_product_fake(x, a, dtype)
    if not t.numel():
        return t
    x, a = _unit(x), a.contiguous()
    M, K = x.shape
    for run in _runs(*groups):
        # Slices, not offsets: the kernel counts layers from 0. `launch` sends slices not aligned to 16 bytes through
        # Triton's dispatch.
        tensors = x, a[run.at : run.at + run.width], t[:, run.at :], seed

        def plan(run: _Run = run) -> Plan:
            block_m, block_k, block_r = _tile(run.rank, x.dtype, 64)
            numbers = M, K, x.stride(0), t.stride(0), run.threshold, row, run.first, run.size, run.rank, ROUNDS
            grid = cdiv(M, block_m) * run.size * cdiv(run.rank, block_r)
            return grid, (*numbers, block_m, block_k, block_r), {"num_warps": 4, "num_stages": 3}

        key = (M, K, x.stride(0), t.stride(0), run, row, x.dtype, a.dtype, dtype)
        launch(_dropped_product_kernel, key, tensors, plan)
    return t


def _dropped_outer_fake(u: Tensor, a: Tensor, *others: Any) -> Tensor:
    return u.new_empty((u.shape[0], a.shape[1]), dtype=others[-1])


@launcher(_dropped_outer_fake, rest=_NUMBERS)
def _dropped_outer(u: Tensor, a: Tensor, seed: Tensor, *numbers: Any) -> Tensor:
    *groups, row, dtype = numbers
    dx = _dropped_outer_fake(u, a, dtype)
    if not dx.numel():
        return dx
    u, a = _unit(u), a.contiguous()
    M, K = dx.shape
    for run in _runs(*groups):
        tensors = u[:, run.at :], a[run.at : run.at + run.width], dx, seed

        # ADD is `run.at > 0`: a group's first run stores, later runs add. The stream orders them.
        def plan(run: _Run = run) -> Plan:
            block_m, block_k, block_r = _tile(run.rank, u.dtype, 64)
            numbers = M, K, u.stride(0), run.threshold, row, run.first, run.at > 0, run.size, run.rank, ROUNDS
            return cdiv(M, block_m) * cdiv(K, block_k), (*numbers, block_m, block_k, block_r), {"num_warps": 4}

        launch(_dropped_outer_kernel, (M, K, u.stride(0), run, row, u.dtype, dtype), tensors, plan)
    return dx


def _dropped_gradient_fake(u: Tensor, x: Tensor, *others: Any) -> Tensor:
    return x.new_empty((u.shape[1], x.shape[1]), dtype=others[-1])


@launcher(_dropped_gradient_fake, rest=_NUMBERS)
def _dropped_gradient(u: Tensor, x: Tensor, seed: Tensor, *numbers: Any) -> Tensor:
    *groups, row, dtype = numbers
    da = _dropped_gradient_fake(u, x, dtype)
    M, K = x.shape
    if not da.numel() or not M:
        return da.zero_()
    u, x = _unit(u), _unit(x)
    for run in _runs(*groups):
        # At most 32 ranks, half the other kernels': the fp32 sum (BLOCK_R, BLOCK_K) stays in registers for the whole
        # loop.
        block_m, block_k, block_r = _tile(run.rank, x.dtype, 32)
        programs = run.size * cdiv(run.rank, block_r) * cdiv(K, block_k)
        # Four programs per multiprocessor hide the loads; each has at least eight row tiles.
        shares = max(1, min(cdiv(4 * multiprocessors(x.device), programs), cdiv(M, 8 * block_m)))
        step = cdiv(cdiv(M, shares), block_m) * block_m
        shares = cdiv(M, step)
        own = da[run.at : run.at + run.width]
        partial = own if shares == 1 else x.new_empty((shares, own.numel()), dtype=torch.float32)
        tensors = u[:, run.at :], x, partial, seed

        def plan(run: _Run = run, grid: int = programs * shares, step: int = step) -> Plan:
            block_m, block_k, block_r = _tile(run.rank, x.dtype, 32)
            numbers = M, K, u.stride(0), x.stride(0), run.threshold, row, run.first, step, run.size, run.rank, ROUNDS
            return grid, (*numbers, block_m, block_k, block_r), {"num_warps": 4, "num_stages": 3}

        key = (M, K, u.stride(0), x.stride(0), run, row, step, u.dtype, x.dtype, partial.dtype)
        launch(_dropped_gradient_kernel, key, tensors, plan)
        if shares > 1:
            sum_rows(partial, own.view(-1))
    return da


def _choose(launch: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product of two tensors for layers with these ranks and masks, summed in fp32 and rounded once to dtype."""

    def multiply(left: Tensor, right: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
        if not masks.kernels:
            return reference(left, right, ranks, masks, dtype)
        numbers = list(ranks), list(masks.layers), list(masks.thresholds), masks.row
        return launch(left, right, masks.seed, *numbers, dtype)

    return multiply


dropped_product = _choose(_dropped_product, dropped_product_reference)  # x (M, K), a (Σr, K) → (M, Σr)
dropped_outer = _choose(_dropped_outer, dropped_outer_reference)  # u (M, Σr), a (Σr, K) → (M, K)
dropped_gradient = _choose(_dropped_gradient, dropped_gradient_reference)  # u (M, Σr), x (M, K) → (Σr, K)
