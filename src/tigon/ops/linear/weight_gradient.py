"""dW (V, H) of a head: a sum over chunks, in fp32 if there are several, narrow_sum to the weight's dtype at the end.

An fp32 sum and its bf16 result together take half as much memory again as the sum alone, at the peak of the loss. So
where the result is larger than a chunk of logits, half of the fp32 sum lives inside the bf16 result: the first half of
the rows is summed there, the other half in a second tensor. Both together take no more memory than one fp32 sum.
Narrowing converts in place, from the front, in passes that double in size. Each pass overwrites only memory that has
already been read.

    result (V, H) bf16    | fp32 of rows 0 … V/2              |        | bf16 of rows 0 … V/2 | bf16 of rows V/2 … V |
    more (V/2, H) fp32    | fp32 of rows V/2 … V              |

In fp16 the divisor of a mean comes with the upstream gradient, or gradients would underflow: dW would be written in
fp32, read and written again. Of few rows in one chunk the factors of the product are kept instead, dlogits (M, V) and
x (M, H). The backward pass knows the upstream gradient, and writes dW once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, is_traced, jit, launch, tl, use_triton
from tigon.ops.linear.padded_product import class_blocks, empty_logits, product_into

BLOCK = 4096


class Late(NamedTuple):
    """The factors of dW's product, which the backward pass computes: dlogits (M, V) and x (M, H), both in fp16."""

    dlogits: Tensor
    x: Tensor


def places(
    weight: Tensor, compute: torch.dtype, wide: bool, budget: int, need: bool, rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Two uninitialised tensors in which dW is summed. The second is empty unless the sum lives inside the result.

    wide: sum in fp32 (fp64 for fp64). budget: bytes of logits a chunk may hold. rows: of the only chunk, 0 if there are
    several; where it helps, the two tensors are a `Late`.
    """
    (V, H), acc = weight.shape, torch.promote_types(compute, torch.float32)
    # An empty tensor stands for "no second place": an operator's schema returns tensors, and never None.
    none = weight.new_empty(0, dtype=acc)
    if not need:
        return weight.new_empty(0, dtype=compute), none
    # No more memory than dW's fp32 sum takes from the forward pass to the backward pass.
    if weight.dtype == compute == torch.float16 and 0 < rows <= 2 * H:
        return empty_logits(rows, V, weight, compute), weight.new_empty(rows, H)
    front = _front_rows(V)
    # The trick wants two narrow numbers in the memory of one wide one: bf16 and fp32, not fp64 or master weights.
    halved = wide and weight.dtype == compute and 2 * compute.itemsize == acc.itemsize
    # A result smaller than a chunk of logits fits in the memory that the logits leave behind, so a second tensor does
    # not raise the peak.
    if halved and front and V * H * compute.itemsize > budget:
        return weight.new_empty(V, H), weight.new_empty(V - front, H, dtype=acc)
    return weight.new_empty(V, H, dtype=acc if wide else compute), none


def _front_rows(V: int) -> int:
    return V // 128 * 64  # at most half of all rows, in whole tiles of the products


def late(dw: Tensor, more: Tensor) -> Late | None:
    """The tensors of `places` as the factors of a late product, if they are."""
    # Only then are both of one dtype: beside a narrow dW the second tensor is wide.
    return Late(dw, more) if more.numel() and more.dtype == dw.dtype else None


def room(sums: Sequence[Tensor] | None) -> Tensor | None:
    """Where the logits of the only chunk have to be, as their gradient is to last; None for anywhere."""
    return sums.dlogits if isinstance(sums, Late) else None


def parts(dw: Tensor, more: Tensor) -> Sequence[Tensor]:
    """The tensors in which dW is summed, each of them for consecutive rows of W; or a `Late`."""
    if not more.numel():
        return [dw]
    if found := late(dw, more):
        return found
    V, H = dw.shape
    front = V - more.shape[0]
    # The same bytes under two dtypes: `front` rows of fp32 fill 2 · `front` rows of bf16.
    return [dw.view(-1)[: 2 * front * H].view(more.dtype).view(front, H), more]


def accumulate(sums: Sequence[Tensor], dlogits: Tensor, x: Tensor, first: bool) -> None:
    """sums = (if first) or += dlogitsᵀ x, without a temporary of that size; half-precision factors may add to fp32."""
    if isinstance(sums, Late):
        sums.x[: x.shape[0]].copy_(x)  # dlogits are there already
        if x.shape[0] < sums.x.shape[0]:  # a CPU may count fewer rows than there was room for
            for t in sums:
                t[x.shape[0] :].zero_()
        return
    start = 0
    for dw in sums:
        # Blocks of classes: products over rows that are no multiple of 16 bytes are several times slower.
        for block in class_blocks(dw.shape[0], x.dtype):
            product_into(dw[block], dlogits[:, start + block.start : start + block.stop].t(), x, first)
        start += dw.shape[0]


def zero(sums: Sequence[Tensor]) -> None:
    for dw in sums:
        dw.zero_()


def late_product(dlogits: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """dlogitsᵀ (factor · x), (V, H), rounded to fp16 once. factor: 0-d, at most 1 in size, so that x stays finite."""
    x = (x.to(factor.dtype) * factor).to(x.dtype)
    if is_traced(x):
        return dlogits.t() @ x
    dw = x.new_empty(dlogits.shape[1], x.shape[1])
    if x.is_cuda or x.is_meta:
        accumulate([dw], dlogits, x, first=True)
        return dw
    return torch.mm(dlogits.t().to(factor.dtype), x.to(factor.dtype)).to(x.dtype)


def narrow_sum(dw: Tensor, more: Tensor, factor: Tensor | None = None, ours: bool = True) -> Tensor:
    """The sums of `places` times the 0-d factor, rounded once to dW's dtype. With `ours` the result overwrites dw."""
    front, rest = parts(dw, more)
    # Without the kernel nothing orders reads before writes inside a tensor, so the result is a new tensor.
    if is_traced(dw) or not use_triton(dw):
        scaled = [t if factor is None else t * factor for t in (front, rest)]
        return torch.cat([t.to(dw.dtype) for t in scaled])
    out = dw if ours else torch.empty_like(dw)
    blocks = cdiv(front.numel(), BLOCK)
    # bf16 block i is written over fp32 block i // 2. The first launch is one program, which reads its block before it
    # writes. Every later launch writes blocks start … 2 start, over fp32 blocks that earlier launches have read.
    start, stop = 0, 1 if ours else blocks
    while start < blocks:
        _narrow(front, out, factor, start, min(stop, blocks))
        start, stop = stop, 2 * stop
    # `rest` lies in memory of its own, and all of `front` has been read: one launch, any order.
    _narrow(rest, out[front.shape[0] :], factor, 0, cdiv(rest.numel(), BLOCK))
    return out


# `start` differs at every launch. Unspecialised, one compiled kernel serves all of them.
@jit
@do_not_specialize("start")
def _narrow_kernel(x_ptr, y_ptr, factor_ptr, start, N, BLOCK: tl.constexpr):
    # int64 before the product: V · H of a large head exceeds 2³¹ elements.
    at = (start + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Read and written once each: the pass is bound by DRAM, and multiplying by the factor costs nothing on the way.
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    if factor_ptr is not None:
        x = x * tl.load(factor_ptr).to(tl.float32)
    # x and y may be the same memory: all threads have to load before any stores.
    tl.debug_barrier()
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < N)


def _narrow(x: Tensor, y: Tensor, factor: Tensor | None, start: int, stop: int) -> None:
    """Narrow blocks start to stop of x into the same blocks of y."""
    key = (start, stop, x.numel(), y.dtype, None if factor is None else factor.dtype)
    # `start` is in the key and in the plan: each pass of a dW is a launch of its own, and the launches are few, since
    # passes double.
    plan = stop - start, (start, x.numel(), BLOCK), {"num_warps": 8}
    launch(_narrow_kernel, key, (x, y, factor), lambda: plan)
