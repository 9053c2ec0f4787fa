"""What prompt rankers are worth, and what shared prefixes save: tables of what benchmarks/rank_prompts.py records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness import report

from studies.retrieve import Rows, _table, mean, sides, spread
from studies.rows import columns


@dataclass
class Row:
    """One fit, or one timing.

    part: films, garments, rates, speed or steps. measures: of the test; of timings milliseconds and counts.
    validation: what a setting was chosen by. seconds: of the fit, beside other processes of the study.
    """

    part: str
    seed: int
    method: str
    setting: dict[str, Any]
    measures: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


report.COLUMNS["rank-prompts"] = columns("part", "seed")

# The order of the tables; what was not run is left out.
FILMS = (
    "zero-shot", "separate", "shared", "shared, garments too", "shared, all requests", "LiGR, as many requests",
    "LiGR, all requests", "student alone", "student taught",
)  # fmt: skip
TEACHER = "shared, all requests"
# Times as many candidates a second as separate sequences have, at least; percent of the teacher's AUC, at most.
ASKED, LOST = {"scoring": 10, "training": 8}, 0.5
GARMENTS = ("zero-shot", "garments alone", "films too")
GROUPS = ("", " known members", " new members", " known films", " new films")


def quality(rows: Rows) -> str:
    """A line for each way to rank the films."""
    found = sides(row for row in rows if row["part"] == "films")
    lines = []
    for name in FILMS:
        if some := found.get(name, []):
            measures = [spread(some, f"auc{group}") for group in GROUPS]
            seconds = f"{fmean(row['seconds'] for row in some):.0f}" if any(row["seconds"] for row in some) else "–"
            requests = f"{some[0]['setting']['requests']:,}"
            lines.append([name, requests, *measures, spread(some, "ndcg@10"), spread(some, "log loss"), seconds])
    header = ["by", "requests", "AUC", "known members", "new members", "known films", "new films"]
    return _table([*header, "NDCG@10", "log loss", "seconds"], lines)


def garments(rows: Rows) -> str:
    """A line for each model that was asked about garments."""
    found = sides(row for row in rows if row["part"] == "garments")
    lines = [
        [name, *(spread(found[name], measure) for measure in ("auc", "ndcg@10", "log loss"))]
        for name in GARMENTS
        if name in found
    ]
    return _table(["by", "AUC", "NDCG@10", "log loss"], lines)


def speed(rows: Rows) -> str:
    """A line for scoring and one for training, of the two timings."""
    lines = []
    for row in rows:
        if row["part"] in ("speed", "steps"):
            m = row["measures"]
            lines.append([
                row["method"], row["setting"]["shape"], f"{m['separate tokens']:,.0f}", f"{m['shared tokens']:,.0f}",
                f"{m['separate ms']:,.1f} ms", f"{m['shared ms']:,.1f} ms",
                f"{m['separate ms'] / m['shared ms']:.1f} ×",
            ])  # fmt: skip
    header = ["", "model and requests", "tokens, separate", "shared", "time, separate", "shared", "faster"]
    return _table(header, lines, 2)


def apart(rows: Rows) -> list[float]:
    """AUC of shared less that of separate, by seed."""
    by = {(row["method"], row["seed"]): row["measures"]["auc"] for row in rows if row["part"] == "films"}
    both = sorted(seed for name, seed in by if name == "shared" and ("separate", seed) in by)
    return [by["shared", seed] - by["separate", seed] for seed in both]


def behind(rows: Rows, student: str = "student taught") -> float:
    """By how much of the teacher's AUC the student's is below it, of the means over the seeds."""
    found = sides(row for row in rows if row["part"] == "films")
    return 1 - mean(found[student], "auc") / mean(found[TEACHER], "auc")


def bars(rows: Rows) -> str:
    """What was asked for before anything was measured, and what was found."""
    lines: list[list[str]] = []

    def line(what: str, asked: str, found: str, met: bool) -> None:
        lines.append([what, asked, found.replace("-", "−"), "met" if met else "missed"])

    for row in rows:
        if row["part"] == "speed":
            asked, times = ASKED[row["method"]], row["measures"]["separate ms"] / row["measures"]["shared ms"]
            line(f"{row['method']}, candidates a second", f"{asked} ×", f"{times:.1f} ×", times >= asked)
    by = sides(row for row in rows if row["part"] == "films")
    if differences := apart(rows):
        aucs = [[row["measures"]["auc"] for row in by[way]] for way in ("shared", "separate")]
        allowed = max(map(stdev, aucs)) if len(differences) > 1 else 0.0
        off = abs(fmean(differences))
        line("AUC of shared and separate apart", f"the seeds' {allowed:.4f}", f"{off:.4f}", off <= allowed)
    if "student taught" in by and TEACHER in by:
        lost = 100 * behind(rows)
        line("AUC that the student lost to its teacher", f"{LOST} %", f"{lost:.2f} %", lost <= LOST)
    return _table(["", "asked for", "found", ""], lines)


PARTS: dict[str, Callable[[Rows], str]] = {"bars": bars, "films": quality, "garments": garments, "speed": speed}


def tables(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown of all parts that there are rows of."""
    listed = list(rows)
    parts = {row["part"] for row in listed}
    return "\n\n".join(make(listed) for part, make in PARTS.items() if part in parts or (part == "bars" and parts))


def page(folder: Path, what: str) -> str:
    """Markdown of one part of the result files in a folder: bars, films, garments, speed or source."""
    parts = []
    for path in sorted(folder.glob("*-rank-prompts.json")):
        content = report.load(path)
        parts.append(report.source(content) if what == "source" else PARTS[what](content["rows"]))
    return "\n\n".join(parts) or "No run has been recorded yet."
