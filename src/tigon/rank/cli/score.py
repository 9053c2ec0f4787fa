"""`tigon rank score`: write a ranker's scores for a table's rows to a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.cli.options import argument, option
from tigon.cli.outputs import check_output_file, replace_output
from tigon.cli.problem import find_device, needs
from tigon.cli.run import METRICS
from tigon.cli.screen import screen
from tigon.rank.cli.ranker_folder import HistoryOptions, RankerFolder, SideOptions
from tigon.rank.cli.report import sentences

NAME = "rank score"
SUFFIXES = (".parquet", ".csv", ".jsonl")
# Columns in every output file.
ROW, SCORE = "row", "score"


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(HistoryOptions, SideOptions):
    run: Path = argument("Run folder or ranker folder.")
    data: list[str] = option(..., "Requests with items, in the formats of `tigon rank fit`.")
    output: Path = option(..., f"File for the scores: {', '.join(SUFFIXES)}.", "-o")
    keep: list[str] | None = option(None, "Data column to copy to the output; repeatable; all: every column.")
    explore: float = option(
        0.0,
        "Scale for sampling last-layer weights per request: 1: full posterior spread; 0: no sampling.",
        min=0,
    )
    seed: int = option(0, "Seed for --explore sampling.", min=0)
    overwrite: bool = option(False, "Replace an existing file.")


def score(options: ScoreOptions) -> None:
    """Write a row per data row, in request order: row number, item, each label's probability, and the score."""
    needs(f"tigon {NAME}", "rank", "torch", "pyarrow", "safetensors")
    run, output = options.run, options.output
    inputs = [path for name in ("data", "history", "items", "users") for path in getattr(options, name) or []]

    def check_output(*files: str | Path) -> None:
        check_output_file(f"{NAME}: --output", output, SUFFIXES, overwrite=options.overwrite, inputs=files)

    check_output(*inputs, run / METRICS)
    device = find_device(options.device, NAME)
    import pyarrow as pa
    import torch

    console = screen(stderr=True)
    with console.status(f"reading {run}"):
        folder = RankerFolder(NAME, run, device)
        check_output(*folder.files)
        table = folder.read(options.data, options, labelled=False)
    if options.explore:
        folder.check_explorer()
    batch_options = folder.make_batch_options(options)
    with sentences(NAME):
        kept = _read_columns(table, options.keep or [])
    for note in table.notes:
        console.print(f"note: {note}")
    # Use the same types for all pieces, even if one has only missing values.
    requests, request_name = _make_array(table.request_ids), table.schema.roles.request or "request"
    names = _choose_names([request_name, *kept], folder.labels)
    for (kind, name), own in names.items():
        if own != name:
            console.print(f"note: {name!r} of the {kind} is written as {own!r}; {name!r} is another column")
    began, row, request = time.perf_counter(), 0, 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        replace_output(output) as partial, _open_writer(partial, output.suffix) as write,
        console.status(f"scoring {table.rows:,} rows"),
    ):  # fmt: skip
        for part, values in folder.score(table, batch_options, explore=options.explore, seed=options.seed):
            sizes, n = part.offsets.diff(), len(part.rows)
            places = torch.repeat_interleave(sizes) + request
            columns = {names["data", request_name]: requests.take(pa.array(places.numpy()))}
            columns |= {names["data", name]: column.slice(row, n) for name, column in kept.items()}
            columns |= {names["labels", label]: value.numpy() for label, value in values.items()}
            write({ROW: part.rows.numpy(), **columns, SCORE: part.score.numpy()})
            row, request = row + n, request + len(sizes)
    seconds = time.perf_counter() - began
    print(f"{row:,} rows of {request:,} requests in {output}, {seconds:.1f} s, {row / max(seconds, 1e-9):,.0f} rows/s")


def _read_columns(table: Any, keep: list[str]) -> dict[str, Any]:
    """The item and the kept columns, as pyarrow arrays over all rows, in request order.

    Raises: ValueError for an unknown column.
    """
    roles = table.schema.roles
    every = "all" in keep and "all" not in table.columns
    kept = [*table.columns, *(name for name in keep if name != "all")] if every else keep
    wanted = dict.fromkeys([*([] if roles.item is None else [roles.item]), *kept])
    return {name: _make_array(table.column(name)) for name in wanted if name != roles.request}


def _make_array(values: Any) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values)
    except OverflowError:  # Python integers above 2**63
        return pa.array(values, pa.uint64())


def _choose_names(data: list[str], labels: list[str]) -> dict[tuple[str, str], str]:
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


@contextmanager
def _open_writer(file: Path, suffix: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """`with _open_writer(file, suffix) as write`: call write(columns) per piece; flushed to disk at the end."""
    import pyarrow as pa
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    sink: Any = None
    with open(file, "wb") as handle:

        def write(columns: dict[str, Any]) -> None:
            nonlocal sink
            table = pa.table(columns)
            if suffix == ".jsonl":
                rows = (json.dumps(row, default=str, ensure_ascii=False) for row in table.to_pylist())
                handle.write("".join(f"{row}\n" for row in rows).encode())
                return
            if sink is None:
                sink = (CSVWriter if suffix == ".csv" else ParquetWriter)(handle, table.schema)
            sink.write_table(table.cast(sink.schema) if suffix == ".parquet" else table)

        try:
            yield write
        finally:
            if sink is not None:
                sink.close()
        handle.flush()
        os.fsync(handle.fileno())
