"""`tigon train`'s additions to a trainer: checkpoints that are complete or ignored, and a way to stop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tigon.cli.checkpoint import prune, seal
from tigon.cli.problem import Problem
from tigon.cli.signals import Interrupts


class RunCallback(Interrupts, TrainerCallback):
    """Seals the trainer's checkpoints, and ends the run on a signal or on a loss that is not finite.

    A checkpoint gets a manifest when all its files are on disk: a checkpoint that a kill, a crash or a full disk
    truncated has none, and no resume uses it. Only then are older checkpoints deleted, so the callback replaces the
    trainer's `save_total_limit`.

    `with callback:` around the training: Ctrl-C and SIGTERM end the run after the current step, with a checkpoint. A
    second Ctrl-C ends the run at once.

    Args:
        fusion: the result of `tigon.fuse`, whose report is printed after the first step; None for a plain model.
    """

    def __init__(self, fusion: Any = None) -> None:
        super().__init__()
        self.fusion = fusion
        self._limit: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._limit, args.save_total_limit = args.save_total_limit, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.fusion is not None and state.is_world_process_zero:
            print(self.fusion.report(), flush=True)
        self.fusion = None
        if args.world_size > 1:
            # All ranks must stop at the same step, which costs waiting for a single number.
            flag = torch.tensor([self.signal], device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            self.signal = int(flag)
        if self.signal:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(float(loss)):
            raise Problem(
                f"the loss became {loss} at step {state.global_step}; a lower --learning_rate may help", code=1
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size > 1:
            torch.distributed.barrier()  # each rank has written its part
        if args.should_save:
            output = Path(args.output_dir)
            seal(output / f"checkpoint-{state.global_step}")
            if self._limit:
                prune(output, self._limit, best=state.best_model_checkpoint)
