"""metrics.jsonl: a line for each training step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(file: Path, *rows: dict[str, Any]) -> None:
    with open(file, "a", encoding="utf-8") as handle:
        handle.write("".join(json.dumps(row) + "\n" for row in rows))


def repair(file: Path) -> None:
    """End the last line in metrics.jsonl where a kill truncated it, so that the next line stands alone."""
    if file.exists():
        with open(file, "rb+") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - 1))
            if handle.read(1) not in (b"", b"\n"):
                handle.write(b"\n")


def read_metrics(file: Path) -> tuple[dict[int, float], dict[int, float]]:
    """The training and evaluation losses by step; where a step is repeated, the last counts.

    A malformed line, such as one truncated by a kill, is skipped.
    """
    train: dict[int, float] = {}
    evaluation: dict[int, float] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            for found, name in ((train, "loss"), (evaluation, "eval_loss")):
                if isinstance(row.get(name), (int, float)):
                    found[row["step"]] = float(row[name])
    return dict(sorted(train.items())), dict(sorted(evaluation.items()))
