"""`tigon graph`: embed a graph's nodes and evaluate them with a linear probe."""

from __future__ import annotations

import importlib

import typer

COMMANDS = ("fit", "probe")

graph = typer.Typer(
    name="graph",
    help="Embeddings of a graph's nodes, without labels.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@graph.callback()
def _graph(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _name in COMMANDS:
    graph.command(_name)(getattr(importlib.import_module(f"tigon.graph.cli.{_name}"), _name))
