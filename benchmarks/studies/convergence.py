"""Are fused runs of a training among the plain ones? What benchmarks/converge.py records, judged, as table and charts.

Plain runs of one training differ only by the order of their sums. For each measure a run has one number: its distance
from the plain runs, in units of the plain runs' distance from one another:

    loss, norm    the largest, over the steps, of ‖x − plain‖ / ‖plain − plain‖, both the root mean square over runs and
                  over neighbouring steps; x is the loss, or the logarithm of the gradient norm before clipping
    weights       the same of the final weights in the Euclidean norm

A plain run is compared with the other plain runs. The plain runs' scores are the measured distribution. Its limit is
the score that one more plain run would exceed with a chance of CHANCE in a whole file. All rows of a family and dtype
give one limit per measure: the more plain runs, the sharper the limit. Families differ: routing to experts jumps.

A fused run beyond the limit is wrong, with one exception. Other orders do not show an error that all plain runs share,
such as the error of a softcap in bf16. So below fp32 an exact run computes in fp32 from the same bf16 weights. A fused
run that is nearer to the exact run than plain runs are on average is right, even beyond the limit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import torch
from harness import plots, report
from torch import Tensor

MEASURES = ("loss", "norm", "weights")
CHANCE = 1e-3  # the chance that a file of sound runs has a run beyond a limit
# A difference of two fp32 numbers is exact to about one rounding, 2⁻²⁴ of the numbers.
ROUNDING = 2.0**-24
COLOURS = {"labels": "#d9480f", "logits": "#3b6ea5", "exact": "#2b8a3e"}
PLAIN = "#9a9a9a"


@dataclass
class Training:
    """One run that has ended.

    side: "hf", "tigon", or "exact", which computes in fp32. path: how its loss is computed. order: its seed.
    losses, norms: of each step; norms are of the whole gradient, before clipping.
    weights: the way from the first weights to the last, as one fp32 vector, the same order for all runs.
    calls: of fused operators in the last step.
    """

    side: str
    path: str
    order: int
    losses: list[float]
    norms: list[float]
    weights: Tensor
    calls: dict[str, int] = field(default_factory=dict)


@dataclass
class Runs:
    """All runs of one family, dtype and kind of batches, the plain ones first.

    loss, norm: of each step, the mean of the plain runs, as text: one number a step, separated by blanks.
    runs: of each its side, path, order and calls (see Training), and as text its loss − the mean, its norm / the
        mean − 1.
    apart: of each run the distance of its final weights to each plain run's, over the length of the way from the start.
    scores: by measure, of each run.
    errors: by measure, of each run the distance from the exact one; empty where there is none.
    limits: by measure; set by `judge`.
    """

    model: str
    dtype: str
    batches: str
    batch: int
    seq: int
    steps: int
    parameters: int = 0
    seconds: float = 0.0
    status: str = "ok"  # ok | wrong | failed
    reason: str = ""
    loss: str = ""
    norm: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    apart: list[list[float]] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def record(self, trainings: Sequence[Training]) -> None:
        """Take over runs that have ended, the plain ones first and an exact one last."""
        plain = [t for t in trainings if t.side == "hf"]
        losses = torch.tensor([t.losses for t in trainings], dtype=torch.float64)
        norms = torch.tensor([t.norms for t in trainings], dtype=torch.float64)
        loss, norm = losses[: len(plain)].mean(0), norms[: len(plain)].mean(0)
        self.parameters = trainings[0].weights.numel()
        self.loss, self.norm = _text(loss, "{:.6g}"), _text(norm, "{:.6g}")
        self.runs = [
            {
                "side": t.side, "path": t.path, "order": t.order, "calls": t.calls,
                "loss": _text(mine - loss, "{:.2e}"), "norm": _text(length / norm - 1, "{:.2e}"),
            }
            for t, mine, length in zip(trainings, losses, norms, strict=True)
        ]  # fmt: skip
        way = float(torch.stack([t.weights.norm() for t in plain]).mean())
        self.apart = [[float(f"{float((t.weights - p.weights).norm()) / way:.3e}") for p in plain] for t in trainings]
        self.scores = {
            "loss": scores(losses, len(plain), ROUNDING * float(loss.abs().max())),
            "norm": scores(norms.log(), len(plain), ROUNDING),
            "weights": scores_of(
                torch.tensor(self.apart, dtype=torch.float64).square()[..., None], len(plain), ROUNDING
            ),
        }
        self.errors = {}
        if trainings[-1].side == "exact":
            ways = torch.stack([t.weights for t in trainings]) / way
            curves = {"loss": losses, "norm": norms.log(), "weights": ways}
            found = {k: (v - v[-1]).double().square().mean(-1).sqrt() for k, v in curves.items()}
            self.errors = {k: [float(f"{e:.3e}") for e in v.tolist()] for k, v in found.items()}

    def of(self, side: str, measure: str) -> list[float]:
        return [s for s, run in zip(self.scores[measure], self.runs, strict=True) if run["side"] == side]

    def nearer(self, measure: str, i: int) -> bool:
        """Whether run i is nearer to the exact run than the plain runs are on average."""
        errors = self.errors.get(measure)
        plain = sum(run["side"] == "hf" for run in self.runs)
        return errors is not None and errors[i] < fmean(errors[:plain])


def _text(values: Tensor, style: str) -> str:
    return " ".join(style.format(v) for v in values.tolist())


def curve(text: str) -> Tensor:
    """(steps,) numbers from the text of a record."""
    return torch.tensor([float(word) for word in text.split()], dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------- judging


def scores(curves: Tensor, plain: int, floor: float) -> list[float]:
    """Of each run, the largest ratio over the steps.

    Args:
        curves: (runs, steps), the plain ones first.
        plain: how many of them are plain, at least three.
        floor: the error that rounding adds to each distance; the squares add up.
    """
    apart = (curves[:, None] - curves[None, :plain]).square()
    return scores_of(smoothed(apart, reach(curves.shape[1])), plain, floor)


def scores_of(apart: Tensor, plain: int, floor: float) -> list[float]:
    """The same, from squared distances (runs, plain, steps)."""
    found = []
    for i in range(len(apart)):
        others = [j for j in range(plain) if j != i]
        mine = apart[i, others].mean(0)
        theirs = torch.stack([apart[a, b] for a in others for b in others if a < b]).mean(0)
        found.append(float(((mine + floor**2) / (theirs + floor**2)).sqrt().max()))  # NaN stays NaN
    return found


def reach(steps: int) -> int:
    """The number of steps before and after each step to average distances over: one step's may be small by chance."""
    return max(4, steps // 20)


def smoothed(values: Tensor, reach: int) -> Tensor:
    """The mean over neighbours along the last axis; fewer of them at the ends."""
    sums = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
    steps = torch.arange(values.shape[-1])
    low, high = (steps - reach).clamp(min=0), (steps + reach + 1).clamp(max=values.shape[-1])
    return ((sums[..., high] - sums[..., low]) / (high - low)).clamp(min=0)  # rounding can go below


def limit(plain: Sequence[float], comparisons: int) -> float:
    """The score that one more score like those in `plain` exceeds with a chance of CHANCE / comparisons.

    Scores are taken to be lognormal, with mean and deviation as measured: Student's prediction limit, its quantile by
    the approximation of Wallace 1959, Annals of Mathematical Statistics 30.
    """
    if not all(math.isfinite(score) for score in plain):
        return math.nan  # a diverging plain run measures nothing, so no run is within the limit
    logs = [math.log(score) for score in plain]
    free = len(logs) - 1
    z = NormalDist().inv_cdf(1 - CHANCE / comparisons)
    t = math.sqrt(free * math.expm1((z * (8 * free + 3) / (8 * free + 1)) ** 2 / free))
    # Three scores that differ much give a limit too large for a float.
    return math.exp(min(700.0, fmean(logs) + t * stdev(logs) * math.sqrt(1 + 1 / len(logs))))


def judge(rows: Iterable[Runs]) -> None:
    """Set limits, status and reason of the rows that ran, from all of them."""
    ran = [row for row in rows if row.status != "failed"]
    comparisons = sum(len(row.of("tigon", measure)) for row in ran for measure in MEASURES)
    for key in dict.fromkeys((row.model, row.dtype) for row in ran):
        mine = [row for row in ran if (row.model, row.dtype) == key]
        for measure in MEASURES:
            bound = limit([score for row in mine for score in row.of("hf", measure)], comparisons)
            for row in mine:
                row.limits[measure] = round(bound, 3)
    for row in ran:
        row.reason = "; ".join(_wrong(row))
        row.status = "wrong" if row.reason else "ok"


def _wrong(row: Runs) -> list[str]:
    found = []
    for i, run in enumerate(row.runs):
        if run["side"] != "tigon":
            continue
        if not run["calls"] or (run["path"] == "labels") != ("head" in run["calls"]):
            found.append(f"{run['path']}: fused operators ran {run['calls'] or 'not at all'}")
        for measure in MEASURES:
            score, most = row.scores[measure][i], row.limits[measure]
            if not score <= most and not row.nearer(measure, i):
                furthest = max(row.of("hf", measure))
                found.append(
                    f"{run['path']}: {measure} {score:.3g} × the spread, plain {furthest:.3g}, limit {most:.3g}"
                )
    return found


# ----------------------------------------------------------------------------------------------------- table and charts


def _worst(measure: str, side: str) -> Any:
    def cell(row: dict[str, Any]) -> str:
        found = [s for s, r in zip(row["scores"].get(measure, []), row["runs"], strict=False) if r["side"] == side]
        return f"{max(found):.2f}" if found else "–"

    return cell


def _spread(row: dict[str, Any]) -> str:
    """How far plain runs are from their mean at the end, a tenth of the steps."""
    ends = [curve(run["loss"])[-max(1, row["steps"] // 10) :] for run in row["runs"] if run["side"] == "hf"]
    return f"{float(torch.stack(ends).square().mean().sqrt()):.0e}".replace("e-0", "e-") if ends else "–"


def _losses(row: dict[str, Any]) -> str:
    values = row["loss"].split()
    return f"{float(values[0]):.2f} → {float(values[-1]):.2f}" if values else "–"


COLUMNS: dict[str, Any] = {
    "model": lambda r: r["model"],
    "dtype": lambda r: r["dtype"],
    "by": lambda r: r["batches"],
    "loss": _losses,
    "± plain": _spread,
    **{
        f"{measure}: {name}": _worst(measure, side)
        for measure in MEASURES
        for name, side in (("plain", "hf"), ("fused", "tigon"), ("fp32", "exact"))
    },
    "limits": lambda r: " ".join(f"{r['limits'][m]:.3g}" for m in MEASURES) if r["limits"] else "–",
    "remark": lambda r: "" if r["status"] == "ok" else f"{r['status'].upper()}: {r['reason']}",
}
report.COLUMNS["converge"] = COLUMNS
PICTURES = ("losses", "distances")


def plot(content: dict[str, Any], path: str | os.PathLike[str], picture: str, dtype: str) -> None:
    """Draw the rows of a dtype to a PNG: the "losses" of all runs, or the "distances" of these from the plain runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in content["rows"] if row["dtype"] == dtype and row["status"] != "failed"]
    models, kinds = (list(dict.fromkeys(row[name] for row in rows)) for name in ("model", "batches"))
    size = 4.0 * len(kinds), 1.7 * len(models) + 0.6
    figure, axes = plt.subplots(len(models), len(kinds), figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.set_visible(False)  # shown when a row uses the panel: a file may lack rows
    for row in rows:
        axis = axes[models.index(row["model"])][kinds.index(row["batches"])]
        axis.set_visible(True)
        axis.set_title(f"{row['model']}, {row['batches']}", fontsize=10, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        _draw_losses(axis, row) if picture == "losses" else _draw_distances(axis, row)
    what = "loss of each step" if picture == "losses" else "distance of the loss from the plain runs"
    figure.suptitle(f"{what}, {dtype}\n{report.headline(content)}", fontsize=10, color=plots.FAINT)
    handles, labels = next(axis for axis in axes.flat if axis.get_visible()).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _draw_losses(axis: Any, row: dict[str, Any]) -> None:
    middle, named = curve(row["loss"]), set()
    for run in row["runs"]:
        name, colour = _named(run)
        line = middle + curve(run["loss"])
        wide = run["side"] == "hf"  # wide, so that lines drawn over a plain run leave it visible
        axis.plot(line, color=colour, linewidth=3.0 if wide else 0.8, label=None if name in named else name)
        named.add(name)


def _draw_distances(axis: Any, row: dict[str, Any]) -> None:
    curves = torch.stack([curve(run["loss"]) for run in row["runs"]])
    plain = sum(run["side"] == "hf" for run in row["runs"])
    apart = smoothed((curves[:, None] - curves[None, :plain]).square(), reach(curves.shape[1]))
    lines = [apart[i, [j for j in range(plain) if j != i]].mean(0).sqrt() for i in range(len(curves))]
    band = torch.stack(lines[:plain])
    steps = range(band.shape[1])
    axis.fill_between(steps, band.amin(0), band.amax(0), color=PLAIN, alpha=0.5, linewidth=0, label="plain runs")
    for run, line in zip(row["runs"][plain:], lines[plain:], strict=True):
        name, colour = _named(run)
        axis.plot(line, color=colour, linewidth=0.8, label=name)
    axis.set_yscale("log")


def _named(run: dict[str, Any]) -> tuple[str, str]:
    if run["side"] == "tigon":
        return f"fused, {run['path']}", COLOURS[run["path"]]
    return ("plain runs", PLAIN) if run["side"] == "hf" else ("in fp32", COLOURS["exact"])


def pictures(path: Path, content: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The charts of a result file: name → the picture and the dtype for `plot`."""
    dtypes = dict.fromkeys(row["dtype"] for row in content["rows"] if row["status"] != "failed")
    return {f"{path.stem}-{dtype}-{picture}.png": (picture, dtype) for dtype in dtypes for picture in PICTURES}


def page(folder: Path, charts: str) -> str:
    """Markdown of the result files in a folder, by dtype: table and charts, which lie at the address `charts`."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        content = report.load(path)
        if content["kind"] != "converge":
            continue
        parts.append(report.source(content) + "\n")
        for dtype in dict.fromkeys(row["dtype"] for row in content["rows"]):
            rows = [row for row in content["rows"] if row["dtype"] == dtype]
            parts += [
                f"### {content['environment']['device']}, {dtype}\n",
                report.to_table({**content, "rows": rows}),
                "",
            ]
            names = [name for name, (_, of) in pictures(path, content).items() if of == dtype]
            parts += [f"![{name}]({charts}/{name})\n" for name in names]
    return "\n".join(parts) or "No run has been recorded yet."
