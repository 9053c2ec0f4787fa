"""A polynomial of normalised powers: y = w0 · norm(x³) + w1 · norm(x²) + w2 · norm(x) + bias, with
norm(u) = u / sqrt(mean(u²) + eps) over the last dimension.

Source: Zhuo et al. 2024, Polynomial Composition Activations, https://arxiv.org/abs/2411.03884
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    check_tensors,
    dense_like,
    differentiable,
    do_not_specialize,
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
from tigon.ops.example import ROWS, Example

# Widest row that a tile holds in registers; wider rows are read twice, block by block.
MAX_TILE = 16384


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-6) -> Tensor:
    """w0 · norm(x³) + w1 · norm(x²) + w2 · norm(x) + bias, computed in fp32 and rounded once.

    Args:
        x: (..., N), any float dtype. A row's sum of x⁶ must fit fp32: |x| up to 4e5 for rows up to 65,536 columns,
            which covers all of fp16. There is no other bound.
        weight: (3,), for the third, second and first power.
        bias: a single element, shape (1,) or ().
        eps: added to each mean square.
    Returns: (..., N) in x's dtype, whatever the parameters' dtypes.
    Raises: ValueError for a weight that is not (3,), a bias with more than one element, a scalar x or a dtype that is
        not a float.

    The backward pass saves only x and the parameters.

    Replaces::

        def norm(u):
            return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)

        y = weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias
    """
    if not x.dtype.is_floating_point or x.dim() == 0:
        raise ValueError(f"poly_norm: x must be (..., N) floats, got {tuple(x.shape)} {x.dtype}.")
    if getattr(weight, "shape", None) != (3,):
        check_tensors("poly_norm", weight=weight)
        raise ValueError(f"poly_norm: weight must have shape (3,), got {tuple(weight.shape)}.")
    if not isinstance(bias, Tensor) or bias.numel() != 1:
        check_tensors("poly_norm", bias=bias)
        raise ValueError(f"poly_norm: bias must have one element, got shape {tuple(bias.shape)}.")
    if not use_triton(x, weight, bias):
        return poly_norm_reference(x, weight, bias, eps=eps)
    return _poly_norm(x, weight, bias, eps)


def poly_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-6) -> Tensor:
    # fp32: in 16 bits a cube loses most digits, and in fp16 it overflows from |x| = 41 on.
    acc = torch.promote_types(x.dtype, torch.float32)
    x32, w = x.to(acc), weight.to(acc)

    def norm(u: Tensor) -> Tensor:
        return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)

    y = w[0] * norm(x32**3) + w[1] * norm(x32**2) + w[2] * norm(x32) + bias.to(acc).view(())
    return y.to(x.dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _weights(w_ptr):
    return tl.load(w_ptr).to(tl.float32), tl.load(w_ptr + 1).to(tl.float32), tl.load(w_ptr + 2).to(tl.float32)


@jit
def _row_sums(a, b, c, d, e, f, g):
    """Sum seven tiles along axis 1 in a single reduction: one exchange between warps instead of seven."""
    # Eight tiles side by side, the seventh twice, since join takes two equal shapes. A reduction along axis 1 then
    # exchanges vectors of eight through shared memory, behind a single barrier.
    stacked = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, g)))
    # The splits undo the joins from the outside in and move no data: a sum's parts are in one thread.
    even, odd = tl.split(tl.sum(stacked, 1))  # split takes the last join apart first: (a b c d), (e f g g)
    ab, cd = tl.split(even)
    ef, gg = tl.split(odd)
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    e, f = tl.split(ef)
    g, _ = tl.split(gg)
    return a, b, c, d, e, f, g


@jit
def _gradient(w0, w1, w2, s1, s2, s3, m1, m2, m3, N, eps):
    """From a row's sums s_k = Σ dy·xᵏ and m_k = Σ x²ᵏ, the gradients of the three weights and six factors of dx:

    dx = dy · (a + x·(b + x·c)) - x · (d + x²·(e + x²·f))
    """
    # r_k is 1/rms of xᵏ. Scalars or a vector over rows: the function serves narrow and wide rows.
    r1, r2, r3 = tl.rsqrt(m1 / N + eps), tl.rsqrt(m2 / N + eps), tl.rsqrt(m3 / N + eps)
    dw0, dw1, dw2 = r3 * s3, r2 * s2, r1 * s1
    c, b, a = w0 * r3, w1 * r2, w2 * r1
    # With u = xᵏ and g = w · dy: d norm(u)/du · g = r · (g − u · r² · Σ g·u / N). The second term is c · r3 · dw0 / N
    # times xᵏ, and dxᵏ/dx = k xᵏ⁻¹ makes that x²ᵏ⁻¹.
    f, e, d = c * r3 * dw0 / N, b * r2 * dw1 / N, a * r1 * dw2 / N
    return dw0, dw1, dw2, a, 2 * b, 3 * c, d, 2 * e, 3 * f


# A program: BLOCK_M rows in registers. x (M, N) with row stride xm, w (3,), bias a single number; y is dense.
@jit
@do_not_specialize("M")
def _poly_norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, M, N, stride_xm, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w0, w1, w2 = _weights(w_ptr)
    square = x * x
    cube = x * square
    a = w2 * tl.rsqrt(tl.sum(square, 1) / N + eps)
    b = w1 * tl.rsqrt(tl.sum(square * square, 1) / N + eps)
    c = w0 * tl.rsqrt(tl.sum(cube * cube, 1) / N + eps)
    y = x * (a[:, None] + x * (b[:, None] + x * c[:, None])) + tl.load(b_ptr).to(tl.float32)
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


# Persistent grid: a program takes every num_programs-th tile of BLOCK_M rows and keeps partial dW and dbias, BLOCK_M
# numbers each at any N.
#   dy, x       (M, N), row strides dym and xm
#   dx          dense, or None if not needed
#   partial     (programs, 3 · DW + DB) fp32, added by torch's sum over a few hundred programs: no atomics, fixed order
# rstd is recomputed from the row's m_k, so the forward pass saves no statistics.
@jit
@do_not_specialize("M")
def _poly_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, partial_ptr, M, N, stride_dym, stride_xm, eps,
    DW: tl.constexpr, DB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    w0, w1, w2 = _weights(w_ptr)
    dw0 = tl.zeros((BLOCK_M,), tl.float32)
    dw1 = tl.zeros((BLOCK_M,), tl.float32)
    dw2 = tl.zeros((BLOCK_M,), tl.float32)
    db = tl.zeros((BLOCK_M,), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # A sixth power exceeds fp32 from |x| = 2.6e6 on.
        square = x * x
        cube = x * square
        s0, s1, s2, s3, m1, m2, m3 = _row_sums(dy, dy * x, dy * square, dy * cube, square, square * square, cube * cube)
        d0, d1, d2, a, b, c, d, e, f = _gradient(w0, w1, w2, s1, s2, s3, m1, m2, m3, N, eps)
        dw0 += d0
        dw1 += d1
        dw2 += d2
        db += s0
        if dx_ptr is not None:
            dx = dy * (a[:, None] + x * (b[:, None] + x * c[:, None]))
            dx -= x * (d[:, None] + square * (e[:, None] + square * f[:, None]))
            tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    out = tl.program_id(0) * (3 * DW + DB)
    if DW:
        tl.store(partial_ptr + out, tl.sum(dw0, 0))
        tl.store(partial_ptr + out + 1, tl.sum(dw1, 0))
        tl.store(partial_ptr + out + 2, tl.sum(dw2, 0))
    if DB:
        tl.store(partial_ptr + out + 3 * DW, tl.sum(db, 0))


# A program: one row too wide for registers, read twice in blocks, in the same order, so that the second reading finds
# as much as possible in L2. Nothing is summed over rows; the many programs hide each other's loads.
@jit
def _poly_norm_wide_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, N, stride_xm, eps, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    w0, w1, w2 = _weights(w_ptr)
    m1 = tl.zeros((BLOCK_N,), tl.float32)
    m2 = tl.zeros((BLOCK_N,), tl.float32)
    m3 = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        square = x * x
        cube = x * square
        m1 += square
        m2 += square * square
        m3 += cube * cube
    a = w2 * tl.rsqrt(tl.sum(m1, 0) / N + eps)
    b = w1 * tl.rsqrt(tl.sum(m2, 0) / N + eps)
    c = w0 * tl.rsqrt(tl.sum(m3, 0) / N + eps)
    bias = tl.load(b_ptr).to(tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, (x * (a + x * (b + x * c)) + bias).to(y_ptr.dtype.element_ty), mask=cols < N)


# As `_poly_norm_bwd_kernel`, for rows too wide for registers. The persistent grid is so small that the rows in flight
# are still in L2 when they are read again for dx.
@jit
@do_not_specialize("M")
def _poly_norm_wide_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, partial_ptr, M, N, stride_dym, stride_xm, eps,
    DW: tl.constexpr, DB: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    w0, w1, w2 = _weights(w_ptr)
    dw0 = tl.full((), 0.0, tl.float32)
    dw1 = tl.full((), 0.0, tl.float32)
    dw2 = tl.full((), 0.0, tl.float32)
    db = tl.full((), 0.0, tl.float32)
    for r in range(tl.program_id(0), M, tl.num_programs(0)):
        row = r + tl.full((), 0, tl.int64)
        s0 = tl.zeros((BLOCK_N,), tl.float32)
        s1 = tl.zeros((BLOCK_N,), tl.float32)
        s2 = tl.zeros((BLOCK_N,), tl.float32)
        s3 = tl.zeros((BLOCK_N,), tl.float32)
        m1 = tl.zeros((BLOCK_N,), tl.float32)
        m2 = tl.zeros((BLOCK_N,), tl.float32)
        m3 = tl.zeros((BLOCK_N,), tl.float32)
        for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + row * stride_xm + cols, mask=cols < N, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row * stride_dym + cols, mask=cols < N, other=0.0).to(tl.float32)
            square = x * x
            cube = x * square
            if DB:
                s0 += dy
            s1 += dy * x
            s2 += dy * square
            s3 += dy * cube
            m1 += square
            m2 += square * square
            m3 += cube * cube
        s1, s2, s3 = tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0)
        m1, m2, m3 = tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0)
        d0, d1, d2, a, b, c, d, e, f = _gradient(w0, w1, w2, s1, s2, s3, m1, m2, m3, N, eps)
        dw0 += d0
        dw1 += d1
        dw2 += d2
        if DB:
            db += tl.sum(s0, 0)
        if dx_ptr is not None:
            for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                x = tl.load(x_ptr + row * stride_xm + cols, mask=cols < N, other=0.0).to(tl.float32)
                dy = tl.load(dy_ptr + row * stride_dym + cols, mask=cols < N, other=0.0).to(tl.float32)
                square = x * x
                dx = dy * (a + x * (b + x * c)) - x * (d + square * (e + square * f))
                tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
    out = tl.program_id(0) * (3 * DW + DB)
    if DW:
        tl.store(partial_ptr + out, dw0)
        tl.store(partial_ptr + out + 1, dw1)
        tl.store(partial_ptr + out + 2, dw2)
    if DB:
        tl.store(partial_ptr + out + 3 * DW, db)


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(n: int) -> tuple[int, int, int]:
    """Rows per tile, columns per tile and warps. Narrow rows share a tile, so that every warp has 16-byte loads."""
    block_n = next_power_of_2(n)
    return max(1, 2048 // block_n), block_n, 4 if block_n <= 2048 else 8


@functools.cache
def _bwd_tile(n: int, itemsize: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Rows, columns, warps, stages and programs per SM. While a program waits at the sums along a row, other programs
    run; each has the next two tiles in flight if shared memory allows."""
    block_n = next_power_of_2(n)
    block_m = max(1, 8192 // itemsize // block_n)
    tile_bytes = block_m * block_n * itemsize
    resident = max(1, 32768 // tile_bytes)
    if tile_bytes <= 8192:  # four programs hide each other's loads without a prefetch
        return block_m, block_n, 4, 1, resident
    stages = 3 if 4 * tile_bytes * resident + 4096 <= shared_memory(device) else 1
    # A row of 8 to 16 KiB: two programs per SM, each with a prefetch if shared memory has room for two inputs each.
    return block_m, block_n, 8, stages, resident


def _wide_tile() -> tuple[int, int, int, int]:
    """Columns, warps, stages and, for the backward pass, programs per SM: so few that their rows are still in L2 when
    they are read again."""
    # Seven sums per lane, 2048 lanes on 256 threads: 56 registers per thread. Five stages: four more steps of x and dy
    # in flight, 32 KiB of 16-bit numbers. A step's sums are few instructions and hide no load, nor does the row's
    # exchange.
    return 2048, 8, 5, 2


@launcher(dense_like)
def _poly_norm_fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = dense_like(x)
    if y.numel() == 0:
        return y
    x, weight = view_rows(x), weight if weight.is_contiguous() else weight.contiguous()
    M, N = x.shape
    stride = x.stride(0)

    def plan() -> Plan:
        if N > MAX_TILE:
            block_n, warps, stages, _ = _wide_tile()
            return M, (N, stride, eps, block_n, stages), {"num_warps": warps}
        block_m, block_n, warps = _fwd_tile(N)
        return cdiv(M, block_m), (M, N, stride, eps, block_m, block_n), {"num_warps": warps}

    kernel = _poly_norm_fwd_kernel if N <= MAX_TILE else _poly_norm_wide_fwd_kernel
    launch(kernel, (M, N, stride, x.dtype, weight.dtype, bias.dtype, eps), (x, weight, bias, y), plan)
    return y


def _poly_norm_bwd_fake(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape if need_dx else 0), x.new_empty(3 * need_dw + need_db, dtype=torch.float32)


@launcher(_poly_norm_bwd_fake)
def _poly_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor]:
    """dx, and side by side the weights' and the bias's gradient, as far as they are needed."""
    sums = 3 * need_dw + need_db
    dx = x.new_empty(x.shape if need_dx else 0)
    if x.numel() == 0:
        return dx, x.new_zeros(sums, dtype=torch.float32)
    x, dy, weight = view_rows(x), view_rows(dy), weight if weight.is_contiguous() else weight.contiguous()
    M, N = x.shape
    strides = dy.stride(0), x.stride(0)
    narrow = N * x.element_size() <= MAX_TILE  # the row, dx and powers must fit registers
    block_m, block_n, warps, stages, resident = (
        _bwd_tile(N, x.element_size(), x.device) if narrow else (1, *_wide_tile())
    )
    # A persistent grid keeps the partial sums few. Wide rows have block_m = 1: at most two programs per SM, whose rows
    # of x and dy stay in L2 until dx is computed.
    programs = min(cdiv(M, block_m), resident * multiprocessors(x.device))
    partial = x.new_empty((programs, sums), dtype=torch.float32)

    def plan() -> Plan:
        tile = (block_m, block_n, stages) if narrow else (block_n, stages)
        return programs, (M, N, *strides, eps, need_dw, need_db, *tile), {"num_warps": warps}

    key = (M, N, strides, x.dtype, weight.dtype, eps, need_dx, need_dw, need_db)
    kernel = _poly_norm_bwd_kernel if narrow else _poly_norm_wide_bwd_kernel
    launch(kernel, key, (dy, x, weight, dx if need_dx else None, partial), plan)
    return dx, partial.sum(0) if sums else partial.view(0)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.bias_shape, ctx.bias_dtype = bias.shape, bias.dtype
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    need_dx, need_dw, need_db, _ = ctx.needs_input_grad
    dx, sums = _poly_norm_bwd(dy, x, weight, ctx.eps, need_dx, need_dw, need_db)
    if weight.dtype == ctx.bias_dtype:
        sums = sums.to(weight.dtype)
    dw = sums[:3].to(weight.dtype) if need_dw else None
    db = sums[-1].to(ctx.bias_dtype).view(ctx.bias_shape) if need_db else None
    return dx if need_dx else None, dw, db


_poly_norm = differentiable(_poly_norm_fwd, _setup_context, _backward)


EXAMPLES = {
    "poly_norm": Example("Norms", (ROWS, (3,), ()), poly_norm),
}
