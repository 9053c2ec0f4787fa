"""Support for `tigon rank search`: output folder, progress bar, result table and plot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tigon.cli.kept_runs import Interrupts
from tigon.cli.problem import Problem, check_writable
from tigon.files import read_json
from tigon.rank.cli.shared import sentences

NAME = "rank search"
STUDY, RESULTS, PICTURE, SCHEMA = "study.db", "results.json", "search.png", "schema.json"
WRITTEN = (STUDY, f"{STUDY}.lock", RESULTS, PICTURE, SCHEMA, "blocks.json", "refits", "refits.lock")


def check_room(output: Path, trials: int, best: int, overwrite: bool) -> None:
    """Raise a Problem if the folder is not a study, or the study is complete. Writes no files."""
    check_writable(output, f"{NAME}: --output")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / STUDY).exists():
        raise Problem(f"{NAME}: --output {output} holds files that no study wrote; give another --output")
    if overwrite:
        from tigon.rank.search.search import is_active

        if is_active(output):
            raise Problem(f"{NAME}: another process searches in {output}; wait for its end, or give another --output")
        return
    if (output / RESULTS).is_file():
        done = read_json(output / RESULTS, required=["trials", "refitted"])
        count, refits = int(done["trials"]), len(done["refitted"])
        if trials <= count and best <= refits:
            raise Problem(
                f"{NAME}: the study in {output} has {count:,} trials and {refits} fits on all rows already; --trials "
                f"above {count:,} goes on with it, --overwrite replaces it"
            )


def clear(output: Path) -> None:
    """Delete a study's files."""
    for path in (output / name for name in WRITTEN):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def options_of(given: dict[str, Any]) -> Any:
    """`rank.SearchOptions` from a command's options."""
    from tigon.rank import FitOptions, SearchOptions

    kinds = [kind.strip() for kind in given["kinds"].split(",") if kind.strip()]
    with sentences(NAME):
        fit = FitOptions(
            lr=given["lr"], table_optimizer=given["table_optimizer"], table_lr=given["table_lr"],
            epochs=given["epochs"], batch_size=given["batch_size"], metric="log_loss", patience=given["patience"],
            precision=given["precision"], seed=given["seed"],
        )  # fmt: skip
        return SearchOptions(
            given["trials"], given["sampler"], kinds, given["most"], given["rows"], given["trial_epochs"],
            given["hash_rows"], given["best"], fit,
            {name: given[name] for name in ("width", "norm", "dropout")}, given["seed"],
        )  # fmt: skip


def near(data: Any, device: Any) -> Any:
    """The table on the device, or on the host if device memory is too small."""
    import torch

    if device.type == "cpu":
        return data
    try:
        moved = data.to(device)
    except torch.OutOfMemoryError:
        return data
    free, total = torch.cuda.mem_get_info(device)
    return moved if free > total / 2 else data


class Bar:
    """Progress bar over trials with the best loss so far, then over refits; called with each `rank.SearchProgress`.

    said: text about the data, printed when the search starts.
    """

    def __init__(self, console: Any, options: Any, interrupts: Interrupts, said: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console, self.options, self.interrupts, self.said = console, options, interrupts, said
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.trials = self.bar.add_task("trials", total=options.trials)
        self.fits: Any = None
        self.told: int | None = None

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, progress: Any) -> bool:
        best, found = progress.best, progress.result
        if self.said:  # validation has passed by now
            self.console.print(self.said)
            self.said = ""
        if best is not None and best.number != self.told:
            self.told = best.number
            self.console.print(
                f"trial {best.number}: log loss {best.loss:.5f}, the best of {progress.trials:,}; {best.flops:,} FLOPs"
            )
        said = "trials" if best is None else f"trials, best {best.loss:.5f}"
        self.bar.update(self.trials, completed=progress.trials, description=said)
        if hasattr(found, "validation"):
            if self.fits is None:
                total = min(self.options.best, progress.trials)
                self.fits = self.bar.add_task("fits on all rows", total=total)
            self.bar.advance(self.fits)
        return bool(self.interrupts.signal)


def results_of(found: Any, options: Any) -> dict[str, Any]:
    """The result as JSON."""
    best = found.best
    refitted = [
        {"trial": one.number, "blocks": blocks(one.graph), "FLOPs": one.flops, "parameters": one.parameters,
         "validation": one.validation, "test": one.test, "steps": one.steps, "seconds": one.seconds,
         "folder": str(one.folder)}
        for one in found.refits
    ]  # fmt: skip
    return {
        "trials": len(found.trials) + found.failed, "failed": found.failed,
        "best": {"trial": best.number, "log_loss": best.loss, "FLOPs": best.flops, "blocks": blocks(best.graph)},
        "refitted": refitted, "options": {**options.lasting(), "trials": options.trials, "best": options.best},
        "history": [{"trial": one.number, "log_loss": one.loss, "FLOPs": one.flops} for one in found.trials],
    }  # fmt: skip


def blocks(graph: Any) -> list[dict[str, Any]]:
    return [{**block._asdict(), "inputs": list(block.inputs)} for block in graph]


def table_of(found: Any) -> Any:
    """Table of refitted graphs, or the best trials if there are no refits."""
    from rich.table import Table

    losses = {one.number: one.loss for one in found.trials}
    tested = any(one.test for one in found.refits)
    names = ["log loss, all rows", "AUC"] + ["test log loss", "test AUC"] * tested if found.refits else []
    table = Table("trial", "blocks", "FLOPs", "log loss, trial", *names)
    for one in found.refits or sorted(found.trials, key=lambda one: (one.loss, one.number))[:5]:
        graph = "\n".join(f"{n}: {block}" for n, block in enumerate(one.graph, 1))
        cells = [str(one.number), graph, f"{one.flops:,}", f"{losses[one.number]:.5f}"]
        if found.refits:
            values = [one.validation, *([one.test] if tested else [])]
            cells += [f"{of[name]:.5f}" for of in values for name in ("log_loss", "auc")]
        table.add_row(*cells)
    return table


def picture(output: Path, found: Any) -> None:
    """Plot each trial's loss and the best so far."""
    import itertools

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    at = [one.number + 1 for one in found.trials]
    losses = [one.loss for one in found.trials]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(at, losses, marker=".", linestyle="", color="tab:gray", label="a trial")
    axes.step(at, list(itertools.accumulate(losses, min)), where="post", color="tab:orange", label="the best so far")
    axes.set(xlabel="trial", ylabel="log loss on the held-out rows")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output / PICTURE, dpi=120)
    plt.close(figure)
