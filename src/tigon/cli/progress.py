"""What a command says while it works: a bar or a spinner on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Seconds between two lines where there is no terminal.
EVERY = 10.0


@contextmanager
def working(console: Any, doing: str) -> Iterator[None]:
    """`with working(console, "reading train.parquet")`, around work whose length is not known."""
    if console.is_terminal:
        with console.status(doing):
            yield
        return
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(EVERY):
            console.print(f"{doing}, {time.monotonic() - began:,.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


class Steps:
    """`with Steps(console, "steps", total) as steps`: steps of a known number, and how many there are a second.

    Args:
        unit: what is counted, in the plural. done: how many there are already.
    """

    def __init__(self, console: Any, unit: str, total: int, done: int = 0) -> None:
        self.console, self.unit, self.total = console, unit, total
        columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
        self.bar = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self.task = self.bar.add_task("", total=total, completed=done)
        self.first, self.began = done, time.monotonic()
        self.told = self.began

    def __enter__(self) -> Steps:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, done: int, said: str = "") -> None:
        """So many are done. said: to stand beside them, such as a loss."""
        now = time.monotonic()
        speed = (done - self.first) / max(now - self.began, 1e-9)
        line = f"{speed:,.1f} {self.unit}/s{f'  {said}' if said else ''}"
        self.bar.update(self.task, completed=done, description=line)
        if not self.console.is_terminal and now - self.told >= EVERY:
            self.told = now
            self.console.print(f"{self.unit[:-1]} {done:,} of {self.total:,}: {line}")
