"""`tigon retrieve train`: train two towers on user–item pairs, and build an item index."""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import load_checkpoint, save_checkpoint
from tigon.cli.problem import Problem, check_choice, check_positive, needs, parse_integers
from tigon.cli.progress import Steps
from tigon.cli.run import RESULTS, Run, stop
from tigon.cli.screen import draw
from tigon.cli.signals import Interrupts
from tigon.retrieve.cli.train_options import LOSSES, PRECISIONS, TrainOptions, choose_settings

NAME = "retrieve train"
PICTURE, INDEX, QUERIES, TABLES = "recall.png", "items.index", "users.npy", "towers.safetensors"


def train(options: TrainOptions) -> None:
    """Train two towers on pairs of users and items: vectors of items as an index, and those of users to search it."""
    needs(f"tigon {NAME}", "retrieve", "torch", "pyarrow", "safetensors", "numpy")
    needs(f"tigon {NAME}", "train", "matplotlib")
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")  # the part used is tested
    TowersRun(options).run()


class TowersRun(Run[TrainOptions]):
    """Stages: a validated fit, then one fit per seed on all pairs up to the best epoch."""

    NAME = NAME
    WRITTEN = (RESULTS, PICTURE, INDEX, QUERIES, TABLES)

    def complete(self, options: TrainOptions) -> TrainOptions:
        if options.data is None:
            raise Problem(f"{NAME}: training pairs must be given")
        test = None if options.test is None else str(Path(options.test).resolve())
        return dataclasses.replace(options, data=str(Path(options.data).resolve()), test=test)

    def check(self) -> None:
        from tigon.retrieve.cli.pairs import SPLITS

        check_choice(NAME, self.options, loss=LOSSES, precision=PRECISIONS, val_split=SPLITS)
        check_positive(NAME, self.options, "lr", "scale", "max_minutes")
        self.cuts = sorted(set(parse_integers(NAME, "-k", self.options.k, 2048)))

    def read(self) -> str:
        import torch

        from tigon.retrieve.cli.pairs import read_pairs

        test = None if self.options.test is None else Path(self.options.test)
        self.pairs = read_pairs(Path(str(self.options.data)), test, self.options.user, self.options.item)
        self.rows = torch.from_numpy(self.pairs.train)
        self.sizes = len(self.pairs.users), len(self.pairs.items)
        return self.pairs.digest

    def choose(self) -> dict[str, Any]:
        return choose_settings(self.options, len(self.rows))

    def prepare(self) -> None:
        if self.options.val_fraction:
            self.parts = self._split()

    def _split(self) -> tuple[Any, Any]:
        import torch

        from tigon.retrieve.cli.pairs import SPLITS

        split: Any = SPLITS[self.options.val_split]
        kept, held = split(self.pairs.train, self.options.val_fraction, self.seeds[0])
        return torch.from_numpy(kept), torch.from_numpy(held)

    def train(self) -> None:
        users, items = self.sizes
        self.console.print(f"{users:,} users, {items:,} items, {len(self.rows):,} training pairs on {self.device}")
        self.show_chosen(len(self.rows), "pairs")
        stages: dict[str, Any] = self.record["stages"]
        options: Any = self.options
        if options.val_fraction:
            if "validation" not in stages:
                self._validate()
            options = dataclasses.replace(options, epochs=stages["validation"]["best"])
            self.console.print(f"best epoch: {options.epochs}; now training on all pairs")
        for seed in self.seeds:
            if f"seed {seed}" not in stages:
                self._fit_seed(seed, options)
        _plot(self.output / PICTURE, stages)
        self.finish_seeds(stages.get("validation", {}).get("warnings", []))
        print(f"item index: {self.output / INDEX}, user vectors: {self.output / QUERIES}")

    def _validate(self) -> None:
        from tigon.retrieve.cli.loop import find_doubts, measure_popular

        kept, held = self.parts
        fitted = self._fit("validation", kept, held, self.options, self.seeds[0])
        doubts = find_doubts(fitted, self.options, measure_popular(kept, held, *self.sizes))
        for doubt in doubts:
            self.console.print(f"warning: {doubt}")
        found = {"best": fitted.best, "history": fitted.history, **_list_times(fitted), "warnings": doubts}
        self.finish_stage("validation", found)

    def _fit_seed(self, seed: int, options: Any) -> None:
        import torch

        from tigon.retrieve.cli.loop import evaluate_towers

        fitted = self._fit(f"seed {seed}", self.rows, None, options, seed)
        found: dict[str, Any] = _list_times(fitted)
        if self.pairs.test is not None:
            test = torch.from_numpy(self.pairs.test).to(self.device)
            found |= evaluate_towers(fitted.towers, test, self.rows.to(self.device), tuple(self.cuts))
        if seed == self.seeds[0]:
            self._save(fitted.towers)
        self.finish_stage(f"seed {seed}", found)

    def _fit(self, stage: str, pairs: Any, held: Any, options: Any, seed: int) -> Any:
        from tigon.retrieve.cli.loop import fit

        state = load_checkpoint(self.output)
        if state is not None and state["stage"] != stage:
            state = None
        if state is not None:
            self.console.print(f"{stage}: from epoch {state['epoch']}")
        saved = time.monotonic()

        def after(epoch: int, loss: float, found: dict[str, Any] | None, read_state: Any) -> bool:
            nonlocal saved
            if found is not None:
                shown = "  ".join(f"{name} {found[name]:.4f}" for name in ("recall@20", "ndcg@20"))
                self.console.print(f"{stage}, epoch {epoch}: loss {loss:.4f}  {shown}")
            # Often enough to lose little, but so rarely that a short epoch does not wait for the disk.
            if interrupts.signal or time.monotonic() - saved > 20 or (epoch == 1 and state is None):
                facts = {"stage": stage, **read_state()}
                save_checkpoint(self.output, {"towers": facts.pop("towers")}, facts.pop("optimizer"), facts)
                saved = time.monotonic()
            return bool(interrupts.signal)

        batches = max(len(pairs) // min(options.batch_size, len(pairs)), 1)
        done = 0 if state is None else state["epoch"] * batches
        with Interrupts() as interrupts, Steps(self.console, "steps", options.epochs * batches, done) as steps:
            fitted = fit(
                pairs, self.sizes, options, seed, held, device=self.device, state=state, after_epoch=after,
                after_step=steps.show,
            )  # fmt: skip
        if fitted.stopped:
            stop(NAME, self.output, f"in {stage} after epoch {fitted.epochs}", interrupts.signal)
        return fitted

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


def _list_times(fitted: Any) -> dict[str, float]:
    return {"epochs": fitted.epochs, "seconds": fitted.seconds, "seconds an epoch": fitted.epoch_seconds}


def _plot(picture: Path, stages: dict[str, Any]) -> None:
    """Plot validation Recall and NDCG by epoch; without validation, the metrics by seed."""
    with draw(picture) as axes:
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
        axes.legend()
