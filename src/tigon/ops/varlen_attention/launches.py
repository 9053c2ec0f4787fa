"""Launches for attention of packed documents: library ops and autograd, over the kernels of prefix attention.

A document is a sequence without a prefix and without suffixes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import differentiable, launcher
from tigon.kernels.tiles.constants import LOG2E
from tigon.ops.prefix_attention.launches import (
    choose_tile,
    launch_delta,
    launch_keys,
    launch_queries,
    new_statistics,
    unit_strides,
)
from tigon.ops.varlen_attention.tiles import KINDS, find_tiles


def varlen_attention_launch(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, sinks: Tensor | None, *scores: Any
) -> Tensor:
    """Run the kernels. scores: scale, softcap, window, and last whether attention is causal."""
    tiles = find_tiles(offsets, q.shape[0], tuple(_count_tokens(kind, q, k, scores) for kind in KINDS))
    return _varlen_attention(q, k, v, sinks, tiles, offsets.shape[0] - 1, *scores)


def _count_tokens(kind: str, q: Tensor, k: Tensor, scores: tuple[Any, ...]) -> int:
    """Return the tokens in a tile of a kind."""
    tile = choose_tile(kind, q, k, scores[1] is not None)
    return tile.keys if kind == "keys" else tile.rows // (q.shape[1] // k.shape[1])


def _slice_tiles(tiles: Tensor, kind: str, q: Tensor, k: Tensor, documents: int, scores: tuple[Any, ...]) -> Tensor:
    """Return the entries of one table that can be filled, (n, 6)."""
    return tiles[KINDS.index(kind), : q.shape[0] // _count_tokens(kind, q, k, scores) + documents]


_OPTIONS = "Tensor tiles, SymInt documents, float scale, float? softcap, int? window, bool causal"


def _varlen_attention_fwd_fake(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), new_statistics(q, k)


@launcher(_varlen_attention_fwd_fake, rest=_OPTIONS)
def _varlen_attention_fwd(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    tiles, documents, *scores_, causal = others
    scores = tuple(scores_)
    q, k, v = unit_strides(q, k, v)
    o, lse = q.new_empty(q.shape), new_statistics(q, k)
    sinks = None if sinks is None else sinks.contiguous()
    forward = _slice_tiles(tiles, "forward", q, k, documents, scores)
    tensors = q, k, v, o, lse, None, None, None, forward, None, None, sinks
    launch_queries("forward", tensors, 0, False, False, scores, causal)
    return o, lse


def _varlen_attention_bwd_fake(
    do: Tensor, wants: list[bool], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = q, k, v, q if sinks is None else sinks
    dq, dk, dv, dsinks = (t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip(given, wants, strict=True))
    return dq, dk, dv, dsinks


@launcher(_varlen_attention_bwd_fake, rest=_OPTIONS)
def _varlen_attention_bwd(
    do: Tensor, wants: list[bool], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, o: Tensor, lse: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """wants: for dq, dk, dv and dsinks; unwanted gradients are empty."""
    tiles, documents, *scores_, causal = others
    scores = tuple(scores_)
    do, q, k, v = unit_strides(do, q, k, v)
    dq, dk, dv, dsinks = _varlen_attention_bwd_fake(do, wants, q, k, v, sinks)
    delta = lse.new_empty(lse.shape)
    if wants[0]:
        table = _slice_tiles(tiles, "queries", q, k, documents, scores)
        tensors = q, k, v, o, lse, do, delta, dq, table, None, None, None
        launch_queries("queries", tensors, 0, False, False, scores, causal)
    else:
        launch_delta(do, o, delta)
    if wants[1] or wants[2]:
        table = _slice_tiles(tiles, "keys", q, k, documents, scores)
        gradients = dk if wants[1] else None, dv if wants[2] else None
        launch_keys((q, k, v, do, lse, delta, *gradients, table, None), 0, False, False, scores, causal)
    if sinks is not None and wants[3]:
        # A sink's value is zero, so that its share of the softmax takes delta = Σ do · o from its score's gradient.
        share = torch.exp2(sinks.float().view(-1, 1, lse.shape[2]) * LOG2E.value - lse)
        dsinks.copy_(share.mul_(delta).sum(1).neg_().view(-1))
    return dq, dk, dv, dsinks


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, sinks, tiles, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, tiles)


def _backward(ctx: Any, do: Tensor, *_: Any) -> tuple[Any, ...]:
    wants = list(ctx.needs_input_grad[:4])
    gradients = _varlen_attention_bwd(do, wants, *ctx.saved_tensors, *ctx.options)
    return tuple(g if wanted else None for g, wanted in zip(gradients, wants, strict=True))


_varlen_attention = differentiable(_varlen_attention_fwd, _setup_context, _backward)
