"""`tigon rank inspect`: describe an impression table or a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.options import argument, json_option, option
from tigon.cli.outputs import check_output_file
from tigon.cli.problem import Problem, find_device, needs
from tigon.cli.progress import working
from tigon.cli.screen import screen, show, show_rows
from tigon.rank.cli.ranker_folder import HistoryOptions, RankerFolder, SideOptions
from tigon.rank.cli.report import sentences
from tigon.rank.cli.tables import parse_history

NAME = "rank inspect"


@dataclass(frozen=True, kw_only=True)
class InspectOptions(HistoryOptions, SideOptions):
    target: Path = argument("Run folder, ranker folder or table with impressions.")
    data: list[str] | None = option(None, "Impressions for counting and timing a request; default: the run's data.")
    request: str | None = option(None, "Request column, when TARGET is a table.")
    item: str | None = option(None, "Item column, when TARGET is a table.")
    user: str | None = option(None, "User column, when TARGET is a table.")
    time: str | None = option(None, "Time column, when TARGET is a table.")
    label: list[str] | None = option(None, "Labels, as for `tigon rank fit`, when TARGET is a table.")
    action: list[str] | None = option(None, "Event outcome columns, when TARGET is a table.")
    weight: str | None = option(None, "Weight column, when TARGET is a table.")
    schema: Path | None = option(None, "Existing schema.json, when TARGET is a table.")
    output: Path | None = option(None, "File for the schema, for later editing, when TARGET is a table.", "-o")
    overwrite: bool = option(False, "Replace an existing file at --output.")
    json: bool = json_option()


def inspect(options: InspectOptions) -> None:
    """Describe a run (fields, parameters by part, tokens, FLOPs and latency per request) or a table."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    target = options.target
    if target.is_dir() and any((target / name).exists() for name in ("run.json", "config.json", "prompt.yaml")):
        _inspect_ranker(options)
    else:
        _inspect_table(options)


def _inspect_ranker(options: InspectOptions) -> None:
    target = options.target
    if options.output is not None:
        raise Problem(f"{NAME}: --output is for a table's schema, got the ranker folder {target}")
    device: Any = find_device(options.device, NAME)
    from tigon.rank.cli.costs import count_parameters, list_fields, measure_costs

    console = screen(stderr=True)
    with working(console, f"reading {target}"):
        folder = RankerFolder(NAME, target, device)
        if folder.by_prompt:
            raise Problem(f"{NAME}: {target} is a language model; use `tigon inspect`")
        files = options.data or folder.options.get("data")
        table = folder.read(files, options, labelled=False) if files else None
    ranker = folder.ranker
    fields, parameters = list_fields(ranker.schema), count_parameters(ranker)
    found: dict[str, Any] = {
        "kind": ranker.kind, "labels": ranker.score_weights, "fields": fields, "parameters": parameters
    }  # fmt: skip
    if table is not None and len(table):
        with working(console, "timing a batch"), sentences(NAME):
            found["request"] = measure_costs(ranker, table, folder.make_batch_options(options))
    if options.json:
        print(json.dumps(found))
        return
    rows = [{**row, "rows": f"{row['rows']:,}" if row["rows"] else ""} for row in fields]
    show_rows([{"rows of its table" if k == "rows" else k: v for k, v in row.items()} for row in rows], "what it reads")
    total = sum(parameters.values())
    parts = [
        {"part": name, "parameters": f"{count:,}", "share": f"{count / max(total, 1):.1%}"}
        for name, count in parameters.items()
    ]
    show_rows(parts, f"{ranker.kind}, {total:,} parameters")
    if "request" in found:
        costs = {k: f"{v:,.4g}" if isinstance(v, float) else f"{v:,}" for k, v in found["request"].items()}
        title = f"{found['request']['requests']:,} requests, on {device}"
        show_rows([{"a request": name, "": value} for name, value in costs.items()], title)


def _inspect_table(options: InspectOptions) -> None:
    from tigon.rank import Impressions, Schema
    from tigon.rank.data.leakage import find_leaky_fields, find_rare_crosses
    from tigon.rank.data.summary import summarize

    if options.output is not None:
        inputs: list[str | Path] = [options.target, *([options.schema] if options.schema else [])]
        inputs += [path for name in ("history", "items", "users") for path in getattr(options, name) or []]
        check_output_file(f"{NAME}: --output", options.output, (".json",), overwrite=options.overwrite, inputs=inputs)
    console = screen(stderr=True)
    roles = {name: getattr(options, name) for name in ("request", "item", "user", "time", "weight", "action")}
    given: dict[str, Any] = {name: value for name, value in {**roles, "labels": options.label}.items() if value}
    with sentences(NAME), working(console, f"reading {options.target}"):
        schema = None if options.schema is None else Schema.load(options.schema)
        data = Impressions.read(
            options.target, history=parse_history(options.history or []), items=options.items or None,
            users=options.users or None, schema=schema, labelled=False, **given,
        )  # fmt: skip
        if options.output is not None:
            data.schema.save(options.output)
    with working(console, "checking single fields for leakage"):
        found = summarize(data)
        found["notes"] = [*found["notes"], *find_leaky_fields(data), *find_rare_crosses(data)]
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _show_table(found)


def _show_table(found: dict[str, Any]) -> None:
    from rich.table import Table

    title = f"{found['requests']:,} requests, {found['rows']:,} rows, {found['events']:,} events"
    whole = Table("", "", title=title, show_header=False)
    whole.add_row("candidates a request", _format_counts(found["candidates"]))
    if found["events"]:
        history = found["history"]
        whole.add_row("events a request", f"{_format_counts(history)}; none: {history['empty']:.1%}")
    if found["time"]:
        whole.add_row("first and last", " and ".join(found["time"]))
    for label, share in found["labels"].items():
        whole.add_row(f"label {label}", f"{share:.2%} of the rows")
    for role, name in found["roles"].items():
        whole.add_row(role, name if isinstance(name, str) else ", ".join(name))
    show(whole)
    fields = [
        {
            "field": one["name"], "kind": one["kind"], "side": one["side"],
            "in events": "yes" if one["history"] else "",
            "values": f"{one['values']:,}" if one["values"] else "",
            "missing": f"{one['missing']:.1%}" if one["missing"] else "",
        }
        for one in found["fields"]
    ]  # fmt: skip
    show_rows(fields, "fields")
    if found["left_out"]:
        show_rows([{"column": name, "why": why} for name, why in found["left_out"].items()], "left out")
    for note in found["notes"]:
        print(note)


def _format_counts(counts: dict[str, Any]) -> str:
    return f"{counts['mean']:,.4g} on average, {counts['most']:,} at most"
