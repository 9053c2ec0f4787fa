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

    data: str | None = argument("Pairs: parquet, csv, json lines or arrow; a .txt file of lines \"user item item …\"; a scipy .npz adjacency matrix; or a folder of train.txt or s_adj_mat.npz and test.txt.", None)
    test: str | None = option(None, "Pairs to test on, in the forms of the data.")
    user: str | None = option(None, "Column of users; default: user or user_id.")
    item: str | None = option(None, "Column of items; default: item or item_id.")
    output: Path = option(Path("retrieve-run"), "Folder for checkpoints, results and the index.", "-o")
    k: str = option("20", "Cut-offs of the test, separated by commas.", "-k")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DataOptions):
    PANEL: ClassVar[str] = "Model"

    dim: int | None = option(None, "Width of the vectors. \\[default: from the data]", min=1, max=256)
    hops: int = option(3, "How far a vector pools over training pairs; 0: own embeddings alone.", min=0)
    own: float = option(0.0, "Weight of own embeddings beside pooled ones.", min=0)
    bias: bool = option(True, "Give each item a learned number that is added to its scores.")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    PANEL: ClassVar[str] = "Optimization"

    loss: str = option("item_softmax", f"{', '.join(LOSSES)}.")
    leave_out: bool = option(True, "Pool over all pairs but those of the step.")
    lr: float | None = option(None, "Learning rate of AdamW. \\[default: from the data]")
    weight_decay: float = option(0.0, "Weight decay of AdamW.", min=0)
    batch_size: int | None = option(None, "Pairs of a step. \\[default: from the data]", min=1)
    scale: float = option(12.0, "Factor of the cosines: one over the temperature.")
    negatives: int = option(4096, "For --loss sampled: items drawn a step.", min=1)
    hard_after: int = option(10, "For --loss hard: epochs with the items of the batch alone, before negatives are mined.", min=0)
    hard_negatives: int = option(16, "For --loss hard: items mined for each user at the beginning of an epoch.", min=1, max=1000)
    hard_skip: int = option(0, "For --loss hard: how many of a user's best items are left out, which may be right after all.", min=0, max=1000)
    epochs: int | None = option(None, "Most passes over the pairs. \\[default: from the data]", min=1)
    max_minutes: float = option(10.0, "Most minutes of training for a seed.")
    val_fraction: float | None = option(None, "Share of the training pairs that early stopping validates on; 0: train for --epochs. \\[default: from the data]", min=0, max=0.9)
    val_split: str = option("random", "Which pairs are held out: random, or block: of each user, neighbours in the order of items' ids.")
    eval_every: int | None = option(None, "Epochs between validations. \\[default: from the data]", min=1)
    patience: int = option(5, "Validations without a better one before training stops.", min=1)
    precision: str = option("auto", "Of the products: bf16, fp32, or auto: bf16 on a GPU.")
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
