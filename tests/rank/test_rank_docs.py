"""The page on ranking runs as a reader runs it, and every name is described."""

import inspect
import re
from pathlib import Path

import pytest

from tigon import rank
from tigon.lazy import homes_of

PAGE = Path(__file__).parents[2] / "docs" / "rank" / "index.md"
NAMES = [(module, name) for module in (rank.losses, rank.metrics) for name in module.__all__]


def test_the_code_of_the_page_runs(capsys):
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert names["scores"].grad.abs().sum() > 0
    assert names["found"].left_out == 1
    low, high, _ = names["interval"]
    assert low <= names["found"].mean <= high
    assert "left out" in capsys.readouterr().out


def test_the_code_of_the_page_on_tables_runs(capsys, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", (PAGE.parent / "data.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks[:1]:
        exec(compile(block, "data.md", "exec"), names)
    assert names["data"].schema.fields["minutes"].kind == "Id"
    # As the page says: the event of ten o'clock is not in the history of the request of ten o'clock.
    assert names["batch"].history_offsets.tolist() == [0, 1, 2]
    assert names["batch"].age.tolist() == [38 * 3600, 10.5 * 3600]
    assert names["data"].notes == ["Histories leave out 1 event at the very time of a request of the same user."]
    for block in blocks[1:]:
        exec(compile(block, "data.md", "exec"), names)
    assert [len(part) for part in (names["train"], names["held"], names["later"])] == [1, 1, 2]
    assert names["later"].schema == names["data"].schema
    assert names["schema"] != names["data"].schema
    assert capsys.readouterr().out.endswith("\n2 5 2\n1\n")


def test_the_page_on_tables_lists_fields_and_endings():
    from tigon.rank.fields import KINDS
    from tigon.tables.formats import COMPRESSED, FORMATS

    text = (PAGE.parent / "data.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]\w+)", text, re.MULTILINE)) == set(KINDS)
    endings = text.partition("| ending | read as |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\.\w+)`", endings)) == {*FORMATS, *COMPRESSED}


def test_the_public_names_are_the_modules():
    assert set(homes_of("tigon.rank")) == set(rank.__all__) >= {"losses", "metrics"}
    public = {name for module in (rank.losses, rank.metrics) for name, value in vars(module).items()
              if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"}  # fmt: skip
    assert public <= {name for _, name in NAMES}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_name_is_described_here_and_on_the_page(module, name):
    value = getattr(module, name)
    doc = inspect.getdoc(value)
    if inspect.isfunction(value):
        arguments = doc.partition("\nArgs:\n")[2].partition("\nReturns: ")[0]
        assert "\nRaises: ValueError " in doc
        parameters = inspect.signature(value).parameters
        assert len(parameters) <= 6
        assert not [one for one in parameters if not re.search(rf"(^    |\. |, ){one}[:,]", arguments, re.MULTILINE)]
    else:
        assert all(re.search(rf"\b{field}\b", doc.partition("\nAttributes:\n")[2]) for field in value._fields)
    members = PAGE.read_text().partition(f"::: {module.__name__}\n")[2].partition("members: [")[2].partition("]")[0]
    assert name in re.split(r",\s*", members)
