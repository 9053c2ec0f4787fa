"""Options of `tigon rank fit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tigon.cli.options import option
from tigon.cli.run import RunOptions
from tigon.rank.cli.tables import TableOptions

# ruff: noqa: E501 (one line for each option)
# fmt: off


@dataclass(frozen=True, kw_only=True)
class DataOptions(TableOptions):
    PANEL: ClassVar[str] = "Data"

    history: list[str] | None = option(None, "Events: user, item, time and what happened. self: the impressions themselves; positives: those with a positive label.")
    action: list[str] | None = option(None, "Column of the history that says what happened, once for each.")
    stream: bool | None = option(None, "Read the impressions by row groups of parquet files, or as a whole; default: by row groups where they would take half of the memory.")
    stream_mib: int = option(1024, "With --stream: most memory of the impressions, in MiB.", min=1)
    history_max: int = option(200, "Newest events of a request that are read.", min=0)


@dataclass(frozen=True, kw_only=True)
class RankRunOptions(RunOptions):
    PANEL: ClassVar[str] = "Run"

    output: Path = option(Path("rank-run"), "Folder for checkpoints, the ranker and results.", "-o")
    from_run: str | None = option(None, "Folder of a run, or of a ranker, to go on from on newer data; new values get rows of their own.", "--from")
    save_priors: bool | None = option(None, "Save the Fisher information that a later --from run needs (twice the size of the ranker, one extra pass over the data); default: with bce and without row-adagrad.")
    save_every: int = option(500, "Steps between checkpoints.", min=1)
    log_every: int = option(50, "Steps between log lines.", min=1)
    at: str = option("1,5,10", "Cut-offs of NDCG and HR in the results, separated by commas.")
    draws: int = option(200, "Bootstrap draws for the intervals of the results; 0: none.", min=0)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    PANEL: ClassVar[str] = "Model"

    model: str = option("ligr", "ligr, by the history of a user, or lirank, by the features of a row.")
    width: int | None = option(None, "Width of the tokens; of the embeddings of lirank. \\[default: from the data]", min=1)
    layers: int | None = option(None, "Layers, the set-wise ones among them; cross layers of lirank. \\[default: from the data]", min=1)
    heads: int | None = option(None, "ligr: heads of attention. \\[default: from the data]", min=1)
    setwise_layers: int | None = option(None, "ligr: last layers in which the candidates of a request read each other; default: 1.", min=0)
    cross: str | None = option(None, "lirank: cross layers, residual, dcn or none; default: residual.")
    rank: int | None = option(None, "lirank: rank of the cross layers. \\[default: from the data]", min=1)
    mlp: str | None = option(None, "lirank: widths of the layers beside them, separated by commas, or none. \\[default: from the data]")
    norm: str | None = option(None, "lirank: of these layers, batch, layer or none; default: batch.")
    tower: list[str] | None = option(None, "lirank: labels that share layers of their own, such as click=click,long_dwell, once for each tower; default: all are one.")
    tower_mlp: str | None = option(None, "lirank: widths of the layers of each tower; default: none.")
    blocks: str | None = option(None, "lirank: a blocks.json of `tigon rank search`, in place of --cross, --layers, --rank and --mlp.")
    calibrate: str | None = option(None, "lirank: an isotonic layer for each label (label), or for each value of a column, too; none. Fitted on the held-out rows at the end.")
    gate: bool = option(True, "Whether layers are gated.")
    dropout: float = option(0.0, "Dropout.", min=0, max=0.9)
    score_weight: list[str] | None = option(None, "Weight of a label's probability in the score, such as click=1, once for each label; default: 1 each.")


@dataclass(frozen=True, kw_only=True)
class FitOptions(ModelOptions, RankRunOptions, DataOptions):
    """Options with the names of `rank.FitOptions` become its arguments."""

    PANEL: ClassVar[str] = "Optimization"

    objective: str = option("impressions", "impressions, or next-item: what comes next in a history, among all items.")
    loss: str = option("bce", "bce, softmax, pairwise, approx_ndcg or lambda, summed over the labels.")
    label_weight: list[str] | None = option(None, "Weight of a label's loss, such as click=0.5, once for each label; default: 1 each.")
    lr: float | None = option(None, "Peak of the learning rate of AdamW. \\[default: from the data]")
    table_optimizer: str = option("adamw", "Of embeddings: adamw as of the rest, or row-adagrad, which touches the rows of a step alone (lirank).")
    table_lr: float = option(0.02, "Peak of the learning rate of row-adagrad.")
    weight_decay: float = option(0.01, "Decay of the weights of linear layers.")
    warmup: float = option(0.05, "Fraction of steps used for learning-rate warm-up.")
    schedule: str = option("cosine", "Learning-rate schedule: cosine, linear, constant, or plateau, which divides the rate by 10 after each evaluation that does not improve.")
    clip: float = option(1.0, "Largest norm of the gradients; 0: any.")
    prior_strength: float = option(0.1, "With --from: strength of the penalty that keeps parameters close to the previous run; n / m weighs the old data as n rows against m new ones.", min=0)
    epochs: int | None = option(None, "Most passes over the requests. \\[default: from the data]", min=1)
    max_minutes: float | None = option(None, "Most minutes of training; default: any.")
    batch_size: int | None = option(None, "Requests of a step. \\[default: from the data]", min=1)
    batch_tokens: int | None = option(None, "Events and candidates of a step, instead of so many requests.", min=1)
    metric: str | None = option(None, "What early stopping looks at: auc, gauc, log_loss, ndcg@10, click:auc, …; default: auc for bce, else ndcg@10.")
    eval_every: int | None = option(None, "Steps between evaluations; 0: at the end of each epoch. \\[default: from the data]", min=0)
    patience: int | None = option(None, "Evaluations without a better one before the run stops. \\[default: from the data]", min=1)
    seed: str = option("0", "Seed of weights, order, dropout and the split; several, separated by commas: a run of each, with one split, and their mean and spread.")
    precision: str = option("auto", "Of the products: bf16, fp32, or auto: bf16 on a GPU.")
