"""Softmax over items sharded across devices. Each device has a shard of the items, and all queries.

A device scans its own items for all queries. The devices exchange

    once    3 numbers per query: the maximum score, the sum of powers, and the target's score, −∞ if the
            target is on another device
    once    the sum of the devices' dq, in fp32

Every device merges the same numbers in device order, so the loss is bitwise equal on all. The gradient of the items
needs no communication.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tigon.kernels import differentiable_directly
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.ops.shard_statistics import IGNORED, OUTSIDE
from tigon.retrieve.training.over_items.launches import (
    _backward,
    _setup_context,
    power_shift,
    reduce_losses,
    run_scan,
)


def _item_softmax_over_shards_fwd(
    q: Tensor, items: Tensor, target: Tensor, bias: Tensor | None, ids: Tensor | None, own: Tensor | None,
    allowed: Tensor | None, positive: Tensor | None, positive_bias: Tensor | None, scale: float, ignore_index: int,
    reduction: str, need_dq: bool, *, shards: Shards,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Like `_item_softmax_fwd`; target: this device's labels (`tigon.ops.shard_statistics`)."""
    m, total, acc = run_scan(q, items, target, bias, None, None, scale, need_dq)
    here, shift = target >= 0, power_shift(q)
    x = torch.zeros_like(q, dtype=torch.float32)
    none = m.new_full((len(q),), -torch.inf)
    z = none
    if len(items):
        at = torch.where(here, target, 0)
        x = torch.where(here.unsqueeze(1), items[at].float(), 0.0)
        z = (q.float() * x).sum(1) * (scale / math.log(2))
        z = torch.where(here, z if bias is None else z + bias[at].float() / math.log(2), -torch.inf)
    top = m.amax(0) if len(m) else none
    sums = (torch.exp2(m - torch.where(top == -torch.inf, 0.0, top)) * total).sum(0)

    # A few numbers per query: in fp64, so that merging rounds no more than a single-device scan over all items.
    tops, sums, of_target = shards.gather(torch.stack((top, sums, z))).wait().double().unbind(1)
    z = of_target.amax(0)
    highest = torch.maximum(tops.amax(0), z)
    others = (torch.exp2(tops - highest - shift) * sums).sum(0)
    whole = others + torch.exp2(z - highest)
    less = -others / whole
    dq, on_the_way = m.new_empty(0), None
    if acc is not None:
        share = (torch.exp2(m - highest - shift) / whole).float()
        of_own = torch.where(here, less, 0.0).float().unsqueeze(1) * x
        on_the_way = shards.sum(acc.mul_(share.unsqueeze(2)).sum(0).add_(of_own).mul_(scale))
    counts, wrong = target != IGNORED, torch.where(target == OUTSIDE, torch.nan, 0.0)
    losses = torch.where(counts, (torch.log2(whole) + (highest - z)) * math.log(2), 0.0).float() + wrong
    lse = torch.where(counts, highest + torch.log2(whole), torch.inf).float() + wrong
    less = torch.where(counts, less, 0.0).float() + wrong
    if on_the_way is not None:
        dq = torch.where(counts.unsqueeze(1), on_the_way.wait(), 0.0) + wrong.unsqueeze(1)
    loss, inverse = reduce_losses(losses, target, ignore_index, reduction)
    return loss, lse, less, dq, inverse


_over_shards = differentiable_directly(_item_softmax_over_shards_fwd, _setup_context, _backward)
