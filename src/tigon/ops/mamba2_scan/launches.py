"""Launches for Mamba-2's scan: the delta rule's kernels without a correction, and the sum over groups of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, differentiable, do_not_specialize, jit, launch, launcher, tl
from tigon.ops.gated_delta_rule.launches import (
    Call,
    flatten_tokens,
    launch_gradients,
    launch_matrices,
    launch_walk,
    make_table,
)

# Most heads that a program of the gradients walks through: Mamba-2 has up to 128 heads for a B and C.
HEADS = 8
BLOCK = 1024


def choose_split(H: int, G: int) -> int:
    """Return the programs among which a group's heads are divided. Depends on no length, and with it no sum's order."""
    heads = H // G
    return heads // next(n for n in range(min(heads, HEADS), 0, -1) if heads % n == 0)


# ---------------------------------------------------------------------------------------------------------- kernels


# One program sums BLOCK numbers of the result over its SPLIT parts, in their order.
# parts (tokens, G, SPLIT, K) fp32. sum: dense (tokens, G, K), `count` numbers.
@jit
@do_not_specialize("count")
def _parts_kernel(parts_ptr, sum_ptr, count, K: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = at < count
    parts_ptr += at // K * (SPLIT * K) + at % K
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(SPLIT):
        total += tl.load(parts_ptr + part * K, mask=own, other=0.0)
    tl.store(sum_ptr + at, total.to(sum_ptr.dtype.element_ty), mask=own)


# --------------------------------------------------------------------------------------------------------- launches


def mamba2_scan_launch(
    x: Tensor, g: Tensor, steps: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None,
    offsets: Tensor | None, return_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernels. States are (documents, H, N, P); the state is empty unless return_state."""
    table, documents = make_table(offsets, C, x)
    y, state = _mamba2_scan(x, g, steps, B, C, D, initial, table, documents, return_state)
    return y, state


def _make_call(
    x: Tensor, g: Tensor, steps: Tensor, B: Tensor, C: Tensor, D: Tensor | None, table: Tensor | None, documents: int
) -> Call:  # fmt: skip
    length, split = x.shape[1], choose_split(x.shape[2], B.shape[2])
    q, k, v, g, steps = flatten_tokens(C, B, x, g, steps)
    skip = None if D is None else D.contiguous()
    return Call(q, k, v, g, steps, table, documents, length, 1.0, False, False, skip, split)


def _mamba2_scan_fwd_fake(
    x: Tensor, g: Tensor, steps: Tensor, B: Tensor, C: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    documents, return_state = others[-2:]
    shape = (documents, x.shape[2], B.shape[3], x.shape[3]) if return_state else (0,)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


@launcher(
    _mamba2_scan_fwd_fake, rest="Tensor? D, Tensor? initial, Tensor? table, SymInt documents, bool return_state"
)  # fmt: skip
def _mamba2_scan_fwd(
    x: Tensor, g: Tensor, steps: Tensor, B: Tensor, C: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    D, initial, table, documents, return_state = others
    y, final = _mamba2_scan_fwd_fake(x, g, steps, B, C, *others)
    call = _make_call(x, g, steps, B, C, D, table, documents)
    initial = None if initial is None else initial.contiguous()
    results = y, None, None, final if return_state else None
    matrices = None, *launch_matrices(call)
    launch_walk("states", call, (*call[:3], *matrices, call.skip, table, initial, *results), call.v)
    return y, final


def _mamba2_scan_bwd_fake(
    x: Tensor, g: Tensor, steps: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None,
    table: Tensor | None, dy: Tensor | None, dfinal: Tensor | None, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    given, wants = (x, g, steps, B, C, *(x if t is None else t for t in (D, initial))), others[0]
    return tuple(t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip(given, wants, strict=True))


@launcher(_mamba2_scan_bwd_fake, rest="bool[] wants, SymInt documents", results=7)
def _mamba2_scan_bwd(
    x: Tensor, g: Tensor, steps: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None,
    table: Tensor | None, dy: Tensor | None, dfinal: Tensor | None, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """wants: for dx, dg, dsteps, dB, dC, dD and dinitial; unwanted gradients are empty."""
    wants, documents = others
    results = _mamba2_scan_bwd_fake(x, g, steps, B, C, D, initial, table, dy, dfinal, wants)
    dx, dg, dsteps, dB, dC, dD, dinitial = (t if wanted else None for t, wanted in zip(results, wants, strict=True))
    call = _make_call(x, g, steps, B, C, D, table, documents)
    (dy,) = flatten_tokens(dy)
    matrices = None, *launch_matrices(call)
    initial, dfinal = (None if t is None else t.contiguous() for t in (initial, dfinal))
    deep = any(wants[1:6])
    states = dstates = None
    if deep:
        states, dstates = call.new_states(), call.new_states()
        own = None, None, states, None
        launch_walk("states", call, (*call[:3], *matrices, None, table, initial, *own), call.v)
    dx = x.new_empty(x.shape) if dx is None else dx
    reverse = dx, dstates, dinitial
    launch_walk(
        "reverse", call, (*call[:2], dy, *matrices, call.skip, table, dfinal, *reverse), dy
    )  # fmt: skip
    if not deep:
        return results
    _, attend, factors = matrices
    dskip = None if dD is None else factors.new_zeros(factors.shape[1:])
    parts = [t if t is None or call.split == 1 else _new_parts(t, call.split) for t in (dC, dB)]
    given = dy, call.v.contiguous(), None, factors, states, dstates
    launch_gradients(call, given, [attend, None], (dskip, *parts, dg, dsteps))
    for sums, part in zip((dC, dB), parts, strict=True):
        if sums is not None and part is not None and sums is not part:
            _launch_sum(part, sums, call.split)
    if dD is not None and dskip is not None:
        dD.copy_(dskip.sum(1))
    return results


def _new_parts(gradient: Tensor, split: int) -> Tensor:
    *rows, K = gradient.shape
    return gradient.new_empty((*rows, split, K), dtype=torch.float32)


def _launch_sum(parts: Tensor, result: Tensor, split: int) -> None:
    count, K = result.numel(), result.shape[-1]

    def plan() -> Plan:
        return cdiv(count, BLOCK), (count, K, split, BLOCK), {"num_warps": 4}

    if count:
        launch(_parts_kernel, (count, K, split, result.dtype), (parts, result), plan)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.documents, ctx.return_state = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
    wants = list(ctx.needs_input_grad[:7])
    dfinal = dfinal if ctx.return_state else None
    gradients = _mamba2_scan_bwd(*ctx.saved_tensors, dy, dfinal, wants, ctx.documents)
    return tuple(t if wanted else None for t, wanted in zip(gradients, wants, strict=True))


_mamba2_scan = differentiable(_mamba2_scan_fwd, _setup_context, _backward, outputs=2)
