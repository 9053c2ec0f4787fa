"""`feed_forward`'s report: changes per layer, method comparison, and `remove()`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tigon.compress.layout import swap_layers, write_layout


@dataclass(frozen=True)
class Skipped:
    """A skipped layer and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class LayerRow:
    """A layer's row in the report.

    method: "whole" if unchanged.
    heavy: fraction of neurons kept or stored at the wider width.
    bits: widths for heavy and other neurons; None for floats.
    rank: for the other neurons, or 0.
    bytes, bytes_before: weights, scales and biases.
    error: E‖y − ŷ‖² / E‖y‖² at the output after recovery, on rows not used for scores.
    score_of_a_tenth: fraction of the score in the best tenth of the neurons.
    """

    name: str
    formula: str
    method: str
    heavy: float
    bits: tuple[int, int] | None
    rank: int
    bytes: int
    bytes_before: int
    error: float
    score_of_a_tenth: float


@dataclass(frozen=True)
class MethodRow:
    """A method at the same budget: total bytes and mean layer error.

    distance: whole-model output distance on the calibration text; None if not tried.
    """

    name: str
    bytes: int
    error: float
    distance: float | None
    chosen: bool


@dataclass
class Report:
    """Result of `feed_forward`.

    layers: a row per layer.
    methods: each method's cost.
    skipped: skipped layers and reasons.
    tokens: calibration tokens.
    unit: unit for distances.
    notes: further remarks.

    The report keeps the replaced layers for `remove()`. Their memory is freed once you drop the report or call
    `forget()`.
    """

    layers: list[LayerRow]
    methods: list[MethodRow]
    skipped: list[Skipped]
    tokens: int
    unit: str
    notes: list[str] = field(default_factory=list)
    _model: Any = field(default=None, repr=False)
    _before: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.layers)

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.layers)

    @property
    def distance(self) -> float | None:
        """The whole model's distance from the original on the calibration text; 0 if nothing changed."""
        return next((row.distance for row in self.methods if row.chosen), None)

    def remove(self) -> None:
        """Restore the replaced layers; outputs are again bitwise identical to the original.

        Raises: RuntimeError after `forget()`.
        """
        if self._model is None:
            raise RuntimeError("compress: the original layers are gone, since forget() was called.")
        swap_layers(self._model, self._before)
        write_layout(self._model)
        self.forget()

    def forget(self) -> None:
        """Release the original layers."""
        self._model, self._before = None, {}

    def to_dict(self) -> dict[str, Any]:
        """Rows as JSON-compatible values."""
        rows = {name: [asdict(row) for row in getattr(self, name)] for name in ("layers", "methods", "skipped")}
        totals = {name: getattr(self, name) for name in ("tokens", "unit", "notes", "bytes", "bytes_before")}
        return rows | totals

    def table(self) -> str:
        """The report as text."""
        header = ("method", 7), ("kept", 6), ("bits", 6), ("rank", 5), ("MiB", 8), ("of", 8), ("error", 9)
        lines = [" ".join([f"{'layer':<32}", *(f"{word:>{width}}" for word, width in header), " top tenth"])]
        for row in self.layers:
            bits = "" if row.bits is None else "/".join(map(str, dict.fromkeys(row.bits)))
            size, before = row.bytes / 2**20, row.bytes_before / 2**20
            lines.append(
                f"{row.name[-32:]:<32} {row.method:>7} {row.heavy:>6.1%} {bits:>6} {row.rank or '':>5} "
                f"{size:>8.2f} {before:>8.2f} {row.error:>9.2e}  {row.score_of_a_tenth:.0%}"
            )
        lines += ["", f"within the same bytes, on {self.tokens:,} calibration tokens"]
        for one in self.methods:
            distance = "" if one.distance is None else f", {one.distance:.4g} {self.unit}"
            mark = "→" if one.chosen else " "
            lines.append(f"{mark} {one.name:<6} {one.bytes / 2**20:9.2f} MiB  mean error {one.error:.3e}{distance}")
        share = self.bytes / self.bytes_before if self.bytes_before else 1.0
        lines.append(f"{self.bytes_before / 2**20:.2f} MiB before, {self.bytes / 2**20:.2f} now: {share:.1%}")
        lines += [f"skipped: {row.name}: {row.reason}" for row in self.skipped]
        return "\n".join([*lines, *self.notes])

    def __str__(self) -> str:
        return self.table()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot layer errors and each method's distance or error; needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.bar(range(len(self.layers)), [row.error for row in self.layers], color="0.45")
        left.set(xlabel="layer", ylabel="output error")
        tried = [row for row in self.methods if row.distance is not None]
        rows = tried if len(tried) > 1 else self.methods
        values = [float(row.error if row.distance is None or rows is not tried else row.distance) for row in rows]
        colors = ["tab:orange" if row.chosen else "0.7" for row in rows]
        right.bar([row.name for row in rows], values, color=colors)
        right.set(ylabel=self.unit if rows is tried else "mean output error over the layers")
        if values and min(values) > 0:
            right.set_yscale("log")
        figure.savefig(path)
