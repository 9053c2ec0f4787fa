"""An expert's activation between its two products, element by element, and its gradient.

The activation has kernels of its own: inside the products it cost more than the memory traffic that it saved. A product
of tiles of 128 × 256 has no registers left for it, and nothing runs beside a product's last part, which stores results.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, tl
from tigon.ops.acts import ACTS
from tigon.ops.experts.options import Options
from tigon.ops.experts.routing import Routing

# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _gate_and_up(z_ptr, rows, cols, mask, N, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Gate and up of BLOCK_N columns, in fp32. rows (M,): int64. mask (M, BLOCK_N)."""
    if INTERLEAVED:
        # One wide load brings the pairs; each pair is in one thread, which splits it.
        # cols are neighbours, so the pairs begin at twice the first column. min is a way to say "the first" of a tile.
        pair = 2 * tl.min(cols, 0) + tl.arange(0, 2 * BLOCK_N)
        # The mask of rows alone: the columns' mask has another width here.
        exists = tl.max(mask.to(tl.int32), 1)[:, None] > 0
        z = tl.load(z_ptr + rows[:, None] * 2 * N + pair[None, :], mask=exists & (pair < 2 * N)[None, :], other=0.0)
        gate, up = tl.split(tl.reshape(z, (z.shape[0], BLOCK_N, 2)))
    else:
        # Two runs of memory N apart, each in wide loads.
        z_ptr += rows[:, None] * 2 * N + cols[None, :]
        gate = tl.load(z_ptr, mask=mask, other=0.0)
        up = tl.load(z_ptr + N, mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@jit
def _unit(
    gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr
):  # fmt: skip
    """h = act(α · gate) / α · (up + offset), gate and up held to the limit, and dh/dgate, dh/dup."""
    # gate is clamped from above alone, as gpt-oss has it: silu sends a very negative gate to 0 by itself.
    held_gate, held_up = gate, up
    if LIMIT is not None:  # comparisons, unlike minimum and maximum, let NaN through on every GPU
        held_gate = tl.where(gate > LIMIT, LIMIT, gate)
        held_up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ALPHA == 1.0:
        a, da = ACT(held_gate)
    else:
        a, da = ACT(held_gate * ALPHA)
        # act(α g)/α has slope act'(α g): the factors cancel, and da needs none.
        a = a * (1.0 / ALPHA)
    # The up projection's offset is gpt-oss's up + 1.
    dgate = (held_up + UP_OFFSET) * da
    # h = a · (up + offset): dh/dup = a, dh/dgate = (up + offset) · act'.
    dup = a
    if LIMIT is not None:
        # A clamped number has no slope.
        dgate = tl.where(gate > LIMIT, 0.0, dgate)
        dup = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, dup)
    return a * (held_up + UP_OFFSET), dgate, dup


@jit
@do_not_specialize("E")
def _unit_fwd_kernel(
    z_ptr, h_ptr, offsets_ptr, E, N, BLOCKS, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # int64: S · 2N reaches 2**31 at 64k slots of 2 × 16384.
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    # The number of slots with an expert is known on the device alone: rows beyond it are skipped.
    mask = (rows < tl.load(offsets_ptr + E))[:, None] & (cols < N)[None, :]
    if GATED:
        gate, up = _gate_and_up(z_ptr, rows, cols, mask, N, INTERLEAVED, BLOCK_N)
        h, _, _ = _unit(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
    else:
        h, _ = ACT(tl.load(z_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32))
    # Rounded once, to the dtype in which `down` multiplies it.
    tl.store(h_ptr + rows[:, None] * N + cols[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


@jit
@do_not_specialize("E")
def _unit_bwd_kernel(
    z_ptr, dh_ptr, weights_ptr, order_ptr, offsets_ptr, dz_ptr, h_ptr, dots_ptr, E, N,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dz, which may overwrite z; weight · h, which may overwrite dh; and h · dh, the routing weight's gradient.

    A program takes whole rows, for the sums h · dh. Outputs that are None are not written; without dh there is neither
    dz nor h · dh.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Slots without an expert come last, and have no rows.
    exists = rows < tl.load(offsets_ptr + E)
    # order is not written beyond the last row with an expert: the mask is what keeps that memory from being used as an
    # index.
    slot = tl.load(order_ptr + rows, mask=exists, other=0)
    # In the order of the sort: rows are by expert, weights by token.
    weight = tl.load(weights_ptr + slot, mask=exists, other=0.0).to(tl.float32)
    # A sum for every place of the tile, reduced once a row.
    dots = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # z is read once, in blocks: no statistic has to be known before dz is written.
    for first in range(0, N, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        mask = exists[:, None] & (cols < N)[None, :]
        at = rows[:, None] * N + cols[None, :]
        if GATED:
            gate, up = _gate_and_up(z_ptr, rows, cols, mask, N, INTERLEAVED, BLOCK_N)
            h, dgate, dup = _unit(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
        else:
            h, dgate = ACT(tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32))
        if dh_ptr is not None:
            dh = tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # dz may lie over z, and h over dh: all threads read before any writes
        if dh_ptr is not None:
            # The routing weight's gradient is dy · expert(x) = h · (downᵀ dy): expert(x) itself is not kept.
            dots += tl.where(mask, h * dh, 0.0)
            if dz_ptr is not None:
                # In place, after dots has used the unscaled dh: no second tile is held.
                dh *= weight[:, None]
                # dh came without the routing weight, which dots must not have and dz must.
                dtype = dz_ptr.dtype.element_ty
                if GATED:
                    if INTERLEAVED:
                        # Joined in registers and stored as one run, as it was loaded.
                        dz = tl.join((dh * dgate).to(dtype), (dh * dup).to(dtype))
                        dz = tl.reshape(dz, (BLOCK_M, 2 * BLOCK_N))
                        pair = 2 * first + tl.arange(0, 2 * BLOCK_N)
                        pairs = exists[:, None] & (pair < 2 * N)[None, :]
                        tl.store(dz_ptr + rows[:, None] * 2 * N + pair[None, :], dz, mask=pairs)
                    else:
                        to = dz_ptr + rows[:, None] * 2 * N + cols[None, :]
                        # dgate and dup include the clamp's zero slope.
                        tl.store(to, (dh * dgate).to(dtype), mask=mask)
                        tl.store(to + N, (dh * dup).to(dtype), mask=mask)
                else:
                    tl.store(dz_ptr + at, (dh * dgate).to(dtype), mask=mask)
        if h_ptr is not None:
            # For the gradient of down, (weight · h)ᵀ dy: the weight is applied here, where h is written anyway.
            tl.store(h_ptr + at, (h * weight[:, None]).to(h_ptr.dtype.element_ty), mask=mask)
    if dots_ptr is not None:
        # fp32: weight_sum adds the bias's share before the one rounding.
        tl.store(dots_ptr + rows, tl.sum(dots, 1), mask=exists)


# --------------------------------------------------------------------------------------------------------- launches


def _unit_tile(interleaved: bool) -> tuple[int, int, dict[str, int]]:
    """Rows and columns of a program. With gate and up interleaved a thread loads twice as many neighbouring columns."""
    return (4, 512, {"num_warps": 4}) if interleaved else (8, 256, {"num_warps": 8})


def _unit_bwd_tile() -> tuple[int, int, dict[str, int]]:
    return 4, 256, {"num_warps": 4}


def _constants(options: Options) -> tuple[Any, ...]:
    """The kernels' options: the activation is its tile function, which they call."""
    return ACTS[options.act].tile, *options[1:]


def unit(z: Tensor, h: Tensor, routing: Routing, options: Options) -> None:
    """Write h (S, N), computed from z: (S, 2N), or (S, N) without a gate."""
    S, N = h.shape
    if not h.numel():
        return
    block_m, block_n, launched = _unit_tile(options.interleaved)
    blocks, E = cdiv(N, block_n), routing.offsets.shape[0] - 1
    plan = cdiv(S, block_m) * blocks, (E, N, blocks, *_constants(options), block_m, block_n), launched
    launch(_unit_fwd_kernel, (S, E, N, z.dtype, options), (z, h, routing.offsets), lambda: plan)


def unit_bwd(
    z: Tensor, dh: Tensor | None, weights: Tensor, routing: Routing, dz: Tensor | None, h: Tensor | None,
    dots: Tensor | None, options: Options,
) -> None:  # fmt: skip
    """Write dz (S, W), weight · h (S, N) and h · dh (S,), from z (S, W), dh (S, N) and the routing weights."""
    # From z, since dh may be None.
    S, N = z.shape[0], z.shape[1] // (2 if options.gated else 1)
    if not z.numel():
        return
    block_m, block_n, launched = _unit_bwd_tile()
    E = routing.offsets.shape[0] - 1
    # A flat grid over rows alone: sums along a row stay in one program, and need neither atomics nor a second launch.
    plan = cdiv(S, block_m), (E, N, *_constants(options), block_m, block_n), launched
    key = (S, E, N, z.dtype, weights.dtype, dh is None, dz is None, h is None, dots is None, options)
    launch(_unit_bwd_kernel, key, (z, dh, weights, routing.order, routing.offsets, dz, h, dots), lambda: plan)
