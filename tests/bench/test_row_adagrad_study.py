"""benchmarks/row_adagrad.py: every side takes the step that its formula has, and the file says what was measured."""

import pytest
import torch
from harness import report


@pytest.fixture(scope="module")
def study(script):
    return script("row_adagrad")


def test_a_small_run(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "measure_ceilings", lambda *_: study.Ceilings(10.0, 1.0, "by hand"))
    study.main(["--small", "--output", str(tmp_path), "--name", "a.json"])
    rows = report.load(tmp_path / "a.json")["rows"]
    assert [(row["rows"], row["side"]) for row in rows] == [(v, side) for v, _ in study.SMALL for side in study.SIDES]
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert 0 < row["error"] < 1e-4
        assert 0 < row["touched"] < row["rows"]
        assert row["floor_ms"] == pytest.approx(row["touched"] * (12 * row["width"] + 16) / 10e6)
        numbers = 1 if row["side"].startswith("tigon") else row["width"]
        assert row["state_mb"] == pytest.approx(4e-6 * row["rows"] * numbers)
        assert row["total_ms"] > 0
    assert "3,000 × 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda table: table.neg_(), "error above"), (lambda table: table[0].add_(1), "no gradient")],
)
def test_a_wrong_step_is_seen(study, change, reason):
    table = torch.nn.Parameter(torch.randn(8, 4))
    at, grad = torch.tensor([2, 5]), torch.randn(2, 4)
    row = study.Step(8, 4, 2, "tigon, rows", 1.0)
    optimizer = study.optimizer_of(row.side, table)
    table.grad = torch.sparse_coo_tensor(at[None], grad, (8, 4), is_coalesced=True, check_invariants=False)

    def step():
        optimizer.step()
        with torch.no_grad():
            change(table)

    study.check(row, step, table, at, grad)
    assert row.status == "wrong"
    assert reason in row.reason
