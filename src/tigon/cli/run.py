"""One training run: data, tokenizer, model, Hugging Face Trainer and checkpoints."""

from __future__ import annotations

import dataclasses
import inspect
import math
import platform
import shlex
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import PrinterCallback, ProgressCallback, TrainingArguments, set_seed

from tigon import __version__
from tigon.cli.agree import agree, join_again
from tigon.cli.checkpoint import STAGING, checkpoints, step_of
from tigon.cli.closing import conclude, save, save_from, save_merged
from tigon.cli.data import Corpus
from tigon.cli.folder import METRICS, Claim, check_room, clear, is_closed, move_in, read_record, record
from tigon.cli.memory import check_memory, resolved
from tigon.cli.metrics import Metrics
from tigon.cli.metrics_file import repair
from tigon.cli.model import (
    Source,
    attention_options,
    frozen_dtype,
    is_quantized,
    load_model,
    load_tokenizer,
    lora_config,
    quantize_options,
    quiet_transformers,
    random_model,
    stored_form,
    with_adapters,
)
from tigon.cli.options import TrainOptions
from tigon.cli.parallel import Layout, SpreadTrainer, ZeroTrainer, deepspeed_config
from tigon.cli.problem import Problem, disk_full
from tigon.cli.screen import screen
from tigon.cli.start import FirstStep, start_line
from tigon.cli.tasks import Rows, TaskTrainer, task_of
from tigon.cli.tokens import (
    CHAT_TEMPLATE,
    Packed,
    collate,
    conversation_rows,
    text_blocks,
    tokens_of,
    train_tokenizer,
    trained_tokenizer,
)
from tigon.cli.trainer import CheckpointedTrainer, StopOnSignal


def run(
    options: TrainOptions, source: Source, corpus: Corpus, checkpoint: Path | None, held: Corpus | None,
    overwrite: bool, claim: Claim,
) -> None:  # fmt: skip
    """Train. Raises Problem if the run cannot go on, and with status 130 or 143 if a signal ended it."""
    quiet_transformers()
    output = Path(options.output)
    use_cpu = _on_cpu(options)
    join_again(use_cpu)
    state = PartialState(cpu=use_cpu)
    # The first process holds the store by which the others make their group, and a Problem below may end it.
    state.wait_for_everyone()
    console = screen(quiet=not state.is_main_process)
    facts = read_record(output) if checkpoint else {}
    if checkpoint and facts.get("processes") != state.num_processes:
        raise Problem(
            f"the run in {output} had {facts.get('processes')} processes, and a resumed run goes on with as many; "
            f"got {state.num_processes}"
        )
    layout = Layout.of(options, state.num_processes)
    started = time.perf_counter()
    tokenizer = _tokenizer(options, source, corpus, checkpoint, state, console)
    dataset = _tokenize(corpus, tokenizer, options, source, console)
    agree({"what the tokenizer made of --data": f"{dataset.digest}"})
    if checkpoint and facts.get("data") != dataset.digest:
        raise Problem(f"--data {options.data} is not what the run in {output} was trained on, so it cannot be resumed")
    if held is None:
        train_set, eval_set = _split(dataset, options)
    else:
        train_set, eval_set = dataset, _tokenize(held, tokenizer, options, source, console)

    if not options.no_memory_check:
        warning = check_memory(options, source, use_cpu, state.num_processes)
        if warning:
            console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    loading = attention_options(options.attention)
    set_seed(options.seed)
    pure = options.precision == "bf16-pure"
    model: Any
    dtype = torch.bfloat16 if pure else torch.float32
    if options.quantize or stored_form(source.config):
        dtype = frozen_dtype(resolved(options, use_cpu))
    if options.quantize:
        loading |= quantize_options(options.quantize, dtype, state.device)
    with _spinner(console) as bar:
        bar.add_task("loading the model" if source.weights else "building the model", total=None)
        if (
            checkpoint and layout.sharded and not options.lora
        ):  # every process loads the whole weights, and keeps its share in `spread`
            model = load_model(Source(str(checkpoint), "path", source.config, weights=True), dtype, **loading)
        elif source.weights:
            model = load_model(source, dtype, **loading)
        else:
            model = random_model(_sized(source, tokenizer), **loading)
            model = model.to(dtype)
    _fit_vocabulary(model, tokenizer, options)
    if options.pack and "position_ids" not in inspect.signature(model.forward).parameters:
        raise Problem(f"--pack: {options.model} takes no positions, so packed conversations would see each other")
    task = None if options.task == "sft" else task_of(options)
    adapters = None
    if options.lora:
        adapters = lora_config(options.lora, options.lora_targets, options.lora_alpha, options.lora_dropout)
        if task is None:
            # Before they are sharded the weights are whole: a resumed run reads them here.
            saved = checkpoint if layout.sharded else None
            model = with_adapters(model, adapters, saved)
    model.config.use_cache = False
    layout.check(model)

    arguments = _arguments(options, task, output, use_cpu, len(train_set), bool(eval_set), layout)
    # Only a mixture of experts has parameters that a step may not use; other models need no search for them.
    arguments.ddp_find_unused_parameters = any("expert" in name for name, _ in model.named_modules())
    total = arguments.max_steps
    label = "loss, nats per token" if task is None else "loss"
    if checkpoint is not None and step_of(checkpoint) >= total:
        if is_closed(output, step_of(checkpoint)):
            raise Problem(f"the run in {output} is at its end, step {step_of(checkpoint)}; --steps above it goes on")
        if state.is_main_process:
            console.print(f"all steps are done; the end of the run is written from {checkpoint}", soft_wrap=True)
            save_from(checkpoint, output)
            conclude(console, output, step_of(checkpoint), time.perf_counter() - started, label=label)
        state.wait_for_everyone()
        return
    if state.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        claim.take(output)
        if overwrite:
            clear(output)
        elif not checkpoint:
            check_room(output, overwrite)  # again: another run may have ended there since the first check
        # Files that a killed run left half written must not get into a checkpoint of the same name.
        shutil.rmtree(output / STAGING, ignore_errors=True)
        # The record comes first: it marks the files that follow as this run's.
        record(
            output, options=dataclasses.asdict(options), data=dataset.digest, processes=state.num_processes,
            versions=_versions(), closed=None,
        )  # fmt: skip
        if not checkpoint:
            tokenizer.save_pretrained(output / STAGING / "tokenizer")
            move_in(output, output / STAGING / "tokenizer")
        repair(output / METRICS)
    console.print(
        f"{len(train_set):,} "
        + (task.examples if task else f"sequences of up to {options.seq_len} tokens")
        + f", {len(eval_set) if eval_set else 0:,} held out; {total:,} steps"
        + (f", from step {step_of(checkpoint)}" if checkpoint else ""),
        highlight=False,
        soft_wrap=True,
    )
    if chosen := getattr(corpus, "chosen", ""):
        console.print(chosen, highlight=False, soft_wrap=True)

    if task is None:
        metrics = Metrics(output, console, options.tensorboard, state.is_main_process)
    else:
        metrics = Metrics(
            output, console, options.tensorboard, state.is_main_process, unit=task.unit, further=task.shown
        )
    stop = StopOnSignal(state.is_main_process)
    count = tokens_of if task is None else task.count
    common = {"args": arguments, "callbacks": [stop, metrics], "metrics": metrics, "keep": options.keep, "count": count}
    trainer: Any
    fusion: Any = None
    if task is not None:
        trainer = task.trainer(model, tokenizer, train_set, eval_set, adapters, common)
        if is_quantized(model):
            # TRL narrows the adapters of a quantised model to bf16, in which a step of 1e-6 changes nothing.
            for p in trainer.model.parameters():
                if p.requires_grad:
                    p.data = p.data.float()
        if not options.plain or options.task == "rank":
            fusion = task.fuse(trainer, options.shared_prefix, recompute=options.recompute, offload=options.offload)
    else:
        if not options.plain:
            from tigon import fuse

            with _spinner(console) as bar:
                bar.add_task("fusing", total=None)
                level: Any = options.recompute  # TrainOptions.check has checked the word
                fusion = fuse(model, recompute=level, offload=options.offload)
        trainer_class: Any = ZeroTrainer if layout.kind == "zero3" else CheckpointedTrainer
        if layout.sharded:
            # The sharding casts in place of autocast: at the edges of the shards, and in the collectives.
            mixed = torch.bfloat16 if arguments.bf16 else None
            arguments.bf16 = False
            trainer_class = partial(SpreadTrainer, layout=layout, mesh=layout.spread(model, arguments.device, mixed))
        trainer = trainer_class(
            model=model,
            train_dataset=train_set,
            eval_dataset=eval_set,
            processing_class=tokenizer,
            data_collator=partial(collate, pad=tokenizer.pad_token_id),
            **common,
        )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(FirstStep(console, fusion))
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    console.print(
        start_line(options, trainer.model, trained, resolved(options, use_cpu), arguments.device, layout.readers),
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    command = f"tigon train --resume --output {shlex.quote(options.output)}"
    try:
        with stop:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if stop.signal:
            sentence = f"stopped at step {trainer.state.global_step} of {total}, with a checkpoint; go on by: {command}"
            raise Problem(sentence, code=128 + stop.signal)
        if fusion is not None:
            fusion.remove()
        weights = None if layout.kind == "ddp" else trainer.whole_weights()
        if state.is_main_process:
            save(trainer.model, tokenizer, output, weights)
            if task is not None:
                task.finish(trainer, eval_set, output, console)
            if options.merge:
                save_merged(trainer.model, tokenizer, output)
            conclude(console, output, total, time.perf_counter() - started, label=label, metrics=metrics)
    except BaseException as error:  # an interruption too: the progress bar must release the terminal
        metrics.close()
        if not disk_full(error):
            raise
        shutil.rmtree(output / STAGING, ignore_errors=True)
        on = f"go on by: {command}" if checkpoints(output) else "begin anew with --overwrite"
        raise Problem(
            f"the disk of {output} is full, or fails, at step {trainer.state.global_step}; make room and {on}"
        ) from error
    state.wait_for_everyone()


def _on_cpu(options: TrainOptions) -> bool:
    use_cpu = options.device == "cpu" or not torch.cuda.is_available()
    if options.precision == "fp16" and use_cpu:
        raise Problem("--precision fp16 needs a GPU; use fp32 or bf16 on a CPU")
    return use_cpu


def _spinner(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _tokenizer(
    options: TrainOptions, source: Source, corpus: Corpus, checkpoint: Path | None, state: Any, console: Console
) -> Any:
    """The run's own tokenizer on resume; else the named one, the model's, or one trained on the data, in this order."""
    if checkpoint:
        tokenizer = load_tokenizer(options.output, "--output")
    elif options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer, "--tokenizer")
    elif source.weights:
        tokenizer = load_tokenizer(source.name, "--model")
    else:
        serialized = [""]
        if state.is_main_process:
            size = min(options.vocab_size, source.config.vocab_size)
            with _spinner(console) as bar:
                bar.add_task(f"training a tokenizer of {size:,} tokens on the data", total=None)
                serialized = [train_tokenizer(corpus.strings, size)]
        tokenizer = trained_tokenizer(broadcast_object_list(serialized)[0])
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise Problem("the tokenizer has neither an end-of-text nor a padding token; give another by --tokenizer")
    if corpus.chats and not tokenizer.chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _tokenize(corpus: Corpus, tokenizer: Any, options: TrainOptions, source: Source, console: Console) -> Any:
    if options.task == "rank":
        shown: Any = corpus
        with _spinner(console) as bar:
            bar.add_task("reading the tables", total=None)
            return shown.tokenize(tokenizer, options, source)
    if corpus.rows:
        return Rows(corpus.rows, corpus.name)  # TRL's trainers tokenize them
    with _spinner(console) as bar:
        task = bar.add_task("tokenizing", total=corpus.characters)
        advance = partial(bar.advance, task)
        if corpus.texts:
            return text_blocks(corpus, tokenizer, options.seq_len, advance)
        rows, note = conversation_rows(corpus, tokenizer, options.seq_len, advance)
    if options.pack:
        rows = Packed(rows.rows, options.seq_len, tokenizer.pad_token_id)
    if note:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    return rows


def _split(dataset: Any, options: TrainOptions) -> tuple[Any, Any]:
    """Hold out a share at random, by the seed, or the latest requests; none where it would be less than one."""
    if options.task == "rank":
        return dataset.split(options.eval_fraction, options.seed)  # type: ignore[no-any-return]
    held = int(options.eval_fraction * len(dataset))
    if held == 0:
        return dataset, None
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(options.seed)).tolist()
    pick = torch.utils.data.Subset
    return pick(dataset, sorted(order[held:])), pick(dataset, sorted(order[:held]))


def _sized(source: Source, tokenizer: Any) -> Any:
    """The configuration with the tokenizer's vocabulary, rounded up to a multiple of 64 for the matrix units."""
    config = source.config
    config.vocab_size = math.ceil(len(tokenizer) / 64) * 64
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return config


def _fit_vocabulary(model: Any, tokenizer: Any, options: TrainOptions) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        name = options.tokenizer or options.model
        raise Problem(f"the tokenizer of {name} has {len(tokenizer):,} tokens, and the model embeds {rows:,}")


def _arguments(
    options: TrainOptions, task: TaskTrainer | None, output: Path, use_cpu: bool, examples: int, evaluate: bool,
    layout: Layout,
) -> TrainingArguments:  # fmt: skip
    per_step = options.batch_size * options.grad_accum * layout.readers
    sequences = examples * (1 if task is None else task.sequences_per_example)
    steps = options.steps or max(1, math.ceil(options.epochs * sequences / per_step))
    has_bf16 = not use_cpu and torch.cuda.is_bf16_supported()
    settings: dict[str, Any] = dict(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.grad_accum,
        learning_rate=options.lr,
        warmup_steps=options.warmup_steps(steps),
        lr_scheduler_type="constant_with_warmup" if options.schedule == "constant" else options.schedule,
        weight_decay=options.weight_decay,
        max_grad_norm=options.clip,
        bf16=options.precision == "bf16" or (options.precision == "auto" and has_bf16),
        fp16=options.precision == "fp16",
        seed=options.seed,
        full_determinism=options.deterministic,
        **_recomputation(options),
        torch_compile=options.compile,
        use_cpu=use_cpu,
        ddp_backend="gloo" if use_cpu and layout.processes > 1 else None,
        save_strategy="steps",
        save_steps=options.save_every,
        logging_strategy="steps",
        logging_steps=options.log_every,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=options.save_every,
        prediction_loss_only=True,
        disable_tqdm=True,
        report_to=[],
        deepspeed=deepspeed_config(options.clip) if layout.kind == "zero3" else None,
    )
    arguments = TrainingArguments(**settings) if task is None else task.arguments(settings)
    if layout.processes == 1:
        # Without a launcher the Trainer would spread a batch over all GPUs by DataParallel: slower than one GPU.
        arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _recomputation(options: TrainOptions) -> dict[str, Any]:
    # The argument was renamed during transformers 5.
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    if not options.gradient_checkpointing:
        return {name: False}  # TRL's default is to recompute
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}


def _versions() -> dict[str, str]:
    return {
        "tigon": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
