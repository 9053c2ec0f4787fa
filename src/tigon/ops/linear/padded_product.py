"""Products whose rows are padded to 16 bytes: room for them, the blocks they are taken in, sums without a temporary."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_logits(rows: int, V: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for (rows, V) logits, uninitialised; rows of 16 bytes and more begin at multiples of 16 bytes."""
    if not needs_padding(V, dtype):
        return like.new_empty(rows, V, dtype=dtype)
    step = 64 if V >= 1024 else 16 // dtype.itemsize  # whole cache lines, where they are little beside the budget
    room = like.new_empty(rows, -(-V // step) * step, dtype=dtype)
    if like.is_cpu:
        # With AMX, torch multiplies the number behind an odd number of columns by 0: NaN there becomes NaN in dX.
        room[:, V:].zero_()
    return room[:, :V]


def needs_padding(V: int, dtype: torch.dtype) -> bool:
    return V * dtype.itemsize >= 16 and V * dtype.itemsize % 16 != 0


def class_blocks(V: int, dtype: torch.dtype) -> list[slice]:
    """The blocks of classes for the products: all classes, or first a multiple of 64 and then the rest.

    A product over 50257 classes (GPT-2), or 200019, takes up to six times as long as one over a few classes less: its
    rows begin where no 16-byte load can.
    """
    if V * dtype.itemsize % 16 == 0 or V < 1024:
        return [slice(0, V)]
    return [slice(0, V // 64 * 64), slice(V // 64 * 64, V)]


def product_into(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out = or += a b, without a temporary of its size; out may be fp32 under half-precision factors."""
    if not b.shape[0]:  # a sum of nothing, as where a device has no classes
        if first:
            out.zero_()
    elif out.dtype == b.dtype:
        if first:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)
    elif b.is_meta:
        return  # there is nothing to compute, and before torch 2.13 no meta kernel of a product with an out_dtype
    elif b.is_cuda:
        # `out` may be columns of wider rows. The product with an out_dtype is torch's addmm like the one without: its
        # library takes the distance between rows as it is, and torch copies from a temporary where that cannot be.
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
