"""Processes beside the one that takes times, which end with all that they have started.

A compiler's own processes outlive the process that started them, for seconds, and share the processors with what is
timed next. So each child leads a group of its own, and the group is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping


def start(
    module: str, *arguments: str, stderr: int = subprocess.DEVNULL, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A process of a module, in a group of its own, with pipes for its input and output.

    Args:
        environment: variables beside those of this process.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a process of `start` and all that it has started, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended; macOS then says PermissionError
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows, which has no groups
            process.kill()
    process.wait()
