"""The terminal that the commands print to, and tables that fit the terminal.

rich truncates columns in a table that is wider than the terminal, and numbers lose their exponents. Here cells fold at
the points where words and identifiers can break, and where a cell would have no room for the longest piece, each row is
printed as separate lines.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# A cell that folds to more lines than these is easier to read on separate lines.
MAX_LINES = 6
# Between a separator and a letter: in "layers.*.post_attention_layernorm", but not in "1.6e-09" or "4,096".
BREAK = re.compile(r"(?<=[._/:-])(?=[A-Za-z*])")


def screen(**options: Any) -> Console:
    """A console that prints text unchanged: brackets and colons in the user's names are not markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def show(console: Console, table: Table) -> None:
    """Print a table, folded to the terminal, or each row as lines: the first cell, then "column: cell"."""
    widths = fit_columns(console, table)
    if widths is None:
        _show_lines(console, table)
        return
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
        column.header = _fold_cell(column.header, width)
        column._cells[:] = [_fold_cell(cell, width) for cell in column.cells]
    console.print(table)


def fit_columns(console: Console, table: Table) -> list[int] | None:
    """The widths at which the table fits the console without cutting a cell's pieces, or None if there are none."""
    texts = [[_plain(cell) for cell in (column.header, *column.cells)] for column in table.columns]
    minimal = [max(cell_len(piece) for text in column for piece in [*split_pieces(text), ""]) for column in texts]
    # Headers fold before cells do.
    bodies, natural = ([max(cell_len(line) for text in column for line in ["", *text.split("\n")]) for column in part]
                       for part in ([column[1:] for column in texts], texts))  # fmt: skip
    natural = [max(width, column.min_width or 0) for width, column in zip(natural, table.columns, strict=True)]
    # Lines and padding between the columns, which do not depend on their widths.
    frame = Measurement.get(console, console.options.update(width=100_000), table).maximum - sum(natural)
    widths, room = minimal, console.width - frame - sum(minimal)
    if room < 0:
        return None
    for wanted in (bodies, natural):
        # Columns that lack the least width are completed first, so that as few as possible fold.
        for i in sorted(range(len(widths)), key=lambda i: wanted[i] - widths[i]):
            more = min(room, max(0, wanted[i] - widths[i]))
            widths[i], room = widths[i] + more, room - more
    lines = (fold(text, width).count("\n") + 1 for column, width in zip(texts, widths, strict=True) for text in column)
    return widths if max(lines, default=1) <= MAX_LINES else None


def split_pieces(text: str) -> list[str]:
    """A text's pieces, without spaces, between which a line may end."""
    return [piece for word in text.split() for piece in BREAK.split(word)]


def fold(text: str, width: int) -> str:
    """Fold the text to this width, broken at spaces, or else within identifiers."""
    return "\n".join(line for paragraph in text.split("\n") for line in _fold_line(paragraph, width))


def _fold_line(text: str, width: int) -> list[str]:
    if cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        for i, piece in enumerate(BREAK.split(word)):
            joined = f"{lines[-1]} {piece}" if i == 0 and lines[-1] else lines[-1] + piece
            # A word that fits a line is not broken.
            whole = i == 0 and cell_len(f"{lines[-1]} {word}") > width >= cell_len(word)
            if lines[-1] and (cell_len(joined) > width or whole):
                lines.append(piece)
            else:
                lines[-1] = joined
    return lines


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _fold_cell(cell: Any, width: int) -> Any:
    text = _plain(cell)
    folded = fold(text, width)
    if folded == text:
        return cell
    return Text(folded, style=cell.style) if isinstance(cell, Text) else folded


def _show_lines(console: Console, table: Table) -> None:
    if table.title:
        console.print(table.title, style="italic")
    names = [_plain(column.header) for column in table.columns]
    for row in zip_longest(*(column.cells for column in table.columns), fillvalue=""):
        first, *others = map(_plain, row)
        console.print(first, style="bold")
        for name, cell in zip(names[1:], others, strict=True):
            if cell:
                console.print(f"  {name}: {cell}" if name else f"  {cell}")
    if table.caption:
        console.print(table.caption, style="dim italic")
