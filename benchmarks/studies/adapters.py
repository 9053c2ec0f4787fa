"""Adapters (LoRA, QLoRA) of several libraries side by side: the rows of the record, and the table of them.

A row is one side in one case. What a case measures stands in `measure`:

    speed        the median step, tokens/s and the peak of the timed steps
    gradients    loss and adapters' gradients of a few layers, beside those of the same numbers in fp32
    memory       the peak of one step; two lengths give the bytes that a token needs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import report
from harness.training import MASKED
from tables import NOISE, bold, group_cases, measure_scatter

SIDES = {
    "hf": "HF + PEFT", "liger": "Liger", "unsloth": "Unsloth", "tigon": "Tigon (`cheap`)",
    "tigon-offload": "Tigon (`cheap`, offload)", "tigon-mlp-offload": "Tigon (`mlp`, offload)",
}  # fmt: skip
MODELS = {
    "llama-3-8b": "Llama-3-8B", "qwen3-1.7b": "Qwen3-1.7B", "mistral-7b": "Mistral-7B", "qwen2-7b": "Qwen2-7B",
    "gemma-2-2b": "Gemma-2-2B",
}  # fmt: skip
USABLE_GIB = 77.5  # of a GPU with 80 GB, what is left beside the CUDA context and the allocator's gaps
CAPTION = (
    "Tokens/s and peak memory; 12.5 % of the labels is masked. Bold: better than every other library measured "
    "by more than 2 % and by more than the measurement noise."
)
_DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass
class Row:
    """One side in one case.

    quantized: "" or "nf4", the form of the frozen weights. layers: 0 for all of the model's. host_ms: until the host
    has issued a step, the median. error, error_a, error_b: of all adapters' gradients, of the A's and of the B's,
    relative to fp32's in the Euclidean norm; worst names the furthest single gradient.
    """

    model: str
    side: str
    batch: int
    seq: int
    rank: int = 16
    quantized: str = ""
    checkpointing: bool = False
    measure: str = "speed"
    layers: int = 0
    status: str = "ok"  # ok | wrong | failed
    reason: str = ""
    note: str = ""
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    host_ms: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    weights_gib: float | None = None
    trained: int | None = None
    loss: float | None = None
    loss_error: float | None = None
    error: float | None = None
    error_a: float | None = None
    error_b: float | None = None
    worst: str = ""
    wall_s: float | None = None
    date: str = ""  # of the run that the row is from, and its command
    command: str = ""
    masked: float = MASKED  # share of the labels

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _fixed(digits: int, key: str) -> Any:
    return lambda row: "–" if row[key] is None else f"{row[key]:,.{digits}f}"


report.COLUMNS["adapters"] = {
    "model": lambda r: MODELS.get(r["model"], r["model"]) + (f", {r['layers']} layers" if r["layers"] else ""),
    "batch×seq": lambda r: f"{r['batch']}×{r['seq']}" + (" ckpt" if r["checkpointing"] else ""),
    "adapters": lambda r: f"{'QLoRA ' + r['quantized'] if r['quantized'] else 'LoRA'} r={r['rank']}",
    "measured": lambda r: r["measure"],
    "by": lambda r: r["side"],
    "tokens/s": _fixed(0, "tokens_per_s"),
    "step ms": lambda r: (
        "–" if r["step_ms"] is None else f"{r['step_ms']:,.1f} ±{100 * measure_scatter(r):.1f}%"
    ),
    "host ms": _fixed(0, "host_ms"),
    "peak GiB": _fixed(2, "peak_gib"),
    "loss − fp32's": lambda r: "–" if r["loss_error"] is None else f"{r['loss_error']:+.1e}",
    "gradients' error": _fixed(4, "error"),
    "remark": lambda r: f"{r['status'].upper()}: {r['reason']}" if r["status"] != "ok" else "",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the table


def page(results: Path) -> str:
    """The tables of all records, for the documentation."""
    parts = []
    for path in sorted(results.glob("*-adapters.json")):
        content = report.load(path)
        parts.append(f"{report.source(content)}\n\n{to_table(content)}")
    return "\n".join(parts)


def to_table(content: dict[str, Any]) -> str:
    """Tokens/s and peak memory of every case and side, memory over the length, and the gradients' errors below."""
    lines, notes = table(content["rows"])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    marked = [f"{raised(number)} {note}" for number, note in enumerate(notes, 1)]
    return f"{text}\n\n" + " ".join([CAPTION, *marked]) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """The lines, the header first, and what the raised numbers in them say."""
    cases = group_cases(rows)
    speed = [by for by in cases if _measure(by) == "speed"]
    lengths = over_length([by for by in cases if _measure(by) == "memory"])
    present = [side for side in SIDES if any(side in by for by in (*speed, *(found for _, found, _ in lengths)))]
    notes = [text] if (text := errors(rows)) else []
    header = ["adapters, of rank 16 unless the line says" + (raised(1) if notes else ""), *(SIDES[s] for s in present)]
    lines = [header, [":--", *("--:" for _ in present)]]
    for by in speed:
        right = {side: row for side, row in by.items() if row["status"] == "ok"}
        scatter = {side: measure_scatter(row) for side, row in right.items()}
        fast = ahead({side: 1 / row["tokens_per_s"] for side, row in right.items() if row["tokens_per_s"]}, scatter)
        small = ahead({side: row["peak_gib"] for side, row in right.items() if row["peak_gib"]})
        cells = [_cell(by.get(side), side in fast, side in small, notes) for side in present]
        # Two runs are two machines of one kind, which differ by a per cent or two.
        apart = len({row.get("date") for row in by.values()}) > 1
        mark = _mark("The sides of this row come from two runs.", notes) if apart else ""
        lines.append([title(next(iter(by.values()))) + mark, *cells])
    for row, found, measured in lengths:
        small = ahead({side: kib for side, (kib, _) in found.items()})
        cells = [
            bold(f"{found[side][0]:,.0f} KiB", side in small) + f" ({found[side][1]:,.0f})" if side in found else "–"
            for side in present
        ]
        note = (
            f"Measured at {measured[0]:,} and {measured[1]:,} tokens. In parentheses, extrapolated and not measured: "
            "the tokens of one sequence at which a GPU with 80 GB would be full."
        )
        kind = f"{_kind(row)}, one sequence" + (", checkpointing" if row["checkpointing"] else "")
        lines.append([f"{_name(row)} {kind}: memory per token{_mark(note, notes)}", *cells])
    return lines, notes


def _measure(by: dict[str, dict[str, Any]]) -> str:
    return str(next(iter(by.values()))["measure"])


def _name(row: dict[str, Any]) -> str:
    return MODELS.get(row["model"], row["model"])


def _kind(row: dict[str, Any]) -> str:
    return f"QLoRA {row['quantized']}" if row["quantized"] else "LoRA"


def title(row: dict[str, Any]) -> str:
    more = [f"rank {row['rank']}"] if row["rank"] != 16 else []
    more += ["checkpointing"] if row["checkpointing"] else []
    return ", ".join([f"{_name(row)} {row['batch']}×{row['seq']} {_kind(row)}", *more])


def _cell(row: dict[str, Any] | None, fastest: bool, smallest: bool, notes: list[str]) -> str:
    if row is None:
        return "–"
    if row["status"] != "ok":
        short = row["reason"] == "out of memory"
        return (
            row["reason"]
            if short
            else row["status"] + _mark(f"{SIDES[row['side']]}: {row['reason'].rstrip('.')}.", notes)
        )
    rate = bold(f"{row['tokens_per_s']:,.0f}", fastest)
    return rate if row["peak_gib"] is None else f"{rate}, " + bold(f"{row['peak_gib']:.1f} GiB", smallest)


def _mark(note: str, notes: list[str]) -> str:
    if note not in notes:
        notes.append(note)
    return raised(notes.index(note) + 1)


def raised(number: int) -> str:
    return str(number).translate(_DIGITS)


def ahead(values: dict[str, float], scatter: dict[str, float] | None = None) -> set[str]:
    """The sides whose value is below that of every other library beyond noise; of one library's sides the lowest.

    Two sides of one library that are within noise of each other lead together. Nobody leads alone: there must be
    another library's value.
    """
    scatter = scatter or {}

    def beats(one: str, other: str) -> bool:
        return values[other] > values[one] * (1 + max(NOISE, scatter.get(one, 0.0) + scatter.get(other, 0.0)))

    found = set()
    for side in values:
        others = [other for other in values if library(other) != library(side)]
        siblings = [other for other in values if other != side and library(other) == library(side)]
        if others and all(beats(side, other) for other in others) and not any(beats(s, side) for s in siblings):
            found.add(side)
    return found


def library(side: str) -> str:
    return side.partition("-")[0]


def over_length(
    cases: list[dict[str, dict[str, Any]]],
) -> list[tuple[dict[str, Any], dict[str, tuple[float, float]], tuple[int, int]]]:
    """For each case but its length: KiB a token between two lengths and the tokens that fit, by side; those lengths."""
    peaks: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for by in cases:
        for side, row in by.items():
            key = tuple(row[name] for name in ("model", "batch", "rank", "quantized", "checkpointing"))
            rows.setdefault(key, row)
            if row["status"] == "ok" and row["peak_gib"]:
                peaks.setdefault(key, {}).setdefault(side, {})[row["batch"] * row["seq"]] = row["peak_gib"]
    found = []
    for key, sides in peaks.items():
        slopes, lengths = {}, (0, 0)
        for side, measured in sides.items():
            if len(measured) < 2:
                continue
            (a, low), (b, high) = sorted(measured.items())[-2:]
            if high > low:
                per_token, lengths = (high - low) / (b - a), (a, b)
                slopes[side] = (per_token * 2**20, round(a + (USABLE_GIB - low) / per_token, -3))
        if slopes:
            found.append((rows[key], slopes, lengths))
    return found


def errors(rows: Sequence[dict[str, Any]]) -> str:
    """How far the gradients are from fp32's, in a sentence; nothing where that was not measured."""
    parts = []
    for by in group_cases([row for row in rows if row["measure"] == "gradients"]):
        row = next(iter(by.values()))
        known = [(SIDES[side], by[side]["error"]) for side in SIDES if side in by and by[side]["error"] is not None]
        if known:
            which = f"{_kind(row)} of {row['layers']} layers of {_name(row)}"
            parts.append(f"{which}: " + ", ".join(f"{name} {error:.4f}" for name, error in known))
    return "Distance of all adapters' gradients from fp32's, in its norm. " + "; ".join(parts) + "." if parts else ""
