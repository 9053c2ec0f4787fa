"""`tigon rank interactions`: rank feature interactions and write a schema with crosses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.options import argument, device_option, json_option, option
from tigon.cli.outputs import check_output_file
from tigon.cli.problem import Problem, check_choice, find_device, needs
from tigon.cli.progress import working
from tigon.cli.screen import screen, show_rows
from tigon.rank.cli.ranker_folder import RankerFolder
from tigon.rank.cli.report import sentences

NAME = "rank interactions"
METHODS = ("persistence", "nid")
OF_RUN = ("run.json", "results.json", "schema.json", "config.json", "model")


@dataclass(frozen=True, kw_only=True)
class InteractionsOptions:
    run: Path = argument("Folder with a --model lirank run or ranker.")
    data: list[str] | None = option(None, "Rows for measuring how much each field varies; default: the run's data.")
    label: str | None = option(None, "Label to analyse; default: all labels.")
    top: int = option(20, "Number of sets to show.", min=1)
    pairs: bool = option(False, "All pairs; same as --order 2.")
    order: int | None = option(None, "Features per set; default: any number; 2 with --as-crosses.", min=2)
    method: str = option("persistence", "persistence or nid.")
    as_crosses: Path | None = option(
        None, "File for the schema with crosses from the strongest sets, for the next fit."
    )
    crosses: int = option(5, "With --as-crosses: number of crosses.", min=1)
    hash_rows: int = option(100_000, "With --as-crosses: number of codes per cross.", min=2)
    seed: int = option(0, "Seed for sampling rows.", min=0)
    device: str = device_option()
    overwrite: bool = option(False, "Replace an existing file.")
    json: bool = json_option()


def interactions(options: InteractionsOptions) -> None:
    """Find interacting fields from the weights of a run's MLP."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    file, order = options.as_crosses, options.order
    if options.pairs and order not in (None, 2):
        raise Problem(f"{NAME}: --pairs means --order 2, got also --order {order}")
    if options.pairs or (file is not None and order is None):
        order = 2
    check_choice(NAME, options, method=METHODS)
    if file is not None:
        inputs: list[str | Path] = [*(options.run / name for name in OF_RUN), *(options.data or [])]
        check_output_file(f"{NAME}: --as-crosses", file, (".json",), overwrite=options.overwrite, inputs=inputs)
    device: Any = find_device(options.device, NAME)
    from tigon import rank

    console = screen(stderr=True)
    with sentences(NAME):
        with working(console, f"reading {options.run}"):
            model, schema = _read_run(options, device)
        method: Any = options.method
        found = rank.find_interactions(model, order=order, method=method)
        made: dict[str, Any] = {}
        if file is not None:
            made = found.crosses(options.crosses, hash_rows=options.hash_rows, schema=schema)
            if not made:
                raise Problem(f"{NAME}: --as-crosses: no set holds only impression ids and numbers, which crosses need")
            file.parent.mkdir(parents=True, exist_ok=True)
            schema.replace(made).save(file)
    if options.json:
        result = {
            "method": method, "order": found.order, "fields": list(found.names), "sets": len(found),
            "interactions": found.to_table(options.top).to_pylist(), "left_out": dict(model.left_out),
            "crosses": list(made), "notes": list(found.notes),
        }  # fmt: skip
        print(json.dumps(result, ensure_ascii=False))
        return
    rows = [
        {"features": " × ".join(one.features), "strength": f"{one.strength:.4g}", "share": f"{one.share:.1%}",
         "units": f"{one.units:,}"}
        for one in found[: options.top]
    ]  # fmt: skip
    show_rows(rows, f"{min(options.top, len(found)):,} of {len(found):,} sets")
    for note in found.notes:
        console.print(f"note: {note}")
    if file is not None:
        print(f"the schema with {', '.join(made)} is in {file}; train with: tigon rank fit --schema {file}")


def _read_run(options: InteractionsOptions, device: Any) -> tuple[Any, Any]:
    """Load a run's MLP and schema."""
    from tigon import rank

    folder = RankerFolder(NAME, options.run, device)
    if not isinstance(folder.ranker, rank.LiRank):
        kind = "a language model" if folder.by_prompt else f"a {type(folder.ranker).__name__}"
        raise Problem(f"{NAME}: requires --model lirank, whose MLP reads row fields, got {kind}")
    files = options.data or folder.options.get("data")
    if not files:
        raise Problem(f"{NAME}: --data must name rows for measuring how much the fields in {options.run} vary")
    table = folder.read(files, labelled=False)
    return rank.extract_mlp(folder.ranker, table, options.label, seed=options.seed), folder.ranker.schema
