"""A run of Tigon's own training loops: its folder, record, checkpoints, seeds and results.

`tigon rank fit`, `tigon retrieve train` and `tigon graph fit` are subclasses of `Run`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from tigon.cli.checkpoint import LOCK, STAGING, lock_folder, prune, write_json
from tigon.cli.options import device_option, option, record_options, restore_options
from tigon.cli.outputs import delete
from tigon.cli.problem import Problem, check_writable, count_processes, find_device, parse_seeds
from tigon.cli.progress import working
from tigon.cli.screen import screen, show_rows
from tigon.files import read_json

RECORD, RESULTS, METRICS = "run.json", "results.json", "metrics.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every command that trains in Tigon's own loop."""

    PANEL: ClassVar[str] = "Run"

    output: Path
    resume: bool = option(False, "Resume from the latest complete checkpoint in --output, with its original options.")
    overwrite: bool = option(False, "Delete the existing run in --output.")
    device: str = device_option()
    seed: str = option("0", "Seeds, separated by commas: one model per seed, with mean and spread.")


OptionsT = TypeVar("OptionsT", bound=RunOptions)


class Run(Generic[OptionsT]):
    """A run from its options to its results. The constructor checks everything and writes no files, so that errors
    occur before another run is replaced.

    NAME: the command, after "tigon". WRITTEN: the files and folders that a run writes beside checkpoints and record.
    SEED_FOLDERS: with at least so many seeds, each has a folder.
    """

    NAME: ClassVar[str]
    WRITTEN: ClassVar[tuple[str, ...]]
    SEED_FOLDERS: ClassVar[float] = math.inf

    def __init__(self, options: OptionsT) -> None:
        if (processes := count_processes()) > 1:
            raise Problem(f"{self.NAME}: trains on one device, got {processes} processes")
        self.output = options.output.expanduser().resolve()
        self.console = screen(stderr=True)
        self.is_resumed = options.resume
        self.record: dict[str, Any] = {}
        if options.resume:
            self.record = read_record(self.NAME, self.output)
            if "results" in self.record:
                raise Problem(f"{self.NAME}: the run in {self.output} is complete")
            self.options = restore_options(options, self.record["options"])
        else:
            self.options = self.complete(options)
            check_free(self.NAME, self.output, options.overwrite)
        self.device: Any = find_device(options.device, self.NAME)
        self.seeds = parse_seeds(self.NAME, self.options.seed)
        self.check()
        with working(self.console, "reading the data"):
            digest = self.read()
        if options.resume:
            if self.record["data"] != digest:
                raise Problem(f"{self.NAME}: the data differs from the training data of the run in {self.output}")
        else:
            chosen = self.choose()
            self.options = dataclasses.replace(self.options, **chosen)
            given = record_options(self.options)
            self.record = {"kind": self.NAME, "options": given, "chosen": [*chosen], "data": digest, "stages": {}}
        self.prepare()

    def complete(self, options: OptionsT) -> OptionsT:
        """Make paths absolute, so that a run can resume from any directory. Raises Problem if data is missing."""
        return options

    def check(self) -> None:
        """Raise a Problem for options that are wrong whatever the data."""

    def read(self) -> str:
        """Read the data. Returns a digest, by which a resumed run recognises the data."""
        raise NotImplementedError

    def choose(self) -> dict[str, Any]:
        """Values, from the data, for options that were left open."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Build the parts that fail for data and options that do not fit together."""

    def train(self) -> None:
        """Train, and write the results."""
        raise NotImplementedError

    def run(self) -> None:
        """Train in the run's folder, which other processes cannot use meanwhile."""
        self.output.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.output):
            if not self.is_resumed:
                check_free(self.NAME, self.output, self.options.overwrite)  # another run may have ended meanwhile
                seeds = find_seeds(self.output)
                folders = [f"seed-{seed}" for seed in seeds] if len(seeds) >= self.SEED_FOLDERS else []
                clear(self.output, (*self.WRITTEN, *folders))
                write_json(self.output / RECORD, self.record)
            self.train()

    def show_chosen(self, count: int, unit: str) -> None:
        """Print the options that `choose` has set."""
        if chosen := self.record.get("chosen"):
            words = ", ".join(f"{name.replace('_', ' ')} {getattr(self.options, name)}" for name in chosen)
            self.console.print(f"chosen for {count:,} {unit}: {words}; override with the options of the same names")

    def finish_stage(self, stage: str, found: dict[str, Any]) -> None:
        """Record a stage's results. Its checkpoints are no longer needed."""
        self.record["stages"][stage] = found
        write_json(self.output / RECORD, self.record)
        prune(self.output, 0)

    def finish(self, results: dict[str, Any]) -> None:
        """Record the run's results, after which the run cannot be resumed."""
        finish_record(self.output, self.record, results, self.device)

    def finish_seeds(self, warnings: list[str]) -> None:
        """Record the seeds' stages, with their mean and spread, as the results, and print them."""
        rows = [{"seed": seed, **self.record["stages"][f"seed {seed}"]} for seed in self.seeds]
        self.finish({"seeds": rows, "summary": summarize(rows), "warnings": warnings})
        show_seeds(rows)


def finish_record(output: Path, record: dict[str, Any], results: dict[str, Any], device: Any) -> None:
    """Write a run's results into its record and beside it."""
    record["results"] = {**results, **describe_versions(device)}
    write_json(output / RESULTS, {**record["results"], "options": record["options"]})
    write_json(output / RECORD, record)


def stop(command: str, output: Path, where: str, signal: int) -> NoReturn:
    """End a command after a signal, with the command that resumes the run."""
    resume = f"tigon {command} --resume --output {shlex.quote(str(output))}"
    raise Problem(f"stopped {where}, with a checkpoint; resume with: {resume}", code=128 + signal)


def read_record(command: str, output: Path) -> dict[str, Any]:
    """Read this command's run record in a folder.

    Raises: Problem if there is none, or if the record is from another command.
    """
    if not (output / RECORD).exists():
        raise Problem(f"{command}: no run in {output} to resume: {RECORD} is missing")
    found: dict[str, Any] = read_json(output / RECORD)
    if found.get("kind") != command or not isinstance(found.get("options"), dict):
        raise Problem(f"{command}: {output / RECORD} is not the record of a run of tigon {command}")
    return found


def check_free(command: str, output: Path, overwrite: bool) -> None:
    """Raise a Problem unless a folder is free for a run, without writing anything."""
    check_writable(output, "--output")
    if output.exists() and any(path.name != LOCK for path in output.iterdir()):
        if not (output / RECORD).exists():
            raise Problem(f"{command}: --output {output} contains files that no run wrote; choose another --output")
        read_record(command, output)
        if not overwrite:
            raise Problem(
                f"{command}: --output {output} contains a run: --resume continues the run, --overwrite replaces it"
            )


def clear(output: Path, written: Iterable[str]) -> None:
    """Delete an earlier run. Files that no run wrote are never deleted."""
    for path in [*output.glob("checkpoint-*"), *(output / name for name in (*written, STAGING, RECORD))]:
        delete(path)


def find_seeds(output: Path) -> dict[int, Path]:
    """The folders of a run's seeds; {} where there is no record."""
    try:
        options = read_json(output / RECORD, required=["options"])["options"]
        return {seed: output / f"seed-{seed}" for seed in parse_seeds("", str(options["seed"]))}
    except (ValueError, KeyError, TypeError, Problem):
        return {}


def append_metrics(file: Path, *rows: Mapping[str, Any]) -> None:
    """Append rows to metrics.jsonl. A line that a kill has truncated is ended first, so that the next stands alone."""
    with open(file, "ab+") as handle:
        if handle.tell():
            handle.seek(-1, 2)
            if handle.read(1) != b"\n":
                handle.write(b"\n")
        handle.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Mean and sample standard deviation over the rows of each column but "seed"."""
    import numpy as np

    return {
        name: {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None}
        for name in rows[0] if name != "seed" for values in [[row[name] for row in rows]]
    }  # fmt: skip


def show_seeds(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per seed, and their mean and spread."""
    summary = summarize(rows)
    kinds = ("mean", "sd") if len(rows) > 1 else ()
    show_rows([*rows, *({"seed": kind, **{name: one[kind] for name, one in summary.items()}} for kind in kinds)])


def describe_versions(device: Any) -> dict[str, Any]:
    """The hardware and versions that produced the results."""
    from tigon.cli.environment import describe_environment

    found = describe_environment(device)
    versions = {"tigon": found["tigon"], "torch": found["packages"]["torch"], "python": found["python"]}
    return {"hardware": found["device"], "versions": versions}
