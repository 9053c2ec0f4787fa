"""The examples of the trainers run as a user runs them, and learn."""

import re
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_learns_and_reports(name, example):
    key, sign, ran = SCRIPTS[name]
    said = example(EXAMPLES / f"{name}.py")
    values = [float(x) for x in re.findall(rf"'{key}': '(-?[\d.e-]+)'", said)]
    assert len(values) == 4, said
    assert sign * (values[-1] - values[0]) > 0.02 * abs(values[0])
    assert re.search(rf"Ran in the last (of 20 steps|step): {ran}", said), said
