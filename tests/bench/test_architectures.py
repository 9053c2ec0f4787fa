"""benchmarks/architectures.py on small widths: what it records, and that a wrong gradient does not pass."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from harness import report

FILE = Path(__file__).parents[2] / "benchmarks" / "architectures.py"
SMALL = ["vocab_size=256", "hidden_size=64", "intermediate_size=96", "num_attention_heads=4", "num_key_value_heads=2"]


@pytest.fixture(scope="module")
def architectures(script):
    return script("architectures")


def run(architectures, folder, name, *more):
    size = ["--batch", "1", "--seq", "24", "--layers", "1", "--steps", "1"]
    architectures.main(["--output", str(folder), "--only", name, *size, *more, "--set", *SMALL, "head_dim=16"])
    (file,) = folder.glob("*-architectures.json")
    return report.load(file)


def test_it_records_both_sides(architectures, tmp_path, monkeypatch):
    monkeypatch.setattr(architectures, "ROUNDS", 1)
    content = run(architectures, tmp_path, "qwen3-8b,no-such-model")
    plain, fused, missing, _ = content["rows"]
    assert (plain["side"], fused["side"]) == ("hf", "tigon")
    assert plain["status"] == fused["status"] == "ok", fused["reason"]
    assert fused["calls"] == {"head": 1, "norm": 5, "add_norm": 1, "mlp": 1, "rotary": 1, "qk_norm": 1, "linear": 1}
    assert 0 < fused["error"] < 0.05
    assert fused["step_ms"] > 0
    assert missing["status"] == "failed"
    assert "no-such-model" in missing["reason"]
    assert "| qwen3-8b, 1 layers | 1×24 | tigon |" in report.to_markdown(content)


def test_a_wrong_gradient_is_named(architectures, tmp_path, monkeypatch):
    from tigon.parts import norm

    right = norm.rms_norm
    # Forward alike, gradients a tenth too large.
    scaled = lambda x, *a, **k: right(x * 1.1 - (x * 0.1).detach(), *a, **k)  # noqa: E731
    monkeypatch.setattr(architectures, "ROUNDS", 1)
    monkeypatch.setattr(norm, "rms_norm", scaled)
    fused = run(architectures, tmp_path, "llama-3.1-8b")["rows"][1]
    assert fused["status"] == "wrong"
    assert "more than 2 × the plain error in model." in fused["reason"]


def test_errors_are_relative(architectures):
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2)}
    assert architectures.errors({"a": torch.tensor([3.0, 4.5])}, exact) == {"a": pytest.approx(0.1)}
