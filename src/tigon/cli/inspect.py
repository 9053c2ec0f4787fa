"""`tigon inspect`: what `tigon.fuse` would replace in a model, what not, and why, from the configuration alone."""

from __future__ import annotations

import json as encoder
from typing import Annotated, Any

import typer

from tigon.cli.problem import needs


def inspect(
    model: Annotated[str, typer.Argument(help="A directory, a config.json, a name on the hub, or a preset.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What would be replaced in a model, what not, and why. Needs no weights and no memory for them."""
    needs("tigon inspect", "train", "torch", "transformers")
    from rich.console import Console

    from tigon.cli.model import find_model, quiet_transformers, random_model

    source = find_model(model)
    quiet_transformers()
    import torch

    from tigon import fuse

    console = Console(quiet=json)
    with console.status("looking at every part of the model"):
        with torch.device("meta"):
            built = random_model(source.config)
        report = fuse(built).report()
    if json:
        found: dict[str, Any] = {
            "model": source.name,
            "class": type(built).__name__,
            "parameters": built.num_parameters(),
            "report": report.to_dict(),
        }
        print(encoder.dumps(found, indent=2))
        return
    console.print(
        f"{source.name}: {type(built).__name__}, {built.num_parameters() / 1e6:,.1f}M parameters, "
        f"{source.config.get_text_config().num_hidden_layers} layers",
        highlight=False,
        soft_wrap=True,
    )
    console.print(report.to_rich())
