"""The page on graphs describes every public name."""

import re
from pathlib import Path

from tigon import graph

PAGE = Path(__file__).parents[2] / "docs" / "graph.md"


def test_every_name_is_on_the_page():
    assert set(re.findall(r"^::: tigon\.graph\.(\w+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == set(
        graph.__all__
    )
