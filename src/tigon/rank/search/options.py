"""Search options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from tigon.data.arrow import nearest
from tigon.rank.models.lirank.graph import KINDS
from tigon.rank.search.evolution import Sampler
from tigon.rank.search.space import MOST, Space
from tigon.rank.training.fit import FitOptions

Model = dict[str, Any]
# LiRank arguments: those replaced by blocks, and those that a search passes on.
REPLACED = ("blocks", "cross", "layers", "rank", "mlp", "gate")
PASSED = ("width", "dropout", "norm", "towers", "tower_mlp", "temperature", "weights")


@dataclass(frozen=True)
class SearchOptions:
    """Options for `rank.search_blocks`.

    Args:
        trials: total graphs to try, including earlier runs and other processes.
        sampler: "evolution", or "random" as a baseline.
        kinds: allowed block kinds. most: maximum blocks per graph.
        rows: fraction of the requests used to train a trial. epochs: passes over them.
        hash_rows: maximum codes per field in trials; larger fields share codes. None: no limit.
        best: number of best graphs to refit on all rows; no two share more than half of their blocks, as long as there
            are others.
        fit: `rank.FitOptions` for refits; trials use the same options except the epochs. The loss is "bce".
        model: further arguments for `rank.LiRank`, such as {"width": 16, "norm": "batch", "dropout": 0.1}.
        seed: for drawing graphs; weights and data order use `fit.seed`.

    Raises: ValueError for a value out of range, and for a space without a path from features to towers.
    """

    trials: int = 100
    sampler: Sampler = "evolution"
    kinds: Sequence[str] = KINDS
    most: int = MOST
    rows: float = 0.1
    epochs: int = 1
    hash_rows: int | None = 10_000
    best: int = 5
    fit: FitOptions = FitOptions()
    model: Model = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        for name, low in (("trials", 1), ("best", 0), ("epochs", 1), ("hash_rows", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ValueError(f"rank.search_blocks: {name} must be an integer of at least {low}, got {value!r}.")
        if not 0 < self.rows <= 1:
            raise ValueError(f"rank.search_blocks: rows must be a fraction, above 0 and at most 1, got {self.rows}.")
        if self.sampler not in get_args(Sampler):
            raise ValueError(f"rank.search_blocks: sampler must be evolution or random, got {self.sampler!r}.")
        if self.fit.loss != "bce" or self.fit.objective != "impressions":
            raise ValueError(
                f"rank.search_blocks: fit must use loss bce on impressions, by which graphs are compared, got "
                f"{self.fit.loss!r} on {self.fit.objective!r}."
            )
        for name in self.model:
            if name in REPLACED:
                raise ValueError(
                    f"rank.search_blocks: model must leave {name} to the blocks, got {name}={self.model[name]!r}."
                )
            if name not in PASSED:
                raise ValueError(f"rank.search_blocks: model has no {name!r}; {nearest(name, PASSED)}")
        Space(tuple(self.kinds), self.most)

    def lasting(self) -> dict[str, Any]:
        """The options that all runs in a study must share, as JSON."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        fitting = dataclasses.asdict(found.pop("fit"))
        for name in ("trials", "best"):
            del found[name]
        found |= {"kinds": list(self.kinds), "model": dict(self.model), "fit": fitting}
        lasting: dict[str, Any] = json.loads(json.dumps(found, default=str))  # normalised as in the study
        return lasting
