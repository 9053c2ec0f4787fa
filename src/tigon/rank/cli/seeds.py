"""Multi-seed runs: `tigon rank fit --seed 0,1,2` writes a run per seed in one folder, with mean and spread."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.cli.checkpoint import RECORD, write_json
from tigon.cli.folder import Claim
from tigon.cli.kept_runs import circumstances, read_record
from tigon.cli.problem import Problem, seeds_of
from tigon.files import read_json
from tigon.rank.cli.fitting import NAME, PICTURE, RESULTS, Run, Tables

if TYPE_CHECKING:
    from tigon.rank import Evaluation

PARTS = ("validation", "test")


def folders_of(output: Path) -> dict[int, Path]:
    """Runs in a multi-seed folder, by seed; {} for a single run or none."""
    try:
        options = read_json(output / RECORD, required=["options"])["options"]
        seeds = seeds_of(NAME, str(options["seed"]))
    except (ValueError, KeyError, TypeError, Problem):
        return {}
    return {seed: output / f"seed-{seed}" for seed in seeds} if len(seeds) > 1 else {}


def one_of(command: str, folder: Path) -> None:
    """Raise a Problem for a multi-seed folder if a command needs a single ranker."""
    if found := folders_of(folder):
        raise Problem(
            f"{command}: {folder} holds runs of the seeds {', '.join(map(str, found))}; name one of them, such as "
            f"{next(iter(found.values()))}"
        )


class Runs:
    """A run per seed on the same tables and split, so that the spread reflects training alone.

    The constructor validates the options and writes no files, so that errors occur before another run is replaced.
    """

    def __init__(
        self, output: Path, record: dict[str, Any], tables: Tables, options: Any, device: Any, seeds: list[int]
    ) -> None:
        from tigon.cli.screen import screen

        self.output, self.record, self.tables, self.options, self.device = output, record, tables, options, device
        self.seeds = seeds
        self.console = screen(stderr=True, soft_wrap=True)
        self.first = self._made(seeds[0])

    def go(self) -> None:
        for seed in self.seeds:
            run = self.first if seed == self.seeds[0] else self._made(seed)
            if run is None:
                continue
            self.console.print(f"seed {seed}")
            run.output.mkdir(parents=True, exist_ok=True)
            with Claim() as claim:
                claim.take(run.output)
                write_json(run.output / RECORD, run.record)
                run.go()
        self._conclude()

    def _made(self, seed: int) -> Run | None:
        """A seed's run, resumed if it was started; None if it is complete."""
        folder = self.output / f"seed-{seed}"
        own = {"seed": seed, "split_seed": self.seeds[0]}
        record = {**self.record, "options": {**self.record["options"], **own}}
        if (folder / RECORD).is_file():
            record = read_record(NAME, folder)
            if "results" in record:
                return None
        options = dataclasses.replace(self.options, seed=seed)
        return Run(folder, record, self.tables, options, self.device, again=self.output)

    def _conclude(self) -> None:
        from tigon.cli.screen import screen, show

        rows = []
        for seed in self.seeds:
            found = read_record(NAME, self.output / f"seed-{seed}")["results"]
            rows.append({"seed": seed, **{name: found[name] for name in ("steps", "best_step", "seconds", "history")},
                         **{name: found[name]["metrics"] for name in PARTS if name in found}})  # fmt: skip
        summary = {name: summarized([row[name] for row in rows]) for name in PARTS if name in rows[0]}
        results = {"seeds": rows, "summary": summary, **circumstances(self.device)}
        plot(self.output / PICTURE, rows, self.options.monitor)
        write_json(self.output / RESULTS, {**results, "options": self.record["options"]})
        self.record["results"] = results
        write_json(self.output / RECORD, self.record)
        wide = screen(width=None if sys.stdout.isatty() else 10_000)
        for name in summary:
            show(wide, spread_table(name, {row["seed"]: row[name] for row in rows}, summary[name]))
        print(
            f"the rankers of {len(rows)} seeds are in {self.output / 'seed-N'}, their mean and spread in "
            f"{self.output / RESULTS} and {self.output / PICTURE}"
        )


def summarized(found: list[dict[str, Any]]) -> dict[str, Any]:
    """label → metric → mean and standard deviation over the seeds, for metrics from `shared.spread`."""
    import numpy as np

    made: dict[str, Any] = {}
    for label, names in found[0].items():
        made[label] = {}
        for name in names:
            values = [one[label][name]["value"] for one in found]
            made[label][name] = {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1))}
    return made


def spread_table(title: str, of_seeds: dict[int, dict[str, Any]], summary: dict[str, Any]) -> Any:
    """A row per label and metric: value per seed, mean and standard deviation."""
    from rich.table import Table

    table = Table("label", "metric", *(f"seed {seed}" for seed in of_seeds), "mean", "sd", title=title)
    for label, names in summary.items():
        for name, one in names.items():
            values = [metrics[label][name]["value"] for metrics in of_seeds.values()]
            table.add_row(label, name, *(f"{value:.4f}" for value in (*values, one["mean"], one["sd"])))
    return table


def evaluations(found: dict[int, Evaluation]) -> dict[str, Any]:
    """Multi-seed output for `tigon rank eval`."""
    from tigon.rank.cli.shared import spread

    metrics = {seed: spread(one) for seed, one in found.items()}
    rows = [{"seed": seed, "metrics": one} for seed, one in metrics.items()]
    return {"seeds": rows, "summary": summarized(list(metrics.values()))}


def plot(picture: Path, rows: list[dict[str, Any]], watched: str) -> None:
    """Plot the early-stopping metric by step, a line per seed; without validation, the fit times.

    rows: one per seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for row in rows:
        history = row["history"]
        if history:
            axes.plot(
                [one["step"] for one in history], [one[watched] for one in history], marker="o",
                label=f"seed {row['seed']}",
            )  # fmt: skip
        else:
            axes.plot(row["seed"], row["seconds"], marker="o", label=f"seed {row['seed']}")
    held = bool(rows[0]["history"])
    axes.set(xlabel="step" if held else "seed", ylabel=f"{watched} on the validation" if held else "seconds of the fit")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
