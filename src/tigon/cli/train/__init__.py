"""`tigon train`: fine-tune a model, or train from scratch, with TRL's trainers and `tigon.fuse`."""

from __future__ import annotations

import typer

from tigon.cli.problem import needs


def train(context: typer.Context) -> None:
    """Fine-tune a model, or train one from scratch: `tigon train --help` lists all options of TRL's trainers."""
    needs("tigon train", "train", "torch", "transformers", "accelerate", "tokenizers", "datasets", "trl", "peft")
    from tigon.cli.model import quiet_transformers

    quiet_transformers()
    from tigon.cli.train.options import parse_options
    from tigon.cli.train.run import run

    run(parse_options(context.args))
