"""`tigon train --task rank`: fit a language model that ranks the candidates of requests (tigon.rank.models.prompt)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import Trainer, TrainingArguments

from tigon.cli.checkpoint import STAGING
from tigon.cli.folder import move_in, record
from tigon.cli.model import Source, with_adapters
from tigon.cli.options import TrainOptions
from tigon.cli.problem import Problem, one_line
from tigon.cli.tasks import TaskTrainer
from tigon.cli.trainer import Checkpointed
from tigon.rank.cli.shared import as_options
from tigon.rank.metrics import auc, log_loss
from tigon.rank.models.prompt.calibrate import calibrate
from tigon.rank.models.prompt.distillation import check_teacher
from tigon.rank.models.prompt.model import PromptRanker, default_prefix_len
from tigon.rank.models.prompt.packing import Encoded, Encoder, PromptBatch, collate
from tigon.rank.models.prompt.requests import Requests, read_impressions
from tigon.rank.models.prompt.templates import Prompt
from tigon.rank.training.diagnostics import find_problems

if TYPE_CHECKING:
    from tigon.cli.prompts import Shown

# Requests whose text a tokenizer is trained on, where the model has none.
SPOKEN = 2000


def spoken(shown: Shown) -> list[str]:
    """The text of some requests."""
    prompt, requests = shown.prompt, shown.requests
    texts = [prompt.render("instruction", {})]
    for request in requests[:SPOKEN]:
        texts += [prompt.render("profile", request.profile)] if prompt.profile is not None else []
        texts += [prompt.render("event", row) for row in request.events] if prompt.event is not None else []
        texts += [prompt.render(part, row) for row in request.candidates for part in ("candidate", *prompt.tasks)]
    return texts + [answer for task in prompt.tasks.values() for answer in task.answers]


def requests_of(options: TrainOptions, prompt: Prompt, data: str, option: str) -> Requests:
    """The requests of a table. Raises Problem for what cannot be read, and for a task of one class."""
    try:
        found = read_impressions(prompt, data, history=options.history, items=options.items, users=options.users)
        requests = Requests(found, prompt)
        counts = requests.counts()
    except (ValueError, OSError) as error:
        raise Problem(f"{option} {data}: {one_line(error)}") from error
    if not len(requests):
        raise Problem(f"{option} {data}: the data set is empty")
    for name, own in counts.items() if option == "--data" else ():
        if sum(n > 0 for n in own) < 2:
            answers = list(prompt.tasks[name].answers)
            what = (
                f"all {sum(own):,} labels are {answers[own.index(max(own))]!r}" if any(own) else "there are no labels"
            )
            raise Problem(f"{option} {data}: task {name}: {what}, so that there is nothing to learn")
    return requests


class PromptRows(torch.utils.data.Dataset[Encoded]):
    """Requests as token ids, made when a batch asks for them."""

    def __init__(self, requests: Requests, encoder: Encoder) -> None:
        self.requests, self.encoder = requests, encoder
        self.teacher: dict[str, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, i: int) -> Encoded:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: list[int]) -> list[Encoded]:
        found = []
        for i, request in zip(indices, self.requests.__getitems__(indices), strict=True):
            taught = {name: own[i].tolist() for name, own in self.teacher.items()}
            try:
                found.append(self.encoder.encode(replace(request, teacher={**taught, **request.teacher})))
            except ValueError as error:
                raise Problem(f"--prompt: {one_line(error)}") from error
        return found

    def split(self, fraction: float, seed: int) -> tuple[PromptRows, PromptRows | None]:
        """The latest requests are held out; any are, by the seed, where there are no times or only one."""
        data = self.requests.data
        if not int(fraction * len(self)):
            return self, None
        ways: list[Any] = ["time"] if data.schema.roles.time is not None else []
        for by in (*ways, "request"):
            try:
                parts = data.split(by=by, fraction=fraction, seed=seed)
            except ValueError as error:
                raise Problem(f"--eval-fraction {fraction}: {one_line(error)}; 0 holds out none") from error
            if all(map(len, parts)):
                train, held = (PromptRows(Requests(part, self.encoder.prompt), self.encoder) for part in parts)
                return train, held
        return self, None

    def teach(self, teacher: PromptRanker) -> None:
        """Ask a teacher once, about all requests."""
        sizes = [len(request.candidates) for request in self.requests]
        self.teacher = {name: list(p.split(sizes)) for name, p in teacher.probabilities(self.requests).items()}

    @property
    def digest(self) -> str:
        told = json.dumps([self.requests.digest, self.encoder.prompt.to_dict(), self.encoder.prefix_len], default=str)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def rows_of(shown: Shown, tokenizer: Any, options: TrainOptions, source: Source) -> PromptRows:
    """The data set of a run. Raises Problem for a prompt that does not fit tokenizer or model."""
    positions = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    length = default_prefix_len(positions) if options.prefix_len is None else options.prefix_len
    try:
        rows = PromptRows(shown.requests, Encoder(shown.prompt, tokenizer, length, positions))
        rows.__getitems__(list(range(min(len(rows), 8))))  # what would fail on every request fails here
    except ValueError as error:
        raise Problem(f"--prompt {options.prompt}: {one_line(error)}") from error
    return rows


class PromptTrainer(Checkpointed, Trainer):
    """The Trainer of prompt rankers: the loss of the answers, and on held-out requests what they are worth."""

    ranker: PromptRanker

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self.ranker.loss(inputs["batch"], model)
        return (loss, {}) if return_outputs else loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # the batch follows the model by itself

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
        # A request at a time: the last batches of several processes are filled up with requests that others have, and
        # Accelerate leaves these out by their number.
        self.seen += self.accelerator.gather_for_metrics(requests, use_gather_object=True)
        return loss.detach(), None, None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "eval_loss" in logs:
            logs = {**logs, **self.worth()}
        super().log(logs, *args, **kwargs)

    def worth(self) -> dict[str, float]:
        """The loss of the labels, and AUC and log loss of each task's score, on the requests that were evaluated last.

        Each of them counts once, however many processes there are and however they were cut into batches.
        """
        found: dict[str, float] = {}
        self.classes: dict[str, tuple[int, int]] = {}
        if not self.seen:
            return found
        z, task, labels, whole = (torch.cat(part) for part in zip(*self.seen, strict=True))
        rows = PromptBatch(None, task, labels, None, None)  # type: ignore[arg-type]  # no model reads it
        found["eval_loss"] = float(self.ranker.loss_from_logits(z, rows, whole))
        for t, (name, one) in enumerate(self.ranker.prompt.tasks.items()):
            mine = (task == t) & (labels >= 0)
            p = z[mine][:, self.ranker.columns[t]].softmax(-1)
            right = torch.tensor(one.values)[labels[mine]]
            self.classes[name] = int((right > 0).sum()), int((right <= 0).sum())
            if set(one.values) != {0.0, 1.0} or not 0 < float(right.sum()) < len(right):
                continue
            score = p @ torch.tensor(one.values)
            found[f"eval_auc_{name}"] = float(auc(score, right))
            found[f"eval_log_loss_{name}"] = float(log_loss(score.clamp(1e-7, 1 - 1e-7), right))
        return found

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:  # one process writes, where each is asked
            self.ranker.save_settings(str(output_dir or self.args.output_dir))


@dataclass
class RankTask(TaskTrainer):
    """Prompt rankers, as a task of a run."""

    run: TrainOptions = field(default_factory=TrainOptions)

    def arguments(self, settings: dict[str, Any]) -> Any:
        return TrainingArguments(**settings, remove_unused_columns=False)

    def trainer(
        self, model: Any, tokenizer: Any, train_set: Any, eval_set: Any, adapters: Any, common: dict[str, Any]
    ) -> Any:
        options, rows = self.run, train_set
        if adapters is not None:
            model = with_adapters(model, adapters)
        try:
            ranker = PromptRanker(
                model, tokenizer, rows.encoder.prompt, prefix_len=rows.encoder.prefix_len, distil=options.distil,
                vocabulary_weight=options.vocabulary_weight,
            )  # fmt: skip
            if options.teacher:
                device = common["args"].device
                teacher = PromptRanker.from_pretrained(options.teacher, device=device)
                check_teacher(ranker, teacher)
                rows.teach(teacher)
                del teacher
        except (ValueError, OSError) as error:
            where = f"--teacher {options.teacher}: " if options.teacher else "--prompt: "
            raise Problem(where + one_line(error)) from error
        trainer = PromptTrainer(
            model=model, train_dataset=train_set, eval_dataset=eval_set, processing_class=tokenizer,
            data_collator=lambda encoded: {"batch": collate(encoded)}, **common,
        )  # fmt: skip
        # An attribute that is no module of the trainer's model: tokens lie where the model does.
        trainer.ranker = ranker.to(trainer.args.device)
        return trainer

    def fuse(self, trainer: Any, shared_prefix: bool | None, **options: Any) -> Any:
        from tigon.fusion.engine.model import fuse

        if self.run.plain:  # which leaves out all of Tigon but what a batch of shared prefixes needs
            parts = ("head", "norms", "mlp", "rotary", "experts", "adapters", "projections")
            options = dict.fromkeys(parts, False)
        try:
            return fuse(trainer.model, shared_prefix=True, **options)
        except ValueError as error:
            raise Problem(f"--task rank: {one_line(error)}") from error

    def finish(self, trainer: Any, eval_set: Any, output: Path, console: Console) -> None:
        """Calibrate on the held-out requests, and write what the folder needs beside its model."""
        ranker: PromptRanker = trainer.ranker
        rows = [{name.removeprefix("eval_"): value for name, value in row.items() if isinstance(value, (int, float))}
                for row in trainer.state.log_history if "eval_loss" in row]  # fmt: skip
        row = {f"{name}:auc": rows[-1].get(f"auc_{name}", float("nan")) for name in trainer.classes} if rows else None
        warnings = find_problems(
            row, rows, "loss", trainer.classes if rows else {}, steps=trainer.state.global_step,
            warmup=self.run.warmup_steps(trainer.state.max_steps), ended=False, probabilities=False,
            more="Try more steps (epochs=…, or a smaller batch_size=…), or another lr=…",
        )  # fmt: skip
        for warning in warnings:
            console.print(f"warning: {as_options(warning)}.", style="yellow", highlight=False, soft_wrap=True)
        record(output, warnings=warnings)
        kind: Any = self.run.calibrate  # TrainOptions.check has checked the word
        if kind != "none" and eval_set is not None:
            try:
                calibrate(ranker, eval_set.requests, kind)
            except ValueError as error:
                ranker.calibration.clear()
                console.print(f"not calibrated: {one_line(error)}", style="yellow", highlight=False, soft_wrap=True)
        staged = output / STAGING / "settings"
        staged.mkdir(parents=True, exist_ok=True)
        ranker.save_settings(staged)
        move_in(output, staged)  # which records them as files of the run, that --overwrite may replace


def rank_task(options: TrainOptions) -> RankTask:
    """The task of --task rank."""
    names = tuple(f"eval_auc_{name}" for name in Prompt.load(str(options.prompt)).tasks)
    return RankTask(
        "rank", TrainingArguments, {}, Trainer, "requests", "candidates", names,
        lambda inputs: len(inputs["batch"].labels), run=options,
    )  # fmt: skip
