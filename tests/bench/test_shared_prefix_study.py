"""benchmarks/shared_prefix.py: every side computes the same, and its file can be read."""

import json
import sys

import pytest
from harness import report

pytest.importorskip("transformers")


def test_a_tiny_run(script, monkeypatch, tmp_path, capsys):
    study = script("shared_prefix")
    monkeypatch.setattr(study, "TINY_CASES", ((2, 24, 3, 8),))
    monkeypatch.setattr(study, "STEPS", 1)
    monkeypatch.setattr(sys, "argv", ["shared_prefix.py", "--tiny", "--output", str(tmp_path)])
    assert study.main() == 0
    (path,) = tmp_path.glob("*-shared-prefix.json")
    rows = report.load(path)["rows"]
    assert [(row["side"], row["checkpointing"]) for row in rows] == [
        (s, on) for on in (True, False) for s in study.SIDES
    ]
    for row in rows:
        assert row["status"] == "ok"
        assert row["step_ms"] > 0
        if row["side"] == "trl":
            assert row["logprob_apart"] is None
        else:
            assert row["logprob_apart"] < 1e-5
            assert row["gradient_cosine"] > 0.9999
    assert "2 × (24 + 3 × 8), checkpoints" in capsys.readouterr().out
    assert json.loads(path.read_text())["kind"] == "shared-prefix"
