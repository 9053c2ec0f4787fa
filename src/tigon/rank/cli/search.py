"""`tigon rank search`: search block graphs for a feature ranker, with trials stored in a folder."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tigon.cli.checkpoint import write_json
from tigon.cli.options import device_option, option
from tigon.cli.outputs import delete
from tigon.cli.problem import Problem, check_writable, find_device, needs
from tigon.cli.progress import Steps
from tigon.cli.run import describe_versions
from tigon.cli.screen import draw, screen, show
from tigon.cli.signals import Interrupts
from tigon.files import read_json
from tigon.rank.cli.report import sentences
from tigon.rank.cli.tables import TableOptions, move_near, read_tables

NAME = "rank search"
STUDY, RESULTS, PICTURE, SCHEMA, BLOCKS = "study.db", "results.json", "search.png", "schema.json", "blocks.json"
WRITTEN = (STUDY, f"{STUDY}-journal", f"{STUDY}.lock", RESULTS, PICTURE, SCHEMA, BLOCKS, "refits", "refits.lock")


# ruff: noqa: E501 (one line for each option)
# fmt: off
@dataclass(frozen=True, kw_only=True)
class DataOptions(TableOptions):
    PANEL: ClassVar[str] = "Data"

    data: list[str] = option(..., "Impressions, one per row, in the formats of `tigon rank fit`.")
    val: list[str] | None = option(None, "Validation impressions for comparing graphs; default: a fraction of the data.")
    test: list[str] | None = option(None, "Test impressions for the best graphs; not used for selection.")
    val_fraction: float | None = option(0.1, "Fraction of requests held out for validation, without --val.", min=0.001, max=0.9)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    PANEL: ClassVar[str] = "Run"

    output: Path = option(Path("study"), "Study folder. An existing study is resumed; several processes can share a study.", "-o")
    overwrite: bool = option(False, "Delete an existing study in --output.")
    trials: int = option(100, "Total number of graphs to try, including earlier trials.", min=1)
    best: int = option(5, "Number of best graphs to refit on all rows.", min=0)
    sampler: str = option("evolution", "evolution, or random as a baseline.")
    plot: bool = option(False, "Plot the best result so far against trials (search.png).")
    device: str = device_option()


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    PANEL: ClassVar[str] = "Graphs"

    kinds: str = option("mlp,fm,dot,cross,residual-cross,gate", "Comma-separated block kinds; default: all.")
    most: int = option(7, "Maximum blocks per graph, up to 7.")
    width: int = option(16, "Width of the embeddings.", min=1)
    norm: str = option("batch", "Normalization in mlp blocks: batch, layer or none.")
    dropout: float = option(0.0, "Of mlp blocks.", min=0, max=0.9)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(GraphOptions, StudyOptions, DataOptions):
    PANEL: ClassVar[str] = "Optimization"

    rows: float = option(0.1, "Fraction of requests that a trial trains on.")
    trial_epochs: int = option(1, "Passes per trial over these requests.", min=1)
    hash_rows: int = option(10_000, "Maximum codes per field in trials; larger fields share codes.", min=1)
    epochs: int = option(10, "Maximum passes for a refit on all rows.", min=1)
    batch_size: int = option(256, "Requests of a step.", min=1)
    lr: float = option(1e-3, "Peak learning rate for AdamW.")
    table_optimizer: str = option("adamw", "Optimizer for embeddings: adamw or row-adagrad.")
    table_lr: float = option(0.02, "Peak learning rate for row-adagrad.")
    patience: int = option(3, "Early-stopping patience for a refit on all rows: epochs without a lower log loss.", min=1)
    seed: int = option(0, "Seed for graphs, weights, data order and split.", min=0)
    precision: str = option("auto", "Dtype for matrix products: bf16, fp32, or auto (bf16 on a GPU).")
# fmt: on


def search(options: SearchOptions) -> None:
    """Search a feature ranker's block graph by evolution, and refit the best graphs.

    The folder is an Optuna study. Run the same command again to resume; concurrent processes share the trials.
    """
    plotting = ["matplotlib"] if options.plot else []
    needs(
        f"tigon {NAME}", "search", "torch", "pyarrow", "safetensors", "accelerate", "optuna", "lightgbm", *plotting
    )  # fmt: skip
    output = options.output.expanduser().resolve()
    _check_free(options, output)
    device: Any = find_device(options.device, NAME)
    search_options = _make_search_options(options)
    console = screen(stderr=True)
    with console.status("reading the data"):
        tables = read_tables(NAME, options, options.seed)
    if options.overwrite:
        for name in WRITTEN:
            delete(output / name)
    from tigon import rank

    train, val = (move_near(part, device) for part in tables[:2])
    words = [f"{len(train):,} training requests, {len(val):,} for validation; labels {', '.join(train.schema.labels)}"]
    best = -1

    def after(progress: Any) -> bool:
        nonlocal best
        while words:  # validation has passed by now
            console.print(words.pop())
        if progress.best is not None and progress.best.number != best:
            best = progress.best.number
            console.print(
                f"trial {best}: log loss {progress.best.loss:.5f}, the best of {progress.trials:,}; "
                f"{progress.best.flops:,} FLOPs"
            )
        if hasattr(progress.result, "validation"):
            console.print(f"trial {progress.result.number} is fitted on all rows")
        steps.show(progress.trials, "" if progress.best is None else f"best {progress.best.loss:.5f}")
        return bool(interrupts.signal)

    with Interrupts() as interrupts, sentences(NAME), Steps(console, "trials", options.trials) as steps:
        found = rank.search_blocks(
            train, val, search_options, folder=output, test=tables.test, device=device, after=after
        )
    tables.train.schema.save(output / SCHEMA)
    if options.plot and found.trials:
        _plot(output / PICTURE, found)
    if found.stopped:
        raise Problem(
            f"{NAME}: stopped after {len(found.trials):,} trials, which are saved; run the same command to resume",
            code=128 + interrupts.signal,
        )
    write_json(output / RESULTS, {**_list_results(found, search_options), **describe_versions(device)})
    show(_make_table(found))
    if found.failed:
        print(f"{found.failed:,} trials had no finite loss")
    if found.refits:
        first, (schema, blocks) = found.refits[0], (shlex.quote(str(output / name)) for name in (SCHEMA, BLOCKS))
        print(
            f"the ranker from trial {first.number} is in {first.folder}, its blocks in {output / BLOCKS}; to refit "
            f"with other options: tigon rank fit --model lirank --schema {schema} --blocks {blocks} --data …"
        )


def _check_free(options: SearchOptions, output: Path) -> None:
    """Raise a Problem if the folder is not a study, or the study is complete. Writes no files."""
    check_writable(output, f"{NAME}: --output")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / STUDY).exists():
        raise Problem(f"{NAME}: --output {output} holds files that are not from a study; choose another --output")
    if options.overwrite:
        from tigon.rank.search.search import is_active

        if is_active(output):
            raise Problem(
                f"{NAME}: another process is searching in {output}; wait until that search ends, or choose another --output"
            )
        return
    if (output / RESULTS).is_file():
        done = read_json(output / RESULTS, required=["trials", "refitted"])
        count, refits = int(done["trials"]), len(done["refitted"])
        if options.trials <= count and options.best <= refits:
            raise Problem(
                f"{NAME}: the study in {output} has {count:,} trials and {refits} fits on all rows already; --trials "
                f"above {count:,} continues the study, --overwrite deletes it"
            )


def _make_search_options(options: SearchOptions) -> Any:
    """`rank.SearchOptions` from the command's options."""
    from tigon import rank

    kinds = [kind.strip() for kind in options.kinds.split(",") if kind.strip()]
    names = ("lr", "table_optimizer", "table_lr", "epochs", "batch_size", "patience", "precision", "seed")
    sampler: Any = options.sampler
    with sentences(NAME):
        fit = rank.FitOptions(metric="log_loss", **{name: getattr(options, name) for name in names})
        return rank.SearchOptions(
            options.trials, sampler, kinds, options.most, options.rows, options.trial_epochs,
            options.hash_rows, options.best, fit, {name: getattr(options, name) for name in ("width", "norm", "dropout")},
            options.seed,
        )  # fmt: skip


def _list_results(found: Any, options: Any) -> dict[str, Any]:
    """The result as JSON."""
    best = found.best
    refitted = [
        {"trial": one.number, "blocks": _list_blocks(one.graph), "FLOPs": one.flops, "parameters": one.parameters,
         "validation": one.validation, "test": one.test, "steps": one.steps, "seconds": one.seconds,
         "folder": str(one.folder)}
        for one in found.refits
    ]  # fmt: skip
    return {
        "trials": len(found.trials) + found.failed, "failed": found.failed,
        "best": {"trial": best.number, "log_loss": best.loss, "FLOPs": best.flops, "blocks": _list_blocks(best.graph)},
        "refitted": refitted, "options": {**options.lasting(), "trials": options.trials, "best": options.best},
        "history": [{"trial": one.number, "log_loss": one.loss, "FLOPs": one.flops} for one in found.trials],
    }  # fmt: skip


def _list_blocks(graph: Any) -> list[dict[str, Any]]:
    return [{**block._asdict(), "inputs": list(block.inputs)} for block in graph]


def _make_table(found: Any) -> Any:
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


def _plot(picture: Path, found: Any) -> None:
    """Plot each trial's loss and the best so far."""
    at, losses = [one.number + 1 for one in found.trials], [one.loss for one in found.trials]
    best = list(itertools.accumulate(losses, min))
    with draw(picture) as axes:
        axes.plot(at, losses, marker=".", linestyle="", color="tab:gray", label="a trial")
        axes.step(at, best, where="post", color="tab:orange", label="the best so far")
        axes.set(xlabel="trial", ylabel="log loss on the validation set")
        axes.legend()
