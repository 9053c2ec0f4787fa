"""Losses written as plain PyTorch functions on token log-probabilities, without materialising all logits.

    for each part, sequences that the loss has to see together:
        logits ← x Wᵀ (+ bias)                       matrix product into the buffer
        logprob, entropy ← logits                    one read
        loss, slopes ← f(logprob, entropy)           plain PyTorch and autograd, on a few numbers per token
        logits ← Σ slopes · d(logprob, entropy)/d(logits)
        dx ← logits W;  dw += logitsᵀ x              two matrix products

Where a part's logits fit the budget, a token costs three products, as many as with all logits in memory. A longer part
is walked twice and costs a fourth product. A reference head costs another product, through the same buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import is_concrete, use_triton
from tigon.losses.batch_split import PartRows, split_batch
from tigon.losses.early_gradients import EarlyGradients, empty_gradients, save_gradients, scale_saved_gradients
from tigon.losses.family import ALONE, FAMILIES, Family, Part, Whole
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.chunks import Chunk, Chunks, Gradients, read_logprobs
from tigon.losses.head.head import Head, Hidden, Projection, check_head, parse_head
from tigon.losses.head.vocabulary_parallel import Shards, resolve_shards
from tigon.losses.inputs import HeadInputs, WalkPlan, parse_inputs, plan_walk
from tigon.losses.operator import LossOperator, Packed, Unpacker, make_differentiable, pack, record
from tigon.losses.options import check_positive
from tigon.ops.linear.padded_product import empty_logits
from tigon.ops.logprob import logprob_gradient_rows

# ----------------------------------------------------------------------------------------------------------- public


def token_loss(
    family: Family, tensors: Any, x: Tensor, head: Head | Tensor | torch.nn.Linear, target: Tensor, *,
    reference: Hidden | None = None, ignore_index: int = -100, temperature: float = 1.0,
    chunks: ChunkOptions = ChunkOptions(), name: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """A family's loss, 0-d, and other results, without gradient. The public functions call this function.

    Args:
        family: the loss, with options.
        tensors: the family's tensors, as `family.Tensors`; (S,) or (S, T) each, or None. No gradient.
        x: (S, T, H). target: (S, T), aligned with x: the token that x[s, t] predicts.
        reference: the reference model's hidden states (S, T, H') and head, with the policy's softcap, scale and group.
        chunks: `valid_tokens` holds valid-target counts per sequence.
        name: the public function, for error messages.
    """
    name = name or family.key
    head = parse_head(name, head)
    check_positive(name, temperature=temperature)
    chunks.check_unused(name, "logits_dtype", "keep_bytes", "fp8")
    inputs = parse_inputs(name, x, head, target, ignore_index, chunks.accumulate, sequences=True)
    x, target = inputs.x, inputs.target
    theirs: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if reference is not None:
        theirs = _parse_reference(name, reference, head, inputs, chunks.accumulate)
    stacks = family.group_size()
    if stacks > 1 and x.shape[0] % stacks:
        raise ValueError(f"{name}: x must hold {stacks} equal stacks, got {x.shape[0]} sequences.")
    # Detached: a graph behind advantages or a reference would live as long as the loss.
    own = [t.detach() if t.requires_grad else t for t in tensors if t is not None]
    for field, t in zip(family.given, own, strict=True):
        if t.device != x.device and t.dim():  # a kernel would read a host address; a 0-d tensor may be on the host
            raise ValueError(f"{name}: {field} must be on x's device {x.device}, got {t.device}.")
    lengths = _count_lengths(name, chunks.valid_tokens, target, inputs.ignore_index)
    valid = sum(lengths) if lengths else -1
    plan = plan_walk(inputs, chunks, valid, row_bytes=inputs.compute.itemsize, one_chunk_saves_dw=True)
    call = _Call(_Options(plan, temperature, tuple(lengths), family.key, family.given), family)
    arguments = _Tensors(x, inputs.weight, inputs.bias, target.contiguous(), *theirs, own)
    loss, sums, per_sequence, per_token = _token_loss(arguments, call, inputs.shards)
    results: dict[str, Tensor] = {}
    per_token_names = family.per_token[: len(family.per_token) - family.internal]
    kinds = (family.metrics, sums), (family.per_sequence, per_sequence), (per_token_names, per_token)
    for names, values in kinds:
        if names:
            results |= zip(names, values.detach().unbind(0), strict=True)
    return loss, results


def _parse_reference(
    name: str, reference: Hidden, head: Head, inputs: HeadInputs, accumulate: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The reference's hidden states, weight and bias on this device; a ValueError if they do not fit the policy's."""
    theirs = parse_head(name, reference.head, "ref.head")
    for field in ("softcap", "scale"):
        value, own = getattr(theirs, field), getattr(head, field)
        if value not in (own, getattr(Head(theirs.weight), field)):
            raise ValueError(f"{name}: ref.head.{field} must be head.{field}, {own}, or left out, got {value}.")
    # Split over the same devices with the same sizes: both heads' statistics are merged with the same labels.
    x, weight, bias, _, shards = resolve_shards(
        f"{name}: of the reference", reference.x, theirs.weight, theirs.bias, None, theirs.group or head.group,
        accumulate,
    )  # fmt: skip
    if (None if shards is None else shards.sizes) != (None if inputs.shards is None else inputs.shards.sizes):
        raise ValueError(f"{name}: ref.head must be split over the devices as head is.")
    if x.shape[:2] != inputs.x.shape[:2] or weight.shape != (inputs.weight.shape[0], x.shape[-1]):
        raise ValueError(
            f"{name}: ref.x must be (S, T, H') and ref.head's weight (V, H') beside x {tuple(inputs.x.shape)} and "
            f"weight {tuple(inputs.weight.shape)}, got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    # Same dtype, since both share a logits buffer.
    if check_head(name, x, weight, bias, prefix="ref.", sequences=True) != inputs.compute:
        raise ValueError(f"{name}: ref.x must have x's dtype {inputs.x.dtype}, got {x.dtype}.")
    return x, weight, bias


def _count_lengths(name: str, lengths: Any, target: Tensor, ignore_index: int) -> list[int]:
    """Valid targets per sequence; empty if the host does not know."""
    if lengths is None:
        looks = target.device.type == "cpu" and is_concrete(target)
        return (target != ignore_index).sum(1).tolist() if looks else []
    if not isinstance(lengths, Iterable):
        raise ValueError(f"{name}: chunks.valid_tokens must be a list or a ValidLengths, got {type(lengths).__name__}.")
    known = [int(n) for n in lengths]
    if len(known) != target.shape[0] or any(not 0 <= n <= target.shape[1] for n in known):
        raise ValueError(
            f"{name}: chunks.valid_tokens must hold a number from 0 to {target.shape[1]} for each of {target.shape[0]} "
            f"sequences, got {known[:8]}{' …' if len(known) > 8 else ''}."
        )
    return known


# --------------------------------------------------------------------------------------------------------- launches


class _Tensors(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    ref_x: Tensor | None
    ref_weight: Tensor | None
    ref_bias: Tensor | None
    tensors: list[Tensor]  # the family's tensors that are not None


@record
class _Options(NamedTuple):
    """lengths: valid targets per sequence; empty if the host does not know. family: the family's key."""

    plan: WalkPlan
    temperature: float
    lengths: tuple[int, ...]
    family: str
    given: tuple[str, ...]

    @property
    def transform(self) -> tuple[float, float, float]:
        return self.temperature, self.plan.softcap, self.plan.scale


class _Call(NamedTuple):
    options: _Options
    family: Family

    def grad_scale(self, target: Tensor) -> float:
        return self.family.grad_scale(*target.shape) if self.options.plan.compute == torch.float16 else 1.0


def _pack_call(call: _Call) -> Packed:
    return pack(call.options, call.family.options)


def _read_call(unpacker: Unpacker) -> _Call:
    options: _Options = unpacker.read(_Options)
    family = FAMILIES[options.family]
    return _Call(options, family(unpacker.read(family.Options), options.given))


def _forward_fake(tensors: _Tensors, call: _Call, shards: Shards | None) -> tuple[Tensor, ...]:
    x, family, acc = tensors.x, call.family, call.options.plan.acc
    S, T, _ = x.shape
    per_token = len(family.per_token) - family.internal
    results = (
        x.new_empty((), dtype=acc), x.new_empty(len(family.metrics), dtype=acc),
        x.new_empty((len(family.per_sequence), S), dtype=acc), x.new_empty((per_token, S, T), dtype=acc),
    )  # fmt: skip
    return *results, *_empty_gradients(tensors, call.options, shards)


def _empty_gradients(tensors: _Tensors, options: _Options, shards: Shards | None) -> EarlyGradients:
    visited = sum(options.lengths) if options.lengths else tensors.target.numel()
    return empty_gradients(tensors.x, tensors.weight, options.plan, shards, visited)


def _forward(tensors: _Tensors, call: _Call, shards: Shards | None) -> tuple[Tensor, ...]:
    options, family = call
    places = _empty_gradients(tensors, options, shards)
    x, weight, target, plan, lengths = tensors.x, tensors.weight, tensors.target, options.plan, options.lengths
    batch = _Batch(tensors, options, family, shards)
    # Row capacity: a single part for all rows if possible, else whole tiles (128 rows), and at least one tile.
    fitting = plan.budget // max(1, (weight.shape[0] if shards is None else shards.widest) * plan.compute.itemsize)
    counted = sum(lengths) if lengths else target.numel()
    most = fitting if counted <= fitting else max(128, fitting // 128 * 128)
    alone = family.group_size() == ALONE and counted > most
    known = counted if lengths and alone else None
    whole = Chunks(batch.head, target.view(-1), plan.ignore_index, known, plan.budget, shards)
    # All parts before the first product: the buffer must fit the largest chunk.
    parts = list(split_batch(whole, target, family.group_size(), lengths, plan.ignore_index, most))
    gradients = Gradients.from_places(whole, plan.needs, places)
    if not alone and counted < target.numel():
        places.dx.zero_()  # no part writes the rows that are left out
    room, size = whole.room, max((part.chunks.size for part in parts), default=0)
    room = empty_logits(size, weight.shape[0], x, plan.compute) if room is None else room
    # Too small a length would silently drop valid rows. The loss becomes NaN instead, decided on the device: the host
    # does not wait.
    enough = [(target != plan.ignore_index).sum() <= known] if known is not None and known < target.numel() else []
    results = _Results(family, batch, lone=len(parts) == 1 and parts[0].sequences is None)
    grad_scale = call.grad_scale(target) if gradients else None
    for part in parts:
        stats, last, slopes = results.add(part, room, enough, grad_scale)
        # A part without slopes, such as a part clipped throughout, has a zero gradient and needs no product.
        if all(s is None for s in slopes):
            if plan.need_dx:
                places.dx[part.chunks.row_indices(0, part.chunks.visited)] = 0.0
            continue
        flat = [None if s is None else part.gather(s) for s in slopes]
        # Backwards, because the last chunk's logits are still in the buffer. A single-chunk part, the usual case, is
        # never computed twice. The walk takes over `last`, so that the rows' memory can be freed.
        walk, last = part.chunks.iterate_backward(room, last), None
        for chunk in walk:
            dlogprob, dentropy = (None if s is None else s[chunk.rows] for s in flat)
            logprob_gradient_rows(
                chunk.logits, chunk.target, stats[chunk.rows], dlogprob, dentropy, chunk.logits, plan.ignore_index,
                *options.transform, merged=shards is not None,
            )  # fmt: skip
            gradients.add(chunk)
    gradients.finish()
    loss, *others = results.finish()
    if enough:
        loss = torch.where(enough[0] if len(enough) == 1 else torch.stack(enough).all(), loss, float("nan"))
    return loss, *others, *places


class _Results:
    """Loss and further results, accumulated over parts.

    lone: there is a single part, which is the whole batch in order.
    """

    def __init__(self, family: Family, batch: _Batch, lone: bool) -> None:
        self.family, self.batch, self.lone = family, batch, lone
        x, target, acc = batch.head.x, batch.target, batch.acc
        self.by_kernels = lone and target.numel() > 0 and family.has_kernels() and use_triton(x)
        self.results: tuple[Tensor, ...] = ()
        if self.by_kernels:
            return
        self.mask = target != batch.ignore_index
        self.tensors = family.prepare(batch.tensors, self.mask, acc)
        sizes = (len(family.sums),), (len(family.per_sequence), len(target)), (len(family.per_token), *target.shape)
        # Parts add to sums, and ignored tokens stay zero. A lone part writes everything.
        room = x.new_empty if lone else x.new_zeros
        self.loss, self.results = room((), dtype=acc), tuple(room(size, dtype=acc) for size in sizes)

    def add(
        self, part: PartRows, room: Tensor, enough: list[Tensor], grad_scale: float | None
    ) -> tuple[Tensor, Chunk | None, list[Tensor | None]]:
        """Add a part. Returns: row statistics, the last chunk, the slopes with respect to logprob and entropy.

        enough: collects whether all valid tokens in the part were visited, if that is not certain.
        grad_scale: None if no gradient is wanted.
        """
        family, batch = self.family, self.batch
        values, stats, last = batch.forward(family, part, room)
        slopes: list[Tensor | None] = [None, None]
        if self.by_kernels:
            if grad_scale is not None:
                # The entropy's slope last: a family without it takes one tensor.
                own = values.logprob.new_empty((1 + family.has_entropy_slope(), *batch.target.shape)).unbind()
                slopes[: len(own)] = own
            x, acc = batch.head.x, batch.acc
            self.loss, metrics = x.new_empty((), dtype=acc), x.new_empty(len(family.metrics), dtype=acc)
            whole = Whole(*values, batch.target, batch.ignore_index, batch.tensors, part.chunks.visited)
            family.launch(whole, self.loss, metrics, slopes, 1.0 if grad_scale is None else grad_scale)
            shown = len(family.per_token) - family.internal
            per_token = values.logprob.unsqueeze(0) if shown else x.new_empty((0, *batch.target.shape), dtype=acc)
            self.results = metrics, x.new_empty((0, len(batch.target)), dtype=acc), per_token
            return stats, last, slopes
        view = batch.make_part(part, values, self.mask, self.tensors)
        if part.indices is not None:
            # Per part, since sorting the rows cuts off those beyond the part's lengths.
            enough.append(view.mask.sum() <= part.chunks.visited)
        if grad_scale is not None:
            # Scaled from the start, in fp32: fp16 gradients for a mean over many tokens would underflow.
            share, outputs, slopes = _evaluate_with_slopes(family, view, grad_scale)
        else:
            share, outputs = family(view)
        if self.lone:
            self.loss, self.results = share.detach(), tuple(_stack_results(family, outputs, self.results))
        else:
            self.loss += share.detach()
            _scatter_results(family, outputs, part, self.results)
        return stats, last, slopes

    def finish(self) -> tuple[Tensor, ...]:
        """Loss, metrics, and the sequence and token results that the caller gets."""
        if self.by_kernels:
            return self.loss, *self.results
        family, (sums, per_sequence, per_token) = self.family, self.results
        if family.finishes:
            results = dict(zip((*family.sums, *family.per_token), (*sums, *per_token), strict=True))
            sums = torch.stack(list(family.finish(results, self.tensors, self.mask)))
            per_token = per_token[: len(family.per_token) - family.internal].clone()  # frees the internal results
        return self.loss, sums, per_sequence, per_token


def _evaluate_with_slopes(
    family: Family, part: Part, grad_scale: float
) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None]]:
    """The family's loss, and autograd's derivatives with respect to logprob and entropy, times grad_scale."""
    # torch.library operators run below autograd, so autograd is switched on again for the family.
    above = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with above, torch.enable_grad(), _without_hooks():
        logprob = part.logprob.detach().requires_grad_()
        entropy = None if part.entropy is None else part.entropy.detach().requires_grad_()
        share, outputs = family(part._replace(logprob=logprob, entropy=entropy))
        slopes: list[Tensor | None] = [None, None]
        if share.requires_grad:
            leaves = [logprob] if entropy is None else [logprob, entropy]
            # allow_unused: some losses do not depend on the entropy that they log.
            found_slopes = torch.autograd.grad(share, leaves, share.new_full((), grad_scale), allow_unused=True)
            slopes[: len(leaves)] = found_slopes
    return share, outputs, slopes


def _without_hooks() -> AbstractContextManager[Any]:
    """Hide the family's small graph from the saved-tensor hooks of checkpoints and offloading.

    The graph is gone before the forward pass ends. A checkpoint's hooks would recompute the whole forward pass for it.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or top(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(t: Tensor) -> Tensor:
    return t


def _stack_results(family: Family, outputs: dict[str, Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """Results for a part that is the whole batch: like `results`, which are then not written."""
    stacked = []
    for names, like in zip((family.sums, family.per_sequence, family.per_token), results, strict=True):
        with torch.no_grad():  # instead of a detach for each
            values = [outputs[name].to(like.dtype).view(like.shape[1:]) for name in names]
            stacked.append(torch.stack(values) if values else like)
    return stacked


def _scatter_results(family: Family, outputs: dict[str, Tensor], part: PartRows, results: Sequence[Tensor]) -> None:
    sums, per_sequence, per_token = results
    if sums.numel():  # one launch for all: with few tokens, launches take longer than the sums
        sums.add_(torch.stack([outputs[name].detach().to(sums.dtype) for name in family.sums]))
    assert part.sequences is not None
    # index_copy_ rather than a mask index: the host would have to wait for the mask's count.
    for i, name in enumerate(family.per_sequence):
        place = per_sequence[i]
        place.index_copy_(0, part.sequences, outputs[name].detach().reshape(-1).to(place.dtype))
    for i, name in enumerate(family.per_token):
        place = per_token[i]
        values = outputs[name].detach().to(place.dtype)
        if part.alone:
            place.view(-1).index_copy_(0, part.sequences, values.reshape(-1))
        else:
            place.index_copy_(0, part.sequences, values)


class _Values(NamedTuple):
    """Results from a part's logits, (S', T) each: as in `Part`."""

    logprob: Tensor
    entropy: Tensor | None
    mean_logit: Tensor | None
    reference: Tensor | None
    is_top1: Tensor | None


class _Batch:
    """The batch as the walk reads it: heads in the compute dtype, labels and the family's tensors."""

    def __init__(self, tensors: _Tensors, options: _Options, family: Family, shards: Shards | None) -> None:
        x, weight, bias, target, ref_x, ref_weight, ref_bias, own = tensors
        compute = options.plan.compute
        self.head = Projection.cast(x.reshape(target.numel(), x.shape[-1]), weight, bias, compute)
        self.reference = None
        if ref_x is not None and ref_weight is not None:
            rows = ref_x.reshape(target.numel(), ref_x.shape[-1])
            self.reference = Projection.cast(rows, ref_weight, ref_bias, compute)
        self.tensors = family.Tensors(**dict(zip(family.given, own, strict=True)))
        self.target, self.shards, self.acc = target, shards, options.plan.acc
        self.ignore_index, self.transform = options.plan.ignore_index, options.transform

    def slice_rows(self, part: PartRows, t: Tensor) -> Tensor:
        """Select the part's rows: (S,) or (S, T) becomes (S', 1) or (S', T); with `alone` (S', 1)."""
        t = t.unsqueeze(1) if t.dim() == 1 else t
        if part.sequences is None:
            return t
        if part.alone:
            # (S, 1) expands to tokens without memory; the tokens are then gathered unless all are present.
            tokens, rows = t.expand(self.target.shape).reshape(-1, 1), part.chunks
            every = rows.index is None and rows.visited == tokens.shape[0]
            return tokens if every else tokens.index_select(0, part.sequences)
        return t.index_select(0, part.sequences)

    def forward(self, family: Family, part: PartRows, room: Tensor) -> tuple[_Values, Tensor, Chunk | None]:
        """Results from the part's logits, row statistics, and the last chunk, whose logits stay in the room."""
        count = part.chunks.visited
        wanted = True, family.wants_entropy, family.wants_mean_logit, self.reference is not None
        # One tensor for all, so that one launch fills in masked tokens; rows are 16-byte aligned.
        numbers = self.head.x.new_empty((sum(wanted), -(-count // 4) * 4), dtype=self.acc)
        numbers = numbers if count % 4 == 0 else numbers[:, :count]
        rows = iter(numbers.unbind())
        logprob, entropy, mean, reference = (next(rows) if one else None for one in wanted)
        top1 = numbers.new_empty(count, dtype=torch.bool) if family.wants_is_top1 else None
        # The gradient needs each row's maximum, log-sum and entropy; with shards, in the exchange dtype.
        stats = self.head.x.new_empty((count, 3), dtype=torch.float32 if self.shards is None else self.acc)
        if self.reference is not None and reference is not None:
            # The reference first: the policy's logits then stay in the buffer for the gradient.
            theirs = part.chunks.with_head(self.reference)
            read_logprobs(theirs, room, (reference, None, None, None, None), None, self.ignore_index, self.transform)
        results = logprob, entropy, None, top1, mean
        last = read_logprobs(part.chunks, room, results, stats, self.ignore_index, self.transform)
        rows = iter(part.scatter(numbers).unbind())
        logprob, entropy, mean, reference = (next(rows) if one else None for one in wanted)
        assert logprob is not None
        top1 = None if top1 is None else part.scatter(top1)
        return _Values(logprob, entropy, mean, reference, top1), stats, last

    def make_part(self, part: PartRows, values: _Values, mask: Tensor, tensors: Any) -> Part:
        """The part as the family sees it. mask, tensors: for the whole batch; tensors as `prepare` returned them."""
        own = tensors._make(None if t is None else self.slice_rows(part, t) for t in tensors)
        logprob, entropy, mean, reference, top1 = values
        return Part(part.sequences, logprob, entropy, mean, reference, self.slice_rows(part, mask), own, top1)


_fwd = LossOperator("token_loss_fwd", _Tensors, (_pack_call, _read_call), _forward_fake, _forward, 8)


# --------------------------------------------------------------------------------------------------------- autograd


def _save(ctx: Any, tensors: _Tensors, call: _Call, output: tuple[Tensor, ...]) -> None:
    save_gradients(ctx, tensors, call.options.plan, output[4:], grad_scale=call.grad_scale(tensors.target))


_token_loss = make_differentiable(_fwd, _save, scale_saved_gradients, outputs=4, unsaved=(0, 1, 2))
