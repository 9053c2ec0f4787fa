"""The table of a result: the columns of each kind, how a cell is written, and which rows belong to one case."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]  # header and lines


# -------------------------------------------------------------------------------------------------------------- cells


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, without an exponent."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    decimals = max(0, digits - 1 - int(f"{value:e}".split("e")[1]))
    return f"{value:,.{decimals}f}"


def format_value(value: Any) -> str:
    """A field as it is: a float with three digits, a bool as yes or NO."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def format_shape(row: Row) -> str:
    return "×".join(map(str, row["shape"]))


def format_model(row: Row) -> str:
    """The model's name, and how many layers were built where that is not all of them."""
    return str(row["model"]) + (f", {row['layers']} layers" if row.get("layers") else "")


def format_size(row: Row) -> str:
    """Batch and length of a whole model's step, and how it is taken."""
    micro_batches = f"{row['accumulation']} × " if row.get("accumulation", 1) > 1 else ""
    return f"{micro_batches}{row['batch']}×{row['seq']}" + (", checkpointing" if row["checkpointing"] else "")


def format_share(value: float) -> str:
    return f"{100 * value:.3g} %"


def _round(key: str, decimals: int = 0) -> Callable[[Row], str]:
    return lambda row: "–" if row.get(key) is None else f"{row[key]:,.{decimals}f}"


def _loss(position: int) -> Callable[[Row], str]:
    return lambda row: f"{row['losses'][position]:.5f}" if row["losses"] else "–"


def _rate(unit: str) -> Callable[[Row], str]:
    return lambda row: number(row["rate"]) if row["rate_unit"] == unit else "–"


def _against_plain(key: str, digits: int = 0) -> Callable[[Row], str]:
    """The number, and its difference to Hugging Face's in the same case."""

    def cell(row: Row) -> str:
        if row[key] is None:
            return "–"
        plain = row.get("plain") or {}
        more = "" if not plain.get(key) else f" ({100 * (row[key] / plain[key] - 1):+.1f}%)"
        return f"{row[key]:,.{digits}f}{more}"

    return cell


def _with_range(middle: float | None, low: float, high: float) -> str:
    """The median, and half the range in per cent of the median; a single round has no range."""
    text = number(middle)
    return text if middle is None or low == high else f"{text} ±{50 * (high - low) / middle:.1f}%"


def _total(row: Row) -> str:
    return "–" if row["total_ms"] is None else _with_range(row["total_ms"], *row["total_range_ms"])


def _step(row: Row) -> str:
    steps = row.get("steps_ms") or [0.0]
    return _with_range(row["step_ms"], min(steps), max(steps))


def _times_floor(row: Row) -> str:
    return "–" if not row.get("times_floor") or row.get("side") == "floor" else f"{row['times_floor']:.2f}×"


def remark(row: Row) -> str:
    note: str = row.get("note", "")
    return note if row["status"] == "ok" else f"{row['status'].upper()}: {row.get('reason', '')}"


# ------------------------------------------------------------------------------------------------------------ columns

# A column is the name of a field, shown by format_value, or a function of the row.
Column = str | Callable[[Row], str]
_REMARK: dict[str, Column] = {"remark": remark}
_OPERATOR: dict[str, Column] = {"op": "op", "shape": format_shape, "dtype": "dtype", "by": "implementation"}
# Tables of other kinds, such as those of studies, show the fields as they are.
COLUMNS: dict[str, dict[str, Column]] = {
    "ops": {
        **_OPERATOR,
        "fwd ms": "forward_ms",
        "bwd ms": "backward_ms",
        "fwd+bwd ms": _total,
        "device ms": "device_ms",
        "× floor": _times_floor,
        "GB/s": _rate("GB/s"),
        "TFLOP/s": _rate("TFLOP/s"),
        "peak MiB": _round("peak_mib"),
        "error": lambda r: f"{max(r['errors'].values()):.1e}".replace("e-0", "e-") if r["errors"] else "–",
        **_REMARK,
    },
    "host": {
        "op": "op",
        "dtype": "dtype",
        "by": "implementation",
        "fwd µs": "forward_us",
        "fwd+bwd µs": "total_us",
        "× eager": "times_eager",
        **_REMARK,
    },
    "model": {
        "model": format_model,
        "batch×seq": format_size,
        "masked": lambda r: format_share(r["masked"]),
        "GPUs": lambda r: "–" if r.get("gpus", 1) == 1 else str(r["gpus"]),
        "by": "side",
        "tokens/s": _against_plain("tokens_per_s"),
        "step ms": _step,
        "× floor": _times_floor,
        "peak GiB": _against_plain("peak_gib", 1),
        "first loss": _loss(0),
        "last loss": _loss(-1),
        **_REMARK,
    },
    "sequence": {
        "model": lambda r: r["model"] + (", checkpointing" if r["checkpointing"] else ""),
        "sequence": "seq",
        "by": "side",
        "tokens/s": _against_plain("tokens_per_s"),
        "peak GiB": _against_plain("peak_gib", 1),
        "step ms": _step,
        "loss": _loss(0),
        **_REMARK,
    },
    "search": {
        **{name: name for name in ("vectors", "queries", "k", "filters", "share")},
        "by": "implementation",
        **{name: name for name in ("ms", "p99_ms", "graph_ms", "floor_ms", "times_floor", "peak_mib")},
        **{name: name for name in ("equal", "candidates", "certified", "recall")},
        **_REMARK,
    },
}  # fmt: skip
PLAIN = "hf"  # the side that others are compared with
TEXT_COLUMNS = ("op", "shape", "dtype", "model", "batch×seq", "GPUs", "sequence", "tokens", "method", "by", "remark")


def list_fields(rows: Sequence[Row]) -> dict[str, Column]:
    """Columns of a kind that has none: the fields that hold a number or a word in any row, without its origin."""
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (str, int, float)))
    return {key: key for key in keys if key not in ("date", "command")}


def make_cells(kind: str, rows: Sequence[Row]) -> Cells:
    """Header and lines, without the columns that are empty in every line."""
    columns = COLUMNS.get(kind) or list_fields(rows)
    plain = {case_key(row): row for row in rows if row.get("side") == PLAIN and row["status"] == "ok"}
    lines = []
    for row in rows:
        if row.get("side") not in (PLAIN, "floor"):
            row = {**row, "plain": plain.get(case_key(row))}
        lines.append([
            format_value(row.get(column)) if isinstance(column, str) else column(row) for column in columns.values()
        ])  # fmt: skip
    kept = [i for i in range(len(columns)) if any(line[i] not in ("", "–") for line in lines)]
    return [list(columns)[i] for i in kept], [[line[i] for i in kept] for line in lines]


# -------------------------------------------------------------------------------------------------------------- cases

_CASE_KEYS = (
    "op", "shape", "dtype", "draw", "model", "batch", "seq", "checkpointing", "gpus", "rank", "quantized", "measure",
    "masked", "accumulation",
    "items", "queries", "k", "filters", "share", "vectors", "workers", "clients", "form", "asked",
)  # fmt: skip


def case_key(row: Row) -> tuple[Any, ...]:
    """The fields that the rows of one case have in common."""
    return tuple(tuple(row[k]) if k == "shape" else row[k] for k in _CASE_KEYS if k in row)
