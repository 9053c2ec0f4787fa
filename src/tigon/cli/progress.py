"""A command's progress: a bar or a spinner on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Seconds between two lines where there is no terminal.
EVERY = 10.0


@contextmanager
def _lines(console: Any, line: Callable[[], str]) -> Iterator[None]:
    """Print `line`'s result every ten seconds, from another thread: also during a long step."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(EVERY):
            console.print(line())

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


@contextmanager
def working(console: Any, doing: str) -> Iterator[None]:
    """`with working(console, "reading train.parquet")`, around work with unknown length."""
    began = time.monotonic()
    with console.status(doing) if console.is_terminal else _lines(
        console, lambda: f"{doing}, {time.monotonic() - began:,.0f} s"
    ):  # fmt: skip
        yield


class Steps:
    """`with Steps(console, "steps", total) as steps`: a known number of steps, with the rate per second.

    Args:
        unit: the counted things, in the plural. total: the most steps. done: steps already finished.
    """

    def __init__(self, console: Any, unit: str, total: int, done: int = 0) -> None:
        self.unit, self.total, self.first, self.done, self.said = unit, total, done, done, ""
        self.began = time.monotonic()
        columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self.task = self.bar.add_task("", total=total, completed=done)
        self.shown = self.bar if console.is_terminal else _lines(console, self._line)

    def __enter__(self) -> Steps:
        self.shown.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.shown.__exit__(*error)

    def show(self, done: int, said: str = "") -> None:
        """Show the finished steps. said: text to show beside them, such as a loss."""
        self.done, self.said = done, said
        self.bar.update(self.task, completed=done, description=self._speed())

    def _speed(self) -> str:
        speed = (self.done - self.first) / max(time.monotonic() - self.began, 1e-9)
        return f"{speed:,.1f} {self.unit}/s{f'  {self.said}' if self.said else ''}"

    def _line(self) -> str:
        return f"{self.unit[:-1]} {self.done:,} of {self.total:,}: {self._speed()}"
