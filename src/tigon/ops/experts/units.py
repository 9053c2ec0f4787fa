"""An expert's activation between its two products, elementwise, and its gradient.

The activation has separate kernels: fused into the products it cost more than the memory traffic it saved. A product
with 128 × 256 tiles has no registers left, and nothing overlaps with a product's epilogue, which stores the results.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, tl
from tigon.kernels.tiles.tanh import tanh
from tigon.ops.acts import ACTS, sigmoid
from tigon.ops.experts.options import Options
from tigon.ops.experts.routing import Routing

# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _gate_and_up(z_ptr, rows, cols, mask, N, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load gate and up for BLOCK_N columns, in fp32. rows (M,): int64. mask (M, BLOCK_N)."""
    if INTERLEAVED:
        pair = 2 * tl.min(cols, 0) + tl.arange(0, 2 * BLOCK_N)
        exists = tl.max(mask.to(tl.int32), 1)[:, None] > 0
        z = tl.load(z_ptr + rows[:, None] * 2 * N + pair[None, :], mask=exists & (pair < 2 * N)[None, :], other=0.0)
        gate, up = tl.split(tl.reshape(z, (z.shape[0], BLOCK_N, 2)))
    else:
        z_ptr += rows[:, None] * 2 * N + cols[None, :]
        gate = tl.load(z_ptr, mask=mask, other=0.0)
        up = tl.load(z_ptr + N, mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@jit
def _unit(
    gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """Return h = act(α · gate) / α · (up + offset), dh/dgate and dh/dup, with gate and up clamped to the limit.

    With caps gate's linear factor, not its sigmoid's, and up go through c · tanh(· / c).
    """
    # gate has no lower clamp, as in gpt-oss: silu maps very negative gates to 0.
    held_gate, held_up = gate, up
    if LIMIT is not None:  # comparisons propagate NaN on every GPU; minimum and maximum do not
        held_gate = tl.where(gate > LIMIT, LIMIT, gate)
        held_up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if UP_CAP is not None:
        held_up, dcap = tanh(up * (1.0 / UP_CAP))
        held_up *= UP_CAP
    if GATE_CAP is not None:
        s, ds = sigmoid(gate)
        t, dt = tanh(gate * (1.0 / GATE_CAP))
        a, da = GATE_CAP * t * s, dt * s + GATE_CAP * t * ds
    elif ALPHA == 1.0:
        a, da = ACT(held_gate)
    else:
        a, da = ACT(held_gate * ALPHA)
        # act(α g)/α has slope act'(α g): the factors cancel in da.
        a = a * (1.0 / ALPHA)
    dgate = (held_up + UP_OFFSET) * da
    dup = a
    if LIMIT is not None:
        dgate = tl.where(gate > LIMIT, 0.0, dgate)
        dup = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, dup)
    if UP_CAP is not None:
        dup *= dcap
    return a * (held_up + UP_OFFSET), dgate, dup


# One program computes BLOCK_M rows × BLOCK_N columns of h (S, N) from z (S, 2N), or from (S, N) without a gate; rows
# beyond offsets[E] are skipped.
# BLOCKS: column blocks. ACT: tile function that returns value and slope. GATED … UP_CAP: the fields of `Expert`.
@jit
@do_not_specialize("E")
def _unit_fwd_kernel(
    z_ptr, h_ptr, offsets_ptr, E, N, BLOCKS, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < tl.load(offsets_ptr + E))[:, None] & (cols < N)[None, :]
    if GATED:
        gate, up = _gate_and_up(z_ptr, rows, cols, mask, N, INTERLEAVED, BLOCK_N)
        h, _, _ = _unit(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
    else:
        h, _ = ACT(tl.load(z_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32))
    tl.store(h_ptr + rows[:, None] * N + cols[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


# One program owns BLOCK_M whole rows and walks over their columns, so that h · dh is summed without atomics.
# z (S, 2N) or (S, N), dh (S, N), weights (T, K): input; order, offsets: `Routing`. dz may overwrite z, and h may
# overwrite dh. Outputs that are None are skipped; without dh there is neither dz nor dots.
# h receives weight · h, for d down = (weight · h)ᵀ dy. dots (S,) receives h · dh in fp32: dy · expert(x) = h · (downᵀ
# dy), so expert(x) is not saved. weight_sum adds the bias's share before the only rounding.
@jit
@do_not_specialize("E")
def _unit_bwd_kernel(
    z_ptr, dh_ptr, weights_ptr, order_ptr, offsets_ptr, dz_ptr, h_ptr, dots_ptr, E, N,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dz, weight · h, and h · dh, the routing weight's gradient."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < tl.load(offsets_ptr + E)
    slot = tl.load(order_ptr + rows, mask=exists, other=0)
    weight = tl.load(weights_ptr + slot, mask=exists, other=0.0).to(tl.float32)
    dots = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, N, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        mask = exists[:, None] & (cols < N)[None, :]
        at = rows[:, None] * N + cols[None, :]
        if GATED:
            gate, up = _gate_and_up(z_ptr, rows, cols, mask, N, INTERLEAVED, BLOCK_N)
            h, dgate, dup = _unit(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
        else:
            h, dgate = ACT(tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32))
        if dh_ptr is not None:
            dh = tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # dz may alias z, and h may alias dh: all threads load before any stores
        if dh_ptr is not None:
            dots += tl.where(mask, h * dh, 0.0)
            if dz_ptr is not None:
                dh *= weight[:, None]
                dtype = dz_ptr.dtype.element_ty
                if GATED:
                    if INTERLEAVED:
                        dz = tl.join((dh * dgate).to(dtype), (dh * dup).to(dtype))
                        dz = tl.reshape(dz, (BLOCK_M, 2 * BLOCK_N))
                        pair = 2 * first + tl.arange(0, 2 * BLOCK_N)
                        pairs = exists[:, None] & (pair < 2 * N)[None, :]
                        tl.store(dz_ptr + rows[:, None] * 2 * N + pair[None, :], dz, mask=pairs)
                    else:
                        to = dz_ptr + rows[:, None] * 2 * N + cols[None, :]
                        tl.store(to, (dh * dgate).to(dtype), mask=mask)
                        tl.store(to + N, (dh * dup).to(dtype), mask=mask)
                else:
                    tl.store(dz_ptr + at, (dh * dgate).to(dtype), mask=mask)
        if h_ptr is not None:
            tl.store(h_ptr + at, (h * weight[:, None]).to(h_ptr.dtype.element_ty), mask=mask)
    if dots_ptr is not None:
        tl.store(dots_ptr + rows, tl.sum(dots, 1), mask=exists)


# --------------------------------------------------------------------------------------------------------- launches


def _unit_tile(interleaved: bool) -> tuple[int, int, dict[str, int]]:
    """Return rows and columns per program, and Triton options. With interleaving a thread loads twice the columns."""
    return (4, 512, {"num_warps": 4}) if interleaved else (8, 256, {"num_warps": 8})


def _unit_bwd_tile() -> tuple[int, int, dict[str, int]]:
    return 4, 256, {"num_warps": 4}


def _constants(options: Options) -> tuple[Any, ...]:
    """Return the kernels' constants: the activation's tile function and the remaining options."""
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
    """Write dz (S, W), weight · h (S, N) and h · dh (S,), given z (S, W), dh (S, N) and the routing weights."""
    S, N = z.shape[0], z.shape[1] // (2 if options.gated else 1)
    if not z.numel():
        return
    block_m, block_n, launched = _unit_bwd_tile()
    E = routing.offsets.shape[0] - 1
    plan = cdiv(S, block_m), (E, N, *_constants(options), block_m, block_n), launched
    key = (S, E, N, z.dtype, weights.dtype, dh is None, dz is None, h is None, dots is None, options)
    launch(_unit_bwd_kernel, key, (z, dh, weights, routing.order, routing.offsets, dz, h, dots), lambda: plan)
