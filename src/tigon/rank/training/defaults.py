"""Default model sizes and fit settings, derived from the table size.

A thousand rows cannot determine millions of weights, and batches as large as the table leave only about ten steps.
Therefore parameters grow with the row count, and batches are small enough for a few hundred steps.

Source: two blocks with width 50 for 10⁵ to 10⁶ events, SASRec, Kang and McAuley 2018, https://arxiv.org/abs/1808.09781;
learning rate decreasing with width, μP, Yang et al. 2022, https://arxiv.org/abs/2203.03466; the rest from
`benchmarks/learn_defaults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

# Model sizes by minimum row count.
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
# Minimum steps and passes over the requests for a full-length fit.
STEPS, EPOCHS = 600, 10
# Rows per batch, and the minimum number of batches per pass.
FEWEST_ROWS, MOST_ROWS, BATCHES = 32, 2048, 15
# Maximum evaluations per fit.
EVALUATIONS = 40
# LiGR's learning rate is 3e-3 at width 64 and decreases with the width.
LR, LR_WIDTH = 3e-3, 64
# Held-out rows if a tenth of all rows is fewer; at most a quarter of all rows.
HELD_ROWS = 200


def choose_sizes(model: str, data: Any, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Choose a ranker's sizes by row count: options for `rank.LiGRConfig` or `rank.LiRankConfig`.

    LiGR has width 64 and 2 layers below 100,000 rows, 128 and 3 from there, 256 and 4 from a million, 256 and 6 from
    ten million. LiRank has embedding width 8 below 100,000 rows and 16 from there. Cross layers and MLP widths: 1 and
    (32,) below 1,000 rows, 2 and (64, 64) from there, 2 and (128, 128) from 100,000, 3 and (256, 256) from a million.
    LiRank's embedding width is halved while tables exceed ten numbers per row, down to 4.

    Args:
        model: "ligr" or "lirank".
        data: `rank.Impressions` or `rank.Stream`, the training data.
        given: arguments already chosen; not returned. None: no arguments.
    Returns: arguments for the class, without those in `given`.
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
    """The `rank.FitOptions` that depend on the table."""

    batch_size: int
    epochs: int
    eval_every: int
    patience: int
    lr: float


def choose_settings(
    requests: int, rows: int, width: int | None, *, batch_size: int | None = None, epochs: int | None = None
) -> Settings:
    """Choose the options that `rank.FitOptions` leaves open, by table size.

    Batches hold a fifteenth of the rows, 32 to 2,048, converted to requests and rounded down to a power of two. A
    full-length fit has at least 10 passes and at least 600 steps. Evaluations run after each pass, at most 40. The fit
    stops after half of the planned evaluations without improvement: a sequence ranker may show no progress for some
    hundred steps, until it has learned which items are alike. The learning rate is 3e-3; above token width 64 it
    decreases with the width.

    Args:
        requests, rows: counts in the training table.
        width: LiGR's token width; None for other rankers.
        batch_size, epochs: user-specified values, which the other options adapt to.
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
    """Validation fraction: a tenth; below 2,000 rows 200 rows, but at most a quarter."""
    return min(max(0.1, HELD_ROWS / max(rows, 1)), 0.25)


def choose_prompt_settings(requests: int, rows: int, width: int, trained: bool) -> dict[str, Any]:
    """Choose the options that `tigon train --task rank` leaves open, by table size.

    A step has 8 requests, but at most a quarter of the requests. From scratch, epochs suffice for 600 steps, at most
    200 epochs; with pretrained weights for 100 steps, at most 20 epochs. The learning rate from scratch is 1e-3; above
    width 128 it decreases in proportion. A fiftieth is held out; below 10,000 rows 200 rows, but at most a quarter.
    There are ten evaluations.

    Args:
        requests, rows: the table's counts. width: the model's. trained: whether its weights are pretrained.
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
