"""dW (V, H) of a head: a sum over chunks, in fp32 where there are several, at last narrowed to the weight's dtype.

An fp32 sum and its narrow result at once would be half as much memory again, beyond what the loss was allowed. So where
the result is larger than a chunk of logits, the first half of the rows is summed in the memory of the result itself, as
fp32, and the others in a tensor of their own: in all as much as one fp32 sum. Narrowing goes from the front, each time
over as many numbers as were done before: what is written then lies where everything has been read.

    result (V, H) bf16    | fp32 of rows 0 … V/2              |        | bf16 of rows 0 … V/2 | bf16 of rows V/2 … V |
    more (V/2, H) fp32    | fp32 of rows V/2 … V              |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.linear.head import class_blocks, product_into
from tigon.runtime import cdiv, is_traced, launch, tl, triton, use_triton

BLOCK = 4096


def places(weight: Tensor, compute: torch.dtype, wide: bool, budget: int, need: bool) -> tuple[Tensor, Tensor]:
    """Where dW is summed: two uninitialised tensors, the second of them empty unless the result's memory is shared.

    wide: in fp32 (fp64 for fp64). budget: bytes of logits a chunk may hold.
    """
    (V, H), acc = weight.shape, torch.promote_types(compute, torch.float32)
    none = weight.new_empty(0, dtype=acc)
    if not need:
        return weight.new_empty(0, dtype=compute), none
    front = _front_rows(V)
    halved = wide and weight.dtype == compute and 2 * compute.itemsize == acc.itemsize
    if halved and front and V * H * compute.itemsize > budget:
        return weight.new_empty(V, H), weight.new_empty(V - front, H, dtype=acc)
    return weight.new_empty(V, H, dtype=acc if wide else compute), none


def _front_rows(V: int) -> int:
    return V // 128 * 64  # rows of whole tiles, not more than half of all


def parts(dw: Tensor, more: Tensor) -> list[Tensor]:
    """The sums, of consecutive rows of W."""
    if not more.numel():
        return [dw]
    V, H = dw.shape
    front = V - more.shape[0]
    return [dw.view(-1)[: 2 * front * H].view(more.dtype).view(front, H), more]


def accumulate(sums: Sequence[Tensor], dlogits: Tensor, x: Tensor, first: bool) -> None:
    """sums = or += dlogitsᵀ x, without a temporary of their size; they may be fp32 under half-precision factors."""
    start = 0
    for dw in sums:
        for block in class_blocks(dw.shape[0], x.dtype):
            product_into(dw[block], dlogits[:, start + block.start : start + block.stop].t(), x, first)
        start += dw.shape[0]


def zero(sums: Sequence[Tensor]) -> None:
    for dw in sums:
        dw.zero_()


def narrowed(dw: Tensor, more: Tensor, factor: Tensor | None = None, ours: bool = True) -> Tensor:
    """The shared sums times the 0-d factor in dW's dtype, rounded once; in dW's own memory if that is `ours`."""
    front, rest = parts(dw, more)
    if is_traced(dw) or not use_triton(dw):
        scaled = [t if factor is None else t * factor for t in (front, rest)]
        return torch.cat([t.to(dw.dtype) for t in scaled])
    out = dw if ours else torch.empty_like(dw)
    blocks = cdiv(front.numel(), BLOCK)
    # The first step reads all before it writes any; every other one writes where those before it have read.
    start, stop = 0, 1 if ours else blocks
    while start < blocks:
        _narrow(front, out, factor, start, min(stop, blocks))
        start, stop = stop, 2 * stop
    _narrow(rest, out[front.shape[0] :], factor, 0, cdiv(rest.numel(), BLOCK))
    return out


@triton.jit(do_not_specialize=["start"])
def _narrow_kernel(x_ptr, y_ptr, factor_ptr, start, N, BLOCK: tl.constexpr):
    at = (start + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    if factor_ptr is not None:
        x = x * tl.load(factor_ptr).to(tl.float32)
    tl.debug_barrier()
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < N)


def _narrow(x: Tensor, y: Tensor, factor: Tensor | None, start: int, stop: int) -> None:
    """Blocks start to stop of x."""
    key = (start, stop, x.numel(), y.dtype, None if factor is None else factor.dtype)
    plan = stop - start, (start, x.numel(), BLOCK), {"num_warps": 8}
    launch(_narrow_kernel, key, (x, y, factor), lambda: plan)
