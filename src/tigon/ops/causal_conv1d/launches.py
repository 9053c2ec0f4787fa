"""Launches of the causal convolution: library ops and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    differentiable,
    empty_rows,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
)
from tigon.ops.causal_conv1d.kernels import (
    _causal_conv1d_bwd_kernel,
    _causal_conv1d_fwd_kernel,
    _state_bwd_kernel,
    _state_fwd_kernel,
)
from tigon.ops.sum_rows import shares, sum_rows


def _choose_channels(C: int, W: int, itemsize: int, most: int = 8) -> tuple[int, int]:
    """Channels per program, and warps. A thread loads 16 bytes of each row, or less where the inputs, weights and sums
    of W taps would not fit its registers."""
    each = min(most, 16 // itemsize if W <= 4 else 4)
    block = min(next_power_of_2(C), 128 * each)
    return block, max(1, block // (32 * each))


def _fwd_tile(B: int, T: int, C: int, W: int, itemsize: int, device: torch.device) -> tuple[int, int, int]:
    """Channels per program, warps, and tokens per program, which reads W - 1 more."""
    block, warps = _choose_channels(C, W, itemsize)
    return block, warps, 16 if B * cdiv(T, 16) * cdiv(C, block) >= multiprocessors(device) else 4


def _bwd_tile(B: int, T: int, C: int, W: int, itemsize: int, device: torch.device) -> tuple[int, int, int, int]:
    """Channels per program, warps, tokens per step and tokens per program: about four programs per SM, whose last step
    is full with the W - 1 tokens that follow a program's own."""
    block, warps = _choose_channels(C, W, itemsize, 4)
    rows = 8 if W <= 4 else 4
    spans = max(1, 4 * multiprocessors(device) // (cdiv(C, block) * B))
    return block, warps, rows, cdiv(cdiv(T, spans) + W - 1, rows) * rows - (W - 1)


def _empty(x: Tensor) -> Tensor:
    """A result in x's memory order, as `lay_out` gives it."""
    if x.stride(2) != 1 and x.stride(1) == 1:
        return empty_rows(x.transpose(1, 2)).transpose(1, 2)
    return empty_rows(x)


def _strides(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if t is None else t.stride()


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple([None if t is None else t.dtype for t in tensors])


def _count_documents(x: Tensor, offsets: Tensor | None) -> int:
    return x.shape[0] if offsets is None else offsets.shape[0] - 1


def _causal_conv1d_fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, offsets: Tensor | None,
    documents: Tensor | None, silu: bool, return_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    W = weight.shape[1]
    last = x.new_empty((_count_documents(x, offsets), x.shape[2], W - 1) if return_state else (0,))
    return _empty(x), last


@launcher(_causal_conv1d_fwd_fake)
def _causal_conv1d_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, offsets: Tensor | None,
    documents: Tensor | None, silu: bool, return_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """documents: `find_documents` of offsets. The second result is empty unless return_state."""
    y, last = _causal_conv1d_fwd_fake(x, weight, bias, state, offsets, documents, silu, return_state)
    (B, T, C), W, D = x.shape, weight.shape[1], _count_documents(x, offsets)
    weight, bias, offsets, state = _dense(weight), _dense(bias), _dense(offsets), _swap(state)
    strides = *_strides(x), *_strides(state)
    key = (B, T, C, D, W, silu, *strides, *_dtypes(x, weight, bias, state, offsets))

    def plan() -> Plan:
        block, warps, rows = _fwd_tile(B, T, C, W, x.element_size(), x.device)
        arguments = (T, C, D, *strides, *y.stride(), W, next_power_of_2(W), silu, rows, block)
        return B * cdiv(T, rows) * cdiv(C, block), arguments, {"num_warps": warps}

    def plan_state() -> Plan:
        block, warps = _choose_channels(C, W, x.element_size())
        return D * cdiv(C, block), (T, C, *strides, W, block), {"num_warps": warps}

    if y.numel():
        tensors = (x, weight, bias, state, offsets, documents, y)
        launch(_causal_conv1d_fwd_kernel, (*key, *y.stride()), tensors, plan)
    if last.numel():
        launch(_state_fwd_kernel, key, (x, state, offsets, last), plan_state)
    return y, last


def _dense(t: Tensor | None) -> Any:
    return t if t is None or t.is_contiguous() else t.contiguous()


def _swap(state: Tensor | None) -> Any:
    """A state (D, C, W - 1), small beside x, with unit stride along C, as a thread loads it."""
    return None if state is None else state.transpose(1, 2).contiguous().transpose(1, 2)


def _causal_conv1d_bwd_fake(
    dy: Tensor, dlast: Tensor | None, wants: list[bool], x: Tensor, weight: Tensor, bias: Tensor | None,
    state: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx = _empty(x) if wants[0] else x.new_empty(0)
    dw = weight.new_empty(weight.shape if wants[1] else (0,))
    db = x.new_empty(0) if bias is None or not wants[2] else bias.new_empty(bias.shape)
    return dx, dw, db, x.new_empty(0) if state is None or not wants[3] else state.new_empty(state.shape)


@launcher(_causal_conv1d_bwd_fake)
def _causal_conv1d_bwd(
    dy: Tensor, dlast: Tensor | None, wants: list[bool], x: Tensor, weight: Tensor, bias: Tensor | None,
    state: Tensor | None, offsets: Tensor | None, documents: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """wants: for dx, dweight, dbias and dstate; unwanted gradients are empty. dlast: of the returned state."""
    dx, dw, db, ds = _causal_conv1d_bwd_fake(dy, dlast, wants, x, weight, bias, state)
    (B, T, C), W, D = x.shape, weight.shape[1], _count_documents(x, offsets)
    weight, bias, offsets, state, dlast = _dense(weight), _dense(bias), _dense(offsets), _swap(state), _swap(dlast)
    wants = [g.numel() > 0 for g in (dx, dw, db, ds)]
    strides = *_strides(dy), *_strides(x), *_strides(state)
    dtypes = _dtypes(dy, x, weight, bias, state, offsets, dlast)
    key = (B, T, C, D, W, silu, *wants, *strides, *dtypes)
    if x.numel() == 0:
        dw.zero_(), db.zero_()
    elif any(wants[:3]):
        block, warps, rows, each = _bwd_tile(B, T, C, W, x.element_size(), x.device)
        spans = cdiv(T, each)
        flat = dw.view(-1)
        partial_w = shares(B * spans, flat)[0] if wants[1] else None
        partial_b = shares(B * spans, db)[0] if wants[2] else None

        def plan() -> Plan:
            sizes = (T, C, D, each, spans, *strides, *_strides(dx if wants[0] else None))
            return B * spans * cdiv(C, block), (*sizes, W, next_power_of_2(W), silu, rows, block), {"num_warps": warps}

        results = (dx if wants[0] else None, partial_w, partial_b)
        tensors = (dy, x, weight, bias, state, offsets, documents, dlast, *results)
        launch(_causal_conv1d_bwd_kernel, key, tensors, plan)
        if partial_w is not None:
            sum_rows(partial_w, flat)
        if partial_b is not None:
            sum_rows(partial_b, db)
    if wants[3]:

        def plan_state() -> Plan:
            block, warps = _choose_channels(C, W, x.element_size(), 4)
            return D * cdiv(C, block), (T, C, *strides, W, next_power_of_2(W), silu, block), {"num_warps": warps}

        launch(_state_bwd_kernel, key, (dy, x, weight, bias, state, offsets, dlast, ds), plan_state)
    return dx, dw, db, ds


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.silu, ctx.return_state = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, state, offsets, documents = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[:4])
    dy = x.new_zeros(()).expand(x.shape) if dy is None else dy
    dlast = dlast if ctx.return_state else None
    grads = _causal_conv1d_bwd(dy, dlast, wants, x, weight, bias, state, offsets, documents, ctx.silu)
    return tuple([g if wanted else None for g, wanted in zip(grads, wants, strict=True)])


causal_conv1d_launch = differentiable(_causal_conv1d_fwd, _setup_context, _backward, outputs=2)
