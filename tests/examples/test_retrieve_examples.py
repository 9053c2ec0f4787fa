"""The examples of retrieval run as a user runs them."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_from_a_parquet_file_to_filtered_hits(example):
    for package in ("pyarrow", "pandas", "safetensors"):
        pytest.importorskip(package)
    said = example(EXAMPLES / "retrieve_filters.py")
    assert "skills has all of 'python', 'cuda'" in said
    hits = re.findall(r"^\d +0 +(\d) .*job-\d+ +(us|ca) +\[(.*?)\] +(\S+) +(\S+)", said, re.MULTILINE)
    assert [rank for rank, *_ in hits] == list("01234")
    for _, _, skills, salary, posted in hits:
        assert {"python", "cuda"} <= set(skills.split(", "))
        assert "sales" not in skills
        assert salary == "NaN" or float(salary) >= 100_000
        assert posted >= "2026-02-01"
    assert re.search(r"best now: \['job-new', 'job-\d+'\] \[1.0, 0\.\d+\]", said)
