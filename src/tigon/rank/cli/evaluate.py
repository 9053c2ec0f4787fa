"""`tigon rank eval`: evaluate a ranker on a table."""

from __future__ import annotations

import json as encoder
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.outputs import check_output_file
from tigon.cli.problem import Problem, check_writable, device_of, integers, needs
from tigon.rank.cli.shared import metrics_table, sentences, spread

NAME = "rank eval"
PICTURE, RESULTS = "eval.png", "eval.json"


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run, of runs of several seeds, or of a ranker.")],
    data: Annotated[list[str], typer.Option(help="Impressions with labels, in the forms of `tigon rank fit`.")],
    history: Annotated[list[str] | None, typer.Option(help="Events; default: those of the run.")] = None,
    items: Annotated[list[str] | None, typer.Option(help="Features of items; default: those of the run.")] = None,
    users: Annotated[list[str] | None, typer.Option(help="Features of users; default: those of the run.")] = None,
    at: Annotated[str, typer.Option(help="Cut-offs of NDCG and HR, separated by commas.")] = "1,5,10",
    by: Annotated[str | None, typer.Option(help="Column of the data: metrics of each of its values.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="impressions, or next-item: the place among all items; default: the run's.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Bootstrap draws for the intervals; 0: none.", min=0)] = 200,
    batch_size: Annotated[int, typer.Option(help="Requests of a batch.", min=1)] = 256,
    history_max: Annotated[
        int | None, typer.Option(help="Newest events of a request that are read; default: the run's.", min=0)
    ] = None,
    precision: Annotated[str, typer.Option(help="Of the products: bf16, fp32, or auto: bf16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"Folder for {RESULTS} and {PICTURE}; default: the run's.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results that are in --output.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute AUC, GAUC, log loss, ECE, NDCG, MRR and hit rate for a ranker, with bootstrap intervals."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors", "matplotlib")
    cuts = sorted(set(integers(NAME, "--at", at)))
    place = device_of(device, NAME)
    if output is not None and output.resolve() != run.resolve():
        for name in (RESULTS, PICTURE):
            check_output_file(
                f"{NAME}: --output", output / name, (Path(name).suffix,), overwrite=overwrite, inputs=data
            )
    output = run if output is None else output
    check_writable(output, f"{NAME}: --output")
    from tigon.cli.checkpoint import write_json
    from tigon.cli.kept_runs import circumstances
    from tigon.cli.screen import screen, show
    from tigon.rank.cli.opened import Opened
    from tigon.rank.evaluation.evaluate import OBJECTIVES

    if objective is not None and objective not in OBJECTIVES:
        raise Problem(f"{NAME}: --objective must be one of {', '.join(OBJECTIVES)}, got {objective}")
    console = screen(stderr=True, soft_wrap=True)
    from tigon.rank.cli.seeds import evaluations, folders_of, spread_table

    seeds = folders_of(run)
    if seeds and by is not None:
        raise Problem(f"{NAME}: --by is for one run; name one, such as {next(iter(seeds.values()))}")
    found: dict[int, Any] = {}
    left_out: list[str] = []
    for seed, folder in (seeds or {-1: run}).items():
        with console.status(f"reading {folder}"):
            opened = Opened(NAME, folder, place)
            table = opened.read(data, history or [], items or [], users or [], labelled=True)
        opened.check_binary(left_out)
        batch_options = parse_batch_options(NAME, opened, batch_size, history_max, precision)
        with console.status(f"scoring {table.rows:,} rows"), sentences(NAME):
            parts = _measured(opened, table, batch_options, objective or opened.objective, cuts, by, draws)
        found[seed] = next(iter(parts.values()))
    whole = found[next(iter(found))]
    results = {
        "requests": whole.requests, "rows": whole.rows, "notes": [*table.notes, *dict.fromkeys(left_out), *whole.notes],
        **(evaluations(found) if seeds else {"metrics": spread(whole)}), **circumstances(place),
    }  # fmt: skip
    if seeds:
        parts = {f"seed {seed}": one for seed, one in found.items()}
    if by is not None:
        results["by"] = {by: {name: spread(part) for name, part in list(parts.items())[1:]}}
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / RESULTS, results)
    plot(output / PICTURE, parts)
    if json:
        print(encoder.dumps(results))
        return
    for note in results["notes"]:
        console.print(f"note: {note}")
    if seeds:
        of_seeds = {row["seed"]: row["metrics"] for row in results["seeds"]}
        shown = spread_table("all", of_seeds, results["summary"])
    else:
        shown = metrics_table(parts)
    show(screen(width=None if sys.stdout.isatty() else 10_000), shown)
    console.print(f"{whole.requests:,} requests; {output / RESULTS} and {output / PICTURE}")


def parse_batch_options(command: str, opened: Any, batch_size: int, history_max: int | None, precision: str) -> Any:
    """`rank.BatchOptions` from command options. The history length defaults to the training run's."""
    from tigon.rank.data.batches import PRECISIONS, BatchOptions

    if precision not in PRECISIONS:
        raise Problem(f"{command}: --precision must be one of {', '.join(PRECISIONS)}, got {precision}")
    longest = opened.options.get("history_max") if history_max is None else history_max
    return BatchOptions(batch_size, None, longest, precision)


def _measured(
    opened: Any, table: Any, batch_options: Any, objective: str, cuts: list[int], by: str | None, draws: int
) -> dict[str, Any]:
    """Evaluations by part name; all rows first."""
    from tigon import rank
    from tigon.rank.evaluation.evaluate import split_by_column
    from tigon.rank.evaluation.score import concat_scores

    if objective == "next-item":
        if by is not None:
            raise Problem(f"{NAME}: --by is for --objective impressions")
        return {"all": rank.evaluate_next_items(opened.ranker, table, cuts, batch_options, draws=draws)}
    column = None if by is None else table.column(by)
    scored = concat_scores([part for part, _ in opened.scored(table, batch_options)])
    parts = {"all": scored} | ({} if column is None else split_by_column(scored, column))
    return {name: rank.evaluate(part, cuts, draws=draws) for name, part in parts.items()}


def plot(picture: Path, parts: dict[str, Any]) -> None:
    """Plot each metric over all rows with its interval; with several parts, each part's GAUC or AUC."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    whole = next(iter(parts.values()))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if len(parts) == 1:
        for label, values in whole.labels.items():
            _bars(axes, list(values), list(values.values()), label)
        axes.set(ylabel="value")
    else:
        for label, values in whole.labels.items():
            name = "auc" if "auc" in values else "gauc"
            # GAUC is undefined if each request in the part has a single row.
            there = {part: of.labels[label][name] for part, of in parts.items() if name in of.labels.get(label, {})}
            _bars(axes, list(there), list(there.values()), f"{name} of {label}")
        axes.set(ylabel="value")
    axes.tick_params(axis="x", rotation=30)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _bars(axes: Any, names: list[str], values: list[Any], label: str) -> None:
    lows = [one.value - one.low if one.low is not None else 0.0 for one in values]
    highs = [one.high - one.value if one.high is not None else 0.0 for one in values]
    errors = [[max(x, 0.0) if x == x else 0.0 for x in side] for side in (lows, highs)]
    axes.errorbar(names, [one.value for one in values], yerr=errors, marker="o", linestyle="", capsize=3, label=label)
