"""SIGTERM ends a command by an exception, even where Python drops that exception.

An exception raised in a signal handler is dropped inside a callback, such as an import lock's or a destructor. So the
handler also records the signal: a loop checks the record at the start, and the command at the end.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

_received: list[int] = []


def catch_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that `finally` blocks run, child processes end and files are closed."""
    _received.clear()
    signal.signal(signal.SIGTERM, _end)


def received() -> int:
    """The number of the termination signal; 0 if there was none."""
    return _received[0] if _received else 0


def _end(number: int, _: Any) -> None:
    _received.append(number)
    sys.exit(128 + number)
