"""One GPU in short, for the documentation: the quoted cases beside Liger, the best of the others and the floor.

In which cases Tigon is first, and which of them wait for the host, is told as in a sweep (`tigon.bench.verdicts`). What
the record lacks is said as well, so that no figure stands for a case that nobody measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models

from tigon.bench import report
from tigon.bench.cases import OPS
from tigon.bench.columns import number, shape_of
from tigon.bench.matrix import CAPTION, By, Cells, cases_of, leaders, ops_cell, to_markdown, to_matrix
from tigon.bench.verdicts import WORDS, Verdict, count, device_of, host_limits, memory_of, verdict_of
from tigon.install import REPOSITORY

SIDES = ("floor", "hf", "liger", "tigon")
Of = Callable[[By], Verdict | None]


def page(results: Path, name: str) -> str:
    """Tables and sentences of the files of a GPU: NAME-memory, -matmul, -models and -odd-shapes.json."""
    paths = {what: results / f"{name}-{what}.json" for what in ("matmul", "memory", "models", "odd-shapes")}
    found = {what: report.load(path) for what, path in paths.items() if path.exists()}
    quoted = [by for what in ("matmul", "memory") if what in found for by in quoted_of(found[what]["rows"])]
    parts = [f"{to_markdown(operators(quoted))}\n{CAPTION}", summary(quoted)]
    for title, cells in (("Not first in time", not_first(quoted)), ("Not least in memory", not_least(quoted))):
        parts += [f"{title}:\n\n{to_markdown(cells)}"] if cells[1] else []
    if "models" in found:
        parts.append(f"Tokens/s and peak memory of whole models:\n\n{to_matrix(found['models'], SIDES)}\n{CAPTION}")
    if "odd-shapes" in found:
        odd = cases_of(found["odd-shapes"]["rows"], "implementation")
        parts.append(f"Shapes that no tile was tuned on:\n\n{to_markdown(operators(odd, every=True))}\n{CAPTION}")
    parts.append(missing(quoted, found.get("models", {"rows": []})["rows"]))
    return (
        "\n\n".join([*filter(None, parts), *(source(paths[what], content) for what, content in found.items())]) + "\n"
    )


def quoted_of(rows: Sequence[dict[str, Any]]) -> list[By]:
    """The cases that quoted tables have, those in bf16 on an operator's own shapes, in the order of the table."""
    rows = [row for row in rows if row["dtype"] == "bfloat16"]
    known = {(row["op"], tuple(row["shape"])): by for by in cases_of(rows, "implementation") for row in by.values()}
    return [known[case] for case in _quoted() if case in known]


def _quoted() -> list[tuple[str, tuple[int, ...]]]:
    return [(op.name, shape) for op in OPS.values() for shape in op.shapes]


def operators(quoted: Sequence[By], every: bool = False) -> Cells:
    """Milliseconds (× floor): of each operator that memory bounds the first shape, of the others every shape.

    every: every shape of all operators.
    """
    lines, seen = [], set()
    for by in quoted:
        row = next(iter(by.values()))
        if not every and OPS[row["op"]].flops is None and row["op"] in seen:
            continue
        seen.add(row["op"])
        others = {who: one for who, one in by.items() if who.split("-")[0] not in ("tigon", "liger") and _right(one)}
        best = min(others, key=lambda who: others[who]["total_ms"], default="")
        fastest, _ = leaders({who: by[who] for who in ("tigon", "liger", best) if who in by})
        floor = next((one["floor_ms"] for one in by.values() if one["floor_ms"] is not None), None)
        cells = [ops_cell(by.get(who), who == fastest) for who in ("tigon", "liger", best)]
        lines.append([row["op"], shape_of(row), number(floor), *cells[:2], f"{best} {cells[2]}".strip()])
    return ["op", "shape", "floor ms", "Tigon", "Liger", "best of the others"], lines


def _right(row: dict[str, Any]) -> bool:
    return row["status"] == "ok" and row["total_ms"] is not None


# ------------------------------------------------------------------------------------------------------------ verdicts


def summary(quoted: Sequence[By]) -> str:
    """In how many cases Tigon is first: as called, on the device alone, and in memory."""
    openings: tuple[tuple[str, Of], ...] = (
        (f"Of {len(quoted)} cases Tigon is first in", verdict_of),
        ("On the device alone, without the host's time, it is first in", device_of),
        ("It needs the least memory in", memory_of),
    )
    said = []
    for opening, of in openings:
        words = count([one for by in quoted if (one := of(by)) is not None])
        said.append(
            ", ".join([f"{opening} {words['first']}", *(f"{w} in {words[w]}" for w in WORDS[1:] if words[w])]) + "."
        )
    return " ".join(said)


def not_first(quoted: Sequence[By]) -> Cells:
    """The cases in which Tigon ties or is behind as called, the worst first, and what the device alone says."""
    found = [(one, device_of(by)) for by in quoted if (one := verdict_of(by)).word != "first" and one.peer]
    lines = []
    for one, device in sorted(found, key=lambda pair: -pair[0].more):
        limit = "host" if host_limits(one.row) else "device"
        alone = f"{device.word}, {number(device.ours)} to {number(device.theirs)}" if device and device.peer else "–"
        times = [number(one.ours), number(one.theirs), one.peer, _word(one), limit, alone]
        lines.append([one.row["op"], shape_of(one.row), *times])
    return ["op", "shape", "Tigon ms", "best ms", "by", "Tigon is", "limit", "on the device"], lines


def _word(one: Verdict) -> str:
    return f"{100 * one.more:+.1f} %" if one.word == "behind" else one.word


def not_least(quoted: Sequence[By]) -> Cells:
    found = [one for by in quoted if (one := memory_of(by)) is not None and one.word == "behind"]
    lines = [
        [one.row["op"], shape_of(one.row), f"{one.ours:,.0f}", f"{one.theirs:,.0f}", one.peer]
        for one in sorted(found, key=lambda one: -one.more)
    ]
    return ["op", "shape", "Tigon MiB", "least MiB", "by"], lines


# -------------------------------------------------------------------------------------------------- what is not there


def missing(quoted: Sequence[By], rows: Sequence[dict[str, Any]]) -> str:
    """A sentence with the quoted cases and the sides of models that the record lacks; "" if it lacks none."""
    there = {(row["op"], tuple(row["shape"])) for by in quoted for row in by.values()}
    absent: dict[str, list[str]] = {}
    for op, shape in _quoted():
        if (op, shape) not in there:
            absent.setdefault(op, []).append("×".join(map(str, shape)))
    words = [f"`{op}`" + (f" of {' and '.join(shapes)}" if len(shapes) < len(OPS[op].shapes) else "")
             for op, shapes in absent.items()]  # fmt: skip
    ran = {(row["model"], row["batch"], row["seq"], row["checkpointing"], row["side"]) for row in rows}
    for case in models.CASES:
        known = case.model, case.batch, case.seq, case.checkpointing
        left = [side for side in SIDES if (*known, side) not in ran]
        words += [f"{case.name}" + (f" ({', '.join(left)})" if len(left) < len(SIDES) else "")] if left else []
    return f"Not measured on this GPU so far: {', '.join(words)}." if words else ""


def source(path: Path, content: dict[str, Any]) -> str:
    """The machine, and the file, which has the dates and commands of its runs."""
    return f"{report.headline(content)}; [{path.name}]({REPOSITORY}/blob/main/benchmarks/results/{path.name})."
