"""Gated linear units: y = act(gate) · up, with act one of silu (SwiGLU) and gelu (GEGLU).

Source: Shazeer 2020, https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.backend import cdiv, differentiable, launch, launcher, rows_of, tl, triton, use_triton

GELU = {"tanh": "gelu_tanh", "none": "gelu"}


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) · up, computed in fp32 and rounded once.

    Args:
        gate: (..., N), any float dtype; or (..., 2N) holding gate and up side by side when up is None.
        up: (..., N), gate's dtype.
    Returns: (..., N) in gate's dtype.
    Raises: ValueError where gate and up differ in shape, dtype or device, or a packed width is odd.

    Replaces::

        y = F.silu(gate) * up                       # swiglu(gate, up)
        gate, up = gate_up.chunk(2, dim=-1)         # swiglu(gate_up)
    """
    return _checked("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """gelu(gate) · up, computed in fp32 and rounded once.

    Args:
        gate, up: as for `swiglu`.
        approximate: "tanh" or "none" (the error function), as in `torch.nn.functional.gelu`.
    Returns: (..., N) in gate's dtype.
    Raises: ValueError as `swiglu`, and for another `approximate`.

    Replaces::

        y = F.gelu(gate, approximate="tanh") * up
    """
    if approximate not in GELU:
        raise ValueError(f"geglu: approximate must be 'tanh' or 'none', got {approximate!r}.")
    return _checked("geglu", gate, up, GELU[approximate])


def _checked(name: str, gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    if not gate.dtype.is_floating_point:
        raise ValueError(f"{name}: gate must have a float dtype, got {gate.dtype}.")
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"{name}: a packed gate_up must have an even last dimension, gate and up side by side, "
                f"got shape {tuple(gate.shape)}."
            )
    elif up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
        raise ValueError(
            f"{name}: up must match gate, {tuple(gate.shape)} {gate.dtype} on {gate.device}, "
            f"got {tuple(up.shape)} {up.dtype} on {up.device}."
        )
    if not use_triton(gate, up):
        return gated_reference(gate, up, act)
    return _gated(gate, up, act)


def gated_reference(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    acc = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(acc)
    a = F.silu(g) if act == "silu" else F.gelu(g, approximate="tanh" if act == "gelu_tanh" else "none")
    return (a * up.to(acc)).to(gate.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _act(g, ACT: tl.constexpr):
    """act(g) and its derivative. Both gelus and silu are g · s(g) with s a sigmoid or the normal distribution."""
    if ACT == "gelu":
        s = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        ds = 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        if ACT == "gelu_tanh":
            # 0.5 · (1 + tanh(z / 2)) is sigmoid(z): one exponential, no cancellation for negative g.
            square = g * g
            z = g * (1.5957691216057308 + 0.07135481282970877 * square)
            dz = 1.5957691216057308 + 0.2140644384891263 * square
        else:
            z = g
            dz = 1.0
        # From exp(-|z|): 1 - s would lose all digits where s is near 1, and g · dz blows that up.
        e = tl.exp(-tl.abs(z))
        r = 1.0 / (1.0 + e)
        s = tl.where(z >= 0, r, e * r)
        ds = e * r * r * dz
    return g * s, s + g * ds


@triton.jit
def _gated_fwd_kernel(g_ptr, u_ptr, y_ptr, N, stride_gm, stride_um, ACT: tl.constexpr, BLOCK: tl.constexpr):
    # A flat grid over (row, block of columns): contiguous inputs arrive as one long row, and no row is padded.
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * stride_um + cols, mask=mask, other=0.0).to(tl.float32)
    a, _ = _act(g, ACT)
    tl.store(y_ptr + row * N + cols, (a * u).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_bwd_kernel(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, y_ptr, N, stride_dym, stride_gm, stride_um, stride_dgm, stride_dum, stride_ym,
    ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    a, da = _act(g, ACT)
    u = tl.load(u_ptr + row * stride_um + cols, mask=mask, other=0.0).to(tl.float32)
    if y_ptr is not None:  # the product again, for a consumer that did not keep it; y may lie where dy did
        tl.store(y_ptr + row * stride_ym + cols, (a * u).to(y_ptr.dtype.element_ty), mask=mask)
    if dg_ptr is not None:
        tl.store(dg_ptr + row * stride_dgm + cols, (dy * u * da).to(dg_ptr.dtype.element_ty), mask=mask)
    if du_ptr is not None:
        tl.store(du_ptr + row * stride_dum + cols, (dy * a).to(du_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches

BLOCK = 1024


def _warps(act: str) -> int:
    return 2 if act == "gelu" else 4  # erf is long: more independent work a thread hides it


def _split(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The (M, N) views of gate and up."""
    if up is None:
        packed = rows_of(gate)
        return tuple(packed.chunk(2, dim=-1))  # type: ignore[return-value]
    return rows_of(gate), rows_of(up)


def _grid(*tensors: Tensor | None) -> tuple[int, int]:
    """Programs and columns a row: dense tensors count as one long row."""
    present = [t for t in tensors if t is not None]
    M, N = present[0].shape
    if all(t.is_contiguous() for t in present):
        M, N = 1, M * N
    return M * cdiv(N, BLOCK), N


def _gated_fwd_fake(gate, up, act):
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


@launcher("(Tensor gate, Tensor? up, str act) -> Tensor", _gated_fwd_fake)
def _gated_fwd(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    y = _gated_fwd_fake(gate, up, act)
    if y.numel():
        g, u = _split(gate, up)
        programs, N = _grid(g, u)
        arguments = (N, g.stride(0), u.stride(0), act, BLOCK)
        plan = programs, arguments, {"num_warps": _warps(act)}
        launch(_gated_fwd_kernel, (programs, arguments, g.dtype), (g, u, y), lambda: plan)
    return y


def _gated_bwd_fake(dy, gate, up, act, need_dgate, need_dup):
    dgate = gate.new_empty(gate.shape) if need_dgate else gate.new_empty(0)
    return dgate, gate.new_empty(gate.shape) if need_dup and up is not None else gate.new_empty(0)


@launcher(
    "(Tensor dy, Tensor gate, Tensor? up, str act, bool need_dgate, bool need_dup) -> (Tensor, Tensor)",
    _gated_bwd_fake,
)
def _gated_bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, need_dgate: bool, need_dup: bool
) -> tuple[Tensor, Tensor]:
    dgate, dup = _gated_bwd_fake(dy, gate, up, act, need_dgate, need_dup)
    gated_rows_backward(dy, gate, up, act, dgate if need_dgate else None, dup if need_dup else None, None)
    return dgate, dup


def gated_rows_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, dgate: Tensor | None, dup: Tensor | None, y: Tensor | None
) -> None:
    """Write the gradients that are given room, and y = act(gate) · up; y may be dy, where that is scratch."""
    if not dy.numel():
        return
    rows, out = rows_of(dy), None if y is None else rows_of(y)
    g, u = _split(gate, up)
    dg: Tensor | None
    du: Tensor | None
    if up is None:
        dg, du = (None, None) if dgate is None else _split(dgate, None)
    else:
        dg, du = (None if t is None else rows_of(t) for t in (dgate, dup))
    tensors = (rows, g, u, dg, du, out)
    programs, N = _grid(*tensors)
    strides = (0 if t is None else t.stride(0) for t in tensors)
    arguments = (N, *strides, act, BLOCK)
    key = (programs, arguments, g.dtype, *(t is None for t in tensors))
    launch(_gated_bwd_kernel, key, tensors, lambda: (programs, arguments, {"num_warps": _warps(act)}))


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    gate, up, ctx.act = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    gate, up = ctx.saved_tensors
    need_dgate, need_dup = ctx.needs_input_grad[:2]
    dgate, dup = _gated_bwd(dy, gate, up, ctx.act, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None, None


_gated = differentiable(_gated_fwd, _setup_context, _backward)
