"""Rows between tokens and experts in FP8: the passes of `tigon.ops.experts`, and the same in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import use_triton, view_rows
from tigon.ops.experts.routing import LEAST_ROWS, Routing, route
from tigon.ops.experts.rows import take, token_sum, weight_sum
from tigon.ops.fp8.recipe import Rows
from tigon.ops.fp8.reference import read_rows


def sort_choices(x: Tensor, index: Tensor, E: int) -> Routing:
    """The choices (T, K) sorted by expert. x: any float tensor, which decides whether kernels run."""
    if _uses_kernels(x, index):
        return route(index, E, LEAST_ROWS)  # grouped products need no list of tiles
    chosen = index.flatten()
    known = (chosen >= 0) & (chosen < E)
    expert = torch.where(known, chosen, E)
    order = expert.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    offsets = torch.searchsorted(expert[order], torch.arange(E + 1, device=order.device))
    parts = order, torch.where(known, place, -1), offsets, index.new_empty((2, 0))
    return Routing(*(t.int() for t in parts))


def gather_rows(rows: Tensor, routing: Routing, top_k: int) -> Tensor:
    """rows (T, N) of the tokens for each choice sorted by expert: (S, N). Rows without an expert have any value."""
    if not _uses_kernels(rows, routing.order):
        return rows[(routing.order // top_k).long()]
    found = rows.new_empty((len(routing.order), rows.shape[1]))
    take(view_rows(rows), routing, found, top_k)
    return found


def gather_quantized_rows(rows: Rows, routing: Routing, top_k: int) -> Rows:
    """`gather_rows` of rows in e4m3. Two bytes move as a number of 16 bits, which nothing computes with."""
    data = gather_rows(rows.data.view(torch.bfloat16), routing, top_k).view(rows.data.dtype)
    return Rows(data, gather_rows(rows.scale, routing, top_k))


def sum_rows(rows: Tensor, routing: Routing, weights: Tensor | None, shape: torch.Size) -> Tensor:
    """Σ weight · row over each token's choices, (T, D), rounded once. weights: (T, K), or None for ones."""
    T, top_k = shape[0], len(routing.place) // max(shape[0], 1)
    if _uses_kernels(rows, routing.order):
        y = rows.new_empty(shape)
        token_sum(rows, routing, None if weights is None else weights.contiguous(), y, top_k)
        return y
    chosen = read_rows(rows, routing.place).float()
    if weights is not None:
        chosen = torch.where((routing.place >= 0)[:, None], chosen * weights.reshape(-1, 1).float(), 0.0)
    return chosen.view(T, top_k, shape[1]).sum(1).to(rows.dtype)


def gather_weight_gradients(dots: Tensor, routing: Routing, index: Tensor, weights: Tensor) -> Tensor:
    """The gradients of the routing weights (T, K), from those of the rows (S, 1)."""
    if _uses_kernels(dots, routing.order):
        found = torch.empty_like(weights, memory_format=torch.contiguous_format)
        weight_sum(dots, routing, index, dots, None, found)
        return found
    return read_rows(dots, routing.place).view(weights.shape).to(weights.dtype)


def _uses_kernels(x: Tensor, index: Tensor) -> bool:
    return bool(index.numel()) and use_triton(x)
