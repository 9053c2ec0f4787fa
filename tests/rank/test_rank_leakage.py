"""Fields that tell a label by themselves, and fields that only seem to."""

import re

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from tigon import rank
from tigon.rank.data import leakage as module
from tigon.rank.data.leakage import find_leaky_fields, find_rare_crosses


def table(rows=3000, share=0.3):
    draw = np.random.default_rng(0)
    click = (draw.random(rows) < share).astype(int)
    return {
        "click": click, "number": draw.normal(size=rows), "own": np.arange(rows),
        "noisy": np.where(draw.random(rows) < 0.03, 1 - click, click).astype(float) + 0.1 * draw.random(rows),
        "seconds": np.where(click == 1, draw.exponential(30, rows) + 0.1, 0.0),
        "paid": np.where(click == 1, draw.normal(size=rows), np.nan),
        "both ends": np.where(click == 1, np.sign(draw.normal(size=rows)) * 3, draw.uniform(-1, 1, rows)),
        "state": np.where(click == 1, "open", np.array(["new", "gone"])[draw.integers(0, 2, rows)]).tolist(),
        "done": [f"2026-11-{1 + n % 28:02d}" if one else None for n, one in enumerate(click)],
        "tags": [["a"]] * rows,
    }  # fmt: skip


FIELDS = {
    **{name: rank.Number() for name in ("number", "noisy", "seconds", "paid", "both ends")},
    "own": rank.Id(), "state": rank.Id(), "done": rank.Time(), "tags": rank.Ids(),
}  # fmt: skip


def told(rows, labels=("click",)):
    data = rank.Impressions.read(rows, schema=rank.Schema({"labels": labels}, FIELDS))
    return [
        re.match(r"Field '(.*?)' alone predicts label '(.*?)', with AUC (\S+)\. If", one)
        for one in find_leaky_fields(data)
    ]


def test_fields_that_say_what_happened_are_named():
    found = told(table())
    assert {one[1] for one in found} == {"seconds", "paid", "both ends", "state", "done"}
    assert all(float(one[3]) > 0.99 for one in found)
    # Rare clicks, too.
    assert {one[1] for one in told(table(share=0.02))} >= {"seconds", "paid", "state"}


def test_few_rows_tell_nothing():
    rows = table()
    assert told({name: values[:150] for name, values in rows.items()}) == []
    none = rows | {"click": (np.arange(3000) < 10).astype(int), "state": ["open"] * 10 + ["new"] * 2990}
    assert told(none) == []


def test_rows_without_a_value_are_left_out():
    rows = table()
    like = np.where(np.arange(3000) % 3 == 0, np.nan, rows["click"])
    found = told(rows | {"like": like, "click": np.random.default_rng(1).integers(0, 2, 3000)}, ("click", "like"))
    assert {one[2] for one in found} == {"like"}
    assert "state" in {one[1] for one in found}


def test_crosses_that_no_two_rows_share_are_named(monkeypatch):
    rows = table() | {"half": np.arange(3000) // 2, "three": np.arange(3000) % 3, "request": np.arange(3000) // 4}
    side = rank.Id(side="context")
    fields = {"own": rank.Id(), "half": rank.Id(), "three": rank.Id(), "number": rank.Number(scale="quantile")}
    crosses = {
        "alone": rank.Cross(("own", "three")), "pairs": rank.Cross(("half", "number")),
        "often": rank.Cross(("three", "number")), "twice": rank.Cross(("half", "request")),
    }  # fmt: skip
    schema = rank.Schema({"labels": ("click",), "request": "request"}, fields | {"request": side} | crosses)
    data = rank.Impressions.read(rows, schema=schema)
    found = [re.match(r"Cross '(.*?)': (\d+)% of the rows", one) for one in find_rare_crosses(data)]
    assert [one[1] for one in found] == ["alone", "pairs"]
    assert found[0][2] == "0"
    assert 3 < int(found[1][2]) < 10  # two of a pair are in one sixteenth
    monkeypatch.setattr(module, "COUNTED", 2999)
    assert find_rare_crosses(data) == []
