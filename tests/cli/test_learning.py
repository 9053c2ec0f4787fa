"""The bare commands find a signal that was planted in small tables, and say so where there is none."""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
for package in ("safetensors", "accelerate", "matplotlib", "rich", "typer"):
    pytest.importorskip(package)
import pyarrow.parquet as parquet  # noqa: E402
import torch  # noqa: E402

from tigon.cli import progress  # noqa: E402
from tigon.cli.screen import screen  # noqa: E402


@pytest.fixture(scope="module")
def plant():
    """The plants of the study, which asks the same of larger tables."""
    path = Path(__file__).parents[2] / "benchmarks" / "learn_defaults.py"
    spec = importlib.util.spec_from_file_location("learn_defaults", path)
    sys.modules["learn_defaults"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["learn_defaults"]


def results(folder):
    return json.loads((folder / "results.json").read_text())


def auc(p, y):
    from tigon.rank import metrics

    return float(metrics.auc(torch.from_numpy(p), torch.from_numpy(y).float()))


def write(folder, **tables):
    for name, columns in tables.items():
        parquet.write_table(pa.table(columns), folder / f"{name}.parquet")


def fit(here, folder, model, *more):
    data = ("--data", folder / "train.parquet", "--test", folder / "test.parquet", "--label", "click")
    history = ("--history", folder / "events.parquet") if model == "ligr" else ()
    out = folder / "run"
    said = here("rank", "fit", "--model", model, *data, *history, *more, "--device", "cpu", "-o", out).ok()
    return results(out), said


def test_ligr_finds_it(plant, here, tmp_path):
    shown, events, _ = plant.sequences(100, 0, items=12)
    test, later, _ = plant.sequences(2_000, 7, 10_000_000, 12)
    events = {name: np.concatenate((events[name], later[name])) for name in events}
    write(tmp_path, train=shown, test=test, events=events)
    found, said = fit(here, tmp_path, "ligr")
    assert found["test"]["metrics"]["click"]["auc"]["value"] > 0.56  # chance is 0.5 ± 0.026 on 2,000 rows
    assert "chosen for 72 rows: width 64, layers " in said.err
    assert found["options"]["width"] == 64


def test_lirank_finds_it(plant, here, tmp_path):
    shown, _ = plant.features(100, 0)
    test, p = plant.features(4_000, 7, 100)
    write(tmp_path, train=shown, test=test)
    found, said = fit(here, tmp_path, "lirank", "--val-split", "request", "--seed", "0,1,2")
    assert found["summary"]["test"]["click"]["auc"]["mean"] > 0.5 + 0.4 * (auc(p, test["click"]) - 0.5)
    assert "; override with the options of the same names" in said.err


def test_towers_find_it(plant, here, tmp_path):
    from tigon.retrieve import metrics

    users, items, train, later, kind = plant.pairs(100, 0)
    write(tmp_path, **{
        name: {"user": part[:, 0], "item": part[:, 1]} for name, part in (("train", train), ("test", later))
    })  # fmt: skip
    data = (tmp_path / "train.parquet", "--test", tmp_path / "test.parquet", "--device", "cpu")
    said = here("retrieve", "train", *data, "-o", tmp_path / "run").ok()
    value = results(tmp_path / "run")["summary"]["ndcg@20"]["mean"]
    known, right = torch.from_numpy(train), torch.from_numpy(later)
    popular = known[:, 1].bincount(minlength=items).float().unsqueeze(1)
    chance = metrics.evaluate(torch.ones(users, 1), popular, right, known, (20,))["ndcg@20"]
    of_kind = [torch.nn.functional.one_hot(torch.from_numpy(one), 4).float() for one in (kind, np.arange(items) % 4)]
    oracle = metrics.evaluate(*of_kind, right, known, (20,))["ndcg@20"]
    assert value > chance + 0.5 * (oracle - chance)
    assert f"chosen for {len(train):,} pairs: dim " in said.err


def test_embeddings_of_nodes_find_it(plant, here, tmp_path):
    pytest.importorskip("sklearn")
    from tigon.graph import probe

    graph = plant.linked(120, 0)
    parts = {name: getattr(graph, name).numpy() for name in ("x", "edge_index", "y", "train", "val", "test")}
    np.savez(tmp_path / "own.npz", **parts)
    said = here("graph", "fit", "--data", tmp_path / "own.npz", "--device", "cpu", "-o", tmp_path / "run").ok()
    found = json.loads(here("graph", "probe", tmp_path / "run", "--json").ok().out)
    share = found["summary"]["test"]["mean"]
    assert share > probe(graph.x, graph)["test"] + 0.15
    assert share > 1 / 3 + 0.4 * (1 - 1 / 3)
    assert "chosen for 120 nodes: gamma 1.0, eps 0.3, epochs 20" in said.err


def test_sizes_grow_with_the_data():
    from tigon.graph.cli.fit import GraphFitOptions
    from tigon.graph.cli.fit import choose_settings as choose_graph
    from tigon.retrieve.cli.train_options import TrainOptions
    from tigon.retrieve.cli.train_options import choose_settings as choose_towers

    towers = [choose_towers(TrainOptions(), pairs) for pairs in (100, 10_000, 1_000_000)]
    assert [one["dim"] for one in towers] == [32, 64, 128]
    assert [one["batch_size"] for one in towers] == [32, 512, 8192]
    assert [one["epochs"] for one in towers] == [200, 100, 100]
    assert "dim" not in choose_towers(TrainOptions(dim=9), 100)
    graphs = [choose_graph(GraphFitOptions(data="own"), nodes) for nodes in (120, 1_000, 5_000)]
    assert [(one["hidden"], one["out"]) for one in graphs] == [(64, 32), (256, 128), (1024, 512)]
    assert choose_graph(GraphFitOptions(data="pubmed", eps=1.0), 19_717) == {
        "gamma": 0.5, "epochs": 40, "nodes": 200, "hidden": 1024, "out": 512,
    }  # fmt: skip


def test_a_fit_that_ends_at_chance_says_so(plant, here, tmp_path):
    columns, _ = plant.features(1_200, 0)
    columns["click"] = np.random.default_rng(1).integers(2, size=1_200)
    write(tmp_path, train=columns, test=columns)
    found, said = fit(here, tmp_path, "lirank", "--val-split", "request", "--epochs", 3)
    (sentence,) = found["warnings"]
    assert "the validation AUC is no better than chance: 0." in sentence
    assert "--epochs, or a smaller --batch-size" in sentence
    assert f"warning: {sentence}" in said.err
    assert "…" not in sentence


def test_towers_no_better_than_what_is_popular_are_warned_of():
    from tigon.retrieve.cli.loop import FitResult, find_doubts
    from tigon.retrieve.cli.train_options import TrainOptions

    rows = [{"epoch": n, "loss": 1.0, "ndcg@20": 0.01 * n} for n in range(1, 9)]
    fitted = FitResult(None, rows, 8, 8, 1.0, 1.0)
    worse, better = find_doubts(fitted, TrainOptions(epochs=8), 0.2)
    assert "ndcg@20 0.0800, most popular items 0.2000" in worse
    assert "from 0.0600 to 0.0800 in the last quarter: raise --epochs" in better
    assert find_doubts(fitted, TrainOptions(epochs=9), 0.01) == []


def test_embeddings_that_are_one_or_tell_nothing_are_warned_of():
    from tigon.graph.cli.fit import find_doubts

    apart = torch.eye(8)
    told = {"most": 0.4, "error": 0.02, "val": 0.9, "before": 0.6}
    assert find_doubts(apart, told) == find_doubts(apart, {}) == []
    (one,) = find_doubts(torch.ones(8, 4), {})
    assert "larger --gamma" in one
    (nothing,) = find_doubts(apart, {**told, "val": 0.43})
    assert "validation accuracy 0.430" in nothing
    (worse,) = find_doubts(apart, {**told, "val": 0.5})
    assert "validation accuracy 0.500, and 0.600 before the fit" in worse


def test_work_is_told_of_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    console = screen(stderr=True, force_terminal=False)
    with progress.working(console, "reading x.parquet"):
        time.sleep(0.2)
    with progress.Steps(console, "steps", 7, done=2) as steps:
        steps.show(4, "loss 0.5")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert "reading x.parquet, 0 s" in lines
    assert re.fullmatch(r"step 4 of 7: [\d.]+ steps/s  loss 0\.5", lines[-1])
    with progress.working(console, "nothing"):
        pass
    assert capsys.readouterr().err == ""


def test_a_bar_is_shown_on_a_terminal(capsys):
    console = screen(stderr=True, force_terminal=True, width=100)
    with progress.working(console, "reading"), pytest.raises(ZeroDivisionError):
        1 / 0  # noqa: B018
    with progress.Steps(console, "steps", 7) as steps:
        steps.show(4, "loss 0.5")
    assert "4/7" in capsys.readouterr().err
