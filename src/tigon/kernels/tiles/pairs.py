"""Rotary pairs: a pair's members lie half a head apart, or side by side (INTERLEAVED).

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def load_pairs(
    at, here, stride_plane, HALF: tl.constexpr, BLOCK_R: tl.constexpr, INTERLEAVED: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr,
):  # fmt: skip
    """Load both members of each row's pairs, in fp32.

    at, here: row addresses and mask, with a trailing dimension of size 1. From pair SECOND on the angles lie one plane
    further, from THIRD on two; negative values: a single plane.
    """
    if INTERLEAVED:  # one contiguous run, in wide loads; a thread holds whole pairs, so splitting moves no data
        col = tl.arange(0, 2 * BLOCK_R)
        if SECOND >= 0:
            # Each column gets its plane's address, so that one load serves three planes. A pair is two columns, hence
            # the 2.
            at += ((col >= 2 * SECOND).to(tl.int32) + (col >= 2 * THIRD).to(tl.int32)) * stride_plane
        x = tl.load(at + col, mask=here & (col < 2 * HALF), other=0.0).to(tl.float32)
        if len(x.shape) == 2:
            x = tl.reshape(x, (x.shape[0], BLOCK_R, 2))
        else:
            x = tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_R, 2))
        x1, x2 = tl.split(x)
    else:
        pair = tl.arange(0, BLOCK_R)
        if SECOND >= 0:
            at += ((pair >= SECOND).to(tl.int32) + (pair >= THIRD).to(tl.int32)) * stride_plane
        mask = here & (pair < HALF)
        x1 = tl.load(at + pair, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(at + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@jit
def store_pairs(at, here, y1, y2, HALF: tl.constexpr, BLOCK_R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store both members of each pair at the addresses that `load_pairs` reads, rounded to the dtype at `at`."""
    dtype = at.dtype.element_ty
    if INTERLEAVED:
        col = tl.arange(0, 2 * BLOCK_R)
        tl.store(at + col, tl.interleave(y1.to(dtype), y2.to(dtype)), mask=here & (col < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK_R)
        mask = here & (pair < HALF)
        tl.store(at + pair, y1.to(dtype), mask=mask)
        tl.store(at + HALF + pair, y2.to(dtype), mask=mask)


@jit
def turn(x1, x2, c1, c2, s1, s2, INVERSE: tl.constexpr):
    """Rotate pairs (x1, x2) by angles with cosines c1, c2 and sines s1, s2. INVERSE: transposed, for dx.

    Each member has a separate angle, because tables that repeat each angle may hold two different ones. In fp32, with
    contraction: `tigon.ops.rope` has a variant that rounds each product.
    """
    if INVERSE:
        # The transpose swaps the sines between members. A rotation by −angle would be a different map where a table
        # holds two different angles for a pair.
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    return y1, y2
