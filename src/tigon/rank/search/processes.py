"""Files that live with a process: the system unlocks them when it ends, however it ends."""

from __future__ import annotations

import os
from pathlib import Path


def locked(file: Path) -> int | None:
    """A file that is locked until the process ends, however it ends; None if another process has it."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except (ImportError, OSError):  # Windows, or a file system without locks: its files say who lives
        pass
    return handle


def unlocked(handle: int | None, file: Path) -> None:
    """Unlock and delete a file."""
    if handle is not None:
        file.unlink(missing_ok=True)
        os.close(handle)


def is_locked(file: Path) -> bool:
    """Whether a file is there, and a living process has locked it. One that is not is deleted."""
    if not file.exists():
        return False
    handle = locked(file)
    if handle is None:
        return True
    try:
        import fcntl  # noqa: F401
    except ImportError:
        os.close(handle)
        return True
    unlocked(handle, file)
    return False
