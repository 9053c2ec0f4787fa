"""Cross entropy of a linear head, without its logits: the loss and all gradients in one walk over chunks of rows.

    logits = softcap · tanh(scale · (x Wᵀ + bias) / softcap);   loss as in tigon.cross_entropy

Sources: Liger-Kernel, https://arxiv.org/abs/2410.10989; Cut Cross-Entropy, https://arxiv.org/abs/2411.09009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import differentiable, differentiable_directly, launcher, make_anchor, run_once_differentiable
from tigon.losses.head.chunks import Chunk, Chunks, Gradients, chunk_budget, nan_if_more, scalar, spared_by_one_chunk
from tigon.losses.head.head import Head, Projection, check_head, head_of
from tigon.losses.head.upstream import scaled_gradients
from tigon.losses.head.vocabulary_parallel import Shards, shards_of
from tigon.losses.head.walk import Walk
from tigon.ops.cross_entropy import (
    Reduction,
    check_options,
    cross_entropy_reference,
    cross_entropy_rows,
    inverse_divisor,
)
from tigon.ops.cross_entropy.launches import gradient_rows
from tigon.ops.linear import weight_gradient
from tigon.ops.shard_statistics import IGNORED, merge_cross_entropy
from tigon.ops.targets import checked_target


class MainGrad(NamedTuple):
    """Where a head's dW is added, for optimizers that keep fp32 gradients of several steps.

    Args:
        grad: (V, H) fp32 (fp64 for fp64), to which dW is added in the forward pass, in place.
        scale: a number or a 0-d tensor, the factor by which you will multiply the loss (a loss scale, 1 / accumulation
            steps). dW is added before the upstream gradient is known. If the upstream gradient is another number, the
            gradient of x is NaN.
    """

    grad: Tensor
    scale: Tensor | float = 1.0


def linear_cross_entropy(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    divisor: Tensor | float | None = None,
    main_grad: MainGrad | Tensor | None = None,
    walk: Walk = Walk(),
) -> Tensor:
    """Cross entropy of the logits x Wᵀ + bias, which are never all in memory at once.

    Args:
        x: (..., H), bf16, fp16, fp32 or fp64: hidden states that enter the head.
        head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap, scale or group.
        target: (...), integer class indices.
        ignore_index: targets that do not count.
        reduction: "mean" over the rows that count (0 where none does), "sum", or "none" for one loss a row.
        label_smoothing: in [0, 1], spread evenly over the classes.
        z_loss: coefficient of lse², which keeps the logits from drifting.
        divisor: with "mean", divides in place of the number of rows that count; as in `tigon.cross_entropy`.
        main_grad: a `tigon.losses.MainGrad` or its tensor, to which dW is added in place in the forward pass. The
            weight gets no other gradient. Do not use it under torch.compile, nor in a checkpoint
            (`use_reentrant=False`), which runs the forward pass twice and would add dW twice.
        walk: which tokens are left out, and what the walk over the others costs.
    Returns: 0-d, or (...) for reduction="none", in fp32 (fp64 for fp64 inputs); a plain tensor.
    Raises: ValueError for shapes, dtypes or options that do not fit, and as `tigon.cross_entropy` for targets.

    Beyond its gradients the loss holds one chunk of logits. By default the budget grows so that one chunk suffices, if
    that costs no more memory than the fp32 dW buffer it avoids. With "mean" and "sum" the gradients are computed in the
    forward pass: three matrix products in all. If you never call backward you still pay for the gradients; evaluate
    under `no_grad`. "none" computes the logits again in the backward pass, since every row has an upstream gradient of
    its own.

    Replaces::

        loss = F.cross_entropy(F.linear(x, weight, bias).float(), target)
    """
    name = "linear_cross_entropy"
    weight, bias, softcap, scale, group, _ = head_of(name, head)
    check_options(name, reduction, label_smoothing, softcap, scale, divisor)
    walk.check_unused(name, "logits_dtype", "keep_bytes")
    accumulate = walk.accumulate
    x, weight, bias, target, shards = shards_of(name, x, weight, bias, target, group, accumulate)
    compute = check_head(name, x, weight, bias)
    classes, widest = (weight.shape[0],) * 2 if shards is None else (shards.classes, shards.widest)
    target = checked_target(name, target, x.shape[:-1], classes, ignore_index, x.device)
    labels = target.reshape(-1).contiguous()
    rows = x.reshape(labels.numel(), x.shape[-1])  # not -1: of hidden states of width 0 torch could not tell
    if shards is not None:
        labels, ignore_index = shards.labels(labels, ignore_index), IGNORED
    loss_dtype = torch.promote_types(compute, torch.float32)
    valid = walk.number(name)
    inverse = inverse_divisor(labels, ignore_index, reduction, divisor, loss_dtype)
    if valid >= 0:
        # Through the divisor, so that a count that is too small makes gradients NaN as well.
        guard = nan_if_more(labels, ignore_index, valid, loss_dtype)
        inverse = guard if inverse is None else inverse * guard
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (rows, weight, bias)]
    spared = 0
    if needs[1] and reduction == "mean" and main_grad is None:
        # Only "mean" profits: a "sum" keeps its fp32 dW even in one chunk, and main_grad takes dW without a buffer.
        spared = spared_by_one_chunk(weight, compute, accumulate, widest)
    # Of the widest shard: every device has to come to the same chunks.
    whole = (rows.shape[0] if valid < 0 else valid) * widest * compute.itemsize
    budget = chunk_budget(x.device, walk.chunk_bytes, whole=whole, spared=spared, frozen=not needs[1])
    options = ignore_index, label_smoothing, z_loss, softcap or 0.0, scale
    if main_grad is not None:
        grad, upstream_scale = main_grad if isinstance(main_grad, MainGrad) else MainGrad(main_grad)
        grad = grad.to_local() if hasattr(grad, "to_local") else grad
        _check_main_grad(grad, weight, loss_dtype, reduction)
        if torch.is_grad_enabled():
            upstream = scalar(upstream_scale, x.device, loss_dtype)
            rest = labels, inverse, valid, reduction, compute, budget, grad, upstream, options, shards
            loss, *_ = _IntoMainGrad.apply(rows, weight, bias, *rest)
            return loss  # type: ignore[no-any-return]
    arguments = (
        rows, weight, bias, labels, inverse, valid, reduction, compute, budget, accumulate == "fp32", *needs, *options,
    )  # fmt: skip
    loss = _linear_cross_entropy(*arguments) if shards is None else _over_shards(*arguments, {"shards": shards})
    return loss.view(target.shape) if reduction == "none" else loss


def _check_main_grad(main_grad: Tensor, weight: Tensor, dtype: torch.dtype, reduction: str) -> None:
    name = "linear_cross_entropy"
    if torch.compiler.is_compiling():
        raise ValueError(f"{name}: main_grad is written to in place, which is not for torch.compile.")
    if reduction == "none":
        raise ValueError(f"{name}: main_grad goes with reduction='mean' and 'sum', got 'none'.")
    if main_grad.shape != weight.shape or main_grad.dtype != dtype or main_grad.device != weight.device:
        raise ValueError(
            f"{name}: main_grad must be {tuple(weight.shape)} {dtype} on {weight.device}, got "
            f"{tuple(main_grad.shape)} {main_grad.dtype} on {main_grad.device}."
        )
    if not main_grad.is_contiguous():
        raise ValueError(f"{name}: main_grad must be contiguous, got strides {main_grad.stride()}.")


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, reduction: str = "mean", *options: Any
) -> Tensor:
    """The specification: real logits. `options` as in `cross_entropy_reference`."""
    rows = cross_entropy_reference(F.linear(x, weight, bias), target, *options)
    if reduction == "none":
        return rows
    count = (target != (options[0] if options else -100)).sum()
    return rows.sum() if reduction == "sum" else rows.sum() / count.clamp(min=1)


# --------------------------------------------------------------------------------------------------------- launches


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, inverse: Tensor | None, valid: int,
    reduction: str, compute: torch.dtype, budget: int, fp32: bool, need_dx: bool, need_dw: bool, need_db: bool,
    *options: Any, shards: Shards | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    V = weight.shape[0]
    acc = torch.promote_types(compute, torch.float32)
    loss = x.new_empty(target.shape if reduction == "none" else (), dtype=acc)
    early = reduction != "none"
    dx = x.new_empty(x.shape, dtype=compute) if need_dx and early else x.new_empty(0)
    visited = x.shape[0] if valid < 0 or valid > x.shape[0] else valid
    widest = V if shards is None else shards.widest
    wide = _wide_weight_gradient(visited, widest, x.device, reduction, compute, budget, fp32, weight.dtype)
    only = visited if shards is None and visited * V * compute.itemsize <= budget else 0
    dw, more = weight_gradient.places(weight, compute, wide, budget, need_dw and early, only)
    return loss, dx, dw, more, x.new_empty(V, dtype=acc) if need_db and early else x.new_empty(0)


def _wide_weight_gradient(
    rows: Any, V: int, device: torch.device, reduction: str, compute: torch.dtype, budget: int, fp32: bool,
    dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether dW is summed in fp32 and narrowed in the backward pass, together with the upstream gradient.

    "mean" in one chunk needs no sum, and its divisor is folded in already: the product itself rounds once. "sum" stays
    wide because you will divide it by the token count, which would round a second time; in fp16 it would overflow.
    """
    if dtype != compute:  # fp32 master weights under autocast: the accumulator is the gradient
        return True
    if not fp32 and compute != torch.float16:
        return False
    return reduction == "sum" or compute == torch.float16 or rows * V * compute.itemsize > budget


@launcher(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? inverse, int valid, str reduction,"
    " ScalarType compute, int budget, bool fp32, bool need_dx, bool need_dw, bool need_db, int ignore_index,"
    " float label_smoothing, float z_loss, float softcap, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward_fake,
)
def _linear_cross_entropy_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, inverse: Tensor | None, valid: int,
    reduction: str, compute: torch.dtype, budget: int, fp32: bool, need_dx: bool, need_dw: bool, need_db: bool,
    *options: Any, shards: Shards | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    loss, *gradients = _forward_fake(
        x, weight, bias, target, inverse, valid, reduction, compute, budget, fp32, need_dx, need_dw, need_db, *options,
        shards=shards,
    )  # fmt: skip
    dx, dw, more, db = gradients
    early = reduction != "none"
    sums = weight_gradient.parts(dw, more) if need_dw and early else None
    chunks = _chunks(x, weight, bias, target, valid, compute, budget, options[0], shards)
    chunks.room = weight_gradient.room(sums)
    losses = x.new_empty(chunks.visited, dtype=loss.dtype)
    # In fp16 the divisor would make gradients underflow: the backward pass applies it, in fp32.
    folded = None if compute == torch.float16 or reduction == "none" else inverse
    # Without a place the walk skips a product: a frozen head, frozen hidden states.
    places = (
        dx if need_dx and early else None,
        sums,
        db if need_db and early else None,
    )
    _walk(chunks, losses, folded, *places, False, *options)
    if reduction == "none":
        loss = chunks.in_batch_order(losses)
        return loss if inverse is None else loss * inverse, *gradients
    # The sum in fp32 is divided once. The gradients have their divisor already, but for fp16.
    total = losses.sum()
    return total if inverse is None else total * inverse, *gradients


def _walk(
    chunks: Chunks, losses: Tensor, factor: Tensor | None, dx: Tensor | None, dw: Sequence[Tensor] | None,
    db: Tensor | None, add: bool, *options: Any,
) -> None:  # fmt: skip
    """Write the rows' losses, and the gradients times factor to dx, dw and db unless they are None. add: dw += …."""
    gradients = Gradients(chunks, dx, dw, db, add)
    for chunk in _computed(chunks, losses, factor, bool(gradients), *options):
        gradients.add(chunk)
    gradients.finish()


def _computed(chunks: Chunks, losses: Tensor, factor: Tensor | None, gradient: bool, *options: Any) -> Iterator[Chunk]:
    """The chunks, losses written. With `gradient` their logits become the gradient times factor, 0-d or (N,)."""

    def of(chunk: Chunk) -> Tensor | None:
        return factor[chunk.rows] if factor is not None and factor.dim() else factor

    shards = chunks.shards
    if shards is None:
        for chunk in chunks:
            cross_entropy_rows(chunk.logits, chunk.target, losses[chunk.rows], None, of(chunk), gradient, *options)
            yield chunk
        return
    _, smoothing, _, softcap, scale = options
    one = losses.new_ones(())
    for chunk, parts in chunks.with_statistics(losses.dtype, 1.0, softcap, scale, False, smoothing != 0.0):
        stats = losses.new_empty(4 + 2 * chunk.target.numel())
        # Every device merges the same numbers in the same order, and so gets the same loss to the bit.
        merge_cross_entropy(parts, chunk.target, losses[chunk.rows], stats, shards.classes, *options[1:])
        if gradient:
            here = of(chunk)
            gradient_rows(chunk.logits, chunk.target, stats, one if here is None else here, shards.classes, *options)
        yield chunk


def _chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, valid: int, compute: torch.dtype, budget: int,
    ignore_index: int, shards: Shards | None = None,
) -> Chunks:  # fmt: skip
    if valid < 0 and x.device.type == "cpu":
        valid = int((target != ignore_index).sum())  # the host is the device: looking costs nothing
    known = None if valid < 0 else valid
    return Chunks(Projection.of(x, weight, bias, compute), target, ignore_index, known, budget, shards)


def _backward_fake(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, valid: int, compute: torch.dtype,
    budget: int, fp32: bool, need_dx: bool, need_dw: bool, need_db: bool, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    dw = torch.empty_like(weight) if need_dw else x.new_empty(0)
    return dx, dw, weight.new_empty(weight.shape[0]) if need_db else x.new_empty(0)


@launcher(
    "(Tensor dloss, Tensor x, Tensor weight, Tensor? bias, Tensor target, int valid, ScalarType compute, int budget,"
    " bool fp32, bool need_dx, bool need_dw, bool need_db, int ignore_index, float label_smoothing, float z_loss,"
    " float softcap, float scale) -> (Tensor, Tensor, Tensor)",
    _backward_fake,
)
def _linear_cross_entropy_bwd(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, valid: int, compute: torch.dtype,
    budget: int, fp32: bool, need_dx: bool, need_dw: bool, need_db: bool, *options: Any, shards: Shards | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of reduction="none", from logits that are computed again: each row has its upstream gradient."""
    chunks = _chunks(x, weight, bias, target, valid, compute, budget, options[0], shards)
    acc = torch.promote_types(compute, torch.float32)
    dx = x.new_empty(x.shape if need_dx else (0,), dtype=compute)
    wide = weight.dtype != compute or (fp32 and chunks.count > 1)
    dw, more = weight_gradient.places(weight, compute, wide, budget, need_dw)
    db = x.new_empty(weight.shape[0] if need_db else 0, dtype=acc)
    sums = weight_gradient.parts(dw, more) if need_dw else None
    gradients = Gradients(chunks, dx if need_dx else None, sums, db if need_db else None)
    rows = dloss if chunks.index is None else dloss.index_select(0, chunks.index)
    losses = torch.empty_like(rows)  # scratch: the kernel writes the losses again together with the gradient
    for chunk in _computed(chunks, losses, rows, True, *options):
        gradients.add(chunk)
    gradients.finish()
    dw = weight_gradient.narrowed(dw, more) if more.numel() else dw.to(weight.dtype)
    return dx.to(x.dtype), dw, db.to(weight.dtype) if need_db else x.new_empty(0)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, inverse, valid, ctx.reduction, compute, budget, fp32, *ctx.needs = inputs[:13]
    ctx.options, ctx.arguments = inputs[13:], (valid, compute, budget, fp32)
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    if ctx.reduction == "none":
        ctx.save_for_backward(x, weight, bias, target, inverse)
    else:
        # The gradients are saved, not the inputs: backward has only to scale them. fp16 still lacks its divisor.
        ctx.save_for_backward(*output[1:], inverse if compute == torch.float16 else None)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * (13 + len(ctx.options))
    if ctx.reduction == "none":
        x, weight, bias, target, inverse, *_ = ctx.saved_tensors
        dloss = dloss.contiguous() if inverse is None else dloss * inverse
        own = getattr(ctx, "own", {})
        arguments = *ctx.arguments, *ctx.needs, *ctx.options
        grads: Sequence[Tensor | None] = _linear_cross_entropy_bwd(dloss, x, weight, bias, target, *arguments, **own)
    else:
        dx, dw, more, db, inverse, *_ = ctx.saved_tensors
        factor = dloss if inverse is None else dloss * inverse
        grads = scaled_gradients((dx, (dw, more), db), factor, ctx.dtypes, ctx.needs)
    wanted = [grad if need else None for grad, need in zip(grads, ctx.needs, strict=True)]
    return *wanted, *(None for _ in range(10 + len(ctx.options)))


_linear_cross_entropy = differentiable(_linear_cross_entropy_fwd, _setup_context, _backward, unsaved=(0, 1, 2))
_over_shards = differentiable_directly(_linear_cross_entropy_fwd, _setup_context, _backward, unsaved=(0, 1, 2))


class _IntoMainGrad(torch.autograd.Function):
    """Adds dW to the caller's tensor, times the upstream gradient that the caller has announced."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, inverse: Tensor | None, valid: int,
        reduction: str, compute: torch.dtype, budget: int, main_grad: Tensor, upstream: Tensor,
        options: tuple[Any, ...],
        shards: Shards | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        chunks = _chunks(x, weight, bias, target, valid, compute, budget, options[0], shards)
        losses = x.new_empty(chunks.visited, dtype=main_grad.dtype)
        dx = x.new_empty(x.shape, dtype=compute) if ctx.needs_input_grad[0] else None
        db = losses.new_empty(weight.shape[0]) if ctx.needs_input_grad[2] else None
        factor = upstream if inverse is None else upstream * inverse
        # The products add to main_grad themselves, so dW needs no buffer of its own.
        _walk(chunks, losses, factor, dx, [main_grad], db, True, *options)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        total = losses.sum()
        way = make_anchor(ctx, (x, weight, bias), (0, 1, 2))
        ctx.save_for_backward(dx, db, upstream, *way)
        return total if inverse is None else total * inverse, *way

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
        return run_once_differentiable(_IntoMainGrad.gradients, ctx, dloss)

    @staticmethod
    def gradients(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, db, upstream, *_ = ctx.saved_tensors
        # main_grad holds dW already, so an upstream gradient that was not announced cannot be applied to it. dx becomes
        # NaN then, decided on the device: the host does not wait. The tolerance admits the same factors rounded in
        # another order.
        same = (dloss - upstream).abs() <= 8 * torch.finfo(dloss.dtype).eps * upstream.abs()
        factor = torch.where(same, 1.0, float("nan")).to(dloss.dtype)
        found = [t for t in (dx, db) if t is not None]
        dtypes = [d for t, d in zip((dx, db), ctx.dtypes, strict=True) if t is not None]
        scaled = iter(scaled_gradients(found, factor, dtypes, [True] * len(found)))
        dx, db = (None if t is None else next(scaled) for t in (dx, db))
        return dx, None, db, *(None for _ in range(10))
