"""`tigon rank compress`: quantize a ranker's embedding tables to 8 bits and compare scores."""

from __future__ import annotations

import json as encoder
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.outputs import check_output_folder
from tigon.cli.problem import Problem, device_of, needs
from tigon.rank.cli.shared import sentences

NAME = "rank compress"


def compress(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of a ranker.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the compressed ranker.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Rows to compare scores on, with labels or without; default: those of the run."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Requests of a batch.", min=1)] = 8192,
    precision: Annotated[str, typer.Option(help="Of the products: bf16, fp32, or auto: bf16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a ranker that is in --output.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a feature ranker with 8-bit tables; report its size and the score differences."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    place = device_of(device, NAME)
    inputs: list[str | Path] = [run, *([run / "model"] if (run / "model").is_dir() else []), *(data or [])]
    check_output_folder(f"{NAME}: --output", output, overwrite=overwrite, is_own=_is_ranker, inputs=inputs)
    from tigon.cli.screen import screen
    from tigon.rank import LiRank
    from tigon.rank.cli.evaluate import parse_batch_options
    from tigon.rank.cli.opened import Opened

    console = screen(stderr=True, soft_wrap=True)
    with console.status(f"reading {run}"):
        opened = Opened(NAME, run, place)
        if not isinstance(opened.ranker, LiRank):
            raise Problem(
                f"{NAME}: is for --model lirank, whose tables are large, got a {type(opened.ranker).__name__}"
            )
        files = data or opened.options.get("data")
        # Read labels if the data has them.
        table = opened.read(files, [], [], [], labelled=False) if files else None
    found = _compressed(opened.ranker, table, parse_batch_options(NAME, opened, batch_size, None, precision), output)
    if json:
        print(encoder.dumps(found))
        return
    _show(found, files)
    console.print(f"the compressed ranker is in {output}")


def _is_ranker(folder: Path) -> bool:
    """Whether a folder contains only files written by a ranker's `save_pretrained`."""
    names = {path.name for path in folder.iterdir()}
    known = {"config.json", "schema.json", "model.safetensors", "explorer.safetensors", "manifest.json"}
    return "config.json" in names and names <= known


def _compressed(ranker: Any, table: Any, batch_options: Any, output: Path) -> dict[str, Any]:
    from tigon.rank.evaluation.score import compare_scores
    from tigon.rank.models.lirank.quantize import count_bytes, quantize_tables

    with sentences(NAME):
        small = quantize_tables(ranker)
        found: dict[str, Any] = {"before": count_bytes(ranker), "after": count_bytes(small)}
        if table is not None and len(table):
            found["scores"] = compare_scores(ranker, small, table, batch_options)._asdict()
        staged = output.with_name(output.name + ".partial")
        shutil.rmtree(staged, ignore_errors=True)
        small.save_pretrained(staged)
        shutil.rmtree(output, ignore_errors=True)
        staged.replace(output)
    return found


def _show(found: dict[str, Any], files: list[str] | None) -> None:
    from rich.table import Table

    from tigon.cli.screen import screen, show

    table = Table("", "before", "after", "change")
    for name in ("tables", "rest"):
        before, after = found["before"][name], found["after"][name]
        table.add_row(f"{name}, bytes", f"{before:,}", f"{after:,}", f"{after / max(before, 1) - 1:+.0%}")
    for label, (before, after) in found.get("scores", {}).get("auc", {}).items():
        table.add_row(f"AUC of {label}", f"{before:.5f}", f"{after:.5f}", f"{after - before:+.5f}")
    show(screen(width=None if sys.stdout.isatty() else 10_000), table)
    if "scores" in found:
        scores = found["scores"]
        print(f"probabilities differ by {scores['mean']:.2e} on average, {scores['largest']:.2e} at most")
