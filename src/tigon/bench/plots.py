"""Results of `tigon bench` as charts, PNG or SVG.

Bars show multiples of the floor, microseconds of the host, and tokens/s and memory of whole models. Stacked bars show
a step's kinds of kernel. Lines show memory over the number of tokens.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable
from typing import Any

from tigon.bench.columns import format_share, format_size, model_of
from tigon.bench.report import headline
from tigon.bench.training import MASKED

# One colour per implementation in every chart: Tigon's stands out, the peers' recede.
COLOURS = {
    "tigon": "#d9480f",
    "tigon-weight": "#f08c3a",
    "tigon-compact": "#f5b97f",
    "tigon-compile": "#f08c3a",
    "liger": "#3b6ea5",
    "liger-fp32": "#7ba3cc",
    "compile": "#7a7a7a",
    "eager": "#b5b5b5",
    "torch": "#d0b070",
    "torch-gather": "#b58a6a",
    "hf": "#b5b5b5",
    "cce": "#6a9c78",
    "quack": "#8d7ab5",
    "floor": "#dcdcdc",
}
OTHER = "#999999"
# Kinds of kernel in the order of a stacked bar: the kinds that every side needs come first.
KERNELS = {
    "matmul": "#3b6ea5",
    "attention": "#6a9c78",
    "optimizer": "#8d7ab5",
    "loss": "#d9480f",
    "norms": "#f08c3a",
    "gated unit": "#d0b070",
    "rotary": "#b58a6a",
    "embedding": "#7ba3cc",
    "communication": "#444f5a",
    "elementwise and copies": "#8a8a8a",
    "idle": "#dcdcdc",
}
# A placeholder for the colour of the text around an SVG: no chart uses this colour otherwise.
INK = "#010203"
FAINT = "#555555"  # titles on a white background
# Bars of operators end at this multiple of the shortest, so that the slowest do not flatten the others.
LONGEST = 6.0


def plot(content: dict[str, Any], path: str | os.PathLike[str], kind: str | None = None) -> None:
    """Draw a result (see report.result) to a PNG file, without the rows that were not measured.

    kind: "memory" for the peak memory of operators instead of their time, "profile" for the kinds of kernel of whole
        models; by default the kind of the content.
    """
    _save(content, path, kind, 2, {}, headline(content), format="png", dpi=150)


def svg(content: dict[str, Any], kind: str | None = None) -> str:
    """The same chart as an <svg> element for a page, without background and in the colour of the page's text.

    The panels are in one column, so that a phone can show the chart.
    """
    return inline(lambda file: _save(content, file, kind, 1, {}, "", format="svg"))


def inline(draw: Callable[[Any], object]) -> str:
    """The chart that `draw` saves to the file passed to it, as an <svg> element for a page."""
    import matplotlib

    file = io.StringIO()
    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: Any = {
        **dict.fromkeys(ink, INK), "savefig.format": "svg", "savefig.transparent": True, "svg.fonttype": "none",
        "svg.hashsalt": "tigon", "legend.framealpha": 0.0, "font.family": "sans-serif",
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        draw(file)
    text = file.getvalue()
    # Width and height in points would keep the chart from shrinking with the page; the viewBox has both.
    text = re.sub(r' width="([\d.]+)pt" height="[\d.]+pt"', r' style="max-width: \1pt"', text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = text[text.index("<svg") :].replace("<svg ", '<svg stroke-linejoin="round" ', 1)
    return text.replace(INK, "currentColor").replace(FAINT, "currentColor")


def _save(
    content: dict[str, Any], target: Any, kind: str | None, across: int, settings: Any, title: str, **options: Any
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Names come from files, where a dollar sign begins no formula.
    with matplotlib.rc_context({"text.parse_math": False, **settings}):
        figure = KINDS[kind or content["kind"]](content, plt, across)
        if title:
            figure.suptitle(title, fontsize=11, color=FAINT)
        figure.savefig(target, bbox_inches="tight", **options)
        plt.close(figure)


def _panels(
    groups: dict[str, list[dict[str, Any]]], plt: Any, across: int, height: float = 0.4
) -> tuple[Any, list[Any]]:
    columns = min(across, max(1, len(groups)))
    lines = max(1, math.ceil(len(groups) / columns))
    longest = max((len(rows) for rows in groups.values()), default=1)
    figure, axes = plt.subplots(
        lines, columns, figsize=(7.0 * columns, lines * (1.15 + height * longest)), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for spare in flat[len(groups) :]:
        spare.set_visible(False)
    return figure, flat


def _bars(
    axis: Any, rows: list[dict[str, Any]], name: str, key: str, label: str, longest: float = math.inf, by: str = ""
) -> None:
    """Draw one bar per row. by: the implementation that all rows belong to, if their names are no implementations."""
    values = [row[key] for row in rows]
    names = [row[name] for row in rows]
    end = longest * min(values)
    colours = [COLOURS.get(by or n, OTHER) for n in names]
    bars = axis.barh(range(len(rows)), [min(v, end) for v in values], color=colours)
    labels = [label.format(v) + (" →" if v > end else "") for v in values]
    axis.bar_label(bars, labels=labels, padding=3, fontsize=11)
    axis.set_yticks(range(len(rows)), names, fontsize=11)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.tick_params(axis="x", labelsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _operators(content: dict[str, Any], plt: Any, across: int) -> Any:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["times_floor"] is not None:
            title = f"{row['op']}  {'×'.join(map(str, row['shape']))}  {row['dtype']}"
            groups.setdefault(title, []).append(row)
    figure, axes = _panels(groups, plt, across)
    for axis, (title, rows) in zip(axes, groups.items(), strict=False):
        _bars(axis, rows, "implementation", "times_floor", "{:.2f}×", LONGEST)
        axis.axvline(1.0, color=plt.rcParams["text.color"], linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=12, loc="left")
        axis.set_xlabel("forward + backward, multiple of the floor", fontsize=10)
    return figure


def tokens_of(row: dict[str, Any]) -> int:
    """The number of tokens of a linear head's loss: the product of its shape without width and vocabulary."""
    return math.prod(row["shape"][:-2])


def over_tokens(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One loss's rows with the width, vocabulary and dtype that have the most numbers of tokens; none below three."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("peak_mib") and len(row["shape"]) > 2:
            groups.setdefault((*row["shape"][-2:], row["dtype"]), []).append(row)
    most = max(groups.values(), key=lambda group: len({tokens_of(row) for row in group}), default=[])
    return most if len({tokens_of(row) for row in most}) >= 3 else []


def _memory(content: dict[str, Any], plt: Any, across: int) -> Any:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["peak_mib"]:
            lines.setdefault(row["implementation"], []).append((tokens_of(row), row["peak_mib"] / 1024))
    figure, axis = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    for name, points in lines.items():
        tokens, gib = zip(*sorted(points), strict=True)
        axis.plot(tokens, gib, marker="o", markersize=3, label=name, color=COLOURS.get(name, OTHER))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("tokens", fontsize=11)
    axis.set_ylabel("peak memory beyond the inputs, GiB", fontsize=11)
    axis.tick_params(labelsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=10)
    width, vocabulary = content["rows"][0]["shape"][-2:]
    axis.set_title(
        f"{content['rows'][0]['op']}, width {width}, vocabulary {vocabulary}; a line ends where it no longer ran",
        fontsize=12,
        loc="left",
    )
    return figure


def _host(content: dict[str, Any], plt: Any, across: int) -> Any:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["total_us"] is not None:
            groups.setdefault(row["op"], []).append(row)
    figure, axes = _panels(groups, plt, across)
    for axis, (title, rows) in zip(axes, groups.items(), strict=False):
        _bars(axis, rows, "implementation", "total_us", "{:.0f} µs")
        axis.set_title(title, fontsize=12, loc="left")
        axis.set_xlabel("host time of forward + backward, µs", fontsize=10)
    return figure


def _case(row: dict[str, Any]) -> str:
    gpus = f"  {row['gpus']} GPUs" if row.get("gpus", 1) > 1 else ""
    masked = "" if row.get("masked", MASKED) == MASKED else f"  {format_share(row['masked'])} masked"
    return f"{model_of(row)}  {format_size(row)}{masked}{gpus}"


def _models(content: dict[str, Any], plt: Any, across: int) -> Any:
    panels: dict[str, tuple[list[dict[str, Any]], str, str]] = {}
    for row in content["rows"]:
        for key, unit, label in (("tokens_per_s", "tokens/s", "{:,.0f}"), ("peak_gib", "peak GiB", "{:.1f}")):
            if row["status"] == "ok" and row[key] is not None:
                panels.setdefault(f"{_case(row)}, {unit}", ([], key, label))[0].append(row)
    figure, axes = _panels({title: rows for title, (rows, _, _) in panels.items()}, plt, across, 0.44)
    for axis, (title, (rows, key, label)) in zip(axes, panels.items(), strict=False):
        _bars(axis, rows, "side", key, label)
        axis.set_title(title, fontsize=12, loc="left")
    return figure


def has_profile(content: dict[str, Any]) -> bool:
    """Whether a row other than a floor has times by kind of kernel."""
    return any(row.get("profile_ms") and row.get("side") != "floor" for row in content["rows"])


def _profile(content: dict[str, Any], plt: Any, across: int) -> Any:
    """One panel for each case, with a bar per side, stacked by kind of kernel."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        if row.get("profile_ms"):
            panels.setdefault(_case(row), []).append(row)
    panels = {title: rows for title, rows in panels.items() if has_profile({"rows": rows})}
    figure, axes = _panels(panels, plt, across, 0.44)
    for axis, (title, rows) in zip(axes, panels.items(), strict=False):
        left = [0.0] * len(rows)
        for kind, colour in KERNELS.items():
            widths = [row["profile_ms"].get(kind, 0.0) for row in rows]
            axis.barh(range(len(rows)), widths, left=left, color=colour)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, end in enumerate(left):
            axis.text(end, place, f" {end:,.0f}", va="center", fontsize=11)
        axis.set_yticks(range(len(rows)), [row["side"] for row in rows], fontsize=11)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.12 * max(left))
        axis.tick_params(axis="x", labelsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("milliseconds of the device in one step", fontsize=10)
        axis.set_title(title, fontsize=12, loc="left")
    recorded = {kind for rows in panels.values() for row in rows for kind in row["profile_ms"]}
    present = [kind for kind in KERNELS if kind in recorded]
    handles = [plt.Rectangle((0, 0), 1, 1, color=KERNELS[kind]) for kind in present]
    figure.legend(handles, present, loc="outside lower center", ncols=min(5, len(present)), fontsize=10)
    return figure


def _sequence(content: dict[str, Any], plt: Any, across: int) -> Any:
    """Peak memory over the length; a line ends at the longest sequence that fits."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in content["rows"]:
        if row["status"] == "ok" and row["peak_gib"]:
            lines.setdefault(row["side"], []).append((row["seq"], row["peak_gib"]))
    figure, axis = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    for name, points in lines.items():
        lengths, gib = zip(*sorted(points), strict=True)
        colour = COLOURS.get(name, OTHER)
        axis.plot(lengths, gib, marker="o", markersize=3, label=f"{name}: {lengths[-1]:,} tokens", color=colour)
    if available := content["environment"].get("memory_gib"):
        axis.axhline(available, color=plt.rcParams["text.color"], linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    axis.set_ylim(0)
    axis.set_xlabel("tokens of a sequence", fontsize=11)
    axis.set_ylabel("peak memory, GiB", fontsize=11)
    axis.tick_params(labelsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=10, title="longest measured", title_fontsize=10)
    axis.set_title(_case({**content["rows"][0], "seq": "length"}), fontsize=12, loc="left")
    return figure


def _architectures(content: dict[str, Any], plt: Any, across: int) -> Any:
    """The gain from fusing, model by model: one bar for both sides of a model."""
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
    figure, axes = _panels(panels, plt, across)
    for axis, (title, shown), key in zip(axes, panels.items(), ("faster", "smaller"), strict=False):
        _bars(axis, shown, "model", key, "{:.2f}×", by="tigon")
        axis.axvline(1.0, color=plt.rcParams["text.color"], linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=12, loc="left")
    return figure


def _search(content: dict[str, Any], plt: Any, across: int) -> Any:
    """Time over the share of the rows that pass, a panel for each number of queries, with the floor below."""
    rows = [row for row in content["rows"] if row["status"] == "ok" and row["filters"] != "each"]
    rows = [row for row in rows if row.get("p99_ms") is None]  # single searches of an index have no floor
    rows = [row for row in rows if row.get("vectors") is None]  # nor do searches with codes have shares
    first = rows[0]["k"] if rows else 0
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["k"] == first:
            name = "one query" if row["queries"] == 1 else f"{row['queries']:,} queries"
            groups.setdefault(f"{name}, k = {first}", []).append(row)
    columns = max(1, min(across + 1, len(groups)))
    lines = max(1, math.ceil(len(groups) / columns))
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.8 * lines), squeeze=False, layout="constrained"
    )
    for axis, (title, own) in zip(axes.flat, groups.items(), strict=False):
        for name in dict.fromkeys(row["implementation"] for row in own):
            points = sorted(
                (row["share"], row["graph_ms"] or row["ms"]) for row in own if row["implementation"] == name
            )
            axis.plot(*zip(*points, strict=True), marker="o", color=COLOURS.get(name, OTHER), label=name)
        floor = sorted({(row["share"], row["floor_ms"]) for row in own})
        axis.plot(*zip(*floor, strict=True), linestyle="--", color=plt.rcParams["text.color"], label="floor")
        for scale, line in ((axis.set_xscale, axis.xaxis), (axis.set_yscale, axis.yaxis)):
            scale("log")
            line.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_title(title, fontsize=12, loc="left")
        axis.set_xlabel("share of the rows that pass", fontsize=11)
        axis.set_ylabel("ms", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=10, frameon=False)
    return figure


KINDS = {
    "ops": _operators,
    "host": _host,
    "model": _models,
    "profile": _profile,
    "sequence": _sequence,
    "memory": _memory,
    "architecture": _architectures,
    "search": _search,
}
