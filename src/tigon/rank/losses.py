"""Ranking losses over ragged groups: pointwise, listwise and pairwise.

All losses take `(scores, labels, offsets=None, *, weights=None, reduction="mean")`. A group contains the rows shown for
a request. Its rows are adjacent: group g has rows offsets[g] to offsets[g + 1] − 1. With scores s, labels y, weights w:

    bce           per row:    w · (softplus(s) − y · s)
    softmax       per group: −Σ_i w_i y_i log(exp s_i / Σ_j exp s_j)
    pairwise      per group:  mean over pairs y_i > y_j: w_i · softplus(s_j − s_i)
    approx_ndcg   per group:  1 − Σ_i w_i G_i / log₂(1 + r_i) / maxDCG,  r_i = 1 + Σ_{j≠i} σ((s_j − s_i) / temperature)
    lambda_loss   per group:  Σ_{y_i > y_j} w_i ΔNDCG_ij · softplus(s_j − s_i)

Groups without order information are skipped: they are excluded from the mean and get no gradient. NaN scores in other
groups make the loss NaN. 16-bit scores are converted to fp32.

`pairwise`, `approx_ndcg` and `lambda_loss` compare all rows within a group, in blocks with similar group sizes. A block
has at most `PAIRS` pairs, including padding, or a single row's pairs if those are more. With several blocks, each is
recomputed in the backward pass, so that peak memory is a single block's. The host must know the group sizes: offsets on
the CPU need no wait, offsets on a GPU one synchronisation. `bce` and `softmax` never synchronise.

Sources: Cao et al. 2007, ListNet, https://doi.org/10.1145/1273496.1273513; Burges et al. 2005, RankNet,
https://doi.org/10.1145/1102351.1102363; Qin, Liu & Li 2010, ApproxNDCG, https://doi.org/10.1007/s10791-009-9124-x; Wang
et al. 2018, LambdaLoss, https://doi.org/10.1145/3269206.3271784; the signature follows rax,
https://github.com/google/rax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tigon.data.groups import Groups, check_groups, discounts
from tigon.kernels import is_concrete
from tigon.ops.cross_entropy import REDUCTIONS, Reduction
from tigon.ops.targets import CHECKS

__all__ = ["approx_ndcg", "bce", "lambda_loss", "pairwise", "softmax"]

# Maximum pairs compared at once.
PAIRS = 1 << 22


def bce(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """Binary cross entropy per row: w · (softplus(s) − y · s).

    Args:
        scores: (n,) floats, logits.
        labels: (n,) bool, integers or floats in [0, 1], the probability that the row is positive. No gradient.
        offsets: (G + 1,) int32 or int64, for a uniform signature; rows count equally in all groups.
        weights: (n,) row weights. No gradient.
        reduction: "mean" over all rows, not divided by the weights; "sum"; "none" for (n,).
    Returns: 0-d or (n,), in fp32 (fp64 for fp64 scores). 0 without rows.
    Raises: ValueError for wrong shapes, dtypes and devices; on the CPU for labels outside [0, 1].
    """
    s, y, w, _ = _check_inputs("rank.losses.bce", scores, labels, offsets, weights, reduction, most=1.0)
    losses = F.softplus(s) - y * s
    losses = losses if w is None else w * losses
    return _reduce(losses, torch.ones_like(losses, dtype=torch.bool), reduction)


def softmax(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean", normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Cross entropy between labels and the softmax over a group: −Σ_i w_i y_i log softmax(s)_i.

    With a single positive this is the usual softmax loss. With several, a group's weight is the sum over its labels, as
    in rax; normalize=True divides by that sum, so that labels form a distribution, as in ListNet.

    Args:
        scores: (n,) floats. −inf excludes a non-positive row from the softmax.
        labels: (n,) bool, integers or floats ≥ 0, relevance. No gradient.
        offsets: (G + 1,) int32 or int64, group starts, then n; on scores' device or the CPU. None: one group.
        weights: (n,) label multipliers. No gradient.
        reduction: "mean" over the groups with a positive; "sum"; "none" for (G,), with 0 for the other groups.
        normalize: divide w · y by its sum over the group.
    Returns: 0-d or (G,), in fp32 (fp64 for fp64 scores). 0 if no group has a positive.
    Raises: ValueError for wrong shapes, dtypes and devices; on the CPU for negative labels.
    """
    s, y, w, groups = _check_inputs("rank.losses.softmax", scores, labels, offsets, weights, reduction)
    y = y if w is None else w * y
    mass = groups.sum(y)
    counted = mass > 0
    s = _mask_groups(s, counted, groups)
    shifted = s - groups.largest(s)[groups.row]
    # Both terms are non-negative, so there is no cancellation: shifted ≤ 0, and its log-sum-exp ≥ 0.
    own = groups.sum(torch.where(y > 0, y * shifted, 0.0))
    lse = torch.where(counted, groups.sum(shifted.exp()), 1.0).log()
    losses = lse - own / torch.where(counted, mass, 1.0) if normalize else mass * lse - own
    return _reduce(losses, counted, reduction)


def pairwise(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """Logistic loss over pairs in a group (RankNet): mean over y_i > y_j, w_i · softplus(s_j − s_i).

    All groups have equal weight, regardless of their pair counts; rax averages over all pairs in all groups.

    Args:
        scores, offsets: as in `softmax`.
        labels: (n,) bool, integers or floats ≥ 0; only their order matters.
        weights: (n,); a pair's weight is the weight of the row with the higher label. No gradient.
        reduction: "mean" over the groups with a pair; "sum"; "none" for (G,), with 0 for the other groups.
    Returns: 0-d or (G,), in fp32 (fp64 for fp64 scores). 0 if no group has a pair.
    Raises: ValueError for wrong shapes, dtypes and devices; on the CPU for negative labels.
    """
    s, y, w, groups = _check_inputs("rank.losses.pairwise", scores, labels, offsets, weights, reduction)
    counted = _differ(y, groups)

    def terms(there: Tensor, s: Pair, y: Pair, w: Pair) -> Tensor:
        above = there & (y.own > y.other)
        losses = w.own * F.softplus(torch.where(above, s.other - s.own, 0.0))
        return torch.stack((torch.where(above, losses, 0.0).sum((1, 2)), above.sum((1, 2)).to(losses.dtype)))

    w = torch.ones_like(s) if w is None else w
    losses, pairs = _over_pairs(terms, groups, _mask_groups(s, counted, groups), y, w)
    return _reduce(losses / torch.where(counted, pairs, 1.0), counted, reduction)


def approx_ndcg(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean", temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """One minus NDCG with smooth ranks: 1 − Σ_i w_i G_i / log₂(1 + r_i) / maxDCG.

    G = 2^y − 1 is a row's gain, r_i = 1 + Σ_{j≠i} σ((s_j − s_i) / temperature) its smooth rank, and maxDCG the DCG for
    rows sorted by descending w · G. rax returns negative NDCG, which has the same gradient.

    Args:
        scores, labels, offsets: as in `softmax`.
        weights: (n,) gain multipliers. No gradient.
        reduction: "mean" over the groups with a gain; "sum"; "none" for (G,), with 0 for the other groups.
        temperature: in units of scores; smaller values approximate the ranks better, with flatter gradients in between.
    Returns: 0-d or (G,), in fp32 (fp64 for fp64 scores). 0 if no group has a gain.
    Raises: ValueError for wrong shapes, dtypes and devices, and a non-positive temperature; on the CPU for negative
        labels.
    """
    name = "rank.losses.approx_ndcg"
    if not temperature > 0:
        raise ValueError(f"{name}: temperature must be positive, got {temperature}.")
    s, y, w, groups = _check_inputs(name, scores, labels, offsets, weights, reduction)
    gain = torch.exp2(y) - 1
    gain = gain if w is None else w * gain
    best = _ideal(gain, groups)
    counted = best > 0

    def terms(there: Tensor, s: Pair, gain: Pair) -> Tensor:
        # The row itself is among the others and contributes ½.
        rank = 0.5 + torch.where(there, torch.sigmoid((s.other - s.own) / temperature), 0.0).sum(2)
        return (gain.own.squeeze(2) * discounts(rank)).sum(1)[None]

    dcg = _over_pairs(terms, groups, _mask_groups(s, counted, groups), gain)[0]
    losses = 1 - dcg / torch.where(counted, best, 1.0)
    return _reduce(losses, counted, reduction)


def lambda_loss(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean", mu: float = 10.0,
) -> Tensor:  # fmt: skip
    """Logistic loss over pairs, weighted by their effect on NDCG: Σ_{y_i > y_j} w_i ΔNDCG_ij · softplus(s_j − s_i).

        ΔNDCG_ij = (G_i − G_j) / maxDCG · (|D(r_i) − D(r_j)| + mu · (D(d) − D(d + 1)))

    with G = 2^y − 1, D(r) = 1 / log₂(1 + r), r the ranks by score (ties in row order; no gradient) and d = |r_i − r_j|.
    This is NDCG-Loss2++ from Wang et al. 2018 with natural logarithms; mu=0 is LambdaRank. The name is `lambda_loss`
    because `lambda` is a Python keyword.

    Args:
        scores, labels, offsets: as in `softmax`.
        weights: (n,); a pair's weight is the weight of the row with the higher label. No gradient.
        reduction: "mean" over the groups with a pair; "sum"; "none" for (G,), with 0 for the other groups.
        mu: ≥ 0, weight for NDCG-Loss2's bound relative to the LambdaRank weights.
    Returns: 0-d or (G,), in fp32 (fp64 for fp64 scores). 0 if no group has a pair.
    Raises: ValueError for wrong shapes, dtypes and devices, and a negative mu; on the CPU for negative labels.
    """
    name = "rank.losses.lambda_loss"
    if not mu >= 0:
        raise ValueError(f"{name}: mu must not be negative, got {mu}.")
    s, y, w, groups = _check_inputs(name, scores, labels, offsets, weights, reduction)
    counted = _differ(y, groups)
    s = _mask_groups(s, counted, groups)
    gain = torch.exp2(y) - 1
    order = groups.order(s)
    rank = torch.empty_like(order).index_copy_(0, order, groups.place()).to(s.dtype)

    def terms(there: Tensor, s: Pair, y: Pair, gain: Pair, rank: Pair, w: Pair) -> Tensor:
        above = there & (y.own > y.other)
        apart = torch.where(above, (rank.own - rank.other).abs(), 1.0)
        worth = (discounts(rank.own) - discounts(rank.other)).abs() + mu * (discounts(apart) - discounts(apart + 1))
        losses = w.own * (gain.own - gain.other) * worth * F.softplus(torch.where(above, s.other - s.own, 0.0))
        return torch.where(above, losses, 0.0).sum((1, 2))[None]

    losses = _over_pairs(terms, groups, s, y, gain, rank, torch.ones_like(s) if w is None else w)[0]
    return _reduce(losses / torch.where(counted, _ideal(gain, groups), 1.0), counted, reduction)


def _check_inputs(
    name: str, scores: Tensor, labels: Tensor, offsets: Tensor | None, weights: Tensor | None, reduction: str,
    most: float = torch.inf,
) -> tuple[Tensor, Tensor, Tensor | None, Groups]:  # fmt: skip
    """Check the inputs; return scores, labels and weights in the loss dtype, and the groups."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    groups = check_groups(name, scores, labels, offsets, weights)
    for argument, value, top in (("labels", labels, most), ("weights", weights, torch.inf)):
        # Reading values would synchronise with the GPU.
        if value is None or not (CHECKS or value.device.type == "cpu") or not is_concrete(value):
            continue
        wrong = ~((value >= 0) & (value <= top))  # NaN is out of range too
        if wrong.any():
            expected = "not be negative" if top == torch.inf else f"lie between 0 and {top:g}"
            row = int(wrong.nonzero()[0])
            raise ValueError(f"{name}: {argument} must {expected}, got {value[row].item():g} in row {row}.")
    dtype = torch.promote_types(scores.dtype, torch.float32)
    w = None if weights is None else weights.detach().to(dtype)
    return scores.to(dtype), labels.detach().to(dtype), w, groups


class Pair(NamedTuple):
    """A column's values in pairs: first row (g, R, 1), second row (g, 1, L)."""

    own: Tensor
    other: Tensor


def _mask_groups(s: Tensor, counted: Tensor, groups: Groups) -> Tensor:
    """Scores with 0 in skipped groups, so that their contents, including NaN, cannot affect the result."""
    return torch.where(counted[groups.row], s, 0.0) if groups.number else s


def _differ(y: Tensor, groups: Groups) -> Tensor:
    """(G,): whether a group contains different labels."""
    return groups.largest(y) > -groups.largest(-y)


def _ideal(gain: Tensor, groups: Groups) -> Tensor:
    """(G,): DCG with rows sorted by descending gain."""
    return groups.sum(gain[groups.order(gain)] * discounts(groups.place().to(gain.dtype)))


# The block count depends on the group sizes.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _over_pairs(terms: Callable[..., Tensor], groups: Groups, s: Tensor, *columns: Tensor) -> Tensor:
    """(c, G): sums computed by `terms` over each group's row pairs.

    terms: takes a (g, R, L) mask for valid pairs, and a `Pair` for s and each column; returns (c, g), 0 without pairs.
    s: (n,), with gradients. columns: (n,), without.
    """
    order = groups.offsets.diff().argsort(descending=True, stable=True)
    sizes = groups.given.diff().cpu().sort(descending=True, stable=True).values
    starts, ends = groups.offsets[:-1][order], groups.offsets[1:][order]

    def block(s: Tensor, part: slice, L: int, rows: slice) -> Tensor:
        place = starts[part, None] + torch.arange(L, device=s.device)
        there = place < ends[part, None]
        # Padding reads its own group's last row: if all padding read the same row, that row's gradient would be a long
        # sum.
        place = torch.minimum(place, ends[part, None] - 1)
        padded = [torch.where(there, x[place], 0.0) for x in (s, *columns)]
        pairs = [Pair(x[:, rows, None], x[:, None, :]) for x in padded]
        return terms(there[:, rows, None] & there[:, None, :], *pairs)

    filled = int((sizes > 0).sum())
    blocks = []
    first = 0
    while first < filled:
        L = int(sizes[first])
        part = slice(first, first := min(first + max(PAIRS // L**2, 1), filled))
        R = max(min(PAIRS // L, L), 1)
        blocks.append([(part, L, slice(row, row + R)) for row in range(0, L, R)])
    if not blocks:  # no groups: slices for an empty block
        blocks = [[(slice(0, 0), 1, slice(0, 1))]]
    again = torch.is_grad_enabled() and s.requires_grad and (len(blocks) > 1 or len(blocks[0]) > 1)

    def compute_block(part: slice, L: int, rows: slice) -> Tensor:
        if not again:
            return block(s, part, L, rows)
        out: Tensor = checkpoint(block, s, part, L, rows, use_reentrant=False, preserve_rng_state=False)
        return out

    found = [reduce(torch.add, (compute_block(*arguments) for arguments in same)) for same in blocks]
    found.append(found[0].new_zeros(len(found[0]), groups.number - filled))
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    return torch.cat(found, 1)[:, back]


def _reduce(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    losses = torch.where(counted, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum().clamp(min=1)
