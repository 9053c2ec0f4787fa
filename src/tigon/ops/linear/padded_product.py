"""Products with rows padded to 16 bytes: allocation, class blocks, accumulation without a temporary."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_logits(rows: int, V: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate (rows, V) logits, uninitialised; rows with at least 16 bytes begin at multiples of 16 bytes."""
    if not needs_padding(V, dtype):
        return like.new_empty(rows, V, dtype=dtype)
    step = 64 if V >= 1024 else 16 // dtype.itemsize  # whole cache lines, where the overhead is small
    room = like.new_empty(rows, -(-V // step) * step, dtype=dtype)
    if like.is_cpu:
        # With AMX, torch multiplies the number after an odd column count by 0: NaN there becomes NaN in dX.
        room[:, V:].zero_()
    return room[:, :V]


def needs_padding(V: int, dtype: torch.dtype) -> bool:
    return V * dtype.itemsize >= 16 and V * dtype.itemsize % 16 != 0


def class_blocks(V: int, dtype: torch.dtype) -> list[slice]:
    """Split the classes into blocks for the products: all classes, or a multiple of 64 and then the rest.

    A product over 50257 classes (GPT-2), or 200019, takes up to six times as long as a product over a few classes less,
    because the rows begin at addresses where 16-byte loads are impossible.
    """
    if V * dtype.itemsize % 16 == 0 or V < 1024:
        return [slice(0, V)]
    return [slice(0, V // 64 * 64), slice(V // 64 * 64, V)]


def product_into(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out = or += a b, without a temporary; out may be fp32 with half-precision factors."""
    if not b.shape[0]:  # empty sum, as on a device without classes
        if first:
            out.zero_()
    elif out.dtype == b.dtype:
        if first:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)
    elif b.is_meta:
        return  # nothing to compute; before torch 2.13 there is no meta kernel for a product with an out_dtype
    elif b.is_cuda:
        # `out` may be columns in wider rows. With an out_dtype, torch's addmm behaves as without: cuBLAS accepts the
        # row stride, and torch copies from a temporary otherwise.
        if first:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        a, b = a.to(out.dtype), b.to(out.dtype)
        if first:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)
