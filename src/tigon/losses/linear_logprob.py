"""Log-probabilities of a linear head without its logits, for preference tuning and reinforcement learning.

    logits = softcap(scale · (x Wᵀ + bias + s · (x Aᵀ) Bᵀ)) / temperature;   results as in tigon.logprob

The weight's gradient is a sum over tokens, each times its upstream gradient, which the forward pass cannot know. So the
backward pass computes the logits again: four matrix products a token. A loss of `tigon.losses` computes its gradients
in the forward pass and takes three. The last chunk's logits are still in their buffer; `keep_bytes` keeps more.

Source: tigon.logprob; low-rank adapters, Hu et al. 2021, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import (
    differentiable,
    differentiable_directly,
    is_concrete,
    is_graph_retained,
    is_traced,
    launcher,
    use_triton,
)
from tigon.losses.head.chunks import Chunk, Chunks, Gradients, chunk_budget, chunk_rows, nan_if_more
from tigon.losses.head.head import Head, Projection, check_head, class_blocks, empty_logits, head_of
from tigon.losses.head.vocabulary_parallel import Shards, adapter_of, is_sharded, shards_of
from tigon.losses.head.walk import Walk
from tigon.ops.linear import weight_gradient
from tigon.ops.logprob import (
    LogProb,
    check_transform,
    logprob_gradient_rows,
    logprob_reference,
    logprob_rows,
)
from tigon.ops.shard_statistics import IGNORED, columns, merge_logprob, shard_statistics
from tigon.ops.targets import checked_target


def linear_logprob(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    target: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    walk: Walk = Walk(),
) -> LogProb:
    """Each target's log-probability, with entropy, log-sum-exp, rank and mean of the logits, which are never all there.

    Args:
        x: (..., H), bf16, fp16, fp32 or fp64: hidden states that enter the head.
        head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap, scale, group or adapter.
            Over a group the upstream gradient has to be the same on all ranks, and the adapter's B holds the rows of
            this rank's classes.
        target: (...), integer class indices: what x predicts.
        ignore_index, temperature: as in `tigon.logprob`.
        walk: which tokens are left out, what the walk over the others costs, and with `keep_bytes` which logits are
            kept for the backward pass.
    Returns: `LogProb` of (...), fp32 (fp64 for fp64), is_top1 bool; gradients through logprob and entropy, exact for
        any upstream gradient.
    Raises: ValueError for shapes, dtypes or options that do not fit, and as `tigon.logprob` for targets.

    Replaces::

        logp = F.log_softmax(F.linear(x, weight, bias).float() / temperature, dim=-1)
        logprob = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
    """
    name = "linear_logprob"
    weight, bias, softcap, scale, group, lora = head_of(name, head, lora=True)
    check_transform(name, temperature, softcap, scale)
    walk.check_unused(name, "logits_dtype")
    accumulate = walk.accumulate
    lora_a, lora_b, lora_scale = lora if lora is not None else (None, None, 0.0)
    if is_sharded(weight, group):
        lora_a, lora_b = adapter_of(name, lora_a, lora_b)
    x, weight, bias, target, shards = shards_of(name, x, weight, bias, target, group, accumulate)
    compute = check_head(name, x, weight, bias, beside=(("lora A", lora_a), ("lora B", lora_b)))
    V, H = weight.shape
    if lora_a is not None and lora_b is not None:
        r = lora_a.shape[0]
        if lora_a.shape != (r, H) or lora_b.shape != (V, r):
            raise ValueError(
                f"{name}: lora must be (A, B, s), A (r, {H}) and B ({V}, r), got {tuple(lora_a.shape)} and "
                f"{tuple(lora_b.shape)}."
            )
    classes = V if shards is None else shards.classes
    target = checked_target(name, target, x.shape[:-1], classes, ignore_index, x.device)

    labels = target.reshape(-1).contiguous()
    if shards is not None:
        labels, ignore_index = shards.labels(labels, ignore_index), IGNORED
    valid = walk.number(name)
    if valid < 0 and x.device.type == "cpu" and is_concrete(labels):
        valid = int((labels != ignore_index).sum())  # the host is the device: looking costs nothing
    frozen = not (weight.requires_grad and torch.is_grad_enabled())
    budget = chunk_budget(x.device, walk.chunk_bytes, frozen=frozen)
    arguments = (
        x.reshape(labels.numel(), H), weight, labels, bias, lora_a, lora_b, valid, compute,
        budget, walk.keep_bytes, accumulate == "fp32", float(lora_scale), ignore_index,
        temperature, softcap or 0.0, scale,
    )  # fmt: skip
    results = _linear_logprob(*arguments) if shards is None else _over_shards(*arguments, {"shards": shards})
    logprob, entropy, *rest = (r.view(target.shape) for r in results)
    if 0 <= valid < labels.numel():  # else no row can be left out that counts
        guard = nan_if_more(labels, ignore_index, valid, logprob.dtype)
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


class _Adapted(Chunks):
    """The walk over chunks of a head that may have an adapter, in the compute dtype."""

    def __init__(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, lora_a: Tensor | None,
        lora_b: Tensor | None, valid: int, compute: torch.dtype, budget: int, lora_scale: float, ignore_index: int,
        shards: Shards | None,
    ) -> None:  # fmt: skip
        number = None if valid < 0 else valid
        super().__init__(Projection.of(x, weight, bias, compute), target, ignore_index, number, budget, shards)
        self.lora_a: Any = lora_a if lora_a is None else lora_a.to(compute)
        self.lora_b: Any = lora_b if lora_b is None else lora_b.to(compute)
        self.lora_scale = lora_scale

    def compute(self, start: int, stop: int, logits: Tensor) -> Chunk:
        chunk = super().compute(start, stop, logits)
        if self.lora_a is not None:
            # Through the rank: W + s · B A would be a second weight of full size.
            through = chunk.x @ self.lora_a.t()
            for block in class_blocks(logits.shape[1], logits.dtype):
                logits[:, block].addmm_(through, self.lora_b[block].t(), alpha=self.lora_scale)
        return chunk


def _widest(weight: Tensor, shards: Shards | None) -> int:
    return weight.shape[0] if shards is None else shards.widest


def _kept_chunks(rows: Any, V: int, compute: torch.dtype, budget: int, keep: int) -> tuple[int, int]:
    """How many rows' logits are kept (whole chunks from the end, at least one), and how many rows the buffer has."""
    size = chunk_rows(rows, V * compute.itemsize, budget) if rows else 0
    chunks = -(-rows // size) if rows else 0
    number = min(chunks, 1 + keep // max(1, size * V * compute.itemsize))
    kept = rows - (chunks - number) * size
    return kept, max(kept, size)


def _fwd_fake(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
    valid: int, compute: torch.dtype, budget: int, keep: int, fp32: bool, lora_scale: float, ignore_index: int,
    *options: Any, shards: Shards | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    acc = torch.promote_types(compute, torch.float32)
    rows = x.shape[0] if valid < 0 else min(valid, x.shape[0])
    one = x.new_empty(x.shape[0], dtype=acc)
    others = torch.empty_like(one), torch.empty_like(one), x.new_empty(x.shape[0], dtype=torch.bool)
    _, room = _kept_chunks(rows, _widest(weight, shards), compute, budget, keep)
    # Statistics of the visited rows alone, in the order of the walk.
    stats = x.new_empty((rows, 3), dtype=torch.float32 if shards is None else acc)
    return one, *others, torch.empty_like(one), stats, empty_logits(room, weight.shape[0], x, compute)


@launcher(
    "(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? lora_a, Tensor? lora_b, int valid,"
    " ScalarType compute, int budget, int keep, bool fp32, float lora_scale, int ignore_index, float temperature,"
    " float softcap, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd_fake,
)
def _linear_logprob_fwd(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
    valid: int, compute: torch.dtype, budget: int, keep: int, fp32: bool, lora_scale: float, *options: Any,
    shards: Shards | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    *found, stats, logits = _fwd_fake(
        x, weight, target, bias, lora_a, lora_b, valid, compute, budget, keep, fp32, lora_scale, *options, shards=shards
    )
    chunks = _Adapted(x, weight, target, bias, lora_a, lora_b, valid, compute, budget, lora_scale, options[0], shards)
    acc = torch.promote_types(compute, torch.float32)
    if chunks.index is not None:  # rows that are left out: the results are in the order of the walk at first
        found = [x.new_empty(chunks.visited, dtype=torch.bool if i == 3 else acc) for i in range(5)]
    # (rows, columns) of all chunks: one exchange at the end, since nothing before the backward pass needs the sums.
    own = x.new_empty(chunks.visited if shards is not None else 0, columns(True, True), dtype=acc)
    for chunk in chunks.forwards(logits):
        if shards is not None:
            shard_statistics(chunk.logits, chunk.target, own[chunk.rows], *options[1:], along=True, total=True)
            continue
        places = tuple(f[chunk.rows] for f in found)
        logprob_rows(chunk.logits, chunk.target, places, stats[chunk.rows], *options)
    if shards is not None and chunks.visited:
        (labels,) = chunks.rows_of(0, chunks.visited, target)
        merge_logprob(shards.gather(own).wait(), labels, tuple(found), stats, shards.classes, *options[1:])
    return *(chunks.in_batch_order(f) for f in found), stats, logits


def _bwd_fake(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
    stats: Tensor | None, logits: Tensor, dlogprob: Tensor | None, dentropy: Tensor | None, valid: int,
    compute: torch.dtype, budget: int, keep: int, fp32: bool, ours: bool, needs: list[bool], *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) if need and t is not None else x.new_empty(0)
        for t, need in zip((x, weight, bias, lora_a, lora_b), needs, strict=True)
    )


@launcher(
    "(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? lora_a, Tensor? lora_b, Tensor? stats,"
    " Tensor logits, Tensor? dlogprob, Tensor? dentropy, int valid, ScalarType compute, int budget, int keep,"
    " bool fp32, bool ours, bool[] needs, float lora_scale, int ignore_index, float temperature, float softcap,"
    " float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd_fake,
)
def _linear_logprob_bwd(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
    stats: Tensor | None, logits: Tensor, dlogprob: Tensor | None, dentropy: Tensor | None, valid: int,
    compute: torch.dtype, budget: int, keep: int, fp32: bool, ours: bool, needs: list[bool], lora_scale: float,
    *options: Any, shards: Shards | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients, from the last chunk on, whose logits are still in the buffer.

    ours: whether the kept logits may be overwritten, and their memory used for the other chunks.
    """
    chunks = _Adapted(x, weight, target, bias, lora_a, lora_b, valid, compute, budget, lora_scale, options[0], shards)
    acc = torch.promote_types(compute, torch.float32)
    dx = x.new_empty(x.shape, dtype=compute) if needs[0] else None
    # One chunk needs no sum: its product rounds once, into the weight's dtype.
    wide = weight.dtype != compute or (fp32 and chunks.count > 1)
    dw, more_dw = weight_gradient.places(weight, compute, wide, budget, needs[1])
    db = x.new_empty(weight.shape[0], dtype=acc) if needs[2] else None
    sums = weight_gradient.parts(dw, more_dw) if needs[1] else None
    gradients = Gradients(chunks, dx, sums, db)
    da = dlb = None
    if lora_a is not None and lora_b is not None:
        # Small beside dW, so they are summed in fp32 in any case.
        da, dlb = x.new_zeros(lora_a.shape, dtype=acc), x.new_zeros(lora_b.shape, dtype=acc)
    upstream = [
        d if d is None or chunks.index is None else d.index_select(0, chunks.index) for d in (dlogprob, dentropy)
    ]
    # Another backward pass may read the kept logits, as under retain_graph: the gradient then has scratch memory.
    scratch = None if ours else empty_logits(chunks.size, weight.shape[0], x, compute)
    for chunk in chunks.backwards(logits, scratch=scratch):
        slopes = [d if d is None else d[chunk.rows] for d in upstream]
        dlogits = chunk.logits if scratch is None else scratch[: chunk.logits.shape[0]]
        place = None if stats is None else stats[chunk.rows]
        merged = shards is not None
        logprob_gradient_rows(chunk.logits, chunk.target, place, slopes[0], slopes[1], dlogits, *options, merged=merged)
        chunk.logits = dlogits
        # The walk goes backwards, so the last chunk is the first to write the sums.
        last, more = chunk.stop == chunks.visited, None
        if chunks.lora_a is not None:
            through = dlogits @ chunks.lora_b  # (n, r)
            # dx gains s · (dlogits B) A. The product with B serves the gradient of A as well.
            more = through, chunks.lora_a, lora_scale
            if da is not None and needs[3]:
                weight_gradient.accumulate([da], through, chunk.x, first=last)
            if dlb is not None and needs[4]:
                weight_gradient.accumulate([dlb], dlogits, chunk.x @ chunks.lora_a.t(), first=last)
        gradients.add(chunk, more)
    gradients.finish()
    if shards is not None and da is not None and needs[3]:
        shards.sum(da).wait()  # every device holds all of A: its gradient is a sum over all classes
    if more_dw.numel():
        dw = weight_gradient.narrowed(dw, more_dw)
    # s is applied once, to the finished sums, rather than in every chunk.
    found = (dx, dw, db, *(g if g is None else g.mul_(lora_scale) for g in (da, dlb)))
    return tuple(
        g.to(t.dtype) if need and t is not None and g is not None else x.new_empty(0)
        for g, t, need in zip(found, (x, weight, bias, lora_a, lora_b), needs, strict=True)
    )


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, target, bias, lora_a, lora_b, valid, compute, budget, keep, fp32, *ctx.options = inputs
    ctx.arguments = valid, compute, budget, keep, fp32
    stats, logits = output[5:]
    over = bool(getattr(ctx, "own", {}))  # a split head: the statistics are sums over the devices, and always needed
    # Only the kernels write statistics. Under tracing the backend is not known yet, so they are saved in any case.
    ctx.save_for_backward(
        x, weight, target, bias, lora_a, lora_b, stats if over or is_traced(x) or use_triton(logits) else None, logits
    )


def _backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    none = (None,) * 16
    wanted = ctx.needs_input_grad
    needs = [wanted[0], wanted[1], wanted[3], wanted[4], wanted[5]]
    if (dlogprob is None and dentropy is None) or not any(needs):
        return none
    upstream = [None if d is None else d.contiguous() for d in (dlogprob, dentropy)]
    given = dlogprob if dlogprob is not None else dentropy
    ours = getattr(ctx, "hides", False) and not is_traced(given) and not is_graph_retained()  # type: ignore[arg-type]
    saved = ctx.saved_tensors
    own = getattr(ctx, "own", {})
    grads = _linear_logprob_bwd(*saved, *upstream, *ctx.arguments, ours, needs, *ctx.options, **own)
    dx, dw, db, da, dlb = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dx, dw, None, db, da, dlb, *none[6:]


_linear_logprob = differentiable(_linear_logprob_fwd, _setup_context, _backward, outputs=5)
_over_shards = differentiable_directly(_linear_logprob_fwd, _setup_context, _backward, outputs=5)
