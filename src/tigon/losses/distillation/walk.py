"""The walk over chunks: both heads' logits for a chunk's rows at a time, and all gradients along the way.

for each chunk of rows:
    logits  ← x Wᵀ (+ bias)       matrix product into the student's buffer
    teacher ← x' W'ᵀ (+ bias)     matrix product into the teacher's buffer; the next chunk overwrites it
    logits  ← d loss / d logits   `heads` or `topk`
    dx ← logits W;  dw += logitsᵀ x
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.losses.distillation import heads, topk
from tigon.losses.distillation.formula import Formula, Kind, Rest, Transform, Weights
from tigon.losses.distillation.rows import Rows, TopK
from tigon.losses.early_gradients import empty_gradients, save_gradients, scale_saved_gradients
from tigon.losses.head.chunks import Chunk, Chunks, Gradients
from tigon.losses.head.head import Projection, logit_bytes
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.losses.inputs import WalkPlan, make_chunks
from tigon.losses.operator import LossOperator, make_differentiable, record
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


def _count_classes(weight: Tensor, shards: Shards | None) -> int:
    return weight.shape[0] if shards is None else shards.classes


def _forward_fake(tensors: Tensors, options: Options, shards: Shards | None) -> tuple[Tensor, ...]:
    """Three losses, 0-d, and the gradients."""
    x, weight, plan = tensors.x, tensors.weight, options.plan
    gradients = empty_gradients(
        x, weight, plan, shards, plan.count_visited(x.shape[0]), needs_sum=tensors.inverse is None,
        class_bytes=options.logit_bytes, budget=options.share,
    )  # fmt: skip
    return *(x.new_empty((), dtype=plan.acc) for _ in range(3)), *gradients


def _forward(tensors: Tensors, options: Options, shards: Shards | None) -> tuple[Tensor, ...]:
    loss, soft, hard, *places = _forward_fake(tensors, options, shards)
    x, target, inverse, plan = tensors.x, tensors.target, tensors.inverse, options.plan
    chunks = make_chunks(x, tensors.weight, tensors.bias, target, plan, shards, options.share, options.logits)
    # Each program writes its row's loss, summed at the end in a fixed order, hence the same bits on every run; atomics
    # would not guarantee that.
    soft_rows = x.new_empty(chunks.visited, dtype=plan.acc)
    hard_rows = torch.empty_like(soft_rows) if options.hard_weight else None
    gradients = Gradients.from_places(chunks, plan.needs, places)
    unit, weights, _ = options.factors(_count_classes(tensors.weight, shards))
    formula = Formula(
        options.kind, options.rest, options.beta, options.temperature, weights, plan.ignore_index,
        Transform(plan.softcap, plan.scale), options.teacher, bool(gradients),
    )  # fmt: skip
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
    torch.mul(heads.sum_over_devices(soft_rows, formula, shards).sum() * unit, over, out=soft)
    if hard_rows is None:
        hard.zero_()
    else:
        torch.mul(hard_rows.sum(), over, out=hard)
    torch.add(soft * (1 - options.hard_weight), hard, alpha=options.hard_weight, out=loss)
    return loss, soft, hard, *places


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
    grad_scale = options.factors(_count_classes(tensors.weight, ctx.shards)).grad_scale
    save_gradients(ctx, tensors, options.plan, output[3:], inverse=tensors.inverse, grad_scale=grad_scale)


distill_rows = make_differentiable(_fwd, _save, scale_saved_gradients, outputs=3, unsaved=(0, 1, 2))
