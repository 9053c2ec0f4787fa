"""The code of the pages on retrieval runs as a reader runs it, block after block."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "retrieve"


@pytest.mark.parametrize("page", ["index", "filters", "updates", "batching", "train", "links", "serve"])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    for package in ("pyarrow", "pandas", "safetensors") if page in ("index", "links") else ("safetensors",):
        pytest.importorskip(package)
    if page == "serve":
        pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= (1 if page == "train" else 3)
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), names)
    said = capsys.readouterr().out
    if page == "index":
        assert "job-" in said
        assert "GiB on the device" in said
        assert "and country is 'us'" in said
        found = names["hits"].ids
        assert (found % 2 == 1).all()
    if page == "links":
        assert "occupation=nurse → tags=ward, +" in said
        assert (names["hits"].ids >= 0).any()
    if page == "filters":
        assert said == "2\n"


def test_the_code_for_several_gpus_runs_on_one(tmp_path, monkeypatch, process_group):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "several-gpus.md").read_text(), re.MULTILINE | re.DOTALL
    ):
        exec(compile(block, "several-gpus.md", "exec"), names)
    assert names["hits"].ids.shape == (4, 10)
    assert len(names["index"]) == len(names["alone"]) == 500
    assert names["table"].grad.abs().sum() > 0


def test_the_code_for_those_who_come_from_faiss_runs():
    page = DOCS.parent / "how-to" / "from-faiss.md"
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    assert names["D"].shape == names["I"].shape == (5, 10)
    best = (names["xq"] @ names["xb"].T).argmax(1)
    assert names["I"][:, 0].tolist() == best.tolist()
    assert (names["hits"].ids >= 0).all()


def test_the_table_of_columns_says_what_the_columns_have():
    from tigon.retrieve import Category, Number, Tags, Timestamp

    text = (DOCS / "filters.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)\([^|]*\| [^|]* \| [^|]* \| ([^|]*) \|$", text, re.MULTILINE))
    spoken = {"in": ["is_in"], "null": ["is_null"], "has_any": ["has", "has_any"]}
    for kind in (Category, Tags):
        expected = [word for operation in kind.operations for word in spoken.get(operation, [operation])]
        assert re.findall(r"`([^`]+)`", rows[kind.kind]) == expected
    assert [Timestamp(unit).bits for unit in ("s", "m", "h", "D")] == [32, 27, 21, 16]
    assert {*re.findall(r"`([^`]+)`", text.partition("| `Number()`")[2].split("|")[3])} == {
        word for operation in (*Number.operations, "between") for word in spoken.get(operation, [operation])
    }
