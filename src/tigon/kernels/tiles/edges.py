"""Rows that begin or end between 16-byte boundaries: an aligned body, moved 16 bytes per thread, and two edges.

A thread moves 16 bytes at once only from an address divisible by 16. Rows of 49155 2-byte numbers begin at every
remainder in turn, and a kernel that cannot rely on a row's alignment moves each number separately, 2.5 times slower
than memory allows. The body spans the row from its first to its last boundary. The edges hold fewer numbers than two
threads move at once. Nothing outside the row is read or written.
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def split(ptr, N):
    """Split a row of N numbers at ptr: the count before the first boundary, and the count in whole 16-byte units after.

    ptr: a scalar. Tensors with identically aligned rows have the same head and body.
    """
    W: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    past = (ptr.to(tl.int64) // (16 // W) % W).to(tl.int32)
    # The outer modulo turns W, for a row that begins at a boundary, into 0. A row that ends before its first boundary
    # is all head, with a body of 0.
    head = tl.minimum((W - past) % W, N)
    return head, (N - head) // W * W


@jit
def align(ptr, head):
    """The body's start, with the promise that 16 divides the address."""
    return tl.multiple_of(ptr + head, 16)


@jit
def edges(ptr, head, body, N):
    """The columns of both edges in one tile, head first, and a mask for lanes that hold a column.

    ptr: a pointer with the row's dtype, which determines the lane count: 16 for 2 bytes, 8 for 4.
    """
    W: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    lane = tl.arange(0, 2 * W)
    before = lane < W
    columns = tl.where(before, lane, head + body - W + lane)
    return columns, tl.where(before, lane < head, columns < N)
