"""Additions to a Trainer of transformers or TRL: checkpoints that are whole or absent, and a way to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Trainer, TrainerCallback

from tigon.cli.checkpoint import STAGING, prune, publish, seal
from tigon.cli.metrics import Metrics
from tigon.cli.signals import received

# The mixin goes over a Trainer of transformers or TRL; only the type checker needs a base class with the methods.
if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class Checkpointed(_Base):
    """A mixin over a Trainer: checkpoints that are whole or absent, and each step's loss handed to the metrics.

    Args:
        count: how many of the metrics' unit a micro-batch has: a number, or a tensor of one.
    """

    copies = 1  # how many processes get the same batch

    def __init__(
        self, *args: Any, metrics: Metrics, keep: int, count: Callable[[Any], int | torch.Tensor], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.metrics, self.keep, self.staging, self.count = metrics, keep, False, count
        metrics.mean = lambda losses: self.accelerator.reduce(losses, "mean")
        metrics.total = lambda count: self.accelerator.reduce(count, "sum") / self.copies

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        learning_rate = float(cast(Any, self.lr_scheduler).get_last_lr()[0])
        count = self.count(inputs)  # before the step, which may change its inputs
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.metrics.add(loss, learning_rate, count)
        return loss

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(str(self.args.output_dir), STAGING) if self.staging else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output = Path(str(self.args.output_dir))
        name = f"checkpoint-{self.state.global_step}"
        self.metrics.flush()
        try:
            self.staging = True
            super()._save_checkpoint(model, trial)
        finally:
            self.staging = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(output / STAGING / name)
            publish(output / STAGING / name, output / name)
            prune(output, self.keep)
        self.accelerator.wait_for_everyone()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: TRL's trainers would overwrite the user's own model card with every checkpoint."""


class CheckpointedTrainer(Checkpointed, Trainer):
    """The Trainer for text and conversations."""


class StopOnSignal(TrainerCallback):
    """Ctrl-C and SIGTERM end the run after the current step, with a checkpoint. A second Ctrl-C ends it at once.

    The last step is logged, evaluated and saved, whatever the intervals are.
    """

    def __init__(self, main: bool) -> None:
        self.main = main
        self.signal = 0
        self.since = 0.0

    def __enter__(self) -> StopOnSignal:
        self.before = {s: signal.signal(s, self.receive) for s in (signal.SIGINT, signal.SIGTERM)}
        self.signal = self.signal or received()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: Any) -> None:
        # The terminal and torchrun both send the signal of one Ctrl-C: a repetition within a second does not count.
        if self.signal and number == signal.SIGINT and time.monotonic() - self.since > 1:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self.since = number, time.monotonic()
            if self.main:
                os.write(2, b"\ntigon: stopping after this step, with a checkpoint\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size > 1:
            # All ranks must stop at the same step, which costs waiting for one number.
            flag = torch.tensor([self.signal], device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            self.signal = int(flag)
        if self.signal:
            control.should_save = control.should_training_stop = True
            control.should_log = True  # else the metrics since the last log would be lost with the process
        if state.global_step >= state.max_steps:
            control.should_save = control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"
