"""Rows of studies that compare methods over seeds, and how they are printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Row:
    """One fit, or one timing, of a part of a study.

    measures: of the test. validation: what stopped the fit and chose the setting.
    """

    part: str
    data: str
    seed: int
    method: str
    setting: dict[str, Any]
    measures: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
