"""Copy several tensors into a single buffer with another dtype, in a single launch.

An adapter's factors are small: seven layers have fourteen, with some 100,000 elements each, and every step casts the
factors from fp32 four times. A launch per factor costs more than the copy, and `torch._foreach_copy_` spreads so few
elements over too few programs: 16.7 µs for the six factors in an attention layer on an H100.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import cdiv, jit, launch, tl, use_triton

# Triton kernels have a fixed number of pointers. Eight cover the six factors for an attention layer's q, k and v.
MOST = 8  # tensors per launch
# 16 elements per thread with four warps: a factor with 100,000 elements takes 49 programs.
BLOCK = 2048


@jit
def _cast_part(out_ptr, ptr, block, blocks, count, at, BLOCK: tl.constexpr):
    if (block >= 0) & (block < blocks):
        i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + at + i, tl.load(ptr + i, mask=i < count).to(out_ptr.dtype.element_ty), mask=i < count)


# A program casts BLOCK elements of a single tensor to out's dtype, rounding once. The grid covers the blocks of all
# tensors in turn: `block` counts down to the index within the own tensor, and `at` is that tensor's start in out.
# ptr_i, count_i: pointer and element count, None for absent tensors, whose code is compiled away.
@jit
def _cast_together_kernel(
    out_ptr, ptr_0, ptr_1, ptr_2, ptr_3, ptr_4, ptr_5, ptr_6, ptr_7, count_0, count_1, count_2, count_3, count_4,
    count_5, count_6, count_7, BLOCK: tl.constexpr,
):  # fmt: skip
    block, at = tl.program_id(0), tl.cast(0, tl.int64)
    blocks = tl.cdiv(count_0, BLOCK)
    _cast_part(out_ptr, ptr_0, block, blocks, count_0, at, BLOCK)
    if ptr_1 is not None:
        block, at, blocks = block - blocks, at + count_0, tl.cdiv(count_1, BLOCK)
        _cast_part(out_ptr, ptr_1, block, blocks, count_1, at, BLOCK)
    if ptr_2 is not None:
        block, at, blocks = block - blocks, at + count_1, tl.cdiv(count_2, BLOCK)
        _cast_part(out_ptr, ptr_2, block, blocks, count_2, at, BLOCK)
    if ptr_3 is not None:
        block, at, blocks = block - blocks, at + count_2, tl.cdiv(count_3, BLOCK)
        _cast_part(out_ptr, ptr_3, block, blocks, count_3, at, BLOCK)
    if ptr_4 is not None:
        block, at, blocks = block - blocks, at + count_3, tl.cdiv(count_4, BLOCK)
        _cast_part(out_ptr, ptr_4, block, blocks, count_4, at, BLOCK)
    if ptr_5 is not None:
        block, at, blocks = block - blocks, at + count_4, tl.cdiv(count_5, BLOCK)
        _cast_part(out_ptr, ptr_5, block, blocks, count_5, at, BLOCK)
    if ptr_6 is not None:
        block, at, blocks = block - blocks, at + count_5, tl.cdiv(count_6, BLOCK)
        _cast_part(out_ptr, ptr_6, block, blocks, count_6, at, BLOCK)
    if ptr_7 is not None:
        block, at, blocks = block - blocks, at + count_6, tl.cdiv(count_7, BLOCK)
        _cast_part(out_ptr, ptr_7, block, blocks, count_7, at, BLOCK)


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return (numel,): all tensors' elements in order, in the given dtype. No gradient."""
    sizes = [t.numel() for t in tensors]
    out = tensors[0].new_empty(sum(sizes), dtype=dtype)
    if not use_triton(*tensors):
        for part, t in zip(out.split(sizes), tensors, strict=True):
            part.copy_(t.reshape(-1))
        return out
    starts = [0, *accumulate(sizes)]
    for i in range(0, len(tensors), MOST):
        _launch(out[starts[i] :] if i else out, [t.contiguous() for t in tensors[i : i + MOST]])
    return out


def _launch(out: Tensor, tensors: list[Tensor]) -> None:
    sizes = tuple(t.numel() for t in tensors)
    if not any(sizes):
        return
    missing = MOST - len(tensors)

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        counts = (*sizes, *[None] * missing)
        # A flat grid: a two-dimensional grid would pad every tensor to the largest.
        return sum(cdiv(size, BLOCK) for size in sizes), (*counts, BLOCK), {"num_warps": 4}

    key = (sizes, out.dtype, tuple(t.dtype for t in tensors))
    launch(_cast_together_kernel, key, (out, *tensors, *[None] * missing), plan)
