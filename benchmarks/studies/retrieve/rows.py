"""Rows of the study of retrieval."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

MOVIELENS = "MovieLens 100K"


@dataclass
class Row:
    """One method, setting and seed.

    part: filters, cold, links or towers. measures: of the test. validation: what the setting was chosen by; of links
    the tried values, each with its measure. edges: of links, the strongest.
    """

    part: str
    data: str
    seed: int
    method: str
    setting: dict[str, Any]
    measures: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    edges: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
