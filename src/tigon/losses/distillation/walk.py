"""The walk over chunks: both heads' logits for a chunk's rows at a time, and all gradients along the way.

for each chunk of rows:
    logits  ← x Wᵀ (+ bias)       matrix product into the student's buffer
    teacher ← x' W'ᵀ (+ bias)     matrix product into the teacher's buffer; the next chunk overwrites it
    logits  ← d loss / d logits   `heads` or `topk`
    dx ← logits W;  dw += logitsᵀ x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.losses.distillation import heads, topk
from tigon.losses.distillation.formula import Formula, Kind, Rest, Transform, Weights
from tigon.losses.distillation.rows import Rows, TopK
from tigon.losses.head.chunks import Chunk, Chunks, Gradients
from tigon.losses.head.head import Projection, logit_bytes
from tigon.losses.head.upstream import scale_gradients
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.losses.inputs import WalkPlan
from tigon.losses.operator import LossOperator, make_differentiable, record
from tigon.ops.linear import weight_gradient
from tigon.ops.linear.padded_product import empty_logits


class Tensors(NamedTuple):
    """teacher_x, teacher_weight: with `rest`, the ids and log-probabilities (N, K) from a `TopK`.

    inverse: 1 / the summed loss's divisor, 0-d.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher_x: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    target: Tensor | None
    inverse: Tensor | None


@record
class Options(NamedTuple):
    """plan.budget covers both sides' logits. logits, teacher_logits: dtypes.

    per_class: the soft loss is divided by V. unit: factor on the soft loss. rest: "" with a teacher's head.
    """

    plan: WalkPlan
    logits: torch.dtype
    teacher_compute: torch.dtype
    teacher_logits: torch.dtype
    teacher: Transform
    per_class: bool
    kind: Kind
    rest: Rest | Literal[""]
    beta: float
    temperature: float
    unit: float
    hard_weight: float

    @property
    def logit_bytes(self) -> int:
        return logit_bytes(self.plan.compute, self.logits)

    @property
    def share(self) -> int:
        """The student's share of the budget: everything with a top-k teacher."""
        if self.rest:
            return self.plan.budget
        # Both buffers have the same rows and V columns, so a row's bytes divide the budget. The student's bytes include
        # the narrowed gradient for wide logits.
        return max(1, self.plan.budget * self.logit_bytes // (self.logit_bytes + self.teacher_logits.itemsize))

    @property
    def acc(self) -> torch.dtype:
        return torch.promote_types(self.plan.compute, torch.float32)

    def factors(self, classes: int) -> Factors:
        unit = self.unit / classes if self.per_class else self.unit
        # dz for a divergence on softmax(z / τ) is slope / τ. The cross entropy has temperature 1 and no such factor.
        soft = (1 - self.hard_weight) * unit / self.temperature
        if self.plan.compute != torch.float16:
            return Factors(unit, Weights(soft, self.hard_weight))
        # Elements in cosine's gradient are about 1 / V: a / |a| has elements near 1 / √V, and |a| grows as √V.
        scale = 1 / max(soft / (classes if self.kind == "cosine" else 1), self.hard_weight)
        return Factors(unit, Weights(soft * scale, self.hard_weight * scale), scale)


class Factors(NamedTuple):
    """The factor on the soft loss sum; the gradient weights in the logits, and the scale in them.

    In fp16 the divisor, or logit norms, would make gradients underflow. The scale keeps them near a probability's
    magnitude; the backward pass divides by the scale, in fp32.
    """

    unit: float
    weights: Weights
    grad_scale: float = 1.0


class Results(NamedTuple):
    """The operator's results: three losses, 0-d, and gradients, empty where not needed."""

    loss: Tensor
    soft: Tensor
    hard: Tensor
    dx: Tensor
    dw: Tensor
    more: Tensor  # the second tensor for dW's sum: see `weight_gradient.places`
    db: Tensor


def _count_classes(weight: Tensor, shards: Shards | None) -> int:
    return weight.shape[0] if shards is None else shards.classes


def _forward_fake(tensors: Tensors, options: Options, shards: Shards | None) -> Results:
    x, weight, plan, acc = tensors.x, tensors.weight, options.plan, options.acc
    (V, H), rows = weight.shape, x.shape[0]
    loss, soft, hard = (x.new_empty((), dtype=acc) for _ in range(3))
    dx = x.new_empty((rows, H) if plan.need_dx else (0,), dtype=plan.compute)
    # The rule by which `Chunks` leaves rows out: a single chunk there has to be a single product here. On a CPU the
    # walk may later count fewer rows, and dW is then wider than necessary.
    visited = rows if plan.valid < 0 or plan.valid > rows else plan.valid
    one = visited * (V if shards is None else shards.widest) * options.logit_bytes <= options.share
    # A single chunk with a folded divisor is a single product, which rounds once. "sum" stays wide: the divisor arrives
    # with the upstream gradient and would round a second time.
    several = tensors.inverse is None or not one
    wide = weight.dtype != plan.compute or plan.compute == torch.float16 or (plan.fp32 and several)
    only = visited if one and shards is None and options.logits == plan.compute else 0
    dw, more = weight_gradient.places(weight, plan.compute, wide, plan.budget, plan.need_dw, only)
    return Results(loss, soft, hard, dx, dw, more, x.new_empty(V if plan.need_db else 0, dtype=acc))


def _forward(tensors: Tensors, options: Options, shards: Shards | None) -> Results:
    # The fake allocates the results, so a traced graph and a launch cannot disagree about shapes and dtypes.
    results, plan = _forward_fake(tensors, options, shards), options.plan
    x, target, inverse, valid = tensors.x, tensors.target, tensors.inverse, plan.valid
    if target is not None and valid < 0 and x.device.type == "cpu":
        valid = int((target != plan.ignore_index).sum())  # on the CPU the count costs no synchronisation
    # Without targets every row counts: an expanded zero serves as all labels.
    labels = x.new_zeros(1, dtype=torch.long).expand(x.shape[0]) if target is None else target
    # Rows are left out only where the host knows the valid count: shapes may not depend on device values.
    known = None if target is None or valid < 0 else valid
    head = Projection.cast(x, tensors.weight, tensors.bias, plan.compute)
    sums = weight_gradient.parts(results.dw, results.more) if plan.need_dw else None
    room = weight_gradient.room(sums)
    chunks = Chunks(head, labels, plan.ignore_index, known, options.share, shards, options.logits, room)
    # Each program writes its row's loss, summed at the end in a fixed order, hence the same bits on every run; atomics
    # would not guarantee that.
    soft_rows = x.new_empty(chunks.visited, dtype=results.loss.dtype)
    hard_rows = torch.empty_like(soft_rows) if options.hard_weight else None
    gradients = Gradients(chunks, results.dx if plan.need_dx else None, sums, results.db if plan.need_db else None)
    unit, weights, _ = options.factors(_count_classes(tensors.weight, shards))
    formula = Formula(
        options.kind, options.rest, options.beta, options.temperature, weights, plan.ignore_index,
        Transform(plan.softcap, plan.scale), options.teacher, bool(gradients),
    )  # fmt: skip
    # All ranks have equal chunks, so they issue the same collectives in the same order.
    for chunk, theirs in _with_teacher(chunks, tensors, options):
        rows = Rows(
            chunk.logits, None if target is None else chunk.target, soft_rows[chunk.rows],
            None if hard_rows is None else hard_rows[chunk.rows],
            None if plan.compute == torch.float16 else inverse,  # fp16 applies the divisor in backward, in fp32
        )  # fmt: skip
        if isinstance(theirs, TopK):
            topk.write_rows(rows, theirs, formula, shards)
        else:
            heads.write_rows(rows, theirs, formula, shards)
        gradients.add(chunks.narrow(chunk) if gradients else chunk)
    gradients.finish()
    over: Tensor | float = 1.0 if inverse is None else inverse
    torch.mul(heads.sum_over_devices(soft_rows, formula, shards).sum() * unit, over, out=results.soft)
    if hard_rows is None:
        results.hard.zero_()
    else:
        torch.mul(hard_rows.sum(), over, out=results.hard)
    torch.add(results.soft * (1 - options.hard_weight), results.hard, alpha=options.hard_weight, out=results.loss)
    return results


def _with_teacher(chunks: Chunks, tensors: Tensors, options: Options) -> Iterator[tuple[Chunk, Tensor | TopK]]:
    """Each chunk with the teacher's logits, in a reused buffer, or with the chunk's rows from a `TopK`."""
    x, weight = tensors.teacher_x, tensors.teacher_weight
    if options.rest:
        for chunk in chunks:
            yield chunk, TopK(*chunks.select(chunk.start, chunk.stop, x, weight))
        return
    head = Projection.cast(x, weight, tensors.teacher_bias, options.teacher_compute)
    buffer = empty_logits(chunks.size, weight.shape[0], head.x, options.teacher_logits)
    for chunk in chunks:
        # Gathered with the student's index: where rows are left out, teacher and student have to see the same tokens.
        (theirs,) = chunks.select(chunk.start, chunk.stop, head.x)
        yield chunk, head.logits(theirs, buffer[: chunk.stop - chunk.start])


_fwd = LossOperator("distill_fwd", Tensors, Options, _forward_fake, _forward, 7)


# --------------------------------------------------------------------------------------------------------- autograd


def _save(ctx: Any, tensors: Tensors, options: Options, output: tuple[Tensor, ...]) -> None:
    results = Results(*output)
    ctx.needs = options.plan.needs
    ctx.dtypes = tensors.x.dtype, tensors.weight.dtype, None if tensors.bias is None else tensors.bias.dtype
    ctx.grad_scale = options.factors(_count_classes(tensors.weight, ctx.shards)).grad_scale
    # The gradients are saved, not the inputs: backward only scales them. fp16 still needs the divisor.
    inverse = tensors.inverse if options.plan.compute == torch.float16 else None
    ctx.save_for_backward(results.dx, results.dw, results.more, results.db, inverse)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> Sequence[Tensor | None]:
    if dloss is None:
        return ()
    dx, dw, more, db, inverse, *_ = ctx.saved_tensors
    factor = dloss if inverse is None else dloss * inverse
    # Applied to the fp32 factor rather than the gradients, which would leave fp16's range again.
    factor = factor if ctx.grad_scale == 1.0 else factor / ctx.grad_scale
    return scale_gradients((dx, (dw, more), db), factor, ctx.dtypes, ctx.needs)


distill_rows = make_differentiable(_fwd, _save, _backward, outputs=3, unsaved=(0, 1, 2))
