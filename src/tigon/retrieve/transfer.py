"""Copies from the host to an index's device, and writes into rows there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device. A copy from memory that is not pinned would wait for all work on the stream."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def array_to_device(values: Any, device: torch.device) -> Tensor:
    """Copy a numpy array to the device."""
    return to_device(torch.from_numpy(np.ascontiguousarray(values)), device)


def batch_to_device(arrays: Sequence[Ints], device: torch.device, vectors: Tensor | None = None) -> list[Tensor]:
    """Copy int64 arrays, and vectors, to the device. A GPU gets everything in one copy from a single pinned buffer."""
    if device.type != "cuda":
        parts = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        return parts if vectors is None else [*parts, vectors.to(device)]
    # Each array starts at a multiple of 16 bytes, as kernels are compiled for.
    sizes = [array.size + array.size % 2 for array in arrays]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    count = starts[-1]
    beside = vectors is not None and vectors.device.type == "cpu"
    length = vectors.numel() * vectors.element_size() if beside and vectors is not None else 0
    pinned = torch.empty(8 * count + length, dtype=torch.uint8, pin_memory=True)
    ints = pinned[: 8 * count].view(torch.int64).numpy()
    for array, start in zip(arrays, starts, strict=False):
        ints[start : start + array.size] = array.reshape(-1)
    if beside and vectors is not None:
        pinned[8 * count :].view(vectors.dtype).view(vectors.shape).copy_(vectors)
    copied = pinned.to(device, non_blocking=True)
    copied_ints = copied[: 8 * count].view(torch.int64)
    pairs = zip(arrays, starts, strict=False)
    parts = [copied_ints[start : start + array.size].view(array.shape) for array, start in pairs]
    if vectors is None:
        return parts
    return [*parts, copied[8 * count :].view(vectors.dtype).view(vectors.shape) if beside else vectors.to(device)]


def is_run(rows: Ints) -> bool:
    """Whether rows are consecutive and ascending."""
    return bool(len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] - rows[:-1] == 1).all())


def row_index(rows: Ints, device: torch.device) -> Any:
    """Rows as an index into a buffer: a slice where they are consecutive."""
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_run(rows) else array_to_device(rows, device)


def gather_rows(buffer: Tensor, rows: Tensor) -> Tensor:
    """buffer[rows], in any dtype."""
    if buffer.element_size() == 1:  # torch cannot index float8
        return buffer.view(torch.uint8)[rows].view(buffer.dtype)
    return buffer[rows]


def scatter_rows_(buffer: Tensor, rows: Any, vectors: Tensor) -> None:
    """buffer[rows] = vectors, in any dtype."""
    if buffer.element_size() == 1:  # torch cannot index float8
        buffer, vectors = buffer.view(torch.uint8), vectors.contiguous().view(torch.uint8)
    buffer[rows] = vectors
