"""`rank.search_blocks`: try graphs on a fraction of the rows, and refit the best on all rows.

    folder/study.db     an Optuna study, readable by its dashboard: it holds all state, so that a killed search resumes,
                        and processes share the trials
    folder/refits/      rankers

A trial's value is its log loss; its graph and FLOPs are user attributes. A trial without a finite loss is pruned. A
trial whose process died has no heartbeat, is marked as failed by Optuna, and is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock  # a torch dependency
import torch

from tigon.files import DamagedFileError
from tigon.rank.models.lirank.blocks import count_flops
from tigon.rank.models.lirank.config import LiRankConfig
from tigon.rank.models.lirank.graph import blocks_to_json, parse_blocks
from tigon.rank.models.lirank.model import LiRank
from tigon.rank.models.ranker import Ranker
from tigon.rank.search.evolution import choose_graph, select_distinct
from tigon.rank.search.fidelity import ReducedData
from tigon.rank.search.measures import digest_table, measure
from tigon.rank.search.options import SearchOptions
from tigon.rank.search.space import Graph, Space, Trial, graph_key
from tigon.rank.training.fit import fit

NAME, STUDY, BLOCKS, REFITS = "tigon rank search", "study.db", "blocks.json", "refits"
# Seconds between a running trial's heartbeats; without a heartbeat, until the trial counts as dead; between looks at
# other processes; and for which a process waits for another process's write.
HEARTBEAT, GRACE, WAIT, PATIENCE = 10, 60, 0.5, 60


@dataclass(frozen=True)
class RefitResult:
    """A best graph's fit on all rows.

    Attributes:
        number: the trial's number. graph: its `rank.Block`s. flops: per row. parameters: the ranker's, tables included.
        validation, test: log loss, and AUC, means over the labels; {} without test data. steps, seconds: for the fit.
        folder: the ranker's, for `rank.Ranker.from_pretrained`.
    """

    number: int
    graph: Graph
    flops: int
    parameters: int
    validation: dict[str, float]
    test: dict[str, float]
    steps: int
    seconds: float
    folder: Path


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        trials: each trial's `number`, `graph`, validation `loss` and `flops`, in order.
        refits: sorted by validation log loss.
        failed: number of trials without a finite loss. stopped: whether `after` ended the search.
    """

    trials: list[Trial]
    refits: list[RefitResult]
    failed: int
    stopped: bool

    @property
    def best(self) -> Trial:
        """The trial with the smallest loss."""
        return min(self.trials, key=lambda one: (one.loss, one.number))


@dataclass(frozen=True)
class SearchProgress:
    """Search progress, passed to the callback after each fit step, trial and refit.

    Attributes:
        result: the trial or refit that just ended; None after a step.
        trials: finished trials, including other processes'. best: the best trial; None before the first.
    """

    result: Trial | RefitResult | None
    trials: int
    best: Trial | None


class Stopped(Exception):
    """`after` ended a fit."""


class Surplus(Exception):
    """Processes began a trial more than asked for, each before it could see the others'."""


def search_blocks(
    train: Any, val: Any, options: SearchOptions = SearchOptions(), *, folder: str | Path, test: Any = None,
    device: torch.device | str | None = None, after: Callable[[SearchProgress], bool] | None = None,
) -> SearchResult:  # fmt: skip
    """Search for a `rank.LiRank` block graph. Needs the extra `search`.

    Each trial trains a block graph on a fraction of the rows and measures its log loss on `val`, averaged over the
    labels. The first 20 graphs are random; later graphs are mutants of good graphs, picked by a model fitted on
    finished trials. The best graphs, no two alike, are refitted on all rows, with early stopping on `val`. A study in
    the folder is resumed; concurrent processes in the same folder share the trials, and return the same result.

    Args:
        train: `rank.Impressions`. val: validation impressions, with other requests.
        options: `rank.SearchOptions`.
        folder: for study.db, the study for Optuna and its dashboard; refits/, rankers; and blocks.json, the best
            refit's graph, for `LiRank(blocks=…)` and `tigon rank fit --blocks`.
        test: impressions for the refits' final metrics; never used for selection.
        device: for the rankers; None: CPU.
        after: called with a `rank.SearchProgress`; returning True ends the search, which a later call can resume.
    Returns: `rank.SearchResult`.
    Raises: ImportError without Optuna or LightGBM; ValueError if the folder's study was started with other data, labels
        or options, and as in `rank.fit`; FloatingPointError if a refit's loss, or every trial's, is not finite.
    """
    if missing := [name for name in ("optuna", "lightgbm") if importlib.util.find_spec(name) is None]:
        from tigon.install import install

        raise ImportError(f"rank.search_blocks needs {' and '.join(missing)}: {install('search')}")
    return _Search(train, val, test, options, Path(folder), torch.device(device or "cpu"), after).run()


def open_study(folder: Path) -> Any:
    """A folder's Optuna study, created if missing.

    Raises: DamagedFileError for a file that is no study.
    """
    import optuna
    import sqlalchemy

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        # Two processes must not create the tables at once.
        with filelock.FileLock(folder / f"{STUDY}.lock"), _ignore_experimental():
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{folder / STUDY}", {"connect_args": {"timeout": PATIENCE}},
                heartbeat_interval=HEARTBEAT, grace_period=GRACE,
            )  # fmt: skip
            return optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True)
    except (sqlalchemy.exc.DatabaseError, optuna.exceptions.StorageInternalError) as error:
        said = str(error).splitlines()[0].rstrip(".")
        raise DamagedFileError(f"{folder / STUDY} is not a readable study: {said}.") from error


def is_active(folder: Path) -> bool:
    """Whether a process runs trials or refits in a folder's study; up to a minute after a kill."""
    try:
        with filelock.FileLock(folder / f"{REFITS}.lock", timeout=0):
            return bool(_count_states(open_study(folder))["RUNNING"])
    except filelock.Timeout:
        return True
    except DamagedFileError:
        return False


@contextlib.contextmanager
def _ignore_experimental() -> Iterator[None]:
    """Optuna marks its heartbeat as experimental."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _count_states(study: Any) -> Counter[str]:
    """Number of trials by state, once dead trials are marked as failed."""
    from optuna.storages import fail_stale_trials

    with _ignore_experimental():
        fail_stale_trials(study)
    for one in study.get_trials(deepcopy=False):
        # Killed before its first heartbeat, which Optuna does not count as stale.
        began = one.datetime_start if one.state.name == "RUNNING" and "graph" not in one.user_attrs else None
        if began is not None and (datetime.datetime.now() - began).total_seconds() > GRACE:
            study.tell(one.number, state=type(one.state).FAIL, skip_if_finished=True)
    return Counter(one.state.name for one in study.get_trials(deepcopy=False))


class _Search:
    """State for a `search_blocks` call."""

    def __init__(
        self, train: Any, val: Any, test: Any, options: SearchOptions, folder: Path, device: torch.device,
        after: Callable[[SearchProgress], bool] | None,
    ) -> None:  # fmt: skip
        self.train, self.val, self.test, self.options = train, val, test, options
        self.folder, self.device, self.after = folder, device, after
        for name, data in (("train", train), ("val", val)):
            if not len(data):
                raise ValueError(f"rank.search_blocks: {name} has no requests.")
        # Inputs shared by all graphs; constructing a ranker validates the schema and the options.
        inputs = LiRank(train.schema, LiRankConfig(cross="none", mlp=(), **options.model)).inputs
        self.space = Space(tuple(options.kinds), options.most, len(inputs.vectors))
        self.small = ReducedData(train, options.rows, options.hash_rows)
        self.held = ReducedData(val, 1.0, options.hash_rows)
        self.fit = dataclasses.replace(
            options.fit, epochs=options.epochs, eval_every=0, max_minutes=None, metric="log_loss"
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.study = open_study(folder)
        self._check_settings()

    def _check_settings(self) -> None:
        """Store the settings that all runs in a study must share; raise if they are not the study's."""
        labels, data = ", ".join(self.train.schema.labels), {"training": self.train, "held-out": self.val}
        settings = {"labels": labels, **{f"{name} data": digest_table(table) for name, table in data.items()}}
        options = self.options.lasting()
        settings |= {f"fit {name}": value for name, value in options.pop("fit").items()} | options
        before = self.study.user_attrs.get("settings")
        if before is None:
            self.study.set_user_attr("settings", settings)
            return
        for name in {**before, **settings}:
            was, now = before.get(name), settings.get(name)
            if was != now:
                raise ValueError(
                    f"rank.search_blocks: the study in {self.folder} was started with {name} {was}, but got "
                    f"{now}; use the original value or another folder."
                )

    def run(self) -> SearchResult:
        try:
            self._run_trials()
            return self._result(self._refit_best(), False)
        except Stopped:
            return self._result([], True)

    def _run_trials(self) -> None:
        """Run trials until enough have ended, here or in other processes."""
        while True:
            counts = _count_states(self.study)
            ended = counts["COMPLETE"] + counts["PRUNED"]
            if ended >= self.options.trials and not counts["RUNNING"]:
                return
            if ended + counts["RUNNING"] >= self.options.trials:
                self._wait()
                continue
            self.study.optimize(self._try_graph, n_trials=1, catch=Surplus)
            for trial in self._finished_trials():
                if trial.number == self.number:
                    self._report(trial)

    def _wait(self) -> None:
        time.sleep(WAIT)
        self._report(None)

    def _try_graph(self, trial: Any) -> float:
        """The objective: a graph's log loss after a fit on a fraction of the rows."""
        import optuna

        self.number = trial.number
        options, trials = self.options, self.study.get_trials(deepcopy=False)
        counting = ("COMPLETE", "PRUNED", "RUNNING")
        if sum(one.number < trial.number and one.state.name in counting for one in trials) >= options.trials:
            raise Surplus
        # Another process may still be choosing its graph.
        seen = {graph_key(_read_graph(one)) for one in trials if "graph" in one.user_attrs}
        graph = choose_graph(self.space, options.sampler, self._finished_trials(), seen, options.seed, trial.number)
        trial.set_user_attr("graph", [block._asdict() for block in graph])
        ranker = self._make_ranker(graph, self.small.schema)
        trial.set_user_attr("flops", count_flops(ranker))
        try:
            fit(ranker, self.small, None, self.fit, after=self._after_step)
            loss = measure(ranker, self.held, self.fit)["log_loss"]
            if not math.isfinite(loss):
                raise FloatingPointError(f"the log loss is {loss}")
        except FloatingPointError as error:
            trial.set_user_attr("note", str(error))
            raise optuna.TrialPruned(str(error)) from error
        return loss

    def _finished_trials(self) -> list[Trial]:
        from optuna.trial import TrialState

        return [
            Trial(one.number, _read_graph(one), float(one.value), int(one.user_attrs["flops"]))
            for one in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        ]

    def _result(self, refits: list[RefitResult], stopped: bool) -> SearchResult:
        trials = self._finished_trials()
        if not trials and not stopped:
            raise FloatingPointError(
                "rank.search_blocks: no trial had a finite loss; a lower lr, or a longer warmup, may help."
            )
        return SearchResult(trials, refits, _count_states(self.study)["PRUNED"], stopped)

    def _make_ranker(self, graph: Graph, schema: Any) -> LiRank:
        torch.manual_seed(self.options.fit.seed)
        return LiRank(schema, LiRankConfig(blocks=graph, **self.options.model)).to(self.device)

    # --------------------------------------------------------------------------------------------------------- refits

    def _refit_best(self) -> list[RefitResult]:
        """The best graphs refitted on all rows; another process's refits are waited for, and taken."""
        best = select_distinct(self._finished_trials(), self.options.best)
        if not best:
            return []
        with self._refit_lock():
            result = [self._refit(one) for one in best]
            result.sort(key=lambda one: (one.validation["log_loss"], one.number))
            staged = self.folder / f"{BLOCKS}.partial"
            staged.write_text(blocks_to_json(result[0].graph), encoding="utf-8")
            os.replace(staged, self.folder / BLOCKS)
        return result

    @contextlib.contextmanager
    def _refit_lock(self) -> Iterator[None]:
        lock = filelock.FileLock(self.folder / f"{REFITS}.lock", timeout=0)
        while not lock.is_locked:
            try:
                lock.acquire()
            except filelock.Timeout:
                self._wait()
        try:
            yield
        finally:
            lock.release()

    def _refit(self, one: Trial) -> RefitResult:
        """A graph's fit on all rows, or the stored fit."""
        place, attribute = self.folder / REFITS / f"trial-{one.number}", f"refit {one.number}"
        record = self.study.user_attrs.get(attribute)
        if record is None or not (place / "config.json").is_file():
            began = time.perf_counter()
            ranker = self._make_ranker(one.graph, self.train.schema)
            options = dataclasses.replace(self.options.fit, metric=self.options.fit.metric or "log_loss")
            fitted = fit(ranker, self.train, self.val, options, after=self._after_step)
            ranker.save_pretrained(place)
            record = {
                "parameters": sum(p.numel() for p in ranker.parameters()), "steps": fitted.steps,
                "validation": measure(ranker, self.val, options), "seconds": time.perf_counter() - began,
            }  # fmt: skip
            self.study.set_user_attr(attribute, record)
        test: dict[str, float] = {}
        if self.test is not None:
            test = measure(Ranker.from_pretrained(place, self.device), self.test, self.options.fit)
        result = RefitResult(one.number, one.graph, one.flops, test=test, folder=place, **record)
        self._report(result)
        return result

    # ------------------------------------------------------------------------------------------------------- progress

    def _after_step(self, _: Any) -> bool:
        self._report(None)
        return False

    def _report(self, result: Trial | RefitResult | None) -> None:
        if self.after is None:
            return
        if result is not None or not hasattr(self, "_last"):
            trials = self._finished_trials()
            self._last = len(trials), min(trials, key=lambda one: (one.loss, one.number), default=None)
        if self.after(SearchProgress(result, *self._last)):
            raise Stopped


def _read_graph(trial: Any) -> Graph:
    return parse_blocks(trial.user_attrs["graph"])
