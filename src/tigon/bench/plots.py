"""Results of `tigon bench` as charts in one PNG: multiples of the floor, microseconds of the host, tokens/s and memory
of whole models as bars; the memory of a loss over the number of tokens as lines."""

from __future__ import annotations

import math
import os
from typing import Any

from tigon.bench.report import headline

# One colour per implementation in every chart; ours stands out, the peers recede.
COLOURS = {
    "tigon": "#d9480f",
    "tigon-weight": "#f08c3a",
    "tigon-compact": "#f5b97f",
    "liger": "#3b6ea5",
    "liger-fp32": "#7ba3cc",
    "compile": "#7a7a7a",
    "eager": "#b5b5b5",
    "torch": "#d0b070",
    "hf": "#b5b5b5",
    "cce": "#6a9c78",
    "quack": "#8d7ab5",
}
OTHER = "#999999"
# Bars of operators end at this multiple of the shortest, so that the slowest do not flatten the others.
LONGEST = 6.0


def plot(content: dict[str, Any], path: str | os.PathLike[str], kind: str | None = None) -> None:
    """Draw a result (see report.result) to a PNG file. Rows that were not measured are left out.

    kind: "memory" for the peak memory of operators instead of their time; default: what the content is.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    draw = KINDS[kind or content["kind"]]
    figure = draw(content, plt)
    figure.suptitle(headline(content), fontsize=8, color="#555555")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _panels(groups: dict[str, list[dict[str, Any]]], plt: Any, height: float = 0.32) -> tuple[Any, list[Any]]:
    columns = min(2, max(1, len(groups)))
    lines = max(1, math.ceil(len(groups) / columns))
    longest = max((len(rows) for rows in groups.values()), default=1)
    figure, axes = plt.subplots(
        lines, columns, figsize=(6.5 * columns, lines * (1.0 + height * longest)), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for spare in flat[len(groups) :]:
        spare.set_visible(False)
    return figure, flat


def _bars(
    axis: Any, rows: list[dict[str, Any]], name: str, key: str, label: str, longest: float = math.inf, by: str = ""
) -> None:
    """by: whose rows they are, where their names are not those of implementations."""
    values = [row[key] for row in rows]
    names = [row[name] for row in rows]
    end = longest * min(values)
    colours = [COLOURS.get(by or n, OTHER) for n in names]
    bars = axis.barh(range(len(rows)), [min(v, end) for v in values], color=colours)
    labels = [label.format(v) + (" →" if v > end else "") for v in values]
    axis.bar_label(bars, labels=labels, padding=3, fontsize=8)
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _operators(content: dict[str, Any], plt: Any) -> Any:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["times_floor"] is not None:
            title = f"{row['op']}  {'×'.join(map(str, row['shape']))}  {row['dtype']}"
            groups.setdefault(title, []).append(row)
    figure, axes = _panels(groups, plt)
    for axis, (title, rows) in zip(axes, groups.items(), strict=False):
        _bars(axis, rows, "implementation", "times_floor", "{:.2f}×", LONGEST)
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("forward + backward, multiple of the floor", fontsize=7)
    return figure


def tokens_of(row: dict[str, Any]) -> int:
    """Of a loss of a linear head: all numbers of its shape but width and vocabulary."""
    return math.prod(row["shape"][:-2])


def _memory(content: dict[str, Any], plt: Any) -> Any:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["peak_mib"]:
            lines.setdefault(row["implementation"], []).append((tokens_of(row), row["peak_mib"] / 1024))
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for name, points in lines.items():
        tokens, gib = zip(*sorted(points), strict=True)
        axis.plot(tokens, gib, marker="o", markersize=3, label=name, color=COLOURS.get(name, OTHER))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("tokens", fontsize=8)
    axis.set_ylabel("peak memory beyond the inputs, GiB", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    width, vocabulary = content["rows"][0]["shape"][-2:]
    axis.set_title(
        f"{content['rows'][0]['op']}, width {width}, vocabulary {vocabulary}; a line ends where it no longer ran",
        fontsize=9,
        loc="left",
    )
    return figure


def _host(content: dict[str, Any], plt: Any) -> Any:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["total_us"] is not None:
            groups.setdefault(row["op"], []).append(row)
    figure, axes = _panels(groups, plt)
    for axis, (title, rows) in zip(axes, groups.items(), strict=False):
        _bars(axis, rows, "implementation", "total_us", "{:.0f} µs")
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("host time of forward + backward, µs", fontsize=7)
    return figure


def _models(content: dict[str, Any], plt: Any) -> Any:
    panels: dict[str, tuple[list[dict[str, Any]], str, str]] = {}
    for row in content["rows"]:
        what = f"{row['model']}  {row['batch']}×{row['seq']}" + ("  checkpointing" if row["checkpointing"] else "")
        for key, unit, label in (("tokens_per_s", "tokens/s", "{:,.0f}"), ("peak_gib", "peak GiB", "{:.1f}")):
            if row["status"] == "ok" and row[key] is not None:
                panels.setdefault(f"{what}, {unit}", ([], key, label))[0].append(row)
    figure, axes = _panels({title: rows for title, (rows, _, _) in panels.items()}, plt, 0.36)
    for axis, (title, (rows, key, label)) in zip(axes, panels.items(), strict=False):
        _bars(axis, rows, "side", key, label)
        axis.set_title(title, fontsize=9, loc="left")
    return figure


def _architectures(content: dict[str, Any], plt: Any) -> Any:
    """What fusing gains, model by model: of both sides of a model, one bar."""
    sides: dict[str, dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["step_ms"]:
            sides.setdefault(row["model"], {})[row["side"]] = row
    rows = [
        {
            "model": model,
            "faster": by["tigon"]["tokens_per_s"] / by["hf"]["tokens_per_s"],
            "smaller": by["tigon"]["peak_gib"] / by["hf"]["peak_gib"] if by["hf"]["peak_gib"] else None,
        }
        for model, by in sides.items()
        if {"hf", "tigon"} <= by.keys()
    ]
    measured = [row for row in rows if row["smaller"] is not None]
    panels = {"tokens/s, fused ÷ plain": rows, **({"peak memory, fused ÷ plain": measured} if measured else {})}
    figure, axes = _panels(panels, plt)
    for axis, (title, shown), key in zip(axes, panels.items(), ("faster", "smaller"), strict=False):
        _bars(axis, shown, "model", key, "{:.2f}×", by="tigon")
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=9, loc="left")
    return figure


KINDS = {"ops": _operators, "host": _host, "model": _models, "memory": _memory, "architecture": _architectures}
