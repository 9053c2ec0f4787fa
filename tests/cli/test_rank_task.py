"""`tigon train --task rank` as a user runs it: tables and a prompt to a folder that ranks."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from command import losses

pytest.importorskip("trl", minversion="1.16")
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
FEW = ("--per_device_train_batch_size", 4, "--logging_steps", 1, "--save_steps", 2, "--eval_steps", 2, "--use_cpu",
       "true", "--seed", 3, "--max_steps", 4)  # fmt: skip
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
        "train", "--task", "rank", "--prompt", tables / "prompt.yaml", "--dataset_name", tables / "rows.csv",
        "--history", tables / "events.csv", "--items", tables / "items.csv", "--output_dir", output, *FEW, *more,
    )  # fmt: skip


def test_a_ranker_is_trained_resumed_and_read(tigon, checkpoint, tables, tmp_path):
    from tigon.rank.models.prompt import PromptRanker, read_impressions

    output = tmp_path / "run"
    own = ("--model_name_or_path", checkpoint, "--learning_rate", 1e-3, "--test_split_size", 0.25, "--prefix_len", 100)
    done = tigon(*arguments(tables, output, *own)).ok()
    found = losses(output)
    assert list(found) == list(range(1, 5))
    assert "chosen for 96 rows: num_train_epochs" not in done.out, "all of these options are given"
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in history if "eval_auc_like" in row] == [2, 4]
    assert {"prompt.yaml", "ranker.json"} <= {file.name for file in (output / "checkpoint-4").iterdir()}

    ranker = PromptRanker.from_pretrained(output)
    assert ranker.prefix_len == 100
    assert ranker.calibration["like"].kind == "platt"
    data = read_impressions(
        ranker.prompt, tables / "rows.csv", history=tables / "events.csv", items=tables / "items.csv"
    )
    scores = ranker.score(data)["like"]
    assert scores.shape == (96,)
    assert 0 < scores.min() <= scores.max() < 1  # equal where calibration finds no signal in the held-out rows

    whole = (output / "model.safetensors").read_bytes()
    shutil.rmtree(output / "checkpoint-4")
    (output / "model.safetensors").unlink()
    tigon(*arguments(tables, output, *own, "--resume_from_checkpoint", "true")).ok()
    assert losses(output) == found
    assert (output / "model.safetensors").read_bytes() == whole

    # A student from scratch with a tokenizer of its own, plain but for shared prefixes.
    student = tmp_path / "student"
    more = ("--model_name_or_path", "llama-tiny", "--no_fuse", "--teacher", output, "--distil", 1.0,
            "--test_split_size", 0)  # fmt: skip
    done = tigon(*arguments(tables, student, *more, "--calibrate", "none", "--max_steps", 2)).ok()
    assert "chosen for 96 rows: learning_rate 0.001; override with the options of the same names" in done.out
    assert "Ran in the last step: prefix" in done.out
    assert losses(student)[1] == pytest.approx(0.693, abs=0.05)
    assert (student / "tokenizer.json").read_bytes() != (output / "tokenizer.json").read_bytes()
    assert json.loads((student / "ranker.json").read_text())["calibration"] == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (("--prompt", "none.yaml"), ["--prompt ", "none.yaml: "]),
        (("--history", "none.csv"), ["--dataset_name ", "rows.csv: ", "none.csv"]),
        (("--prefix_len", 4), ["--prompt: rank.prompt: instruction and profile take "]),
        (("--prefix_len", 100_000), ["prefix_len must leave room for suffixes"]),
        (("--teacher", "none"), ["--teacher ", "none: ", "must hold prompt.yaml"]),
    ],
)
def test_what_does_not_fit_gets_a_sentence(tigon, checkpoint, tables, tmp_path, changes, sentence):
    tigon(*arguments(tables, tmp_path / "run", "--model_name_or_path", checkpoint, *changes)).problem(*sentence)


def test_a_task_of_one_class(tigon, checkpoint, tables, tmp_path):
    rows = (tables / "rows.csv").read_text().splitlines()
    kept = [row for row in rows[1:] if row.split(",")[4] == "5"]
    (tmp_path / "rows.csv").write_text("\n".join([rows[0], *kept]) + "\n")
    tigon(
        *arguments(tables, tmp_path / "run", "--model_name_or_path", checkpoint),
        "--dataset_name", tmp_path / "rows.csv",
    ).problem("task like: all ", "labels are 'yes', so that there is nothing to learn")  # fmt: skip


def test_two_processes(together, checkpoint, tables, tmp_path):
    """The same requests a step, by halves, and metrics of all held-out requests, each of them once.

    Five requests in batches of two: Accelerate gives the second process three that the first has already. A rate of
    nearly nothing leaves the model as it was, so that one process must find the same.
    """
    told = {}
    for world in (1, 2):
        output = tmp_path / str(world)
        own = (
            "--model_name_or_path", checkpoint, "--per_device_train_batch_size", 4 // world, "--test_split_size", 0.21,
            "--max_steps", 2, "--use_peft", "--lora_r", 4, "--lora_dropout", 0, "--lora_target_modules", "all-linear",
            "--learning_rate", 1e-12, "--vocabulary_weight", 0.5,
        )  # fmt: skip
        together(world, *arguments(tables, output, *own)).ok()
        assert list(losses(output)) == [1, 2]
        rows = json.loads((output / "trainer_state.json").read_text())["log_history"]
        (told[world],) = (row for row in rows if "eval_auc_like" in row)
        assert {"ranker.json", "prompt.yaml", "adapter_model.safetensors"} <= {file.name for file in output.iterdir()}
    for name in ("eval_auc_like", "eval_log_loss_like", "eval_loss"):
        assert told[1][name] == pytest.approx(told[2][name], rel=1e-5), name
    assert told[1]["eval_loss"] > told[1]["eval_log_loss_like"] + 1  # half of that over all words
