"""A row that begins or ends between 16-byte boundaries: its body, moved 16 bytes a thread, and the two edges beside it.

A thread moves 16 bytes at once only from an address that 16 divides. Rows of 49155 numbers of 2 bytes begin at every
remainder in turn, and a kernel that cannot rely on a row's address moves each number by itself, 2.5 times as slowly as
memory allows. The body of such a row is what lies between its first and its last boundary. The edges are fewer numbers
than two threads move at once. Nothing outside the row is read or written.
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def split(ptr, N):
    """A row of N numbers at ptr: how many come before its first boundary, and how many fill whole 16 bytes from there.

    ptr: a scalar. Two tensors whose rows lie alike have the same head and body.
    """
    # W numbers fill 16 bytes: 8 of 16 bits, 4 of 32.
    W: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    # The address itself: it also tells of storage that begins between two boundaries.
    past = (ptr.to(tl.int64) // (16 // W) % W).to(tl.int32)
    # The outer modulo turns W, of a row that begins at a boundary, into 0. A row that ends before its first boundary is
    # all head, with a body of 0.
    head = tl.minimum((W - past) % W, N)
    # A multiple of W by construction, which the compiler sees: a mask `column < body` is the same for all of a thread's
    # numbers.
    return head, (N - head) // W * W


@jit
def aligned(ptr, head):
    """Where the body begins, with the promise that 16 divides the address."""
    return tl.multiple_of(ptr + head, 16)


@jit
def edges(ptr, head, body, N):
    """The columns of both edges in one tile, and which of its lanes hold one: those before the body, then those behind.

    ptr: a pointer to the row's dtype, which says how many lanes there are: 16 of 2 bytes, 8 of 4.
    """
    W: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    lane = tl.arange(0, 2 * W)
    # Each edge has fewer than W numbers, so that W lanes hold it. Lane W is the first column behind the body.
    before = lane < W
    columns = tl.where(before, lane, head + body - W + lane)
    return columns, tl.where(before, lane < head, columns < N)
