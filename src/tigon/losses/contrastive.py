"""In-batch softmax for embeddings: each query's document among the documents of the whole batch.

    loss_i = log Σ_j exp(scale · q_i · d_j) − scale · q_i · d_i,   mean over i

Other directions add terms to the sum, or are a softmax of their own: a document among the queries, a query among the
other queries, a document among the other documents. The B × B scores are never in memory together.

Sources: InfoNCE, van den Oord et al. 2018, https://arxiv.org/abs/1807.03748; symmetric, Günther et al. 2023,
https://arxiv.org/abs/2310.19923; a single softmax over all directions, Li et al. 2023, https://arxiv.org/abs/2308.03281
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.kernels import autocast_dtype, check_tensors, run_once_differentiable
from tigon.losses.head.head import Head
from tigon.losses.linear_cross_entropy import linear_cross_entropy

Direction = Literal["query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc"]
DIRECTIONS = ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc")
Directions = Sequence[Direction] | Literal["symmetric"]
# Scores in memory at once, where one softmax is over several directions.
SCORES = 2**25


def info_nce(
    query: Tensor, positive: Tensor, negatives: Sequence[Tensor] = (), *, scale: float = 20.0,
    directions: Directions = ("query_to_doc",), group: dist.ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of each query's positive among all documents in the batch.

    Args:
        query: (B, D), bf16, fp16, fp32 or fp64.
        positive: (B, D), each query's document, in query's dtype. Another row with the same document counts as a
            negative: draw batches without duplicates.
        negatives: tensors (B, D), hard negatives; row i is mined for query i, and a negative for all queries.
        scale: multiplies the products: 1 / temperature. For cosine similarity, normalize the embeddings first.
        directions: terms of the softmax. "query_to_doc": a query and all documents; always included. "doc_to_query": a
            positive and all queries. "query_to_query": a query and the other queries. "doc_to_doc": a positive and the
            documents of the other queries. Or "symmetric", the mean of two losses: "query_to_doc" and "doc_to_query",
            with a softmax each.
        group: a process group whose ranks' embeddings are negatives as well, B from each. Each rank has the loss for
            its own queries; gradients flow back to the rank that an embedding came from.
    Returns: 0-d, in fp32 (fp64 for fp64 inputs).
    Raises: ValueError for shapes, dtypes and options that do not fit.

    A softmax over one direction is `tigon.linear_cross_entropy` with the documents as the head. The forward pass
    computes the gradients; beyond the gradients, memory holds the scores of a few queries.

    Replaces::

        scores = scale * query @ torch.cat([positive, *negatives]).mT
        loss = F.cross_entropy(scores.float(), torch.arange(len(query)))
    """
    name = "info_nce"
    columns = (query, positive, *negatives)
    _check(name, columns, scale, directions)
    first = 0
    if group is not None and query.numel():
        first = dist.get_rank(group) * len(query)
        columns = tuple(gather_rows(column, group) for column in columns)
    if directions != "symmetric" and len(set(directions)) > 1:
        dtype = autocast_dtype(query.device.type)
        rows = torch.cat(columns)
        rows = rows if dtype is None or rows.dtype == torch.float64 else rows.to(dtype)
        with torch.autocast(rows.device.type, enabled=False):
            batch = _Batch(len(query), len(columns[0]), first)
            need = rows.requires_grad and torch.is_grad_enabled()
            loss: Tensor = _JointSoftmax.apply(rows, batch, float(scale), frozenset(directions), need)
        return loss
    target = torch.arange(first, first + len(query), device=query.device)
    documents = torch.cat(columns[1:]) if negatives else columns[1]
    losses = [linear_cross_entropy(query, Head(documents, scale=scale), target)]
    if directions == "symmetric":
        losses.append(linear_cross_entropy(positive, Head(columns[0], scale=scale), target))
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def info_nce_reference(
    query: Tensor, positive: Tensor, negatives: Sequence[Tensor] = (), *, scale: float = 20.0,
    directions: Directions = ("query_to_doc",),
) -> Tensor:  # fmt: skip
    """The specification: all scores."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, d, documents = query, positive, torch.cat((positive, *negatives))
    same = torch.eye(len(q), dtype=torch.bool, device=q.device)
    scores = {
        "query_to_doc": q @ documents.mT,
        "doc_to_query": d @ q.mT,
        "query_to_query": (q @ q.mT).masked_fill(same, -torch.inf),
        "doc_to_doc": (d @ documents.mT).masked_fill(same.repeat(1, 1 + len(negatives)), -torch.inf),
    }
    names = DIRECTIONS[:2] if directions == "symmetric" else dict.fromkeys(("query_to_doc", *directions))
    chosen = [scale * scores[direction].to(wide) for direction in names]
    if directions == "symmetric":
        lse = torch.stack([z.logsumexp(1) for z in chosen]).mean(0)
    else:
        lse = torch.cat(chosen, 1).logsumexp(1)
    return (lse - chosen[0].diagonal()).mean()


def _check(name: str, columns: tuple[Tensor, ...], scale: float, directions: Directions) -> None:
    query, positive, *negatives = columns
    check_tensors(name, query=query, positive=positive, **{f"negatives[{i}]": t for i, t in enumerate(negatives)})
    if query.dim() != 2 or not query.dtype.is_floating_point:
        raise ValueError(f"{name}: query must be (B, D) floats, got {tuple(query.shape)} {query.dtype}.")
    for i, column in enumerate(columns[1:]):
        if (column.shape, column.dtype, column.device) != (query.shape, query.dtype, query.device):
            argument = f"negatives[{i - 1}]" if i else "positive"
            raise ValueError(
                f"{name}: {argument} must have query's shape {tuple(query.shape)}, dtype {query.dtype} and device "
                f"{query.device}, got {tuple(column.shape)} {column.dtype} on {column.device}."
            )
    if not scale > 0:
        raise ValueError(f"{name}: scale must be positive, got {scale}.")
    is_known = set(directions) <= set(DIRECTIONS) and "query_to_doc" in directions
    if directions != "symmetric" and (isinstance(directions, str) or not is_known):
        raise ValueError(
            f"{name}: directions must be 'symmetric', or 'query_to_doc' and others of {DIRECTIONS}, got {directions!r}."
        )


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, as many from each, in rank order. Each rank gets the sum of its rows' gradients."""
    gathered: Tensor = _Gathered.apply(x, group)
    return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        # In fp32, and by all_reduce, which every backend has: a sum in bf16 would round once per rank.
        total = g.float() if g.dtype in (torch.bfloat16, torch.float16) else g.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        rows = total.shape[0] // dist.get_world_size(ctx.group)
        first = dist.get_rank(ctx.group) * rows
        return total[first : first + rows].to(g.dtype), None


class _Batch(NamedTuple):
    """own: this rank's queries. queries: all ranks'. first: the first of this rank's among them."""

    own: int
    queries: int
    first: int


class _Part(NamedTuple):
    """Scores of a chunk's rows against a slice of all rows. out: columns that take no part, (c, …) or None."""

    rows: slice
    keys: slice
    out: Tensor | None


def _parts(begin: int, end: int, total: int, batch: _Batch, directions: frozenset[Direction]) -> Iterator[_Part]:
    """The chunk's queries, whose scores hold the positives, and its documents. Columns are relative to the keys."""
    count, at = batch.queries, torch.arange(begin, end).unsqueeze(1)
    start = 0 if "query_to_query" in directions else count
    yield _Part(slice(begin, end), slice(start, total), None if start else at)
    to_query, to_doc = "doc_to_query" in directions, "doc_to_doc" in directions
    if to_query or to_doc:
        start = 0 if to_query else count
        own = at + torch.arange(count - start, total - start, count) if to_doc else None
        yield _Part(slice(count + begin, count + end), slice(start, total if to_doc else count), own)


class _JointSoftmax(torch.autograd.Function):
    """One softmax over several directions: rows (queries, positives, negatives, …) stand in one tensor.

    The forward pass walks over chunks of queries, and adds each chunk's gradients to one fp32 tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, batch: _Batch, scale: float, directions: frozenset[Direction], need: bool
    ) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        total, (own, count, first) = len(rows), batch
        drows = rows.new_zeros(rows.shape if need else 0, dtype=wide)
        loss = rows.new_zeros((), dtype=wide)
        step = max(1, SCORES // (2 * max(total, 1)))
        for begin in range(first, first + own, step):
            end = min(begin + step, first + own)
            parts = list(_parts(begin, end, total, batch, directions))
            scores = [(rows[part.rows] @ rows[part.keys].mT).to(wide).mul_(scale) for part in parts]
            for z, part in zip(scores, parts, strict=True):
                if part.out is not None:
                    z.scatter_(1, part.out.to(z.device), -torch.inf)
            target = torch.arange(begin, end, device=rows.device).add_(count - parts[0].keys.start).unsqueeze(1)
            lse = torch.stack([z.logsumexp(1) for z in scores]).logsumexp(0).unsqueeze(1)
            loss += (lse - scores[0].gather(1, target)).sum()
            if not need:
                continue
            for i, (z, part) in enumerate(zip(scores, parts, strict=True)):
                p = z.sub_(lse).exp_()
                if i == 0:
                    p.scatter_add_(1, target, p.new_full(target.shape, -1.0))
                p = p.to(rows.dtype)
                drows[part.rows] += p @ rows[part.keys]
                drows[part.keys] += p.mT @ rows[part.rows]
        ctx.save_for_backward(drows)
        ctx.factor, ctx.dtype = scale / max(own, 1), rows.dtype
        return loss / max(own, 1)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        return run_once_differentiable(_JointSoftmax.gradients, ctx, dloss)

    @staticmethod
    def gradients(ctx: Any, dloss: Tensor) -> tuple[Tensor, ...]:
        (drows,) = ctx.saved_tensors
        return ((drows * (dloss * ctx.factor)).to(ctx.dtype),)
