"""The examples of ranking run as a user runs them."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_ligr_that_learns_what_users_like_from_their_history(example):
    for package in ("pyarrow", "accelerate"):
        pytest.importorskip(package)
    said = example(EXAMPLES / "rank_movies_ligr.py")
    assert "160 requests to train on, 40 held out; fields: item_id, rating, timestamp, genre" in said
    before, after = (float(x) for x in re.findall(r"^GAUC (0\.\d+)", said, re.MULTILINE))
    assert before < 0.7
    assert after > 0.85
    films = re.findall(r"^film \d+, (\w+): (0\.\d+), rated (\d)$", said, re.MULTILINE)
    assert len(films) == 3
    assert len({genre for genre, *_ in films}) == 1
    assert [float(p) for _, p, _ in films] == sorted((float(p) for _, p, _ in films), reverse=True)
