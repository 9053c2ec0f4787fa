"""Result files: what is written is read back, and the tables say what the rows say."""

import json
import sys
from dataclasses import replace

import pytest
from harness import report
from harness.columns import number
from harness.runner import Row
from harness.training import RunResult

ROWS = [
    Row(
        "rms_norm", (32768, 4096), "bfloat16", "tigon-compact", forward_ms=0.12, backward_ms=0.23, total_ms=0.3456,
        total_range_ms=(0.3412, 0.3499), floor_ms=0.314, times_floor=1.1006, rate=3883.0, rate_unit="GB/s",
        peak_mib=12024.4, errors={"y": 2.0e-3, "dx": 3.1e-3},
    ),
    Row("rms_norm", (32768, 4096), "bfloat16", "other", status="wrong", reason="relative error above 0.01 in dx"),
    Row("rms_norm", (32768, 4096), "bfloat16", "absent", status="failed", reason="absent is not installed"),
]  # fmt: skip
SIDES = [
    RunResult(
        "llama-3-8b", "tigon", 16, 512, False, "bfloat16", tokens_per_s=13000.4, step_ms=630.1, peak_gib=69.04,
        losses=[12.125, 12.0625],
    ),
    RunResult("llama-3-8b", "hf", 16, 512, False, "bfloat16", status="failed", reason="out of memory"),
]  # fmt: skip


def operators():
    ceilings = {"copy_gbps": 4270.0, "matmul_tflops": 690.0, "matmul": "8192³ bfloat16"}
    return report.result("ops", ROWS, ceilings=ceilings)


def test_what_is_saved_is_loaded(tmp_path):
    content = operators()
    report.save(tmp_path / "deep" / "r.json", content)
    loaded = report.load(tmp_path / "deep" / "r.json")
    assert loaded == json.loads(json.dumps(content))
    assert loaded["environment"]["packages"]["torch"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]  # nothing half-written stays


@pytest.mark.parametrize(
    ("text", "match"),
    [("{", "not a result file"), ('{"kind": "x"}', "not a result file of"), ("[]", "not a result file of")],
)
def test_other_files_get_a_sentence(tmp_path, text, match):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        report.load(tmp_path / "r.json")
    report.save(tmp_path / "r.json", {**operators(), "schema": 0})
    with pytest.raises(ValueError, match="schema 0"):
        report.load(tmp_path / "r.json")


def test_a_kind_without_columns_is_shown_as_it_is():
    rows = [{"model": "m", "steps": 3, "curve": [1, 2], "date": "d"}, {"model": "n", "steps": None, "curve": []}]
    lines = report.to_text({**operators(), "kind": "study", "rows": rows}).splitlines()[1:]
    assert [line.split() for line in lines] == [["model", "steps"], ["m", "3"], ["n", "–"]]


def test_tables_say_what_the_rows_say():
    table = report.to_text(operators())
    for cell in ("32768×4096", "0.346 ±1.3%", "1.10×", "3,883", "12,024", "3.1e-3", "4,270 GB/s"):
        assert cell in table
    assert "WRONG: relative error above 0.01 in dx" in table
    assert "FAILED: absent is not installed" in table
    table = report.to_text(report.result("model", SIDES))
    for cell in ("16×512", "13,000", "630", "69.0", "12.12500", "12.06250", "FAILED: out of memory"):
        assert cell in table


def test_models_are_compared_with_the_plain_one():
    plain = replace(SIDES[1], status="ok", reason="", tokens_per_s=10000.0, step_ms=819.0, peak_gib=100.0)
    table = report.to_text(report.result("model", [replace(SIDES[0], side="floor"), SIDES[0], plain])).splitlines()
    assert "13,000 (+30.0%)" in table[3]
    assert "69.0 (-31.0%)" in table[3]
    assert "(" not in table[2] + table[4], "a floor is no side"
    other = report.result("model", [SIDES[0], replace(plain, seq=1024)])
    assert "(" not in report.to_text(other).split("\n", 2)[2], "of another case"


def test_columns_that_say_nothing_are_left_out():
    header, _ = report.cells(report.result("ops", ROWS[2:]))
    assert header == ["op", "shape", "dtype", "by", "remark"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.0123456, "0.0123"), (9.876, "9.88"), (157.84, "158"), (4270.3, "4,270")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_no_path_of_this_machine_is_recorded(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/benchmarks/run.py", "--output", "/home/me/out"])
    assert operators()["command"] == "run.py --output out"


def test_files_are_named_after_the_device():
    content = operators()
    content["environment"]["device"] = "NVIDIA H200"
    assert report.file_name(content) == "h200-ops.json"
    assert report.file_name(content, "models") == "h200-models.json"


def test_merged_runs_keep_the_last_of_each_case():
    def run(*rows, copy_gbps):
        return report.result("ops", rows, ceilings={"copy_gbps": copy_gbps, "matmul_tflops": 690.0, "matmul": ""})

    wide, narrow = (Row("rope", shape, "bfloat16", "tigon", total_ms=1.0) for shape in ((1, 8), (1, 2)))
    again = Row("rope", (1, 8), "bfloat16", "eager", total_ms=2.0)
    merged = report.merge([run(wide, narrow, copy_gbps=4000.0), run(again, copy_gbps=4100.0)])
    assert [(row["shape"], row["implementation"]) for row in merged["rows"]] == [((1, 8), "eager"), ((1, 2), "tigon")]
    assert [one["ceilings"]["copy_gbps"] for one in merged["runs"]] == [4000.0, 4100.0]
    assert len(report.merge([merged, run(narrow, copy_gbps=4200.0)])["runs"]) == 3


def test_runs_on_different_devices_are_not_merged():
    one, other = operators(), operators()
    other["environment"]["device"] = "another"
    with pytest.raises(ValueError, match="differ in device"):
        report.merge([one, other])


def test_charts_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from harness.plots import plot

    for content in (operators(), report.result("model", SIDES)):
        plot(content, tmp_path / "r.png")
        assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "r.png").unlink()
