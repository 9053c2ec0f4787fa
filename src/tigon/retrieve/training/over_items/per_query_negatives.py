"""Softmax of each query's item among per-query negatives, whose rows are gathered in pieces and never stored.

    loss_i = log(exp s_i + Σ_k exp(scale · q_i · x_{n(i, k)} + bias_ik)) − s_i,   s_i = scale · q_i · p_i

Memory holds (B, K) probabilities and the gradient of the queries, computed while the rows are gathered, but no
(B, K, D) rows. The gradient of the items is a product with a sparse matrix, a row per item, without atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import run_once_differentiable
from tigon.kernels.sparse import make_csr_matrix

# Bytes per gathered piece of rows.
PIECE_BYTES = 2**27
# Negatives per sort: torch.sort takes fewer than 2³¹.
SORTED = 2**30


def own_contrast(
    query: Tensor, items: Tensor, positive: Tensor, negatives: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """A loss per query, (B,) in fp32 or fp64.

    negatives: (B, K), rows in items; negative numbers mean none. bias: (B, K), no gradient.
    """
    if not negatives.shape[1]:
        return query.new_zeros(len(query), dtype=torch.promote_types(query.dtype, torch.float32)) + 0 * query.sum()
    need_dq = query.requires_grad and torch.is_grad_enabled()
    loss: Tensor = _Own.apply(query, items, positive, negatives, bias, scale, need_dq)
    return loss


def own_contrast_reference(
    query: Tensor, items: Tensor, positive: Tensor, negatives: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide)
    right = (q * positive.to(wide)).sum(-1) * scale
    scores = (q.unsqueeze(1) * items[negatives.clamp(min=0)].to(wide)).sum(-1) * scale
    scores = scores if bias is None else scores + bias.to(wide)
    return loss_among(right, scores.masked_fill(negatives < 0, -torch.inf))


def loss_among(right: Tensor, scores: Tensor) -> Tensor:
    """The loss of scores (B,) among others (B, K), where −inf means none."""
    return torch.logsumexp(torch.cat([right.unsqueeze(1), scores], 1), 1) - right


def combine_losses(first: Tensor, second: Tensor) -> Tensor:
    """The loss among two sets of negatives, from the loss among each: log(exp first + exp second − 1)."""
    most = torch.maximum(first, second).detach()
    return most + ((first - most).exp() + (second - most).exp() - (-most).exp()).log()


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, items: Tensor, positive: Tensor, negatives: Tensor, bias: Tensor | None, scale: float,
        need_dq: bool,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(query.dtype, torch.float32)
        q, own = query.to(wide), positive.to(wide)
        losses, p = q.new_empty(len(q)), q.new_empty(negatives.shape)
        # The positive's p − 1, without a difference: a confident model's small gradients survive.
        less = torch.empty_like(losses)
        dq = torch.empty_like(q) if need_dq else None
        with torch.autocast(query.device.type, enabled=False):
            right = (q * own).sum(-1) * scale
            for part, x in _pieces(items, negatives, wide):
                z = torch.bmm(x, q[part].unsqueeze(2)).squeeze(2) * scale
                z = z if bias is None else z + bias[part]
                z = z.masked_fill(negatives[part] < 0, -torch.inf)
                most = torch.maximum(right[part], z.amax(1))
                z = (z - most.unsqueeze(1)).exp()
                others, gap = z.sum(1), right[part] - most
                whole = others + gap.exp()
                losses[part], less[part], p[part] = whole.log() - gap, -others / whole, z / whole.unsqueeze(1)
                if dq is not None:  # while the rows are gathered
                    dq[part] = torch.bmm(p[part].unsqueeze(1), x).squeeze(1) + less[part].unsqueeze(1) * own[part]
        ctx.save_for_backward(query, items, positive, negatives, p, less, dq)
        ctx.scale = scale
        return losses

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        found: tuple[Any, ...] = run_once_differentiable(_backward, ctx, g)
        return found


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    query, items, positive, negatives, p, less, dq = ctx.saved_tensors
    upstream = g.unsqueeze(1) * ctx.scale
    dx = dp = None
    with torch.autocast(query.device.type, enabled=False):
        if dq is not None:
            dq = (dq * upstream).to(query.dtype)
        if ctx.needs_input_grad[1]:
            dx = _scatter_gradients(p * upstream, negatives, query.to(p.dtype), len(items)).to(items.dtype)
        if ctx.needs_input_grad[2]:
            dp = (less.unsqueeze(1) * upstream * query.to(p.dtype)).to(positive.dtype)
    return dq, dx, dp, None, None, None, None


def _pieces(items: Tensor, negatives: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Slices of queries, and their negatives' rows, (b, K, D)."""
    B, K = negatives.shape
    most = max(1, PIECE_BYTES // (K * items.shape[1] * wide.itemsize))
    for start in range(0, B, most):
        part = slice(start, start + most)
        yield part, items.detach()[negatives[part].clamp(min=0)].to(wide)


def _scatter_gradients(weights: Tensor, negatives: Tensor, q: Tensor, items: int) -> Tensor:
    """(N, D): for each item, the sum of weight · q over queries and their negatives."""
    most = max(1, SORTED // negatives.shape[1])
    total = _scatter_part(weights[:most], negatives[:most], q[:most], items)
    for start in range(most, len(q), most):
        some = slice(start, start + most)
        total += _scatter_part(weights[some], negatives[some], q[some], items)
    return total


def _scatter_part(weights: Tensor, negatives: Tensor, q: Tensor, items: int) -> Tensor:
    B, K = negatives.shape
    each = torch.arange(B * K, device=q.device)
    # Missing negatives have weight 0 and are spread over all rows, so that no row gets long.
    flat = negatives.reshape(-1)
    rows, order = torch.where(flat < 0, each % items, flat).sort(stable=True)
    starts = torch.searchsorted(rows, torch.arange(items + 1, device=q.device))
    index = torch.int32 if max(B * K, items) < 2**31 else torch.int64
    matrix = make_csr_matrix(starts.to(index), (order // K).to(index), weights.reshape(-1)[order], (items, B))
    return torch.mm(matrix, q)
