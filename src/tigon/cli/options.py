"""The options of `tigon train`: their defaults, their checks, and the record of them that a resume reads."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from tigon.cli.checkpoint import RECORD
from tigon.cli.folder import check_apart, check_room, located, read_record
from tigon.cli.problem import Problem, check_writable

if TYPE_CHECKING:
    from tigon.cli.model import Source

SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("auto", "bf16", "bf16-pure", "fp16", "fp32")
DEVICES = ("auto", "cpu", "cuda")
TASKS = ("sft", "dpo", "grpo", "rank")
CALIBRATE = ("platt", "isotonic", "none")
QUANTIZE = ("nf4", "fp4", "int8")
# Repeats tigon.fusion.memory.recompute.LEVELS, whose import needs torch.
RECOMPUTE = ("auto", "none", "product", "cheap", "mlp")
PARALLEL = ("ddp", "fsdp", "hsdp", "hpz", "tp", "zero3")
SHARDED = ("fsdp", "hsdp")  # those that train adapters too
# Defaults that differ by task: preferences and rewards want smaller steps, and rewards no held-out prompts.
TASK_DEFAULTS: dict[str, dict[str, Any]] = {"dpo": {"lr": 1e-6}, "grpo": {"lr": 1e-6, "eval_fraction": 0.0}}
# NumPy accepts no larger seed, and the libraries no larger number of steps, sequences or tokens.
SEEDS, COUNTS = 2**32 - 1, 2**31 - 1
# The options whose values may be paths.
PATHS = (
    "model", "data", "eval_data", "output", "tokenizer", "reward", "prompt", "history", "items", "users", "teacher",
)  # fmt: skip
# A resumed run may change these options: they do not change what any step before the end computes.
FREE = {
    "output", "resume", "overwrite", "save_every", "keep", "log_every", "tensorboard", "steps", "epochs", "merge",
    "no_memory_check",
}  # fmt: skip
# Peak learning rates: for all weights of a trained model, and for new weights (from scratch, or adapters).
FINE_TUNE_LR, NEW_LR = 2e-5, 3e-4


@dataclass
class TrainOptions:
    model: str = ""
    data: str = ""
    output: str = "tigon-run"
    task: str = "sft"
    reward: str | None = None
    prompt: str | None = None
    history: str | None = None
    items: str | None = None
    users: str | None = None
    prefix_len: int | None = None
    teacher: str | None = None
    distil: float = 0.5
    vocabulary_weight: float = 0.0
    calibrate: str = "platt"
    beta: float | None = None
    num_generations: int = 8
    max_completion_length: int = 256
    shared_prefix: bool | None = None
    tokenizer: str | None = None
    vocab_size: int = 32768
    plain: bool = False
    steps: int | None = None
    epochs: float = 1.0
    batch_size: int = 8
    grad_accum: int = 1
    seq_len: int = 512
    lr: float | None = None
    warmup: float = 0.05
    schedule: str = "cosine"
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "auto"
    device: str = "auto"
    seed: int = 0
    deterministic: bool = False
    gradient_checkpointing: bool = False
    recompute: str = "auto"
    offload: bool = False
    compile: bool = False
    parallel: str = "ddp"
    lora: int | None = None
    lora_alpha: float | None = None
    lora_targets: str = "all-linear"
    lora_dropout: float = 0.0
    quantize: Literal["nf4", "fp4", "int8"] | None = None
    merge: bool = False
    attention: str | None = None
    eval_data: str | None = None
    pack: bool = False
    no_memory_check: bool = False
    eval_fraction: float = 0.02
    save_every: int = 500
    keep: int = 2
    log_every: int = 10
    tensorboard: bool = False

    def check(self) -> None:
        """Raise a Problem for the first option that is out of range."""
        one_of = (
            ("task", TASKS), ("schedule", SCHEDULES), ("precision", PRECISIONS), ("device", DEVICES),
            ("recompute", RECOMPUTE), ("calibrate", CALIBRATE),
        )  # fmt: skip
        for name, known in one_of:
            if getattr(self, name) not in known:
                raise Problem(f"{flag(name)} must be one of {', '.join(known)}, got {getattr(self, name)}")
        if self.quantize is not None and self.quantize not in QUANTIZE:
            raise Problem(f"--quantize must be one of {', '.join(QUANTIZE)}, got {self.quantize}")
        above_0 = ("steps", "batch_size", "grad_accum", "lora", "save_every", "keep", "log_every", "epochs", "lr")
        for name in (*above_0, "max_completion_length", "lora_alpha", "prefix_len"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise Problem(f"{flag(name)} must be above 0, got {value}")
        for name in ("weight_decay", "warmup", "clip", "seed"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise Problem(f"{flag(name)} must be 0 or more, got {getattr(self, name)}")
        for field in dataclasses.fields(self):
            value, most = getattr(self, field.name), SEEDS if field.name == "seed" else COUNTS
            if isinstance(value, int) and value > most:
                raise Problem(f"{flag(field.name)} must be at most {most}, got {value}")
        for name in ("offload", "recompute"):
            if self.plain and getattr(self, name) != getattr(TrainOptions, name):
                raise Problem(f"{flag(name)} is a part of tigon.fuse, and --plain trains without it")
        if self.seq_len < 2:
            raise Problem(f"--seq-len must be 2 or more, a token and one to predict it from, got {self.seq_len}")
        if not 0 <= self.eval_fraction < 1:
            raise Problem(f"--eval-fraction must be at least 0 and below 1, got {self.eval_fraction}")
        if not 0 <= self.lora_dropout < 1:
            raise Problem(f"--lora-dropout must be at least 0 and below 1, got {self.lora_dropout}")
        for name in ("lora_alpha", "lora_targets", "lora_dropout", "quantize", "merge"):
            if not self.lora and getattr(self, name) != getattr(TrainOptions, name):
                raise Problem(f"{flag(name)} goes with --lora, the rank of adapters")
        if self.eval_data and self.eval_fraction not in (0.0, TrainOptions.eval_fraction):
            raise Problem("--eval-data and --eval-fraction contradict each other: a file, or a share of --data")
        if self.pack and self.task != "sft":
            raise Problem(f"--pack goes with --task sft, got --task {self.task}")
        if self.vocab_size < 257:
            raise Problem(f"--vocab-size must be 257 or more, 256 bytes and the end of a text, got {self.vocab_size}")

        self._check_task()
        self._check_parallel()

    def _check_parallel(self) -> None:
        kind, _ = parallel_of(self.parallel)
        if kind == "ddp":
            return
        if self.lora and kind in SHARDED:
            for name in ("quantize", "merge"):
                if getattr(self, name):
                    value = "" if getattr(self, name) is True else f" {getattr(self, name)}"
                    raise Problem(f"{flag(name)}{value} goes with --parallel ddp, got --parallel {self.parallel}")
        lora = self.lora and kind not in SHARDED
        for name, wrong in (("lora", lora), ("compile", self.compile), ("task", self.task != "sft")):
            if wrong:
                value = "" if getattr(self, name) is True else f" {getattr(self, name)}"
                kinds = "ddp, fsdp and hsdp" if name == "lora" else "ddp"
                raise Problem(f"{flag(name)}{value} goes with --parallel {kinds}, got --parallel {self.parallel}")
        if self.precision == "fp16":
            raise Problem(
                f"--precision fp16 goes with --parallel ddp, got --parallel {self.parallel}; use bf16 or fp32"
            )

    def _check_task(self) -> None:
        if self.task != "grpo" and self.reward:
            raise Problem(f"--reward goes with --task grpo, got --task {self.task}")
        for name in ("prompt", "history", "items", "users", "prefix_len", "teacher", "distil", "vocabulary_weight",
                     "calibrate"):  # fmt: skip
            if self.task != "rank" and getattr(self, name) != getattr(TrainOptions, name):
                raise Problem(f"{flag(name)} goes with --task rank, got --task {self.task}")
        if self.task == "rank" and not self.prompt:
            raise Problem("--task rank needs --prompt, a prompt.yaml: docs/how-to/rank-by-prompts.md")
        if not 0 <= self.distil <= 1:
            raise Problem(f"--distil must be from 0 to 1, got {self.distil}")
        if not 0 <= self.vocabulary_weight < math.inf:
            raise Problem(f"--vocabulary-weight must be at least 0, got {self.vocabulary_weight}")
        if self.task in ("sft", "rank") and self.shared_prefix is not None:
            raise Problem(f"{_switch(self)} goes with --task dpo and --task grpo, got --task {self.task}")
        if self.plain and self.shared_prefix:
            raise Problem("--shared-prefix is a part of tigon.fuse, and --plain trains without it")
        if self.task in ("sft", "rank") and self.beta is not None:
            raise Problem(f"--beta goes with --task dpo and --task grpo, got --task {self.task}")
        if self.beta is not None and not 0 <= self.beta < float("inf"):
            raise Problem(f"--beta must be 0 or more, got {self.beta}")
        if self.task == "dpo" and self.beta == 0:
            raise Problem("--beta must be above 0 for --task dpo, got 0")
        if self.task == "grpo":
            if not self.reward:
                raise Problem("--task grpo needs --reward: module:function, file.py:function or regex:PATTERN")
            completions = self.batch_size * self.grad_accum
            if self.num_generations < 2 or completions % self.num_generations:
                raise Problem(
                    f"--num-generations must be 2 or more and divide --batch-size times --grad-accum, {completions}, "
                    f"got {self.num_generations}"
                )

    def check_model(self, source: Source) -> None:
        """Raise a Problem for an option that the model does not support."""
        limit = getattr(source.config, "max_position_embeddings", None)
        if limit is not None and self.seq_len > limit:
            raise Problem(f"--seq-len {self.seq_len} is beyond the {limit} positions of {self.model}")
        if limit is not None and self.task == "grpo" and self.max_completion_length >= limit:
            raise Problem(
                f"--max-completion-length {self.max_completion_length} leaves no room for a prompt in the {limit} "
                f"positions of {self.model}"
            )
        if self.task == "grpo" and self.beta and not source.weights:
            raise Problem(
                f"--beta {self.beta} wants a reference, the model that training starts from, and {self.model} has none"
            )
        stored = getattr(source.config, "quantization_config", None)
        if stored is not None and self.quantize:
            raise Problem(
                f"--quantize {self.quantize} is for a model with whole weights, and {self.model} is quantised"
            )
        if stored is not None and not self.lora:
            raise Problem(
                f"{self.model} is quantised, and quantised weights cannot be trained; train adapters on it, as in "
                "--lora 16"
            )
        if stored is not None and parallel_of(self.parallel)[0] != "ddp":
            raise Problem(f"{self.model} is quantised, which goes with --parallel ddp, got --parallel {self.parallel}")
        if self.lora and not source.weights:
            raise Problem(f"--lora {self.lora} adapts trained weights, and {self.model} has none")

    def settle_rate(self, source: Source) -> None:
        """Set the learning rate if the user set none: small steps for all weights of a trained model."""
        if self.lr is None:
            self.lr = FINE_TUNE_LR if source.weights and not self.lora else NEW_LR

    def warmup_steps(self, total: int) -> int:
        """--warmup below 1 is a share of all steps, otherwise a count."""
        return int(self.warmup if self.warmup >= 1 else round(self.warmup * total))


def parallel_of(text: str) -> tuple[str, int | None]:
    """--parallel as its kind and the size of its groups; None without a size.

    Raises: Problem for an unknown kind, for a malformed size, and for a size with a kind that has no groups.
    """
    kind, given, size = text.partition("=")
    if kind not in PARALLEL or (given and kind not in ("hsdp", "hpz", "tp")):
        raise Problem(f"--parallel must be ddp, fsdp, hsdp, hsdp=N, hpz, hpz=N, tp=N or zero3, got {text}")
    least = 1 if kind == "hpz" else 2
    if given and (not size.isdecimal() or int(size) < least):
        raise Problem(f"--parallel {kind}=N needs {least} or more processes in a group, got {text}")
    if kind == "tp" and not given:
        raise Problem("--parallel tp needs the size of its groups, as in --parallel tp=4")
    return kind, int(size) if given else None


def _switch(options: TrainOptions) -> str:
    return "--shared-prefix" if options.shared_prefix else "--no-shared-prefix"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settle(given: dict[str, Any], resume: bool, overwrite: bool) -> TrainOptions:
    """The options of this run: the user's, then the defaults or, with --resume, the recorded run's options.

    Raises: Problem for a missing or contradicting option, and for an output directory that has another run.
    """
    given = {name: value for name, value in given.items() if value is not None}
    given["output"] = given.get("output", TrainOptions.output)
    given.update({name: located(name, given[name]) for name in PATHS if name in given})
    output = Path(given["output"])
    if resume and overwrite:
        raise Problem("--resume and --overwrite contradict each other: go on with the run, or begin it anew")
    if resume:
        options = _recorded(output)
        for name, value in given.items():
            before = getattr(options, name)
            if name not in FREE and value != before:
                raise Problem(
                    f"{flag(name)} was {before} in the run in {output}, and a resumed run goes on with it; got {value}"
                )
        options = dataclasses.replace(options, **given)
        # A new limit of one kind replaces the recorded limit of the other kind.
        if "epochs" in given and "steps" not in given:
            options.steps = None
    else:
        for name in ("model", "data"):
            if not given.get(name):
                raise Problem(f"{flag(name)} is missing (see `tigon train --help`)")
        options = TrainOptions(**{**TASK_DEFAULTS.get(given.get("task", ""), {}), **given})
    options.check()
    check_writable(output, "--output")
    check_apart(output, options)
    if not resume:
        check_room(output, overwrite)
    return options


def _recorded(output: Path) -> TrainOptions:
    kinds = get_type_hints(TrainOptions)
    found = read_record(output)["options"]
    for name, value in found.items():
        if name not in kinds or not _is_a(value, kinds[name]):
            raise Problem(
                f"{output / RECORD} is not the record of a run of this version of tigon train ({name}: "
                f"{reprlib.repr(value)})"
            )
    found.update({name: located(name, found[name]) for name in PATHS if found.get(name)})
    return TrainOptions(**{**found, "output": str(output)})


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value from JSON has an option's type."""
    if kinds := get_args(kind):  # a union, or the words of a Literal
        return any(value == one if isinstance(one, str) else _is_a(value, one) for one in kinds)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)
