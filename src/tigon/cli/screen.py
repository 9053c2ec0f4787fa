"""The terminal that the commands print to. Tables fold at a terminal's width; a pipe gets them whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PIPE = 10_000  # columns


def screen(**options: Any) -> Console:
    """A console that prints text unchanged: brackets and colons in the user's names are not markup."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)


def show(table: Table) -> None:
    """Print a table to standard output. No cell is cut: where a line is too narrow, a cell has several lines."""
    for column in table.columns:
        column.overflow = "fold"
    screen(width=None if sys.stdout.isatty() else PIPE).print(table, soft_wrap=False)


def show_rows(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print rows as a table, with a column for each key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*(format_cell(row.get(name)) for name in names))
    show(table)


def format_cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else f"{value:,.4f}" if isinstance(value, float) else str(value)


@contextmanager
def draw(picture: Path, rows: int = 1, **options: Any) -> Iterator[Any]:
    """`with draw(picture) as axes`: plot on the axes, which are then written to a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, figsize=(8, 4.5), layout="constrained", **options)
    yield axes
    for one in figure.axes:
        one.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
