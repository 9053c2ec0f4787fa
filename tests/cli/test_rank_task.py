"""`tigon train --task rank` as a user runs it: tables and a prompt to a folder that ranks."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from command import losses

from tigon.cli.folder import check_room
from tigon.cli.options import TrainOptions
from tigon.cli.problem import Problem

pytest.importorskip("pyarrow")
pytest.importorskip("jinja2")
YAML = """
instruction: Films that a member rated.
profile: "Age {{ age }}."
event: "{{ title }}: {{ rating }} of 5, {{ ago }} before"
candidate: "Film: {{ title }}."
tasks:
  like: {question: "Will they rate it 4 or more?", answers: {"yes": 1, "no": 0}, label: "rating >= 4"}
columns: {item: film, request: session}
"""
FEW = ("--batch-size", 4, "--log-every", 2, "--save-every", 2, "--device", "cpu", "--seed", 3, "--steps", 4)
DAY = 86_400


def csv(file, head, rows):
    file.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return file


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Users who like even films or odd ones, which their history says."""
    folder, draw = tmp_path_factory.mktemp("tables"), random.Random(0)
    rows, events = [], []
    for user in range(24):
        taste = user % 2
        events += [
            (user, film, day * DAY, 5 if film % 2 == taste else 1) for day, film in enumerate(draw.sample(range(8), 3))
        ]
        rows += [
            (user, user, film, (30 + user) * DAY, 5 if film % 2 == taste else 2, 20 + user)
            for film in draw.sample(range(8), 4)
        ]
    (folder / "prompt.yaml").write_text(YAML)
    csv(folder / "rows.csv", "session,user_id,film,timestamp,rating,age", rows)
    csv(folder / "events.csv", "user_id,film,timestamp,rating", events)
    csv(
        folder / "items.csv",
        "film,title",
        [(i, w) for i, w in enumerate(["Heat", "Fargo", "Alien", "Brazil", "Casino", "Psycho", "Rocky", "M"])],
    )
    return folder


def arguments(tables, output, *more):
    return (
        "train", "--task", "rank", "--prompt", tables / "prompt.yaml", "--data", tables / "rows.csv", "--history",
        tables / "events.csv", "--items", tables / "items.csv", "--output", output, *FEW, *more,
    )  # fmt: skip


def test_a_ranker_is_trained_resumed_and_read(tigon, checkpoint, tables, tmp_path):
    from tigon.rank.models.prompt import PromptRanker, read_impressions

    output = tmp_path / "run"
    own = ("--model", checkpoint, "--lr", 1e-3, "--eval-fraction", 0.25, "--prefix-len", 100)
    done = tigon(*arguments(tables, output, *own)).ok()
    found = losses(output)
    assert list(found) == list(range(1, 5))
    assert "18 requests, 6 held out; 4 steps" in done.out
    assert "candidates/s" in done.out
    assert "evaluation loss 0." in done.out
    assert ", auc_like 0." in done.out
    told = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in told if "eval_auc_like" in row] == [2, 4]
    assert {"prompt.yaml", "ranker.json"} <= {file.name for file in (output / "checkpoint-4").iterdir()}

    check_room(output, overwrite=True)  # all that it wrote, it may replace

    ranker = PromptRanker.from_pretrained(output)
    assert ranker.prefix_len == 100
    assert ranker.calibration["like"].kind == "platt"
    data = read_impressions(
        ranker.prompt, tables / "rows.csv", history=tables / "events.csv", items=tables / "items.csv"
    )
    scores = ranker.score(data)["like"]
    assert scores.shape == (96,)
    assert 0 < scores.min() <= scores.max() < 1  # equal where calibration finds no signal in the held-out rows

    before, whole = losses(output), (output / "model.safetensors").read_bytes()
    shutil.rmtree(output / "checkpoint-4")
    (output / "model.safetensors").unlink()
    tigon("train", "--resume", "--output", output).ok()
    assert losses(output) == before
    assert (output / "model.safetensors").read_bytes() == whole

    # A student from scratch with a tokenizer of its own, plain but for shared prefixes.
    student = tmp_path / "student"
    more = ("--model", "llama-tiny", "--plain", "--teacher", output, "--distil", 1.0, "--eval-fraction", 0)
    done = tigon(*arguments(tables, student, *more, "--calibrate", "none", "--steps", 2)).ok()
    assert "24 requests, 0 held out" in done.out
    assert "Ran in the last step: prefix" in done.out
    assert losses(student)[1] == pytest.approx(0.693, abs=0.05)
    assert (student / "tokenizer.json").read_bytes() != (output / "tokenizer.json").read_bytes()
    assert json.loads((student / "ranker.json").read_text())["calibration"] == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (("--prompt", "none.yaml"), ["--prompt ", "none.yaml: "]),
        (("--history", "none.csv"), ["--data ", "rows.csv: ", "none.csv"]),
        (("--prefix-len", 4), ["--prompt: rank.prompt: instruction and profile take "]),
        (("--prefix-len", 100_000), ["prefix_len must leave room for suffixes"]),
        (("--teacher", "none"), ["--teacher ", "none: ", "must hold prompt.yaml"]),
    ],
)
def test_what_does_not_fit_gets_a_sentence(tigon, checkpoint, tables, tmp_path, changes, sentence):
    tigon(*arguments(tables, tmp_path / "run", "--model", checkpoint, *changes)).problem(*sentence)


def test_a_task_of_one_class(tigon, checkpoint, tables, tmp_path):
    rows = (tables / "rows.csv").read_text().splitlines()
    kept = [row for row in rows[1:] if row.split(",")[4] == "5"]
    (tmp_path / "rows.csv").write_text("\n".join([rows[0], *kept]) + "\n")
    tigon(
        *arguments(tables, tmp_path / "run", "--model", checkpoint, "--data", tmp_path / "rows.csv")
    ).problem("task like: all ", "labels are 'yes', so that there is nothing to learn")  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"task": "rank"}, "--task rank needs --prompt, a prompt.yaml"),
        ({"prompt": "x"}, "--prompt goes with --task rank, got --task sft"),
        ({"task": "dpo", "calibrate": "isotonic"}, "--calibrate goes with --task rank, got --task dpo"),
        ({"task": "rank", "prompt": "x", "distil": 2.0}, "--distil must be from 0 to 1, got 2.0"),
        ({"task": "rank", "prompt": "x", "calibrate": "x"}, "--calibrate must be one of platt, isotonic, none, got x"),
        ({"task": "rank", "prompt": "x", "prefix_len": 0}, "--prefix-len must be above 0, got 0"),
        ({"task": "rank", "prompt": "x", "shared_prefix": False}, "--no-shared-prefix goes with --task dpo and"),
        ({"task": "rank", "prompt": "x", "parallel": "fsdp"}, "--task goes with --parallel ddp|--task rank"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(given, sentence):
    with pytest.raises(Problem, match=sentence):
        TrainOptions(model="x", data="x", **given).check()


def test_two_processes(together, checkpoint, tables, tmp_path):
    """The same requests a step, by halves, and metrics of all held-out requests, each of them once.

    Five requests in batches of two: Accelerate gives the second process three that the first has already. A rate of
    nearly nothing leaves the model as it was, so that one process must find the same.
    """
    told = {}
    for world in (1, 2):
        output = tmp_path / str(world)
        own = ("--model", checkpoint, "--batch-size", 4 // world, "--eval-fraction", 0.21, "--steps", 2, "--lora", 4,
               "--lr", 1e-12, "--vocabulary-weight", 0.5)  # fmt: skip
        done = together(world, *arguments(tables, output, *own)).ok()
        assert list(losses(output)) == [1, 2]
        assert "19 requests, 5 held out" in done.out
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        (told[world],) = (row for row in rows if "eval_auc_like" in row)
        assert {"ranker.json", "prompt.yaml", "adapter_model.safetensors"} <= {file.name for file in output.iterdir()}
    for name in ("eval_auc_like", "eval_log_loss_like", "eval_loss"):
        assert told[1][name] == pytest.approx(told[2][name], rel=1e-5), name
    assert told[1]["eval_loss"] > told[1]["eval_log_loss_like"] + 1  # half of that over all words
