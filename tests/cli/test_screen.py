"""Tables in terminals of any width: every cell is there, whole."""

import re

import pytest

pytest.importorskip("rich")
from hypothesis import given
from hypothesis import strategies as st
from rich.box import HEAVY_HEAD
from rich.table import Table
from rich.text import Text

from tigon.cli.screen import fit_columns, fold, screen, show, split_pieces


def printed(table, width):
    console = screen(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, table)
    return console.export_text()


def cells_of(text, columns):
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


WORDS = st.lists(
    st.one_of(
        st.sampled_from(["1.6e-09", "4,096", "*.post_attention_layernorm", "q_proj,", "a", "|fused − plain|", "to/it"]),
        st.text("abc._/-", min_size=1, max_size=30),
    ),
    max_size=6,
).map(" ".join)  # fmt: skip


@given(st.lists(st.lists(WORDS, min_size=3, max_size=3), min_size=2, max_size=4), st.integers(20, 160))
def test_a_table_has_every_cell_or_each_row_as_lines(rows, width):
    table = Table(*rows[0], box=HEAVY_HEAD, show_lines=True)
    for row in rows[1:]:
        table.add_row(Text(row[0]), *row[1:])
    widths = fit_columns(screen(width=width), table)
    text = printed(table, width)
    assert "…" not in text
    if widths is None:
        flat = "".join(text.split())
        assert all("".join(cell.split()) in flat for row in rows[1:] for cell in row)
    else:
        assert max(map(len, text.splitlines())) <= width
        assert cells_of(text, 3) == [["".join(cell.split()) for cell in row] for row in rows]


@given(WORDS, st.integers(1, 60))
def test_text_folds_between_pieces(text, width):
    lines = fold(text, width).split("\n")
    assert "".join("".join(lines).split()) == "".join(text.split())
    longest = max(map(len, split_pieces(text)), default=0)
    assert all(len(line) <= max(width, longest) for line in lines)


def test_numbers_and_short_words_stay_whole():
    assert split_pieces("1.6e-09 4,096 3.8e+02 layers.*.q_proj") == [
        "1.6e-09", "4,096", "3.8e+02", "layers.", "*.", "q_", "proj",
    ]  # fmt: skip
    assert fold("the loss_of layers.q_proj", 12) == "the loss_of\nlayers.q_\nproj"


@pytest.mark.parametrize(
    "arguments", [("inspect", "llama-tiny"), ("verify", "llama-tiny"), ("inspect", "qwen3-30b-a3b")]
)
def test_a_pipe_of_80_columns_cuts_nothing(tigon, arguments):
    narrow, wide = (tigon(*arguments, COLUMNS=str(columns)).ok().out for columns in (80, 200))
    assert "…" not in narrow
    assert all(len(line) <= 80 for line in narrow.splitlines() if line.startswith(("│", "┃")))
    count = max(line.count("│") for line in wide.splitlines()) - 1
    bodies = [sorted("".join(row) for row in cells_of(text, count)) for text in (narrow, wide)]
    assert any(bodies[1])
    numbers = [sorted(re.findall(r"\d\.\de-\d\d|\d+\.\d+", text)) for text in (narrow, wide)]
    assert len(numbers[0]) == len(numbers[1])
