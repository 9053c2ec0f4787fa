"""The comparison with the recorded ratios: what it reads, and what it prints."""

import dataclasses
import json

import pytest
from cases import OPS
from harness import report


@pytest.fixture(scope="module")
def compare(script):
    return script("compare")


def test_every_quoted_case_of_tigon_is_recorded(compare):
    recorded = compare.read_op_ratios(compare.RESULTS)
    quoted = {
        (op.name, shape, "bfloat16") for op in OPS.values() for shape in op.shapes if "tigon" in op.implementations
    }
    assert {name for name, *_ in quoted - set(recorded)} == set()
    keys = {key[1:4] for key in compare.read_model_ratios(compare.RESULTS) if not key[4]}
    assert keys >= set(compare.MODELS)


def test_only_what_differs_is_printed_and_the_slowest_first(compare):
    found = [compare.Comparison("a", 1.0, 1.02), compare.Comparison("b", 1.0, 0.9), compare.Comparison("c", 2.0, 2.2)]
    lines = compare.table(found, 3.0).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["c", "b"]
    assert lines[1].endswith("+10.0 %")
    assert lines[-1] == "2 of 3 cases differ by more than 3 %"


def test_a_run_leaves_its_rows_and_says_what_it_left_out(compare, tmp_path, monkeypatch, capsys):
    small = {name: dataclasses.replace(OPS[name], shapes=(OPS[name].tiny,)) for name in ("rms_norm", "swiglu")}
    monkeypatch.setattr(compare, "OPS", small)
    monkeypatch.setattr(compare, "read_op_ratios", lambda folder: {("rms_norm", OPS["rms_norm"].tiny, "bfloat16"): 1.0})
    monkeypatch.setattr(compare, "BRIEF", compare.Settings(1, 1.0, 1.0))
    compare.main(["--output", str(tmp_path), "--only", "rms_norm,swiglu"])
    out = capsys.readouterr().out
    assert "not compared: swiglu" in out
    assert "1 of 1 cases" in out
    rows = json.loads((tmp_path / "compare-ops.json").read_text())["rows"]
    assert [(row["op"], row["errors"]) for row in rows] == [("rms_norm", {})]
    assert report.load(tmp_path / "compare-ops.json")["kind"] == "ops"
