"""Gated residual: y = x + sigmoid(gate) · f; or only the gated f.

Source: LiGR, https://arxiv.org/abs/2502.03417; gates as in highway networks, https://arxiv.org/abs/1505.00387
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    check_tensors,
    differentiable,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    tl,
    use_triton,
)
from tigon.ops.acts import sigmoid
from tigon.ops.example import ROWS, Example
from tigon.ops.gated import choose_unit, laid_out


def gated_residual(x: Tensor | None, gate: Tensor, f: Tensor) -> Tensor:
    """x + sigmoid(gate) · f, computed in fp32 and rounded once.

    Args:
        x: (..., N), any float dtype, the residual stream. None: return sigmoid(gate) · f.
        gate: (..., N), any float dtype, logits.
        f: the update, in gate's shape and dtype.
    Returns: (..., N) in x's and f's promoted dtype.
    Raises: ValueError if shapes or devices differ, or if gate's and f's dtypes differ.

    Replaces::

        y = x + torch.sigmoid(gate) * f
    """
    check_tensors("gated_residual", x=x, gate=gate, f=f)
    first, stream = ("gate", gate) if x is None else ("x", x)
    if not stream.dtype.is_floating_point:
        raise ValueError(f"gated_residual: {first} must have a float dtype, got {stream.dtype}.")
    for name, t in (("gate", gate), ("f", f)):
        if t.shape != stream.shape or t.device != stream.device or not t.dtype.is_floating_point:
            raise ValueError(
                f"gated_residual: {name} must be {tuple(stream.shape)} floats on {stream.device}, as {first} is, got "
                f"{tuple(t.shape)} {t.dtype} on {t.device}."
            )
    if gate.dtype != f.dtype:
        raise ValueError(f"gated_residual: f must have gate's dtype {gate.dtype}, got {f.dtype}.")
    if not use_triton(gate, f, x):
        return gated_residual_reference(x, gate, f)
    return _gated_residual(gate, f, x)


def gated_residual_reference(x: Tensor | None, gate: Tensor, f: Tensor) -> Tensor:
    dtype = f.dtype if x is None else torch.promote_types(x.dtype, f.dtype)
    acc = torch.promote_types(dtype, torch.float32)
    gated = torch.sigmoid(gate.to(acc)) * f.to(acc)
    return (gated if x is None else x.to(acc) + gated).to(dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


# A program computes BLOCK columns of a row, on a flat grid over (row, column block), as in `tigon.ops.gated`;
# contiguous tensors arrive as a single long row.
# g, f, x, y: row strides; x is None without a stream. N and the strides count UNIT elements, which shows their
# divisibility to the compiler.
@jit
def _gated_residual_fwd_kernel(
    g_ptr, f_ptr, x_ptr, y_ptr, N, stride_gm, stride_fm, stride_xm, stride_ym, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK // UNIT)
    row = (tl.program_id(0) // blocks).to(tl.int64) * UNIT
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N * tl.full((), UNIT, tl.int64)
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + row * stride_fm + cols, mask=mask, other=0.0).to(tl.float32)
    s, _ = sigmoid(g)
    y = s * f
    if x_ptr is not None:
        y += tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# A program computes BLOCK columns of dgate = dy · f · s (1 − s) and df = dy · s, each unless None; dx is dy. The
# sigmoid is recomputed, y is not saved.
@jit
def _gated_residual_bwd_kernel(
    dy_ptr, g_ptr, f_ptr, dg_ptr, df_ptr, N, stride_dym, stride_gm, stride_fm, stride_dgm, stride_dfm,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK // UNIT)
    row = (tl.program_id(0) // blocks).to(tl.int64) * UNIT
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N * tl.full((), UNIT, tl.int64)
    dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    s, slope = sigmoid(g)
    if dg_ptr is not None:
        f = tl.load(f_ptr + row * stride_fm + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dg_ptr + row * stride_dgm + cols, (dy * f * slope).to(dg_ptr.dtype.element_ty), mask=mask)
    if df_ptr is not None:
        tl.store(df_ptr + row * stride_dfm + cols, (dy * s).to(df_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(m: int, n: int, device: torch.device) -> tuple[int, int]:
    """Return elements per program, and warps: 16 elements per thread, or 4 if there are fewer programs than SMs."""
    if m * cdiv(n, 1024) < multiprocessors(device):
        return 256, 2
    block = min(1024, max(256, next_power_of_2(n)))
    return block, max(1, block // 512)


def _launch(kernel: Any, tensors: tuple[Tensor | None, ...]) -> None:
    """Launch a kernel over tensors with equal shapes. Contiguous tensors form a single long row."""
    first = tensors[0]
    assert first is not None
    M, N, strides, tensors = laid_out(tensors, first.shape[-1] if first.dim() else 1)

    def plan() -> Plan:
        unit = choose_unit(N, strides)
        block, warps = _tile(M, N, first.device)
        sizes = (None if n is None else n // unit for n in (N, *strides))
        return M * cdiv(N, block), (*sizes, unit, block), {"num_warps": warps}

    key = (M, N, strides, *[None if t is None else t.dtype for t in tensors])
    launch(kernel, key, tensors, plan)


def _gated_residual_fwd_fake(gate: Tensor, f: Tensor, x: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape, dtype=f.dtype if x is None else torch.promote_types(x.dtype, f.dtype))


# x comes last, since the first tensor in a launch must not be None.
@launcher(_gated_residual_fwd_fake)
def _gated_residual_fwd(gate: Tensor, f: Tensor, x: Tensor | None) -> Tensor:
    y = _gated_residual_fwd_fake(gate, f, x)
    if y.numel():
        _launch(_gated_residual_fwd_kernel, (gate, f, x, y))
    return y


def _gated_residual_bwd_fake(
    dy: Tensor, gate: Tensor, f: Tensor, need_dgate: bool, need_df: bool
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape if need_dgate else 0), f.new_empty(f.shape if need_df else 0)


@launcher(_gated_residual_bwd_fake)
def _gated_residual_bwd(dy: Tensor, gate: Tensor, f: Tensor, need_dgate: bool, need_df: bool) -> tuple[Tensor, Tensor]:
    dgate, df = _gated_residual_bwd_fake(dy, gate, f, need_dgate, need_df)
    if dy.numel():
        _launch(_gated_residual_bwd_kernel, (dy, gate, f, dgate if need_dgate else None, df if need_df else None))
    return dgate, df


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, f, x = inputs
    ctx.dtype = None if x is None else x.dtype
    ctx.save_for_backward(gate, f)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    need_dgate, need_df, need_dx = ctx.needs_input_grad
    dgate = df = None
    if need_dgate or need_df:
        gate, f, *_ = ctx.saved_tensors
        dgate, df = _gated_residual_bwd(dy, gate, f, need_dgate, need_df)
    return dgate if need_dgate else None, df if need_df else None, dy.to(ctx.dtype) if need_dx else None


_gated_residual = differentiable(_gated_residual_fwd, _setup_context, _backward, unsaved=(2,))


EXAMPLES = {
    "gated_residual": Example("Gated units", (ROWS, ROWS, ROWS), gated_residual),
}
