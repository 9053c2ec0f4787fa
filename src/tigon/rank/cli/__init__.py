"""`tigon rank`: train, evaluate and serve rankers from impression tables."""

from __future__ import annotations

import importlib

import typer

# Command → module; the function has the module's name.
COMMANDS = {
    "fit": "fit", "eval": "evaluate", "score": "score", "export": "export", "compress": "compress",
    "inspect": "inspect", "search": "search", "interactions": "interactions",
}  # fmt: skip

rank = typer.Typer(
    name="rank",
    help="Rankers of what requests show, from tables of impressions.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@rank.callback()
def _rank(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _name, _module in COMMANDS.items():
    rank.command(_name)(getattr(importlib.import_module(f"tigon.rank.cli.{_module}"), _module))
