"""Results of `tigon bench` as one HTML page that needs no other file: charts as SVG, tables, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from tigon.bench import plots, report, verdicts
from tigon.bench.cases import KINDS
from tigon.bench.columns import TEXT_COLUMNS
from tigon.bench.matrix import LEFT, MATRICES, Cells, matrix

# The titles of the page's parts, in their order; a kind that is missing here comes last, under its own name.
TITLES = {
    "model": "Whole models",
    "sequence": "Memory over the length of a sequence",
    "ops": "Operators and losses",
    "sweep": "Drawn cases",
    "architecture": "Architectures",
    "host": "Host time",
    "counters": "Hardware counters",
    "hpz": "Hierarchical partitioning",
    "serve": "Searches over HTTP",
}
READING = {
    "model": "One training step. Tokens/s and peak memory of the device, and what they are more or less than Hugging "
    "Face's; floor: the step's matrix products, attention and optimizer alone.",
    "sequence": "Peak memory of one training step of one sequence.",
    "ops": "Forward + backward in milliseconds, and as a multiple of the floor: the least time that this device could "
    "take, measured in the same run.",
    "sweep": "Forward + backward of cases drawn from the ranges of real models, beside the best of the others.",
    "architecture": "Forward + backward, plain and fused, and how far loss and gradients are from those in fp32.",
    "host": "Microseconds of the host per call, on tiny inputs.",
    "counters": "Of single kernels, beside the bytes that the operator has to move.",
    "hpz": "A training step beside plain FSDP2's, and what a GPU gets by gathers in it.",
    "serve": "Searches a second of clients on the same machine, their latency, how many queries one search had, and "
    "what a search cost the processor: in the process of the index, and in its fronts together.",
}
ORDER = ("floor", "hf", "tigon", "tigon-compile", "eager", "compile", "torch", "liger", "quack", "cce")
CHART_CASES = 24  # more panels are unreadable, and take megabytes
_LEFT = {*LEFT, *TEXT_COLUMNS}

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --faint: #6a6a6a; --line: #ddd; --ours: #d9480f }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181c; --faint: #9a9a9a; --line: #34383f; --ours: #ff8a50 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem }
nav a { margin-right: 1rem } a { color: var(--ours) }
p.source, p.reading { color: var(--faint); font-size: .85rem; overflow-wrap: anywhere }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem }
figure { margin: 0 }
svg { width: 100%; height: auto; display: block }
.table { overflow-x: auto }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th { position: sticky; top: 0; background: var(--paper) }
th.left, td.left { text-align: left } td b { color: var(--ours) }
summary { cursor: pointer; margin: .5rem 0 }
"""


def page(contents: Sequence[dict[str, Any]], title: str = "Tigon benchmarks") -> str:
    """The page of one or more result files (see report.result), ordered by kind, device and date."""
    kinds = [*TITLES, *(kind for content in contents if (kind := content["kind"]) not in TITLES)]
    ordered = sorted(contents, key=lambda c: (kinds.index(c["kind"]), c["environment"]["device"], c["date"]))
    parts = [f'<section id="part-{number}">\n{_part(content)}</section>' for number, content in enumerate(ordered)]
    links = [f'<a href="#part-{number}">{escape(_title(content))}</a>' for number, content in enumerate(ordered)]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<nav>{' '.join(links)}</nav>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _title(content: dict[str, Any]) -> str:
    kind = content["kind"]
    device = content["environment"]["device"].removeprefix("NVIDIA ").removeprefix("AMD ")
    gpus = max((row.get("gpus", 1) for row in content["rows"]), default=1)
    return f"{TITLES.get(kind, kind.capitalize())}, {f'{gpus} × ' if gpus > 1 else ''}{device}"


def _part(content: dict[str, Any]) -> str:
    kind = content["kind"]
    parts = [f"<h2>{escape(_title(content))}</h2>\n"]
    if kind in READING:
        parts.append(f'<p class="reading">{READING[kind]}</p>\n')
    if kind == "sweep":
        parts += [f"<p>{escape(line)}</p>\n" for line in (verdicts.summary(content), *content.get("notes", ()))]
        parts += [f"<h3>{escape(title)}</h3>\n{_table(found)}" for title, found in verdicts.tables(content).items()]
    if kind in MATRICES:
        parts.append(_table(matrix(content, ORDER)))
    figures = [f"<figure>{plots.svg(drawn, how)}</figure>" for drawn, how in _charts(content)]
    parts += ['<div class="charts">', *figures, "</div>\n"] if figures else []
    columns = _table(report.cells(content))
    parts.append(
        f"<details><summary>All columns</summary>{columns}</details>\n" if kind in (*MATRICES, "sweep") else columns
    )
    source, command = escape(report.headline(content)), escape(content["command"])
    parts.append(f'<p class="source">{source}<br><code>{command}</code></p>\n')
    return "".join(parts)


def _charts(content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """The contents to draw for a result, each with the kind of chart."""
    kind, rows = content["kind"], content["rows"]
    if kind == "ops":
        losses = {op.name for op in KINDS["Losses of a linear head"]}
        for op in dict.fromkeys(row["op"] for row in rows):
            measured = [row for row in rows if row["op"] == op and row["status"] == "ok" and row["times_floor"]]
            cases = dict.fromkeys(map(report.case_of, measured))
            if cases:
                first = list(cases)[:CHART_CASES]
                yield {**content, "rows": [row for row in measured if report.case_of(row) in first]}, None
            if op in losses and (lengths := plots.over_tokens([row for row in rows if row["op"] == op])):
                yield {**content, "rows": lengths}, "memory"
    elif kind in plots.KINDS and any(row["status"] == "ok" for row in rows):
        yield content, None
        if kind == "model" and plots.has_profile(content):
            yield content, "profile"


def _table(cells: Cells) -> str:
    header, rows = cells
    left = [' class="left"' if name in _LEFT else "" for name in header]
    lines = ["".join(f"<th{side}>{escape(name)}</th>" for side, name in zip(left, header, strict=True))]
    for row in rows:
        lines.append("".join(f"<td{side}>{_bold(cell)}</td>" for side, cell in zip(left, row, strict=True)))
    head, *body = (f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><thead>{head}</thead><tbody>\n' + "\n".join(body) + "</tbody></table></div>\n"


def _bold(cell: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(cell))
