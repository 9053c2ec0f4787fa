"""Optimizers and learning rates: AdamW, and optionally row-wise Adagrad for embedding tables."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tigon.rank.evaluation.evaluate import is_better
from tigon.training.row_adagrad import RowAdagrad

TABLE_OPTIMIZERS = ("adamw", "row-adagrad")
SCHEDULES = ("cosine", "linear", "constant", "plateau")


class Optimizers:
    """AdamW for a ranker's parameters, and optionally RowAdagrad for its tables.

    Args:
        ranker: must have `table_gradients`, as `rank.LiRank`, if tables is "row-adagrad".
        tables: "adamw" for AdamW on all parameters, or "row-adagrad".
        lr, table_lr: peak learning rates. weight_decay: for linear weights.

    Attributes:
        adamw: to be prepared by Accelerate. rows: the RowAdagrad optimizer, or None.

    Raises: ValueError for a ranker without such tables.
    """

    def __init__(self, ranker: Any, tables: str, lr: float, table_lr: float, weight_decay: float) -> None:
        by_rows = tables == "row-adagrad"
        if by_rows and not hasattr(ranker, "table_gradients"):
            raise ValueError(
                f"rank.fit: table_optimizer must be 'adamw' for {type(ranker).__name__}, got {tables!r}, which needs "
                "tables with row-wise gradients."
            )
        own: list[Tensor] = []
        if hasattr(ranker, "table_gradients"):
            found = ranker.table_gradients("rows" if by_rows else "dense")
            own = found if by_rows else []
        device = next(ranker.parameters()).device
        self.peaks, self.own = (lr, table_lr), {id(p) for p in own}
        self.adamw = torch.optim.AdamW(
            parameter_groups(ranker, weight_decay, self.own), lr=lr, fused=device.type == "cuda"
        )
        self.rows = RowAdagrad(own, lr=table_lr) if own else None

    def clipped_parameters(self, ranker: nn.Module) -> list[nn.Parameter]:
        """Parameters with gradient clipping: all except the tables, whose steps Adagrad scales by row."""
        return [p for p in ranker.parameters() if id(p) not in self.own]

    def set_lr(self, adamw: Any, lr_multiplier: float) -> float:
        """Set the learning rates to a multiple of their peaks. Returns: AdamW's rate."""
        rates = [peak * lr_multiplier for peak in self.peaks]
        for optimizer, rate in zip((adamw, self.rows), rates, strict=True):
            for group in optimizer.param_groups if optimizer is not None else ():
                group["lr"] = rate
        return rates[0]

    def state_dict(self) -> dict[str, Any]:
        """A single state dict for both optimizers; the last group is the tables'."""
        result = self.adamw.state_dict()
        if self.rows is None:
            return result
        more = self.rows.state_dict()
        first = sum(len(group["params"]) for group in result["param_groups"])
        state = {**result["state"], **{first + p: value for p, value in more["state"].items()}}
        of_rows = [{**g, "params": [first + p for p in g["params"]]} for g in more["param_groups"]]
        return {"state": state, "param_groups": [*result["param_groups"], *of_rows]}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Load a dict from `state_dict`."""
        count = len(self.adamw.param_groups)
        for optimizer, part in (
            (self.adamw, given["param_groups"][:count]),
            (self.rows, given["param_groups"][count:]),
        ):
            if optimizer is None:
                continue
            names = [p for group in part for p in group["params"]]
            first = min(names, default=0)
            state = {p - first: given["state"][p] for p in names if p in given["state"]}
            part = [{**group, "params": [p - first for p in group["params"]]} for group in part]
            optimizer.load_state_dict({"state": state, "param_groups": part})


def parameter_groups(module: nn.Module, decay: float, without: set[int] | None = None) -> list[dict[str, Any]]:
    """Linear weights, with decay, and the rest without: a step touches few rows in an embedding.

    without: parameter ids to exclude.
    """
    linear = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    trained = [p for p in module.parameters() if p.requires_grad and id(p) not in (without or ())]
    decayed, others = [p for p in trained if id(p) in linear], [p for p in trained if id(p) not in linear]
    found = ({"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in found if group["params"]]


def lr_multiplier(schedule: str, done: float, warmup: float, falls: int) -> float:
    """Learning-rate multiplier after a fraction `done` of the run.

    falls: for "plateau", the count from `count_drops`.
    """
    if done < warmup:
        now = done / warmup
    elif schedule in ("constant", "plateau"):
        now = 1.0
    else:
        left = 1 - min((done - warmup) / (1 - warmup), 1.0)
        now = left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return now * 0.1**falls if schedule == "plateau" else now


def count_drops(history: list[dict[str, float]], metric: str) -> int:
    """Number of evaluations that did not improve on the best so far."""
    best, count = None, 0
    for value in (row[metric] for row in history):
        if best is None or is_better(metric, value, best):
            best = value
        else:
            count += 1
    return count
