"""`rank.search_blocks`: try graphs on a fraction of the rows, and refit the best on all rows."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tigon.rank.models.lirank.blocks import count_flops
from tigon.rank.models.lirank.config import LiRankConfig
from tigon.rank.models.lirank.graph import blocks_to_json
from tigon.rank.models.lirank.model import LiRank
from tigon.rank.models.ranker import Ranker
from tigon.rank.search.evolution import select_distinct
from tigon.rank.search.fidelity import ReducedData, reduce_vocabularies
from tigon.rank.search.measures import digest_table, log_loss, measure
from tigon.rank.search.options import SearchOptions
from tigon.rank.search.space import Graph, Space
from tigon.rank.search.trial import Trial
from tigon.rank.training.fit import fit

if TYPE_CHECKING:
    from tigon.rank.search.study import Study

BLOCKS, REFITS = "blocks.json", "refits"


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
        refits: sorted by validation log loss; [] while other processes run trials.
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


def search_blocks(
    train: Any, val: Any, options: SearchOptions = SearchOptions(), *, folder: str | Path, test: Any = None,
    device: torch.device | str | None = None, after: Callable[[SearchProgress], bool] | None = None,
) -> SearchResult:  # fmt: skip
    """Search for a `rank.LiRank` block graph. Needs the extra `search`.

    Each trial trains a block graph on a fraction of the rows and measures its log loss on `val`, averaged over the
    labels. The first 20 graphs are random; later graphs are mutants of good graphs, picked by a model fitted on
    finished trials. The best graphs, no two alike, are refitted on all rows, with early stopping on `val`. A study in
    the folder is resumed; concurrent processes in the same folder share the trials.

    Args:
        train: `rank.Impressions`. val: validation impressions, with other requests.
        options: `rank.SearchOptions`.
        folder: for journal.log, the study for Optuna and its dashboard; refits/, rankers; and blocks.json, the best
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
    from tigon.rank.search.study import Study

    run = _Search(train, val, test, options, Path(folder), torch.device(device or "cpu"), after)
    about = {
        "labels": list(train.schema.labels), "training data": digest_table(train), "held-out data": digest_table(val),
        **options.lasting(),
    }  # fmt: skip
    defaults = SearchOptions().lasting()
    run.study = Study(Path(folder), about, run.space, options.sampler, options.seed, defaults)
    try:
        return run.run()
    finally:
        run.study.close()


class _Search:
    """State for a `search_blocks` call."""

    study: Study

    def __init__(
        self, train: Any, val: Any, test: Any, options: SearchOptions, folder: Path, device: torch.device,
        after: Callable[[SearchProgress], bool] | None,
    ) -> None:  # fmt: skip
        self.train, self.val, self.test, self.options = train, val, test, options
        self.folder, self.device, self.after = folder, device, after
        self.tested = None if test is None else digest_table(test)
        for name, data in (("train", train), ("val", val)):
            if not len(data):
                raise ValueError(f"rank.search_blocks: {name} has no requests.")
        # Inputs shared by all graphs; constructing a ranker validates the schema and the options.
        inputs = LiRank(train.schema, LiRankConfig(cross="none", mlp=(), **options.model)).inputs
        self.space = Space(tuple(options.kinds), options.most, len(inputs.vectors))
        self.small = ReducedData(train, options.rows, options.hash_rows)
        self.held = reduce_vocabularies(val, options.hash_rows)
        self.fit = dataclasses.replace(
            options.fit, epochs=options.epochs, eval_every=0, max_minutes=None, metric="log_loss"
        )

    def run(self) -> SearchResult:
        try:
            while (asked := self.study.ask(self.options.trials)) is not None:
                self._trial(*asked)
            refitted = self._refits() if not self.study.count_running() else []
        except Stopped:
            return self._result([], True)
        return self._result(refitted, False)

    def _result(self, refitted: list[RefitResult], stopped: bool) -> SearchResult:
        tried = self.study.finished_trials()
        if not tried and not stopped and not self.study.count_running():
            raise FloatingPointError(
                "rank.search_blocks: no trial had a finite loss; a lower lr, or a longer warmup, may help."
            )
        return SearchResult(
            tried, refitted, len(self.study.counting_trials()) - len(tried) - self.study.count_running(), stopped
        )

    def _trial(self, trial: Any, graph: Graph) -> None:
        try:
            ranker = self._ranker(graph, self.small.schema)
            fit(ranker, self.small, None, self.fit, after=self._step)
            loss = log_loss(ranker, self.held, self.fit)
            if not math.isfinite(loss):
                raise FloatingPointError(f"the log loss is {loss}")
        except FloatingPointError as error:
            self.study.fail(trial, str(error))
            return
        except BaseException:
            self.study.fail(trial)  # another trial replaces it
            raise
        self._tell(self.study.tell(trial, loss, count_flops(ranker), graph))

    def _ranker(self, graph: Graph, schema: Any) -> LiRank:
        torch.manual_seed(self.options.fit.seed)
        return LiRank(schema, LiRankConfig(blocks=graph, **self.options.model)).to(self.device)

    # --------------------------------------------------------------------------------------------------------- refits

    def _refits(self) -> list[RefitResult]:
        """The best graphs refitted on all rows, or stored refits; [] while another process refits them."""
        tried = select_distinct(self.study.finished_trials(), self.options.best)
        lock = self.study.claim() if tried else None
        if lock is None:
            return []
        try:
            result = [self._refit(one) for one in tried]
        finally:
            from tigon.rank.search.study import release

            release(lock)
        result.sort(key=lambda one: (one.validation["log_loss"], one.number))
        staged = self.folder / f"{BLOCKS}.partial"
        staged.write_text(blocks_to_json(result[0].graph), encoding="utf-8")
        os.replace(staged, self.folder / BLOCKS)
        return result

    def _refit(self, one: Trial) -> RefitResult:
        place = self.folder / REFITS / f"trial-{one.number}"
        kept = self.study.refits().get(one.number)
        if kept is None or not (place / "config.json").is_file():
            began = time.perf_counter()
            ranker = self._ranker(one.graph, self.train.schema)
            options = dataclasses.replace(self.options.fit, metric=self.options.fit.metric or "log_loss")
            fitted = fit(ranker, self.train, self.val, options, after=self._step)
            ranker.save_pretrained(place)
            kept = {
                "flops": count_flops(ranker), "parameters": sum(p.numel() for p in ranker.parameters()),
                "validation": measure(ranker, self.val, options), "test": {}, "tested": None,
                "steps": fitted.steps, "seconds": time.perf_counter() - began,
            }  # fmt: skip
            self.study.keep(one.number, kept)
        if kept["tested"] != self.tested:
            again = Ranker.from_pretrained(place, self.device)
            test = {} if self.test is None else measure(again, self.test, self.options.fit)
            kept = {**kept, "test": test, "tested": self.tested}
            self.study.keep(one.number, kept)
        about = {name: value for name, value in kept.items() if name != "tested"}
        result = RefitResult(one.number, one.graph, **about, folder=place)
        self._tell(result)
        return result

    # ------------------------------------------------------------------------------------------------------- progress

    def _step(self, _: Any) -> bool:
        self._tell(None)
        return False

    def _tell(self, found: Trial | RefitResult | None) -> None:
        if self.after is None:
            return
        if found is not None or not hasattr(self, "_last"):
            tried = self.study.finished_trials()
            self._last = len(tried), min(tried, key=lambda one: (one.loss, one.number), default=None)
        if self.after(SearchProgress(found, *self._last)):
            raise Stopped
