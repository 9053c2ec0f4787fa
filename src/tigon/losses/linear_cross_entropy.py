"""Cross entropy after a linear head, without logits: the loss and all gradients in one walk over chunks.

    logits = softcap · tanh(scale · (x Wᵀ + bias) / softcap);   loss as in tigon.cross_entropy

Sources: Liger-Kernel, https://arxiv.org/abs/2410.10989; Cut Cross-Entropy, https://arxiv.org/abs/2411.09009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import add_anchor, run_once_differentiable
from tigon.losses.early_gradients import empty_gradients, save_gradients, scale_saved_gradients
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.chunks import Chunk, Chunks, Gradients, guard_valid_count, to_scalar
from tigon.losses.head.fp8 import Fp8Gradients, check_fp8
from tigon.losses.head.head import Head
from tigon.losses.head.upstream import scale_gradients
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.losses.inputs import WalkPlan, make_chunks, parse_inputs, plan_walk
from tigon.losses.operator import LossOperator, make_differentiable, record
from tigon.losses.options import make_keyword_error
from tigon.ops.cross_entropy import CrossEntropy, cross_entropy_reference, cross_entropy_rows, inverse_divisor
from tigon.ops.cross_entropy.launches import gradient_rows
from tigon.ops.example import HEAD, SEQUENCES, Example, make_ids
from tigon.ops.linear import weight_gradient
from tigon.ops.shard_statistics import merge_cross_entropy


class MainGrad(NamedTuple):
    """Where a head's dW is added, for optimizers that keep fp32 gradients over several steps.

    Args:
        grad: (V, H) fp32 (fp64 for fp64), to which dW is added in the forward pass, in place.
        scale: a number or a 0-d tensor, the factor by which you will multiply the loss (a loss scale, 1 / accumulation
            steps). dW is added before the upstream gradient is known. If the upstream gradient differs, dx is NaN.
    """

    grad: Tensor
    scale: Tensor | float = 1.0


def linear_cross_entropy(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    target: Tensor,
    *,
    config: CrossEntropy = CrossEntropy(),
    main_grad: MainGrad | Tensor | None = None,
    chunks: ChunkOptions = ChunkOptions(),
    **unknown: NoReturn,
) -> Tensor:
    """Cross entropy on the logits x Wᵀ + bias, which are never all in memory at once.

    Args:
        x: (..., H), bf16, fp16, fp32 or fp64: hidden states that enter the head.
        head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap, scale or group.
        target: (...), integer class indices.
        config: a `tigon.CrossEntropy`: reduction, smoothing, z-loss, divisor. Softcap and scale belong to the head.
        main_grad: a `tigon.losses.MainGrad` or a tensor, to which dW is added in place in the forward pass. The weight
            gets no other gradient. Do not use `main_grad` under torch.compile, nor in a checkpoint
            (`use_reentrant=False`), which runs the forward pass twice and would add dW twice.
        chunks: which tokens are left out, and the walk's cost.
    Returns: 0-d, or (...) for reduction="none", in fp32 (fp64 for fp64 inputs); a plain tensor.
    Raises: ValueError for shapes, dtypes or options that do not fit, and as `tigon.cross_entropy` for targets.

    Beyond the gradients, memory holds one chunk's logits. By default the budget grows so that one chunk suffices, if
    that costs no more memory than the fp32 dW buffer thereby avoided. With "mean" and "sum" the forward pass computes
    the gradients: three matrix products in all, even if you never call backward; evaluate under `no_grad`. "none"
    recomputes the logits in the backward pass, since every row has its own upstream gradient.

    `chunks=tigon.losses.ChunkOptions(fp8=True)` computes the products in FP8, on GPUs that multiply e4m3, and elsewhere
    the same numbers slowly. Losses are then off by some thousandths: use this option to train, not to compare models.

    Replaces::

        loss = F.cross_entropy(F.linear(x, weight, bias).float(), target)
    """
    name, reduction = "linear_cross_entropy", config.reduction
    if unknown:
        raise make_keyword_error(name, unknown, CrossEntropy)
    if config.softcap is not None or config.scale != 1.0:
        raise ValueError(f"{name}: config.softcap and config.scale must be left out: pass them in a tigon.Head.")
    chunks.check_unused(name, "logits_dtype", "keep_bytes")
    inputs = parse_inputs(name, x, head, target, config.ignore_index, chunks.accumulate)
    if chunks.fp8:
        check_fp8(name, inputs.weight, inputs.compute, inputs.shards)
    labels, dtype, valid = inputs.labels, inputs.loss_dtype, chunks.read_valid_tokens(name)
    inverse = inverse_divisor(labels, inputs.ignore_index, reduction, config.divisor, dtype)
    if valid >= 0:
        # Through the divisor, so that too small a count makes gradients NaN as well.
        guard = guard_valid_count(labels, inputs.ignore_index, valid, dtype)
        inverse = guard if inverse is None else inverse * guard
    # Only "mean" saves dW's buffer: "sum" keeps an fp32 dW even in a single chunk, and main_grad needs no buffer.
    saves = reduction == "mean" and main_grad is None
    plan = plan_walk(inputs, chunks, valid, row_bytes=inputs.compute.itemsize, one_chunk_saves_dw=saves)
    options = _Options(plan, reduction, config.label_smoothing, config.z_loss)
    tensors = _Tensors(inputs.rows, inputs.weight, inputs.bias, labels, inverse)
    if main_grad is not None:
        grad, upstream_scale = main_grad if isinstance(main_grad, MainGrad) else MainGrad(main_grad)
        grad = grad.to_local() if hasattr(grad, "to_local") else grad
        _check_main_grad(grad, inputs.weight, dtype, reduction)
        if torch.is_grad_enabled():
            upstream = to_scalar(upstream_scale, x.device, dtype)
            added: Tensor = _IntoMainGrad.apply(*tensors, grad, upstream, options, inputs.shards)[0]
            return added
    loss: Tensor = _linear_cross_entropy(tensors, options, inputs.shards)
    return loss.view(inputs.target.shape) if reduction == "none" else loss


def _check_main_grad(main_grad: Tensor, weight: Tensor, dtype: torch.dtype, reduction: str) -> None:
    name = "linear_cross_entropy"
    if torch.compiler.is_compiling():
        raise ValueError(f"{name}: main_grad is updated in place, which torch.compile does not support.")
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


class _Tensors(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    inverse: Tensor | None  # 1 / the divisor, 0-d


class _BackwardTensors(NamedTuple):
    dloss: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor


@record
class _Options(NamedTuple):
    plan: WalkPlan
    reduction: str
    label_smoothing: float
    z_loss: float

    @property
    def of_rows(self) -> tuple[int, float, float, float, float]:
        """The kernel options, in the kernels' order."""
        plan = self.plan
        return plan.ignore_index, self.label_smoothing, self.z_loss, plan.softcap, plan.scale

    @property
    def early(self) -> bool:
        """Whether the forward pass computes the gradients."""
        return self.reduction != "none"

    @property
    def gradients(self) -> type[Gradients]:
        return Fp8Gradients if self.plan.fp8 else Gradients

    @property
    def early_plan(self) -> WalkPlan:
        """The plan of the forward pass."""
        return self.plan if self.early else self.plan._replace(need_dx=False, need_dw=False, need_db=False)


def _forward_fake(tensors: _Tensors, options: _Options, shards: Shards | None) -> tuple[Tensor, ...]:
    x, weight, plan = tensors.x, tensors.weight, options.early_plan
    # "sum" needs a wide dW because you will divide by the token count. "mean" has folded the divisor in.
    needs_sum = options.reduction == "sum"
    gradients = empty_gradients(x, weight, plan, shards, plan.count_visited(x.shape[0]), needs_sum=needs_sum)
    return x.new_empty(() if options.early else tensors.target.shape, dtype=plan.acc), *gradients


def _forward(tensors: _Tensors, options: _Options, shards: Shards | None) -> tuple[Tensor, ...]:
    _, *places = _forward_fake(tensors, options, shards)
    (x, weight, bias, target, inverse), plan = tensors, options.early_plan
    chunks = make_chunks(x, weight, bias, target, plan, shards)
    losses = x.new_empty(chunks.visited, dtype=plan.acc)
    # In fp16 the divisor would make gradients underflow: the backward pass applies the divisor in fp32.
    folded = None if plan.compute == torch.float16 or not options.early else inverse
    _walk(chunks, losses, folded, options.gradients.from_places(chunks, plan.needs, places), options)
    # The fp32 sum is divided once. The gradients are divided already, except in fp16.
    loss = losses.sum() if options.early else chunks.scatter_to_batch(losses)
    return loss if inverse is None else loss * inverse, *places


def _walk(chunks: Chunks, losses: Tensor, factor: Tensor | None, gradients: Gradients, options: _Options) -> None:
    """Write row losses, and add gradients times factor, 0-d or (N,)."""
    for chunk in _with_gradient_logits(chunks, losses, factor, bool(gradients), options):
        gradients.add(chunk)
    gradients.finish()


def _with_gradient_logits(
    chunks: Chunks, losses: Tensor, factor: Tensor | None, gradient: bool, options: _Options
) -> Iterator[Chunk]:
    """Yield chunks with losses written. With `gradient` the logits become the gradient times factor, 0-d or (N,)."""
    shards, of_rows = chunks.shards, options.of_rows
    if shards is None:
        for chunk in chunks:
            here = _select_factor(factor, chunk)
            cross_entropy_rows(chunk.logits, chunk.target, losses[chunk.rows], None, here, gradient, *of_rows)
            yield chunk
        return
    _, smoothing, _, softcap, scale = of_rows
    one = losses.new_ones(())
    for chunk, parts in chunks.iterate_with_statistics(losses.dtype, 1.0, softcap, scale, False, smoothing != 0.0):
        stats = losses.new_empty(4 + 2 * chunk.target.numel())
        # Every device merges the same numbers in the same order, so all get bit-identical losses.
        merge_cross_entropy(parts, chunk.target, losses[chunk.rows], stats, shards.classes, *of_rows[1:])
        if gradient:
            here = _select_factor(factor, chunk)
            gradient_rows(chunk.logits, chunk.target, stats, one if here is None else here, shards.classes, *of_rows)
        yield chunk


def _select_factor(factor: Tensor | None, chunk: Chunk) -> Tensor | None:
    return factor[chunk.rows] if factor is not None and factor.dim() else factor


def _backward_fake(tensors: _BackwardTensors, options: _Options, shards: Shards | None) -> tuple[Tensor, ...]:
    x, weight, plan = tensors.x, tensors.weight, options.plan
    dx = x.new_empty(x.shape) if plan.need_dx else x.new_empty(0)
    dw = torch.empty_like(weight) if plan.need_dw else x.new_empty(0)
    return dx, dw, weight.new_empty(weight.shape[0]) if plan.need_db else x.new_empty(0)


def _backward_of_rows(tensors: _BackwardTensors, options: _Options, shards: Shards | None) -> tuple[Tensor, ...]:
    """Gradients for reduction="none", from recomputed logits: each row has its own upstream gradient."""
    dloss, x, weight, bias, target = tensors
    plan = options.plan
    chunks = make_chunks(x, weight, bias, target, plan, shards)
    dx = x.new_empty(x.shape if plan.need_dx else (0,), dtype=plan.compute)
    wide = weight.dtype != plan.compute or (plan.fp32 and chunks.visited > chunks.held)
    dw, more = weight_gradient.places(weight, plan.compute, wide, plan.budget, plan.need_dw)
    db = x.new_empty(weight.shape[0] if plan.need_db else 0, dtype=plan.acc)
    gradients = options.gradients.from_places(chunks, plan.needs, (dx, dw, more, db))
    rows = dloss if chunks.index is None else dloss.index_select(0, chunks.index)
    losses = torch.empty_like(rows)  # scratch: the kernel rewrites the losses together with the gradient
    _walk(chunks, losses, rows, gradients, options)
    dw = weight_gradient.narrow_sum(dw, more) if more.numel() else dw.to(weight.dtype)
    return dx.to(x.dtype), dw, db.to(weight.dtype) if plan.need_db else x.new_empty(0)


_fwd = LossOperator("linear_cross_entropy_fwd", _Tensors, _Options, _forward_fake, _forward, 5)
_bwd = LossOperator("linear_cross_entropy_bwd", _BackwardTensors, _Options, _backward_fake, _backward_of_rows, 3)


# --------------------------------------------------------------------------------------------------------- autograd


def _save(ctx: Any, tensors: _Tensors, options: _Options, output: tuple[Tensor, ...]) -> None:
    ctx.options = options
    if options.early:
        save_gradients(ctx, tensors, options.plan, output[1:], inverse=tensors.inverse)
    else:
        ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> Sequence[Tensor | None]:
    options: _Options = ctx.options
    if dloss is None or options.early:
        return scale_saved_gradients(ctx, dloss)
    x, weight, bias, target, inverse, *_ = ctx.saved_tensors
    dloss = dloss.contiguous() if inverse is None else dloss * inverse
    grads = _bwd(_BackwardTensors(dloss, x, weight, bias, target), options, shards=ctx.shards)
    return [grad if need else None for grad, need in zip(grads, options.plan.needs, strict=True)]


_linear_cross_entropy = make_differentiable(_fwd, _save, _backward, unsaved=(0, 1, 2))


class _IntoMainGrad(torch.autograd.Function):
    """Adds dW, times the announced upstream gradient, to the caller's tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, inverse: Tensor | None,
        main_grad: Tensor, upstream: Tensor, options: _Options, shards: Shards | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        chunks = make_chunks(x, weight, bias, target, options.plan, shards)
        losses = x.new_empty(chunks.visited, dtype=main_grad.dtype)
        dx = x.new_empty(x.shape, dtype=options.plan.compute) if ctx.needs_input_grad[0] else None
        db = losses.new_empty(weight.shape[0]) if ctx.needs_input_grad[2] else None
        factor = upstream if inverse is None else upstream * inverse
        _walk(chunks, losses, factor, options.gradients(chunks, dx, [main_grad], db, add=True), options)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        total = losses.sum()
        ctx.save_for_backward(dx, db, upstream)
        return total if inverse is None else total * inverse, *add_anchor(ctx, (x, weight, bias), (0, 1, 2))

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
        return run_once_differentiable(_IntoMainGrad.gradients, ctx, dloss)

    @staticmethod
    def gradients(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, db, upstream, *_ = ctx.saved_tensors
        # main_grad holds dW already, so an unannounced upstream gradient cannot be applied. dx then becomes NaN,
        # decided on the device: the host does not wait. The tolerance admits the same factors rounded in another order.
        same = (dloss - upstream).abs() <= 8 * torch.finfo(dloss.dtype).eps * upstream.abs()
        factor = torch.where(same, 1.0, float("nan")).to(dloss.dtype)
        present = [t is not None for t in (dx, db)]
        dx, db = scale_gradients((dx, db), factor, ctx.dtypes, present)
        return dx, None, db, *(None for _ in ctx.needs_input_grad[3:])


EXAMPLES = {
    "linear_cross_entropy": Example(
        "Losses of a linear head",
        (SEQUENCES, HEAD),
        lambda x, w: linear_cross_entropy(x, w, make_ids(x, 4, 32)),
    ),
}
