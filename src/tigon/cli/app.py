"""The typer application, with one row per command."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from tigon.cli.options import add_command

# Each command's name and the module with the function by that name. A system has a separate module.
COMMANDS = {
    "demo": "tigon.cli.demo",
    "train": "tigon.cli.train",
    "inspect": "tigon.cli.inspect",
    "verify": "tigon.cli.verify",
    "export": "tigon.cli.export",
    "compress": "tigon.compress.cli.command",
    "doctor": "tigon.cli.doctor",
}
# Command groups: each module holds a typer application under the group's name.
GROUPS = {"retrieve": "tigon.retrieve.cli", "rank": "tigon.rank.cli", "graph": "tigon.graph.cli"}

app = typer.Typer(
    name="tigon",
    help="Train Hugging Face models faster and in less memory.",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from tigon import __version__

        typer.echo(f"tigon {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _tigon(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def add_commands(app: typer.Typer, commands: dict[str, str], groups: dict[str, str]) -> None:
    """Add commands and groups by their names and modules."""
    for name, module in commands.items():
        run = getattr(importlib.import_module(module), name)
        if name == "train":
            # TRL's parser reads the arguments, including --help: its options depend on the task's trainer.
            settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
            app.command(name, context_settings=settings, add_help_option=False)(run)
        else:
            add_command(app, name, run)
    for name, module in groups.items():
        app.add_typer(getattr(importlib.import_module(module), name))


add_commands(app, COMMANDS, GROUPS)
