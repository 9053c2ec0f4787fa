"""The script of the page on several GPUs runs on two processes. What one process runs is in tests/pages."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "several-gpus.md"


def test_shards(tmp_path, example):
    pytest.importorskip("transformers")
    if torch.cuda.device_count() == 1:
        pytest.skip("two processes cannot share a GPU")
    small, script, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1:]
    for name, code in (("small.py", small), ("train.py", script)):
        (tmp_path / name).write_text(code)
    example(tmp_path / "small.py", tmp_path)
    printed = example(tmp_path / "train.py", tmp_path, processes=2)
    assert len(re.findall(r"^step \d  loss 5\.\d", printed, re.MULTILINE)) == 4
    assert "Ran in the last step: head 1" in printed
