"""TRL's fused head as a peer: the same losses, with what its trainers import and without."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("trl.kernels.chunked_logprob")

from tigon.bench.cases import OPS
from tigon.bench.inputs import DTYPES
from tigon.bench.runner import check

CPU = torch.device("cpu")
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
    row = check(op, op.tiny, DTYPES[dtype], CPU, "trl")
    ours = check(op, op.tiny, DTYPES[dtype], CPU, "eager")
    assert row.status == "ok" or row.reason == ours.reason, row.reason
    assert row.errors.keys() == ours.errors.keys()


def test_it_needs_no_datasets():
    """On a machine that has TRL's wheel and not what its trainers import."""
    code = """
import sys
sys.modules["datasets"] = sys.modules["pandas"] = None
import torch
from tigon.bench.cases import OPS
from tigon.bench.runner import check
for name in ("dpo", "distill"):
    row = check(OPS[name], OPS[name].tiny, torch.float32, torch.device("cpu"), "trl")
    assert row.status == "ok", row.reason
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
