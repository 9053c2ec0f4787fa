"""The factors of a weight gradient: transposed, with the tokens' scales folded into one of them.

A transposition moves 32-bit words and not bytes: bytes of four rows form words, which pass through shared memory, so
that a thread loads 16 bytes of a row and stores 16 bytes of a column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, do_not_specialize, jit, launch, launcher, tl, use_triton, view_rows
from tigon.kernels.tiles.fp8 import compute_amax_tile, join_words, larger, round_to_words
from tigon.ops.fp8.recipe import E4M3, Norm, round_up
from tigon.ops.fp8.reference import fold_scales_reference, to_columns_reference, transpose_rows_reference


def fold_scales(into: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """into / c (M, 1), and c = max into · other, 0-d and at least 2⁻¹²⁰."""
    if not use_triton(into, other) or not into.numel():
        return fold_scales_reference(into, other)
    return _fp8_fold_scales(into, other)


def to_columns(x: Tensor, factor: Tensor, norm: Norm | None = None, rows: Tensor | None = None) -> Tensor:
    """x · factor, or norm(x) · factor, in e4m3, transposed: (N, M padded to 16 with zeros).

    rows: (M,) int32, the row of x for each column, −1 for a column of zeros; not with a norm. None: all rows in order.
    """
    weight = None if norm is None else norm.weight
    if not use_triton(x, factor, weight) or not x.numel():
        return to_columns_reference(x, factor, norm, rows)
    if norm is None:
        return _fp8_to_columns(x, factor, None, None, 0.0, "none", rows)
    return _fp8_to_columns(x, factor, norm.rstd, weight, norm.offset, norm.cast)


def transpose_rows(data: Tensor, rows: Tensor | None = None) -> Tensor:
    """data (M, N) → (N, M padded to 16 with zeros), the same bytes. rows: as for `to_columns`."""
    # use_triton expects a float tensor of two or more bytes on data's device.
    if not use_triton(data.new_empty(0, dtype=torch.float32)) or not data.numel():
        return transpose_rows_reference(data, rows)
    return _fp8_transpose_rows(data, rows)


# ---------------------------------------------------------------------------------------------------------- kernels


# Every program finds the maximum over all tokens, which come from L2, and writes SHARE quotients: a single launch
# without atomics.
#   a, b     scales (M,), not negative
#   q, c     a / c (M,), and c = max a · b
@jit
@do_not_specialize("M")
def _fp8_fold_scales_kernel(a_ptr, b_ptr, q_ptr, c_ptr, M, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + rows, mask=rows < M, other=0.0)
        top = larger(top, a * tl.load(b_ptr + rows, mask=rows < M, other=0.0))
    c = larger(compute_amax_tile(top, 0), 7.52316384526264e-37)  # 2⁻¹²⁰
    tl.store(c_ptr, c, mask=tl.program_id(0) == 0)
    rows = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    a = tl.load(a_ptr + rows, mask=rows < M, other=0.0)
    tl.store(q_ptr + rows, tl.math.div_rn(a, c), mask=rows < M)


@jit
def _place(N, T, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program's words along the tokens, and its columns: neighbouring programs take neighbouring columns."""
    blocks = tl.cdiv(N, BLOCK_N)
    i = tl.program_id(0) // blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    return i, tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)


@jit
def _store_columns(t_ptr, words, i, cols, N, T):
    # T counts 16 bytes, so that the compiler sees 16-byte boundaries. Words behind the last token are zeros.
    mask = (cols < N)[:, None] & (i < 4 * T)[None, :]
    tl.store(t_ptr + cols.to(tl.int64)[:, None] * (4 * T) + i[None, :], tl.trans(words), mask=mask)


@jit
def _find_rows(rows_ptr, at, M):
    """The rows of so many tokens at positions of the sum, and whether there is one."""
    row, exists = at, at < M
    if rows_ptr is not None:
        row = tl.load(rows_ptr + at, mask=exists, other=-1)
        exists = row >= 0
    return row, exists


@jit
def _load_bytes(q_ptr, rows_ptr, at, cols, M, N, stride_q):
    row, exists = _find_rows(rows_ptr, at, M)
    mask = exists[:, None] & (cols < N)[None, :]
    return tl.load(q_ptr + row.to(tl.int64)[:, None] * stride_q + cols[None, :], mask=mask, other=0)


# A program: BLOCK_I words of four tokens each, of BLOCK_N columns.
#   q, t     bytes (M, N) with a row stride; words (N, 4 · T)
#   rows     (M,), the row of q for each token, −1 for none; or None: M rows in order
@jit
@do_not_specialize("M", "T")
def _fp8_transpose_rows_kernel(q_ptr, rows_ptr, t_ptr, M, N, T, stride_q, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr):
    i, cols = _place(N, T, BLOCK_I, BLOCK_N)
    a = _load_bytes(q_ptr, rows_ptr, 4 * i, cols, M, N, stride_q)
    b = _load_bytes(q_ptr, rows_ptr, 4 * i + 1, cols, M, N, stride_q)
    c = _load_bytes(q_ptr, rows_ptr, 4 * i + 2, cols, M, N, stride_q)
    d = _load_bytes(q_ptr, rows_ptr, 4 * i + 3, cols, M, N, stride_q)
    _store_columns(t_ptr, join_words(a, b, c, d), i, cols, N, T)


@jit
def _scale_rows(x_ptr, f_ptr, rows_ptr, rstd_ptr, w, at, cols, M, N, stride_x, ROUND: tl.constexpr):
    dtype = x_ptr.dtype.element_ty
    row, exists = _find_rows(rows_ptr, at, M)
    mask = exists[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if rstd_ptr is not None:
        x *= tl.load(rstd_ptr + at, mask=at < M, other=0.0)[:, None]
        if ROUND:
            x = x.to(dtype).to(tl.float32)
        if w is not None:
            x *= w[None, :]
        x = x.to(dtype).to(tl.float32)
    return x * tl.load(f_ptr + at, mask=at < M, other=0.0)[:, None]


# A program: BLOCK_I words of four tokens each, of BLOCK_N columns.
#   x, f     (M, N) with a row stride, and a factor for each token
#   rows     as for `_fp8_transpose_rows_kernel`; not with a norm
#   rstd, w  1/rms (M,) and the weight (N,) of a norm that comes before the factor; rstd is None for no norm, w for no
#            weight. offset, ROUND as in `rms_norm`
#   t        words (N, 4 · T)
@jit
@do_not_specialize("M", "T")
def _fp8_to_columns_kernel(
    x_ptr, f_ptr, rows_ptr, rstd_ptr, w_ptr, t_ptr, M, N, T, stride_x, offset,
    ROUND: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i, cols = _place(N, T, BLOCK_I, BLOCK_N)
    w = None
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
    a = _scale_rows(x_ptr, f_ptr, rows_ptr, rstd_ptr, w, 4 * i, cols, M, N, stride_x, ROUND)
    b = _scale_rows(x_ptr, f_ptr, rows_ptr, rstd_ptr, w, 4 * i + 1, cols, M, N, stride_x, ROUND)
    c = _scale_rows(x_ptr, f_ptr, rows_ptr, rstd_ptr, w, 4 * i + 2, cols, M, N, stride_x, ROUND)
    d = _scale_rows(x_ptr, f_ptr, rows_ptr, rstd_ptr, w, 4 * i + 3, cols, M, N, stride_x, ROUND)
    words = round_to_words(a, b, c, d)
    if w_ptr is not None:
        # Rows behind the last one are 0 · weight: NaN for an infinite weight.
        present = tl.minimum(tl.maximum(M - 4 * i, 0), 4)
        words = tl.where((present == 4)[:, None], words, words & ((1 << (8 * present % 32)) - 1)[:, None])
    _store_columns(t_ptr, words, i, cols, N, T)


# --------------------------------------------------------------------------------------------------------- launches


def _tile() -> tuple[int, int, int]:
    """Words along the tokens, columns and warps: 128 bytes of a row of bytes, and of a column."""
    return 32, 128, 8


def _fold_tile() -> tuple[int, int, int]:
    """Tokens that a program reads at a time, tokens that it writes, and warps: 8 and 4 tokens per thread."""
    return 8192, 4096, 32


def _fp8_fold_scales_fake(into: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(into, memory_format=torch.contiguous_format), into.new_empty(())


@launcher(_fp8_fold_scales_fake)
def _fp8_fold_scales(into: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    quotient, c = _fp8_fold_scales_fake(into, other)
    M = into.numel()

    def plan() -> Plan:
        block, share, warps = _fold_tile()
        return cdiv(M, share), (M, block, share), {"num_warps": warps}

    launch(_fp8_fold_scales_kernel, (M,), (into.contiguous(), other.contiguous(), quotient, c), plan)
    return quotient, c


def _fp8_transpose_rows_fake(data: Tensor, rows: Tensor | None = None) -> Tensor:
    return data.new_empty((data.shape[1], round_up(len(data if rows is None else rows))))


@launcher(_fp8_transpose_rows_fake)
def _fp8_transpose_rows(data: Tensor, rows: Tensor | None = None) -> Tensor:
    data = view_rows(data)
    M, N = len(data if rows is None else rows), data.shape[1]
    columns = _empty_words(data, M)
    stride = data.stride(0)

    def plan() -> Plan:
        return _plan_tiles(_tile(), M, N, (stride,))

    launch(_fp8_transpose_rows_kernel, (M, N, stride, rows is None), (data.view(torch.uint8), rows, columns), plan)
    return columns.view(data.dtype)


def _fp8_to_columns_fake(
    x: Tensor, factor: Tensor, rstd: Tensor | None, weight: Tensor | None, offset: float, cast: str,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[1], round_up(len(x if rows is None else rows))), dtype=E4M3)


@launcher(_fp8_to_columns_fake)
def _fp8_to_columns(
    x: Tensor, factor: Tensor, rstd: Tensor | None, weight: Tensor | None, offset: float, cast: str,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x = view_rows(x)
    M, N = len(x if rows is None else rows), x.shape[1]
    columns = _empty_words(x, M)
    stride = x.stride(0)
    weight = None if weight is None else weight.contiguous()

    def plan() -> Plan:
        return _plan_tiles(_tile(), M, N, (stride, offset, cast == "llama"))

    key = (M, N, stride, x.dtype, rstd is None, None if weight is None else weight.dtype, offset, cast, rows is None)
    launch(_fp8_to_columns_kernel, key, (x, factor.contiguous(), rows, rstd, weight, columns), plan)
    return columns.view(E4M3)


def _empty_words(x: Tensor, M: int) -> Tensor:
    return torch.empty((x.shape[1], round_up(M) // 4), dtype=torch.int32, device=x.device)


def _plan_tiles(tile: tuple[int, int, int], M: int, N: int, rest: tuple[float, ...]) -> Plan:
    block_i, block_n, warps = tile
    units = round_up(M) // 16
    grid = cdiv(4 * units, block_i) * cdiv(N, block_n)
    return grid, (M, N, units, *rest, block_i, block_n), {"num_warps": warps}
