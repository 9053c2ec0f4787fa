"""Ranker training loop: label losses, AdamW, warm-up and cosine schedule, early stopping.

The data order in an epoch and a step's random numbers depend only on the seed and the epoch or step number, so that a
resumed run is bitwise identical to an uninterrupted run.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tigon.rank import losses
from tigon.rank.data.batch import labelled_rows
from tigon.rank.data.batches import PRECISIONS, BatchOptions, BatchSource, check_schema
from tigon.rank.evaluation.evaluate import (
    METRICS,
    OBJECTIVES,
    evaluate,
    evaluate_next_items,
    find_best,
    monitored_value,
    parse_cutoffs,
)
from tigon.rank.evaluation.score import score
from tigon.rank.training.defaults import choose_settings
from tigon.rank.training.diagnostics import count_classes, find_problems
from tigon.rank.training.optimizers import SCHEDULES, TABLE_OPTIMIZERS, Optimizers, count_drops, lr_multiplier
from tigon.rank.training.warm_start import FisherPrior, QuadraticPenalty, check_prior_options

LOSSES: dict[str, Callable[..., Tensor]] = {
    "bce": losses.bce, "softmax": losses.softmax, "pairwise": losses.pairwise, "approx_ndcg": losses.approx_ndcg,
    "lambda": losses.lambda_loss,
}  # fmt: skip
# Reading a loss synchronises with the device: read this many at once.
READ_EVERY = 50


@dataclass(frozen=True)
class FitOptions:
    """Training options.

    `lr`, `epochs`, `batch_size`, `eval_every` and `patience` default to None: `resolve` chooses them from the request
    and row counts.

    Args:
        loss: loss for each label: "bce", "softmax", "pairwise", "approx_ndcg" or "lambda"; see `tigon.rank.losses`.
        label_weights: by label, the loss weight in the sum; None: 1 each.
        objective: "impressions", or "next-item": cross entropy over all items for the next item in a history, for
            rankers that support it, such as `rank.LiGR`.
        lr: peak learning rate; None: 3e-3, less for `rank.LiGR` above width 64.
        weight_decay: for linear weights.
        table_optimizer: for embedding tables: "adamw", as for the other parameters, or "row-adagrad" for
            `tigon.training.RowAdagrad`, where a step updates only the rows in its batch. Requires a ranker with such
            tables, as `rank.LiRank`.
        table_lr: peak learning rate for "row-adagrad", with the same schedule as `lr`.
        warmup: fraction of the run used for learning-rate warm-up.
        schedule: after warm-up: "cosine" or "linear" decay to 0 at the last epoch, "constant", or "plateau": divide the
            learning rate by 10 after each evaluation on `val` that does not improve.
        clip: maximum gradient norm, over all gradients except tables with "row-adagrad"; 0: no clipping.
        epochs: maximum passes over the requests; None: 10, or enough for 600 steps.
        max_minutes: time limit; None: no limit.
        batch_size: requests per step; None: a fifteenth of the rows, 32 to 2,048.
        batch_tokens: events and candidates per step, instead of `batch_size`.
        history_max: maximum events per request, newest first; None: all.
        metric: the metric that early stopping monitors, such as "auc", "gauc", "log_loss" or "ndcg@10", averaged over
            the labels; "click:auc" monitors a single label. None: "auc" for bce, "ndcg@10" for other losses.
        eval_every: steps between evaluations; 0: at the end of each epoch; None: likewise, but at most 40 evaluations.
        patience: evaluations without improvement before the run stops; None: half of the planned evaluations, 3 with
            "plateau".
        prior_strength: λ, strength of the penalty for `fit(…, priors=…)` that keeps weights close to an earlier fit; n
            / m weighs the old data as n rows against m new rows.
        precision: matmul precision: "bf16", "fp32", or "auto": bf16 on a GPU.
        seed: for data order and dropout.
    Raises: ValueError for a value out of range.
    """

    loss: str = "bce"
    label_weights: Mapping[str, float] | None = None
    objective: str = "impressions"
    lr: float | None = None
    weight_decay: float = 0.01
    table_optimizer: str = "adamw"
    table_lr: float = 0.02
    warmup: float = 0.05
    schedule: str = "cosine"
    clip: float = 1.0
    epochs: int | None = None
    max_minutes: float | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    history_max: int | None = None
    metric: str | None = None
    eval_every: int | None = None
    patience: int | None = None
    prior_strength: float = 0.1
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        words: dict[str, Any] = {
            "loss": LOSSES, "objective": OBJECTIVES, "precision": PRECISIONS, "table_optimizer": TABLE_OPTIMIZERS,
            "schedule": SCHEDULES,
        }  # fmt: skip
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"rank.fit: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        for name in ("epochs", "batch_size", "batch_tokens", "patience", "history_max", "eval_every", "seed"):
            value, low = getattr(self, name), int(name not in ("history_max", "eval_every", "seed"))
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ValueError(f"rank.fit: {name} must be an integer of at least {low}, got {value!r}.")
        for name in ("lr", "table_lr", "max_minutes", "weight_decay", "clip", "prior_strength"):
            value, above = getattr(self, name), name in ("lr", "table_lr", "max_minutes")
            if value is not None and not (0 <= value < math.inf and (value or not above)):
                raise ValueError(f"rank.fit: {name} must be {'above 0' if above else 'at least 0'}, got {value}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(
                f"rank.fit: warmup must be a fraction of the run, at least 0 and below 1, got {self.warmup}."
            )
        if not re.fullmatch(METRICS[self.objective], self.monitor.rpartition(":")[2]):
            names = "auc, gauc, log_loss, ece, mrr, " if self.objective == "impressions" else "mrr, "
            raise ValueError(
                f"rank.fit: metric must be one of {names}ndcg@K and hr@K, or LABEL:METRIC, got {self.metric!r}."
            )
        for label, weight in (self.label_weights or {}).items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"rank.fit: label_weights must be at least 0, got {weight} for {label!r}.")

    @property
    def monitor(self) -> str:
        """The metric that early stopping monitors."""
        if self.metric is not None:
            return self.metric
        return "auc" if self.loss == "bce" and self.objective == "impressions" else "ndcg@10"

    @property
    def batch_options(self) -> BatchOptions:
        requests = BatchOptions().requests if self.batch_size is None else self.batch_size
        return BatchOptions(requests, self.batch_tokens, self.history_max, self.precision)

    def resolve(self, ranker: Any, train: BatchSource) -> FitOptions:
        """Choose `lr`, `epochs`, `batch_size`, `eval_every` and `patience` from the data where they are None.

        Args:
            ranker, train: as in `fit`.
        Returns: `FitOptions`, with these five as numbers.
        """
        width = ranker.config.width if getattr(ranker, "kind", None) == "ligr" else None
        chosen = choose_settings(
            len(train), getattr(train, "rows", len(train)), width, batch_size=self.batch_size, epochs=self.epochs
        )
        if self.schedule == "plateau":  # three evaluations without improvement divide the rate by 1,000
            chosen = chosen._replace(patience=3)
        return replace(self, **{name: x for name, x in chosen._asdict().items() if getattr(self, name) is None})


@dataclass
class FitResult:
    """The result of a fit.

    Attributes:
        history: a row per evaluation: "step", "epoch", "loss", and metrics as "LABEL:METRIC".
        best: the best evaluation's step, whose weights the ranker has; the last step without evaluations.
        steps: step count. seconds: total time. stopped: whether `after` ended the run.
        warnings: a message for each sign of a failed or short training, with the option to change.
    """

    history: list[dict[str, float]]
    best: int
    steps: int
    seconds: float
    stopped: bool = False
    warnings: list[str] = field(default_factory=list)


@dataclass
class Progress:
    """Training progress, passed to `fit`'s callback after each step and each evaluation.

    Attributes:
        step: completed steps. epoch: passes over the requests, a float.
        evaluation: the history row from the latest evaluation; None after a step.
    """

    step: int
    epoch: float
    evaluation: dict[str, float] | None
    _rows: Callable[[], list[dict[str, float]]] = field(repr=False)
    _state: Callable[[], dict[str, Any]] = field(repr=False)

    def rows(self) -> list[dict[str, float]]:
        """ "step", "epoch", "loss", "lr" and "grad_norm" for the steps since the last call.

        Synchronises with the device.

        Raises: FloatingPointError for a non-finite loss.
        """
        return self._rows()

    def state(self) -> dict[str, Any]:
        """State for resuming `fit`: the run's own tensors; copy or write them before the next step.

        "model" and, after an evaluation, "best" are the ranker's state dicts, "optimizer" is the optimizers'; the rest
        is JSON.
        """
        return self._state()


def fit(
    ranker: Any, train: BatchSource, val: BatchSource | None = None, options: FitOptions = FitOptions(), *,
    priors: Sequence[FisherPrior] = (), state: dict[str, Any] | None = None,
    after: Callable[[Progress], bool] | None = None,
) -> FitResult:  # fmt: skip
    """Train a ranker in place, on its current device. Needs the extra `rank`.

    A step's loss is the weighted sum of the label losses. With `val` the ranker is evaluated during training, and ends
    with the best weights. The ranker is left in `eval` mode. Warns if the fit ends at chance level, during warm-up, or
    while still improving.

    Args:
        ranker: a `rank.Ranker`, such as `rank.LiGR`.
        train: `rank.Impressions`.
        val: validation impressions, with other requests. None: all epochs run.
        options: `rank.FitOptions`.
        priors: `rank.FisherPrior` list from fits on older data; the penalty weight is `options.prior_strength`.
            Reported losses exclude the penalty.
        state: from `Progress.state`, to resume with bitwise identical results on the same device.
        after: called with a `rank.Progress` after each step and each evaluation; returning True ends the run.
    Returns: `rank.FitResult`.
    Raises: ValueError if train has no requests or no labels, for an unknown label or metric, and for priors that do not
        match the ranker or the options; FloatingPointError for a non-finite loss.
    """
    run = _Run(ranker, train, val, options, after, priors)
    try:
        fitted = run.run(state)
    finally:
        ranker.eval()
    for sentence in fitted.warnings:
        warnings.warn(f"rank.fit: {sentence}.", stacklevel=2)
    return fitted


def objective_loss(ranker: Any, batch: Any, options: FitOptions) -> Tensor:
    """A batch's loss, 0-d fp32."""
    with options.batch_options.autocast(batch.rows.device):
        if options.objective == "next-item":
            out: Tensor = ranker.next_item_loss(batch)
            return out.float()
        logits = ranker(batch)
    if not batch.labels:
        raise ValueError("rank.fit: train must have labels, got a table without labels.")
    weights = options.label_weights or {}
    loss = LOSSES[options.loss]
    terms = [weights.get(label, 1.0) * _label_loss(loss, batch, label, logits[label].float()) for label in batch.labels]
    return torch.stack(terms).sum()


def _label_loss(loss: Callable[..., Tensor], batch: Any, label: str, z: Tensor) -> Tensor:
    """A label's loss over the rows with a value."""
    y, offsets, weights = batch.labels[label], batch.offsets, batch.weights
    known = labelled_rows(batch, label)
    if known is not None:
        before = torch.cat((known.new_zeros(1, dtype=torch.int64), known.cumsum(0)))
        offsets = before.cpu()[offsets].unique()
        z, y, weights = z[known], y[known], None if weights is None else weights[known]
    return loss(z, y, offsets, weights=weights)


def check_arguments(ranker: Any, train: BatchSource, val: BatchSource | None, options: FitOptions) -> None:
    """Raise `fit`'s errors before the first step."""
    if not len(train):
        raise ValueError("rank.fit: train has no requests.")
    if options.objective == "next-item" and not hasattr(ranker, "next_item_loss"):
        raise ValueError(
            f"rank.fit: objective must be impressions for {type(ranker).__name__}, which has no next-item loss."
        )
    if options.schedule == "plateau" and val is None:
        raise ValueError("rank.fit: schedule must be cosine, linear or constant without val, which plateau monitors.")
    for data in (train, val):
        check_schema("rank.fit", ranker, data)
    if options.objective == "impressions" and options.loss != "bce" and getattr(train, "rows", None) == len(train):
        raise ValueError(
            f"rank.fit: loss must be bce if each request has a single row, with no order to learn, got "
            f"{options.loss!r}; request=… names the request column."
        )
    labels, label = ranker.schema.labels, options.monitor.rpartition(":")[0]
    if val is not None and options.objective == "impressions" and label not in ("", *labels):
        raise ValueError(f"rank.fit: metric must be for one of the labels {', '.join(labels)}, got {options.metric!r}.")
    if unknown := sorted(set(options.label_weights or {}) - set(labels)):
        raise ValueError(f"rank.fit: label_weights must be for the labels {', '.join(labels)}, got {unknown[0]!r}.")


class _Run:
    """State for a fit."""

    def __init__(
        self, ranker: Any, train: BatchSource, val: BatchSource | None, options: FitOptions,
        after: Callable[[Progress], bool] | None, priors: Sequence[FisherPrior],
    ) -> None:  # fmt: skip
        from accelerate import Accelerator

        if priors:
            check_prior_options(options)
        check_arguments(ranker, train, val, options)
        options = options.resolve(ranker, train)
        assert options.lr is not None
        assert options.epochs is not None
        assert options.patience is not None
        self.epochs, self.every, self.patience = options.epochs, options.eval_every, options.patience
        self.ranker, self.train, self.val, self.options, self.after = ranker, train, val, options, after
        self.device = next(ranker.parameters()).device
        # All Accelerators in a process share a state, whose device may differ from this ranker's.
        self.accelerator = Accelerator(device_placement=False)
        if self.accelerator.num_processes > 1:
            raise ValueError(f"rank.fit: trains on one device, got {self.accelerator.num_processes} processes.")
        self.optimizers = Optimizers(
            ranker, options.table_optimizer, options.lr, options.table_lr, options.weight_decay
        )
        self.clipped = self.optimizers.clipped_parameters(ranker)
        self.pull = (
            QuadraticPenalty(ranker, priors, options.prior_strength) if priors and options.prior_strength else None
        )
        self.step, self.epoch, self.batches, self.requests = 0, 0, 0, 0
        self.history: list[dict[str, float]] = []
        self.best: dict[str, Tensor] | None = None
        self.pending: list[tuple[int, float, Tensor, float, Tensor]] = []
        self.rows: list[dict[str, float]] = []
        self.loss = math.nan
        self.began = time.perf_counter()

    def run(self, state: dict[str, Any] | None) -> FitResult:
        if state is not None:
            self._load_state(state)
        # Do not prepare the ranker: its forward would use the precision of the process's first Accelerator.
        optimizer = self.accelerator.prepare(self.optimizers.adamw)
        stopped = False
        while self.epoch < self.epochs and not stopped and not self._is_over():
            stopped = self._epoch(optimizer)
        self._read()
        if self.best is not None and not stopped:
            self.ranker.load_state_dict(self.best)
        row = self._best_row()
        best = self.step if row is None else int(row["step"])
        doubts = [] if stopped else self._find_problems(row)
        return FitResult(self.history, best, self.step, self._seconds(), stopped, doubts)

    def _find_problems(self, row: dict[str, float] | None) -> list[str]:
        options = self.options
        shown = options.objective == "impressions"
        classes = count_classes(self.val) if self.val is not None and shown else {}
        probabilities = shown and options.loss == "bce" and getattr(self.ranker, "isotonic", None) is None
        return find_problems(
            row, self.history, options.monitor, classes, steps=self.step, ended=self.epoch == self.epochs,
            warmup=options.warmup * self.epochs * self.step / max(self._epochs(), 1e-9),
            probabilities=probabilities,
        )  # fmt: skip

    def _epoch(self, optimizer: Any) -> bool:
        """Run the rest of an epoch; True if `after` ended the run."""
        every, batch_options = self.every, self.options.batch_options
        measured = self.history[-1]["step"] if self.history else 0
        # A state saved at this step may predate its evaluation, which may be the last.
        if every and self.step % every == 0 and measured != self.step:
            if self._evaluate():
                return True
            if self._is_over():
                return False
        order = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.epoch)
        self.ranker.train()
        for batch in batch_options.batches(self.train, self.device, order, self.batches):
            self._step(optimizer, batch)
            if self._notify(None) or (every and self.step % every == 0 and self._evaluate()):
                return True
            if self._is_late() or (every and self._is_over()):
                break
        else:
            self.epoch, self.batches, self.requests = self.epoch + 1, 0, 0
        ends = self.epoch == self.epochs or self._is_late()
        return (self.step % every > 0 and ends if every else True) and self._evaluate()

    def _step(self, optimizer: Any, batch: Any) -> None:
        options = self.options
        torch.manual_seed(options.seed * 1_000_003 + self.step)
        # The midpoint of the step's requests, as a fraction of the run: token-budget batches vary in size.
        done = (self.epoch + (self.requests + batch.requests / 2) / len(self.train)) / self.epochs
        falls = count_drops(self.history, options.monitor) if options.schedule == "plateau" else 0
        rate = self.optimizers.set_lr(optimizer, lr_multiplier(options.schedule, done, options.warmup, falls))
        loss = objective_loss(self.ranker, batch, options)
        self.accelerator.backward(loss)
        if self.pull is not None:
            self.pull.add()
        norm = self.accelerator.clip_grad_norm_(self.clipped, options.clip or math.inf)
        for one in (optimizer, self.optimizers.rows):
            if one is not None:
                one.step()
                one.zero_grad(set_to_none=True)
        self.step, self.batches, self.requests = self.step + 1, self.batches + 1, self.requests + batch.requests
        self.pending.append((self.step, self._epochs(), loss.detach(), rate, norm))
        if self.after is None and len(self.pending) == READ_EVERY:
            self._take_rows()

    def _read(self) -> None:
        """Synchronise and read the losses of completed steps."""
        if not self.pending:
            return
        values = torch.stack([torch.stack((loss, norm.float())) for _, _, loss, _, norm in self.pending]).tolist()
        self.rows += [
            {"step": step, "epoch": round(epoch, 6), "loss": loss, "lr": lr, "grad_norm": norm}
            for (step, epoch, _, lr, _), (loss, norm) in zip(self.pending, values, strict=True)
        ]
        for row in self.rows[-len(self.pending) :]:
            if not math.isfinite(row["loss"]):
                raise FloatingPointError(
                    f"rank.fit: the loss became {row['loss']} at step {row['step']}; a lower lr may help."
                )
        self.pending = []
        self.loss = self.rows[-1]["loss"]

    def _take_rows(self) -> list[dict[str, float]]:
        self._read()
        rows, self.rows = self.rows, []
        return rows

    def _evaluate(self) -> bool:
        if self.val is None:
            return False
        options = self.options
        self._read()
        at = sorted({5, 10, *parse_cutoffs(options.monitor)})
        if options.objective == "next-item":
            found = evaluate_next_items(self.ranker, self.val, at, options.batch_options)
        else:
            found = evaluate(score(self.ranker, self.val, options.batch_options), at)
        value = monitored_value(found, options.monitor)
        row = {"step": self.step, "epoch": round(self._epochs(), 6), "loss": self.loss, options.monitor: value}
        for label, names in found.labels.items():
            row |= {f"{label}:{name}": one.value for name, one in names.items()}
        self.history.append(row)
        if self._best_row() is row:
            self.best = {name: x.detach().clone() for name, x in self.ranker.state_dict().items()}
        self.ranker.train()
        return self._notify(row)

    def _notify(self, found: dict[str, float] | None) -> bool:
        if self.after is None:
            return False
        return bool(self.after(Progress(self.step, self._epochs(), found, self._take_rows, self._state)))

    def _best_row(self) -> dict[str, float] | None:
        return find_best(self.history, self.options.monitor)

    def _is_over(self) -> bool:
        """Whether the time is up or patience is exhausted."""
        best = self._best_row()
        behind = 0 if best is None else len(self.history) - 1 - self.history.index(best)
        return behind >= self.patience or (self._is_late() and self.step > 0)

    def _is_late(self) -> bool:
        return self.options.max_minutes is not None and self._seconds() > 60 * self.options.max_minutes

    def _seconds(self) -> float:
        return time.perf_counter() - self.began

    def _epochs(self) -> float:
        return self.epoch + self.requests / len(self.train)

    def _state(self) -> dict[str, Any]:
        self._read()  # so that no state contains non-finite weights
        best = {} if self.best is None else {"best": self.best}
        return {
            "model": self.ranker.state_dict(), **best, "optimizer": self.optimizers.state_dict(),
            "history": self.history, "step": self.step, "epoch": self.epoch, "batches": self.batches,
            "requests": self.requests, "loss": self.loss, "seconds": self._seconds(),
        }  # fmt: skip

    def _load_state(self, state: dict[str, Any]) -> None:
        self.ranker.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizer"])
        best = state.get("best")
        self.best = None if best is None else {name: x.detach().clone().to(self.device) for name, x in best.items()}
        self.history = [dict(row) for row in state["history"]]
        for name in ("step", "epoch", "batches", "requests", "loss"):
            setattr(self, name, state[name])
        self.began = time.perf_counter() - state["seconds"]
