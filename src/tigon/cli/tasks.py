"""The tasks of `tigon train` beside text: preferences (dpo) and rewards (grpo) by TRL's trainers; ranking (rank)."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from tigon.cli.options import TrainOptions
from tigon.cli.problem import Problem, one_line
from tigon.cli.trainer import Checkpointed


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Prompts and answers in the form that TRL's trainers take.

    Raises: Problem for rows that form no table: TRL's trainers take columns, each of one type.
    """

    def __init__(self, rows: list[dict[str, Any]], name: str) -> None:
        from datasets import Dataset

        self.rows = rows
        try:
            Dataset.from_list(rows)
        except Exception as error:
            raise Problem(
                f"--data {name}: the rows do not make columns of one type each ({one_line(error)})"
            ) from error

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.rows, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass
class TaskTrainer:
    """The trainer of a task, as one of TRL's: its classes, its own options, and the words in which a run reports on it.

    count: how many of `unit` a micro-batch has.
    sequences_per_example: how many of a step's sequences come from one row of the data.
    shown: metrics that are printed beside the loss.
    """

    name: str
    config: type
    options: dict[str, Any]
    base: type
    examples: str
    unit: str
    shown: tuple[str, ...]
    count: Callable[[Any], int]
    sequences_per_example: int = 1
    further: dict[str, Any] = field(default_factory=dict)

    def arguments(self, settings: dict[str, Any]) -> Any:
        """The trainer's arguments: a run's settings and the task's own."""
        try:
            return self.config(**settings, **self.options)
        except ValueError as error:
            raise Problem(f"--task {self.name}: TRL refuses these options ({one_line(error)})") from error

    def trainer(
        self, model: Any, tokenizer: Any, train_set: Any, eval_set: Any, adapters: Any, common: dict[str, Any]
    ) -> Any:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        kind = type(self.base.__name__, (Checkpointed, self.base), {})  # whose name the reports print
        further = dict(self.further)
        if self.name == "dpo" and adapters is None:
            further["ref_model"] = copy.deepcopy(model)
        train, evaluation = (None if rows is None else Dataset.from_list(list(rows)) for rows in (train_set, eval_set))
        return kind(
            model=model, train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer,
            peft_config=adapters, **further, **common,
        )  # fmt: skip

    def finish(self, trainer: Any, eval_set: Any, output: Path, console: Any) -> None:
        """What a task does once its model is trained and saved."""

    def fuse(self, trainer: Any, shared_prefix: bool | None, **options: Any) -> Any:
        """shared_prefix: None shares prompts where that pays. Raises Problem where it is asked for and cannot be."""
        from tigon.integrations.trl import fuse

        try:
            return fuse(trainer, shared_prefix="auto" if shared_prefix is None else shared_prefix, **options)
        except ValueError as error:
            if not shared_prefix:
                raise
            raise Problem(f"--shared-prefix: {one_line(error).rpartition('Trainer: ')[2]}") from error


def task_of(options: TrainOptions) -> TaskTrainer:
    """The trainer for --task. Raises Problem for a reward that cannot be loaded."""
    if options.task == "rank":
        from tigon.cli.rank_task import rank_task

        return rank_task(options)
    trl: Any = importlib.import_module("trl")
    if options.task == "dpo":
        beta = 0.1 if options.beta is None else options.beta
        return TaskTrainer(
            "dpo", trl.DPOConfig, {"beta": beta, "max_length": options.seq_len}, trl.DPOTrainer,
            f"pairs of up to {options.seq_len} tokens", "pairs", ("rewards/accuracies", "rewards/margins"),
            lambda batch: len(batch["input_ids"]) // 2,  # a chosen and a rejected answer
        )  # fmt: skip
    own = {
        "beta": options.beta or 0.0, "num_generations": options.num_generations,
        "max_completion_length": options.max_completion_length,
    }  # fmt: skip
    return TaskTrainer(
        "grpo", trl.GRPOConfig, own, trl.GRPOTrainer, "prompts", "completions", ("reward", "completions/mean_length"),
        # The trainer gets prompts, and generates whole micro-batches of completions.
        lambda _: options.batch_size, options.num_generations, {"reward_funcs": reward_of(str(options.reward))},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ rewards


def reward_of(reward: str) -> Callable[..., list[float]]:
    """The function that `--reward` names. Raises Problem if it names none."""
    where, _, name = reward.rpartition(":") if not reward.startswith("regex:") else ("regex", ":", reward[6:])
    if where == "regex":
        return _matches(name)
    if not where or not name.isidentifier():
        raise Problem(f"--reward must be module:function, file.py:function or regex:PATTERN, got {reward}")
    try:
        module = _load(Path(where)) if where.endswith(".py") else _import(where)
    except Exception as error:
        raise Problem(f"--reward {reward}: {where} cannot be imported ({one_line(error)})") from error
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise Problem(f"--reward {reward}: {where} has no function {name}")
    return cast(Callable[..., list[float]], function)


def _matches(pattern: str) -> Callable[..., list[float]]:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise Problem(f"--reward regex:{pattern}: not a regular expression ({error})") from error

    def matches(completions: list[Any], **_: Any) -> list[float]:
        """1 for a completion that the pattern is found in, else 0."""
        texts = (c if isinstance(c, str) else "\n".join(m["content"] for m in c) for c in completions)
        return [float(compiled.search(text) is not None) for text in texts]

    return matches


def _import(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module beside the command, as `python -m` finds it
    return importlib.import_module(name)


def _load(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError("there is no such file")
    name = f"tigon_reward_{file.stem}"  # a name that no other module has
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
