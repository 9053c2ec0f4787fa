"""Loss against compute of LiGR, of widths and shares of the users: the tables and the chart of the study.

benchmarks/rank_scaling.py records the rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness import plots, report

from studies.rows import columns

Rows = list[dict[str, Any]]
KIND = "rank-scaling"
MARKERS = "o^sDvP"

report.COLUMNS[KIND] = columns("data", "seed")


def points(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, int, float], Rows]:
    """The fits of all seeds, by set, width and share."""
    found: dict[tuple[str, int, float], Rows] = {}
    for row in rows:
        found.setdefault((row["data"], row["setting"]["width"], row["setting"]["share"]), []).append(row)
    return dict(sorted(found.items()))


def spread(rows: Rows, name: str = "loss") -> tuple[float, float]:
    """Mean and standard deviation over the seeds of a measure of the validation; 0 for one seed."""
    values = [row["validation"][name] for row in rows]
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def table(rows: Rows) -> str:
    """A line for each set, width and share."""
    lines = [
        "| set | width | share of the users | seeds | parameters without the items | PFLOP until the best | loss, nats "
        "| HR@10 | ended by their time |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for (data, width, share), some in points(rows).items():
        loss, off = spread(some)
        flops = fmean(row["validation"]["flops"] for row in some) / 1e15
        hits = fmean(row["measures"]["hr@10"] for row in some)
        cut = sum(row["setting"]["ended"] == "seconds" for row in some)
        apart = f" ± {off:.3f}" if len(some) > 1 else ""
        cells = [data, str(width), f"{share:.0%}", str(len(some)), f"{some[0]['setting']['matrix_parameters']:,}",
                 f"{flops:.3g}", f"{loss:.3f}{apart}", f"{hits:.4f}", str(cut) if cut else "–"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """A panel for each set: loss against FLOPs, a line for each share through its widths, with the seeds' deviation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = points(content["rows"])
    sets = list(dict.fromkeys(data for data, _, _ in found))
    shares, widths = (sorted({key[place] for key in found}) for place in (2, 1))
    down = (len(sets) + 1) // 2
    figure, axes = plt.subplots(down, min(2, len(sets)), figsize=(7.0, 2.9 * down), squeeze=False, layout="constrained")
    for axis, data in zip(axes.flat, sets, strict=False):
        for number, share in enumerate(shares):
            some = [(width, found[data, width, share]) for width in widths if (data, width, share) in found]
            flops = [fmean(row["validation"]["flops"] for row in rows) for _, rows in some]
            losses, apart = zip(*(spread(rows) for _, rows in some), strict=True) if some else ((), ())
            axis.errorbar(flops, losses, yerr=apart, linewidth=1.2, capsize=2, color=f"C{number}", label=f"{share:.0%}")
            for place, (width, _) in enumerate(some):
                axis.plot(flops[place], losses[place], MARKERS[widths.index(width) % len(MARKERS)], color=f"C{number}")
        axis.set_xscale("log")
        axis.set_title(data, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    for axis in list(axes.flat)[len(sets) :]:
        axis.set_visible(False)
    axes[0, 0].set_ylabel("validation loss, nats", fontsize=9)
    axes[-1, 0].set_xlabel("FLOPs until the best", fontsize=9)
    marks = ", ".join(f"{MARKERS[n % len(MARKERS)]} {width}" for n, width in enumerate(widths))
    axes[0, 0].legend(fontsize=8, frameon=False, title="share of the users", title_fontsize=8)
    figure.suptitle(f"widths: {marks}. {report.headline(content)}", fontsize=8, color=plots.FAINT)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def page(folder: Path, charts: str) -> str:
    """Markdown of the result files in a folder, with their charts at the address `charts`."""
    parts: list[str] = []
    for path in sorted(folder.glob(f"*-{KIND}.json")):
        content = report.load(path)
        parts += [f"![loss against compute]({charts}/{path.stem}.png)", "", table(content["rows"]), "",
                  report.source(content), ""]  # fmt: skip
    return "\n".join(parts) or "No run has been recorded yet."
