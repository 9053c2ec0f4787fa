"""Launches of the experts' layer, in the order of a step, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.backend import cdiv, differentiable, launch, launcher, rows_of, shared_memory
from tigon.ops.experts.options import Options
from tigon.ops.experts.products import _down_bwd_kernel, _gate_up_fwd_kernel, _rows_kernel, _weight_bwd_kernel
from tigon.ops.experts.routing import Routing, empty_routing, route, rows_of_a_tile, tiles_at_most
from tigon.ops.experts.sums import expert_sum, token_sum, weight_sum

# ------------------------------------------------------------------------------------------------------------- tiles
# Each says: columns of a block, depth of a step, how many tiles of rows share a block's weight in L2, and Triton's
# options. Rows of a tile are routing's: all kernels walk the same list of tiles.

Tile = tuple[int, int, int, dict[str, int]]


def _gate_up_tile(rows: int, x: Tensor, gated: bool) -> Tile:
    """Columns are of h: the product has twice as many, gate and up."""
    if x.dtype == torch.float32:  # without tensor cores: what fits into registers
        return 16 if gated else 32, 16, 8, {"num_warps": 4, "num_stages": 2}
    if rows >= 64:
        return 128 if gated else 256, 64, 8, {"num_warps": 8 if rows == 128 else 4, "num_stages": _stages(x, rows, 256)}
    return 32 if gated else 64, 64, 8, {"num_warps": 4, "num_stages": 3}


def _rows_tile(rows: int, x: Tensor) -> Tile:
    if x.dtype == torch.float32:
        return 32, 16, 8, {"num_warps": 4, "num_stages": 2}
    if rows >= 64:
        return 256, 64, 8, {"num_warps": 8 if rows == 128 else 4, "num_stages": _stages(x, rows, 256)}
    return 64, 64, 8, {"num_warps": 4, "num_stages": 3}


def _down_bwd_tile(rows: int, x: Tensor) -> Tile:
    """Half as many columns as elsewhere: gate, up and their gradients want registers beside the product's."""
    if x.dtype == torch.float32:
        return 32, 16, 8, {"num_warps": 4, "num_stages": 2}
    if rows >= 64:
        return 128, 64, 8, {"num_warps": 8, "num_stages": _stages(x, rows, 128)}
    return 64, 64, 8, {"num_warps": 4, "num_stages": 3}


def _weight_bwd_tile(slots: int, E: int, x: Tensor) -> tuple[int, int, int, int, dict[str, int]]:
    """Rows and columns of a block of the weight, rows of tokens a step, blocks that share rows in L2."""
    if x.dtype == torch.float32:
        return 32, 32, 16, 8, {"num_warps": 4, "num_stages": 2}
    if slots < 20 * E:
        return 64, 64, 16, 8, {"num_warps": 4, "num_stages": 3}
    return 128, 256, 64, 8, {"num_warps": 8, "num_stages": _stages(x, 128, 256)}


def _stages(x: Tensor, rows: int, columns: int) -> int:
    """Steps on their way at a time, of 64 in two bytes: as many as shared memory holds, four at most."""
    return max(2, min(4, (shared_memory(x.device) - 16384) // ((rows + columns) * 64 * 2)))


def _precision(x: Tensor) -> str:
    """Products of fp32 are as exact as torch's own are set to be."""
    return "tf32" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


# ---------------------------------------------------------------------------------------------------------- products


def _with_unit_stride(w: Tensor) -> Tensor:
    """An expert's matrix is read by rows or by columns, where it lies; another layout is copied."""
    return w if w.stride(2) == 1 or w.stride(1) == 1 else w.contiguous()


def _gradient_room(w: Tensor) -> Tensor:
    """Room for the gradient of w, in the order of w's memory."""
    dense = w.stride(2) == 1 or w.stride(1) == 1
    room = torch.empty_like(w) if dense else w.new_empty(w.shape)
    return room if room.stride(2) == 1 or room.stride(1) == 1 else w.new_empty(w.shape)


def _gate_up(
    x: Tensor, w: Tensor, bias: Tensor | None, routing: Routing, z: Tensor | None, h: Tensor, K: int, rows: int,
    options: Options,
) -> None:  # fmt: skip
    (S, N), (E, _, D) = h.shape, w.shape
    tiles = tiles_at_most(S, E, rows)
    if not tiles or not N:
        return
    precision = _precision(x)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        block_n, block_k, group, launched = _gate_up_tile(rows, x, options.gated)
        blocks = cdiv(N, block_n)
        sizes = (tiles, routing.tiles.shape[1], E, N, D, blocks, K, x.stride(0), *w.stride())
        pairs = options.interleaved or w.stride(2) == 1
        parts = 4 if options.gated and pairs and block_n >= 128 else 1
        flags = (
            *options,
            pairs,
            parts,
            D % block_k == 0,
            precision,
            rows,
            block_n,
            block_k,
            group,
        )
        return tiles * blocks, (*sizes, *flags), launched

    key = (S, E, N, D, K, rows, x.stride(0), w.stride(), x.dtype, z is None, bias is None, options, precision)
    launch(_gate_up_fwd_kernel, key, (x, w, bias, routing.order, routing.tiles, routing.offsets, z, h), plan)


def _rows_by_weight(
    a: Tensor, w: Tensor, bias: Tensor | None, routing: Routing, y: Tensor, rows: int, *, transposed: bool = False
) -> None:
    """Write a (S, K) by each expert's w (N, K), or (K, N) where transposed, to y (S, N)."""
    (S, K), N, E = a.shape, y.shape[1], w.shape[0]
    tiles = tiles_at_most(S, E, rows)
    if not tiles or not N:
        return
    strides = (w.stride(0), w.stride(2), w.stride(1)) if transposed else w.stride()
    precision = _precision(a)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        block_n, block_k, group, launched = _rows_tile(rows, a)
        blocks = cdiv(N, block_n)
        sizes = (tiles, routing.tiles.shape[1], E, N, K, blocks, *strides)
        return tiles * blocks, (*sizes, K % block_k == 0, precision, rows, block_n, block_k, group), launched

    key = (S, E, N, K, rows, strides, a.dtype, bias is None, precision)
    launch(_rows_kernel, key, (a, w, bias, routing.tiles, routing.offsets, y), plan)


def _down_bwd(
    dy: Tensor, w: Tensor, z: Tensor, weights: Tensor, routing: Routing, dz: Tensor | None, h: Tensor | None,
    dots: Tensor | None, K: int, rows: int, options: Options,
) -> None:  # fmt: skip
    E, D, N = w.shape
    S = z.shape[0]
    tiles = tiles_at_most(S, E, rows)
    if not tiles or not N:
        return
    precision = _precision(dy)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        block_n, block_k, group, launched = _down_bwd_tile(rows, dy)
        blocks = cdiv(N, block_n)
        strides = (K, dy.stride(0), w.stride(0), w.stride(2), w.stride(1))
        sizes = (tiles, routing.tiles.shape[1], E, N, D, blocks, *strides)
        flags = (*options, max(1, block_n // 32), D % block_k == 0, precision, rows, block_n, block_k, group)
        return tiles * blocks, (*sizes, *flags), launched

    wanted = dz is None, h is None, dots is None
    key = (S, E, N, D, K, rows, dy.stride(0), w.stride(), dy.dtype, weights.dtype, wanted, options, precision)
    launch(_down_bwd_kernel, key, (dy, w, z, weights, routing.order, routing.tiles, routing.offsets, dz, h, dots), plan)


def _weight_bwd(a: Tensor, b: Tensor, routing: Routing, dw: Tensor, K: int, *, tokens: str) -> None:
    """Write Σ over each expert's rows of aᵀ b to dw (E, M, N). tokens: "a" or "b", whose rows are those of tokens."""
    if dw.stride(2) != 1:  # stored by columns
        a, b, dw, tokens = b, a, dw.transpose(1, 2), {"a": "b", "b": "a"}[tokens]
    E, M, N = dw.shape
    if not dw.numel():
        return
    slots, precision = routing.order.shape[0], _precision(a)

    def plan() -> tuple[int, tuple, dict[str, int]]:
        block_m, block_n, block_r, group, launched = _weight_bwd_tile(slots, E, a)
        blocks = cdiv(M, block_m), cdiv(N, block_n)
        sizes = (M, N, *blocks, a.stride(0), b.stride(0), dw.stride(0), dw.stride(1))
        flags = (K, tokens == "a", tokens == "b", precision, block_m, block_n, block_r, group)
        return E * blocks[0] * blocks[1], (*sizes, *flags), launched

    key = (slots, E, M, N, K, a.stride(0), b.stride(0), dw.stride(), a.dtype, tokens, precision)
    launch(_weight_bwd_kernel, key, (a, b, routing.order, routing.offsets, dw), plan)


# --------------------------------------------------------------------------------------------------------- launches

_OPTIONS = "str act, bool gated, bool interleaved, float alpha, float? limit, float up_offset"


def _moe_mlp_fwd_fake(x, index, weights, gate_up, down, gate_up_bias, down_bias, keep, *options):
    S = index.shape[0] * index.shape[1]
    z = x.new_empty((S, gate_up.shape[1]) if keep else (0,))
    return x.new_empty(x.shape), z, *empty_routing(index, gate_up.shape[0])


@launcher(
    "(Tensor x, Tensor index, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias,"
    f" bool keep, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _moe_mlp_fwd_fake,
)
def _moe_mlp_fwd(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, keep: bool, *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    (E, D, N), K = down.shape, index.shape[1]
    S = index.numel()
    rows = rows_of_a_tile(S, E, x.dtype)
    routing = route(index, E, rows)
    y = x.new_empty(x.shape)
    z = x.new_empty((S, gate_up.shape[1]) if keep else (0,))
    h = x.new_empty((S, N))
    _gate_up(
        rows_of(x), _with_unit_stride(gate_up), _dense(gate_up_bias), routing, z if keep else None, h, K, rows,
        Options(*options),
    )  # fmt: skip
    results = x.new_empty((S, D))
    _rows_by_weight(h, _with_unit_stride(down), _dense(down_bias), routing, results, rows)
    token_sum(results, routing, weights.contiguous(), y, K)
    return y, z, *routing


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _moe_mlp_bwd_fake(
    dy, x, index, weights, gate_up, down, gate_up_bias, down_bias, z, order, place, offsets, tiles, needs, *options
):
    def like(t, needed, room=lambda t: t.new_empty(t.shape)):
        return room(t) if needed else x.new_empty(0)

    return (
        like(x, needs[0]),
        like(weights, needs[1]),
        like(gate_up, needs[2], _gradient_room),
        like(down, needs[3], _gradient_room),
        like(gate_up_bias, needs[4] and gate_up_bias is not None),
        like(down_bias, needs[5] and down_bias is not None),
    )


@launcher(
    "(Tensor dy, Tensor x, Tensor index, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias,"
    " Tensor? down_bias, Tensor z, Tensor order, Tensor place, Tensor offsets, Tensor tiles, bool[] needs,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _moe_mlp_bwd_fake,
)
def _moe_mlp_bwd(
    dy: Tensor, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, z: Tensor, order: Tensor, place: Tensor, offsets: Tensor, tiles: Tensor,
    needs: list[bool], *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    routing = Routing(order, place, offsets, tiles)
    dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = found = _moe_mlp_bwd_fake(
        dy, x, index, weights, gate_up, down, gate_up_bias, down_bias, z, *routing, needs, *options
    )
    (E, D, N), K = down.shape, index.shape[1]
    S = order.shape[0]
    rows = rows_of_a_tile(S, E, x.dtype)
    index, weights, dy, x = index.contiguous(), weights.contiguous(), rows_of(dy), rows_of(x)
    of_bias = [needs[4] and gate_up_bias is not None, needs[5] and down_bias is not None]
    if of_bias[1]:
        expert_sum(dy, routing, weights, ddown_bias, K)
    need_dz = needs[0] or needs[2] or of_bias[0]
    dz = x.new_empty(z.shape) if need_dz else None
    h = x.new_empty((S, N)) if needs[3] else None
    blocks = cdiv(N, _down_bwd_tile(rows, x)[0])
    dots = x.new_empty((S, blocks), dtype=torch.float32) if needs[1] else None
    if need_dz or needs[1] or needs[3]:
        by = _with_unit_stride(down)
        _down_bwd(dy, by, z, weights, routing, dz, h, dots, K, rows, Options(*options))
    if dots is not None:
        weight_sum(dots, routing, index, dy, _dense(down_bias), dweights)
    if h is not None:
        _weight_bwd(dy, h, routing, ddown, K, tokens="a")
        h = None  # before there is room for the next
    if dz is not None and needs[0]:
        expanded = x.new_empty((S, D))
        _rows_by_weight(dz, _with_unit_stride(gate_up), None, routing, expanded, rows, transposed=True)
        token_sum(expanded, routing, None, dx, K)
        del expanded
    if dz is not None and needs[2]:
        _weight_bwd(dz, x, routing, dgate_up, K, tokens="b")
    if dz is not None and of_bias[0]:
        expert_sum(dz, routing, None, dgate_up_bias, K)
    return found


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, _, act, gated, interleaved, alpha, limit, up_offset = inputs
    ctx.options = act, gated, interleaved, alpha, limit, up_offset
    ctx.save_for_backward(*tensors, *output[1:])


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 14
    saved = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = [wanted[i] and saved[i] is not None for i in (0, 2, 3, 4, 5, 6)]
    dx, dweights, *rest = _moe_mlp_bwd(dy, *saved, needs, *ctx.options)
    found = dx, dweights, *rest
    first, second, *others = (g if need else None for g, need in zip(found, needs, strict=True))
    return (first, None, second, *others, *(None,) * 7)


_moe_mlp = differentiable(_moe_mlp_fwd, _setup_context, _backward)
