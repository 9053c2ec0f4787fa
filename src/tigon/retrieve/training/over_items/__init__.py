"""Softmax over a catalogue's items, exact, without the scores in memory.

    loss_i = log Σ_j exp(scale · q_i · x_j + bias_j) − (scale · q_i · x_t + bias_t),   t = target_i

Sources: online softmax, Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867; tile recomputation,
FlashAttention, Dao et al. 2022, https://arxiv.org/abs/2205.14135.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tigon.kernels import autocast_dtype, check_plain, use_triton
from tigon.losses.head.head import Head
from tigon.losses.head.vocabulary_parallel import Shards, resolve_shards
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.ops import shard_statistics
from tigon.ops.cross_entropy import CrossEntropy, Reduction, check_options
from tigon.ops.targets import checked_target
from tigon.retrieve.training.over_items.launches import _item_softmax
from tigon.retrieve.training.over_items.reference import Contrast, contrast_reference, item_softmax_reference
from tigon.retrieve.training.over_items.sharded import _over_shards

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["item_softmax", "item_softmax_reference"]

# The widest rows that the kernels' tiles hold.
WIDEST = 256
# The target for an ignored query, as in torch.
IGNORED = -100


def item_softmax(
    query: Tensor, items: Tensor, target: Tensor, bias: Tensor | None = None, *, scale: float = 1.0,
    reduction: Reduction = "mean", group: dist.ProcessGroup | DeviceMesh | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of each query's item among all items: the exact softmax, not a sampled approximation.

    Args:
        query: (..., D), bf16, fp16, fp32 or fp64.
        items: (N, D) in query's dtype: the table of all items, such as `embedding.weight`.
        target: (...), row in items for each query; −100 for ignored queries.
        bias: (N,), added to the scores after scale, such as −log of each item's frequency.
        scale: multiplies the products: 1 / temperature. For cosine similarity, normalize query and items first.
        reduction: "mean" over the queries that are not ignored (0 if there are none), "sum", or "none" for a loss per
            query.
        group: a process group, or a one-dimensional mesh, over which the items are sharded. `items` and `bias` are then
            this rank's shard, consecutive in rank order, any number, possibly none; N is their sum. query and
            target (global rows) are the same on all ranks, and so are the loss and the gradient of query, which
            is summed over the ranks. All ranks make the same calls, and replace or resize the table together.

    Returns: 0-d, or (...) for reduction="none", in fp32 (fp64 for fp64 inputs).

    Raises: ValueError for mismatched shapes, dtypes and options, and for targets outside the items (on a GPU these
        give NaN, unless TIGON_CHECKS=1).

    Up to D = 256 the scores never leave the multiprocessor: the forward pass gives the loss and the gradient of the
    queries, the backward pass recomputes the scores for the gradient of the items. Both are deterministic. Wider rows,
    and a bias that requires a gradient, go to `tigon.linear_cross_entropy`.

    Replaces::

        loss = F.cross_entropy((query @ items.T).float() * scale + bias, target)
    """
    name = "item_softmax"
    check_plain(name, query=query, items=items, target=target, bias=bias)
    check_options(name, reduction, 0.0, None, scale, None)
    check_pair(name, query, items)
    check_bias(name, "bias", bias, items)
    *_, shards = resolve_shards(name, query, items, bias, target, group, "fp32")
    count = items.shape[0] if shards is None else shards.classes
    target = checked_target(name, target, query.shape[:-1], count, IGNORED, query.device)
    dtype = autocast_dtype(query.device.type)
    if dtype is not None and query.dtype != torch.float64:
        query, items = query.to(dtype), items.to(dtype)
    elif items.dtype != query.dtype:
        raise ValueError(f"{name}: items must have query's dtype {query.dtype}, got {items.dtype}.")
    trained = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    narrow = query.shape[-1] <= WIDEST and not trained and count > 0
    if narrow and use_triton(query, items, bias):
        return run_fused(query, items, Contrast(target, bias, scale=scale, reduction=reduction), shards)
    inner = bias if bias is None or scale == 1.0 else bias / scale
    head = Head(items, None if inner is None else inner.to(items.dtype), scale=scale, group=group)
    return linear_cross_entropy(query, head, target, config=CrossEntropy(ignore_index=IGNORED, reduction=reduction))


def run_fused(query: Tensor, items: Tensor, options: Contrast, shards: Shards | None = None) -> Tensor:
    """The kernels' loss."""
    target, bias, ids, own, allowed, positive, positive_bias, scale, ignore_index, reduction = options
    flat = query.reshape(target.numel(), query.shape[-1])
    need_dq = query.requires_grad and torch.is_grad_enabled()
    labels = target.reshape(-1).contiguous()
    bias, ids, own, positive_bias = (t if t is None else t.contiguous() for t in (bias, ids, own, positive_bias))
    if allowed is not None:
        allowed = _lines(allowed).expand(len(flat), -1)
    inputs = bias, ids, own, allowed, positive, positive_bias, float(scale)
    if shards is None:
        loss = _item_softmax(flat, items, labels, *inputs, ignore_index, reduction, need_dq)
    else:
        labels = shards.labels(labels, ignore_index)
        rest = shard_statistics.IGNORED, reduction, need_dq, {"shards": shards}
        loss = _over_shards(flat, items, labels, *inputs, *rest)
    return loss.view(target.shape) if reduction == "none" else loss


def _lines(allowed: Tensor) -> Tensor:
    """As bytes, which the kernels read 16 at a time: lines that begin and end at multiples of 16."""
    short = -allowed.shape[1] % 16
    if short or allowed.stride(0) % 16 or allowed.stride(1) != 1 or allowed.storage_offset() % 16:
        allowed = torch.nn.functional.pad(allowed, (0, short)).contiguous()
    return allowed.view(torch.uint8)


def contrast(query: Tensor, items: Tensor, options: Contrast) -> Tensor:
    """`run_fused`, or its reference where kernels cannot run. Options with ids and own."""
    if query.shape[-1] <= WIDEST and use_triton(query, items, options.positive, options.bias):
        return run_fused(query, items, options)
    return contrast_reference(query, items, options)


def check_pair(name: str, query: Tensor, items: Tensor) -> None:
    if not query.dtype.is_floating_point or query.dim() < 1 or query.shape[-1] < 1:
        raise ValueError(f"{name}: query must be (..., D) floats, got {tuple(query.shape)} {query.dtype}.")
    if items.dim() != 2 or items.shape[1] != query.shape[-1] or not items.dtype.is_floating_point:
        raise ValueError(
            f"{name}: items must be (N, {query.shape[-1]}), as wide as query, got {tuple(items.shape)} {items.dtype}."
        )
    if items.device != query.device:
        raise ValueError(f"{name}: items must be on query's device {query.device}, got {items.device}.")


def check_bias(name: str, argument: str, bias: Tensor | None, items: Tensor) -> None:
    if bias is None:
        return
    if bias.shape != items.shape[:1] or not bias.dtype.is_floating_point or bias.device != items.device:
        raise ValueError(
            f"{name}: {argument} must be ({items.shape[0]},) floats on {items.device}, a number for each item, got "
            f"{tuple(bias.shape)} {bias.dtype} on {bias.device}."
        )
