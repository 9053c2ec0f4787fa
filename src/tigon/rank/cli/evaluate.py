"""`tigon rank eval`: evaluate a ranker on a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.checkpoint import write_json
from tigon.cli.options import argument, json_option, option
from tigon.cli.outputs import check_output_file
from tigon.cli.problem import Problem, check_choice, check_writable, find_device, needs, parse_integers
from tigon.cli.run import describe_versions
from tigon.cli.screen import draw, screen, show
from tigon.rank.cli.ranker_folder import HistoryOptions, RankerFolder, SideOptions
from tigon.rank.cli.report import (
    list_metrics,
    make_metrics_table,
    make_seeds_table,
    sentences,
    summarize_seeds,
)
from tigon.rank.cli.warm_start import find_seed_runs

NAME = "rank eval"
PICTURE, RESULTS = "eval.png", "eval.json"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(HistoryOptions, SideOptions):
    run: Path = argument("Run folder (one or several seeds) or ranker folder.")
    data: list[str] = option(..., "Labelled impressions, in the formats of `tigon rank fit`.")
    at: str = option("1,5,10", "Comma-separated cut-offs for NDCG and HR.")
    by: str | None = option(None, "Data column whose values get separate metrics.")
    objective: str | None = option(
        None, "impressions, or next-item (rank among all items); default: the run's objective."
    )
    draws: int = option(200, "Bootstrap samples for confidence intervals; 0: no intervals.", min=0)
    output: Path | None = option(None, f"Folder for {RESULTS} and {PICTURE}; default: the run folder.", "-o")
    overwrite: bool = option(False, "Replace existing results in --output.")
    json: bool = json_option()


def evaluate(options: EvaluateOptions) -> None:
    """Compute AUC, GAUC, log loss, ECE, NDCG, MRR and hit rate for a ranker, with bootstrap intervals."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors", "matplotlib")
    run, device = options.run, find_device(options.device, NAME)
    output = options.output or run
    if output.resolve() != run.resolve():
        for name in (RESULTS, PICTURE):
            check_output_file(
                f"{NAME}: --output", output / name, (Path(name).suffix,), overwrite=options.overwrite,
                inputs=options.data,
            )  # fmt: skip
    check_writable(output, f"{NAME}: --output")
    from tigon.rank.evaluation.evaluate import OBJECTIVES

    check_choice(NAME, options, objective=OBJECTIVES)
    cuts = sorted(set(parse_integers(NAME, "--at", options.at)))
    console, seeds = screen(stderr=True), find_seed_runs(run)
    if seeds and options.by is not None:
        raise Problem(f"{NAME}: --by needs a single run; choose one run, such as {next(iter(seeds.values()))}")
    found: dict[int, Any] = {}
    notes: list[str] = []
    for seed, place in (seeds or {-1: run}).items():
        with console.status(f"reading {place}"):
            folder = RankerFolder(NAME, place, device)
            table = folder.read(options.data, options, labelled=True)
        folder.check_binary(notes)
        with console.status(f"scoring {table.rows:,} rows"), sentences(NAME):
            parts = _evaluate_parts(folder, table, options, cuts)
        found[seed] = next(iter(parts.values()))
    whole = found[next(iter(found))]
    metrics = {seed: list_metrics(one) for seed, one in found.items()}
    results: dict[str, Any] = {
        "requests": whole.requests, "rows": whole.rows, "notes": [*table.notes, *dict.fromkeys(notes), *whole.notes],
    }  # fmt: skip
    if seeds:
        rows = [{"seed": seed, "metrics": one} for seed, one in metrics.items()]
        results |= {"seeds": rows, "summary": summarize_seeds(list(metrics.values()))}
        parts = {f"seed {seed}": one for seed, one in found.items()}
        shown = make_seeds_table("all", metrics, results["summary"])
    else:
        results["metrics"] = metrics[-1]
        shown = make_metrics_table(parts)
    results |= describe_versions(device)
    if options.by is not None:
        results["by"] = {options.by: {name: list_metrics(part) for name, part in list(parts.items())[1:]}}
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / RESULTS, results)
    _plot(output / PICTURE, parts)
    if options.json:
        print(json.dumps(results))
        return
    for note in results["notes"]:
        console.print(f"note: {note}")
    show(shown)
    console.print(f"{whole.requests:,} requests; {output / RESULTS} and {output / PICTURE}")


def _evaluate_parts(folder: RankerFolder, table: Any, options: EvaluateOptions, cuts: list[int]) -> dict[str, Any]:
    """Evaluations by part name; all rows first."""
    from tigon import rank
    from tigon.rank.evaluation.evaluate import split_by_column
    from tigon.rank.evaluation.score import concat_scores

    batch_options, draws = folder.make_batch_options(options), options.draws
    if (options.objective or folder.objective) == "next-item":
        if options.by is not None:
            raise Problem(f"{NAME}: --by is for --objective impressions")
        return {"all": rank.evaluate_next_items(folder.ranker, table, cuts, batch_options, draws=draws)}
    column = None if options.by is None else table.column(options.by)
    scored = concat_scores([part for part, _ in folder.score(table, batch_options)])
    parts = {"all": scored} | ({} if column is None else split_by_column(scored, column))
    return {name: rank.evaluate(part, cuts, draws=draws) for name, part in parts.items()}


def _plot(picture: Path, parts: dict[str, Any]) -> None:
    """Plot each metric over all rows with its interval; with several parts, each part's GAUC or AUC."""
    whole = next(iter(parts.values()))
    with draw(picture) as axes:
        for label, values in whole.labels.items():
            if len(parts) == 1:
                _plot_intervals(axes, values, label)
                continue
            name = "auc" if "auc" in values else "gauc"
            # GAUC is undefined if each request in the part has a single row.
            found = {part: one.labels.get(label, {}) for part, one in parts.items()}
            known = {part: metrics[name] for part, metrics in found.items() if name in metrics}
            _plot_intervals(axes, known, f"{name} of {label}")
        axes.set(ylabel="value")
        axes.tick_params(axis="x", rotation=30)
        axes.legend()


def _plot_intervals(axes: Any, values: dict[str, Any], label: str) -> None:
    metrics = list(values.values())
    lows = [one.value - one.low if one.low is not None else 0.0 for one in metrics]
    highs = [one.high - one.value if one.high is not None else 0.0 for one in metrics]
    errors = [[max(x, 0.0) if x == x else 0.0 for x in side] for side in (lows, highs)]
    heights = [one.value for one in metrics]
    axes.errorbar(list(values), heights, yerr=errors, marker="o", linestyle="", capsize=3, label=label)
