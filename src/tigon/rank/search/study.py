"""A search as an Optuna study. The journal file holds all state: a killed search resumes, and processes share it.

    folder/journal.log     Optuna's `JournalFileBackend`, readable by its dashboard
    folder/processes/      a lock file per active process, locked while the process lives

Trial parameters are the graph's tokens; the value is the log loss. A trial whose process died is marked failed and
replaced.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filelock  # a torch dependency
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from tigon.rank.search.evolution import Sampler, choose_graph
from tigon.rank.search.space import LEVELS, Graph, Space, graph_from_tokens, graph_key, graph_tokens
from tigon.rank.search.trial import Trial

NAME, JOURNAL, PROCESSES, REFITS = "tigon rank search", "journal.log", "processes", "refits"
# Trials not claimed by a process within this time belong to no process.
SIGNED_IN = 60.0


class Evolution(optuna.samplers.BaseSampler):
    """Optuna sampler for graphs. space, sampler, seed: as in `choose_graph`."""

    def __init__(self, space: Space, sampler: Sampler, seed: int) -> None:
        self.space, self.sampler, self.seed = space, sampler, seed

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return token_distributions(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        trials = study.get_trials(deepcopy=False)
        seen = {graph_key(graph_from_tokens(one.params)) for one in trials if is_whole(one)}
        graph = choose_graph(self.space, self.sampler, finished_trials(trials), seen, self.seed, trial.number)
        return dict(graph_tokens(graph))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(f"rank.search_blocks: a trial has no parameter {param_name!r}.")


def token_distributions(space: Space) -> dict[str, BaseDistribution]:
    """Distributions for a space's tokens, by name."""
    result: dict[str, BaseDistribution] = {"blocks": IntDistribution(1, space.most)}
    for number in range(1, space.most + 1):
        result[f"{number} kind"] = CategoricalDistribution(space.kinds)
        result[f"{number} level"] = IntDistribution(0, LEVELS - 1)
        result[f"{number} inputs"] = IntDistribution(1, (1 << number) - 1)
    return result


def is_whole(trial: FrozenTrial) -> bool:
    """Whether all tokens are present: a process may still be writing them."""
    return 1 + 3 * int(trial.params.get("blocks", 99)) == len(trial.params)


def finished_trials(trials: Sequence[FrozenTrial]) -> list[Trial]:
    """Finished trials, in order."""
    return [
        Trial(one.number, graph_from_tokens(one.params), float(one.value), int(one.user_attrs["flops"]))
        for one in trials
        if one.state == TrialState.COMPLETE and one.value is not None
    ]


class Study:
    """A folder's study.

    Args:
        folder: created if missing.
        about: settings that all runs and processes in the study must share, as JSON: name → value.
        defaults: default values for such settings. A study from an earlier version is assumed to use the defaults for
            settings added since.

    Raises: ValueError if the folder's study was started with other settings.
    """

    def __init__(
        self, folder: Path, about: dict[str, Any], space: Space, sampler: Sampler, seed: int, defaults: dict[str, Any]
    ) -> None:  # fmt: skip
        self.folder, self.space = folder, space
        (folder / PROCESSES).mkdir(parents=True, exist_ok=True)
        self.name = uuid.uuid4().hex[:12]
        # The operating system releases the lock when the process ends for any reason.
        self.presence = filelock.FileLock(folder / PROCESSES / self.name, timeout=0)
        self.presence.acquire()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            _truncate_partial_line(folder / JOURNAL)
            storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
            self.study = optuna.create_study(
                storage=storage, sampler=Evolution(space, sampler, seed), study_name=NAME, direction="minimize",
                load_if_exists=True,
            )  # fmt: skip
            self._check(about, defaults)
            self._mark_dead()
        except BaseException:
            self.close()
            raise

    def _check(self, about: dict[str, Any], defaults: dict[str, Any]) -> None:
        before = self.study.user_attrs.get("about")
        if before is None:
            self.study.set_user_attr("about", about)
            return
        for name in {**before, **about}:
            was, now = before.get(name, defaults.get(name)), about.get(name)
            if isinstance(was, dict):
                was = {**defaults.get(name, {}), **was}
            if was == now:
                continue
            if isinstance(was, dict) and isinstance(now, dict):  # list the options that differ
                differ = [option for option in {**was, **now} if was.get(option) != now.get(option)]
                was, now = ([f"{option}={side.get(option)}" for option in differ] for side in (was, now))
            raise ValueError(
                f"rank.search_blocks: the study in {self.folder} was begun with {name} {_format(was)}, and now there "
                f"is {_format(now)}; a study is of one thing: give that, or another folder."
            )

    def _mark_dead(self) -> None:
        """Fail the trials whose process has died."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not self._is_running(trial):
                self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _is_running(self, trial: FrozenTrial) -> bool:
        name = trial.user_attrs.get("process")
        if name is None:
            began = trial.datetime_start
            return began is None or time.time() - began.timestamp() < SIGNED_IN
        return bool(name == self.name) or is_locked(self.folder / PROCESSES / name)

    def close(self) -> None:
        release(self.presence)

    # --------------------------------------------------------------------------------------------------------- trials

    def finished_trials(self) -> list[Trial]:
        return finished_trials(self.study.get_trials(deepcopy=False))

    def counting_trials(self, before: int | None = None) -> list[FrozenTrial]:
        """Trials that count towards the total: finished, running, or with a non-finite loss.

        before: only trials with smaller numbers.
        """
        return [
            one
            for one in self.study.get_trials(deepcopy=False)
            if (before is None or one.number < before)
            and (one.state == TrialState.COMPLETE or "note" in one.user_attrs
                 or (one.state == TrialState.RUNNING and self._is_running(one)))
        ]  # fmt: skip

    def count_running(self) -> int:
        """Number of trials running in other processes."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return sum(self._is_running(one) for one in running)

    def ask(self, most: int) -> tuple[optuna.Trial, Graph] | None:
        """A new trial and its graph; None if the trial limit is reached."""
        if len(self.counting_trials()) >= most:
            return None
        trial = self.study.ask()
        trial.set_user_attr("process", self.name)
        if len(self.counting_trials(trial.number)) >= most:  # another process was faster
            self.fail(trial)
            return None
        may = token_distributions(self.space)
        found: dict[str, Any] = {"blocks": _suggest(trial, "blocks", may)}
        for number in range(1, found["blocks"] + 1):
            for token in ("kind", "level", "inputs"):
                found[f"{number} {token}"] = _suggest(trial, f"{number} {token}", may)
        return trial, graph_from_tokens(found)

    def tell(self, trial: optuna.Trial, loss: float, flops: int, graph: Graph) -> Trial:
        """Finish a trial with its loss."""
        trial.set_user_attr("flops", flops)
        trial.set_user_attr("graph", "; ".join(f"{n}: {block}" for n, block in enumerate(graph, 1)))
        self.study.tell(trial, loss)
        return Trial(trial.number, graph, loss, flops)

    def fail(self, trial: optuna.Trial, note: str | None = None) -> None:
        """Finish a trial without a loss.

        note: the reason if a retry would also fail; without a note, another trial replaces the failed trial.
        """
        if note is not None:
            trial.set_user_attr("note", note)
        self.study.tell(trial, state=TrialState.FAIL)

    # --------------------------------------------------------------------------------------------------------- refits

    def refits(self) -> dict[int, dict[str, Any]]:
        """Refits stored by `keep`, by trial number."""
        attrs = self.study.user_attrs
        return {int(name.split()[1]): found for name, found in attrs.items() if name.startswith("refit ")}

    def keep(self, number: int, found: dict[str, Any]) -> None:
        self.study.set_user_attr(f"refit {number}", found)

    def claim(self) -> filelock.BaseFileLock | None:
        """A lock for a study's refits, to be passed to `release`; None if another process holds the lock."""
        lock = filelock.FileLock(self.folder / PROCESSES / REFITS, timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            return None
        return lock


def release(lock: filelock.BaseFileLock) -> None:
    """Release a lock and delete its file."""
    if lock.is_locked:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def is_locked(file: Path) -> bool:
    """Whether a living process has locked a file. Unlocked files are deleted."""
    if not file.exists():
        return False
    lock = filelock.FileLock(file, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        return True
    release(lock)
    return False


def _suggest(trial: optuna.Trial, name: str, may: dict[str, BaseDistribution]) -> Any:
    found = may[name]
    if isinstance(found, IntDistribution):
        return trial.suggest_int(name, found.low, found.high)
    assert isinstance(found, CategoricalDistribution)
    return trial.suggest_categorical(name, found.choices)


def _format(value: Any) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _truncate_partial_line(journal: Path) -> None:
    """Truncate a partial last line left by a killed process or a full disk: Optuna cannot read lines after it."""
    if not journal.exists():
        return
    lock = JournalFileSymlinkLock(str(journal))
    lock.acquire()
    try:
        text = journal.read_bytes()
        if text and not text.endswith(b"\n"):
            os.truncate(journal, text.rfind(b"\n") + 1)
    finally:
        lock.release()
