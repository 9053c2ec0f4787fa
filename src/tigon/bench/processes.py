"""Processes that each measure one thing and end.

python -m tigon.bench.processes      the child: waits for one request on standard input
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tigon.bench.floor import measure_floor
from tigon.bench.runner import one_line
from tigon.bench.training import Side, measure_lengths, train_side


class Processes:
    """Processes that each do one thing and end, one after another; the next process imports while one works.

    Args:
        count: how many there will be.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.waiting: subprocess.Popen[str] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        if self.waiting is not None:
            _end(self.waiting)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tigon.bench.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self,
        row: Side,
        *,
        device: str,
        timeout_s: float = 1800.0,
        say: Callable[[str], None] = lambda text: None,
        stop: Callable[[], str] = lambda: "",
        **request: Any,
    ) -> list[Side]:
        """The rows that a task makes of this row; a row with the reason if the process fails.

        Args:
            stop: asked several times a second for a reason to end the process before its time.
            request: "task", a key of TASKS or "FILE.py:FUNCTION", and the arguments of its function.
        """
        process, self.waiting = self.waiting or self._start(), None
        self.left -= 1
        if self.left > 0:
            self.waiting = self._start()
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "rows.json")
            message = {"row": row.to_dict(), "device": device, "result": str(result), **request}
            last, done, reasons = "", threading.Event(), []

            def watch() -> None:
                deadline = time.monotonic() + timeout_s
                while not done.wait(0.1):
                    reason = stop() or (f"took longer than {timeout_s:g} s" if time.monotonic() > deadline else "")
                    if reason:
                        reasons.append(reason)
                        process.kill()
                        return

            watchdog = threading.Thread(target=watch, daemon=True)
            watchdog.start()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(BrokenPipeError):  # the process has died; its last output says why
                    process.stdin.write(json.dumps(message) + "\n")
                    process.stdin.close()
                for line in process.stdout:
                    last = line.strip() or last
                    if line.startswith(f"{row.side}: step"):
                        say(f"{row.model} {line.strip()}")
                process.wait()
            finally:
                done.set()
                watchdog.join()
                _end(process)
            rows = [Side(**one) for one in json.loads(result.read_text())] if result.exists() else []
        if reasons:
            rows.append(replace(row, status="failed", reason=reasons[0]))
        elif not rows:
            reason = f"the process ended with code {process.returncode}: {last[:200]}"
            rows.append(replace(row, status="failed", reason=reason))
        return rows


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _floor(row: Side, device: torch.device, overrides: dict[str, Any], say: Callable[[str], None]) -> list[Side]:
    row.profile_ms = measure_floor(row, device, overrides)
    row.step_ms = sum(row.profile_ms.values())
    row.tokens_per_s = 1e3 * row.batch * row.seq / row.step_ms
    row.note = "matrix products, attention and optimizer alone"
    say(f"{row.side}: step of {row.step_ms:.0f} ms")
    return [row]


# The tasks of a process. A function of a file, "FILE.py:FUNCTION", is a task too, and is called like these.
TASKS: dict[str, Callable[..., list[Side]]] = {
    "train": train_side,
    "floor": lambda row, done, **options: _floor(row, **options),
    "lengths": measure_lengths,
}


def _task(name: str) -> Callable[..., list[Side]]:
    if name in TASKS:
        return TASKS[name]
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look modules up there
    spec.loader.exec_module(module)
    found: Callable[..., list[Side]] = getattr(module, function)
    return found


def _serve() -> int:
    """The child: imports, waits for one request, and writes its rows to a file."""
    import transformers.modeling_utils  # noqa: F401

    import tigon.fusion.engine.model  # noqa: F401

    line = sys.stdin.readline()
    if not line:  # the parent needs nothing more
        return 0
    request = json.loads(line)
    row, result = Side(**request.pop("row")), Path(request.pop("result"))
    task, device = _task(request.pop("task")), torch.device(request.pop("device"))

    def keep(rows: list[Side]) -> None:
        part = result.with_suffix(".part")
        part.write_text(json.dumps([one.to_dict() for one in rows]))
        part.replace(result)

    try:
        rows = task(row, device=device, say=lambda text: print(text, flush=True), done=keep, **request)
    except Exception as error:  # a peer may fail in any way, and its row says how
        rows = [replace(row, status="failed", reason=one_line(error))]
    keep(rows)
    sys.stdout.flush()
    # Not sys.exit: destroying a process group at exit would wait for ranks that have failed.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(_serve())
