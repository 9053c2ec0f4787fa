"""The examples for PEFT and Accelerate run as a user runs them, each in a process of its own, and learn."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "host", "last"), [("peft_dora", "peft", "merged "), ("accelerate_loop", "accelerate", "epoch 20")]
)
def test_it_learns_and_reports(name, host, last, example):
    pytest.importorskip("transformers")
    pytest.importorskip(host)
    said = example(EXAMPLES / f"{name}.py")
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", said)]
    assert len(losses) >= 4
    assert losses[-1] < 0.5 * losses[0]
    assert re.search(rf"^{last}", said, re.MULTILINE)
    assert "Ran in the last step: head 1" in said
