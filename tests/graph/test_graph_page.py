"""The page on graphs runs as a reader runs it, and every public name is described."""

import re
from pathlib import Path

import pytest

from tigon import graph

PAGE = Path(__file__).parents[2] / "docs" / "graph.md"


def test_the_code_of_the_page_runs(capsys, tmp_path, monkeypatch):
    for package in ("safetensors", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    before, after = map(float, capsys.readouterr().out.split())
    assert before < 0.6 < before + 0.2 < after
    assert names["angles"].shape == (3, 3, 4)
    assert (tmp_path / "g2r" / "config.json").is_file()
    assert (tmp_path / "angles.png").is_file()


def test_every_name_is_on_the_page():
    assert set(re.findall(r"^::: tigon\.graph\.(\w+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == set(
        graph.__all__
    )
