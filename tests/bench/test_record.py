"""benchmarks/h200.py: what the record holds, and that its parts and interrupted runs make one file."""

from pathlib import Path

import pytest

from tigon.bench import report
from tigon.bench.cases import OPS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "h200.py"


@pytest.fixture(scope="module")
def h200(script):
    return script("h200")


def test_every_operator_is_recorded_in_three_dtypes(h200):
    keys = [case.key for kind in ("memory", "matmul") for case in h200.record(kind)]
    assert len(keys) == len(set(keys))
    for name, op in OPS.items():
        every = {"bfloat16", "float16", "float32"} if op.flops is None or op.extra else {"bfloat16"}
        assert {key[2] for key in keys if key[0] == name} == every


def test_the_record_has_the_widths_and_row_counts_of_the_norms(h200):
    shapes = {case.shape for case in h200.record("memory") if case.op.name == "layer_norm"}
    assert {n for _, n in shapes} >= {2304, 3584, 4096, 5120, 12288, 16384}
    assert {m for m, _ in shapes} >= {1, 17, 4096, 10**6}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_cover_the_record_once_and_evenly(h200, count):
    cases = h200.record("memory")
    parts = [h200.part_of(cases, f"{i + 1}/{count}") for i in range(count)]
    assert sorted(case.key for part in parts for case in part) == sorted(case.key for case in cases)
    assert max(map(len, parts)) < 2 * min(map(len, parts))


def test_a_part_that_is_none_is_refused(h200):
    with pytest.raises(SystemExit, match="I/N"):
        h200.part_of([], "4/3")


@pytest.fixture
def tiny_record(h200, monkeypatch):
    cases = [h200.Case(OPS["swiglu"], shape, main=shape == (4, 8)) for shape in ((4, 8), (2, 8), (1, 8))]
    monkeypatch.setattr(h200, "record", lambda kind: cases)
    return h200


def run(h200, folder, *arguments):
    h200.main(
        ["--output", str(folder), "--record", "memory", "--small", "--peers", "eager", "--name", "r.json", *arguments]
    )
    return report.load(folder / "r.json")


def test_what_is_done_is_kept_and_not_measured_again(tiny_record, tmp_path, monkeypatch):
    cases = tiny_record.record("memory")
    monkeypatch.setattr(tiny_record, "record", lambda kind: cases[:2])
    first = run(tiny_record, tmp_path)
    monkeypatch.setattr(tiny_record, "record", lambda kind: cases)
    second = run(tiny_record, tmp_path / "next", "--resume", str(tmp_path / "r.json"))
    assert [tuple(row["shape"]) for row in second["rows"]] == [(4, 8)] * 2 + [(2, 8)] * 2 + [(1, 8)] * 2
    assert second["rows"][:4] == first["rows"]
    assert len(second["runs"]) == 2


def test_after_the_budget_no_case_is_started(tiny_record, tmp_path, capsys):
    (tmp_path / "r.json").write_text(report.json.dumps(report.result("ops", [])))
    run(tiny_record, tmp_path, "--budget", "0", "--resume", str(tmp_path / "r.json"))
    assert "left out, the budget of 0 s was spent: swiglu 2×8 bf16" in capsys.readouterr().out


def test_further_shapes_check_tigon_alone(tiny_record, tmp_path):
    rows = run(tiny_record, tmp_path)["rows"]
    assert [bool(row["errors"]) for row in rows] == [True, True, True, False, True, False]
