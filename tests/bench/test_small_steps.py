"""benchmarks/small_steps.py: every side trains on the same tokens, and the file says what was measured."""

import json
import sys

import pytest

from tigon.training.capture import GraphStep

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def module(script):
    return script("small_steps")


@pytest.fixture
def study(module, monkeypatch):
    monkeypatch.setattr(module, "CASES", (("Llama", "llama-3.2-1b", {}, ((1, 256),)),))
    monkeypatch.setattr(module, "ROUNDS", 2)
    return module


def test_a_tiny_run(study, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["small_steps.py", "--tiny", "--output", str(tmp_path)])
    assert study.main() == 0
    (path,) = tmp_path.glob("*-small-steps.json")
    content = json.loads(path.read_text())
    steps, lengths = content["rows"][:4], content["rows"][4:]
    assert [row["side"] for row in steps] == list(study.SIDES)
    plain = steps[0]["losses"]
    assert len(plain) == study.WARMUP + 2
    for row in steps:
        assert row["status"] == "ok"
        assert len(row["steps_ms"]) == 2
    assert steps[1]["losses"] == pytest.approx(plain, rel=1e-4)
    # The graphs' sides go on training the same models.
    assert steps[3]["losses"] == pytest.approx(steps[2]["losses"], rel=1e-4)
    for row in lengths:
        assert len(set(row["seqs"])) == len(row["first_ms"]) == 3
        assert len(row["later_ms"]) == 3 * (study.SIGHTS - 1)
    said = capsys.readouterr().out
    assert "Llama 1×32" in said
    assert said.count("first sight") == 2


def test_a_side_that_fails_keeps_the_others(study, monkeypatch, tmp_path, capsys):
    def fails(self, ids):
        raise RuntimeError("no graph here")

    monkeypatch.setattr(GraphStep, "__call__", fails)
    monkeypatch.setattr(sys, "argv", ["small_steps.py", "--tiny"])
    assert study.main() == 0
    said = capsys.readouterr().out
    assert said.count("RuntimeError: no graph here") == 2
    assert "first sight" in said
