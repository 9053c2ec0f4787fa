"""`tigon retrieve train`: train two towers on user–item pairs, and build an item index."""

from __future__ import annotations

import dataclasses
import shlex
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.checkpoint import RECORD, prune, write_json
from tigon.cli.kept_runs import Interrupts, circumstances, load, make_room, read_record, save
from tigon.cli.problem import Problem, count_processes, device_of, needs, seeds_of
from tigon.cli.progress import Steps, working
from tigon.cli.screen import screen

NAME = "retrieve train"
RESULTS, PICTURE, INDEX, QUERIES, TABLES = (
    "results.json", "recall.png", "items.index", "users.npy", "towers.safetensors",
)  # fmt: skip
WRITTEN = (RESULTS, PICTURE, INDEX, QUERIES, TABLES)
_RUN, _MODEL, _STEP = "Run", "Model", "Optimization"


def _in(panel: str, help: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


# ruff: noqa: E501 (one line per option)
# fmt: off
def train(
    data: Annotated[Path | None, typer.Argument(help="Pairs: parquet, csv, json lines or arrow; a .txt file of lines \"user item item …\"; a scipy .npz adjacency matrix; or a folder of train.txt or s_adj_mat.npz and test.txt.")] = None,
    test: Annotated[Path | None, _in(_RUN, "Pairs to test on, in the forms of the data.")] = None,
    user: Annotated[str | None, _in(_RUN, "Column of users; default: user or user_id.")] = None,
    item: Annotated[str | None, _in(_RUN, "Column of items; default: item or item_id.")] = None,
    output: Annotated[Path, _in(_RUN, "Folder for checkpoints, results and the index.", "--output", "-o")] = Path("retrieve-run"),
    resume: Annotated[bool, _in(_RUN, "Go on from the newest whole checkpoint in --output, with its options.", "--resume")] = False,
    overwrite: Annotated[bool, _in(_RUN, "Delete the run that is in --output.", "--overwrite")] = False,
    loss: Annotated[str, _in(_STEP, "item_softmax, in_batch, in_batch_logq, sampled or hard.")] = "item_softmax",
    dim: Annotated[int | None, _in(_MODEL, "Width of the vectors. \\[default: from the data]", min=1, max=256)] = None,
    hops: Annotated[int, _in(_MODEL, "How far a vector pools over training pairs; 0: own embeddings alone.", min=0)] = 3,
    own: Annotated[float, _in(_MODEL, "Weight of own embeddings beside pooled ones.", min=0)] = 0.0,
    bias: Annotated[bool, _in(_MODEL, "Give each item a learned number that is added to its scores.")] = True,
    leave_out: Annotated[bool, _in(_STEP, "Pool over all pairs but those of the step.")] = True,
    lr: Annotated[float | None, _in(_STEP, "Learning rate of AdamW. \\[default: from the data]")] = None,
    weight_decay: Annotated[float, _in(_STEP, "Weight decay of AdamW.", min=0)] = 0.0,
    batch_size: Annotated[int | None, _in(_STEP, "Pairs of a step. \\[default: from the data]", min=1)] = None,
    scale: Annotated[float, _in(_STEP, "Factor of the cosines: one over the temperature.")] = 12.0,
    negatives: Annotated[int, _in(_STEP, "For --loss sampled: items drawn a step.", min=1)] = 4096,
    hard_after: Annotated[int, _in(_STEP, "For --loss hard: epochs with the items of the batch alone, before negatives are mined.", min=0)] = 10,
    hard_negatives: Annotated[int, _in(_STEP, "For --loss hard: items mined for each user at the beginning of an epoch.", min=1, max=1000)] = 16,
    hard_skip: Annotated[int, _in(_STEP, "For --loss hard: how many of a user's best items are left out, which may be right after all.", min=0, max=1000)] = 0,
    epochs: Annotated[int | None, _in(_STEP, "Most passes over the pairs. \\[default: from the data]", min=1)] = None,
    max_minutes: Annotated[float, _in(_STEP, "Most minutes of training for a seed.")] = 10.0,
    val_fraction: Annotated[float | None, _in(_STEP, "Share of the training pairs that early stopping validates on; 0: train for --epochs. \\[default: from the data]", min=0, max=0.9)] = None,
    val_split: Annotated[str, _in(_STEP, "Which pairs are held out: random, or block: of each user, neighbours in the order of items' ids.")] = "random",
    eval_every: Annotated[int | None, _in(_STEP, "Epochs between validations. \\[default: from the data]", min=1)] = None,
    patience: Annotated[int, _in(_STEP, "Validations without a better one before training stops.", min=1)] = 5,
    seed: Annotated[str, _in(_STEP, "Seeds, separated by commas: a model of each, and their mean and spread.")] = "0",
    k: Annotated[str, _in(_RUN, "Cut-offs of the test, separated by commas.", "-k")] = "20",
    precision: Annotated[str, _in(_STEP, "Of the products: bf16, fp32, or auto: bf16 on a GPU.")] = "auto",
    device: Annotated[str, _in(_RUN, "auto, cpu or cuda.")] = "auto",
) -> None:
    # fmt: on
    """Train two towers on pairs of users and items: vectors of items as an index, and those of users to search it."""
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    needs(f"tigon {NAME}", "train", "accelerate", "matplotlib")
    given = {name: value for name, value in locals().items() if name not in ("resume", "overwrite", "device", "output")}
    given = {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in given.items()}
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")  # the part used is tested
    if count_processes() > 1:
        raise Problem(f"{NAME}: trains on one device, got {count_processes()} processes")
    output = output.expanduser().resolve()
    if resume:
        record = read_record(NAME, output)
        if "results" in record:
            raise Problem(f"{NAME}: the run in {output} is at its end")
        given = record["options"]
    elif data is None:
        raise Problem(f"{NAME}: the pairs to train on must be given")
    place = device_of(device, NAME)
    settings, seeds, cuts = _settings(given)
    from tigon.retrieve.cli.pairs import read_pairs

    test_path = None if given["test"] is None else Path(given["test"])
    with working(screen(stderr=True), f"reading {given['data']}"):
        pairs = read_pairs(Path(given["data"]), test_path, given["user"], given["item"])
    if resume:
        if record["data"] != pairs.digest:
            raise Problem(f"{NAME}: {given['data']} is not what the run in {output} was trained on")
    else:
        make_room(NAME, output, WRITTEN, overwrite)
        from tigon.retrieve.cli.fitting import choose

        chosen = choose(len(pairs.train), given)
        given |= chosen
        settings = dataclasses.replace(settings, **{k: v for k, v in chosen.items() if k != "val_fraction"})
        record = {"kind": NAME, "options": given, "chosen": [*chosen], "data": pairs.digest, "stages": {}}
        write_json(output / RECORD, record)
    _Run(output, record, pairs, settings, seeds, cuts, (given["val_split"], given["val_fraction"]), place).go()


def _settings(given: dict[str, Any]) -> tuple[Any, list[int], list[int]]:
    from tigon.cli.problem import integers
    from tigon.retrieve.cli.fitting import LOSSES, PRECISIONS, Settings
    from tigon.retrieve.cli.pairs import SPLITS

    for name, known in (("loss", LOSSES), ("precision", PRECISIONS), ("val_split", tuple(SPLITS))):
        if given[name] not in known:
            raise Problem(f"{NAME}: --{name.replace('_', '-')} must be one of {', '.join(known)}, got {given[name]}")
    for name in ("lr", "scale", "max_minutes"):
        if given[name] is not None and not 0 < given[name] < float("inf"):
            raise Problem(f"{NAME}: --{name.replace('_', '-')} must be above 0, got {given[name]}")
    seeds = seeds_of(NAME, given["seed"])
    fields = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in given.items() if name in fields and value is not None})
    return settings, seeds, sorted(set(integers(NAME, "-k", given["k"], 2048)))


class _Run:
    """Stages: a validated fit, then one fit per seed on all pairs up to the best epoch."""

    def __init__(
        self, output: Path, record: dict[str, Any], pairs: Any, settings: Any, seeds: list[int], cuts: list[int],
        held: tuple[str, float], device: Any,
    ) -> None:  # fmt: skip
        import torch

        self.output, self.record, self.pairs, self.settings = output, record, pairs, settings
        self.seeds, self.cuts, self.device = seeds, cuts, device
        self.how, self.share = held
        self.console = screen(stderr=True)
        self.train = torch.from_numpy(pairs.train)
        self.saved = time.monotonic()

    def go(self) -> None:
        from tigon.retrieve.cli.fitting import evaluated
        from tigon.retrieve.cli.pairs import SPLITS

        users, items = len(self.pairs.users), len(self.pairs.items)
        self.console.print(f"{users:,} users, {items:,} items, {len(self.train):,} training pairs on {self.device}")
        if chosen := self.record.get("chosen"):
            given = self.record["options"]
            words = ", ".join(f"{name.replace('_', ' ')} {given[name]}" for name in chosen)
            self.console.print(
                f"chosen from {len(self.train):,} pairs: {words}; options of these names override them", soft_wrap=True
            )
        stages: dict[str, Any] = self.record["stages"]
        settings = self.settings
        if self.share:
            import torch

            if "validation" not in stages:
                kept, held = map(torch.from_numpy, SPLITS[self.how](self.pairs.train, self.share, self.seeds[0]))
                fitted = self._fit("validation", kept, held, settings, self.seeds[0])
                self._done("validation", {
                    "best": fitted.best, "history": fitted.history, **_times(fitted),
                    "warnings": self._doubts(fitted, kept, held),
                })  # fmt: skip
            settings = dataclasses.replace(settings, epochs=stages["validation"]["best"])
            self.console.print(f"the best epoch is {settings.epochs}; now on all pairs")
        for seed in self.seeds:
            if f"seed {seed}" in stages:
                continue
            fitted = self._fit(f"seed {seed}", self.train, None, settings, seed)
            found: dict[str, Any] = _times(fitted)
            if self.pairs.test is not None:
                import torch

                test = torch.from_numpy(self.pairs.test).to(self.device)
                found |= evaluated(fitted.towers, test, self.train.to(self.device), tuple(self.cuts))
            if seed == self.seeds[0]:
                self._save(fitted.towers)
            self._done(f"seed {seed}", found)
        self._conclude()

    def _fit(self, stage: str, pairs: Any, held: Any, settings: Any, seed: int) -> Any:
        from tigon.retrieve.cli.fitting import fit

        state = self._state(stage)
        if state is not None:
            self.console.print(f"{stage}: from epoch {state['epoch']}")

        def after(epoch: int, loss: float, found: dict[str, Any] | None, made: Any) -> bool:
            if found is not None:
                shown = "  ".join(f"{name} {found[name]:.4f}" for name in ("recall@20", "ndcg@20"))
                self.console.print(f"{stage}, epoch {epoch}: loss {loss:.4f}  {shown}")
            # Often enough to lose little, but so rarely that a short epoch does not wait for the disk.
            if interrupts.signal or time.monotonic() - self.saved > 20 or (epoch == 1 and state is None):
                facts = {"stage": stage, **made()}
                save(self.output, {"towers": facts.pop("towers")}, facts.pop("optimizer"), facts)
                self.saved = time.monotonic()
            return bool(interrupts.signal)

        batches = max(len(pairs) // min(settings.batch_size, len(pairs)), 1)
        done = 0 if state is None else state["epoch"] * batches
        with Interrupts() as interrupts, Steps(self.console, "steps", settings.epochs * batches, done) as steps:
            fitted = fit(
                pairs, len(self.pairs.users), len(self.pairs.items), settings, seed, held, device=self.device,
                state=state, after_epoch=after, after_step=steps.show,
            )  # fmt: skip
        if fitted.stopped:
            command = f"tigon {NAME} --resume --output {shlex.quote(str(self.output))}"
            raise Problem(
                f"stopped in {stage} after epoch {fitted.epochs}, with a checkpoint; go on by: {command}",
                code=128 + interrupts.signal,
            )
        return fitted

    def _doubts(self, fitted: Any, kept: Any, held: Any) -> list[str]:
        """Print the warnings that `find_doubts` returns for the validated fit."""
        from tigon.retrieve.cli.fitting import find_doubts, popular

        baseline = popular(kept, held, len(self.pairs.users), len(self.pairs.items), self.settings.metric)
        found = find_doubts(fitted, self.settings, baseline)
        for warning in found:
            self.console.print(f"warning: {warning}", soft_wrap=True)
        return found

    def _state(self, stage: str) -> dict[str, Any] | None:
        """The state to resume this stage from: the newest complete checkpoint, if it belongs to this stage."""
        found = load(self.output)
        if found is None or found[2]["stage"] != stage:
            return None
        modules, optimizer, facts = found
        return {**facts, **modules, "optimizer": optimizer}

    def _done(self, stage: str, found: dict[str, Any]) -> None:
        self.record["stages"][stage] = found
        write_json(self.output / RECORD, self.record)
        prune(self.output, 0)

    def _save(self, towers: Any) -> None:
        """Save the first seed's towers: their tables, the items as an index, and the users' vectors."""
        import numpy as np
        import torch
        from safetensors.torch import save_file

        from tigon.retrieve import Index

        with torch.no_grad():
            users, items = (vectors.cpu() for vectors in towers())
        index = Index(items.shape[1], len(items), dtype="float32")
        ids = self.pairs.items
        index.upsert(ids.tolist() if ids.dtype.kind == "U" else ids, items)
        index.save(self.output / INDEX)
        np.save(self.output / QUERIES, users.numpy())
        save_file({name: value.cpu() for name, value in towers.state_dict().items()}, self.output / TABLES)

    def _conclude(self) -> None:
        import numpy as np
        from rich.table import Table

        from tigon.cli.screen import show

        stages = self.record["stages"]
        rows = [{"seed": seed, **stages[f"seed {seed}"]} for seed in self.seeds]
        names = [name for name in rows[0] if name != "seed"]
        summary = {
            name: {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None}
            for name in names for values in [[row[name] for row in rows]]
        }  # fmt: skip
        warnings = stages.get("validation", {}).get("warnings", [])
        self.record["results"] = {
            "seeds": rows, "summary": summary, "warnings": warnings, **circumstances(self.device)
        }  # fmt: skip
        _plot(self.output / PICTURE, stages)
        write_json(self.output / RESULTS, {**self.record["results"], "options": self.record["options"]})
        write_json(self.output / RECORD, self.record)
        table = Table("seed", *names)
        for row in rows:
            table.add_row(str(row["seed"]), *(_number(row[name]) for name in names))
        if len(rows) > 1:
            for kind in ("mean", "sd"):
                table.add_row(kind, *(_number(summary[name][kind]) for name in names))
        show(screen(), table)
        print(f"the index of the items is {self.output / INDEX}, vectors of the users {self.output / QUERIES}")


def _times(fitted: Any) -> dict[str, float]:
    return {"epochs": fitted.epochs, "seconds": fitted.seconds, "seconds an epoch": fitted.epoch_seconds}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _plot(picture: Path, stages: dict[str, Any]) -> None:
    """Plot validation Recall and NDCG by epoch; without validation, the metrics by seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if "validation" in stages:
        history = stages["validation"]["history"]
        for name in ("recall@20", "ndcg@20"):
            axes.plot([row["epoch"] for row in history], [row[name] for row in history], marker="o", label=name)
        axes.axvline(stages["validation"]["best"], linewidth=1, color="gray", label="the best epoch")
        axes.set(xlabel="epoch", ylabel="on the validation pairs")
    else:
        for name, found in stages.items():
            shown = {metric: value for metric, value in found.items() if "@" in metric}
            axes.plot(list(shown), list(shown.values()), marker="o", label=name)
        axes.set(ylabel="on the test pairs")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
