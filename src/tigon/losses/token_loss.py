"""Losses that are plain PyTorch functions of tokens' log-probabilities, whose logits are never all in memory.

    for each part, sequences that the loss has to see together:
        logits ← x Wᵀ (+ bias)                       matrix product into the buffer
        logprob, entropy ← logits                    one reading
        loss, slopes ← f(logprob, entropy)           plain PyTorch and its autograd, on a few numbers a token
        logits ← Σ slopes · d(logprob, entropy)/d(logits)
        dx ← logits W;  dw += logitsᵀ x              two matrix products

Where a part's logits fit the budget, a token costs three products, as many as with all logits in memory. A longer part
is walked twice and costs a fourth product. A reference model's head costs one more product, through the same buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import differentiable, differentiable_directly, is_concrete, launcher, use_triton
from tigon.losses.family import ALONE, Family, Part, Whole, family_of
from tigon.losses.head.chunks import Chunk, Chunks, Gradients, chunk_budget, spared_by_one_chunk
from tigon.losses.head.head import Head, Hidden, Projection, check_head, empty_logits, head_of
from tigon.losses.head.upstream import scaled_gradients
from tigon.losses.head.vocabulary_parallel import Shards, shards_of
from tigon.losses.head.walk import Walk
from tigon.losses.parts import Rows, split
from tigon.ops.linear import weight_gradient
from tigon.ops.logprob import check_transform, logprob_gradient_rows, logprob_rows
from tigon.ops.shard_statistics import IGNORED, columns, merge_logprob, shard_statistics
from tigon.ops.targets import checked_target

# ----------------------------------------------------------------------------------------------------------- public


def token_loss(
    family: Family, sides: Any, x: Tensor, head: Head | Tensor | torch.nn.Linear, target: Tensor, *,
    reference: Hidden | None = None, ignore_index: int = -100, temperature: float = 1.0, walk: Walk = Walk(),
    name: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss of a family, 0-d, and its other results, which have no gradient. The public functions call this one.

    Args:
        family: what is computed, with its options.
        sides: the family's tensors, its `takes.sides`; (S,) or (S, T) each, or None. No gradient.
        x: (S, T, H). target: (S, T), aligned with x: what x[s, t] predicts.
        reference: the reference model's hidden states (S, T, H') and head, whose softcap, scale and group are the
            policy's.
        walk: its `valid` are the numbers of targets of the sequences that count.
        name: the public function, for sentences.
    """
    name = name or family.key
    weight, bias, softcap, scale, group, _ = head_of(name, head)
    check_transform(name, temperature, softcap, scale)
    walk.check_unused(name, "logits_dtype", "keep_bytes")
    accumulate = walk.accumulate
    x, weight, bias, target, shards = shards_of(name, x, weight, bias, target, group, accumulate)
    compute = check_head(name, x, weight, bias, sequences=True)
    # Those of the reference are tensors of their own, which the op takes one by one.
    ref_x = ref_weight = ref_bias = None
    if reference is not None:
        of = f"{name}: of the reference"
        theirs = head_of(name, reference.head, "ref.head")
        for field, value, own in (("softcap", theirs.softcap, softcap), ("scale", theirs.scale, scale)):
            if value not in (own, getattr(Head(theirs.weight), field)):
                raise ValueError(f"{name}: ref.head.{field} must be head.{field}, {own}, or left out, got {value}.")
        # Split over the same devices with the same sizes: both heads' statistics are merged by one set of labels.
        ref = reference.x, theirs.weight, theirs.bias
        ref_x, ref_weight, ref_bias, _, others = shards_of(of, *ref, None, theirs.group or group, accumulate)
        if (None if others is None else others.sizes) != (None if shards is None else shards.sizes):
            raise ValueError(f"{name}: ref.head must be split over the devices as head is.")
    if ref_x is not None and ref_weight is not None:
        if ref_x.shape[:2] != x.shape[:2] or ref_weight.shape != (weight.shape[0], ref_x.shape[-1]):
            raise ValueError(
                f"{name}: ref.x must be (S, T, H') and ref.head's weight (V, H') beside x {tuple(x.shape)} and weight "
                f"{tuple(weight.shape)}, got {tuple(ref_x.shape)} and {tuple(ref_weight.shape)}."
            )
        # One dtype, since one buffer takes the logits of both.
        if check_head(name, ref_x, ref_weight, ref_bias, prefix="ref.", sequences=True) != compute:
            raise ValueError(f"{name}: ref.x must have x's dtype {x.dtype}, got {ref_x.dtype}.")
    classes, widest = (weight.shape[0],) * 2 if shards is None else (shards.classes, shards.widest)
    target = checked_target(name, target, x.shape[:-1], classes, ignore_index, x.device)
    together = family.together()
    if together > 1 and x.shape[0] % together:
        raise ValueError(f"{name}: x must hold {together} stacks of equal size, got {x.shape[0]} sequences.")
    if shards is not None:
        # This device's labels tell "counts, but elsewhere" from "does not count", which a global index cannot.
        target, ignore_index = shards.labels(target, ignore_index), IGNORED
    known = _lengths(name, walk.valid, target, ignore_index)
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (x, weight, bias)]
    whole = (sum(known) if known else target.numel()) * widest * compute.itemsize
    spared = spared_by_one_chunk(weight, compute, accumulate, widest) if needs[1] else 0
    budget = chunk_budget(x.device, walk.chunk_bytes, whole=whole, spared=spared, frozen=not needs[1])
    words, numbers = family.encoded()
    # Detached: a graph that hangs on advantages or a reference would live as long as the loss.
    tensors = [t.detach() if t.requires_grad else t for t in sides if t is not None]
    for field, t in zip(family.given, tensors, strict=True):
        if t.device != x.device and t.dim():  # a kernel would read a host address; a number may be the host's
            raise ValueError(f"{name}: {field} must be on the device of x, {x.device}, got {t.device}.")
    arguments = (
        x, weight, bias, target.contiguous(), ref_x, ref_weight, ref_bias, tensors, ["", *family.given], family.key,
        ["", *words], [0.0, *numbers], [-1, *known], compute, budget, accumulate == "fp32", *needs, ignore_index,
        temperature, softcap or 0.0, scale,
    )  # fmt: skip
    loss, sums, per_sequence, per_token = (
        _token_loss(*arguments) if shards is None else _over_shards(*arguments, {"shards": shards})
    )
    results: dict[str, Tensor] = {}
    per_token_names = family.per_token[: len(family.per_token) - family.hidden]
    kinds = (family.metrics, sums), (family.per_sequence, per_sequence), (per_token_names, per_token)
    for names, values in kinds:
        if names:
            results |= zip(names, values.detach().unbind(0), strict=True)
    return loss, results


def _lengths(name: str, lengths: Any, target: Tensor, ignore_index: int) -> list[int]:
    """How many targets of each sequence count; empty if the host does not know."""
    if lengths is None:
        # On a CPU the host is the device, and looking costs nothing; a traced tensor has no numbers to look at.
        looks = target.device.type == "cpu" and is_concrete(target)
        return (target != ignore_index).sum(1).tolist() if looks else []
    if not isinstance(lengths, Iterable):
        raise ValueError(f"{name}: walk.valid must be a list or a ValidLengths, got {type(lengths).__name__}.")
    known = [int(n) for n in lengths]
    if len(known) != target.shape[0] or any(not 0 <= n <= target.shape[1] for n in known):
        raise ValueError(
            f"{name}: walk.valid must hold a number from 0 to {target.shape[1]} for each of {target.shape[0]} "
            f"sequences, got {known[:8]}{' …' if len(known) > 8 else ''}."
        )
    return known


# --------------------------------------------------------------------------------------------------------- launches


def _token_loss_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ref_x: Tensor | None, ref_weight: Tensor | None,
    ref_bias: Tensor | None, sides: Sequence[Tensor], given: Sequence[str], family: str, words: Sequence[str],
    numbers: Sequence[float], lengths: Sequence[int], compute: torch.dtype, budget: int, fp32: bool, need_dx: bool,
    need_dw: bool, need_db: bool, *options: Any, shards: Shards | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    instance = family_of(family, words, numbers, given)
    acc = torch.promote_types(compute, torch.float32)
    results = x.new_empty((), dtype=acc), x.new_empty(len(instance.metrics), dtype=acc), *_rows(instance, x, acc)
    gradients = _gradients_fake(x, weight, lengths, compute, budget, fp32, need_dx, need_dw, need_db, shards)
    return *results, *gradients


def _rows(instance: Family, x: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the results of sequences and of tokens that the caller gets."""
    S, T, _ = x.shape
    per_token = len(instance.per_token) - instance.hidden
    return x.new_empty((len(instance.per_sequence), S), dtype=acc), x.new_empty((per_token, S, T), dtype=acc)


def _gradients_fake(
    x: Tensor, weight: Tensor, lengths: Sequence[int], compute: torch.dtype, budget: int, fp32: bool, need_dx: bool,
    need_dw: bool, need_db: bool, shards: Shards | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (S, T, H), V = x.shape, weight.shape[0]
    acc = torch.promote_types(compute, torch.float32)
    dx = x.new_empty((S * T, H) if need_dx else (0,), dtype=compute)
    # In one chunk there is nothing to sum: the product itself rounds once, into the weight's dtype.
    rows = sum(lengths[1:]) if len(lengths) > 1 else S * T
    several = rows * (V if shards is None else shards.widest) * compute.itemsize > budget
    wide = weight.dtype != compute or compute == torch.float16 or (fp32 and several)
    only = 0 if several or shards is not None else rows
    dw, more = weight_gradient.places(weight, compute, wide, budget, need_dw, only)
    return dx, dw, more, x.new_empty(V if need_db else 0, dtype=acc)


# Lists of words, numbers and lengths have a dummy in front: torch.library takes an empty list for one of tensors.
@launcher(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? ref_x, Tensor? ref_weight, Tensor? ref_bias,"
    " Tensor[] sides, str[] given, str family, str[] words, float[] numbers, int[] lengths, ScalarType compute,"
    " int budget, bool fp32, bool need_dx, bool need_dw, bool need_db, int ignore_index, float temperature,"
    " float softcap, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _token_loss_fake,
)
def _token_loss_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ref_x: Tensor | None, ref_weight: Tensor | None,
    ref_bias: Tensor | None, sides: Sequence[Tensor], given: Sequence[str], family: str, words: Sequence[str],
    numbers: Sequence[float], lengths: Sequence[int], compute: torch.dtype, budget: int, fp32: bool, need_dx: bool,
    need_dw: bool, need_db: bool, *options: Any, shards: Shards | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, dw, more, db = _gradients_fake(
        x, weight, lengths, compute, budget, fp32, need_dx, need_dw, need_db, shards
    )  # fmt: skip
    lengths = lengths[1:]
    instance = family_of(family, words, numbers, given)
    boost = instance.boost(*target.shape) if compute == torch.float16 else 1.0
    named = instance.takes.sides(**dict(zip(instance.given, sides, strict=True)))
    batch = _Batch(x, weight, bias, target, ref_x, ref_weight, ref_bias, named, compute, options, shards)
    # Rows that fit: one part for all of them if possible, else whole tiles of 128, and at least one tile.
    held = budget // max(1, (weight.shape[0] if shards is None else shards.widest) * compute.itemsize)
    counted = sum(lengths) if lengths else target.numel()
    most = held if counted <= held else max(128, held // 128 * 128)
    alone = instance.together() == ALONE and counted > most
    # Sequences are cut out of the whole batch, and each part leaves out its own rows that do not count.
    known = counted if lengths and alone else None
    whole = Chunks(batch.head, target.view(-1), options[0], known, budget, shards)
    # All parts before the first product: the buffer is as large as the largest of their chunks.
    parts = list(split(whole, target, instance.together(), lengths, options[0], most))
    weight_sums = weight_gradient.parts(dw, more) if need_dw else None
    gradients = Gradients(whole, dx if need_dx else None, weight_sums, db if need_db else None)
    if not alone and counted < target.numel():
        dx.zero_()  # no part writes the rows that are left out
    # One buffer for all parts, and for the reference's logits as well.
    room, size = weight_gradient.room(weight_sums), max((part.chunks.size for part in parts), default=0)
    room = empty_logits(size, weight.shape[0], x, compute) if room is None else room
    # Too small a length would silently leave out rows that count. The loss becomes NaN instead, decided on the device:
    # the host does not wait.
    enough = [(target != options[0]).sum() <= known] if known is not None and known < target.numel() else []
    found = _Results(instance, batch, lone=len(parts) == 1 and parts[0].sequences is None)
    for part in parts:
        stats, last, slopes = found.add(part, room, enough, boost if gradients else None)
        # A part without slopes, such as one that is clipped throughout, has a zero gradient and needs no product.
        if all(s is None for s in slopes):
            if need_dx:
                dx[part.chunks.places(0, part.chunks.visited)] = 0.0
            continue
        # (rows,) each, in the order of the walk.
        flat = [None if s is None else part.sparse(s) for s in slopes]
        # Backwards, because the last chunk's logits are still in the buffer. A part of one chunk, the usual case, is
        # therefore never computed twice. The walk takes `last` over: its rows of x are memory that is needed again.
        walk, last = part.chunks.backwards(room, last), None
        for chunk in walk:
            dlogprob, dentropy = (None if s is None else s[chunk.rows] for s in flat)
            # In place: the gradient overwrites the logits, which nothing reads again.
            logprob_gradient_rows(
                chunk.logits, chunk.target, stats[chunk.rows], dlogprob, dentropy, chunk.logits, *options,
                merged=shards is not None,
            )  # fmt: skip
            gradients.add(chunk)
    gradients.finish()
    loss, *results = found.finish()
    if enough:
        loss = torch.where(enough[0] if len(enough) == 1 else torch.stack(enough).all(), loss, float("nan"))
    return loss, *results, dx, dw, more, db


class _Results:
    """The loss and the further results: of the parts so far, and at the end of all.

    lone: there is one part, which is the whole batch in its order.
    """

    def __init__(self, family: Family, batch: _Batch, lone: bool) -> None:
        self.family, self.batch, self.lone = family, batch, lone
        x, target, acc = batch.head.x, batch.target, batch.acc
        # A small batch's time is the host's, which launches a family's kernels in less time than many small operators.
        self.by_kernels = lone and target.numel() > 0 and family.has_kernels() and use_triton(x)
        self.results: tuple[Tensor, ...] = ()
        if self.by_kernels:
            return
        self.mask = target != batch.options[0]
        self.sides = family.prepare(batch.sides, self.mask, acc)
        sizes = (len(family.sums),), (len(family.per_sequence), len(target)), (len(family.per_token), *target.shape)
        # Parts add to sums, and no part writes the places of tokens that do not count. A lone part writes all itself.
        room = x.new_empty if lone else x.new_zeros
        self.loss, self.results = room((), dtype=acc), tuple(room(size, dtype=acc) for size in sizes)

    def add(
        self, part: Rows, room: Tensor, enough: list[Tensor], boost: float | None
    ) -> tuple[Tensor, Chunk | None, list[Tensor | None]]:
        """Take in a part. Returns: its rows' statistics, its last chunk, the slopes of logprob and of entropy.

        enough: takes whether all of the part's tokens that count were visited, if that is not certain.
        boost: None if no gradient is wanted.
        """
        family, batch = self.family, self.batch
        values, stats, last = batch.forward(family, part, room)
        slopes: list[Tensor | None] = [None, None]
        if self.by_kernels:
            if boost is not None:
                # The entropy's slope last: a family without it takes one tensor.
                own = values.logprob.new_empty((1 + family.has_entropy_slope(), *batch.target.shape)).unbind()
                slopes[: len(own)] = own
            x, acc = batch.head.x, batch.acc
            self.loss, metrics = x.new_empty((), dtype=acc), x.new_empty(len(family.metrics), dtype=acc)
            whole = Whole(*values, batch.target, batch.options[0], batch.sides, part.chunks.visited)
            family.launch(whole, self.loss, metrics, slopes, 1.0 if boost is None else boost)
            shown = len(family.per_token) - family.hidden
            per_token = values.logprob.unsqueeze(0) if shown else x.new_empty((0, *batch.target.shape), dtype=acc)
            self.results = metrics, x.new_empty((0, len(batch.target)), dtype=acc), per_token
            return stats, last, slopes
        seen = batch.seen(family, part, values, self.mask, self.sides)
        if part.at is not None:
            # Of this part, as the sort of its own rows cuts off what its lengths do not count.
            enough.append(seen.mask.sum() <= part.chunks.visited)
        if boost is not None:
            # Boosted from the start, in fp32: fp16 gradients of a mean over many tokens would underflow.
            share, found, slopes = _with_slopes(family, seen, boost)
        else:
            share, found = family(seen)
        if self.lone:
            self.loss, self.results = share.detach(), tuple(_kept(family, found, self.results))
        else:
            self.loss += share.detach()
            _keep(family, found, part, self.results)
        return stats, last, slopes

    def finish(self) -> tuple[Tensor, ...]:
        """The loss, the metrics, and the results of sequences and of tokens that the caller gets."""
        if self.by_kernels:
            return self.loss, *self.results
        family, (sums, per_sequence, per_token) = self.family, self.results
        if family.finishes:
            found = dict(zip((*family.sums, *family.per_token), (*sums, *per_token), strict=True))
            sums = torch.stack(list(family.finish(found, self.sides, self.mask)))
            per_token = per_token[: len(family.per_token) - family.hidden].clone()  # the others are not kept alive
        return self.loss, sums, per_sequence, per_token


def _with_slopes(family: Family, part: Part, boost: float) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None]]:
    """The family's loss, and its derivatives with respect to logprob and entropy by PyTorch's autograd, times boost."""
    # An operator of torch.library runs below autograd, which is therefore switched on again for the family.
    above = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with above, torch.enable_grad(), _without_hooks():
        logprob = part.logprob.detach().requires_grad_()
        entropy = None if part.entropy is None else part.entropy.detach().requires_grad_()
        share, found = family(part._replace(logprob=logprob, entropy=entropy))
        slopes: list[Tensor | None] = [None, None]
        if share.requires_grad:
            # Numbers of tokens, (S', T): this graph is small beside their logits.
            leaves = [logprob] if entropy is None else [logprob, entropy]
            # allow_unused: some families' losses do not depend on the entropy that they log.
            found_slopes = torch.autograd.grad(share, leaves, share.new_full((), boost), allow_unused=True)
            slopes[: len(leaves)] = found_slopes
    return share, found, slopes


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


def _kept(family: Family, found: dict[str, Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """The results of a part that is the whole batch: like `results`, which are then not written."""
    kept = []
    for names, like in zip((family.sums, family.per_sequence, family.per_token), results, strict=True):
        with torch.no_grad():  # instead of a detach for each
            values = [found[name].to(like.dtype).view(like.shape[1:]) for name in names]
            kept.append(torch.stack(values) if values else like)
    return kept


def _keep(family: Family, found: dict[str, Tensor], part: Rows, results: Sequence[Tensor]) -> None:
    sums, per_sequence, per_token = results
    if sums.numel():  # one launch for all: of a few tokens, launches take longer than the sums
        sums.add_(torch.stack([found[name].detach().to(sums.dtype) for name in family.sums]))
    assert part.sequences is not None
    # index_copy_ rather than indexing by a mask, whose size the host would have to wait for.
    for i, name in enumerate(family.per_sequence):
        place = per_sequence[i]
        place.index_copy_(0, part.sequences, found[name].detach().reshape(-1).to(place.dtype))
    for i, name in enumerate(family.per_token):
        place = per_token[i]
        values = found[name].detach().to(place.dtype)
        if part.alone:
            place.view(-1).index_copy_(0, part.sequences, values.reshape(-1))
        else:
            place.index_copy_(0, part.sequences, values)


class _Values(NamedTuple):
    """What the walk reads off a part's logits, (S', T) each: as in `Part`."""

    logprob: Tensor
    entropy: Tensor | None
    mean_logit: Tensor | None
    reference: Tensor | None
    is_top1: Tensor | None


class _Batch:
    """The batch as the walk reads it: the heads in the compute dtype, the labels and the side tensors."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ref_x: Tensor | None,
        ref_weight: Tensor | None, ref_bias: Tensor | None, sides: Any, compute: torch.dtype,
        options: tuple[Any, ...], shards: Shards | None,
    ) -> None:  # fmt: skip
        self.head = Projection.of(x.reshape(target.numel(), x.shape[-1]), weight, bias, compute)
        self.reference = None
        if ref_x is not None and ref_weight is not None:
            rows = ref_x.reshape(target.numel(), ref_x.shape[-1])
            self.reference = Projection.of(rows, ref_weight, ref_bias, compute)
        self.target, self.options, self.sides, self.shards = target, options, sides, shards
        self.acc = torch.promote_types(compute, torch.float32)

    def of(self, part: Rows, t: Tensor) -> Tensor:
        """The part's rows of a tensor of the batch: (S,) or (S, T) becomes (S', 1) or (S', T); with `alone` (S', 1)."""
        t = t.unsqueeze(1) if t.dim() == 1 else t
        if part.sequences is None:
            return t
        if part.alone:
            # (S, 1) expands to tokens without memory; then the tokens are looked up, unless all are there.
            tokens, rows = t.expand(self.target.shape).reshape(-1, 1), part.chunks
            every = rows.index is None and rows.visited == tokens.shape[0]
            return tokens if every else tokens.index_select(0, part.sequences)
        return t.index_select(0, part.sequences)

    def read(
        self, chunks: Chunks, room: Tensor, results: tuple[Tensor | None, ...], stats: Tensor | None
    ) -> Chunk | None:
        """Write the results of a part's rows, as `logprob_rows` does, and return the last chunk."""
        along, total = results[1] is not None, results[4] is not None
        own = None
        if self.shards is not None:
            own = room.new_empty(chunks.visited, columns(along, total), dtype=self.acc)
        chunk = None
        for chunk in chunks.forwards(room):
            if own is not None:
                shard_statistics(
                    chunk.logits, chunk.target, own[chunk.rows], *self.options[1:], along=along, total=total
                )
                continue
            places = tuple(None if t is None else t[chunk.rows] for t in results)
            logprob_rows(
                chunk.logits, chunk.target, places, None if stats is None else stats[chunk.rows], *self.options
            )
        if self.shards is not None and own is not None and chunks.visited:
            # The reference needs no statistics afterwards, but merging writes them.
            stats = own.new_empty(chunks.visited, 3) if stats is None else stats
            (labels,) = chunks.rows_of(0, chunks.visited, chunks.target)
            # One collective for the whole part: all its chunks' statistics travel together.
            parts = self.shards.gather(own).wait()
            merge_logprob(parts, labels, results, stats, self.shards.classes, *self.options[1:])
        return chunk

    def forward(self, family: Family, part: Rows, room: Tensor) -> tuple[_Values, Tensor, Chunk | None]:
        """What the part's logits say, its rows' statistics, and its last chunk, whose logits are in the room."""
        count = part.chunks.visited
        wanted = True, family.wants_entropy, family.wants_mean_logit, self.reference is not None
        # One tensor for all, so that one launch puts in what does not count; each begins at a multiple of 16 bytes.
        numbers = self.head.x.new_empty((sum(wanted), -(-count // 4) * 4), dtype=self.acc)
        numbers = numbers if count % 4 == 0 else numbers[:, :count]
        rows = iter(numbers.unbind())
        logprob, entropy, mean, reference = (next(rows) if one else None for one in wanted)
        top1 = numbers.new_empty(count, dtype=torch.bool) if family.wants_is_top1 else None
        # The gradient needs a row's maximum, the log of its sum, its entropy; over shards as wide as devices exchange.
        stats = self.head.x.new_empty((count, 3), dtype=torch.float32 if self.shards is None else self.acc)
        if self.reference is not None and reference is not None:
            # The reference first: the policy's logits then stay in the buffer for the gradient.
            self.read(part.chunks.through(self.reference), room, (reference, None, None, None, None), None)
        last = self.read(part.chunks, room, (logprob, entropy, None, top1, mean), stats)
        rows = iter(part.dense(numbers).unbind())
        logprob, entropy, mean, reference = (next(rows) if one else None for one in wanted)
        assert logprob is not None
        top1 = None if top1 is None else part.dense(top1)
        return _Values(logprob, entropy, mean, reference, top1), stats, last

    def seen(self, family: Family, part: Rows, values: _Values, mask: Tensor, sides: Any) -> Part:
        """The part as the family sees it. mask, sides: of the batch, the sides as the family has prepared them."""
        own = sides._make(None if t is None else self.of(part, t) for t in sides)
        logprob, entropy, mean, reference, top1 = values
        return Part(part.sequences, logprob, entropy, mean, reference, self.of(part, mask), own, top1)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, _, _, _, _, given, family, words, numbers, _, compute, _, _, *ctx.needs = inputs[:19]
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.shape, ctx.arguments, ctx.sides = x.shape, len(inputs), len(inputs[7])
    ctx.boost = family_of(family, words, numbers, given).boost(*target.shape) if compute == torch.float16 else 1.0
    ctx.save_for_backward(*output[4:])


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    # A torch.library op wants a gradient of each tensor in a list, an autograd.Function one of the list.
    sides = None if getattr(ctx, "hides", False) else [None] * ctx.sides
    rest = (None, None, None, None, sides, *(None for _ in range(ctx.arguments - 8)))
    if dloss is None:
        return None, None, None, *rest
    # The boost kept fp16 gradients from underflowing; it leaves together with the upstream gradient, in fp32.
    factor = dloss if ctx.boost == 1.0 else dloss / ctx.boost
    dx, dw, more, db, *_ = ctx.saved_tensors
    dx, dw, db = scaled_gradients((dx, (dw, more), db), factor, ctx.dtypes, ctx.needs)
    return None if dx is None else dx.view(ctx.shape), dw, db, *rest


_token_loss = differentiable(_token_loss_fwd, _setup_context, _backward, outputs=4, unsaved=(0, 1, 2))
_over_shards = differentiable_directly(_token_loss_fwd, _setup_context, _backward, outputs=4, unsaved=(0, 1, 2))
