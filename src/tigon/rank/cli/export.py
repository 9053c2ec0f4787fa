"""`tigon rank export`: export a ranker for use without Tigon."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.outputs import check_output_folder
from tigon.cli.problem import Problem, needs
from tigon.rank.cli.shared import sentences

NAME = "rank export"
TARGETS = ("torch-export", "onnx", "sglang")
# Output names by program; other programs return an output per label.
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an export left in --output.")] = False,
) -> None:
    """Export torch.export or ONNX programs, or a folder for SGLang."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    if to not in TARGETS:
        raise Problem(f"{NAME}: --to must be one of {', '.join(TARGETS)}, got {to}")
    if to == "onnx":
        needs(f"tigon {NAME} --to onnx", None, "onnx", "onnxscript")
    folder = run / "export" if output is None else output
    # Delete the whole folder: SGLang would also serve files from an earlier export.
    check_output_folder(f"{NAME}: --output", folder, overwrite=overwrite, is_own=_is_export,
                        inputs=[run, *(data or []), *(history or []), *(items or []), *(users or [])])  # fmt: skip
    import torch

    from tigon import rank
    from tigon.cli.screen import screen
    from tigon.rank.cli.opened import Opened

    console = screen(stderr=True)
    with console.status(f"reading {run}"):
        opened = Opened(NAME, run, torch.device("cpu"))
    kind = type(opened.ranker).__name__
    if to == "sglang" and not opened.by_prompt:
        raise Problem(
            f"{NAME}: --to sglang is for rankers by prompts, which are language models; a {kind} goes to torch-export "
            "or onnx"
        )
    if to != "sglang" and opened.by_prompt:
        raise Problem(
            f"{NAME}: --to {to} is for rankers of features and sequences; a {kind} is a language model, which goes to "
            "sglang"
        )
    if to == "sglang" and not data:
        raise Problem(f"{NAME}: --to sglang needs --data, the requests whose bodies are written")
    staged = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staged, ignore_errors=True)
    if to == "sglang":
        from tigon.rank.models.prompt import export_sglang

        with sentences(NAME):
            table = opened.read(data or [], history or [], items or [], users or [], labelled=False)
            files = export_sglang(opened.ranker, table, staged)
    else:
        with console.status("exporting"), sentences(NAME):
            files = rank.export(opened.ranker, staged)
            if to == "onnx":
                files = [_onnx(file, OUTPUTS.get(file.stem, opened.ranker.schema.labels)) for file in files]
    shutil.rmtree(folder, ignore_errors=True)
    staged.replace(folder)
    for file in files or [staged]:
        print(folder / file.relative_to(staged))


def _is_export(folder: Path) -> bool:
    """Whether a folder contains only files written by an export."""
    names = {path.name for path in folder.iterdir()}
    programs = all(name.endswith((".pt2", ".onnx", ".onnx.data")) for name in names)
    return programs or {"sglang.json", "requests.jsonl", "config.json"} <= names


def _onnx(program: Path, outputs: list[str]) -> Path:
    """Convert a torch.export program to ONNX and replace the file."""
    import torch

    made = torch.onnx.export(torch.export.load(program), dynamo=True, output_names=outputs, verbose=False)
    file = program.with_suffix(".onnx")
    assert made is not None
    made.save(str(file))
    program.unlink()
    return file
