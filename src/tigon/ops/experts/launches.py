"""Launches of the experts' layer, in the order of a step, and its gradient."""

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
    shared_memory,
    view_rows,
)
from tigon.ops.experts.options import Options
from tigon.ops.experts.products import _rows_kernel, _weight_bwd_kernel
from tigon.ops.experts.routing import Routing, empty_routing, route, rows_of_a_tile, tiles_at_most
from tigon.ops.experts.rows import expert_sum, take, token_sum, weight_sum
from tigon.ops.experts.units import unit, unit_bwd

# ------------------------------------------------------------------------------------------------------------- tiles


def _rows_tile(rows: int, a: Tensor) -> tuple[int, int, int, dict[str, int]]:
    """Columns of a block, depth of a step, how many tiles of rows share a block's weight in L2, and Triton's options.
    The rows of a tile come from routing.py: all products walk the same list of tiles."""
    if a.dtype == torch.float32:  # without tensor cores: what fits into registers
        return 32, 16, 8, {"num_warps": 4, "num_stages": 2}
    # A step of 64 numbers of two bytes is 128 bytes, once across the banks of shared memory. A deeper one would leave
    # room for fewer stages.
    if rows >= 64:
        return 256, 64, 8, {"num_warps": 8 if rows == 128 else 4, "num_stages": _stages(a, rows, 256)}
    # Few tokens an expert: the products are bound by reading the weights, each of which is used for 16 or 32 rows.
    # Narrow blocks of columns make more programs, which together load more.
    return 64, 64, 8, {"num_warps": 4, "num_stages": 3}


def _weight_bwd_tile(slots: int, E: int, a: Tensor) -> tuple[int, int, int, int, dict[str, int]]:
    """Rows and columns of a block of the weight, rows of tokens a step, blocks that share rows in L2."""
    if a.dtype == torch.float32:
        return 32, 32, 16, 8, {"num_warps": 4, "num_stages": 2}
    # An expert with few tokens has a short sum: dW is then bound by writing, and deep steps would be mostly masked.
    if slots < 20 * E:
        return 64, 64, 16, 8, {"num_warps": 4, "num_stages": 3}
    if slots < 1536 * E:  # short sums: two programs on a multiprocessor, so that one stores while the other multiplies
        return 128, 128, 64, 8, {"num_warps": 8, "num_stages": 3}
    # Long sums: 128 fp32 sums a thread leave room for one program on a multiprocessor, whose stores are a small share.
    return 128, 256, 64, 16, {"num_warps": 8, "num_stages": _stages(a, 128, 256)}


def _stages(a: Tensor, rows: int, columns: int) -> int:
    """Steps of 64 two-byte numbers that are loaded ahead: as many as shared memory holds, four at most."""
    # 16 KiB are left for what the compiler itself keeps in shared memory. Two stages at least: one to load, one to
    # multiply.
    return max(2, min(4, (shared_memory(a.device) - 16384) // ((rows + columns) * 64 * 2)))


def _precision(a: Tensor) -> str:
    """Products of fp32 are as exact as torch's own are set to be."""
    if a.dtype != torch.float32:
        return "ieee"
    # Since PyTorch 2.9. Once a program has set fp32_precision, get_float32_matmul_precision raises.
    set_to = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if set_to is None:
        set_to = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "tf32" if set_to == "tf32" else "ieee"


# ---------------------------------------------------------------------------------------------------------- products


def _with_unit_stride(w: Tensor) -> Tensor:
    """An expert's matrix is read by rows or by columns, where it lies; another layout is copied."""
    # No copy of a transposed weight: the kernel has both strides, and the descriptor takes the dimension of unit stride
    # last.
    return w if w.stride(2) == 1 or w.stride(1) == 1 else w.contiguous()


def _gradient_room(w: Tensor) -> Tensor:
    """Room for the gradient of w, in the order of w's memory."""
    dense = w.stride(2) == 1 or w.stride(1) == 1
    # empty_like keeps the strides of a dense tensor, but packs an expanded or sliced one in an order of its own choice.
    room = torch.empty_like(w) if dense else w.new_empty(w.shape)
    return room if room.stride(2) == 1 or room.stride(1) == 1 else w.new_empty(w.shape)


def _rows_by_weight(
    a: Tensor, w: Tensor, bias: Tensor | None, routing: Routing, y: Tensor, rows: int, *, transposed: bool = False
) -> None:
    """Write a (S, K) times each expert's w, (N, K) or with `transposed` (K, N), to y (S, N)."""
    (S, K), N, E = a.shape, y.shape[1], w.shape[0]
    # The host does not know the split: the grid covers the worst one.
    tiles = tiles_at_most(S, E, rows)
    if not tiles or not N:
        return
    if transposed:
        # A view: back through a product the same memory is read by its other dimension.
        w = w.transpose(1, 2)
    strides, precision = w.stride(), _precision(a)
    by_columns = strides[2] != 1
    lies = w.transpose(1, 2) if by_columns else w
    # A descriptor needs unit stride in the last dimension and 16-byte rows: `lies` is the weight as it lies in memory.
    described = can_describe(a, lies)
    block_n, block_k, group, launched = _rows_tile(rows, a)

    def plan() -> Plan:
        blocks = cdiv(N, block_n)
        # The list has room for tiles of LEAST_ROWS, more than the grid visits: TILES is its stride, M_TILES the grid's.
        sizes = (tiles, routing.tiles.shape[1], E, N, K, blocks, *strides)
        # Constants of the kernel. K % block_k decides whether loads have a mask along K.
        flags = (described, by_columns, K % block_k == 0, precision, rows, block_n, block_k, group)
        return tiles * blocks, (*sizes, *flags), launched

    operands: tuple[Any, ...] = (a, w)
    if described:
        block = (1, block_k, block_n) if by_columns else (1, block_n, block_k)
        # Descriptors hold the address, so they are made for every call: only the plan is kept.
        operands = describe(a, (rows, block_k)), describe(lies, block)
    key = (S, E, N, K, rows, strides, a.dtype, bias is None, described, precision)
    launch(_rows_kernel, key, (y, *operands, bias, routing.tiles, routing.offsets), plan)


def _weight_bwd(a: Tensor, b: Tensor, routing: Routing, dw: Tensor) -> None:
    """Write Σ over each expert's rows of aᵀ b, a (S, M) and b (S, N), to dw (E, M, N)."""
    # dWᵀ = bᵀ a: with the operands exchanged the kernel writes unit strides in either order of the weight.
    if dw.stride(2) != 1:  # stored by columns
        a, b, dw = b, a, dw.transpose(1, 2)
    # The result is written as the weight lies: an optimiser reads both.
    # An expert without rows has a gradient of zeros, which its programs write: dW needs no pass that clears it.
    E, M, N = dw.shape
    if not dw.numel():
        return
    slots, precision, described = a.shape[0], _precision(a), can_describe(a, b)
    block_m, block_n, block_r, group, launched = _weight_bwd_tile(slots, E, a)

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

_OPTIONS = "str act, bool gated, bool interleaved, float alpha, float? limit, float up_offset"


def _moe_mlp_fwd_fake(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, keep: bool, *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    S = index.shape[0] * index.shape[1]
    # S rows are allocated, though choices of other ranks have none: their number is on the device alone.
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
    # From shapes alone, so that forward and backward agree, and no number comes from the device.
    rows = rows_of_a_tile(S, E, x.dtype)
    routing = route(index, E, rows)
    room = x.new_empty((S, D))  # the workspace: first the experts' input rows, later their output rows
    take(view_rows(x), routing, room, K)
    z = x.new_empty((S, gate_up.shape[1]))
    _rows_by_weight(room, _with_unit_stride(gate_up), _dense(gate_up_bias), routing, z, rows)
    # z is kept and h is not: h is one elementwise pass from z, and z is what the activation's gradient needs.
    h = x.new_empty((S, N))
    unit(z, h, routing, Options(*options))
    # Freed before the next product: in inference the peak is without z.
    if not keep:
        z = x.new_empty((0,))
    # room again: the experts' input rows have been multiplied, and nothing reads them any more.
    _rows_by_weight(h, _with_unit_stride(down), _dense(down_bias), routing, room, rows)
    y = x.new_empty(x.shape)
    # Each token gathers its rows: experts adding into y would need atomics, and give other bits on every run.
    token_sum(room, routing, weights.contiguous(), y, K)
    # The routing is returned to be saved: the backward pass sorts nothing.
    return y, z, *routing


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _like(t: Tensor) -> Tensor:
    return t.new_empty(t.shape)


def _rooms(
    needs: list[bool], x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor | None
) -> Callable[[int], Tensor]:
    """A function that allocates gradient i when its turn comes: empty if that gradient is not wanted."""

    def room(i: int) -> Tensor:
        # The order is that of the operator's results.
        t = (x, weights, gate_up, down, *biases)[i]
        if t is None or not needs[i]:
            return x.new_empty(0)
        return _gradient_room(t) if t is gate_up or t is down else _like(t)

    return room


def _moe_mlp_bwd_fake(
    dy: Tensor, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, z: Tensor, order: Tensor, place: Tensor, offsets: Tensor, tiles: Tensor,
    needs: list[bool], reuse: bool, *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(map(_rooms(needs, x, weights, gate_up, down, gate_up_bias, down_bias), range(6)))


@launcher(
    "(Tensor dy, Tensor x, Tensor index, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias,"
    " Tensor? down_bias, Tensor z, Tensor order, Tensor place, Tensor offsets, Tensor tiles, bool[] needs, bool reuse,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _moe_mlp_bwd_fake,
)
def _moe_mlp_bwd(
    dy: Tensor, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, z: Tensor, order: Tensor, place: Tensor, offsets: Tensor, tiles: Tensor,
    needs: list[bool], reuse: bool, *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """reuse: dz may overwrite z. Never in a compiled graph, whose operators must not change their inputs."""
    routing = Routing(order, place, offsets, tiles)
    # Room for a gradient is made when its turn comes: those of the weights are the largest tensors of the pass.
    gradient = _rooms(needs, x, weights, gate_up, down, gate_up_bias, down_bias)
    found = [x.new_empty(0) for _ in range(6)]
    (E, D, N), K = down.shape, index.shape[1]
    S = order.shape[0]
    rows = rows_of_a_tile(S, E, x.dtype)
    # The forward made the same views and copies; they are not kept, since most of them are views.
    index, weights, dy, x = index.contiguous(), weights.contiguous(), view_rows(dy), view_rows(x)
    of_bias = [needs[4] and gate_up_bias is not None, needs[5] and down_bias is not None]
    # d down_bias needs dy and the routing weights alone, and comes before any workspace is allocated.
    if of_bias[1]:
        found[5] = gradient(5)
        expert_sum(dy, routing, weights, found[5], K)
    # What is needed is traced back: dx, d gate_up and its bias need dz, which needs dh. The routing weights' gradient
    # needs dh alone.
    need_dz = needs[0] or needs[2] or of_bias[0]
    need_dh = need_dz or needs[1]
    dz = None
    # Otherwise the frozen layer costs nothing but the bias above.
    if need_dh or needs[3]:
        room = x.new_empty((S, D))  # the workspace, in turn: rows of dy, rows of x, rows that sum to dx
        # Rows of dy are copied out as those of x were: the product reads whole tiles.
        take(dy, routing, room, K)
        dh = x.new_empty((S, N)) if need_dh else None
        if dh is not None:
            _rows_by_weight(room, _with_unit_stride(down), None, routing, dh, rows, transposed=True)
        # weight · h overwrites dh, which the same kernel has read.
        # A frozen `down` needs no h. Without dh there is nothing to overwrite, and h gets memory of its own.
        h = None if not needs[3] else x.new_empty((S, N)) if dh is None else dh
        if need_dz:
            dz = z if reuse else _like(z)
        # Zeros for experts of width 0, for which unit_bwd launches nothing. Otherwise every place that is read has been
        # written.
        dots = x.new_zeros((S,), dtype=torch.float32) if needs[1] else None
        # One pass over z and dh makes dz, weight · h and the dots: all three need the activation.
        unit_bwd(z, dh, weights, routing, dz, h, dots, Options(*options))
        # From order of experts to order of tokens, through `place`.
        if dots is not None:
            found[1] = gradient(1)
            weight_sum(dots, routing, index, dy, _dense(down_bias), found[1])
        if h is not None:
            found[3] = gradient(3)
            # room still holds the rows of dy: d down = Σ dyᵀ (weight · h).
            _weight_bwd(room, h, routing, found[3])
        del dh, h  # freed before the gradient of gate_up, the largest of all, is allocated
    if dz is not None and needs[2]:
        found[2] = gradient(2)
        # Copied again, instead of kept since the forward: S · D numbers less are alive in between.
        take(x, routing, room, K)
        _weight_bwd(dz, room, routing, found[2])
    if dz is not None and needs[0]:
        found[0] = gradient(0)
        # room is overwritten again: d gate_up has been summed from the rows of x before this line.
        _rows_by_weight(dz, _with_unit_stride(gate_up), None, routing, room, rows, transposed=True)
        # No weights: dz has the routing weight already.
        token_sum(room, routing, None, found[0], K)
    if dz is not None and of_bias[0]:
        found[4] = gradient(4)
        expert_sum(dz, routing, None, found[4], K)
    return tuple(found)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, act, gated, interleaved, alpha, limit, up_offset = inputs
    ctx.options = act, gated, interleaved, alpha, limit, up_offset
    ctx.save_for_backward(*tensors, *output[1:])


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        # One for each input of the operator: eight arguments and six options.
        return (None,) * 14
    saved = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    # index, at position 1, has no gradient; an absent bias needs none whatever torch says.
    needs = [wanted[i] and saved[i] is not None for i in (0, 2, 3, 4, 5, 6)]
    # Nothing outside the graph sees z. Unless the graph is kept, no later pass reads z, so dz may overwrite it.
    reuse = getattr(ctx, "hides", False) and not is_traced(dy) and not is_graph_retained()
    dx, dweights, *rest = _moe_mlp_bwd(dy, *saved, needs, reuse, *ctx.options)
    found = dx, dweights, *rest
    first, second, *others = (g if need else None for g, need in zip(found, needs, strict=True))
    return (first, None, second, *others, *(None,) * 7)


_moe_mlp = differentiable(_moe_mlp_fwd, _setup_context, _backward)
