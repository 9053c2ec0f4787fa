"""Tables in terminals of any width: every cell is there, whole."""

import re

import pytest

pytest.importorskip("rich")
from rich.table import Table

from tigon.cli import screen as module


def read_cells(text, columns):
    """The cells of a printed table, row by row, each without its spaces: what was folded is joined."""
    rows, cells = [], [""] * columns
    for line in text.splitlines():
        parts = re.split("[│┃]", line)
        if len(parts) == columns + 2:
            cells = [cell + part.replace(" ", "") for cell, part in zip(cells, parts[1:-1], strict=True)]
        elif line.startswith(("┡", "├", "└")):
            rows.append(cells)
            cells = [""] * columns
    return rows


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_no_cell_is_cut_and_names_are_no_markup(width, monkeypatch, capsys):
    original = module.screen
    monkeypatch.setattr(module, "screen", lambda **options: original(**{**options, "width": width}))
    rows = [
        ["name", "error"],
        ["*.post_attention_layernorm", "1.6e-09"],
        ["[bold]q_proj, k_proj", "4,096 |fused − plain|"],
    ]
    table = Table(*rows[0], show_lines=True)
    for row in rows[1:]:
        table.add_row(*row)
    module.show(table)
    text = capsys.readouterr().out
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert read_cells(text, 2) == [["".join(cell.split()) for cell in row] for row in rows]


def test_a_pipe_gets_whole_lines(capsys):
    module.show_rows([{"a": "word " * 50, "b": 1.5}, {"b": None, "c": ["x", "y"]}], "a title")
    text = capsys.readouterr().out
    assert "word " * 50 in text
    assert "1.5000" in text
    assert "x, y" in text
