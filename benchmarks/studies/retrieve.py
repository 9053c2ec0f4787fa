"""What retrieval does on real data: filters, items that no one has had, links, and training, as tables.

benchmarks/retrieve.py and benchmarks/two_towers.py record the rows. Where a method has settings, the one is shown that
its validation says, by the mean over the seeds. What stands in the tables is measured on other pairs, the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness import report

from studies.rows import columns

MOVIELENS = "MovieLens 100K"
WAYS = ("where", "top 1000", "top 100")


@dataclass
class Row:
    """One method, setting and seed.

    part: filters, cold, links or towers. measures: of the test. validation: what the setting was chosen by; of links
    the tried values, each with its measure. edges: of links, the strongest.
    """

    part: str
    data: str
    seed: int
    method: str
    setting: dict[str, Any]
    measures: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    edges: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


report.COLUMNS["retrieve-study"] = columns("part", "data", "seed")


Rows = list[dict[str, Any]]


def groups(rows: Iterable[dict[str, Any]], part: str, data: str | None = None) -> dict[tuple[str, ...], Rows]:
    """Rows of a part that differ by their seed alone, by method and setting."""
    found: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        if row["part"] == part and data in (None, row["data"]):
            # What a seed has chosen, and found, does not tell methods apart.
            setting = () if part == "links" else tuple(str(value) for value in row["setting"].values())
            found.setdefault((row["method"], *setting), []).append(row)
    return found


def mean(rows: Rows, measure: str) -> float:
    return fmean(row["measures"][measure] for row in rows)


def spread(rows: Rows, measure: str, digits: int = 3) -> str:
    """Mean ± standard deviation over the seeds; a dash where it was not measured."""
    values = [row["measures"][measure] for row in rows if measure in row["measures"]]
    if not values:
        return "–"
    return f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _table(header: list[str], lines: Iterable[list[str]], left: int = 1) -> str:
    align = [":--"] * left + ["--:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, align, *lines))


def filters(rows: Rows) -> str:
    """A line for each filter, of all data."""
    lines = []
    named = len({row["data"] for row in rows if row["part"] == "filters"}) > 1
    for data in dict.fromkeys(row["data"] for row in rows if row["part"] == "filters"):
        found = groups(rows, "filters", data)
        for attribute, share in dict.fromkeys(key[1:] for key in found):
            by = {way: found[way, attribute, share] for way in WAYS}
            lines.append([
                f"{data}, {attribute}" if named else attribute, f"{100 * mean(by['where'], 'passing'):.1f} %",
                *(spread(by[way], "recall") for way in WAYS),
                *(f"{100 * mean(by[way], 'of exact'):.0f} %" for way in WAYS[1:]),
            ])  # fmt: skip
    header = ["filter", "pass", "Recall@20, `where`", *(f"best {way[4:]}, filtered" for way in WAYS[1:])]
    return _table([*header, *(f"of the exact 20, best {way[4:]}" for way in WAYS[1:])], lines)


def chosen(rows: Rows) -> tuple[str, ...]:
    """The clusters, by size and dropout, whose validation films are found best, on average."""
    found = {key: some for key, some in groups(rows, "cold").items() if key[0] == "clusters"}
    return max(found, key=lambda key: fmean(row["validation"]["new"] for row in found[key]))


def cold(rows: Rows, every: bool = False) -> str:
    """A line for each method, clusters at what was chosen; or for every setting of the clusters."""
    best = chosen(rows)
    lines = []
    for key, some in groups(rows, "cold").items():
        name, *setting = key
        if (name == "clusters") == every or key == best:
            shown = name if not setting else f"clusters, {setting[0]} a level, dropout {setting[1]}"
            measures = ("new", "new ndcg", "warm", "mixed new", "mixed warm")
            lines.append([shown, *(spread(some, measure) for measure in measures)])
    header = ["vectors of new films", "new: Recall@20", "new: NDCG@20", "others: Recall@20"]
    return _table([*header, "one list: new", "one list: others"], lines)


LINK_ORDER = ("popularity", "links", "popularity + links", "vectors", "vectors + links")


def links(rows: Rows) -> str:
    """A line for each method."""
    found = groups(rows, "links")
    measures = ("recall", "ndcg", "auc", "auc disliked", "new recall", "new auc")
    lines = [
        [name, *(spread(found[name,], measure) for measure in measures)] for name in LINK_ORDER if (name,) in found
    ]
    header = ["by", "Recall@20", "NDCG@20", "AUC", "AUC, disliked", "new users: Recall@20", "new users: AUC"]
    return _table(header, lines)


def edges(rows: Rows) -> str:
    """The strongest edges of the first seed."""
    first = min((row for row in rows if row["part"] == "links" and row["edges"]), key=lambda row: row["seed"])
    lines = []
    for edge in first["edges"]:
        a, b = (f"{edge[f'{side}_column']} = {edge[f'{side}_value']}" for side in ("query", "item"))
        lines.append([a, b, f"{edge['weight']:+.2f}".replace("-", "−")])
    return _table(["of a user", "of a film", "weight"], lines, 2)


def towers(rows: Rows) -> str:
    """A line for each side. Epochs and seconds are those of a fit on all training pairs."""
    lines = []
    for name, some in sides(rows).items():
        epochs = {row["setting"]["epochs"] for row in some}
        measures = [spread(some, measure, 4) for measure in ("recall@20", "ndcg@20")]
        coverage = f"{100 * mean(some, 'coverage@20'):.0f} %"
        seconds = f"{fmean(row['seconds'] for row in some):.1f}"
        lines.append([name, *measures, coverage, ", ".join(map(str, sorted(epochs))), seconds])
    return _table(["by", "Recall@20", "NDCG@20", "items shown to someone", "epochs", "seconds"], lines)


def sides(rows: Iterable[dict[str, Any]]) -> dict[str, Rows]:
    """The rows of a training by side."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


PARTS: dict[str, Callable[[Rows], str]] = {"filters": filters, "cold": cold, "links": links}


def tables(rows: Rows) -> str:
    """Markdown of all parts that there are rows of."""
    parts = [make(rows) for part, make in PARTS.items() if any(row["part"] == part for row in rows)]
    return "\n\n".join(parts)


def page(folder: Path, what: str) -> str:
    """Markdown of one part of the result files in a folder: filters, cold, every, links, edges, towers or a source."""
    makers: dict[str, Callable[[Rows], str]] = {
        **PARTS, "every": lambda rows: cold(rows, every=True), "edges": edges, "towers": towers,
    }  # fmt: skip
    part = {"every": "cold", "edges": "links"}.get(what, what)
    run = "towers" if what.startswith("towers") else "study"
    parts = []
    for path in sorted(folder.glob(f"*-retrieve-{run}.json")):
        content = report.load(path)
        if what.endswith("source"):
            parts.append(report.source(content))
        elif any(row["part"] == part for row in content["rows"]):
            parts.append(makers[what](content["rows"]))
    return "\n\n".join(parts) or "No run has been recorded yet."
