"""Gated linear units: y = act(gate) · up, with act one of silu (SwiGLU), gelu (GEGLU), relu (ReGLU), relu² and every
other row of `tigon.ops.acts`.

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

# torch's word for the variant, and the row of `tigon.ops.acts` that computes it.
GELU = {"tanh": "gelu_tanh", "none": "gelu"}


def swiglu(gate: Tensor, up: Tensor | None = None, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> Tensor:
    """silu(gate) · up, computed in fp32 and rounded once.

    Args:
        gate: (..., N), any float dtype; or (..., 2N) holding gate and up side by side when up is None.
        up: (..., N), gate's dtype.
        gate_multiplier, multiplier: multiply gate before the activation, and the result: the multipliers of Falcon-H1.
    Returns: (..., N) in gate's dtype.
    Raises: ValueError where gate and up differ in shape, dtype or device, or a packed width is odd.

    Replaces::

        y = F.silu(gate) * up

    and, for swiglu(gate_up), before it::

        gate, up = gate_up.chunk(2, dim=-1)

    and, with the multipliers::

        y = F.silu(gate * gate_multiplier) * up * multiplier
    """
    return _checked("swiglu", gate, up, "silu", gate_multiplier, multiplier)


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
    Raises: ValueError as `swiglu`, and for another `approximate`.

    Replaces::

        y = F.gelu(gate, approximate="tanh") * up
    """
    if approximate not in GELU:
        raise ValueError(f"geglu: approximate must be 'tanh' or 'none', got {approximate!r}.")
    return _checked("geglu", gate, up, GELU[approximate], gate_multiplier, multiplier)


def reglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    squared: bool = False,
    gate_multiplier: float = 1.0,
    multiplier: float = 1.0,
) -> Tensor:
    """relu(gate) · up, or relu(gate)² · up, computed in fp32 and rounded once. The derivative of relu at 0 is 0.

    Args:
        gate, up, gate_multiplier, multiplier: as for `swiglu`.
        squared: relu(gate)², as BitNet b1.58 has it.
    Returns: (..., N) in gate's dtype.
    Raises: ValueError as `swiglu`.

    Replaces::

        y = F.relu(gate) * up

    and, with squared=True::

        y = F.relu(gate).square() * up
    """
    return _checked("reglu", gate, up, "relu2" if squared else "relu", gate_multiplier, multiplier)


def gated_unit(
    gate: Tensor, up: Tensor | None = None, *, act: Act = "silu", gate_multiplier: float = 1.0, multiplier: float = 1.0
) -> Tensor:
    """act(gate) · up for any activation of `tigon.ops.acts`, computed in fp32 and rounded once.

    Args:
        gate, up, gate_multiplier, multiplier: as for `swiglu`.
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (the square of relu) or "sigmoid".
    Returns: (..., N) in gate's dtype.
    Raises: ValueError as `swiglu`, and for another act.

    Replaces::

        y = F.silu(gate) * up
    """
    return _checked("gated_unit", gate, up, checked_act("gated_unit", act), gate_multiplier, multiplier)


def _checked(name: str, gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float) -> Tensor:
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
        # The torch path, on any device: the kernels below are held against it.
        return gated_reference(gate, up, act, gate_multiplier, multiplier)
    return _gated(gate, up, act, gate_multiplier, multiplier)


def fit_each_other(gate: Tensor, up: Tensor | None) -> bool:
    """Whether a gated unit takes these two, for callers with code of their own for tensors that it refuses."""
    if not gate.dtype.is_floating_point or gate.dim() == 0:
        return False
    if up is None:
        return gate.shape[-1] % 2 == 0
    return up.dtype == gate.dtype and up.shape == gate.shape and up.device == gate.device


def gated_reference(
    gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float = 1.0, multiplier: float = 1.0
) -> Tensor:
    if up is None:
        # Views: torch reads the two halves with the stride of the packed row.
        gate, up = gate.chunk(2, dim=-1)
    acc = torch.promote_types(gate.dtype, torch.float32)
    # A multiplier of 1 is skipped: the multiplication would make, and autograd keep, another tensor of gate's size.
    g = gate.to(acc)
    y = ACTS[act].value(g if gate_multiplier == 1.0 else g * gate_multiplier) * up.to(acc)
    return (y if multiplier == 1.0 else y * multiplier).to(gate.dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _gated_fwd_kernel(
    g_ptr, u_ptr, y_ptr, N, stride_gm, stride_um, stride_ym, gate_multiplier, multiplier,
    ACT: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A flat grid over (row, block of columns): contiguous inputs arrive as one long row, and no row is padded.
    # N and the strides come in units of UNIT elements, which tells the compiler that they are multiples of it.
    # N counts units of UNIT elements, so the block does here as well.
    blocks = tl.cdiv(N, BLOCK // UNIT)
    # The row is multiplied by UNIT, not the stride: strides too are in units, and row · UNIT · stride is the offset in
    # elements, a multiple of UNIT that the compiler sees. Without it the loads would be narrower than 16 bytes.
    row = (tl.program_id(0) // blocks).to(tl.int64) * UNIT
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # int64: contiguous tensors are one row, which may be longer than 2**31.
    # The product with the constant UNIT is what shows the compiler that the mask changes at multiples of it.
    width = N * tl.full((), UNIT, tl.int64)
    mask = cols < width
    # Masked lanes compute act(0), which is finite for every activation, and are not stored.
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    # Before the activation, in fp32: a product in the dtype of gate would be rounded, as Falcon-H1's own code does it.
    if gate_multiplier is not None:  # None stands for 1
        g = g * gate_multiplier
    # The activation is a function of a tile, which the launch passes in and the compiler inlines.
    # The slope is dropped: the compiler removes its arithmetic. One function for both passes cannot drift apart.
    y, _ = ACT(g)
    if PACKED:  # up follows gate in the same row
        # gate and up of a fused projection are read where they lie, in one row of 2N: `width` is N in elements.
        y *= tl.load(g_ptr + width + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    elif u_ptr is not None:  # relu² alone has no second factor
        y *= tl.load(u_ptr + row * stride_um + cols, mask=mask, other=0.0).to(tl.float32)
    if multiplier is not None:
        # After the product, before the one rounding: in fp32, and without a pass of its own over y.
        y = y * multiplier
    # Rounded once, from fp32: eager code rounds after the activation and after each product.
    tl.store(y_ptr + row * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _gated_bwd_kernel(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, y_ptr, N, stride_dym, stride_gm, stride_um, stride_dgm, stride_dum, stride_ym,
    gate_multiplier, multiplier, ACT: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The same flat grid as the forward pass: an element needs no other.
    blocks = tl.cdiv(N, BLOCK // UNIT)
    row = (tl.program_id(0) // blocks).to(tl.int64) * UNIT
    # int64 columns, since the one long row of contiguous tensors may exceed 2**31 elements.
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    width = N * tl.full((), UNIT, tl.int64)
    mask = cols < width
    # All loads come before the first store, as y may lie over dy, and dgate and dup over gate and up.
    dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    if gate_multiplier is not None:
        g = g * gate_multiplier
    # Value and slope are computed again, together: nothing but gate and up is saved.
    a, da = ACT(g)
    if gate_multiplier is not None:
        # The chain rule: d act(m · g) / dg = m · act'(m · g). g itself was scaled before ACT.
        da = da * gate_multiplier
    if multiplier is not None:
        # Folded into value and slope once: dup = dy · a and dgate = dy · u · da both have the factor.
        a = a * multiplier
        da = da * multiplier
    if PACKED:
        u = tl.load(g_ptr + width + row * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    elif u_ptr is not None:
        u = tl.load(u_ptr + row * stride_um + cols, mask=mask, other=0.0).to(tl.float32)
    else:
        # relu² alone has no second factor.
        u = 1.0
    if y_ptr is not None:  # the product again, for a linear layer that did not keep it; y may overwrite dy
        tl.store(y_ptr + row * stride_ym + cols, (a * u).to(y_ptr.dtype.element_ty), mask=mask)
    # A frozen gate or up gets no gradient: its pointer is None, and its arithmetic is compiled away.
    if dg_ptr is not None:
        # dgate = dy · up · act'(gate).
        tl.store(dg_ptr + row * stride_dgm + cols, (dy * u * da).to(dg_ptr.dtype.element_ty), mask=mask)
        # dup = dy · act(gate), in the second half of the same row: one gradient tensor for the packed projection.
        if PACKED:
            du = (dy * a).to(dg_ptr.dtype.element_ty)
            tl.store(dg_ptr + width + row * stride_dgm + cols, du, mask=mask)
    if du_ptr is not None:
        tl.store(du_ptr + row * stride_dum + cols, (dy * a).to(du_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(act: str, m: int, n: int, device: torch.device) -> tuple[int, int]:
    """Elements of a program, and warps. Where arithmetic is slow a thread takes twice the elements."""
    # A few rows leave multiprocessors idle: how long one program takes is how long all take, and a thread of 4 elements
    # is done sooner than one of 16.
    if m * cdiv(n, 1024) < multiprocessors(device):
        return 256, 2
    # At least 256 elements: a warp has 8 a thread, one 16-byte load of 16-bit numbers.
    # Narrow rows of strided tensors get a block of their own width, down to 256.
    block = min(1024, max(256, next_power_of_2(n)))
    # 16 elements a thread in place of 8: while one element's chain of instructions waits, another's can run.
    return block, max(1, block // (512 if ACTS[act].slow else 256))


def laid_out(
    tensors: tuple[Tensor | None, ...], N: int, packed: bool = False
) -> tuple[int, int, tuple[int | None, ...], tuple[Tensor | None, ...]]:
    """Rows, columns, row strides and tensors of elementwise kernels on a flat grid over (row, block of columns).

    The first tensor is there. None for the stride of one that is absent: in a key it tells of the absence.
    """
    # One long row has no padding at the ends of rows, and needs no division by the width.
    if not packed and all(t is None or t.is_contiguous() for t in tensors):
        return 1, tensors[0].numel(), tuple([None if t is None else 0 for t in tensors]), tensors  # type: ignore[union-attr]
    # A view of (M, N) with one row stride; copied only where no such stride exists.
    tensors = tuple([None if t is None else view_rows(t) for t in tensors])
    return tensors[0].shape[0], N, tuple([None if t is None else t.stride(0) for t in tensors]), tensors  # type: ignore[union-attr]


def unit_of(N: int, strides: tuple[int | None, ...]) -> int:
    """How many elements N and the strides are counted by.

    8 elements of bf16 are the 16 bytes of a wide load, but Triton tells the compiler only of multiples of 16. In units
    of 8 elements the compiler sees the others.
    """
    return 8 if math.gcd(N, *(s or 0 for s in strides)) % 16 == 8 else 1


def launch_gated(
    kernel: Any, tensors: tuple[Tensor | None, ...], N: int, act: str, gate_multiplier: float, multiplier: float,
    packed: bool,
) -> None:  # fmt: skip
    """Launch a kernel over tensors of (..., N), or (..., 2N) where packed. Dense tensors count as one long row."""
    M, N, strides, tensors = laid_out(tensors, N, packed)

    def plan() -> Plan:
        unit = unit_of(N, strides)
        # Inside `plan`, which runs once a key: the gcd and the tile cost nothing per call.
        block, warps = _tile(act, M, N, tensors[0].device)  # type: ignore[union-attr]
        # None is a constant to the compiler: without multipliers the kernel has no multiplication, and its bits are
        # those of silu(gate) · up.
        factors = (None if f == 1.0 else f for f in (gate_multiplier, multiplier))
        sizes = (None if n is None else n // unit for n in (N, *strides))
        return M * cdiv(N, block), (*sizes, *factors, ACTS[act].tile, packed, unit, block), {"num_warps": warps}

    # strides holds None for an absent tensor: its absence is part of the key.
    key = (M, N, strides, act, tensors[0].dtype, gate_multiplier, multiplier, packed)  # type: ignore[union-attr]
    launch(kernel, key, tensors, plan)


def _gated_fwd_fake(gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float) -> Tensor:
    # Contiguous whatever strides gate has: the next product reads rows.
    return _dense_like(gate) if up is not None else gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))


def _dense_like(x: Tensor) -> Tensor:
    # A third of the host's time for new_empty(x.shape).
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@launcher(
    "(Tensor gate, Tensor? up, str act, float gate_multiplier, float multiplier) -> Tensor",
    _gated_fwd_fake,
)
def _gated_fwd(gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float) -> Tensor:
    y = _gated_fwd_fake(gate, up, act, gate_multiplier, multiplier)
    if y.numel():
        # A scalar counts as a row of one.
        N = y.shape[-1] if y.dim() else 1
        launch_gated(_gated_fwd_kernel, (gate, up, y), N, act, gate_multiplier, multiplier, up is None)
    return y


def _gated_bwd_fake(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float, need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # An unneeded gradient is an empty tensor, since an op of torch.library cannot return None.
    dgate = _dense_like(gate) if need_dgate else gate.new_empty(0)
    return dgate, _dense_like(gate) if need_dup and up is not None else gate.new_empty(0)


@launcher(
    "(Tensor dy, Tensor gate, Tensor? up, str act, float gate_multiplier, float multiplier, bool need_dgate,"
    " bool need_dup) -> (Tensor, Tensor)",
    _gated_bwd_fake,
)
def _gated_bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float, need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dgate, dup = _gated_bwd_fake(dy, gate, up, act, gate_multiplier, multiplier, need_dgate, need_dup)
    # None, not the empty tensor: the kernel is compiled without what nobody wants.
    room = dgate if need_dgate else None, dup if need_dup and up is not None else None
    gated_backward(dy, gate, up, act, gate_multiplier, multiplier, *room, None)
    return dgate, dup


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, act: str, gate_multiplier: float, multiplier: float,
    dgate: Tensor | None, dup: Tensor | None, y: Tensor | None,
) -> None:  # fmt: skip
    """Write dgate, dup and y = act(gate) · up, each unless it is None; y may be dy if dy is scratch memory."""
    # Not an op of its own: the results go into memory that the caller gives, which a registered op would have to
    # declare.
    if dy.numel():
        N = dy.shape[-1] if dy.dim() else 1
        tensors = (dy, gate, up, dgate, dup, y)
        launch_gated(_gated_bwd_kernel, tensors, N, act, gate_multiplier, multiplier, up is None)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.options = inputs
    # The inputs alone: neither act(gate) nor y is kept here. The linear layer behind saves y for itself, if it has to.
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    gate, up = ctx.saved_tensors
    need_dgate, need_dup, *_ = ctx.needs_input_grad
    dgate, dup = _gated_bwd(dy, gate, up, *ctx.options, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None, None, None, None


_gated = differentiable(_gated_fwd, _setup_context, _backward)
