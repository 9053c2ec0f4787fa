"""Kernel launches: tiles, item shares, library ops, gradient.

The forward pass is attention with the items as both keys and values: besides the log-sum-exp it gives the
probability-weighted item sum, which is the gradient of the queries. The backward pass recomputes the scores for the
gradient of the items: four matrix products in total, and no scores in memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import Plan, cdiv, differentiable, launch, launcher, multiprocessors, next_power_of_2, shared_memory
from tigon.kernels import device as facts
from tigon.ops.sum_rows import sum_rows
from tigon.retrieve.training.over_items.kernels import _items_kernel, _merge_kernel, _scan_kernel

# ------------------------------------------------------------------------------------------------------------ tiles


class Tile(NamedTuple):
    """Queries and items per tile, warps, stages: loop blocks in flight at once."""

    queries: int
    items: int
    warps: int
    stages: int


# For 16-bit numbers, keyed by the largest dimension; 128 is tuned on an H200.
TILES = {
    "scan": {64: Tile(128, 128, 8, 3), 128: Tile(64, 128, 4, 3), 256: Tile(128, 64, 8, 2)},
    "items": {64: Tile(64, 128, 8, 3), 128: Tile(32, 256, 8, 3), 256: Tile(64, 128, 8, 2)},
}
# With a byte per query and item that says whether they are compared, which takes registers too.
MASKED = {
    "scan": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 4, 3), 256: Tile(128, 32, 8, 2)},
    "items": {64: Tile(32, 128, 8, 3), 128: Tile(32, 128, 8, 3), 256: Tile(32, 128, 8, 2)},
}
# For fp32, where a product takes three on the tensor cores and twice the registers: above 64 dimensions some spill.
TILES_FP32 = {64: Tile(32, 32, 8, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 16, 8, 1)}
# Queries per program that merges shares.
MERGED = 8
# Byte limit for all queries' shares, and the maximum share count.
SHARES_BYTES, SHARES = 2**28, 64
# Cost to begin a share, in item blocks.
BEGIN = 4
# Queries that a program sums for its items' gradient. Tensor cores round sums towards zero: with a hundred times as
# many queries the sum loses a hundredth.
SUMMED = 2**16


def choose_tile(kind: str, q: Tensor, allowed: Tensor | None = None) -> Tile:
    D = q.shape[1]
    width = 64 if D <= 64 else 128 if D <= 128 else 256
    if q.dtype != torch.float32:
        tile = (TILES if allowed is None else MASKED)[kind][width]
    else:
        tile = TILES_FP32[width]
        if allowed is not None:
            half = "items" if kind == "scan" else "queries"
            tile = tile._replace(**{half: max(16, getattr(tile, half) // 2)})
    stay, move = (tile.queries, tile.items) if kind == "scan" else (tile.items, tile.queries)
    # The resident tile, and blocks in flight. Consumer and AMD GPUs have less shared memory than an H100.
    line, room = max(16, next_power_of_2(D)) * q.element_size(), shared_memory(q.device) - 1024
    stages = tile.stages
    while stages > 1 and line * (stay + stages * move) > room:
        stages -= 1
    return tile._replace(stages=stages)


def split_items(M: int, N: int, D: int, tile: Tile, multiprocessors: int) -> tuple[int, int]:
    """(parts, items per part, in whole blocks): programs end together, and each has enough work."""
    tiles, blocks = cdiv(M, tile.queries), cdiv(N, tile.items)
    most = max(1, min(SHARES, blocks, SHARES_BYTES // (4 * M * (D + 2))))

    def cost(parts: int) -> int:
        return cdiv(tiles * parts, multiprocessors) * (cdiv(blocks, parts) + BEGIN)

    parts = min(range(1, most + 1), key=cost)
    share = cdiv(blocks, parts)
    return cdiv(blocks, share), share * tile.items


def split_queries(M: int, N: int, D: int, tile: Tile) -> tuple[int, int]:
    """(parts, queries per part, in whole blocks) for the sums over all queries; a single part up to SUMMED queries."""
    parts = max(1, min(cdiv(M, SUMMED), SHARES_BYTES // (4 * N * D)))
    share = cdiv(cdiv(M, tile.queries), parts) * tile.queries
    return max(1, cdiv(M, share)) if share else 1, share


def power_shift(q: Tensor) -> int:
    """fp16 powers are scaled by 2¹⁵."""
    return 15 if q.dtype == torch.float16 else 0


def _constants(q: Tensor) -> dict[str, Any]:
    # fp32 is multiplied as three TF32 products, or in AMD's native precision.
    precision = "tf32x3" if q.dtype == torch.float32 and facts.limits_registers(q.device) else "ieee"
    return {"SHIFT": power_shift(q), "PRECISION": precision}


def _key(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors)


# --------------------------------------------------------------------------------------------------------- launches


def _item_softmax_fwd_fake(q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    M, (*_, reduction, need_dq) = q.shape[0], rest
    rows = [q.new_empty(M, dtype=torch.float32) for _ in range(2)]
    loss = q.new_empty((M,) if reduction == "none" else (), dtype=torch.float32)
    return loss, *rows, q.new_empty(q.shape if need_dq else (0,), dtype=torch.float32), loss.new_empty(())


@launcher(
    _item_softmax_fwd_fake,
    "(Tensor q, Tensor items, Tensor target, Tensor? bias, Tensor? ids, Tensor? own, Tensor? allowed, "
    "Tensor? positive, Tensor? positive_bias, float scale, int ignore_index, str reduction, bool need_dq) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _item_softmax_fwd(
    q: Tensor, items: Tensor, target: Tensor, bias: Tensor | None, ids: Tensor | None, own: Tensor | None,
    allowed: Tensor | None, positive: Tensor | None, positive_bias: Tensor | None, scale: float, ignore_index: int,
    reduction: str, need_dq: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns: loss, log-sum-exp in units of log 2, the target's p − 1, dloss/dq, the sum's factor."""
    (M, D), N = q.shape, items.shape[0]
    _, lse, less, dq, _ = _item_softmax_fwd_fake(q, reduction, need_dq)
    losses = torch.empty_like(lse)
    if M:
        m, total, acc = run_scan(q, items, target if own is None else own, bias, ids, allowed, scale, need_dq)
        q, items, positive = _unit_strides(q, items, positive)
        factor = scale / math.log(2)

        def merge() -> Plan:
            stride = 0 if positive is None else positive.stride(0)
            arguments = (
                M, N, len(m), q.stride(0), items.stride(0), stride, factor, ignore_index, D, MERGED,
                max(16, next_power_of_2(D)), power_shift(q),
            )  # fmt: skip
            return cdiv(M, MERGED), arguments, {"num_warps": 4}

        key = factor, ignore_index, N, _key(q, items, target, bias, m, acc, positive, positive_bias)
        tensors = (q, items, target, bias, m, total, acc, positive, positive_bias, losses, lse, less)
        launch(_merge_kernel, key, (*tensors, dq if need_dq else None), merge)
    loss, inverse = reduce_losses(losses, target, ignore_index, reduction)
    return loss, lse, less, dq, inverse


def run_scan(
    q: Tensor, items: Tensor, own: Tensor, bias: Tensor | None, ids: Tensor | None, allowed: Tensor | None,
    scale: float, need_dq: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Each share's statistics per query, without the query's own item: maximum, sum of powers, weighted item sum.

    Returns: (parts, M), (parts, M), (parts, M, D) or None, in fp32; powers are scaled by two to `power_shift`.
    """
    (M, D), N = q.shape, items.shape[0]
    q, items = _unit_strides(q, items)
    tile = choose_tile("scan", q, allowed)
    parts, share = split_items(M, N, D, tile, multiprocessors(q.device)) if M and N else (0, 0)
    m, total = (q.new_empty(parts, M, dtype=torch.float32) for _ in range(2))
    acc = m.new_empty(parts, M, D) if need_dq else None
    factor = scale / math.log(2)

    def scan() -> Plan:
        arguments = (
            M, N, share, q.stride(0), items.stride(0), _line(allowed), factor, D, tile.queries, tile.items,
            max(16, next_power_of_2(D)),
        )  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        return cdiv(M, tile.queries) * parts, (*arguments, *_constants(q).values()), options

    if parts:
        key = factor, tile, parts, share, _key(q, items, own, bias, ids, allowed, acc)
        launch(_scan_kernel, key, (q, items, own, bias, ids, allowed, m, total, acc), scan)
    return m, total, acc


def reduce_losses(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor]:
    """The loss, and the factor that multiplies a sum."""
    if reduction == "none":
        return losses, losses.new_empty(())
    if reduction == "sum":
        return losses.sum(), losses.new_ones(())
    inverse = 1.0 / (target != ignore_index).sum().clamp(min=1).to(torch.float32)
    return losses.sum() * inverse, inverse


def _item_softmax_bwd_fake(g: Tensor, q: Tensor, items: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip((q, items, q), rest[-1], strict=True))


@launcher(_item_softmax_bwd_fake)
def _item_softmax_bwd(
    g: Tensor, q: Tensor, items: Tensor, target: Tensor, bias: Tensor | None, ids: Tensor | None, own: Tensor | None,
    allowed: Tensor | None, positive: Tensor | None, lse: Tensor, less: Tensor, dq: Tensor, inverse: Tensor,
    scale: float, wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """g: (M,), or 0-d for a sum of losses. wants: q, items and positive; an unneeded gradient has no elements."""
    empty = q.new_empty(0)
    upstream = g.unsqueeze(-1) if g.dim() else g * inverse
    own_dq = (dq * upstream).to(q.dtype) if wants[0] else empty
    dpositive = ((less.unsqueeze(-1) * upstream) * (q * scale)).to(q.dtype) if wants[2] else empty
    if not wants[1]:
        return own_dq, items.new_empty(0), dpositive
    dx = items.new_empty(items.shape)
    q, items = _unit_strides(q, items)
    (M, D), N = q.shape, items.shape[0]
    if g.dim():
        # In [−1, 1], so that no dtype underflows or overflows: the largest is multiplied at the end, in fp32.
        most = g.abs().amax() if M else g.new_ones(())
        factor = torch.where(most > 0, most, 1.0)
        weight = g / factor
    else:
        factor, weight = upstream, None
    if N:
        tile = choose_tile("items", q, allowed)
        parts, share = split_queries(M, N, D, tile)
        # Shares are summed in fp32, and rounded once.
        sums = dx if parts == 1 else dx.new_empty((parts, N * D), dtype=torch.float32)

        def plan() -> Plan:
            arguments = (
                M, N, share, q.stride(0), items.stride(0), _line(allowed), scale / math.log(2), positive is not None, D,
                tile.queries, tile.items, max(16, next_power_of_2(D)), *_constants(q).values(),
            )  # fmt: skip
            return cdiv(N, tile.items) * parts, arguments, {"num_warps": tile.warps, "num_stages": tile.stages}

        tensors = (q, items, target, own, bias, ids, allowed, lse, less, weight, factor, sums)
        launch(_items_kernel, (scale, positive is not None, share, _key(*tensors)), tensors, plan)
        if parts > 1:
            sum_rows(sums, dx.view(-1))
    return own_dq, dx, dpositive


def _line(allowed: Tensor | None) -> int:
    """Byte stride between queries; 0 if all share the same line."""
    return 0 if allowed is None else allowed.stride(0)


def _unit_strides(*tensors: Tensor | None) -> list[Any]:
    return [t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, items, target, bias, ids, own, allowed, positive, _, ctx.scale = inputs[:10]
    ctx.save_for_backward(q, items, target, bias, ids, own, allowed, positive, *output[1:])


def _backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if g is None:
        return (None,) * 13
    needs = ctx.needs_input_grad
    wants = [needs[0], needs[1], needs[7]]
    dq, dx, dp = _item_softmax_bwd(g.contiguous(), *ctx.saved_tensors, ctx.scale, wants)
    rest = (None,) * 5
    return dq if wants[0] else None, dx if wants[1] else None, *rest, dp if wants[2] else None, *(None,) * 5


_item_softmax = differentiable(_item_softmax_fwd, _setup_context, _backward)
