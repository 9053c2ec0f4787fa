"""Gated RMS norm: y = x / rms(x) · weight · act(gate), or the norm of x · act(gate), over rows or groups of a row.

Source: Dao & Gu 2024, https://arxiv.org/abs/2405.21060 (Mamba-2: the gate before the norm, in groups); Yang et al.
2024, https://arxiv.org/abs/2412.06464 (gated delta nets: the gate after the norm).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    check_tensors,
    differentiable,
    do_not_specialize,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    row_groups,
    shared_memory,
    tl,
    use_triton,
)
from tigon.kernels.tiles.reduce import sum2
from tigon.ops.acts import ACTS, Act, checked_act
from tigon.ops.example import ROWS, WEIGHT, Example
from tigon.ops.rms_norm import CASTS, Cast, _fwd_tile, _out_dtype, default_eps, rms_norm
from tigon.ops.sum_rows import shares, spread, sum_rows

# The widest group that fits the registers of a program, with gate and gradient. Wider groups are normed by `rms_norm`.
MAX_TILE = 8192


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    cast: Cast = "llama",
    act: Act = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    """Scale each row of x to unit root mean square and by weight, and gate it, in one pass.

    Args:
        x: (..., N), any float dtype and strides. Statistics are fp32 (fp64 for fp64).
        gate: (..., N), x's shape, any float dtype; or None for the norm alone.
        weight: (N,), or None for no scale.
        eps, offset: as for `rms_norm`.
        cast: where the result is rounded, as the model families write it:
            "llama"  the normed row is rounded to x's dtype, then scaled; as in Mamba-2, Bamba and Nemotron-H, and as in
                     Qwen3-Next, which rounds the scaled row to the dtype of x · weight before the gate multiplies it.
            "gemma"  everything in fp32, rounded once; as in Kimi Linear and Falcon-H1.
            "none"   as "gemma", to the promoted dtype of x and weight.
        act: the gate's activation, a name in `tigon.ops.acts`: "silu", "sigmoid", …
        norm_before_gate: norm(x) · act(gate); if False, norm(x · act(gate)). Mamba's argument of that name.
        group_size: the norm is taken over each group_size numbers of a row; over the whole row by default.
    Returns: (..., N), contiguous, in x's dtype; in `rms_norm`'s dtype for this cast if no gate follows the norm.
    Raises: ValueError for shapes that differ, a group_size that does not divide N, an unknown cast or act.

    Replaces (cast="llama")::

        variance = x.float().pow(2).mean(-1, keepdim=True)
        y = weight * (x.float() * torch.rsqrt(variance + eps)).to(x.dtype)
        y = (y * F.silu(gate.float())).to(x.dtype)

    and, with norm_before_gate=False and group_size=n::

        h = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, n))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        y = weight * h.flatten(-2).to(x.dtype)
    """
    _check(x, gate, weight, cast, act, group_size)
    if eps is None:
        eps = default_eps(x.dtype)
    width = x.shape[-1] if group_size is None else group_size
    options = eps, offset, cast, act, norm_before_gate and gate is not None, width
    if not use_triton(x, gate, weight):
        return _compose(_normalise, x, gate, weight, *options)
    if width > MAX_TILE:
        return _compose(rms_norm, x, gate, weight, *options)
    return _gated_rms_norm(x, gate, weight, *options)


def _check(x: Tensor, gate: Tensor | None, weight: Tensor | None, cast: str, act: str, group_size: int | None) -> None:
    check_tensors("gated_rms_norm", x=x, gate=gate, weight=weight)
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise ValueError(f"gated_rms_norm: x must be (..., N) floats, got {tuple(x.shape)} {x.dtype}.")
    if gate is not None and (gate.shape != x.shape or not gate.dtype.is_floating_point or gate.device != x.device):
        raise ValueError(
            f"gated_rms_norm: gate must be floats of x's shape {tuple(x.shape)} on {x.device}, got "
            f"{tuple(gate.shape)} {gate.dtype} on {gate.device}."
        )
    N = x.shape[-1]
    if weight is not None and (weight.shape != (N,) or not weight.dtype.is_floating_point):
        raise ValueError(
            f"gated_rms_norm: weight must be ({N},) floats, the last dimension of x {tuple(x.shape)}, got "
            f"{tuple(weight.shape)} {weight.dtype}."
        )
    if cast not in CASTS:
        raise ValueError(f"gated_rms_norm: cast must be one of {CASTS}, got {cast!r}.")
    checked_act("gated_rms_norm", act)
    if group_size is not None and (group_size < 1 or N % group_size):
        raise ValueError(f"gated_rms_norm: group_size must divide {N}, the last dimension of x, got {group_size}.")


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor | None, weight: Tensor | None = None, *, eps: float | None = None, offset: float = 0.0,
    cast: str = "llama", act: str = "silu", norm_before_gate: bool = True, group_size: int | None = None,
) -> Tensor:  # fmt: skip
    width = x.shape[-1] if group_size is None else group_size
    eps = default_eps(x.dtype) if eps is None else eps
    gate_follows = norm_before_gate and gate is not None
    return _compose(_normalise, x, gate, weight, eps, offset, cast, act, gate_follows, width)


def _normalise(x: Tensor, *, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _compose(
    norm: Callable[..., Tensor], x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, offset: float,
    cast: str, act: str, gate_follows: bool, width: int,
) -> Tensor:  # fmt: skip
    """The steps one by one. norm: divides rows in fp32 or fp64 by their root mean square."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a = None if gate is None else ACTS[act].value(gate.to(wide))
    y = x.to(wide) if a is None or gate_follows else x.to(wide) * a
    y = norm(y.unflatten(-1, (-1, width)), eps=eps).flatten(-2) if y.numel() else y
    if cast == "llama":
        y = y.to(x.dtype)
    if weight is not None:
        # With "llama" PyTorch multiplies bf16 in fp32 and rounds once. An offset is added in at least fp32.
        scale = weight
        if cast != "llama" or offset:
            scale = weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
        y = y * scale
    if a is not None and gate_follows:
        return (y * a).to(x.dtype).contiguous()
    return y.to(_out_dtype(x.dtype, weight, cast)).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


# A program: BLOCK_M rows of one group, in registers.
#   x, gate     (M, G · N); row i starts at (i // inner) · stride_o + (i % inner) · stride_i, with separate strides for
#               x (xo, xi) and gate (go, gi)
#   w, y        (G · N,) or None; (M, G · N) dense
#   FOLLOWS     the gate follows the norm; without a gate (None) it does not
#   ROUND       Llama's order: x · rstd is rounded to x's dtype before the weight scales it; SCALED: so is the product
#               with the weight, before the gate
@jit
@do_not_specialize("M")
def _gated_rms_norm_fwd_kernel(
    x_ptr, g_ptr, w_ptr, y_ptr, M, N, G, inner, stride_xo, stride_xi, inner_g, stride_go, stride_gi, eps, offset,
    ACT: tl.constexpr, FOLLOWS: tl.constexpr, ROUND: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) % G * N
    rows = tl.program_id(0) // G * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    # int64: row * stride reaches 2**31 at 512k tokens of width 4096.
    x_at = (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi + start
    x = tl.load(x_ptr + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if g_ptr is not None:
        g_at = (rows // inner_g).to(tl.int64) * stride_go + (rows % inner_g).to(tl.int64) * stride_gi + start
        a, _ = ACT(tl.load(g_ptr + g_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32))
        if not FOLLOWS:
            x = x * a
    y = x * tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None]
    if ROUND:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if w_ptr is not None:
        y = y * (tl.load(w_ptr + start + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
    if SCALED:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if FOLLOWS:
        y = y * a
    y_at = rows.to(tl.int64)[:, None] * G * N + start + cols[None, :]
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


# Persistent grid, num_programs / G programs per group: each takes every such tile of BLOCK_M rows of its group, and
# keeps a partial dW in registers.
#   dy          (M, G · N) with strides as in the forward pass; dx, dg dense, None if not needed
#   dw          (programs / G, G · N) fp32 partial sums, added by sum_rows in a fixed order; a single program per group
#               writes dW itself
#   RELOAD      the widest rows leave no registers for the weight: it is loaded for every row
#   STAGES      tiles prefetched into shared memory
# With u = x or x · a, v = dy · w · a or dy · w, by the order, and û = u · rstd: du = (v − û · mean(v · û)) · rstd.
# Norm first: dx = du, dgate = dy · w · û · a'. Gate first: dx = du · a, dgate = du · x · a'.
@jit
@do_not_specialize("M")
def _gated_rms_norm_bwd_kernel(
    dy_ptr, x_ptr, g_ptr, w_ptr, dx_ptr, dg_ptr, dw_ptr, M, N, G, inner_dy, stride_dyo, stride_dyi, inner, stride_xo,
    stride_xi, inner_g, stride_go, stride_gi, eps, offset,
    ACT: tl.constexpr, FOLLOWS: tl.constexpr, ROUND: tl.constexpr, SCALED: tl.constexpr, RELOAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) % G * N
    part = tl.program_id(0) // G
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < N
    if w_ptr is not None and not RELOAD:
        w = (tl.load(w_ptr + start + cols, mask=col_mask, other=0.0).to(tl.float32) + offset)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(part, tl.cdiv(M, BLOCK_M), tl.num_programs(0) // G, num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & col_mask[None, :]
        x_at = (rows // inner).to(tl.int64) * stride_xo + (rows % inner).to(tl.int64) * stride_xi + start
        dy_at = (rows // inner_dy).to(tl.int64) * stride_dyo + (rows % inner_dy).to(tl.int64) * stride_dyi + start
        # Columns beyond N need no mask below: x and dy are 0 there, and every term contains x or dy.
        x = tl.load(x_ptr + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if w_ptr is not None and RELOAD:
            w = (tl.load(w_ptr + start + cols, mask=col_mask, other=0.0).to(tl.float32) + offset)[None, :]
        u, dh = x, dy
        if g_ptr is not None:
            g_at = (rows // inner_g).to(tl.int64) * stride_go + (rows % inner_g).to(tl.int64) * stride_gi + start
            g = tl.load(g_ptr + g_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            a, slope = ACT(g)
            if FOLLOWS:
                dh = dy * a
            else:
                u = x * a
        v = dh if w_ptr is None else dh * w
        squares, products = sum2(u * u, v * u)
        rstd = tl.rsqrt(squares / N + eps)[:, None]
        xhat = u * rstd
        rounded = xhat.to(x_ptr.dtype.element_ty).to(tl.float32) if ROUND else xhat
        if dw_ptr is not None:
            dw += dh * rounded
        at = rows.to(tl.int64)[:, None] * G * N + start + cols[None, :]
        du = (v - xhat * (products[:, None] * rstd / N)) * rstd
        if dx_ptr is not None:
            dx = du if FOLLOWS or g_ptr is None else du * a
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dg_ptr is not None:
            if FOLLOWS:
                h = rounded if w_ptr is None else rounded * w
                if SCALED:
                    h = h.to(x_ptr.dtype.element_ty).to(tl.float32)
                dg = dy * h * slope
            else:
                dg = du * x * slope
            tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        out = tl.sum(dw, 0).to(dw_ptr.dtype.element_ty)
        tl.store(dw_ptr + part.to(tl.int64) * G * N + start + cols, out, mask=col_mask)


# --------------------------------------------------------------------------------------------------------- launches


@functools.cache
def _bwd_tile(n: int, itemsize: int, shared: int) -> tuple[int, int, int, int, int]:
    """Rows, columns, warps, stages and programs per SM.

    A thread has 16 numbers each of x, gate, dy and the partial dW; as many of the next two tiles are loaded meanwhile,
    where 3 inputs · 3 stages fit shared memory.
    """
    block_n = next_power_of_2(n)
    numbers = max(2048, block_n)
    warps = numbers // 512
    resident = max(1, 8 // warps)
    stages = 3 if resident * (9 * numbers * itemsize + 4096) <= shared else 1
    return numbers // block_n, block_n, warps, stages, resident


def _order(x: Tensor, weight: Tensor | None, offset: float, cast: str, gate_follows: bool) -> tuple[bool, bool, bool]:
    """FOLLOWS, ROUND and SCALED."""
    rounds = cast == "llama"
    scaled = rounds and gate_follows and weight is not None and weight.dtype == x.dtype and not offset
    return gate_follows, rounds, scaled


def _gate_rows(gate: Tensor | None) -> tuple[Any, int, int, int]:
    return (None, 1, 0, 0) if gate is None else row_groups(gate)


_OPTIONS = "float eps, float offset, str cast, str act, bool gate_follows, SymInt width"


def _gated_rms_norm_fwd_fake(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    cast, _, gate_follows, _ = options[2:]
    return x.new_empty(x.shape, dtype=x.dtype if gate_follows else _out_dtype(x.dtype, weight, cast))


@launcher(_gated_rms_norm_fwd_fake, rest=_OPTIONS)
def _gated_rms_norm_fwd(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    eps, offset, cast, act, gate_follows, width = options
    y = _gated_rms_norm_fwd_fake(x, gate, weight, *options)
    if y.numel() == 0:
        return y
    G = y.shape[-1] // width
    M = y.numel() // y.shape[-1]
    order = _order(x, weight, offset, cast, gate_follows)
    (x, *strides), (gate, *strides_g) = row_groups(x), _gate_rows(gate)
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()

    def plan() -> Plan:
        block_m, block_n, warps = _fwd_tile(width)
        arguments = (M, width, G, *strides, *strides_g, eps, offset, ACTS[act].tile, *order, block_m, block_n)
        return cdiv(M, block_m) * G, arguments, {"num_warps": warps}

    dtypes = x.dtype, None if gate is None else gate.dtype, None if weight is None else weight.dtype, y.dtype
    key = (M, width, G, eps, offset, act, order, dtypes, *strides, *strides_g)
    launch(_gated_rms_norm_fwd_kernel, key, (x, gate, weight, y), plan)
    return y


def _gated_rms_norm_bwd_fake(
    dy: Tensor, wants: list[bool], x: Tensor, gate: Tensor | None, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    given = x, x if gate is None else gate, x if weight is None else weight
    dx, dgate, dw = (t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip(given, wants, strict=True))
    return dx, dgate, dw


@launcher(_gated_rms_norm_bwd_fake, rest=_OPTIONS)
def _gated_rms_norm_bwd(
    dy: Tensor, wants: list[bool], x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """wants: for dx, dgate and dweight; unwanted gradients are empty."""
    eps, offset, cast, act, gate_follows, width = options
    dx, dgate, dw = _gated_rms_norm_bwd_fake(dy, wants, x, gate, weight)
    if x.numel() == 0:
        return dx, dgate, dw.zero_()
    G = x.shape[-1] // width
    M = x.numel() // x.shape[-1]
    order = _order(x, weight, offset, cast, gate_follows)
    (dy, *strides_dy), (x, *strides), (gate, *strides_g) = row_groups(dy), row_groups(x), _gate_rows(gate)
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    block_m, block_n, warps, stages, resident = _bwd_tile(width, x.element_size(), shared_memory(x.device))
    block_m, warps, stages = spread(M * G, block_m, block_n, x.device) or (block_m, warps, stages)
    tiles = cdiv(M, block_m)
    parts = min(tiles, max(1, resident * multiprocessors(x.device) // G))
    partial = shares(parts, dw)[0] if wants[2] else None

    def plan() -> Plan:
        sizes = (M, width, G, *strides_dy, *strides, *strides_g)
        tile = (block_n > 4096, block_m, block_n, 1 if tiles == 1 else stages)
        return parts * G, (*sizes, eps, offset, ACTS[act].tile, *order, *tile), {"num_warps": warps}

    dtypes = dy.dtype, x.dtype, None if gate is None else gate.dtype, None if weight is None else weight.dtype
    key = (M, width, G, eps, offset, act, order, dtypes, *wants, *strides_dy, *strides, *strides_g)
    results = (dx if wants[0] else None, dgate if wants[1] else None, partial)
    launch(_gated_rms_norm_bwd_kernel, key, (dy, x, gate, weight, *results), plan)
    if partial is not None:
        sum_rows(partial, dw)
    return dx, dgate, dw


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gate, weight, *ctx.options = inputs
    ctx.save_for_backward(x, gate, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wants = list(ctx.needs_input_grad[:3])
    grads = _gated_rms_norm_bwd(dy, wants, *ctx.saved_tensors, *ctx.options)
    return tuple([g if wanted else None for g, wanted in zip(grads, wants, strict=True)])


_gated_rms_norm = differentiable(_gated_rms_norm_fwd, _setup_context, _backward)


EXAMPLES = {
    "gated_rms_norm": Example("Norms", (ROWS, ROWS, WEIGHT), gated_rms_norm),
}
