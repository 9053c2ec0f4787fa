"""A residual behind a gate: y = x + sigmoid(gate) · f; or the gated f alone.

Source: LiGR, https://arxiv.org/abs/2502.03417; the gate is that of highway networks, https://arxiv.org/abs/1505.00387
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
from tigon.ops.gated import laid_out, unit_of


def gated_residual(x: Tensor | None, gate: Tensor, f: Tensor) -> Tensor:
    """x + sigmoid(gate) · f, computed in fp32 and rounded once.

    Args:
        x: (..., N), any float dtype: the stream that is added to. None for sigmoid(gate) · f alone.
        gate: (..., N), any float dtype: logits.
        f: gate's shape and dtype: what is added.
    Returns: (..., N) in the promoted dtype of x and f.
    Raises: ValueError where they differ in shape or device, or gate and f in dtype.

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


@jit
def _sigmoid(g):
    """sigmoid(g) and its slope: from exp(-|g|), since 1 - s would lose all digits where s is near 1."""
    e = tl.exp(-tl.abs(g))
    r = 1.0 / (1.0 + e)
    return tl.where(g >= 0, r, e * r), e * r * r


@jit
def _gated_residual_fwd_kernel(
    g_ptr, f_ptr, x_ptr, y_ptr, N, stride_gm, stride_fm, stride_xm, stride_ym, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # A flat grid over (row, block of columns), as that of the gated units: dense tensors arrive as one long row. N and
    # the strides count UNIT elements, which tells the compiler that they are multiples of it.
    blocks = tl.cdiv(N, BLOCK // UNIT)
    row = (tl.program_id(0) // blocks).to(tl.int64) * UNIT
    # int64: one long row may have more than 2**31 elements.
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N * tl.full((), UNIT, tl.int64)
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + row * stride_fm + cols, mask=mask, other=0.0).to(tl.float32)
    s, _ = _sigmoid(g)
    y = s * f
    # Without a stream its pointer is None, and the kernel has no such load.
    if x_ptr is not None:
        y += tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _gated_residual_bwd_kernel(
    dy_ptr, g_ptr, f_ptr, dg_ptr, df_ptr, N, stride_dym, stride_gm, stride_fm, stride_dgm, stride_dfm,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # dx is dy. dgate = dy · f · s (1 − s), df = dy · s: the sigmoid is computed again, and y is not kept.
    blocks = tl.cdiv(N, BLOCK // UNIT)
    row = (tl.program_id(0) // blocks).to(tl.int64) * UNIT
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N * tl.full((), UNIT, tl.int64)
    dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    s, slope = _sigmoid(g)
    # A frozen input gets no gradient: its pointer is None, and its arithmetic is compiled away.
    if dg_ptr is not None:
        f = tl.load(f_ptr + row * stride_fm + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dg_ptr + row * stride_dgm + cols, (dy * f * slope).to(dg_ptr.dtype.element_ty), mask=mask)
    if df_ptr is not None:
        tl.store(df_ptr + row * stride_dfm + cols, (dy * s).to(df_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(m: int, n: int, device: torch.device) -> tuple[int, int]:
    """Elements of a program, and warps: 16 elements a thread, or 4 where there are fewer programs than processors."""
    if m * cdiv(n, 1024) < multiprocessors(device):
        return 256, 2
    block = min(1024, max(256, next_power_of_2(n)))
    return block, max(1, block // 512)


def _launch(kernel: Any, tensors: tuple[Tensor | None, ...]) -> None:
    """Launch a kernel over tensors of one shape. Dense tensors count as one long row."""
    first = tensors[0]
    assert first is not None
    M, N, strides, tensors = laid_out(tensors, first.shape[-1] if first.dim() else 1)

    def plan() -> Plan:
        unit = unit_of(N, strides)
        block, warps = _tile(M, N, first.device)
        sizes = (None if n is None else n // unit for n in (N, *strides))
        return M * cdiv(N, block), (*sizes, unit, block), {"num_warps": warps}

    # strides holds None for an absent tensor: its absence is part of the key.
    key = (M, N, strides, *[None if t is None else t.dtype for t in tensors])
    launch(kernel, key, tensors, plan)


def _gated_residual_fwd_fake(gate: Tensor, f: Tensor, x: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape, dtype=f.dtype if x is None else torch.promote_types(x.dtype, f.dtype))


# The stream comes last: the first tensor of a launch is there.
@launcher("(Tensor gate, Tensor f, Tensor? x) -> Tensor", _gated_residual_fwd_fake)
def _gated_residual_fwd(gate: Tensor, f: Tensor, x: Tensor | None) -> Tensor:
    y = _gated_residual_fwd_fake(gate, f, x)
    if y.numel():
        _launch(_gated_residual_fwd_kernel, (gate, f, x, y))
    return y


def _gated_residual_bwd_fake(
    dy: Tensor, gate: Tensor, f: Tensor, need_dgate: bool, need_df: bool
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape if need_dgate else 0), f.new_empty(f.shape if need_df else 0)


@launcher(
    "(Tensor dy, Tensor gate, Tensor f, bool need_dgate, bool need_df) -> (Tensor, Tensor)", _gated_residual_bwd_fake
)
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


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    need_dgate, need_df, need_dx = ctx.needs_input_grad
    dgate = df = None
    if need_dgate or need_df:
        gate, f, *_ = ctx.saved_tensors
        dgate, df = _gated_residual_bwd(dy, gate, f, need_dgate, need_df)
    return dgate if need_dgate else None, df if need_df else None, dy.to(ctx.dtype) if need_dx else None


_gated_residual = differentiable(_gated_residual_fwd, _setup_context, _backward, unsaved=(2,))
