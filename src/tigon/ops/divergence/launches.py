"""Divergence launches, tiles and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Parts,
    Plan,
    SymInt,
    cdiv,
    differentiable,
    find_sum_parts,
    fold_warps,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    part_tile,
    uneven,
    view_rows,
)
from tigon.kernels.tiles.constants import LOG2E
from tigon.ops.divergence.kernels import _divergence_bwd_kernel, _divergence_fwd_kernel
from tigon.ops.divergence.parts import (
    STATISTICS,
    TERMS,
    _fold_parts_kernel,
    _part_statistics_kernel,
    _part_terms_kernel,
)
from tigon.ops.divergence.signs import _signed_bwd_kernel

ALONE = 4
# TVD saves its slope's signs from this many rows and classes on. Fewer rows may be cut into parts, and narrow rows are
# bound by program launch: fewer bytes gain nothing.
SIGNED_ROWS, SIGNED_CLASSES = 1024, 4096


def _fwd_tile(v: int, kind: str, form: str, alone: bool = False) -> tuple[int, int, int]:
    """Blocks folded at a time, columns per block, and warps. Many warps read a wide row that is read twice: fewer rows
    then lie between the two readings, and the cache serves more of the second."""
    # JSD of log-probabilities keeps both sides, their ratio and a logarithm per element: depth 1. A block is 8 numbers
    # per thread.
    twice = form == "logits" and kind != "kl"
    warps, depth = (8, 2) if twice else (8, 1) if kind == "jsd" else (4, 4)
    warps = max(warps, ALONE) if alone else warps
    block = min(next_power_of_2(v), warps * 32 * 8)
    return max(1, min(depth, next_power_of_2(v) // block)), block, warps


def _bwd_tile(v: int) -> tuple[int, int]:
    return min(2048, next_power_of_2(v)), 4


def _planes_tile(plane: int) -> tuple[int, int, int]:
    """As `_fwd_tile`, for rows whose four quarters are read side by side: a block is each quarter's columns."""
    block = min(2048, next_power_of_2(plane))
    return 4, block, max(1, block // 256)


def _signed_tile(plane: int) -> tuple[int, int]:
    """Columns per quarter, and warps: 32 numbers per thread."""
    block = min(1024, next_power_of_2(plane))
    return block, max(1, block // 256)


def in_planes(input: Tensor, target: Tensor) -> bool:
    """Whether TVD reads a row's quarters side by side, so that their signs share bytes."""
    # From shapes and strides, which tracing also has. A few rows are cut into parts; other rows must be aligned.
    V = input.shape[-1]
    if V % 16 or V < SIGNED_CLASSES or input.numel() < SIGNED_ROWS * V:
        return False
    for t in (input, target):
        # Dynamo does not expose the storage offset. An unaligned offset costs narrow loads.
        if not torch.compiler.is_compiling() and t.storage_offset() % 16:
            return False
        for stride in t.stride()[:-1]:
            if stride % 16:
                return False
    return True


def _plane(v: int) -> int:
    """Columns per quarter row: the row's sign bytes. A multiple of 16, so that quarters are aligned."""
    return cdiv(v, 64) * 16


def _divergence_fwd_fake(
    input: Tensor, target: Tensor, mask: Tensor | None, kind: str, form: str, beta: float, temperature: float,
    signed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = input.new_empty(input.shape[:-1], dtype=torch.float32)
    stats = input.new_empty((rows.numel() if form == "logits" else 0, 5), dtype=torch.float32)
    signs = (rows.numel(), _plane(input.shape[-1])) if signed else (0, 0)
    return rows, stats, input.new_empty(signs, dtype=torch.uint8)


@launcher(_divergence_fwd_fake)
def _divergence_fwd(
    input: Tensor, target: Tensor, mask: Tensor | None, kind: str, form: str, beta: float, temperature: float,
    signed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, stats, signs = _divergence_fwd_fake(input, target, mask, kind, form, beta, temperature, signed)
    if input.numel() == 0:
        return rows.zero_(), stats, signs
    a, b = view_rows(input), view_rows(target)
    M, V = a.shape
    # With or without a gradient, so that a loss has the same bits.
    plane = _plane(V) if signed or (kind == "tvd" and in_planes(input, target)) else None
    sizes = V, a.stride(0), b.stride(0), beta, LOG2E.value / temperature
    mask = None if mask is None else mask.contiguous()
    # Without logits a whole row takes half the time.
    parts = None if plane else find_sum_parts(M, V, a.device, 1 if form == "logits" else 2)
    if parts is not None:
        _launch_parts((a, b, mask, rows, stats), (*sizes, kind, form, uneven(a, b)), M, parts)
        return rows, stats, signs
    arguments = *sizes, plane, kind, form, plane is None and uneven(a, b)
    key = (M, arguments, a.dtype, b.dtype, mask is None, signed)

    def plan() -> Plan:
        alone = multiprocessors(a.device) >= M
        depth, block, warps = _fwd_tile(V, kind, form, alone) if plane is None else _planes_tile(plane)
        return M, (*arguments, depth, block), {"num_warps": warps}

    launch(_divergence_fwd_kernel, key, (a, b, mask, rows, stats, signs if signed else None), plan)
    return rows, stats, signs


def _launch_parts(tensors: tuple[Tensor | None, ...], arguments: tuple[Any, ...], M: int, parts: Parts) -> None:
    """Two or three launches: the parts, once or twice, then the rows."""
    a, b, mask, rows, stats = tensors
    V, *strides, beta, k, kind, form, edges = arguments
    count, width, most = parts
    depth, block, warps = part_tile(*_fwd_tile(V, kind, form))
    options = {"num_warps": warps}
    key = (M, parts, arguments, a.dtype, b.dtype, mask is None)  # type: ignore[union-attr]
    # Never read before written, except for ignored rows' numbers, which are not read at all.
    room = stats.new_empty  # type: ignore[union-attr]
    partial = room(M * STATISTICS.value * count) if form == "logits" else None
    terms = room(M * TERMS.value * count) if form != "logits" or kind != "kl" else None
    if partial is not None:
        tile = edges, depth, block
        sizes = V, *strides, k, count, width, kind
        launch(_part_statistics_kernel, key, (a, b, mask, partial), lambda: (M * count, (*sizes, *tile), options))
    if terms is not None:
        more = V, *strides, beta, k, count, width, kind, form, edges, depth, block, most
        launch(_part_terms_kernel, key, (a, b, mask, partial, terms, stats), lambda: (M * count, more, options))
    fold = *strides, k, count, kind, form, most
    few = {"num_warps": fold_warps(most)}
    launch(_fold_parts_kernel, key, (a, b, mask, partial, terms, rows, stats), lambda: (M, fold, few))


def _divergence_bwd_fake(
    drows: Tensor, input: Tensor | None, target: Tensor, mask: Tensor | None, stats: Tensor, kind: str, form: str,
    beta: float, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return target.new_empty(target.shape, dtype=dtype)


@launcher(_divergence_bwd_fake)
def _divergence_bwd(
    drows: Tensor, input: Tensor | None, target: Tensor, mask: Tensor | None, stats: Tensor, kind: str, form: str,
    beta: float, temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    dinput = target.new_empty(target.shape, dtype=dtype)
    if target.numel() == 0:
        return dinput
    g = _flat(drows)
    a, b = None if input is None else view_rows(input), view_rows(target)
    M, V = b.shape
    # A None input has stride 0, since the kernel's argument count is fixed.
    strides = (g.stride(0), 0 if a is None else a.stride(0), b.stride(0))
    apart = uneven(b, dinput.view(M, V), *(() if a is None else (a,)))
    arguments = (V, *strides, beta, LOG2E.value / temperature, kind, form, apart)
    tensors = (g, a, b, None if mask is None else mask.contiguous(), stats, dinput)
    key = (M, arguments, None if a is None else a.dtype, b.dtype, dtype, mask is None)

    def plan() -> Plan:
        block, warps = _bwd_tile(V)
        return M * cdiv(V // 4 * 4 if apart else V, block), (*arguments, block), {"num_warps": warps}

    launch(_divergence_bwd_kernel, key, tensors, plan)
    return dinput


def _signed_bwd_fake(
    drows: Tensor, input: Tensor | None, mask: Tensor | None, stats: Tensor, signs: Tensor, classes: int, form: str,
    temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return signs.new_empty((*drows.shape, classes), dtype=dtype)


@launcher(_signed_bwd_fake)
def _signed_bwd(
    drows: Tensor, input: Tensor | None, mask: Tensor | None, stats: Tensor, signs: Tensor, classes: SymInt, form: str,
    temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    dinput = signs.new_empty((*drows.shape, classes), dtype=dtype)
    g = _flat(drows)
    a = None if input is None else view_rows(input)
    M, plane = signs.shape
    arguments = classes, g.stride(0), 0 if a is None else a.stride(0), LOG2E.value / temperature, plane, form
    tensors = g, a, None if mask is None else mask.contiguous(), stats, signs, dinput
    key = (M, arguments, None if a is None else a.dtype, dtype, mask is None)

    def plan() -> Plan:
        lanes, warps = _signed_tile(plane)
        return M * cdiv(plane, lanes), (*arguments, lanes), {"num_warps": warps}

    launch(_signed_bwd_kernel, key, tensors, plan)
    return dinput


def _flat(drows: Tensor) -> Tensor:
    same = drows.numel() > 1 and not any(drows.stride())
    return drows.as_strided((drows.numel(),), (0,)) if same else drows.reshape(-1)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, target, mask, *ctx.options, ctx.signed = inputs
    # The gradient is computed in the backward pass, where the upstream gradient is known: loss scaling applies before
    # rounding, and evaluation computes no gradient.
    ctx.dtype, ctx.classes = input.dtype, input.shape[-1]
    kind, form = ctx.options[:2]
    # KL's gradient with respect to log-probabilities is −p, so the input is not saved. With TVD's signs neither side is
    # needed, and for logits only the student's.
    linear = kind == "kl" and form != "logits"
    needless = linear or (ctx.signed and form != "logits")
    saved = (mask, *output[1:]) if ctx.signed else (target, mask, output[1])
    ctx.save_for_backward(None if needless else input, *saved)


def _backward(ctx: Any, drows: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if drows is None or not ctx.needs_input_grad[0]:
        return ()
    if not ctx.signed:
        return (_divergence_bwd(drows, *ctx.saved_tensors[:4], *ctx.options, ctx.dtype),)
    _, form, _, temperature = ctx.options
    return (_signed_bwd(drows, *ctx.saved_tensors[:4], ctx.classes, form, temperature, ctx.dtype),)


divergence_rows = differentiable(_divergence_fwd, _setup_context, _backward, unsaved=(0,))
