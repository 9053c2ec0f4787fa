"""`tigon rank search`: a study that goes on, what it leaves, and what the other commands make of it."""

import json
import shutil
import signal
import sqlite3
import time
from contextlib import closing

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
for package in ("safetensors", "accelerate", "matplotlib", "optuna", "lightgbm"):
    pytest.importorskip(package)
import pyarrow.csv as csv  # noqa: E402

TINY = ("--device", "cpu", "--width", 4, "--batch-size", 60, "--epochs", 2, "--lr", 0.02, "--rows", 0.5)


def drawn(rows, seed):
    draw = np.random.default_rng(seed)
    banner, visitor = draw.integers(6, size=rows), draw.integers(5, size=rows)
    return {"banner": [f"b{b}" for b in banner], "visitor": [f"v{v}" for v in visitor],
            "click": ((banner + visitor) % 2).astype(int), "bought": draw.integers(2, size=rows)}  # fmt: skip


def count_trials(study):
    """Finished trials in a study, as the database says; 0 before its tables exist."""
    if not (study / "study.db").exists():
        return 0
    with closing(sqlite3.connect(study / "study.db", timeout=60)) as database:
        if not database.execute("select 1 from sqlite_master where name = 'trials'").fetchone():
            return 0
        return database.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    for name, rows, seed in (("train", 300, 1), ("test", 100, 2)):
        csv.write_csv(pa.table(drawn(rows, seed)), folder / f"{name}.csv")
    return folder


@pytest.fixture(scope="module")
def study(folder, here, tmp_path_factory):
    out = tmp_path_factory.mktemp("studies") / "study"
    data = ("--data", folder / "train.csv", "--test", folder / "test.csv", "--label", "click")
    return out, here("rank", "search", *data, *TINY, "--trials", 3, "--best", 1, "--plot", "-o", out).ok()


def test_a_study_leaves_a_ranker_and_its_blocks(study, folder, here, tmp_path):
    out, said = study
    found = json.loads((out / "results.json").read_text())
    assert (found["trials"], found["failed"], len(found["refitted"]), len(found["history"])) == (3, 0, 1, 3)
    first = found["refitted"][0]
    assert first["blocks"] == found["best"]["blocks"] == json.loads((out / "blocks.json").read_text())
    assert "270 training requests, 30 for validation; labels click\n" in said.err
    assert "the best of 1;" in said.err
    assert "test log loss" in said.out
    assert f"{first['test']['log_loss']:.5f}" in said.out
    assert (out / "search.png").stat().st_size > 5000
    ranker = out / "refits" / f"trial-{first['trial']}"
    measured = json.loads(
        here("rank", "eval", ranker, "--data", folder / "test.csv", "--device", "cpu", "--draws", 0, "-o", tmp_path,
              "--json").ok().out
    )  # fmt: skip
    assert measured["metrics"]["click"]["log_loss"]["value"] == pytest.approx(first["test"]["log_loss"], rel=1e-5)
    fitted = ("--model", "lirank", "--schema", out / "schema.json", "--blocks", out / "blocks.json", "--norm", "layer")
    fit = ("rank", "fit", "--data", folder / "train.csv", "--device", "cpu", "--width", 4, "--epochs", 1, "--draws", 0)
    here(*fit, *fitted, "-o", tmp_path / "run").ok()
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config["blocks"], config["norm"], config["width"]) == (first["blocks"], "layer", 4)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["options"]["blocks"] == first["blocks"]  # a run goes on without the file
    here(*fit, *fitted, "--cross", "dcn", "-o", tmp_path / "no").problem("--cross cannot be used with --blocks")
    (tmp_path / "bad.json").write_text('[{"kind": "mlp", "width": 4, "inputs": [1]}]')
    bad = ("--model", "lirank", "--blocks", tmp_path / "bad.json")
    here(*fit, *bad, "-o", tmp_path / "no").problem("block 1, mlp, is the first and can read only the features")


def test_a_study_goes_on_where_there_is_more_to_do(study, folder, here, tmp_path):
    out = tmp_path / "study"
    shutil.copytree(study[0], out)
    search = ("rank", "search", "--data", folder / "train.csv", *TINY, "-o", out)
    clicks = (*search, "--label", "click", "--best", 1)
    here(*clicks, "--trials", 3).problem("has 3 trials and 1 fits on all rows already; --trials above 3 continues")
    here(*search, "--label", "bought", "--trials", 4).problem("started with labels click, but got bought")
    other = ("rank", "search", "--data", folder / "test.csv", *TINY, "-o", out, "--label", "click", "--trials", 4)
    here(*other).problem("started with training data 270 requests", "but got 90 requests")
    here(*clicks, "--trials", 4).ok()
    assert json.loads((out / "results.json").read_text())["trials"] == 4
    here(*clicks, "--trials", 2, "--overwrite").ok()
    assert json.loads((out / "results.json").read_text())["trials"] == 2
    assert count_trials(out) == 2


def test_ctrl_c_keeps_the_trials(folder, forks, here, tmp_path):
    from command import environment

    search = ["rank", "search", "--data", folder / "train.csv", "--label", "click", *TINY, "--best", 0, "-o", tmp_path]
    run = forks.begin([[*map(str, search), "--trials", "500"]], environment())
    end = time.monotonic() + 120
    while time.monotonic() < end and count_trials(tmp_path) < 2:
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    run.communicate()
    assert run.returncode == 130, run.stderr
    assert "trials, which are saved; run the same command to resume" in run.stderr.splitlines()[-1]
    done = count_trials(tmp_path)
    said = here(*search, "--trials", 2).ok()
    assert "log loss" in said.out
    assert count_trials(tmp_path) == done  # there were enough


def test_what_cannot_be_searched_is_said_in_a_sentence(folder, here, tmp_path):
    search = ("rank", "search", "--data", folder / "train.csv", "--label", "click", "-o", tmp_path / "study")
    for words, *said in (
        (("--most", 0), "--most must be from 1 to 7 blocks, got 0: without a block no path leads"),
        (("--kinds", ","), "--kinds must name one of mlp", "no path leads from the features to the towers"),
    ):
        here(*search, *words).problem("rank search", *said)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "mine.txt").write_text("mine")
    here(*search).problem("holds files that are not from a study")
