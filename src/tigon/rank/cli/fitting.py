"""A `tigon rank fit` run: tables, checkpoints, and output files."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from tigon.cli.checkpoint import RECORD, STAGING, prune, publish, seal, write_json
from tigon.cli.folder import METRICS
from tigon.cli.kept_runs import Interrupts, circumstances, load, save
from tigon.cli.metrics_file import append, repair
from tigon.cli.problem import Problem, integers
from tigon.cli.progress import Steps, working
from tigon.rank.cli.models import made
from tigon.rank.cli.shared import after_own, as_options, history_of, metrics_table, sentences, spread
from tigon.rank.cli.streaming import read_train
from tigon.rank.cli.warm_start import load_schema, load_warm_start, save_warm_start, should_save_priors

NAME = "rank fit"
RESULTS, PICTURE, MODEL, SCHEMA = "results.json", "fit.png", "model", "schema.json"
WRITTEN = (RESULTS, PICTURE, MODEL, SCHEMA, METRICS)
ROLES = ("request", "item", "user", "time", "weight")


class Tables(NamedTuple):
    """Training, validation and test impressions; None if absent."""

    train: Any
    val: Any
    test: Any


def read_tables(command: str, given: dict[str, Any]) -> Tables:
    """Read the impressions named by the options; validation and test use the training schema."""
    from tigon.rank import Impressions, Schema
    from tigon.rank.training.defaults import choose_share

    roles: dict[str, Any] = {name: given[name] for name in ROLES if given[name] is not None}
    roles |= {plural: given[name] for plural, name in (("labels", "label"), ("action", "action")) if given[name]}
    with sentences(command):
        schema = None if given["schema"] is None else Schema.load(given["schema"])
        if schema is None and given.get("from_run"):
            if roles:
                raise Problem(f"{command}: --from has the columns already, got --{next(iter(roles))} besides")
            schema = load_schema(Path(given["from_run"]))
        elif schema is not None and roles:
            raise Problem(f"{command}: --schema has the columns already, got --{next(iter(roles))} besides")
        sides: dict[str, Any] = {name: given[name] or None for name in ("items", "users")}
        history = history_of(given["history"])
        train = read_train(given, history, schema, sides, roles)
        if not train.schema.labels and given["objective"] == "impressions":
            raise Problem(f"{command}: --label must name what happened, a column of 0 and 1, or 'like=rating>=4'")
        val = None
        share = choose_share(train.rows) if given["val_fraction"] is None else given["val_fraction"]
        if not given["val"] and share:
            timed = train.schema.roles.time in train.schema.fields
            by: Any = given["val_split"] or ("time" if timed else "request")
            train, val = train.split(by=by, fraction=share, seed=given.get("split_seed", given["seed"]))
        # The schema is fitted on the training impressions, which may serve as history for the other parts.
        past = after_own(history, given["data"])
        val, test = (
            Impressions.read(given[name], history=past, schema=train.schema, **sides) if given[name] else found
            for name, found in (("val", val), ("test", None))
        )
    for name, data in (("train", train), ("validate", val)):
        if data is not None and not len(data):
            raise Problem(f"{command}: --val-fraction {share:g} leaves no request to {name} on")
    return Tables(train, val, test)


class Run:
    """Fit a ranker, write checkpoints and metrics during training, and finally the ranker and its results.

    The constructor validates the options and writes no files, so that errors occur before another run is replaced.

    again: the folder that --resume continues; None: the run's own.
    """

    def __init__(
        self, output: Path, record: dict[str, Any], tables: Tables, options: Any, device: Any, again: Path | None = None
    ) -> None:
        import torch

        from tigon.cli.screen import screen
        from tigon.rank.evaluation.evaluate import check_monitor
        from tigon.rank.training.fit import check_arguments

        self.output, self.record, self.tables, self.options, self.device = output, record, tables, options, device
        self.given, self.again = record["options"], output if again is None else again
        self.console = screen(stderr=True, soft_wrap=True)
        self.saved = time.monotonic()
        self.marked, self.shown, self.shown_loss = time.perf_counter(), 0, ""
        torch.manual_seed(self.given["seed"])
        self.priors: list[Any] = []
        self.warnings: list[str] = []
        with sentences(NAME):
            if self.given.get("from_run"):
                place = Path(self.given["from_run"])
                self.ranker, self.priors = load_warm_start(place, tables.train.schema, options)
            else:
                self.ranker = made(NAME, self.given, tables.train.schema)
            self.ranker.to(device)
            check_arguments(self.ranker, tables.train, tables.val, options)
            if tables.val is not None and options.objective == "impressions":
                check_monitor(tables.val, options.monitor)
            if tables.val is not None and getattr(self.ranker, "isotonic", None) is not None:
                from tigon.rank.models.lirank.calibrate import check_classes

                check_classes(tables.val, options.batch_options, "--calibrate: the rows to validate on")

    def go(self) -> None:
        from tigon.rank.data.leakage import find_leaky_fields, find_rare_crosses
        from tigon.rank.data.summary import find_constant_fields

        train, val, _ = self.tables
        ranker = self.ranker
        train.schema.save(self.output / SCHEMA)
        count = sum(p.numel() for p in ranker.parameters())
        held = f", {len(val):,} to validate on" if val is not None else ""
        self.console.print(
            f"{self.given['model']} of {count:,} parameters on {self.device}; {len(train):,} requests{held}; "
            f"labels {', '.join(train.schema.labels) or 'none'}"
        )
        if chosen := self.record.get("chosen"):
            words = ", ".join(f"{name.replace('_', ' ')} {self.given[name]}" for name in chosen)
            self.console.print(f"chosen from {train.rows:,} rows: {words}; options of these names override them")
        self.console.print(f"it reads {self._read_fields(train.schema)}")
        if self.given.get("stream"):
            self.console.print(f"from {train.pieces:,} row groups, {self.given['stream_mib']:,} MiB at a time")
        with working(self.console, "looking at what single fields say"):
            notes, self.warnings = (
                [*train.notes, *find_constant_fields(train)],
                [*find_leaky_fields(train), *find_rare_crosses(train)],
            )
        for note in notes:
            self.console.print(f"note: {note}")
        for warning in self.warnings:
            self.console.print(f"warning: {warning}")
        repair(self.output / METRICS)
        fitted = self._fit(ranker)
        if getattr(ranker, "isotonic", None) is not None:
            self._calibrate(ranker, val)
        for warning in fitted.warnings:
            self.warnings.append(as_options(warning) + ".")
            self.console.print(f"warning: {self.warnings[-1]}")
        self._conclude(ranker, fitted)

    def _read_fields(self, schema: Any) -> str:
        """Describe the fields the ranker reads, by side."""
        if self.options.objective == "next-item":  # events only: a request's own fields come after all events
            return f"of an event {', '.join(n for n, field in schema.history.items() if field.kind != 'Text')}"
        sides = {
            "context": "of a request",
            "item": "of an item",
            "row": "of an impression",
            "action": "of events alone",
        }
        fields = {name: field.side for name, field in schema.fields.items() if field.kind != "Text"}
        read = [f"{said} {', '.join(n for n in fields if fields[n] == side)}" for side, said in sides.items()
                if side in fields.values()]  # fmt: skip
        return "; ".join(read)

    # ---------------------------------------------------------------------------------------------------- the loop

    def _fit(self, ranker: Any) -> Any:
        from tigon import rank

        train, val = (self._near(data) for data in self.tables[:2])
        kept = load(self.output)
        state = None
        if kept is not None:
            modules, optimizer, facts = kept
            state = {**facts, **modules, "optimizer": optimizer}
            self.console.print(f"from step {state['step']:,}")
        interrupts = Interrupts()
        last: list[Any] = []
        settings = self.options.resolve(ranker, train)
        # With a token budget the batch count is unknown in advance: the progress bar then counts epochs.
        by_steps = self.options.batch_tokens is None
        total = settings.epochs * (-(-len(train) // settings.batch_size) if by_steps else 1)
        begun = 0 if state is None else int(state["step" if by_steps else "epoch"])
        steps = Steps(self.console, "steps" if by_steps else "epochs", total, begun)

        def after(progress: Any) -> bool:
            last[:] = [progress]
            steps.show(progress.step if by_steps else int(progress.epoch), self.shown_loss)
            now = time.monotonic()
            log = progress.step % self.given["log_every"] == 0 or progress.evaluation is not None
            keep = interrupts.signal or (progress.step % self.given["save_every"] == 0 and progress.evaluation is None)
            # Checkpoint at evaluations; short epochs must not wait for the disk.
            keep = keep or (progress.evaluation is not None and now - self.saved > 20)
            if log or keep:
                self._log(progress)
            if keep:
                self._save(progress.state())
            return bool(interrupts.signal)

        with interrupts, sentences(NAME), steps, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "rank.fit: ")  # also in `FitResult.warnings`
            fitted = rank.fit(ranker, train, val, self.options, priors=self.priors, state=state, after=after)
        for progress in last:  # steps since the last log line
            append(self.output / METRICS, *progress.rows())
        if fitted.stopped:
            command = f"tigon {NAME} --resume --output {shlex.quote(str(self.again))}"
            raise Problem(
                f"stopped after step {fitted.steps:,}, with a checkpoint; go on by: {command}",
                code=128 + interrupts.signal,
            )
        return fitted

    def _calibrate(self, ranker: Any, val: Any) -> None:
        """Fit the isotonic layers on the validation rows, if there are any."""
        if val is None:
            self.console.print("note: without rows that are held out, calibration is what training made of it")
            return
        from tigon.rank import calibrate

        with sentences(NAME), working(self.console, "calibrating on the validation"):
            calibrate(ranker, val, self.options.batch_options)
        self.console.print(f"calibrated on the {val.rows:,} rows of the validation, whose log loss and ECE gain by it")

    def _near(self, data: Any) -> Any:
        """The table on the device, or on the host if device memory is too small beside training."""
        import torch

        # A stream copies each buffer to the device itself.
        if data is None or self.device.type == "cpu" or not hasattr(data, "to"):
            return data
        try:
            near = data.to(self.device)
        except torch.OutOfMemoryError:
            return data
        free, total = torch.cuda.mem_get_info(self.device)
        return near if free > total / 2 else data

    def _save(self, state: dict[str, Any]) -> None:
        modules: dict[str, Any] = {name: state.pop(name) for name in ("model", "best") if name in state}
        save(self.output, modules, state.pop("optimizer"), state)
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
            watched = self.options.monitor
            self.console.print(
                f"step {progress.step:,}: {watched} {progress.evaluation[watched]:.4f} on the validation"
            )
            rows = [*rows, {**progress.evaluation, "event": "evaluation"}]
        append(self.output / METRICS, *rows)

    # ----------------------------------------------------------------------------------------------------- the end

    def _conclude(self, ranker: Any, fitted: Any) -> None:
        staged = self.output / STAGING / MODEL
        shutil.rmtree(staged, ignore_errors=True)
        ranker.save_pretrained(staged)
        priors = self.priors if should_save_priors(self.given.get("save_priors"), self.options) else None
        with working(self.console, "keeping what exploring and later fits need"), sentences(NAME):
            save_warm_start(staged, ranker, self.tables.train, self.options, priors)
        seal(staged, largest=None)
        shutil.rmtree(self.output / MODEL, ignore_errors=True)
        publish(staged, self.output / MODEL)
        found = self._measured(ranker)
        results = {
            "steps": fitted.steps, "best_step": fitted.best, "seconds": fitted.seconds, "history": fitted.history,
            "warnings": self.warnings,
            **{name: {"requests": one.requests, "rows": one.rows, "metrics": spread(one), "notes": one.notes}
               for name, one in found.items()},
            **circumstances(self.device),
        }  # fmt: skip
        plot(self.output / PICTURE, self.output / METRICS, self.options.monitor, fitted.history)
        write_json(self.output / RESULTS, {**results, "options": self.given})
        self.record["results"] = results
        write_json(self.output / RECORD, self.record)
        prune(self.output, 0)
        self._show(found, fitted)

    def _measured(self, ranker: Any) -> dict[str, Any]:
        from tigon.rank import evaluate, evaluate_next_items, score

        found = {}
        at = sorted(set(integers(NAME, "--at", self.given["at"])))
        batch_options, draws, seed = self.options.batch_options, self.given["draws"], self.given["seed"]
        for name, data in (("validation", self.tables.val), ("test", self.tables.test)):
            if data is None:
                continue
            with working(self.console, f"measuring on the {name}"), sentences(NAME):
                if self.options.objective == "next-item":
                    found[name] = evaluate_next_items(ranker, data, at, batch_options, draws=draws, seed=seed)
                else:
                    found[name] = evaluate(score(ranker, data, batch_options), at, draws=draws, seed=seed)
        return found

    def _show(self, found: dict[str, Any], fitted: Any) -> None:
        from tigon.cli.screen import screen, show

        for name, one in found.items():
            for note in one.notes:
                self.console.print(f"{name}: {note}")
        if found:
            show(screen(width=None if sys.stdout.isatty() else 10_000), metrics_table(found))
        print(
            f"the ranker of step {fitted.best:,} is in {self.output / MODEL}, its results in {self.output / RESULTS}, "
            f"its losses in {self.output / METRICS} and {self.output / PICTURE}"
        )


def plot(picture: Path, file: Path, watched: str, history: list[dict[str, float]]) -> None:
    """Plot the loss per step, and the early-stopping metric below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from tigon.cli.metrics_file import read_metrics

    losses, _ = read_metrics(file)
    figure, axes = plt.subplots(1 + bool(history), figsize=(8, 4.5), layout="constrained", sharex=True, squeeze=False)
    axes = axes[:, 0]
    axes[0].plot(list(losses), list(losses.values()), linewidth=1)
    axes[0].set(ylabel="training loss")
    if history:
        axes[1].plot(
            [row["step"] for row in history], [row[watched] for row in history], marker="o", color="tab:orange"
        )
        axes[1].set(ylabel=f"{watched} on the validation")
    axes[-1].set(xlabel="step")
    for one in axes:
        one.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
