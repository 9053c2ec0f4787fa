"""The report of the parts that a fusion replaced, skipped, and ran."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN = 20  # rows in the text


@dataclass(frozen=True)
class Row:
    """A kind of module: replaced, with the formula, or skipped, with the reason.

    calls: how often these modules ran fused in the last step. advice: how to have a skipped kind fused; empty if
    skipping costs nothing. idle: why replaced modules ran their own code in the last step, or did not run.
    """

    kind: str
    name: str
    count: int
    fused: bool
    what: str
    calls: int = 0
    advice: str = ""
    idle: str = ""


@dataclass(frozen=True)
class Report:
    """The parts that tigon.fuse replaced, the parts skipped and why, and the parts that ran in the last step.

    kinds: the fused kinds, in the order in which fuse tries them, without a kind that waits for a packed batch. calls:
        how often each ran in the last step.
    under_compile: sentences about the parts that run otherwise under torch.compile.
    recompute_auto: the choice made by recompute="auto" for the last forward pass with gradients, and why; else empty.
        The text omits this choice for a model on a CPU (on_cpu).
    outside: calls to parts since then by code that called them alone; they belong to no step, and `calls` lacks them.
    adapters_off: layers whose adapters were switched off or merged in the last step, as a reference has them;
    adapters_before: layers with adapters that ran fused in the most recent earlier step in which any did.

    whole_layers: decoder layers that ran as a whole in the last step, all parts together.

    str(report) is a table for one screen; to_dict() is JSON; to_rich() a rich table.
    """

    model: str
    active: bool
    rows: list[Row]
    kinds: list[str] = field(default_factory=list)
    steps: int = 0
    outside: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    under_compile: list[str] = field(default_factory=list)
    logits_built_by: dict[str, int] = field(default_factory=dict)
    recompute: str = "none"
    recompute_auto: str = ""
    on_cpu: bool = False
    tensors_not_kept: int = 0
    bytes_not_kept: int = 0
    bytes_offloaded: int = 0
    unfused_heads: dict[str, int] = field(default_factory=dict)
    unfused_adapters: dict[str, int] = field(default_factory=dict)
    adapters_off: int = 0
    adapters_before: int = 0
    whole_layers: int = 0

    @property
    def fused_rows(self) -> list[Row]:
        return [row for row in self.rows if row.fused]

    @property
    def skipped_rows(self) -> list[Row]:
        return [row for row in self.rows if not row.fused]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}

    def headline(self) -> str:
        parts = sum(row.count for row in self.fused_rows)
        if not parts:
            return f"{self.model}: nothing to fuse"
        noun = "part" if parts == 1 else "parts"
        return f"{self.model}: {parts} {noun} fused" + ("" if self.active else ", removed again")

    def last_step(self) -> str:
        """The parts that ran in the last step, in a few sentences; empty if nothing was fused."""
        if not self.fused_rows:
            return ""
        if not self.steps:
            text = "No step has run yet. Steps under torch.compile are not counted: run one without it to see counts."
            alone = [self._outside()] if self.outside else []
            return " ".join([text, *alone, *self.under_compile])
        ran = ", ".join(f"{kind} {self.calls.get(kind, 0)}" for kind in self.kinds)
        text = f"Ran in the last step: {ran}."
        if self.whole_layers:
            text += f" Decoder layers that ran as a whole: {self.whole_layers}."
        if self.logits_built_by:
            text += " Logits were built by " + ", ".join(f"{k} ({n}×)" for k, n in self.logits_built_by.items()) + "."
        if self.unfused_heads:
            text += " The head had real logits: " + "; ".join(self.unfused_heads) + "."
        if self.unfused_adapters:
            text += " Adapters ran in PEFT's own code: " + "; ".join(self.unfused_adapters) + "."
        if self.adapters_off:
            text += f" The adapters of {self.adapters_off} layers were switched off or merged"
            text += f"; in the last step with adapters {self.adapters_before} ran." if self.adapters_before else "."
        if self.outside:
            text += f" {self._outside()}"
        if self.recompute_auto and not self.on_cpu:  # on a CPU no kernel waits for the host, and nothing is gained
            text += f" Recompute auto: {self.recompute_auto}."
        if self.tensors_not_kept:
            size = f"{self.bytes_not_kept / 2**20:,.1f} MiB"
            text += f" Recomputed instead of saved: {self.tensors_not_kept} activations, {size}."
        if self.bytes_offloaded:
            text += f" Offloaded to host memory: {self.bytes_offloaded / 2**20:,.1f} MiB."
        return text

    def _outside(self) -> str:
        calls = "1 call of a part" if self.outside == 1 else f"{self.outside} calls of parts"
        return f"Outside the model's forward, and not counted: {calls}."

    def __str__(self) -> str:
        lines = [self.headline()]
        width = max((len(row.name) for row in self.rows), default=0)
        kind = max((len(row.kind) for row in self.rows), default=0)
        for row in self.rows[:SHOWN]:
            mark = "fused" if row.fused else "skipped"
            ran = f"{self._ran(row):<7} " if self.steps else ""
            count = f"{mark} {row.count:>{9 - len(mark)}}"
            lines.append(f"  {row.kind:<{kind}} {count} × {row.name:<{width}}  {ran}{self._describe(row)}")
        hidden = len(self.rows) - SHOWN
        if hidden > 0:
            lines.append(f"  … and {hidden} more: to_dict() lists all")
        return "\n".join([*lines, self.last_step()]).rstrip()

    @staticmethod
    def _ran(row: Row) -> str:
        return f"ran {row.calls}" if row.fused else ""

    @staticmethod
    def _describe(row: Row) -> str:
        if row.fused and not row.calls and row.idle:
            return f"{row.what}. Did not run: {row.idle}"
        return f"{row.what} → {row.advice}" if row.advice else row.what

    def to_rich(self) -> Any:
        try:
            from rich.table import Table
        except ImportError:
            raise ImportError("Report.to_rich needs rich: pip install rich.") from None
        table = Table(title=self.headline(), caption=self.last_step() or None, title_justify="left")
        columns = ("part", "", "count", "class", *(["ran"] if self.steps else []), "formula or reason")
        for column in columns:
            table.add_column(column, justify="right" if column in ("count", "ran") else "left")
        for row in self.rows:
            ran = [str(row.calls) if row.fused else ""] if self.steps else []
            table.add_row(
                row.kind, "fused" if row.fused else "skipped", str(row.count), row.name, *ran, self._describe(row),
                style=None if row.fused else "dim",
            )  # fmt: skip
        return table
