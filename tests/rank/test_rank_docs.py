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
    assert capsys.readouterr().out.endswith("\n2 5 2\n2\n1\n")


def test_the_page_on_tables_lists_fields_and_endings():
    from tigon.rank.fields import KINDS
    from tigon.tables.formats import COMPRESSED, FORMATS

    text = (PAGE.parent / "data.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]\w+)", text, re.MULTILINE)) == set(KINDS)
    endings = text.partition("| ending | read as |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\.\w+)`", endings)) == {*FORMATS, *COMPRESSED}


def test_the_code_of_the_page_on_fitting_runs(capsys, tmp_path, monkeypatch):
    for package in ("pyarrow", "accelerate"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", (PAGE.parent / "fit.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "fit.md", "exec"), names)
    fitted, found = names["fitted"], names["found"].labels["click"]["auc"]
    assert found.value == pytest.approx(max(row["auc"] for row in fitted.history), abs=1e-6)
    assert found.low <= found.value <= found.high
    assert "Measured(value=" in capsys.readouterr().out


def test_the_code_of_the_page_on_interactions_runs(capsys, tmp_path, monkeypatch):
    for package in ("pyarrow", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tigon.rank.interacting.tables.STEPS", 0)
    monkeypatch.setattr("tigon.rank.interacting.tables.EPOCHS", 10)
    names = {}
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (PAGE.parent / "interactions.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "interactions.md", "exec"), names)
    assert set(names["of_ranker"].names) == {"hour", "price", "age", "country"}
    assert names["found"][0].features == ("hour", "price")
    assert names["fitted"].loss[0] < 0.8 * names["fitted"].constant
    assert (tmp_path / "pairs.png").stat().st_size > 10_000
    assert rank.Schema.load(tmp_path / "schema.json") == names["schema"]
    assert "hour × price" in names["data"].schema.rows
    assert "share" in capsys.readouterr().out


def test_the_page_on_fitting_names_what_the_library_has():
    pytest.importorskip("accelerate")
    from tigon.cli.rank.fitting import WRITTEN
    from tigon.rank.fitting import LOSSES

    text = (PAGE.parent / "fit.md").read_text()
    rows = set(re.findall(r"^\| `([\w./-]+)` \|", text, re.MULTILINE))
    assert rows == {"model/", "run.json", "checkpoint-N/"} | {*WRITTEN} - {"model"}
    losses = text.partition("- **Which loss**: ")[2].partition("\n")[0]
    assert set(re.findall(r"`(\w+)`", losses)) == set(LOSSES)


def test_the_code_of_the_page_on_sequences_runs(capsys, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    # What takes seconds has a test of its own.
    monkeypatch.setattr(rank.LiGR, "export", lambda ranker, folder: (Path(folder), Path(folder)))
    names = {}
    page = (PAGE.parents[1] / "how-to" / "rank-sequences.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "rank-sequences.md", "exec"), names)
    assert names["data"].notes == []
    assert names["scores"].shape == (5,)
    assert names["cache"].lengths == (5, 3)  # a context, and the events twice
    assert names["codes"].shape == (2, 2)
    assert (names["place"] >= 1).all()
    assert type(names["ranker"]) is rank.LiGR
    options = set(re.findall(r"^\| `(\w+)=", page, re.MULTILINE))
    assert options < set(inspect.signature(rank.LiGR).parameters)
    # 512 · (512 + 1) + 512 tokens are 512 sequences of a history and a candidate.
    assert "262,656" in page
    assert capsys.readouterr().out.endswith(f"(5, 3) {names['cache'].nbytes}\n")


def test_the_code_of_the_page_on_clicks_runs(capsys, tmp_path, monkeypatch):
    for package in ("pyarrow", "safetensors", "accelerate"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    # What takes seconds has a test of its own.
    monkeypatch.setattr(rank.LiRank, "export", lambda ranker, folder: (Path(folder),))
    names = {}
    page = (PAGE.parents[1] / "how-to" / "rank-clicks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "rank-clicks.md", "exec"), names)
    assert names["data"].schema.roles.item is None
    assert set(names["found"]) == {"auc", "log_loss", "ece"}
    assert names["found"]["auc"].value > 0.7
    assert names["found"]["ece"].value < 0.15
    assert 0 < float(names["off"].abs().max()) < 0.01
    tables, small = (sum(one.nbytes for one in of.tables()) for of in (names["ranker"], names["small"]))
    assert 4 * 8 * small == (8 + 4) * tables  # of width 8
    assert type(names["ranker"]) is rank.LiRank
    assert names["ranker"].explorer is not None
    assert 0 < float((names["drawn"].score - rank.score(names["ranker"], names["held"]).score).abs().mean()) < 0.3
    assert names["going"].schema.fields["banner"].rows == 71
    options = set(re.findall(r"^\| `(\w+)=", page, re.MULTILINE))
    assert options < set(inspect.signature(rank.LiRank).parameters)
    assert "Measured(value=" in capsys.readouterr().out


def test_the_code_of_the_page_on_searches_runs(capsys, tmp_path, monkeypatch):
    for package in ("pyarrow", "safetensors", "accelerate", "optuna", "lightgbm"):
        pytest.importorskip(package)
    from tigon.rank.features.blocks import KINDS
    from tigon.rank.searching.space import WIDTHS

    monkeypatch.chdir(tmp_path)
    names = {}
    page = (PAGE.parent / "search.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "search.md", "exec"), names)
    assert len(names["found"].trials) == 4
    assert names["ranker"].config()["blocks"][0]["kind"] == names["first"].graph[0].kind
    rows = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (?:rank )?([\d, ]+) \|$", page, re.MULTILINE))
    assert {kind: tuple(map(int, widths.split(", "))) for kind, widths in rows.items()} == WIDTHS
    assert set(rows) == set(KINDS)
    assert "'auc': " in capsys.readouterr().out


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
