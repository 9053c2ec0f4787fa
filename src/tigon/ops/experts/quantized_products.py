"""Matrix products by weights in 4 bits, dequantized tile by tile; see quantized.py for the formats.

With few rows per expert `_frozen_rows_kernel` dequantizes each tile of the weight inside the product, and the dense
weight never reaches memory. With many rows per expert the same tile would be dequantized once per row tile: there
`_expand_kernel` writes the dense weights of a few experts at a time to a workspace, and products.py multiplies by it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan, can_describe, cdiv, describe, do_not_specialize, jit, launch, tl
from tigon.ops.experts.products import add_low_rank, find_tile
from tigon.ops.experts.routing import Routing, tiles_at_most

WORKSPACE = 256 * 2**20  # bytes of dense weights at a time
MANY_ROWS = 256  # rows per expert from which on the weights are expanded before the product


class Packed(NamedTuple):
    """A stack of weights (E, N, K) in 4 bits, for a launch.

    Attributes:
        codes: (E, N, ceil(K / 2)) uint8, contiguous.
        scales: (E, N, blocks), contiguous: fp32 for nf4, uint8 exponents for mxfp4.
        table: (16,) fp32, the codes' values.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor

    @property
    def high_first(self) -> bool:
        """Whether a byte's first code is in the high four bits: bitsandbytes' order."""
        return self.scales.dtype == torch.float32

    @property
    def blocksize(self) -> int:
        return 64 if self.high_first else 32

    def choose_experts(self, first: int, last: int) -> Packed:
        return Packed(self.codes[first:last], self.scales[first:last], self.table)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _decode(codes, table, HIGH_FIRST: tl.constexpr):
    """The values of 4-bit codes, of any shape, in fp32."""
    if HIGH_FIRST:
        # From registers: a load would be staged in shared memory as the products' operands are.
        return tl.reshape(tl.gather(table, tl.ravel(codes), 0), codes.shape)
    # An e2m1 number in fp32's places for sign, exponent and mantissa is 2^126 times too small: the exponents' biases
    # are 1 and 127. Its 0.5 becomes a subnormal number, which a product keeps, as no kernel flushes them.
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@jit
def _load_weights(
    codes_ptr, scales_ptr, table, rows, inside, col, ROW_BYTES, ROW_BLOCKS,
    HIGH_FIRST: tl.constexpr, EVEN: tl.constexpr, COLS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Dequantize COLS columns from col on of the rows (R,), int64, where inside (R,): (R, COLS) in DTYPE.

    EVEN: no column lies beyond the row. Else bytes beyond it are 0; a last byte's second code may be anything.
    """
    BLOCKSIZE: tl.constexpr = 64 if HIGH_FIRST else 32
    GROUPS: tl.constexpr = COLS // BLOCKSIZE if COLS > BLOCKSIZE else 1
    byte = col // 2 + tl.arange(0, COLS // 2)
    block = col // BLOCKSIZE + tl.arange(0, GROUPS)
    byte_mask, block_mask = inside[:, None], inside[:, None]
    if not EVEN:
        byte_mask = byte_mask & (byte < ROW_BYTES)[None, :]
        block_mask = block_mask & (block < ROW_BLOCKS)[None, :]
    q = tl.load(codes_ptr + rows[:, None] * ROW_BYTES + byte[None, :], mask=byte_mask, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + rows[:, None] * ROW_BLOCKS + block[None, :], mask=block_mask, other=0)
    if not HIGH_FIRST:  # the exponent's bits: 2^(scale − 127), of which 2^−127 is subnormal
        bits = scale.to(tl.int32)
        scale = tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)
    # Both codes of a byte are in one block. Scaled before the codes are put in order, so that 16 bits are reordered.
    shape: tl.constexpr = (q.shape[0], GROUPS, COLS // 2 // GROUPS)
    high = tl.reshape(_decode(q >> 4, table, HIGH_FIRST), shape) * scale[:, :, None]
    low = tl.reshape(_decode(q & 15, table, HIGH_FIRST), shape) * scale[:, :, None]
    first, second = (high, low) if HIGH_FIRST else (low, high)
    return tl.reshape(tl.join(first.to(DTYPE), second.to(DTYPE)), (q.shape[0], COLS))


# One program computes BLOCK_M rows × BLOCK_N columns of y for a single expert, as `_rows_kernel` does.
# a (S, C), a descriptor if DESCRIBED; y (S, N): rows sorted by expert. codes, scales, table: `Packed`, ROWS rows per
# expert. The weight is (N, C) with blocks along C, or if TRANSPOSED (C, N) with blocks along N. bias (E, N) or None.
# s (S, RANK), b (E, N, RANK): an adapter's share, or None; see add_low_rank.
# EVEN_C, EVEN_N: C is a multiple of BLOCK_C, N of BLOCK_N.
# SWAPPED: compute yᵀ = w aᵀ, so that the tensor cores read the dequantized weight from registers.
@jit
@do_not_specialize("M_TILES", "TILES")
def _frozen_rows_kernel(
    y_ptr, a, codes_ptr, scales_ptr, table_ptr, bias_ptr, tiles_ptr, offsets_ptr, s_ptr, b_ptr,
    M_TILES, TILES, E, N, C, BLOCKS, ROWS, ROW_BYTES, ROW_BLOCKS, RANK, stride_be, stride_bn, stride_br,
    DESCRIBED: tl.constexpr, TRANSPOSED: tl.constexpr, HIGH_FIRST: tl.constexpr, EVEN_C: tl.constexpr,
    EVEN_N: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = a · wᵀ + s · bᵀ + bias, or with w in place of wᵀ, accumulated in fp32 and rounded once."""
    expert, start, rows, inside, block = find_tile(tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP, BLOCK_M)
    if expert >= E:
        return
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    first_row = expert.to(tl.int64) * ROWS
    table = tl.load(table_ptr + tl.arange(0, 16))
    cs = tl.arange(0, BLOCK_C)
    if not DESCRIBED:
        a_ptrs = a + tl.where(inside, rows, start).to(tl.int64)[:, None] * C + cs[None, :]
    if SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, C, BLOCK_C):
        if DESCRIBED:
            rows_of_a = a.load([start, c])
        elif EVEN_C:
            rows_of_a = tl.load(a_ptrs + c)
        else:
            rows_of_a = tl.load(a_ptrs + c, mask=(cs < C - c)[None, :], other=0.0)
        if TRANSPOSED:
            # Rows of the weight beyond C are read as zeros.
            weight = _load_weights(
                codes_ptr, scales_ptr, table, first_row + c + cs, cs < C - c, block * BLOCK_N,
                ROW_BYTES, ROW_BLOCKS, HIGH_FIRST, EVEN_N, BLOCK_N, dtype,
            )  # fmt: skip
        else:
            weight = _load_weights(
                codes_ptr, scales_ptr, table, first_row + cols, mask, c, ROW_BYTES, ROW_BLOCKS,
                HIGH_FIRST, EVEN_C, BLOCK_C, dtype,
            ).T  # fmt: skip
        if SWAPPED:
            acc = tl.dot(weight.T, rows_of_a.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(rows_of_a, weight, acc, input_precision=PRECISION)
    if SWAPPED:
        acc = acc.T
    if s_ptr is not None:
        acc = add_low_rank(
            acc, s_ptr, b_ptr, expert, rows, inside, cols, mask, RANK, stride_be, stride_bn, stride_br, PRECISION,
            BLOCK_R,
        )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    y_ptr += rows.to(tl.int64)[:, None] * N + cols[None, :]
    # A tile overlaps the next expert's first rows, which another program writes: the mask is required.
    tl.store(y_ptr, acc.to(dtype), mask=inside[:, None] & mask[None, :])


# One program writes BLOCK_R rows × COLS columns of the dense weight w (R, K); see `_load_weights`.
@jit
@do_not_specialize("R")
def _expand_kernel(
    w_ptr, codes_ptr, scales_ptr, table_ptr, R, K, BLOCKS, ROW_BYTES, ROW_BLOCKS,
    HIGH_FIRST: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """w = table[code] · scale, rounded once."""
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(0) % BLOCKS * COLS
    table = tl.load(table_ptr + tl.arange(0, 16))
    w = _load_weights(
        codes_ptr, scales_ptr, table, rows, rows < R, col, ROW_BYTES, ROW_BLOCKS, HIGH_FIRST, EVEN, COLS,
        w_ptr.dtype.element_ty,
    )  # fmt: skip
    cols = col + tl.arange(0, COLS)
    mask = (rows < R)[:, None]
    if not EVEN:
        mask = mask & (cols < K)[None, :]
    tl.store(w_ptr + rows[:, None] * K + cols[None, :], w, mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _frozen_tile(rows: int, a: Tensor) -> tuple[int, int, int, bool, dict[str, int]]:
    """Return columns per block, step depth, row tiles that share a weight block in L2, SWAPPED, Triton's options."""
    if a.dtype == torch.float32:  # no tensor cores: limited by registers
        return 32, 32, 8, False, {"num_warps": 4, "num_stages": 2}
    if rows >= 64:
        return 128, 64, 8, False, {"num_warps": 8 if rows == 128 else 4, "num_stages": 3}
    # With few rows a product is bound by the decoding, which is faster from registers.
    return 64, 128, 8, True, {"num_warps": 4, "num_stages": 3}


def multiply_rows(
    a: Tensor, w: Packed, bias: Tensor | None, routing: Routing, y: Tensor, rows: int, precision: str,
    share: tuple[Tensor, Tensor] | None, rank_block: int, *, transposed: bool = False,
) -> None:  # fmt: skip
    """Write a (S, C) times each expert's w, (N, C) or with `transposed` (C, N), to y (S, N).

    precision: of the products, as `tl.dot` takes it. share: as in `_rows_by_weight`, rank_block of its ranks per step.
    The dense weight is never stored.
    """
    (S, C), N, E = a.shape, y.shape[1], w.codes.shape[0]
    tiles = tiles_at_most(S, E, rows)
    if not tiles or not N:
        return
    s, b = (None, None) if share is None else share
    if b is not None and transposed:
        b = b.transpose(1, 2)
    of_rank = (0, 0, 0, 0) if b is None else (b.shape[2], *b.stride())
    described = can_describe(a)
    block_n, block_c, group, swapped, launched = _frozen_tile(rows, a)
    operand: Any = describe(a, (rows, block_c)) if described else a

    def plan() -> Plan:
        blocks = cdiv(N, block_n)
        sizes = tiles, routing.tiles.shape[1], E, N, C, blocks, *w.codes.shape[1:], w.scales.shape[2], *of_rank
        flags = described, transposed, w.high_first, C % block_c == 0, N % block_n == 0, swapped, precision
        return tiles * blocks, (*sizes, *flags, rows, block_n, block_c, rank_block, group), launched

    key = (S, E, N, C, rows, transposed, of_rank, a.dtype, w.high_first, bias is None, described, precision)
    launch(_frozen_rows_kernel, key, (y, operand, *w, bias, routing.tiles, routing.offsets, s, b), plan)


def expand(packed: Packed, w: Tensor) -> Tensor:
    """Write the dense weight to w (E, N, K), contiguous, and return it."""
    E, N, K = w.shape
    block_r, cols = 16, 256

    def plan() -> Plan:
        blocks = cdiv(K, cols)
        sizes = E * N, K, blocks, packed.codes.shape[2], packed.scales.shape[2]
        return (
            cdiv(E * N, block_r) * blocks,
            (*sizes, packed.high_first, K % cols == 0, block_r, cols),
            {"num_warps": 4},
        )

    launch(_expand_kernel, (E, N, K, w.dtype, packed.high_first), (w, *packed), plan)
    return w


def split_experts(E: int, numbers: int, element_size: int) -> list[tuple[int, int]]:
    """Ranges of experts, each of `numbers` weights, whose dense weights fit into the workspace."""
    count = max(1, WORKSPACE // (numbers * element_size))
    count -= count % 4 if count > 4 else 0  # 16-byte addresses of the first expert's offset
    return [(first, min(first + count, E)) for first in range(0, E, count)]


def choose_experts(routing: Routing, first: int, last: int) -> Routing:
    """The routing for a part of the experts: tiles of other experts are surplus."""
    expert, row = routing.tiles[0] - first, routing.tiles[1]  # experts from last on are surplus already
    tiles = torch.stack((torch.where(expert < 0, last - first, expert), row))
    return routing._replace(offsets=routing.offsets[first : last + 1], tiles=tiles)
