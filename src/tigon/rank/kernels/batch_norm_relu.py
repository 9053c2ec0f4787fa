"""Batch norm with relu: y = max(0, (h − μ) / sqrt(σ² + eps) · γ + β), with μ and σ² per column of a batch.

Source: Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167

Rows may have zero columns after the normalized columns, as LiRank's padded linear layers produce; the result then has
them too. The minimum traffic: h twice and y forward; dy and h twice and dh backward. The relu mask is recomputed from
h.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    check_tensors,
    differentiable,
    differentiable_directly,
    do_not_specialize,
    is_traced,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    shared_memory,
    tl,
    use_triton,
    view_rows,
)
from tigon.ops.gated import choose_unit
from tigon.ops.sum_rows import sum_rows

Running = tuple[Tensor, Tensor]


def batch_norm_relu(
    h: Tensor, weight: Tensor, bias: Tensor, running: Running | None = None, *, training: bool = True,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Batch norm over the first N columns of h, then relu. fp32 (fp64 for fp64), rounded once.

    Args:
        h: (C, W), W ≥ N, any float dtype, with zeros after the first N columns.
        weight, bias: (N,), γ and β, fp32; fp64 through the reference.
        running: (N,) mean and (N,) variance, in weight's dtype. Updated in training like `nn.BatchNorm1d`:
            running ← (1 − momentum) · running + momentum · batch statistic, with the unbiased variance.
        training: normalize by the batch statistics; otherwise by the running statistics.

    Returns: (C, W) in h's dtype, dense, with zeros after the first N columns.

    Raises: ValueError for other shapes or dtypes, for a single row in training, and for missing running statistics
        outside training.

    The gradients of weight and bias, and in training those of the statistics, are fp32 sums in a fixed order.
    """
    check_tensors("batch_norm_relu", h=h, weight=weight, bias=bias)
    _check(h, weight, bias, running, training)
    if not use_triton(h, weight, bias, *(running or ())):
        return batch_norm_relu_reference(h, weight, bias, running, training=training, momentum=momentum, eps=eps)
    if not training:
        assert running is not None
        return _batch_norm_relu(h, weight, bias, running[0].contiguous(), running[1].contiguous(), eps)
    if running is None or h.shape[0] == 0:
        return _batch_norm_relu(h, weight, bias, None, None, eps)
    # An op that mutates its arguments has no gradient, and the kernel needs contiguous statistics.
    if is_traced(h) or not all(t.is_contiguous() for t in running):
        return batch_norm_relu_reference(h, weight, bias, running, momentum=momentum, eps=eps)
    result: Tensor = _tracking(h, weight, bias, None, None, eps, {"running": running, "momentum": momentum})
    return result


def _check(h: Tensor, weight: Tensor, bias: Tensor, running: Running | None, training: bool) -> None:
    if h.dim() != 2 or not h.dtype.is_floating_point:
        raise ValueError(f"batch_norm_relu: h must be (C, W) floats, got {tuple(h.shape)} {h.dtype}.")
    if weight.dim() != 1 or weight.shape[0] > h.shape[1] or weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"batch_norm_relu: weight must be (N,) fp32 or fp64, with N up to {h.shape[1]}, the width of h, got "
            f"{tuple(weight.shape)} {weight.dtype}."
        )
    for name, t in (("bias", bias), *(("running", t) for t in running or ())):
        if t.shape != weight.shape or t.dtype != weight.dtype:
            raise ValueError(
                f"batch_norm_relu: {name} must be {tuple(weight.shape)} {weight.dtype}, as weight is, got "
                f"{tuple(t.shape)} {t.dtype}."
            )
    if training and h.shape[0] == 1:
        raise ValueError(
            "batch_norm_relu: h must have two rows or more in training, since a single row has no variance; got 1."
        )
    if not training and running is None:
        raise ValueError("batch_norm_relu: running must be (mean, variance) outside training, got None.")


def batch_norm_relu_reference(
    h: Tensor, weight: Tensor, bias: Tensor, running: Running | None = None, *, training: bool = True,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    C, N = h.shape[0], weight.shape[0]
    x = h[:, :N].to(torch.promote_types(h.dtype, weight.dtype))
    if training and C:
        mean = x.mean(0)
        # Two passes, like the kernels' statistics: E(x²) − E(x)² would cancel.
        variance = (x - mean).square().mean(0)
        if running is not None:
            with torch.no_grad():
                for of, new in zip(running, (mean, variance * (C / (C - 1))), strict=True):
                    of.lerp_(new.to(of.dtype), momentum)
    elif training:
        mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    else:
        assert running is not None
        mean, variance = running
    y = F.relu((x - mean) * torch.rsqrt(variance + eps) * weight + bias)
    return F.pad(y, (0, h.shape[1] - N)).to(h.dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels
#
# Tiles are (BLOCK_M, BLOCK_N); a program owns a column block and the tiles in a chunk of rows. Columns are the fast
# grid index: concurrent programs read whole rows. W and the strides count UNIT elements, which tells the compiler that
# they are multiples of UNIT. After the first N columns mean, weight and bias are 0, and so are all values derived from
# them.


@jit
def _chunk(C, W, per, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's chunk, its first tile, the end of its tiles, its columns, and the column mask."""
    blocks = tl.cdiv(W, BLOCK_N // UNIT)
    chunk = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    return chunk, chunk * per, tl.minimum((chunk + 1) * per, tl.cdiv(C, BLOCK_M)), cols, cols < W * UNIT


@jit
def _rows(tile, C, col_mask, BLOCK_M: tl.constexpr):
    """A tile's rows, and the tile mask."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    # int64: row · stride exceeds 2**31 at 613,000 rows with width 3504.
    return rows.to(tl.int64)[:, None], (rows < C)[:, None] & col_mask[None, :]


@jit
def _columns(w_ptr, b_ptr, stats_ptr, cols, N):
    """Mean, 1/std, their product with the weight, and bias."""
    mask = cols < N
    mean = tl.load(stats_ptr + cols, mask=mask, other=0.0)
    rstd = tl.load(stats_ptr + N + cols, mask=mask, other=0.0)
    scale = rstd * tl.load(w_ptr + cols, mask=mask, other=0.0)
    return mean, rstd, scale, tl.load(b_ptr + cols, mask=mask, other=0.0)


@jit
def _positive(square):
    # Not tl.maximum, which turns NaN into 0: NaN in the batch must reach the result.
    return tl.where(square < 0.0, 0.0, square)


@jit
@do_not_specialize("C", "per")
def _batch_norm_stats_kernel(
    h_ptr, part_ptr, C, N, W, stride_h, per,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and Σ (h − mean)² for each column in a chunk."""
    chunk, first, last, cols, col_mask = _chunk(C, W, per, UNIT, BLOCK_M, BLOCK_N)
    h_ptr += cols[None, :]
    rows, mask = _rows(first, C, col_mask, BLOCK_M)
    x = tl.load(h_ptr + rows * stride_h * UNIT, mask=mask, other=0.0).to(tl.float32)
    # Sums are centred on the first tile's mean, within sqrt(tiles) standard deviations of the chunk's: a difference of
    # squares then keeps its digits.
    about = tl.sum(x, 0) / tl.minimum(BLOCK_M, C - first * BLOCK_M)
    # Separate sums per tile element, reduced once after the last tile.
    total = tl.where(mask, x - about[None, :], 0.0)
    squares = total * total
    for tile in tl.range(first + 1, last, num_stages=STAGES):
        rows, mask = _rows(tile, C, col_mask, BLOCK_M)
        x = tl.load(h_ptr + rows * stride_h * UNIT, mask=mask, other=0.0).to(tl.float32)
        # Masked elements hold 0, not `about`.
        x = tl.where(mask, x - about[None, :], 0.0)
        total += x
        squares += x * x
    sums = tl.sum(total, 0)
    shift = sums / (tl.minimum(last * BLOCK_M, C) - first * BLOCK_M)
    part_ptr += chunk.to(tl.int64) * 2 * N + cols
    tl.store(part_ptr, about + shift, mask=cols < N)
    tl.store(part_ptr + N, _positive(tl.sum(squares, 0) - sums * shift), mask=cols < N)


@jit
@do_not_specialize("C", "P", "rows")
def _batch_norm_fold_kernel(
    stats_ptr, part_ptr, mean_ptr, var_ptr, C, N, P, rows, momentum, eps,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Mean and 1/std from P chunks of `rows` rows, updating the running statistics; without chunks, from the latter."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    if part_ptr is not None:
        # Centred on the first chunk's mean: the chunk means may be large compared with their differences.
        about = tl.load(part_ptr + cols, mask=mask, other=0.0)
        total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
        for start in range(0, P, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            there = (p < P)[:, None] & mask[None, :]
            at = part_ptr + p.to(tl.int64)[:, None] * 2 * N + cols[None, :]
            shift = tl.where(there, tl.load(at, mask=there, other=0.0) - about[None, :], 0.0)
            weighted = tl.minimum(rows, C - p * rows).to(tl.float32)[:, None] * shift
            total += weighted
            squares += tl.load(at + N, mask=there, other=0.0) + weighted * shift
        sums = tl.sum(total, 0)
        shift = sums / C
        mean = about + shift
        square = _positive(tl.sum(squares, 0) - sums * shift)
        variance = square / C
        if mean_ptr is not None:
            old = tl.load(mean_ptr + cols, mask=mask, other=0.0)
            tl.store(mean_ptr + cols, old + momentum * (mean - old), mask=mask)
            old = tl.load(var_ptr + cols, mask=mask, other=0.0)
            tl.store(var_ptr + cols, old + momentum * (square / (C - 1) - old), mask=mask)
    else:
        mean = tl.load(mean_ptr + cols, mask=mask, other=0.0)
        variance = tl.load(var_ptr + cols, mask=mask, other=0.0)
    tl.store(stats_ptr + cols, mean, mask=mask)
    tl.store(stats_ptr + N + cols, tl.rsqrt(variance + eps), mask=mask)


@jit
@do_not_specialize("C", "per")
def _batch_norm_relu_fwd_kernel(
    h_ptr, w_ptr, b_ptr, stats_ptr, y_ptr, C, N, W, stride_h, per,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    _, first, last, cols, col_mask = _chunk(C, W, per, UNIT, BLOCK_M, BLOCK_N)
    mean, _, scale, bias = _columns(w_ptr, b_ptr, stats_ptr, cols, N)
    for tile in tl.range(first, last, num_stages=STAGES):
        rows, mask = _rows(tile, C, col_mask, BLOCK_M)
        x = tl.load(h_ptr + rows * stride_h * UNIT + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # An fma, as in the backward kernels, so that they recompute the same mask.
        y = _positive(tl.fma(x - mean[None, :], scale[None, :], bias[None, :]))
        tl.store(y_ptr + rows * W * UNIT + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _upstream(
    dy_ptr, h_ptr, rows, mask, cols, stride_dy, stride_h, mean, scale, bias, UNIT: tl.constexpr
):  # fmt: skip
    """A tile's gradient of the norm's result, and h − mean."""
    dy = tl.load(dy_ptr + rows * stride_dy * UNIT + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.load(h_ptr + rows * stride_h * UNIT + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    x -= mean[None, :]
    return tl.where(tl.fma(x, scale[None, :], bias[None, :]) <= 0.0, 0.0, dy), x


@jit
@do_not_specialize("C", "per")
def _batch_norm_relu_sums_kernel(
    dy_ptr, h_ptr, w_ptr, b_ptr, stats_ptr, part_ptr, C, N, W, stride_dy, stride_h, per,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A chunk's part of dγ and dβ: a row in (P, 2, N), summed by `sum_rows`."""
    chunk, first, last, cols, col_mask = _chunk(C, W, per, UNIT, BLOCK_M, BLOCK_N)
    mean, rstd, scale, bias = _columns(w_ptr, b_ptr, stats_ptr, cols, N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        rows, mask = _rows(tile, C, col_mask, BLOCK_M)
        g, x = _upstream(dy_ptr, h_ptr, rows, mask, cols, stride_dy, stride_h, mean, scale, bias, UNIT)
        dw += g * x
        db += g
    part_ptr += chunk.to(tl.int64) * 2 * N + cols
    tl.store(part_ptr, tl.sum(dw, 0) * rstd, mask=cols < N)
    tl.store(part_ptr + N, tl.sum(db, 0), mask=cols < N)


# dh for a chunk, dense; dw_ptr and db_ptr hold dγ and dβ, or None with running statistics.
@jit
@do_not_specialize("C", "per")
def _batch_norm_relu_bwd_kernel(
    dy_ptr, h_ptr, w_ptr, b_ptr, stats_ptr, dw_ptr, db_ptr, dh_ptr, C, N, W, stride_dy, stride_h, per,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    _, first, last, cols, col_mask = _chunk(C, W, per, UNIT, BLOCK_M, BLOCK_N)
    mean, rstd, scale, bias = _columns(w_ptr, b_ptr, stats_ptr, cols, N)
    # dh = γ / std · (g − dβ / C − ĥ · dγ / C): the last two terms come from the batch's mean and variance, and are
    # absent for running statistics.
    along = tl.zeros((BLOCK_N,), tl.float32)
    shift = tl.zeros((BLOCK_N,), tl.float32)
    if dw_ptr is not None:
        along = tl.load(dw_ptr + cols, mask=cols < N, other=0.0) * rstd / C
        shift = tl.load(db_ptr + cols, mask=cols < N, other=0.0) / C
    for tile in tl.range(first, last, num_stages=STAGES):
        rows, mask = _rows(tile, C, col_mask, BLOCK_M)
        g, x = _upstream(dy_ptr, h_ptr, rows, mask, cols, stride_dy, stride_h, mean, scale, bias, UNIT)
        dh = scale[None, :] * (g - shift[None, :] - x * along[None, :])
        tl.store(dh_ptr + rows * W * UNIT + cols[None, :], dh.to(dh_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


class _Cut(NamedTuple):
    """How a batch is partitioned: grid, row chunks, tiles per chunk, and rows, columns and stages per tile."""

    programs: int
    chunks: int
    per: int
    tile: tuple[int, int, int]


@functools.lru_cache(maxsize=4096)
def _cut(C: int, W: int, itemsize: int, inputs: int, device: torch.device) -> _Cut:
    """128 columns, 256 bytes in 16-bit rows, and 16 or 32 rows: two or four 16-byte loads per thread.

    Sixteen programs per multiprocessor, of which about a quarter run at a time: fewer, longer programs would leave
    multiprocessors idle at the end, and more programs produce more parts to fold.
    """
    block_n = min(128, max(8, next_power_of_2(W)))
    # In the backward pass a thread holds two tile tensors and two sums.
    block_m = (4096 if inputs == 1 else 2048) // block_n
    tiles, blocks = cdiv(C, block_m), cdiv(W, block_n)
    # Rounding up twice may leave empty chunks; recounting drops them.
    per = cdiv(tiles, max(1, 16 * multiprocessors(device) // blocks))
    chunks = cdiv(tiles, per)
    # Two tiles in flight while a third is computed, in each of four programs.
    fits = 4 * 3 * inputs * block_m * block_n * itemsize <= shared_memory(device)
    return _Cut(chunks * blocks, chunks, per, (block_m, block_n, 3 if fits and per > 1 else 1))


def _cut_inputs(*inputs: Tensor) -> _Cut:
    h = inputs[-1]
    return _cut(*h.shape, h.element_size(), len(inputs), h.device)


def _launch(kernel: Any, inputs: tuple[Tensor, ...], others: tuple[Tensor | None, ...], N: int) -> None:
    """Launch a kernel over a batch. inputs: (C, W), whose strides the kernel gets; h is the last."""
    C, W = inputs[-1].shape
    strides = tuple(t.stride(0) for t in inputs)

    def plan() -> Plan:
        cut, unit = _cut_inputs(*inputs), choose_unit(W, strides)
        sizes = C, N, W // unit, *(s // unit for s in strides), cut.per, unit
        return cut.programs, (*sizes, *cut.tile), {"num_warps": 4}

    tensors = *inputs, *others
    key = (C, N, W, strides, *(None if t is None else t.dtype for t in tensors))
    launch(kernel, key, tensors, plan)


def _fold(
    part: Tensor | None, rows: int, mean: Tensor | None, variance: Tensor | None, stats: Tensor, C: int,
    momentum: float, eps: float,
) -> None:  # fmt: skip
    N, P = stats.shape[1], None if part is None else part.shape[0]
    # stats comes first because stats is never None: `launch` takes the device from the first tensor.
    tensors = stats, part, mean, variance
    key = (C, N, P, rows, mean is None, momentum, eps)

    def plan() -> Plan:
        # Narrow blocks, as in sum_rows: few columns, many multiprocessors.
        return cdiv(N, 16), (C, N, P, rows, momentum, eps, 64, 16), {"num_warps": 4}

    launch(_batch_norm_fold_kernel, key, tensors, plan)


def _batch_norm_relu_fwd_fake(
    h: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, variance: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    # Mean and 1/std side by side.
    return h.new_empty(h.shape), h.new_empty((2, weight.shape[0]), dtype=torch.float32)


@launcher(_batch_norm_relu_fwd_fake)
def _batch_norm_relu_fwd(
    h: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, variance: Tensor | None, eps: float, *,
    running: Running | None = None, momentum: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """mean, variance: statistics to use instead of the batch's. running: statistics that the batch's update."""
    y, stats = _batch_norm_relu_fwd_fake(h, weight, bias, mean, variance, eps)
    if y.numel() == 0:
        return y, stats
    h, N = view_rows(h), weight.shape[0]
    cut = _cut_inputs(h)
    part = None
    if mean is None:
        part = h.new_empty((cut.chunks, 2, N), dtype=torch.float32)
        _launch(_batch_norm_stats_kernel, (h,), (part,), N)
        mean, variance = running or (None, None)
    _fold(part, cut.per * cut.tile[0], mean, variance, stats, h.shape[0], momentum, eps)
    _launch(_batch_norm_relu_fwd_kernel, (h,), (weight.contiguous(), bias.contiguous(), stats, y), N)
    return y, stats


def _batch_norm_relu_bwd_fake(
    dy: Tensor, h: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, of_batch: bool, need_dh: bool, need_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    sums = [weight.new_empty(weight.shape if need_sums else 0) for _ in range(2)]
    return h.new_empty(h.shape if need_dh else 0), sums[0], sums[1]


@launcher(_batch_norm_relu_bwd_fake)
def _batch_norm_relu_bwd(
    dy: Tensor, h: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, of_batch: bool, need_dh: bool, need_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dh, dw, db = _batch_norm_relu_bwd_fake(dy, h, weight, bias, stats, of_batch, need_dh, need_sums)
    if h.numel() == 0:
        return dh, dw.zero_(), db.zero_()
    inputs, N = (view_rows(dy), view_rows(h)), weight.shape[0]
    columns = weight.contiguous(), bias.contiguous(), stats
    sums: tuple[Tensor | None, Tensor | None] = None, None
    if need_sums or of_batch:
        # With batch statistics, dh needs the sums too.
        first, second = (dw, db) if need_sums else (torch.empty_like(columns[0]) for _ in range(2))
        part = stats.new_empty((_cut_inputs(*inputs).chunks, 2, N))
        _launch(_batch_norm_relu_sums_kernel, inputs, (*columns, part), N)
        sum_rows(part, first, second)
        if of_batch:
            sums = first, second
    if need_dh:
        _launch(_batch_norm_relu_bwd_kernel, inputs, (*columns, *sums, dh), N)
    return dh, dw, db


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, weight, bias, mean, *_ = inputs
    ctx.of_batch = mean is None
    ctx.save_for_backward(h, weight, bias, output[1])


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    need_dh, need_dw, need_db = ctx.needs_input_grad[:3]
    dh, dw, db = _batch_norm_relu_bwd(dy, *ctx.saved_tensors, ctx.of_batch, need_dh, need_dw or need_db)
    return dh if need_dh else None, dw if need_dw else None, db if need_db else None, None, None, None


_batch_norm_relu = differentiable(_batch_norm_relu_fwd, _setup_context, _backward)
_tracking = differentiable_directly(_batch_norm_relu_fwd, _setup_context, _backward)
