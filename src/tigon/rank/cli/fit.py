"""`tigon rank fit`: train a ranker on an impression table, once or with several seeds."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import load_checkpoint, lock_folder, prune, publish, save_checkpoint, seal, stage, write_json
from tigon.cli.problem import Problem, needs, parse_integers, replace_arguments
from tigon.cli.progress import Steps, working
from tigon.cli.run import METRICS, RECORD, RESULTS, Run, append_metrics, finish_record, read_record, stop
from tigon.cli.screen import draw, show
from tigon.cli.signals import Interrupts
from tigon.rank.cli import tables, warm_start
from tigon.rank.cli.fit_options import FitOptions
from tigon.rank.cli.models import build_ranker, choose_options, parse_arguments, parse_weights, read_blocks
from tigon.rank.cli.report import (
    OPTIONS,
    list_metrics,
    make_metrics_table,
    make_seeds_table,
    sentences,
    summarize_seeds,
)

NAME = "rank fit"
PICTURE = "fit.png"
PARTS = ("validation", "test")


def fit(options: FitOptions) -> None:
    """Train and evaluate a ranker on a table of impressions.

    A row is an impression: the shown item, its request, and the outcome (labels).
    """
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors", "accelerate", "matplotlib")
    FitRun(options).run()


class FitRun(Run[FitOptions]):
    """A fit, or a fit per seed on the same tables and split, so that the spread reflects training alone."""

    NAME = NAME
    WRITTEN = (RESULTS, PICTURE, warm_start.MODEL, warm_start.SCHEMA, METRICS)
    SEED_FOLDERS = 2

    def complete(self, options: FitOptions) -> FitOptions:
        if not options.data:
            raise Problem(f"{NAME}: --data must name the impressions to train on")
        given: dict[str, Any] = {name: tables.resolve_paths(getattr(options, name)) for name in tables.FILES}
        if options.from_run is not None:
            place = warm_start.find_ranker_folder(Path(options.from_run), self.output)
            given |= {"model": warm_start.read_model(options, place), "from_run": str(place)}
        if options.blocks is not None:  # the blocks themselves, so that a run resumes without the file
            given["blocks"] = read_blocks(NAME, Path(options.blocks).expanduser())
        if options.schema is not None:
            given["schema"] = str(Path(options.schema).expanduser().resolve())
        if options.stream is None:  # a resumed run reads them in the same way
            given["stream"] = tables.should_stream(given["data"], given["history"])
        return dataclasses.replace(options, **given)

    def check(self) -> None:
        self.fit_options = self._make_fit_options()
        self.cuts = sorted(set(parse_integers(NAME, "--at", self.options.at)))

    def read(self) -> str:
        options = self.options
        stream = options.stream_mib if options.stream else None
        needs_label = options.objective == "impressions"
        history = tables.History(options.history or (), options.action or (), stream, options.from_run, needs_label)
        # A seed's run can be resumed alone, with the split that all seeds have.
        seed = self.record.get("options", {}).get("split_seed", self.seeds[0])
        self.tables = tables.read_tables(NAME, options, seed, history)
        files = [path for name in tables.FILES for path in getattr(options, name) or []]
        return tables.compute_digest(
            [*files, *([str(Path(options.from_run, warm_start.WEIGHTS))] if options.from_run else [])]
        )

    def choose(self) -> dict[str, Any]:
        return choose_options(self.options, self.tables.train)

    def prepare(self) -> None:
        self.fit_options = self._make_fit_options()
        self.first = self._make_fit(self.seeds[0])

    def train(self) -> None:
        if len(self.seeds) == 1:
            assert self.first is not None
            self.first.run()
            return
        for seed in self.seeds:
            fit = self.first if seed == self.seeds[0] else self._make_fit(seed)
            if fit is not None:
                self.console.print(f"seed {seed}")
                fit.folder.mkdir(exist_ok=True)
                with lock_folder(fit.folder):  # a seed's run can be resumed alone
                    write_json(fit.folder / RECORD, fit.record)
                    fit.run()
        self._finish_seeds()

    def _make_fit_options(self) -> Any:
        from tigon.rank import FitOptions

        options = self.options
        parse_arguments(NAME, options)
        if options.model == "lirank" and options.history:
            raise Problem(f"{NAME}: --history is for --model ligr; lirank reads only row features")
        given = {f.name: getattr(options, f.name) for f in dataclasses.fields(FitOptions) if hasattr(options, f.name)}
        given |= {"seed": self.seeds[0], "label_weights": parse_weights(NAME, "--label-weight", options.label_weight)}
        with sentences(NAME):
            found = FitOptions(**given)
        warm_start.should_save_priors(options.save_priors, found)
        return found

    def _make_fit(self, seed: int) -> SeedFit | None:
        """A seed's fit, resumed if it was started; None if it is complete."""
        if len(self.seeds) == 1:
            return SeedFit(self, seed, self.output, self.record)
        folder = self.output / f"seed-{seed}"
        own = {"seed": str(seed), "split_seed": self.seeds[0]}
        record = {**self.record, "options": {**self.record["options"], **own}}
        if self.is_resumed and (folder / RECORD).is_file():
            record = read_record(NAME, folder)
            if "results" in record:
                return None
        return SeedFit(self, seed, folder, record)

    def _finish_seeds(self) -> None:
        rows = []
        for seed in self.seeds:
            found = read_record(NAME, self.output / f"seed-{seed}")["results"]
            rows.append({"seed": seed, **{name: found[name] for name in ("steps", "best_step", "seconds", "history")},
                         **{name: found[name]["metrics"] for name in PARTS if name in found}})  # fmt: skip
        summary = {name: summarize_seeds([row[name] for row in rows]) for name in PARTS if name in rows[0]}
        _plot_seeds(self.output / PICTURE, rows, self.fit_options.monitor)
        finish_record(self.output, self.record, {"seeds": rows, "summary": summary}, self.device)
        for name in summary:
            show(make_seeds_table(name, {row["seed"]: row[name] for row in rows}, summary[name]))
        print(
            f"rankers for {len(rows)} seeds are in {self.output / 'seed-N'}, their mean and spread in "
            f"{self.output / RESULTS} and {self.output / PICTURE}"
        )


class SeedFit:
    """Fit a ranker with one seed, write checkpoints and metrics meanwhile, and finally the ranker and its results.

    The constructor validates the options and writes no files.
    """

    def __init__(self, run: FitRun, seed: int, folder: Path, record: dict[str, Any]) -> None:
        import torch

        from tigon.rank.evaluation.evaluate import check_monitor
        from tigon.rank.training.fit import check_arguments

        self.folder, self.record, self.seed, self.run_folder = folder, record, seed, run.output
        self.given, self.tables, self.device, self.console = run.options, run.tables, run.device, run.console
        self.show_chosen, self.cuts = run.show_chosen, run.cuts
        self.options = options = dataclasses.replace(run.fit_options, seed=seed)
        self.saved = time.monotonic()
        self.marked, self.shown, self.shown_loss = time.perf_counter(), 0, ""
        self.priors: list[Any] = []
        self.warnings: list[str] = []
        train, val, _ = self.tables
        torch.manual_seed(seed)
        with sentences(NAME):
            if self.given.from_run:
                self.ranker, self.priors = warm_start.load_warm_start(Path(self.given.from_run), train.schema, options)
            else:
                self.ranker = build_ranker(NAME, self.given, train.schema)
            self.ranker.to(self.device)
            check_arguments(self.ranker, train, val, options)
            if val is not None and options.objective == "impressions":
                check_monitor(val, options.monitor)
            if val is not None and getattr(self.ranker, "isotonic", None) is not None:
                from tigon.rank.models.lirank.calibrate import check_classes

                check_classes(val, options.batch_options, "--calibrate: the validation rows")

    def run(self) -> None:
        self.tables.train.schema.save(self.folder / warm_start.SCHEMA)
        self._introduce()
        fitted = self._fit()
        if getattr(self.ranker, "isotonic", None) is not None:
            self._calibrate()
        for warning in fitted.warnings:
            self._warn(replace_arguments(warning, OPTIONS) + ".")
        self._finish(fitted)

    def _introduce(self) -> None:
        """Print the ranker, its data, and signs of trouble in single fields."""
        from tigon.rank.data.leakage import find_leaky_fields, find_rare_crosses
        from tigon.rank.data.summary import find_constant_fields

        train, val, _ = self.tables
        count = sum(p.numel() for p in self.ranker.parameters())
        held = f", {len(val):,} for validation" if val is not None else ""
        self.console.print(
            f"{self.given.model} with {count:,} parameters on {self.device}; {len(train):,} requests{held}; "
            f"labels {', '.join(train.schema.labels) or 'none'}"
        )
        self.show_chosen(train.rows, "rows")
        self.console.print(f"the ranker reads {self._list_fields(train.schema)}")
        if self.given.stream:
            self.console.print(f"from {train.pieces:,} row groups, {self.given.stream_mib:,} MiB at a time")
        with working(self.console, "checking single fields for leakage"):
            notes = [*train.notes, *find_constant_fields(train)]
            found = [*find_leaky_fields(train), *find_rare_crosses(train)]
        for note in notes:
            self.console.print(f"note: {note}")
        for warning in found:
            self._warn(warning)

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        self.console.print(f"warning: {warning}")

    def _list_fields(self, schema: Any) -> str:
        """Describe the fields the ranker reads, by side."""
        if self.options.objective == "next-item":  # events only: a request's own fields come after all events
            return f"from events: {', '.join(n for n, field in schema.history.items() if field.kind != 'Text')}"
        sides = {
            "context": "from requests", "item": "from items", "row": "from impressions", "action": "from events only",
        }  # fmt: skip
        fields = {name: field.side for name, field in schema.fields.items() if field.kind != "Text"}
        read = {said: [n for n in fields if fields[n] == side] for side, said in sides.items()}
        return "; ".join(f"{said}: {', '.join(names)}" for said, names in read.items() if names)

    def _fit(self) -> Any:
        from tigon import rank

        train, val = (tables.move_near(data, self.device) for data in self.tables[:2])
        state = load_checkpoint(self.folder)
        if state is not None:
            self.console.print(f"from step {state['step']:,}")
        last: list[Any] = []
        settings = self.options.resolve(self.ranker, train)
        # With a token budget the batch count is unknown in advance: the progress bar then counts epochs.
        by_steps = self.options.batch_tokens is None
        total = settings.epochs * (-(-len(train) // settings.batch_size) if by_steps else 1)
        begun = 0 if state is None else int(state["step" if by_steps else "epoch"])

        def after(progress: Any) -> bool:
            last[:] = [progress]
            steps.show(progress.step if by_steps else int(progress.epoch), self.shown_loss)
            is_evaluated = progress.evaluation is not None
            is_due = progress.step % self.given.save_every == 0 and not is_evaluated
            # Checkpoint at evaluations; short epochs must not wait for the disk.
            is_due = is_due or (is_evaluated and time.monotonic() - self.saved > 20) or interrupts.signal != 0
            if is_due or is_evaluated or progress.step % self.given.log_every == 0:
                self._log(progress)
            if is_due:
                self._save(progress.state())
            return interrupts.signal != 0

        with (
            Interrupts() as interrupts, sentences(NAME), warnings.catch_warnings(),
            Steps(self.console, "steps" if by_steps else "epochs", total, begun) as steps,
        ):  # fmt: skip
            warnings.filterwarnings("ignore", "rank.fit: ")  # also in `FitResult.warnings`
            fitted = rank.fit(self.ranker, train, val, self.options, priors=self.priors, state=state, after=after)
        for progress in last:  # steps since the last log line
            append_metrics(self.folder / METRICS, *progress.rows())
        if fitted.stopped:
            stop(NAME, self.run_folder, f"after step {fitted.steps:,}", interrupts.signal)
        return fitted

    def _calibrate(self) -> None:
        """Fit the isotonic layers on the validation rows, if there are any."""
        val = self.tables.val
        if val is None:
            self.console.print("note: without a validation set, the isotonic layers stay as trained")
            return
        from tigon.rank import calibrate

        with sentences(NAME), working(self.console, "calibrating on the validation set"):
            calibrate(self.ranker, val, self.options.batch_options)
        self.console.print(
            f"calibrated on the {val.rows:,} validation rows, so log loss and ECE on these rows are optimistic"
        )

    def _save(self, state: dict[str, Any]) -> None:
        modules: dict[str, Any] = {name: state.pop(name) for name in ("model", "best") if name in state}
        save_checkpoint(self.folder, modules, state.pop("optimizer"), state)
        self.saved = time.monotonic()

    def _log(self, progress: Any) -> None:
        rows = progress.rows()
        now = time.perf_counter()
        if rows:
            rows[-1]["steps_per_second"] = round((progress.step - self.shown) / max(now - self.marked, 1e-9), 2)
            shown = rows[-1]
            self.shown_loss = f"loss {shown['loss']:.4f}"
            self.console.print(
                f"step {shown['step']:,}, epoch {shown['epoch']:.2f}: loss {shown['loss']:.4f}  lr {shown['lr']:.2e}  "
                f"{shown['steps_per_second']:,.1f} steps/s"
            )
        self.marked, self.shown = now, progress.step
        if progress.evaluation is not None:
            monitor = self.options.monitor
            value = progress.evaluation[monitor]
            self.console.print(f"step {progress.step:,}: {monitor} {value:.4f} on the validation set")
            rows = [*rows, {**progress.evaluation, "event": "evaluation"}]
        append_metrics(self.folder / METRICS, *rows)

    def _finish(self, fitted: Any) -> None:
        final = self.folder / warm_start.MODEL
        staged = stage(final)
        self.ranker.save_pretrained(staged)
        priors = self.priors if warm_start.should_save_priors(self.given.save_priors, self.options) else None
        with working(self.console, "saving the explorer and priors for later runs"), sentences(NAME):
            warm_start.save_warm_start(staged, self.ranker, self.tables.train, self.options, priors)
        seal(staged, largest=None)
        publish(staged, final, replace=True)
        found = self._evaluate()
        results = {
            "steps": fitted.steps, "best_step": fitted.best, "seconds": fitted.seconds, "history": fitted.history,
            "warnings": self.warnings,
            **{name: {"requests": one.requests, "rows": one.rows, "metrics": list_metrics(one), "notes": one.notes}
               for name, one in found.items()},
        }  # fmt: skip
        _plot(self.folder / PICTURE, self.folder / METRICS, self.options.monitor, fitted.history)
        finish_record(self.folder, self.record, results, self.device)
        prune(self.folder, 0)
        for name, one in found.items():
            for note in one.notes:
                self.console.print(f"{name}: {note}")
        if found:
            show(make_metrics_table(found))
        print(
            f"the ranker from step {fitted.best:,} is in {final}, results are in {self.folder / RESULTS}, losses in "
            f"{self.folder / METRICS} and {self.folder / PICTURE}"
        )

    def _evaluate(self) -> dict[str, Any]:
        from tigon.rank import evaluate, evaluate_next_items, score

        found = {}
        batch_options, draws = self.options.batch_options, self.given.draws
        for name, data in zip(PARTS, self.tables[1:], strict=True):
            if data is None:
                continue
            with working(self.console, f"measuring on the {name}"), sentences(NAME):
                if self.options.objective == "next-item":
                    found[name] = evaluate_next_items(
                        self.ranker, data, self.cuts, batch_options, draws=draws, seed=self.seed
                    )
                else:
                    scores = score(self.ranker, data, batch_options)
                    found[name] = evaluate(scores, self.cuts, draws=draws, seed=self.seed)
        return found


def read_losses(file: Path) -> dict[int, float]:
    """The training losses in metrics.jsonl by step; where a step is repeated, the last counts.

    A malformed line, such as one truncated by a kill, is skipped.
    """
    losses: dict[int, float] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("loss"), (int, float)):
            losses[row["step"]] = float(row["loss"])
    return dict(sorted(losses.items()))


def _plot(picture: Path, file: Path, monitor: str, history: list[dict[str, float]]) -> None:
    """Plot the loss per step, and the early-stopping metric below."""
    losses = read_losses(file)
    with draw(picture, 1 + bool(history), sharex=True, squeeze=False) as axes:
        axes[0, 0].plot(list(losses), list(losses.values()), linewidth=1)
        axes[0, 0].set(ylabel="training loss")
        if history:
            steps, values = [row["step"] for row in history], [row[monitor] for row in history]
            axes[1, 0].plot(steps, values, marker="o", color="tab:orange")
            axes[1, 0].set(ylabel=f"{monitor} on the validation")
        axes[-1, 0].set(xlabel="step")


def _plot_seeds(picture: Path, rows: list[dict[str, Any]], monitor: str) -> None:
    """Plot the early-stopping metric by step, a line per seed; without validation, the fit times.

    rows: one per seed.
    """
    with draw(picture) as axes:
        for row in rows:
            history, label = row["history"], f"seed {row['seed']}"
            if history:
                axes.plot([r["step"] for r in history], [r[monitor] for r in history], marker="o", label=label)
            else:
                axes.plot(row["seed"], row["seconds"], marker="o", label=label)
        held = bool(rows[0]["history"])
        ylabel = f"{monitor} on the validation" if held else "seconds of the fit"
        axes.set(xlabel="step" if held else "seed", ylabel=ylabel)
        axes.legend()
