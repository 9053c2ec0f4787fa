"""Results of `tigon bench` with one line per case and one column per implementation, as Markdown and as cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tigon.bench.report import _number, _shape, case_of

Cells = tuple[list[str], list[list[str]]]


def to_matrix(content: dict[str, Any], order: Sequence[str] = ()) -> str:
    """Markdown. Numbers to the right, what names a case to the left."""
    header, rows = matrix(content, order)
    align = [":--" if name in LEFT else "--:" for name in header]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, align, *rows)) + "\n"


def matrix(content: dict[str, Any], order: Sequence[str] = ()) -> Cells:
    """Header and lines of a result of one of the kinds in MATRICES. The best of a line stands between asterisks.

    Args:
        order: implementations that come first; the others follow as they appear.
    """
    by = "implementation" if content["kind"] == "ops" else "side"
    present = list(dict.fromkeys(row[by] for row in content["rows"]))
    names = [n for n in order if n in present] + [n for n in present if n not in order]
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        cases.setdefault(case_of(row), {})[row[by]] = row
    return MATRICES[content["kind"]](names, list(cases.values()))


# ---------------------------------------------------------------------------------------------------------- operators


def _ops(names: list[str], cases: list[dict[str, dict[str, Any]]]) -> Cells:
    """Milliseconds (× floor)."""
    lines = []
    for by in cases:
        row = next(iter(by.values()))
        floor = next((r["floor_ms"] for r in by.values() if r["floor_ms"] is not None), None)
        fastest = min(
            (r["total_ms"] for r in by.values() if r["total_ms"] is not None and r["status"] == "ok"), default=0
        )
        cells = [_ops_cell(by.get(name), fastest) for name in names]
        lines.append([row["op"], _shape(row), row["dtype"], _number(floor), *cells])
    return ["op", "shape", "dtype", "floor ms", *names], lines


def _ops_cell(row: dict[str, Any] | None, fastest: float) -> str:
    if row is None or row["status"] != "ok" or row["total_ms"] is None:
        return "–" if row is None or row["status"] == "ok" else row["status"]
    floor = "" if row["times_floor"] is None else f" ({row['times_floor']:.2f}×)"
    text = f"{_number(row['total_ms'])}{floor}"
    return f"**{text}**" if row["total_ms"] == fastest else text


# ------------------------------------------------------------------------------------------------------- whole models


def _models(names: list[str], cases: list[dict[str, dict[str, Any]]]) -> Cells:
    """Tokens/s and peak GiB, with what they are more or less than Hugging Face's; their mean over the models below."""
    lines = []
    for by in cases:
        row = next(iter(by.values()))
        size = f"{row['batch']}×{row['seq']}" + (", checkpointing" if row["checkpointing"] else "")
        sides = [r for r in by.values() if r["side"] != "floor" and r["status"] == "ok"]
        fastest = max((r["tokens_per_s"] for r in sides), default=0)
        lines.append([row["model"], size, *(_model_cell(by.get(name), by.get("hf"), fastest) for name in names)])
    pairs = {name: [(by[name], by["hf"]) for by in cases if _both(by, name)] for name in names}
    if any(len(found) > 1 for found in pairs.values()):
        lines.append(["mean", "", *(_mean(found) if name != "floor" else "" for name, found in pairs.items())])
    return ["model", "batch×seq", *names], lines


def _both(by: dict[str, dict[str, Any]], name: str) -> bool:
    return name != "hf" and all(side in by and by[side]["status"] == "ok" for side in (name, "hf"))


def _model_cell(row: dict[str, Any] | None, plain: dict[str, Any] | None, fastest: float) -> str:
    if row is None:
        return "–"
    if row["status"] != "ok":
        return row["reason"] if len(row["reason"]) <= 30 else "failed"
    if plain is None or plain["status"] != "ok" or row["side"] in ("hf", "floor"):
        plain = None
    rate = f"{row['tokens_per_s']:,.0f}" + _change(row, plain, "tokens_per_s")
    rate = f"**{rate}**" if row["tokens_per_s"] == fastest else rate
    return rate if row["peak_gib"] is None else f"{rate}, {row['peak_gib']:.1f} GiB" + _change(row, plain, "peak_gib")


def _change(row: dict[str, Any], plain: dict[str, Any] | None, key: str) -> str:
    return "" if plain is None else f" ({_percent(row[key] / plain[key])})"


def _mean(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    def mean(key: str) -> str:
        return _percent(statistics.fmean(row[key] / plain[key] for row, plain in pairs))

    if not pairs:
        return "–"
    return mean("tokens_per_s") + (f", memory {mean('peak_gib')}" if all(row["peak_gib"] for row, _ in pairs) else "")


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")


def _sequence(names: list[str], cases: list[dict[str, dict[str, Any]]]) -> Cells:
    """Peak GiB, and the longest sequence of which a step was made."""
    lines = []
    cases = sorted(cases, key=lambda by: next(iter(by.values()))["seq"])
    for by in cases:
        row = next(iter(by.values()))
        cells = [_length_cell(by.get(name)) for name in names]
        lines.append([f"{row['seq']:,}", *cells])
    longest = [max((by[n]["seq"] for by in cases if n in by and by[n]["status"] == "ok"), default=0) for n in names]
    return ["tokens", *names], [*lines, ["longest", *(f"**{length:,}**" for length in longest)]]


def _length_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['peak_gib']:.1f} GiB" if row["status"] == "ok" and row["peak_gib"] else row["reason"] or "–"


MATRICES: dict[str, Callable[[list[str], list[dict[str, dict[str, Any]]]], Cells]] = {
    "ops": _ops,
    "model": _models,
    "sequence": _sequence,
}
LEFT = ("op", "shape", "dtype", "model", "batch×seq", "tokens")
