"""The walk over chunks: both heads' logits for one chunk of rows at a time, and all gradients along the way.

for each chunk of rows:
    logits  ← x Wᵀ (+ bias)       matrix product into the student's buffer
    teacher ← x' W'ᵀ (+ bias)     matrix product into the teacher's buffer; the next chunk overwrites it
    logits  ← d loss / d logits   one launch, or of a split head three, with exchanges between them
    dx ← logits W;  dw += logitsᵀ x

What a chunk's rows become is the business of `Classes`: `whole` where this device has all classes, else `split`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import differentiable, differentiable_directly, launcher
from tigon.losses.distillation.formula import Formula, Kind, Rest, Transform, Weights
from tigon.losses.distillation.rows import Classes, Rows, TopK
from tigon.losses.distillation.split import Split
from tigon.losses.distillation.whole import Whole
from tigon.losses.head.chunks import Chunk, Chunks, Gradients
from tigon.losses.head.head import Projection, empty_logits, logit_bytes
from tigon.losses.head.upstream import scaled_gradients
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.ops.linear import weight_gradient


class Call(NamedTuple):
    """The arguments of the operator, in the order of its schema."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher_x: Tensor  # with `rest`: the ids of a `TopK`
    teacher_weight: Tensor  # with `rest`: its log-probabilities
    teacher_bias: Tensor | None
    target: Tensor | None
    inverse: Tensor | None  # 1 / what the summed loss is divided by, 0-d
    valid: int  # −1: unknown
    compute: torch.dtype  # of the student's products, and of its logits
    logits: torch.dtype
    teacher_compute: torch.dtype
    teacher_logits: torch.dtype
    budget: int  # bytes of a chunk's logits, of both sides
    fp32: bool
    need_dx: bool
    need_dw: bool
    need_db: bool
    per_class: bool  # the soft loss is divided by V
    kind: Kind
    rest: Rest | None  # None beside a teacher's head
    beta: float
    temperature: float
    unit: float  # factor of the soft loss
    hard_weight: float
    ignore_index: int
    softcap: float
    scale: float
    teacher_softcap: float
    teacher_scale: float

    @property
    def share(self) -> int:
        """The student's share of the budget: all of it beside a teacher's K classes."""
        if self.rest:
            return self.budget
        # Both buffers have the same rows and V columns, so a row's bytes divide the budget. The student's bytes include
        # the narrowed gradient of wide logits.
        own = logit_bytes(self.compute, self.logits)
        return max(1, self.budget * own // (own + self.teacher_logits.itemsize))

    @property
    def acc(self) -> torch.dtype:
        # Half precision is summed in fp32. fp64 stays fp64, so that the torch path can be held against it.
        return torch.promote_types(self.compute, torch.float32)

    def factors(self, classes: Classes) -> Factors:
        unit = self.unit / classes.total if self.per_class else self.unit
        # dz of a divergence of softmax(z / τ) is slope / τ. The cross entropy is taken at temperature 1 and has no such
        # factor.
        soft = (1 - self.hard_weight) * unit / self.temperature
        if self.compute != torch.float16:
            return Factors(unit, Weights(soft, self.hard_weight))
        # An element of cosine's gradient is about 1 / V: a / |a| has elements of 1 / √V, and |a| grows as √V.
        boost = 1 / max(soft / (classes.total if self.kind == "cosine" else 1), self.hard_weight)
        return Factors(unit, Weights(soft * boost, self.hard_weight * boost), boost)


class Factors(NamedTuple):
    """The factor of the sum of soft losses; the weights of the gradients in the logits, and the boost in them.

    In fp16 the divisor, or the norms of logits, would make gradients underflow. The boost leaves them at the size of a
    probability; the backward pass divides by it, in fp32.
    """

    unit: float
    weights: Weights
    boost: float = 1.0


class Results(NamedTuple):
    """What the operator returns: three losses, 0-d, and the gradients, empty where none is needed."""

    loss: Tensor
    soft: Tensor
    hard: Tensor
    dx: Tensor
    dw: Tensor
    more: Tensor  # the second place of dW's sum: see `weight_gradient.places`
    db: Tensor


def classes_of(weight: Tensor, shards: Shards | None) -> Classes:
    return Whole(weight.shape[0]) if shards is None else Split(shards)


def _fake(*arguments: Any, shards: Shards | None = None) -> Results:
    call = Call(*arguments)
    (V, H), rows, acc = call.weight.shape, call.x.shape[0], call.acc
    loss, soft, hard = (call.x.new_empty((), dtype=acc) for _ in range(3))
    dx = call.x.new_empty((rows, H) if call.need_dx else (0,), dtype=call.compute)
    # One chunk with its divisor folded in is one product, which rounds once. A "sum" stays wide: its factor comes with
    # the upstream gradient and would round a second time.
    # The rule by which `Chunks` leaves rows out: what it holds in one chunk has to be one product here. On a CPU the
    # walk may count fewer rows later, and dW is then wider than it had to be.
    visited = rows if call.valid < 0 or call.valid > rows else call.valid
    # The widest shard, as in `Chunks`, whose chunks have to be the same on all ranks.
    row_bytes = classes_of(call.weight, shards).widest * logit_bytes(call.compute, call.logits)
    one = visited * row_bytes <= call.share
    several = call.inverse is None or not one
    # Weights wider than the products (autocast) get a gradient as wide as theirs. fp16 gets its divisor in the backward
    # pass alone, and its range need not hold the sum.
    wide = call.weight.dtype != call.compute or call.compute == torch.float16 or (call.fp32 and several)
    only = visited if one and shards is None and call.logits == call.compute else 0
    dw, more = weight_gradient.places(call.weight, call.compute, wide, call.budget, call.need_dw, only)
    return Results(loss, soft, hard, dx, dw, more, call.x.new_empty(V if call.need_db else 0, dtype=acc))


@launcher(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor teacher_x, Tensor teacher_weight, Tensor? teacher_bias,"
    " Tensor? target, Tensor? inverse, int valid, ScalarType compute, ScalarType logits, ScalarType teacher_compute,"
    " ScalarType teacher_logits, int budget, bool fp32, bool need_dx, bool need_dw, bool need_db, bool per_class,"
    " str kind, str? rest, float beta, float temperature, float unit, float hard_weight, int ignore_index,"
    " float softcap, float scale, float teacher_softcap, float teacher_scale)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def _distill_fwd(*arguments: Any, shards: Shards | None = None) -> Results:
    # The fake allocates the results, so a traced graph and a launch cannot disagree about shapes and dtypes.
    call, results, classes = Call(*arguments), _fake(*arguments, shards=shards), classes_of(arguments[1], shards)
    x, target, inverse, valid = call.x, call.target, call.inverse, call.valid
    if target is not None and valid < 0 and x.device.type == "cpu":
        valid = int((target != call.ignore_index).sum())  # the host is the device: looking costs nothing
    # Without targets every row counts: one zero, expanded, serves as all labels.
    labels = x.new_zeros(1, dtype=torch.long).expand(x.shape[0]) if target is None else target
    # Rows are left out only where the host knows how many count: shapes may not depend on numbers of the device.
    known = None if target is None or valid < 0 else valid
    # Casts of x and of the weight happen here, once a call, and not once a chunk.
    head = Projection.of(x, call.weight, call.bias, call.compute)
    sums = weight_gradient.parts(results.dw, results.more) if call.need_dw else None
    room = weight_gradient.room(sums)
    chunks = Chunks(head, labels, call.ignore_index, known, call.share, shards, call.logits, room)
    # Each program writes its row's loss to a place of its own. One sum at the end has one order, hence the same bits on
    # every run; atomics would not.
    soft_rows = x.new_empty(chunks.visited, dtype=results.loss.dtype)
    hard_rows = torch.empty_like(soft_rows) if call.hard_weight else None
    gradients = Gradients(chunks, results.dx if call.need_dx else None, sums, results.db if call.need_db else None)
    unit, weights, _ = call.factors(classes)
    formula = Formula(
        call.kind, call.rest, call.beta, call.temperature, weights, call.ignore_index,
        Transform(call.softcap, call.scale), Transform(call.teacher_softcap, call.teacher_scale), bool(gradients),
    )  # fmt: skip
    # In a split head every step of this loop exchanges numbers. All ranks have equal chunks, so they issue the same
    # collectives in the same order.
    for chunk, theirs in _with_teacher(chunks, call):
        rows = Rows(
            chunk.logits, None if target is None else chunk.target, soft_rows[chunk.rows],
            None if hard_rows is None else hard_rows[chunk.rows],
            None if call.compute == torch.float16 else inverse,  # fp16 gets it in the backward pass, in fp32
        )  # fmt: skip
        if isinstance(theirs, TopK):
            classes.from_topk(rows, theirs, formula)
        else:
            classes.from_head(rows, theirs, formula)
        # Wide logits leave a wide gradient, and the products take narrow factors.
        gradients.add(chunks.narrowed(chunk) if gradients else chunk)
    # The last chunk's dx of a split head is still being summed over the devices.
    gradients.finish()
    over: Tensor | float = 1.0 if inverse is None else inverse
    torch.mul(classes.over_all(soft_rows, formula).sum() * unit, over, out=results.soft)
    if hard_rows is None:
        results.hard.zero_()
    else:
        torch.mul(hard_rows.sum(), over, out=results.hard)
    torch.add(results.soft * (1 - call.hard_weight), results.hard, alpha=call.hard_weight, out=results.loss)
    return results


def _with_teacher(chunks: Chunks, call: Call) -> Iterator[tuple[Chunk, Tensor | TopK]]:
    """Each chunk with its rows' teacher logits, in one reused buffer, or with its rows of a `TopK`."""
    if call.rest:
        for chunk in chunks:
            yield chunk, TopK(*chunks.rows_of(chunk.start, chunk.stop, call.teacher_x, call.teacher_weight))
        return
    head = Projection.of(call.teacher_x, call.teacher_weight, call.teacher_bias, call.teacher_compute)
    buffer = empty_logits(chunks.size, call.teacher_weight.shape[0], head.x, call.teacher_logits)
    for chunk in chunks:
        # Gathered by the student's index: where rows are left out, teacher and student have to see the same tokens.
        (theirs,) = chunks.rows_of(chunk.start, chunk.stop, head.x)
        yield chunk, head.logits(theirs, buffer[: chunk.stop - chunk.start])


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, results = Call(*inputs), Results(*output)
    ctx.needs = call.need_dx, call.need_dw, call.need_db
    ctx.dtypes = call.x.dtype, call.weight.dtype, None if call.bias is None else call.bias.dtype
    # `ctx.own` exists only where the call came through `differentiable_directly`, with shards that no schema can carry.
    ctx.boost = call.factors(classes_of(call.weight, getattr(ctx, "own", {}).get("shards"))).boost
    # The gradients are saved, not the inputs: backward has only to scale them. fp16 still lacks its divisor.
    inverse = call.inverse if call.compute == torch.float16 else None
    ctx.save_for_backward(results.dx, results.dw, results.more, results.db, inverse)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * len(Call._fields)
    dx, dw, more, db, inverse, *_ = ctx.saved_tensors
    # 0-d tensors on the device: the host reads neither of them. The metrics' gradients are ignored, as callers get the
    # metrics detached.
    factor = dloss if inverse is None else dloss * inverse
    # On the factor, which is fp32, and not on the gradients: those would leave fp16's range again.
    factor = factor if ctx.boost == 1.0 else factor / ctx.boost
    grads = scaled_gradients((dx, (dw, more), db), factor, ctx.dtypes, ctx.needs)
    return *grads, *(None for _ in range(len(Call._fields) - len(grads)))


distilled = differentiable(_distill_fwd, _setup_context, _backward, outputs=3, unsaved=(0, 1, 2))
distilled_over_shards = differentiable_directly(_distill_fwd, _setup_context, _backward, outputs=3, unsaved=(0, 1, 2))
