"""TRL's fused head as a peer: the same losses, with what its trainers import and without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob")

from cases import OPS
from cases.inputs import DTYPES
from harness.runner import Case, check

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOSSES = [name for name, op in OPS.items() if "trl" in op.implementations]


def test_it_stands_beside_every_loss_that_its_trainers_fuse():
    assert {
        "linear_cross_entropy",
        "linear_cross_entropy-ignored50",
        "linear_logprob",
        "dpo",
        "grpo",
        "distill",
    } <= set(LOSSES)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", LOSSES)
def test_it_computes_the_same_loss(name, dtype):
    op = OPS[name]
    row = check(Case(op, op.tiny, DTYPES[dtype]), CPU, "trl")
    ours = check(Case(op, op.tiny, DTYPES[dtype]), CPU, "eager")
    assert row.status == "ok" or row.reason == ours.reason, row.reason
    assert row.errors.keys() == ours.errors.keys()


def test_it_needs_no_datasets():
    """On a machine that has TRL's wheel and not what its trainers import."""
    code = """
import sys
sys.modules["datasets"] = sys.modules["pandas"] = None
import torch
from cases import OPS
from harness.runner import Case, check
for name in ("dpo", "distill"):
    row = check(Case(OPS[name], OPS[name].tiny, torch.float32), torch.device("cpu"), "trl")
    assert row.status == "ok", row.reason
"""
    paths = [str(BENCHMARKS), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
