"""SIGTERM ends a command by an exception, and is not forgotten where Python drops that exception.

An exception that a handler raises is dropped where it meets a callback, such as that of an import lock or a destructor.
So the handler notes the signal as well: a loop looks at the note when it begins, and so does the command at its end.
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
    """The number of the signal that was to end the command; 0 if there was none."""
    return _received[0] if _received else 0


def _end(number: int, _: Any) -> None:
    _received.append(number)
    sys.exit(128 + number)
