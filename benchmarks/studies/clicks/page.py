"""The study of clicks as tables: AUC beside the peers', what the attention adds, calibration, int8, and a step.

Rows are of quality, calibration, int8 or speed. setting["of"] names the method whose scores those of calibration and
int8 are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness import report

from studies.rows import columns, markdown

NAMES = {
    "lirank-residual": "**LiRank, residual**", "lirank-dcn": "LiRank, DCN, low rank",
    "lirank-dcn-full": "LiRank, DCN, full", "lirank-none": "LiRank, no cross layers",
    "lirank-residual-gate": "LiRank, residual, gates", "lirank-dcn-gate": "LiRank, DCN, low rank, gates",
    "fuxictr-dcnv2": "FuxiCTR DCN-V2", "fuxictr-finalmlp": "FuxiCTR FinalMLP", "fuxictr-finalnet": "FuxiCTR FinalNet",
    "lightgbm": "LightGBM",
}  # fmt: skip
# What is compared: the first with the second, by AUC.
PAIRS = (
    ("lirank-residual", "fuxictr-dcnv2"), ("lirank-residual", "lirank-dcn"), ("lirank-residual", "lirank-dcn-full"),
    ("lirank-residual-gate", "lirank-residual"), ("lirank-residual", "lightgbm"),
)  # fmt: skip


# Of the sentences on the attention.
LEVEL = 0.05


report.COLUMNS["rank-clicks"] = columns("part", "data", "seed")

Rows = list[dict[str, Any]]


def grouped(rows: Rows, part: str) -> dict[tuple[str, str, str], Rows]:
    """Rows of a part that differ by their seed alone, by data, method, and whose scores they are of."""
    found: dict[tuple[str, str, str], Rows] = {}
    for row in rows:
        if row["part"] == part:
            found.setdefault((row["data"], row["method"], row["setting"].get("of", "")), []).append(row)
    return found


def values(rows: Rows, measure: str) -> list[float]:
    return [row["measures"][measure] for row in rows]


def spread(rows: Rows, measure: str, digits: int = 4) -> str:
    """Mean ± standard deviation over the seeds."""
    found = values(rows, measure)
    return f"{fmean(found):.{digits}f}" + (f" ± {stdev(found):.{digits}f}" if len(found) > 1 else "")


def p_value(a: list[float], b: list[float]) -> float:
    """Two-sided, of the difference of means: the share of all ways to deal the values that differ as much or more."""
    pool, many = [*a, *b], len(a)
    total, seen = sum(pool), abs(fmean(a) - fmean(b))
    found = [
        abs(sum(some) / many - (total - sum(some)) / len(b)) >= seen - 1e-12 for some in combinations(pool, many)
    ]  # fmt: skip
    return sum(found) / len(found)


def quality(rows: Rows) -> str:
    lines = []
    for (data, method, _), some in grouped(rows, "quality").items():
        parameters = some[0]["setting"]["parameters"]
        lines.append([
            data, NAMES.get(method, method), str(len(some)), spread(some, "auc"), spread(some, "log_loss"),
            spread(some, "ece"), f"{parameters / 1e6:.2f} M" if parameters else "–",
            f"{fmean(row['seconds'] for row in some):.1f}",
        ])  # fmt: skip
    return markdown(["data", "by", "seeds", "AUC", "log loss", "ECE", "parameters", "seconds a fit"], lines, 2)


def differences(rows: Rows) -> str:
    found = grouped(rows, "quality")
    lines = []
    for data in dict.fromkeys(key[0] for key in found):
        for first, second in PAIRS:
            a, b = (values(found.get((data, method, ""), []), "auc") for method in (first, second))
            if a and b:
                p = f"{p_value(a, b):.3f}" if min(len(a), len(b)) > 1 else "–"
                away = f"{1e4 * (fmean(a) - fmean(b)):+.1f}".replace("-", "−")
                lines.append([data, f"{NAMES[first].strip('*')} − {NAMES[second].strip('*')}", away, p])
    return markdown(["data", "AUC of", "difference, 10⁻⁴", "p"], lines, 2)


def verdict(rows: Rows) -> str:
    """Whether the attention pays, in sentences: beside the same network without it, and beside FuxiCTR's DCN-V2."""
    found, said = grouped(rows, "quality"), []
    for other, name in (("lirank-dcn", "the same network without it"), ("fuxictr-dcnv2", "FuxiCTR's DCN-V2")):
        above, below, both = [], [], []
        for data in dict.fromkeys(key[0] for key in found):
            a, b = (values(found.get((data, method, ""), []), "auc") for method in ("lirank-residual", other))
            if min(len(a), len(b)) < 2:
                continue
            both.append(data)
            if p_value(a, b) < LEVEL:
                (above if fmean(a) > fmean(b) else below).append(data)
        if not both:
            continue
        said.append(
            f"Beside {name}, the attention's AUC is significantly higher (p < {LEVEL}) on {_listed(above)} and "
            f"significantly lower on {_listed(below)}, of {_listed(both)}."
        )
        if other == "lirank-dcn" and len(above) <= len(below):
            said.append("**On tables of this size the attention does not pay.**")
    return " ".join(said)


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def calibration(rows: Rows) -> str:
    lines = [
        [data, NAMES.get(of, of).strip("*"), name, spread(some, "ece"), spread(some, "log_loss")]
        for (data, name, of), some in grouped(rows, "calibration").items()
    ]
    return markdown(["data", "scores of", "calibrated by", "ECE", "log loss"], lines, 3)


def int8(rows: Rows) -> str:
    found, lines = grouped(rows, "int8"), []
    for (data, name, of), small in found.items():
        whole = found.get((data, "fp32", of), [])
        if name != "int8" or not whole:
            continue
        before, after = (fmean(values(some, "bytes")) for some in (whole, small))
        # Of the same rankers, seed by seed.
        by_seed = {row["seed"]: row["measures"]["auc"] for row in whole}
        away = [row["measures"]["auc"] - by_seed[row["seed"]] for row in small]
        lines.append([
            data, NAMES.get(of, of).strip("*"), f"{before / 1024:,.0f} KiB", f"{after / 1024:,.0f} KiB",
            f"{100 * (after / before - 1):.0f} %".replace("-", "−"),
            f"{fmean(away):+.6f}".replace("-", "−"), f"{min(away):+.6f}".replace("-", "−"),
        ])  # fmt: skip
    return markdown(["data", "by", "tables, fp32", "int8", "size", "AUC, mean", "worst seed"], lines, 2)


def speed(rows: Rows) -> str:
    lines = []
    peer = next((r["measures"]["rows_s"] for r in rows if (r["part"], r["method"]) == ("speed", "fuxictr-dcnv2")), None)
    for row in rows:
        if row["part"] == "speed":
            m = row["measures"]
            times = f"{m['rows_s'] / peer:.2f} ×" if peer and "rows_s" in m else "–"
            own = f"{m['floors']:.2f} × {m['floor_ms']:.2f}" if "floors" in m else "–"
            lines.append([
                row["method"], f"{m['ms']:.2f}", own,
                f"{m['rows_s'] / 1e6:.2f} M" if "rows_s" in m else "–", times,
                f"{m['peak_gib']:.1f}" if "peak_gib" in m else "–",
            ])  # fmt: skip
    return markdown(["a step of", "ms", "its floor", "rows a second", "of FuxiCTR's", "peak GiB"], lines, 1)


PARTS: dict[str, Callable[[Rows], str]] = {
    "quality": quality, "differences": differences, "verdict": verdict, "calibration": calibration,
    "int8": int8, "speed": speed,
}  # fmt: skip


def table(part: str, rows: Rows) -> str:
    """Markdown of a part; "" without rows of it."""
    of = "quality" if part in ("differences", "verdict") else part
    return PARTS[part](rows) if any(row["part"] == of for row in rows) else ""


def page(folder: Path, what: str) -> str:
    """Markdown of one part of the result files in a folder, or their sources."""
    parts = []
    for path in sorted(folder.glob("*-rank-clicks.json")):
        content = report.load(path)
        parts.append(report.source(content) if what == "source" else table(what, content["rows"]))
    return "\n\n".join(filter(None, parts)) or "No run has been recorded yet."
