"""Losses of two towers with sampled negatives: of the batch, or drawn, corrected for how often they are drawn.

    loss_i = log(exp s_ii + Σ_{j of another id} exp s_ij) − s_ii,   s_ij = scale · q_i · x_j − log Q(j)

Sources: Bengio & Senécal 2008, adaptive importance sampling; Yi et al. 2019, https://doi.org/10.1145/3298689.3346996
(the correction in a batch, and frequencies estimated from a stream).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tigon.losses.over_items import check_bias, check_pair, contrast
from tigon.ops.cross_entropy import check_options
from tigon.ops.targets import checked_target
from tigon.runtime import check_tensors

# No target has it: every query of a batch counts.
NEVER = -100


def in_batch_softmax(
    query: Tensor, positive: Tensor, ids: Tensor, log_q: Tensor | None = None, *, scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """Softmax of each query's item among the items of the batch; the mean over the queries.

    Args:
        query: (B, D). positive: (B, D), the item of each query, in query's dtype.
        ids: (B,) integers, which item each is. Another row with the query's own item is no negative.
        log_q: (B,), the log of how likely each item is to be in a batch, such as log of its share of the training
            pairs, or from a `FrequencyEstimator`. It is subtracted from the scores, so that popular items, which are
            negatives more often, are not pushed down. No gradient.
        scale: multiplies the products: one over the temperature.
        group: a process group whose ranks' items are negatives as well, the same number from each. Each rank has the
            loss of its own queries; gradients flow back to the rank that an item came from.
    Returns: 0-d, in fp32 (fp64 for fp64 inputs).
    Raises: ValueError for shapes and dtypes that do not fit.
    """
    name = "in_batch_softmax"
    check_tensors(name, query=query, positive=positive, ids=ids, log_q=log_q)
    check_options(name, "mean", 0.0, None, scale, None)
    check_pair(name, query, positive)
    if query.dim() != 2 or positive.shape != query.shape or positive.dtype != query.dtype:
        raise ValueError(
            f"{name}: positive must have query's shape {tuple(query.shape)} and dtype {query.dtype}, (B, D), got "
            f"{tuple(positive.shape)} {positive.dtype}."
        )
    _check_ids(name, "ids", ids, query)
    check_bias(name, "log_q", log_q, positive)
    bias = None if log_q is None else -log_q.detach()
    B, own, items, others = len(ids), ids, positive, ids
    first = 0
    if group is not None:
        items, others = _Gathered.apply(positive, group), _gathered(ids, group)
        bias = None if bias is None else _gathered(bias, group)
        first = dist.get_rank(group) * B
    rows = torch.arange(first, first + B, device=query.device)
    return contrast(query, items, rows, bias, others, own, None, None, scale, NEVER, "mean")


def sampled_softmax(
    query: Tensor, items: Tensor | nn.Embedding, target: Tensor, negatives: Tensor, log_q: Tensor | None = None, *,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Softmax of each query's item among negatives that all queries share.

    Args:
        query: (B, D). items: (N, D), the table of all items in query's dtype, or its Embedding.
        target: (B,), row of items for each query; −100 for queries that do not count.
        negatives: (K,), rows of items, drawn as you like, and as often as they were drawn. A negative that is a
            query's own target is left out for that query.
        log_q: (N,), the log of how often each item is expected among the K; subtracted from the negatives' scores, so
            that the loss approaches the softmax over all items as K grows. None: uniform draws, K / N of each. No
            gradient.
        scale: multiplies the products: one over the temperature.
    Returns: 0-d, the mean over the queries that count, in fp32 (fp64 for fp64 inputs).
    Raises: ValueError for shapes and dtypes that do not fit, and for targets outside the items.
    """
    name = "sampled_softmax"
    items = items.weight if isinstance(items, nn.Embedding) else items
    check_tensors(name, query=query, items=items, target=target, negatives=negatives, log_q=log_q)
    check_options(name, "mean", 0.0, None, scale, None)
    check_pair(name, query, items)
    if query.dim() != 2 or items.dtype != query.dtype:
        raise ValueError(
            f"{name}: query must be (B, D) in the dtype of items, {items.dtype}, got "
            f"{tuple(query.shape)} {query.dtype}."
        )
    target = checked_target(name, target, query.shape[:-1], items.shape[0], NEVER, query.device).long()
    _check_ids(name, "negatives", negatives, query, len(negatives) if negatives.dim() else -1)
    negatives = checked_target(name, negatives, negatives.shape, items.shape[0], -(2**63), query.device).long()
    check_bias(name, "log_q", log_q, items)
    if log_q is None:
        uniform = math.log(max(items.shape[0], 1) / max(len(negatives), 1))
        bias = query.new_full((len(negatives),), uniform, dtype=torch.promote_types(query.dtype, torch.float32))
    else:
        bias = -log_q.detach()[negatives]
    positive = items[torch.where(target == NEVER, 0, target)]
    return contrast(query, items[negatives], target, bias, negatives, target, positive, None, scale, NEVER, "mean")


class FrequencyEstimator(nn.Module):
    """How often items come, learned from a stream of batches: the mean number of batches between two occurrences.

    Two arrays of `buckets` numbers, by several hashes of the id: the last batch, and a moving mean B of the distance,
    B ← (1 − rate) · B + rate · (now − last). An item is in a batch with probability 1 / B. Of several hashes the
    largest B counts, since a collision makes distances shorter.

    Args:
        buckets: of each hash; more than there are frequent items.
        hashes: how many arrays.
        rate: of the moving mean, in (0, 1].
    Raises: ValueError for numbers that make no array.

    Source: Yi et al. 2019, algorithms 2 and 3, https://doi.org/10.1145/3298689.3346996
    """

    last: Tensor
    distance: Tensor
    now: Tensor

    def __init__(self, buckets: int = 2**20, hashes: int = 3, *, rate: float = 0.05) -> None:
        super().__init__()
        if buckets < 1 or hashes < 1 or not 0 < rate <= 1:
            raise ValueError(
                "FrequencyEstimator: buckets and hashes must be positive and rate in (0, 1], got "
                f"{buckets}, {hashes}, {rate}."
            )
        self.rate = rate
        self.register_buffer("last", torch.zeros(hashes, buckets, dtype=torch.int64))
        self.register_buffer("distance", torch.zeros(hashes, buckets, dtype=torch.float32))
        self.register_buffer("now", torch.zeros((), dtype=torch.int64))

    def _places(self, ids: Tensor) -> Tensor:
        """(hashes, n): the bucket of each id, by a multiplier and a shift for each hash."""
        hashes, buckets = self.last.shape
        odd = torch.arange(1, hashes + 1, device=ids.device).mul(0x9E3779B97F4A7C1).bitwise_or(1)
        mixed = ids.reshape(1, -1).long() * odd.unsqueeze(1)
        mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
        return ((mixed ^ (mixed >> 32)) & (2**62 - 1)) % buckets

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Take a batch into account.

        Args:
            ids: (n,), integers.

        Returns: the log of the probability that a batch holds each id, (n,) in fp32.
        """
        self.now += 1
        places = self._places(ids)
        last = self.last.gather(1, places)
        before = self.distance.gather(1, places)
        gap = (self.now - last).float()
        # An id that was never seen has waited since the beginning.
        moved = torch.where(last == 0, gap, (1 - self.rate) * before + self.rate * gap)
        # Ids of one bucket write the same number: which comes last does not matter.
        self.distance.scatter_(1, places, moved)
        self.last.scatter_(1, places, self.now.expand_as(places).contiguous())
        return self.log_q(ids)

    @torch.no_grad()
    def log_q(self, ids: Tensor) -> Tensor:
        """What `forward` returns, with nothing learned.

        Args:
            ids: (n,), integers; one that was never seen is as the rarest.

        Returns: (n,), fp32.
        """
        distance = self.distance.gather(1, self._places(ids)).amax(0)
        rarest = self.now.float().clamp(min=1.0)
        return -torch.where(distance > 0, distance, rarest).log().view(ids.shape)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, one rank's after another's. Backward: each rank gets the sum of what its rows are due."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        # In fp32, and by all_reduce, which every backend has: a sum in bf16 would round once a rank.
        total = g.float() if g.dtype in (torch.bfloat16, torch.float16) else g.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        rows = total.shape[0] // dist.get_world_size(ctx.group)
        first = dist.get_rank(ctx.group) * rows
        return total[first : first + rows].to(g.dtype), None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


def _check_ids(name: str, argument: str, ids: Tensor, query: Tensor, count: int | None = None) -> None:
    count = len(query) if count is None else count
    if ids.shape != (count,) or ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.device != query.device:
        raise ValueError(
            f"{name}: {argument} must be a vector of integers on {query.device}, one for each row, got "
            f"{tuple(ids.shape)} {ids.dtype} on {ids.device}."
        )
