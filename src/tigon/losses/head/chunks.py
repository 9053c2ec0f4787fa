"""The loop behind every fused-linear loss: logits exist for a chunk of rows at a time, in a reused buffer.

    for each chunk of rows:
        logits ← x Wᵀ (+ bias)          matrix product into the buffer
        logits ← d loss / d logits      one pass over the buffer; per-row losses on the side
        dx     ← logits W               matrix product straight into its rows of dx
        dw     += logitsᵀ x             matrix product that accumulates, in fp32 over several chunks

A chunk holds as many rows as fit a byte budget, so memory does not grow with the batch and matrix products stay large.
Ignored rows can be left out (`num_valid`): time and memory then follow the valid tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.kernels import cdiv
from tigon.losses.head.head import Projection, logit_bytes, select_rows
from tigon.losses.head.vocabulary_parallel import InputGradient, Shards
from tigon.ops.linear import weight_gradient
from tigon.ops.linear.chunk_size import chunk_rows
from tigon.ops.linear.padded_product import empty_logits
from tigon.ops.logprob import logprob_rows
from tigon.ops.shard_statistics import columns, merge_logprob, shard_statistics
from tigon.ops.targets import as_labels


def count_spared_bytes(weight: Tensor, compute: torch.dtype, accumulate: str, classes: int | None = None) -> int:
    """Bytes in the fp32 buffer that sums several chunks' dW, and which a single chunk does not need.

    classes: the widest shard's class count; all devices use the same number, so that they chunk alike.
    """
    # Under torch.compile the row count may be symbolic, and a comparison would put a guard on the batch.
    # `accumulate="weight"` has no fp32 buffer to spare.
    if torch.compiler.is_compiling() or accumulate != "fp32":
        return 0
    V, H = weight.shape
    # 2 bytes an element: the fp32 sum takes 4, and the bf16 result takes 2 in any case.
    return (V if classes is None else classes) * H * 2 if weight.dtype == compute == torch.bfloat16 else 0


class ValidCount:
    """The number of targets that are not ignored, on the way from the device to the host.

    Start the count when you first see the labels. `int(count)` then waits only until the device has reached that point
    in its queue. Work that you queued later is still ahead of the device, so the device never idles.

    Args:
        target: integer labels in any shape.
        ignore_index: the label that does not count.
        shift: leave out each row's first label, as a causal language model does.
    """

    def __init__(self, target: Tensor, ignore_index: int = -100, *, shift: bool = False) -> None:
        labels = target[..., 1:] if shift else target
        self._arrival = _Arrival((as_labels(labels, ignore_index) != ignore_index).sum())

    def __int__(self) -> int:
        return int(self._arrival.wait())

    __index__ = __int__


class ValidLengths:
    """Each sequence's valid targets, as `ValidCount` counts a batch's.

    Preference and policy losses use these numbers to leave masked tokens out.

    Args:
        target: (S, T) labels.
        ignore_index: the label that does not count.
    """

    def __init__(self, target: Tensor, ignore_index: int = -100) -> None:
        self._arrival = _Arrival((as_labels(target, ignore_index) != ignore_index).sum(-1))

    def __iter__(self) -> Iterator[int]:
        return iter(self._arrival.wait().tolist())


def guard_valid_count(target: Tensor, ignore_index: int, num_valid: int, dtype: torch.dtype) -> Tensor:
    """0-d: 1, or NaN if more targets count than num_valid (rows would be dropped silently). The host never waits."""
    # The count stays on the device, and NaN reaches the host with the loss. A check that raised would have to wait.
    return torch.where((target != ignore_index).sum() <= num_valid, 1.0, float("nan")).to(dtype)


def to_scalar(value: Tensor | float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Convert a number or 0-d tensor to a 0-d device tensor, without gradient. No copy makes the host wait."""
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=dtype, device=device)
    value = value.detach().reshape(()).to(dtype)
    if value.device.type == "cpu" and device.type != "cpu":  # multiplied as a scalar: a copy from pageable memory waits
        return value * torch.ones((), dtype=dtype, device=device)
    return value.to(device)


class _Arrival:
    """A small tensor on the way from the device to the host; `wait` returns the host tensor."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = value
        if value.is_cuda:
            # Only a copy to pinned memory is asynchronous. `value` may be freed at once: the allocator reuses that
            # memory only for later work on this stream.
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            with torch.cuda.device(value.device):
                # An event marks the work queued so far. Synchronising the stream would wait for later work too.
                self._event = torch.cuda.Event()
                self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            # The host memory must not be read before the copy has ended.
            self._event.synchronize()
            self._event = None
        return self._value


@dataclass
class Chunk:
    """Rows start to stop in the order of `Chunks`, with logits (scratch memory), inputs and targets.

    at: the rows' positions in the batch.
    """

    start: int
    stop: int
    at: Tensor | slice
    logits: Tensor
    x: Tensor
    target: Tensor

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


class Chunks:
    """A loss's rows in processing order; iterating computes the logits chunk by chunk.

    Args:
        head: x (N, H), weight and bias, in the compute dtype.
        target: (N,), integer labels.
        ignore_index: targets that do not count.
        num_valid: the valid-target count, if the host knows. Only that many rows are visited, the valid rows.
        budget: logits bytes per chunk.
        shards: this device's classes, if the head is split over several devices.
        dtype: the logits' dtype; the compute dtype by default.

    `room`, if set, is the buffer in which the logits must lie. size: rows per chunk. held: rows per product of dW.
    """

    def __init__(
        self, head: Projection, target: Tensor, ignore_index: int, num_valid: int | None, budget: int,
        shards: Shards | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.head, self.target, self.shards = head, target, shards
        self.room: Tensor | None = None
        self.dtype = head.x.dtype if dtype is None else dtype
        # Second buffer, allocated on first use: the gradient of wide logits, narrowed for the products.
        self._narrow: Tensor | None = None
        # Chunks follow from the widest shard, so that every device has the same chunks and collectives match.
        N, V = head.x.shape[0], head.weight.shape[0] if shards is None else shards.widest
        # Clamped to N: too large a number must not cost memory beyond the batch.
        visited = N if num_valid is None else max(0, min(num_valid, N))
        self._first = 0
        self.index: Tensor | None = None
        if visited < N:
            # A stable sort by a flag: valid rows first, in order. Fixed shapes, so nothing waits for the device.
            order = torch.argsort((target == ignore_index).to(torch.uint8), stable=True)
            self.index = order[:visited]
        self._cut(visited, V * logit_bytes(head.x.dtype, self.dtype), budget)

    def _cut(self, visited: int, row_bytes: int, budget: int) -> None:
        self.visited = visited
        self.size = self.held = chunk_rows(visited, row_bytes, budget) if visited else 0
        if self.head.parts > 1:
            # Within the budget: logits of few rows, and gradients, half as large, of many.
            rows = visited if self.size == visited else max(128, budget // row_bytes // 128 * 128)
            self.size = min(rows, cdiv(rows, 128 * self.head.parts) * 128)
            self.held = max(rows, 2 * (rows - self.size))
        self.count = cdiv(visited, self.size) if visited else 0

    def subset(self, rows: Tensor | slice, most: int) -> Chunks:
        """The walk over some rows, in batch order, in chunks with about `most` rows at most."""
        part = copy.copy(self)
        if isinstance(rows, slice):
            part._first, part.index, visited = rows.start, None, rows.stop - rows.start
        else:
            part._first, part.index, visited = 0, rows, rows.numel()
        # A budget in rows: a row counts as one byte. The outer walk has applied the budget in bytes.
        part._cut(visited, 1, most)
        return part

    def with_head(self, head: Projection) -> Chunks:
        """The same walk over another head's x, with logits in the same dtype."""
        other = copy.copy(self)
        other.head = head
        return other

    def __iter__(self) -> Iterator[Chunk]:
        room = self.room
        if room is None:
            room = self.head.empty_logits(self.size, self.dtype)
        return self.iterate_forward(room)

    def iterate_forward(self, room: Tensor) -> Iterator[Chunk]:
        """Yield the chunks, with logits computed into `room`, (at least `size`, V).

        As many of the last chunks as fit the room together keep their logits there; the chunks before them use the
        front in turn.
        """
        kept = self._first_kept_row(room)
        for start, stop in self.spans():
            # Rows before `kept` all start at the front of the room, each chunk over the last. Later rows have separate
            # places.
            at = max(0, start - kept)
            yield self.compute(start, stop, room[at : at + stop - start])

    def iterate_backward(
        self, room: Tensor, last: Chunk | None = None, scratch: Tensor | None = None
    ) -> Iterator[Chunk]:
        """Yield the chunks from the last to the first, after `iterate_forward`. Logits still in the room are not
        recomputed.

        last: the last chunk, if you have it: the rows of x are then not gathered again.
        scratch: where logits are recomputed, if those in the room must last.
        """
        kept = self._first_kept_row(room)
        for start, stop in reversed(self.spans()):
            if last is not None:
                yield last
                last = None  # frees the memory that the next chunk's rows need
            elif start >= kept:
                yield self.with_logits(start, stop, room[start - kept : stop - kept])
            else:
                yield self.compute(start, stop, (room if scratch is None else scratch)[: stop - start])

    def _first_kept_row(self, room: Tensor) -> int:
        """The first row, in walk order, whose logits the room holds after `iterate_forward`."""
        if not self.count:
            return 0
        # The last chunk may be short. The room holds whole chunks beside the last, so that no chunk lies across the
        # front and the kept part.
        before_last = (self.count - 1) * self.size
        return max(0, before_last - (room.shape[0] - (self.visited - before_last)) // self.size * self.size)

    def iterate_with_statistics(
        self, dtype: torch.dtype, temperature: float, softcap: float, scale: float, along: bool, total: bool
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield each chunk and all devices' row statistics, (devices, M, columns) as in tigon.ops.shard_statistics."""
        assert self.shards is not None
        # Each chunk waits for the statistics. With two buffers they could travel while the next chunk's logits are
        # computed, but chunks would be half as large and add to dW twice as often, which takes longer than the wait.
        for chunk in self:
            # A new tensor for each chunk: the collective reads the tensor on another stream and holds a reference until
            # `wait`.
            own = self.head.x.new_empty(chunk.target.numel(), columns(along, total), dtype=dtype)
            shard_statistics(chunk.logits, chunk.target, own, temperature, softcap, scale, along=along, total=total)
            yield chunk, self.shards.gather(own).wait()

    def spans(self) -> list[tuple[int, int]]:
        """The chunks' start and stop rows."""
        return [(start, min(start + self.size, self.visited)) for start in range(0, self.visited, self.size or 1)]

    def row_indices(self, start: int, stop: int) -> Tensor | slice:
        """Batch positions for rows start to stop in the walk."""
        # A slice where possible: sliced rows are a view, while an index copies x's rows for each chunk.
        return slice(self._first + start, self._first + stop) if self.index is None else self.index[start:stop]

    def select(self, start: int, stop: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The chunk's rows in each tensor; the tensors have N rows, in batch order."""
        rows = self.row_indices(start, stop)
        return tuple(select_rows(t, rows) for t in tensors)

    def with_logits(self, start: int, stop: int, logits: Tensor) -> Chunk:
        """The chunk from start to stop, with logits computed before."""
        at = self.row_indices(start, stop)
        return Chunk(start, stop, at, logits, select_rows(self.head.x, at), select_rows(self.target, at))

    def compute(self, start: int, stop: int, logits: Tensor) -> Chunk:
        """The chunk from start to stop; writes `logits`, (stop − start, V)."""
        chunk = self.with_logits(start, stop, logits)
        self.head.logits(chunk.x, logits)
        return chunk

    def narrow(self, chunk: Chunk) -> Chunk:
        """The chunk with `logits`, now the gradient, converted to the products' dtype."""
        if chunk.logits.dtype != self.head.x.dtype:
            if self._narrow is None:
                self._narrow = empty_logits(self.size, chunk.logits.shape[1], self.head.x, self.head.x.dtype)
            # Both gradient products want factors in the same dtype, and half precision runs at the tensor cores' full
            # rate.
            chunk.logits = self._narrow[: chunk.logits.shape[0]].copy_(chunk.logits)
        return chunk

    def scatter_to_batch(self, results: Tensor) -> Tensor:
        """Per-row results (visited, ...) as (N, ...), with zeros for rows that were not visited."""
        if self.index is None:
            return results
        return results.new_zeros(self.target.shape[0], *results.shape[1:]).index_copy_(0, self.index, results)


def read_logprobs(
    chunks: Chunks, room: Tensor, results: Sequence[Tensor | None], stats: Tensor | None, ignore_index: int,
    transform: tuple[float, float, float],
) -> Chunk | None:  # fmt: skip
    """Write results and statistics for the walk's rows, as `logprob_rows` does; return the last chunk.

    transform: temperature, softcap, scale. Over several devices there is one exchange, at the end of the walk.
    """
    along, total, shards = results[1] is not None, results[4] is not None, chunks.shards
    own = chunk = None
    if shards is not None:
        dtype = torch.promote_types(chunks.head.x.dtype, torch.float32)
        own = room.new_empty(chunks.visited, columns(along, total), dtype=dtype)
    for chunk in chunks.iterate_forward(room):
        rows = chunk.rows
        if own is not None:
            shard_statistics(chunk.logits, chunk.target, own[rows], *transform, along=along, total=total)
            continue
        places = tuple([None if t is None else t[rows] for t in results])
        own_stats = None if stats is None else stats[rows]
        logprob_rows(chunk.logits, chunk.target, places, own_stats, ignore_index, *transform)
    if shards is not None and own is not None and chunks.visited:
        # The backward pass alone needs statistics, but merging writes them.
        stats = own.new_empty(chunks.visited, 3) if stats is None else stats
        (labels,) = chunks.select(0, chunks.visited, chunks.target)
        merge_logprob(shards.gather(own).wait(), labels, tuple(results), stats, shards.classes, *transform)
    return chunk


class Gradients:
    """dx, dW and db for a walk: three products with each chunk's dlogits. A gradient that is None skips the product.

    Args:
        walk: the chunks that will be added, or the batch whose parts will be added.
        dx: (N, H), uninitialised. Rows that `walk` does not visit are zeroed.
        dw: the tensors from `weight_gradient.parts`, uninitialised unless `add`.
        db: (V,), uninitialised.
        add: add to the values in `dw`.
    """

    def __init__(
        self, walk: Chunks, dx: Tensor | None, dw: Sequence[Tensor] | None, db: Tensor | None, add: bool = False
    ) -> None:
        self.dx, self.dw, self.db = dx, dw, db
        self._input = InputGradient(walk.head, walk.shards)
        # The first product overwrites dW, which saves a zeroing pass.
        self._first = not add
        if dx is not None and walk.index is not None:
            dx.zero_()
        if db is not None:
            db.zero_()

    @classmethod
    def from_places(cls, walk: Chunks, needs: Sequence[bool], places: Sequence[Tensor]) -> Gradients:
        """Write the needed gradients to places: dx, dW in the tensors of `weight_gradient.places`, and db.

        The only chunk's logits may have to lie in dW's memory: sets `walk.room`.
        """
        dx, dw, more, db = places
        sums = weight_gradient.parts(dw, more) if needs[1] else None
        walk.room = weight_gradient.room(sums)
        return cls(walk, dx if needs[0] else None, sums, db if needs[2] else None)

    def __bool__(self) -> bool:
        """Whether any gradient is wanted."""
        return self.dx is not None or self.dw is not None or self.db is not None

    def add(self, chunk: Chunk, more: tuple[Tensor, Tensor, float] | None = None) -> None:
        """Add a chunk whose logits now hold dlogits. `more` = (a, b, alpha) adds alpha · a b to dx."""
        if self.dx is not None:
            # Before dW: the sum of dx over the devices travels while dW's product is computed.
            self._input.add(self.dx, chunk.at, chunk.logits, more)
        if self.dw is not None:
            weight_gradient.accumulate(self.dw, chunk.logits, chunk.x, self._first)
        if self.db is not None:
            self.db += chunk.logits.sum(0, dtype=self.db.dtype)
        self._first = False

    def finish(self) -> None:
        """Write the pending dx sum, and zero dW if no chunk came. Call this at the end of the walk."""
        self._input.flush()
        if self._first and self.dw is not None:
            weight_gradient.zero(self.dw)
