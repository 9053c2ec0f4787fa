"""A head's dW (V, H): a sum over chunks, in fp32 for several chunks, narrowed to the weight's dtype at the end.

An fp32 sum and the bf16 result together take half as much memory again as the sum alone, at the loss's memory peak. If
the result is larger than a chunk of logits, half of the fp32 sum therefore lives inside the bf16 result: the first half
of the rows is summed there, the other half in a second tensor. Both together take no more memory than one fp32 sum.
Narrowing converts in place, from the front, in passes that double in size. Each pass overwrites only memory that has
already been read.

    result (V, H) bf16    | fp32 of rows 0 … V/2              |        | bf16 of rows 0 … V/2 | bf16 of rows V/2 … V |
    more (V/2, H) fp32    | fp32 of rows V/2 … V              |

In fp16 a mean's divisor arrives with the upstream gradient, since gradients would otherwise underflow: dW would be
written in fp32, read and written again. For few rows in a single chunk the product's factors are saved instead,
dlogits (M, V) and x (M, H). The backward pass knows the upstream gradient and writes dW once.
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
    """Factors of dW's product, deferred to the backward pass: dlogits (M, V) and x (M, H), both fp16."""

    dlogits: Tensor
    x: Tensor


def places(
    weight: Tensor, compute: torch.dtype, wide: bool, budget: int, need: bool, rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Allocate two uninitialised tensors for dW's sum. The second is empty unless the sum lives inside the result.

    wide: sum in fp32 (fp64 for fp64). budget: bytes of logits per chunk. rows: the only chunk's row count, 0 for
    several chunks; where beneficial, the two tensors are a `Late`.
    """
    (V, H), acc = weight.shape, torch.promote_types(compute, torch.float32)
    none = weight.new_empty(0, dtype=acc)
    if not need:
        return weight.new_empty(0, dtype=compute), none
    # No more memory than dW's fp32 sum takes between forward and backward pass.
    if weight.dtype == compute == torch.float16 and 0 < rows <= 2 * H:
        return empty_logits(rows, V, weight, compute), weight.new_empty(rows, H)
    front = _front_rows(V)
    halved = wide and weight.dtype == compute and 2 * compute.itemsize == acc.itemsize
    # A result smaller than a chunk of logits fits in the memory that the logits free, so a second tensor does not raise
    # the peak.
    if halved and front and V * H * compute.itemsize > budget:
        return weight.new_empty(V, H), weight.new_empty(V - front, H, dtype=acc)
    return weight.new_empty(V, H, dtype=acc if wide else compute), none


def _front_rows(V: int) -> int:
    return V // 128 * 64  # at most half of all rows, in whole product tiles


def late(dw: Tensor, more: Tensor) -> Late | None:
    """Interpret tensors from `places` as a deferred product's factors, if they are; else None."""
    return Late(dw, more) if more.numel() and more.dtype == dw.dtype else None


def room(sums: Sequence[Tensor] | None) -> Tensor | None:
    """The tensor that must hold the only chunk's logits, as their gradient is saved; None for no constraint."""
    return sums.dlogits if isinstance(sums, Late) else None


def parts(dw: Tensor, more: Tensor) -> Sequence[Tensor]:
    """The tensors that dW is summed in, each for consecutive rows of W; or a `Late`."""
    if not more.numel():
        return [dw]
    if found := late(dw, more):
        return found
    V, H = dw.shape
    front = V - more.shape[0]
    # The same bytes under two dtypes: `front` rows in fp32 fill 2 · `front` rows in bf16.
    return [dw.view(-1)[: 2 * front * H].view(more.dtype).view(front, H), more]


def accumulate(sums: Sequence[Tensor], dlogits: Tensor, x: Tensor, first: bool) -> None:
    """sums = (if first) or += dlogitsᵀ x, without a temporary; half-precision factors may accumulate in fp32."""
    if isinstance(sums, Late):
        sums.x[: x.shape[0]].copy_(x)  # dlogits are already in place
        if x.shape[0] < sums.x.shape[0]:  # a CPU may count fewer rows than were allocated
            for t in sums:
                t[x.shape[0] :].zero_()
        return
    start = 0
    for dw in sums:
        # Blocks of classes: products with row sizes not divisible by 16 bytes are several times slower.
        for block in class_blocks(dw.shape[0], x.dtype):
            product_into(dw[block], dlogits[:, start + block.start : start + block.stop].t(), x, first)
        start += dw.shape[0]


def zero(sums: Sequence[Tensor]) -> None:
    for dw in sums:
        dw.zero_()


def late_product(dlogits: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """dlogitsᵀ (factor · x), (V, H), rounded once to fp16. factor: 0-d, magnitude at most 1, so that x stays finite."""
    x = (x.to(factor.dtype) * factor).to(x.dtype)
    if is_traced(x):
        return dlogits.t() @ x
    dw = x.new_empty(dlogits.shape[1], x.shape[1])
    if x.is_cuda or x.is_meta:
        accumulate([dw], dlogits, x, first=True)
        return dw
    return torch.mm(dlogits.t().to(factor.dtype), x.to(factor.dtype)).to(x.dtype)


def narrow_sum(dw: Tensor, more: Tensor, factor: Tensor | None = None, ours: bool = True) -> Tensor:
    """The sums from `places` times the 0-d factor, rounded once to dW's dtype. With `ours` the result overwrites dw."""
    front, rest = parts(dw, more)
    # Without the kernel nothing orders reads before writes within a tensor, so the result is a new tensor.
    if is_traced(dw) or not use_triton(dw):
        scaled = [t if factor is None else t * factor for t in (front, rest)]
        return torch.cat([t.to(dw.dtype) for t in scaled])
    out = dw if ours else torch.empty_like(dw)
    blocks = cdiv(front.numel(), BLOCK)
    # bf16 block i overwrites fp32 block i // 2. The first launch is a single program, which reads the block before
    # writing. Later launches write blocks start … 2 start, over fp32 blocks that earlier launches have read.
    start, stop = 0, 1 if ours else blocks
    while start < blocks:
        _narrow(front, out, factor, start, min(stop, blocks))
        start, stop = stop, 2 * stop
    _narrow(rest, out[front.shape[0] :], factor, 0, cdiv(rest.numel(), BLOCK))
    return out


# Program i converts block start + i of N fp32 numbers at x, times the optional 0-d factor, to y's dtype.
# `start` differs on every launch: not specialised, so that all launches share a compiled kernel.
@jit
@do_not_specialize("start")
def _narrow_kernel(x_ptr, y_ptr, factor_ptr, start, N, BLOCK: tl.constexpr):
    at = (start + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    if factor_ptr is not None:
        x = x * tl.load(factor_ptr).to(tl.float32)
    # x and y may alias: all threads must load before any stores.
    tl.debug_barrier()
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < N)


def _narrow(x: Tensor, y: Tensor, factor: Tensor | None, start: int, stop: int) -> None:
    """Narrow blocks start to stop of x into the same blocks of y."""
    key = (start, stop, x.numel(), y.dtype, None if factor is None else factor.dtype)
    plan = stop - start, (start, x.numel(), BLOCK), {"num_warps": 8}
    launch(_narrow_kernel, key, (x, y, factor), lambda: plan)
