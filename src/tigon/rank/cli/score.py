"""`tigon rank score`: write a ranker's scores for a table's rows to a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.cli.folder import METRICS
from tigon.cli.outputs import check_output_file
from tigon.cli.problem import device_of, needs

NAME = "rank score"
SUFFIXES = (".parquet", ".csv", ".jsonl")
# Columns in every output file.
ROW, SCORE = "row", "score"


def score(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of a ranker.")],
    data: Annotated[list[str], typer.Option(help="Requests and their items, in the forms of `tigon rank fit`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help=f"File for the scores: {', '.join(SUFFIXES)}.")],
    history: Annotated[list[str] | None, typer.Option(help="Events; default: those of the run.")] = None,
    items: Annotated[list[str] | None, typer.Option(help="Features of items; default: those of the run.")] = None,
    users: Annotated[list[str] | None, typer.Option(help="Features of users; default: those of the run.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Column of the data that is written beside, once for each; all: every one.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Requests of a batch.", min=1)] = 256,
    history_max: Annotated[
        int | None, typer.Option(help="Newest events of a request that are read; default: the run's.", min=0)
    ] = None,
    explore: Annotated[
        float,
        typer.Option(
            help="How far weights of the last layer are drawn for each request: 1 as far as the data "
            "leaves open, 0 not at all.",
            min=0,
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws of --explore.", min=0)] = 0,
    precision: Annotated[str, typer.Option(help="Of the products: bf16, fp32, or auto: bf16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Write a row per data row, in request order: row number, item, each label's probability, and the score."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    inputs = [path for given in (data, history, items, users) for path in given or []]
    check_output_file(f"{NAME}: --output", output, SUFFIXES, overwrite=overwrite, inputs=[*inputs, run / METRICS])
    place = device_of(device, NAME)
    import pyarrow as pa
    import torch

    from tigon.cli.screen import screen
    from tigon.rank.cli.evaluate import parse_batch_options
    from tigon.rank.cli.opened import Opened
    from tigon.rank.cli.shared import sentences

    console = screen(stderr=True, soft_wrap=True)
    with console.status(f"reading {run}"):
        opened = Opened(NAME, run, place)
        check_output_file(f"{NAME}: --output", output, SUFFIXES, overwrite=overwrite, inputs=opened.files)
        table = opened.read(data, history or [], items or [], users or [], labelled=False)
    if explore:
        opened.check_explorer()
    batch_options = parse_batch_options(NAME, opened, batch_size, history_max, precision)
    with sentences(NAME):
        beside = _beside(table, keep or [])
    for note in table.notes:
        console.print(f"note: {note}")
    roles = table.schema.roles
    # Use the same types for all pieces, even if one has only missing values.
    requests = _arrow(table.request_ids)
    names = _names([roles.request or "request", *beside], list(opened.labels))
    for name, own in names.items():
        if own != name[1]:
            console.print(f"note: {name[1]!r} of the {name[0]} is written as {own!r}; {name[1]!r} is another column")
    began, row, request = time.perf_counter(), 0, 0
    output.parent.mkdir(parents=True, exist_ok=True)
    # Rename into place only when complete.
    partial = output.with_name(output.name + ".partial")
    try:
        with _writer(partial, output.suffix) as write, console.status(f"scoring {table.rows:,} rows"):
            for part, values in opened.scored(table, batch_options, explore=explore, seed=seed):
                sizes, n = part.offsets.diff(), len(part.rows)
                of = torch.repeat_interleave(sizes) + request
                columns = {names["data", roles.request or "request"]: requests.take(pa.array(of.numpy()))}
                columns |= {names["data", name]: column.slice(row, n) for name, column in beside.items()}
                columns |= {names["labels", label]: value.numpy() for label, value in values.items()}
                write({ROW: part.rows.numpy(), **columns, SCORE: part.score.numpy()})
                row, request = row + n, request + len(sizes)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(output)
    seconds = time.perf_counter() - began
    print(f"{row:,} rows of {request:,} requests in {output}, {seconds:.1f} s, {row / max(seconds, 1e-9):,.0f} rows/s")


def _beside(table: Any, keep: list[str]) -> dict[str, Any]:
    """The item and the kept columns, as pyarrow arrays over all rows, in request order.

    Raises: ValueError for an unknown column.
    """
    roles = table.schema.roles
    every = "all" in keep and "all" not in table.columns
    kept = [*table.columns, *(name for name in keep if name != "all")] if every else keep
    wanted = dict.fromkeys([*([] if roles.item is None else [roles.item]), *kept])
    return {name: _arrow(table.column(name)) for name in wanted if name != roles.request}


def _arrow(values: Any) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values)
    except OverflowError:  # Python integers above 2**63
        return pa.array(values, pa.uint64())


def _names(data: list[str], labels: list[str]) -> dict[tuple[str, str], str]:
    """Output column names for data columns and labels: unchanged unless the name is taken."""
    taken, found = {ROW, SCORE}, {}
    for kind, prefix, names in (("labels", "label_", labels), ("data", "data_", dict.fromkeys(data))):
        for name in names:
            own = name
            while own in taken:
                own = prefix + own
            taken.add(own)
            found[kind, name] = own
    return found


class _writer:
    """`with _writer(file, suffix) as write`: call write(columns) per piece; flushed to disk at the end."""

    def __init__(self, file: Path, suffix: str) -> None:
        self.file, self.suffix = file, suffix
        self.sink: Any = None
        self.handle: Any = None

    def __enter__(self) -> Any:
        self.handle = open(self.file, "wb")
        return self._write

    def _write(self, columns: dict[str, Any]) -> None:
        import pyarrow as pa

        table = pa.table(columns)
        if self.suffix == ".jsonl":
            rows = (json.dumps(row, default=str, ensure_ascii=False) for row in table.to_pylist())
            self.handle.write("".join(f"{row}\n" for row in rows).encode())
            return
        if self.sink is None:
            if self.suffix == ".csv":
                from pyarrow.csv import CSVWriter as Writer
            else:
                from pyarrow.parquet import ParquetWriter as Writer
            self.sink = Writer(self.handle, table.schema)
        self.sink.write_table(table.cast(self.sink.schema) if self.suffix == ".parquet" else table)

    def __exit__(self, *_: object) -> None:
        import os

        if self.sink is not None:
            self.sink.close()
        self.handle.flush()
        os.fsync(self.handle.fileno())
        self.handle.close()
