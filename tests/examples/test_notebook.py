"""The notebook runs from top to bottom, prints what it shows, and stands on the site."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())["cells"]


@pytest.fixture(scope="module")
def printed():
    names, texts = {}, []
    state = torch.get_rng_state()
    for cell in CELLS:
        said = io.StringIO()
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(said):
                exec("".join(cell["source"]), names)
        texts.append(said.getvalue())
    torch.set_rng_state(state)
    return texts


def shown(cell):
    return "".join("".join(output["text"]) for output in cell.get("outputs", []))


def words(text):
    """Without numbers, whose last digits differ from machine to machine, and what the report says on a GPU alone."""
    return re.sub(r"\d+(\.\d+)?", "#", re.sub(r" Recompute auto: .*", "", text))


def test_the_cells_print_what_the_notebook_shows(printed):
    assert [words(text) for text in printed] == [words(shown(cell)) for cell in CELLS]


def test_it_learns_and_counts_on(printed):
    losses = [float(x) for text in printed for x in re.findall(r"^step \d+  loss ([\d.]+)", text, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < 0.2 * losses[0]
    assert "Logits were built by argmax" in "".join(printed)
    assert printed[-2].endswith(f"{list(range(100, 116))}\n")
