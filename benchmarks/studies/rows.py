"""Rows of studies that compare methods over seeds, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def text(values: dict[str, Any]) -> str:
    """Names and values; without the settings that validation chose among."""
    return ", ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
        if name != "tried"
    )


def markdown(header: list[str], lines: Iterable[list[str]], left: int) -> str:
    """A table, of which the first `left` columns are aligned to the left."""
    align = [":--"] * left + ["--:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, align, *lines))


def columns(*names: str) -> dict[str, Callable[[dict[str, Any]], str]]:
    """The columns of a study's text, for `report.COLUMNS`: these, then who, how and what was measured."""
    first = {name: (lambda row, name=name: str(row[name])) for name in names}
    return {
        **first,
        "by": lambda row: row["method"],
        "setting": lambda row: text(row["setting"]) or "–",
        "measures": lambda row: text(row["measures"]),
    }
