"""`tigon graph`: embeddings of a graph from a file, a probe of them, and what is left when the run is cut."""

import json
import signal

import numpy as np
import pytest

for package in ("safetensors", "sklearn", "matplotlib"):
    pytest.importorskip(package)

SMALL = ("--hidden", 16, "--out", 16, "--device", "cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Three classes of 40 nodes, whose edges say what their features hardly do."""
    draw = np.random.default_rng(0)
    y = np.arange(120) % 3
    edges = draw.random((120, 120)) < np.where(y[:, None] == y, 0.08, 0.002)
    x = draw.normal(size=(3, 12))[y] + 4 * draw.normal(size=(120, 12))
    order = draw.permutation(120)
    place = tmp_path_factory.mktemp("graph") / "made.npz"
    np.savez(place, x=x, edge_index=np.argwhere(edges | edges.T).T, y=y, train=order[:30], val=order[30:60],
             test=order[60:])  # fmt: skip
    return place


def vectors(output, seed=0):
    from safetensors.numpy import load_file

    return load_file(output / f"seed-{seed}" / "embeddings.safetensors")["z"]


def test_a_graph_is_fitted_and_probed(file, here, tmp_path):
    run = tmp_path / "run"
    shown = here("graph", "fit", "--data", file, *SMALL, "--epochs", 12, "--seed", "0,3", "-o", run).ok()
    assert "seed 3, epoch 12: loss" in shown.err
    assert "120 nodes with 12 features" in shown.err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["seed"], row["step"]) for row in rows] == [(seed, step) for seed in (0, 3) for step in range(1, 13)]
    record = json.loads((run / "results.json").read_text())
    # The epoch that is kept is the first of those that are best on the validation.
    for one in record["seeds"]:
        own = [row["val"] for row in rows if row["seed"] == one["seed"]]
        assert (one["val"], one["epoch"]) == (max(own), own.index(max(own)) + 1)
    assert record["versions"]["torch"]
    assert not list(run.glob("checkpoint-*"))
    probed = here("graph", "probe", run, "--plot", tmp_path / "angles.png", "--dims", 3, "--json").ok()
    found = json.loads(probed.out)
    assert [row["seed"] for row in found["seeds"]] == [0, 3]
    assert [row["val"] for row in found["seeds"]] == [one["val"] for one in record["seeds"]]
    tests = [row["test"] for row in found["seeds"]]
    assert min(tests) > 0.6  # by chance a third
    assert found["summary"]["test"] == pytest.approx({"mean": np.mean(tests), "sd": np.std(tests, ddof=1)})
    assert json.loads((run / "probe.json").read_text()) == found
    assert (tmp_path / "angles.png").stat().st_size > 5000
    table = here("graph", "probe", run).ok().out
    assert f"{np.mean(tests):.4f}" in table
    from tigon import graph

    model, of = graph.G2R.from_pretrained(run / "seed-3"), graph.read_graph(file)
    np.testing.assert_allclose(model.encode(of.x, of.edge_index).numpy(), vectors(run, 3), rtol=1e-5, atol=1e-8)
    here("graph", "fit", "--data", file, "-o", run).problem("contains a run", "--overwrite replaces it")
    here("graph", "fit", "--resume", "-o", run).problem("is complete")
    here("graph", "fit", "--data", file, *SMALL, "--epochs", 1, "--keep", "last", "-o", run, "--overwrite").ok()
    assert not (run / "probe.json").exists()
    np.savez(tmp_path / "other.npz", x=of.x.numpy(), edge_index=of.edge_index.numpy()[:, :9])
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace(str(file), str(tmp_path / "other.npz")))
    here("graph", "probe", run).problem("has changed since the run in", "was fitted")


def test_a_run_that_was_stopped_goes_on_to_the_same_embeddings(file, here, tmp_path, monkeypatch):
    from tigon.graph.cli import fit

    same = ("--data", file, *SMALL, "--epochs", 8, "--seed", "0,1")
    here("graph", "fit", *same, "-o", tmp_path / "whole").ok()
    cut, append = tmp_path / "cut", fit.append_metrics

    def at(seed, step, act):
        monkeypatch.setattr(
            fit, "append_metrics", lambda f, row: (append(f, row), (row["seed"], row["step"]) == (seed, step) and act())
        )

    at(0, 5, lambda: signal.raise_signal(signal.SIGINT))
    said = here("graph", "fit", *same, "-o", cut)
    assert said.code == 130
    assert (
        f"stopped in seed 0 after epoch 5, with a checkpoint; resume with: tigon graph fit --resume --output {cut}"
        in said.err
    )
    assert not (cut / "seed-0").exists()
    here("graph", "probe", cut).problem("no seed in", "is complete; resume with")
    # A kill in the second seed, before it has a checkpoint: the first one is not fitted again.
    at(1, 3, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        here("graph", "fit", "--resume", "--device", "cpu", "-o", cut)
    assert list(json.loads((cut / "run.json").read_text())["stages"]) == ["seed 0"]
    assert len(json.loads(here("graph", "probe", cut, "--json").ok().out)["seeds"]) == 1
    at(0, 0, None)
    again = here("graph", "fit", "--resume", "--device", "cpu", "-o", cut).ok()
    assert "seed 0" not in again.err
    for seed in (0, 1):
        assert (vectors(cut, seed) == vectors(tmp_path / "whole", seed)).all()


def test_a_graph_without_labels_is_fitted_and_cannot_be_probed(file, here, tmp_path):
    arrays = np.load(file)
    np.savez(tmp_path / "bare.npz", x=arrays["x"], edge_index=arrays["edge_index"])
    shown = here("graph", "fit", "--data", tmp_path / "bare.npz", *SMALL, "--epochs", 2, "-o", tmp_path / "run").ok()
    assert "the last epoch is kept, as the graph has no y, train and val" in shown.err
    assert vectors(tmp_path / "run").shape == (120, 16)
    here("graph", "probe", tmp_path / "run").problem("graph must have y, train and test, got no y and no train")
    here("graph", "probe", tmp_path / "none").problem("graph probe: RUN must be a tigon graph fit run folder")
    place = tmp_path / "bare.npz" / "a.png"
    here("graph", "probe", tmp_path / "run", "--plot", place).problem(
        "graph probe: --plot", "a file with that name exists"
    )
    (tmp_path / "run" / "seed-0" / "embeddings.safetensors").unlink()
    here("graph", "probe", tmp_path / "run").problem("embeddings.safetensors is missing")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--data must name a graph",)),
        (("--data", "reddit"), ("--data must be one of cora, citeseer, pubmed, or a file, got reddit",)),
        (("--data", "cora"), ("--root must name the folder with the cora files",)),
        (("--data", "cora", "--root", "."), ("must hold the cora files, got none of ind.cora.x",)),
        (("--data", "{file}", "--root", "."), ("--root is for --data cora, citeseer, pubmed",)),
        (("--data", "{file}", "--eps", "0"), ("--eps must be positive, got 0.0",)),
        (("--data", "{file}", "--lr", "nan"), ("--lr must be positive, got nan",)),
        (("--data", "{file}", "--keep", "first"), ("--keep must be one of best, last, got first",)),
        (("--data", "{file}", "--normalize", "all"), ("--normalize must be one of rows, columns, got all",)),
        (("--data", "{file}", "--seed", "a"), ("--seed must be integers", "got a")),
        (("--data", "nan.npz"), ("x must be finite, got nan",)),
        (("--data", "far.npz"), ("edge_index must lie in [0, 2), the nodes, got 2",)),
        (("--data", "turned.npz"), ("edge_index must be (2, e) integers, sources and targets, got (3, 2)",)),
        (("--data", "alone.npz"), ("edge_index must hold an edge between two nodes",)),
        (("--data", "one.npz"), ("train must have nodes from two classes, got one",)),
        (("--resume",), ("no run in", "to resume")),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, words, file, here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, pair = np.ones((2, 3)), np.array([[0], [1]])
    np.savez(tmp_path / "nan.npz", x=x * np.nan, edge_index=pair)
    np.savez(tmp_path / "far.npz", x=x, edge_index=pair + 1)
    np.savez(tmp_path / "turned.npz", x=x, edge_index=np.zeros((3, 2), int))
    np.savez(tmp_path / "alone.npz", x=x, edge_index=np.zeros((2, 1), int))
    np.savez(tmp_path / "one.npz", x=x, edge_index=pair, y=np.zeros(2, int), train=[0], val=[1], test=[1])
    arguments = [word.format(file=file) for word in arguments]
    here("graph", "fit", *arguments, "-o", "x", "--device", "cpu").refused(*words)
    assert not (tmp_path / "x").exists()  # a run that can never be fitted would hold its folder
