"""`tigon inspect`: what `tigon.fuse` would replace in a model, how often it runs in a step, what not, and why.

All from the configuration alone: model and step are on the meta device, where tensors have shapes and no memory.
"""

from __future__ import annotations

import json as encoder
from typing import Annotated, Any

import typer

from tigon.cli.problem import needs, one_line


def inspect(
    model: Annotated[str, typer.Argument(help="A directory, a config.json, a name on the hub, or a preset.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What would be replaced in a model, how often it runs, what not, and why. Needs no weights and no memory."""
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
        fusion = fuse(built)
        report = fusion.report()
        obstacle = _step(built)
        if obstacle is None:
            report = fusion.report()
    if json:
        found: dict[str, Any] = {
            "model": source.name,
            "class": type(built).__name__,
            "parameters": built.num_parameters(),
            "report": report.to_dict(),
            "no_step": obstacle,
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
    if obstacle is not None:
        console.print(f"No step to count calls in: {obstacle}", style="dim", highlight=False, soft_wrap=True)


def _step(model: Any) -> str | None:
    """Run one forward pass with labels, which decide what runs; or say why it cannot be run without data."""
    import torch

    tokens = torch.zeros(1, 16, dtype=torch.long, device="meta")
    try:
        # With a cache, as by default: without one transformers looks whether sequences are packed.
        model.to(torch.bfloat16)(input_ids=tokens, labels=tokens)
    except Exception as error:  # code that looks at the values of its tensors, whatever it then raises
        return one_line(error, 160)
    return None
