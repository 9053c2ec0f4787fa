"""Results of `tigon bench` with one line per case and one column per implementation, as Markdown and as cells.

A value is bold if it leads its line by more than NOISE, and by more than the two measurements scatter. Speed and memory
count separately, so that a line may have two bold values, one or none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tigon.bench.columns import format_share, format_size, model_of, number, shape_of
from tigon.bench.report import case_of

Cells = tuple[list[str], list[list[str]]]
By = dict[str, dict[str, Any]]  # the rows of one case by implementation or side

NOISE = 0.02
CAPTION = "Bold: best in its row by more than 2 % and by more than the measurement noise."


def to_matrix(content: dict[str, Any], order: Sequence[str] = ()) -> str:
    """Markdown, with numbers aligned right and the names of cases aligned left."""
    return to_markdown(matrix(content, order))


def to_markdown(cells: Cells) -> str:
    header, rows = cells
    align = [":--" if name in LEFT else "--:" for name in header]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, align, *rows)) + "\n"


def matrix(content: dict[str, Any], order: Sequence[str] = ()) -> Cells:
    """Header and lines of a result of one of the kinds in MATRICES. The leading value of a line is between asterisks.

    Args:
        order: implementations that come first; the others follow as they appear.
    """
    by = "implementation" if content["kind"] == "ops" else "side"
    present = list(dict.fromkeys(row[by] for row in content["rows"]))
    names = [n for n in order if n in present] + [n for n in present if n not in order]
    return MATRICES[content["kind"]](names, cases_of(content["rows"], by))


def cases_of(rows: Sequence[dict[str, Any]], by: str) -> list[By]:
    """The rows grouped by case, each case's rows by implementation or side. by: "implementation" or "side"."""
    cases: dict[tuple[Any, ...], By] = {}
    for row in rows:
        cases.setdefault(case_of(row), {})[row[by]] = row
    return list(cases.values())


# -------------------------------------------------------------------------------------------------------------- noise


def leader(values: Mapping[str, float | None], scatter: Mapping[str, float] | None = None) -> str | None:
    """The name with the lowest value, beyond noise; None if another value is as good, or there is no other.

    Args:
        scatter: the scatter of each name's measurements, as a share of the value.
    """
    known = sorted((value, name) for name, value in values.items() if value is not None)
    if len(known) < 2:
        return None
    (best, name), *others = known
    scatter = scatter or {}
    for value, other in others:
        if value <= best * (1 + max(NOISE, scatter.get(name, 0.0) + scatter.get(other, 0.0))):
            return None
    return name


def scatter_of(row: dict[str, Any]) -> float:
    """Half of the range of the rounds, or half of the distance of the steps' quartiles, as a share of the median."""
    if row.get("total_range_ms"):
        low, high = row["total_range_ms"]
        return float((high - low) / 2 / row["total_ms"])
    if len(row.get("steps_ms", ())) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(row["steps_ms"])
    return float((high - low) / 2 / middle)


def leaders(by: By) -> tuple[str | None, str | None]:
    """The names that lead in time and in memory, among those with right results."""
    right = {name: row for name, row in by.items() if row["status"] == "ok" and name != "floor"}
    scatter = {name: scatter_of(row) for name, row in right.items()}
    memory = "peak_gib" if any("peak_gib" in row for row in right.values()) else "peak_mib"
    return (
        leader({name: _time(row) for name, row in right.items()}, scatter),
        leader({name: row[memory] for name, row in right.items()}),
    )


def _time(row: dict[str, Any]) -> float | None:
    if "tokens_per_s" in row:
        return 1 / row["tokens_per_s"] if row["tokens_per_s"] else None
    return row["total_ms"]  # type: ignore[no-any-return]


def bold(text: str, really: bool) -> str:
    return f"**{text}**" if really else text


# ---------------------------------------------------------------------------------------------------------- operators


def _ops(names: list[str], cases: list[By]) -> Cells:
    """Milliseconds (× floor)."""
    lines = []
    for by in cases:
        row = next(iter(by.values()))
        floor = next((r["floor_ms"] for r in by.values() if r["floor_ms"] is not None), None)
        fastest, _ = leaders(by)
        cells = [ops_cell(by.get(name), name == fastest) for name in names]
        lines.append([row["op"], shape_of(row), row["dtype"], number(floor), *cells])
    return ["op", "shape", "dtype", "floor ms", *names], lines


def ops_cell(row: dict[str, Any] | None, leads: bool) -> str:
    """Milliseconds (× floor), with the mark "wrong" where the result is; or why there is no time."""
    if row is None:
        return "–"
    if row["total_ms"] is None:
        return row["reason"] if row["reason"] == "out of memory" else str(row["status"]).replace("ok", "–")
    floor = "" if row["times_floor"] is None else f" ({row['times_floor']:.2f}×)"
    return bold(f"{number(row['total_ms'])}{floor}", leads) + ("" if row["status"] == "ok" else f", {row['status']}")


# ------------------------------------------------------------------------------------------------------- whole models


def _models(names: list[str], cases: list[By]) -> Cells:
    """Tokens/s and peak GiB, with the difference to Hugging Face's, and the means below.

    The share of masked labels has a column where it differs between the cases.
    """
    lines = [[*_model_and_size(next(iter(by.values()))), *_model_cells(names, by)] for by in cases]
    header, lines = ["model", "batch×seq", *names], [*lines, *_means(names, cases)]
    shares = [format_share(next(iter(by.values()))["masked"]) for by in cases]
    if len(set(shares)) == 1:
        return header, lines
    shares += [""] * (len(lines) - len(shares))
    return (
        [*header[:2], "masked", *header[2:]],
        [[*line[:2], share, *line[2:]] for line, share in zip(lines, shares, strict=True)],
    )


def _model_and_size(row: dict[str, Any]) -> list[str]:
    return [model_of(row), format_size(row)]


def _model_cells(names: list[str], by: By) -> list[str]:
    fastest, smallest = leaders(by)
    return [_model_cell(by.get(name), by.get("hf"), name == fastest, name == smallest) for name in names]


def _model_cell(row: dict[str, Any] | None, plain: dict[str, Any] | None, fastest: bool, smallest: bool) -> str:
    if row is None:
        return "–"
    if row["status"] != "ok":
        return row["reason"] if len(row["reason"]) <= 30 else "failed"
    if plain is None or plain["status"] != "ok" or row["side"] in ("hf", "floor"):
        plain = None
    rate = bold(f"{row['tokens_per_s']:,.0f}" + _change(row, plain, "tokens_per_s"), fastest)
    if row["peak_gib"] is None:
        return rate
    return f"{rate}, " + bold(f"{row['peak_gib']:.1f} GiB" + _change(row, plain, "peak_gib"), smallest)


def _change(row: dict[str, Any], plain: dict[str, Any] | None, key: str) -> str:
    return "" if plain is None else f" ({_percent(row[key] / plain[key])})"


def _means(names: list[str], cases: list[By]) -> list[list[str]]:
    """A line of means for each set of models that some side has run, over all sides that have run the whole set.

    Means over different models cannot be compared. So a side that ran two of five models has its mean beside the other
    sides' means over the same two.
    """
    plain = [by for by in cases if "hf" in by and by["hf"]["status"] == "ok"]
    sides = [name for name in names if name not in ("hf", "floor")]
    ran = {name: [n for n, by in enumerate(plain) if name in by and by[name]["status"] == "ok"] for name in sides}
    lines = []
    for chosen in sorted({tuple(found) for found in ran.values() if len(found) > 1}, key=len, reverse=True):
        members = [plain[n] for n in chosen]
        cells = [
            _mean([(by[n], by["hf"]) for by in members]) if set(chosen) <= set(ran.get(n, ())) else "" for n in names
        ]
        left = [by for by in cases if by not in members]
        named, word = (left, "all but ") if len(left) < len(members) else (members, "")
        which = " and ".join(" ".join(_model_and_size(next(iter(by.values())))) for by in named)
        lines.append([f"mean of {len(chosen)}", word + which if which else "", *cells])
    return lines


def _mean(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The mean of each, and the range of the speed where the lines above are more than two."""

    def ratios(key: str) -> list[float]:
        return [row[key] / plain[key] for row, plain in pairs]

    speeds = ratios("tokens_per_s")
    text = _percent(statistics.fmean(speeds))
    if len(speeds) > 2:
        text += f" ({_percent(min(speeds)).removesuffix(' %')} to {_percent(max(speeds))})"
    if all(row["peak_gib"] for row, _ in pairs):
        text += f", memory {_percent(statistics.fmean(ratios('peak_gib')))}"
    return text


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")


def _sequence(names: list[str], cases: list[By]) -> Cells:
    """Tokens/s and peak GiB over the length, and the longest sequence that a step succeeded with."""
    cases = sorted(cases, key=lambda by: next(iter(by.values()))["seq"])
    lines = [[f"{next(iter(by.values()))['seq']:,}", *_model_cells(names, by)] for by in cases]
    longest = [max((by[n]["seq"] for by in cases if n in by and by[n]["status"] == "ok"), default=0) for n in names]
    return ["tokens", *names], [*lines, ["longest", *(f"{length:,}" for length in longest)]]


MATRICES: dict[str, Callable[[list[str], list[By]], Cells]] = {
    "ops": _ops,
    "model": _models,
    "sequence": _sequence,
}
LEFT = ("op", "shape", "dtype", "options", "by", "device: by", "model", "batch×seq", "tokens")
