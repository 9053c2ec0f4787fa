"""The terminal that the commands print to."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

# On a narrower terminal rich cuts a table's columns until they are unreadable.
NARROW = 72


def screen(**options: Any) -> Console:
    """A console that prints text unchanged: brackets and colons in the user's names are not markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def show(console: Console, table: Table) -> None:
    """Print a table, or in a narrow terminal each row as lines of its own: the first cell, then "column: cell"."""
    if console.width >= NARROW:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="italic")
    names = [str(column.header) for column in table.columns]
    for row in zip_longest(*(column.cells for column in table.columns), fillvalue=""):
        first, *others = map(str, row)
        console.print(first, style="bold")
        for name, cell in zip(names[1:], others, strict=True):
            if cell:
                console.print(f"  {name}: {cell}" if name else f"  {cell}")
    if table.caption:
        console.print(table.caption, style="dim italic")
