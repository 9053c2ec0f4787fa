"""`tigon rank inspect` for tables: inferred column roles and column statistics."""

from __future__ import annotations

import json as encoder
import sys
from pathlib import Path
from typing import Any

from tigon.cli.progress import working
from tigon.cli.screen import screen
from tigon.rank.cli.shared import sentences

NAME = "rank inspect"


def inspect_data(
    paths: Any,
    *,
    history: Any = None,
    items: Any = None,
    users: Any = None,
    schema: Path | None = None,
    output: Path | None = None,
    json: bool = False,
    **roles: Any,
) -> None:
    """Print a summary for impressions, as tables or JSON.

    Args:
        paths, history, items, users: files, as in `rank.Impressions.read`.
        schema: a schema.json for reading; None infers the schema.
        output: path for the schema, for editing.
        json: print JSON.
        roles: columns by role, if there is no schema.
    Raises: Problem if the tables cannot be read.
    """
    from tigon.rank import Impressions, Schema
    from tigon.rank.data.leakage import find_leaky_fields, find_rare_crosses
    from tigon.rank.data.summary import summarize

    console = screen(stderr=True, soft_wrap=True)
    with sentences(NAME), working(console, f"reading {paths}"):
        given = None if schema is None else Schema.load(schema)
        data = Impressions.read(paths, history=history, items=items, users=users, schema=given, labelled=False, **roles)
        if output is not None:
            data.schema.save(output)
    with working(console, "looking at what single fields say"):
        found = summarize(data)
        found["notes"] = [*found["notes"], *find_leaky_fields(data), *find_rare_crosses(data)]
    if json:
        print(encoder.dumps(found, ensure_ascii=False))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from tigon.cli.screen import screen, show

    out = screen(width=None if sys.stdout.isatty() else 10_000)
    title = f"{found['requests']:,} requests, {found['rows']:,} rows, {found['events']:,} events"
    whole = Table("", "", title=title, show_header=False)
    whole.add_row("candidates a request", _counts(found["candidates"]))
    if found["events"]:
        whole.add_row("events a request", f"{_counts(found['history'])}; none: {found['history']['empty']:.1%}")
    if found["time"]:
        whole.add_row("first and last", " and ".join(found["time"]))
    for label, share in found["labels"].items():
        whole.add_row(f"label {label}", f"{share:.2%} of the rows")
    for role, name in found["roles"].items():
        whole.add_row(role, name if isinstance(name, str) else ", ".join(name))
    show(out, whole)
    fields = Table("field", "kind", "side", "in events", "values", "missing", title="fields")
    for one in found["fields"]:
        values = f"{one['values']:,}" if one["values"] else ""
        missing = f"{one['missing']:.1%}" if one["missing"] else ""
        fields.add_row(one["name"], one["kind"], one["side"], "yes" if one["history"] else "", values, missing)
    show(out, fields)
    if found["left_out"]:
        left_out = Table("column", "why", title="left out")
        for name, why in found["left_out"].items():
            left_out.add_row(name, why)
        show(out, left_out)
    for note in found["notes"]:
        out.print(note)


def _counts(spread: dict[str, Any]) -> str:
    return f"{spread['mean']:,.4g} on average, {spread['most']:,} at most"
