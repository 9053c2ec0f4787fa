"""Sizes of rankers and settings of their fits that follow from the table, where nothing else is asked for.

A table of a thousand rows does not determine millions of weights, and a batch that holds all of it leaves a fit of ten
steps. So parameters grow with the rows, and batches leave some hundred steps.

Source: two blocks of 50 numbers for 10⁵ to 10⁶ events, SASRec, Kang and McAuley 2018, https://arxiv.org/abs/1808.09781;
a learning rate that falls with the width, μP, Yang et al. 2022, https://arxiv.org/abs/2203.03466; the rest by
`benchmarks/learn_defaults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

# Sizes of each model by the number of rows of the table, from that number on.
LIGR: dict[int, dict[str, Any]] = {
    0: {"width": 64, "layers": 2},
    100_000: {"width": 128, "layers": 3},
    1_000_000: {"width": 256, "layers": 4},
    10_000_000: {"width": 256, "layers": 6},
}
LIRANK: dict[int, dict[str, Any]] = {
    0: {"width": 8, "layers": 1, "rank": 8, "mlp": (32,)},
    1_000: {"width": 8, "layers": 2, "rank": 16, "mlp": (64, 64)},
    100_000: {"width": 16, "layers": 2, "rank": 32, "mlp": (128, 128)},
    1_000_000: {"width": 16, "layers": 3, "rank": 64, "mlp": (256, 256)},
}
# Steps of the longest fit, at least, and passes over the requests.
STEPS, EPOCHS = 600, 10
# Rows of a batch, and into how many batches requests are cut at least.
FEWEST_ROWS, MOST_ROWS, BATCHES = 32, 2048, 15
# Evaluations of a fit, at most.
EVALUATIONS = 40
# The rate of LiGR is 3e-3 at a width of 64, and falls with the width.
LR, LR_WIDTH = 3e-3, 64
# Rows that are held out, where a tenth of all is fewer; at most a quarter of all.
HELD_ROWS = 200


def choose_sizes(model: str, data: Any, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Choose the sizes of a ranker by the number of rows: options of `rank.LiGRConfig` or `rank.LiRankConfig`.

    LiGR is 64 wide with 2 layers below 100,000 rows, 128 with 3 from there, 256 with 4 from a million, and 256 with 6
    from ten million. LiRank has embeddings of 8 numbers below 100,000 rows and of 16 from there, with 1 cross layer and
    an MLP of 32 below 1,000 rows, 2 and 64, 64 from there, 2 and 128, 128 from 100,000, 3 and 256, 256 from a million.
    Embeddings of LiRank are half as wide as long as their tables would have more than ten numbers a row, but not below
    4.

    Args:
        model: "ligr" or "lirank".
        data: `rank.Impressions` or `rank.Stream`, those to train on.
        given: arguments that are chosen already; None for none. They are not returned.
    Returns: arguments of the class, without those of `given`.
    Raises: ValueError for another model.
    """
    given = given or {}
    if model == "ligr":
        sizes = _find_row(LIGR, data.rows)
        width = given.get("width") or sizes["width"]
        sizes["heads"] = next((heads for heads in (4, 2) if width % (2 * heads) == 0), 1)
    elif model == "lirank":
        sizes = _find_row(LIRANK, data.rows)
        codes = sum(min(getattr(field, "rows", 0), data.rows) for field in data.schema.fields.values())
        while sizes["width"] > 4 and codes * sizes["width"] > 10 * data.rows:
            sizes["width"] //= 2
    else:
        raise ValueError(f"rank.choose_sizes: model must be 'ligr' or 'lirank', got {model!r}.")
    return {name: value for name, value in sizes.items() if given.get(name) is None}


class Settings(NamedTuple):
    """What of `rank.FitOptions` follows from the table."""

    batch_size: int
    epochs: int
    eval_every: int
    patience: int
    lr: float


def choose_settings(
    requests: int, rows: int, width: int | None, *, batch_size: int | None = None, epochs: int | None = None
) -> Settings:
    """Choose the options that `rank.FitOptions` leaves open, by the size of the table.

    Batches hold a fifteenth of the rows, 32 to 2,048, cut to a power of two of requests. The longest fit has 10 passes,
    and as many as 600 steps take. It is evaluated behind each pass, but 40 times at most, and stops where half of the
    evaluations of the longest fit bring nothing better: a ranker of sequences may learn nothing for some hundred steps,
    until it knows which items are alike. The rate is 3e-3, and for tokens wider than 64 falls with the width.

    Args:
        requests, rows: of the table to train on.
        width: of the tokens of LiGR; None for other rankers.
        batch_size, epochs: those that were asked for, by which the others go.
    """
    if batch_size is None:
        most = min(max(rows / BATCHES, FEWEST_ROWS), MOST_ROWS) * requests / max(rows, 1)
        batch_size = 1 << max(math.floor(math.log2(max(most, 1))), 0)
    steps = math.ceil(requests / batch_size)
    if epochs is None:
        epochs = max(EPOCHS, math.ceil(STEPS / max(steps, 1)))
    every = 0 if epochs <= EVALUATIONS else math.ceil(epochs * steps / EVALUATIONS)
    patience = max(min(epochs, EVALUATIONS) // 2, 3)
    return Settings(batch_size, epochs, every, patience, LR * min(LR_WIDTH / (width or LR_WIDTH), 1.0))


def choose_share(rows: int) -> float:
    """The share of the requests that is held out: a tenth, and of fewer than 2,000 rows 200 rows, or a quarter."""
    return min(max(0.1, HELD_ROWS / max(rows, 1)), 0.25)


def choose_prompt_settings(requests: int, rows: int, width: int, trained: bool) -> dict[str, Any]:
    """What `tigon train --task rank` leaves open: how a ranker by prompts is fitted to a table.

    A step has 8 requests, and of few a quarter at most. Passes are as many as 600 steps take from scratch, at most 200,
    and 100 steps with weights that are trained already, at most 20. The rate from scratch is 1e-3, above a width of 128
    in proportion less. A fiftieth is held out, and of fewer than 10,000 rows 200 rows, or a quarter, and measured ten
    times.

    Args:
        requests, rows: of the table. width: of the model. trained: whether its weights are trained already.
    Returns: "batch_size", "epochs", "eval_fraction", "save_every", and from scratch "lr".
    """
    share = min(max(0.02, HELD_ROWS / max(rows, 1)), 0.25)
    kept = max(round(requests * (1 - share)), 1)
    batch = min(8, 1 << math.floor(math.log2(max(kept // 4, 1))))
    steps = math.ceil(kept / batch)
    least, most = (100, 20) if trained else (STEPS, 200)
    epochs = min(max(math.ceil(least / steps), 1), most)
    found = {"batch_size": batch, "epochs": float(epochs), "eval_fraction": share,
             "save_every": min(max(epochs * steps // 10, 1), 500)}  # fmt: skip
    return found if trained else {**found, "lr": 1e-3 * min(128 / width, 1.0)}


def _find_row(table: Mapping[int, dict[str, Any]], rows: int) -> dict[str, Any]:
    return dict(table[max(first for first in table if first <= rows)])
