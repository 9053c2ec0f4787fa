"""The lock on an index's folder: one index in one process writes to the folder at a time.

The lock is an flock on the file `tigon.lock` in the folder itself, which no save replaces. The kernel releases the lock
when the process ends in any way. Readers take no lock.
"""

from __future__ import annotations

import os
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tigon.retrieve.fork import Forkable

LOCK = "tigon.lock"


class FolderLock(Forkable):
    """A lock on a folder, held until `release` or garbage collection.

    A forked child does not hold its parent's lock, and is refused like any other process.

    Args:
        name: the beginning of errors. folder: an existing folder.

    Raises: ValueError if the lock is held elsewhere; OSError if the folder cannot be written.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.pid = folder.resolve(), os.getpid()
        self.file = _acquire(name, folder)
        self.survive_forks()

    def is_held(self) -> bool:
        """Whether this process holds the lock, and the folder has not been moved or replaced."""
        return self.pid == os.getpid() and not self.file.closed and _is_at(self.file, self.folder / LOCK)

    def release(self) -> None:
        self.file.close()

    def after_fork(self, is_child: bool) -> None:
        if (
            is_child
        ):  # a child that outlives its parent would keep the lock; closing here does not release the parent's lock
            self.file.close()


def check_free(name: str, folder: Path) -> None:
    """Raise a ValueError if another index or process writes to the folder, before any work is done."""
    if (folder / LOCK).exists():
        FolderLock(name, folder).release()


def _acquire(name: str, folder: Path) -> BinaryIO:
    path = folder / LOCK
    while True:
        file = _open_lock(path)
        try:
            _flock(name, file, folder)
        except BaseException:
            file.close()
            raise
        if _is_at(file, path):
            break
        file.close()  # the folder was removed and recreated between the two steps
    with suppress(OSError):  # on a full disk the holder's name is missing
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
    return file


def _open_lock(path: Path) -> BinaryIO:
    """Open the lock file, which stays open while the lock is held."""
    try:
        return open(path, "a+b", buffering=0)
    except PermissionError:  # created by another user, in a folder that both write to
        if not path.exists() or not os.access(path.parent, os.W_OK):
            raise
        return open(path, "rb", buffering=0)


def _flock(name: str, file: BinaryIO, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # on Windows folders cannot be flushed, so that no index can be saved
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(f"{name}: {folder} is open for writing in another index or process{_holder(file)}.") from None
    except OSError as error:  # a network file system without locks
        warnings.warn(
            f"{name}: the file system of {folder} has no locks ({error.strerror}): let only one process write to the "
            "folder.",
            stacklevel=5,
        )


def _holder(file: BinaryIO) -> str:
    """The lock's holder as named in the lock file, in parentheses."""
    file.seek(0)
    pid, _, host = file.read(300).decode(errors="replace").strip().partition(" ")
    if not host:
        return ""
    there = "" if host == socket.gethostname() else f" on {host}"
    return " (this process)" if not there and pid == str(os.getpid()) else f" (process {pid}{there})"


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False
