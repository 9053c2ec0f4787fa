"""Results as charts: bars of operators and whole models, lines of searches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from harness.columns import format_model, format_size
from harness.report import headline

# One colour per implementation in every chart: Tigon's stands out, the peers' recede.
COLOURS = {
    "tigon": "#d9480f", "tigon-weight": "#f08c3a", "tigon-compact": "#f5b97f", "tigon-compile": "#f08c3a",
    "liger": "#3b6ea5", "liger-fp32": "#7ba3cc", "compile": "#7a7a7a", "eager": "#b5b5b5", "torch": "#d0b070",
    "torch-gather": "#b58a6a", "hf": "#b5b5b5", "cce": "#6a9c78", "quack": "#8d7ab5", "floor": "#dcdcdc",
    "tigon-fp8": "#2b8a3e", "tigon-fp8 first=2": "#94c973",
}  # fmt: skip
OTHER = "#999999"
FAINT = "#555555"  # titles on a white background
# Bars of operators end at this multiple of the shortest, so that the slowest do not flatten the others.
LONGEST = 6.0
FIRST_STEPS = 60  # of a training, in a panel of their own

Row = dict[str, Any]


def plot(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a result (see report.result) of a kind in KINDS to a PNG file, without the rows that were not measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar sign in a file's name begins no formula
        figure = KINDS[content["kind"]](content, plt)
        figure.suptitle(headline(content), fontsize=11, color=FAINT)
        figure.savefig(path, bbox_inches="tight", dpi=150)
        plt.close(figure)


def _draw_bars(groups: dict[str, list[Row]], plt: Any, name: str, key: str, label: str) -> Any:
    """A panel for each group, a bar for each row."""
    columns = min(2, max(1, len(groups)))
    lines = max(1, math.ceil(len(groups) / columns))
    height = lines * (1.15 + 0.42 * max((len(rows) for rows in groups.values()), default=1))
    figure, axes = plt.subplots(lines, columns, figsize=(7.0 * columns, height), squeeze=False, layout="constrained")
    for spare in axes.flat[len(groups) :]:
        spare.set_visible(False)
    for axis, (title, rows) in zip(axes.flat, groups.items(), strict=False):
        values, names = [row[key] for row in rows], [row[name] for row in rows]
        end = LONGEST * min(values)
        bars = axis.barh(range(len(rows)), [min(v, end) for v in values], color=[COLOURS.get(n, OTHER) for n in names])
        axis.bar_label(bars, [label.format(v) + (" →" if v > end else "") for v in values], padding=3, fontsize=11)
        axis.set_yticks(range(len(rows)), names, fontsize=11)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(title, fontsize=12, loc="left")
    return figure


def _draw_operators(content: dict[str, Any], plt: Any) -> Any:
    groups: dict[str, list[Row]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["times_floor"] is not None:
            title = f"{row['op']}  {'×'.join(map(str, row['shape']))}  {row['dtype']}, multiple of the floor"
            groups.setdefault(title, []).append(row)
    return _draw_bars(groups, plt, "implementation", "times_floor", "{:.2f}×")


def _draw_models(content: dict[str, Any], plt: Any) -> Any:
    groups: dict[str, list[Row]] = {}
    for row in content["rows"]:
        for key, unit in (("tokens_per_s", "tokens/s"), ("peak_gib", "peak GiB")):
            if row["status"] == "ok" and row[key] is not None:
                title = f"{format_model(row)}  {format_size(row)}, {unit}"
                groups.setdefault(title, []).append({**row, "value": row[key]})
    return _draw_bars(groups, plt, "side", "value", "{:,.1f}")


def _draw_searches(content: dict[str, Any], plt: Any) -> Any:
    """Time over the share of the rows that pass, a panel for each number of queries, with the floor below."""
    # Single searches of an index have no floor, and searches with codes no shares.
    rows = [
        row for row in content["rows"]
        if row["status"] == "ok" and row["filters"] != "each" and row.get("p99_ms") is None
        and row.get("vectors") is None
    ]  # fmt: skip
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if row["k"] == rows[0]["k"]:
            groups.setdefault(row["queries"], []).append(row)
    size = (4.6 * max(1, len(groups)), 3.8)
    figure, axes = plt.subplots(1, max(1, len(groups)), figsize=size, squeeze=False, layout="constrained")
    for axis, (queries, rows) in zip(axes.flat, groups.items(), strict=False):
        for name in dict.fromkeys(row["implementation"] for row in rows):
            points = sorted((r["share"], r["graph_ms"] or r["ms"]) for r in rows if r["implementation"] == name)
            axis.plot(*zip(*points, strict=True), marker="o", color=COLOURS.get(name, OTHER), label=name)
        floor = sorted({(row["share"], row["floor_ms"]) for row in rows})
        axis.plot(*zip(*floor, strict=True), linestyle="--", color=plt.rcParams["text.color"], label="floor")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"{queries:,} queries, k = {rows[0]['k']}", fontsize=12, loc="left")
        axis.set_xlabel("share of the rows that pass")
        axis.set_ylabel("ms")
        axis.legend(frameon=False)
    return figure


def _draw_held_out(content: dict[str, Any], plt: Any) -> Any:
    """Losses of the steps, the mean over seeds: the first steps from random weights, all of them, and fine-tuning."""
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for row in content["rows"]:
        losses = [float(word) for word in row["losses"].split()]
        curves.setdefault(row["part"], {}).setdefault(row["side"], []).append(losses)
    panels: list[tuple[str, int | None]] = [(part, None) for part in curves]
    panels.insert(0, (panels[0][0], FIRST_STEPS))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.0 * len(panels), 3.6), squeeze=False, layout="constrained")
    for axis, (part, count) in zip(axes.flat, panels, strict=True):
        for side, seeds in curves[part].items():
            mean = [sum(losses) / len(losses) for losses in zip(*seeds, strict=True)][:count]
            axis.plot(range(1, len(mean) + 1), mean, color=COLOURS.get(side, OTHER), label=side, linewidth=1.2)
        axis.set_title(f"{part}, first {count} steps" if count else part, fontsize=12, loc="left")
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("loss")
    axes[0, 0].legend(frameon=False)
    return figure


KINDS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "ops": _draw_operators,
    "model": _draw_models,
    "search": _draw_searches,
    "held-out": _draw_held_out,
}
