"""Durable files: content reaches the disk before a name or a record refers to it.

Every disk operation goes through one of these functions, so that tests can stop a process at each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from tigon.files import compute_sha256

PIECE = 1 << 24
# Ends the name of a snapshot that does not count: being written, or being removed.
PARTIAL = ".partial"
# File names in a snapshot.
WRITTEN = re.compile(r"manifest\.json|journal|items(-\d+)?\.safetensors|items-\d+\.json")
# safetensors names for dtypes.
DTYPES = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.int8: "I8",
}  # fmt: skip


def write(file: BinaryIO, content: bytes | memoryview) -> None:
    """Write all content."""
    left = memoryview(content)
    while len(left):
        left = left[file.write(left) :]


def flush(file: BinaryIO) -> None:
    """Wait until the written content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def rename(old: Path, new: Path) -> None:
    os.rename(old, new)


def truncate(file: BinaryIO, size: int) -> None:
    file.truncate(size)


def remove(folder: Path) -> None:
    """Remove a complete or partial snapshot as far as possible: the files that `save` writes, and then the folder if it
    is empty.

    The folder is renamed first, so that a reader finds either a complete snapshot or none.
    """
    if folder.is_symlink():
        return
    with suppress(OSError):
        if folder.suffix != PARTIAL:
            gone = folder.with_name(folder.name + PARTIAL)
            os.rename(folder, gone)
            folder = gone
        for file in [*folder.iterdir()]:
            if WRITTEN.fullmatch(file.name):
                file.unlink()
        folder.rmdir()


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file and wait for the disk. Returns size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for piece in pieces:
            write(file, piece)
            digest.update(piece)
            size += len(piece)
        flush(file)
    return {"bytes": size, "sha256": digest.hexdigest()}


def compute_digest(path: Path) -> dict[str, Any]:
    """A file's size and SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": compute_sha256(path)}


# --------------------------------------------------------------------------------------------------------- safetensors


class SelectedRows(NamedTuple):
    """Some rows from a tensor, gathered in pieces."""

    buffer: Tensor
    rows: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self.rows), *self.buffer.shape[1:]])


def serialize(tensors: Mapping[str, Tensor | SelectedRows]) -> Iterator[bytes | memoryview]:
    """Serialize tensors as safetensors in pieces, without an in-memory copy of all tensors."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        dtype = tensor.buffer.dtype if isinstance(tensor, SelectedRows) else tensor.dtype
        size = tensor.shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield from _iterate_pieces(tensor)


def _iterate_pieces(tensor: Tensor | SelectedRows) -> Iterator[memoryview]:
    buffer = tensor.buffer if isinstance(tensor, SelectedRows) else tensor
    rows = max(1, PIECE // max(1, tensor.shape[1:].numel() * buffer.element_size()))
    for start in range(0, tensor.shape[0] if tensor.shape.numel() else 0, rows):
        if isinstance(tensor, SelectedRows):
            bits = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer  # torch cannot index float8
            piece = bits[tensor.rows[start : start + rows]]
        else:
            piece = buffer[start : start + rows]
        yield memoryview(piece.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
