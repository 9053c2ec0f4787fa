"""A journal: updates of an index, appended to a file, each with a checksum.

A record is written and on the disk before the update is made, so that an update which was answered is never lost. A
record that a kill or a full disk left half written is cut off when the journal is opened; one that was whole and is
damaged is an error. The first record names the snapshot that the updates follow.

A record is a head of 24 bytes (mark, kind, size and checksum of the body, checksum of the head) and a body in the
format of safetensors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints, Value
from tigon.files import parse_json
from tigon.retrieve import disk, writing
from tigon.retrieve.ids import split_texts
from tigon.retrieve.writing import Prepared

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

MARK = b"TJ1\n"
HEAD = struct.Struct("<4sIQI")  # mark, kind, size, checksum of the body; behind it the checksum of those
SIZE = HEAD.size + 4
KINDS = ("upsert", "delete", "grow", "snapshot")


class Journal:
    """The open journal of an index, which has the lock of the folder.

    Args:
        path: of the file, which is made if it is not there. What is behind the last whole record is cut off.
        snapshot: the id of the snapshot that the updates follow.

    Raises: ValueError if the file is damaged, or of another snapshot.
    """

    def __init__(self, path: Path, snapshot: str) -> None:
        self.path, self.pid = path, os.getpid()
        self.file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 - open as long as the index is
        try:
            self.size = whole(path, snapshot)
            disk.truncate(self.file, self.size)
            if not self.size:
                body = snapshot.encode()
                disk.write(self.file, head("snapshot", body) + body)
                self.size = SIZE + len(body)
            disk.flush(self.file)
        except BaseException:
            self.file.close()
            raise
        self.broken = False

    def close(self) -> None:
        self.file.close()

    def upsert(self, items: Prepared) -> None:
        assert items.vectors is not None
        ids = items.ids
        texts = [text.encode() for text in ids] if isinstance(ids, list) else None
        body = {
            "vectors": items.vectors.cpu(),
            "words": torch.from_numpy(items.words),
            "growth": _bytes(json.dumps(items.growth).encode()),
            **_packed(texts if texts is not None else ids),
        }
        self._append("upsert", body)

    def delete(self, ids: Ints | list[str]) -> None:
        self._append("delete", _packed([text.encode() for text in ids] if isinstance(ids, list) else ids))

    def grow(self, capacity: int) -> None:
        self._append("grow", {"capacity": torch.tensor([capacity])})

    def _append(self, kind: str, tensors: dict[str, Tensor]) -> None:
        if self.broken:
            raise OSError(
                f"Index: the journal {self.path} could not be cut to its last whole record: open the index again."
            )
        if self.pid != os.getpid():
            raise ValueError(
                f"Index: the journal {self.path} is of process {self.pid}, of which this process is a fork: close() "
                "the index here first; updates then stay in memory."
            )
        if not os.fstat(self.file.fileno()).st_nlink and not self.path.exists():
            raise OSError(errno.ENOENT, f"Index: the journal {self.path} was removed: save the index to a folder again")
        body = b"".join(disk.safetensors(tensors))
        try:
            disk.write(self.file, head(kind, body))
            disk.write(self.file, body)
            disk.flush(self.file)
        except OSError as error:
            self._take_back()
            raise OSError(
                error.errno,
                f"Index: the journal {self.path} took no record of {len(body):,} bytes ({error.strerror}); "
                "the index is as it was",
            ) from error
        self.size += SIZE + len(body)

    def _take_back(self) -> None:
        """Cut off what was written of a record."""
        try:
            disk.truncate(self.file, self.size)
            disk.flush(self.file)
        except OSError:
            self.broken = True


def head(kind: str, body: bytes) -> bytes:
    first = HEAD.pack(MARK, KINDS.index(kind), len(body), _checksum(body))
    return first + struct.pack("<I", zlib.crc32(first))


def _checksum(body: bytes) -> int:
    return int.from_bytes(hashlib.sha256(body).digest()[:4], "little")


def updates(path: Path, snapshot: str) -> Iterator[tuple[str, bytes, int]]:
    """Kind, body and end of each whole record of a journal; the first is that of the snapshot.

    Raises: ValueError for a record that is damaged, and for the journal of another snapshot.
    """
    for number, (kind, body, end) in enumerate(_records(path)):
        if (kind == "snapshot") != (number == 0) or (number == 0 and body != snapshot.encode()):
            raise ValueError(
                f"Index: the journal {path} is not of the snapshot beside it: it was put there from another index, or "
                "from another time. Put back the folder as a whole, or take the journal away to go without its updates."
            )
        yield kind, body, end


class _Damaged(ValueError):
    """A record of a journal is damaged."""


def _records(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """Kind, body and end of each whole record."""
    if not path.exists():
        return
    size = path.stat().st_size
    with open(path, "rb") as file:
        at = number = 0
        while at + SIZE <= size:
            first = file.read(SIZE)
            mark, kind, length, checksum = HEAD.unpack(first[:-4])
            if mark != MARK or struct.pack("<I", zlib.crc32(first[:-4])) != first[-4:] or kind >= len(KINDS):
                if not any(first) and not any(piece.strip(b"\0") for piece in iter(lambda: file.read(disk.PIECE), b"")):
                    return  # zeros to the end: what a lost power supply leaves of a file that was growing
                raise _damaged(path, number, at, size)
            if at + SIZE + length > size:
                return
            body = file.read(length)
            if _checksum(body) != checksum:
                raise _damaged(path, number, at, size)
            at += SIZE + length
            number += 1
            yield KINDS[kind], body, at


def whole(path: Path, snapshot: str) -> int:
    """Bytes of the whole records."""
    end = 0
    for _, _, end in updates(path, snapshot):  # noqa: B007
        pass
    return end


def _damaged(path: Path, number: int, at: int, size: int) -> _Damaged:
    return _Damaged(
        f"Index: record {number + 1} of the journal {path} is damaged, at byte {at:,} of {size:,}. "
        "Index.open(…, repair=True) keeps the records before it, and drops it and those behind it."
    )


def replay(index: Index, path: Path, snapshot: str, write: Callable[[Prepared], None] | None = None) -> None:
    """Make the updates of a journal. write: writes items to the index; None: `writing.write`.

    Raises: ValueError as `updates`, and for an update that does not fit the index.
    """
    for kind, body, end in updates(path, snapshot):
        if kind == "snapshot":
            continue
        try:
            tensors = disk.from_safetensors(body)
            if kind == "grow":
                index.grow(int(tensors["capacity"][0]))
            elif kind == "delete":
                index.delete(_ids(tensors))
            else:
                items = _items(index, tensors)
                if write is None:
                    writing.write(index, items)
                else:
                    write(items)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"Index: the journal {path} does not fit its snapshot, before byte {end:,}: {error}"
            ) from error


def _items(index: Index, tensors: dict[str, Tensor]) -> Prepared:
    """The items of a record. The journal wrote what had been checked, so that shapes and kinds are left to look at."""
    ids, vectors, words = _ids(tensors), tensors["vectors"], tensors["words"].numpy()
    growth: dict[str, list[Value]] = parse_json(tensors["growth"].numpy().tobytes(), "a vocabulary")
    read = writing.checked_ids(index, "Index.upsert", ids)
    index.schema.check_growth(growth)
    known = None if index.ids is None else index.ids.find(read)
    writing.check_room(index, read, np.full(len(read), -1) if known is None else known[1])
    shapes = vectors.shape, vectors.dtype, words.shape
    if shapes != ((len(read), index.dim), index.dtype, (index.schema.words, len(read))):
        raise ValueError(f"a record of {len(read):,} items has {shapes[0]}, {shapes[1]} and {shapes[2]}")
    return Prepared(read, vectors, words, growth, known)


def repair(path: Path, snapshot: str) -> None:
    """Cut a journal off before the first record that is damaged.

    Raises: ValueError for the journal of another snapshot, which stays as it is.
    """
    end = 0
    try:
        for _, _, end in updates(path, snapshot):  # noqa: B007
            pass
    except _Damaged:
        with open(path, "r+b", buffering=0) as file:
            disk.truncate(file, end)
            disk.flush(file)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)[: len(content)]


def _packed(ids: Any) -> dict[str, Tensor]:
    if isinstance(ids, list):
        ends = np.cumsum([len(text) for text in ids], dtype=np.int64)
        return {"id_bytes": _bytes(b"".join(ids)), "id_ends": torch.from_numpy(ends)}
    return {"ids": torch.from_numpy(np.ascontiguousarray(ids))}


def _ids(tensors: dict[str, Tensor]) -> Any:
    if "ids" in tensors:
        return tensors["ids"].numpy()
    return split_texts(tensors["id_bytes"].numpy().tobytes(), tensors["id_ends"].numpy())
