"""Log-probabilities under a linear head without logits, for preference tuning and reinforcement learning.

    logits = softcap(scale · (x Wᵀ + bias + s · (x Aᵀ) Bᵀ)) / temperature;   results as in tigon.logprob

dW is a sum over tokens, each times an upstream gradient that the forward pass cannot know. So the backward pass
recomputes the logits: four matrix products per token. Losses in `tigon.losses` compute gradients in the forward pass
and take three. The last chunk's logits are still in the buffer; `keep_bytes` keeps more.

Source: tigon.logprob; low-rank adapters, Hu et al. 2021, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import is_concrete, is_graph_retained, is_traced, use_triton
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.chunks import Chunk, Chunks, Gradients, guard_valid_count, read_logprobs
from tigon.losses.head.head import Head, Projection, parse_head
from tigon.losses.head.vocabulary_parallel import Shards, is_sharded, localize_adapter
from tigon.losses.inputs import WalkPlan, parse_inputs, plan_walk
from tigon.losses.operator import LossOperator, make_differentiable, record
from tigon.losses.options import check_positive
from tigon.ops.example import HEAD, SEQUENCES, Example, make_ids
from tigon.ops.linear import weight_gradient
from tigon.ops.linear.chunk_size import chunk_rows
from tigon.ops.linear.padded_product import class_blocks, empty_logits
from tigon.ops.logprob import LogProb, logprob_gradient_rows, logprob_reference


def linear_logprob(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    target: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    chunks: ChunkOptions = ChunkOptions(),
) -> LogProb:
    """Log-probability, entropy, log-sum-exp, rank and mean logit for each target, without materialising all logits.

    Args:
        x: (..., H), bf16, fp16, fp32 or fp64: hidden states that enter the head.
        head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap, scale, group or adapter.
            Over a group the upstream gradient has to be the same on all ranks, and the adapter's B holds this rank's
            class rows.
        target: (...), integer class indices, which x predicts.
        ignore_index, temperature: as in `tigon.logprob`.
        chunks: which tokens are left out, the walk's cost, and with `keep_bytes` which logits are kept for the backward
            pass.
    Returns: `LogProb` with (...) fields, fp32 (fp64 for fp64), is_top1 bool; gradients through logprob and entropy,
        exact for any upstream gradient.
    Raises: ValueError for shapes, dtypes or options that do not fit, and as `tigon.logprob` for targets.

    Replaces::

        logp = F.log_softmax(F.linear(x, weight, bias).float() / temperature, dim=-1)
        logprob = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
    """
    name = "linear_logprob"
    head = parse_head(name, head, lora=True)
    lora_a, lora_b, lora_scale = head.lora if head.lora is not None else (None, None, 0.0)
    if is_sharded(head.weight, head.group):
        lora_a, lora_b = localize_adapter(name, lora_a, lora_b)
    check_positive(name, temperature=temperature)
    chunks.check_unused(name, "logits_dtype", "fp8")
    beside = ("lora A", lora_a), ("lora B", lora_b)
    inputs = parse_inputs(name, x, head._replace(lora=None), target, ignore_index, chunks.accumulate, beside=beside)
    V, H = inputs.weight.shape
    if lora_a is not None and lora_b is not None:
        r = lora_a.shape[0]
        if lora_a.shape != (r, H) or lora_b.shape != (V, r):
            raise ValueError(
                f"{name}: lora must be (A, B, s), A (r, {H}) and B ({V}, r), got {tuple(lora_a.shape)} and "
                f"{tuple(lora_b.shape)}."
            )
    labels, valid = inputs.labels, chunks.read_valid_tokens(name)
    if valid < 0 and x.device.type == "cpu" and is_concrete(labels):
        valid = int((labels != inputs.ignore_index).sum())  # on the CPU the count costs no synchronisation
    options = _Options(plan_walk(inputs, chunks, valid), chunks.keep_bytes, float(lora_scale), temperature)
    tensors = _Tensors(inputs.rows, inputs.weight, inputs.bias, lora_a, lora_b, labels)
    results = _linear_logprob(tensors, options, inputs.shards)
    logprob, entropy, *rest = (r.view(inputs.target.shape) for r in results)
    if 0 <= valid < labels.numel():  # otherwise no valid row can be left out
        guard = guard_valid_count(labels, inputs.ignore_index, valid, logprob.dtype)
        logprob, entropy = logprob * guard, entropy * guard
    return LogProb(logprob, entropy, *(r.detach() for r in rest))


def linear_logprob_reference(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, lora: tuple[Tensor, Tensor, float] | None,
    *options: Any,
) -> LogProb:  # fmt: skip
    """The specification: real logits. `options` as in `logprob_reference`."""
    logits = F.linear(x, weight, bias)
    if lora is not None:
        logits = logits + lora[2] * F.linear(F.linear(x, lora[0]), lora[1])
    return logprob_reference(logits, target, *options)


# --------------------------------------------------------------------------------------------------------- launches


class _Tensors(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    target: Tensor


class _BackwardTensors(NamedTuple):
    """The forward pass's tensors and saved results, and the upstream gradients."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    target: Tensor
    stats: Tensor | None
    logits: Tensor
    dlogprob: Tensor | None
    dentropy: Tensor | None


@record
class _Options(NamedTuple):
    """keep: bytes for logits kept beyond the last chunk."""

    plan: WalkPlan
    keep: int
    lora_scale: float
    temperature: float

    @property
    def transform(self) -> tuple[float, float, float]:
        return self.temperature, self.plan.softcap, self.plan.scale


@record
class _BackwardOptions(NamedTuple):
    """needs: for x, weight, bias, A and B. ours: kept logits may be overwritten, and serve the other chunks."""

    forward: _Options
    needs: tuple[bool, ...]
    ours: bool


class _AdaptedChunks(Chunks):
    """The chunk walk for a head with an optional adapter, in the compute dtype."""

    def __init__(self, tensors: _Tensors | _BackwardTensors, options: _Options, shards: Shards | None) -> None:
        x, weight, bias, lora_a, lora_b, target = tensors[:6]
        plan = options.plan
        known = None if plan.valid < 0 else plan.valid
        head = Projection.cast(x, weight, bias, plan.compute)
        super().__init__(head, target, plan.ignore_index, known, plan.budget, shards)
        self.lora_a: Any = lora_a if lora_a is None else lora_a.to(plan.compute)
        self.lora_b: Any = lora_b if lora_b is None else lora_b.to(plan.compute)
        self.lora_scale = options.lora_scale

    def compute(self, start: int, stop: int, logits: Tensor) -> Chunk:
        chunk = super().compute(start, stop, logits)
        if self.lora_a is not None:
            # Through the rank: W + s · B A would be a second full-size weight.
            through = chunk.x @ self.lora_a.t()
            for block in class_blocks(logits.shape[1], logits.dtype):
                logits[:, block].addmm_(through, self.lora_b[block].t(), alpha=self.lora_scale)
        return chunk


def _count_buffer_rows(rows: Any, row_bytes: int, budget: int, keep: int) -> Any:
    """Rows in the logits buffer: the chunks kept from the end, at least one chunk."""
    size = chunk_rows(rows, row_bytes, budget) if rows else 0
    chunks = -(-rows // size) if rows else 0
    number = min(chunks, 1 + keep // max(1, size * row_bytes))
    return max(rows - (chunks - number) * size, size)


def _forward_fake(tensors: _Tensors, options: _Options, shards: Shards | None) -> tuple[Tensor, ...]:
    x, weight, plan = tensors.x, tensors.weight, options.plan
    rows = x.shape[0] if plan.valid < 0 else min(plan.valid, x.shape[0])
    one = x.new_empty(x.shape[0], dtype=plan.acc)
    others = torch.empty_like(one), torch.empty_like(one), x.new_empty(x.shape[0], dtype=torch.bool)
    row_bytes = (weight.shape[0] if shards is None else shards.widest) * plan.compute.itemsize
    room = _count_buffer_rows(rows, row_bytes, plan.budget, options.keep)
    stats = x.new_empty((rows, 3), dtype=torch.float32 if shards is None else plan.acc)
    return one, *others, torch.empty_like(one), stats, empty_logits(room, weight.shape[0], x, plan.compute)


def _forward(tensors: _Tensors, options: _Options, shards: Shards | None) -> tuple[Tensor, ...]:
    *results, stats, logits = _forward_fake(tensors, options, shards)
    chunks = _AdaptedChunks(tensors, options, shards)
    if chunks.index is not None:  # rows are left out: results start in walk order
        results = [r.new_empty(chunks.visited) for r in results]
    read_logprobs(chunks, logits, results, stats, options.plan.ignore_index, options.transform)
    return *(chunks.scatter_to_batch(r) for r in results), stats, logits


def _backward_fake(tensors: _BackwardTensors, options: _BackwardOptions, shards: Shards | None) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) if need and t is not None else tensors.x.new_empty(0)
        for t, need in zip(tensors[:5], options.needs, strict=True)
    )


def _backward_of_rows(
    tensors: _BackwardTensors, options: _BackwardOptions, shards: Shards | None
) -> tuple[Tensor, ...]:
    """The gradients, starting with the last chunk, whose logits are still in the buffer."""
    x, weight, _, lora_a, lora_b, _, stats, logits, dlogprob, dentropy = tensors
    need_dx, need_dw, need_db, need_da, need_dlb = options.needs
    forward, plan = options.forward, options.forward.plan
    chunks = _AdaptedChunks(tensors, forward, shards)
    dx = x.new_empty(x.shape if need_dx else (0,), dtype=plan.compute)
    # A single chunk needs no sum: the product rounds once, into the weight's dtype.
    wide = weight.dtype != plan.compute or (plan.fp32 and chunks.count > 1)
    dw, more_dw = weight_gradient.places(weight, plan.compute, wide, plan.budget, need_dw)
    db = x.new_empty(weight.shape[0] if need_db else 0, dtype=plan.acc)
    gradients = Gradients.from_places(chunks, options.needs, (dx, dw, more_dw, db))
    da = dlb = None
    if lora_a is not None and lora_b is not None:
        # Small beside dW, so always summed in fp32.
        da, dlb = x.new_zeros(lora_a.shape, dtype=plan.acc), x.new_zeros(lora_b.shape, dtype=plan.acc)
    upstream = [
        d if d is None or chunks.index is None else d.index_select(0, chunks.index) for d in (dlogprob, dentropy)
    ]
    # Under retain_graph another backward pass may read the kept logits: the gradient then gets scratch memory.
    scratch = None if options.ours else empty_logits(chunks.size, weight.shape[0], x, plan.compute)
    for chunk in chunks.iterate_backward(logits, scratch=scratch):
        dlogprob, dentropy = (d if d is None else d[chunk.rows] for d in upstream)
        dlogits = chunk.logits if scratch is None else scratch[: chunk.logits.shape[0]]
        logprob_gradient_rows(
            chunk.logits, chunk.target, None if stats is None else stats[chunk.rows], dlogprob, dentropy,
            dlogits, plan.ignore_index, *forward.transform, merged=shards is not None,
        )  # fmt: skip
        chunk.logits = dlogits
        # The walk goes backwards, so the last chunk is the first to write the sums.
        last, more = chunk.stop == chunks.visited, None
        if chunks.lora_a is not None:
            through = dlogits @ chunks.lora_b  # (n, r)
            # dx gains s · (dlogits B) A. The product with B also serves A's gradient.
            more = through, chunks.lora_a, forward.lora_scale
            if da is not None and need_da:
                weight_gradient.accumulate([da], through, chunk.x, first=last)
            if dlb is not None and need_dlb:
                weight_gradient.accumulate([dlb], dlogits, chunk.x @ chunks.lora_a.t(), first=last)
        gradients.add(chunk, more)
    gradients.finish()
    if shards is not None and da is not None and need_da:
        shards.sum(da).wait()  # every device holds the whole A, so dA sums over all classes
    if more_dw.numel():
        dw = weight_gradient.narrow_sum(dw, more_dw)
    results = (dx, dw, db, *(g if g is None else g.mul_(forward.lora_scale) for g in (da, dlb)))
    return tuple(
        g.to(t.dtype) if need and t is not None and g is not None else x.new_empty(0)
        for g, t, need in zip(results, tensors[:5], options.needs, strict=True)
    )


_fwd = LossOperator("linear_logprob_fwd", _Tensors, _Options, _forward_fake, _forward, 7)
_bwd = LossOperator("linear_logprob_bwd", _BackwardTensors, _BackwardOptions, _backward_fake, _backward_of_rows, 5)


# --------------------------------------------------------------------------------------------------------- autograd


def _save(ctx: Any, tensors: _Tensors, options: _Options, output: tuple[Tensor, ...]) -> None:
    ctx.options = options
    stats, logits = output[5:]
    # Only kernels and the shard merge write statistics. Under tracing the backend is not known yet.
    written = ctx.shards is not None or is_traced(tensors.x) or use_triton(logits)
    ctx.save_for_backward(*tensors, stats if written else None, logits)


def _backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, *_: Any) -> Any:
    needs = tuple(ctx.needs_input_grad[:5])
    given = dlogprob if dlogprob is not None else dentropy
    if given is None or not any(needs):
        return ()
    upstream = [None if d is None else d.contiguous() for d in (dlogprob, dentropy)]
    ours = getattr(ctx, "hides", False) and not is_traced(given) and not is_graph_retained()
    options = _BackwardOptions(ctx.options, needs, ours)
    grads = _bwd(_BackwardTensors(*ctx.saved_tensors, *upstream), options, ctx.shards)
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


_linear_logprob = make_differentiable(_fwd, _save, _backward, outputs=5)


EXAMPLES = {
    "linear_logprob": Example(
        "Losses of a linear head",
        (SEQUENCES, HEAD),
        lambda x, w: linear_logprob(x, w, make_ids(x, 4, 32)).logprob,
    ),
}
