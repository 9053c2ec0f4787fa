"""The logits of a head, and in the same product what the softmax of their rows needs:

    z = x Wᵀ, rounded to x's dtype
    parts[0, p] = max z, parts[1, p] = Σ exp(scale · (z − max)) over the p-th block of columns, of each row

A pass that forms the gradient of a loss would otherwise read the logits twice, since a row's probabilities wait for its
maximum and its sum. These are of the rounded logits, which are what that pass reads.

Exponentials after a tile's product would take a twentieth of its time, with nothing beside them. So a program keeps a
tile's logits in registers, two in one, while it multiplies the next tile, and works through them under its first steps:
the tensor cores compute on their own meanwhile.

Source: the statistics of parts, Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tigon.backend import (
    INTERPRET,
    can_describe,
    cdiv,
    describe,
    launch,
    multiprocessors,
    tl,
    triton,
    use_triton,
)
from tigon.losses.head import Head
from tigon.ops.cross_entropy.kernels import LOG2E, LOWEST

INTERPRETED = tl.constexpr(INTERPRET)

# Off until it is measured to be faster than cuBLAS' product and a second reading of the logits.
STATISTICS_IN_PRODUCT = False

LEAST_TILES = 8  # of a multiprocessor: with fewer, too many idle in the last round


def forms_statistics(head: Head, x: Tensor, logits: Tensor) -> bool:
    """Whether `logits_and_parts` takes the product of x (M, H), rows of the head's, to logits (M, V)."""
    if not STATISTICS_IN_PRODUCT or head.bias is not None or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not use_triton(x, head.weight) or not _is_hopper(x.device) or not can_describe(x, head.weight, logits):
        return False
    block_m, block_n, *_ = _logits_tile()
    return cdiv(x.shape[0], block_m) * cdiv(logits.shape[1], block_n) >= LEAST_TILES * multiprocessors(x.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """The kernel is laid out for its registers; of Blackwell, which sums in a memory of its own, it asks too much."""
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
    return True


# ---------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _halves(z):
    """The left and the right half of the columns."""
    return z.reshape(z.shape[0], 2, z.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _packed(z, dtype: tl.constexpr):
    """z (M, N) fp32, rounded to dtype, as four (M, N / 8) of two neighbours each.

    The instruction that rounds two at a time has to be asked for: one by one takes as long as an exponential.
    """
    a, b = z.reshape(z.shape[0], z.shape[1] // 2, 2).split()
    if INTERPRETED:
        a = a.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        b = b.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        pairs = a | (b << 16)
    elif dtype == tl.bfloat16:
        pairs = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        pairs = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], tl.uint32, True, 1)
    left, right = _halves(pairs)
    q0, q1 = _halves(left)
    q2, q3 = _halves(right)
    return q0, q1, q2, q3


@triton.jit
def _fold(pairs, columns, top, total, k, dtype: tl.constexpr):
    """Maximum and Σ exp₂(k · (z − max)) of rows, with some more logits, of which so many columns exist."""
    if dtype == tl.bfloat16:
        a = (pairs << 16).to(tl.float32, bitcast=True)
        b = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        a = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        b = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    column = 2 * tl.arange(0, pairs.shape[1])[None, :]
    a = tl.where(column < columns, a, float("-inf"))
    b = tl.where(column + 1 < columns, b, float("-inf"))
    new = tl.maximum(top, tl.max(tl.maximum(a, b), 1))
    added = tl.exp2((a - new[:, None]) * k) + tl.exp2((b - new[:, None]) * k)
    return new, total * tl.exp2((top - new) * k) + tl.sum(added, 1)


@triton.jit
def _keep(parts_ptr, top, total, m, n, M, PARTS, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = m + tl.arange(0, BLOCK_M)
    at = parts_ptr + (n // BLOCK_N).to(tl.int64) * M + rows
    tl.store(at, top, mask=rows < M)
    tl.store(at + PARTS.to(tl.int64) * M, total, mask=rows < M)


@triton.jit(do_not_specialize=["M", "TILES_M", "PARTS"])
def _logits_kernel(
    parts_ptr, x, w, logits, M, V, H, TILES_M, PARTS, scale,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Descriptors x (M, H), w (V, H) and logits (M, V).

    A persistent grid. GROUP tiles of rows go through the blocks of W together, so that those rows stay in the L2 cache.
    The loop over steps is flattened into the one over tiles: tiles of the next product are on their way while the last
    one is stored.
    """
    dtype: tl.constexpr = logits.dtype
    QUARTER: tl.constexpr = BLOCK_N // 4
    steps = tl.cdiv(H, BLOCK_K)
    k = scale * LOG2E
    # A finite start: a row of -inf alone adds up to nothing, not to NaN.
    lowest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    nothing = tl.zeros((BLOCK_M,), tl.float32)
    top, total = lowest, nothing
    # The tile before the first one: rows that do not exist.
    q0, q1, q2, q3 = _packed(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), dtype)
    m_before = TILES_M * BLOCK_M
    n_before = 0
    for tile in tl.range(tl.program_id(0), TILES_M * PARTS, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * PARTS) * GROUP
        size = tl.minimum(TILES_M - first, GROUP)
        within = tile % (GROUP * PARTS)
        m = (first + within % size) * BLOCK_M
        n = within // size * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            acc = tl.dot(x.load([m, step * BLOCK_K]), w.load([n, step * BLOCK_K]).T, acc)
            # A quarter of the tile before, under each of the first steps, or under the last if there are fewer.
            columns = V - n_before
            if step == tl.minimum(steps - 1, 0):
                top, total = _fold(q0, columns, lowest, nothing, k, dtype)
            if step == tl.minimum(steps - 1, 1):
                top, total = _fold(q1, columns - QUARTER, top, total, k, dtype)
            if step == tl.minimum(steps - 1, 2):
                top, total = _fold(q2, columns - 2 * QUARTER, top, total, k, dtype)
            if step == tl.minimum(steps - 1, 3):
                top, total = _fold(q3, columns - 3 * QUARTER, top, total, k, dtype)
                _keep(parts_ptr, top, total, m_before, n_before, M, PARTS, BLOCK_M, BLOCK_N)
        logits.store([m, n], acc.to(dtype))
        q0, q1, q2, q3 = _packed(acc, dtype)
        m_before = m
        n_before = n
    columns = V - n_before
    top, total = _fold(q0, columns, lowest, nothing, k, dtype)
    top, total = _fold(q1, columns - QUARTER, top, total, k, dtype)
    top, total = _fold(q2, columns - 2 * QUARTER, top, total, k, dtype)
    top, total = _fold(q3, columns - 3 * QUARTER, top, total, k, dtype)
    _keep(parts_ptr, top, total, m_before, n_before, M, PARTS, BLOCK_M, BLOCK_N)


# --------------------------------------------------------------------------------------------------------- launches


def _logits_tile() -> tuple[int, int, int, int, dict[str, int]]:
    """Rows and columns of a tile, depth of a step, tiles of rows that go together, and Triton's options.

    Sums and a tile's logits take 192 of the 255 registers; three steps and a tile to be stored, 208 KiB of 227.
    """
    return 128, 256, 64, 16, {"num_warps": 8, "num_stages": 3}


def logits_and_parts(x: Tensor, weight: Tensor, logits: Tensor, scale: float) -> Tensor:
    """Write x Wᵀ to logits (M, V); return the statistics of its rows' parts, (2, V / 256 rounded up, M) fp32."""
    (M, H), V = x.shape, weight.shape[0]
    block_m, block_n, block_k, group, options = _logits_tile()
    tiles_m, count = cdiv(M, block_m), cdiv(V, block_n)
    parts = x.new_empty(2, count, M, dtype=torch.float32)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        programs = min(multiprocessors(x.device), tiles_m * count)
        sizes = (M, V, H, tiles_m, count, scale)
        return programs, (*sizes, group, block_m, block_n, block_k), options

    operands = describe(x, (block_m, block_k)), describe(weight, (block_n, block_k))
    tensors = parts, *operands, describe(logits, (block_m, block_n))
    launch(_logits_kernel, (M, V, H, scale, x.dtype), tensors, plan)
    return parts
