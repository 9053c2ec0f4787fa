"""`tigon retrieve`: from item files to filtered results, one row per command."""

from __future__ import annotations

import importlib

import typer

COMMANDS = ("build", "search", "evaluate", "calibrate", "train", "serve")

retrieve = typer.Typer(
    name="retrieve",
    help="Exact search over millions of items, with filters.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@retrieve.callback()
def _retrieve(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _name in COMMANDS:
    retrieve.command(_name)(getattr(importlib.import_module(f"tigon.retrieve.cli.{_name}"), _name))
