"""`tigon rank export`: export a ranker for use without Tigon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tigon.cli.options import argument, option
from tigon.cli.outputs import check_output_folder, replace_output
from tigon.cli.problem import Problem, check_choice, needs
from tigon.cli.screen import screen
from tigon.rank.cli.ranker_folder import RankerFolder, SideOptions
from tigon.rank.cli.report import sentences

NAME = "rank export"
TARGETS = ("torch-export", "onnx", "sglang")
# Output names by program; other programs return an output per label.
OUTPUTS = {"encode": ["keys", "values", "newest"]}


@dataclass(frozen=True, kw_only=True)
class ExportOptions(SideOptions):
    run: Path = argument("Run folder or ranker folder.")
    to: str = option("torch-export", f"{', '.join(TARGETS)}.")
    output: Path | None = option(None, "Folder for the exported files; default: export, in the run folder.", "-o")
    data: list[str] | None = option(None, "With --to sglang: requests to write as /v1/score bodies.")
    overwrite: bool = option(False, "Replace files from an earlier export in --output.")


def export(options: ExportOptions) -> None:
    """Export torch.export or ONNX programs, or a folder for SGLang."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    check_choice(NAME, options, to=TARGETS)
    run, to = options.run, options.to
    if to == "onnx":
        needs(f"tigon {NAME} --to onnx", None, "onnx", "onnxscript")
    output = options.output or run / "export"
    inputs = [path for name in ("data", "history", "items", "users") for path in getattr(options, name) or []]
    # Delete the whole folder: SGLang would also serve files from an earlier export.
    check_output_folder(
        f"{NAME}: --output", output, overwrite=options.overwrite, is_own=_is_export, inputs=[run, *inputs]
    )
    import torch

    from tigon import rank

    console = screen(stderr=True)
    with console.status(f"reading {run}"):
        folder = RankerFolder(NAME, run, torch.device("cpu"))
    kind = type(folder.ranker).__name__
    if to == "sglang" and not folder.by_prompt:
        raise Problem(
            f"{NAME}: --to sglang is for prompt rankers, which are language models; export a {kind} to torch-export "
            "or onnx"
        )
    if to != "sglang" and folder.by_prompt:
        raise Problem(
            f"{NAME}: --to {to} is for feature and sequence rankers; a {kind} is a language model, so export it to "
            "sglang"
        )
    if to == "sglang" and not options.data:
        raise Problem(f"{NAME}: --to sglang needs --data, the requests to write bodies for")
    with replace_output(output) as staged, sentences(NAME):
        if to == "sglang":
            from tigon.rank.models.prompt import export_sglang

            files = export_sglang(folder.ranker, folder.read(options.data or [], options, labelled=False), staged)
        else:
            with console.status("exporting"):
                files = rank.export(folder.ranker, staged)
                if to == "onnx":
                    files = [_convert(file, OUTPUTS.get(file.stem, folder.ranker.schema.labels)) for file in files]
    for file in files or [staged]:
        print(output / file.relative_to(staged))


def _is_export(folder: Path) -> bool:
    """Whether a folder contains only files written by an export."""
    names = {path.name for path in folder.iterdir()}
    programs = all(name.endswith((".pt2", ".onnx", ".onnx.data")) for name in names)
    return programs or {"sglang.json", "requests.jsonl", "config.json"} <= names


def _convert(program: Path, outputs: list[str]) -> Path:
    """Convert a torch.export program to ONNX and replace the file."""
    import torch

    made = torch.onnx.export(torch.export.load(program), dynamo=True, output_names=outputs, verbose=False)
    file = program.with_suffix(".onnx")
    assert made is not None
    made.save(str(file))
    program.unlink()
    return file
