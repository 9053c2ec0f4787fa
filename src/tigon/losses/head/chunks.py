"""The loop behind every fused-linear loss: logits exist for one chunk of rows at a time, in one reused buffer.

    for each chunk of rows:
        logits ← x Wᵀ (+ bias)          matrix product into the buffer
        logits ← d loss / d logits      one pass over the buffer; per-row losses on the side
        dx     ← logits W               matrix product straight into its rows of dx
        dw     += logitsᵀ x             matrix product that accumulates, in fp32 where several chunks add up

A chunk is as many rows as fit a byte budget, so memory does not grow with the batch and matrix products stay large.
Rows whose target is ignored can be left out (`num_valid`): time and memory then follow the valid tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.losses.head.head import Projection, logit_bytes, select_rows
from tigon.losses.head.vocabulary_parallel import InputGradient, Shards
from tigon.ops.linear import weight_gradient
from tigon.ops.linear.chunk_size import chunk_rows
from tigon.ops.linear.padded_product import empty_logits
from tigon.ops.shard_statistics import columns, shard_statistics
from tigon.ops.targets import as_labels


def count_spared_bytes(weight: Tensor, compute: torch.dtype, accumulate: str, classes: int | None = None) -> int:
    """Bytes of the fp32 buffer in which several chunks' dW is summed, and which a single chunk does not need.

    classes: the number of classes of the widest shard; all devices use the same number, so that they chunk alike.
    """
    # Under torch.compile the number of rows may be symbolic, and a comparison with it would put a guard on the batch.
    # `accumulate="weight"` has no fp32 buffer to spare.
    if torch.compiler.is_compiling() or accumulate != "fp32":
        return 0
    V, H = weight.shape
    # 2 bytes an element: the fp32 sum takes 4, and the bf16 result takes 2 of them in any case.
    return (V if classes is None else classes) * H * 2 if weight.dtype == compute == torch.bfloat16 else 0


class ValidCount:
    """The number of targets that are not ignored, on its way from the device to the host.

    Start the count when you first see the labels. `int(count)` then waits only until the device has reached that point
    of its queue. Work that you queued later is still ahead of the device, so the device never idles.

    Args:
        target: integer labels of any shape.
        ignore_index: the label that does not count.
        shift: leave out the first label of each row, as a causal language model does.
    """

    def __init__(self, target: Tensor, ignore_index: int = -100, *, shift: bool = False) -> None:
        labels = target[..., 1:] if shift else target
        self._arrival = _Arrival((as_labels(labels, ignore_index) != ignore_index).sum())

    def __int__(self) -> int:
        return int(self._arrival.wait())

    __index__ = __int__


class ValidLengths:
    """The valid targets of each sequence, as `ValidCount` counts those of a batch.

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
    # The count stays on the device, and NaN reaches the host with the loss. A check that raised would have to wait for
    # it.
    return torch.where((target != ignore_index).sum() <= num_valid, 1.0, float("nan")).to(dtype)


def to_scalar(value: Tensor | float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number or 0-d tensor as a 0-d tensor on the device, without gradient. No copy makes the host wait."""
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=dtype, device=device)
    value = value.detach().reshape(()).to(dtype)
    if value.device.type == "cpu" and device.type != "cpu":  # multiplied as a scalar: a copy from pageable memory waits
        return value * torch.ones((), dtype=dtype, device=device)
    return value.to(device)


class _Arrival:
    """A small tensor on its way from the device to the host; `wait` returns it there."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = value
        if value.is_cuda:
            # Only a copy to pinned memory is asynchronous.
            # `value` itself may be freed at once: the allocator gives its memory only to work that comes later on this
            # stream.
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            with torch.cuda.device(value.device):
                # An event marks the work queued so far. Synchronising the stream would wait for later work too.
                self._event = torch.cuda.Event()
                self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            # The CPU's memory is not to be read before the copy has ended. A second call finds no event, and waits for
            # nothing.
            self._event.synchronize()
            self._event = None
        return self._value


@dataclass
class Chunk:
    """Rows start to stop in the order of `Chunks`, with their logits (scratch memory), inputs and targets.

    at: the rows' places in the batch.
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
    """The rows of one loss in the order in which they are worked on; iterating computes the logits chunk by chunk.

    Args:
        head: x (N, H), weight and bias, in the compute dtype.
        target: (N,), integer labels.
        ignore_index: targets that do not count.
        num_valid: how many targets count, if the host knows. Only that many rows are visited, the valid ones.
        budget: bytes of logits a chunk may hold.
        shards: which classes this device's head has, if the head is split over several devices.
        dtype: the dtype of the logits; the compute dtype by default.
        room: where iterating computes the logits, if they have to lie there.
    """

    def __init__(
        self, head: Projection, target: Tensor, ignore_index: int, num_valid: int | None, budget: int,
        shards: Shards | None = None, dtype: torch.dtype | None = None, room: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.head, self.target, self.shards, self.room = head, target, shards, room
        self.dtype = head.x.dtype if dtype is None else dtype
        # Second buffer, allocated on first use: the gradient of wide logits, narrowed for the products.
        self._narrow: Tensor | None = None
        # Chunks follow from the widest shard, so that every device has the same chunks and its collectives match.
        N, V = head.x.shape[0], head.weight.shape[0] if shards is None else shards.widest
        # More than N valid rows do not exist: a number that is too large costs rows, not memory beyond the batch.
        visited = N if num_valid is None else max(0, min(num_valid, N))
        self._first = 0
        self.index: Tensor | None = None
        if visited < N:
            # A stable sort of a flag: valid rows first, in their order. Fixed shapes, so nothing waits for the device.
            order = torch.argsort((target == ignore_index).to(torch.uint8), stable=True)
            self.index = order[:visited]
        # Bytes of a row of logits, and of the narrowed gradient beside them where logits are wider than the products.
        self._cut(visited, V * logit_bytes(head.x.dtype, self.dtype), budget)

    def _cut(self, visited: int, row_bytes: int, budget: int) -> None:
        self.visited = visited
        self.size = chunk_rows(visited, row_bytes, budget) if visited else 0
        self.count = -(-visited // self.size) if visited else 0

    def subset(self, rows: Tensor | slice, most: int) -> Chunks:
        """The walk over some rows of the batch, in their order, in chunks of about at most `most` rows."""
        part = copy.copy(self)
        if isinstance(rows, slice):
            part._first, part.index, visited = rows.start, None, rows.stop - rows.start
        else:
            part._first, part.index, visited = 0, rows, rows.numel()
        # A budget in rows: a row counts as one byte. The walk that made the parts has applied the budget in bytes.
        part._cut(visited, 1, most)
        return part

    def with_head(self, head: Projection) -> Chunks:
        """The same walk over the rows of another head's x, in logits of the same dtype."""
        other = copy.copy(self)
        other.head = head
        return other

    def __iter__(self) -> Iterator[Chunk]:
        room = self.room
        if room is None:
            room = empty_logits(self.size, self.head.weight.shape[0], self.head.x, self.dtype)
        return self.iterate_forward(room)

    def iterate_forward(self, room: Tensor) -> Iterator[Chunk]:
        """The chunks, their logits computed into `room`, (at least `size`, V).

        As many of the last chunks as fit the room together keep their logits there; the chunks before them use the
        front of the room in turn.
        """
        kept = self._first_kept_row(room)
        for start, stop in self.spans():
            # Rows before `kept` all begin at the front of the room, one chunk over the other. Rows from `kept` on have
            # places of their own.
            at = max(0, start - kept)
            yield self.compute(start, stop, room[at : at + stop - start])

    def iterate_backward(
        self, room: Tensor, last: Chunk | None = None, scratch: Tensor | None = None
    ) -> Iterator[Chunk]:
        """The chunks from the last to the first, after `iterate_forward`. Logits that the room still holds are not
        computed again.

        last: the last chunk, if you have it: its rows of x are then not gathered again.
        scratch: where logits are computed again, if those in the room must last.
        """
        kept = self._first_kept_row(room)
        for start, stop in reversed(self.spans()):
            if last is not None:
                yield last
                last = None  # its rows of x are memory that the next chunk's rows need
            elif start >= kept:
                yield self.with_logits(start, stop, room[start - kept : stop - kept])
            else:
                yield self.compute(start, stop, (room if scratch is None else scratch)[: stop - start])

    def _first_kept_row(self, room: Tensor) -> int:
        """The first row, in the order of the walk, whose logits the room holds after `iterate_forward`."""
        if not self.count:
            return 0
        # The last chunk may be short. Beside it the room holds a number of whole chunks, so that no chunk lies
        # across the front and the kept part.
        before_last = (self.count - 1) * self.size
        return max(0, before_last - (room.shape[0] - (self.visited - before_last)) // self.size * self.size)

    def iterate_with_statistics(
        self, dtype: torch.dtype, temperature: float, softcap: float, scale: float, along: bool, total: bool
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Each chunk, and all devices' statistics of its rows, (devices, M, columns) of tigon.ops.shard_statistics."""
        assert self.shards is not None
        # Each chunk waits for its statistics. With two buffers they could travel while the next chunk's logits are
        # computed. But chunks would be half as large and add to dW twice as often, which takes longer than the wait.
        for chunk in self:
            # A new tensor for each chunk: the collective that reads it runs on a stream of its own, and holds it until
            # `wait`.
            own = self.head.x.new_empty(chunk.target.numel(), columns(along, total), dtype=dtype)
            shard_statistics(chunk.logits, chunk.target, own, temperature, softcap, scale, along=along, total=total)
            yield chunk, self.shards.gather(own).wait()

    def spans(self) -> list[tuple[int, int]]:
        """Where the chunks start and stop."""
        return [(start, min(start + self.size, self.visited)) for start in range(0, self.visited, self.size or 1)]

    def row_indices(self, start: int, stop: int) -> Tensor | slice:
        """The places in the batch of rows start to stop of the walk."""
        # A slice where it can be: its rows are a view, while an index makes a copy of x's rows for each chunk.
        return slice(self._first + start, self._first + stop) if self.index is None else self.index[start:stop]

    def select(self, start: int, stop: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The chunk's rows of each tensor; the tensors have N rows, in the order of the batch."""
        rows = self.row_indices(start, stop)
        return tuple(select_rows(t, rows) for t in tensors)

    def with_logits(self, start: int, stop: int, logits: Tensor) -> Chunk:
        """The chunk from start to stop, whose logits have been computed before."""
        at = self.row_indices(start, stop)
        return Chunk(start, stop, at, logits, select_rows(self.head.x, at), select_rows(self.target, at))

    def compute(self, start: int, stop: int, logits: Tensor) -> Chunk:
        """The chunk from start to stop; its logits are written to `logits`, (stop − start, V)."""
        chunk = self.with_logits(start, stop, logits)
        self.head.logits(chunk.x, logits)
        return chunk

    def narrow(self, chunk: Chunk) -> Chunk:
        """The chunk with `logits`, which hold the gradient by now, converted to the dtype of the products."""
        if chunk.logits.dtype != self.head.x.dtype:
            if self._narrow is None:
                self._narrow = empty_logits(self.size, chunk.logits.shape[1], self.head.x, self.head.x.dtype)
            # Both gradient products want factors of one dtype, and half-precision ones run at the tensor cores' full
            # rate.
            chunk.logits = self._narrow[: chunk.logits.shape[0]].copy_(chunk.logits)
        return chunk

    def scatter_to_batch(self, results: Tensor) -> Tensor:
        """Per-row results (visited, ...) as (N, ...), with zeros for rows that were not visited."""
        if self.index is None:
            return results
        return results.new_zeros(self.target.shape[0], *results.shape[1:]).index_copy_(0, self.index, results)


class Gradients:
    """dx, dW and db of a walk: three products with each chunk's dlogits. None in a gradient's place spares its product.

    Args:
        walk: the chunks that will be added, or those of the batch whose parts will be.
        dx: (N, H), uninitialised. Rows that `walk` does not visit are zeroed.
        dw: the tensors of `weight_gradient.parts`, uninitialised unless `add`.
        db: (V,), uninitialised.
        add: add to the values of `dw`.
    """

    def __init__(
        self, walk: Chunks, dx: Tensor | None, dw: Sequence[Tensor] | None, db: Tensor | None, add: bool = False
    ) -> None:
        self.dx, self.dw, self.db = dx, dw, db
        self._input = InputGradient(walk.head, walk.shards)
        # The first product overwrites dW, which spares a pass that zeroes it.
        self._first = not add
        # Without an index every row is written by some chunk, and zeroing dx would be a pass for nothing.
        if dx is not None and walk.index is not None:
            dx.zero_()
        if db is not None:
            db.zero_()

    def __bool__(self) -> bool:
        """Whether any gradient is wanted."""
        return self.dx is not None or self.dw is not None or self.db is not None

    def add(self, chunk: Chunk, more: tuple[Tensor, Tensor, float] | None = None) -> None:
        """Take in a chunk whose logits hold dlogits by now. `more` = (a, b, alpha) adds alpha · a b to its dx."""
        if self.dx is not None:
            # Before dW: a sum of dx over the devices travels while dW's product is computed.
            self._input.add(self.dx, chunk.at, chunk.logits, more)
        if self.dw is not None:
            # All three products have n · V · H multiplications. This one also reads its result: from the second chunk
            # on it adds to what lies in dW, V · H numbers of fp32.
            weight_gradient.accumulate(self.dw, chunk.logits, chunk.x, self._first)
        if self.db is not None:
            self.db += chunk.logits.sum(0, dtype=self.db.dtype)
        self._first = False

    def finish(self) -> None:
        """Write the pending sum of dx, and zero dW if no chunk came. Call this at the end of the walk."""
        self._input.flush()
        if self._first and self.dw is not None:
            weight_gradient.zero(self.dw)
