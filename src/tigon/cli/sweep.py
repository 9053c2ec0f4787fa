"""`tigon bench --sweep`: cases drawn from the ranges of real models, and where Tigon is not first among them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem

INTERRUPTED = 130


def sweep(
    count: int,
    seed: int,
    names: list[str],
    peers: list[str] | None,
    device: Any,
    keep: Callable[[dict[str, Any]], None],
    *,
    budget: float | None = None,
    resume: Path | None = None,
    fail_behind: float | None = None,
) -> tuple[dict[str, Any], int]:
    """Measure and show a sweep. Returns its result and the exit status.

    Args:
        keep: called with the result so far, every few seconds and at the end.
        fail_behind: per cent that Tigon may be behind the best peer in a draw; None: any.
    """
    from tigon.bench.sweep import NO_GPU, Sweep
    from tigon.bench.verdicts import furthest_behind
    from tigon.cli.bench import _check_names, _progress

    _check_drawable(names)
    _check_names(peers, _implementations())
    before = None if resume is None or not resume.exists() else _load(resume)
    try:
        run = Sweep(count, seed, device, names=names or None, peers=peers, budget_s=budget, before=before)
    except ValueError as error:
        raise Problem(f"bench: --resume {resume}: {str(error).rstrip('.')}") from None
    if run.room.tiny:
        print(NO_GPU, file=sys.stderr)
    interrupted = False
    try:
        with _progress(len(run.plan.draws)) as step:
            run.run(step if sys.stderr.isatty() else _log(), keep)
    except KeyboardInterrupt:
        if run.ceilings is None:  # nothing was measured
            raise
        interrupted = True
    finally:
        if run.ceilings is not None:
            keep(run.content())
    content = run.content()
    show_sweep(content)
    if interrupted:
        return content, INTERRUPTED
    wrong = any(row["status"] == "wrong" and row["implementation"] == "tigon" for row in content["rows"])
    behind = fail_behind is not None and furthest_behind(content) > fail_behind
    return content, int(wrong or behind or bool(run.broken))


def _log() -> Callable[[str, int], None]:
    """A line for each draw that is begun, where a bar cannot be seen."""
    began, last = time.monotonic(), [""]

    def say(text: str, advance: int) -> None:
        if not advance and text != last[0]:
            last[0] = text
            print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    return say


def _implementations() -> set[str]:
    from tigon.bench.cases import OPS
    from tigon.bench.drawn_models import SIDES

    return {*SIDES, *(name for op in OPS.values() for name in op.implementations)}


def _check_drawable(names: list[str]) -> None:
    from tigon.bench.cases import OPS
    from tigon.bench.sweep import drawable

    for name in names:
        if name in OPS and isinstance(why := OPS[name].drawn, str):
            raise Problem(f"bench: --sweep does not draw {name}: {why}")
    unknown = [name for name in names if name not in drawable()]
    if unknown:
        raise Problem(f"bench: --only must be among {', '.join(drawable())}, got {', '.join(map(repr, unknown))}")


def _load(path: Path) -> dict[str, Any]:
    from tigon.bench.report import load

    try:
        return load(path)
    except OSError as error:
        raise Problem(f"bench: --resume {path}: {error.strerror}") from None
    except ValueError as error:
        raise Problem(f"bench: --resume {str(error).rstrip('.')}") from None


def show_sweep(content: dict[str, Any]) -> None:
    """The summary, and tables of the draws in which Tigon is not first."""
    from tigon.bench import report, verdicts

    if not sys.stdout.isatty():
        print(verdicts.to_text(content))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tigon.cli.screen import screen

    console = screen()
    if max(map(len, verdicts.to_text(content).splitlines()[1:-2]), default=0) > console.width:
        # A line that wraps can be read; a column that is cut cannot.
        console.print(verdicts.to_text(content), soft_wrap=True)
        return
    console.print(report.headline(content), style="dim")
    for title, (header, rows) in verdicts.tables(content).items():
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for name in header:
            table.add_column(name, justify="left" if name in verdicts.LEFT else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in (verdicts.summary(content), *content.get("notes", ())):
        console.print(line)
