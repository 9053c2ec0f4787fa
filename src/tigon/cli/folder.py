"""A run's folder: which process may write there, and whether a path is inside."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from tigon.cli.problem import Problem

LOCK = ".lock"
METRICS = "metrics.jsonl"


def is_within(inner: Path, outer: Path) -> bool:
    """Whether `inner` is `outer` or inside `outer`, also through links."""
    inner = inner.resolve()
    for place in (inner, *inner.parents):
        with contextlib.suppress(OSError):  # one of the paths does not exist
            if os.path.samefile(place, outer):
                return True
    return False


class Claim:
    """A process's lock on a run's folder: `with Claim() as claim: claim.take(output)`.

    The system releases the lock when the process ends, however it ends, so a killed run never blocks the next. On a
    system or file system without such locks, nothing is locked.
    """

    def __init__(self) -> None:
        self.file: Path | None = None
        self.handle = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)  # while locked: a waiting process then sees that the file is gone
            os.close(self.handle)
            self.file = None

    def take(self, output: Path) -> None:
        """Lock an existing folder; locking again is no error. Raises Problem if another process holds the lock."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        while self.file is None:
            try:
                handle = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:  # the folder is missing or not writable, which other checks report
                return
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
                os.close(handle)
                raise Problem(
                    f"another run is at work in {output} ({holder}); wait for its end, or give another --output"
                ) from None
            except OSError:
                os.close(handle)
                return
            # The previous holder may have deleted the file on exit: then this lock guards nothing.
            if not _same(handle, output / LOCK):
                os.close(handle)
                continue
            self.file, self.handle = output / LOCK, handle
            with contextlib.suppress(OSError):  # a full disk
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Drop the lock in a child process: the lock belongs to the parent, and must end with the parent."""
        if self.file is not None:
            os.close(self.handle)
            self.file = None


def _same(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False
