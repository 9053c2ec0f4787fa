"""What `tigon rank inspect` says of a table."""

import json
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("typer")
parquet = pytest.importorskip("pyarrow.parquet")

from tigon.cli.problem import Problem  # noqa: E402
from tigon.rank import Impressions, Schema  # noqa: E402
from tigon.rank.cli.inspect import InspectOptions, inspect  # noqa: E402
from tigon.rank.data.summary import summarize  # noqa: E402

ROWS = {
    "user_id": ["u", "u", "u", "v"], "item_id": ["a", "b", "a", "b"], "rating": [5.0, 2.0, 4.0, 5.0],
    "timestamp": [100.0, 100.0, 200.0, 86500.0],
}  # fmt: skip
ITEMS = {"item_id": ["a", "c"], "title": [["Toy", "Story"], ["Heat"]], "year": [1995.5, None]}


def inspect_data(target, **options):
    inspect(InspectOptions(target=Path(target), **options))


@pytest.fixture
def folder(tmp_path):
    for name, table in (("films", ROWS), ("items", ITEMS)):
        (tmp_path / name).mkdir()
        parquet.write_table(pa.table(table), tmp_path / name / "rows.parquet")
    return tmp_path


def test_a_table_is_summed_up(folder):
    found = summarize(
        Impressions.read(folder / "films", items=folder / "items", history="self", labels=["like = rating >= 4"])
    )
    fields = {one.pop("name"): one for one in found.pop("fields")}
    assert found == {
        "requests": 3, "rows": 4, "events": 4,
        "candidates": {"mean": 1.33, "most": 2}, "history": {"mean": 0.67, "most": 2, "empty": 0.6667},
        "time": ["1970-01-01 00:01:40", "1970-01-02 00:01:40"], "labels": {"like": 0.75},
        "roles": {"item": "item_id", "user": "user_id", "time": "timestamp", "labels": ("like = rating >= 4",),
                  "action": ("rating",)},
        "left_out": {"user_id": "the history identifies the user"},
        "notes": ["2 of 4 rows have an item that is not among the items.",
                  "2 of 4 events have an item that is not among the items."],
    }  # fmt: skip
    assert fields["item_id"] == {"kind": "Id", "side": "item", "history": True, "values": 2, "missing": 0.0}
    assert fields["title"] == {"kind": "Ids", "side": "item", "history": True, "values": 3, "missing": 0.5}
    assert fields["year"] == {"kind": "Number", "side": "item", "history": True, "values": None, "missing": 0.5}
    assert fields["timestamp"]["missing"] == 0
    assert fields["rating"]["side"] == "action"
    assert json.loads(json.dumps(found))["rows"] == 4


def test_a_table_is_shown(folder, capsys, monkeypatch):
    tables = {"target": folder / "films", "history": ["self"], "items": [str(folder / "items")]}
    inspect_data(**tables, label=["rating >= 4"], output=folder / "schema.json")
    said = capsys.readouterr().out
    for words in ("3 requests, 4 rows, 4 events", "1.33 on average, 2 at most", "none: 66.7%", "75.00% of the rows",
                  "title", "the history identifies the user", "not among the items"):  # fmt: skip
        assert words in said
    schema = Schema.load(folder / "schema.json")
    inspect_data(**tables, schema=folder / "schema.json", json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["labels"] == {"rating>=4": 0.75}
    assert [one["name"] for one in found["fields"]] == list(schema.fields)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"item": "film"}, "rank inspect: there is no column 'film' .item. in the impressions; there are 'user_id'"),
        ({"history": ["gone.csv"]}, "rank inspect: there is no file gone.csv"),
        ({"schema": Path("gone.json")}, "rank inspect: gone.json is missing"),
    ],
)
def test_what_cannot_be_read_is_a_problem(folder, options, said):
    with pytest.raises(Problem, match=said):
        inspect_data(folder / "films", **options)
    (folder / "bare.csv").write_text("a,b\n1,2\n")
    with pytest.raises(Problem, match=r"rank inspect: the history must go .* name the column by --item, there are 'a'"):
        inspect_data(folder / "bare.csv", history=["self"])
