"""Interactions of ten functions whose interactions are known: the functions, the rows of the record, and their table.

benchmarks/interactions.py records the rows. The functions are those of Tsang, Cheng, Liu 2018, table 1; which features
act together is read from the formulas.
"""

# ruff: noqa: RUF059 (each function names its ten features, whichever of them it reads)
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import report

Array = npt.NDArray[np.float64]
FEATURES = 10
FAST = "FAST, of trees"
MEASURES = ("auc", "top_pairs", "sets", "sets_pruned", "sets_largest")
Rows = dict[tuple[str, int], dict[str, Any]]


@dataclass
class Row:
    """One function, seed and way of reading the model that was fitted on it.

    Attributes:
        l1: the penalty of the network's weights; 0 for FAST, which reads trees.
        loss: mean square of the model's error on the held-out rows, in the variance of the function.
        measures: auc and top_pairs of all pairs, sets of whole sets of three and more, each also pruned. Of FAST those
            of pairs, and seconds.
    """

    function: str
    seed: int
    l1: float
    method: str
    power: float
    loss: float
    measures: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


report.COLUMNS["interactions"] = {
    "function": lambda r: r["function"],
    "seed": lambda r: str(r["seed"]),
    "l1": lambda r: f"{r['l1']:g}",
    "by": lambda r: name_of(r),
    "loss": lambda r: f"{r['loss']:.4f}",
    **{name: (lambda r, name=name: _cell(r["measures"].get(name))) for name in MEASURES},
}  # fmt: skip


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def name_of(row: dict[str, Any]) -> str:
    names = {"nid": "NID", "fast": FAST}
    return names.get(row["method"]) or f"persistence, q = {row['power']:g}"


# ------------------------------------------------------------------------------------------------------- the functions

exp, log, sqrt, cos, sin, tanh, arctan = np.exp, np.log, np.sqrt, np.cos, np.sin, np.tanh, np.arctan


def _f1(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    return np.pi ** (a * b) * sqrt(2 * c) - np.arcsin(d) + log(c + e) - i / j * sqrt(g / h) - b * g


def _f2(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    last = i / (1 + abs(j)) * sqrt(abs(g) / (1 + abs(h)))
    return np.pi ** (a * b) * sqrt(2 * abs(c)) - np.arcsin(d / 2) + log(abs(c + e) + 1) + last - b * g


def _f3(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    last = log(d**2 + e**2 + g**2 + h**2) + i + 1 / (1 + j**2)
    return exp(abs(a - b)) + abs(b * c) - (c**2) ** abs(d) + last


def _f4(*x: Array) -> Array:
    return _f3(*x) + (x[0] * x[3]) ** 2


def _f5(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    return 1 / (1 + a**2 + b**2 + c**2) + sqrt(exp(d + e)) + abs(f + g) + h * i * j


def _f6(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    return exp(abs(a * b) + 1) - exp(abs(c + d) + 1) + cos(e + f - h) + sqrt(h**2 + i**2 + j**2)


def _f7(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    middle = np.maximum(c * d + f, 0) - 1 / (1 + (d * e * f * g * h) ** 2) + (abs(g) / (1 + abs(i))) ** 5
    return (arctan(a) + arctan(b)) ** 2 + middle + (a + b + c + d + e + f + g + h + i + j)


def _f8(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    return a * b + 2 ** (c + e + f) + 2 ** (c + d + e + g) + sin(g * sin(h + i)) + np.arccos(0.9 * j)


def _f9(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    first = tanh(a * b + c * d) * sqrt(abs(e)) + exp(e + f)
    return first + log((f * g * h) ** 2 + 1) + i * j + 1 / (1 + abs(j))


def _f10(*x: Array) -> Array:
    a, b, c, d, e, f, g, h, i, j = x
    return np.sinh(a + b) + np.arccos(tanh(c + e + g)) + cos(d + e) + 1 / cos(g * i)


# Each function with the sets of features that it does not take apart, counted from 1.
FUNCTIONS: dict[str, tuple[Callable[..., Array], tuple[set[int], ...]]] = {
    "F1": (_f1, ({1, 2, 3}, {3, 5}, {7, 8, 9, 10}, {2, 7})),
    "F2": (_f2, ({1, 2, 3}, {3, 5}, {7, 8, 9, 10}, {2, 7})),
    "F3": (_f3, ({1, 2}, {2, 3}, {3, 4}, {4, 5, 7, 8})),
    "F4": (_f4, ({1, 2}, {2, 3}, {3, 4}, {1, 4}, {4, 5, 7, 8})),
    "F5": (_f5, ({1, 2, 3}, {4, 5}, {6, 7}, {8, 9, 10})),
    "F6": (_f6, ({1, 2}, {3, 4}, {5, 6, 8}, {8, 9, 10})),
    "F7": (_f7, ({1, 2}, {3, 4, 6}, {4, 5, 6, 7, 8}, {7, 9})),
    "F8": (_f8, ({1, 2}, {3, 5, 6}, {3, 4, 5, 7}, {7, 8, 9})),
    "F9": (_f9, ({1, 2, 3, 4, 5}, {5, 6}, {6, 7, 8}, {9, 10})),
    "F10": (_f10, ({1, 2}, {3, 5, 7}, {4, 5}, {7, 9})),
}


def true_sets(function: str) -> list[tuple[int, ...]]:
    """Sets of features that act together, counted from 0."""
    return [tuple(sorted(feature - 1 for feature in one)) for one in FUNCTIONS[function][1]]


def drawn(function: str, rows: int, seed: int) -> tuple[Array, Array]:
    """(rows, 10) features and (rows,) values. Features are uniform: of F1 between 0 and 1, four of them above 0.6, and
    of the others between −1 and 1."""
    draw = np.random.default_rng((int(function[1:]), seed))
    x = draw.uniform(0 if function == "F1" else -1, 1, (rows, FEATURES))
    if function == "F1":
        high = [3, 4, 7, 9]
        x[:, high] = 0.6 + 0.4 * x[:, high]
    return x, FUNCTIONS[function][0](*x.T)


# ----------------------------------------------------------------------------------------------------------- the table


def groups(rows: Iterable[dict[str, Any]]) -> dict[tuple[float, str], Rows]:
    """Of each penalty and way of reading its rows, by function and seed."""
    found: dict[tuple[float, str], Rows] = {}
    for row in rows:
        found.setdefault((row["l1"], name_of(row)), {})[row["function"], row["seed"]] = row
    return found


def by_seed(rows: Rows, measure: str) -> list[float]:
    """Of each seed the mean over the functions."""
    seeds = sorted({seed for _, seed in rows})
    return [fmean(row["measures"][measure] for (_, own), row in rows.items() if own == seed) for seed in seeds]


def mean(rows: Rows, measure: str, function: str | None = None) -> float:
    return fmean(row["measures"][measure] for (own, _), row in rows.items() if function in (None, own))


def ahead(one: Rows, other: Rows, measure: str) -> tuple[float, float]:
    """How far one way is ahead of another on the same networks: mean over the seeds, and its standard error."""
    differ = [a - b for a, b in zip(by_seed(one, measure), by_seed(other, measure), strict=True)]
    return fmean(differ), stdev(differ) / len(differ) ** 0.5


def best(found: dict[tuple[float, str], Rows], name: str, measure: str = "auc") -> float:
    """The penalty at which a way of reading is best, on average."""
    return max((l1 for l1, own in found if own == name), key=lambda l1: mean(found[l1, name], measure))


NAMES = ("NID", "persistence, q = 0.5", "persistence, q = 2", "persistence, q = 3")


def _table(header: list[str], lines: Iterable[list[str]]) -> str:
    align = [":--"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, align, *lines))


def functions(content: list[dict[str, Any]]) -> str:
    """The AUC of each function: NID at its best penalty, and persistence on the same networks."""
    found = groups(content)
    penalty = best(found, "NID")
    lines = []
    for key in (*((penalty, name) for name in NAMES), (0.0, FAST)):
        if key not in found:
            continue
        name, rows = key[1], found[key]
        values = [f"{mean(rows, 'auc', function):.3f}" for function in FUNCTIONS]
        lines.append([name, *values, f"{mean(rows, 'auc'):.3f} ± {stdev(by_seed(rows, 'auc')):.3f}"])
    return _table(["AUC of pairs", *FUNCTIONS, "mean"], lines)


def penalties(content: list[dict[str, Any]]) -> str:
    """A line for each penalty: losses, NID and persistence, and how far the second is ahead."""
    found = groups(content)
    lines = []
    for l1 in dict.fromkeys(l1 for l1, name in found if name != FAST):
        nid, ours = found[l1, "NID"], found[l1, "persistence, q = 2"]
        differ, error = ahead(ours, nid, "auc")
        values = [f"{mean(rows, measure):.3f}" for measure in ("auc", "top_pairs") for rows in (nid, ours)]
        loss = fmean(row["loss"] for row in nid.values())
        lines.append(
            [f"{l1:g}", f"{loss:.4f}", *values[:2], f"{differ:+.3f} ± {error:.3f}".replace("-", "−"), *values[2:]]
        )
    header = ["l1", "loss", "AUC, NID", "AUC, persistence", "ahead", "top pairs, NID", "top pairs, persistence"]
    return _table(header, lines)


def sets(content: list[dict[str, Any]]) -> str:
    """Whole sets of three features and more, each way at the penalty where it finds most."""
    found = groups(content)
    shown = {
        "sets": "as they are",
        "sets_pruned": "without parts of stronger ones",
        "sets_largest": "the largest alone",
    }
    lines = []
    for name in NAMES:
        values = []
        for measure in shown:
            rows = found[best(found, name, measure), name]
            values.append(f"{mean(rows, measure):.3f} ± {stdev(by_seed(rows, measure)):.3f}")
        lines.append([name, *values])
    return _table(["whole sets of 3 and more", *shown.values()], lines)


PARTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "functions": functions, "penalties": penalties, "sets": sets,
}  # fmt: skip


def page(folder: Path, what: str) -> str:
    """Markdown of one part of the result files in a folder: functions, penalties, sets or source."""
    contents = [report.load(path) for path in sorted(folder.glob("*-interactions.json"))]
    if what == "source":
        return " ".join(map(report.source, contents)) or "No run has been recorded yet."
    rows = [row for content in contents for row in content["rows"]]
    return PARTS[what](rows) if any(row["method"] == "nid" for row in rows) else "No run has been recorded yet."
