"""The reports of a training run: a bar or lines on the screen, metrics.jsonl, TensorBoard, and a plot of the loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from tigon.cli.metrics_file import append
from tigon.cli.problem import Problem

_OURS = ("loss", "learning_rate", "epoch", "step")  # written for every step, not only at log steps


class Metrics(TrainerCallback):
    """Collects each step's loss on the device and writes it when the run logs or saves: one wait for many steps.

    When a resume computes a step again, metrics.jsonl has two lines for that step; the last line counts.

    Args:
        unit: what speeds count: the numbers given to `add` are numbers of it.
        further: metrics of the trainer to show beside the loss; metrics.jsonl has every metric that the trainer logs.
    """

    def __init__(
        self, output: Path, console: Console, tensorboard: bool, main: bool, *, unit: str = "tokens",
        further: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.file = output / "metrics.jsonl"
        self.console = console
        self.main = main
        self.unit, self.further = unit, further
        self.loss: torch.Tensor | None = None
        self.count: int | torch.Tensor = 0
        self.pending: list[tuple[int, float, torch.Tensor, float]] = []
        self.learning_rate = 0.0
        self.last: dict[str, Any] = {}
        self.speeds: list[float] = []
        # Set by the trainer, which knows the processes: their mean, and their sum with every batch counted once.
        self.mean: Callable[[torch.Tensor], torch.Tensor]
        self.total: Callable[[torch.Tensor], torch.Tensor]
        self.writer: Any = None
        self.mark = time.perf_counter()
        self.bar: Progress | None = None
        if main and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(output / "tensorboard"))

    def add(self, loss: torch.Tensor, learning_rate: float, count: int | torch.Tensor) -> None:
        """Take the loss of one micro-batch, and how many of `unit` the micro-batch has.

        The losses of a step's micro-batches add up to the step's mean.
        """
        if self.loss is None:
            self.learning_rate = learning_rate
        self.loss = loss if self.loss is None else self.loss + loss
        self.count = self.count + count

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.mark = time.perf_counter()
        if not self.main:
            return
        self.append({"event": "start", "step": state.global_step, "steps": state.max_steps})
        text = TextColumn("{task.description}", markup=False)
        columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), text)
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self.bar.start()
        self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.loss is not None:
            self.pending.append((state.global_step, state.epoch, self.loss.float().reshape(()), self.learning_rate))
        self.loss = None
        # The speed of these steps must not include an evaluation or a save. A step that logs is left for `on_log`,
        # which comes before both and brings the trainer's metrics of the step.
        if (control.should_save or control.should_evaluate) and not control.should_log:
            self.flush()
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        logs = logs or {}
        numbers = {k: float(v) for k, v in logs.items() if k not in _OURS and isinstance(v, (int, float))}
        if "eval_loss" in logs:
            self.last["eval_loss"] = logs["eval_loss"]
            self.append({"step": state.global_step, **numbers})
            self.scalars(state.global_step, **numbers)
            shown = {name: numbers[name] for name in self.further if name in numbers}
            self.last.update(shown)
            worth = "".join(f", {name.removeprefix('eval_')} {value:.4f}" for name, value in shown.items())
            self.say(f"step {state.global_step}: evaluation loss {logs['eval_loss']:.4f}{worth}")
            self.mark = time.perf_counter()
        elif "loss" in logs:
            self.flush(numbers)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.flush()
        self.mark = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.flush()
        self.close()

    def flush(self, logged: dict[str, float] | None = None) -> None:
        """Write the steps since the last call. Raises Problem at the first loss that is not finite."""
        if not self.pending:
            return
        stacked = torch.stack([loss for _, _, loss, _ in self.pending])
        count = float(self.total(torch.as_tensor(self.count, device=stacked.device)))
        losses = self.mean(stacked).tolist()
        self.count = 0
        now = time.perf_counter()
        speed = count / max(now - self.mark, 1e-9)
        self.mark = now
        self.speeds.append(speed)
        rows = [
            {"step": step, "epoch": round(epoch, 6), "loss": loss, "learning_rate": lr}
            for (step, epoch, _, lr), loss in zip(self.pending, losses, strict=True)
        ]
        self.pending = []
        rows[-1][f"{self.unit}_per_second"] = round(speed, 1)
        rows[-1].update(logged or {})
        self.last.update(rows[-1])
        self.append(*rows)
        for row in rows:
            self.scalars(row["step"], **{k: v for k, v in row.items() if k != "step"})
        line = f"loss {losses[-1]:.4f}  lr {rows[-1]['learning_rate']:.2e}  {speed:,.0f} {self.unit}/s"
        line += "".join(f"  {name} {rows[-1][name]:.4f}" for name in self.further if name in rows[-1])
        if self.bar is not None:
            self.bar.update(self.task, description=line)
        if not self.console.is_terminal:
            self.say(f"step {rows[-1]['step']}: {line}")
        for row in rows:
            if not math.isfinite(row["loss"]):
                raise Problem(f"the loss became {row['loss']} at step {row['step']}; a lower --lr may help", code=1)

    def say(self, line: str) -> None:
        if self.main:
            self.console.print(line, highlight=False, soft_wrap=True)

    def append(self, *rows: dict[str, Any]) -> None:
        if self.main:
            append(self.file, *rows)

    def scalars(self, step: int, **values: float) -> None:
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.writer is not None:
            self.writer.close()
