"""Softmax launches, tiles and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Parts,
    Plan,
    cdiv,
    cut_rows,
    dense_like,
    dense_like_second,
    differentiable,
    is_hopper,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    shared_memory,
    uneven,
    view_rows,
)
from tigon.ops.softmax.kernels import (
    _softmax_bwd_kernel,
    _softmax_fwd_kernel,
    _softmax_wide_bwd_kernel,
    _softmax_wide_fwd_kernel,
)

# Widest row that stays in registers, so that memory is read once; wider rows are read twice, block by block. A tile
# with 32768 columns on 32 warps has 32 numbers per thread.
MAX_TILE = 32768
# If there are fewer wide rows than SMs, each row is cut into parts with PART columns or a multiple, until there are
# PARTED programs per SM. 0: never.
PART, PARTED = 4096, 8


def _tile(m: int, n: int, device: torch.device) -> tuple[int, int, int]:
    """Rows and columns per tile, and warps. Narrow rows share a tile, so that every warp has wide loads."""
    block_n = next_power_of_2(n)
    programs = multiprocessors(device)
    # A few narrow rows get a program each: SMs are idle anyway, and less work per thread finishes sooner. Up to 256
    # columns a row fits a single warp, whose threads meet without a barrier.
    if block_n < 2048 and m <= (programs if block_n < 1024 else 4 * programs):
        return 1, block_n, max(1, block_n // 256)
    if block_n <= 512 and m <= 16 * programs:
        return 4, block_n, 4
    # At least 2048 numbers per tile: on 4 warps 16 numbers per thread, two 16-byte loads in 16 bits.
    warps = 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16 if block_n <= 16384 else 32
    return max(1, 2048 // block_n), block_n, warps


def _prefetch(row_bytes: int, x: Tensor) -> int:
    """Stages of the forward pass. A row of 64 KiB occupies an SM alone; its next two rows are prefetched into shared
    memory if they fit. The backward pass, which loads two such rows, is faster without prefetch."""
    return 3 if row_bytes >= 65536 and 3 * row_bytes + 4096 <= shared_memory(x.device) else 1


def _parts(M: int, N: int, device: torch.device) -> Parts | None:
    """How each of M wide rows is cut; None if whole rows are enough programs."""
    programs = multiprocessors(device)
    return cut_rows(M, N, PART, PARTED * programs) if programs > M else None


def _wide_tile(N: int, edges: bool, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Columns per step for a program with a whole row, and Triton's options.

    Rows narrower than MAX_TILE are also read twice if their edges would not fit the tile with the rest. Rows of up to
    64 KiB come from the L1 cache the second time: the wider the row, the fewer share an SM.
    """
    warps = 32 if N > 16384 else 16 if N > 8192 else 8 if N > 2048 else 4
    options = {"num_warps": warps}
    # An SM's 65,536 registers for 2 · 1024 threads are 32 per thread. The edges need slightly more than would fit two
    # programs of 32 warps, so the compiler is told to economise.
    if edges and is_hopper(device):
        options["maxnreg"] = 32
    return warps * 256, options


def _launch_wide(
    kernel: Any, key: tuple[Any, ...], tensors: tuple[Tensor | None, ...], arguments: tuple[Any, ...], M: int, N: int,
    numbers: int, edges: bool,
) -> None:  # fmt: skip
    """One launch for whole rows, or two for rows in parts, with `numbers` fp32 statistics per part in between."""
    # The key includes `edges`, which addresses decide: rows with the same shape and stride may be aligned differently.
    device = tensors[-1].device  # type: ignore[union-attr]
    parts = _parts(M, N, device) if N > MAX_TILE else None
    if parts is None:
        block, options = _wide_tile(N, edges, device)
        whole = M, (*arguments, 1, N, 0, edges, block, 1), options
        launch(kernel, (*key, edges), (*tensors, None), lambda: whole)
        return
    count, width, most = parts
    partial = torch.empty(M * count * numbers, dtype=torch.float32, device=device)
    for step in (1, 2):

        def plan(step: int = step) -> Plan:
            return M * count, (*arguments, count, width, step, edges, PART, most), {"num_warps": 8}

        launch(kernel, (*key, step, edges), (*tensors, partial), plan)


def _mask_layout(mask: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, ...]]:
    """Mask layout for the kernels: sizes of the last two row dimensions, three row strides, the column stride.

    Dimensions that a single stride describes are merged: for (B, H, T, S), a mask (B, 1, T, S) has three, (T, S) two.
    """
    mask = mask.expand(shape)
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], mask.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    if len(dims) > 3:  # alternating broadcast dimensions in five or more dimensions
        return _mask_layout(mask.contiguous(), shape)
    (_, s0), (d1, s1), (d2, s2) = [(1, 0)] * (3 - len(dims)) + dims
    return mask, (d1, d2, s0, s1, s2, mask.stride(-1))


@launcher(dense_like)
def _softmax_fwd(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    y = dense_like(x)
    if x.numel() == 0:
        return y
    layout: tuple[int, ...] = (1, 1, 0, 0, 0, 0)
    if mask is not None:
        mask, layout = _mask_layout(mask, x.shape)
    T = x.shape[-2] if causal else 1
    x = view_rows(x)
    M, N = x.shape
    arguments = (N, T, *layout[:2], x.stride(0), *layout[2:], scale, scale != 1.0, causal)
    key = (M, arguments, x.dtype, None if mask is None else mask.dtype)
    # The mask's rows are aligned differently from x's and would have other edges: with a mask, odd rows are moved
    # number by number.
    edges = mask is None and uneven(x, y.view(M, N))
    if N > MAX_TILE or edges:
        _launch_wide(_softmax_wide_fwd_kernel, key, (x, mask, y), arguments, M, N, 2, edges)
    else:

        def plan_tile() -> Plan:
            block_m, block_n, warps = _tile(M, N, x.device)
            tiles, stages = cdiv(M, block_m), _prefetch(block_n * x.element_size(), x)
            # Persistent with a prefetch only: otherwise the hardware balances the load of one program per tile.
            grid = tiles if stages == 1 else min(tiles, multiprocessors(x.device))
            return grid, (M, *arguments, block_m, block_n, stages), {"num_warps": warps}

        launch(_softmax_fwd_kernel, key, (x, mask, y), plan_tile)
    return y


@launcher(dense_like_second)
def _softmax_bwd(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    dx = dense_like(y)
    if y.numel() == 0:
        return dx
    T = y.shape[-2] if causal else 1
    dy, y = view_rows(dy), view_rows(y)
    M, N = y.shape
    arguments = (N, T, dy.stride(0), y.stride(0), scale, causal)
    key = (M, arguments, dy.dtype, y.dtype)
    edges = uneven(dy, y, dx.view(M, N))
    if N > MAX_TILE or edges:
        _launch_wide(_softmax_wide_bwd_kernel, key, (dy, y, dx), arguments, M, N, 1, edges)
    else:

        def plan_tile() -> Plan:
            block_m, block_n, warps = _tile(M, N, y.device)
            # Up to 16384 columns registers hold both tensors in fp32. Beyond, bf16 stays as loaded, in half the
            # registers.
            reload = block_n > 16384 and y.dtype != torch.bfloat16
            if block_n * y.element_size() > 65536:  # 16 warps wait less for two such rows than 32
                warps = 16
            return cdiv(M, block_m), (M, *arguments, reload, block_m, block_n), {"num_warps": warps}

        launch(_softmax_bwd_kernel, key, (dy, y, dx), plan_tile)
    return dx


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    return (_softmax_bwd(dy, *ctx.saved_tensors, ctx.scale, ctx.causal),) if ctx.needs_input_grad[0] else ()


softmax_of_last = differentiable(_softmax_fwd, _setup_context, _backward)
