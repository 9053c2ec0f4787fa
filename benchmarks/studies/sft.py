"""Supervised fine-tuning with adapters through the command line: Tigon's curve beside PEFT's, as table and chart.

benchmarks/sft.py records the runs: `tigon train --lora` as it is, and with `--plain`, which leaves the adapters to PEFT
and the model to transformers. The runs of one seed have the same adapters to begin with, the same rows in the same
order, and the same held-out rows; what differs is the order of sums.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness import plots, report

SIDES = {"hf": "PEFT", "tigon": "Tigon"}
COLOURS = {"hf": "#9a9a9a", "tigon": plots.COLOURS["tigon"], "seeds": "#3b6ea5"}
NEAR = 5  # steps on either side over which curves are averaged in the chart


@dataclass
class Run:
    """One run of `tigon train`.

    losses: of each step, as text: one number a step, separated by blanks. held_out: the loss of the rows that no run
    trains on, after the last step. tokens_per_s: the median over log lines but the first, which has the start.
    adapters: how many layers with adapters ran fused in a step, as the command's report said.
    """

    side: str
    seed: int
    batch: int
    seq: int
    rank: int
    steps: int
    losses: str = ""
    held_out: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    adapters: int = 0
    seconds: float = 0.0
    status: str = "ok"  # ok | failed
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def curve(row: dict[str, Any]) -> list[float]:
    return [float(word) for word in row["losses"].split()]


def _end(row: dict[str, Any]) -> float:
    """The mean loss of the last tenth of the steps: a single step's depends on its rows."""
    values = curve(row)
    return fmean(values[-max(1, len(values) // 10) :])


def _number(value: float | None, style: str) -> str:
    return "–" if value is None else style.format(value)


report.COLUMNS["sft"] = {
    "side": lambda r: SIDES[r["side"]],
    "seed": lambda r: str(r["seed"]),
    "batch×seq": lambda r: f"{r['batch']}×{r['seq']}",
    "rank": lambda r: str(r["rank"]),
    "loss": lambda r: f"{curve(r)[0]:.3f} → {_end(r):.3f}" if r["losses"] else "–",
    "held out": lambda r: _number(r["held_out"], "{:.4f}"),
    "tokens/s": lambda r: _number(r["tokens_per_s"], "{:,.0f}"),
    "GiB": lambda r: _number(r["peak_gib"], "{:.2f}"),
    "remark": lambda r: "" if r["status"] == "ok" else f"{r['status'].upper()}: {r['reason']}",
}


def ok(content: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs that ended, by side and seed."""
    return {(r["side"], r["seed"]): r for r in content["rows"] if r["status"] == "ok"}


def apart(content: dict[str, Any]) -> dict[str, float]:
    """How far curves are from each other, in nats per token.

    sides, largest: mean and largest difference of the two sides at a step, with the same seed; seeds: mean difference
    of two of PEFT's own runs at a step; held_out: largest difference of the two sides' held-out losses; held_out_seeds:
    the largest between two of PEFT's own.
    """
    runs = ok(content)
    pairs = [(runs["hf", s], run) for (side, s), run in runs.items() if side == "tigon" and ("hf", s) in runs]
    plain = [run for (side, _), run in runs.items() if side == "hf"]
    others = [(a, b) for i, a in enumerate(plain) for b in plain[:i]]
    found: dict[str, float] = {}
    if pairs:
        steps = [abs(x - y) for a, b in pairs for x, y in zip(curve(a), curve(b), strict=True)]
        found |= {"sides": fmean(steps), "largest": max(steps)}
        found["held_out"] = max(abs(a["held_out"] - b["held_out"]) for a, b in pairs)
    if others:
        found["seeds"] = fmean(abs(x - y) for a, b in others for x, y in zip(curve(a), curve(b), strict=True))
        found["held_out_seeds"] = max(abs(a["held_out"] - b["held_out"]) for a, b in others)
    return found


def table(content: dict[str, Any]) -> str:
    """A line for each side, over its seeds."""
    lines = ["| | seeds | loss, last tenth | held-out loss | tokens/s | GiB |", "| :-- | --: | --: | --: | --: | --: |"]
    for side, name in SIDES.items():
        rows = [run for (of, _), run in ok(content).items() if of == side]
        if not rows:
            continue
        speeds = [run["tokens_per_s"] for run in rows if run["tokens_per_s"]]
        peaks = [run["peak_gib"] for run in rows if run["peak_gib"]]
        cells = [
            name,
            str(len(rows)),
            _range([_end(run) for run in rows], "{:.3f}"),
            _range([run["held_out"] for run in rows], "{:.4f}"),
            f"{median(speeds):,.0f}" if speeds else "–",
            f"{max(peaks):.2f}" if peaks else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _range(values: list[float], style: str) -> str:
    low, high = style.format(min(values)), style.format(max(values))
    return low if low == high else f"{low} to {high}"


def sentences(content: dict[str, Any]) -> str:
    """What was trained on what, and how far the curves are apart."""
    base, found, first = content["base"], apart(content), content["rows"][0]
    text = (
        f"A Llama of {base['parameters'] / 1e6:,.3g}M parameters, trained for {base['steps']:,} steps "
        f"({base['loss'][0]:.2f} → {base['loss'][1]:.2f} nats per token) on {base['characters'] / 1e6:.1f} MB of "
        f"Python's standard library and of this documentation; then LoRA of rank {first['rank']} on all linear "
        f"layers, for {first['steps']} steps of {first['batch']} functions of other modules, each with its docstring "
        f"as the answer. {content['held_out']:,} more were held out."
    )
    if found:
        text += (
            f" With the same seed the losses of the two sides differ by {found['sides']:.1g} nats at a step on "
            f"average, by {found['largest']:.1g} at most, and their held-out losses by {found['held_out']:.1g}."
        )
    if "seeds" in found:
        text += f" Two seeds of PEFT alone differ by {found['seeds']:.1g} and {found['held_out_seeds']:.1g}."
    return text


def plot(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the curves of all runs to a PNG, and under them how far apart sides, and seeds, are at each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = ok(content)
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(7.0, 5.2), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    named: set[str] = set()
    for (side, _), run in sorted(runs.items()):
        name = None if side in named else SIDES[side]
        wide = side == "hf"  # so that a line over it leaves it visible
        upper.plot(_smooth(curve(run)), color=COLOURS[side], linewidth=3.2 if wide else 1.0, label=name)
        named.add(side)
    plain = {seed: curve(run) for (side, seed), run in runs.items() if side == "hf"}
    fused = {seed: curve(run) for (side, seed), run in runs.items() if side == "tigon"}
    pairs = [(plain[s], fused[s]) for s in fused if s in plain]
    others = [(plain[a], plain[b]) for a in plain for b in plain if a < b]
    for kind, label, curves in (
        ("tigon", "Tigon and PEFT, same seed", pairs),
        ("seeds", "PEFT, two seeds", others),
    ):
        if curves:
            distances = [[abs(x - y) for x, y in zip(a, b, strict=True)] for a, b in curves]
            mean = [fmean(step) for step in zip(*distances, strict=True)]
            lower.plot(_smooth(mean), color=COLOURS[kind], linewidth=1.2, label=label)
    upper.set_ylabel("loss, nats per token", fontsize=10)
    lower.set_ylabel("difference", fontsize=10)
    lower.set_xlabel(f"step (mean over {2 * NEAR + 1})", fontsize=10)
    if pairs:
        lower.set_yscale("log")
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
        axis.legend(fontsize=9, frameon=False)
    figure.suptitle(report.headline(content), fontsize=10, color=plots.FAINT)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _smooth(values: list[float]) -> list[float]:
    return [fmean(values[max(0, i - NEAR) : i + NEAR + 1]) for i in range(len(values))]


def page(folder: Path, charts: str) -> str:
    """Markdown of the result files in a folder, with their charts at the address `charts`."""
    parts: list[str] = []
    for path in sorted(folder.glob("*-sft.json")):
        content = report.load(path)
        if content["kind"] == "sft" and ok(content):
            parts += [
                sentences(content), "", table(content), "", f"![loss of each step]({charts}/{path.stem}.png)", "",
                report.source(content), "",
                "```\n" + "\n".join(content["commands"]) + "\n```\n",
            ]  # fmt: skip
    return "\n".join(parts) or "No run has been recorded yet."
