"""A trial that is no part of Tigon: dW = or += dlogitsᵀ x, an fp32 sum whose traffic hides behind the arithmetic.

cuBLAS adds a product to an fp32 sum at the end of each tile: the tile of the sum is read, added to, and written, and
the tensor cores wait. Here a tile of the product goes to shared memory, and the copy engine adds it to the sum in the
L2 cache while the multiprocessor is at work on the next tile. benchmarks/loss_parts.py measures whether that pays.

Each number of the sum gets one addition a launch, from the one program that has its tile: the order is fixed, and so
are the bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import (
    INTERPRET,
    Plan,
    can_describe,
    cdiv,
    describe,
    do_not_specialize,
    jit,
    launch,
    multiprocessors,
    tl,
    use_triton,
)

# The interpreter has no addition by descriptor.
INTERPRETED = tl.constexpr(INTERPRET)


class Tile(NamedTuple):
    """Rows and columns of dW, rows of x a step, tiles of rows that share columns in L2, parts that are added at once,
    warps, steps that are loaded ahead."""

    v: int
    h: int
    step: int
    group: int
    parts: int
    warps: int
    stages: int


# All 128 sums a thread has registers for, and shared memory for the steps and a part of a tile beside them. Of 1152
# columns (Gemma 3) tiles of 256 would be half empty in the last round.
TILES = {
    "128x256": Tile(128, 256, 64, 16, 4, 8, 4),
    "128x256, 3 steps": Tile(128, 256, 64, 16, 4, 8, 3),
    "128x256, groups of 8": Tile(128, 256, 64, 8, 4, 8, 4),
    "128x256, 3 steps, 2 parts": Tile(128, 256, 64, 16, 2, 8, 3),
    "256x128": Tile(256, 128, 64, 8, 4, 8, 4),
}


def takes(dw: Tensor, dlogits: Tensor, x: Tensor) -> bool:
    """Whether `product` takes dw (V, H), dlogits (n, V) and x (n, H)."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return dw.dtype == torch.float32 and half and use_triton(dw, dlogits, x) and can_describe(dw, dlogits, x)


def product(dw: Tensor, dlogits: Tensor, x: Tensor, first: bool, tile: Tile) -> None:
    """dw (V, H) = (if first) or += dlogitsᵀ x."""
    (V, H), n = dw.shape, x.shape[0]

    def plan() -> Plan:
        tiles = cdiv(V, tile.v), cdiv(H, tile.h)
        programs = min(multiprocessors(dw.device), tiles[0] * tiles[1])
        constants = not first, tile.group, tile.parts, tile.v, tile.h, tile.step
        return programs, (n, *tiles, *constants), {"num_warps": tile.warps, "num_stages": tile.stages}

    blocks = (tile.v, tile.h // tile.parts), (tile.step, tile.v), (tile.step, tile.h)
    operands = (describe(t, block) for t, block in zip((dw, dlogits, x), blocks, strict=True))
    launch(_sum_kernel, (V, H, n, tile, first, x.dtype, dlogits.stride(0)), (dw, *operands), plan)


@jit
def _halves(z):
    """The left and the right half of the columns."""
    return z.reshape(z.shape[0], 2, z.shape[1] // 2).permute(0, 2, 1).split()


@jit
def _put(part, dw, v, h, ADD: tl.constexpr):
    if not ADD:
        dw.store([v, h], part)
    elif INTERPRETED:
        dw.store([v, h], dw.load([v, h]) + part)
    else:
        # The multiprocessor waits until the engine has read the part from shared memory, not until the sum is written.
        dw.atomic_add([v, h], part)


@jit
@do_not_specialize("n", "TILES_V", "TILES_H")
def _sum_kernel(
    dw_ptr, dw, dlogits, x, n, TILES_V, TILES_H,
    ADD: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Descriptors dw (V, H), dlogits (n, V) and x (n, H). dw_ptr tells the launcher of the device, and nothing else.

    A persistent grid. The loop over steps is flattened into the loop over tiles: the first steps of the next tile are
    on their way while this one is stored. GROUP tiles of V go through all columns together, so that x and they stay in
    the L2 cache. Rows beyond n, and columns beyond V and H, are loaded as 0 and not stored.
    """
    steps = tl.cdiv(n, STEP)
    PART: tl.constexpr = BLOCK_H // PARTS
    for tile in tl.range(tl.program_id(0), TILES_V * TILES_H, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * TILES_H) * GROUP
        size = tl.minimum(TILES_V - first, GROUP)
        within = tile % (GROUP * TILES_H)
        v = (first + within % size) * BLOCK_V
        h = within // size * BLOCK_H
        acc = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
        for step in range(steps):
            acc = tl.dot(dlogits.load([step * STEP, v]).T, x.load([step * STEP, h]), acc)
        # In parts: beside the steps that are loaded ahead, a whole tile of fp32 would not fit into shared memory.
        left, right = _halves(acc)
        if PARTS == 2:
            _put(left, dw, v, h, ADD)
            _put(right, dw, v, h + PART, ADD)
        else:
            quarter, second = _halves(left)
            third, last = _halves(right)
            _put(quarter, dw, v, h, ADD)
            _put(second, dw, v, h + PART, ADD)
            _put(third, dw, v, h + 2 * PART, ADD)
            _put(last, dw, v, h + 3 * PART, ADD)
