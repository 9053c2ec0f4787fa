"""Gated unit and the linear layer that consumes it, without saving their product: y = (act(gate) · up) Wᵀ + b.

The product act(gate) · up is the widest activation in a transformer layer, 3.5 times the hidden width in Llama. PyTorch
saves the product for a single use, W's gradient. Here the backward pass recomputes the product in the kernel that reads
gate and up for their gradients anyway. That saves a tensor, and costs writing the product once more.

    backward, inplace=True     dy W → scratch;  gate, up, scratch → dgate, dup, act(gate) · up, in the same memory

With `inplace` no other tensor with that width exists beside gate, up and the scratch.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import (
    autocast_device,
    autocast_dtype,
    check_tensors,
    differentiable,
    is_graph_retained,
    is_traced,
    launcher,
    load_tensors,
    make_function,
    save_tensors,
    unknown_keyword,
    use_triton,
)
from tigon.ops.acts import Act, checked_act
from tigon.ops.example import ROWS, Example
from tigon.ops.gated import _gated_fwd, gated_backward, gated_reference


def gated_linear(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, act: Act = "silu",
    inplace: bool = False, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """(act(gate) · up) Wᵀ + bias, saving only gate and up for the backward pass.

    Args:
        gate: (..., N); or, if up is None, (..., 2N) with gate and up side by side.
        up: (..., N), gate's dtype, or None.
        weight: (M, N), gate's dtype; under autocast all are cast, as by `F.linear`.
        bias: (M,), gate's dtype, or None.
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (squared relu) or "sigmoid".
        inplace: the backward pass overwrites gate and up with their gradients, so no other code may read them. Ignored
            with `retain_graph=True` and under torch.compile.
    Returns: (..., M) in gate's dtype.
    Raises: ValueError for invalid shapes, dtypes or act.

    Replaces::

        y = F.linear(F.silu(gate) * up, weight, bias)
    """
    if unknown:
        raise unknown_keyword("gated_linear", unknown, {})
    return gated_linear_saved_by(None, gate, up, weight, bias, act, inplace)


def gated_linear_saved_by(
    hooks: tuple[Any, Any] | None, gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str,
    inplace: bool,
) -> Tensor:  # fmt: skip
    """`gated_linear` in a checkpoint whose hooks (pack, unpack) save the inputs before the forward pass computes.

    A checkpoint recomputes up to the last saved tensor. torch saves a Function's inputs only after the forward pass.
    """
    checked_act("gated_linear", act)
    check_tensors("gated_linear", gate=gate, up=up, weight=weight, bias=bias)
    device = gate.device.type
    dtype = autocast_dtype(device)
    if dtype is not None and gate.dtype != torch.float64:
        cast = [t if t is None else t.to(dtype) for t in (gate, up, weight, bias)]
        with torch.autocast(autocast_device(device), enabled=False):  # tensors are cast already
            return gated_linear_saved_by(hooks, *cast, act, inplace)  # type: ignore[arg-type,call-arg]
    if not gate.dtype.is_floating_point or gate.dim() == 0:
        raise ValueError(f"gated_linear: gate must be (..., N) floats, got {tuple(gate.shape)} {gate.dtype}.")
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise ValueError(
            f"gated_linear: up must match gate, {tuple(gate.shape)} {gate.dtype}, got {tuple(up.shape)} {up.dtype}."
        )
    N = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    if (up is None and gate.shape[-1] % 2) or weight.dim() != 2 or weight.shape[1] != N or weight.dtype != gate.dtype:
        raise ValueError(
            f"gated_linear: weight must be (M, N) {gate.dtype} with N the width of gate and up, "
            f"{tuple(gate.shape)}{' packed' if up is None else ''}, got {tuple(weight.shape)} {weight.dtype}."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != gate.dtype):
        raise ValueError(
            f"gated_linear: bias must be ({weight.shape[0]},) {gate.dtype}, got {tuple(bias.shape)} {bias.dtype}."
        )
    if not use_triton(gate, up, weight, bias):
        return gated_linear_reference(gate, up, weight, bias, act)
    if hooks is not None:
        return _gated_linear_saved_first(gate, up, weight, bias, act, inplace, hooks)  # type: ignore[no-any-return]
    return _gated_linear(gate, up, weight, bias, act, inplace)


def gated_linear_reference(gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return F.linear(gated_reference(gate, up, act), weight, bias)


# --------------------------------------------------------------------------------------------------------- launches


def _gated_linear_fwd_fake(gate: Tensor, up: Tensor | None, weight: Tensor, *_: Any) -> Tensor:
    return gate.new_empty((*gate.shape[:-1], weight.shape[0]))


@launcher(_gated_linear_fwd_fake)
def _gated_linear_fwd(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, act: str, inplace: bool
) -> Tensor:
    return F.linear(_gated_fwd(gate, up, act, 1.0, 1.0), weight, bias)


def _gated_linear_bwd_fake(
    dy: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, act: str, need_dgate: bool, need_dup: bool,
    need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def like(t: Tensor, needed: bool) -> Tensor:
        return t.new_empty(t.shape) if needed else gate.new_empty(0)

    need_dup = need_dup and up is not None
    return (
        like(gate, need_dgate),
        like(gate, need_dup),
        like(weight, need_dw),
        weight.new_empty(weight.shape[:1] if need_db else (0,)),
    )


@launcher(_gated_linear_bwd_fake)
def _gated_linear_bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, act: str, need_dgate: bool, need_dup: bool,
    need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dgate, dup, dw, db = _gated_linear_bwd_fake(dy, gate, up, weight, act, need_dgate, need_dup, need_dw, need_db)
    room = dgate if need_dgate else None, dup if need_dup and up is not None else None
    _write_gradients(dy, gate, up, weight, act, *room, dw if need_dw else None, db if need_db else None)
    return dgate, dup, dw, db


def _write_gradients(
    dy: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, act: str, dgate: Tensor | None, dup: Tensor | None,
    dw: Tensor | None, db: Tensor | None,
) -> None:  # fmt: skip
    """Write the gradients that are not None. dgate and dup may alias gate and up: loads come before stores."""
    rows = dy.reshape(-1, weight.shape[0])
    if dgate is not None or dup is not None:
        scratch = torch.mm(rows, weight)
        gated_backward(scratch, gate, up, act, 1.0, 1.0, dgate, dup, None if dw is None else scratch)
    elif dw is not None:
        scratch = _gated_fwd(gate, up, act, 1.0, 1.0).view(-1, weight.shape[1])
    if dw is not None:
        torch.mm(rows.t(), scratch, out=dw)
    if db is not None:
        torch.sum(rows, 0, out=db)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, ctx.act, ctx.inplace = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing raises on a second access
    return _gradients(ctx, dy, *saved)


def _gradients(ctx: Any, dy: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:4]
    if not ctx.inplace or is_traced(gate) or is_graph_retained():
        grads: tuple[Tensor | None, ...] = _gated_linear_bwd(dy, gate, up, weight, ctx.act, *needs)
    else:
        dgate, dup = gate.detach() if needs[0] else None, up.detach() if needs[1] and up is not None else None
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[2] else None
        db = weight.new_empty(weight.shape[:1]) if needs[3] else None
        _write_gradients(dy, gate, up, weight, ctx.act, dgate, dup, dw, db)
        for t in (dgate, dup):
            if t is not None:  # PyTorch then raises if another backward pass needs the old value
                torch.autograd.graph.increment_version(t)
        grads = dgate, dup, dw, db
    present = (True, up is not None, True, True)
    return tuple([g if n and p else None for g, n, p in zip(grads, needs, present, strict=True)])


_gated_linear = differentiable(_gated_linear_fwd, _setup_context, _backward)


def _save_first(ctx: Any, *inputs: Any) -> Tensor:
    """`_gated_linear_fwd` with inputs saved before the forward pass computes."""
    *tensors, _, ctx.act, ctx.inplace, hooks = inputs
    ctx.set_materialize_grads(False)
    save_tensors(ctx, hooks, *tensors)
    return _gated_linear_fwd(*inputs[:-1])


def _differentiate_packed(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, dy, *load_tensors(ctx))


_gated_linear_saved_first = make_function(_save_first, _differentiate_packed, "gated_linear")


EXAMPLES = {
    "gated_linear": Example("Gated units", (ROWS, ROWS, (128, 1024)), gated_linear),
}
