"""Run a task in a process of its own: patches, compiled code and a fragmented allocator end with the process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness.runner import one_line
from harness.training import RunResult

# task(row, device=, say=, done=, **options): rows. `say` gets progress as text, `done` the rows so far.
Task = Callable[..., list[RunResult]]


def run_in_process(
    task: Task,
    row: RunResult,
    *,
    device: str,
    timeout_s: float = 1800.0,
    say: Callable[[str], None] = lambda text: None,
    stop: Callable[[], str] = lambda: "",
    **options: Any,
) -> list[RunResult]:
    """The rows that a task makes of this row; a row with the reason if the process fails.

    Args:
        task: a function of a module, which the process imports.
        stop: called several times a second; a text that it returns ends the process, as the reason.
        options: further arguments of the task.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, task, row, device, options), daemon=True)
    process.start()
    theirs.close()
    deadline, reason = time.monotonic() + timeout_s, ""
    rows: list[RunResult] = []
    try:
        while not reason:
            if ours.poll(0.1):
                message = ours.recv()
                if isinstance(message, str):
                    say(f"{row.model} {message}")
                else:
                    rows = message
            else:
                reason = stop() or (f"took longer than {timeout_s:g} s" if time.monotonic() > deadline else "")
    except (EOFError, OSError):  # the process has ended
        pass
    finally:
        if reason:
            process.kill()
        process.join()
    if not reason and not rows:
        reason = f"the process ended with code {process.exitcode}"
    return [*rows, replace(row, status="failed", reason=reason)] if reason else rows


def _serve(connection: Connection, task: Task, row: RunResult, device: str, options: dict[str, Any]) -> None:
    try:
        rows = task(row, device=torch.device(device), say=connection.send, done=connection.send, **options)
    except Exception as error:  # a peer may fail in any way, and its row says how
        rows = [replace(row, status="failed", reason=one_line(error))]
    connection.send(rows)
    connection.close()
    # Not a return: destroying a process group at exit would wait for ranks that have failed.
    os._exit(0)
