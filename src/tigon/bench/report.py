"""Results of `tigon bench` as a text table, JSON and Markdown.

    python -m tigon.bench.report results.json             the table
    python -m tigon.bench.report results.json --markdown  what the documentation shows

This module needs only torch, so that a bare GPU machine can measure.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tigon.bench.columns import CASE_COLUMNS, COLUMNS, PLAIN, TEXT_COLUMNS, number, remark

# Raise this when a field changes its meaning or goes. Rows are runner.Row for kind "ops", host.HostRow for "host",
# sweep.SweepRow for "sweep", models.Side for "model" and "sequence" (memory over the length), Side of
# benchmarks/architectures.py for "architecture", Row of benchmarks/counters.py for "counters", Row of
# benchmarks/hpz.py for "hpz", search.SearchRow and search_codes.CodedRow for "search", Row of
# benchmarks/vocabulary_parallel.py for "vocabulary-parallel", Row of benchmarks/sharded_search.py for
# "sharded-search", Row of benchmarks/serve_load.py for "serve", Step of benchmarks/row_adagrad.py for "row-adagrad",
# what tests/distributed record for "composition". The studies in benchmarks/studies add the columns of their kinds to
# COLUMNS; without them a row is shown as it is.
SCHEMA = 1
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "datasets",
    "tokenizers",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
)


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Hardware and versions, as a result file records them. Missing packages and devices are None."""
    from tigon import __version__

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {
        "device": _cpu_name() if device.type != "cuda" else torch.cuda.get_device_name(device),
        "device_type": device.type,
        "cpu": _cpu_name(),
        "memory_gib": None,
        "capability": None,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "tigon": __version__,
        "packages": {name: package_version(name) for name in PACKAGES},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["capability"] = f"{properties.major}.{properties.minor}"
    return found


def package_version(name: str) -> str | None:
    if name == "torch":  # torch's metadata lacks the build (+cu128), which matters as much
        return str(torch.__version__)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's version, as the kernel module reports it."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in line.split() if word[0].isdigit() and "." in word), None)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


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
        "environment": environment(device),
        **more,
        "rows": [row.to_dict() for row in rows],
    }


NOT_RECORDED = "not recorded"


def find_origin(content: dict[str, Any], row: dict[str, Any]) -> tuple[str, str] | None:
    """The date and the command of a row: its own, or those of the file that one run wrote. None if neither is known."""
    if row.get("date"):
        return None if NOT_RECORDED in (row["date"], row["command"]) else (row["date"], row["command"])
    if len(content.get("runs", ())) > 1 or "--resume" in content["command"]:
        return None
    return content["date"], content["command"]


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
    """The name of a result's file in benchmarks/results: the device, and what was measured on it.

    what: replaces the second part, which comes from the kind and, for whole models, from the first row.
    """
    device = content["environment"]["device"].lower().replace("nvidia", "").replace("amd", "")
    words = "".join(c if c.isalnum() else " " for c in device).split()
    if what or content["kind"] != "model":
        return "-".join([*words, what or content["kind"]]) + ".json"
    row = content["rows"][0]
    checkpointing = ["checkpointing"] if row["checkpointing"] else []
    return "-".join([*words, row["model"], f"{row['batch']}x{row['seq']}", *checkpointing]) + ".json"


def save(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a result file whole or not at all: a killed run leaves the file as it was after the previous case."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


# The errors of reading a field that is missing or has the wrong type.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a result file. Raises ValueError with a sentence for a file that does not have this schema."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a result file: {error}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("kind"), str) or "schema" not in content:
        raise ValueError(f"{path} is not a result file of tigon bench.")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {content.get('schema')!r}, this version reads {SCHEMA}.")
    where = "its head"
    try:
        headline(content)
        content["command"].split()
        for number, row in enumerate(content["rows"], 1):
            where = f"row {number}"
            hash(case_of(row))
            row.get("status", "ok").startswith("ok")
            if not all(isinstance(cell, str) for cell in cells({**content, "rows": [row]})[1][0]):
                raise TypeError("a name is no text")
    except MALFORMED as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"has a field of another type ({error})"
        raise ValueError(f"{path} is not a result file: {where} {what}.") from None
    return content


def merge(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Result files of one kind, device and set of versions as one. If several files have a case, the last one counts.

    Floors stay those of the run that a row comes from, and every run keeps its date, command and ceilings in "runs".
    Raises ValueError for files that do not belong together.
    """
    first = contents[0]
    for content in contents[1:]:
        for what in ("device", "packages"):
            if content["environment"][what] != first["environment"][what]:
                raise ValueError(f"merge: the files differ in {what}; only runs of one environment make one record.")
        if content["kind"] != first["kind"]:
            raise ValueError(f"merge: the files must be of one kind, got {first['kind']!r} and {content['kind']!r}.")
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    runs: list[dict[str, Any]] = []
    for content in contents:
        mine: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in content["rows"]:
            date, how = find_origin(content, row) or (NOT_RECORDED, NOT_RECORDED)
            mine.setdefault(case_of(row), []).append({**row, "date": date, "command": how})
        cases |= mine
        own = {key: content[key] for key in ("date", "command", "ceilings") if key in content}
        runs += [run for run in content.get("runs", [own]) if run not in runs]
    rows = [row for members in cases.values() for row in members]
    return {**contents[-1], **{k: first[k] for k in ("ceilings",) if k in first}, "runs": runs, "rows": rows}


def take(content: dict[str, Any], other: dict[str, Any], implementation: str) -> dict[str, Any]:
    """Replace one implementation's failed rows by its rows of another run on the same device.

    Such a row has Tigon's milliseconds in that run under "beside", and that run's floor.
    Raises ValueError for files that do not belong together.
    """
    together = merge([content, other])
    ours = {case_of(row): row["total_ms"] for row in other["rows"] if row["implementation"] == "tigon"}
    rows = [row for row in other["rows"] if row["implementation"] == implementation and row["status"] != "failed"]
    found = {case_of(row): {**row, "beside": {"tigon": ours.get(case_of(row))}} for row in rows}
    taken = [
        found[case_of(row)] if row["implementation"] == implementation and case_of(row) in found else row
        for row in content["rows"]
    ]
    return {**content, "runs": together["runs"], "rows": taken}


_CASE_KEYS = (
    "op", "shape", "dtype", "draw", "model", "batch", "seq", "checkpointing", "gpus", "rank", "quantized", "measure",
    "masked", "accumulation",
    "items", "queries", "k", "filters", "share", "vectors", "workers", "clients", "form", "asked",
)  # fmt: skip


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The fields that the rows of one case have in common."""
    return tuple(tuple(row[k]) if k == "shape" else row[k] for k in _CASE_KEYS if k in row)


# ------------------------------------------------------------------------------------------------------------- cells


def cells(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table, without the columns that are empty in every row."""
    columns = COLUMNS.get(content["kind"]) or _as_it_is(content["rows"])
    plain = {case_of(row): row for row in content["rows"] if row.get("side") in PLAIN and row["status"] == "ok"}
    beside = [
        {**row, "plain": plain.get(case_of(row))} if row.get("side") not in (*PLAIN, "floor") else row
        for row in content["rows"]
    ]
    rows = [[column(row) for column in columns.values()] for row in beside]
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", "–") for row in rows)]
    return [list(columns)[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _as_it_is(rows: Sequence[dict[str, Any]]) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Columns of an unknown kind: the fields that hold a number or a word in any row, without its provenance."""
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (str, int, float)))
    keys = {key: None for key in keys if key not in ("date", "command")}

    def column(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: "–" if row.get(key) is None else str(row[key])

    return {key: column(key) for key in keys}


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
    versions = {
        k: v
        for k, v in env["packages"].items()
        if v and k in ("torch", "triton", "transformers", "liger-kernel", "quack-kernels")
    }
    parts += [f"{k} {v}" for k, v in versions.items()]
    return ", ".join([*parts, content["date"][:10]])


# ----------------------------------------------------------------------------------------------------------- formats


def to_text(content: dict[str, Any]) -> str:
    header, rows = cells(content)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)] if rows else [len(h) for h in header]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if name in TEXT_COLUMNS else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([headline(content), line(header), *(line(row) for row in rows), *content.get("notes", ())])


def to_rich(content: dict[str, Any]) -> Any:
    """One table per case with remarks below, narrow enough for 80 columns without losing a digit."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    header, rows = cells(content)
    cases: dict[str, list[tuple[list[str], dict[str, Any]]]] = {}
    for row, data in zip(rows, content["rows"], strict=True):
        title = "  ".join(cell for name, cell in zip(header, row, strict=True) if name in CASE_COLUMNS)
        cases.setdefault(title, []).append((row, data))
    parts: list[Any] = [Text(headline(content), style="dim")]
    for title, members in cases.items():
        table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        kept = [i for i, name in enumerate(header) if name not in (*CASE_COLUMNS, "remark")]
        kept = [i for i in kept if any(row[i] != "–" for row, _ in members)]
        for name in (header[i] for i in kept):
            left = name in TEXT_COLUMNS
            table.add_column(name, justify="left" if left else "right", no_wrap=True, min_width=13 if left else 6)
        for row, data in members:
            ours = data.get("implementation", data.get("side", "")).startswith("tigon")
            style = {"wrong": "red", "failed": "dim"}.get(data["status"], "bold" if ours else "")
            table.add_row(*(Text(row[i]) for i in kept), style=style)
        remarks = [f"  {row[header.index('by')]}: {remark(data)}" for row, data in members if remark(data)]
        parts += ["", table, *(Text(remark, style="dim") for remark in remarks)]
    if content.get("notes"):
        parts += ["", *map(Text, content["notes"])]
    return Group(*parts)


def to_markdown(content: dict[str, Any]) -> str:
    return f"{source(content)}\n\n{to_table(content)}\n"


def source(content: dict[str, Any]) -> str:
    """The origin of a table: hardware, ceilings, versions and command, in Markdown."""
    return f"{headline(content)}. `{content['command']}`" + "".join(f" {line}" for line in provenance(content))


def provenance(content: dict[str, Any]) -> list[str]:
    """A sentence for each run that the rows name, except the run that wrote the file."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in content["rows"]:
        if "date" in row and (row["date"], row["command"]) != (content["date"], content["command"]):
            named = " ".join(f"{row[k]}" for k in ("op", "model", "seq", "side", "implementation") if k in row)
            found.setdefault((row["date"], row["command"]), []).append(named)
    lines = []
    for (date, how), rows in sorted(found.items()):
        some = ", ".join(rows) if len(rows) < 5 else f"{len(rows)} rows"
        where = f"on {date[:10]} by `{how}`"
        if NOT_RECORDED in (date, how):
            where = "in earlier runs, whose dates and commands were not recorded"
        lines.append(f"{some}: measured {where}.")
    return lines


def to_table(content: dict[str, Any]) -> str:
    header, rows = cells(content)
    align = [":--" if name in TEXT_COLUMNS else "--:" for name in header]
    lines = [header, align, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m tigon.bench.report", description="Show result files of tigon bench."
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of text")
    options = parser.parse_args(arguments)
    for path in options.files:
        try:
            content = load(path)
        except (OSError, ValueError) as error:
            print(f"report: {error}", file=sys.stderr)
            return 2
        print(to_markdown(content) if options.markdown else to_text(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
