"""Every row of every result file says when and by which command it was measured, or is in a list with the reason."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import report
from harness.runner import Row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MERGED = "several runs in one file, and which of them measured a row was not recorded"
RESUMED = "a run that went on with an earlier file, whose command was not recorded"
# How many rows of a file have no date or no command, and why. No new file may stand here.
EXCEPTIONS = {
    "h100-80gb-hbm3-sweep.json": (291, MERGED),
    "h100-matmul.json": (51, MERGED),
    "h200-architectures.json": (20, MERGED),
    "h200-losses.json": (15, MERGED),
    "h200-matmul-prefix.json": (15, MERGED),
    "h200-matmul.json": (179, MERGED),
    "h200-models.json": (18, "measured on 22 November 2026 or before, by commands that were not recorded"),
    "h200-rank-prompts.json": (62, "its command tells in words of the runs that it was put together from"),
    "h200-retrieve-towers.json": (21, RESUMED),
    "h200-sweep.json": (292, MERGED),
}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_every_row_says_when_and_how_it_was_measured(path):
    content = report.load(path)
    unknown = [row for row in content["rows"] if report.find_origin(content, row) is None]
    assert len(unknown) == EXCEPTIONS.get(path.name, (0, ""))[0]
    known = [report.find_origin(content, row) for row in content["rows"] if row not in unknown]
    assert all(
        (date.startswith("20") and "benchmarks/" in how) or "tigon" in how or "make" in how for date, how in known
    )


def ops(*rows: Row, **more: Any) -> dict[str, Any]:
    return {**report.result("ops", rows), **more}


def test_a_row_keeps_the_run_that_measured_it_when_files_are_merged(monkeypatch):
    monkeypatch.setattr(report, "command", lambda: "first")
    old = Row("rope", (1, 8), "bfloat16", "tigon", total_ms=1.0)
    first = ops(old)
    monkeypatch.setattr(report, "command", lambda: "second")
    assert ops(old)["rows"][0]["command"] == "first", "a later save of the same run"
    both = report.merge([first, ops(Row("rope", (1, 9), "bfloat16", "tigon", total_ms=1.0))])
    assert [report.find_origin(both, row)[1] for row in both["rows"]] == ["first", "second"]
    assert both["command"] == "second"
    for row in first["rows"]:
        del row["date"], row["command"]
    assert report.find_origin(first, first["rows"][0]) == (first["date"], "first")
    unknown = report.merge([{**first, "runs": [{}, {}]}, ops(Row("rope", (1, 9), "bfloat16", "tigon"))])
    assert report.find_origin(unknown, unknown["rows"][0]) is None


def test_a_kind_without_columns_does_not_show_them():
    @dataclass
    class Own:
        value: float
        date: str = ""
        command: str = ""

        def to_dict(self):
            return vars(self)

    content = report.result("own", [Own(1.0)])
    assert content["rows"][0]["date"] == content["date"]
    assert report.cells(content)[0] == ["value"]
