"""Ranking losses of ragged groups: by rows, by groups, and by the pairs within a group.

All take `(scores, labels, offsets=None, *, weights=None, reduction="mean")`. A group is what one request showed; its
rows lie side by side: group g is the rows offsets[g] to offsets[g + 1] − 1. With s scores, y labels, w weights:

    bce           of a row:   w · (softplus(s) − y · s)
    softmax       of a group: −Σ_i w_i y_i log(exp s_i / Σ_j exp s_j)
    pairwise      of a group: the mean over its pairs y_i > y_j of w_i · softplus(s_j − s_i)
    approx_ndcg   of a group: 1 − Σ_i w_i G_i / log₂(1 + r_i) / maxDCG,  r_i = 1 + Σ_{j≠i} σ((s_j − s_i) / temperature)
    lambda_loss   of a group: Σ_{y_i > y_j} w_i ΔNDCG_ij · softplus(s_j − s_i)

Groups that say nothing about order are left out: the mean is over the others, and no gradient comes of them. NaN scores
of groups that count make the loss NaN. Scores of 16 bits are widened to fp32.

`pairwise`, `approx_ndcg` and `lambda_loss` compare each row with all of its group, in blocks of groups of about one
size. A block has at most `PAIRS` pairs, padding included, or those of one row; where there are several, each is
computed again in the backward pass, so that memory is that of one. The host must know the sizes: offsets on the CPU
cost no wait, those on a GPU one synchronisation. `bce` and `softmax` never wait.

Sources: Cao et al. 2007, ListNet, https://doi.org/10.1145/1273496.1273513; Burges et al. 2005, RankNet,
https://doi.org/10.1145/1102351.1102363; Qin, Liu & Li 2010, ApproxNDCG, https://doi.org/10.1007/s10791-009-9124-x; Wang
et al. 2018, LambdaLoss, https://doi.org/10.1145/3269206.3271784; the signature is that of rax,
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

from tigon.kernels import is_concrete
from tigon.ops.cross_entropy import REDUCTIONS, Reduction
from tigon.ops.targets import CHECKS
from tigon.rank.groups import Groups, check_groups, discounts

__all__ = ["approx_ndcg", "bce", "lambda_loss", "pairwise", "softmax"]

# Pairs that are compared at once.
PAIRS = 1 << 22


def bce(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """Binary cross entropy of each row: w · (softplus(s) − y · s).

    Args:
        scores: (n,) floats, logits.
        labels: (n,) bool, integers or floats from 0 to 1: how likely the row is right. No gradient.
        offsets: (G + 1,) int32 or int64, as the other losses take them; rows count alike, whatever their group.
        weights: (n,), of rows. No gradient.
        reduction: "mean" over all rows, whatever their weights; "sum"; "none" for (n,).
    Returns: 0-d or (n,), in fp32 (fp64 for fp64 scores). 0 for no rows.
    Raises: ValueError for shapes, dtypes and devices that do not fit; on the CPU for labels outside 0 to 1.
    """
    s, y, w, _ = _check_inputs("rank.losses.bce", scores, labels, offsets, weights, reduction, most=1.0)
    losses = F.softplus(s) - y * s
    losses = losses if w is None else w * losses
    return _reduce(losses, torch.ones_like(losses, dtype=torch.bool), reduction)


def softmax(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean", normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Cross entropy of labels and the softmax over a group: −Σ_i w_i y_i log softmax(s)_i.

    With one positive this is the usual softmax loss. With several a group counts for the sum of its labels, as in rax;
    normalize=True divides by it, so that the labels are a distribution, as in ListNet.

    Args:
        scores: (n,) floats. −inf takes a row that is not positive out of the sum.
        labels: (n,) bool, integers or floats, not negative: how right each row is. No gradient.
        offsets: (G + 1,) int32 or int64, where groups begin, and n; on scores' device or the CPU. None: one group.
        weights: (n,), factors of labels. No gradient.
        reduction: "mean" over the groups with a positive; "sum"; "none" for (G,), with 0 for groups without.
        normalize: divide w · y by its sum over the group.
    Returns: 0-d or (G,), in fp32 (fp64 for fp64 scores). 0 if no group has a positive.
    Raises: ValueError for shapes, dtypes and devices that do not fit; on the CPU for negative labels.
    """
    s, y, w, groups = _check_inputs("rank.losses.softmax", scores, labels, offsets, weights, reduction)
    y = y if w is None else w * y
    mass = groups.sum(y)
    counted = mass > 0
    s = _mask_groups(s, counted, groups)
    shifted = s - groups.largest(s)[groups.row]
    # Both terms are positive, so nothing cancels: shifted is at most 0, and its log-sum-exp at least 0.
    own = groups.sum(torch.where(y > 0, y * shifted, 0.0))
    lse = torch.where(counted, groups.sum(shifted.exp()), 1.0).log()
    losses = lse - own / torch.where(counted, mass, 1.0) if normalize else mass * lse - own
    return _reduce(losses, counted, reduction)


def pairwise(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """Logistic loss of pairs in a group (RankNet): the mean over y_i > y_j of w_i · softplus(s_j − s_i).

    Each group counts alike, however many pairs it has; rax takes the mean over the pairs of all groups.

    Args:
        scores: (n,) floats.
        labels: (n,) bool, integers or floats, not negative; only their order counts.
        offsets: (G + 1,) int32 or int64, where groups begin, and n; on scores' device or the CPU. None: one group.
        weights: (n,), the weight of a pair is that of its row with the higher label. No gradient.
        reduction: "mean" over the groups with a pair; "sum"; "none" for (G,), with 0 for groups without.
    Returns: 0-d or (G,), in fp32 (fp64 for fp64 scores). 0 if no group has a pair.
    Raises: ValueError for shapes, dtypes and devices that do not fit; on the CPU for negative labels.
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

    G = 2^y − 1 is a row's gain, r_i = 1 + Σ_{j≠i} σ((s_j − s_i) / temperature) its smooth rank, and maxDCG the sum with
    the rows by falling w · G. rax returns the negative of NDCG, which has the same gradient.

    Args:
        scores: (n,) floats.
        labels: (n,) bool, integers or floats, not negative: grades of relevance. No gradient.
        offsets: (G + 1,) int32 or int64, where groups begin, and n; on scores' device or the CPU. None: one group.
        weights: (n,), factors of gains. No gradient.
        reduction: "mean" over the groups with a gain; "sum"; "none" for (G,), with 0 for groups without.
        temperature: in units of scores: the smaller, the closer to the ranks, and the flatter between them.
    Returns: 0-d or (G,), in fp32 (fp64 for fp64 scores). 0 if no group has a gain.
    Raises: ValueError for shapes, dtypes and devices that do not fit, and a temperature that is not positive; on the
        CPU for negative labels.
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
        # The row itself is among the others, and counts ½.
        rank = 0.5 + torch.where(there, torch.sigmoid((s.other - s.own) / temperature), 0.0).sum(2)
        return (gain.own.squeeze(2) * discounts(rank)).sum(1)[None]

    dcg = _over_pairs(terms, groups, _mask_groups(s, counted, groups), gain)[0]
    losses = 1 - dcg / torch.where(counted, best, 1.0)
    return _reduce(losses, counted, reduction)


def lambda_loss(
    scores: Tensor, labels: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None,
    reduction: Reduction = "mean", mu: float = 10.0,
) -> Tensor:  # fmt: skip
    """Logistic loss of pairs, weighted by their worth to NDCG: Σ_{y_i > y_j} w_i ΔNDCG_ij · softplus(s_j − s_i).

        ΔNDCG_ij = (G_i − G_j) / maxDCG · (|D(r_i) − D(r_j)| + mu · (D(d) − D(d + 1)))

    with G = 2^y − 1, D(r) = 1 / log₂(1 + r), r the ranks by scores (equal scores as they stand; no gradient) and
    d = |r_i − r_j|. This is NDCG-Loss2++ of Wang et al. 2018, in natural logarithms; mu=0 is LambdaRank. The field says
    lambda loss; `lambda` is a keyword of Python.

    Args:
        scores: (n,) floats.
        labels: (n,) bool, integers or floats, not negative: grades of relevance. No gradient.
        offsets: (G + 1,) int32 or int64, where groups begin, and n; on scores' device or the CPU. None: one group.
        weights: (n,), the weight of a pair is that of its row with the higher label. No gradient.
        reduction: "mean" over the groups with a pair; "sum"; "none" for (G,), with 0 for groups without.
        mu: not negative; how much the bound of NDCG-Loss2 counts beside LambdaRank's weights.
    Returns: 0-d or (G,), in fp32 (fp64 for fp64 scores). 0 if no group has a pair.
    Raises: ValueError for shapes, dtypes and devices that do not fit, and a negative mu; on the CPU for negative
        labels.
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
    """Scores, labels and weights in the dtype of the loss, and the groups."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    groups = check_groups(name, scores, labels, offsets, weights)
    for argument, value, top in (("labels", labels, most), ("weights", weights, torch.inf)):
        # Looking at values stalls a GPU.
        if value is None or not (CHECKS or value.device.type == "cpu") or not is_concrete(value):
            continue
        wrong = ~((value >= 0) & (value <= top))  # NaN is wrong too
        if wrong.any():
            expected = "not be negative" if top == torch.inf else f"lie between 0 and {top:g}"
            row = int(wrong.nonzero()[0])
            raise ValueError(f"{name}: {argument} must {expected}, got {value[row].item():g} in row {row}.")
    dtype = torch.promote_types(scores.dtype, torch.float32)
    w = None if weights is None else weights.detach().to(dtype)
    return scores.to(dtype), labels.detach().to(dtype), w, groups


class Pair(NamedTuple):
    """A column's values in pairs: of the first row, (g, R, 1), and of the second, (g, 1, L)."""

    own: Tensor
    other: Tensor


def _mask_groups(s: Tensor, counted: Tensor, groups: Groups) -> Tensor:
    """Scores with 0 in groups that do not count: whatever stands there, not even NaN comes of it."""
    return torch.where(counted[groups.row], s, 0.0) if groups.number else s


def _differ(y: Tensor, groups: Groups) -> Tensor:
    """(G,): whether a group has a pair of different labels."""
    return groups.largest(y) > -groups.largest(-y)


def _ideal(gain: Tensor, groups: Groups) -> Tensor:
    """(G,): DCG with rows by falling gain."""
    return groups.sum(gain[groups.order(gain)] * discounts(groups.place().to(gain.dtype)))


# How many blocks there are depends on the sizes.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _over_pairs(terms: Callable[..., Tensor], groups: Groups, s: Tensor, *columns: Tensor) -> Tensor:
    """(c, G): what `terms` sums over the pairs of rows in each group.

    terms: of which of (g, R, L) pairs there are, and of s and each column a `Pair`; returns (c, g), 0 for no pairs.
    s: (n,), with gradients. columns: (n,), without.
    """
    order = groups.offsets.diff().argsort(descending=True, stable=True)
    sizes = groups.given.diff().cpu().sort(descending=True, stable=True).values
    starts, ends = groups.offsets[:-1][order], groups.offsets[1:][order]

    def block(s: Tensor, part: slice, L: int, rows: slice) -> Tensor:
        place = starts[part, None] + torch.arange(L, device=s.device)
        there = place < ends[part, None]
        # Padding reads its group's last row: one row that all of it read would make a long sum of its gradient.
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
    if not blocks:  # the slices of one that has no groups
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
