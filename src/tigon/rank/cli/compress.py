"""`tigon rank compress`: quantize a ranker's embedding tables to 8 bits and compare scores."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.options import argument, json_option, option
from tigon.cli.outputs import check_output_folder, replace_output
from tigon.cli.problem import Problem, find_device, needs
from tigon.cli.screen import screen, show
from tigon.rank.cli.ranker_folder import RankerFolder, ScoringOptions
from tigon.rank.cli.report import sentences

NAME = "rank compress"


@dataclass(frozen=True, kw_only=True)
class CompressOptions(ScoringOptions):
    run: Path = argument("Run folder or ranker folder.")
    output: Path = option(..., "Folder for the compressed ranker.", "-o")
    data: list[str] | None = option(None, "Rows for comparing scores, with or without labels; default: the run's data.")
    batch_size: int = option(8192, "Requests of a batch.", min=1)
    overwrite: bool = option(False, "Replace an existing ranker in --output.")
    json: bool = json_option()


def compress(options: CompressOptions) -> None:
    """Write a feature ranker with 8-bit tables; report its size and the score differences."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    device, run, output = find_device(options.device, NAME), options.run, options.output
    inputs: list[str | Path] = [run, *([run / "model"] if (run / "model").is_dir() else []), *(options.data or [])]
    check_output_folder(f"{NAME}: --output", output, overwrite=options.overwrite, is_own=_is_ranker, inputs=inputs)
    from tigon.rank import LiRank
    from tigon.rank.evaluation.score import compare_scores
    from tigon.rank.models.lirank.quantize import count_bytes, quantize_tables

    console = screen(stderr=True)
    with console.status(f"reading {run}"):
        folder = RankerFolder(NAME, run, device)
        ranker = folder.ranker
        if not isinstance(ranker, LiRank):
            raise Problem(f"{NAME}: requires --model lirank, whose tables are large, got a {type(ranker).__name__}")
        files = options.data or folder.options.get("data")
        # Read labels if the data has them.
        table = folder.read(files, labelled=False) if files else None
    with sentences(NAME):
        small = quantize_tables(ranker)
        found: dict[str, Any] = {"before": count_bytes(ranker), "after": count_bytes(small)}
        if table is not None and len(table):
            batch_options = folder.make_batch_options(options)
            found["scores"] = compare_scores(ranker, small, table, batch_options)._asdict()
        with replace_output(output) as staged:
            small.save_pretrained(staged)
    if options.json:
        print(json.dumps(found))
        return
    _show(found)
    console.print(f"the compressed ranker is in {output}")


def _is_ranker(folder: Path) -> bool:
    """Whether a folder contains only files written by a ranker's `save_pretrained`."""
    names = {path.name for path in folder.iterdir()}
    known = {"config.json", "schema.json", "model.safetensors", "explorer.safetensors", "manifest.json"}
    return "config.json" in names and names <= known


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("", "before", "after", "change")
    for name in ("tables", "rest"):
        before, after = found["before"][name], found["after"][name]
        table.add_row(f"{name}, bytes", f"{before:,}", f"{after:,}", f"{after / max(before, 1) - 1:+.0%}")
    scores = found.get("scores", {})
    for label, (before, after) in scores.get("auc", {}).items():
        table.add_row(f"AUC of {label}", f"{before:.5f}", f"{after:.5f}", f"{after - before:+.5f}")
    show(table)
    if scores:
        print(f"probabilities differ by {scores['mean']:.2e} on average, {scores['largest']:.2e} at most")
