"""`tigon train --task classify`: sequence classification and regression, by transformers' Trainer.

A label is a name or an integer; a list of these in multi-label classification; a number in regression. The names of the
labels are kept in the model's configuration.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from accelerate import PartialState
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Trainer, set_seed

from tigon.cli.model import Source
from tigon.cli.problem import Problem, is_out_of_memory, one_line
from tigon.cli.train.data import check_texts, read_data
from tigon.cli.train.options import ClassifyArguments, TrainOptions, trl
from tigon.cli.train.run import find_source, find_tokenizer, fuse_trainer

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


class Labels(NamedTuple):
    """problem_type: transformers' own word. values: the classes as the data has them. names: the classes' names."""

    problem_type: str
    values: list[Any]
    names: list[str]

    def encode(self, label: Any) -> Any:
        """A class index; a 0 or 1 for each class; or a number."""
        if self.problem_type == REGRESSION:
            return float(label)
        if self.problem_type == SINGLE:
            return self.values.index(label)
        return [float(value in label) for value in self.values]


def make_trainer(options: TrainOptions) -> tuple[Any, Any]:
    """A classifier's trainer, and the result of `fuse`, or None."""
    own: ClassifyArguments = options.extra
    if options.data.dataset_streaming:
        raise Problem("--dataset_streaming cannot go with --task classify, which reads all labels before training")
    source = find_source(options)
    tokenizer = find_tokenizer(options, source, ())
    train_rows, test_rows = read_data(options)
    labels = order_labels(find_labels(train_rows, options), source)
    for rows in (train_rows, test_rows):
        if rows is not None:
            check_rows(rows, options, labels)
    set_seed(options.trainer.seed)
    try:
        model = load_classifier(options, source, labels, tokenizer)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, Problem):
            raise
        raise Problem(f"--model_name_or_path {source.name}: {one_line(error)}", is_own=True) from error
    positions = getattr(source.config.get_text_config(), "max_position_embeddings", None) or own.max_length
    length = min(own.max_length, positions, tokenizer.model_max_length)
    with PartialState().main_process_first():
        parts = [
            None if rows is None else encode_rows(rows, own, labels, tokenizer, length)
            for rows in (train_rows, test_rows)
        ]
    trainer = Trainer(
        model=model, args=options.trainer, train_dataset=parts[0], eval_dataset=parts[1], processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda predicted: measure(labels.problem_type, predicted.predictions, predicted.label_ids),
    )  # fmt: skip
    # transformers' loss of a classifier is the mean of a micro-batch, whatever count of items the Trainer passes: the
    # Trainer would take it for a share of the step, and multiply by micro-batches and processes.
    trainer.model_accepts_loss_kwargs = False
    return trainer, fuse_trainer(trainer, options)


def find_labels(rows: Any, options: TrainOptions) -> Labels:
    """Find the classes in the training rows. Raises Problem for labels that are no classes, and for a single class."""
    own: ClassifyArguments = options.extra
    where, column = f"--dataset_name {options.data.dataset_name}", own.label_column
    values = list(rows[column])
    feature = rows.features[column]
    known = getattr(getattr(feature, "feature", feature), "names", None)  # of a ClassLabel
    is_list = isinstance(values[0], list)
    flat = list(chain.from_iterable(values)) if is_list else values
    kind: str = own.problem_type
    if kind == "auto":
        has_fractions = any(isinstance(value, float) and not value.is_integer() for value in flat)
        kind = MULTI if is_list else REGRESSION if has_fractions else SINGLE
    if is_list != (kind == MULTI):
        what = "lists" if is_list else "no lists"
        raise Problem(f"{where}: --problem_type {kind}: the column {column} has {what} of labels")
    if kind == REGRESSION:
        return Labels(kind, [], [column])
    if known:
        classes: list[Any] = list(range(len(known)))
        check_labels(values, classes, where, column, f"outside its {len(known)} classes")
    else:
        classes = sorted(set(flat), key=lambda value: (isinstance(value, str), value))
        for value in classes:
            if not isinstance(value, (str, int)) and not (isinstance(value, float) and value.is_integer()):
                raise Problem(f"{where}: the column {column} has {value!r}, which is neither a name nor an integer")
        if negative := [value for value in classes if not isinstance(value, str) and value < 0]:
            raise Problem(f"{where}: the column {column} has the label {negative[0]}, which marks rows without labels")
    if len(set(flat)) < 2:
        what = f"all {len(flat):,} labels are {flat[0]!r}" if flat else "there are no labels"
        raise Problem(f"{where}: {what}, so there is nothing to learn")
    return Labels(kind, classes, known or [str(int(c) if isinstance(c, float) else c) for c in classes])


def check_labels(values: Any, classes: list[Any], where: str, column: str, why: str) -> None:
    """Raise a Problem for the first row whose labels are not all among the classes."""
    wanted = set(classes)
    for i, value in enumerate(values):
        for label in value if isinstance(value, list) else [value]:
            if label not in wanted:
                raise Problem(f"{where}: row {i + 1} has {column} {label!r}, {why}")


def check_rows(rows: Any, options: TrainOptions, labels: Labels) -> None:
    """Raise a Problem for a text without words, a label that no training row has, and a number that is not finite."""
    own: ClassifyArguments = options.extra
    where, column = f"--dataset_name {options.data.dataset_name}", own.label_column
    check_texts(rows, own.text_columns, options)
    if labels.problem_type != REGRESSION:
        check_labels(rows[column], labels.values, where, column, "which no training row has")
        return
    for i, value in enumerate(rows[column]):
        if isinstance(value, str) or not math.isfinite(value):
            raise Problem(f"{where}: row {i + 1} has {column} {value!r}, which is not a finite number")


def order_labels(labels: Labels, source: Source) -> Labels:
    """In the order of the model's own labels, if it is a classifier of the same labels, whose head then goes on."""
    own: dict[str, int] = getattr(source.config, "label2id", None) or {}
    if labels.problem_type == REGRESSION or set(own) != set(labels.names):
        return labels
    pairs = sorted(zip(labels.values, labels.names, strict=True), key=lambda pair: own[pair[1]])
    return Labels(labels.problem_type, [value for value, _ in pairs], [name for _, name in pairs])


def get_loading(options: TrainOptions) -> dict[str, Any]:
    """The options for from_pretrained."""
    config = options.model
    loading = {"dtype": config.dtype, "revision": config.model_revision}
    loading |= {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    quantization = trl.get_quantization_config(config)
    if quantization is not None:
        device = PartialState().device
        place = (device.index or 0) if device.type == "cuda" else "cpu"
        loading |= {"quantization_config": quantization, "device_map": {"": place}}
    return loading


def load_classifier(options: TrainOptions, source: Source, labels: Labels, tokenizer: Any) -> Any:
    """The model with a head for these labels: its own if that has the same labels, otherwise a new one."""
    config, arguments = options.model, options.trainer
    loading = get_loading(options)
    model = AutoModelForSequenceClassification.from_pretrained(
        source.name, id2label=dict(enumerate(labels.names)), problem_type=labels.problem_type,
        label2id={name: i for i, name in enumerate(labels.names)}, ignore_mismatched_sizes=True, **loading,
    )  # fmt: skip
    # A decoder's head reads the last token that is not padding.
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    if not config.use_peft:
        return model
    import peft

    if "quantization_config" in loading:
        prepare: Any = peft.prepare_model_for_kbit_training
        model = prepare(model, arguments.gradient_checkpointing)
    adapters = trl.get_peft_config(config)
    adapters.task_type = "SEQ_CLS"  # which trains the new head as well
    return peft.get_peft_model(model, adapters)


def encode_rows(rows: Any, own: ClassifyArguments, labels: Labels, tokenizer: Any, length: int) -> Any:
    """Token ids and labels."""

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        tokens = tokenizer(*(batch[column] for column in own.text_columns), truncation=True, max_length=length)
        return {**tokens, "labels": [labels.encode(label) for label in batch[own.label_column]]}

    return rows.map(encode, batched=True, remove_columns=rows.column_names)


def measure(problem_type: str, logits: Any, target: Any) -> dict[str, float]:
    """Accuracy and macro F1; micro and macro F1 of several labels; the error and correlation of a regression."""
    z = np.asarray(logits[0] if isinstance(logits, tuple) else logits, dtype=np.float64)
    y = np.asarray(target)
    if problem_type == REGRESSION:
        z, y = z.reshape(-1), y.reshape(-1).astype(np.float64)
        spread = z.std() * y.std()
        correlation = float(((z - z.mean()) * (y - y.mean())).mean() / spread) if spread > 0 else 0.0
        return {"mse": float(((z - y) ** 2).mean()), "mae": float(np.abs(z - y).mean()), "pearson": correlation}
    if problem_type == SINGLE:
        classes = np.arange(z.shape[1])
        found, right = (a[:, None] == classes for a in (z.argmax(1), y))
        scores = {"accuracy": float((z.argmax(1) == y).mean())}
    else:
        found, right = z > 0, y > 0.5  # a probability above one half
        scores = {"accuracy": float((found == right).all(1).mean())}
    hits, total = (found & right).sum(0), found.sum(0) + right.sum(0)
    each = np.divide(2 * hits, total, out=np.zeros(len(total)), where=total > 0)
    scores["f1"] = float(each[total > 0].mean()) if (total > 0).any() else 0.0
    if problem_type == MULTI:
        scores["f1_micro"] = float(2 * hits.sum() / max(total.sum(), 1))
    return scores
