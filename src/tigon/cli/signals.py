"""Ctrl-C and SIGTERM: a command ends by an exception, a training loop after its current step.

An exception raised in a signal handler is dropped inside a callback, such as an import lock's or a destructor. So the
handler also records the signal: a loop checks the record at the start, and the command at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

_received: list[int] = []


def catch_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that `finally` blocks run, child processes end and files are closed."""
    _received.clear()
    signal.signal(signal.SIGTERM, _end)


def get_signal() -> int:
    """The number of the termination signal; 0 if there was none."""
    return _received[0] if _received else 0


def _end(number: int, _: Any) -> None:
    _received.append(number)
    sys.exit(128 + number)


class Interrupts:
    """`with Interrupts() as interrupts`: the first Ctrl-C or SIGTERM is stored in `.signal`, for a loop to check.

    A second Ctrl-C raises KeyboardInterrupt. A repetition within a second does not count: the terminal and torchrun
    both send the signal for one Ctrl-C.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        self.signal = self.signal or get_signal()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> None:
        if self.signal and number == signal.SIGINT and time.monotonic() - self._since > 1:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self._since = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"\ntigon: stopping at the next checkpoint\n")
