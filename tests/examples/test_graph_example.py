"""The example of graphs runs as a user runs it."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_embeddings_of_nodes_need_few_labels(example):
    pytest.importorskip("sklearn")
    said = example(EXAMPLES / "g2r.py")
    told = {name: float(share) for name, share in re.findall(r"^(\w+): (0\.\d+) told right", said, re.MULTILINE)}
    assert told["words"] < 0.5
    assert told["fitted"] > max(0.85, told["before"])
    first, last = map(float, re.search(r"^loss (\S+) to (\S+)$", said, re.MULTILINE).groups())
    assert last < first
