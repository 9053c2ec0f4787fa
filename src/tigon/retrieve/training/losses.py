"""Two-tower losses with sampled negatives: in-batch or drawn, corrected for their sampling frequency.

    loss_i = log(exp s_ii + Σ_{j of another id} exp s_ij) − s_ii,   s_ij = scale · q_i · x_j − log Q(j)

Sources: Bengio & Senécal 2008, adaptive importance sampling; Yi et al. 2019, https://doi.org/10.1145/3298689.3346996
(the correction in a batch, and frequencies estimated from a stream).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tigon.kernels import check_tensors
from tigon.losses.contrastive import gather_rows
from tigon.ops.cross_entropy import check_options
from tigon.ops.targets import checked_target
from tigon.retrieve.arguments import as_int, as_number, require_tensors
from tigon.retrieve.training.over_items import check_bias, check_pair, contrast
from tigon.retrieve.training.over_items.per_query_negatives import combine_losses, loss_among, own_contrast
from tigon.retrieve.training.over_items.reference import Contrast

Similarity = Callable[[Tensor, Tensor], Tensor]
# Never occurs as a target: every query in a batch counts.
NEVER = -100


class Negatives(NamedTuple):
    """Which items are negatives for which queries, for `in_batch_softmax`, `sampled_softmax` and `similarity_softmax`.

    Args:
        shared: (K,) integers, negatives for all queries: item rows, or for `in_batch_softmax` the batch ids. None:
            there are none.
        own: (B, J) integers, item rows that are negatives for a single query each, such as from `negatives.mine`; −1
            for none. Not for `in_batch_softmax`.
        allowed: (B, K) bool, or (K,) for all queries: the shared items that a query could have been shown, such as from
            `negatives.find_allowed`. The others are ignored for that query. None: all are used.
    """

    shared: Tensor | None
    own: Tensor | None = None
    allowed: Tensor | None = None


def in_batch_softmax(
    query: Tensor, positive: Tensor, ids: Tensor | Negatives, log_q: Tensor | None = None, *, scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """Softmax for each query's item among the batch items; the mean over the queries.

    Args:
        query: (B, D). positive: (B, D), each query's item, in query's dtype.
        ids: (B,) integers, the items' ids. Another row with the query's own item is not a negative. `Negatives(ids,
            allowed=…)` also restricts which batch items are negatives for which query.
        log_q: (B,), the log of each item's probability to be in a batch, such as log of its share of the training
            pairs, or from a `FrequencyEstimator`. Subtracted from the scores, so that popular items, which are
            negatives more often, are not pushed down. No gradient.
        scale: multiplies the products: the inverse temperature.
        group: a process group whose ranks' items are negatives as well, the same number from each. Each rank has the
            loss for its own queries; gradients flow back to the rank that an item came from. `allowed` then covers all
            ranks' items, (B, ranks · B), in rank order.
    Returns: 0-d, in fp32 (fp64 for fp64 inputs).
    Raises: ValueError for shapes and dtypes that do not fit.
    """
    name = "in_batch_softmax"
    shared, own_rows, allowed = ids if isinstance(ids, Negatives) else Negatives(ids)
    if own_rows is not None or shared is None:
        raise ValueError(f"{name}: ids must be the batch's ids, Negatives(ids, allowed=…), got rows per query.")
    require_tensors(name, query=query, positive=positive, ids=shared)
    check_tensors(name, allowed=allowed, log_q=log_q)
    check_options(name, "mean", 0.0, None, scale, None)
    check_pair(name, query, positive)
    if query.dim() != 2 or positive.shape != query.shape or positive.dtype != query.dtype:
        raise ValueError(
            f"{name}: positive must have query's shape {tuple(query.shape)} and dtype {query.dtype}, (B, D), got "
            f"{tuple(positive.shape)} {positive.dtype}."
        )
    _check_ids(name, "ids", shared, query)
    check_bias(name, "log_q", log_q, positive)
    bias = None if log_q is None else -log_q.detach()
    B, own, items, others = len(shared), shared, positive, shared
    first = 0
    if group is not None:
        items, others = gather_rows(positive, group), gather_rows(shared, group)
        bias = None if bias is None else gather_rows(bias, group)
        first = dist.get_rank(group) * B
    allowed = _check_allowed(name, allowed, query, len(others))
    rows = torch.arange(first, first + B, device=query.device)
    return contrast(query, items, Contrast(rows, bias, others, own, allowed, scale=scale))


def sampled_softmax(
    query: Tensor, items: Tensor | nn.Embedding, target: Tensor, negatives: Tensor | Negatives,
    log_q: Tensor | None = None, *, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Softmax for each query's item among shared negatives, per-query negatives, or both.

    Args:
        query: (B, D). items: (N, D), the table with all items in query's dtype, or its Embedding.
        target: (B,), each query's item row; −100 for queries that do not count.
        negatives: (K,), item rows, drawn from any distribution, repeated as drawn; (B, K), per-query negatives, −1 for
            none; or `Negatives`. A negative equal to a query's own target is ignored for that query.
        log_q: (N,), the log of how often each item is expected among the K; subtracted from the negatives' scores, so
            that the loss approaches the softmax over all items as K grows. None: uniform draws, K / N each, for shared
            negatives; per-query negatives are not corrected. Per-query negatives beside shared negatives never are. No
            gradient.
        scale: multiplies the products: the inverse temperature.
    Returns: 0-d, the mean over the queries that count, in fp32 (fp64 for fp64 inputs).
    Raises: ValueError for shapes and dtypes that do not fit, and for rows outside the items.

    Items for per-query negatives are gathered in pieces: (B, K) numbers are kept, and no (B, K, D) rows.
    """
    name = "sampled_softmax"
    items = items.weight if isinstance(items, nn.Embedding) else items
    require_tensors(name, query=query, items=items)
    check_options(name, "mean", 0.0, None, scale, None)
    check_pair(name, query, items)
    if query.dim() != 2 or items.dtype != query.dtype:
        raise ValueError(
            f"{name}: query must be (B, D) in the dtype of items, {items.dtype}, got "
            f"{tuple(query.shape)} {query.dtype}."
        )
    target, drawn = _parse_negatives(name, query, items, target, negatives, log_q)
    positive = items[torch.where(target == NEVER, 0, target)]
    reduction = "mean" if drawn.own is None else "none"
    losses = None
    if drawn.shared is not None:
        rows, bias, allowed = drawn.shared, drawn.bias, drawn.allowed
        options = Contrast(target, bias, rows, target, allowed, positive, scale=scale, reduction=reduction)
        losses = contrast(query, items[rows], options)
    if drawn.own is None:
        assert losses is not None
        return losses
    among_own = own_contrast(query, items, positive, drawn.own, drawn.own_bias, scale)
    return _mean(among_own if losses is None else combine_losses(losses, among_own), target)


def similarity_softmax(
    similarity: Similarity, query: Tensor, items: Tensor | nn.Embedding, target: Tensor,
    negatives: Tensor | Negatives, log_q: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`sampled_softmax` with a custom similarity, such as a `MixtureOfLogits`, in place of the inner product.

    Args:
        similarity: a module or function that takes the query and items (B, C, …), or (1, C, …) for items that all
            queries share, and returns scores (B, C). A function for `Retriever.search(rerank=…)` qualifies.
        query: (B, …), the similarity's input.
        items: (N, …), the table with all items, or its Embedding.
        target: (B,), each query's item row; −100 for queries that do not count.
        negatives, log_q: as in `sampled_softmax`.
    Returns: 0-d, the mean over the queries that count, in fp32 (fp64 for fp64 scores).
    Raises: ValueError as `sampled_softmax`, and for a similarity that returns another shape.
    """
    name = "similarity_softmax"
    items = items.weight if isinstance(items, nn.Embedding) else items
    require_tensors(name, query=query, items=items)
    if not callable(similarity):
        raise ValueError(f"{name}: similarity must be a module or a function, got {type(similarity).__name__}.")
    if query.device != items.device:
        raise ValueError(f"{name}: items must be on query's device {query.device}, got {items.device}.")
    target, drawn = _parse_negatives(name, query, items, target, negatives, log_q)
    right = _score(name, similarity, query, items[torch.where(target == NEVER, 0, target)].unsqueeze(1))
    scores = []
    if drawn.shared is not None:
        part = _score(name, similarity, query, items[drawn.shared].unsqueeze(0))
        part = part if drawn.bias is None else part + drawn.bias
        keep = drawn.shared != target.unsqueeze(1)
        scores.append(part.masked_fill(~(keep if drawn.allowed is None else keep & drawn.allowed), -torch.inf))
    if drawn.own is not None:
        part = _score(name, similarity, query, items[drawn.own.clamp(min=0)])
        part = part if drawn.own_bias is None else part + drawn.own_bias
        scores.append(part.masked_fill(drawn.own < 0, -torch.inf))
    return _mean(loss_among(right.squeeze(1), torch.cat(scores, 1)), target)


class FrequencyEstimator(nn.Module):
    """Estimate item frequencies from a stream of batches: the mean number of batches between two occurrences.

    Two arrays with `buckets` numbers, for several hashes of the id: the last batch, and a moving mean B of the
    distance, B ← (1 − rate) · B + rate · (now − last). An item is in a batch with probability 1 / B. The largest B over
    the hashes counts, since a collision makes distances shorter.

    Args:
        buckets: per hash; more than there are frequent items.
        hashes: the number of hash functions.
        rate: for the moving mean, in (0, 1].
    Raises: ValueError for numbers that make no array.

    Source: Yi et al. 2019, algorithms 2 and 3, https://doi.org/10.1145/3298689.3346996
    """

    last: Tensor
    distance: Tensor
    now: Tensor

    def __init__(self, buckets: int = 2**20, hashes: int = 3, *, rate: float = 0.05) -> None:
        super().__init__()
        if (as_int(buckets) or 0) < 1 or (as_int(hashes) or 0) < 1 or not 0 < (as_number(rate) or 0) <= 1:
            raise ValueError(
                "FrequencyEstimator: buckets and hashes must be positive and rate in (0, 1], got "
                f"{buckets}, {hashes}, {rate}."
            )
        self.rate = rate
        self.register_buffer("last", torch.zeros(hashes, buckets, dtype=torch.int64))
        self.register_buffer("distance", torch.zeros(hashes, buckets, dtype=torch.float32))
        self.register_buffer("now", torch.zeros((), dtype=torch.int64))

    def _places(self, ids: Tensor) -> Tensor:
        """(hashes, n): each id's bucket, by a multiplier and a shift per hash."""
        hashes, buckets = self.last.shape
        odd = torch.arange(1, hashes + 1, device=ids.device).mul(0x9E3779B97F4A7C1).bitwise_or(1)
        mixed = ids.reshape(1, -1).long() * odd.unsqueeze(1)
        mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
        return ((mixed ^ (mixed >> 32)) & (2**62 - 1)) % buckets

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Update the estimates with a batch.

        Args:
            ids: (n,), integers.

        Returns: the log probability that a batch holds each id, (n,) in fp32.
        """
        self.now += 1
        places = self._places(ids)
        last = self.last.gather(1, places)
        before = self.distance.gather(1, places)
        gap = (self.now - last).float()
        # The gap for an unseen id counts from the beginning.
        moved = torch.where(last == 0, gap, (1 - self.rate) * before + self.rate * gap)
        # Ids in one bucket write the same number, so that their order does not matter.
        self.distance.scatter_(1, places, moved)
        self.last.scatter_(1, places, self.now.expand_as(places).contiguous())
        return self.log_q(ids)

    @torch.no_grad()
    def log_q(self, ids: Tensor) -> Tensor:
        """The result of `forward`, without an update.

        Args:
            ids: (n,), integers; an unseen id counts as the rarest.

        Returns: (n,), fp32.
        """
        distance = self.distance.gather(1, self._places(ids)).amax(0)
        rarest = self.now.float().clamp(min=1.0)
        return -torch.where(distance > 0, distance, rarest).log().view(ids.shape)


class _Drawn(NamedTuple):
    """Checked negatives. shared: (K,), with bias (K,) and allowed (B, K). own: (B, J), −1 for none, with own_bias."""

    shared: Tensor | None
    bias: Tensor | None
    allowed: Tensor | None
    own: Tensor | None
    own_bias: Tensor | None


def _parse_negatives(
    name: str, query: Tensor, items: Tensor, target: Tensor, negatives: Tensor | Negatives, log_q: Tensor | None
) -> tuple[Tensor, _Drawn]:
    """The target, and the negatives except the target, as the losses take them.

    Raises: ValueError for arguments that do not fit.
    """
    if isinstance(negatives, Tensor):
        negatives = Negatives(None, negatives) if negatives.dim() == 2 else Negatives(negatives)
    elif not isinstance(negatives, Negatives):
        raise ValueError(f"{name}: negatives must be a tensor of rows or Negatives, got {type(negatives).__name__}.")
    shared, own, allowed = negatives
    check_tensors(name, target=target, shared=shared, own=own, allowed=allowed, log_q=log_q)
    if shared is None and own is None:
        raise ValueError(f"{name}: negatives must be shared, per query or both, got none.")
    N, device = items.shape[0], query.device
    target = checked_target(name, target, query.shape[:1], N, NEVER, device).long()
    check_bias(name, "log_q", log_q, items)
    wide = torch.promote_types(query.dtype, torch.float32)
    bias = own_bias = None
    if shared is not None:
        _check_ids(name, "negatives", shared, query, len(shared) if shared.dim() else -1)
        shared = checked_target(name, shared, shared.shape, N, -(2**63), device).long()
        allowed = _check_allowed(name, allowed, query, len(shared))
        if log_q is None:
            bias = query.new_full((len(shared),), math.log(max(N, 1) / max(len(shared), 1)), dtype=wide)
        else:
            bias = -log_q.detach()[shared]
    elif allowed is not None:
        raise ValueError(f"{name}: allowed must be None without shared negatives; exclude per-query negatives with -1.")
    if own is not None:
        if own.dim() != 2 or len(own) != len(query) or own.dtype.is_floating_point or own.dtype == torch.bool:
            raise ValueError(
                f"{name}: negatives per query must be ({len(query)}, K) integers, got {tuple(own.shape)} {own.dtype}."
            )
        own = checked_target(name, own, own.shape, N, -1, device).long()
        own = torch.where((own == target.unsqueeze(1)) | (own >= N), -1, own)
        own_bias = None if log_q is None or shared is not None else -log_q.detach()[own.clamp(min=0)].to(wide)
    return target, _Drawn(shared, bias, allowed, own, own_bias)


def _check_allowed(name: str, allowed: Tensor | None, query: Tensor, count: int) -> Tensor | None:
    """(B, count) or (1, count) bool."""
    if allowed is None:
        return None
    shapes = (len(query), count), (count,)
    if allowed.dtype != torch.bool or allowed.shape not in shapes or allowed.device != query.device:
        raise ValueError(
            f"{name}: allowed must be {shapes[0]} or {shapes[1]} bool on {query.device}, got {tuple(allowed.shape)} "
            f"{allowed.dtype} on {allowed.device}."
        )
    return allowed if allowed.dim() == 2 else allowed.unsqueeze(0)


def _score(name: str, similarity: Similarity, query: Tensor, items: Tensor) -> Tensor:
    """(B, C) scores, in fp32 or fp64."""
    output = similarity(query, items)
    shape = len(query), items.shape[1]
    if not isinstance(output, Tensor) or output.shape != shape or not output.is_floating_point():
        got = f"{tuple(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"{name}: similarity must return float scores {shape}, got {got}.")
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _mean(losses: Tensor, target: Tensor) -> Tensor:
    """The mean over the queries that count."""
    counts = target != NEVER
    return torch.where(counts, losses, 0.0).sum() / counts.sum().clamp(min=1)


def _check_ids(name: str, argument: str, ids: Tensor, query: Tensor, count: int | None = None) -> None:
    count = len(query) if count is None else count
    if ids.shape != (count,) or ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.device != query.device:
        raise ValueError(
            f"{name}: {argument} must be a vector of integers on {query.device}, one for each row, got "
            f"{tuple(ids.shape)} {ids.dtype} on {ids.device}."
        )
