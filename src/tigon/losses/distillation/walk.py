"""The walk over chunks: both heads' logits for one chunk of rows at a time, and all gradients along the way.

for each chunk of rows:
    teacher ← x' W'ᵀ (+ bias)     matrix product into the teacher's buffer; the next chunk overwrites it
    logits  ← x Wᵀ (+ bias)       matrix product into the student's buffer
    logits  ← d loss / d logits   one launch
    dx ← logits W;  dw += logitsᵀ x

Where the classes lie on several devices, parts.py replaces the one launch by three, with exchanges between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tigon.linear import weight_gradient
from tigon.linear.chunks import Chunk, Chunks, Gradients
from tigon.linear.head import Projection, empty_logits, logit_bytes
from tigon.linear.upstream import scaled_gradients
from tigon.linear.vocabulary_parallel import Shards
from tigon.losses.distillation.parts import distill_part, topk_part
from tigon.losses.distillation.rows import distill_rows, topk_rows
from tigon.runtime import differentiable, differentiable_directly, launcher


def _fake(
    x, weight, bias, teacher_x, teacher_weight, teacher_bias, target, inverse, valid, compute, teacher_compute,
    wide_logits, budget, fp32, need_dx, need_dw, need_db, *options, shards=None,
):  # fmt: skip
    (V, H), rows = weight.shape, x.shape[0]
    widest = V if shards is None else shards.widest
    acc = torch.promote_types(compute, torch.float32)
    loss, soft, hard = (x.new_empty((), dtype=acc) for _ in range(3))
    dx = x.new_empty((rows, H) if need_dx else (0,), dtype=compute)
    # One chunk with its divisor folded in is one product, which rounds once. A "sum" stays wide: its factor comes with
    # the upstream gradient and would round a second time.
    visited = rows if valid < 0 or valid > rows else valid
    dtypes = logits_dtypes(compute, teacher_compute, wide_logits)
    share = _share(budget, options[2], compute, *dtypes)
    several = inverse is None or visited * widest * logit_bytes(compute, dtypes[0]) > share
    wide = weight.dtype != compute or compute == torch.float16 or (fp32 and several)
    dw, more = weight_gradient.places(weight, compute, wide, budget, need_dw)
    return loss, soft, hard, dx, dw, more, x.new_empty(V if need_db else 0, dtype=acc)


def logits_dtypes(
    compute: torch.dtype, teacher_compute: torch.dtype, wide_logits: bool
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the student's and the teacher's logits: those of their products, or fp32 if wide."""
    if not wide_logits:
        return compute, teacher_compute
    return torch.promote_types(compute, torch.float32), torch.promote_types(teacher_compute, torch.float32)


def _share(budget: int, rest: str, compute: torch.dtype, logits: torch.dtype, teacher: torch.dtype) -> int:
    """The student's share of the budget for both sides' logits: all of it beside a teacher's K classes."""
    own = logit_bytes(compute, logits)
    return budget if rest else max(1, budget * own // (own + teacher.itemsize))


def _weights(
    per_class: bool, kind: str, temperature: float, unit: float, hard_weight: float, V: int, compute: torch.dtype
) -> tuple[float, tuple[float, float], float]:
    """The factor of the sum of soft losses, the weights of the two gradients, and the boost of those weights.

    In fp16 the divisor, or the norms of logits, would make gradients underflow. The boost leaves them at the size of a
    probability; the backward pass divides by it, in fp32.
    """
    unit = unit / V if per_class else unit
    soft = (1 - hard_weight) * unit / temperature
    if compute != torch.float16:
        return unit, (soft, hard_weight), 1.0
    boost = 1 / max(soft / (V if kind == "cosine" else 1), hard_weight)
    return unit, (soft * boost, hard_weight * boost), boost


@launcher(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor teacher_x, Tensor teacher_weight, Tensor? teacher_bias,"
    " Tensor? target, Tensor? inverse, int valid, ScalarType compute, ScalarType teacher_compute, bool wide_logits,"
    " int budget, bool fp32, bool need_dx, bool need_dw, bool need_db, bool per_class, str kind, str rest, float beta,"
    " float temperature, float unit, float hard_weight, int ignore_index, float softcap, float scale,"
    " float teacher_softcap, float teacher_scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def _distill_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, teacher_x: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, target: Tensor | None, inverse: Tensor | None, valid: int, compute: torch.dtype,
    teacher_compute: torch.dtype, wide_logits: bool, budget: int, fp32: bool, need_dx: bool, need_dw: bool,
    need_db: bool, per_class: bool, kind: str, rest: str, beta: float, temperature: float, unit: float,
    hard_weight: float, ignore_index: int, *transforms: Any, shards: Shards | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """rest: "" for a teacher's head; else teacher_x and teacher_weight hold a `TopK`'s ids and log-probabilities."""
    outputs = _fake(
        x, weight, bias, teacher_x, teacher_weight, teacher_bias, target, inverse, valid, compute, teacher_compute,
        wide_logits, budget, fp32, need_dx, need_dw, need_db, per_class, kind, rest,
        shards=shards,
    )  # fmt: skip
    loss, soft, hard, dx, dw, more, db = outputs
    classes = weight.shape[0] if shards is None else shards.classes
    unit, weights, _ = _weights(per_class, kind, temperature, unit, hard_weight, classes, compute)
    if target is not None and valid < 0 and x.device.type == "cpu":
        valid = int((target != ignore_index).sum())  # the host is the device: looking costs nothing
    # Without targets every row counts: one zero, expanded, serves as all labels.
    labels = x.new_zeros(1, dtype=torch.long).expand(x.shape[0]) if target is None else target
    known = None if target is None or valid < 0 else valid
    dtype, teacher_dtype = logits_dtypes(compute, teacher_compute, wide_logits)
    share = _share(budget, rest, compute, dtype, teacher_dtype)
    chunks = Chunks(Projection.of(x, weight, bias, compute), labels, ignore_index, known, share, shards, dtype)
    soft_rows = x.new_empty(chunks.visited, dtype=loss.dtype)
    hard_rows = torch.empty_like(soft_rows) if hard_weight else None
    folded = None if compute == torch.float16 else inverse
    sums = weight_gradient.parts(dw, more) if need_dw else None
    gradients = Gradients(chunks, dx if need_dx else None, sums, db if need_db else None)
    gradient = bool(gradients)
    options = beta, temperature, ignore_index
    teacher = teacher_x, teacher_weight, teacher_bias
    for chunk, theirs in _walk(chunks, rest, teacher_compute, teacher_dtype, *teacher):
        places = soft_rows[chunk.rows], None if hard_rows is None else hard_rows[chunk.rows]
        here = None if target is None else chunk.target, *places, folded, weights, gradient
        if rest and shards is not None:
            topk_part(
                chunk.logits, theirs[0], theirs[1], *here, kind, rest, *options[:2], *transforms[:2], shards=shards
            )
        elif rest:
            topk_rows(chunk.logits, theirs[0], theirs[1], *here, kind, rest, *options, *transforms[:2])
        elif shards is not None:
            distill_part(chunk.logits, theirs[0], *here, kind, *options[:2], *transforms, shards=shards)
        else:
            distill_rows(chunk.logits, theirs[0], *here, kind, *options, *transforms)
        if gradient:
            # Wide logits leave a wide gradient, and the products take narrow factors.
            chunk = chunks.narrowed(chunk)
        gradients.add(chunk)
    gradients.finish()
    if shards is not None and chunks.count and not rest and kind != "cosine":
        # Each device has its classes' part of the divergence. One exchange at the end adds up all rows at once.
        soft_rows = shards.gather(soft_rows).wait().sum(0)
    over: Tensor | float = 1.0 if inverse is None else inverse
    torch.mul(soft_rows.sum() * unit, over, out=soft)
    if hard_rows is None:
        hard.zero_()
    else:
        torch.mul(hard_rows.sum(), over, out=hard)
    torch.add(soft * (1 - hard_weight), hard, alpha=hard_weight, out=loss)
    return outputs


def _walk(
    chunks: Chunks, rest: str, compute: torch.dtype, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
    """Each chunk with its rows' teacher logits, in one reused buffer, or with its rows of a `TopK`."""
    if rest:
        for chunk in chunks:
            yield chunk, chunks.rows_of(chunk.start, chunk.stop, x, weight)
        return
    head = Projection.of(x, weight, bias, compute)
    buffer = empty_logits(chunks.size, weight.shape[0], head.x, dtype)
    for chunk in chunks:
        (theirs,) = chunks.rows_of(chunk.start, chunk.stop, head.x)
        yield chunk, (head.logits(theirs, buffer[: chunk.stop - chunk.start]),)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _, _, _, inverse, _, compute, _, _, _, _, *ctx.needs = inputs[:17]
    per_class, kind, _, _, temperature, unit, hard_weight = inputs[17:24]
    ctx.arguments = len(inputs)
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    shards = getattr(ctx, "own", {}).get("shards")
    classes = weight.shape[0] if shards is None else shards.classes
    ctx.boost = _weights(per_class, kind, temperature, unit, hard_weight, classes, compute)[2]
    ctx.save_for_backward(*output[3:], inverse if compute == torch.float16 else None)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * ctx.arguments
    dx, dw, more, db, inverse, *_ = ctx.saved_tensors
    factor = dloss if inverse is None else dloss * inverse
    factor = factor if ctx.boost == 1.0 else factor / ctx.boost
    grads = scaled_gradients((dx, (dw, more), db), factor, ctx.dtypes, ctx.needs)
    return *grads, *(None for _ in range(ctx.arguments - 3))


distilled = differentiable(_distill_fwd, _setup_context, _backward, outputs=3, unsaved=(0, 1, 2))
distilled_over_shards = differentiable_directly(_distill_fwd, _setup_context, _backward, outputs=3, unsaved=(0, 1, 2))
