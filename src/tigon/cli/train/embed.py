"""`tigon train --task embed` and `--task rerank`: sentence-transformers' trainers, with Tigon's in-batch softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentence_transformers as st
from sentence_transformers.cross_encoder import losses as rerank_losses
from sentence_transformers.sentence_transformer import losses as embed_losses
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import set_seed

from tigon.cli.model import Source
from tigon.cli.problem import Problem, is_disk_full, is_out_of_memory, one_line
from tigon.cli.train.classify import get_loading
from tigon.cli.train.data import check_texts, find_columns, read_data
from tigon.cli.train.options import TASKS, EmbedArguments, RerankArguments, TrainOptions, trl
from tigon.cli.train.run import find_source, find_tokenizer, fuse_trainer

DIRECTIONS: dict[str, dict[str, Any]] = {
    "query_to_doc": {},
    "symmetric": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "all": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
}
# The loss for each set of columns, and the class for each loss.
RERANK_LOSSES = {"label": "bce", "labels": "lambda", "negative": "mnrl"}
RERANK_CLASSES = {
    "bce": "BinaryCrossEntropyLoss", "lambda": "LambdaLoss", "listnet": "ListNetLoss",
    "mnrl": "MultipleNegativesRankingLoss",
}  # fmt: skip


def make_trainer(options: TrainOptions) -> tuple[Any, Any]:
    """An embedding model's or a reranker's trainer, and the result of `fuse`, or None."""
    source = find_source(options)
    if options.task == "rerank" and options.model.use_peft:
        raise Problem("--task rerank trains the whole model: sentence-transformers would not save the head of adapters")
    if options.task == "rerank" and options.data.dataset_streaming:
        raise Problem("--dataset_streaming cannot go with --task rerank: sentence-transformers' trainer has no streams")
    if options.fuse.tokenizer_name_or_path:
        raise Problem(f"--tokenizer_name_or_path cannot go with --task {options.task}, which takes the model's own")
    tokenizer = find_tokenizer(options, source, ())
    train_rows, test_rows = read_data(options)
    train_rows = select_columns(train_rows, options)
    test_rows = None if test_rows is None else select_columns(test_rows, options)
    check_learnable(train_rows, options)
    set_seed(options.trainer.seed)
    try:
        if options.task == "embed":
            model = load_embedder(options, source, tokenizer)
            loss, evaluator = make_embed_loss(options, model), make_evaluator(test_rows, options)
        else:
            evaluator = None
            model = load_reranker(options, source, tokenizer)
            loss = make_rerank_loss(options, model, train_rows.column_names)
        trainer = make_trainer_class(options)(
            model=model, args=options.trainer, train_dataset=train_rows, eval_dataset=test_rows, loss=loss,
            evaluator=evaluator,
        )  # fmt: skip
    except Exception as error:
        if is_out_of_memory(error) or is_disk_full(error) or isinstance(error, Problem):
            raise
        sentence = f"--task {options.task}: {type(error).__name__}: {one_line(error)}"
        raise Problem(sentence, is_own=True) from error
    trainer.model._create_model_card = lambda *_, **__: None  # each checkpoint would overwrite the user's own
    return trainer, fuse_trainer(trainer, options)


def make_trainer_class(options: TrainOptions) -> Any:
    """The task's trainer, without the callback that collects a model card from the data and the hub."""
    own = getattr(st, TASKS[options.task].trainer)
    return type(own.__name__, (own,), {"add_model_card_callback": lambda *_: None})


def select_columns(rows: Any, options: TrainOptions) -> Any:
    """The loss's columns, in its order. Raises Problem for rows without words, and for labels that no loss takes."""
    columns, found = find_columns(rows, options), set(next(iter(rows)))
    if columns[-1] not in ("label", "labels"):
        negatives = sorted(name for name in found if name.startswith("negative") and name not in columns)
        columns = (*columns, *negatives)
    rows = rows.select_columns(list(columns))
    if not options.data.dataset_streaming:
        check_texts(rows, [name for name in columns if name not in ("label", "labels")], options)
        check_relevance(rows, columns[-1], options)
    return rows


def check_relevance(rows: Any, column: str, options: TrainOptions) -> None:
    """Raise a Problem for labels that are no numbers from 0 to 1; a list has one for each document."""
    where = f"--dataset_name {options.data.dataset_name}"
    if column == "labels":
        for i, (labels, documents) in enumerate(zip(rows["labels"], rows["documents"], strict=True)):
            if len(labels) != len(documents) or not documents:
                raise Problem(f"{where}: row {i + 1} has {len(documents)} documents and {len(labels)} labels")
    elif column == "label":
        for i, label in enumerate(rows["label"]):
            if isinstance(label, str) or not 0 <= label <= 1:
                raise Problem(f"{where}: row {i + 1} has the label {label!r}, which is not a number from 0 to 1")


def check_learnable(rows: Any, options: TrainOptions) -> None:
    """Raise a Problem for labels that are all the same, and for batches without a negative."""
    if (
        options.task == "embed"
        and options.trainer.per_device_train_batch_size < 2
        and len(rows.column_names or ()) == 2
    ):
        raise Problem(
            "--per_device_train_batch_size must be at least 2: the other documents of a batch are the negatives"
        )
    if "label" in (rows.column_names or ()) and len(values := set(rows["label"])) < 2:
        name = options.data.dataset_name
        raise Problem(
            f"--dataset_name {name}: all {len(rows):,} labels are {values.pop()}, so there is nothing to learn"
        )


def load_embedder(options: TrainOptions, source: Source, tokenizer: Any) -> Any:
    """The embedding model, with new adapters under --use_peft."""
    own: EmbedArguments = options.extra
    device, loading = str(options.trainer.device), get_loading(options)
    if own.pooling == "auto" or (Path(source.name) / "modules.json").is_file():
        if own.pooling != "auto":
            raise Problem(f"--pooling {own.pooling}: {source.name} is an embedding model with a pooling of its own")
        model = st.SentenceTransformer(source.name, device=device, model_kwargs=loading)
    else:
        encoder = Transformer(source.name, model_kwargs=loading)
        pooling = Pooling(encoder.get_embedding_dimension(), own.pooling)
        model = st.SentenceTransformer(modules=[encoder, pooling], device=device)
    model.max_seq_length = min(model.max_seq_length or own.max_length, own.max_length)
    set_padding(model, tokenizer)
    if options.model.use_peft:
        adapters = trl.get_peft_config(options.model)
        adapters.task_type = "FEATURE_EXTRACTION"
        model.requires_grad_(False)
        model.add_adapter(adapters)
    return model


def load_reranker(options: TrainOptions, source: Source, tokenizer: Any) -> Any:
    """A model with one score for a query and a document."""
    own: RerankArguments = options.extra
    limit = getattr(source.config.get_text_config(), "max_position_embeddings", None) or own.max_length
    model = st.CrossEncoder(
        source.name, num_labels=1, max_length=min(own.max_length, limit, tokenizer.model_max_length),
        device=str(options.trainer.device), model_kwargs=get_loading(options),
    )  # fmt: skip
    set_padding(model, tokenizer)
    return model


def set_padding(model: Any, tokenizer: Any) -> None:
    """Give a decoder the padding token that `find_tokenizer` chose."""
    if model.tokenizer.pad_token_id is None:
        model.tokenizer.pad_token = tokenizer.pad_token
    config = model.transformers_model.config
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = model.tokenizer.pad_token_id


def make_embed_loss(options: TrainOptions, model: Any) -> Any:
    """The in-batch softmax: Tigon's, or with --no_fuse the library's."""
    own: EmbedArguments = options.extra
    names: dict[str, Any] = {"scale": own.scale, "gather_across_devices": own.gather_embeddings}
    names |= DIRECTIONS[own.direction]
    classes: Any = embed_losses
    if options.fuse.fuse:
        from tigon.integrations import sentence_transformers as classes
    if own.cached_batch_size:
        return classes.CachedMultipleNegativesRankingLoss(model, mini_batch_size=own.cached_batch_size, **names)
    return classes.MultipleNegativesRankingLoss(model, **names)


def make_evaluator(rows: Any, options: TrainOptions) -> Any:
    """Searches each held-out query's document among all held-out documents; None without such rows, or for a stream."""
    if rows is None or options.data.dataset_streaming:
        return None
    query, *columns = rows.column_names
    documents = {text: str(i) for i, text in enumerate(dict.fromkeys(t for column in columns for t in rows[column]))}
    relevant: dict[str, set[str]] = {}
    for text, document in zip(rows[query], rows[columns[0]], strict=True):
        relevant.setdefault(text, set()).add(documents[document])
    names = {text: str(i) for i, text in enumerate(relevant)}
    return InformationRetrievalEvaluator(
        {i: text for text, i in names.items()}, {i: text for text, i in documents.items()},
        {names[text]: found for text, found in relevant.items()}, accuracy_at_k=[1, 10], precision_recall_at_k=[10],
        batch_size=options.trainer.per_device_eval_batch_size, write_csv=False,
    )  # fmt: skip


def make_rerank_loss(options: TrainOptions, model: Any, columns: list[str]) -> Any:
    """The loss that fits the columns. Raises Problem for a loss that takes others."""
    own: RerankArguments = options.extra
    kind = next(kind for column, kind in RERANK_LOSSES.items() if column in columns)
    chosen = kind if own.rerank_loss == "auto" else own.rerank_loss
    if chosen != kind and (chosen, kind) != ("listnet", "lambda"):
        raise Problem(f"--rerank_loss {chosen} does not fit the columns {', '.join(columns)}, which {kind} takes")
    return getattr(rerank_losses, RERANK_CLASSES[chosen])(model)
