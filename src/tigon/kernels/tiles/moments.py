"""Softmax statistics over a row that is read once, in blocks."""

from __future__ import annotations

from tigon.kernels import jit, tl
from tigon.kernels.tiles.cap import cap
from tigon.kernels.tiles.constants import LOWEST
from tigon.kernels.tiles.edges import align, edges, split
from tigon.kernels.tiles.parts import numbers_of_parts


@jit
def fold_moments(
    z, mask, top, total, along, sum_z, softcap, unit, k,
    SOFTCAP: tl.constexpr, ALONG: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Fold a tile (DEPTH, lanes) of logits into the running per-lane sums for `row_moments`."""
    if SOFTCAP:
        # Statistics are taken over the capped logits. The cap is monotonic, so the maximum could be capped alone, but
        # the sums need every capped logit anyway.
        z, _ = cap(z, unit, softcap)
        # tanh maps a masked -inf to -1, a regular logit.
        z = tl.where(mask, z, float("-inf"))
    if SUM:
        sum_z += tl.sum(tl.where(mask, z, 0.0), 0)
    new = tl.maximum(top, tl.max(z, 0))
    # Bounded: from the start to the first maximum the distance would be infinite, and 0 · inf is NaN.
    step = tl.maximum((top - new) * k, -1000.0)
    shrink = tl.exp2(step)
    # Subtract before scaling by k: the difference is exact where both are close, the only place e is not small.
    power = (z - new[None, :]) * k
    e = tl.exp2(power)
    if ALONG:
        # Σ e · log₂ e is relative to the maximum too: a new maximum shifts the old terms' log₂ e by step.
        along = shrink * (along + total * step) + tl.sum(tl.where(e == 0.0, 0.0, e * power), 0)
    total = total * shrink + tl.sum(e, 0)
    return new, total, along, sum_z


@jit
def row_moments(
    logits_ptr, V, softcap, unit, k,
    SOFTCAP: tl.constexpr, ALONG: tl.constexpr, SUM: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's max z, Σ e, Σ e · log₂ e with e = 2^((z − max) k), and Σ z: four fp32 scalars, in one pass.

    z is the stored logit, or with SOFTCAP the capped logit (unit: the scale before the cap). k: from z to powers of 2.
    ALONG and SUM enable the third and fourth result; a disabled result is 0 and free. DEPTH blocks are folded at a
    time. A row of only -inf gives a maximum of LOWEST and a sum of 0. EDGES: the row begins or ends between 16-byte
    boundaries.
    """
    lane = tl.arange(0, BLOCK)
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + lane[None, :]
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    along = tl.zeros((BLOCK,), tl.float32)
    sum_z = tl.zeros((BLOCK,), tl.float32)
    first, width = 0, V
    body_ptr = logits_ptr
    if EDGES:
        first, width = split(logits_ptr, V)
        body_ptr = align(logits_ptr, first)
    for start in range(0, width, DEPTH * BLOCK):
        mask = start + tile < width
        z = tl.load(body_ptr + start + tile, mask=mask, other=float("-inf")).to(tl.float32)
        top, total, along, sum_z = fold_moments(
            z, mask, top, total, along, sum_z, softcap, unit, k, SOFTCAP, ALONG, SUM
        )
    row_top = tl.max(top, 0)
    if EDGES:
        # The edges have separate sums from neutral starts: at most 16 lanes, which do not fit the body's tile. They are
        # read after the body, once the body's tiles no longer take registers.
        edge, real = edges(logits_ptr, first, width, V)
        z = tl.load(logits_ptr + edge, mask=real, other=float("-inf")).to(tl.float32)
        nothing = tl.zeros(edge.shape, tl.float32)
        edge_top, edge_total, edge_along, edge_z = fold_moments(
            z[None, :], real[None, :], nothing + LOWEST, nothing, nothing, nothing, softcap, unit, k,
            SOFTCAP, ALONG, SUM,
        )  # fmt: skip
        row_top = tl.maximum(row_top, tl.max(edge_top, 0))
    # A lane without any logit has top = LOWEST and a total of 0. The step is bounded as above: 2⁻¹⁰⁰⁰ is 0 in fp32, and
    # 0 · step is 0 where 0 · -inf would be NaN.
    step = tl.maximum((top - row_top) * k, -1000.0)
    shrink = tl.exp2(step)
    row_along = 0.0
    row_z = 0.0
    if ALONG:
        row_along = tl.sum(shrink * (along + total * step), 0)
    if SUM:
        row_z = tl.sum(sum_z, 0)
    row_total = tl.sum(total * shrink, 0)
    if EDGES:
        step = tl.maximum((edge_top - row_top) * k, -1000.0)
        shrink = tl.exp2(step)
        row_total += tl.sum(edge_total * shrink, 0)
        if ALONG:
            row_along += tl.sum(shrink * (edge_along + edge_total * step), 0)
        if SUM:
            row_z += tl.sum(edge_z, 0)
    return row_top, row_total, row_along, row_z


@jit
def moments_of_parts(partial_ptr, row, P, k, ALONG: tl.constexpr, SUM: tl.constexpr, BLOCK_P: tl.constexpr):
    """Combine `row_moments` of a row's P parts, (M, 4, P), into the row's."""
    top = numbers_of_parts(partial_ptr, row, 0, P, LOWEST, 4, BLOCK_P)
    total = numbers_of_parts(partial_ptr, row, 1, P, 0.0, 4, BLOCK_P)
    row_top = tl.max(top, 0)
    step = tl.maximum((top - row_top) * k, -1000.0)
    shrink = tl.exp2(step)
    row_along, row_z = 0.0, 0.0
    if ALONG:
        along = numbers_of_parts(partial_ptr, row, 2, P, 0.0, 4, BLOCK_P)
        row_along = tl.sum(shrink * (along + total * step), 0)
    if SUM:
        row_z = tl.sum(numbers_of_parts(partial_ptr, row, 3, P, 0.0, 4, BLOCK_P), 0)
    return row_top, tl.sum(total * shrink, 0), row_along, row_z
