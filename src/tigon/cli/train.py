"""`tigon train`: fine-tune a model, or train one from scratch, on a file of text or conversations."""

# ruff: noqa: E501 (one line for each option)

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from zlib import crc32

import typer

from tigon.cli.agree import agree, versions
from tigon.cli.checkpoint import MANIFEST, after_restart, newest_whole, step_of
from tigon.cli.config import with_config
from tigon.cli.data import Corpus, read_corpus
from tigon.cli.folder import Claim, from_here, is_closed, located
from tigon.cli.model import Source, find_model
from tigon.cli.options import (
    CALIBRATE,
    DEVICES,
    PRECISIONS,
    QUANTIZE,
    RECOMPUTE,
    SCHEDULES,
    TASKS,
    TrainOptions,
    flag,
    settle,
)
from tigon.cli.problem import Problem, needs

_DEFAULT = TrainOptions()
# Options that you leave out are None, so that a resumed run takes them from its record. The help shows the defaults,
# but typer does not pass them.
_RUN, _STEP, _MODEL, _MACHINE = "Run", "Optimization", "Model", "Machine"


def _option(name: str, text: str, panel: str, *flags: str) -> typer.models.OptionInfo:
    default = getattr(_DEFAULT, name)
    if default not in (None, "") and default is not False:
        text += f" \\[default: {default}]"
    option: typer.models.OptionInfo = typer.Option(*flags, help=text, rich_help_panel=panel, show_default=False)
    return option


# fmt: off
# The names of the parameters are those of TrainOptions.
def train(
    model: Annotated[str | None, _option("model", "A directory, a name on the hub, or a preset such as llama-tiny (random weights).", _RUN)] = None,
    data: Annotated[str | None, _option("data", "A file, directory, pattern or data set: plain text, JSON lines (text, messages, prompt and completion, Alpaca, ShareGPT), or the rows of --task.", _RUN)] = None,
    eval_data: Annotated[str | None, _option("eval_data", "Data to evaluate on, in the forms of --data; replaces --eval-fraction.", _RUN)] = None,
    config: Annotated[str | None, typer.Option("--config", help="A YAML file of these options by their names; the command line wins.", rich_help_panel=_RUN)] = None,
    task: Annotated[str | None, _option("task", f"{', '.join(TASKS)}: train on text, on preferences, by a reward, or to rank; dpo and grpo use TRL's trainers.", _RUN)] = None,
    reward: Annotated[str | None, _option("reward", "For grpo: module:function, file.py:function, or regex:PATTERN (1 for completions that match).", _RUN)] = None,
    prompt: Annotated[str | None, _option("prompt", "For rank: a prompt.yaml, the templates and questions of a prompt.", _RUN)] = None,
    history: Annotated[str | None, _option("history", "For rank: a table of events, of user, item and time; or self or positives, the impressions themselves.", _RUN)] = None,
    items: Annotated[str | None, _option("items", "For rank: a table of items' features.", _RUN)] = None,
    users: Annotated[str | None, _option("users", "For rank: a table of users' features.", _RUN)] = None,
    output: Annotated[str | None, _option("output", "Folder for checkpoints, metrics and the model.", _RUN)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in --output, with its options.", rich_help_panel=_RUN)] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run that is in --output.", rich_help_panel=_RUN)] = False,
    plain: Annotated[bool | None, _option("plain", "Train without tigon.fuse.", _RUN, "--plain")] = None,
    save_every: Annotated[int | None, _option("save_every", "Steps between checkpoints.", _RUN)] = None,
    keep: Annotated[int | None, _option("keep", "How many checkpoints to keep.", _RUN)] = None,
    log_every: Annotated[int | None, _option("log_every", "Steps between log lines; metrics.jsonl has every step.", _RUN)] = None,
    eval_fraction: Annotated[float | None, _option("eval_fraction", "Share of the data held out for evaluation.", _RUN)] = None,
    tensorboard: Annotated[bool | None, _option("tensorboard", "Write TensorBoard events too.", _RUN, "--tensorboard")] = None,
    steps: Annotated[int | None, _option("steps", "Optimizer steps, in place of --epochs.", _STEP, "--steps", "--max-steps")] = None,
    epochs: Annotated[float | None, _option("epochs", "Passes over the data.", _STEP)] = None,
    batch_size: Annotated[int | None, _option("batch_size", "Sequences, pairs or completions per device and micro-batch.", _STEP)] = None,
    grad_accum: Annotated[int | None, _option("grad_accum", "Micro-batches per optimizer step.", _STEP)] = None,
    seq_len: Annotated[int | None, _option("seq_len", "Tokens per sequence; for dpo, of prompt and answer together.", _STEP)] = None,
    pack: Annotated[bool | None, _option("pack", "Put several conversations into a sequence; none attends to another.", _STEP, "--pack")] = None,
    beta: Annotated[float | None, _option("beta", "How near the model stays to where it began: 0.1 for dpo, 0 for grpo.", _STEP)] = None,
    num_generations: Annotated[int | None, _option("num_generations", "For grpo: completions per prompt.", _STEP)] = None,
    max_completion_length: Annotated[int | None, _option("max_completion_length", "For grpo: largest number of tokens in a completion.", _STEP)] = None,
    prefix_len: Annotated[int | None, _option("prefix_len", "For rank: most tokens before the candidates; the oldest events are left out. \\[default: 1024]", _STEP)] = None,
    teacher: Annotated[str | None, _option("teacher", "For rank: the folder of a larger ranker, whose probabilities become part of the target.", _STEP)] = None,
    distil: Annotated[float | None, _option("distil", "For rank: the teacher's part of the target.", _STEP)] = None,
    vocabulary_weight: Annotated[float | None, _option("vocabulary_weight", "For rank: weight of the right answer's loss over the whole vocabulary.", _STEP)] = None,
    calibrate: Annotated[str | None, _option("calibrate", f"For rank: {', '.join(CALIBRATE)}; how scores are calibrated on held-out requests at the end.", _STEP)] = None,
    shared_prefix: Annotated[bool | None, _option("shared_prefix", "For dpo and grpo: compute a prompt once for all its answers or completions. \\[default: where prompts are a quarter of the tokens]", _STEP, "--shared-prefix/--no-shared-prefix")] = None,
    lr: Annotated[float | None, _option("lr", "Peak learning rate. By default 2e-5 for a trained model, 3e-4 from scratch and for adapters, 1e-6 for dpo and grpo.", _STEP)] = None,
    warmup: Annotated[float | None, _option("warmup", "Warm-up: a share of all steps when below 1, else steps.", _STEP)] = None,
    schedule: Annotated[str | None, _option("schedule", f"{', '.join(SCHEDULES)}.", _STEP)] = None,
    weight_decay: Annotated[float | None, _option("weight_decay", "AdamW's weight decay.", _STEP)] = None,
    clip: Annotated[float | None, _option("clip", "Largest norm of the gradient, which is scaled down to it; 0 does not clip.", _STEP)] = None,
    seed: Annotated[int | None, _option("seed", "Seed of weights and data order.", _STEP)] = None,
    tokenizer: Annotated[str | None, _option("tokenizer", "A directory or hub name; else the model's own, or one trained on the data.", _MODEL)] = None,
    vocab_size: Annotated[int | None, _option("vocab_size", "Largest vocabulary of a tokenizer trained on the data.", _MODEL)] = None,
    lora: Annotated[int | None, _option("lora", "Train LoRA adapters of this rank on all linear layers.", _MODEL)] = None,
    lora_alpha: Annotated[float | None, _option("lora_alpha", "Scale of the adapters' result, which is multiplied by alpha / rank. \\[default: twice the rank]", _MODEL)] = None,
    lora_targets: Annotated[str | None, _option("lora_targets", "Names of the layers that get adapters, separated by commas.", _MODEL)] = None,
    lora_dropout: Annotated[float | None, _option("lora_dropout", "Dropout before the adapters.", _MODEL)] = None,
    quantize: Annotated[str | None, _option("quantize", f"{', '.join(QUANTIZE)}: the frozen linear layers under --lora in 4 bits (QLoRA), or 8, by bitsandbytes.", _MODEL)] = None,
    merge: Annotated[bool | None, _option("merge", "At the end, also save the model with its adapters merged, in --output/merged.", _MODEL, "--merge")] = None,
    attention: Annotated[str | None, _option("attention", "sdpa, eager, flash_attention_2, or another that transformers knows; by default the model's own.", _MODEL)] = None,
    gradient_checkpointing: Annotated[bool | None, _option("gradient_checkpointing", "Recompute activations in the backward pass.", _MODEL, "--gradient-checkpointing")] = None,
    recompute: Annotated[str | None, _option("recompute", f"{', '.join(RECOMPUTE)}: what the backward pass of a fused model computes again instead of keeping it.", _MODEL)] = None,
    offload: Annotated[bool | None, _option("offload", "Keep what the forward pass saves in host memory; with --gradient-checkpointing, the layers' inputs.", _MODEL, "--offload")] = None,
    compile: Annotated[bool | None, _option("compile", "Compile the model by torch.compile.", _MODEL, "--compile")] = None,
    precision: Annotated[str | None, _option("precision", f"{', '.join(PRECISIONS)}; auto is bf16 where the GPU has it. bf16 and fp16 keep fp32 weights, bf16-pure does not.", _MACHINE)] = None,
    device: Annotated[str | None, _option("device", f"{', '.join(DEVICES)}.", _MACHINE)] = None,
    no_memory_check: Annotated[bool | None, _option("no_memory_check", "Train even if the model plainly does not fit in memory.", _MACHINE, "--no-memory-check")] = None,
    parallel: Annotated[str | None, _option("parallel", "How several processes share the model: ddp, fsdp, hsdp, hpz, tp=N or zero3.", _MACHINE)] = None,
    deterministic: Annotated[bool | None, _option("deterministic", "Use deterministic GPU algorithms only.", _MACHINE, "--deterministic")] = None,
) -> None:
    """Fine-tune a model, or train one from scratch, on text, conversations, preferences, rewards or impressions.

    Ctrl-C leaves a checkpoint; --resume goes on from it, and gives the same losses as a run that was not stopped.
    On several GPUs: `torchrun --nproc-per-node 4 -m tigon train --parallel fsdp …`.
    """
    given = {name: value for name, value in locals().items() if name not in ("resume", "overwrite", "config")}
    needs("tigon train", "train", "torch", "transformers", "accelerate", "tokenizers", "matplotlib")
    prepared: Prepared | None = None
    problem: Problem | None = None
    with Claim() as claim:
        try:
            given = with_config(config, given)
            folder = Path(located("output", given.get("output") or _DEFAULT.output))
            if os.environ.get("RANK", "0") == "0":
                claim.take(folder)
            resume, overwrite = after_restart(folder, resume, overwrite)
            prepared = _prepare(given, resume, overwrite)
        except Problem as error:
            problem = error
        agree({} if prepared is None else prepared.told(), problem)
        if prepared is not None:  # None: `agree` has raised the problem
            from tigon.cli.run import run

            run(*prepared, overwrite, claim)
# fmt: on


class Prepared(NamedTuple):
    """The inputs of a run, checked before anything is written and, with one process, before PyTorch is imported."""

    options: TrainOptions
    source: Source
    corpus: Corpus
    checkpoint: Path | None
    held: Corpus | None = None

    def told(self) -> dict[str, Any]:
        """The values that all processes of a run must have alike, by the user's names for them."""
        files = sorted((p.name, p.stat().st_size) for p in Path(self.source.name).glob("*") if p.is_file())
        return {
            **versions(),
            **{flag(name): from_here(value) for name, value in asdict(self.options).items()},
            "the configuration of --model": f"{crc32(self.source.config.to_json_string().encode()):08x}",
            "the size of the files of --model": f"{sum(size for _, size in files):,} bytes",
            "the size of --data": f"{self.corpus.characters:,} characters",
            "the checkpoint to go on from": self.checkpoint and self.checkpoint.name,
            "the manifest of the checkpoint to go on from": self.checkpoint
            and f"{crc32((self.checkpoint / MANIFEST).read_bytes()):08x}",
        }


def _prepare(given: dict[str, Any], resume: bool, overwrite: bool) -> Prepared:
    options = settle(given, resume, overwrite)
    if options.tensorboard:
        needs("--tensorboard", None, "tensorboard")
    if options.lora:
        needs("--lora", "train", "peft")
    if options.quantize:
        needs("--quantize", "quantize", "bitsandbytes")
    if options.task == "rank":
        needs("--task rank", "rank", "jinja2", "yaml", "pyarrow")
    elif options.task != "sft":
        needs(f"--task {options.task}", "train", "trl", "datasets")
    folder = Path(options.output)
    checkpoint, notes = newest_whole(folder) if resume else (None, [])
    for note in notes if os.environ.get("RANK", "0") == "0" else []:
        typer.echo(f"tigon: {note}; going back to {checkpoint}", err=True)
    if checkpoint and options.steps and step_of(checkpoint) >= options.steps and is_closed(folder, step_of(checkpoint)):
        raise Problem(f"the run in {folder} is at its end, step {step_of(checkpoint)}; --steps above it goes on")
    corpus = _corpus(options, options.data, "--data")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise Problem("--device cuda: PyTorch finds no CUDA or ROCm device")
    source = find_model(options.model)
    options.check_model(source)
    if options.task == "rank" and not resume:
        corpus.settle({name for name, value in given.items() if value is not None}, source)
    options.settle_rate(source)
    held = _held(options, corpus) if options.eval_data else None
    return Prepared(options, source, corpus, checkpoint, held)


def _corpus(options: TrainOptions, data: str, option: str) -> Any:
    """What a run reads: texts and rows, or for --task rank tables that are read when it begins."""
    if options.task == "rank":
        from tigon.cli.prompts import Shown

        return Shown(options, data, option)
    return read_corpus(data, options.task)


def _held(options: TrainOptions, corpus: Corpus) -> Corpus:
    """The corpus that --eval-data names, which must have the form of --data."""
    try:
        held: Corpus = _corpus(options, str(options.eval_data), "--eval-data")
    except Problem as problem:
        raise Problem(str(problem).replace("--data", "--eval-data", 1), problem.code) from problem
    for form in ("texts", "rows"):
        if bool(getattr(held, form)) != bool(getattr(corpus, form)):
            raise Problem(f"--eval-data {options.eval_data} has rows of another form than --data {options.data}")
    return held
