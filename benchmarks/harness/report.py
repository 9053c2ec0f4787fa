"""Result files: rows with the machine, the versions, the date and the command that they were measured with.

This module needs only torch, so that a bare GPU machine can measure.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.columns import TEXT_COLUMNS, Cells, case_key, make_cells, number

from tigon.cli.environment import describe_environment

# Raise this when a field changes its meaning or goes.
SCHEMA = 1
NOT_RECORDED = "not recorded"


def result(kind: str, rows: Iterable[Any], *, device: torch.device | None = None, **more: Any) -> dict[str, Any]:
    """One result file as a dictionary: the rows, the machine, the date and the command.

    Rows that have a place for a date and a command, and none yet, get those of this run, and keep them in later runs.
    """
    rows = list(rows)
    for row in rows:
        if getattr(row, "date", None) == "":
            row.date, row.command = start_date(), command()
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date": start_date(),
        "command": command(),
        "environment": describe_environment(device),
        **more,
        "rows": [row.to_dict() for row in rows],
    }


@functools.cache
def start_date() -> str:
    """When this process made its first result: the date of its run, whose file is written after every case."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def command() -> str:
    """The command line of this process, without this machine's paths."""
    first, *rest = (Path(word).name if os.path.isabs(word) else word for word in sys.argv)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if first == "__main__.py" and spec is not None:  # python -m PACKAGE: the file's name says nothing
        first = f"python -m {spec.name.removesuffix('.__main__')}"
    return " ".join([first, *rest])


def file_name(content: dict[str, Any], what: str | None = None) -> str:
    """The name of a result's file in benchmarks/results: the device, and what was measured, by default the kind."""
    device = content["environment"]["device"].lower().replace("nvidia", "").replace("amd", "")
    words = "".join(c if c.isalnum() else " " for c in device).split()
    return "-".join([*words, what or content["kind"]]) + ".json"


def save(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a result file whole or not at all: a killed run leaves the file as it was after the previous case."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a result file. Raises ValueError with a sentence for a file that does not have this schema."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a result file: {error}.") from None
    if not isinstance(content, dict) or not {"schema", "kind", "date", "command", "environment", "rows"} <= set(
        content
    ):
        raise ValueError(f"{path} is not a result file of Tigon's benchmarks.")
    if content["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {content['schema']!r}, this version reads {SCHEMA}.")
    return content


def find_origin(content: dict[str, Any], row: dict[str, Any]) -> tuple[str, str] | None:
    """The date and the command of a row: its own, or those of the file that one run wrote. None if neither is known."""
    if row.get("date"):
        return None if NOT_RECORDED in (row["date"], row["command"]) else (row["date"], row["command"])
    if len(content.get("runs", ())) > 1 or "--resume" in content["command"]:
        return None
    return content["date"], content["command"]


def check_environment(content: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise ValueError if two results are of different devices, versions or kinds, whose rows make no one record."""
    for what in ("device", "packages"):
        if content["environment"][what] != other["environment"][what]:
            raise ValueError(f"merge: the files differ in {what}; only runs of one environment make one record.")
    if content["kind"] != other["kind"]:
        raise ValueError(f"merge: the files must be of one kind, got {content['kind']!r} and {other['kind']!r}.")


def merge(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Result files of one kind, device and set of versions as one. If several files have a case, the last one counts.

    Floors stay those of the run that a row comes from, and every run keeps its date, command and ceilings in "runs".
    Raises ValueError for files that do not belong together.
    """
    first = contents[0]
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    runs: list[dict[str, Any]] = []
    for content in contents:
        check_environment(first, content)
        added: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in content["rows"]:
            date, how = find_origin(content, row) or (NOT_RECORDED, NOT_RECORDED)
            added.setdefault(case_key(row), []).append({**row, "date": date, "command": how})
        cases |= added
        run = {key: content[key] for key in ("date", "command", "ceilings") if key in content}
        runs += [run for run in content.get("runs", [run]) if run not in runs]
    rows = [row for members in cases.values() for row in members]
    return {**contents[-1], **{k: first[k] for k in ("ceilings",) if k in first}, "runs": runs, "rows": rows}


# ----------------------------------------------------------------------------------------------------------- formats


def cells(content: dict[str, Any]) -> Cells:
    return make_cells(content["kind"], content["rows"])


def headline(content: dict[str, Any]) -> str:
    """The line above a table: hardware, ceilings, versions."""
    env = content["environment"]
    gpus = content.get("gpus") or 1
    parts = [f"{gpus} × {env['device']}" if gpus > 1 else env["device"]]
    if content["kind"] == "host" and env.get("cpu", env["device"]) != env["device"]:
        parts.append(env["cpu"])
    if "ceilings" in content:
        ceilings = content["ceilings"]
        parts.append(f"copy {number(ceilings['copy_gbps'])} GB/s")
        parts.append(f"matmul {number(ceilings['matmul_tflops'])} TFLOP/s ({ceilings['matmul']})")
    names = ("torch", "triton", "transformers", "liger-kernel", "quack-kernels")
    parts += [f"{name} {env['packages'][name]}" for name in names if env["packages"].get(name)]
    return ", ".join([*parts, content["date"][:10]])


def to_text(content: dict[str, Any]) -> str:
    header, rows = cells(content)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if name in TEXT_COLUMNS else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([headline(content), line(header), *(line(row) for row in rows)])
