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

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.linear.head import Projection, empty_logits, logit_bytes, take
from tigon.linear.vocabulary_parallel import InputGradient, Shards
from tigon.ops.shard_statistics import columns, shard_statistics
from tigon.ops.targets import as_labels

# Logits a chunk may hold. A GPU's matrix products want thousands of rows; a CPU's caches want few.
CHUNK_BYTES = 2**30
CPU_CHUNK_BYTES = 2**25


def chunk_budget(device: torch.device, chunk_bytes: int | None = None, *, whole: Any = 0, spared: int = 0) -> int:
    """Bytes of logits a chunk may hold: the argument, else TIGON_CHUNK_BYTES, else 1 GiB (32 MiB on a CPU).

    If all logits (`whole` bytes) exceed the default budget by at most `spared` bytes, return `whole`, so that one chunk
    suffices.
    """
    if chunk_bytes is None:
        text = os.environ.get("TIGON_CHUNK_BYTES")
        if text:
            try:
                chunk_bytes = int(text)
            except ValueError:
                raise ValueError(f"TIGON_CHUNK_BYTES must be a whole number of bytes, got {text!r}.") from None
    if chunk_bytes is None:
        budget = CPU_CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES
        return whole if spared and budget < whole <= budget + spared else budget
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}.")
    return chunk_bytes


def spared_by_one_chunk(weight: Tensor, compute: torch.dtype, accumulate: str, classes: int | None = None) -> int:
    """Bytes of the fp32 buffer in which several chunks' dW is summed, and which a single chunk does not need.

    classes: the number of classes of the widest shard; all devices use the same number, so that they chunk alike.
    """
    if torch.compiler.is_compiling() or accumulate != "fp32":
        return 0
    V, H = weight.shape
    return (V if classes is None else classes) * H * 2 if weight.dtype == compute == torch.bfloat16 else 0


def chunk_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Rows of a chunk: all if the budget holds them, else an equal share, rounded up to the products' tile of 128."""
    if rows * row_bytes <= budget:
        return max(1, rows)
    # Never fewer than one tile, even over the budget: a product of a few rows would leave the device idle.
    most = max(128, budget // max(1, row_bytes) // 128 * 128)
    chunks = max(1, -(-rows // most))
    # Equal shares: a short last chunk would be a small product, which is slow for its size.
    balanced = -(-rows // chunks)
    return max(1, min(rows, -(-balanced // 128) * 128))


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


def nan_if_more(target: Tensor, ignore_index: int, num_valid: int, dtype: torch.dtype) -> Tensor:
    """0-d: 1, or NaN if more targets count than num_valid (rows would be dropped silently). The host never waits."""
    return torch.where((target != ignore_index).sum() <= num_valid, 1.0, float("nan")).to(dtype)


def scalar(value: Tensor | float, device: torch.device, dtype: torch.dtype) -> Tensor:
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
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            with torch.cuda.device(value.device):
                # An event marks the work queued so far. Synchronising the stream would wait for later work too.
                self._event = torch.cuda.Event()
                self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._value


@dataclass
class Chunk:
    """Rows start to stop in the order of `Chunks`, with their logits (scratch memory), inputs and targets."""

    start: int
    stop: int
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
    """

    def __init__(
        self, head: Projection, target: Tensor, ignore_index: int, num_valid: int | None, budget: int,
        shards: Shards | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.head, self.target, self.shards = head, target, shards
        self.dtype = head.x.dtype if dtype is None else dtype
        # Second buffer, allocated on first use: the gradient of wide logits, narrowed for the products.
        self._narrow: Tensor | None = None
        self.input_gradient = InputGradient(head, shards)
        # Chunks follow from the widest shard, so that every device has the same chunks and its collectives match.
        N, V = head.x.shape[0], head.weight.shape[0] if shards is None else shards.widest
        self.visited = N if num_valid is None else max(0, min(num_valid, N))
        self.index: Tensor | None = None
        if self.visited < N:
            # A stable sort of a flag: valid rows first, in their order. Fixed shapes, so nothing waits for the device.
            order = torch.argsort((target == ignore_index).to(torch.uint8), stable=True)
            self.index = order[: self.visited]
        # Zero visited rows mean zero chunks: the losses then zero their gradients themselves.
        self.size = chunk_rows(self.visited, V * logit_bytes(head.x.dtype, self.dtype), budget) if self.visited else 0
        self.count = -(-self.visited // self.size) if self.visited else 0

    def __iter__(self) -> Iterator[Chunk]:
        # One buffer for all chunks. A chunk is done with its logits before the next one is computed.
        buffer = empty_logits(self.size, self.head.weight.shape[0], self.head.x, self.dtype)
        for start, stop in self.spans():
            yield self.compute(start, stop, buffer[: stop - start])

    def with_statistics(
        self, dtype: torch.dtype, temperature: float, softcap: float, scale: float, along: bool, total: bool
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Each chunk, and all devices' statistics of its rows, (devices, M, columns) of tigon.ops.shard_statistics."""
        assert self.shards is not None
        # Each chunk waits for its statistics. With two buffers they could travel while the next chunk's logits are
        # computed. But chunks would be half as large and add to dW twice as often, which takes longer than the wait.
        for chunk in self:
            own = self.head.x.new_empty(chunk.target.numel(), columns(along, total), dtype=dtype)
            shard_statistics(chunk.logits, chunk.target, own, temperature, softcap, scale, along=along, total=total)
            yield chunk, self.shards.gather(own).wait()

    def spans(self) -> list[tuple[int, int]]:
        """Where the chunks start and stop."""
        return [(start, min(start + self.size, self.visited)) for start in range(0, self.visited, self.size or 1)]

    def rows_of(self, start: int, stop: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The chunk's rows of each tensor; the tensors have N rows, in the order of the batch."""
        rows = slice(start, stop) if self.index is None else self.index[start:stop]
        return tuple(take(t, rows) for t in tensors)

    def with_logits(self, start: int, stop: int, logits: Tensor) -> Chunk:
        """The chunk from start to stop, whose logits have been computed before."""
        return Chunk(start, stop, logits, *self.rows_of(start, stop, self.head.x, self.target))

    def compute(self, start: int, stop: int, logits: Tensor) -> Chunk:
        """The chunk from start to stop; its logits are written to `logits`, (stop − start, V)."""
        chunk = self.with_logits(start, stop, logits)
        self.head.logits(chunk.x, logits)
        return chunk

    def narrowed(self, chunk: Chunk) -> Chunk:
        """The chunk with `logits`, which hold the gradient by now, converted to the dtype of the products."""
        if chunk.logits.dtype != self.head.x.dtype:
            if self._narrow is None:
                self._narrow = empty_logits(self.size, chunk.logits.shape[1], self.head.x, self.head.x.dtype)
            chunk.logits = self._narrow[: chunk.logits.shape[0]].copy_(chunk.logits)
        return chunk

    def in_batch_order(self, results: Tensor) -> Tensor:
        """Per-row results (visited, ...) as (N, ...), with zeros for rows that were not visited."""
        if self.index is None:
            return results
        return results.new_zeros(self.target.shape[0], *results.shape[1:]).index_copy_(0, self.index, results)

    def clear_unvisited(self, dx: Tensor) -> None:
        """Zero dx (N, H) if some rows are not visited: no chunk writes those rows."""
        if self.index is not None:
            dx.zero_()

    def add_input_gradient(self, dx: Tensor, chunk: Chunk, more: tuple[Tensor, Tensor, float] | None = None) -> None:
        """The chunk's rows of dx = dlogits W; chunk.logits hold dlogits. `more` = (a, b, alpha) adds alpha · a b."""
        rows = chunk.rows if self.index is None else self.index[chunk.rows]
        self.input_gradient.add(dx, rows, chunk.logits, more)
