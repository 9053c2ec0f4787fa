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

    history: list[str] | None = option(None, "Event tables: user, item, time and outcome. self: the impressions themselves; positives: impressions with a positive label.")
    action: list[str] | None = option(None, "History column with the event's outcome; repeatable.")
    stream: bool | None = option(None, "Stream the impressions by parquet row group instead of loading all; default: stream if the impressions would take half the memory.")
    stream_mib: int = option(1024, "With --stream: memory limit for the impressions, in MiB.", min=1)
    history_max: int = option(200, "Maximum events per request; the newest are kept.", min=0)


@dataclass(frozen=True, kw_only=True)
class RankRunOptions(RunOptions):
    PANEL: ClassVar[str] = "Run"

    output: Path = option(Path("rank-run"), "Folder for checkpoints, the ranker and results.", "-o")
    from_run: str | None = option(None, "Run or ranker folder to warm-start from on newer data; new values get new embedding rows.", "--from")
    save_priors: bool | None = option(None, "Save the Fisher information that a later --from run needs (twice the ranker's size, one extra pass over the data); default: with bce and without row-adagrad.")
    save_every: int = option(500, "Steps between checkpoints.", min=1)
    log_every: int = option(50, "Steps between log lines.", min=1)
    at: str = option("1,5,10", "Comma-separated cut-offs for NDCG and HR in the results.")
    draws: int = option(200, "Bootstrap samples for confidence intervals in the results; 0: no intervals.", min=0)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    PANEL: ClassVar[str] = "Model"

    model: str = option("ligr", "ligr (reads user histories) or lirank (reads row features).")
    width: int | None = option(None, "ligr: token width; lirank: embedding width. \\[default: from the data]", min=1)
    layers: int | None = option(None, "ligr: number of layers, including set-wise layers; lirank: number of cross layers. \\[default: from the data]", min=1)
    heads: int | None = option(None, "ligr: number of attention heads. \\[default: from the data]", min=1)
    setwise_layers: int | None = option(None, "ligr: last layers in which a request's candidates attend to each other; default: 1.", min=0)
    cross: str | None = option(None, "lirank: cross layers: residual, dcn or none; default: residual.")
    rank: int | None = option(None, "lirank: cross-layer rank. \\[default: from the data]", min=1)
    mlp: str | None = option(None, "lirank: comma-separated widths for the MLP beside the cross layers, or none. \\[default: from the data]")
    norm: str | None = option(None, "lirank: MLP normalization: batch, layer or none; default: batch.")
    tower: list[str] | None = option(None, "lirank: labels that share a tower, such as click=click,long_dwell; repeat for each tower; default: one tower for all.")
    tower_mlp: str | None = option(None, "lirank: comma-separated layer widths for each tower; default: none.")
    blocks: str | None = option(None, "lirank: blocks.json from `tigon rank search`, in place of --cross, --layers, --rank and --mlp.")
    calibrate: str | None = option(None, "lirank: label (an isotonic layer per label), a column (an isotonic layer per label and value) or none. Fitted on the validation set at the end.")
    gate: bool = option(True, "Whether layers are gated.")
    dropout: float = option(0.0, "Dropout.", min=0, max=0.9)
    score_weight: list[str] | None = option(None, "Weight for a label's probability in the score, such as click=1; repeat for each label; default: 1 each.")


@dataclass(frozen=True, kw_only=True)
class FitOptions(ModelOptions, RankRunOptions, DataOptions):
    """Options with the names of `rank.FitOptions` become its arguments."""

    PANEL: ClassVar[str] = "Optimization"

    objective: str = option("impressions", "impressions, or next-item (predict the next history item among all items).")
    loss: str = option("bce", "bce, softmax, pairwise, approx_ndcg or lambda, summed over the labels.")
    label_weight: list[str] | None = option(None, "Weight for a label's loss, such as click=0.5; repeat for each label; default: 1 each.")
    lr: float | None = option(None, "Peak learning rate for AdamW. \\[default: from the data]")
    table_optimizer: str = option("adamw", "Optimizer for embeddings: adamw, or row-adagrad (lirank), which updates only the rows in a batch.")
    table_lr: float = option(0.02, "Peak learning rate for row-adagrad.")
    weight_decay: float = option(0.01, "Weight decay for linear layers.")
    warmup: float = option(0.05, "Fraction of steps used for learning-rate warm-up.")
    schedule: str = option("cosine", "Learning-rate schedule: cosine, linear, constant, or plateau, which divides the rate by 10 after each evaluation that does not improve.")
    clip: float = option(1.0, "Maximum gradient norm; 0: no clipping.")
    prior_strength: float = option(0.1, "With --from: strength of the penalty that keeps parameters close to the previous run; n / m weighs the old data as n rows against m new ones.", min=0)
    epochs: int | None = option(None, "Maximum passes over the requests. \\[default: from the data]", min=1)
    max_minutes: float | None = option(None, "Maximum training time in minutes; default: no limit.")
    batch_size: int | None = option(None, "Requests per step. \\[default: from the data]", min=1)
    batch_tokens: int | None = option(None, "Events and candidates per step, in place of a request count.", min=1)
    metric: str | None = option(None, "Early-stopping metric: auc, gauc, log_loss, ndcg@10, click:auc, …; default: auc for bce, else ndcg@10.")
    eval_every: int | None = option(None, "Steps between evaluations; 0: evaluate after each epoch. \\[default: from the data]", min=0)
    patience: int | None = option(None, "Early-stopping patience: evaluations without improvement. \\[default: from the data]", min=1)
    seed: str = option("0", "Seed for weights, data order, dropout and split. Comma-separated seeds: a run for each, with the same split, and their mean and spread.")
    precision: str = option("auto", "Dtype for matrix products: bf16, fp32, or auto (bf16 on a GPU).")
