"""Whole models: every side in a process of its own, from one seed."""

import math

import pytest

pytest.importorskip("transformers")

from tigon.bench.models import run_model
from tigon.bench.training import WARMUP_STEPS

SHAPE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}


def test_sides_start_from_the_same_weights_and_train():
    heard, finished = [], []
    rows = run_model(
        "llama-tiny", batch=2, seq=16, steps=2, sides=["hf", "tigon"], dtype="float32", device="cpu", overrides=SHAPE,
        say=heard.append, done=lambda rows: finished.append(len(rows)),
    )  # fmt: skip
    assert [row.status for row in rows] == ["ok", "ok"], [row.reason for row in rows]
    plain, fused = rows
    assert len(plain.losses) == len(plain.steps_ms) + WARMUP_STEPS == 2 + WARMUP_STEPS
    assert plain.losses == pytest.approx(fused.losses, abs=1e-3)
    assert abs(plain.losses[0] - math.log(128)) < 0.5  # random weights: uniform over the vocabulary
    assert len(set(plain.losses)) > 1
    for row in rows:
        assert row.tokens_per_s == pytest.approx(1e3 * 2 * 16 / row.step_ms)
        assert row.peak_gib is None
    assert finished == [1, 2]
    assert len(heard) == 2 * (2 + WARMUP_STEPS)


def test_a_side_that_fails_is_a_row():
    rows = run_model(
        "llama-tiny", batch=1, seq=16, steps=1, sides=["hf"], dtype="float32", device="cpu",
        overrides={"num_attention_heads": 3, **SHAPE},
    )  # fmt: skip
    assert rows[0].status == "failed"
    assert rows[0].reason
    assert rows[0].tokens_per_s is None


def test_a_side_that_hangs_is_ended():
    (row,) = run_model(
        "llama-tiny", batch=1, seq=16, steps=1, sides=["hf"], dtype="float32", device="cpu", timeout_s=0.2
    )
    assert row.status == "failed"
    assert "longer than" in row.reason
