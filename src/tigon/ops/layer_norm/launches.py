"""Layer norm launches: kernel and tile by width, and the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    differentiable,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    row_groups,
    shared_memory,
)
from tigon.ops.layer_norm.kernels import (
    _layer_norm_bwd_kernel,
    _layer_norm_fwd_kernel,
    _layer_norm_row_bwd_kernel,
    _layer_norm_row_fwd_kernel,
    _layer_norm_wide_dw_kernel,
    _layer_norm_wide_dx_kernel,
    _layer_norm_wide_fwd_kernel,
)
from tigon.ops.sum_rows import shares, spread, sum_rows

# Widest row that a program holds in registers; wider rows are read twice, block by block.
MAX_TILE = 16384
# Width ranges (from, to) where the forward pass gives each row a program, so that more rows are resident; NARROW_ALONE
# for 16-bit rows only; TWICE: rows read twice in small blocks, because a tile would be a third padding.
ALONE = ((4097, 6144), (MAX_TILE, MAX_TILE))
NARROW_ALONE = (6145, 8191)
TWICE = (8193, MAX_TILE - 1)
# Prefetch the next row in the widest rows' backward pass.
AHEAD = True


def _fwd_tile(n: int) -> tuple[int, int, int]:
    """Rows per tile, columns per tile and warps, up to 8192 columns; wider rows go to other kernels.

    Narrow rows share a tile, so that every warp has 16-byte loads; each further warp makes the three sums more
    expensive. No row is prefetched: the other resident rows hide the loads.
    """
    block_n = next_power_of_2(n)
    return max(1, 2048 // block_n), block_n, 4 if n <= 5120 else 8


def _row_tile(n: int) -> tuple[int, int, int]:
    """Columns of a row's two parts, and warps.

    A tile is a power of 2, which 12288 is not, but 8192 + 4096 wastes no lane. Beyond 8192 columns the second part is
    empty if it would be as large as the first. Every thread has 16-byte loads in both parts.
    """
    block_n = next_power_of_2(n)
    warps = 4 if n <= 5120 else 8 if n <= 8192 else 16
    rest = max(next_power_of_2(n - block_n // 2), 256 * warps)
    # Two parts of 4096 take 48 registers, a single part of 8192 takes 56: another program is resident.
    return (block_n // 2, rest, warps) if rest < block_n // 2 or block_n == 8192 else (block_n, 0, warps)


def _bwd_tile(n: int, x: Tensor) -> tuple[int, int, int, int, int]:
    """Rows, columns, warps, stages, programs per SM.

    A program computes a tile while the next two are loaded: 2 inputs · 3 stages · 16 KiB of shared memory. There is no
    prefetch if that does not fit, or if a row is so wide that registers are short. A row that leaves much of a power of
    2 empty, and any row of 8192, loads less and sums more: such tiles hold a single row, with a further stage.
    """
    block_n = next_power_of_2(n)
    padded = n < block_n if block_n == 8192 else 4 * n <= 3 * block_n and block_n == 4096
    if padded and x.element_size() == 2:
        warps, programs = (4, 2) if block_n == 4096 else (8, 1)
        if programs * (2 * 4 * 2 * block_n + 1024) <= shared_memory(x.device):
            return 1, block_n, warps, 4, programs
    # 16 KiB per tile at any width: as many loads in flight for narrow rows as for wide rows.
    block_m = max(1, 16384 // x.element_size() // block_n)
    tile_bytes = block_m * block_n * x.element_size()
    stages = 3 if tile_bytes <= 16384 and 6 * tile_bytes + 4096 <= shared_memory(x.device) else 1
    return block_m, block_n, 8 if tile_bytes <= 16384 else 16, stages, 1


def _layer_norm_fwd_fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((x.numel() // max(1, x.shape[-1]), 2), dtype=torch.float32)


@launcher(_layer_norm_fwd_fake)
def _layer_norm_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, stats = _layer_norm_fwd_fake(x, weight, bias, eps)
    if x.numel() == 0:
        return y, stats
    M, N = stats.shape[0], x.shape[-1]
    x, *strides = row_groups(x)
    weight = weight if weight is None else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()

    alone = any(least <= N <= most for least, most in ALONE)
    alone = alone or (NARROW_ALONE[0] <= N <= NARROW_ALONE[1] and x.element_size() == 2)
    twice = TWICE[0] <= N <= TWICE[1]

    def plan() -> Plan:
        arguments = (M, N, *strides, eps)
        if N > MAX_TILE:
            return M, (*arguments, 8192), {"num_warps": 16}
        if twice:
            return M, (*arguments, 2048), {"num_warps": 8}
        if alone:
            *parts, warps = _row_tile(N)
            return M, (*arguments, *parts), {"num_warps": warps}
        block_m, block_n, warps = _fwd_tile(N)
        return cdiv(M, block_m), (*arguments, block_m, block_n), {"num_warps": warps}

    kernel = _layer_norm_row_fwd_kernel if alone else _layer_norm_fwd_kernel
    if N > MAX_TILE or twice:
        kernel = _layer_norm_wide_fwd_kernel
    dtypes = (x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    launch(kernel, (M, N, *strides, dtypes, eps), (x, weight, bias, y, stats), plan)
    return y, stats


def _layer_norm_bwd_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, need_dx: bool, need_dw: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    dw = torch.empty_like(weight) if need_dw and weight is not None else x.new_empty(0)
    return dx, dw, torch.empty_like(bias) if need_db and bias is not None else x.new_empty(0)


@launcher(_layer_norm_bwd_fake)
def _layer_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw, db = _layer_norm_bwd_fake(dy, x, weight, bias, stats, need_dx, need_dw, need_db)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    M, N = stats.shape[0], x.shape[-1]
    dy, *dy_strides = row_groups(dy)
    x, *x_strides = row_groups(x)
    weight = weight if weight is None else weight.contiguous()
    out_dx = dx if need_dx else None
    arguments: tuple[Any, ...] = (M, N, *dy_strides, *x_strides)
    dtypes = (dy.dtype, x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    key = (arguments, dtypes, need_dx, need_dw, need_db)
    halves = need_dw + need_db
    results = dw if need_dw else db, db if need_dw and need_db else None
    sums: tuple[Tensor | None, Tensor | None] = None, None
    if N * x.element_size() <= 2 * MAX_TILE:  # the row and dx fit registers; half as many columns in fp32
        block_m, block_n, warps, stages, each = _bwd_tile(N, x)
        block_m, warps, stages = spread(M, block_m, block_n, x.device) or (block_m, warps, stages)
        # As many programs as run at a time, since each writes a row of partial sums; no more than tiles, since a
        # program without rows would still store zeros to be added.
        programs = min(cdiv(M, block_m), each * multiprocessors(x.device))
        if halves:
            sums = shares(programs, *results)

        # Beyond 8192 columns the sums of dW and dbias leave no registers for the row. Such rows are 16-bit: in fp32 the
        # limit above is 8192 columns.
        by_row = block_n > 8192

        def plan() -> Plan:
            ahead = 1 if cdiv(M, block_m) == 1 else stages
            tile = (*_row_tile(N)[:2], block_n // 16 * AHEAD) if by_row else (block_m, block_n, ahead)
            return programs, (*arguments, need_dw, need_db, *tile), {"num_warps": warps}

        kernel = _layer_norm_row_bwd_kernel if by_row else _layer_norm_bwd_kernel
        launch(kernel, key, (dy, x, weight, stats, out_dx, *sums), plan)
    else:
        if need_dx:
            tensors = (dy, x, weight, stats, dx)
            launch(_layer_norm_wide_dx_kernel, key, tensors, lambda: (M, (*arguments, 8192), {"num_warps": 16}))
        if halves:
            # Columns alone are too few programs for wide rows: rows are split as well, about four programs per SM. 1024
            # columns on 4 warps are 8 per thread in each of the two sums.
            columns = cdiv(N, 1024)
            programs = min(M, max(1, 4 * multiprocessors(x.device) // columns))
            sums = shares(programs, *results)
            slices = programs * columns, (*arguments, programs, need_dw, need_db, 1024), {"num_warps": 4}
            launch(_layer_norm_wide_dw_kernel, key, (dy, x, stats, *sums), lambda: slices)
    if sums[0] is not None:
        sum_rows(sums[0], *results)
    return dx, dw, db


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, bias, output[1])


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    dx, dw, db = _layer_norm_bwd(dy, *ctx.saved_tensors, need_dx, need_dw, need_db)
    return dx if need_dx else None, dw if need_dw else None, db if need_db else None


norm_of_rows = differentiable(_layer_norm_fwd, _setup_context, _backward)
