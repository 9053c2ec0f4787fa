"""`tigon rank inspect`: describe an impression table or a run."""

from __future__ import annotations

import json as encoder
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.outputs import check_output_file
from tigon.cli.problem import Problem, device_of, needs
from tigon.cli.progress import working
from tigon.rank.cli.shared import history_of, sentences

NAME = "rank inspect"


def inspect(
    target: Annotated[Path, typer.Argument(help="Folder of a run or of a ranker, or a table of impressions.")],
    data: Annotated[
        list[str] | None, typer.Option(help="Impressions to count and time a request on; default: those of the run.")
    ] = None,
    history: Annotated[list[str] | None, typer.Option(help="Events; default: those of the run.")] = None,
    items: Annotated[list[str] | None, typer.Option(help="Features of items; default: those of the run.")] = None,
    users: Annotated[list[str] | None, typer.Option(help="Features of users; default: those of the run.")] = None,
    request: Annotated[str | None, typer.Option(help="Of a table: its column of requests.")] = None,
    item: Annotated[str | None, typer.Option(help="Of a table: its column of items.")] = None,
    user: Annotated[str | None, typer.Option(help="Of a table: its column of users.")] = None,
    time: Annotated[str | None, typer.Option(help="Of a table: its column of times.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="Of a table: labels, as for `tigon rank fit`.")] = None,
    action: Annotated[list[str] | None, typer.Option(help="Of a table: columns of what happened in events.")] = None,
    weight: Annotated[str | None, typer.Option(help="Of a table: its column of weights.")] = None,
    schema: Annotated[Path | None, typer.Option(help="Of a table: a schema.json to read it by.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Of a table: where the schema goes, to be edited.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Requests of a batch.", min=1)] = 256,
    history_max: Annotated[
        int | None, typer.Option(help="Newest events of a request that are read; default: the run's.", min=0)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is in --output.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a run (fields, parameters by part, tokens, FLOPs and latency per request) or a table."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    if not target.is_dir() or not any((target / name).exists() for name in ("run.json", "config.json", "prompt.yaml")):
        from tigon.rank.cli.inspect_data import inspect_data

        if output is not None:
            inputs: list[str | Path] = [
                target,
                *(path for path in (schema,) if path),
                *(history or []),
                *(items or []),
                *(users or []),
            ]
            check_output_file(f"{NAME}: --output", output, (".json",), overwrite=overwrite, inputs=inputs)
        given = {"request": request, "item": item, "user": user, "time": time, "weight": weight,
                 "labels": label, "action": action}  # fmt: skip
        inspect_data(
            target, history=history_of(history or []), items=items or None, users=users or None, schema=schema,
            output=output, json=json, **{name: value for name, value in given.items() if value},
        )  # fmt: skip
        return
    if output is not None:
        raise Problem(f"{NAME}: --output is for the schema of a table, got the folder of a ranker, {target}")
    place = device_of(device, NAME)
    from tigon.cli.screen import screen
    from tigon.rank.cli.evaluate import parse_batch_options
    from tigon.rank.cli.inspected import costs, fields_of, parameters_of
    from tigon.rank.cli.opened import Opened

    console = screen(stderr=True, soft_wrap=True)
    with working(console, f"reading {target}"):
        opened = Opened(NAME, target, place)
        if opened.by_prompt:
            raise Problem(f"{NAME}: {target} is a language model, which `tigon inspect` describes")
        files = data or opened.options.get("data")
        table = opened.read(files, history or [], items or [], users or [], labelled=False) if files else None
    found: dict[str, Any] = {
        "kind": opened.ranker.kind, "labels": opened.ranker.score_weights, "fields": fields_of(opened.ranker.schema),
        "parameters": parameters_of(opened.ranker),
    }  # fmt: skip
    if table is not None and len(table):
        with working(console, "timing a batch"), sentences(NAME):
            found["request"] = costs(
                opened.ranker, table, parse_batch_options(NAME, opened, batch_size, history_max, "auto")
            )
    if json:
        print(encoder.dumps(found))
        return
    _show(found, place)


def _show(found: dict[str, Any], device: Any) -> None:
    from rich.table import Table

    from tigon.cli.screen import screen, show

    out = screen(width=None if sys.stdout.isatty() else 10_000)
    fields = Table("field", "kind", "side", "rows of its table", title="what it reads")
    for row in found["fields"]:
        fields.add_row(row["name"], row["kind"], row["side"], f"{row['rows']:,}" if row["rows"] else "")
    show(out, fields)
    total = sum(found["parameters"].values())
    parts = Table("part", "parameters", "share", title=f"{found['kind']}, {total:,} parameters")
    for name, count in found["parameters"].items():
        parts.add_row(name, f"{count:,}", f"{count / max(total, 1):.1%}")
    show(out, parts)
    if "request" in found:
        costs = Table("a request", "", title=f"{found['request']['requests']:,} requests, on {device}")
        for name, value in found["request"].items():
            costs.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
        show(out, costs)
