"""`tigon rank search`: search block graphs for a feature ranker, with trials stored in a folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from tigon.cli.kept_runs import Interrupts, circumstances
from tigon.cli.problem import Problem, device_of, needs
from tigon.rank.cli.shared import paths_of, sentences, within

NAME = "rank search"
_RUN, _DATA, _MODEL, _STEP = "Run", "Data", "Graphs", "Optimization"


# ruff: noqa: E501 (one line for each option)
# fmt: off
def search(
    data: Annotated[list[str], within(_DATA, "Impressions, a row each, in the forms of `tigon rank fit`.")],
    items: Annotated[list[str] | None, within(_DATA, "Features of items, a row each.")] = None,
    users: Annotated[list[str] | None, within(_DATA, "Features of users, a row each.")] = None,
    val: Annotated[list[str] | None, within(_DATA, "Impressions that graphs are compared on; default: a share of the data.")] = None,
    test: Annotated[list[str] | None, within(_DATA, "Impressions to measure the best graphs on; they choose nothing.")] = None,
    schema: Annotated[Path | None, within(_DATA, "A schema.json that you have edited; default: what is found in the data.")] = None,
    request: Annotated[str | None, within(_DATA, "Column of what was shown together.")] = None,
    item: Annotated[str | None, within(_DATA, "Column of items.")] = None,
    user: Annotated[str | None, within(_DATA, "Column of users.")] = None,
    time: Annotated[str | None, within(_DATA, "Column of times.")] = None,
    label: Annotated[list[str] | None, within(_DATA, "Column of 0 and 1, or a comparison, such as 'like=rating>=4'; once for each label. Default: click, label, ….")] = None,
    weight: Annotated[str | None, within(_DATA, "Column of how much a row counts; default: sample_weight.")] = None,
    val_fraction: Annotated[float, within(_DATA, "Share of the requests that is held out, without --val.", min=0.001, max=0.9)] = 0.1,
    val_split: Annotated[str | None, within(_DATA, "Which requests are held out: the last by time, or any (request); default: by time where there are times.")] = None,
    output: Annotated[Path, within(_RUN, "Folder of the study. One that is there goes on, also while other processes are at it.", "--output", "-o")] = Path("study"),
    overwrite: Annotated[bool, within(_RUN, "Delete the study that is in --output.", "--overwrite")] = False,
    trials: Annotated[int, within(_RUN, "Graphs to try in all, earlier ones among them.", min=1)] = 100,
    best: Annotated[int, within(_RUN, "How many of the best are fitted on all rows.", min=0)] = 5,
    sampler: Annotated[str, within(_RUN, "evolution, or random to compare with.")] = "evolution",
    plot: Annotated[bool, within(_RUN, "Draw the best so far against the trials, search.png.", "--plot")] = False,
    kinds: Annotated[str, within(_MODEL, "Kinds of blocks, separated by commas; default: all.")] = "mlp,fm,dot,cross,residual-cross,gate",
    most: Annotated[int, within(_MODEL, "Most blocks of a graph, up to 7.")] = 7,
    width: Annotated[int, within(_MODEL, "Width of the embeddings.", min=1)] = 16,
    norm: Annotated[str, within(_MODEL, "Of mlp blocks, batch, layer or none.")] = "batch",
    dropout: Annotated[float, within(_MODEL, "Of mlp blocks.", min=0, max=0.9)] = 0.0,
    rows: Annotated[float, within(_STEP, "Share of the requests that a trial is trained on.")] = 0.1,
    trial_epochs: Annotated[int, within(_STEP, "Passes of a trial over them.", min=1)] = 1,
    hash_rows: Annotated[int, within(_STEP, "Most codes of a field in trials; larger fields share them.", min=1)] = 10_000,
    epochs: Annotated[int, within(_STEP, "Most passes of a fit on all rows.", min=1)] = 10,
    batch_size: Annotated[int, within(_STEP, "Requests of a step.", min=1)] = 256,
    lr: Annotated[float, within(_STEP, "Peak of the learning rate of AdamW.")] = 1e-3,
    table_optimizer: Annotated[str, within(_STEP, "Of embeddings: adamw, or row-adagrad.")] = "adamw",
    table_lr: Annotated[float, within(_STEP, "Peak of the learning rate of row-adagrad.")] = 0.02,
    patience: Annotated[int, within(_STEP, "Epochs without a lower log loss before a fit on all rows stops.", min=1)] = 3,
    seed: Annotated[int, within(_STEP, "Seed of graphs, weights, orders and the split.", min=0)] = 0,
    precision: Annotated[str, within(_STEP, "Of the products: bf16, fp32, or auto: bf16 on a GPU.")] = "auto",
    device: Annotated[str, within(_RUN, "auto, cpu or cuda.")] = "auto",
) -> None:
    # fmt: on
    """Search a feature ranker's block graph by evolution, and refit the best graphs.

    The folder is an Optuna study. Run the same command again to resume; concurrent processes share the trials.
    """
    given = dict(locals())
    needs(f"tigon {NAME}", "search", "torch", "pyarrow", "safetensors", "accelerate", "optuna", "lightgbm", *(["matplotlib"] if plot else []))
    output = output.expanduser().resolve()
    from tigon.rank.cli.searching import check_room, clear, options_of

    check_room(output, trials, best, overwrite)
    place = device_of(device, NAME)
    options = options_of(given)
    for name in ("data", "items", "users", "val", "test"):
        given[name] = paths_of(given[name] or [])
    given |= {"history": [], "action": None, "objective": "impressions"}
    from tigon.cli.screen import screen
    from tigon.rank.cli.fitting import read_tables

    console = screen(stderr=True, soft_wrap=True)
    with console.status("reading the data"):
        tables = read_tables(NAME, given)
    if overwrite:
        clear(output)
    _searched(console, tables, options, output, place, plot)


def _searched(console: Any, tables: Any, options: Any, output: Path, place: Any, plot: bool) -> None:
    from tigon import rank
    from tigon.cli.checkpoint import write_json
    from tigon.cli.screen import show
    from tigon.rank.cli.searching import RESULTS, SCHEMA, Bar, near, picture, results_of, table_of

    interrupts = Interrupts()
    train, val = (near(part, place) for part in tables[:2])
    said = f"{len(train):,} requests to train on, {len(val):,} held out; labels {', '.join(train.schema.labels)}"
    with interrupts, sentences(NAME), Bar(console, options, interrupts, said) as bar:
        found = rank.search_blocks(train, val, options, folder=output, test=tables.test, device=place, after=bar)
    tables.train.schema.save(output / SCHEMA)
    if plot and found.trials:
        picture(output, found)
    if found.stopped:
        raise Problem(
            f"{NAME}: stopped after {len(found.trials):,} trials, which are kept; the same command goes on",
            code=128 + interrupts.signal,
        )
    write_json(output / RESULTS, {**results_of(found, options), **circumstances(place)})
    from tigon.cli.screen import screen

    show(screen(width=None if sys.stdout.isatty() else 10_000), table_of(found))
    if found.failed:
        print(f"{found.failed:,} trials had no finite loss")
    if found.refits:
        first = found.refits[0]
        print(f"the ranker of trial {first.number} is in {first.folder}, its blocks in {output / 'blocks.json'}; to fit it otherwise: "
              f"tigon rank fit --model lirank --schema {shlex.quote(str(output / SCHEMA))} --blocks {shlex.quote(str(output / 'blocks.json'))} --data …")
