"""The examples of the trainers run as a user runs them, and learn. One process for all: importing TRL is most of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for package, least in (("transformers", None), ("accelerate", None), ("datasets", None), ("trl", "1.16")):
    pytest.importorskip(package, minversion=least)
EXAMPLES = Path(__file__).parents[2] / "examples"
# What is logged, and whether it grows or falls; what ran in the last step.
SCRIPTS = {
    "hf_trainer": ("loss", -1, "head 1"),
    "trl_sft": ("loss", -1, "policy linear_logprob 1"),
    "trl_dpo": ("loss", -1, "policy linear_logprob 1, reference linear_logprob 1"),
    "trl_kto": ("loss", -1, "policy linear_logprob 2, reference linear_logprob 2"),
    "trl_orpo": ("loss", -1, "orpo 1"),
    "trl_grpo": ("reward", 1, "policy linear_logprob 1"),
    "trl_gkd": ("loss", -1, "distill 1"),
}
RUN = """
import runpy, sys
for script in sys.argv[1:]:
    print("=====", script, flush=True)
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory, environment):
    """What each example printed."""
    # One thread, for the same numbers everywhere.
    path = os.pathsep.join([str(EXAMPLES), *sys.path])
    environment = environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *(str(EXAMPLES / f"{name}.py") for name in SCRIPTS)],
        capture_output=True, text=True, env=environment, timeout=400, cwd=tmp_path_factory.mktemp("examples"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    parts = re.split(r"^===== (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    return {Path(script).stem: text for script, text in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_learns_and_reports(name, said):
    key, sign, ran = SCRIPTS[name]
    values = [float(x) for x in re.findall(rf"'{key}': '(-?[\d.e-]+)'", said[name])]
    assert len(values) == 4, said[name]
    assert sign * (values[-1] - values[0]) > 0.02 * abs(values[0])
    assert re.search(rf"Ran in the last (of 20 steps|step): {ran}", said[name]), said[name]
