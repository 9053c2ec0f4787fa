"""How flat the minima are that sharpness-aware minimization finds, and what it costs: tables and charts.

benchmarks/micro_batch_sam.py records the runs. A method is judged at the learning rate and rho that its runs on the
validation split say, by the mean over the seeds; what stands in the table is measured on other text, the test split.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness import plots, report

COLOURS = {"SGD": "#9a9a9a", "SGD, twice as long": "#555555", "SAM": "#3b6ea5", "mSAM, 4 shards": "#2b8a3e",
           "mSAM, 8 shards": "#d9480f"}  # fmt: skip


@dataclass
class Run:
    """One training.

    m: shards of a batch; 0 is without perturbation. steps: of the optimizer. rows: of data that a backward pass saw, in
    all of them. train_loss: mean cross entropy, nats. validation, test: share of characters that are foreseen.
    lambda_max: the largest eigenvalue of the Hessian of the training loss; residual: ‖Hv − λv‖ / λ of its vector.
    """

    method: str
    m: int
    rho: float
    lr: float
    steps: int
    seed: int
    rows: int = 0
    train_loss: float | None = None
    validation: float | None = None
    test: float | None = None
    lambda_max: float | None = None
    residual: float | None = None
    seconds: float = 0.0
    status: str = "ok"  # ok | failed
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Cost:
    """A step with perturbation beside the same step without: the same micro-batches, optimizer and precision.

    parallel: "", "DDP" or "HSDP R×S", replicas by shards. batch: rows a rank and step; shards: it is cut into.
    base_ms, sam_ms: medians of alternating steps, with half their range in per cent. perturb_ms: the norm, the step
    along the gradient and the way back, alone; floor_ms: of the bytes that these move, at the speed of a copy;
    foreach_ms: the same of torch._foreach, with a copy of the weights. error: of the gradient against one whose weights
    were moved by hand, in its norm; moved: how far it is from the plain gradient, by the same measure.
    """

    model: str
    parallel: str
    gpus: int
    parameters: int
    batch: int
    shards: int
    base_ms: float | None = None
    base_range: float | None = None
    sam_ms: float | None = None
    sam_range: float | None = None
    ratio: float | None = None
    perturb_ms: float | None = None
    foreach_ms: float | None = None
    floor_ms: float | None = None
    base_gib: float | None = None
    sam_gib: float | None = None
    error: float | None = None
    moved: float | None = None
    restored: bool | None = None
    status: str = "ok"  # ok | wrong | failed
    reason: str = ""
    steps_ms: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# -------------------------------------------------------------------------------------------------------------- tables


def _remark(row: dict[str, Any]) -> str:
    return "" if row["status"] == "ok" else f"{row['status'].upper()}: {row['reason']}"


def _digits(key: str, digits: int, unit: str = "") -> Any:
    return lambda row: "–" if row[key] is None else f"{row[key]:,.{digits}f}{unit}"


def _range(key: str) -> Any:
    def cell(row: dict[str, Any]) -> str:
        if row[f"{key}_ms"] is None:
            return "–"
        return f"{row[f'{key}_ms']:.2f}" + (f" ±{row[f'{key}_range']:.1f}%" if row[f"{key}_range"] is not None else "")

    return cell


RUN_COLUMNS: dict[str, Any] = {
    "method": lambda r: r["method"],
    "lr": lambda r: f"{r['lr']:g}",
    "rho": lambda r: f"{r['rho']:g}" if r["m"] else "–",
    "steps": lambda r: str(r["steps"]),
    "seed": lambda r: str(r["seed"]),
    "train loss": _digits("train_loss", 3),
    "validation": _digits("validation", 4),
    "test": _digits("test", 4),
    "λ max": _digits("lambda_max", 2),
    "remark": _remark,
}
COST_COLUMNS: dict[str, Any] = {
    "model": lambda r: r["model"],
    "GPUs": lambda r: str(r["gpus"]) + (f" {r['parallel']}" if r["parallel"] else ""),
    "rows a rank": lambda r: str(r["batch"]),
    "shards": lambda r: str(r["shards"]),
    "plain ms": _range("base"),
    "SAM ms": _range("sam"),
    "× plain": _digits("ratio", 3),
    "perturb + restore ms": _digits("perturb_ms", 3),
    "torch._foreach ms": _digits("foreach_ms", 3),
    "copy floor ms": _digits("floor_ms", 3),
    "plain GiB": _digits("base_gib", 2),
    "SAM GiB": _digits("sam_gib", 2),
    "error": lambda r: "–" if r["error"] is None else f"{r['error']:.0e} of {r['moved']:.0e}".replace("e-0", "e-"),
    "remark": _remark,
}
report.COLUMNS["sam"], report.COLUMNS["sam-cost"] = RUN_COLUMNS, COST_COLUMNS


def settings(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, float, float], list[dict[str, Any]]]:
    """Runs that differ by their seed alone, by method, learning rate and rho."""
    found: dict[tuple[str, float, float], list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok":
            found.setdefault((row["method"], row["lr"], row["rho"]), []).append(row)
    return found


def chosen(rows: Iterable[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Of each method the learning rate and rho that foresee most on the validation split, on average."""
    best: dict[str, tuple[float, tuple[float, float]]] = {}
    for (method, lr, rho), runs in settings(rows).items():
        score = fmean(run["validation"] for run in runs)
        if method not in best or score > best[method][0]:
            best[method] = score, (lr, rho)
    return {method: setting for method, (_, setting) in best.items()}


def spread(values: list[float], digits: int, factor: float = 1.0) -> str:
    """Mean ± standard deviation over the seeds."""
    middle = f"{factor * fmean(values):.{digits}f}"
    return f"{middle} ± {factor * stdev(values):.{digits}f}" if len(values) > 1 else middle


def table(rows: list[dict[str, Any]], every: bool = False) -> str:
    """Markdown: a line for each method at what was chosen for it, or for every setting."""
    picked = chosen(rows)
    header = ["method", "lr", "rho", "seeds", "rows seen", "train loss", "validation %", "test %", "λ max"]
    lines = ["| " + " | ".join(header) + " |", "| :-- |" + " --: |" * (len(header) - 1)]
    for (method, lr, rho), runs in sorted(settings(rows).items(), key=lambda s: (list(COLOURS).index(s[0][0]), s[0])):
        if not every and picked[method] != (lr, rho):
            continue
        cells = [
            method, f"{lr:g}", f"{rho:g}" if runs[0]["m"] else "–", str(len(runs)), f"{runs[0]['rows']:,}",
            spread([r["train_loss"] for r in runs], 2), spread([r["validation"] for r in runs], 1, 100),
            spread([r["test"] for r in runs], 1, 100), spread([r["lambda_max"] for r in runs], 2),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(rows: list[dict[str, Any]]) -> str:
    """How often a method's minimum is flatter than another's of fewer shards, and foresees more of the test.

    Seed by seed, at what was chosen for each, and of two with perturbation also at each rho.
    """
    by, picked = settings(rows), chosen(rows)
    methods = [method for method in COLOURS if method in picked and method != "SGD, twice as long"]
    said = []
    for flat, sharp in ((b, a) for i, a in enumerate(methods) for b in methods[i + 1 :]):
        count, lower, better = _wins(by[(flat, *picked[flat])], by[(sharp, *picked[sharp])])
        line = f"{flat} against {sharp}: λ max lower in {lower} of {count} seeds, test accuracy higher in {better}."
        same = [rho for name, _, rho in by if name == flat and (sharp, picked[sharp][0], rho) in by]
        if same:
            found = [_wins(by[(flat, picked[flat][0], rho)], by[(sharp, picked[sharp][0], rho)]) for rho in same]
            count, lower, better = (sum(each) for each in zip(*found, strict=True))
            line += (
                f" At the same rho: λ max lower in {lower} of {count} pairs of runs, test accuracy higher in {better}."
            )
        said.append(line)
    return "\n".join(f"- {line}" for line in said)


def _wins(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Pairs of the same seed; those where mine is flatter; those where it foresees more."""
    by_seed = {run["seed"]: run for run in theirs}
    pairs = [(run, by_seed[run["seed"]]) for run in mine if run["seed"] in by_seed]
    flatter = sum(a["lambda_max"] < b["lambda_max"] for a, b in pairs)
    return len(pairs), flatter, sum(a["test"] > b["test"] for a, b in pairs)


# -------------------------------------------------------------------------------------------------------------- charts


def plot(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the runs to a PNG: flatness over rho, accuracy over rho, and the one over the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = content["rows"]
    by, picked = settings(rows), chosen(rows)
    figure, axes = plt.subplots(1, 3, figsize=(11.0, 3.4), layout="constrained")
    for axis, key, name in ((axes[0], "lambda_max", "λ max of the Hessian"), (axes[1], "test", "test accuracy")):
        _over_rho(axis, by, picked, key)
        axis.set_title(f"{name}, over rho", fontsize=9, loc="left")
        axis.set_xscale("log")
        axis.set_xticks(sorted({row["rho"] for row in rows if row["rho"]}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
    axes[0].set_yscale("log")
    for method, setting in picked.items():
        runs = by[(method, *setting)]
        axes[2].scatter(
            [r["lambda_max"] for r in runs], [r["test"] for r in runs], s=22, color=COLOURS[method], label=method
        )
    axes[2].set_xscale("log")
    axes[2].xaxis.set_major_formatter("{x:g}")
    axes[2].xaxis.set_minor_formatter("")
    axes[2].set_title("test accuracy over λ max, as chosen", fontsize=9, loc="left")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    handles, labels = axes[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=10, frameon=False)
    figure.suptitle(report.headline(content), fontsize=10, color=plots.FAINT)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _over_rho(axis: Any, by: dict[Any, list[dict[str, Any]]], picked: dict[str, Any], key: str) -> None:
    for method in picked:
        if by[(method, *picked[method])][0]["m"] == 0:
            values = [r[key] for r in by[(method, *picked[method])]]
            axis.axhspan(min(values), max(values), color=COLOURS[method], alpha=0.35, linewidth=0)
            continue
        lr = picked[method][0]
        points = sorted(
            (rho, [r[key] for r in runs]) for (name, at, rho), runs in by.items() if (name, at) == (method, lr)
        )
        rhos = [rho for rho, _ in points]
        axis.plot(rhos, [fmean(values) for _, values in points], color=COLOURS[method], marker="o", markersize=3)
        lows, highs = ([f(values) for _, values in points] for f in (min, max))
        axis.fill_between(rhos, lows, highs, color=COLOURS[method], alpha=0.2, linewidth=0)


def page(folder: Path, charts: str) -> str:
    """Markdown of the result files in a folder: the study with its chart at the address `charts`, and the cost."""
    parts: list[str] = []
    for path in sorted(folder.glob("*.json")):
        content = report.load(path)
        if content["kind"] == "sam":
            parts += [
                report.source(content), "", table(content["rows"]), "", verdict(content["rows"]), "",
                f"![flatness and accuracy]({charts}/{path.stem}.png)", "",
                '<details markdown="1"><summary>Every setting</summary>\n', table(content["rows"], every=True),
                "\n</details>\n",
            ]  # fmt: skip
    return "\n".join(parts) or "No run has been recorded yet."


def cost_page(folder: Path) -> str:
    """Markdown of the steps that were timed."""
    contents = [report.load(path) for path in sorted(folder.glob("*.json"))]
    parts = [f"{report.source(c)}\n\n{report.to_table(c)}\n" for c in contents if c["kind"] == "sam-cost"]
    return "\n".join(parts) or "No step has been timed yet."
