"""The softmax over items in plain PyTorch, with all scores: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def item_softmax_reference(
    query: Tensor, items: Tensor, target: Tensor, bias: Tensor | None = None, *, scale: float = 1.0,
    ignore_index: int = -100, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    q, x = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (query, items))
    z = q @ x.mT * scale
    if bias is not None:
        z = z + bias.to(z.dtype)
    flat = z.reshape(target.numel(), z.shape[-1])
    losses = torch.nn.functional.cross_entropy(
        flat, target.reshape(-1).long(), ignore_index=ignore_index, reduction="none"
    )
    return reduce_losses(losses.view(target.shape), target, ignore_index, reduction)


class Contrast(NamedTuple):
    """The positive of each query against all items with another id.

    Attributes:
        target: (M,), each query's item row; `ignore_index` for queries that do not count.
        bias: (N,), added to the scores, or None.
        ids, own: the items' ids (N,), and the id (M,) whose items are no negatives of a query; None: the target alone.
        allowed: (M, N) or (1, N) bool, the items that are compared, which requires ids. None: all.
        positive, positive_bias: (M, D) and (M,), in place of row `target`, or None.
        scale, ignore_index, reduction: as in `item_softmax`.
    """

    target: Tensor
    bias: Tensor | None = None
    ids: Tensor | None = None
    own: Tensor | None = None
    allowed: Tensor | None = None
    positive: Tensor | None = None
    positive_bias: Tensor | None = None
    scale: float = 1.0
    ignore_index: int = -100
    reduction: str = "mean"


def contrast_reference(query: Tensor, items: Tensor, options: Contrast) -> Tensor:
    """Options with ids and own."""
    target, bias, ids, own, allowed, positive, positive_bias, scale, ignore_index, reduction = options
    assert ids is not None
    assert own is not None
    wide = torch.promote_types(query.dtype, torch.float32)
    q, x = query.to(wide), items.to(wide)
    z = q @ x.mT * scale
    if bias is not None:
        z = z + bias.to(wide)
    at = torch.where(target == ignore_index, 0, target)
    if positive is None:
        right = z.gather(1, at.unsqueeze(1)).squeeze(1)
    else:
        right = (q * positive.to(wide)).sum(-1) * scale
        right = right if positive_bias is None else right + positive_bias.to(wide)
    out = ids == own.unsqueeze(1)
    others = z.masked_fill(out if allowed is None else out | ~allowed, -torch.inf)
    losses = torch.logsumexp(torch.cat([right.unsqueeze(1), others], 1), 1) - right
    return reduce_losses(torch.where(target == ignore_index, 0.0, losses), target, ignore_index, reduction)


def reduce_losses(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum().clamp(min=1)
