"""The example of compression runs as a user runs it."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_trained_model_is_stored_in_fewer_bytes_and_still_knows_who_sits_where(example):
    pytest.importorskip("safetensors")
    said = example(EXAMPLES / "compress_model.py")
    whole, packed, opened = (float(x) for x in re.findall(r"^loss (\d+\.\d+)", said, re.MULTILINE))
    assert whole < 1.2  # it has learned: untrained it costs log 320 = 5.8
    assert packed < whole + 0.05
    assert opened == pytest.approx(packed, abs=0.02)  # embeddings in bytes too
    assert "→ bits" in said
    before, now = (
        int(x.replace(",", "")) for x in re.search(r"^file ([\d,]+) bytes before, ([\d,]+)", said, re.M).groups()
    )
    assert now < 0.6 * before
