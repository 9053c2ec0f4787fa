"""`tigon rank export`: a ranker for where Tigon is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.problem import Problem, check_writable, needs
from tigon.cli.rank.shared import sentences

NAME = "rank export"
TARGETS = ("torch-export", "onnx", "sglang")
# What programs return, by their names; others return a label each.
OUTPUTS = {"encode": ["keys", "values", "newest"]}


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of a ranker.")],
    to: Annotated[str, typer.Option(help=f"{', '.join(TARGETS)}.")] = "torch-export",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the files; default: export, in the run's.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="For sglang: requests, which are written as bodies of /v1/score.")
    ] = None,
    history: Annotated[list[str] | None, typer.Option(help="For sglang: events.")] = None,
    items: Annotated[list[str] | None, typer.Option(help="For sglang: features of items.")] = None,
    users: Annotated[list[str] | None, typer.Option(help="For sglang: features of users.")] = None,
) -> None:
    """Write programs of torch.export or ONNX, or a folder that SGLang serves."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    if to not in TARGETS:
        raise Problem(f"{NAME}: --to must be one of {', '.join(TARGETS)}, got {to}")
    if to == "onnx":
        needs(f"tigon {NAME} --to onnx", None, "onnx", "onnxscript")
    folder = run / "export" if output is None else output
    check_writable(folder, f"{NAME}: --output")
    import torch

    from tigon.cli.rank.opened import Opened
    from tigon.cli.screen import screen

    console = screen(stderr=True)
    with console.status(f"reading {run}"):
        opened = Opened(NAME, run, torch.device("cpu"))
    kind = type(opened.ranker).__name__
    if to == "sglang":
        if not hasattr(opened.ranker, "export_sglang"):
            raise Problem(
                f"{NAME}: --to sglang is for rankers by prompts, which are language models; a {kind} goes to "
                "torch-export or onnx"
            )
        if not data:
            raise Problem(f"{NAME}: --to sglang needs --data, the requests whose bodies are written")
        with sentences(NAME):
            table = opened.read(data, history or [], items or [], users or [], labelled=False)
            files = opened.ranker.export_sglang(table, folder)
    elif not hasattr(opened.ranker, "export"):
        raise Problem(
            f"{NAME}: --to {to} is for rankers of features and sequences; a {kind} is a language model, which goes to "
            "sglang"
        )
    else:
        with console.status("exporting"), sentences(NAME):
            files = opened.ranker.export(folder)
            if to == "onnx":
                files = [_onnx(file, OUTPUTS.get(file.stem, opened.ranker.schema.labels)) for file in files]
    for file in files or [folder]:
        print(file)


def _onnx(program: Path, outputs: list[str]) -> Path:
    """A program of torch.export as ONNX, in its place."""
    import torch

    made = torch.onnx.export(torch.export.load(program), dynamo=True, output_names=outputs, verbose=False)
    file = program.with_suffix(".onnx")
    assert made is not None
    made.save(str(file))
    program.unlink()
    return file
