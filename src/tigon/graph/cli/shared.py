"""Shared code for `tigon graph` commands: load the graph, and convert errors to messages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem, one_line

# Convolution and embedding widths by minimum node count.
WIDTHS = {0: (64, 32), 500: (256, 128), 2_000: (1024, 512)}
# The G2R authors' values for all Planetoid sets; per-set values are in `citations`.
AUTHORS = {"hidden": 1024, "out": 512, "gamma": 0.5}
# For other graphs. With weight 0.5, embeddings of small or noisy graphs collapse.
OTHERS = {"gamma": 1.0, "eps": 0.3, "epochs": 20, "nodes": 768}


def choose(given: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Default values for options that are None, by node count.

    Widths are 64 and 32 below 500 nodes, 256 and 128 below 2,000, else 1,024 and 512, which the G2R authors use for
    sets with 2,708 nodes and more. Planetoid sets use the authors' values.

    Source: https://arxiv.org/abs/2202.06241; for other graphs, benchmarks/learn_defaults.py.

    given: options by name; options that are already set are not returned.
    """
    from tigon.graph.citations import DATASETS

    hidden, out = WIDTHS[max(first for first in WIDTHS if first <= nodes)]
    found = {**OTHERS, "hidden": hidden, "out": out}
    if given["data"] in DATASETS:
        found = {**AUTHORS, **DATASETS[given["data"]]}
    return {name: value for name, value in found.items() if given[name] is None}


def find_doubts(z: Any, shares: dict[str, float]) -> list[str]:
    """Warnings for each sign of a failed fit, with suggested changes.

    z: (n, d), embeddings.
    shares: validation accuracies: "val", probe after the fit; "before", probe before the fit; "most", most frequent
        class; "error", its standard error. {} without validation nodes.
    """
    import torch

    found = []
    away = 1 - float(torch.nn.functional.normalize(z.float()).mean(0).norm() ** 2)
    if away < 0.02:
        found.append(
            f"the embeddings of all nodes are nearly one (they vary by {away:.1%}): take a larger --gamma, fewer "
            "--epochs, or a smaller --out"
        )
    if shares and shares["val"] <= shares["most"] + 2 * shares["error"]:
        found.append(
            f"the embeddings tell no more than the most frequent class does: {shares['val']:.3f} of the nodes to "
            f"validate on, and {shares['most']:.3f} by the class alone. Edges may join unlike nodes (probe the "
            "features beside them), or a smaller --out or another --gamma may help"
        )
    elif shares and shares["val"] < shares["before"]:
        found.append(
            f"the fit has made the embeddings worse: {shares['val']:.3f} of the nodes to validate on, and "
            f"{shares['before']:.3f} before it. Take fewer --epochs, a lower --lr or a larger --gamma"
        )
    return found


@contextmanager
def sentences(command: str) -> Iterator[None]:
    """Convert `tigon.graph` errors about user input to the command's Problems."""
    try:
        yield
    except ValueError as error:
        said = re.sub(r"^[\w.]+: ", "", one_line(error))
        option = re.match(r"([a-z_]+)(?= must )", said)
        if option and option[1] in OPTIONS:
            said = f"--{option[1].replace('_', '-')}{said[option.end() :]}"
        raise Problem(f"{command}: {said}") from error


# Library arguments that are options.
OPTIONS = ("epochs", "nodes", "normalize", "hidden", "out", "eps", "gamma", "lr", "weight_decay", "c", "dims")


def opened(command: str, data: str, root: str | None) -> Any:
    """Load the `tigon.graph.Graph` for --data and --root."""
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
    """Digest that identifies a graph when a run resumes."""
    from tigon.graph.data import NAMES

    found = hashlib.blake2b(digest_size=16)
    for name in NAMES:
        tensor = getattr(graph, name)
        found.update(b"-" if tensor is None else f"{name} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, float | None]]:
    """Mean and sample standard deviation for each column over the rows."""
    import numpy as np

    return {
        name: {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None}
        for name in names for values in [[row[name] for row in rows]]
    }  # fmt: skip


def show_rows(rows: list[dict[str, Any]], names: list[str], total: dict[str, dict[str, float | None]]) -> None:
    """Print a table with a row per seed, plus mean and spread."""
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
