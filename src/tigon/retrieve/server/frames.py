"""The socket between the index process and a worker: each frame calls a method at the other end.

A frame is its byte count, then (method, *arguments) in `marshal` format, which takes a quarter of JSON's time and,
unlike pickle, runs no code when read. Both ends run on one machine with the same Python.
"""

from __future__ import annotations

import asyncio
import marshal
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = struct.Struct("=Q")
PIECE = 1 << 14  # column values that are read and written at once


class FrameReader:
    """Extract frames from a stream's pieces."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._missing = 0  # bytes until the current frame is complete

    def feed(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        """The frames that these bytes complete."""
        if self._missing > len(data):
            self._missing -= len(data)
            self._pieces.append(data)
            return
        data = b"".join((*self._pieces, data)) if self._pieces else data
        start = 0
        self._missing = 0
        while start + SIZE.size <= len(data):
            end = start + SIZE.size + SIZE.unpack_from(data, start)[0]
            if end > len(data):
                self._missing = end - len(data)
                break
            yield marshal.loads(memoryview(data)[start + SIZE.size : end])
            start = end
        self._pieces = [data[start:]] if start < len(data) else []


def pack_frame(*call: Any) -> bytes:
    content = marshal.dumps(call)
    return SIZE.pack(len(content)) + content


class FrameProtocol(asyncio.Protocol):
    """One end of the socket. A frame (name, *arguments) calls `on_name(*arguments)`."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._frames = FrameReader()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for name, *arguments in self._frames.feed(data):
            getattr(self, f"on_{name}")(*arguments)

    def send(self, name: str, *arguments: Any) -> None:
        """Call a method at the other end, if the other end is still there."""
        if not self.transport.is_closing():
            self.transport.write(pack_frame(name, *arguments))


def encode_arrays(value: Any) -> Any:
    """Convert a value for `marshal`: arrays, also inside a dict, become tuples."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: encode_arrays(each) for name, each in value.items()}
    return value


def decode_arrays(value: Any) -> Any:
    """Restore a value converted by `encode_arrays`."""
    if isinstance(value, tuple):
        dtype, shape, data = value
        array: npt.NDArray[Any] = np.frombuffer(data, dtype).reshape(shape)
        return array
    if isinstance(value, dict):
        return {name: decode_arrays(each) for name, each in value.items()}
    return value


def split_table(table: dict[str, list[Any]] | None) -> dict[str, list[bytes]] | None:
    """Split a table into pieces: `marshal` holds the interpreter for a whole call, 200 ms for a million values."""
    if table is None:
        return None
    return {
        name: [marshal.dumps(values[start : start + PIECE]) for start in range(0, len(values), PIECE)]
        for name, values in table.items()
    }


def join_table(pieces: dict[str, list[bytes]] | None) -> dict[str, list[Any]] | None:
    """Restore a table split by `split_table`."""
    if pieces is None:
        return None
    return {name: [value for piece in column for value in marshal.loads(piece)] for name, column in pieces.items()}
