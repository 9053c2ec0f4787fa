"""Row layout in memory, and integer arithmetic for launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own costs 9 µs per call on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def dense_like(x: Tensor, *_: Any) -> Tensor:
    """Allocate a contiguous tensor with x's shape and dtype: also the fake of launches with such a result."""
    # A third of new_empty(x.shape)'s host time.
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dense_like_second(_: Tensor, x: Tensor, *others: Any) -> Tensor:
    """`dense_like` of the second argument: the fake of gradients, whose first argument is the result's."""
    return dense_like(x)


def view_rows(x: Tensor) -> Tensor:
    """View x (..., N) as (M, N) with unit stride along N; copies only if no single row stride describes x."""
    n = x.shape[-1] if x.dim() else 1
    if x.dim() == 2 and (x.stride(1) == 1 or n == 1):
        return x
    if x.dim() and (x.stride(-1) == 1 or n == 1):
        try:
            return x.view(-1, n) if n else x.reshape(0, 0)
        except RuntimeError:
            pass
    return x.contiguous().view(-1, n) if n else x.new_empty(0, 0)


# Rows up to WHOLE numbers are not split: at 1001 on an H100 the edges cost more than the narrow loads. Padded rows,
# which begin at a boundary and only end off-boundary, cost twice as much with narrow loads: they stay whole up to
# PADDED.
WHOLE, PADDED = 4096, 512


def uneven(x: Tensor, *others: Tensor) -> bool:
    """Whether rows of x (M, N) begin or end between 16-byte boundaries, and `tigon.kernels.tiles.edges` helps.

    Triton lets a thread move 16 bytes at once if 16 divides address, stride and width. Other layouts can too, in a
    kernel that handles a row's edges separately, if the other tensors' rows are aligned like x's.
    """
    size, address, stride, width = x.element_size(), x.data_ptr(), x.stride(0), x.shape[1]
    for t in others:
        if t.element_size() != size or (t.data_ptr() - address) % 16 or (t.stride(0) - stride) * size % 16:
            return False
    if address % 16 or stride % 16 or any(t.stride(0) % 16 for t in others):
        return width > WHOLE
    return width % 16 != 0 and width > PADDED


def row_groups(x: Tensor, order: tuple[int, ...] | None = None) -> tuple[Tensor, int, int, int]:
    """Describe where the rows of x (..., N) start, with the leading dimensions in the given order.

    Returns: (x, inner, outer_stride, inner_stride), such that row r starts at
        (r // inner) · outer_stride + (r % inner) · inner_stride, and has unit stride. The heads of a packed
        projection are such a view. x is copied if two strides do not describe it.
    """
    if order is None and x.is_contiguous():
        return x, 1, x.shape[-1], 0
    if x.stride(-1) == 1:
        groups: list[tuple[int, int]] = []
        for d in range(x.dim() - 1) if order is None else order:
            size, stride = x.shape[d], x.stride(d)
            if groups and groups[-1][1] == size * stride:
                groups[-1] = groups[-1][0] * size, stride
            elif size != 1:
                groups.append((size, stride))
        if len(groups) < 2:
            return x, 1, groups[0][1] if groups else 0, 0
        if len(groups) == 2:
            return x, groups[1][0], groups[0][1], groups[1][1]
    return (x if order is None else x.permute(*order, -1)).contiguous(), 1, x.shape[-1], 0


def memory_order(dense: Tensor) -> tuple[int, ...] | None:
    """The leading dimensions of an `empty_rows` result, from slowest to fastest; None if contiguous."""
    if dense.is_contiguous():
        return None
    strides = dense.stride()
    return tuple(sorted(range(len(strides) - 1), key=lambda d: -strides[d]))


def in_order(y: Tensor, x: Tensor) -> Tensor:
    """y in x's memory order, dense along the rows: the same strides as `empty_rows`, using torch operators."""
    if x.is_contiguous() or x.dim() < 2 or x.stride(-1) != 1:
        return y.contiguous()
    order = [0]
    for d in range(1, x.dim()):  # insertion sort: Dynamo cannot sort symbolic sizes
        at = d
        while at and x.stride(order[at - 1]) < x.stride(d):
            at -= 1
        order.insert(at, d)
    if order[-1] != x.dim() - 1 or 0 in x.stride():
        return y.contiguous()
    return y.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def empty_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a result with x's shape, in x's memory order, dense along the rows."""
    if x.is_contiguous() or (x.stride(-1) == 1 and x.dim() > 1):
        y = torch.empty_like(x, dtype=dtype)
        # For overlapping rows, such as `unfold` windows, PyTorch may make another dimension the fastest.
        if y.stride(-1) == 1 or y.is_contiguous():
            return y
    return x.new_empty(x.shape, dtype=dtype)
