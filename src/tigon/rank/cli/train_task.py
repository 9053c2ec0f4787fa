"""`tigon train --task rank`: fit a language model that ranks each request's candidates (tigon.rank.models.prompt)."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import Trainer, set_seed

from tigon.cli.model import Source, load_model
from tigon.cli.problem import Problem, needs, one_line
from tigon.cli.train.options import TrainOptions, trl
from tigon.cli.train.run import build_model, find_source, find_tokenizer
from tigon.data.metrics import auc, log_loss
from tigon.rank.models.prompt.calibrate import calibrate
from tigon.rank.models.prompt.distillation import check_teacher
from tigon.rank.models.prompt.model import PromptRanker, default_prefix_len
from tigon.rank.models.prompt.packing import Encoded, Encoder, PromptBatch, collate
from tigon.rank.models.prompt.requests import Requests, read_impressions
from tigon.rank.models.prompt.templates import FILE, Prompt
from tigon.rank.training.defaults import choose_prompt_settings
from tigon.rank.training.diagnostics import find_problems

# Requests whose text trains a tokenizer, where the model has none.
TOKENIZER_REQUESTS = 2000
# `tigon train` options by the names in `choose_prompt_settings`.
CHOSEN = {
    "batch_size": "per_device_train_batch_size", "epochs": "num_train_epochs", "lr": "learning_rate",
    "eval_fraction": "test_split_size", "save_every": "eval_steps",
}  # fmt: skip


class PromptRows(torch.utils.data.Dataset[Encoded]):
    """Requests as token ids, tokenized when a batch needs them."""

    def __init__(self, requests: Requests, encoder: Encoder) -> None:
        self.requests, self.encoder = requests, encoder
        self.teacher: dict[str, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, i: int) -> Encoded:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: list[int]) -> list[Encoded]:
        rows = []
        for i, request in zip(indices, self.requests.__getitems__(indices), strict=True):
            scores = {name: own[i].tolist() for name, own in self.teacher.items()}
            try:
                rows.append(self.encoder.encode(replace(request, teacher={**scores, **request.teacher})))
            except ValueError as error:
                raise Problem(f"--prompt: {one_line(error)}") from error
        return rows

    def split(self, fraction: float, seed: int) -> tuple[PromptRows, PromptRows | None]:
        """Hold out the latest requests; random requests, by the seed, where there are no times or only one."""
        data = self.requests.data
        if not int(fraction * len(self)):
            return self, None
        ways: list[Any] = ["time"] if data.schema.roles.time is not None else []
        for by in (*ways, "request"):
            try:
                parts = data.split(by=by, fraction=fraction, seed=seed)
            except ValueError as error:
                raise Problem(f"--test_split_size {fraction}: {one_line(error)}; 0 disables validation") from error
            if all(map(len, parts)):
                train, test = (PromptRows(Requests(part, self.encoder.prompt), self.encoder) for part in parts)
                return train, test
        return self, None

    def add_teacher(self, teacher: PromptRanker) -> None:
        """Add a teacher's scores to all requests, computed once."""
        sizes = [len(request.candidates) for request in self.requests]
        self.teacher = {name: list(p.split(sizes)) for name, p in teacher.probabilities(self.requests).items()}


class PromptTrainer(Trainer):
    """The Trainer for prompt rankers: the loss on the answers, and AUC and log loss on held-out requests."""

    ranker: PromptRanker
    calibration: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self.ranker.loss(inputs["batch"], model)
        return (loss, {}) if return_outputs else loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # the batch moves with the model

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        batch: PromptBatch = inputs["batch"]
        with torch.no_grad(), self.compute_loss_context_manager():
            z, whole = self.ranker.read_answers(batch, model)
            loss = self.ranker.loss_from_logits(z, batch, whole)
        whole = z.new_zeros(len(z)) if whole is None else whole
        sizes = [len(own) for own in batch.shared.layout.suffix_lengths]
        rows = (z.float().cpu(), batch.task.cpu(), batch.labels.cpu(), whole.float().cpu())
        requests = list(zip(*(part.split(sizes) for part in rows), strict=True))
        # Per request: across processes the last batches are padded with repeated requests, and Accelerate drops these
        # by count.
        self.seen += self.accelerator.gather_for_metrics(requests, use_gather_object=True)
        return loss.detach(), None, None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "eval_loss" in logs:
            logs = {**logs, **self.measure()}
        super().log(logs, *args, **kwargs)

    def measure(self) -> dict[str, float]:
        """The labels' loss, and each task's AUC and log loss, on the last evaluated requests.

        Each request counts once, whatever the process count and batch size.
        """
        metrics: dict[str, float] = {}
        self.classes: dict[str, tuple[int, int]] = {}
        if not self.seen:
            return metrics
        z, task, labels, whole = (torch.cat(part) for part in zip(*self.seen, strict=True))
        rows = PromptBatch(None, task, labels, None, None)  # type: ignore[arg-type]  # no model reads it
        metrics["eval_loss"] = float(self.ranker.loss_from_logits(z, rows, whole))
        for t, (name, one) in enumerate(self.ranker.prompt.tasks.items()):
            mine = (task == t) & (labels >= 0)
            p = z[mine][:, self.ranker.columns[t]].softmax(-1)
            right = torch.tensor(one.values)[labels[mine]]
            self.classes[name] = int((right > 0).sum()), int((right <= 0).sum())
            if set(one.values) != {0.0, 1.0} or not 0 < float(right.sum()) < len(right):
                continue
            score = p @ torch.tensor(one.values)
            metrics[f"eval_auc_{name}"] = float(auc(score, right))
            metrics[f"eval_log_loss_{name}"] = float(log_loss(score.clamp(1e-7, 1 - 1e-7), right))
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:  # called in each process, but only one writes
            self.ranker.save_settings(str(output_dir or self.args.output_dir))

    def finish(self) -> None:
        """Warn about signs of underfitting, calibrate on the held-out requests, and write the ranker's settings."""
        rows = [{name.removeprefix("eval_"): value for name, value in row.items() if isinstance(value, (int, float))}
                for row in self.state.log_history if "eval_loss" in row]  # fmt: skip
        row = {f"{name}:auc": rows[-1].get(f"auc_{name}", float("nan")) for name in self.classes} if rows else None
        for warning in find_problems(
            row, rows, "loss", self.classes if rows else {}, steps=self.state.global_step,
            warmup=self.args.get_warmup_steps(self.state.max_steps), ended=False, probabilities=False,
            more="Try more steps (num_train_epochs=…, or a smaller per_device_train_batch_size=…), or another "
            "learning_rate=…",
        ):  # fmt: skip
            sentence = re.sub(r"([a-z_]+)=…", r"--\1", warning)  # arguments as options
            print(f"warning: {sentence}.", flush=True)
        if self.calibration != "none" and self.eval_dataset is not None:
            try:
                calibrate(self.ranker, self.eval_dataset.requests, self.calibration)  # type: ignore[union-attr]
            except ValueError as error:
                self.ranker.calibration.clear()
                print(f"not calibrated: {one_line(error)}", flush=True)
        self.ranker.save_settings(str(self.args.output_dir))


def make_trainer(options: TrainOptions) -> tuple[PromptTrainer, Any]:
    """A prompt ranker's trainer, and the result of `fuse`."""
    needs("--task rank", "rank", "jinja2", "yaml", "pyarrow")
    own, trainer = options.extra, options.trainer
    try:
        prompt = Prompt.load(own.prompt)
    except (ValueError, OSError) as error:
        raise Problem(f"--prompt {own.prompt}: {one_line(error)}") from error
    if own.teacher and not (Path(own.teacher) / FILE).is_file():
        raise Problem(f"--teacher {own.teacher}: the ranker folder must hold {FILE}")
    source = find_source(options)
    requests = read_requests(options, prompt)
    held_out = choose_settings(options, requests, source)
    tokenizer = find_tokenizer(options, source, sample_texts(requests, prompt))
    positions = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    length = default_prefix_len(positions) if own.prefix_len is None else own.prefix_len
    try:
        rows = PromptRows(requests, Encoder(prompt, tokenizer, length, positions))
        rows.__getitems__(list(range(min(len(rows), 8))))  # an error that affects every request is raised here
    except ValueError as error:
        raise Problem(f"--prompt {own.prompt}: {one_line(error)}") from error
    train_rows, test_rows = rows.split(held_out, trainer.seed)
    trainer.remove_unused_columns = False
    if test_rows is not None:
        trainer.eval_strategy, trainer.prediction_loss_only = "steps", True
    elif str(getattr(trainer.eval_strategy, "value", trainer.eval_strategy)) != "no":
        raise Problem("--eval_strategy needs a validation set: --test_split_size")
    set_seed(trainer.seed)
    model = load_base(options, source, tokenizer)
    try:
        ranker = PromptRanker(
            model, tokenizer, prompt, prefix_len=length, distil=own.distil, vocabulary_weight=own.vocabulary_weight
        )
        if own.teacher:
            teacher = PromptRanker.from_pretrained(own.teacher, device=trainer.device)
            check_teacher(ranker, teacher)
            train_rows.add_teacher(teacher)
    except (ValueError, OSError) as error:
        where = f"--teacher {own.teacher}: " if own.teacher else "--prompt: "
        raise Problem(where + one_line(error)) from error
    made = PromptTrainer(
        model=model, args=trainer, train_dataset=train_rows, eval_dataset=test_rows, processing_class=tokenizer,
        data_collator=lambda encoded: {"batch": collate(encoded)},
    )  # fmt: skip
    # An attribute that is not a module in the trainer's model: tokens are on the model's device.
    made.ranker, made.calibration = ranker.to(trainer.device), own.calibrate
    return made, fuse_ranker(made.model, options)


def read_requests(options: TrainOptions, prompt: Prompt) -> Requests:
    """The requests in --dataset_name. Raises Problem for unreadable data, and for a task with a single class."""
    own, name = options.extra, options.data.dataset_name
    try:
        requests = Requests(
            read_impressions(prompt, name, history=own.history, items=own.items, users=own.users), prompt
        )
        counts = requests.counts()
    except (ValueError, OSError) as error:
        raise Problem(f"--dataset_name {name}: {one_line(error)}") from error
    if not len(requests):
        raise Problem(f"--dataset_name {name}: the data set is empty")
    for task, labels in counts.items():
        if sum(n > 0 for n in labels) < 2:
            answers = list(prompt.tasks[task].answers)
            what = f"all {sum(labels):,} labels are {answers[labels.index(max(labels))]!r}"
            what = what if any(labels) else "there are no labels"
            raise Problem(f"--dataset_name {name}: task {task}: {what}, so there is nothing to learn")
    return requests


def choose_settings(options: TrainOptions, requests: Requests, source: Source) -> float:
    """Set the options that the user left out by the table size. Returns the held-out share."""
    rows, text, trainer = requests.data.rows, source.config.get_text_config(), options.trainer
    chosen = choose_prompt_settings(len(requests), rows, text.hidden_size, source.weights)
    left_out = {"num_train_epochs"} if "max_steps" in options.given else set()
    new = {CHOSEN[name]: value for name, value in chosen.items()}
    new = {name: value for name, value in new.items() if name not in options.given | left_out}
    if new and PartialState().is_main_process:
        words = ", ".join(f"{name} {value:g}" for name, value in new.items())
        print(f"chosen for {rows:,} rows: {words}; override with the options of the same names", flush=True)
    held_out = float(new.pop("test_split_size", options.data.test_split_size))
    for name, value in new.items():
        setattr(trainer, name, value)
    return held_out


def sample_texts(requests: Requests, prompt: Prompt) -> list[str]:
    """Some requests' text, to train a tokenizer on."""
    texts = [prompt.render("instruction", {})]
    for request in islice(requests, TOKENIZER_REQUESTS):
        texts += [prompt.render("profile", request.profile)] if prompt.profile is not None else []
        texts += [prompt.render("event", row) for row in request.events] if prompt.event is not None else []
        texts += [prompt.render(part, row) for row in request.candidates for part in ("candidate", *prompt.tasks)]
    return texts + [answer for task in prompt.tasks.values() for answer in task.answers]


def load_base(options: TrainOptions, source: Source, tokenizer: Any) -> Any:
    """The model to train, with new adapters under --use_peft."""
    config = options.model
    if not source.weights:
        return build_model(options, source, tokenizer)
    loading: dict[str, Any] = {"revision": config.model_revision}
    if config.attn_implementation:
        loading["attn_implementation"] = config.attn_implementation
    if (quantization := trl.get_quantization_config(config)) is not None:
        device = PartialState().device
        # The index, not the device: accelerate compares with its own device, which may have none.
        place = (device.index or 0) if device.type == "cuda" else "cpu"
        loading |= {"quantization_config": quantization, "device_map": {"": place}}
    model: Any = load_model(source, config.dtype, **loading)
    if config.use_peft:
        from peft import get_peft_model

        try:
            model = get_peft_model(model, trl.get_peft_config(config))
        except ValueError as error:
            raise Problem(f"--lora_target_modules: {one_line(error)}") from error
    model.config.use_cache = False
    return model


def fuse_ranker(model: Any, options: TrainOptions) -> Any:
    """Fuse the model. --no_fuse disables Tigon, except for shared-prefix batches."""
    from tigon.fusion.engine.model import fuse

    own = options.fuse
    given: dict[str, Any] = {"recompute": own.recompute, "offload": own.offload} if own.fuse else {"parts": ()}
    try:
        return fuse(model, shared_prefix=True, **given)
    except ValueError as error:
        raise Problem(f"--task rank: {one_line(error)}") from error
