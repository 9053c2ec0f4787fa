"""A gated MLP with adapters on frozen layers that saves only its input and computes a tile of tokens at a time.

Like tigon.ops.linear.gated_mlp for plain layers: the backward pass recomputes gate and up tile by tile, and only a
single tile's gate and up exist at a time. Adapter gradients are summed over the tiles in fp32 and rounded once. Weights
in another representation are made dense once per pass, not per tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import make_function, use_triton
from tigon.ops.acts import Act, checked_act
from tigon.ops.gated import _gated_fwd, gated_backward
from tigon.ops.linear.adapter_products import Group
from tigon.ops.linear.chunk_size import chunk_budget, chunk_rows
from tigon.ops.linear.gated_mlp import HELD
from tigon.ops.linear.lora import LoRA, check_mlp, list_tensors, multiplier, runs_by_hand


def tiled_lora_mlp(
    x: Tensor, layers: tuple[LoRA, LoRA, LoRA], *, act: Act = "silu", tile_bytes: int | None = None
) -> Tensor | None:
    """down(act(gate(x)) · up(x)) with adapters on all three layers, saving only x; None if unsupported.

    Args:
        x: (..., H).
        layers: gate, up and down, each a `tigon.LoRA`: (N, H), (N, H) and (H', N).
        act: a name in `tigon.ops.acts`.
        tile_bytes: bytes per tile for gate, up and a gradient with their width, together; as in `gated_mlp`.

    Returns: (..., H') in x's dtype.

    Raises: ValueError as `lora_linear`.
    """
    checked_act("lora_mlp", act)
    gate, up, down = layers
    dtype, autocast = check_mlp(x, layers)
    if not use_triton(x, *list_tensors(layers)) or not runs_by_hand(dtype, autocast, layers, x):
        return None
    if any(multiplier(layer.weight) is not None for layer in layers):
        return None  # int8 products choose outlier columns from all tokens
    x = x if x.dtype == dtype else x.to(dtype)
    # Each group draws its masks once, here. A tile derives its part from the index of its first row, forward and
    # backward.
    plans = Group((gate, up), dtype, wide=not autocast), Group((down,), dtype, wide=not autocast)
    budget = chunk_budget(x.device, tile_bytes)
    own = *plans[0].tensors((gate, up)), *plans[1].tensors((down,))
    return _tiled_lora_mlp(x, *plans, act, budget, *own)  # type: ignore[no-any-return]


def _tiles(rows: Tensor, width: int, budget: int) -> list[slice]:
    step = chunk_rows(rows.shape[0], HELD * width * rows.element_size(), budget)
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]


class _Sums:
    """Gradients for adapters or biases, accumulated over tiles in fp32."""

    def __init__(self, like: Sequence[Tensor | None], needs: Sequence[bool]) -> None:
        self.like, self.needs = like, list(needs)
        self.wide = [torch.empty(0, dtype=torch.float32) for _ in like]
        self.totals: list[Tensor | None] = [None] * len(like)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        for i, g in enumerate(gradients):
            if g is not None:
                total = self.totals[i]
                self.totals[i] = g if total is None else total.add_(g)

    def results(self) -> list[Tensor | None]:
        return [
            None if not need or p is None else torch.zeros_like(p) if total is None else total.to(p.dtype)
            for p, need, total in zip(self.like, self.needs, self.totals, strict=True)
        ]


def _tiled_lora_mlp_fwd(ctx: Any, x: Tensor, first: Group, last: Group, act: str, budget: int, *tensors: Any) -> Tensor:
    ctx.set_materialize_grads(False)
    ctx.first, ctx.last, ctx.act, ctx.budget = first, last, act, budget
    # Only x and parameters. gate, up and the product are 3.5 times as wide as x each in Llama.
    ctx.save_for_backward(x, *tensors)
    a, b, biases, weights = first.split(tensors[:8])
    ad, bd, bias, wd = last.split(tensors[8:])
    rows = x.reshape(-1, x.shape[-1])
    weights, wd = first.dense_weights(weights), last.dense_weights(wd)
    y = rows.new_empty(rows.shape[0], bd[0].shape[0])
    (joined, b), (joined_d, bd) = first.factors(a, b), last.factors(ad, bd)
    with first.held_weights(), last.held_weights():
        for tile in _tiles(rows, b[0].shape[0], budget):
            here = rows[tile]
            gate, up = first.results(here, first.thin_products(here, joined, tile.start), b, biases, weights)
            product = _gated_fwd(gate, up, act, 1.0, 1.0)
            y[tile] = last.results(product, last.thin_products(product, joined_d, tile.start), bd, bias, wd)[0]
    return y.view(*x.shape[:-1], y.shape[1])


def _tiled_lora_mlp_bwd(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    first, last = ctx.first, ctx.last
    x, *tensors = ctx.saved_tensors
    a, b, biases, weights = first.split(tensors[:8])
    ad, bd, _, wd = last.split(tensors[8:])
    need_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
    need_a, need_b, need_biases, _ = first.split(needs[:8])
    need_ad, need_bd, need_bias, _ = last.split(needs[8:])
    rows, dys = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    weights, wd = first.dense_weights(weights), last.dense_weights(wd)
    sums = [_Sums(*p) for p in ((a, need_a), (b, need_b), (biases, need_biases), (ad, need_ad), (bd, need_bd))]
    sum_a, sum_b, sum_biases, sum_ad, sum_bd = sums
    dx = torch.empty_like(rows) if need_x else None
    above = need_x or any((*need_a, *need_b, *need_biases))
    (joined, thin), (joined_d, thin_d) = first.factors(a, b), last.factors(ad, bd)
    with first.held_weights(), last.held_weights():
        for tile in _tiles(rows, b[0].shape[0], ctx.budget):
            here, over, at = rows[tile], [dys[tile]], tile.start
            t = first.thin_products(here, joined, at)
            gate, up = first.results(here, t, thin, biases, weights)
            u = last.upstream(over, thin_d)
            product = (
                last.input_gradient(over, u, joined_d, wd, at) if above else _gated_fwd(gate, up, ctx.act, 1.0, 1.0)
            )
            if above:
                gated_backward(product, gate, up, ctx.act, 1.0, 1.0, gate, up, product)
            sum_ad.add(last.a_gradients(over, u, product, sum_ad.wide, need_ad, at))
            sum_bd.add(last.b_gradients(over, last.thin_products(product, joined_d, at), sum_bd.wide, need_bd))
            if not above:
                continue
            grads = [gate, up]
            u = first.upstream(grads, thin)
            if dx is not None:
                dx[tile] = first.input_gradient(grads, u, joined, weights, at)
            # These sums run over tiles, in fp32. Rounded to bf16 per tile, their error would grow with the sequence
            # length.
            sum_a.add(first.a_gradients(grads, u, here, sum_a.wide, need_a, at))
            sum_b.add(first.b_gradients(grads, t, sum_b.wide, need_b))
            sum_biases.add(
                [g.sum(0, dtype=torch.float32) if n else None for g, n in zip(grads, need_biases, strict=True)]
            )
    dbias = dys.sum(0) if need_bias[0] else None
    found = [*sum_a.results(), *sum_b.results(), *sum_biases.results(), None, None]
    found += [*sum_ad.results(), *sum_bd.results(), dbias]
    return None if dx is None else dx.view(x.shape), None, None, None, None, *found


_tiled_lora_mlp = make_function(_tiled_lora_mlp_fwd, _tiled_lora_mlp_bwd)
