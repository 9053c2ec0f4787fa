"""Launches for the experts' layer, in execution order, and the autograd function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    can_describe,
    cdiv,
    describe,
    differentiable,
    is_graph_retained,
    is_traced,
    launch,
    launcher,
    next_power_of_2,
    shared_memory,
    view_rows,
)
from tigon.ops.experts.options import Options
from tigon.ops.experts.products import _rows_kernel, _weight_bwd_kernel
from tigon.ops.experts.quantized_products import (
    MANY_ROWS,
    Packed,
    choose_experts,
    expand,
    multiply_rows,
    split_experts,
)
from tigon.ops.experts.routing import Routing, empty_routing, route, rows_of_a_tile, tiles_at_most
from tigon.ops.experts.rows import expert_sum, take, token_sum, weight_sum
from tigon.ops.experts.units import unit, unit_bwd

# ------------------------------------------------------------------------------------------------------------- tiles


def _rows_tile(rows: int, columns: int, a: Tensor) -> tuple[int, int, int, dict[str, int]]:
    """Return columns per block, step depth, row tiles that share a weight block in L2, and Triton's options.

    routing.py sets the rows per tile, since all products walk the same list of tiles.
    """
    if a.dtype == torch.float32:  # no tensor cores: limited by registers
        return 32, 16, 8, {"num_warps": 4, "num_stages": 2}
    # 64 two-byte elements are 128 bytes, the full width of the shared-memory banks. Deeper steps leave room for fewer
    # stages.
    if columns <= 128:  # an adapter's rank: bound by loading a's rows, once
        return max(16, next_power_of_2(columns)), 64, 8, {"num_warps": 4, "num_stages": 4}
    if rows >= 64:
        return 256, 64, 8, {"num_warps": 8 if rows == 128 else 4, "num_stages": _stages(a, rows, 256)}
    # With few tokens per expert the products are bound by loading weights, each used for 16 or 32 rows. Narrow blocks
    # make more programs, which together keep more loads in flight.
    return 64, 64, 8, {"num_warps": 4, "num_stages": 3}


def _weight_bwd_tile(
    slots: int, E: int, M: int, N: int, a: Tensor
) -> tuple[int, int, int, int, dict[str, int]]:  # fmt: skip
    """Return rows and columns per weight block, token rows per step, blocks that share rows in L2, and options."""
    if a.dtype == torch.float32:
        return 32, 32, 16, 8, {"num_warps": 4, "num_stages": 2}
    if min(M, N) <= 64:  # an adapter's rank: bound by loading the rows of the wide side, once
        narrow, wide = max(16, next_power_of_2(min(M, N))), 128
        block_m, block_n = (narrow, wide) if M <= N else (wide, narrow)
        return block_m, block_n, 16 if slots < 20 * E else 64, 8, {"num_warps": 4, "num_stages": 3}
    # With few tokens per expert, writing dW dominates, and deep steps would be mostly masked.
    if slots < 20 * E:
        return 64, 64, 16, 8, {"num_warps": 4, "num_stages": 3}
    if slots < 1536 * E:  # short sums: two programs per SM overlap stores with products
        return 128, 128, 64, 8, {"num_warps": 8, "num_stages": 3}
    # Long sums: 128 fp32 accumulators per thread leave room for a single program per SM, and stores take a small share.
    return 128, 256, 64, 16, {"num_warps": 8, "num_stages": _stages(a, 128, 256)}


def _stages(a: Tensor, rows: int, columns: int) -> int:
    """Return the number of pipeline stages with 64 two-byte elements: as many as fit in shared memory, at most 4."""
    # Reserve 16 KiB of shared memory for the compiler. At least two stages: load and multiply.
    return max(2, min(4, (shared_memory(a.device) - 16384) // ((rows + columns) * 64 * 2)))


def _precision(a: Tensor) -> str:
    """Return the input precision for products; fp32 follows torch's setting."""
    if a.dtype != torch.float32:
        return "ieee"
    # fp32_precision exists since PyTorch 2.9. Once a program has set it, get_float32_matmul_precision raises.
    set_to = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if set_to is None:
        set_to = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "tf32" if set_to == "tf32" else "ieee"


# ---------------------------------------------------------------------------------------------------------- products

# An adapter's share of a product: s (S, r), its rows times A sorted by expert, and B.
Share = tuple[Tensor, Tensor]


def _stack(w: Tensor, scales: Tensor | None, table: Tensor | None) -> Tensor | Packed:
    """Return the weights for a product: w if its rows or columns have unit stride, else a copy; 4 bits as they are."""
    if scales is not None and table is not None:
        return Packed(w, scales, table)
    # A transposed weight needs no copy: the kernel takes both strides, and the descriptor puts the unit-stride
    # dimension last.
    return w if w.stride(2) == 1 or w.stride(1) == 1 else w.contiguous()


def _gradient_room(w: Tensor) -> Tensor:
    """Allocate w's gradient in w's memory order."""
    dense = w.stride(2) == 1 or w.stride(1) == 1
    # empty_like keeps a dense tensor's strides, but picks an arbitrary order for an expanded or sliced tensor.
    room = torch.empty_like(w) if dense else w.new_empty(w.shape)
    return room if room.stride(2) == 1 or room.stride(1) == 1 else w.new_empty(w.shape)


def _rank_block(rank: int, a: Tensor) -> int:
    """Return the ranks per step in an adapter's share of a tile."""
    return 16 if a.dtype == torch.float32 or rank <= 16 else 32


def _rows_by_weight(
    a: Tensor, w: Tensor | Packed, bias: Tensor | None, routing: Routing, y: Tensor, rows: int, *,
    transposed: bool = False, share: Share | None = None, scale: float | None = None, tiles: int | None = None,
) -> None:  # fmt: skip
    """Write a (S, K) times each expert's w, (N, K) or with `transposed` (K, N), to y (S, N).

    share: s (S, r) and b, (E, N, r) or with `transposed` (E, r, N): s times each expert's b is added.
    scale: multiplies y, before the only rounding.
    tiles: the tiles to visit, where w holds some of the experts.
    """
    if isinstance(w, Packed):
        _rows_by_packed(a, w, bias, routing, y, rows, transposed, share)
        return
    (S, K), N, E = a.shape, y.shape[1], w.shape[0]
    tiles = tiles_at_most(S, E, rows) if tiles is None else tiles
    if not tiles or not N:
        return
    s, b = (None, None) if share is None else share
    if transposed:
        w, b = w.transpose(1, 2), None if b is None else b.transpose(1, 2)
    of_rank = (0, 0, 0, 0) if b is None else (b.shape[2], *b.stride())
    strides, precision = w.stride(), _precision(a)
    by_columns = strides[2] != 1
    lies = w.transpose(1, 2) if by_columns else w
    # A descriptor needs unit stride in the last dimension and rows aligned to 16 bytes. `lies` is the weight in memory
    # order.
    described = can_describe(a, lies)
    block_n, block_k, group, launched = _rows_tile(rows, N, a)

    def plan() -> Plan:
        blocks = cdiv(N, block_n)
        sizes = (tiles, routing.tiles.shape[1], E, N, K, blocks, *strides, *of_rank, scale)
        # K % block_k == 0 means that loads along K need no mask.
        tile = (rows, block_n, block_k, _rank_block(of_rank[0], a), group)
        flags = (described, by_columns, K % block_k == 0, precision, *tile)
        return tiles * blocks, (*sizes, *flags), launched

    operands: tuple[Any, ...] = (a, w)
    if described:
        block = (1, block_k, block_n) if by_columns else (1, block_n, block_k)
        # Descriptors hold addresses, so each call makes new descriptors; only the plan is cached.
        operands = describe(a, (rows, block_k)), describe(lies, block)
    key = (S, E, N, K, tiles, rows, strides, of_rank, scale, a.dtype, bias is None, described, precision)
    launch(_rows_kernel, key, (y, *operands, bias, routing.tiles, routing.offsets, s, b), plan)


def _rows_by_packed(
    a: Tensor, w: Packed, bias: Tensor | None, routing: Routing, y: Tensor, rows: int, transposed: bool,
    share: Share | None,
) -> None:  # fmt: skip
    """`_rows_by_weight` for weights in 4 bits: dequantized in the product, or with many rows before it."""
    S, E = a.shape[0], w.codes.shape[0]
    if S < MANY_ROWS * E:
        rank_block = 16 if share is None else _rank_block(share[0].shape[1], a)
        multiply_rows(a, w, bias, routing, y, rows, _precision(a), share, rank_block, transposed=transposed)
        return
    N, K = (a.shape[1], y.shape[1]) if transposed else (y.shape[1], a.shape[1])
    ranges = split_experts(E, N * K, a.element_size())
    room = a.new_empty((ranges[0][1], N, K))
    for first, last in ranges:
        _rows_by_weight(
            a, expand(w.choose_experts(first, last), room[: last - first]), None if bias is None else bias[first:last],
            choose_experts(routing, first, last), y, rows, transposed=transposed, tiles=tiles_at_most(S, E, rows),
            share=None if share is None else (share[0], share[1][first:last]),
        )  # fmt: skip


def _weight_bwd(a: Tensor, b: Tensor, routing: Routing, dw: Tensor) -> None:
    """Write aᵀ b, summed over each expert's rows in a (S, M) and b (S, N), to dw (E, M, N)."""
    # dWᵀ = bᵀ a: exchanging the operands makes stores unit-stride in either memory order.
    if dw.stride(2) != 1:  # stored by columns
        a, b, dw = b, a, dw.transpose(1, 2)
    E, M, N = dw.shape
    if not dw.numel():
        return
    slots, precision, described = a.shape[0], _precision(a), can_describe(a, b)
    block_m, block_n, block_r, group, launched = _weight_bwd_tile(slots, E, M, N, a)

    def plan() -> Plan:
        blocks = cdiv(M, block_m), cdiv(N, block_n)
        sizes = (M, N, *blocks, dw.stride(0), dw.stride(1))
        flags = (described, precision, block_m, block_n, block_r, group)
        return E * blocks[0] * blocks[1], (*sizes, *flags), launched

    operands: tuple[Any, ...] = (a, b)
    if described:
        operands = describe(a, (block_r, block_m)), describe(b, (block_r, block_n))
    key = (slots, E, M, N, dw.stride(), a.dtype, described, precision)
    launch(_weight_bwd_kernel, key, (dw, *operands, routing.offsets), plan)


# --------------------------------------------------------------------------------------------------------- launches

_FACTORS = "Tensor? gate_up_a, Tensor? gate_up_b, Tensor? down_a, Tensor? down_b"
_FROZEN = "Tensor? gate_up_scales, Tensor? gate_up_table, Tensor? down_scales, Tensor? down_table"
_OPTIONS = (
    "float gate_up_scale, float down_scale, str act, bool gated, bool interleaved, float alpha, float? limit, "
    "float up_offset, float? gate_softcap, float? up_softcap"
)


def _moe_mlp_fwd_fake(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    gate_up_a, keep = rest[3], rest[7]
    S = index.shape[0] * index.shape[1]
    z = x.new_empty((S, gate_up.shape[1]) if keep else (0,))
    s = x.new_empty((S, gate_up_a.shape[1]) if keep and gate_up_a is not None else (0,))
    return x.new_empty(x.shape), z, s, *empty_routing(index, gate_up.shape[0])


@launcher(_moe_mlp_fwd_fake, rest=f"{_FACTORS}, bool keep, {_FROZEN}, {_OPTIONS}", results=7)
def _moe_mlp_fwd(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    gate_up_a, gate_up_b, down_a, down_b, keep, *frozen = rest[:9]
    gate_up_scale, down_scale, options = rest[9], rest[10], Options(*rest[11:])
    E, D, N, K = *_sizes(x, gate_up, options), index.shape[1]
    S = index.numel()
    # Depends on shapes alone: forward and backward agree without a device synchronization.
    rows = rows_of_a_tile(S, E, x.dtype)
    routing = route(index, E, rows)
    room = x.new_empty((S, D))  # workspace: the experts' input rows, then their output rows
    take(view_rows(x), routing, room, K)
    z = x.new_empty((S, gate_up.shape[1]))
    first = _share(room, gate_up_a, gate_up_b, routing, rows, gate_up_scale)
    _rows_by_weight(room, _stack(gate_up, *frozen[:2]), _dense(gate_up_bias), routing, z, rows, share=first)
    h = x.new_empty((S, N))
    unit(z, h, routing, options)
    if not keep:
        z = x.new_empty((0,))
    second = _share(h, down_a, down_b, routing, rows, down_scale)
    _rows_by_weight(h, _stack(down, *frozen[2:]), _dense(down_bias), routing, room, rows, share=second)
    y = x.new_empty(x.shape)
    token_sum(room, routing, weights.contiguous(), y, K)
    return y, z, first[0] if keep and first is not None else x.new_empty((0,)), *routing


def _share(
    x: Tensor, a: Tensor | None, b: Tensor | None, routing: Routing, rows: int, scale: float, *,
    transposed: bool = False,
) -> Share | None:  # fmt: skip
    """Return scale · x aᵀ (S, r) and b, an adapter's share in `_rows_by_weight`; with `transposed`, a is (E, r, K)ᵀ."""
    if a is None or b is None:
        return None
    s = x.new_empty((x.shape[0], a.shape[2 if transposed else 1]))
    _rows_by_weight(x, a, None, routing, s, rows, transposed=transposed, scale=scale)
    return s, b


def _sizes(x: Tensor, gate_up: Tensor, options: Options) -> tuple[int, int, int]:
    """E, D and I: gate_up is (E, 2I, D), or (E, I, D) without a gate, or its codes."""
    return gate_up.shape[0], x.shape[1], gate_up.shape[1] // (2 if options.gated else 1)


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _like(t: Tensor) -> Tensor:
    return t.new_empty(t.shape)


def _rooms(needs: list[bool], *tensors: Tensor | None) -> Callable[[int], Tensor]:
    """Return a function that allocates gradient i on demand: empty if that gradient is not needed.

    tensors: x, the routing weights, gate_up, down, their biases, and A and B for gate_up and for down.
    """

    def room(i: int) -> Tensor:
        t = tensors[i]
        if t is None or not needs[i]:
            return tensors[0].new_empty(0)  # type: ignore[union-attr]
        return _gradient_room(t) if i in (2, 3) else _like(t)

    return room


def _moe_mlp_bwd_fake(
    dy: Tensor, needs: list[bool], reuse: bool, x: Tensor, index: Tensor, *parameters: Any
) -> tuple[Tensor, ...]:
    return tuple(map(_rooms(needs, x, *parameters[:9]), range(10)))


@launcher(
    _moe_mlp_bwd_fake,
    rest="Tensor? gate_up_bias, Tensor? down_bias, "
    f"{_FACTORS}, Tensor z, Tensor s, Tensor order, Tensor place, Tensor offsets, Tensor tiles, "
    f"{_FROZEN}, {_OPTIONS}",
    results=10,
)
def _moe_mlp_bwd(
    dy: Tensor, needs: list[bool], reuse: bool, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor,
    down: Tensor, *saved: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the ten gradients; unneeded gradients are empty.

    reuse: dz may overwrite z. Never set in a compiled graph, whose operators must not mutate their inputs.
    """
    tensors = (x, weights, gate_up, down, *saved[:6])
    _, down_bias, gate_up_a, gate_up_b, down_a, down_b, z, s, *rest = saved
    routing, frozen, options = Routing(*rest[:4]), rest[4:8], Options(*rest[10:])
    gate_up_scale, down_scale = rest[8:10]
    gradient = _rooms(needs, *tensors)
    found = [x.new_empty(0) for _ in range(10)]
    E, D, N, K = *_sizes(x, gate_up, options), index.shape[1]
    S = routing.order.shape[0]
    rows = rows_of_a_tile(S, E, x.dtype)
    index, weights, dy, x = index.contiguous(), weights.contiguous(), view_rows(dy), view_rows(x)
    needs = [need and t is not None for need, t in zip(needs, tensors, strict=True)]

    def fill(i: int, a: Tensor, b: Tensor) -> None:
        found[i] = gradient(i)
        _weight_bwd(a, b, routing, found[i])

    if needs[5]:
        found[5] = gradient(5)
        expert_sum(dy, routing, weights, found[5], K)
    need_dz = any(needs[i] for i in (0, 2, 4, 6, 7))
    need_dh, need_h = need_dz or needs[1], needs[3] or needs[8] or needs[9]
    dz = None
    if need_dh or need_h:
        room = x.new_empty((S, D))  # workspace: dy's rows, then x's rows, then the rows that sum to dx
        take(dy, routing, room, K)
        share = None
        if need_dh or needs[8]:
            share = _share(room, down_b, down_a, routing, rows, down_scale, transposed=True)
        dh = x.new_empty((S, N)) if need_dh else None
        if dh is not None:
            _rows_by_weight(room, _stack(down, *frozen[2:]), None, routing, dh, rows, transposed=True, share=share)
        h = None if not need_h else x.new_empty((S, N)) if dh is None else dh
        if need_dz:
            dz = z if reuse else _like(z)
        # Zeros for experts with width 0, where unit_bwd launches nothing. Otherwise every element read below is
        # written.
        dots = x.new_zeros((S,), dtype=torch.float32) if needs[1] else None
        unit_bwd(z, dh, weights, routing, dz, h, dots, options)
        if dots is not None:
            found[1] = gradient(1)
            weight_sum(dots, routing, index, dy, _dense(down_bias), found[1])
        if h is not None:
            if needs[8] and share is not None:
                fill(8, share[0], h)
            # weight · h times Aᵀ: the forward pass's s lacks the routing weight, and was not saved.
            weighted = _share(h, down_a, down_b, routing, rows, down_scale) if needs[9] else None
            if weighted is not None:
                fill(9, room, weighted[0])
            if needs[3]:
                fill(3, room, h)
        del dh, h, share  # free before allocating d gate_up, the largest gradient
    if dz is None:
        return tuple(found)
    share = None
    if needs[0] or needs[6]:
        share = _share(dz, gate_up_b, gate_up_a, routing, rows, gate_up_scale, transposed=True)
    if needs[2] or needs[6]:
        take(x, routing, room, K)
    if needs[2]:
        fill(2, dz, room)
    if needs[6] and share is not None:
        fill(6, share[0], room)
    if needs[7]:
        fill(7, dz, s)
    if needs[0]:
        found[0] = gradient(0)
        _rows_by_weight(dz, _stack(gate_up, *frozen[:2]), None, routing, room, rows, transposed=True, share=share)
        token_sum(room, routing, None, found[0], K)
    if needs[4]:
        found[4] = gradient(4)
        expert_sum(dz, routing, None, found[4], K)
    return tuple(found)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Eleven tensors, keep, the four of 4-bit weights, and options.
    ctx.options = inputs[16:]
    ctx.save_for_backward(*inputs[:11], *output[1:], *inputs[12:16])


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = [wanted[i] and saved[i] is not None for i in (0, *range(2, 11))]
    # z is internal to the graph. Unless the graph is retained, no later pass reads z, so dz may overwrite it.
    reuse = getattr(ctx, "hides", False) and not is_traced(dy) and not is_graph_retained()
    found = _moe_mlp_bwd(dy, needs, reuse, *saved, *ctx.options)
    first, *others = (g if need else None for g, need in zip(found, needs, strict=True))
    return (first, None, *others)


_moe_mlp = differentiable(_moe_mlp_fwd, _setup_context, _backward)
