"""A `tigon train` run: model, data, trainer, `tigon.fuse`, training and saving."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import set_seed

from tigon.cli.adapters import PARAMETERS_HAVE_NO_DROPOUT
from tigon.cli.checkpoint import CRC_LIMIT, LOCK, find_checkpoints, find_defect, find_newest, lock_folder
from tigon.cli.model import Source, find_model, load_tokenizer, random_model, stored_form
from tigon.cli.problem import Problem, check_writable, is_disk_full, is_out_of_memory, needs, one_line
from tigon.cli.tokens import CHAT_TEMPLATE, train_tokenizer
from tigon.cli.train.callback import RunCallback
from tigon.cli.train.data import is_plain_text, iterate_texts, read_data
from tigon.cli.train.four_bit import load_linears, place_experts
from tigon.cli.train.images import has_images, load_processor, prepare_options, prepare_rows
from tigon.cli.train.options import HEADLESS, SHARING, TASKS, RewardArguments, TrainOptions, trl
from tigon.fusion.parts.stacks import list_quantized
from tigon.integrations.capture import CapturedSteps, count_most_tokens
from tigon.manifest import check_manifest, write_manifest
from tigon.training.capture.recorder import can_capture

# The files by which from_pretrained recognises a model, adapters, a tokenizer, a ranker and an embedding model.
PRETRAINED = (
    "*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.*", "merges.txt", "*.model", "prompt.yaml", "ranker.json",
    "modules.json", "config_sentence_transformers.json", "[0-9]_*/*",
)  # fmt: skip

# Tasks whose steps --capture auto captures: their losses read nothing on the host.
CAPTURED = ("sft", "reward")
# Tasks whose trainer is not TRL's: the module of each holds a function `make_trainer`.
OWN_TRAINERS = {
    "rank": "tigon.rank.cli.train_task", "classify": "tigon.cli.train.classify", "embed": "tigon.cli.train.embed",
    "rerank": "tigon.cli.train.embed",
}  # fmt: skip


def run(options: TrainOptions) -> None:
    """Train. Raises Problem if the run cannot go on, and with status 130 or 143 if a signal ended the run."""
    output = Path(options.trainer.output_dir).expanduser().resolve()
    options.trainer.output_dir = str(output)
    check_devices(options.trainer)
    with contextlib.ExitStack() as stack:
        checkpoint = find_checkpoint(output, options.trainer.resume_from_checkpoint)
        # Before the model is loaded, so that the checkpoint stays the newest.
        is_locked = output.is_dir() and PartialState().is_main_process
        if is_locked:
            stack.enter_context(lock_folder(output))
        if options.trainer.world_size == 1:
            options.trainer._n_gpu = min(options.trainer.n_gpu, 1)  # else the Trainer would use DataParallel
        make_trainer: Any = make_trl_trainer
        if options.task in OWN_TRAINERS:
            make_trainer = importlib.import_module(OWN_TRAINERS[options.task]).make_trainer
        trainer, fusion = make_trainer(options)
        if checkpoint and trainer.is_world_process_zero() and (note := note_other_processes(checkpoint, trainer.args)):
            print(note, flush=True)
        if trainer.is_world_process_zero() and not is_locked:
            stack.enter_context(lock_folder(output))
        if is_captured(options, trainer):
            trainer.add_callback(CapturedSteps(trainer, "on" if options.fuse.capture == "on" else "auto"))
        train(trainer, RunCallback(fusion), checkpoint)
        if fusion is not None:
            fusion.remove()
        save(trainer, output)
        if options.task == "rank" and trainer.is_world_process_zero():
            trainer.finish()
            seal_model(output)
        if trainer.args.world_size > 1:  # a process that ends earlier would break the connections of the others
            trainer.accelerator.wait_for_everyone()
            trainer.accelerator.end_training()


def check_devices(arguments: Any) -> None:
    """Raise Problem for --use_cpu with more processes than GPUs: accelerate's barriers name a GPU for each process."""
    gpus = torch.cuda.device_count()
    if arguments.use_cpu and 0 < gpus < arguments.world_size:
        beside = f"{gpus} visible GPU{'s' if gpus > 1 else ''}"
        raise Problem(
            f"--use_cpu with {arguments.world_size} processes fails beside {beside}: hide the GPUs by the environment "
            "variable CUDA_VISIBLE_DEVICES="
        )


def find_checkpoint(output: Path, wanted: str | None) -> str | None:
    """Find the checkpoint for --resume_from_checkpoint: a folder, true for the newest complete checkpoint in
    --output_dir, auto for the same if there is any.

    Raises: Problem for a damaged checkpoint, for none, and for an --output_dir with files where none is expected.
    """
    check_writable(output, "--output_dir")
    word = (wanted or "").lower()
    if word == "true" or (word == "auto" and find_checkpoints(output)):
        found, notes = find_newest(output)
        for note in notes if PartialState().is_main_process else ():
            print(f"{note}; falling back to {found}", flush=True)
        return str(found)
    if wanted and word not in ("auto", "false"):
        reason = find_defect(Path(wanted)) if Path(wanted).is_dir() else "there is no such folder"
        if reason:
            raise Problem(f"--resume_from_checkpoint {wanted} cannot be used: {reason}")
        return wanted
    if word != "auto" and output.is_dir() and any(path.name != LOCK for path in output.iterdir()):
        raise Problem(
            f"--output_dir {output} is not empty; use --resume_from_checkpoint true to continue the run, or choose "
            "another --output_dir"
        )
    return None


def note_other_processes(checkpoint: str, arguments: Any) -> str | None:
    """What is not as in an uninterrupted run if the checkpoint was written by another number of processes."""
    before = len(list(Path(checkpoint).glob("rng_state*.pth")))  # each process writes its own
    if before in (0, arguments.world_size):
        return None
    return (
        f"{checkpoint} is of a run with another number of processes, {before}, and this run has "
        f"{arguments.world_size}. Weights, optimizer and schedule go on. A step has the samples that it would have had "
        "only if processes × --per_device_train_batch_size × --gradient_accumulation_steps is as before. Random "
        "numbers start anew"
    )


def make_trl_trainer(options: TrainOptions) -> tuple[Any, Any]:
    """A TRL task's trainer, and the result of `fuse`, or None."""
    arguments, model_config = options.trainer, options.model
    source = find_source(options)
    train_rows, test_rows = read_data(options)
    if has_images(train_rows):
        options = prepare_options(options, source)
        tokenizer = load_processor(options, source)
        train_rows, test_rows = (
            None if rows is None else prepare_rows(rows, options, tokenizer) for rows in (train_rows, test_rows)
        )
    else:
        tokenizer = find_tokenizer(options, source, iterate_texts(train_rows))
    if options.task == "sft" and is_plain_text(options.data.dataset_name) and "packing" not in options.given:
        # A text is far longer than a sequence: cut it into sequences, where TRL would keep only the beginning.
        arguments.packing, arguments.packing_strategy = True, "wrapped"
    own: dict[str, Any] = {}
    if options.task in ("grpo", "rloo"):
        own["reward_funcs"] = find_rewards(options.extra)
    if options.task == "distillation":
        own["teacher_model"] = arguments.teacher_model_name_or_path
    if source.weights:
        arguments.model_init_kwargs = {
            "revision": model_config.model_revision, "attn_implementation": model_config.attn_implementation,
            "dtype": model_config.dtype, **(arguments.model_init_kwargs or {}),
        }  # fmt: skip
    model, quantization = load_linears(source, options), trl.get_quantization_config(model_config)
    has_experts = model is not None
    if has_experts:
        quantization = arguments.model_init_kwargs = None  # both are for a model that TRL loads
    else:
        model = source.name if source.weights else build_model(options, source, tokenizer)
    try:
        trainer = getattr(trl, TASKS[options.task].trainer)(
            model=model,
            args=arguments,
            train_dataset=train_rows,
            eval_dataset=test_rows,
            processing_class=tokenizer,
            quantization_config=quantization,
            peft_config=trl.get_peft_config(model_config),
            **own,
        )
    except Exception as error:
        if is_out_of_memory(error) or is_disk_full(error) or isinstance(error, Problem):
            raise
        # A process that fails alone breaks the connections of the others, whose errors say only that.
        sentence = f"--task {options.task}: {type(error).__name__}: {one_line(error)}"
        raise Problem(sentence, is_own=True) from error
    if has_experts:
        place_experts(trainer.model, source, trainer.args.device)
    trainer.create_model_card = lambda *_, **__: None  # each checkpoint would overwrite the user's own
    for parameter in trainer.model.parameters():
        # TRL narrows a quantised model's adapters to bf16, in which a step of 1e-6 changes nothing.
        is_narrow = stored_form(trainer.model.config) or getattr(trainer.model, "is_loaded_in_4bit", False)
        if parameter.requires_grad and is_narrow:
            parameter.data = parameter.data.float()
    if trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        check_quantized_shards(trainer.model, plugin.mixed_precision_policy, plugin.fsdp_version)
    fusion = fuse_trainer(trainer, options)
    is_packed = getattr(trainer, "padding_free", False) or is_filled_for_capture(trainer, options)
    if fusion is not None and is_packed and not getattr(trainer, "aux_loss_enabled", False):
        pad_rows_to_budget(trainer)
    return trainer, fusion


def is_captured(options: TrainOptions, trainer: Any) -> bool:
    """Whether steps may be captured. A tower reads the sizes of images on the host, which no graph replays."""
    if options.fuse.capture == "auto":
        return options.task in CAPTURED and "images" not in (trainer.train_dataset.column_names or ())
    return options.fuse.capture == "on"


def is_filled_for_capture(trainer: Any, options: TrainOptions) -> bool:
    """Whether batches without padding, whose lengths all differ, are to fill a token budget: few shapes, each captured.

    Padding up to a budget costs no time where Python is the limit: up to half of the largest batch, by --capture auto.
    """
    args, capture = trainer.args, options.fuse.capture
    can_replay = can_capture(args.device) and args.world_size == 1 and capture != "off"
    if not can_replay or not getattr(trainer.data_collator, "padding_free", False):
        return False
    full = args.max_length * args.per_device_train_batch_size
    return capture == "on" or count_most_tokens(trainer.model) >= full / 2


def pad_rows_to_budget(trainer: Any) -> None:
    """Let packed rows fill a token budget, so that steps have few shapes, and can be captured.

    Full batches fill the largest of eight budgets; the last batch of an epoch may fill a smaller one.
    """
    from tigon.integrations.packing import PackingCollator

    args = trainer.args
    most = args.max_length * max(args.per_device_train_batch_size, args.per_device_eval_batch_size)
    full = args.max_length * args.per_device_train_batch_size
    budgets = sorted({math.ceil(most * i / 8) for i in range(1, 9)} | {full})
    pad_token = trainer.data_collator.pad_token_id
    trainer.data_collator = PackingCollator(max_tokens=budgets, pad_to_budget=True, pad_token_id=pad_token)


def check_quantized_shards(model: Any, policy: Any, version: int = 2) -> None:
    """Raise Problem for quantised weights that FSDP cannot gather as they are.

    policy: FSDP's mixed precision. version: 1 or 2, of FSDP.
    """
    compute = getattr(policy, "param_dtype", None)
    for module in model.modules():
        if version == 1 and list_quantized(module):
            raise Problem(
                "--load_in_4bit: FSDP1 cannot shard stacked experts in 4 bits; set fsdp_version to 2, or train each "
                "GPU's own copy (DDP)"
            )
        if "8bit" in type(module).__name__:
            raise Problem("--load_in_8bit: FSDP cannot shard 8-bit weights; use --load_in_4bit")
        stored = module.weight.dtype if hasattr(module, "quant_state") else compute
        if compute not in (None, stored):
            names = [str(dtype).removeprefix("torch.") for dtype in (stored, compute)]
            raise Problem(
                f"--load_in_4bit: FSDP's mixed precision would cast the 4-bit weights, which are stored as {names[0]}, "
                f"to {names[1]}; pass --dtype {names[1]}, in which they are stored then"
            )


def fuse_trainer(trainer: Any, options: TrainOptions) -> Any:
    """Fuse the trainer's models and losses.

    Raises: Problem for --shared_prefix true or --packing true where the model or the trainer cannot.
    """
    if not options.fuse.fuse:
        return None
    level: Any = options.fuse.recompute  # the parser has validated the value
    if options.task in HEADLESS:  # no logits over a vocabulary: only the layers are fused
        from tigon.fusion.engine.model import fuse as fuse_model

        return fuse_model(trainer.model, recompute=level, offload=options.fuse.offload, fp8=options.fuse.fp8)
    from tigon.integrations.trl import fuse

    share: Any = {"true": True, "false": False}.get(options.fuse.shared_prefix, "auto")
    if options.task not in SHARING:
        share = False
    pack: Any = {"true": True, "false": False}.get(options.packing, "auto")
    if getattr(trainer.args, "packing", False) and trainer.args.packing_strategy == "wrapped":
        pack = False  # a row is one text, cut to length: no padding
    try:
        return fuse(
            trainer, shared_prefix=share, packing=pack, recompute=level, offload=options.fuse.offload,
            fp8=options.fuse.fp8,
        )  # fmt: skip
    except ValueError as error:
        name = next((name for name in ("shared_prefix", "packing") if f"{name}=True" in str(error)), None)
        if name is None:
            raise
        raise Problem(f"--{name} true: {one_line(error).rpartition('Trainer: ')[2]}") from error


def find_source(options: TrainOptions) -> Source:
    """Find the model and check the files. Raises Problem for a model that the options do not fit."""
    name, model = str(options.model.model_name_or_path), options.model
    if model.load_in_4bit or model.load_in_8bit:
        needs("--load_in_4bit", "quantize", "bitsandbytes")
        if not model.use_peft:
            raise Problem("--load_in_4bit and --load_in_8bit require --use_peft: quantised weights are not trained")
    if model.use_peft and model.lora_target_parameters and model.lora_dropout:
        raise Problem(PARAMETERS_HAVE_NO_DROPOUT.format("--lora_target_parameters", "--lora_dropout"))
    source = find_model(name, any_model=options.task in HEADLESS)
    if source.kind == "path" and Path(source.name).is_dir():
        check_manifest(Path(source.name))
    if stored_form(source.config) and not model.use_peft:
        raise Problem(f"{name} is quantised, and quantised weights cannot be trained; train adapters with --use_peft")
    if not source.weights and (model.use_peft or options.task not in ("sft", "rank")):
        what = "--use_peft" if model.use_peft else f"--task {options.task}"
        raise Problem(f"{what} starts from trained weights, and {name} has none")
    limit = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    length = getattr(options.trainer, "max_length", None)
    if limit and length and length > limit and "max_length" in options.given:
        raise Problem(f"--max_length {length} exceeds the {limit} positions of {name}")
    if limit and length:
        options.trainer.max_length = min(length, limit)
    return source


def find_tokenizer(options: TrainOptions, source: Source, texts: Any) -> Any:
    """The named tokenizer; else the model's, or a tokenizer trained on the texts for a model without weights."""
    if options.fuse.tokenizer_name_or_path:
        tokenizer = load_tokenizer(options.fuse.tokenizer_name_or_path, "--tokenizer_name_or_path")
    elif source.weights:
        tokenizer = load_tokenizer(source.name, "--model_name_or_path")
    else:
        size = min(options.fuse.vocab_size, source.config.vocab_size)
        trained = [train_tokenizer(texts, size) if PartialState().is_main_process else None]
        tokenizer = broadcast_object_list(trained)[0]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise Problem(
            "the tokenizer has neither an end-of-text nor a padding token; choose another with --tokenizer_name_or_path"
        )
    if options.task not in HEADLESS:
        tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    return tokenizer


def find_rewards(options: RewardArguments) -> list[Callable[..., list[float]] | str]:
    """The functions in --reward_funcs, and the reward model. Raises Problem for a name that is not a function."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module beside the command, as `python -m` finds it
    found: list[Any] = [_import(name) for name in options.reward_funcs]
    return found + ([options.reward_model_name_or_path] if options.reward_model_name_or_path else [])


def _import(name: str) -> Any:
    module, _, function = name.rpartition(".")
    if not module:
        module, function = "trl.rewards", name  # TRL's own: accuracy_reward, think_format_reward, …
    try:
        reward = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        raise Problem(f"--reward_funcs {name}: {module} cannot be imported ({one_line(error)})") from error
    if not callable(reward):
        raise Problem(f"--reward_funcs {name}: {module} has no function {function}")
    return reward


def build_model(options: TrainOptions, source: Source, tokenizer: Any) -> Any:
    """A model with random weights, with the tokenizer's vocabulary."""
    config = source.config
    config.vocab_size = math.ceil(len(tokenizer) / 64) * 64  # a multiple of 64, for the matrix units
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    set_seed(options.trainer.seed)
    attention = options.model.attn_implementation
    model = random_model(config, **({"attn_implementation": attention} if attention else {}))
    return model.to(getattr(torch, options.model.dtype)) if options.model.dtype not in (None, "auto") else model


def train(trainer: Any, callback: RunCallback, checkpoint: str | None) -> None:
    """Train to the end. Raises Problem if a signal ended the run, or a full disk."""
    trainer.add_callback(callback)
    go_on = "run the same command with --resume_from_checkpoint true to resume"
    try:
        with callback:
            trainer.train(resume_from_checkpoint=checkpoint)
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise Problem(
            f"the disk of {trainer.args.output_dir} is full or failing at step {trainer.state.global_step}; free some "
            f"space, and {go_on}"
        ) from error
    if callback.signal:
        step, steps = trainer.state.global_step, trainer.state.max_steps
        raise Problem(f"stopped at step {step} of {steps}, with a checkpoint; {go_on}", code=128 + callback.signal)


def save(trainer: Any, output: Path) -> None:
    """Write the trained model and the tokenizer, with a manifest by which other commands detect damaged files."""
    if hasattr(config := getattr(trainer.model, "config", None), "use_cache"):
        config.use_cache = True  # type: ignore[union-attr]
    if trainer.is_fsdp_enabled:  # checkpoints may be shards, which from_pretrained cannot read
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(output))
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(output / "trainer_state.json"))
        seal_model(output)
        print(f"the model is in {output}, its losses in {output / 'trainer_state.json'}", flush=True)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()


def seal_model(output: Path) -> None:
    names = sorted({file.relative_to(output).as_posix() for pattern in PRETRAINED for file in output.glob(pattern)})
    write_manifest(output, names, largest=CRC_LIMIT)
