"""The thin products of adapters that drop elements of their input, each layer its own: no dropped copy of x exists.

    t     = […, (mᵢ ⊙ x) Aᵢᵀ, …]    dropped_product     forward
    dx    = Σ mᵢ ⊙ (uᵢ Aᵢ)          dropped_outer       backward
    d[A…] = […, uᵢᵀ (mᵢ ⊙ x), …]    dropped_gradient    backward

The masks mᵢ of zeros and ones are never written to memory: each kernel computes them again where it has the tile, from
a seed, the number of the layer, and the element's row and column. The factor 1/(1-p) is part of the adapter's scale.

A mask is a function of these numbers alone, and the same on every device, in every dtype and for every tile size.
Philox4x32 with 7 rounds, the fewest that pass BigCrush, turns

    counter   (column // 8, row, layer, 0), key: the 64 bits of the seed

into 128 bits, 16 for each of eight columns: p is rounded to a multiple of 2⁻¹⁶. The seed is drawn from torch's
generator of x's device, by a kernel on that device: `torch.manual_seed` and checkpoints give the same masks again, the
host waits for nothing, and a replayed CUDA graph draws new masks.

Source: Srivastava et al. 2014, Dropout, https://jmlr.org/papers/v15/srivastava14a.html; Salmon et al. 2011, Parallel
random numbers: as easy as 1, 2, 3, https://doi.org/10.1145/2063384.2063405
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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

# Thresholds are numbers of 16 bits, as the random fields are. 32 bits an element would give p more digits, and double
# the integer arithmetic, which bounds the kernels.
STEPS = 65536
# torch's CUDA generator takes 10 rounds. 7 are the fewest that pass BigCrush, and rounds are what a mask costs.
ROUNDS = 7


class Masks(NamedTuple):
    """The masks of a group of layers for one input, which are computed wherever they are needed.

    seed: (1,) int64, of one call. layers: the number of each layer in its group. thresholds: of each, 65536 · p.
    row: the number of the first row, where the input is a tile of the call's. kernels: whether the kernels compute with
    these masks, which the forward pass decides for the backward pass as well.
    """

    seed: Tensor
    layers: tuple[int, ...]
    thresholds: tuple[int, ...]
    row: int = 0
    kernels: bool = False

    def of(self, positions: Sequence[int], row: int = 0) -> Masks:
        """The masks of these layers alone, for a tile that begins at a row."""
        layers, thresholds = (tuple(numbers[i] for i in positions) for numbers in (self.layers, self.thresholds))
        return self._replace(layers=layers, thresholds=thresholds, row=row)


def draw_masks(probabilities: Sequence[float], device: torch.device, kernels: bool = False) -> Masks | None:
    """New masks for layers that drop with these probabilities; None, and no number drawn, where all are 0."""
    if not any(probabilities):
        return None
    # The seed stays on the device: reading it would make the host wait. It is drawn by a kernel, so that a replayed
    # CUDA graph draws again, and it advances torch's generator, so that a checkpoint that restores the generator
    # restores the masks.
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    thresholds = tuple(_threshold(p) for p in probabilities)
    return Masks(seed, tuple(range(len(thresholds))), thresholds, kernels=kernels)


def _threshold(p: float) -> int:
    # 65536 would not be a number of 16 bits: at the largest p one element in 65536 is kept, and 1/(1-p) stays finite.
    return min(round(p * STEPS), STEPS - 1)


def kept_share(p: float) -> float:
    """The expected share of elements that a mask keeps: 1 - p, but for the rounding of p."""
    # The adapter's scale is divided by the share of the rounded p. With the p that was asked for, the expectation of
    # the adapter's part would be off by the rounding.
    return 1.0 - _threshold(p) / STEPS


def keep_mask(masks: Masks, i: int, rows: int, columns: int) -> Tensor:
    """The mask of the i-th layer, (rows, columns) booleans, by torch: what the kernels compute, bit for bit."""
    device = masks.seed.device
    # One counter serves eight columns, as it yields eight fields of 16 bits. The last counter of a row may yield fields
    # that no column takes.
    c0 = torch.arange(cdiv(columns, 8), device=device)[None, :].expand(rows, -1)
    # The row of the whole input, and not of this tile: callers that walk in tiles of any height get the same mask.
    c1 = torch.arange(rows, device=device)[:, None].expand_as(c0) + masks.row
    words = torch.stack(_philox(masks.seed, c0, c1, masks.layers[i]), -1)
    # The lower half of a word is the earlier column. The kernels interleave in this order too.
    bits = torch.stack((words & 0xFFFF, words >> 16), -1)
    return bits.flatten(1)[:, :columns] >= masks.thresholds[i]


def _philox(seed: Tensor, c0: Tensor, c1: Tensor, layer: int) -> tuple[Tensor, ...]:
    """Four words of 32 bits for each counter (c0, c1, layer, 0), in int64."""
    # torch has no product of unsigned 32-bit words with a high half. Words live in int64, and each product is taken in
    # halves of 16 bits, so that no intermediate number reaches the sign bit.
    low = 0xFFFFFFFF

    def product(factor: int, c: Tensor) -> tuple[Tensor, Tensor]:
        """The upper and the lower half of a product of two words, without a sum beyond 2⁴⁹."""
        upper, lower = factor * (c >> 16), factor * (c & 0xFFFF)
        return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & low

    # The key of Philox4x32 is two words. The seed is below 2⁶³, so the shift brings in no sign.
    k0, k1 = seed & low, (seed >> 32) & low
    c2, c3 = torch.full_like(c0, layer), torch.zeros_like(c0)
    for _ in range(ROUNDS):
        (high_a, low_a), (high_b, low_b) = product(0xD2511F53, c0), product(0xCD9E8D57, c2)
        # One round: two products of 32 × 32 bits, whose high halves are mixed with the other counters and the key.
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        # The key is raised by the Weyl constants of the paper after every round.
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


# --------------------------------------------------------------------------------------------------------- products


def dropped_product(x: Tensor, a: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    """t (M, Σr) = […, (mᵢ ⊙ x) aᵢᵀ, …], summed in fp32 and rounded once to dtype.

    Args:
        x: (M, K). a: (Σr, K), the layers' A in a column, in x's dtype, or in fp32 beside bf16.
        ranks: of the layers. masks: of these layers.
        dtype: of the result.
    """
    if not masks.kernels:
        return dropped_product_reference(x, a, ranks, masks, dtype)
    return _dropped_product(x, a, masks.seed, *_numbers(ranks, masks), dtype)


def dropped_outer(u: Tensor, a: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    """(M, K) = Σ mᵢ ⊙ (uᵢ aᵢ), summed in fp32 and rounded once to dtype. u: (M, Σr), a: (Σr, K), of one dtype."""
    if not masks.kernels:
        return dropped_outer_reference(u, a, ranks, masks, dtype)
    return _dropped_outer(u, a, masks.seed, *_numbers(ranks, masks), dtype)


def dropped_gradient(u: Tensor, x: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    """(Σr, K) = […, uᵢᵀ (mᵢ ⊙ x), …], summed in fp32 and rounded once to dtype. u: (M, Σr), in x's dtype or fp32."""
    if not masks.kernels:
        return dropped_gradient_reference(u, x, ranks, masks, dtype)
    return _dropped_gradient(u, x, masks.seed, *_numbers(ranks, masks), dtype)


def _numbers(ranks: Sequence[int], masks: Masks) -> tuple[list[int], list[int], list[int], int]:
    return list(ranks), list(masks.layers), list(masks.thresholds), masks.row


def dropped_product_reference(x: Tensor, a: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    # The oracle materialises what the kernels avoid: a dropped copy of x for every layer.
    own = a.to(_wide(x)).split(list(ranks))
    return torch.cat([_dropped(x, masks, i) @ part.t() for i, part in enumerate(own)], 1).to(dtype)


def dropped_outer_reference(u: Tensor, a: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    # dx is a sum over layers of masked products. The mask comes after the product with A, since it belongs to x's
    # elements; layers with different masks can therefore not share one product.
    total = u.new_zeros((u.shape[0], a.shape[1]), dtype=_wide(u))
    for i, (left, right) in enumerate(zip(u.split(list(ranks), 1), a.split(list(ranks)), strict=True)):
        total += _dropped(left.to(total.dtype) @ right.to(total.dtype), masks, i)
    return total.to(dtype)


def dropped_gradient_reference(u: Tensor, x: Tensor, ranks: Sequence[int], masks: Masks, dtype: torch.dtype) -> Tensor:
    own = u.to(_wide(x)).split(list(ranks), 1)
    return torch.cat([part.t() @ _dropped(x, masks, i) for i, part in enumerate(own)]).to(dtype)


def _dropped(x: Tensor, masks: Masks, i: int) -> Tensor:
    # A select, not a product with the mask: 0 · inf would be NaN, and a dropped element must leave nothing behind.
    return torch.where(keep_mask(masks, i, *x.shape), x.to(_wide(x)), 0.0)


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _keep(seed_ptr, layer, rows, start, threshold, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """The mask of a tile: rows (BLOCK_M,), and BLOCK_K columns from `start` on, which 8 divides."""
    # Counters stay int32. Given int64 counters, Triton's Philox is another generator, of 64-bit words, with other bits
    # than the reference. `rows` must therefore not be cast before this call.
    c0 = rows[:, None] * 0 + (start // 8 + tl.arange(0, BLOCK_K // 8))[None, :]
    c1 = c0 * 0 + rows[:, None]
    zero = c0 * 0
    # The seed is one load of 8 bytes from L1 for a tile. The layer is a word of the counter, so that layers of a group
    # have independent masks from one seed.
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, zero + layer, zero, ROUNDS)
    # Interleaved: word 0, 1, 2, 3, then the lower and the upper half of each. A thread's eight bits stay in the thread
    # that loads these eight elements of x.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    bits = tl.join(words & 0xFFFF, words >> 16)
    # The comparison is signed and exact: fields and thresholds lie in [0, 65536).
    return tl.reshape(bits, (BLOCK_M, BLOCK_K)).to(tl.int32) >= threshold


@jit
def _high(t, like):
    # Of an fp32 adapter beside bf16 activations, the half that the tensor cores take first. Without a difference of
    # dtypes this is no operation.
    return t.to(like.dtype)


@jit
def _low(t, like):
    """What `_high` leaves of a number in fp32: the two together have 16 bits of it."""
    # The subtraction is exact in fp32. Two bf16 factors on the tensor cores replace one fp32 product off them.
    return (t - t.to(like.dtype).to(tl.float32)).to(like.dtype)


@jit
@do_not_specialize("M", "threshold", "first_row", "first_layer")
def _dropped_product_kernel(
    x_ptr, a_ptr, t_ptr, seed_ptr, M, K, stride_xm, stride_tm, threshold, first_row, first_layer, LAYERS: tl.constexpr,
    RANK: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # t = (m ⊙ x) Aᵀ for one layer's block of BLOCK_R ranks and BLOCK_M rows. The order of the grid is ranks, layers,
    # rows, the first fastest. Neighbours in the grid share their rows: x comes from memory for one layer, and from the
    # cache for the others. Each layer drops other elements of x, so that one product of x with all layers' A is not
    # possible.
    parts: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    layer = tl.program_id(0) // parts % LAYERS
    r = tl.program_id(0) % parts * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = tl.program_id(0) // (parts * LAYERS) * BLOCK_M + tl.arange(0, BLOCK_M)
    # RANK is padded to BLOCK_R, at least 16: rows of A beyond it are the next layer's, and are read as 0.
    here, own = (rows < M)[:, None], (r < RANK)[:, None]
    # int64 in the addresses alone: row * stride reaches 2**31 at 512k tokens of width 4096.
    x_ptr += rows.to(tl.int64)[:, None] * stride_xm
    a_ptr += (layer * RANK + r).to(tl.int64)[:, None] * K
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    # BLOCK_K is a multiple of 8, so a counter of Philox is never split between two steps.
    for start in range(0, K, BLOCK_K):
        cols = (start + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptr + cols, mask=here & (cols < K), other=0.0)
        a = tl.load(a_ptr + cols, mask=own & (cols < K), other=0.0)
        # The mask depends on nothing of the tile: its integer arithmetic can run while x and A are on their way.
        keep = _keep(seed_ptr, first_layer + layer, first_row + rows, start, threshold, ROUNDS, BLOCK_M, BLOCK_K)
        x = tl.where(keep, x, 0.0)
        # The kept x is not divided by 1-p here: the factor is part of the adapter's scale, and x is multiplied in its
        # own dtype, unrounded.
        # fp32 factors are multiplied as they are, without TF32.
        acc = tl.dot(x, _high(a, x).T, acc, input_precision="ieee")
        if a.dtype != x.dtype:
            # x · (high + low): both products go into one fp32 sum, so that the adapter keeps 16 of its bits.
            acc = tl.dot(x, _low(a, x).T, acc, input_precision="ieee")
    out = t_ptr + rows.to(tl.int64)[:, None] * stride_tm + (layer * RANK + r)[None, :]
    # The only result: neither the mask nor m ⊙ x goes to memory.
    tl.store(out, acc.to(t_ptr.dtype.element_ty), mask=here & (r < RANK)[None, :])


@jit
@do_not_specialize("M", "threshold", "first_row", "first_layer")
def _dropped_outer_kernel(
    u_ptr, a_ptr, dx_ptr, seed_ptr, M, K, stride_um, threshold, first_row, first_layer, ADD: tl.constexpr,
    LAYERS: tl.constexpr, RANK: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    # A program owns a tile of dx, (BLOCK_M, BLOCK_K), and sums over all layers of the launch in registers: dx is
    # written once, and no layer's part of it passes through memory. Ranks are few, so the inner loop is one step for
    # most adapters.
    blocks = tl.cdiv(K, BLOCK_K)
    rows = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(0) % blocks * BLOCK_K
    cols = (start + tl.arange(0, BLOCK_K))[None, :]
    here = (rows < M)[:, None]
    u_ptr += rows.to(tl.int64)[:, None] * stride_um
    dx_ptr += rows.to(tl.int64)[:, None] * K + cols
    mask = here & (cols < K)
    # Layers of another rank or probability have been added by an earlier launch. Their sum was rounded to dx's dtype: a
    # group's dx is rounded once for each launch that it takes.
    if ADD:
        acc = tl.load(dx_ptr, mask=mask, other=0.0).to(tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    # `range` and not `static_range`: the loop is not unrolled, and one layer's tile of products is alive at a time.
    for layer in range(LAYERS):
        # Each layer's product needs a sum of its own, as the mask falls between the product and the sum over layers.
        own = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for first in range(0, RANK, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            u = tl.load(u_ptr + (layer * RANK + r)[None, :], mask=here & (r < RANK)[None, :], other=0.0)
            at = a_ptr + (layer * RANK + r).to(tl.int64)[:, None] * K + cols
            a = tl.load(at, mask=(r < RANK)[:, None] & (cols < K), other=0.0)
            # Carries the dtype of the products: dx's, for u and A may come in fp32.
            like = tl.zeros((1,), dx_ptr.dtype.element_ty)
            own = tl.dot(_high(u, like), _high(a, like), own, input_precision="ieee")
            if u.dtype != like.dtype:
                # (uₕ + uₗ)(aₕ + aₗ) without the product of both low parts, which lies below the bits that are kept.
                own = tl.dot(_high(u, like), _low(a, like), own, input_precision="ieee")
                own = tl.dot(_low(u, like), _high(a, like), own, input_precision="ieee")
        keep = _keep(seed_ptr, first_layer + layer, first_row + rows, start, threshold, ROUNDS, BLOCK_M, BLOCK_K)
        # In fp32, before the one rounding at the store.
        acc += tl.where(keep, own, 0.0)
    tl.store(dx_ptr, acc.to(dx_ptr.dtype.element_ty), mask=mask)


@jit
@do_not_specialize("M", "threshold", "first_row", "first_layer", "STEP")
def _dropped_gradient_kernel(
    u_ptr, x_ptr, da_ptr, seed_ptr, M, K, stride_um, stride_xm, threshold, first_row, first_layer, STEP,
    LAYERS: tl.constexpr, RANK: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    # d A = uᵀ (m ⊙ x): a program owns BLOCK_R ranks and BLOCK_K columns of one layer, and walks down STEP rows. Without
    # the cut along rows there would be too few programs, since dA is small and M is long.
    parts: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    layer = tl.program_id(0) // parts % LAYERS
    r = tl.program_id(0) % parts * BLOCK_R + tl.arange(0, BLOCK_R)
    blocks = tl.cdiv(K, BLOCK_K)
    start = tl.program_id(0) // (parts * LAYERS) % blocks * BLOCK_K
    # The share is the slowest index: programs that run together read the same rows, x for one layer from memory and for
    # the others from L2.
    share = tl.program_id(0) // (parts * LAYERS) // blocks
    cols = (start + tl.arange(0, BLOCK_K))[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    # STEP is a multiple of BLOCK_M, so that only the last share has a masked tile.
    for first in range(share * STEP, min(M, share * STEP + STEP), BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        here = (rows < M)[:, None]
        wide = rows.to(tl.int64)[:, None]
        x = tl.load(x_ptr + wide * stride_xm + cols, mask=here & (cols < K), other=0.0)
        at = u_ptr + wide * stride_um + (layer * RANK + r)[None, :]
        u = tl.load(at, mask=here & (r < RANK)[None, :], other=0.0)
        keep = _keep(seed_ptr, first_layer + layer, first_row + rows, start, threshold, ROUNDS, BLOCK_M, BLOCK_K)
        # The same mask as in the forward pass, from the same counters: nothing of it was saved.
        x = tl.where(keep, x, 0.0)
        # uᵀ stands on the left: the result has the ranks as its rows, as A has, and x is multiplied as it was loaded.
        acc = tl.dot(_high(u, x).T, x, acc, input_precision="ieee")
        if u.dtype != x.dtype:
            acc = tl.dot(_low(u, x).T, x, acc, input_precision="ieee")
    # Shares lie one behind the other in fp32, and sum_rows adds them in their order: atomics would give other bits on
    # every run. A single share is the result itself, in its dtype.
    out = da_ptr + ((share * LAYERS + layer) * RANK + r).to(tl.int64)[:, None] * K + cols
    tl.store(out, acc.to(da_ptr.dtype.element_ty), mask=(r < RANK)[:, None] & (cols < K))


# --------------------------------------------------------------------------------------------------------- launches


class _Run(NamedTuple):
    """Layers behind one another that one launch serves: of one rank and one threshold.

    at: where their ranks begin. first: the number of the first of them. size: how many they are.
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
    """The layers of a group in as few launches as they allow: one, but where ranks or probabilities differ."""
    at = begin = 0
    for i in range(1, len(ranks) + 1):
        # Thresholds are runtime numbers and ranks are constexpr; within one launch both must be the same for all
        # layers, since the layer is taken from the program's number. Numbers of layers must also follow one another.
        last = i == len(ranks)
        if last or (ranks[i], thresholds[i], layers[i]) != (ranks[begin], thresholds[begin], layers[i - 1] + 1):
            yield _Run(at, layers[begin], i - begin, ranks[begin], thresholds[begin])
            at, begin = at + (i - begin) * ranks[begin], i


def _tile(rank: int, dtype: torch.dtype, most: int) -> tuple[int, int, int]:
    """Rows, columns and ranks of a tile.

    32 rows, so that the products of a tile are those of single warps: they take the dropped tile from registers.
    Ranks beyond `most` are other programs'.
    """
    # fp32 columns are halved: a tile of x then has the same 8 KiB.
    return 32, 64 if dtype == torch.float32 else 128, min(most, max(16, next_power_of_2(rank)))


def _unit(t: Tensor) -> Tensor:
    # Column slices of t or u keep unit stride along r, and are read where they lie. Only a transposed view is copied.
    return t if t.stride(1) == 1 else t.contiguous()


def _dropped_product_fake(
    x: Tensor, a: Tensor, seed: Tensor, ranks: list[int], layers: list[int], thresholds: list[int], row: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], a.shape[0]), dtype=dtype)


@launcher(
    "(Tensor x, Tensor a, Tensor seed, int[] ranks, int[] layers, int[] thresholds, int row, ScalarType dtype)"
    " -> Tensor",
    _dropped_product_fake,
)
def _dropped_product(
    x: Tensor, a: Tensor, seed: Tensor, ranks: list[int], layers: list[int], thresholds: list[int], row: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    t = _dropped_product_fake(x, a, seed, ranks, layers, thresholds, row, dtype)
    if not t.numel():
        return t
    # The kernels step through A by K: a slice of a wider matrix is made dense, which is small beside x.
    x, a = _unit(x), a.contiguous()
    M, K = x.shape
    for run in _runs(ranks, layers, thresholds):
        # Slices, not offsets: the kernel counts layers from 0. Slices off 16 bytes go through Triton's dispatch, by
        # `launch`.
        tensors = x, a[run.at : run.at + run.width], t[:, run.at :], seed

        def plan(run: _Run = run) -> Plan:
            block_m, block_k, block_r = _tile(run.rank, x.dtype, 64)
            numbers = M, K, x.stride(0), t.stride(0), run.threshold, row, run.first, run.size, run.rank, ROUNDS
            # Ranks beyond 64 are other programs' and read x again, from the cache. More columns of sums would take
            # registers.
            grid = cdiv(M, block_m) * run.size * cdiv(run.rank, block_r)
            return grid, (*numbers, block_m, block_k, block_r), {"num_warps": 4, "num_stages": 3}

        # run holds ranks and threshold, and row the first row: each is an argument that a plan has stored.
        key = (M, K, x.stride(0), t.stride(0), run, row, x.dtype, a.dtype, dtype)
        launch(_dropped_product_kernel, key, tensors, plan)
    return t


def _dropped_outer_fake(
    u: Tensor, a: Tensor, seed: Tensor, ranks: list[int], layers: list[int], thresholds: list[int], row: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return u.new_empty((u.shape[0], a.shape[1]), dtype=dtype)


@launcher(
    "(Tensor u, Tensor a, Tensor seed, int[] ranks, int[] layers, int[] thresholds, int row, ScalarType dtype)"
    " -> Tensor",
    _dropped_outer_fake,
)
def _dropped_outer(
    u: Tensor, a: Tensor, seed: Tensor, ranks: list[int], layers: list[int], thresholds: list[int], row: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    dx = _dropped_outer_fake(u, a, seed, ranks, layers, thresholds, row, dtype)
    if not dx.numel():
        return dx
    u, a = _unit(u), a.contiguous()
    M, K = dx.shape
    for run in _runs(ranks, layers, thresholds):
        tensors = u[:, run.at :], a[run.at : run.at + run.width], dx, seed

        # ADD is `run.at > 0`: the first run of a group stores, later runs add. One stream orders them.
        def plan(run: _Run = run) -> Plan:
            block_m, block_k, block_r = _tile(run.rank, u.dtype, 64)
            numbers = M, K, u.stride(0), run.threshold, row, run.first, run.at > 0, run.size, run.rank, ROUNDS
            return cdiv(M, block_m) * cdiv(K, block_k), (*numbers, block_m, block_k, block_r), {"num_warps": 4}

        launch(_dropped_outer_kernel, (M, K, u.stride(0), run, row, u.dtype, dtype), tensors, plan)
    return dx


def _dropped_gradient_fake(
    u: Tensor, x: Tensor, seed: Tensor, ranks: list[int], layers: list[int], thresholds: list[int], row: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return x.new_empty((u.shape[1], x.shape[1]), dtype=dtype)


@launcher(
    "(Tensor u, Tensor x, Tensor seed, int[] ranks, int[] layers, int[] thresholds, int row, ScalarType dtype)"
    " -> Tensor",
    _dropped_gradient_fake,
)
def _dropped_gradient(
    u: Tensor, x: Tensor, seed: Tensor, ranks: list[int], layers: list[int], thresholds: list[int], row: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    da = _dropped_gradient_fake(u, x, seed, ranks, layers, thresholds, row, dtype)
    M, K = x.shape
    # No row: the gradient is a sum over nothing.
    if not da.numel() or not M:
        return da.zero_()
    u, x = _unit(u), _unit(x)
    for run in _runs(ranks, layers, thresholds):
        # At most 32 ranks, half of the other kernels': the fp32 sum is (BLOCK_R, BLOCK_K) and lives for the whole walk.
        block_m, block_k, block_r = _tile(run.rank, x.dtype, 32)
        programs = run.size * cdiv(run.rank, block_r) * cdiv(K, block_k)
        # Four programs a multiprocessor hide the loads; each has eight tiles of rows or more.
        shares = max(1, min(cdiv(4 * multiprocessors(x.device), programs), cdiv(M, 8 * block_m)))
        # Rounded up to whole tiles; fewer shares may then be enough, and empty ones would cost a row of zeros each.
        step = cdiv(cdiv(M, shares), block_m) * block_m
        shares = cdiv(M, step)
        own = da[run.at : run.at + run.width]
        # own is a view of da: a single share writes the gradient itself, and no second launch follows.
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
