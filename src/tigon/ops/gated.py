"""Gated linear units: y = act(gate) · up, for act = silu (SwiGLU), gelu (GEGLU), relu (ReGLU), relu² and every other
row in `tigon.ops.acts`.

Source: Shazeer 2020, https://arxiv.org/abs/2002.05202; relu²(gate) · up: BitNet b1.58 2B4T, https://arxiv.org/abs/2504.12285
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    dense_like,
    differentiable,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    tl,
    use_triton,
    view_rows,
)
from tigon.ops.acts import ACTS, Act, checked_act
from tigon.ops.example import ROWS, Example

# torch's `approximate` values, and the rows in `tigon.ops.acts` that compute them.
GELU = {"tanh": "gelu_tanh", "none": "gelu"}


def swiglu(gate: Tensor, up: Tensor | None = None, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> Tensor:
    """silu(gate) · up, computed in fp32 and rounded once.

    Args:
        gate: (..., N), any float dtype; or, if up is None, (..., 2N) with gate and up side by side.
        up: (..., N), gate's dtype.
        gate_multiplier, multiplier: factors for gate before the activation, and for the result, as in Falcon-H1.
    Returns: (..., N) in gate's dtype.
    Raises: ValueError if gate and up differ in shape, dtype or device, or a packed width is odd.

    Replaces::

        y = F.silu(gate) * up

    and, for swiglu(gate_up), before it::

        gate, up = gate_up.chunk(2, dim=-1)

    and, with the multipliers::

        y = F.silu(gate * gate_multiplier) * up * multiplier
    """
    return _run("swiglu", gate, up, "silu", gate_multiplier, multiplier)


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: Literal["tanh", "none"] = "tanh",
    gate_multiplier: float = 1.0,
    multiplier: float = 1.0,
) -> Tensor:
    """gelu(gate) · up, computed in fp32 and rounded once.

    Args:
        gate, up, gate_multiplier, multiplier: as for `swiglu`.
        approximate: "tanh" or "none" (the error function), as in `torch.nn.functional.gelu`.
    Returns: (..., N) in gate's dtype.
    Raises: ValueError as `swiglu`, and for an unknown `approximate`.

    Replaces::

        y = F.gelu(gate, approximate="tanh") * up
    """
    if approximate not in GELU:
        raise ValueError(f"geglu: approximate must be 'tanh' or 'none', got {approximate!r}.")
    return _run("geglu", gate, up, GELU[approximate], gate_multiplier, multiplier)


def reglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    squared: bool = False,
    gate_multiplier: float = 1.0,
    multiplier: float = 1.0,
) -> Tensor:
    """relu(gate) · up, or relu(gate)² · up, computed in fp32 and rounded once. relu's derivative at 0 is 0.

    Args:
        gate, up, gate_multiplier, multiplier: as for `swiglu`.
        squared: relu(gate)², as in BitNet b1.58.
    Returns: (..., N) in gate's dtype.
    Raises: ValueError as `swiglu`.

    Replaces::

        y = F.relu(gate) * up

    and, with squared=True::

        y = F.relu(gate).square() * up
    """
    return _run("reglu", gate, up, "relu2" if squared else "relu", gate_multiplier, multiplier)


def gated_unit(
    gate: Tensor, up: Tensor | None = None, *, act: Act = "silu", gate_multiplier: float = 1.0, multiplier: float = 1.0
) -> Tensor:
    """act(gate) · up for any activation in `tigon.ops.acts`, computed in fp32 and rounded once.

    Args:
        gate, up, gate_multiplier, multiplier: as for `swiglu`.
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (squared relu) or "sigmoid".
    Returns: (..., N) in gate's dtype.
    Raises: ValueError as `swiglu`, and for an unknown act.

    Replaces::

        y = F.silu(gate) * up
    """
    return _run("gated_unit", gate, up, checked_act("gated_unit", act), gate_multiplier, multiplier)


def _run(name: str, gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float) -> Tensor:
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
        return gated_reference(gate, up, act, gate_multiplier, multiplier)
    return _gated(gate, up, act, gate_multiplier, multiplier)


def fit_each_other(gate: Tensor, up: Tensor | None) -> bool:
    """Return whether a gated unit accepts gate and up, for callers with a fallback."""
    if not gate.dtype.is_floating_point or gate.dim() == 0:
        return False
    if up is None:
        return gate.shape[-1] % 2 == 0
    return up.dtype == gate.dtype and up.shape == gate.shape and up.device == gate.device


def gated_reference(
    gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float = 1.0, multiplier: float = 1.0
) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    acc = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(acc)
    y = ACTS[act].value(g if gate_multiplier == 1.0 else g * gate_multiplier) * up.to(acc)
    return (y if multiplier == 1.0 else y * multiplier).to(gate.dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


# One program computes BLOCK columns of a row, on a flat grid over (row, column block); contiguous tensors arrive as a
# single long row.
# g, u, y: gate, up and result with row strides; u is None with PACKED (up follows gate in the same row, 2N) and for
# relu², which has no second factor. Multipliers: None for 1.
# N and the strides count UNIT elements. Triton tells the compiler which arguments are multiples of 16, but not of 8,
# the bf16 elements in a 16-byte load. Multiplying by the constant UNIT in the kernel makes the divisibility visible;
# without UNIT the loads would be narrower.
# ACT: tile function that returns value and slope, shared by both passes; the compiler drops the unused slope.
@jit
def _gated_fwd_kernel(
    g_ptr, u_ptr, y_ptr, N, stride_gm, stride_um, stride_ym, gate_multiplier, multiplier,
    ACT: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK // UNIT)
    row = (tl.program_id(0) // blocks).to(tl.int64) * UNIT
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    width = N * tl.full((), UNIT, tl.int64)
    mask = cols < width
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    # In fp32: Falcon-H1's own code rounds this product to gate's dtype.
    if gate_multiplier is not None:
        g = g * gate_multiplier
    y, _ = ACT(g)
    if PACKED:
        y *= tl.load(g_ptr + width + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    elif u_ptr is not None:
        y *= tl.load(u_ptr + row * stride_um + cols, mask=mask, other=0.0).to(tl.float32)
    if multiplier is not None:
        y = y * multiplier
    tl.store(y_ptr + row * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# One program computes BLOCK columns of a row: dgate = dy · up · act'(gate) and dup = dy · act(gate); grid and UNIT as
# in the forward kernel. Only gate and up are saved.
# Outputs that are None are skipped: dg (with PACKED also dup, in the row's second half), du, and y = act(gate) · up,
# for a linear layer that did not save the product.
# y may overwrite dy, and dg and du may overwrite gate and up: all loads come before the first store.
@jit
def _gated_bwd_kernel(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, y_ptr, N, stride_dym, stride_gm, stride_um, stride_dgm, stride_dum, stride_ym,
    gate_multiplier, multiplier, ACT: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK // UNIT)
    row = (tl.program_id(0) // blocks).to(tl.int64) * UNIT
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    width = N * tl.full((), UNIT, tl.int64)
    mask = cols < width
    # All loads come before the first store: outputs may alias inputs.
    dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    if gate_multiplier is not None:
        g = g * gate_multiplier
    a, da = ACT(g)
    if gate_multiplier is not None:
        da = da * gate_multiplier
    if multiplier is not None:
        a = a * multiplier
        da = da * multiplier
    if PACKED:
        u = tl.load(g_ptr + width + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    elif u_ptr is not None:
        u = tl.load(u_ptr + row * stride_um + cols, mask=mask, other=0.0).to(tl.float32)
    else:
        u = 1.0
    if y_ptr is not None:
        tl.store(y_ptr + row * stride_ym + cols, (a * u).to(y_ptr.dtype.element_ty), mask=mask)
    if dg_ptr is not None:
        tl.store(dg_ptr + row * stride_dgm + cols, (dy * u * da).to(dg_ptr.dtype.element_ty), mask=mask)
        if PACKED:
            du = (dy * a).to(dg_ptr.dtype.element_ty)
            tl.store(dg_ptr + width + row * stride_dgm + cols, du, mask=mask)
    if du_ptr is not None:
        tl.store(du_ptr + row * stride_dum + cols, (dy * a).to(du_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(act: str, m: int, n: int, device: torch.device) -> tuple[int, int]:
    """Return elements per program, and warps. Slow activations have twice the elements per thread."""
    # With few rows SMs are idle, and a single program's latency counts: a thread with 4 elements finishes sooner than
    # one with 16.
    if m * cdiv(n, 1024) < multiprocessors(device):
        return 256, 2
    # At least 256 elements: 8 per thread in a warp, a 16-byte load for 16-bit dtypes. Narrow strided rows get a block
    # of their own width, down to 256.
    block = min(1024, max(256, next_power_of_2(n)))
    return block, max(1, block // (512 if ACTS[act].slow else 256))


def laid_out(
    tensors: tuple[Tensor | None, ...], N: int, packed: bool = False
) -> tuple[int, int, tuple[int | None, ...], tuple[Tensor | None, ...]]:
    """Return rows, columns, row strides and tensors for elementwise kernels on a flat grid over (row, column block).

    `tensors[0]` is never None. Absent tensors have stride None, which also distinguishes them in the cache key.
    """
    if not packed and all(t is None or t.is_contiguous() for t in tensors):
        return 1, tensors[0].numel(), tuple([None if t is None else 0 for t in tensors]), tensors  # type: ignore[union-attr]
    tensors = tuple([None if t is None else view_rows(t) for t in tensors])
    return tensors[0].shape[0], N, tuple([None if t is None else t.stride(0) for t in tensors]), tensors  # type: ignore[union-attr]


def choose_unit(N: int, strides: tuple[int | None, ...]) -> int:
    """Return the elements per unit of N and the strides: 8 if all are multiples of 8 but not all of 16, else 1."""
    return 8 if math.gcd(N, *(s or 0 for s in strides)) % 16 == 8 else 1


def launch_gated(
    kernel: Any, tensors: tuple[Tensor | None, ...], N: int, act: str, gate_multiplier: float, multiplier: float,
    packed: bool,
) -> None:  # fmt: skip
    """Launch a kernel over (..., N) tensors, or (..., 2N) if packed. Contiguous tensors form a single long row."""
    M, N, strides, tensors = laid_out(tensors, N, packed)

    def plan() -> Plan:
        unit = choose_unit(N, strides)
        block, warps = _tile(act, M, N, tensors[0].device)  # type: ignore[union-attr]
        factors = (None if f == 1.0 else f for f in (gate_multiplier, multiplier))
        sizes = (None if n is None else n // unit for n in (N, *strides))
        return M * cdiv(N, block), (*sizes, *factors, ACTS[act].tile, packed, unit, block), {"num_warps": warps}

    key = (M, N, strides, act, tensors[0].dtype, gate_multiplier, multiplier, packed)  # type: ignore[union-attr]
    launch(kernel, key, tensors, plan)


def _gated_fwd_fake(gate: Tensor, up: Tensor | None, *_: Any) -> Tensor:
    # Contiguous for any strides of gate: the next product reads rows.
    return dense_like(gate) if up is not None else gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))


@launcher(_gated_fwd_fake)
def _gated_fwd(gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float) -> Tensor:
    y = _gated_fwd_fake(gate, up, act, gate_multiplier, multiplier)
    if y.numel():
        N = y.shape[-1] if y.dim() else 1
        launch_gated(_gated_fwd_kernel, (gate, up, y), N, act, gate_multiplier, multiplier, up is None)
    return y


def _gated_bwd_fake(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float, need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dgate = dense_like(gate) if need_dgate else gate.new_empty(0)
    return dgate, dense_like(gate) if need_dup and up is not None else gate.new_empty(0)


@launcher(_gated_bwd_fake)
def _gated_bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float, need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dgate, dup = _gated_bwd_fake(dy, gate, up, act, gate_multiplier, multiplier, need_dgate, need_dup)
    room = dgate if need_dgate else None, dup if need_dup and up is not None else None
    gated_backward(dy, gate, up, act, gate_multiplier, multiplier, *room, None)
    return dgate, dup


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float,
    dgate: Tensor | None, dup: Tensor | None, y: Tensor | None,
) -> None:  # fmt: skip
    """Write dgate, dup and y = act(gate) · up, except those that are None; y may be dy if dy is scratch memory."""
    # Not a registered op, which would have to declare that it mutates the caller's memory.
    if dy.numel():
        N = dy.shape[-1] if dy.dim() else 1
        tensors = (dy, gate, up, dgate, dup, y)
        launch_gated(_gated_bwd_kernel, tensors, N, act, gate_multiplier, multiplier, up is None)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.options = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    need_dgate, need_dup, *_ = ctx.needs_input_grad
    dgate, dup = _gated_bwd(dy, gate, up, *ctx.options, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None


_gated = differentiable(_gated_fwd, _setup_context, _backward)


EXAMPLES = {
    "swiglu": Example("Gated units", (ROWS, ROWS), swiglu),
    "geglu": Example("Gated units", (ROWS, ROWS), geglu),
    "reglu": Example("Gated units", (ROWS, ROWS), reglu),
}
