"""`tigon rank` on rows of features alone: fitted, cut, measured, scored, compressed and exported."""

import json
import shutil
import signal
import time

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
for package in ("safetensors", "accelerate", "matplotlib"):
    pytest.importorskip(package)
import pyarrow.csv as csv  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

TINY = ("--device", "cpu", "--model", "lirank", "--width", 8, "--layers", 2, "--rank", 4, "--mlp", "16", "--norm",
        "layer", "--batch-size", 100, "--lr", 0.02, "--draws", 5)  # fmt: skip


def drawn(rows, seed):
    """Rows without items, requests and times: some banners are clicked, and dwelt on if they are large."""
    draw = np.random.default_rng(seed)
    banner, visitor = draw.integers(12, size=rows), draw.integers(12, size=rows)
    size = draw.normal(size=rows)
    click = (banner % 2 == 0) ^ (draw.random(rows) < 0.1)
    dwell = np.where(click, np.exp(3 + size + 0.3 * draw.normal(size=rows)), 0)
    size[::9] = np.nan
    country = np.where(visitor % 3, "fr", "de")
    return {"banner": [f"b{b}" for b in banner], "visitor": visitor + 100, "size": size, "country": country,
            "site": ["one"] * rows, "click": click.astype(int), "dwell": dwell}  # fmt: skip


SCHEMA = {
    "roles": {"labels": ["click", "long = dwell >= 20"]},
    "fields": {
        "banner": {"kind": "Id", "hash_rows": 7, "hash": "qr"}, "visitor": {"kind": "Id"}, "size": {"kind": "Number"},
        "country": {"kind": "Id"}, "site": {"kind": "Id"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for name, rows, seed in (("train", 1000, 1), ("test", 400, 2)):
        csv.write_csv(pa.table(drawn(rows, seed)), folder / f"{name}.csv")
    unlabelled = {name: values for name, values in drawn(400, 2).items() if name not in ("click", "dwell")}
    csv.write_csv(pa.table(unlabelled), folder / "unlabelled.csv")
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    return folder


@pytest.fixture(scope="module")
def options(folder):
    return ("--data", folder / "train.csv", "--test", folder / "test.csv", "--schema", folder / "schema.json",
            "--epochs", 8, "--patience", 8, "--dropout", 0.05, "--table-optimizer", "row-adagrad", "--table-lr", 0.1,
            "--tower", "a=click", "--tower", "b=long", "--calibrate", "country", "--save-every", 7, *TINY)  # fmt: skip


@pytest.fixture(scope="module")
def run(options, here, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, here("rank", "fit", *options, "-o", out).ok()


def results(folder, name="results.json"):
    return json.loads((folder / name).read_text())


def test_a_run_learns_rows_without_items(run):
    out, said = run
    found = results(out)
    assert found["test"]["metrics"]["click"]["auc"]["value"] > 0.8  # 0.9 knows all
    assert found["test"]["metrics"]["long"]["auc"]["value"] > 0.8
    # Each row is a request of its own: there is no order to measure.
    assert list(found["test"]["metrics"]) == ["click", "long"]
    assert set(found["test"]["metrics"]["click"]) == {"auc", "log_loss", "ece"}
    assert found["test"]["metrics"]["click"]["log_loss"]["value"] < 0.5
    assert (found["validation"]["rows"], found["test"]["requests"]) == (200, 400)
    assert "it reads of an impression banner, visitor, size, country, site\n" in said.err
    assert "note: Field 'site' has one value in all 800 rows: nothing can be learned of it." in said.err
    assert "calibrated on the 200 rows of the validation" in said.err
    config = results(out / "model", "config.json")
    assert (config["kind"], config["calibrate"], config["towers"]) == (
        "lirank",
        "country",
        {"a": ["click"], "b": ["long"]},
    )
    weights = load_file(out / "model" / "model.safetensors")
    assert (weights["isotonic.0.weight"] != 1).any()


def test_eval_score_and_compress_agree(run, folder, here, tmp_path):
    out, _ = run
    test = ("--data", folder / "test.csv", "--draws", 5, "--device", "cpu", "-o", tmp_path)
    shown = json.loads(here("rank", "eval", out, *test, "--json").ok().out)
    assert shown["metrics"] == results(out)["test"]["metrics"]
    here("rank", "eval", out, *test, "--by", "country", "--overwrite").ok()
    assert list(results(tmp_path, "eval.json")["by"]["country"]) == ["de", "fr"]
    small = tmp_path / "small"
    compress = ("rank", "compress", out, "-o", small, "--device", "cpu")
    found = json.loads(here(*compress, "--data", folder / "test.csv", "--json").ok().out)
    rows = results(out / "model", "config.json")["width"]
    assert found["after"]["tables"] * 4 * rows == found["before"]["tables"] * (rows + 4)
    assert found["after"]["rest"] == found["before"]["rest"]
    assert found["scores"]["auc"]["click"][0] == pytest.approx(shown["metrics"]["click"]["auc"]["value"], abs=1e-6)
    tables = []
    for number, place in enumerate((out, small)):
        file = tmp_path / f"scores{number}.csv"
        here("rank", "score", place, "--data", folder / "unlabelled.csv", "-o", file, "--device", "cpu").ok()
        tables.append(csv.read_csv(file))
        assert tables[-1].column_names == ["row", "request", "click", "long", "score"]
    off = [np.abs(np.array(tables[0][label]) - np.array(tables[1][label])) for label in ("click", "long")]
    assert np.max(off) == pytest.approx(found["scores"]["largest"], abs=1e-6)
    assert 0 < np.max(off) < 0.02
    here(*compress).problem("--overwrite replaces what it holds")
    said = here(*compress, "--overwrite").ok()  # on the data of the run
    assert "tables, bytes" in said.out
    assert "probabilities differ by" in said.out
    here("rank", "compress", out, "-o", out).problem("which is read; give another folder")
    here("rank", "compress", small, "-o", tmp_path / "again").problem("tables must have 32 bits, got tables of 8 bits")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("mine")
    here("rank", "compress", out, "-o", tmp_path / "mine", "--overwrite").problem("holds files of another kind")
    shown = here("rank", "inspect", small, "--device", "cpu", "--data", folder / "test.csv").ok().out
    assert "lirank" in shown


def test_a_program_scores_as_the_run(run, folder, here, tmp_path):
    from tigon import rank

    file = here("rank", "export", run[0], "-o", tmp_path).ok().out.strip()
    assert file.endswith("score.pt2")
    ranker = rank.Ranker.from_pretrained(run[0] / "model")
    data = rank.Impressions.read(folder / "unlabelled.csv", schema=ranker.schema, labelled=False)
    batch = data.batch(torch.arange(len(data)))
    with torch.no_grad():
        expected = ranker(batch)
    for label, z in torch.export.load(file).module()(dict(batch.items)).items():
        torch.testing.assert_close(z, expected[label], rtol=1e-5, atol=1e-5)


def test_a_run_that_was_interrupted_goes_on_to_the_same_weights(run, options, here, start, tmp_path):
    out = tmp_path / "run"
    process = start("rank", "fit", *options, "-o", out)
    end = time.monotonic() + 120
    while not list(out.glob("checkpoint-*")) and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert f"with a checkpoint; go on by: tigon rank fit --resume --output {out}" in said
    assert "from step" in here("rank", "fit", "--resume", "--device", "cpu", "-o", out).ok().err
    found, weights = (load_file(place / "model" / "model.safetensors") for place in (out, run[0]))
    assert all(torch.equal(value, weights[name]) for name, value in found.items())
    assert results(out)["test"] == results(run[0])["test"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "dcn"), ("--model must be one of ligr, lirank, got dcn",)),
        (("--model", "ligr", "--data", "{test}"), ("must name items", "name their column by --item", "LiRank")),
        (("--data", "{test}", "--cross", "dcn"), ("--cross is for --model lirank, got ligr",)),
        (("--heads", "4"), ("--heads is for --model ligr, got lirank",)),
        (("--history", "self"), ("--history is for --model ligr",)),
        (("--mlp", "16,x"), ("--mlp must be positive integers, separated by commas, got 16,x",)),
        (("--calibrate", "contry"), ("--calibrate must be", "did you mean 'country'")),
        (("--tower", "click"), ("--tower must be a name and its labels",)),
        (("--tower", "a=clik"), ("--tower must name each of the labels",)),
        (("--table-optimizer", "sgd"), ("--table-optimizer must be one of adamw, row-adagrad, got 'sgd'",)),
        (("--objective", "next-item"), ("--objective must be impressions for LiRank",)),
        (("--metric", "ndcg@10"), ("must be one of auc, log_loss, ece", "got 'ndcg@10'")),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, words, folder, here, tmp_path):
    given = ("--label", "click", "--epochs", 1, "-o", "x", "--device", "cpu")
    given += () if "{test}" in arguments else ("--data", folder / "test.csv", *TINY)
    arguments = [str(word).format(test=folder / "test.csv") for word in arguments]
    here("rank", "fit", *given, *arguments, cwd=tmp_path).refused(*words)


def test_calibration_of_one_class_and_a_vocabulary_that_changed(run, folder, here, tmp_path):
    from tigon import rank

    rows = drawn(400, 5)
    val = {name: np.array(values)[np.array(rows["click"]) == 1] for name, values in rows.items()}
    csv.write_csv(pa.table(val), tmp_path / "val.csv")
    given = ("--data", folder / "test.csv", "--label", "click", "--epochs", 1, *TINY, "-o", tmp_path / "run")
    # What early stopping looks at is defined for one class; calibration is not, and says so before a step is done.
    said = here("rank", "fit", *given, "--val", tmp_path / "val.csv", "--calibrate", "label", "--metric", "log_loss")
    said.problem("rank fit: --calibrate: the rows to validate on must have both classes of label 'click', got 1 in all")
    assert not (tmp_path / "run").exists()
    ranker = rank.Ranker.from_pretrained(run[0] / "model")
    other = rank.Impressions.read(folder / "test.csv", schema=rank.Schema.from_json(json.dumps(SCHEMA)))
    with pytest.raises(
        ValueError, match=r"^rank\.score: data must be read with the ranker's schema, .*field 'size' has"
    ):
        rank.score(ranker, other)
    shutil.copytree(run[0] / "model", tmp_path / "edited")
    text = (tmp_path / "edited" / "schema.json").read_text().replace('"fr"', '"fr", "it"')
    (tmp_path / "edited" / "schema.json").write_text(text)
    evaluate = ("rank", "eval", tmp_path / "edited", "--data", folder / "test.csv")
    here(*evaluate).problem("schema.json has changed since it was written", "delete manifest.json")
    (tmp_path / "edited" / "manifest.json").unlink()
    here(*evaluate).problem("model.safetensors does not fit the model", "must have shape")
