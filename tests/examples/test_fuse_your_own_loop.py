"""The example runs as a user runs it, in a process of its own, and learns."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_it_learns_and_reports(example):
    said = example(EXAMPLES / "fuse_your_own_loop.py")
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", said)]
    assert len(losses) == 4
    assert losses[-1] < 0.75 * losses[0]
    assert "Ran in the last step: head 1, norm 5, add_norm 2, mlp 2, rotary 2, linear 2." in said


def test_it_learns_which_continuation_is_right(example):
    said = example(EXAMPLES / "shared_prefix.py")
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", said)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    assert "rows in place of" in said
    assert "prefix 2" in said


def test_it_learns_which_films_members_like(example):
    pytest.importorskip("pyarrow")
    said = example(EXAMPLES / "rank_movies_prompt.py")
    assert "rows in place of" in said
    assert float(re.search(r"AUC (\d\.\d+)", said)[1]) > 0.65
