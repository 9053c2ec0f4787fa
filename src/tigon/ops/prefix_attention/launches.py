"""Launches for prefix attention: tile tables, library ops and autograd.

Prefixes and suffixes have separate launches: a prefix reads no other rows, so its kernel needs no suffix code. The
documents of varlen_attention take the same launches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    differentiable,
    launch,
    launcher,
    next_power_of_2,
    shared_memory,
)
from tigon.kernels import device as facts
from tigon.ops.prefix_attention.keys import _keys_kernel, _single_keys_kernel
from tigon.ops.prefix_attention.layout import PrefixLayout
from tigon.ops.prefix_attention.queries import _attend_kernel, _delta_kernel

# ------------------------------------------------------------------------------------------------------------ tiles


class Tile(NamedTuple):
    """rows: packed queries, tokens × heads. keys: keys per block. stages: loop blocks in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


# Tuned for 16-bit dtypes and heads up to the given dimension. At 256 some registers spill.
TILES = {
    "forward": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)},
    "queries": {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 16, 8, 2)},
    "keys": {64: Tile(64, 64, 4, 3), 128: Tile(64, 128, 8, 2), 256: Tile(32, 32, 8, 1)},
}
# Used if tiles with 128 rows would be half empty, for example few single-token suffixes. Missing entries come from
# TILES.
TILES_SHORT = {
    "forward": {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 3)},
    "queries": {128: Tile(64, 64, 4, 2)},
    "keys": {64: Tile(32, 64, 4, 2)},
}
# Used with a softcap, whose slope takes extra registers.
TILES_CAPPED = {
    "forward": {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)},
    "queries": {64: Tile(64, 64, 4, 3), 128: Tile(128, 32, 8, 2), 256: Tile(64, 16, 8, 2)},
    "keys": {64: Tile(64, 128, 8, 2), 128: Tile(32, 128, 8, 2), 256: Tile(32, 32, 8, 1)},
}
# For fp32: three tensor-core products per product and twice the registers; at 128 some spill.
TILES_FP32 = {64: Tile(16, 32, 4, 1), 128: Tile(16, 16, 4, 1), 256: Tile(16, 16, 8, 1)}
SINGLE_TOKENS, DELTA_ROWS = 16, 32


def choose_tile(kind: str, q: Tensor, k: Tensor, capped: bool, short: bool = False) -> Tile:
    """Return the tile for a kernel: "forward", or the gradients of "queries" or "keys".

    The key block may depend only on heads, dtype, device and options, never on the layout: sums are taken block by
    block, and a row's bits must not depend on its neighbours. short: from `PrefixLayout.short`; changes only the row
    count.
    """
    D, N = q.shape[2], q.shape[1] // k.shape[1]
    width = 64 if D <= 64 else 128 if D <= 128 else 256
    table = TILES_FP32 if q.dtype == torch.float32 else (TILES_CAPPED if capped else TILES)[kind]
    tile = table[width]
    if short and q.dtype != torch.float32 and not capped:
        tile = TILES_SHORT.get(kind, {}).get(width, tile)
    rows, keys, warps, stages = tile
    rows = max(rows, next_power_of_2(N))
    # The resident tile plus the blocks of two tensors in flight must fit in shared memory. Consumer GPUs and AMD GPUs
    # have less than an H100.
    width = max(16, next_power_of_2(D)) * q.element_size()
    stay, move = (2 * keys, rows) if kind == "keys" else (rows if kind == "forward" else 2 * rows, keys)
    room = shared_memory(q.device) - 1024
    while stages > 1 and width * (stay + 2 * stages * move) > room:
        stages -= 1
    return Tile(rows, keys, warps, stages)


def _precision(q: Tensor) -> str:
    """Return the input precision: for fp32 three TF32 products (relative error 2⁻²² each), or AMD's native fp32."""
    return "tf32x3" if q.dtype == torch.float32 and facts.limits_registers(q.device) else "ieee"


def choose_tables(
    layout: PrefixLayout, q: Tensor, k: Tensor, across: bool, capped: bool, keep: bool
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the tile tables for the forward pass, and with `keep` for the backward pass."""
    N = q.shape[1] // k.shape[1]
    short = layout.short(N)

    def cut_queries(kind: str) -> tuple[Tensor, Tensor]:
        prefix, suffix = (choose_tile(kind, q, k, capped, few).rows // N for few in (False, short))
        return layout.tiles("prefix queries", prefix), layout.tiles("suffix queries", suffix)

    forward = cut_queries("forward")
    if not keep:
        return *forward, None, None, None, None
    queries = cut_queries("queries")
    keys = choose_tile("keys", q, k, capped, short).keys
    own = "suffix keys across" if across else "suffix keys"
    return *forward, *queries, layout.tiles("prefix keys", keys), layout.tiles(own, keys)


# --------------------------------------------------------------------------------------------------------- launches


def _options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def new_statistics(q: Tensor, k: Tensor) -> Tensor:
    """Allocate an fp32 number per token and head, (G, tokens, N): contiguous per key head."""
    G = k.shape[1]
    return q.new_empty((G, q.shape[0], q.shape[1] // G), dtype=torch.float32)


def _key(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors)


def launch_queries(
    kind: str, tensors: tuple[Any, ...], singles: int, across: bool, short: bool, scores: tuple[Any, ...],
    causal: bool = True,
) -> None:  # fmt: skip
    """tensors: q, k, v, o, lse, do, delta, dq, tiles, first, stop, sinks; for documents without first and stop."""
    q, k, v, _, _, do, _, dq, tiles, first, _, sinks = tensors
    if not tiles.shape[0] or not q.shape[0]:
        return

    def plan() -> Plan:
        tile, G = choose_tile(kind, q, k, scores[1] is not None, short), k.shape[1]
        upstream = (0, 0) if do is None else do.stride()[:2]
        arguments = (
            q.shape[0], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *upstream, *scores, G,
            q.shape[1] // G, q.shape[2], singles, across, tile.rows, tile.keys, max(16, next_power_of_2(q.shape[2])),
            _precision(q), causal,
        )  # fmt: skip
        return tiles.shape[0] * G, arguments, _options(tile)

    key = (kind, singles, across, short, scores, causal, tiles.shape[0], _key(q, k, v, do, dq, first, sinks))
    launch(_attend_kernel, key, tensors, plan)


_OPTIONS = "SymInt start, int singles, bool across, bool short, float scale, float? softcap, int? window"


def _prefix_attention_fwd_fake(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), new_statistics(q, k)


@launcher(
    _prefix_attention_fwd_fake,
    rest="Tensor? prefix_queries, Tensor? suffix_queries, Tensor? prefix_keys, Tensor? suffix_keys, " + _OPTIONS,
)
def _prefix_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, prefixes: Tensor, suffixes: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    singles, across, short, *scores = others[5:]
    q, k, v = unit_strides(q, k, v)
    o, lse = q.new_empty(q.shape), new_statistics(q, k)
    given = q, k, v, o, lse, None, None, None
    launch_queries("forward", (*given, prefixes, None, None, None), 0, False, False, tuple(scores))
    launch_queries("forward", (*given, suffixes, first, stop, None), singles, across, short, tuple(scores))
    return o, lse


def _prefix_attention_bwd_fake(
    do: Tensor, wants: list[bool], q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip((q, k, v), wants, strict=True))
    return dq, dk, dv


@launcher(
    _prefix_attention_bwd_fake,
    rest="Tensor prefix_queries, Tensor suffix_queries, Tensor prefix_keys, Tensor suffix_keys, " + _OPTIONS,
)
def _prefix_attention_bwd(
    do: Tensor, wants: list[bool], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, first: Tensor,
    stop: Tensor, *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """start: the first suffix row. wants: for dq, dk and dv; unwanted gradients are empty."""
    prefix_queries, suffix_queries, prefix_keys, suffix_keys, start, singles, across, short, *scores_ = others
    do, q, k, v = unit_strides(do, q, k, v)
    scores = tuple(scores_)
    dq, dk, dv = _prefix_attention_bwd_fake(do, wants, q, k, v)
    delta = lse.new_empty(lse.shape)
    if wants[0]:
        given = q, k, v, o, lse, do, delta, dq
        launch_queries("queries", (*given, prefix_queries, None, None, None), 0, False, False, scores)
        launch_queries("queries", (*given, suffix_queries, first, stop, None), singles, across, short, scores)
    else:
        launch_delta(do, o, delta)
    if wants[1] or wants[2]:
        keys = q, k, v, do, lse, delta, dk if wants[1] else None, dv if wants[2] else None
        launch_keys((*keys, prefix_keys, first), 0, False, short, scores)
        launch_keys((*keys, suffix_keys, first), singles, across, short, scores)
        if singles and not across:
            _launch_single_keys((*keys, first, stop), start, scores)
    return dq, dk, dv


def launch_delta(do: Tensor, o: Tensor, delta: Tensor) -> None:
    def plan() -> Plan:
        tokens, H, D = o.shape
        arguments = tokens, *do.stride()[:2], H, delta.shape[2], D, DELTA_ROWS, max(16, next_power_of_2(D))
        return cdiv(tokens * H, DELTA_ROWS), arguments, {"num_warps": 4}

    if o.shape[0]:
        launch(_delta_kernel, _key(do, o, delta), (do, o, delta), plan)


def launch_keys(
    tensors: tuple[Any, ...], singles: int, across: bool, short: bool, scores: tuple[Any, ...], causal: bool = True
) -> None:
    """tensors: q, k, v, do, lse, delta, dk, dv, tiles, first; for documents without first."""
    q, k, v, do, _, _, dk, dv, tiles, first = tensors
    if not tiles.shape[0] or not q.shape[0]:
        return

    def plan() -> Plan:
        tile, G = choose_tile("keys", q, k, scores[1] is not None, short), k.shape[1]
        arguments = (
            q.shape[0], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2], *scores, G,
            q.shape[1] // G, q.shape[2], singles, across, tile.rows, tile.keys, max(16, next_power_of_2(q.shape[2])),
            _precision(q), causal,
        )  # fmt: skip
        return tiles.shape[0] * G, arguments, _options(tile)

    key = (singles, across, short, scores, causal, tiles.shape[0], _key(q, k, v, do, dk, dv, first))
    launch(_keys_kernel, key, tensors, plan)


def _launch_single_keys(tensors: tuple[Any, ...], start: int, scores: tuple[Any, ...]) -> None:
    """tensors: q, k, v, do, lse, delta, dk, dv, first, stop."""
    q, k, v, do, _, _, dk, dv, *_ = tensors

    def plan() -> Plan:
        G, stop = k.shape[1], q.shape[0]
        arguments = (
            start, stop, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2], *scores[:2], G,
            q.shape[1] // G, q.shape[2], SINGLE_TOKENS, max(16, next_power_of_2(q.shape[2])),
        )  # fmt: skip
        return cdiv(stop - start, SINGLE_TOKENS) * G, arguments, {"num_warps": 4}

    launch(_single_keys_kernel, (start, scores, _key(q, k, v, do, dk, dv)), tensors, plan)


def unit_strides(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors whose head dimension does not have unit stride."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, first, stop, _, _, *tables = inputs[:11]
    ctx.options = inputs[11:]
    ctx.save_for_backward(q, k, v, *output, first, stop, *tables)


def _backward(ctx: Any, do: Tensor, *_: Any) -> tuple[Any, ...]:
    wants = list(ctx.needs_input_grad[:3])
    gradients = _prefix_attention_bwd(do, wants, *ctx.saved_tensors, *ctx.options)
    return tuple(g if wanted else None for g, wanted in zip(gradients, wants, strict=True))


_prefix_attention = differentiable(_prefix_attention_fwd, _setup_context, _backward)
