"""One search of `rank.search_blocks` as the study runs it, the hand-written Residual DCN beside it, and their tables.

Rows are of trials, the best of a search as its trials are trained; refit, the best of those that were fitted on all
rows; within, the same among graphs of no more FLOPs than the hand-written model; and hand, that model. Measures are of
the test, which chooses nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from studies.clicks.data import TEST, TRAIN, VALIDATION, Rows, read
from studies.clicks.page import spread
from studies.rows import Row, columns, markdown
from tigon import rank
from tigon.bench import report
from tigon.rank.models.lirank.blocks import count_flops
from tigon.rank.search.fidelity import ReducedData, reduce_vocabularies
from tigon.rank.search.measures import log_loss, measure

__all__ = ["HAND", "PARTS", "SAMPLERS", "Setting", "hand", "page", "searched", "table"]
SAMPLERS = ("evolution", "random")
HAND = "residual-dcn"
# More of the best graphs within the hand-written model's FLOPs are fitted until there are so many.
WITHIN = 3

report.COLUMNS["rank-search"] = columns("part", "data", "seed")


class Setting(NamedTuple):
    """What all searches of a run share.

    Attributes:
        trials, best: of a search. rows: the share of the rows of a trial. hash_rows: of its tables.
        width: of embeddings. dropout: of MLPs. batch_size: rows. epochs: of a refit. lr: peak of the rate.
        layers, rank, mlp: of the hand-written model.
    """

    trials: int
    best: int
    rows: float
    hash_rows: int
    width: int
    dropout: float
    batch_size: int
    epochs: int
    lr: float
    layers: int
    rank: int
    mlp: tuple[int, ...]

    def options(self, sampler: Any, seed: int) -> rank.SearchOptions:
        fit = rank.FitOptions(
            lr=self.lr, table_optimizer="row-adagrad", table_lr=0.05, epochs=self.epochs, batch_size=self.batch_size,
            metric="log_loss", precision="fp32", seed=seed,
        )  # fmt: skip
        return rank.SearchOptions(
            self.trials, sampler, rows=self.rows, hash_rows=self.hash_rows, best=self.best, fit=fit,
            model={"width": self.width, "dropout": self.dropout}, seed=seed,
        )  # fmt: skip


def searched(
    folder: Path, data: str, sampler: str, seed: int, setting: Setting, study: Path, device: torch.device,
    ends: float = float("inf"),
) -> list[Row]:  # fmt: skip
    """The rows of one search; [] where the time was up. ends: of `time.time`; a later call goes on."""
    tables, began = [Rows(read(folder, data), part, device) for part in (TRAIN, VALIDATION, TEST)], time.perf_counter()
    train, validation, test = tables
    options = setting.options(sampler, seed)

    def late(_: rank.SearchProgress) -> bool:
        return time.time() > ends

    found = rank.search_blocks(train, validation, options, folder=study, test=test, device=device, after=late)
    if found.stopped:
        return []
    best = found.best
    about = {"trials": len(found.trials), "rows": setting.rows, "failed": found.failed}
    so_far = list(itertools.accumulate((one.loss for one in found.trials), min))
    rows = [
        Row("trials", data, seed, sampler, {**about, "flops": best.flops, "graph": said(best.graph), "tried": so_far},
            {"log_loss": as_tried(best.graph, tables, setting, options, device)}, {"log_loss": best.loss},
            time.perf_counter() - began),
    ]  # fmt: skip
    refits = [as_row("refit", data, seed, sampler, one) for one in found.refits]
    most = count_flops(hand_written(train, setting))
    known = {one.number for one in found.refits}
    inside = [row for row in refits if row.setting["flops"] <= most]
    for one in sorted(found.trials, key=lambda one: (one.loss, one.number)):
        if len(inside) >= WITHIN or time.time() > ends:
            break
        if one.flops <= most and one.number not in known:
            torch.manual_seed(seed)
            ranker = rank.LiRank(
                train.schema, rank.LiRankConfig(setting.width, dropout=setting.dropout, blocks=one.graph)
            )
            inside.append(fitted("within", data, seed, sampler, ranker, tables, options, device, said(one.graph)))
    best_of: Callable[[list[Row]], Row] = lambda rows: min(rows, key=lambda row: row.validation["log_loss"])  # noqa: E731
    rows.append(best_of(refits))
    if inside:
        rows.append(dataclasses.replace(best_of(inside), part="within"))
    return rows


def as_tried(
    graph: Any, tables: list[Rows], setting: Setting, options: rank.SearchOptions, device: torch.device
) -> float:
    """The test's log loss of a graph that is trained as in its trial, whose steps it does again."""
    small = ReducedData(tables[0], options.rows, options.hash_rows)
    torch.manual_seed(options.fit.seed)
    ranker = rank.LiRank(small.schema, rank.LiRankConfig(blocks=graph, **options.model)).to(device)
    fit = dataclasses.replace(options.fit, epochs=options.epochs)
    rank.fit(ranker, small, None, fit)
    return log_loss(ranker, reduce_vocabularies(tables[2], options.hash_rows), fit)


def hand_written(train: Rows, setting: Setting) -> rank.LiRank:
    return rank.LiRank(
        train.schema,
        rank.LiRankConfig(setting.width, "residual", setting.layers, setting.rank, setting.mlp, False, setting.dropout)
    )  # fmt: skip


def hand(folder: Path, data: str, seed: int, setting: Setting, device: torch.device) -> list[Row]:
    """The hand-written Residual DCN, fitted as the refits are."""
    tables = [Rows(read(folder, data), part, device) for part in (TRAIN, VALIDATION, TEST)]
    torch.manual_seed(seed)
    about = f"{setting.layers} layers of rank {setting.rank}, mlp {list(setting.mlp)}"
    options = setting.options("evolution", seed)
    return [fitted("hand", data, seed, HAND, hand_written(tables[0], setting), tables, options, device, about)]


def fitted(
    part: str, data: str, seed: int, method: str, ranker: rank.LiRank, tables: list[Rows],
    options: rank.SearchOptions, device: torch.device, about: str,
) -> Row:  # fmt: skip
    began = time.perf_counter()
    ranker.to(device)
    rank.fit(ranker, tables[0], tables[1], options.fit)
    validation, test = (measure(ranker, table, options.fit) for table in tables[1:])
    parameters = sum(p.numel() for p in ranker.parameters())
    setting = {"flops": count_flops(ranker), "parameters": parameters, "graph": about}
    return Row(part, data, seed, method, setting, test, validation, time.perf_counter() - began)


def as_row(part: str, data: str, seed: int, method: str, one: rank.RefitResult) -> Row:
    setting = {"flops": one.flops, "parameters": one.parameters, "graph": said(one.graph)}
    return Row(part, data, seed, method, setting, one.test, one.validation, one.seconds)


def said(graph: Any) -> str:
    return "; ".join(f"{n}: {block}" for n, block in enumerate(graph, 1))


# ------------------------------------------------------------------------------------------------------------ the page


def by_seed(rows: list[dict[str, Any]], part: str, data: str, method: str) -> dict[int, dict[str, Any]]:
    return {row["seed"]: row for row in rows if (row["part"], row["data"], row["method"]) == (part, data, method)}


def p_paired(away: list[float]) -> float:
    """Two-sided, of a mean difference of pairs: the share of all ways to turn signs whose mean is as far from 0."""
    seen = abs(fmean(away))
    found = [
        abs(fmean(s * x for s, x in zip(signs, away, strict=True))) >= seen - 1e-15
        for signs in itertools.product((1, -1), repeat=len(away))
    ]
    return sum(found) / len(found)


def compared(rows: list[dict[str, Any]], first: tuple[str, str], second: tuple[str, str], of: str) -> list[list[str]]:
    """A line for each set, and one for all: both losses, the mean of their differences seed by seed, p, and who won.

    first, second: part and method. of: "measures", the test, or "validation".
    """
    lines, every = [], []
    for data in dict.fromkeys(row["data"] for row in rows):
        a, b = (by_seed(rows, part, data, method) for part, method in (first, second))
        seeds = sorted(set(a) & set(b))
        if not seeds:
            continue
        away = [a[seed][of]["log_loss"] - b[seed][of]["log_loss"] for seed in seeds]
        # In shares, so that sets may be taken together.
        every += [x / b[seed][of]["log_loss"] for x, seed in zip(away, seeds, strict=True)]
        cells = [fmean(one[seed][of]["log_loss"] for seed in seeds) for one in (a, b)]
        lines.append([
            data, str(len(seeds)), *(f"{x:.4f}" for x in cells), f"{1e4 * fmean(away):+.1f}".replace("-", "−"),
            f"{sum(x < 0 for x in away)} of {len(away)}", f"{p_paired(away):.3f}" if len(away) > 1 else "–",
        ])  # fmt: skip
    if len(lines) > 1:
        lines.append([
            "all, %", str(len(every)), "", "", f"{100 * fmean(every):+.2f}".replace("-", "−"),
            f"{sum(x < 0 for x in every)} of {len(every)}", f"{p_paired(every):.3f}",
        ])  # fmt: skip
    return lines


def _versus(of: str, part: str, other: tuple[str, str] | None = None) -> Callable[[list[dict[str, Any]]], str]:
    second = other or (part, "random")

    def made(rows: list[dict[str, Any]]) -> str:
        header = ["data", "seeds", "evolution", second[1], "difference, 10⁻⁴", "lower", "p"]
        lines = compared(rows, (part, "evolution"), second, of)
        return markdown(header, lines, 1) if lines else ""

    return made


def flops_of(rows: list[dict[str, Any]]) -> str:
    """What was fitted on all rows: log loss, AUC and FLOPs of the test."""
    lines = []
    for data in dict.fromkeys(row["data"] for row in rows):
        for part, method in (("hand", HAND), *itertools.product(("refit", "within"), SAMPLERS)):
            some = list(by_seed(rows, part, data, method).values())
            if some:
                lines.append([
                    data, method, {"within": "at most its FLOPs"}.get(part, ""), str(len(some)),
                    spread(some, "log_loss"), spread(some, "auc"),
                    f"{fmean(row['setting']['flops'] for row in some) / 1e6:.2f} M",
                ])  # fmt: skip
    return markdown(["data", "by", "", "seeds", "log loss", "AUC", "FLOPs a row"], lines, 3) if lines else ""


PARTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "objective": _versus("validation", "trials"), "trials": _versus("measures", "trials"),
    "refit": _versus("measures", "refit"), "hand": _versus("measures", "within", ("hand", HAND)), "fitted": flops_of,
}  # fmt: skip


def table(part: str, rows: list[dict[str, Any]]) -> str:
    """Markdown of a part; "" without rows of it."""
    return PARTS[part](rows)


def page(folder: Path, what: str) -> str:
    """Markdown of one part of the result files in a folder, or their sources."""
    parts = []
    for path in sorted(folder.glob("*-rank-search.json")):
        content = report.load(path)
        parts.append(report.source(content) if what == "source" else table(what, content["rows"]))
    return "\n\n".join(filter(None, parts)) or "No run has been recorded yet."
