"""The study of next items as tables: full rankings beside the peers', who was still learning, and what a ranking costs.

Rows are of quality or of speed, as benchmarks/rank_sequences.py writes them, or of sittings, from
benchmarks/rank_sittings.py.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness import report

from studies.rows import columns, markdown

NAMES = {
    "ligr": "**LiGR**", "ligr, no gate": "LiGR without gates", "ligr, times and stars": "LiGR with times and stars",
    "sasrec": "SASRec, loss of Tigon", "rectools-sasrec": "RecTools SASRec", "rectools-ligr": "RecTools LiGR layers",
    "rectools-hstu": "RecTools HSTU", "recbole-sasrec": "RecBole SASRec",
}  # fmt: skip
MEASURE = "ndcg@10"

report.COLUMNS["rank-sequences"] = columns("part", "data", "seed")
report.COLUMNS["rank-sittings"] = columns("part", "data", "seed")

Rows = list[dict[str, Any]]


def grouped(rows: Rows) -> dict[str, dict[str, Rows]]:
    """Fits that differ by their seed alone: by data, then by method in the order of NAMES."""
    found: dict[str, dict[str, Rows]] = {}
    for row in rows:
        if row["part"] == "quality":
            found.setdefault(row["data"], {}).setdefault(row["method"], []).append(row)
    order = [*NAMES]
    return {data: {name: found[data][name] for name in sorted(found[data], key=order.index)} for data in sorted(found)}


def cut(row: dict[str, Any]) -> bool:
    """Whether time ended the fit, which might have come further."""
    setting = row["setting"]
    return setting.get("ended", "seconds" if row["seconds"] >= setting["seconds"] else "") == "seconds"


def values(rows: Rows, measure: str = MEASURE) -> list[float]:
    return [row["measures"][measure] for row in rows]


def spread(rows: Rows, measure: str) -> str:
    found = values(rows, measure)
    return f"{fmean(found):.4f}" + (f" ± {deviation(found):.4f}" if len(found) > 1 else "")


def deviation(found: list[float]) -> float:
    """Over the seeds; 0 of one."""
    return stdev(found) if len(found) > 1 else 0.0


def quality(rows: Rows) -> str:
    """A line for each method on each set; "" without fits."""
    lines = []
    for data, by in grouped(rows).items():
        for name, some in by.items():
            epochs = sorted({row["setting"]["epochs_run"] for row in some})
            lines.append([
                data, NAMES[name], str(len(some)), spread(some, "hr@10"), spread(some, MEASURE),
                spread(some, f"{MEASURE}_new"), "–".join(map(str, (*epochs[:1], *epochs[1:][-1:]))),
                f"{fmean(row['seconds'] for row in some):.0f}", str(sum(map(cut, some)) or "–"),
            ])  # fmt: skip
    header = ["data", "by", "seeds", "HR@10", "NDCG@10", "NDCG@10, new items", "epochs", "seconds a fit", "cut"]
    return markdown(header, lines, 2) if lines else ""


def beside(rows: Rows, measure: str) -> str:
    """Where LiGR is above and below the best peer by more than both spreads; "" without both."""
    said: dict[str, list[str]] = {"above": [], "level with": [], "below": []}
    for data, by in grouped(rows).items():
        peers = {name: some for name, some in by.items() if not name.startswith("ligr")}
        if "ligr" not in by or not peers:
            continue
        best = max(peers, key=lambda name: fmean(values(peers[name], measure)))
        ours, theirs = (values(of, measure) for of in (by["ligr"], peers[best]))
        away, apart = fmean(ours) - fmean(theirs), max(deviation(ours), deviation(theirs))
        where = "level with" if abs(away) <= apart else "above" if away > 0 else "below"
        said[where].append(f"{data} ({NAMES[best]}, {away:+.4f})".replace("-0", "−0"))
    return "; ".join(f"{where} it on {', '.join(sets)}" for where, sets in said.items() if sets)


def verdict(rows: Rows) -> str:
    """LiGR beside the best peer by three measures, and which peers were still learning."""
    if not (found := beside(rows, MEASURE)):
        return ""
    text = (
        "Against the best of the others, and the larger of both spreads over seeds, LiGR is by NDCG@10 "
        f"{found}. By NDCG@10 among items that are new to the user it is {beside(rows, f'{MEASURE}_new')}; "
        f"by HR@10 {beside(rows, 'hr@10')}."
    )
    learning: dict[str, list[str]] = {}
    for data, by in grouped(rows).items():
        for name, some in by.items():
            if not name.startswith("ligr") and any(map(cut, some)):
                learning.setdefault(name, []).append(data)
    if learning:
        alike: dict[str, list[str]] = {}
        for name, sets in learning.items():
            alike.setdefault(", ".join(sets), []).append(NAMES[name])
        of = "; ".join(f"{' and '.join(names)} on {sets}" for sets, names in alike.items())
        text += f" **Time ended fits of {of}**, which might have come further."
    return text


def speed(rows: Rows) -> str:
    """A line for each pass and step: as called, in a CUDA graph, and how far it is from fp32; "" without any."""
    lines = []
    for row in rows:
        if row["part"] == "speed":
            of = row["measures"]
            lines.append([
                row["data"], row["method"].replace("ligr", "LiGR"), f"{of['ms']:.3g}",
                f"{of['graph_ms']:.3g}" if "graph_ms" in of else "–",
                f"{of['peak_gib']:.1f}" if "peak_gib" in of else "–", f"{of['error']:.3f}" if "error" in of else "–",
            ])  # fmt: skip
    header = ["of", "by", "ms as called", "ms in a graph", "peak GiB", "error of the scores"]
    return markdown(header, lines, 2) if lines else ""


SIDES = {
    "ligr": "**LiGR**", "by itself": "no set-wise layer",
    "all layers set-wise": "all layers set-wise", "no gate": "no gates", "no actions": "no action tokens",
    "no times": "no times",
}  # fmt: skip
OF_LISTS = {"ndcg@10": "NDCG@10", "gauc": "GAUC", "auc": "AUC", "log_loss": "log loss", "diversity@5": "diversity@5"}


def sittings(rows: Rows) -> str:
    """A line for each side of rank_sittings.py: what LiGR has without one of its parts."""
    by = {side: [row for row in rows if row["method"] == side] for side in SIDES}
    lines = [[SIDES[side], *(spread(some, of) for of in OF_LISTS)] for side, some in by.items() if some]
    return markdown(["", *OF_LISTS.values()], lines, 1)


PARTS = {"quality": quality, "verdict": verdict, "speed": speed, "sittings": sittings}


def page(folder: Path, what: str) -> str:
    """Markdown of one part of the result files in a folder, or their sources."""
    kind = "rank-sittings" if what.startswith("sittings") else "rank-sequences"
    parts = []
    for path in sorted(folder.glob(f"*-{kind}.json")):
        content = report.load(path)
        parts.append(report.source(content) if what.endswith("source") else PARTS[what](content["rows"]))
    return "\n\n".join(filter(None, parts)) or "No run has been recorded yet."
