"""`tigon rank interactions`: rank feature interactions and write a schema with crosses."""

from __future__ import annotations

import json as encoder
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.outputs import check_output_file
from tigon.cli.problem import Problem, device_of, needs
from tigon.cli.progress import working
from tigon.rank.cli.shared import sentences

NAME = "rank interactions"
METHODS = ("persistence", "nid")
OF_RUN = ("run.json", "results.json", "schema.json", "config.json", "model")


def interactions(
    run: Annotated[Path, typer.Argument(help="Folder of a run of --model lirank, or of a ranker.")],
    data: Annotated[
        list[str] | None, typer.Option(help="Rows that say how far the fields vary; default: the data of the run.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="A label of the run; default: all.")] = None,
    top: Annotated[int, typer.Option(help="How many sets are shown.", min=1)] = 20,
    pairs: Annotated[bool, typer.Option("--pairs", help="All pairs, as --order 2.")] = False,
    order: Annotated[
        int | None,
        typer.Option(help="How many features sets have; default: any number; with --as-crosses pairs.", min=2),
    ] = None,
    method: Annotated[str, typer.Option(help="persistence or nid.")] = "persistence",
    as_crosses: Annotated[
        Path | None,
        typer.Option(help="Where to write the schema with crosses of the strongest sets, for the next fit."),
    ] = None,
    crosses: Annotated[int, typer.Option(help="Of --as-crosses: how many.", min=1)] = 5,
    hash_rows: Annotated[int, typer.Option(help="Of --as-crosses: how many codes each has.", min=2)] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the rows that are sampled.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find interacting fields from the weights of a run's MLP."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    order = _order(pairs or (as_crosses is not None and order is None), order)
    if method not in METHODS:
        raise Problem(f"{NAME}: --method must be one of {', '.join(METHODS)}, got {method}")
    if as_crosses is not None:
        inputs: list[str | Path] = [*(run / name for name in OF_RUN), *(data or [])]
        check_output_file(f"{NAME}: --as-crosses", as_crosses, (".json",), overwrite=overwrite, inputs=inputs)
    place = device_of(device, NAME)
    from tigon import rank
    from tigon.cli.screen import screen

    console = screen(stderr=True, soft_wrap=True)
    with sentences(NAME):
        model, schema = _read_run(console, run, data, label, seed, place)
        found = rank.find_interactions(model, order=order, method=method)  # type: ignore[arg-type]
        made = {} if as_crosses is None else found.crosses(crosses, hash_rows=hash_rows, schema=schema)
        if as_crosses is not None and not made:
            raise Problem(f"{NAME}: --as-crosses: no set is of ids and numbers of an impression, of which crosses are")
        if as_crosses is not None:
            as_crosses.parent.mkdir(parents=True, exist_ok=True)
            schema.replace(made).save(as_crosses)
    if json:
        print(encoder.dumps(_to_dict(found, model, top, method, list(made)), ensure_ascii=False))
        return
    _show(console, found, model, top)
    if as_crosses is not None:
        print(
            f"the schema with {', '.join(made)} is in {as_crosses}; tigon rank fit --schema {as_crosses} fits with it"
        )


def _order(pairs: bool, order: int | None) -> int | None:
    if pairs and order not in (None, 2):
        raise Problem(f"{NAME}: --pairs is --order 2, got --order {order} besides")
    return 2 if pairs else order


def _read_run(console: Any, run: Path, data: list[str] | None, label: str | None, seed: int, place: Any) -> Any:
    """Load a run's MLP and schema."""
    from tigon import rank
    from tigon.rank.cli.opened import Opened

    with working(console, f"reading {run}"):
        opened = Opened(NAME, run, place)
        if not isinstance(opened.ranker, rank.LiRank):
            kind = "a language model" if opened.by_prompt else f"a {type(opened.ranker).__name__}"
            raise Problem(f"{NAME}: is for --model lirank, whose MLP reads the fields of a row, got {kind}")
        files = data or opened.options.get("data")
        if not files:
            raise Problem(f"{NAME}: --data must name rows that say how far the fields of {run} vary")
        table = opened.read(files, [], [], [], labelled=False)
        return rank.extract_mlp(opened.ranker, table, label, seed=seed), opened.ranker.schema


def _to_dict(found: Any, model: Any, top: int, method: str, crosses: list[str]) -> dict[str, Any]:
    return {
        "method": method, "order": found.order, "fields": list(found.names), "sets": len(found),
        "interactions": found.to_table(top).to_pylist(), "left_out": dict(model.left_out), "crosses": crosses,
        "notes": list(found.notes),
    }  # fmt: skip


def _show(console: Any, found: Any, model: Any, top: int) -> None:
    from rich.table import Table

    from tigon.cli.screen import screen, show

    table = Table(
        "features", "strength", "share", "units", title=f"{min(top, len(found)):,} of {len(found):,} sets"
    )  # fmt: skip
    for one in found[:top]:
        table.add_row(" × ".join(one.features), f"{one.strength:.4g}", f"{one.share:.1%}", f"{one.units:,}")
    show(screen(width=None if sys.stdout.isatty() else 10_000), table)
    for note in list(found.notes):
        console.print(f"note: {note}")
