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


def test_a_search_that_is_stopped_and_goes_on(example):
    for package in ("pyarrow", "accelerate", "safetensors", "optuna", "lightgbm"):
        pytest.importorskip(package)
    said = example(EXAMPLES / "rank_search.py")
    (half,) = re.findall(r"^stopped after 4 trials; the best log loss is (0\.\d+)$", said, re.MULTILINE)
    (whole,) = re.findall(r"^8 trials; the best log loss is (0\.\d+), of 1: ", said, re.MULTILINE)
    assert float(whole) <= float(half)
    tests = re.findall(r"on all rows: test log loss (0\.\d+), AUC (0\.\d+); [\d,]+ FLOPs$", said, re.MULTILINE)
    assert len(tests) == 1
    assert float(tests[0][0]) < 0.5  # 0.33 knows all, 0.64 nothing


def test_a_lirank_that_learns_which_apps_are_installed(example):
    for package in ("pyarrow", "accelerate", "safetensors"):
        pytest.importorskip(package)
    said = example(EXAMPLES / "rank_clicks.py")
    found = re.findall(r"^(.+): AUC (0\.\d+) .*, ECE (0\.\d+)$", said, re.MULTILINE)
    assert [name for name, *_ in found][:3] == ["before", "fitted", "calibrated"]
    aucs, errors = ([float(one[n]) for one in found] for n in (1, 2))
    assert aucs[0] < 0.6
    assert min(aucs[1:]) > 0.68  # 0.8 knows all
    assert max(errors[1:]) < 0.1
    assert aucs[3] == pytest.approx(aucs[2], abs=0.003)
    small, large = (int(x.replace(",", "")) for x in re.findall(r"\d[\d,]*", found[3][0]))
    assert small * 32 == large * 12  # 8 numbers of 4 bytes, and 8 of one with 4 more
    rows = re.findall(r"^app\d+ for user\d+: install (0\.\d+), long (0\.\d+); score (\d\.\d+)$", said, re.MULTILINE)
    assert len(rows) == 3
    assert all(float(score) == pytest.approx(float(a) + float(b), abs=0.011) for a, b, score in rows)
