"""Options of `tigon retrieve train`, and the values of open options by the number of pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tigon.cli.options import argument, option
from tigon.cli.run import RunOptions

LOSSES = ("item_softmax", "in_batch", "in_batch_logq", "sampled", "hard")
PRECISIONS = ("auto", "bf16", "fp32")
# For `choose_settings`: the pair count from which width and learning rate are those for the published sets; batches per
# epoch; least steps between two evaluations and for the longest fit; least held-out pairs.
PUBLISHED, BATCHES, BETWEEN, STEPS, HELD = 100_000, 16, 16, 600, 200


# ruff: noqa: E501 (one line for each option)
# fmt: off
@dataclass(frozen=True, kw_only=True)
class DataOptions(RunOptions):
    PANEL: ClassVar[str] = "Run"

    data: str | None = argument("Training pairs: parquet, csv, json lines or arrow; a .txt file with lines \"user item item …\"; a scipy .npz adjacency matrix; or a folder with train.txt or s_adj_mat.npz and test.txt.", None)
    test: str | None = option(None, "Test pairs, in any format that DATA supports.")
    user: str | None = option(None, "User column; default: user or user_id.")
    item: str | None = option(None, "Item column; default: item or item_id.")
    output: Path = option(Path("retrieve-run"), "Folder for checkpoints, results and the index.", "-o")
    k: str = option("20", "Cut-offs for the test metrics, separated by commas.", "-k")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DataOptions):
    PANEL: ClassVar[str] = "Model"

    dim: int | None = option(None, "Vector dimension. \\[default: from the data]", min=1, max=256)
    hops: int = option(3, "Pooling hops over training pairs; 0: embeddings without pooling.", min=0)
    own: float = option(0.0, "Weight of the unpooled embedding beside the pooled embeddings.", min=0)
    bias: bool = option(True, "Learn a bias for each item, added to its scores.")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    PANEL: ClassVar[str] = "Optimization"

    loss: str = option("item_softmax", f"Training loss: {', '.join(LOSSES)}.")
    leave_out: bool = option(True, "Exclude the current batch's pairs from pooling.")
    lr: float | None = option(None, "Learning rate for AdamW. \\[default: from the data]")
    weight_decay: float = option(0.0, "Weight decay for AdamW.", min=0)
    batch_size: int | None = option(None, "Batch size in pairs. \\[default: from the data]", min=1)
    scale: float = option(12.0, "Factor on cosine similarities: 1 / temperature.")
    negatives: int = option(4096, "For --loss sampled: items drawn per step.", min=1)
    hard_after: int = option(10, "For --loss hard: epochs with in-batch negatives only, before negatives are mined.", min=0)
    hard_negatives: int = option(16, "For --loss hard: items mined for each user at the start of each epoch.", min=1, max=1000)
    hard_skip: int = option(0, "For --loss hard: a user's top items to skip, which may be false negatives.", min=0, max=1000)
    epochs: int | None = option(None, "Maximum epochs. \\[default: from the data]", min=1)
    max_minutes: float = option(10.0, "Maximum training minutes per seed.")
    val_fraction: float | None = option(None, "Fraction of training pairs in the validation set for early stopping; 0: train for --epochs. \\[default: from the data]", min=0, max=0.9)
    val_split: str = option("random", "Validation split: random, or block: neighbours in item id order for each user.")
    eval_every: int | None = option(None, "Epochs between validations. \\[default: from the data]", min=1)
    patience: int = option(5, "Validations without improvement before early stopping.", min=1)
    precision: str = option("auto", "Dtype for matrix products: bf16, fp32, or auto (bf16 on a GPU).")
# fmt: on


def choose_settings(options: TrainOptions, pairs: int) -> dict[str, Any]:
    """Choose values for options that are None, from the pair count.

    Batches hold a sixteenth of the pairs, 32 to 8,192, rounded down to a power of two. Vectors are 32 wide below 1,000
    pairs, 64 below 100,000 and 128 from there; the learning rate is 3e-3 below 100,000 pairs and 1e-3 from there. The
    longest fit has 100 epochs, or as many as 600 steps take, with at least 16 steps and two epochs between evaluations.
    A tenth of the pairs is held out; below 2,000 pairs, 200 or a quarter.

    Source: from 100,000 pairs on docs/retrieve/study.md, below benchmarks/learn_defaults.py.
    """
    batch = options.batch_size or 1 << math.floor(math.log2(min(max(pairs // BATCHES, 32), 8192)))
    steps = max(pairs // batch, 1)
    found = {
        "dim": 32 if pairs < 1000 else 64 if pairs < PUBLISHED else 128,
        "lr": 1e-3 if pairs >= PUBLISHED else 3e-3,
        "batch_size": batch,
        "epochs": max(100, math.ceil(STEPS / steps)),
        "eval_every": max(2, math.ceil(BETWEEN / steps)),
        "val_fraction": min(max(0.1, HELD / max(pairs, 1)), 0.25),
    }
    return {name: value for name, value in found.items() if getattr(options, name) is None}
