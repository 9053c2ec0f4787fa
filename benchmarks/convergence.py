"""Are fused runs of a training among the plain ones? What benchmarks/converge.py records, judged.

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

A run in FP8 has scores, too, and no limit: FP8 rounds more coarsely by design. Such a run is judged by the loss on
held-out text over several seeds, see `describe_held_out`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Any

import torch
from torch import Tensor

MEASURES = ("loss", "norm", "weights")
CHANCE = 1e-3  # the chance that a file of sound runs has a run beyond a limit
# A difference of two fp32 numbers is exact to about one rounding, 2⁻²⁴ of the numbers.
ROUNDING = 2.0**-24


@dataclass
class Training:
    """One run that has ended.

    side: "hf", "tigon", "fp8", or "exact", which computes in fp32. path: how its loss is computed. order: its seed.
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
            "weights": compute_scores(
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


@dataclass
class HeldOut:
    """One training, judged by the loss on text that no step trained on.

    part: from random weights, or from the weights that bf16 has trained. side: how the model was changed.
    losses: of each step. held_out: pairs of a number of steps and the held-out loss after them, which a plain bf16
        model with the same weights computes.
    calls: of fused operators in the last step.
    """

    part: str
    side: str
    seed: int
    source: str
    batch: int
    seq: int
    steps: int
    rate: float
    parameters: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As it is recorded: the losses as text, for `curve`."""
        return {**asdict(self), "losses": " ".join(f"{loss:.5f}" for loss in self.losses)}


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
    return compute_scores(smooth(apart, reach(curves.shape[1])), plain, floor)


def compute_scores(apart: Tensor, plain: int, floor: float) -> list[float]:
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


def smooth(values: Tensor, reach: int) -> Tensor:
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
        if run["side"] == "fp8" and not run["calls"].get("fp8"):
            found.append(f"{run['path']}: no layer ran in FP8")
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


# ------------------------------------------------------------------------------------------------------- held-out text

SHOWN = (1, 10, 25, 50, 100)  # steps whose losses are printed, besides the last


def describe_held_out(rows: Sequence[HeldOut], base: str) -> list[str]:
    """A line for each part and side: losses of steps, the mean over seeds; held-out losses of the seeds; a verdict.

    base: the side that others are compared with, seed by seed. The yardstick is the range of its held-out losses over
    seeds: a side whose mean exceeds the base's by more is BEYOND the spread, and so is one that is not a number.
    """
    lines = []
    for part, side in dict.fromkeys((row.part, row.side) for row in rows):
        mine = {row.seed: row for row in rows if (row.part, row.side) == (part, side)}
        theirs = {row.seed: row for row in rows if (row.part, row.side) == (part, base)}
        seeds = [seed for seed in mine if seed in theirs]
        steps = [step for step in SHOWN if step < mine[seeds[0]].steps] + [mine[seeds[0]].steps]
        shown = ", ".join(f"{step}: {fmean(mine[seed].losses[step - 1] for seed in seeds):.3f}" for step in steps)
        ends = [mine[seed].held_out[-1][1] for seed in seeds]
        bases = [theirs[seed].held_out[-1][1] for seed in seeds]
        line = f"{part}, {side}: loss of step {shown}; held out {', '.join(f'{end:.4f}' for end in ends)}"
        if side != base:
            curves = [
                torch.tensor(mine[seed].losses, dtype=torch.float64) - torch.tensor(theirs[seed].losses)
                for seed in seeds
            ]
            apart = float(torch.stack(curves).square().mean().sqrt())
            change, spread = fmean(ends) - fmean(bases), max(bases) - min(bases)
            verdict = "within" if change <= spread else "BEYOND"  # NaN is beyond
            line += f", mean {change:+.4f}, {verdict} the spread of seeds {spread:.4f}; steps' losses {apart:.4f} apart"
        lines.append(line)
    return lines
