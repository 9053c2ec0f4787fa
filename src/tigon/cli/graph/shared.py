"""What the commands of `tigon graph` share: the graph that options name, and errors as sentences."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem, one_line


@contextmanager
def sentences(command: str) -> Iterator[None]:
    """Errors about what a user gave, raised by `tigon.graph`, as Problems of a command."""
    try:
        yield
    except ValueError as error:
        said = re.sub(r"^[\w.]+: ", "", one_line(error))
        option = re.match(r"([a-z_]+)(?= must )", said)
        if option and option[1] in OPTIONS:
            said = f"--{option[1].replace('_', '-')}{said[option.end() :]}"
        raise Problem(f"{command}: {said}") from error


# Arguments of the library that are options.
OPTIONS = ("epochs", "nodes", "normalize", "hidden", "out", "eps", "gamma", "lr", "weight_decay", "c", "dims")


def opened(command: str, data: str, root: str | None) -> Any:
    """The `tigon.graph.Graph` of --data and --root."""
    from tigon.graph import planetoid, read_graph
    from tigon.graph.citations import DATASETS

    if data in DATASETS:
        if root is None:
            raise Problem(f"{command}: --root must name the folder of the files of {data}, ind.{data}.x and so on")
        with sentences(command):
            return planetoid(data, root)
    if root is not None:
        raise Problem(f"{command}: --root is for --data {', '.join(DATASETS)}, got {data}")
    if not Path(data).is_file():
        raise Problem(f"{command}: --data must be one of {', '.join(DATASETS)}, or a file, got {data}")
    with sentences(command):
        return read_graph(data)


def digest(graph: Any) -> str:
    """A digest of a graph, by which a run knows its data again."""
    from tigon.graph.data import NAMES

    found = hashlib.blake2b(digest_size=16)
    for name in NAMES:
        tensor = getattr(graph, name)
        found.update(b"-" if tensor is None else f"{name} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, float | None]]:
    """Mean and sample standard deviation of each number over the rows."""
    import numpy as np

    return {
        name: {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None}
        for name in names for values in [[row[name] for row in rows]]
    }  # fmt: skip


def show_rows(rows: list[dict[str, Any]], names: list[str], total: dict[str, dict[str, float | None]]) -> None:
    """A table with a row for each seed, and their mean and spread."""
    import sys

    from rich.table import Table

    from tigon.cli.screen import screen, show

    table = Table("seed", *names)
    for row in rows:
        table.add_row(str(row["seed"]), *(_number(row[name]) for name in names))
    if len(rows) > 1:
        for kind in ("mean", "sd"):
            table.add_row(kind, *(_number(total[name][kind]) for name in names))
    show(screen(width=None if sys.stdout.isatty() else 10_000), table)


def _number(value: Any) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else str(value)
