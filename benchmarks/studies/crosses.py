"""The study of crosses as a table: AUC without them, with those that persistence finds, and with as many at random.

benchmarks/rank_crosses.py records the rows.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness import report

from studies.rows import columns, markdown

WITHOUT, FOUND, DRAWN = "without", "found", "drawn at random"
NAMES = {"lirank": "LiRank", "linear": "linear"}

report.COLUMNS["rank-crosses"] = columns("data", "seed")

Rows = list[dict[str, Any]]


def of(rows: Rows, data: str, model: str, method: str) -> Rows:
    """Rows that differ by their seed alone, in its order."""
    found = [r for r in rows if (r["data"], r["setting"]["model"], r["method"]) == (data, model, method)]
    return sorted(found, key=lambda row: row["seed"])


def ahead(rows: Rows, data: str, model: str, method: str) -> list[float]:
    """Of each seed how much more AUC crosses have than none."""
    plain = {row["seed"]: row["measures"]["auc"] for row in of(rows, data, model, WITHOUT)}
    return [row["measures"]["auc"] - plain[row["seed"]] for row in of(rows, data, model, method)]


def _spread(values: list[float], sign: str = "") -> str:
    said = f"{fmean(values):{sign}.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")
    return said.replace("-", "−")


def quality(rows: Rows) -> str:
    """A line for each set, model and method; differences are of the same seeds."""
    lines = []
    for data in dict.fromkeys(row["data"] for row in rows):
        for model in NAMES:
            for method in (WITHOUT, FOUND, DRAWN):
                some = of(rows, data, model, method)
                if not some:
                    continue
                more = "" if method == WITHOUT else _spread(ahead(rows, data, model, method), "+")
                lines.append([
                    data, NAMES[model], method, str(len(some[0]["setting"]["crosses"]) or ""), str(len(some)),
                    _spread([row["measures"]["auc"] for row in some]), more,
                    f"{fmean(row['setting']['parameters'] for row in some) / 1e6:.2f} M",
                    f"{fmean(row['seconds'] for row in some):.0f}",
                ])  # fmt: skip
    header = ["data", "model", "crosses", "pairs", "seeds", "AUC", "ahead", "parameters", "seconds a fit"]
    return markdown(header, lines, 3)


def pairs(rows: Rows, data: str, model: str = "lirank") -> list[str]:
    """The crosses that were found, those of most seeds first."""
    counts = Counter(one for row in of(rows, data, model, FOUND) for one in row["setting"]["crosses"])
    return [one for one, _ in counts.most_common()]


def page(folder: Path, what: str) -> str:
    """Markdown of the result files in a folder, or their sources."""
    contents = [report.load(path) for path in sorted(folder.glob("*-rank-crosses.json"))]
    made = report.source if what == "source" else lambda content: quality(content["rows"])
    return "\n\n".join(map(made, contents)) or "No run has been recorded yet."
