"""`tigon rank fit --from` on newer data, and `tigon rank score --explore`."""

import json

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
for package in ("safetensors", "accelerate", "matplotlib"):
    pytest.importorskip(package)
import pyarrow.csv as csv  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

TINY = ("--device", "cpu", "--batch-size", 100, "--lr", 0.02, "--draws", 0, "--val-fraction", 0, "--epochs", 3)
MODEL = ("--model", "lirank", "--width", 4, "--layers", 1, "--rank", 2, "--mlp", "8")


def drawn(rows, banners, seed):
    draw = np.random.default_rng(seed)
    banner = draw.integers(banners, size=rows)
    click = (banner % 2 == 0) ^ (draw.random(rows) < 0.1)
    return {"banner": [f"b{b}" for b in banner], "visitor": [f"v{v}" for v in draw.integers(9, size=rows)],
            "click": click.astype(int)}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weeks")
    for name, banners, seed in (("first", 6, 1), ("second", 8, 2), ("third", 10, 3)):
        csv.write_csv(pa.table(drawn(400, banners, seed)), folder / f"{name}.csv")
    return folder


@pytest.fixture(scope="module")
def first(folder, here, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    here("rank", "fit", "--data", folder / "first.csv", "-o", out, *TINY, *MODEL).ok()
    return out


def anchors(run):
    found = load_file(run / "model" / "priors.safetensors")
    return {key.split(".", 1)[0] for key in found}, found


def test_runs_go_on_from_each_other(folder, first, here, tmp_path):
    assert anchors(first)[0] == {"0"}
    second, third = tmp_path / "second", tmp_path / "third"
    said = here(
        "rank", "fit", "--from", first, "--data", folder / "second.csv", "-o", second, "--prior-strength", 0.5, *TINY
    )
    assert "lirank with" in said.ok().err
    here("rank", "fit", "--from", second, "--data", folder / "third.csv", "-o", third, *TINY).ok()
    fields = [json.loads((run / "model" / "schema.json").read_text())["fields"] for run in (first, second, third)]
    vocabs = [one["banner"]["vocab"] for one in fields]
    assert [len(v) for v in vocabs] == [6, 8, 10]
    assert vocabs[2][:8] == vocabs[1]
    # w₀ stays that of the first run.
    numbers, found = anchors(third)
    assert numbers == {"0", "1"}
    origin = load_file(first / "model" / "model.safetensors")["towers.heads.0.weight"]
    assert found["0.weights.towers.heads.0.weight"].equal(origin)
    assert not found["1.weights.towers.heads.0.weight"].equal(origin)
    assert json.loads((third / "results.json").read_text())["options"]["from_run"] == str(second / "model")


def test_scores_explore(folder, first, here, tmp_path):
    found = {}
    drawn = ("--explore", 1, "--seed", 4)
    other = ("--explore", 1, "--seed", 5, "--batch-size", 7)
    for name, more in (("plain", ()), ("drawn", drawn), ("other", other)):
        here("rank", "score", first, "--data", folder / "first.csv", "-o", tmp_path / f"{name}.csv", *more).ok()
        found[name] = csv.read_csv(tmp_path / f"{name}.csv")["score"].to_numpy()
    assert abs(found["drawn"] - found["plain"]).mean() > 0.005
    assert abs(found["drawn"] - found["other"]).mean() > 0.005


def test_sentences(folder, first, here, tmp_path):
    data = ("--data", folder / "second.csv", *TINY)
    out = ("-o", tmp_path / "out")

    def refused(*words, options=(), out=out):
        here("rank", "fit", "--from", first, *data, *out, *options).problem(*words)

    here("rank", "fit", "--from", tmp_path, *data, *out).problem("--from must be a ranker folder")
    refused("--output must differ from --from", out=("-o", first))
    refused("the --from ranker already has --mlp", options=("--mlp", "4"))
    refused("--from already defines the columns, got also --user", options=("--user", "visitor"))
    refused("--loss must be bce on impressions", options=("--loss", "softmax"))
    refused("--table-optimizer must be adamw with priors", options=("--table-optimizer", "row-adagrad"))
    schema = json.loads((first / "schema.json").read_text())
    schema["fields"]["banner"]["vocab"].reverse()
    (tmp_path / "turned.json").write_text(json.dumps(schema))
    turned = ("--schema", tmp_path / "turned.json")
    refused("for 'banner' 'b5' in place of 'b0', whose row it would read", options=turned)
    assert not (tmp_path / "out").exists()
    (first / "model" / "priors.safetensors").rename(tmp_path / "kept")
    refused("--prior-strength needs priors.safetensors")
    (tmp_path / "kept").rename(first / "model" / "priors.safetensors")
    softmax = ("-o", tmp_path / "out", *TINY, *MODEL, "--loss", "softmax")
    fit = ("rank", "fit", "--data", folder / "first.csv")
    here(*fit, *softmax, "--save-priors").problem("--save-priors needs --loss bce on impressions, got softmax")
    for name, more in (("without", ("--no-save-priors",)), ("rows", ("--table-optimizer", "row-adagrad"))):
        here(*fit, "-o", tmp_path / name, *TINY, *MODEL, *more).ok()
        assert (tmp_path / name / "model" / "explorer.safetensors").is_file()
        assert not (tmp_path / name / "model" / "priors.safetensors").exists()
    (first / "model" / "explorer.safetensors").unlink()
    said = here("rank", "score", first, "--data", folder / "first.csv", "-o", tmp_path / "s.csv", "--explore", 1)
    said.problem("--explore needs explorer.safetensors")
