"""The examples for PEFT and Accelerate run as a user runs them, each in a process of its own, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "host", "last"), [("peft_dora", "peft", "merged "), ("accelerate_loop", "accelerate", "epoch 20")]
)
def test_it_learns_and_reports(name, host, last, environment):
    pytest.importorskip("transformers")
    pytest.importorskip(host)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) >= 4
    assert losses[-1] < 0.5 * losses[0]
    assert re.search(rf"^{last}", done.stdout, re.MULTILINE)
    assert "Ran in the last step: head 1" in done.stdout
