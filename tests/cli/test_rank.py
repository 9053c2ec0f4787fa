"""`tigon rank`: from a table of impressions to a ranker and its scores, however the run is cut."""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
for package in ("safetensors", "accelerate", "matplotlib"):
    pytest.importorskip(package)
import pyarrow.csv as csv  # noqa: E402
import pyarrow.parquet as parquet  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tigon.cli import Problem  # noqa: E402
from tigon.rank.cli.fit_options import FitOptions  # noqa: E402
from tigon.rank.cli.ranker_folder import RankerFolder  # noqa: E402
from tigon.rank.cli.tables import History, read_tables, should_stream  # noqa: E402

USERS, ITEMS, KINDS, SHOWN = 20, 48, 2, 20
TINY = ("--device", "cpu", "--width", 16, "--layers", 2, "--heads", 2, "--batch-size", 8, "--lr", 0.02,
        "--history-max", 20)  # fmt: skip
# A process that holds the lock of a run's folder to the end of its input.
HOLDER = """
import fcntl, os, sys
handle = open(sys.argv[1] + "/.lock", "a")
fcntl.lockf(handle, fcntl.LOCK_EX)
os.write(1, b"x")
sys.stdin.read()
"""


def drawn(requests, seed, first=0):
    """Impressions, one request an hour, of users who click what is of their kind; most clicks have 4 or 5 stars."""
    draw = np.random.default_rng(seed)
    request = np.arange(requests).repeat(SHOWN)
    user = draw.integers(USERS, size=requests)[request]
    item = draw.integers(ITEMS, size=len(request))
    click = (user % KINDS == item % KINDS) ^ (draw.random(len(user)) < 0.08)
    return {
        "session_id": [f"s{r + first}" for r in request],
        "user_id": [f"u{u}" for u in user],
        "item_id": item + 1000,
        "timestamp": (request + first + 1) * 3600,
        "position": np.tile(np.arange(SHOWN), requests),
        "click": click.astype(int),
        "stars": np.where(click, 4, 1) + draw.integers(2, size=len(user)) - (draw.random(len(user)) < 0.1),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    past, test = drawn(80, 1), drawn(16, 3, 180)
    clicked = np.flatnonzero(past["click"])
    tables = {
        "train": drawn(100, 2, 80), "test": test,
        "events": {name: np.array(past[name])[clicked] for name in ("user_id", "item_id", "timestamp")},
        "unlabelled": {name: values for name, values in test.items() if name not in ("click", "stars")},
        "items": {"item_id": np.arange(ITEMS) + 1000, "kind": [f"k{i % KINDS}" for i in range(ITEMS)]},
    }  # fmt: skip
    assert len(tables["train"]["click"]) == 2000
    for name, columns in tables.items():
        parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


@pytest.fixture(scope="module")
def data(folder):
    return ("--data", folder / "train.parquet", "--history", folder / "events.parquet", "--items",
            folder / "items.parquet", "--label", "click", "--label", "like=stars>=4")  # fmt: skip


@pytest.fixture(scope="module")
def options(folder):
    """With dropout, whose masks a run that goes on draws again."""
    return ("--test", folder / "test.parquet", "--score-weight", "click=1", "--score-weight", "like=0.5",
            "--label-weight", "like=0.5", "--epochs", 3, "--draws", 20, "--at", "3", "--log-every", 4, "--save-every",
            3, "--dropout", 0.1, *TINY)  # fmt: skip


@pytest.fixture(scope="module")
def run(data, options, here, tmp_path_factory):
    """A run at its end, and what it said."""
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, here("rank", "fit", *data, *options, "-o", out).ok()


def results(output, name="results.json"):
    return json.loads((output / name).read_text())


def test_a_run_learns_and_leaves_a_ranker_and_its_results(run, here, data):
    out, said = run
    found = results(out)
    assert found["test"]["metrics"]["click"]["auc"]["value"] > 0.8  # 0.92 knows all kinds
    assert found["test"]["metrics"]["like"]["gauc"]["value"] > 0.75
    for name, one in found["test"]["metrics"]["click by score"].items():
        assert one["low"] <= one["value"] <= one["high"], name
    assert (found["validation"]["requests"], found["validation"]["rows"]) == (10, 200)
    assert found["test"]["rows"] == 320
    assert found["versions"]["torch"]
    assert [row["step"] for row in found["history"]] == [12, 24, 36]
    best = max(found["history"], key=lambda row: row["auc"])
    assert found["best_step"] == best["step"]
    assert found["validation"]["metrics"]["click"]["auc"]["value"] == pytest.approx(best["click:auc"], abs=1e-6)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "lr" in row] == list(range(1, found["steps"] + 1))
    assert [row["auc"] for row in rows if row.get("event") == "evaluation"] == [row["auc"] for row in found["history"]]
    assert {"schema.json", "config.json", "model.safetensors"} <= {path.name for path in (out / "model").iterdir()}
    roles = json.loads((out / "schema.json").read_text())["roles"]
    assert (roles["request"], roles["user"], roles["labels"]) == ("session_id", "user_id", ["click", "like=stars>=4"])
    assert "stars" not in json.loads((out / "schema.json").read_text())["fields"]
    assert (out / "fit.png").stat().st_size > 1000
    assert not list(out.glob("checkpoint-*"))
    assert "auc" in said.out
    assert "like by score" in said.out
    assert "reads from requests: timestamp; from items: item_id, kind; from impressions: position\n" in said.err
    here("rank", "fit", *data, "-o", out).problem("contains a run", "--overwrite replaces it")
    here("rank", "fit", "--resume", "-o", out).problem("is complete")


def test_eval_finds_what_the_run_found_and_parts_by_a_column(run, folder, here, tmp_path):
    out, _ = run
    same = ("--data", folder / "test.parquet", "--at", 3, "--draws", 20, "--device", "cpu", "-o", tmp_path)
    shown = json.loads(here("rank", "eval", out, *same, "--json").ok().out)
    assert shown["metrics"] == results(out)["test"]["metrics"]
    assert results(tmp_path, "eval.json") == shown
    here("rank", "eval", out, *same).problem("eval.json already exists; --overwrite replaces it")
    same = (*same, "--overwrite")
    said = here("rank", "eval", out, *same, "--by", "position").ok()
    found = results(tmp_path, "eval.json")
    assert list(found["by"]["position"]) == [str(place) for place in range(SHOWN)]
    assert found["metrics"] == shown["metrics"]
    aucs = [part["click"]["auc"]["value"] for part in found["by"]["position"].values()]
    assert min(aucs) > 0.5
    assert len(set(aucs)) > 4
    assert (tmp_path / "eval.png").stat().st_size > 1000
    assert "position" not in said.err
    here("rank", "eval", out, *same, "--by", "place").problem("there is no column 'place'", "position")
    here("rank", "eval", out, "--data", folder / "unlabelled.parquet", "-o", tmp_path / "new").problem("click")


def test_a_history_of_own_impressions_goes_on_with_those_that_have_labels(run, folder, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    record = results(run[0], "run.json")
    record["options"]["history"] = ["self"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    opened = RankerFolder("rank eval", tmp_path / "run", torch.device("cpu"))
    events = []
    for name, labelled in (("test", True), ("unlabelled", False)):
        data = opened.read([str(folder / f"{name}.parquet")], labelled=labelled)
        events.append(data.batch(torch.arange(len(data))).history_offsets.diff())
    trained, user = (
        parquet.read_table(folder / f"{name}.parquet")["user_id"].to_pylist() for name in ("train", "test")
    )
    known, user = {one: trained.count(one) for one in trained}, user[::SHOWN]
    assert events[1].tolist() == [known.get(one, 0) for one in user]
    before = [SHOWN * user[:place].count(one) for place, one in enumerate(user)]
    assert events[0].tolist() == [known.get(one, 0) + more for one, more in zip(user, before, strict=True)]
    assert max(before) > 0
    names = ("data", "items", "label")
    options = FitOptions(
        **{name: record["options"][name] for name in names}, val_fraction=0, test=[str(folder / "test.parquet")]
    )
    _, val, test = read_tables("rank fit", options, 0, History(["self"]))
    assert val is None
    assert test.batch(torch.arange(len(test))).history_offsets.diff().tolist() == events[0].tolist()


def test_scores_are_one_table_in_every_format(run, folder, here, tmp_path):
    out, _ = run
    tables = {}
    for suffix in ("parquet", "csv", "jsonl"):
        file = tmp_path / f"scores.{suffix}"
        said = here("rank", "score", out, "--data", folder / "unlabelled.parquet", "--batch-size", 3, "-o", file,
                     "--device", "cpu").ok()  # fmt: skip
        assert "320 rows of 16 requests" in said.out
        rows = {"parquet": parquet.read_table, "csv": csv.read_csv}.get(suffix)
        tables[suffix] = (
            rows(file).to_pylist() if rows else [json.loads(line) for line in file.read_text().splitlines()]
        )
    first = tables["parquet"]
    assert list(first[0]) == ["row", "session_id", "item_id", "click", "like", "score"]
    given = parquet.read_table(folder / "unlabelled.parquet").to_pylist()
    assert [(row["session_id"], row["item_id"]) for row in first] == [(r["session_id"], r["item_id"]) for r in given]
    assert [row["row"] for row in first] == list(range(320))
    for row in first:
        assert row["score"] == pytest.approx(row["click"] + 0.5 * row["like"], abs=1e-6)
    for other in ("csv", "jsonl"):
        assert [{**row, "score": pytest.approx(row["score"], abs=1e-6), "click": pytest.approx(row["click"], abs=1e-6),
                 "like": pytest.approx(row["like"], abs=1e-6)} for row in first] == tables[other]  # fmt: skip
    clicks = np.array(parquet.read_table(folder / "test.parquet")["click"])
    scores = np.array([row["score"] for row in first])
    assert scores[clicks == 1].mean() > scores[clicks == 0].mean() + 0.1
    assert not list(tmp_path.glob("*.partial"))
    # A piece that knows none of its items is of the types of the others.
    nameless = pa.table({**parquet.read_table(folder / "unlabelled.parquet").to_pydict(),
                         "item_id": [None] * SHOWN + [row["item_id"] for row in given[SHOWN:]]})  # fmt: skip
    parquet.write_table(nameless, tmp_path / "nameless.parquet")
    one = ("--data", tmp_path / "nameless.parquet", "--batch-size", 1, "-o", tmp_path / "one.parquet")
    here("rank", "score", out, *one, "--device", "cpu").ok()
    assert parquet.read_table(tmp_path / "one.parquet")["item_id"].to_pylist() == nameless["item_id"].to_pylist()
    (tmp_path / "folder.csv").mkdir()
    for wrong, words in (
        (file, "already exists; --overwrite replaces it"),
        (tmp_path / "folder.csv", "--output must be a file, got the folder"),
        (tmp_path / "scores.txt", "--output must end in .parquet, .csv, .jsonl"),
    ):
        here("rank", "score", out, "--data", folder / "unlabelled.parquet", "-o", wrong).problem(words)


def test_inspect_counts_parameters_and_a_request(run, here):
    out, _ = run
    found = json.loads(here("rank", "inspect", out, "--json", "--device", "cpu").ok().out)
    weights = load_file(out / "model" / "model.safetensors")
    assert sum(found["parameters"].values()) == sum(value.numel() for value in weights.values())
    assert found["kind"] == "ligr"
    assert found["labels"] == {"click": 1.0, "like": 0.5}
    sides = {field["name"]: field["side"] for field in found["fields"]}
    assert (sides["kind"], sides["item_id"]) == ("item", "item")
    assert found["request"]["candidates"] == SHOWN
    assert found["request"]["events"] > 10
    # 12 products of width × width a token of each of two layers, at least.
    assert found["request"]["MFLOP"] * 1e6 > 2 * 2 * 12 * 16**2 * found["request"]["tokens"]
    shown = here("rank", "inspect", out, "--device", "cpu").ok().out
    assert "item_id" in shown
    assert "MFLOP" in shown


def ends_as(out, run):
    """Whether a run has the weights and the results of another."""
    found, weights = (load_file(folder / "model" / "model.safetensors") for folder in (out, run[0]))
    assert all(torch.equal(value, weights[name]) for name, value in found.items())
    assert all(results(out)[name] == results(run[0])[name] for name in ("history", "best_step", "validation", "test"))


def test_several_seeds_are_runs_beside_each_other(folder, here, tmp_path):
    out = tmp_path / "runs"
    data = ("--data", folder / "test.parquet", "--history", folder / "events.parquet", "--label", "click")
    options = ("--test", folder / "test.parquet", "--epochs", 1, "--draws", 0, "--val-split", "request",
               "--val-fraction", 0.5, *TINY, "--no-save-priors", "--layers", 1)  # fmt: skip
    said = here("rank", "fit", *data, *options, "--seed", "3,1,3", "-o", out).ok()
    found = results(out)
    assert [row["seed"] for row in found["seeds"]] == [3, 1]
    own = [results(out / f"seed-{seed}")["test"]["metrics"]["click"]["auc"]["value"] for seed in (3, 1)]
    assert own[0] != own[1]
    told = found["summary"]["test"]["click"]["auc"]
    assert told["mean"] == pytest.approx(np.mean(own))
    assert told["sd"] == pytest.approx(abs(own[0] - own[1]) / np.sqrt(2))
    assert "sd" in said.out
    # The other has the split of the first, and so its schema.
    assert (out / "seed-1" / "schema.json").read_bytes() == (out / "seed-3" / "schema.json").read_bytes()
    assert [results(out / f"seed-{seed}", "run.json")["options"]["split_seed"] for seed in (3, 1)] == [3, 3]

    same = ("--data", folder / "test.parquet", "--draws", 0, "--device", "cpu", "--json")
    shown = json.loads(here("rank", "eval", out, *same).ok().out)
    assert shown["summary"] == found["summary"]["test"]
    assert [row["seed"] for row in shown["seeds"]] == [3, 1]
    assert (out / "eval.png").stat().st_size > 1000
    with pytest.raises(Problem, match=r"rank score: .* holds runs for the seeds 3, 1; choose one run, .*seed-3"):
        RankerFolder("rank score", out, torch.device("cpu"))
    here("rank", "fit", *data, "--seed", "1,x").problem("--seed must be integers from 0 to 10**9", "got 1,x")

    # A seed that was cut goes on, and what is done stays.
    record = results(out, "run.json")
    del record["results"], record["options"]["schedule"]  # as an earlier version left it, which had none
    (out / "run.json").write_text(json.dumps(record))
    shutil.rmtree(out / "seed-1")
    kept = (out / "seed-3" / "results.json").stat().st_mtime_ns
    (out / "seed-1").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, out / "seed-1"], stdin=-1, stdout=-1)
    assert holder.stdout.read(1) == b"x"
    refused = here("rank", "fit", "--resume", "--device", "cpu", "-o", out)
    assert (refused.code, "another run is using" in refused.err) == (2, True), refused.err
    holder.communicate()
    here("rank", "fit", "--resume", "--device", "cpu", "-o", out).ok()
    assert results(out)["summary"] == found["summary"]
    assert (out / "seed-3" / "results.json").stat().st_mtime_ns == kept
    again = ("rank", "fit", *data, *options, "--overwrite", "--seed", 1, "-o", out)
    here(*again).ok()
    assert not list(out.glob("seed-*"))
    (out / "seed-1").mkdir()  # the user's: one seed's run writes no such folder
    here(*again).ok()
    assert (out / "seed-1").is_dir()


def test_impressions_by_row_groups(folder, here, tmp_path, monkeypatch):
    import psutil

    table = parquet.read_table(folder / "test.parquet")
    parquet.write_table(table, tmp_path / "shown.parquet", row_group_size=45)  # requests of 20: in the last none begins
    data = ("--data", tmp_path / "shown.parquet", "--history", folder / "events.parquet", "--label", "click")
    options = ("--stream", "--stream-mib", 1, "--epochs", 1, "--draws", 0, "--no-save-priors", *TINY, "--layers", 1)
    out = tmp_path / "run"
    said = here("rank", "fit", *data, *options, "-o", out).ok()
    assert "12 requests, 4 for validation" in said.err
    assert "from 7 row groups, 1 MiB at a time" in said.err
    assert results(out)["validation"]["rows"] == 4 * SHOWN
    assert results(out)["steps"] == 2
    wrong = ("--data", tmp_path / "shown.parquet", "--history", "self", "--label", "click", "--stream", "-o", out)
    here("rank", "fit", *wrong, "--overwrite").problem("--history must be a table of events, not the impressions")

    shown = [str(tmp_path / "shown.parquet")]
    assert not should_stream(shown, [])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20_000))
    assert should_stream(shown, [])
    assert not should_stream(shown, ["self"])
    assert not should_stream([str(tmp_path / "none.csv")], [])


def test_a_run_that_was_killed_goes_on_to_the_same_weights(run, data, options, here, start, tmp_path):
    out = tmp_path / "run"
    process = start("rank", "fit", *data, *options, "-o", out)
    end = time.monotonic() + 120
    while not list(out.glob("checkpoint-*")) and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / "model").exists()
    assert "from step" in here("rank", "fit", "--resume", "--device", "cpu", "-o", out).ok().err
    ends_as(out, run)


def test_a_full_disk_loses_no_checkpoint(run, data, options, tigon, here, tmp_path):
    """After the first evaluation a checkpoint has the best weights, too: too large for this disk."""
    out = tmp_path / "run"
    said = tigon("rank", "fit", *data, *options, "-o", out, limit=180_000)
    assert said.code == 2
    assert "the disk is full" in said.err.splitlines()[-1]
    assert "files written before are intact" in said.err.splitlines()[-1]
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-4"]
    assert "from step 12" in here("rank", "fit", "--resume", "--device", "cpu", "-o", out).ok().err
    ends_as(out, run)


def test_the_next_item_among_all_and_programs_of_the_ranker(folder, here, tmp_path):
    out = tmp_path / "run"
    data = ("--data", folder / "test.parquet", "--history", folder / "events.parquet", "--label", "click")
    options = (*TINY, "--layers", 1, "--epochs", 1, "--val-split", "request", "--val-fraction", 0.5, "--draws", 5)
    said = here("rank", "fit", *data, "--objective", "next-item", *options, "-o", out).ok()
    assert "the ranker reads from events: item_id\n" in said.err  # nothing of the request, which comes after them
    metrics = results(out)["validation"]["metrics"]["next item"]
    assert {"mrr", "ndcg@10", "hr@10"} <= set(metrics)
    assert 0 < metrics["mrr"]["value"] < 1
    same = ("--data", folder / "test.parquet", "--json", "-o", tmp_path, "--device", "cpu")
    assert list(json.loads(here("rank", "eval", out, *same).ok().out)["metrics"]) == ["next item"]
    programs = here("rank", "export", out, "-o", tmp_path / "programs").ok().out.split()
    assert len(programs) == 2
    assert all(len(torch.export.load(file).graph.nodes) > 20 for file in programs)
    onnx = here("rank", "export", out, "--to", "onnx", "-o", tmp_path / "onnx")
    if importlib.util.find_spec("onnx") is None:
        onnx.problem("tigon rank export --to onnx needs onnx, onnxscript")
    else:
        assert [file.rpartition("/")[2] for file in onnx.ok().out.split()] == ["encode.onnx", "score.onnx"]
    sglang = here("rank", "export", out, "--to", "sglang", "-o", tmp_path / "sglang")
    sglang.problem("--to sglang is for prompt rankers", "export a LiGR to torch-export or onnx")
    wrong = here("rank", "export", out, "--to", "tflite")
    wrong.problem("--to must be one of torch-export, onnx, sglang, got tflite")


def test_the_next_item_without_labels_and_the_log_of_every_step(folder, here, tmp_path):
    out, unlabelled = tmp_path / "run", folder / "unlabelled.parquet"
    options = ("--objective", "next-item", "--history", "self", "--val-fraction", 0, "--log-every", 3)
    test = ("--test", unlabelled, "--draws", 0)
    here("rank", "fit", "--data", unlabelled, *options, *test, *TINY, "--layers", 1, "--epochs", 2, "-o", out).ok()
    found = results(out)
    assert found["steps"] == 4
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert found["test"]["metrics"]["next item"]["mrr"]["value"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--data must name the impressions to train on",)),
        (("--data", "nowhere.csv"), ("there is no file", "nowhere.csv")),
        (("--data", "{train}", "--label", "clik"), ("clik", "click")),
        (("--data", "{train}", "--label", "stars"), ("must be 0 or 1", "stars")),
        (("--data", "{train}", "--item", "thing"), ("there is no column 'thing'",)),
        (
            ("--data", "{items}", "--label", "kind=='k0'", "--val-split", "time"),
            ("--val-split='time' needs times",),
        ),
        (("--data", "{train}", "--loss", "hinge"), ("--loss must be one of bce, softmax", "got 'hinge'")),
        (("--data", "{train}", "--model", "dcn"), ("--model must be one of ligr, lirank, got dcn",)),
        (
            ("--data", "{train}", "--label-weight", "click"),
            ("--label-weight must be a label and a number", "got click"),
        ),
        (("--data", "{train}", "--label-weight", "buy=1"), ("--label-weight must be for the labels", "got 'buy'")),
        (("--data", "{train}", "--heads", "3"), ("heads",)),
        (("--data", "{train}", "--val-fraction", "1e-9"), ("leaves no request to validate on",)),
        (("--data", "{train}", "--schema", "."), ("Is a directory",)),
        (
            ("--data", "{train}", "--model", "lirank", "--setwise-layers", "0"),
            ("--setwise-layers is for --model ligr",),
        ),
        (
            ("--data", "{items}", "--model", "lirank", "--label", "kind=='k9'"),
            ("metric auc is not defined on val", "all rows are 0"),
        ),
        (("--resume",), ("no run in", "to resume")),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, words, folder, here, tmp_path):
    names = {"train": folder / "train.parquet", "items": folder / "items.parquet"}
    arguments = [word.format(**names) for word in arguments]
    here("rank", "fit", *arguments, "-o", "x", "--device", "cpu", cwd=tmp_path).refused(*words)
    assert not (tmp_path / "x").exists()


def test_files_of_others_and_data_that_changed(folder, data, tigon, here, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    here("rank", "fit", *data, "-o", tmp_path, "--overwrite").problem("contains files that no run wrote")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    out, own = tmp_path / "run", tmp_path / "train.parquet"
    shutil.copyfile(folder / "test.parquet", own)
    assert tigon("rank", "fit", "--data", own, "--label", "click", *TINY, "-o", out, limit=20_000).code == 2
    shutil.copyfile(folder / "train.parquet", own)
    here("rank", "fit", "--resume", "--device", "cpu", "-o", out).problem("the data differs from", "the run in")
    here("rank", "eval", out, "--data", own).problem("is incomplete", "--resume")
    here("rank", "eval", tmp_path, "--data", own).problem("holds no ranker")


def test_nothing_is_overwritten_unasked(run, folder, here, tmp_path):
    out, _ = run
    data = shutil.copy(folder / "test.parquet", tmp_path / "t.parquet")
    score = ("rank", "score", out, "--data", data, "--device", "cpu", "-o")
    before = data.read_bytes()
    here(*score, data, "--overwrite").problem("is an input file")
    (tmp_path / "link.parquet").symlink_to(data)
    here(*score, tmp_path / "link.parquet", "--overwrite").problem("is an input file")
    assert data.read_bytes() == before
    schema = tmp_path / "schema.json"
    schema.write_text("mine")
    here("rank", "inspect", data, "--output", schema).problem("already exists; --overwrite replaces it")
    here("rank", "inspect", data, "--output", data, "--overwrite").problem("--output must end in .json")
    assert schema.read_text() == "mine"
    here("rank", "inspect", data, "--output", schema, "--overwrite").ok()
    assert json.loads(schema.read_text())["roles"]["item"] == "item_id"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for folder_of_mine in (mine, tmp_path):
        here("rank", "export", out, "-o", folder_of_mine, "--overwrite").problem("contains unrelated files")
    here("rank", "export", out, "-o", out, "--overwrite").problem("contains the input")
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
