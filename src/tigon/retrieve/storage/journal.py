"""The journal: index updates appended to a file, each with a checksum.

A record is on disk before the update is applied, so that an acknowledged update is never lost. A record that a kill or
a full disk left incomplete is truncated when the journal is opened; a complete but damaged record is an error. The
first record names the snapshot that the updates follow.

A record is a 24-byte head (mark, kind, body size and checksum, head checksum) and a body in safetensors format.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from tigon.retrieve.storage import disk

MARK = b"TJ1\n"
HEAD = struct.Struct("<4sIQI")  # mark, kind, size, body checksum; followed by the head's checksum
SIZE = HEAD.size + 4
KINDS = ("upsert", "delete", "grow", "snapshot")


class Journal:
    """The open journal of an index that holds the folder lock.

    Args:
        path: the file, created if missing. Bytes after the last complete record are truncated.
        snapshot: the id of the snapshot that the updates follow.

    Raises: ValueError if the file is damaged, or belongs to another snapshot.
    """

    def __init__(self, path: Path, snapshot: str) -> None:
        self.path, self.pid = path, os.getpid()
        self.file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 - open as long as the index is
        try:
            self.size = measure(path, snapshot)
            disk.truncate(self.file, self.size)
            if not self.size:
                body = snapshot.encode()
                disk.write(self.file, make_head("snapshot", body) + body)
                self.size = SIZE + len(body)
            disk.flush(self.file)
        except BaseException:
            self.file.close()
            raise
        self.broken = False

    def close(self) -> None:
        self.file.close()

    def append(self, kind: str, tensors: dict[str, Tensor]) -> None:
        """Write a record, and wait until the record is on disk.

        Raises: OSError if the disk is full or the journal was removed; the journal is unchanged then. ValueError in a
            fork of the process that opened the journal.
        """
        if self.broken:
            raise OSError(
                f"Index: the journal {self.path} could not be truncated to its last complete record: reopen the index."
            )
        if self.pid != os.getpid():
            raise ValueError(
                f"Index: the journal {self.path} belongs to process {self.pid}, and this process is a fork: close() "
                "the index here first; updates then stay in memory."
            )
        if not os.fstat(self.file.fileno()).st_nlink and not self.path.exists():
            raise OSError(errno.ENOENT, f"Index: the journal {self.path} was removed: save the index to a folder again")
        body = b"".join(disk.serialize(tensors))
        try:
            disk.write(self.file, make_head(kind, body))
            disk.write(self.file, body)
            disk.flush(self.file)
        except OSError as error:
            self._truncate()
            raise OSError(
                error.errno,
                f"Index: the journal {self.path} could not store a record of {len(body):,} bytes ({error.strerror}); "
                "the index is unchanged",
            ) from error
        self.size += SIZE + len(body)

    def _truncate(self) -> None:
        """Truncate a partially written record."""
        try:
            disk.truncate(self.file, self.size)
            disk.flush(self.file)
        except OSError:
            self.broken = True


def make_head(kind: str, body: bytes) -> bytes:
    first = HEAD.pack(MARK, KINDS.index(kind), len(body), _checksum(body))
    return first + struct.pack("<I", zlib.crc32(first))


def _checksum(body: bytes) -> int:
    return int.from_bytes(hashlib.sha256(body).digest()[:4], "little")


def read_records(path: Path, snapshot: str) -> Iterator[tuple[str, bytes, int]]:
    """Each complete record's kind, body and end; the first record names the snapshot.

    Raises: ValueError for a damaged record, and for another snapshot's journal.
    """
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
                    return  # zeros to the end: a growing file after a power failure
                raise _make_error(path, number, at, size)
            if at + SIZE + length > size:
                return
            body = file.read(length)
            if _checksum(body) != checksum:
                raise _make_error(path, number, at, size)
            if (KINDS[kind] == "snapshot") != (number == 0) or (number == 0 and body != snapshot.encode()):
                raise ValueError(
                    f"Index: the journal {path} does not belong to the snapshot beside it: the journal comes from "
                    "another index, or from another time. Restore the whole folder, or remove the journal to discard "
                    "its updates."
                )
            at += SIZE + length
            number += 1
            yield KINDS[kind], body, at


def parse_record(body: bytes) -> dict[str, Tensor]:
    """A record's tensors.

    Raises: ValueError if the record is not in safetensors format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(body)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"a record is not in safetensors format ({error})") from None
    return tensors


class _Damaged(ValueError):
    """A journal record is damaged."""


def measure(path: Path, snapshot: str) -> int:
    """The byte size of the complete records."""
    return max((end for _, _, end in read_records(path, snapshot)), default=0)


def _make_error(path: Path, number: int, at: int, size: int) -> _Damaged:
    return _Damaged(
        f"Index: record {number + 1} of the journal {path} is damaged, at byte {at:,} of {size:,}. "
        "Index.open(…, repair=True) keeps the records before the damage, and drops the rest."
    )


def repair_journal(path: Path, snapshot: str) -> None:
    """Truncate a journal before the first damaged record.

    Raises: ValueError for another snapshot's journal, which is not changed.
    """
    end = 0
    try:
        for _, _, end in read_records(path, snapshot):  # noqa: B007
            pass
    except _Damaged:
        with open(path, "r+b", buffering=0) as file:
            disk.truncate(file, end)
            disk.flush(file)
