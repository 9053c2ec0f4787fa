"""`tigon rank interactions`, and what fits and scores say of columns that are not what they seem: one small run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
for package in ("safetensors", "accelerate", "matplotlib"):
    pytest.importorskip(package)
import pyarrow.csv as csv  # noqa: E402

from tigon import rank  # noqa: E402
from tigon.cli.problem import Problem  # noqa: E402
from tigon.rank.cli.interactions import InteractionsOptions, interactions  # noqa: E402

LABELS = ["score", "long = share >= 2"]
FIELDS = {
    "banner": {"kind": "Id"}, "size": {"kind": "Number"}, "country": {"kind": "Id"}, "watched": {"kind": "Number"},
    "tags": {"kind": "Ids"}, "site": {"kind": "Id"},
}  # fmt: skip


def drawn(rows=400):
    draw = np.random.default_rng(0)
    score = draw.integers(0, 2, rows)
    share = np.where(draw.random(rows) < 0.4, np.nan, draw.integers(0, 4, rows))
    return {
        "visit": (np.arange(rows) * 7) % (rows // 4), "banner": draw.integers(0, 5, rows),
        "size": draw.normal(size=rows),
        "country": draw.choice(["at", "be"], rows), "watched": score * (1 + draw.random(rows)), "tags": ["a b"] * rows,
        "site": ["one"] * rows, "row": draw.integers(0, 9, rows), "score": score, "share": share,
    }  # fmt: skip


def written_as(name):
    return f"data_{name}" if name in ("row", "score") else name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    table = pa.table(drawn())
    csv.write_csv(table, folder / "train.csv")
    fields = {name: field for name, field in FIELDS.items() if name != "tags"}
    (folder / "schema.json").write_text(json.dumps({"roles": {"request": "visit", "labels": LABELS}, "fields": fields}))
    return folder


@pytest.fixture(scope="module")
def run(folder, here, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    said = here(
        "rank", "fit", "--data", folder / "train.csv", "--schema", folder / "schema.json", "--model", "lirank",
        "--width", 4, "--layers", 1, "--rank", 2, "--mlp", "8", "--epochs", 1, "--batch-size", 20, "--draws", 0,
        "--device", "cpu", "-o", out,
    ).ok()  # fmt: skip
    return out, said


def test_a_fit_warns_of_what_tells_a_label_and_of_missing_values(run):
    out, said = run
    assert "warning: Field 'watched' alone predicts label 'score', with AUC 1.0000. If the field" in said.err
    assert "note: Label 'long' has no value in " in said.err
    results = json.loads((out / "results.json").read_text())
    assert [one.split(" alone")[0] for one in results["warnings"]] == ["Field 'watched'"]
    found = results["validation"]["metrics"]
    assert all(found[label]["auc"]["value"] == found[label]["auc"]["value"] for label in ("score", "long"))


def test_scores_have_row_numbers_and_columns_of_their_own(run, folder, here, tmp_path):
    out, _ = run
    rows = drawn()
    for keep, columns in (
        ((), ["row", "visit", "label_score", "long", "score"]),
        (("all",), ["row", *map(written_as, rows), "label_score", "long", "score"]),
    ):
        file = tmp_path / f"{len(keep)}.csv"
        options = [word for name in keep for word in ("--keep", name)]
        score = ("rank", "score", out, "--data", folder / "train.csv", "--device", "cpu", *options)
        said = here(*score, "-o", file).ok()
        found = csv.read_csv(file)
        assert found.column_names == columns
        assert "note: 'score' of the labels is written as 'label_score'" in said.err
    # Requests lie apart in the table: rows come request by request, and their numbers lead back.
    row = np.array(found["row"])
    assert sorted(row) == list(range(400))
    assert list(row) != list(range(400))
    assert np.array(found["visit"]).tolist() == rows["visit"][row].tolist()
    assert found["country"].to_pylist() == rows["country"][row].tolist()
    assert np.array(found["data_row"]).tolist() == rows["row"][row].tolist()
    assert np.array(found["data_score"]).tolist() == rows["score"][row].tolist()
    total = np.array(found["label_score"]) + np.array(found["long"])
    np.testing.assert_allclose(np.array(found["score"]), total, atol=1e-6)
    here(*score, "--keep", "contry", "-o", tmp_path / "x.csv").problem("there is no column 'contry'", "country")


def test_interactions_of_a_run(run, folder, here, tmp_path, capsys):
    out, _ = run
    schema = tmp_path / "new" / "next.json"
    command = ("rank", "interactions", out, "--device", "cpu")
    written = ("--as-crosses", schema, "--crosses", 2, "--hash-rows", 500)
    said = here(*command, "--top", 3, *written).ok()
    assert "3 of 6 sets" in said.out
    assert "note: Field 'site' is left out: it is constant over all rows." in said.err
    data = rank.Impressions.read(folder / "train.csv", schema=rank.Schema.load(schema))
    made = [name for name, field in data.schema.fields.items() if field.kind == "Cross"]
    assert [data.schema.fields[name].hash_rows for name in made] == [500, 500]
    found = json.loads(here(*command, "--pairs", "--json").ok().out)
    assert [" × ".join(one["features"]) for one in found["interactions"][:2]] == made
    assert (found["order"], found["sets"]) == (2, 6)
    assert set(found["fields"]) == {"banner", "size", "country", "watched"}
    assert sum(one["share"] for one in found["interactions"]) == pytest.approx(1)
    assert f"train with: tigon rank fit --schema {schema}" in said.out
    here(*command, *written).problem(f"--as-crosses {schema} already exists; --overwrite replaces it")
    with pytest.raises(Problem, match=r"--as-crosses .*next.json already exists; --overwrite replaces it"):
        called(out, as_crosses=schema)
    capsys.readouterr()
    called(out, as_crosses=schema, overwrite=True, label="long", method="nid", order=3, json=True)
    nid = json.loads(capsys.readouterr().out)
    assert [one["order"] for one in nid["interactions"]] == [3] * 4
    assert rank.Schema.load(schema).fields[nid["crosses"][0]].hash_rows == 100
    with pytest.raises(Problem, match=r"nothing.csv"):
        called(out, data=[str(folder / "nothing.csv")])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order": 9}, "--order must be None or an integer from 2 to 4, the number of features, got 9"),
        ({"order": 3, "pairs": True}, "--pairs means --order 2, got also --order 3"),
        ({"method": "pid"}, "--method must be one of persistence, nid, got pid"),
        ({"as_crosses": "."}, "--as-crosses must be a file, got the folder"),
        ({"label": "scor"}, "there is no label 'scor'; did you mean 'score'?"),
    ],
)
def test_bad_options(run, options, said):
    with pytest.raises(Problem, match=re.escape(said)):
        called(run[0], **options)


def called(run, **options):
    given = {name: Path(value) if name == "as_crosses" else value for name, value in options.items()}
    interactions(InteractionsOptions(run=run, hash_rows=100, device="cpu", **given))


def test_other_rankers_have_none(run, tmp_path):
    schema = rank.Schema(rank.Roles("banner", labels="score"), {"banner": rank.Id(side="item", vocab=(1, 2))})
    rank.LiGR(schema, rank.LiGRConfig(8, 1)).save_pretrained(tmp_path / "ligr")
    with pytest.raises(Problem, match="requires --model lirank, whose MLP reads row fields, got a LiGR"):
        called(tmp_path / "ligr")
    plain = rank.Ranker.from_pretrained(run[0] / "model")
    rank.LiRank(plain.schema, rank.LiRankConfig(4, mlp=())).save_pretrained(tmp_path / "linear")
    with pytest.raises(Problem, match="--data must name rows for measuring how much the fields in"):
        called(tmp_path / "linear")
