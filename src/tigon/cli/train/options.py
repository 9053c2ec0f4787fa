"""The options of `tigon train`: three dataclasses, and the arguments of the task's trainer, by TRL's parser.

    DataArguments          the data
    trl.ModelConfig        the model, its adapters and its quantisation
    FuseArguments          the arguments of tigon.fuse
    trl.SFTConfig, …       the trainer: TRL's, transformers', or sentence-transformers'

Names and defaults follow TRL's own commands. DEFAULTS lists the exceptions.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import shutil
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import transformers

from tigon.cli.problem import Problem, needs, one_line
from tigon.files import DamagedFileError, read_yaml

trl: Any = importlib.import_module("trl")  # a lazy module, which exports nothing that mypy sees
USAGE = "tigon train [--task TASK] --model_name_or_path MODEL --dataset_name DATA [options]"
# Where the trainers' defaults do not suit a command. bf16 is their default only on a GPU with bf16.
DEFAULTS = {"output_dir": "tigon-run", "logging_nan_inf_filter": False}


@dataclass(frozen=True)
class DataArguments:
    dataset_name: str = field(
        metadata={
            "help": "File (txt, md, py, json, jsonl, csv, parquet), folder or quoted glob pattern of such files, "
            "save_to_disk folder, or hub data set."
        }
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on (--eval_strategy)."})
    dataset_streaming: bool = field(default=False, metadata={"help": "Stream rows during training."})
    test_split_size: float = field(
        default=0.0, metadata={"help": "Fraction of the training split that is held out as the test split."}
    )


@dataclass(frozen=True)
class FuseArguments:
    fuse: bool = field(default=True, metadata={"help": "Train with tigon.fuse; --no_fuse trains without."})
    recompute: Literal["auto", "none", "product", "cheap", "mlp"] = field(
        default="auto", metadata={"help": "Activations that the backward pass of a fused model recomputes."}
    )
    offload: bool = field(default=False, metadata={"help": "Offload saved activations to host memory."})
    fp8: bool = field(
        default=False,
        metadata={"help": "Run the decoder layers' linear layers in FP8: with bf16, on an H100 or H200."},
    )
    shared_prefix: Literal["auto", "true", "false"] = field(
        default="auto",
        metadata={
            "help": "For dpo, grpo, rloo: compute a prompt once for all its completions. auto: where that is faster."
        },
    )
    capture: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Replay forward and backward pass as a CUDA graph. auto: where Python is slower than the device."
        },
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Tokenizer; default: the model's, or for a preset, a tokenizer trained on the data."},
    )
    vocab_size: int = field(default=32768, metadata={"help": "Maximum vocabulary of a tokenizer trained on the data."})


@dataclass(frozen=True)
class PackingArguments:
    """For the tasks whose trainer has no such option. SFTTrainer has its own."""

    packing: Literal["auto", "true", "false"] = field(
        default="auto",
        metadata={
            "help": "Run each batch as one packed row without padding, with the same losses; --no_packing pads. "
            "auto: where the model's attention takes packed rows."
        },
    )


@dataclass(frozen=True)
class RewardArguments:
    reward_funcs: list[str] = field(
        default_factory=list, metadata={"help": "Reward functions to maximise, as import paths such as rewards.score."}
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model whose score is used as a reward."}
    )


@dataclass(frozen=True)
class RankArguments:
    prompt: str = field(metadata={"help": "Path to a prompt.yaml with the prompt's templates and questions."})
    history: str | None = field(
        default=None,
        metadata={"help": "Table of events (user, item, time); self or positives: take events from the impressions."},
    )
    items: str | None = field(default=None, metadata={"help": "Table of item features."})
    users: str | None = field(default=None, metadata={"help": "Table of user features."})
    prefix_len: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of tokens before the candidates (default: 1024); the oldest events are dropped."
        },
    )
    teacher: str | None = field(default=None, metadata={"help": "Folder of the teacher, a larger ranker to distil."})
    distil: float = field(default=0.5, metadata={"help": "Weight of the teacher in the target, from 0 to 1."})
    vocabulary_weight: float = field(
        default=0.0, metadata={"help": "Weight of the full-vocabulary loss on the correct answer."}
    )
    calibrate: Literal["platt", "isotonic", "none"] = field(
        default="platt", metadata={"help": "Calibration of the scores on held-out requests after training."}
    )


@dataclass(frozen=True)
class ClassifyArguments:
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    text_pair_column: str | None = field(
        default=None, metadata={"help": "Column with a second text, such as the hypothesis of a premise."}
    )
    label_column: str = field(
        default="label",
        metadata={"help": "Column with the label: a name or an integer, a list of these, or for regression a number."},
    )
    problem_type: Literal["auto", "single_label_classification", "multi_label_classification", "regression"] = field(
        default="auto", metadata={"help": "auto: multi-label for lists, regression for numbers with a fraction."}
    )
    max_length: int = field(default=512, metadata={"help": "Maximum number of tokens; longer texts are cut."})

    @property
    def text_columns(self) -> list[str]:
        return [self.text_column, *([self.text_pair_column] if self.text_pair_column else [])]

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        return ((*self.text_columns, self.label_column),)


@dataclass(frozen=True)
class EmbedArguments:
    pooling: Literal["auto", "mean", "cls", "lasttoken"] = field(
        default="auto",
        metadata={
            "help": "How token embeddings become one. auto: the model's own; otherwise the last token of a decoder, "
            "the mean of an encoder."
        },
    )
    scale: float = field(default=20.0, metadata={"help": "Factor on the cosines: 1 / temperature."})
    direction: Literal["query_to_doc", "symmetric", "all"] = field(
        default="query_to_doc",
        metadata={
            "help": "Scores in the loss: queries among documents; also documents among queries; or all four directions "
            "in one softmax."
        },
    )
    cached_batch_size: int = field(
        default=0,
        metadata={
            "help": "Embed this many rows at once, and each twice, so that memory does not limit the batch (GradCache)."
            " 0: embed the batch once, in one piece."
        },
    )
    gather_embeddings: bool = field(
        default=False, metadata={"help": "With several processes: the documents of all of them are negatives."}
    )
    max_length: int = field(default=512, metadata={"help": "Maximum number of tokens; longer texts are cut."})


@dataclass(frozen=True)
class RerankArguments:
    rerank_loss: Literal["auto", "bce", "lambda", "listnet", "mnrl"] = field(
        default="auto",
        metadata={
            "help": "auto: bce for a document per row, lambda for lists of documents, mnrl for positives and negatives."
        },
    )
    max_length: int = field(default=512, metadata={"help": "Maximum number of tokens; longer pairs are cut."})


@dataclass(frozen=True)
class Task:
    """A `tigon train` task.

    config, trainer: names of classes in `library`. columns: sets of columns, one of which the data must have. extra: a
    dataclass with further options; its `columns`, if any, come before the task's.
    """

    config: str
    trainer: str
    columns: tuple[tuple[str, ...], ...] = ()
    extra: type | None = None
    library: str = "trl"

    @property
    def config_class(self) -> Any:
        if self.library != "sentence_transformers":
            return getattr(trl if self.library == "trl" else transformers, self.config)
        needs("this --task", "embed", self.library)
        logging.getLogger(self.library).setLevel(logging.ERROR)
        return getattr(importlib.import_module(self.library), self.config)


_PAIRS = (("chosen", "rejected"),)
TASKS = {
    "sft": Task(
        "SFTConfig", "SFTTrainer", (("text",), ("messages",), ("prompt", "completion"), ("conversations",),
        ("instruction", "output"), ("input_ids",)),
    ),
    "dpo": Task("DPOConfig", "DPOTrainer", _PAIRS),
    "kto": Task("KTOConfig", "KTOTrainer", (("prompt", "completion", "label"), *_PAIRS)),
    "reward": Task("RewardConfig", "RewardTrainer", _PAIRS),
    "grpo": Task("GRPOConfig", "GRPOTrainer", (("prompt",),), RewardArguments),
    "rloo": Task("RLOOConfig", "RLOOTrainer", (("prompt",),), RewardArguments),
    "distillation": Task("DistillationConfig", "DistillationTrainer", (("prompt",),)),
    "rank": Task("TrainingArguments", "", extra=RankArguments, library="transformers"),
    "classify": Task("TrainingArguments", "Trainer", extra=ClassifyArguments, library="transformers"),
    "embed": Task(
        "SentenceTransformerTrainingArguments", "SentenceTransformerTrainer",
        (("anchor", "positive"), ("query", "positive"), ("query", "document"), ("question", "answer")), EmbedArguments,
        "sentence_transformers",
    ),
    "rerank": Task(
        "CrossEncoderTrainingArguments", "CrossEncoderTrainer",
        (("query", "document", "label"), ("query", "documents", "labels"), ("query", "positive", "negative")),
        RerankArguments, "sentence_transformers",
    ),
}  # fmt: skip
# Tasks without a language-model head.
HEADLESS = ("classify", "embed", "rerank")
# Tasks in which several answers continue one prompt.
SHARING = ("dpo", "grpo", "rloo")
# Tasks whose batches are packed by default.
PACKING = ("sft", "dpo", "kto", "reward")
SFT_PACKING = (
    "true packs the data set into rows of --max_length tokens (--packing_strategy), with images each batch. "
    "Without this option each batch runs as one packed row, with the same losses, where the model's attention takes "
    "packed rows; --no_packing pads."
)


@dataclass(frozen=True)
class TrainOptions:
    """A run's options. model: a trl.ModelConfig. trainer: the trainer's own. given: names that the user gave.

    packing: auto, true or false; for SFT "true" with the trainer's own `packing` packs its data set.
    """

    task: str
    data: DataArguments
    model: Any
    fuse: FuseArguments
    trainer: Any
    extra: Any
    given: frozenset[str]
    packing: str = "false"


def parse_options(arguments: list[str]) -> TrainOptions:
    """Parse a command line, and the file in its --config; the command line wins.

    Raises: Problem for an unknown option, naming the nearest, and for a value that the option does not take.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.error = _refuse  # type: ignore[method-assign]
    for name in ("--task", "--config"):
        first.add_argument(name)
    first.add_argument("--use_cpu", "--use-cpu", nargs="?", const="true")
    known, _ = first.parse_known_args(arguments)
    config = {} if known.config is None else _read_config(known.config)
    name = known.task or config.get("task", "sft")
    if name not in TASKS:
        raise Problem(f"--task must be one of {', '.join(TASKS)}, got {name}")
    on_cpu = (known.use_cpu or config.get("use_cpu", "")).lower() in ("true", "1", "yes")
    parser = make_parser(name, on_cpu=on_cpu)
    names = {action.dest for action in parser._actions}
    for option in config:
        if option not in names:
            raise Problem(f"--config {known.config}: {_unknown(option, names)}")
    parser.set_defaults_with_config(**config)
    try:
        *parsed, _, rest = parser.parse_args_into_dataclasses(
            arguments, return_remaining_strings=True, look_for_args_file=False
        )
    except (ValueError, TypeError, ImportError) as error:  # the dataclasses' own checks
        raise Problem(f"{one_line(error)} (see `tigon train --task {name} --help`)") from error
    if rest:
        raise Problem(_unknown(rest[0].partition("=")[0].lstrip("-"), names))
    data, model, fuse, trainer, *extra = parsed
    given = {word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")} | set(config)
    given = {"packing" if option == "no_packing" else option for option in given}
    packing = extra.pop().packing if extra and isinstance(extra[-1], PackingArguments) else "auto"
    packing = _read_packing(name, trainer, packing, given)
    if model.model_name_or_path is None:
        raise Problem("--model_name_or_path is missing (see `tigon train --help`)")
    if not 0 <= data.test_split_size < 1:
        raise Problem(f"--test_split_size must be at least 0 and below 1, got {data.test_split_size}")
    if name in ("grpo", "rloo") and not (extra[0].reward_funcs or extra[0].reward_model_name_or_path):
        raise Problem(f"--task {name} needs --reward_funcs, such as rewards.score for score in rewards.py")
    if fuse.shared_prefix == "true" and name not in SHARING:
        raise Problem(f"--shared_prefix true requires --task {', '.join(SHARING)}, got --task {name}")
    if not fuse.fuse and (fuse.recompute != "auto" or fuse.offload or fuse.fp8 or fuse.shared_prefix == "true"):
        raise Problem("--recompute, --offload, --fp8 and --shared_prefix need tigon.fuse and exclude --no_fuse")
    if not fuse.fuse and name != "sft" and packing == "true":
        raise Problem("--packing true needs tigon.fuse and excludes --no_fuse")
    return TrainOptions(name, data, model, fuse, trainer, extra[0] if extra else None, frozenset(given), packing)


def _read_packing(task: str, trainer: Any, packing: str, given: set[str]) -> str:
    """Whether to pack: auto, true or false. TRL's `padding_free`, which TRL leaves out or narrows, is Tigon's here."""
    if task not in PACKING:
        return "false"
    if task == "sft":
        packing = str(trainer.packing).lower() if "packing" in given else "auto"
    if "padding_free" in given:
        packing = "true" if trainer.padding_free or packing == "true" else "false"
        trainer.padding_free = False
    return packing


def make_parser(name: str, *, on_cpu: bool = False) -> Any:
    """Build the parser for a task's options. on_cpu: whether the run uses no GPU."""
    task = TASKS[name]
    types = [DataArguments, trl.ModelConfig, FuseArguments, task.config_class, *([task.extra] if task.extra else [])]
    types += [PackingArguments] if name in PACKING and name != "sft" else []
    parser: Any = trl.TrlParser(types, prog="tigon train", usage=USAGE, allow_abbrev=False, formatter_class=_Formatter)
    parser.error = _refuse
    parser.add_argument("--task", default="sft", help=f"{', '.join(TASKS)}. Determines the other options.")
    parser.add_argument("--config", help="YAML file with these options by name; the command line takes precedence.")
    if name in PACKING:
        pads: Any = False if name == "sft" else "false"
        parser.add_argument("--no_packing", action="store_const", const=pads, dest="packing", default=argparse.SUPPRESS)
    if name == "sft":
        option = next(action for action in parser._actions if "--packing" in action.option_strings)
        option.help = SFT_PACKING
    has_bf16 = not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    parser.set_defaults(**DEFAULTS, disable_tqdm=not sys.stderr.isatty(), **({} if has_bf16 else {"bf16": False}))
    if name in HEADLESS:  # TRL's configs have defaults that suit models of this size; these are transformers'
        parser.set_defaults(bf16=has_bf16, logging_steps=10)
    if name == "embed":
        parser.set_defaults(batch_sampler="no_duplicates")
    # The trainer's own options come before those that all trainers share.
    shared = {f.name for f in fields(transformers.TrainingArguments)}
    own = [kind for kind in types if kind is not transformers.TrainingArguments]
    groups = {kind.__name__: {f.name for f in fields(kind)} - shared for kind in own}
    for title, members in {**groups, "TrainingArguments": shared}.items():
        group = parser.add_argument_group(title)
        for action in list(parser._optionals._group_actions):
            if action.dest in members:
                parser._optionals._group_actions.remove(action)
                group._group_actions.append(action)
                if action.option_strings[0].startswith("--no_"):
                    action.help = argparse.SUPPRESS
    parser.epilog = (
        "--no_NAME switches off an option that is on by default. TRL and transformers document the remaining options."
    )
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Each option under one name, with the default if there is one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=max(80, min(140, shutil.get_terminal_size().columns)))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.rpartition('_')[2].upper())}"
        return next(option for option in action.option_strings if option.startswith("--")) + value

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "", argparse.SUPPRESS) else super()._get_help_string(action)


def _read_config(file: str) -> dict[str, Any]:
    try:
        found = read_yaml(Path(file).expanduser())
    except DamagedFileError as error:
        raise Problem(f"--config must be a file with options and values, such as 'max_steps: 100': {error}") from error
    # argparse converts text defaults like command-line values; YAML reads 1e-4 as a text.
    return {
        str(key).replace("-", "_"): value if isinstance(value, (list, dict)) else str(value)
        for key, value in found.items()
        if value is not None
    }


def _unknown(option: str, names: set[str]) -> str:
    near = difflib.get_close_matches(option.replace("-", "_"), names, n=1, cutoff=0.5)
    hint = f"; did you mean --{near[0]}?" if near else " (see `tigon train --help`)"
    return f"there is no option --{option}{hint}"


def _refuse(message: str) -> NoReturn:
    raise Problem(f"{message} (see `tigon train --help`)")
