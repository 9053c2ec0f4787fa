"""The study of packing on a CPU: every side runs, and all have the same loss."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def packing(script):
    return script("studies/packing")


def test_all_sides_have_the_same_loss(packing, monkeypatch):
    monkeypatch.setattr(packing, "FIRST", 6)
    saved = []
    rows = packing.measure_all(
        (("tiny", "llama-tiny", 2),), torch.device("cpu"), lambda rows: saved.append(len(rows)),
        packing.draw_lengths(10, 12, 0.8, 40), 48, vocab_size=64,
    )  # fmt: skip
    assert [row.side for row in rows][:5] == list(packing.SIDES)
    assert saved
    assert {row.status for row in rows[:5]} == {"ok"}, packing.table(rows)
    assert [row.loss for row in rows[:5]] == pytest.approx([rows[0].loss] * 5, rel=1e-5)
    padded, *_, packed = rows[:5]
    assert padded.computed > 1.3
    assert packed.computed == rows[2].computed == 1
    assert "tokens/s" in packing.table(rows)


def test_shares_of_padding(packing, monkeypatch):
    monkeypatch.setattr(packing, "DISTRIBUTIONS", ((300, 1.0, 2048),))
    assert packing.shares().splitlines()[-1] == "| 300 | 1.0 | 2,048 | 52 % | 64 % | 75 % | 0.0 % |"
